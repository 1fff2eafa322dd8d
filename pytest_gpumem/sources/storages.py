"""The life of every storage: from an operation's result to the day its last tensor dies.

PyTorch keeps a storage's Python object for as long as the C++ storage lives (`StorageImpl::pyobj_slot`), so a weak reference to
it tells when the memory goes back, also where only C++ holds it (tensors saved for backward).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class Memory(Protocol):
    """Who hands out blocks: `alloc` gives a block's number and takes it back with `free`."""

    def alloc(self, nbytes: int, op: str, from_host: bool, again: int | None) -> int: ...
    def free(self, block: int) -> None: ...


class _Watch(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("block", "key", "nbytes")

    key: int
    block: int | None
    nbytes: int


class Storages:
    """Which block each live storage has. A storage of 0 bytes has none.

    `memory` hands the blocks out. `resize_` of a storage frees its block and takes another: FSDP gathers and drops
    parameters that way, through `UntypedStorage.resize_`, which is no dispatched operation.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._watches: dict[int, _Watch] = {}
        self._untracked = 0

    @contextlib.contextmanager
    def untracked(self) -> Iterator[None]:
        """What operations return in here is nobody's memory: shapes are being worked out."""
        self._untracked += 1
        try:
            yield
        finally:
            self._untracked -= 1

    def see(self, tensor: torch.Tensor, op: str, from_host: bool = False) -> None:
        """An operation returned `tensor`: give its storage a block if it has none, or one of the new size."""
        if self._untracked:
            return
        storage = tensor.untyped_storage()
        watch = self._watches.get(storage._cdata)
        if watch is None:
            nbytes = storage.nbytes()
            block = self.memory.alloc(nbytes, op, from_host, None) if nbytes else None
            watch = _Watch(storage, self._dead)
            watch.key, watch.block, watch.nbytes = storage._cdata, block, nbytes
            self._watches[watch.key] = watch
        elif watch.nbytes != storage.nbytes():
            self._resized(watch, storage.nbytes(), op)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """`storage.resize_` was called."""
        watch = self._watches.get(storage._cdata)
        if watch is not None and watch.nbytes != storage.nbytes():
            self._resized(watch, storage.nbytes(), "resize_")

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """The block of a tensor's storage; None where it has none or is not on the device."""
        watch = self._watches.get(tensor.untyped_storage()._cdata)
        return watch.block if watch is not None else None

    def _resized(self, watch: _Watch, nbytes: int, op: str) -> None:
        # The new block is taken before the old one goes: `resize_bytes_cuda` in aten/src/ATen/native/cuda/Resize.cpp copies.
        # Down to nothing, there is no new block.
        block = self.memory.alloc(nbytes, op, False, watch.block) if nbytes else None
        if watch.block is not None:
            self.memory.free(watch.block)
        watch.block, watch.nbytes = block, nbytes

    def _dead(self, watch: Any) -> None:
        del self._watches[watch.key]
        if watch.block is not None:
            self.memory.free(watch.block)


def hooked_resize(original: Callable[..., Any], storages: Storages) -> Callable[..., Any]:
    """`UntypedStorage.resize_` that tells `storages`."""

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = original(storage, nbytes)
        storages.resized(storage)
        return result

    return resize_
