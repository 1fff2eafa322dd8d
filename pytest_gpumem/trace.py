"""The memory trace: what one rank's allocator did, in order, with the marks that give it meaning.

Plain data. A source writes it; attribution, reports and checks read it. An *instant* is an index into `events`:
the state right after that event.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FORWARD, BACKWARD, OPTIMIZER, BETWEEN = "forward", "backward", "optimizer", "between"


@dataclass(frozen=True, slots=True)
class Alloc:
    """A block was handed out. `requested` and `allocated` are bytes, before and after rounding.

    `op` is the operation that asked for it ("aten.mm.default"), "" where unknown. `from_host` says that the operation
    copied host data to the device. `again` is the block that held the same storage before, where a storage was resized.
    """

    block: int
    requested: int
    allocated: int
    op: str = ""
    from_host: bool = False
    again: int | None = None
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    block: int


@dataclass(frozen=True, slots=True)
class Own:
    """Whoever holds this block makes it `category` for its whole life.

    A `weak` claim counts only where no other claim is made: a tensor that went through an in-place collective, say.
    """

    block: int
    category: str
    weak: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase begins or ends. Phases nest: a `forward` inside `gpumem.measure("eval")` is a phase of its own.

    `grad` says of a forward that it runs with gradients enabled, so that what it leaves behind is for a backward.
    """

    name: str
    begins: bool
    grad: bool = True


@dataclass(frozen=True, slots=True)
class Recompute:
    """Activation checkpointing runs a part of the forward again, inside the backward: it begins or ends."""

    begins: bool


@dataclass(frozen=True, slots=True)
class Step:
    """A step begins or ends, as `gpumem.steps` or `gpumem.train` say."""

    index: int
    begins: bool


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """`requested` bytes were asked for and did not fit."""

    requested: int


Event = Alloc | Free | Own | Phase | Recompute | Step | OutOfMemory


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """One parameter storage of the model on this rank.

    `nbytes` is the whole parameter's bytes, `local_nbytes` what this rank keeps of it (with padding), `shards` over how
    many ranks it is sharded (1: every rank has all of it). `shape` is the whole parameter's.
    """

    nbytes: int
    local_nbytes: int
    shards: int = 1
    trainable: bool = True
    dtype: str = "float32"
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OptimizerInfo:
    """One optimizer, as far as its memory goes. `options` holds momentum, amsgrad and the like, as set."""

    name: str
    options: tuple[tuple[str, object], ...] = ()
    steps: int = 0

    def option(self, name: str) -> object:
        return dict(self.options).get(name)


@dataclass
class MemoryTrace:
    """All of one rank's events. `capacity` is the card's total memory in bytes, None where unknown.

    `assumptions` are the statements that the figures rest on (shapes that depend on data and the like).
    `units` are the bytes of each FSDP unit when gathered, the largest first.
    """

    source: str
    gpu: str
    rank: int = 0
    world_size: int = 1
    strategy: str = "single"
    capacity: int | None = None
    events: list[Event] = field(default_factory=list)
    parameters: tuple[ParameterInfo, ...] = ()
    optimizers: tuple[OptimizerInfo, ...] = ()
    units: tuple[int, ...] = ()
    assumptions: tuple[str, ...] = ()
