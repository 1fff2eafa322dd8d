"""Operations that a fake tensor cannot answer by itself: the assumption made for each is stated in the report.

The table is by operation; the fake mode looks an operation up here before it does anything else with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

# operation -> (rule, the assumption it rests on). A rule gets the operation's arguments and runs inside the fake mode.
RULES: dict[Any, tuple[Callable[..., Any], str]] = {}


def rule(operation: Any, assumption: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function for an operation."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES[operation] = function, assumption
        return function

    return register


def plausible(tensor: torch.Tensor) -> bool | int | float | complex:
    """What `.item()` says of data that does not exist: False, 1 or 1.0."""
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


@rule(aten.nonzero.default, "nonzero: every element is non-zero (upper bound)")
def nonzero(x: torch.Tensor) -> torch.Tensor:
    # CUDA makes the transposed result: aten/src/ATen/native/cuda/Nonzero.cu, `nonzero_cuda_out_impl`.
    return torch.empty((x.dim(), x.numel()), dtype=torch.int64, device=x.device).t()


@rule(aten.masked_select.default, "masked_select: the whole mask is true (upper bound)")
def masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return torch.empty(shape.numel(), dtype=x.dtype, device=x.device)


@rule(aten._unique2.default, "unique: every element is distinct (upper bound)")
def unique2(x: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    return _unique(x, None, return_inverse, return_counts)


@rule(aten.unique_dim.default, "unique: every row is distinct (upper bound)")
def unique_dim(
    x: torch.Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    return _unique(x, dim, return_inverse, return_counts)


@rule(aten.unique_consecutive.default, "unique_consecutive: no two neighbours are equal (upper bound)")
def unique_consecutive(
    x: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    return _unique(x, dim, return_inverse, return_counts)


def _unique(x: torch.Tensor, dim: int | None, inverse: bool, counts: bool) -> tuple[torch.Tensor, ...]:
    shape = (x.numel(),) if dim is None else tuple(x.shape)

    def indices(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, device=x.device)

    inverse_shape = tuple(x.shape) if dim is None else (x.shape[dim],)
    number = x.numel() if dim is None else x.shape[dim]
    return (
        torch.empty(shape, dtype=x.dtype, device=x.device),
        indices(*inverse_shape) if inverse else indices(0),
        indices(number) if counts else indices(0),
    )


@rule(aten.bincount.default, "bincount: as many bins as minlength, or as elements where there is no minlength")
def bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    dtype = torch.int64 if weights is None else weights.dtype
    return torch.empty(minlength or x.numel(), dtype=dtype, device=x.device)


@rule(aten.repeat_interleave.Tensor, "repeat_interleave: each element once, unless output_size says")
def repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    size = repeats.numel() if output_size is None else output_size
    return torch.empty(size, dtype=torch.int64, device=repeats.device)
