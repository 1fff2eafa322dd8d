"""The results file: sizes in whole bytes, every figure where the design says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from figures import budget, rank_report, result, term
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.baselines import Environment
from pytest_gpumem.categories import CATEGORIES
from pytest_gpumem.checks import Verdict
from pytest_gpumem.present import json as json_file
from pytest_gpumem.report import OutOfMemoryReport, PhaseReport, StepReport
from pytest_gpumem.results import TestResult


def whole() -> TestResult:
    """Two ranks of a world of eight; the second holds more."""
    steps = [StepReport(0, {"forward": PhaseReport(300, 200), "backward": PhaseReport(350, 100)}, end=90)]
    oom = OutOfMemoryReport(999, 350, {"activations": 350}, "backward", 0)
    reports = [
        rank_report(0, at_peak={"parameters": 100, "activations": 150}, requested=240),
        rank_report(
            5,
            at_peak={"parameters": 100, "activations": 250},
            category_peaks={"inputs": 30},
            requested=340,
            steps=steps,
            out_of_memory=oom,
        ),
    ]
    terms = (term("parameters", 100, 100, True, "5 B of them frozen"), term("activations", None, 250))
    return result(
        reports,
        [budget(100, 400, n_bytes=800, shards=8), budget(100, 410, n_bytes=800, shards=8, terms=terms)],
        nodeid="tests/test_a.py::test_b[x]",
        environment=Environment("virtual", "A100-40GB", 8, "fsdp"),
        verdicts=[Verdict("max", False, "over", 349, 350), Verdict("measured", True, "so")],
        budget_text="4N",
        budget_limit=400,
        outcome="failed",
        assumptions=("routing is balanced",),
    )


def data_of(*tests: TestResult) -> dict[str, Any]:
    """As a reader of the file gets it."""
    data: dict[str, Any] = json.loads(json.dumps(json_file.results(tests, {"versions": {"torch": "2.13.0"}})))
    return data


def test_the_file_as_a_whole() -> None:
    data = data_of(whole(), result([rank_report()]))
    assert set(data) == {"schema_version", "environment", "tests"}
    assert data["schema_version"] == 1
    assert data["environment"] == {"versions": {"torch": "2.13.0"}}
    assert [test["nodeid"] for test in data["tests"]] == ["tests/test_a.py::test_b[x]", "tests/test_a.py::test_a"]
    assert data_of()["tests"] == []


def test_a_test() -> None:
    (test,) = data_of(whole())["tests"]
    ranks, its_budget = test.pop("ranks"), test.pop("budget")
    assert test == {
        "nodeid": "tests/test_a.py::test_b[x]",
        "outcome": "failed",
        "source": "virtual",
        "gpu": "A100-40GB",
        "strategy": "fsdp",
        "world_size": 8,
        "checks": [
            {"name": "max", "passed": False, "limit_bytes": 349, "value_bytes": 350, "message": "over"},
            {"name": "measured", "passed": True, "limit_bytes": None, "value_bytes": None, "message": "so"},
        ],
        "assumptions": ["routing is balanced"],
    }
    assert its_budget == {  # of the rank that holds the most model states
        "expression": "4N",
        "n_bytes": 800,
        "limit_bytes": 400,
        "measured_bytes": 410,
        "terms": [
            {
                "name": "parameters",
                "expected_bytes": 100,
                "measured_bytes": 100,
                "in_budget": True,
                "note": "5 B of them frozen",
            },
            {"name": "activations", "expected_bytes": None, "measured_bytes": 250, "in_budget": False, "note": ""},
        ],
    }
    assert [rank["rank"] for rank in ranks] == [0, 5]


def test_a_rank() -> None:
    rank = data_of(whole())["tests"][0]["ranks"][1]
    assert rank["peak_bytes"] == {"requested": 340, "allocated": 350, "active": None, "reserved": None}
    assert rank["at_peak"] == {**dict.fromkeys(CATEGORIES, 0), "parameters": 100, "activations": 250}
    assert rank["category_peaks"] == {
        **dict.fromkeys(CATEGORIES, 0),
        "parameters": 100,
        "activations": 250,
        "inputs": 30,
    }
    assert rank["steps"] == [
        {
            "index": 0,
            "phases": {"forward": {"peak": 300, "end": 200}, "backward": {"peak": 350, "end": 100}},
            "end": 90,
        }
    ]
    assert rank["out_of_memory"] == {
        "requested": 999,
        "allocated": 350,
        "composition": {"activations": 350},
        "phase": "backward",
        "step": 0,
    }
    assert (rank["peak_phase"], rank["peak_step"]) == ("backward", 1)
    assert (rank["fragmentation_bytes"], rank["non_torch_bytes"]) == (None, None)


def test_without_a_budget() -> None:
    (test,) = data_of(result([rank_report()]))["tests"]
    assert test["budget"] == {"expression": "", "n_bytes": 0, "limit_bytes": None, "measured_bytes": 0, "terms": []}
    assert test["checks"] == []


def numbers(data: object) -> Iterator[object]:
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list):
        for item in data:
            yield from numbers(item)
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        yield data


figures = st.dictionaries(st.sampled_from(CATEGORIES), st.integers(0, 2**50))


@given(figures, figures)
@settings(deadline=None, max_examples=50)
def test_sizes_are_whole_bytes_and_sum_to_the_peak(one: dict[str, int], other: dict[str, int]) -> None:
    (test,) = data_of(result([rank_report(0, at_peak=one), rank_report(1, at_peak=other)]))["tests"]
    for rank, at_peak in zip(test["ranks"], (one, other), strict=True):
        assert sum(rank["at_peak"].values()) == rank["peak_bytes"]["allocated"] == sum(at_peak.values())
    assert all(type(number) is int for number in numbers(test))


# -- the file on disk


def test_the_file_is_written_in_full(tmp_path: Path) -> None:
    path = tmp_path / "gpumem.json"
    path.write_text("something longer than nothing, from an earlier run")
    json_file.write(path, [whole()], {"versions": {"torch": "2.13.0"}})
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == data_of(whole())
    assert text.startswith('{\n  "schema_version": 1,\n')
    assert text.endswith("}\n")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        json_file.write(tmp_path, [whole()], {})


# -- what JUnit XML shows


def test_properties_are_the_worst_rank_s() -> None:
    assert json_file.properties(whole()) == [
        ("gpumem_source", "virtual"),
        ("gpumem_gpu", "A100-40GB"),
        ("gpumem_strategy", "fsdp"),
        ("gpumem_world_size", 8),
        ("gpumem_peak_requested_bytes", 340),
        ("gpumem_peak_allocated_bytes", 350),
        ("gpumem_parameters_bytes", 100),
        ("gpumem_activations_bytes", 250),
        ("gpumem_inputs_bytes", 30),
    ]
