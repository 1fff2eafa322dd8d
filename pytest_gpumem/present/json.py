"""The results file of `--gpumem-json`: one object, sizes in integer bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gpumem.report import SCHEMA_VERSION
from pytest_gpumem.results import TestResult


def results(tests: Sequence[TestResult], environment: Mapping[str, Any]) -> dict[str, Any]:
    """The whole file as plain data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": dict(environment),
        "tests": [_test(test) for test in tests],
    }


def write(path: Path, tests: Sequence[TestResult], environment: Mapping[str, Any]) -> None:
    """Write the file. Raises OSError."""
    path.write_text(json.dumps(results(tests, environment), indent=2) + "\n", encoding="utf-8")


def _test(test: TestResult) -> dict[str, Any]:
    budget = test.budget
    return {
        "nodeid": test.nodeid,
        "outcome": test.outcome,
        "source": test.environment.source,
        "gpu": test.environment.gpu,
        "strategy": test.environment.strategy,
        "world_size": test.environment.world_size,
        "ranks": [rank.report.to_json() for rank in test.ranks],
        "budget": {
            "expression": test.budget_text,
            "n_bytes": budget.n_bytes,
            "limit_bytes": test.budget_limit,
            "measured_bytes": budget.measured_bytes,
            "terms": [
                {
                    "name": term.name,
                    "expected_bytes": term.expected,
                    "measured_bytes": term.measured,
                    "in_budget": term.in_budget,
                    "note": term.note,
                }
                for term in budget.terms
            ],
        },
        "checks": [verdict.to_json() for verdict in test.verdicts],
        "assumptions": test.assumptions,
    }


def properties(test: TestResult) -> list[tuple[str, object]]:
    """`user_properties` of the test's report, which JUnit XML shows."""
    report = test.worst
    shown: list[tuple[str, object]] = [
        ("gpumem_source", test.environment.source),
        ("gpumem_gpu", test.environment.gpu),
        ("gpumem_strategy", test.environment.strategy),
        ("gpumem_world_size", test.environment.world_size),
    ]
    shown += [(f"gpumem_peak_{name}_bytes", size) for name, size in report.peak_bytes.items() if size is not None]
    shown += [(f"gpumem_{category}_bytes", size) for category, size in report.category_peaks.items() if size]
    return shown
