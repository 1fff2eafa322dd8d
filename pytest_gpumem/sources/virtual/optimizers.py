"""Optimizers and `Module.to` as they are on CUDA.

`torch.optim` chooses foreach implementations by the exact type of the parameters (`_default_to_fused_or_foreach` in
torch/optim/optimizer.py): fake parameters would get the for-loop, whose peak is N lower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from pytest_gpumem.sources.virtual.patches import Patches, private


def patch(patches: Patches) -> None:
    """CUDA's optimizer defaults, `Module.to` by swapping, and a GradScaler that steps, until `patches.undo()`."""
    for module in (optimizer, _foreach_utils):
        if hasattr(module, "_foreach_supported_types"):
            types = private(module, "_foreach_supported_types")
            patches.set(module, "_foreach_supported_types", [*types, FakeTensor])
    # `.item()` of the found-inf flag is 1.0 here, which would read as an overflow and skip every step.
    patches.set(torch.amp.GradScaler, "_maybe_opt_step", _step)


def _step(self: Any, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)
