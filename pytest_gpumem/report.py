"""What one rank's memory trace says, as plain data, and its JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_gpumem.attribution import attribute
from pytest_gpumem.categories import CATEGORIES, MODEL_STATES
from pytest_gpumem.trace import BETWEEN, FORWARD, OPTIMIZER, Alloc, Free, MemoryTrace, OutOfMemory, Phase, Step

SCHEMA_VERSION = 1


@dataclass
class PhaseReport:
    """Allocated bytes of one phase: its peak, and what was live when it ended."""

    peak: int
    end: int


@dataclass
class StepReport:
    """One step: its phases by name, and the allocated bytes live when it ended."""

    index: int
    phases: dict[str, PhaseReport] = field(default_factory=dict)
    end: int = 0

    @property
    def peak(self) -> int:
        return max((phase.peak for phase in self.phases.values()), default=self.end)


@dataclass
class OutOfMemoryReport:
    """The instant at which an allocation did not fit: bytes asked for, and what held the memory."""

    requested: int
    allocated: int
    composition: dict[str, int]
    phase: str
    step: int | None


@dataclass
class RankReport:
    """One rank's figures, all in bytes; None where the source cannot tell.

    `at_peak` is what was live at the instant of the allocated peak, by category: it sums to `peak_bytes["allocated"]`.
    `category_peaks` is each category's own peak. `model_states` is the peak of parameters + gradients + optimizer state
    taken together, in *requested* bytes, by category: the budget speaks of what is asked for, not of how blocks are rounded.
    `category_requested_peaks` is each category's own peak in requested bytes.
    """

    rank: int
    peak_bytes: dict[str, int | None]
    at_peak: dict[str, int]
    category_peaks: dict[str, int]
    peak_phase: str
    peak_step: int | None
    model_states: dict[str, int]
    category_requested_peaks: dict[str, int]
    optimizer_temporaries: int
    fragmentation_bytes: int | None = None
    non_torch_bytes: int | None = None
    steps: list[StepReport] = field(default_factory=list)
    phases: dict[str, PhaseReport] = field(default_factory=dict)
    out_of_memory: OutOfMemoryReport | None = None
    allocations: int = 0

    @property
    def allocated(self) -> int:
        """Peak allocated bytes."""
        return self.peak_bytes["allocated"] or 0

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and integers, as the JSON file holds them."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankReport:
        known = dict(data)
        known["steps"] = [
            StepReport(s["index"], {n: PhaseReport(**p) for n, p in s["phases"].items()}, s["end"])
            for s in data["steps"]
        ]
        known["phases"] = {name: PhaseReport(**phase) for name, phase in data["phases"].items()}
        if data["out_of_memory"] is not None:
            known["out_of_memory"] = OutOfMemoryReport(**data["out_of_memory"])
        return cls(**known)


@dataclass
class MemoryReport:
    """What `gpumem.train` and `gpumem.report` give: the figures of this process's rank so far, in bytes."""

    source: str
    gpu: str
    strategy: str
    world_size: int
    ranks: list[RankReport]
    assumptions: tuple[str, ...] = ()

    @property
    def rank(self) -> RankReport:
        """The rank that this process plays."""
        return self.ranks[0]

    @property
    def peak(self) -> int:
        """Peak allocated bytes of the worst rank."""
        return worst(self.ranks).allocated

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the instant of the peak."""
        return worst(self.ranks).at_peak

    @property
    def category_peaks(self) -> dict[str, int]:
        """Each category's own peak in bytes, of the worst rank."""
        return worst(self.ranks).category_peaks

    @property
    def model_states(self) -> dict[str, int]:
        """Requested bytes of parameters, gradients and optimizer state at their joint peak, of this process's rank."""
        return self.rank.model_states

    @property
    def steps(self) -> list[StepReport]:
        return self.rank.steps


def worst(ranks: Iterable[RankReport]) -> RankReport:
    """The rank with the highest allocated peak; the lowest rank number among equals."""
    return max(ranks, key=lambda report: (report.allocated, -report.rank))


def build(trace: MemoryTrace) -> RankReport:
    """Walk the trace once and take every figure on the way."""
    return _Walk(trace).run()


class _Walk:
    def __init__(self, trace: MemoryTrace) -> None:
        self.trace = trace
        self.category = attribute(trace)
        self.steps_of = _step_marks(trace)
        self.live: dict[int, Alloc] = {}
        self.by_category = dict.fromkeys(CATEGORIES, 0)
        self.requested_by_category = dict.fromkeys(CATEGORIES, 0)
        self.category_peaks = dict.fromkeys(CATEGORIES, 0)
        self.category_requested_peaks = dict.fromkeys(CATEGORIES, 0)
        self.allocated = self.requested = self.requested_peak = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.peak_phase = BETWEEN
        self.peak_step: int | None = None
        self.model_states = dict.fromkeys(MODEL_STATES, 0)
        self.optimizer_temporaries = 0
        self.optimizer_floor = 0
        self.open: list[tuple[str, PhaseReport]] = []
        self.between: PhaseReport | None = None  # open once something happens outside all phases
        self.phases: dict[str, PhaseReport] = {}
        self.steps: list[StepReport] = []
        self.step: StepReport | None = None
        self.out_of_memory: OutOfMemoryReport | None = None
        self.allocations = 0

    def run(self) -> RankReport:
        for instant, event in enumerate(self.trace.events):
            for step in self.steps_of.get(instant, ()):
                self._mark_step(step)
            if isinstance(event, Alloc):
                self._alloc(event)
            elif isinstance(event, Free):
                self._free(event)
            elif isinstance(event, Phase):
                self._mark_phase(event)
            elif isinstance(event, OutOfMemory):
                self.out_of_memory = OutOfMemoryReport(
                    event.requested, self.allocated, self._composition(), self._phase(), self._step_index()
                )
        for step in self.steps_of.get(len(self.trace.events), ()):
            self._mark_step(step)
        while self.open:
            self._close(*self.open.pop())
        self._close_between()
        if self.step is not None:  # the trace ends inside it
            self.step.end = self.allocated
        return RankReport(
            rank=self.trace.rank,
            peak_bytes={"requested": self.requested_peak, "allocated": self.peak, "active": None, "reserved": None},
            at_peak=self.at_peak or self._composition(),
            category_peaks=self.category_peaks,
            peak_phase=self.peak_phase,
            peak_step=self.peak_step,
            model_states=self.model_states,
            category_requested_peaks=self.category_requested_peaks,
            optimizer_temporaries=self.optimizer_temporaries,
            steps=self.steps,
            phases=self.phases,
            out_of_memory=self.out_of_memory,
            allocations=self.allocations,
        )

    def _composition(self) -> dict[str, int]:
        return dict(self.by_category)

    def _phase(self) -> str:
        return self.open[-1][0] if self.open else BETWEEN

    def _step_index(self) -> int | None:
        return self.step.index if self.step else None

    def _alloc(self, event: Alloc) -> None:
        self._open_between()
        self.allocations += 1
        self.live[event.block] = event
        category = self.category[event.block]
        self.allocated += event.allocated
        self.requested += event.requested
        self.requested_peak = max(self.requested_peak, self.requested)
        self.by_category[category] += event.allocated
        self.requested_by_category[category] += event.requested
        self.category_peaks[category] = max(self.category_peaks[category], self.by_category[category])
        self.category_requested_peaks[category] = max(
            self.category_requested_peaks[category], self.requested_by_category[category]
        )
        if self.allocated > self.peak:
            self.peak, self.at_peak = self.allocated, self._composition()
            self.peak_phase, self.peak_step = self._phase(), self._step_index()
        if category in MODEL_STATES:
            states = {name: self.requested_by_category[name] for name in MODEL_STATES}
            if sum(states.values()) > sum(self.model_states.values()):
                self.model_states = states
        elif self._phase().rpartition("/")[2] == OPTIMIZER:
            temporaries = self.requested_by_category["temporaries"] - self.optimizer_floor
            self.optimizer_temporaries = max(self.optimizer_temporaries, temporaries)
        for phase in self._open_phases():
            phase.peak = max(phase.peak, self.allocated)

    def _free(self, event: Free) -> None:
        self._open_between()
        alloc = self.live.pop(event.block)
        category = self.category[event.block]
        self.allocated -= alloc.allocated
        self.requested -= alloc.requested
        self.by_category[category] -= alloc.allocated
        self.requested_by_category[category] -= alloc.requested

    def _open_phases(self) -> list[PhaseReport]:
        return [phase for _, phase in self.open] or ([self.between] if self.between else [])

    def _open_between(self) -> None:
        if not self.open and self.between is None:
            self.between = PhaseReport(self.allocated, self.allocated)

    def _close_between(self) -> None:
        if self.between is not None:
            self._close(BETWEEN, self.between)
            self.between = None

    def _mark_phase(self, event: Phase) -> None:
        if event.begins:
            self._close_between()
            self.open.append((event.name, PhaseReport(self.allocated, self.allocated)))
            if event.name.rpartition("/")[2] == OPTIMIZER:
                self.optimizer_floor = self.requested_by_category["temporaries"]
        elif self.open and self.open[-1][0] == event.name:
            self._close(*self.open.pop())

    def _close(self, name: str, phase: PhaseReport) -> None:
        phase.end = self.allocated
        for phases in (self.phases, self.step.phases if self.step else {}):
            known = phases.get(name)
            phases[name] = PhaseReport(max(phase.peak, known.peak if known else 0), phase.end)

    def _mark_step(self, event: Step) -> None:
        # A phase that spans a step's edge (gpumem.measure around the whole loop) is cut there.
        self._close_between()
        for name, phase in self.open:
            self._close(name, phase)
            phase.peak = self.allocated
        if event.begins:
            self.step = StepReport(event.index)
            self.steps.append(self.step)
        elif self.step is not None:
            self.step.end = self.allocated
            self.step = None


def _step_marks(trace: MemoryTrace) -> dict[int, list[Step]]:
    """Step marks by the instant they come before: the trace's own, or else those that its phases tell.

    Without marks, a step begins at the first forward, and a new one at the first forward that follows an optimizer phase.
    """
    events = trace.events
    marks: dict[int, list[Step]] = {}
    for instant, event in enumerate(events):
        if isinstance(event, Step):
            marks.setdefault(instant, []).append(event)
    if marks:
        return marks
    index, open_step, stepped = 0, False, False
    for instant, event in enumerate(events):
        if not isinstance(event, Phase) or not event.begins:
            continue
        if event.name == FORWARD and event.grad and (stepped or not open_step):
            at = marks.setdefault(instant, [])
            if open_step:
                at.append(Step(index, begins=False))
                index += 1
            at.append(Step(index, begins=True))
            open_step, stepped = True, False
        elif event.name == OPTIMIZER and open_step:
            stepped = True
    if open_step:
        marks.setdefault(len(events), []).append(Step(index, begins=False))
    return marks
