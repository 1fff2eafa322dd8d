"""Length-prefixed pickles over file descriptors."""

from __future__ import annotations

import os
import pickle
import select
import struct
import time
from typing import Any

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20


def send(fd: int, message: object) -> None:
    """Write one message whole, or nothing if it cannot be pickled. Raises OSError once the reader is gone."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    view = memoryview(_LENGTH.pack(len(payload)) + payload)
    while view:
        view = view[os.write(fd, view) :]


def split(raw: bytes | bytearray) -> tuple[list[bytes], int]:
    """The complete payloads at the start of ``raw``, and how many bytes they and their lengths take.

    What follows is a message cut short, as a process leaves it that dies while it writes.
    """
    payloads = []
    start = 0
    while len(raw) - start >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(raw, start)
        end = start + _LENGTH.size + length
        if end > len(raw):
            break
        payloads.append(bytes(raw[start + _LENGTH.size : end]))
        start = end
    return payloads, start


class Reader:
    """Reads messages from a blocking descriptor; an interruption loses nothing that was read before."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()
        self._payloads: list[bytes] = []

    def receive(self, within: float | None = None) -> Any:
        """The next message, or None where the other end is gone.

        Raises TimeoutError when it has not come whole ``within`` so many seconds.
        """
        deadline = None if within is None else time.monotonic() + within
        while not self._payloads:
            if deadline is not None:
                left = max(deadline - time.monotonic(), 0)
                if not select.select([self._fd], [], [], left)[0]:
                    raise TimeoutError(f"no answer within {within:g} s")
            # A large message is announced by its length, so that the buffer is not searched at every read.
            needed = 0
            if len(self._buffer) >= _LENGTH.size:
                needed = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0] - len(self._buffer)
            try:
                chunk = os.read(self._fd, max(_CHUNK, min(needed, 64 * _CHUNK)))
            except ConnectionError:
                return None
            if not chunk:
                return None
            self._buffer += chunk
            self._payloads, used = split(self._buffer)
            del self._buffer[:used]
        return pickle.loads(self._payloads.pop(0))
