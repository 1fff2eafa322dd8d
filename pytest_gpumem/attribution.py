"""From a memory trace to categories: whose was each byte, at every instant.

A block has one category for its whole life, so that a gradient counts as one from the moment its memory is handed
out, not from the moment it is looked up. Claims come first (`Own` events: somebody holds the block as a parameter, a
gradient, ...); what nobody claims is told by its life:

* allocated in a forward and alive when it ends: `activations`, what the forward leaves for the backward. The same for a
  recomputed forward inside a backward (activation checkpointing).
* allocated and freed within one phase: `temporaries`.
* copied from the host between phases: `inputs`.
* the rest: `other`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_gpumem.categories import (
    ACTIVATIONS,
    BUFFERS,
    COMMUNICATION,
    GRADIENTS,
    INPUTS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACE,
)
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
)

# The first wins. A gradient is one wherever it lives (in a DDP bucket, in a reduce-scatter output); a gathered parameter
# is communication although the module points at it as its parameter.
_PRIORITY = {
    category: rank
    for rank, category in enumerate(
        (
            GRADIENTS,
            COMMUNICATION,
            PARAMETERS,
            OPTIMIZER_STATE,
            BUFFERS,
            INPUTS,
            WORKSPACE,
            ACTIVATIONS,
            TEMPORARIES,
            OTHER,
        )
    )
}
_AUTOMATIC = (FORWARD, BACKWARD, OPTIMIZER)


@dataclass
class _Span:
    """A phase that is open: what it has allocated and not freed."""

    kind: str
    keeps: str | None  # the category of what is alive when it ends
    born: dict[int, None] = field(default_factory=dict)


def attribute(trace: MemoryTrace) -> dict[int, str]:
    """The category of every block in the trace, by block number."""
    claims = _claims(trace)
    category: dict[int, str] = {}
    spans = [_Span("", None)]  # the innermost last; the first is what lies between phases
    home: dict[int, _Span] = {}

    def settle(block: int, by_life: str) -> None:
        category[block] = claims.get(block, by_life)
        home.pop(block).born.pop(block)

    def leave(span: _Span, alive: str) -> None:
        for block in list(span.born):
            settle(block, alive)

    for event in trace.events:
        if isinstance(event, Alloc):
            span = spans[-1]
            if event.again is not None and event.block not in claims and event.again in claims:
                claims[event.block] = claims[event.again]
            if event.from_host and span.kind == "":
                category[event.block] = claims.get(event.block, INPUTS)
            else:
                home[event.block] = span
                span.born[event.block] = None
        elif isinstance(event, Free):
            if event.block in home:
                settle(event.block, TEMPORARIES)
        elif isinstance(event, Phase):
            kind = event.name.rpartition("/")[2]
            if kind not in _AUTOMATIC:
                continue
            if event.begins:
                leave(spans[0], OTHER)
                spans.append(_Span(kind, ACTIVATIONS if kind == FORWARD and event.grad else OTHER))
            elif len(spans) > 1:
                span = spans.pop()
                leave(span, span.keeps or OTHER)
        elif isinstance(event, Recompute):
            if event.begins:
                spans.append(_Span("recompute", ACTIVATIONS))
            elif len(spans) > 1 and spans[-1].kind == "recompute":
                leave(spans.pop(), ACTIVATIONS)
        elif isinstance(event, OutOfMemory):
            # What comes next is the exception's unwinding. What the forward held at this instant is best called activations.
            for span in spans:
                if span.keeps == ACTIVATIONS:
                    leave(span, ACTIVATIONS)
    while spans:
        span = spans.pop()
        leave(span, span.keeps or OTHER)
    return category


def _claims(trace: MemoryTrace) -> dict[int, str]:
    strong: dict[int, str] = {}
    weak: dict[int, str] = {}
    for event in trace.events:
        if isinstance(event, Own):
            claims = weak if event.weak else strong
            held = claims.get(event.block)
            if held is None or _PRIORITY[event.category] < _PRIORITY[held]:
                claims[event.block] = event.category
    return {**weak, **strong}
