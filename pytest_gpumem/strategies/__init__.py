"""How a model is spread over the ranks: one file a strategy, each with `parallelize(model, device, wrap, options)`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pytest_gpumem.marker import STRATEGIES, near_miss

if TYPE_CHECKING:
    import torch


class Strategy(Protocol):
    """What each strategy's module offers. `SHARDED` strategies can take a model on the meta device."""

    SHARDED: bool

    def parallelize(
        self, model: torch.nn.Module, device: torch.device, wrap: Sequence[type], options: dict[str, Any]
    ) -> torch.nn.Module: ...


def find(name: str) -> Strategy:
    """The strategy of this name. Raises ValueError that names the near miss."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; {near_miss(str(name), STRATEGIES)}")
    module: Any = importlib.import_module(f"pytest_gpumem.strategies.{name}")
    strategy: Strategy = module
    return strategy


def wrapped_modules(model: torch.nn.Module, wrap: Sequence[type]) -> list[torch.nn.Module]:
    """The submodules of the classes in `wrap`, innermost first. Raises ValueError for a class that matches nothing."""
    if not isinstance(wrap, (list, tuple, set, frozenset)) or not all(isinstance(cls, type) for cls in wrap):
        raise TypeError(f"wrap={wrap!r}: expected a list of module classes, such as [LlamaDecoderLayer]")
    modules = list(model.modules())[1:]
    for cls in wrap:
        if not any(isinstance(module, cls) for module in modules):
            kinds = ", ".join(sorted({type(module).__name__ for module in modules})) or "no submodules"
            raise ValueError(f"wrap: no submodule is a {cls.__name__}; the model has {kinds}")
    return [module for module in reversed(modules) if isinstance(module, tuple(wrap))]
