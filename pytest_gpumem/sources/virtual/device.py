"""The PrivateUse1 device that C++ knows: its registration, streams and events.

Uses `torch.utils.backend_registration._setup_privateuseone_for_python_backend`, there from torch 2.11 on; tried on 2.13
(CPU build) and 2.14 (CUDA build without a GPU).
"""

from __future__ import annotations

import contextlib
import time
import types
from typing import Any

import torch
from torch.utils import backend_registration

from pytest_gpumem.sources.virtual.names import NAME
from pytest_gpumem.sources.virtual.patches import private


class Stream:
    """A stream that runs nothing. It has an identity, and can be the current one."""

    _last = 0

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **kwargs: Any) -> None:
        if stream_id is None:
            Stream._last += 1
            stream_id = Stream._last
        self.device, self.device_index, self.device_type = torch.device("cuda", 0), 0, 1
        self.priority, self.stream_id, self.cuda_stream = priority, stream_id, stream_id

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> Stream:
        STREAMS.stack.append(STREAMS.current)
        STREAMS.current = self
        return self

    def __exit__(self, *exc: object) -> None:
        STREAMS.current = STREAMS.stack.pop()


class ExternalStream(Stream):
    """`torch.cuda.ExternalStream(pointer)`."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
        super().__init__(device, stream_id=stream_ptr)


class Event:
    """An event that has always happened. Timing gives the host's time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class _Streams:
    def __init__(self) -> None:
        self.default = Stream(stream_id=0)
        self.current = self.default
        self.stack: list[Stream] = []


STREAMS = _Streams()


def set_stream(stream_id: int = 0, **kwargs: Any) -> None:
    """What `torch._C._cuda_setStream` does."""
    STREAMS.current = Stream(stream_id=stream_id)


class DeviceModule(types.ModuleType):
    """What torch asks of `torch.vgpu`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def current_stream(self, device: Any = None) -> Stream:
        return STREAMS.current

    def default_stream(self, device: Any = None) -> Stream:
        return STREAMS.default

    def set_stream(self, stream: Stream) -> None:
        STREAMS.current = stream

    def synchronize(self, device: Any = None) -> None: ...
    def empty_cache(self) -> None: ...

    def stream(self, stream: Stream | None) -> contextlib.AbstractContextManager[Any]:
        return stream if stream is not None else contextlib.nullcontext()

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_rng_state(self, *args: Any) -> torch.Tensor:
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, *args: Any) -> None: ...


_registered = False


def register() -> None:
    """Register the device with torch, once in a process."""
    global _registered
    if not _registered:
        setup = private(backend_registration, "_setup_privateuseone_for_python_backend")
        module = DeviceModule(NAME)
        module.__dict__.update(Stream=Stream, Event=Event)
        setup(NAME, backend_module=module)
        _registered = True
