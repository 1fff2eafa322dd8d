"""Every verdict with its message: equal to a limit passes, one byte more fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from figures import baseline, budget, rank_report

from pytest_gpumem.baselines import Baseline
from pytest_gpumem.budget import Budget
from pytest_gpumem.categories import CATEGORIES
from pytest_gpumem.checks import Measured, Verdict, run_checks, value_of
from pytest_gpumem.marker import Settings, Tolerances
from pytest_gpumem.report import RankReport
from pytest_gpumem.units import Tolerance

HOW = "pytest tests/test_a.py::test_a --gpumem-update-baselines"
KIB, MIB, GIB = 1024, 1024**2, 1024**3
EXACT = Tolerances(default=Tolerance())


def verdicts(
    settings: Settings,
    *reports: RankReport,
    budgets: Sequence[Budget] = (),
    stored: Baseline | None = None,
    compare: bool = True,
) -> list[Verdict]:
    measured = Measured(reports, budgets or [budget(0, 0)])
    return run_checks(settings, measured, stored, compare, HOW)


def only(found: list[Verdict]) -> Verdict:
    (verdict,) = found
    return verdict


# -- nothing to check, nothing measured


def test_a_test_that_asks_for_nothing_gets_no_verdict() -> None:
    assert verdicts(Settings(), rank_report(at_peak={"inputs": 1})) == []


@pytest.mark.parametrize("settings", [Settings(), Settings(max_bytes=1, budget=4.0, baseline=True)])
def test_a_test_that_measured_nothing_fails_with_that_alone(settings: Settings) -> None:
    verdict = only(verdicts(settings, rank_report(allocations=0), rank_report(1, allocations=0)))
    assert (verdict.name, verdict.passed) == ("measured", False)
    assert verdict.message == (
        "the test put nothing on the GPU, so it measured nothing. The usual cause: the model and the batch stayed on the "
        'CPU. Move them with .to(gpumem.device) or .to("cuda"), or use gpumem.train().'
    )
    assert (verdict.limit_bytes, verdict.value_bytes) == (None, None)


def test_one_rank_with_an_allocation_is_a_measurement() -> None:
    assert verdicts(Settings(), rank_report(allocations=0), rank_report(1, allocations=1)) == []


# -- max


@pytest.mark.parametrize("peak", [1, 2 * GIB - 1, 2 * GIB])
def test_a_peak_up_to_the_limit_passes(peak: int) -> None:
    verdict = only(verdicts(Settings(max_bytes=2 * GIB), rank_report(at_peak={"activations": peak})))
    assert verdict.passed
    assert (verdict.name, verdict.limit_bytes, verdict.value_bytes) == ("max", 2 * GIB, peak)


def test_a_peak_under_the_limit_in_words() -> None:
    verdict = only(verdicts(Settings(max_bytes=2 * GIB), rank_report(at_peak={"inputs": 3 * MIB})))
    assert verdict.message == "peak 3.0 MiB of 2.000 GiB"


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (1, "2,147,483,649 B is over the limit of 2,147,483,648 B by 1 B"),
        (GIB, "3.000 GiB is over the limit of 2.000 GiB by 1.000 GiB"),
    ],
)
def test_a_peak_over_the_limit_fails(over: int, words: str) -> None:
    verdict = only(verdicts(Settings(max_bytes=2 * GIB), rank_report(at_peak={"activations": 2 * GIB + over})))
    assert verdict == Verdict(
        "max",
        False,
        f"peak {words},\nat step 1, phase backward, rank 0 (worst of 1 measured)",
        limit_bytes=2 * GIB,
        value_bytes=2 * GIB + over,
    )


def test_a_peak_outside_all_steps_says_so() -> None:
    report = rank_report(at_peak={"inputs": 2}, peak_phase="eval/forward", peak_step=None)
    verdict = only(verdicts(Settings(max_bytes=1), report))
    assert verdict.message.endswith("\noutside all steps, phase eval/forward, rank 0 (worst of 1 measured)")


def test_step_0_is_a_step() -> None:
    verdict = only(verdicts(Settings(max_bytes=1), rank_report(at_peak={"inputs": 2}, peak_step=0)))
    assert "at step 0, phase backward" in verdict.message


def test_the_limit_holds_the_worst_rank() -> None:
    reports = [
        rank_report(rank, at_peak={"inputs": nbytes}) for rank, nbytes in ((0, 100), (5, 300), (3, 300), (2, 200))
    ]
    verdict = only(verdicts(Settings(max_bytes=200), *reports))
    assert verdict.message == (
        "peak 300 B is over the limit of 200 B by 100 B,\nat step 1, phase backward, rank 3 (worst of 4 measured)"
    )


def test_the_limit_may_hold_requested_bytes() -> None:
    """The rank with the highest requested peak need not be the one with the highest allocated peak."""
    reports = [
        rank_report(0, at_peak={"inputs": 5120}, requested=1000),
        rank_report(1, at_peak={"inputs": 4608}, requested=3000),
    ]
    assert only(verdicts(Settings(max_bytes=3000, metric="requested"), *reports)).passed
    verdict = only(verdicts(Settings(max_bytes=2999, metric="requested"), *reports))
    assert verdict.message == (
        "peak (requested) 3,000 B is over the limit of 2,999 B by 1 B,\n"
        "at step 1, phase backward, rank 1 (worst of 2 measured)"
    )
    assert (verdict.limit_bytes, verdict.value_bytes) == (2999, 3000)


def test_a_figure_that_the_source_cannot_tell_counts_as_zero() -> None:
    report = rank_report(at_peak={"inputs": 512}, requested=500)
    assert [value_of(report, metric) for metric in ("requested", "allocated", "active")] == [500, 512, 0]


# -- limits of categories


def test_limits_hold_each_category_s_own_peak_on_its_worst_rank() -> None:
    reports = [
        rank_report(0, at_peak={"activations": 10, "inputs": 90}, category_peaks={"activations": 2 * MIB}),
        rank_report(6, at_peak={"activations": 30, "inputs": 10}, category_peaks={"activations": 3 * MIB}),
        rank_report(4, at_peak={"activations": 30, "inputs": 10}, category_peaks={"activations": 3 * MIB}),
    ]
    limits = {"inputs": 90, "activations": 3 * MIB - 1, "gradients": 0}
    assert verdicts(Settings(limits=limits), *reports) == [  # in the order of the tables
        Verdict("limits[gradients]", True, "gradients 0 B of 0 B", 0, 0),
        Verdict(
            "limits[activations]",
            False,
            "activations peak at 3,145,728 B, over the limit of 3,145,727 B by 1 B,\non rank 4 (worst of 3 measured)",
            3 * MIB - 1,
            3 * MIB,
        ),
        Verdict("limits[inputs]", True, "inputs 90 B of 90 B", 90, 90),
    ]


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize(("limit", "passed"), [(100, True), (99, False)])
def test_any_category_can_be_limited(category: str, limit: int, passed: bool) -> None:
    verdict = only(verdicts(Settings(limits={category: limit}), rank_report(at_peak={category: 100})))
    assert (verdict.name, verdict.passed) == (f"limits[{category}]", passed)


# -- budget


def trained(n: int, per_n: float = 4.0, rank: int = 0) -> tuple[RankReport, Budget]:
    """A rank that holds `per_n` times `n` bytes of model states."""
    states = {"parameters": n, "gradients": n, "optimizer_state": int(per_n * n) - 2 * n}
    return rank_report(rank, at_peak=states), budget(n, int(per_n * n))


def test_model_states_at_the_budget_pass() -> None:
    report, its_budget = trained(GIB)
    assert only(verdicts(Settings(budget=4.0), report, budgets=[its_budget])) == Verdict(
        "budget", True, "model states 4.000 GiB = 4N of 4N (N = 1.000 GiB)", 4 * GIB, 4 * GIB
    )


def test_one_byte_over_the_budget_fails() -> None:
    report, _ = trained(GIB)
    found = verdicts(Settings(budget=4.0), report, budgets=[budget(GIB, 4 * GIB + 1)])
    assert only(found) == Verdict(
        "budget",
        False,
        "model states 4,294,967,297 B = 4N, over the budget of 4N = 4,294,967,296 B by 1 B\n(N = 1.000 GiB)",
        4 * GIB,
        4 * GIB + 1,
    )


def test_the_budget_names_the_shards_and_leaves_frozen_parameters_out_of_n() -> None:
    """8 GiB of trainable parameters over 8 ranks, and half a GiB of frozen ones on each: 4 x 1 + 0.5."""
    report, _ = trained(GIB)
    of_rank = {"n_bytes": 8 * GIB, "frozen_bytes": GIB // 2, "shards": 8}
    assert only(verdicts(Settings(budget=4.0), report, budgets=[budget(GIB, 9 * GIB // 2, **of_rank)])) == Verdict(
        "budget",
        True,
        "model states 4.500 GiB = 4N of 4N (N = 8.000 GiB over 8 ranks)",
        9 * GIB // 2,
        9 * GIB // 2,
    )
    assert only(verdicts(Settings(budget=4.5), report, budgets=[budget(GIB, 11 * GIB // 2, **of_rank)])) == Verdict(
        "budget",
        False,
        "model states 5.500 GiB = 5N, over the budget of 4.5N over 8 ranks = 5.000 GiB by 512.0 MiB\n"
        "(N = 8.000 GiB over 8 ranks)",
        5 * GIB,
        11 * GIB // 2,
    )


def test_the_budget_holds_the_rank_with_the_most_model_states() -> None:
    reports, budgets = zip(trained(GIB, 4.0, rank=0), trained(GIB, 5.0, rank=1), trained(GIB, 3.0, rank=2), strict=True)
    verdict = only(verdicts(Settings(budget=4.0), *reports, budgets=budgets))
    assert (verdict.passed, verdict.value_bytes) == (False, 5 * GIB)


def test_a_budget_of_no_parameters() -> None:
    verdict = only(verdicts(Settings(budget=4.0), rank_report(at_peak={"inputs": 1})))
    assert verdict == Verdict("budget", False, "4N of what? No trainable parameter was seen on the GPU.")


def test_a_budget_without_gradients_says_nothing() -> None:
    report = rank_report(at_peak={"parameters": GIB})
    verdict = only(verdicts(Settings(budget=4.5), report, budgets=[budget(GIB, GIB)]))
    assert verdict == Verdict(
        "budget",
        False,
        "no gradients were seen: no step called backward, or nothing that it reached is a parameter.\n"
        "Model states without gradients say nothing about 4.5N.",
    )


# -- baseline

REPORT = {"parameters": 1024, "activations": 2048}  # a peak of 1024 + 2048 = 3072


def compared(report: RankReport, stored: Baseline | None, **settings: Any) -> list[Verdict]:
    return verdicts(Settings(**{"tolerance": EXACT, **settings}), report, stored=stored)


def test_the_same_figures_pass() -> None:
    assert compared(rank_report(at_peak=REPORT), baseline(3072, REPORT)) == [
        Verdict("baseline", True, "peak 3.0 KiB, was 3.0 KiB", 3072, 3072)
    ]


@pytest.mark.parametrize("wanted", [None, False])
def test_a_missing_baseline_that_is_not_required_gives_no_verdict(wanted: bool | None) -> None:
    assert compared(rank_report(at_peak=REPORT), None, baseline=wanted) == []


def test_a_missing_baseline_that_is_required_fails_with_the_command() -> None:
    assert compared(rank_report(at_peak=REPORT), None, baseline=True) == [
        Verdict("baseline", False, f"no baseline is stored for this test here. Record one:\n  {HOW}")
    ]


def test_switched_off_a_baseline_is_never_compared() -> None:
    assert compared(rank_report(at_peak=REPORT), baseline(1), baseline=False) == []


@pytest.mark.parametrize("stored", [None, baseline(1)])
def test_while_baselines_are_updated_they_are_not_compared(stored: Baseline | None) -> None:
    found = verdicts(Settings(baseline=True), rank_report(at_peak=REPORT), stored=stored, compare=False)
    assert found == []


def test_growth_names_what_grew_by_how_much_and_where() -> None:
    was = {"parameters": 1024, "activations": 1024, "inputs": 512}  # the peak: 1024 + 1024 + 512 = 2560
    assert compared(rank_report(at_peak=REPORT), baseline(2560, was)) == [
        Verdict(
            "baseline",
            False,
            "grew beyond the baseline\n"
            "peak 2.5 KiB -> 3.0 KiB: +512 B (tolerance exact)\n"
            "activations 1.0 KiB -> 2.0 KiB: +1.0 KiB (tolerance exact)\n"
            "inputs 512 B -> 0 B: -512 B (tolerance exact)\n"
            "at step 1, phase backward, rank 0 (worst of 1 measured)\n"
            f"To accept: {HOW}",
            2560,
            3072,
        )
    ]


def test_an_improvement_asks_to_be_recorded() -> None:
    was = {"parameters": 1024, "activations": 4096}
    assert compared(rank_report(at_peak=REPORT), baseline(5120, was)) == [
        Verdict(
            "baseline",
            False,
            "fell below the baseline: record it, so that it cannot creep back\n"
            "peak 5.0 KiB -> 3.0 KiB: -2.0 KiB (tolerance exact)\n"
            "activations 4.0 KiB -> 2.0 KiB: -2.0 KiB (tolerance exact)\n"
            "at step 1, phase backward, rank 0 (worst of 1 measured)\n"
            f"To accept: {HOW}",
            5120,
            3072,
        )
    ]


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("by", [1, -1])
def test_one_byte_in_any_category_fails_an_exact_comparison(category: str, by: int) -> None:
    """The peak is the same: only the category's own peak moved."""
    report = rank_report(at_peak=REPORT, category_peaks={category: 5000 + by})
    verdict = only(compared(report, baseline(3072, {**REPORT, category: 5000})))
    assert not verdict.passed
    head = "grew" if by > 0 else "fell"
    assert verdict.message.startswith(head)
    assert f"\n{category} 5,000 B -> {5000 + by:,} B: {by:+} B (tolerance exact)\n" in verdict.message
    assert "\npeak" not in verdict.message


@pytest.mark.parametrize("category", ["total", "activations", "parameters"])
@pytest.mark.parametrize(("moved", "passed"), [(100, True), (-100, True), (101, False), (-101, False)])
def test_the_tolerance_of_a_category_is_its_own(category: str, moved: int, passed: bool) -> None:
    tolerance = Tolerances(default=Tolerance(), by_category={category: Tolerance(nbytes=100)})
    was = {"parameters": 1024, "activations": 2048}
    now = {**was, category: was[category] + moved} if category != "total" else was
    report = rank_report(
        at_peak={"other": 3072 + (moved if category == "total" else 0)}, category_peaks={**now, "other": 0}
    )
    verdict = only(compared(report, baseline(3072, was), tolerance=tolerance))
    assert verdict.passed is passed
    assert ("(tolerance 100 B)" in verdict.message) is not passed


def test_by_default_model_states_are_exact_and_the_rest_may_move_by_two_percent() -> None:
    was = {"parameters": 1000, "activations": 1000}
    within = rank_report(at_peak={"parameters": 1000, "activations": 1020})
    beyond = rank_report(at_peak={"parameters": 1001, "activations": 1021})
    assert only(compared(within, baseline(2000, was), tolerance=Tolerances())).passed
    assert only(compared(beyond, baseline(2000, was), tolerance=Tolerances())).message.splitlines()[:3] == [
        "grew beyond the baseline",  # the peak may move by 40: it moved by 22
        "parameters 1000 B -> 1001 B: +1 B (tolerance exact)",
        "activations 1000 B -> 1021 B: +21 B (tolerance 2%)",
    ]


def test_a_failure_names_other_versions_of_torch() -> None:
    stored = baseline(
        1, versions={"torch": "2.12.0", "cuda": "12.8", "driver": "570"}, current={"torch": "2.13.0", "cuda": "12.8"}
    )
    lines = only(compared(rank_report(at_peak=REPORT), stored)).message.splitlines()
    assert "recorded with other versions: driver 570 (now absent), torch 2.12.0 (now 2.13.0)" in lines


@pytest.mark.parametrize("current", [{"torch": "2.12.0"}, {}])
def test_the_same_versions_are_not_named(current: dict[str, str]) -> None:
    stored = baseline(1, versions={"torch": "2.12.0"}, current=current)
    assert "versions" not in only(compared(rank_report(at_peak=REPORT), stored)).message


@pytest.mark.parametrize(("stored", "asked"), [("requested", "allocated"), ("allocated", "requested")])
def test_a_baseline_of_another_metric_is_not_compared(stored: str, asked: str) -> None:
    found = compared(rank_report(at_peak=REPORT), baseline(3072, REPORT, metric=stored), metric=asked)
    assert found == [
        Verdict(
            "baseline",
            False,
            f"the baseline holds the {stored} peak, the test asks for {asked}. Record it anew:\n  {HOW}",
        )
    ]


@pytest.mark.parametrize(("peak", "passed"), [(3000, True), (2999, False)])
def test_a_baseline_of_requested_bytes(peak: int, passed: bool) -> None:
    report = rank_report(at_peak=REPORT, requested=3000)
    verdict = only(compared(report, baseline(peak, REPORT, metric="requested"), metric="requested"))
    assert (verdict.passed, verdict.limit_bytes, verdict.value_bytes) == (passed, peak, 3000)


def test_the_worst_rank_is_compared() -> None:
    reports = [rank_report(rank, at_peak={"inputs": nbytes}) for rank, nbytes in ((0, 100), (7, 300), (2, 200))]
    verdict = only(verdicts(Settings(tolerance=EXACT), *reports, stored=baseline(200, {"inputs": 200})))
    assert verdict.message.splitlines()[1:4] == [
        "peak 200 B -> 300 B: +100 B (tolerance exact)",
        "inputs 200 B -> 300 B: +100 B (tolerance exact)",
        "at step 1, phase backward, rank 7 (worst of 3 measured)",
    ]


# -- several at once


def test_every_check_gives_its_verdict_whatever_the_others_say() -> None:
    report, _ = trained(GIB, 5.0)  # a peak of 5 GiB
    settings = Settings(max_bytes=5 * GIB, limits={"gradients": KIB, "inputs": 0}, budget=4.0, tolerance=EXACT)
    found = verdicts(settings, report, budgets=[budget(GIB, 5 * GIB)], stored=baseline(GIB))
    assert [(verdict.name, verdict.passed) for verdict in found] == [
        ("max", True),
        ("limits[gradients]", False),
        ("limits[inputs]", True),
        ("budget", False),
        ("baseline", False),
    ]


def test_a_verdict_as_json() -> None:
    assert Verdict("max", False, "too much", 1, 2).to_json() == {
        "name": "max",
        "passed": False,
        "message": "too much",
        "limit_bytes": 1,
        "value_bytes": 2,
    }
