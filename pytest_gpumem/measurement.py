"""One rank of one test being measured: from before its fixtures until its checks.

Imports torch: only processes that run a marked test get here.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from pytest_gpumem import report
from pytest_gpumem.budget import budget_of
from pytest_gpumem.marker import Settings
from pytest_gpumem.results import RankMeasurement
from pytest_gpumem.sources.virtual.cards import find_card
from pytest_gpumem.sources.virtual.gpu import VirtualGpu
from pytest_gpumem.sources.virtual.mode import CannotSimulate
from pytest_gpumem.trace import MemoryTrace


class Measurement:
    """A source that is running, for the settings of one test."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        self.gpu = VirtualGpu(find_card(settings.gpu), rank, settings.world_size)
        self.gpu.trace.strategy = settings.strategy or "single"

    @property
    def trace(self) -> MemoryTrace:
        return self.gpu.trace

    def start(self) -> None:
        self.gpu.__enter__()

    def stop(self) -> None:
        """Give torch back. The trace stays."""
        self.gpu.__exit__(None, None, None)

    def result(self) -> RankMeasurement:
        """The figures so far. The test may go on."""
        self.gpu.finish()
        figures = report.build(self.trace)
        return RankMeasurement(figures, budget_of(self.trace, figures), self.trace.strategy, self.trace.assumptions)


def is_device_error(error: BaseException) -> bool:
    """Whether it is the virtual GPU that raised: out of memory, or an operation that it cannot play."""
    return isinstance(error, (torch.OutOfMemoryError, CannotSimulate))


def versions() -> dict[str, str]:
    """What a figure may depend on: recorded beside each baseline."""
    from pytest_gpumem import __version__

    found = {"pytest-gpumem": __version__, "torch": str(torch.__version__)}
    transformers: Any = sys.modules.get("transformers")
    if transformers is not None:
        found["transformers"] = str(transformers.__version__)
    return found
