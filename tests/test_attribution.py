"""Whose was each byte: claims first, then a block's life."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import TraceBuilder, traces

from pytest_gpumem.attribution import attribute
from pytest_gpumem.categories import CATEGORIES
from pytest_gpumem.trace import Alloc, MemoryTrace, Own, Phase

# A gradient in a DDP bucket is a gradient; a gathered parameter is communication.
PRIORITY = (
    "gradients",
    "communication",
    "parameters",
    "optimizer_state",
    "buffers",
    "inputs",
    "workspace",
    "activations",
    "temporaries",
    "other",
)


@pytest.fixture
def t() -> TraceBuilder:
    return TraceBuilder()


def test_an_empty_trace(t: TraceBuilder) -> None:
    assert attribute(t.trace) == {}


# -- by life: a training step


@pytest.mark.parametrize(
    ("phase", "grad", "left"),
    [
        ("forward", True, "activations"),
        ("forward", False, "other"),  # with gradients disabled it leaves nothing for a backward
        ("backward", True, "other"),
        ("optimizer", True, "other"),
        ("eval/forward", True, "activations"),
        ("eval/forward", False, "other"),
        ("outer/inner/forward", True, "activations"),
    ],
)
def test_what_a_phase_leaves_behind_and_what_it_frees(t: TraceBuilder, phase: str, grad: bool, left: str) -> None:
    with t.phase(phase, grad):
        kept = t.alloc(1)
        freed = t.alloc(1)
        t.free(freed)
    later = t.alloc(1)
    t.free(kept)
    assert attribute(t.trace) == {kept: left, freed: "temporaries", later: "other"}


def test_an_activation_stays_one_when_backward_frees_it(t: TraceBuilder) -> None:
    with t.phase("forward"):
        activation = t.alloc(1)
    with t.phase("backward"):
        t.free(activation)
        scratch = t.alloc(1)
        t.free(scratch)
    assert attribute(t.trace) == {activation: "activations", scratch: "temporaries"}


def test_a_forward_that_the_trace_ends_in_leaves_activations(t: TraceBuilder) -> None:
    t.trace.events.append(Phase("forward", True))
    block = t.alloc(1)
    assert attribute(t.trace) == {block: "activations"}


def test_a_block_from_backward_that_the_optimizer_frees_is_no_temporary(t: TraceBuilder) -> None:
    with t.phase("backward"):
        block = t.alloc(1)
    with t.phase("optimizer"):
        t.free(block)
    assert attribute(t.trace) == {block: "other"}


def test_a_phase_inside_a_phase_settles_only_its_own_blocks(t: TraceBuilder) -> None:
    with t.phase("forward"):
        outer = t.alloc(1)
        with t.phase("backward"):
            inner = t.alloc(1)
            scratch = t.alloc(1)
            t.free(scratch)
        late = t.alloc(1)
        t.free(late)
    assert attribute(t.trace) == {outer: "activations", inner: "other", scratch: "temporaries", late: "temporaries"}


# -- by life: between phases


def test_between_phases(t: TraceBuilder) -> None:
    copied = t.alloc(1, from_host=True)
    made = t.alloc(1)
    freed = t.alloc(1)
    t.free(freed)
    with t.phase("forward"):
        t.free(made, copied)
    assert attribute(t.trace) == {copied: "inputs", made: "other", freed: "temporaries"}


def test_a_block_made_before_a_phase_is_no_temporary_after_it(t: TraceBuilder) -> None:
    block = t.alloc(1)
    with t.phase("forward"):
        pass
    t.free(block)
    assert attribute(t.trace) == {block: "other"}


def test_a_copy_from_the_host_within_a_phase_is_told_by_its_life(t: TraceBuilder) -> None:
    with t.phase("forward"):
        mask = t.alloc(1, from_host=True)
        scratch = t.alloc(1, from_host=True)
        t.free(scratch)
    with t.phase("optimizer"):
        rate = t.alloc(1, from_host=True)
    assert attribute(t.trace) == {mask: "activations", scratch: "temporaries", rate: "other"}


def test_a_named_phase_alone_tells_nothing(t: TraceBuilder) -> None:
    """`gpumem.measure("eval")` is a name for a stretch of the run, not a forward."""
    before = t.alloc(1)
    with t.phase("eval"):
        t.free(before)
        copied = t.alloc(1, from_host=True)
        kept = t.alloc(1)
    assert attribute(t.trace) == {before: "temporaries", copied: "inputs", kept: "other"}


def test_a_named_phase_around_a_forward_or_in_it_changes_nothing(t: TraceBuilder) -> None:
    with t.phase("train"):
        with t.phase("train/forward"):
            around = t.alloc(1)
        with t.phase("train/backward"):
            t.free(around)
    with t.phase("forward"):
        before = t.alloc(1)
        with t.phase("head"):
            inside = t.alloc(1)
        t.free(before)
    assert attribute(t.trace) == {around: "activations", before: "temporaries", inside: "activations"}


# -- activation checkpointing


def test_a_recomputed_forward_inside_backward_leaves_activations(t: TraceBuilder) -> None:
    with t.phase("backward"):
        gradient = t.alloc(1)
        with t.recompute():
            recomputed = t.alloc(1)
            scratch = t.alloc(1)
            t.free(scratch)
        after = t.alloc(1)
        t.free(recomputed, after)
    assert attribute(t.trace) == {
        gradient: "other",
        recomputed: "activations",
        scratch: "temporaries",
        after: "temporaries",
    }


def test_the_end_of_a_recompute_that_never_began_is_ignored(t: TraceBuilder) -> None:
    with t.phase("backward"):
        block = t.alloc(1)
        with t.recompute():
            pass
        t.trace.events.append(t.trace.events[-1])  # its end, once more
        t.free(block)
    assert attribute(t.trace) == {block: "temporaries"}


# -- out of memory


def test_what_a_forward_held_when_memory_ran_out_are_activations(t: TraceBuilder) -> None:
    with t.phase("forward"):
        scratch = t.alloc(1)
        t.free(scratch)
        held = t.alloc(1)
        t.out_of_memory(1000)
        t.free(held)  # the exception unwinds
        retried = t.alloc(1)
        t.free(retried)
    assert attribute(t.trace) == {scratch: "temporaries", held: "activations", retried: "temporaries"}


def test_out_of_memory_in_a_recompute_inside_backward(t: TraceBuilder) -> None:
    with t.phase("backward"):
        gradient = t.alloc(1)
        with t.recompute():
            recomputed = t.alloc(1)
            t.out_of_memory(1000)
            t.free(recomputed, gradient)
    assert attribute(t.trace) == {recomputed: "activations", gradient: "temporaries"}


@pytest.mark.parametrize(("phase", "grad"), [("forward", False), ("backward", True), ("optimizer", True)])
def test_out_of_memory_elsewhere_makes_no_activations(t: TraceBuilder, phase: str, grad: bool) -> None:
    with t.phase(phase, grad):
        held = t.alloc(1)
        t.out_of_memory(1000)
        t.free(held)
    assert attribute(t.trace) == {held: "temporaries"}


# -- claims


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_claim_beats_every_life(t: TraceBuilder, category: str) -> None:
    copied = t.alloc(1, from_host=True)
    made = t.alloc(1)
    with t.phase("forward"):
        kept = t.alloc(1)
        freed = t.alloc(1)
        t.free(freed)
    for block in (copied, made, kept, freed):
        t.own(block, category)
    assert attribute(t.trace) == dict.fromkeys((copied, made, kept, freed), category)


def test_a_gradient_born_in_backward_and_claimed_later_is_one_from_its_birth(t: TraceBuilder) -> None:
    with t.phase("backward"):
        gradient = t.alloc(1)
    t.own(gradient, "gradients")
    with t.phase("optimizer"):
        moment = t.alloc(1)
        t.own(moment, "optimizer_state")
    t.free(gradient)
    assert attribute(t.trace) == {gradient: "gradients", moment: "optimizer_state"}


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(PRIORITY, 2)])
def test_of_two_claims_the_more_telling_one_wins_in_either_order(first: str, second: str) -> None:
    for claims in ((first, second), (second, first)):
        t = TraceBuilder()
        block = t.alloc(1)
        for category in claims:
            t.own(block, category)
        assert attribute(t.trace) == {block: first}


@pytest.mark.parametrize(("weak", "strong"), [("communication", "optimizer_state"), ("gradients", "other")])
def test_a_weak_claim_yields_to_any_other_claim(weak: str, strong: str) -> None:
    for claims in ([(weak, True), (strong, False)], [(strong, False), (weak, True)]):
        t = TraceBuilder()
        block = t.alloc(1)
        for category, is_weak in claims:
            t.own(block, category, is_weak)
        assert attribute(t.trace) == {block: strong}


def test_a_weak_claim_beats_a_life_and_weak_claims_have_the_same_order(t: TraceBuilder) -> None:
    with t.phase("forward"):
        block = t.alloc(1)
        t.own(block, "buffers", weak=True)
        t.own(block, "communication", weak=True)
        t.own(block, "inputs", weak=True)
    assert attribute(t.trace) == {block: "communication"}


# -- a storage that is resized gets a new block


def test_a_resized_storage_keeps_its_owner_through_every_block(t: TraceBuilder) -> None:
    first = t.owned(1, "communication")
    t.free(first)
    with t.phase("forward"):
        second = t.alloc(1, again=first)
    t.free(second)
    with t.phase("backward"):
        third = t.alloc(1, again=second)
        t.free(third)
    assert attribute(t.trace) == dict.fromkeys((first, second, third), "communication")


def test_a_resized_storage_that_is_claimed_anew_belongs_to_the_new_owner(t: TraceBuilder) -> None:
    first = t.owned(1, "communication")
    second = t.alloc(1, again=first)
    t.own(second, "buffers")
    third = t.alloc(1, again=second)
    assert attribute(t.trace) == {first: "communication", second: "buffers", third: "buffers"}


def test_a_resized_storage_that_nobody_claimed_is_told_by_its_life(t: TraceBuilder) -> None:
    first = t.alloc(1)
    t.free(first)
    with t.phase("forward"):
        second = t.alloc(1, again=first)
    assert attribute(t.trace) == {first: "temporaries", second: "activations"}


def test_a_later_block_s_claim_does_not_reach_back(t: TraceBuilder) -> None:
    first = t.alloc(1)
    t.free(first)
    second = t.alloc(1, again=first)
    t.own(second, "communication")
    assert attribute(t.trace) == {first: "temporaries", second: "communication"}


# -- any trace


@given(traces())
@settings(deadline=None, max_examples=100)
def test_every_block_has_one_category_and_claims_hold(trace: MemoryTrace) -> None:
    found = attribute(trace)
    assert set(found) == {event.block for event in trace.events if isinstance(event, Alloc)}
    assert set(found.values()) <= set(CATEGORIES)
    for block, category in found.items():
        strong = {e.category for e in trace.events if isinstance(e, Own) and e.block == block and not e.weak}
        if strong:
            assert category == min(strong, key=PRIORITY.index)


@given(traces(), st.data())
@settings(deadline=None, max_examples=100)
def test_a_claim_counts_wherever_in_the_trace_it_is_made(trace: MemoryTrace, data: st.DataObject) -> None:
    claims = [event for event in trace.events if isinstance(event, Own)]
    rest = [event for event in trace.events if not isinstance(event, Own)]
    shuffled = data.draw(st.permutations(claims))
    moved = MemoryTrace("virtual", "A100-40GB", events=[*rest, *shuffled])
    assert attribute(moved) == attribute(trace)
