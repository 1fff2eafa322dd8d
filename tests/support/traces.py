"""Memory traces written by hand, and drawn at random."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from pytest_gpumem.categories import CATEGORIES
from pytest_gpumem.trace import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Alloc,
    Free,
    MemoryTrace,
    OutOfMemory,
    Own,
    Phase,
    Recompute,
    Step,
)


class TraceBuilder:
    """Appends to `trace.events` what a source would. Blocks are numbered from 1."""

    def __init__(self, **of: Any) -> None:
        self.trace = MemoryTrace("virtual", "A100-40GB", **of)
        self.blocks = 0

    def alloc(self, requested: int, allocated: int | None = None, **how: Any) -> int:
        """A new block; nothing is rounded up unless `allocated` says so."""
        self.blocks += 1
        size = requested if allocated is None else allocated
        self.trace.events.append(Alloc(self.blocks, requested, size, **how))
        return self.blocks

    def free(self, *blocks: int) -> None:
        self.trace.events += [Free(block) for block in blocks]

    def own(self, block: int, category: str, weak: bool = False) -> None:
        self.trace.events.append(Own(block, category, weak))

    def owned(self, requested: int, category: str, allocated: int | None = None) -> int:
        """A new block that is claimed at once."""
        block = self.alloc(requested, allocated)
        self.own(block, category)
        return block

    def out_of_memory(self, requested: int) -> None:
        self.trace.events.append(OutOfMemory(requested))

    @contextlib.contextmanager
    def phase(self, name: str, grad: bool = True) -> Iterator[None]:
        self.trace.events.append(Phase(name, True, grad))
        yield
        self.trace.events.append(Phase(name, False))

    @contextlib.contextmanager
    def recompute(self) -> Iterator[None]:
        self.trace.events.append(Recompute(True))
        yield
        self.trace.events.append(Recompute(False))

    @contextlib.contextmanager
    def step(self, index: int) -> Iterator[None]:
        self.trace.events.append(Step(index, True))
        yield
        self.trace.events.append(Step(index, False))


_PHASES = (FORWARD, BACKWARD, OPTIMIZER, "eval", "eval/forward")
_ACTIONS = ("alloc", "alloc", "alloc", "free", "free", "own", "begin", "end", "step", "recompute", "out of memory")


@st.composite
def traces(draw: st.DrawFn) -> MemoryTrace:
    """Any trace that a source could write: blocks die once, phases nest, steps follow each other; the end may be abrupt."""
    builder = TraceBuilder()
    live: list[int] = []
    open_phases: list[str] = []
    open_step, steps = False, 0
    for action in draw(st.lists(st.sampled_from(_ACTIONS), max_size=40)):
        events = builder.trace.events
        if action == "alloc":
            requested = draw(st.integers(0, 5000))
            again = draw(st.none() | st.integers(1, builder.blocks)) if builder.blocks else None
            block = builder.alloc(
                requested, requested + draw(st.integers(0, 511)), from_host=draw(st.booleans()), again=again
            )
            live.append(block)
        elif action == "free" and live:
            builder.free(live.pop(draw(st.integers(0, len(live) - 1))))
        elif action == "own" and builder.blocks:
            builder.own(draw(st.integers(1, builder.blocks)), draw(st.sampled_from(CATEGORIES)), draw(st.booleans()))
        elif action == "begin":
            open_phases.append(draw(st.sampled_from(_PHASES)))
            events.append(Phase(open_phases[-1], True, draw(st.booleans())))
        elif action == "end" and open_phases:
            events.append(Phase(open_phases.pop(), False))
        elif action == "step":
            events.append(Step(steps, not open_step))
            steps, open_step = steps + open_step, not open_step
        elif action == "recompute":
            events += [Recompute(True), Recompute(False)]
        elif action == "out of memory":
            builder.out_of_memory(draw(st.integers(1, 5000)))
    return builder.trace
