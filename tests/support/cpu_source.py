"""Real tensors on the CPU, tracked by the same recorder: an oracle for the virtual source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_gpumem.sources.recorder import Recorder
from pytest_gpumem.sources.storages import hooked_resize
from pytest_gpumem.sources.virtual.allocator import Allocator
from pytest_gpumem.sources.virtual.patches import Patches
from pytest_gpumem.trace import MemoryTrace


class _Tracker(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if FakeTensor in types:  # DTensor works out global shapes
            return func(*args, **(kwargs or {}))
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # DTensor unwraps first
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            leaf = getattr(leaf, "_local_tensor", leaf)
            if _on_cpu(leaf):
                self.recorder.storages.see(leaf, func._name)
        return out


def _on_cpu(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


@contextlib.contextmanager
def cpu_source(world_size: int = 1) -> Iterator[Recorder]:
    """Every CPU tensor made inside is recorded. Bytes are rounded as on the virtual GPU, so that the figures compare."""
    trace = MemoryTrace("cpu", "none", world_size=world_size)
    recorder = Recorder(trace, Allocator(1 << 60), _on_cpu)
    patches = Patches()
    recorder.patch(patches)
    patches.set(torch.UntypedStorage, "resize_", hooked_resize(torch.UntypedStorage.resize_, recorder.storages))
    try:
        with _Tracker(recorder):
            yield recorder
            recorder.end_forward()
            recorder.survey()
    finally:
        recorder.unhook()
        patches.undo()
