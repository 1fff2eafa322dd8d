"""What the model and its optimizers are made of, as plain data for the budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from pytest_gpumem.trace import OptimizerInfo, ParameterInfo

_OPTIONS = ("momentum", "amsgrad", "centered", "foreach", "fused", "capturable")


def describe(
    modules: Collection[torch.nn.Module],
    optimizers: Collection[torch.optim.Optimizer],
    block_of: Callable[[torch.Tensor], int | None],
) -> tuple[tuple[ParameterInfo, ...], tuple[int, ...], tuple[OptimizerInfo, ...]]:
    """Parameters (each storage once), the gathered bytes of each FSDP unit (largest first), and optimizers.

    `block_of` gives the block that a parameter keeps on the measured device, None for one that keeps none.
    """
    seen: dict[tuple[Any, ...], ParameterInfo] = {}
    for parameter in _parameters(modules, optimizers):
        local = getattr(parameter, "_local_tensor", parameter)
        block = block_of(local)
        if block is not None:
            # Tied weights are one storage at one offset; parts of a flat storage differ in their offset.
            seen.setdefault((block, local.storage_offset(), local.numel()), _info(parameter, local))
    units = sorted(_units(modules), reverse=True)
    return tuple(seen.values()), tuple(units), tuple(_optimizer(optimizer) for optimizer in optimizers)


def _parameters(
    modules: Collection[torch.nn.Module], optimizers: Collection[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
    for module in modules:
        yield from (p for p in module._parameters.values() if p is not None)


def _info(parameter: torch.Tensor, local: torch.Tensor) -> ParameterInfo:
    nbytes = parameter.numel() * parameter.element_size()
    shards = _shards(parameter)
    # A sharded parameter keeps a padded storage of its own; a plain one may be a view into somebody's flat storage.
    local_nbytes = local.untyped_storage().nbytes() if shards > 1 else local.numel() * local.element_size()
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterInfo(nbytes, local_nbytes, shards, parameter.requires_grad, dtype, tuple(parameter.shape))


def _shards(parameter: torch.Tensor) -> int:
    shards = 1
    mesh = getattr(parameter, "device_mesh", None)
    for dimension, placement in enumerate(getattr(parameter, "placements", ())):
        if placement.is_shard() and mesh is not None:
            shards *= mesh.size(dimension)
    return shards


def _units(modules: Collection[torch.nn.Module]) -> Iterator[int]:
    from torch.distributed.fsdp import FSDPModule

    wrapped = [module for module in modules if isinstance(module, FSDPModule)]
    for module in wrapped:
        inner = {
            id(p) for child in module.modules() if child is not module and child in wrapped for p in child.parameters()
        }
        own = {id(p): p for p in module.parameters() if id(p) not in inner}
        dtype = module._get_fsdp_state()._mp_policy.param_dtype
        yield sum(p.numel() * (dtype.itemsize if dtype else p.element_size()) for p in own.values())


def _optimizer(optimizer: torch.optim.Optimizer) -> OptimizerInfo:
    options = tuple((name, optimizer.defaults[name]) for name in _OPTIONS if name in optimizer.defaults)
    return OptimizerInfo(type(optimizer).__name__, options)
