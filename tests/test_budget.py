"""Model states by rule, in units of N, and the terms beyond them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from figures import budget, rank_report

from pytest_gpumem.budget import Budget, Term, budget_of
from pytest_gpumem.trace import MemoryTrace, OptimizerInfo, ParameterInfo

N = 1000


def optimizer(name: str, **options: object) -> OptimizerInfo:
    return OptimizerInfo(name, tuple(options.items()))


def trace_of(*optimizers: OptimizerInfo, parameters: tuple[ParameterInfo, ...] = (), **more: Any) -> MemoryTrace:
    return MemoryTrace(
        "virtual", "A100-40GB", optimizers=optimizers, parameters=parameters or (ParameterInfo(N, N),), **more
    )


def budget_by_rule(*optimizers: OptimizerInfo, parameters: tuple[ParameterInfo, ...] = (), **more: Any) -> Budget:
    return budget_of(trace_of(*optimizers, parameters=parameters, **more), rank_report())


def term(found: Budget, name: str) -> Term:
    (one,) = (each for each in found.terms if each.name == name)
    return one


# -- how many N


@pytest.mark.parametrize(
    ("name", "options", "per_n"),
    [
        ("AdamW", {}, 4),
        ("Adam", {}, 4),
        ("AdamW", {"amsgrad": False, "foreach": None, "fused": None}, 4),
        ("AdamW", {"amsgrad": True}, 5),
        ("Adam", {"amsgrad": True}, 5),
        ("NAdam", {}, 4),
        ("RAdam", {}, 4),
        ("Adamax", {}, 4),
        ("Adadelta", {}, 4),
        ("Adagrad", {}, 3),
        ("SGD", {}, 2),
        ("SGD", {"momentum": 0}, 2),
        ("SGD", {"momentum": 0.9}, 3),
        ("RMSprop", {}, 3),
        ("RMSprop", {"momentum": 0.9}, 4),
        ("RMSprop", {"momentum": 0.9, "centered": True}, 5),
    ],
)
def test_parameters_gradients_and_the_optimizer_s_own(name: str, options: dict[str, object], per_n: int) -> None:
    found = budget_by_rule(optimizer(name, **options))
    assert found.per_n == per_n
    assert found.optimizer == name
    assert [(t.name, t.expected) for t in found.terms if t.in_budget] == [
        ("parameters", 1000),
        ("gradients", 1000),
        ("optimizer state", (per_n - 2) * 1000),
    ]


@pytest.mark.parametrize(
    ("optimizers", "names"),
    [
        ((), ""),
        ((optimizer("Muon"),), "Muon"),
        ((optimizer("AdamW"), optimizer("SGD")), "AdamW + SGD"),
        ((optimizer("AdamW"), optimizer("Muon")), "AdamW + Muon"),
        ((optimizer("SGD"), optimizer("SGD", momentum=0.9)), "SGD + SGD"),
    ],
)
def test_no_rule_tells(optimizers: tuple[OptimizerInfo, ...], names: str) -> None:
    found = budget_by_rule(*optimizers)
    assert found.per_n is None
    assert found.optimizer == names
    state = term(found, "optimizer state")
    assert (state.expected, state.note) == (None, names or "no optimizer stepped")
    assert term(found, "optimizer temporaries").expected is None


def test_two_optimizers_with_one_rule() -> None:
    """One a half of the parameters: together they keep what one over all of them would."""
    found = budget_by_rule(optimizer("AdamW"), optimizer("AdamW"))
    assert found.per_n == 4
    assert term(found, "optimizer state").expected == 2000
    assert term(found, "optimizer temporaries").expected is None


@pytest.mark.parametrize(
    ("name", "options", "scalars"),
    [
        ("AdamW", {"fused": True}, 1),
        ("Adam", {"capturable": True}, 1),
        ("AdamW", {"fused": False, "capturable": False}, 0),
        ("NAdam", {"capturable": True}, 2),  # step and mu_product
        ("SGD", {"fused": True, "momentum": 0.9}, 0),
        ("Muon", {"fused": True}, 0),
    ],
)
def test_step_counters_on_the_gpu_come_on_top(name: str, options: dict[str, object], scalars: int) -> None:
    """Three trainable parameters have a float32 each; the frozen one has none."""
    parameters = (*[ParameterInfo(100, 100)] * 3, ParameterInfo(50, 50, trainable=False))
    found = budget_by_rule(optimizer(name, **options), parameters=parameters)
    assert found.counter_bytes == 3 * scalars * 4
    assert found.limit(4) == 4 * 300 + 50 + found.counter_bytes
    state = term(found, "optimizer state")
    if found.per_n is not None:
        assert state.expected == (found.per_n - 2) * 300 + found.counter_bytes
    assert ("of step counters" in state.note) == (scalars > 0)


# -- what N is


def test_frozen_parameters_are_kept_but_are_not_of_n() -> None:
    parameters = (ParameterInfo(600, 600), ParameterInfo(400, 400), ParameterInfo(5000, 5000, trainable=False))
    found = budget_by_rule(optimizer("AdamW"), parameters=parameters)
    assert (found.n_bytes, found.n_local, found.frozen_bytes) == (600 + 400, 600 + 400, 5000)
    assert term(found, "parameters").expected == 1000 + 5000
    assert term(found, "parameters").note == "5,000 B of them frozen"
    assert term(found, "gradients").expected == 1000
    assert term(found, "optimizer state").expected == 2 * 1000
    assert found.limit(4) == 4 * 1000 + 5000


def test_sharded_parameters_with_padding() -> None:
    """Three rows of 100 bytes over two ranks: each keeps two rows, the second one's last row is padding."""
    parameters = (ParameterInfo(300, 200, shards=2), ParameterInfo(800, 400, shards=2))
    found = budget_by_rule(optimizer("AdamW"), parameters=parameters, strategy="fsdp", world_size=2)
    assert (found.n_bytes, found.n_local, found.shards) == (300 + 800, 200 + 400, 2)
    assert found.padding_bytes == 200 - 300 // 2
    assert term(found, "parameters").note == "50 B of padding to equal shards"
    assert term(found, "gradients").expected == 600
    assert term(found, "optimizer state").expected == 2 * 600
    assert found.limit(4) == 4 * 600


def test_frozen_and_padded_together() -> None:
    parameters = (ParameterInfo(800, 400, shards=2), ParameterInfo(3000, 2000, shards=2, trainable=False))
    found = budget_by_rule(optimizer("AdamW"), parameters=parameters)
    assert term(found, "parameters").note == "2,000 B of them frozen; 500 B of padding to equal shards"
    assert (found.frozen_bytes, found.padding_bytes) == (2000, 2000 - 1500)


def test_sharded_beside_whole_parameters() -> None:
    parameters = (ParameterInfo(800, 100, shards=8), ParameterInfo(64, 64))
    found = budget_by_rule(optimizer("SGD"), parameters=parameters)
    assert (found.n_bytes, found.n_local, found.shards, found.padding_bytes) == (864, 164, 8, 0)


def test_mixed_dtypes_count_in_bytes() -> None:
    """100 elements in bfloat16 and 100 in float32."""
    parameters = (ParameterInfo(200, 200, dtype="bfloat16"), ParameterInfo(400, 400, dtype="float32"))
    found = budget_by_rule(optimizer("AdamW"), parameters=parameters)
    assert found.n_bytes == 2 * 100 + 4 * 100
    assert term(found, "optimizer state").expected == 2 * 2 * 100 + 2 * 4 * 100


def test_no_parameters_at_all() -> None:
    found = budget_of(MemoryTrace("virtual", "A100-40GB"), rank_report())
    assert (found.n_bytes, found.n_local, found.frozen_bytes, found.padding_bytes, found.shards) == (0, 0, 0, 0, 1)
    assert found.limit(4) == 0


# -- what was measured


def test_measured_figures_stand_beside_their_rules() -> None:
    report = rank_report(
        at_peak={"activations": 9000},
        category_peaks={"communication": 77, "inputs": 88, "workspace": 99},
        model_states={"parameters": 1000, "gradients": 900, "optimizer_state": 2100},
        optimizer_temporaries=1234,
    )
    found = budget_of(trace_of(optimizer("AdamW")), report)
    assert found.measured_bytes == 1000 + 900 + 2100
    assert [(t.name, t.measured, t.in_budget) for t in found.terms] == [
        ("parameters", 1000, True),
        ("gradients", 900, True),
        ("optimizer state", 2100, True),
        ("optimizer temporaries", 1234, False),
        ("communication", 77, False),
        ("activations", 9000, False),
        ("inputs", 88, False),
        ("workspace", 99, False),
    ]
    assert term(found, "activations").expected is None


# -- terms beyond the model states


@pytest.mark.parametrize(
    ("name", "options", "expected", "note"),
    [
        ("AdamW", {}, 1000, "foreach"),
        ("AdamW", {"foreach": None, "fused": None}, 1000, "foreach"),
        ("Adam", {"foreach": True}, 1000, "foreach"),
        ("AdamW", {"foreach": False}, None, "one parameter at a time"),
        ("AdamW", {"fused": True}, 0, "fused kernel"),
        ("AdamW", {"fused": True, "foreach": False}, 0, "fused kernel"),
        ("SGD", {"foreach": True}, None, ""),
        ("NAdam", {}, None, ""),
    ],
)
def test_optimizer_temporaries(name: str, options: dict[str, object], expected: int | None, note: str) -> None:
    found = term(budget_by_rule(optimizer(name, **options)), "optimizer temporaries")
    assert (found.expected, found.note, found.in_budget) == (expected, note, False)


@pytest.mark.parametrize(
    ("strategy", "units", "measured", "expected"),
    [
        ("ddp", (), 0, [Term("DDP buckets", 1000, 0, False, "none with gradient_as_bucket_view")]),
        ("ddp", (), 1500, [Term("DDP buckets", 1000, 1500, False, "none with gradient_as_bucket_view")]),
        ("fsdp", (7000, 300), 1500, [Term("gathered units", None, 1500, False, "largest unit: 7,000 B")]),
        ("fsdp", (7000, 300), 0, [Term("gathered units", None, 0, False, "largest unit: 7,000 B")]),
        ("fsdp", (), 1500, [Term("communication", None, 1500, False)]),
        ("single", (7000,), 1500, [Term("communication", None, 1500, False)]),
        ("single", (), 0, []),
    ],
)
def test_communication(strategy: str, units: tuple[int, ...], measured: int, expected: list[Term]) -> None:
    report = rank_report(category_peaks={"communication": measured})
    found = budget_of(trace_of(optimizer("SGD"), strategy=strategy, units=units), report)
    assert [t for t in found.terms if t.name in ("DDP buckets", "gathered units", "communication")] == expected


# -- the limit, and JSON


@pytest.mark.parametrize(
    ("expression", "n_local", "frozen", "limit"),
    [
        (4.0, 1000, 0, 4000),
        (4.5, 1000, 0, 4500),
        (4.5, 1001, 0, 4504),  # 4504.5 rounded down
        (4.0, 1000, 123, 4000 + 123),
        (2.3, 100, 0, 230),  # 2.3 * 100 is 229.999... in floating point
        (0.0, 1000, 5, 5),
    ],
)
def test_the_limit_of_a_budget(expression: float, n_local: int, frozen: int, limit: int) -> None:
    assert budget(n_local, 0, frozen_bytes=frozen).limit(expression) == limit


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_json_round_trip(name: str) -> None:
    found = budget_by_rule(optimizer(name), parameters=(ParameterInfo(300, 200, shards=2),))
    assert Budget.from_json(json.loads(json.dumps(found.to_json()))) == found
