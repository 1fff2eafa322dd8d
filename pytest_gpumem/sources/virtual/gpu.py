"""One virtual GPU, as one rank of a world: between `start` and `stop`, "cuda" means this card."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch

from pytest_gpumem.sources.recorder import Recorder
from pytest_gpumem.sources.storages import hooked_resize
from pytest_gpumem.sources.virtual import attention, autocast, collectives, cuda, device, names, optimizers
from pytest_gpumem.sources.virtual.allocator import Allocator
from pytest_gpumem.sources.virtual.backward import Backward
from pytest_gpumem.sources.virtual.cards import Card
from pytest_gpumem.sources.virtual.mode import VirtualMode
from pytest_gpumem.sources.virtual.patches import Patches
from pytest_gpumem.trace import MemoryTrace


class VirtualGpu:
    """Context manager. Inside it, code that says "cuda" runs on `card`, and `trace` records what it allocates.

    `rank` and `world_size` are what `torch.distributed` says once its process group is started.
    """

    def __init__(self, card: Card, rank: int = 0, world_size: int = 1) -> None:
        self.card = card
        self.world = collectives.World(rank, world_size)
        self.trace = MemoryTrace("virtual", card.key, rank, world_size, capacity=card.total_memory)
        self.allocator = Allocator(card.total_memory)
        self.recorder = Recorder(self.trace, self.allocator, names.is_virtual)
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> VirtualGpu:
        device.register()
        autocast.register()
        attention.register()
        mode = VirtualMode()  # first: it imports torch._dynamo, which asks torch._C what was compiled in
        patches = Patches()
        self._exit.callback(patches.undo)
        self._exit.callback(self.recorder.unhook)
        backward = Backward()
        names.patch(patches)
        patches.set(names.Ordinals, "count", max(1, self.world.size))
        cuda.patch(patches, self.card, self.allocator)
        autocast.patch(patches)
        attention.patch(patches, self.card.compute_capability, mode.assumptions)
        optimizers.patch(patches)
        collectives.patch(patches, self.world, self.recorder)
        backward.patch(patches)
        self.recorder.patch(patches)
        patches.set(
            torch.UntypedStorage, "resize_", hooked_resize(torch.UntypedStorage.resize_, self.recorder.storages)
        )
        patches.set(torch.Tensor, "record_stream", lambda tensor, stream: None)
        self._swap_on_conversion()
        for name, value in self.world.environment().items():
            self._set_environment(name, value)
        mode.storages, mode.backward = self.recorder.storages, backward
        mode.on_collective = functools.partial(collectives.claim_collective, self.recorder)
        self.mode = mode
        self._exit.enter_context(mode)
        return self

    def __exit__(self, *exc: Any) -> None:
        self.finish()
        self._exit.close()

    def finish(self) -> None:
        """Look up who holds what for the last time, and note the model and the assumptions in the trace."""
        self.recorder.end_forward()
        self.recorder.survey()
        if not self.recorder.steps_of_optimizers and not self.recorder.backwards:
            self.recorder.describe()
        self.trace.assumptions = tuple(sorted(self.mode.assumptions))

    def _swap_on_conversion(self) -> None:
        """`Module.to` keeps each parameter's identity, as `.data =` does on CUDA."""
        future = torch.__future__
        self._exit.callback(future.set_swap_module_params_on_conversion, future.get_swap_module_params_on_conversion())
        future.set_swap_module_params_on_conversion(True)

    def _set_environment(self, name: str, value: str) -> None:
        old = os.environ.get(name)
        os.environ[name] = value
        if old is None:
            self._exit.callback(os.environ.pop, name, None)
        else:
            self._exit.callback(os.environ.__setitem__, name, old)
