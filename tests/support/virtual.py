"""Running a function on a virtual GPU, inside the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pytest_gpumem import report
from pytest_gpumem.budget import Budget, budget_of
from pytest_gpumem.report import RankReport
from pytest_gpumem.sources.virtual.cards import find_card
from pytest_gpumem.sources.virtual.gpu import VirtualGpu
from pytest_gpumem.trace import MemoryTrace


class Run:
    """What came of it: the function's result, the trace, the report and the budget."""

    def __init__(self, result: Any, trace: MemoryTrace) -> None:
        self.result = result
        self.trace = trace
        self.report: RankReport = report.build(trace)
        self.budget: Budget = budget_of(trace, self.report)


def play(body: Callable[[VirtualGpu], Any], card: str = "B200", rank: int = 0, world_size: int = 1) -> Run:
    """`body(gpu)` on `card`. Every tensor that it made is gone when its figures are taken, or in its result."""
    with VirtualGpu(find_card(card), rank, world_size) as gpu:
        try:
            result = body(gpu)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return Run(result, gpu.trace)
