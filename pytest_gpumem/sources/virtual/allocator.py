"""Device memory that does not exist: blocks handed out and taken back, with `memory_stats` and the out-of-memory error.

Counts what is asked for, rounded up to 512 bytes as CUDA's caching allocator does (`kMinBlockSize` and
`round_size` in c10/cuda/CUDACachingAllocator.cpp). Segments are not simulated: reserved memory is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable

from pytest_gpumem.units import GIB

ROUND = 512


class OutOfDeviceMemory(Exception):
    """`requested` bytes do not fit on the card."""

    def __init__(self, requested: int) -> None:
        super().__init__(requested)
        self.requested = requested


class Allocator:
    """The memory of one card of `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.allocated = self.requested = 0
        self.peak_allocated = self.peak_requested = 0
        self.live: dict[int, tuple[int, int]] = {}
        self.count = self.freed = 0
        self.total_allocated = self.total_freed = 0
        self.ooms = 0
        self.on_out_of_memory: Callable[[int], None] = lambda requested: None

    def malloc(self, requested: int) -> tuple[int, int]:
        """A new block for `requested` > 0 bytes: its number and its size in bytes. Raises OutOfDeviceMemory."""
        size = (requested + ROUND - 1) // ROUND * ROUND
        if self.allocated + size > self.capacity:
            self.ooms += 1
            self.on_out_of_memory(requested)
            raise OutOfDeviceMemory(requested)
        self.count += 1
        self.live[self.count] = (requested, size)
        self.allocated += size
        self.requested += requested
        self.total_allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_requested = max(self.peak_requested, self.requested)
        return self.count, size

    def free(self, block: int) -> None:
        requested, size = self.live.pop(block)
        self.allocated -= size
        self.requested -= requested
        self.freed += 1
        self.total_freed += size

    def reset_peak(self) -> None:
        self.peak_allocated, self.peak_requested = self.allocated, self.requested

    def reset_accumulated(self) -> None:
        self.total_allocated = self.total_freed = 0

    def stats(self) -> dict[str, object]:
        """What `torch._C._cuda_memoryStats` returns. Active and reserved repeat allocated: segments are not simulated."""

        def by_pool(current: int, peak: int, allocated: int, freed: int) -> dict[str, dict[str, int]]:
            figures = {"current": current, "peak": peak, "allocated": allocated, "freed": freed}
            nothing = dict.fromkeys(figures, 0)
            return {"all": figures, "small_pool": nothing, "large_pool": nothing}

        nothing = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
        sizes = by_pool(self.allocated, self.peak_allocated, self.total_allocated, self.total_freed)
        return {
            "allocated_bytes": sizes,
            "active_bytes": sizes,
            "reserved_bytes": sizes,
            "requested_bytes": by_pool(self.requested, self.peak_requested, 0, 0),
            "allocation": by_pool(len(self.live), 0, self.count, self.freed),
            "active": by_pool(len(self.live), 0, self.count, self.freed),
            "segment": by_pool(0, 0, 0, 0),
            "inactive_split": by_pool(0, 0, 0, 0),
            "inactive_split_bytes": by_pool(0, 0, 0, 0),
            "oversize_allocations": nothing,
            "oversize_segments": nothing,
            "num_alloc_retries": 0,
            "num_ooms": self.ooms,
            "num_sync_all_streams": 0,
            "num_device_alloc": 0,
            "num_device_free": 0,
            "max_split_size": -1,
        }

    def message(self, requested: int) -> str:
        """The wording of CUDA's out-of-memory error, for `requested` bytes."""
        free = self.capacity - self.allocated
        return (
            f"CUDA out of memory. Tried to allocate {_printed(requested)}. GPU 0 has a total capacity of "
            f"{_printed(self.capacity)} of which {_printed(free)} is free. Of the allocated memory "
            f"{_printed(self.allocated)} is allocated by PyTorch. (virtual GPU)"
        )


def _printed(nbytes: int) -> str:
    """As `format_size` in c10/cuda/CUDACachingAllocator.cpp prints it."""
    if nbytes <= 1024:
        return f"{nbytes} bytes"
    if nbytes <= 1024**2:
        return f"{nbytes / 1024:.2f} KiB"
    if nbytes <= GIB:
        return f"{nbytes / 1024**2:.2f} MiB"
    return f"{nbytes / GIB:.2f} GiB"
