"""FSDP2, `torch.distributed.fsdp.fully_shard`: parameters, gradients and optimizer state sharded over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from pytest_gpumem.strategies import wrapped_modules

SHARDED = True


def parallelize(
    model: torch.nn.Module, device: torch.device, wrap: Sequence[type], options: dict[str, Any]
) -> torch.nn.Module:
    """The model with each submodule of a class in `wrap` as one unit, and the rest as the root's.

    A model on the meta device is materialised after sharding, so that the whole of it never lands on one card. `options`
    are keyword arguments of `fully_shard`.
    """
    for module in wrapped_modules(model, wrap):
        fully_shard(module, **options)
    fully_shard(model, **options)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model.to_empty(device=device)
    return model
