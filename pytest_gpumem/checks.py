"""Checks: a rank's figures against what the test asks for. Pure functions of plain data; each gives verdicts.

A verdict's message is for someone who reads a CI log on a phone: what was asked, what was seen, by how much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pytest_gpumem.baselines import Baseline
from pytest_gpumem.budget import Budget
from pytest_gpumem.categories import CATEGORIES, GRADIENTS
from pytest_gpumem.marker import Settings
from pytest_gpumem.report import RankReport, worst
from pytest_gpumem.units import apart, change, human


@dataclass(frozen=True)
class Verdict:
    """What one check found. Sizes are bytes; None where the check compares no sizes."""

    name: str
    passed: bool
    message: str
    limit_bytes: int | None = None
    value_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """What the checks look at: every rank's report and budget, the worst rank first in mind."""

    reports: Sequence[RankReport]
    budgets: Sequence[Budget]

    @property
    def worst(self) -> RankReport:
        return worst(self.reports)

    @property
    def budget(self) -> Budget:
        """The budget of the rank that holds the most model states."""
        return max(self.budgets, key=lambda budget: budget.measured_bytes)


def run_checks(
    settings: Settings, measured: Measured, baseline: Baseline | None, compare: bool, how: str
) -> list[Verdict]:
    """All verdicts. `baseline` is the stored one, if any; `compare` is false while baselines are being updated.

    `how` is the command that records or accepts the figures.
    """
    if not any(report.allocations or report.out_of_memory for report in measured.reports):
        return [_nothing()]
    verdicts = [*_limit(settings, measured), *_limits(settings, measured), *_budget(settings, measured)]
    if compare and settings.baseline is not False:
        verdicts += _baseline(settings, measured, baseline, how)
    return verdicts


def _nothing() -> Verdict:
    return Verdict(
        "measured",
        False,
        "the test put nothing on the GPU, so it measured nothing. The usual cause: the model and the batch stayed on the "
        'CPU. Move them with .to(gpumem.device) or .to("cuda"), or use gpumem.train().',
    )


def instant_of_peak(report: RankReport, ranks: int) -> str:
    """The instant of a rank's peak: "at step 1, phase backward, rank 0 (worst of 8 measured)"."""
    step = f"at step {report.peak_step}" if report.peak_step is not None else "outside all steps"
    return f"{step}, phase {report.peak_phase}, rank {report.rank} (worst of {ranks} measured)"


def value_of(report: RankReport, metric: str) -> int:
    return report.peak_bytes[metric] or 0


def _limit(settings: Settings, measured: Measured) -> Iterator[Verdict]:
    limit = settings.max_bytes
    if limit is None:
        return
    report = max(measured.reports, key=lambda r: (value_of(r, settings.metric), -r.rank))
    value = value_of(report, settings.metric)
    if value <= limit:
        yield Verdict("max", True, f"peak {human(value)} of {human(limit)}", limit, value)
        return
    peak, most = apart(value, limit)
    metric = "" if settings.metric == "allocated" else f" ({settings.metric})"
    yield Verdict(
        "max",
        False,
        f"peak{metric} {peak} is over the limit of {most} by {human(value - limit)},\n"
        f"{instant_of_peak(report, len(measured.reports))}",
        limit,
        value,
    )


def _limits(settings: Settings, measured: Measured) -> Iterator[Verdict]:
    for category in CATEGORIES:
        if category not in settings.limits:
            continue
        limit = settings.limits[category]
        report = max(measured.reports, key=lambda r: (r.category_peaks[category], -r.rank))
        value = report.category_peaks[category]
        name = f"limits[{category}]"
        if value <= limit:
            yield Verdict(name, True, f"{category} {human(value)} of {human(limit)}", limit, value)
        else:
            peak, most = apart(value, limit)
            yield Verdict(
                name,
                False,
                f"{category} peak at {peak}, over the limit of {most} by {human(value - limit)},\n"
                f"on rank {report.rank} (worst of {len(measured.reports)} measured)",
                limit,
                value,
            )


def _budget(settings: Settings, measured: Measured) -> Iterator[Verdict]:
    if settings.budget is None:
        return
    budget = measured.budget
    expression = settings.budget_text
    if not budget.n_local:
        yield Verdict("budget", False, f"{expression} of what? No trainable parameter was seen on the GPU.")
        return
    if not measured.worst.model_states[GRADIENTS]:
        yield Verdict(
            "budget",
            False,
            "no gradients were seen: no step called backward, or nothing that it reached is a parameter.\n"
            f"Model states without gradients say nothing about {expression}.",
        )
        return
    if not budget.optimizer:
        yield Verdict(
            "budget",
            False,
            "no optimizer stepped, so its state was not there to be measured: call step() of a torch.optim.Optimizer.\n"
            f"Model states without optimizer state say nothing about {expression}.",
        )
        return
    limit, value = budget.limit(settings.budget), budget.measured_bytes
    share = f" over {budget.shards} ranks" if budget.shards > 1 else ""
    unit = f"N = {human(budget.n_bytes)}{share}"
    ran = f"{(value - budget.beside_n) / budget.n_local:.4g}N"
    if value <= limit:
        yield Verdict("budget", True, f"model states {human(value)} = {ran} of {expression} ({unit})", limit, value)
        return
    states, most = apart(value, limit)
    yield Verdict(
        "budget",
        False,
        f"model states {states} = {ran}, over the budget of {expression}{share} = {most} "
        f"by {human(value - limit)}\n({unit})",
        limit,
        value,
    )


def _baseline(settings: Settings, measured: Measured, baseline: Baseline | None, how: str) -> Iterator[Verdict]:
    if baseline is None:
        if settings.baseline:
            yield Verdict("baseline", False, f"no baseline is stored for this test here. Record one:\n  {how}")
        return
    report = measured.worst
    metric = settings.metric
    if baseline.metric != metric:
        yield Verdict(
            "baseline",
            False,
            f"the baseline holds the {baseline.metric} peak, the test asks for {metric}. Record it anew:\n  {how}",
        )
        return
    value = value_of(report, metric)
    off = [
        (name, was, now)
        for name, was, now in (
            ("total", baseline.peak, value),
            *((c, baseline.categories.get(c, 0), report.category_peaks[c]) for c in CATEGORIES),
        )
        if not settings.tolerance.of(name).allows(was, now)
    ]
    if not off:
        yield Verdict("baseline", True, f"peak {human(value)}, was {human(baseline.peak)}", baseline.peak, value)
        return
    grew = any(now > was for _, was, now in off)
    lines = [
        f"{'peak' if name == 'total' else name} {' -> '.join(apart(was, now))}: {change(now - was)} "
        f"(tolerance {settings.tolerance.of(name)})"
        for name, was, now in off
    ]
    head = "grew beyond the baseline" if grew else "fell below the baseline: record it, so that it cannot creep back"
    versions = baseline.differing_versions()
    if versions:
        lines.append("recorded with other versions: " + ", ".join(versions))
    lines.append(instant_of_peak(report, len(measured.reports)))
    lines.append(f"To accept: {how}")
    yield Verdict("baseline", False, head + "\n" + "\n".join(lines), baseline.peak, value)
