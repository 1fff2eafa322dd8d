"""Reports, budgets and results written by hand: what a measurement would bring, without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gpumem.baselines import Baseline, Environment
from pytest_gpumem.budget import Budget, Term
from pytest_gpumem.categories import CATEGORIES, MODEL_STATES
from pytest_gpumem.report import RankReport
from pytest_gpumem.results import RankMeasurement, TestResult


def sizes(**categories: int) -> dict[str, int]:
    """Bytes by category, 0 where not named."""
    return {**dict.fromkeys(CATEGORIES, 0), **categories}


def rank_report(
    rank: int = 0,
    at_peak: Mapping[str, int] | None = None,
    category_peaks: Mapping[str, int] | None = None,
    model_states: Mapping[str, int] | None = None,
    requested: int | None = None,
    **more: Any,
) -> RankReport:
    """A report whose peak is the sum of `at_peak`. Category peaks are the same unless given; requested too."""
    composition = sizes(**(at_peak or {}))
    peaks = {**composition, **(category_peaks or {})}
    allocated = sum(composition.values())
    states = {name: composition[name] for name in MODEL_STATES} if model_states is None else {}
    return RankReport(
        rank=rank,
        peak_bytes={
            "requested": allocated if requested is None else requested,
            "allocated": allocated,
            "active": None,
            "reserved": None,
        },
        at_peak=composition,
        category_peaks=peaks,
        model_states={**dict.fromkeys(MODEL_STATES, 0), **states, **(model_states or {})},
        category_requested_peaks=dict(peaks),
        **{"peak_phase": "backward", "peak_step": 1, "optimizer_temporaries": 0, "allocations": 5, **more},
    )


def budget(n_local: int, measured: int, **more: Any) -> Budget:
    """A budget of AdamW over one rank, unless said otherwise."""
    return Budget(
        **{
            "n_bytes": n_local,
            "n_local": n_local,
            "frozen_bytes": 0,
            "counter_bytes": 0,
            "padding_bytes": 0,
            "shards": 1,
            "optimizer": "AdamW",
            "per_n": 4.0,
            "measured_bytes": measured,
            "terms": (),
            **more,
        }
    )


def term(name: str, expected: int | None, measured: int, in_budget: bool = False, note: str = "") -> Term:
    return Term(name, expected, measured, in_budget, note)


def baseline(peak: int, categories: Mapping[str, int] | None = None, **more: Any) -> Baseline:
    return Baseline(peak, dict(categories or {}), dict(categories or {}), **more)


def result(
    reports: Sequence[RankReport],
    budgets: Sequence[Budget] | None = None,
    *,
    nodeid: str = "tests/test_a.py::test_a",
    environment: Environment | None = None,
    assumptions: tuple[str, ...] = (),
    **more: Any,
) -> TestResult:
    environment = environment or Environment("virtual", "A100-40GB", 1, "single")
    of_ranks = budgets or [budget(0, 0)] * len(reports)
    ranks = [
        RankMeasurement(report, its_budget, environment.strategy, assumptions)
        for report, its_budget in zip(reports, of_ranks, strict=True)
    ]
    return TestResult(nodeid, environment, ranks, **more)
