"""Figures of one rank, from traces whose sums can be done by hand."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from traces import TraceBuilder, traces

from pytest_gpumem.attribution import attribute
from pytest_gpumem.categories import CATEGORIES, MODEL_STATES
from pytest_gpumem.report import MemoryReport, OutOfMemoryReport, PhaseReport, RankReport, StepReport, build, worst
from pytest_gpumem.trace import Alloc, Free, MemoryTrace, Phase, Step


def sizes(**categories: int) -> dict[str, int]:
    """Bytes by category, 0 where not named."""
    return {**dict.fromkeys(CATEGORIES, 0), **categories}


def two_steps(marked: bool) -> MemoryTrace:
    """Two steps of training; blocks are multiples of 512 bytes. The level after each event stands beside it."""
    t = TraceBuilder(rank=3, world_size=4, strategy="ddp")
    t.owned(1000, "parameters", 1024)  # 1024
    for index in range(2):
        if marked:
            t.trace.events.append(Step(index, True))
        batch = t.alloc(100, 512, from_host=True)  # 1536, then 3072 + 512 = 3584
        with t.phase("forward"):
            activation = t.alloc(2000, 2048)  # 3584, then 5632
            scratch = t.alloc(500, 512)  # 4096, then 6144
            t.free(scratch)  # 3584, then 5632
        with t.phase("backward"):
            gradient = t.owned(1000, "gradients", 1024)  # 4608, then 6656
            t.free(activation)  # 2560, then 4608
        with t.phase("optimizer"):
            if index == 0:
                t.owned(2000, "optimizer_state", 2048)  # 4608
            scratch = t.alloc(1000, 1024)  # 5632, both times
            t.free(scratch)  # 4608
        t.free(gradient)  # 3584
        t.free(batch)  # 3072
        if marked:
            t.trace.events.append(Step(index, False))
    return t.trace


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "inferred"])
def test_the_peak_and_what_it_is_made_of(marked: bool) -> None:
    report = build(two_steps(marked))
    assert report.rank == 3
    assert (report.peak_phase, report.peak_step) == ("backward", 1)
    assert report.peak_bytes == {"requested": 6100, "allocated": 6656, "active": None, "reserved": None}
    assert report.allocated == 1024 + 1024 + 2048 + 2048 + 512 == 6656
    assert 1000 + 1000 + 2000 + 2000 + 100 == 6100
    assert report.at_peak == sizes(
        parameters=1024, gradients=1024, optimizer_state=2048, activations=2048, inputs=512, temporaries=0
    )
    assert report.category_peaks == sizes(
        parameters=1024, gradients=1024, optimizer_state=2048, activations=2048, inputs=512, temporaries=1024
    )
    assert report.category_requested_peaks == sizes(
        parameters=1000, gradients=1000, optimizer_state=2000, activations=2000, inputs=100, temporaries=1000
    )
    assert report.model_states == {"parameters": 1000, "gradients": 1000, "optimizer_state": 2000}
    assert report.optimizer_temporaries == 1000
    assert report.allocations == 1 + 6 + 5
    assert report.out_of_memory is None
    assert (report.fragmentation_bytes, report.non_torch_bytes) == (None, None)
    assert {name: phase for name, phase in report.phases.items() if name != "between"} == {
        "forward": PhaseReport(6144, 5632),
        "backward": PhaseReport(6656, 4608),
        "optimizer": PhaseReport(5632, 4608),
    }


def test_marked_steps() -> None:
    report = build(two_steps(marked=True))
    assert report.steps == [
        StepReport(
            0,
            {
                "between": PhaseReport(
                    4608, 3072
                ),  # before the forward at most 1536; after the optimizer from 4608 down
                "forward": PhaseReport(4096, 3584),
                "backward": PhaseReport(4608, 2560),
                "optimizer": PhaseReport(5632, 4608),
            },
            end=3072,
        ),
        StepReport(
            1,
            {
                "between": PhaseReport(4608, 3072),
                "forward": PhaseReport(6144, 5632),
                "backward": PhaseReport(6656, 4608),
                "optimizer": PhaseReport(5632, 4608),
            },
            end=3072,
        ),
    ]
    assert [step.peak for step in report.steps] == [5632, 6656]
    assert report.phases["between"] == PhaseReport(4608, 3072)


def test_without_marks_a_step_begins_at_the_forward_that_follows_an_optimizer_phase() -> None:
    """So the second batch, which is copied before that forward, still falls into step 0."""
    first, second = build(two_steps(marked=False)).steps
    assert (first.index, second.index) == (0, 1)
    assert first.phases["between"] == PhaseReport(4608, 3072 + 512)
    assert first.end == 3072 + 512
    assert second.phases["forward"] == PhaseReport(6144, 5632)
    assert second.phases["between"] == PhaseReport(4608, 3072)
    assert second.end == 3072


def test_an_empty_trace() -> None:
    report = build(MemoryTrace("virtual", "A100-40GB"))
    assert report.at_peak == report.category_peaks == report.category_requested_peaks == sizes()
    assert (report.allocated, report.allocations, report.steps, report.phases) == (0, 0, [], {})
    assert (report.peak_phase, report.peak_step) == ("between", None)


def test_of_two_equal_peaks_the_first_one_counts() -> None:
    t = TraceBuilder()
    with t.phase("forward"):
        t.free(t.owned(512, "inputs"))
    with t.phase("backward"):
        t.free(t.owned(512, "gradients"))
    report = build(t.trace)
    assert report.peak_phase == "forward"
    assert report.at_peak == sizes(inputs=512)


def test_requested_and_allocated_peak_at_instants_of_their_own() -> None:
    t = TraceBuilder()
    t.free(t.owned(1000, "inputs", 1024))
    t.owned(900, "inputs", 2048)
    report = build(t.trace)
    assert report.peak_bytes["requested"] == 1000
    assert report.peak_bytes["allocated"] == 2048
    assert report.category_peaks["inputs"] == 2048
    assert report.category_requested_peaks["inputs"] == 1000


# -- model states and what the optimizer needs on top


def test_model_states_are_taken_at_their_joint_peak_in_requested_bytes() -> None:
    """The gradients' own peak of 80 lies elsewhere."""
    t = TraceBuilder()
    t.owned(100, "parameters", 512)  # 100
    t.free(t.owned(80, "gradients", 512))  # 180
    t.owned(50, "gradients", 512)  # 150
    t.owned(31, "optimizer_state", 512)  # 181
    t.owned(10_000, "activations", 10_240)
    report = build(t.trace)
    assert report.model_states == {"parameters": 100, "gradients": 50, "optimizer_state": 31}
    assert report.category_requested_peaks["gradients"] == 80


def test_optimizer_temporaries_are_those_of_its_own_phase() -> None:
    t = TraceBuilder()
    with t.phase("forward"):
        t.free(t.alloc(9000))
    with t.phase("optimizer"):
        first = t.alloc(300, 512)
        t.owned(5000, "optimizer_state")
        second = t.alloc(200, 512)
        t.free(first, second)
        t.free(t.alloc(400, 512))
    with t.phase("backward"):
        t.free(t.alloc(8000))
    assert build(t.trace).optimizer_temporaries == 300 + 200


def test_optimizer_temporaries_do_not_count_what_was_there_before() -> None:
    """An optimizer that steps inside the backward, from a hook."""
    t = TraceBuilder()
    with t.phase("measured"), t.phase("measured/backward"):
        scratch = t.alloc(700)
        with t.phase("measured/optimizer"):
            t.free(t.alloc(300))
        t.free(scratch)
    assert build(t.trace).optimizer_temporaries == 300


# -- phases


def test_a_phase_keeps_its_highest_peak_and_its_last_end() -> None:
    t = TraceBuilder()
    with t.phase("forward"):
        big = t.alloc(300)
        t.free(big)
        t.alloc(10)
    with t.phase("forward"):
        t.alloc(20)
    assert build(t.trace).phases == {"forward": PhaseReport(300, 30)}


def test_a_phase_starts_at_what_is_live_already() -> None:
    t = TraceBuilder()
    block = t.alloc(100)
    with t.phase("forward"):
        t.free(block)
    report = build(t.trace)
    assert report.phases == {"between": PhaseReport(100, 100), "forward": PhaseReport(100, 0)}


def test_an_outer_phase_sees_what_its_inner_ones_allocate() -> None:
    t = TraceBuilder()
    with t.phase("eval"):
        t.alloc(1)
        with t.phase("eval/forward", grad=False):
            block = t.alloc(100)
        t.free(block)
    report = build(t.trace)
    assert report.phases == {"eval": PhaseReport(101, 1), "eval/forward": PhaseReport(101, 101)}
    assert report.peak_phase == "eval/forward"
    assert report.steps == []


def test_nothing_between_phases_is_no_phase() -> None:
    t = TraceBuilder()
    with t.phase("forward"):
        t.alloc(1)
    with t.phase("backward"):
        t.alloc(1)
    assert set(build(t.trace).phases) == {"forward", "backward"}


def test_phases_left_open_end_with_the_trace() -> None:
    t = TraceBuilder()
    t.trace.events += [Phase("eval", True), Phase("eval/forward", True)]
    t.free(t.alloc(100))
    t.alloc(1)
    assert build(t.trace).phases == {"eval": PhaseReport(100, 1), "eval/forward": PhaseReport(100, 1)}


def test_the_end_of_a_phase_that_is_not_the_innermost_is_ignored() -> None:
    t = TraceBuilder()
    with t.phase("eval"):
        t.trace.events.append(Phase("forward", False))
        t.alloc(7)
    assert build(t.trace).phases == {"eval": PhaseReport(7, 7)}


# -- steps


def test_a_phase_that_spans_steps_is_cut_at_their_edges() -> None:
    t = TraceBuilder()
    with t.phase("train"):
        t.alloc(10)  # 10
        with t.step(0):
            t.free(t.alloc(100))  # 110
        with t.step(1):
            t.alloc(50)  # 60
        t.free(t.alloc(70))  # 130
    report = build(t.trace)
    assert report.steps == [
        StepReport(0, {"train": PhaseReport(110, 10)}, end=10),
        StepReport(1, {"train": PhaseReport(60, 60)}, end=60),
    ]
    assert report.phases == {"train": PhaseReport(130, 60)}
    assert (report.peak_phase, report.peak_step) == ("train", None)


def test_what_happens_outside_all_steps_is_in_none() -> None:
    t = TraceBuilder()
    t.alloc(1000)
    with t.step(0):
        pass
    t.alloc(1)
    report = build(t.trace)
    assert report.steps == [StepReport(0, {}, end=1000)]
    assert report.steps[0].peak == 1000
    assert report.phases == {"between": PhaseReport(1001, 1001)}
    assert report.peak_step is None


def test_a_step_that_the_trace_ends_in_has_an_end_too() -> None:
    t = TraceBuilder()
    t.trace.events += [Step(0, True), Phase("forward", True)]
    t.alloc(100)
    assert build(t.trace).steps == [StepReport(0, {"forward": PhaseReport(100, 100)}, end=100)]


def test_the_end_of_a_step_that_never_began_is_ignored() -> None:
    t = TraceBuilder()
    t.alloc(1)
    t.trace.events.append(Step(0, False))
    t.alloc(1)
    assert build(t.trace).steps == []


@pytest.mark.parametrize(
    ("phases", "steps"),
    [
        ("", []),
        ("forward", [0]),
        ("forward backward optimizer", [0]),
        ("forward backward forward backward optimizer", [0]),  # gradient accumulation
        ("forward backward optimizer forward backward optimizer forward", [0, 1, 2]),
        ("optimizer forward", [0]),  # an optimizer before any forward ends nothing
        ("forward backward optimizer optimizer forward", [0, 1]),  # two optimizers
        ("backward optimizer", []),
        ("eval/forward", []),
        ("forward optimizer eval/forward", [0]),
        ("forward eval/optimizer forward", [0]),
    ],
)
def test_steps_that_phases_tell(phases: str, steps: list[int]) -> None:
    t = TraceBuilder()
    for name in phases.split():
        with t.phase(name):
            t.alloc(1)
    assert [step.index for step in build(t.trace).steps] == steps


def test_a_forward_without_gradients_begins_no_step() -> None:
    t = TraceBuilder()
    with t.phase("forward", grad=False):
        t.alloc(1)
    with t.phase("forward"), t.phase("optimizer"):
        t.alloc(1)
    with t.phase("forward", grad=False):  # an evaluation after the step is still in it
        t.alloc(1)
    report = build(t.trace)
    assert [(step.index, step.end) for step in report.steps] == [(0, 3)]
    assert set(report.steps[0].phases) == {"forward", "optimizer"}


# -- out of memory


def test_the_instant_at_which_memory_ran_out() -> None:
    t = TraceBuilder()
    t.owned(1000, "parameters", 1024)
    with t.step(0):
        batch = t.alloc(512, from_host=True)
        with t.phase("forward"):
            activation = t.alloc(2048)
            t.out_of_memory(99_999)
            t.free(activation)
        t.free(batch)
    report = build(t.trace)
    assert report.out_of_memory == OutOfMemoryReport(
        requested=99_999,
        allocated=1024 + 512 + 2048,
        composition=sizes(parameters=1024, inputs=512, activations=2048),
        phase="forward",
        step=0,
    )


def test_out_of_memory_outside_all_phases() -> None:
    t = TraceBuilder()
    t.out_of_memory(7)
    report = build(t.trace)
    assert report.out_of_memory == OutOfMemoryReport(7, 0, sizes(), "between", None)
    assert report.allocations == 0


# -- JSON


@pytest.mark.parametrize("oom", [False, True])
def test_json_round_trip(oom: bool) -> None:
    t = TraceBuilder()
    t.trace = two_steps(marked=True)
    if oom:
        t.out_of_memory(7)
    report = build(t.trace)
    data: dict[str, Any] = json.loads(json.dumps(report.to_json()))
    assert RankReport.from_json(data) == report
    assert data["steps"][1]["phases"]["backward"] == {"peak": 6656, "end": 4608}
    assert (data["out_of_memory"] is not None) == oom


# -- several ranks


def test_the_worst_rank_is_the_lowest_of_those_with_the_highest_peak() -> None:
    reports = []
    for rank, nbytes in ((3, 200), (2, 100), (1, 200)):
        t = TraceBuilder(rank=rank)
        with t.step(0):
            t.owned(nbytes, "inputs")
        reports.append(build(t.trace))
    assert worst(reports).rank == 1
    whole = MemoryReport("virtual", "A100-40GB", "ddp", 4, [reports[1], reports[0]])
    assert whole.rank.rank == 2
    assert whole.steps == [StepReport(0, {"between": PhaseReport(100, 100)}, end=100)]  # this process's rank
    assert whole.peak == 200  # the worst rank's
    assert whole.at_peak == whole.category_peaks == sizes(inputs=200)


# -- any trace


def levels(trace: MemoryTrace, size: str, categories: tuple[str, ...] = CATEGORIES) -> list[int]:
    """Live bytes in these categories before the first event and after every event, one event at a time."""
    category = attribute(trace)
    allocs = {event.block: event for event in trace.events if isinstance(event, Alloc)}
    moves = []
    for event in trace.events:
        counts = isinstance(event, (Alloc, Free)) and category[event.block] in categories
        nbytes = getattr(allocs[event.block], size) if counts and isinstance(event, (Alloc, Free)) else 0
        moves.append(-nbytes if isinstance(event, Free) else nbytes)
    return [0, *itertools.accumulate(moves)]


@given(traces())
@settings(deadline=None, max_examples=150)
def test_peaks_are_those_of_a_running_sum(trace: MemoryTrace) -> None:
    report = build(trace)
    allocated = levels(trace, "allocated")
    assert report.allocated == max(allocated)
    assert report.peak_bytes["requested"] == max(levels(trace, "requested"))
    first = allocated.index(max(allocated))
    for category in CATEGORIES:
        own = levels(trace, "allocated", (category,))
        assert report.category_peaks[category] == max(own)
        assert report.at_peak[category] == own[first]
        assert report.category_requested_peaks[category] == max(levels(trace, "requested", (category,)))
    assert sum(report.model_states.values()) == max(levels(trace, "requested", MODEL_STATES))


@given(traces())
@settings(deadline=None, max_examples=150)
def test_categories_share_out_every_byte(trace: MemoryTrace) -> None:
    report = build(trace)
    assert sum(report.at_peak.values()) == report.allocated
    assert all(report.category_peaks[category] >= report.at_peak[category] for category in CATEGORIES)
    if report.out_of_memory is not None:
        assert sum(report.out_of_memory.composition.values()) == report.out_of_memory.allocated
    assert max((phase.peak for phase in report.phases.values()), default=0) == report.allocated


@given(traces())
@settings(deadline=None, max_examples=150)
def test_a_step_s_peak_is_the_highest_level_between_its_marks(trace: MemoryTrace) -> None:
    allocated = levels(trace, "allocated")
    marks = [instant for instant, event in enumerate(trace.events) if isinstance(event, Step)]
    if not marks:
        return
    if len(marks) % 2:
        marks.append(len(trace.events))
    reports = build(trace).steps
    assert len(reports) == len(marks) // 2
    for step, begin, end in zip(reports, marks[::2], marks[1::2], strict=True):
        assert step.peak == max(allocated[begin : end + 1])
        assert step.end == allocated[end]


@given(traces())
@settings(deadline=None, max_examples=50)
def test_json_keeps_every_figure(trace: MemoryTrace) -> None:
    report = build(trace)
    assert RankReport.from_json(json.loads(json.dumps(report.to_json()))) == report
