"""One test's result, as it travels from the process that ran it to the session: plain data both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpumem.baselines import Baseline, Environment
from pytest_gpumem.budget import Budget
from pytest_gpumem.checks import Verdict
from pytest_gpumem.report import RankReport, worst


@dataclass
class RankMeasurement:
    """What one rank brings home: its figures, its budget, and what they rest on."""

    report: RankReport
    budget: Budget
    strategy: str
    assumptions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "report": self.report.to_json(),
            "budget": self.budget.to_json(),
            "strategy": self.strategy,
            "assumptions": list(self.assumptions),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankMeasurement:
        return cls(
            RankReport.from_json(data["report"]),
            Budget.from_json(data["budget"]),
            data["strategy"],
            tuple(data["assumptions"]),
        )


@dataclass
class TestResult:
    """Everything that was measured and judged in one test. `budget_text` is the expression asked for ("4N") or "".

    `versions` are those of the software that the figures may depend on; `updates` says whether an update may store them.
    """

    __test__ = False  # pytest would take the class for a test

    nodeid: str
    environment: Environment
    ranks: list[RankMeasurement]
    verdicts: list[Verdict] = field(default_factory=list)
    baseline: Baseline | None = None
    metric: str = "allocated"
    budget_text: str = ""
    budget_limit: int | None = None
    max_bytes: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    outcome: str = "passed"
    updates: bool = True

    @property
    def worst(self) -> RankReport:
        return worst(rank.report for rank in self.ranks)

    @property
    def budget(self) -> Budget:
        return max((rank.budget for rank in self.ranks), key=lambda budget: budget.measured_bytes)

    @property
    def assumptions(self) -> list[str]:
        return sorted({assumption for rank in self.ranks for assumption in rank.assumptions})

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.passed]

    def new_baseline(self, allocator: str) -> Baseline:
        """The figures that an update would store."""
        report = self.worst
        return Baseline(
            peak=report.peak_bytes[self.metric] or 0,
            categories=dict(report.category_peaks),
            at_peak=dict(report.at_peak),
            metric=self.metric,
            allocator=allocator,
            versions=dict(self.versions),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "nodeid": self.nodeid,
            "environment": vars(self.environment),
            "ranks": [rank.to_json() for rank in self.ranks],
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "baseline": self.baseline.to_json() if self.baseline else None,
            "metric": self.metric,
            "budget_text": self.budget_text,
            "budget_limit": self.budget_limit,
            "max_bytes": self.max_bytes,
            "versions": dict(self.versions),
            "outcome": self.outcome,
            "updates": self.updates,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TestResult:
        return cls(
            **{
                **data,
                "environment": Environment(**data["environment"]),
                "ranks": [RankMeasurement.from_json(rank) for rank in data["ranks"]],
                "verdicts": [Verdict(**verdict) for verdict in data["verdicts"]],
                "baseline": Baseline(**data["baseline"]) if data["baseline"] else None,
            }
        )
