"""The marker's arguments: what each takes, what it refuses and how it says so, and which layer wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_gpumem.categories import CATEGORIES
from pytest_gpumem.marker import ARGUMENTS, MarkerError, Settings, Tolerances, merge, near_miss, settings_from
from pytest_gpumem.units import Tolerance

MODULE, FUNCTION = "module's marker", "function's marker"


def parsed(**arguments: Any) -> Settings:
    return settings_from([(FUNCTION, arguments)])


def refusal(**arguments: Any) -> str:
    with pytest.raises(MarkerError) as caught:
        parsed(**arguments)
    return str(caught.value)


def test_without_arguments() -> None:
    nothing = settings_from([])
    assert nothing == Settings()
    assert (nothing.max_bytes, nothing.metric, nothing.limits, nothing.budget) == (None, "allocated", {}, None)
    assert (nothing.baseline, nothing.device, nothing.gpu, nothing.strategy) == (None, "auto", "A100-40GB", None)
    assert (nothing.world_size, nothing.ranks, nothing.timeout, nothing.isolate) == (1, (0,), None, True)
    assert nothing.named == frozenset()


# -- each argument


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("max_gb", 40, "max_bytes", 40_000_000_000),
        ("max_gb", 0.5, "max_bytes", 500_000_000),
        ("max_gb", "40", "max_bytes", 40_000_000_000),  # as an ini file gives it
        ("max_gib", 40, "max_bytes", 40 * 1024**3),
        ("max", "40 GiB", "max_bytes", 40 * 1024**3),
        ("max", "40 GB", "max_bytes", 40_000_000_000),
        ("max", 512, "max_bytes", 512),
        ("max", 0, "max_bytes", 0),
        ("metric", "allocated", "metric", "allocated"),
        ("metric", "requested", "metric", "requested"),
        ("limits", {}, "limits", {}),
        ("limits", {"activations": "10 GiB", "gradients": 7}, "limits", {"activations": 10 * 1024**3, "gradients": 7}),
        ("limits", "activations = 1 KiB, gradients=7", "limits", {"activations": 1024, "gradients": 7}),
        ("limits", "\nactivations = 1 KiB\ngradients = 7\n", "limits", {"activations": 1024, "gradients": 7}),
        ("budget", "4N", "budget", 4.0),
        ("budget", " 4.5 N ", "budget", 4.5),
        ("baseline", True, "baseline", True),
        ("baseline", False, "baseline", False),
        ("baseline", "True", "baseline", True),
        ("baseline", "false", "baseline", False),
        ("tolerance", "2%", "tolerance", Tolerances(default=Tolerance(fraction=0.02))),
        ("tolerance", 64, "tolerance", Tolerances(default=Tolerance(nbytes=64))),
        (
            "tolerance",
            {"total": "1%", "activations": 64},
            "tolerance",
            Tolerances(by_category={"total": Tolerance(fraction=0.01), "activations": Tolerance(nbytes=64)}),
        ),
        (
            "tolerance",
            "total = 1%, activations = 64",
            "tolerance",
            Tolerances(by_category={"total": Tolerance(fraction=0.01), "activations": Tolerance(nbytes=64)}),
        ),
        ("device", "auto", "device", "auto"),
        ("device", "cuda", "device", "cuda"),
        ("device", "virtual", "device", "virtual"),
        ("gpu", "A100-80GB", "gpu", "A100-80GB"),
        ("gpu", "nvidia a100 80gb", "gpu", "A100-80GB"),
        ("strategy", "single", "strategy", "single"),
        ("strategy", "ddp", "strategy", "ddp"),
        ("strategy", "fsdp", "strategy", "fsdp"),
        ("world_size", 1, "world_size", 1),
        ("world_size", 8, "world_size", 8),
        ("world_size", " 8", "world_size", 8),
        ("world_size", 2**20, "world_size", 2**20),
        ("timeout", 30, "timeout", 30.0),
        ("timeout", "0.5", "timeout", 0.5),
        ("isolate", False, "isolate", False),
        ("isolate", "TRUE", "isolate", True),
    ],
)
def test_a_good_value(name: str, value: object, field: str, expected: object) -> None:
    settings = parsed(**{name: value})
    assert getattr(settings, field) == expected
    assert type(getattr(settings, field)) is type(expected)
    assert settings.named == {name}


@pytest.mark.parametrize(
    ("name", "value", "because"),
    [
        ("max_gb", "lots", "is not a size"),
        ("max_gb", -1, "is negative"),
        ("max_gb", True, "is not a size"),
        ("max_gib", [40], "is not a size"),
        ("max_gib", float("inf"), "is a number of bytes below 2^63"),
        ("max_gib", 10**400, "is a number of bytes below 2^63"),
        ("max", "40 GiBs", "is not a size"),
        ("metric", "alocated", "did you mean 'allocated'?"),
        ("metric", "xyz", "known: allocated, requested"),
        ("metric", "reserved", "virtual GPUs know 'allocated' and 'requested' bytes only"),
        ("metric", ["allocated"], "did you mean 'allocated'?"),
        ("limits", 40, 'limits is a dict of categories: {"activations": "10 GiB"}'),
        ("limits", [("activations", 7)], "limits is a dict of categories"),
        ("limits", {"activation": 7}, "unknown category 'activation'; did you mean 'activations'?"),
        ("limits", {"xyz": 7}, "unknown category 'xyz'; known: parameters, gradients"),
        ("limits", {7: 7}, "unknown category 7"),
        ("limits", {"total": 7}, "unknown category 'total'"),  # that is what max is for
        ("limits", {"activations": "lots"}, "'lots' is not a size"),
        ("limits", "10 GiB", "unknown category '10 GiB'"),
        ("budget", 4, 'a budget is a number of N, such as "4N"'),
        ("budget", "4", "a budget is a number of N"),
        ("budget", "4n", "a budget is a number of N"),
        ("budget", "N", "a budget is a number of N"),
        ("budget", "-4N", "a budget is a number of N"),
        ("budget", "4N + 1", "a budget is a number of N"),
        ("baseline", "maybe", "write True or False"),
        ("baseline", 1, "write True or False"),
        ("tolerance", "two percent", "is not a tolerance"),
        ("tolerance", -1, "is not a tolerance"),
        ("tolerance", {"totl": "2%"}, "unknown category 'totl'; did you mean 'total'?"),
        ("tolerance", {"total": "much"}, "'much' is not a tolerance"),
        ("tolerance", "total = much", "'much' is not a tolerance"),
        ("device", "gpu", "known: auto, cuda, virtual"),
        ("device", "virtul", "did you mean 'virtual'?"),
        ("gpu", "A100-4GB", "near: A100-40GB"),
        ("gpu", "A100", "A100-40GB"),
        ("gpu", 100, 'the card\'s name is a string, such as "A100-40GB"'),
        ("strategy", "fsdp2", "did you mean 'fsdp'?"),
        ("strategy", "", "known: single, ddp, fsdp"),
        ("world_size", 0, "a world has 1 rank or more"),
        ("world_size", -8, "a world has 1 rank or more"),
        ("world_size", 2**20 + 1, "a world has at most 1048576 ranks"),
        ("world_size", 8.0, "write a whole number"),
        ("world_size", "eight", "write a whole number"),
        ("world_size", True, "write a whole number"),
        ("ranks", [], "at least one rank"),
        ("ranks", "", "at least one rank"),
        ("ranks", -1, "ranks count from 0"),
        ("ranks", [0, -1], "ranks count from 0"),
        ("ranks", [0, 0], "a rank is named twice"),
        ("ranks", "every", "write a whole number"),
        ("ranks", [0.0], "write a whole number"),
        ("timeout", 0, "a number of seconds above 0"),
        ("timeout", -1, "a number of seconds above 0"),
        ("timeout", float("nan"), "a number of seconds above 0"),
        ("timeout", float("inf"), "a number of seconds above 0"),
        ("timeout", True, "a number of seconds above 0"),
        ("timeout", "soon", "soon"),
        ("isolate", "no", "write True or False"),
        ("isolate", 0, "write True or False"),
    ],
)
def test_a_bad_value_is_refused_with_its_place_its_name_and_the_reason(name: str, value: object, because: str) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{FUNCTION}: {name}={value!r}: ")
    assert because in message


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("max_gbs", "max_gb"),
        ("maxgib", "max_gib"),
        ("worldsize", "world_size"),
        ("budgets", "budget"),
        ("tolerence", "tolerance"),
        ("stratgy", "strategy"),
        ("rank", "ranks"),
    ],
)
def test_an_unknown_argument_has_a_near_miss(written: str, meant: str) -> None:
    assert refusal(**{written: 1}) == f"{FUNCTION}: unknown argument {written!r}; did you mean {meant!r}?"


def test_an_unknown_argument_that_is_near_nothing_gets_the_list() -> None:
    assert refusal(xyz=1) == f"{FUNCTION}: unknown argument 'xyz'; known: {', '.join(ARGUMENTS)}"


def test_near_miss() -> None:
    assert near_miss("aplha", ["beta", "alpha"]) == "did you mean 'alpha'?"
    assert near_miss("zzz", ["beta", "alpha"]) == "known: beta, alpha"


# -- layers


def test_a_nearer_layer_overrides_argument_by_argument() -> None:
    settings = settings_from(
        [
            ("ini", {"world_size": "2", "gpu": "A100-80GB", "timeout": "9"}),
            (MODULE, {"world_size": 4, "budget": "5N", "limits": {"gradients": 1}}),
            (FUNCTION, {"world_size": 8, "limits": {"activations": 2}}),
        ]
    )
    assert (settings.world_size, settings.gpu, settings.timeout, settings.budget) == (8, "A100-80GB", 9.0, 5.0)
    assert settings.limits == {"activations": 2}  # one argument: it is replaced, not mixed
    assert settings.named == {"world_size", "gpu", "timeout", "budget", "limits"}


def test_merge_remembers_where_each_value_was_said() -> None:
    layers: list[tuple[str, Mapping[str, Any]]] = [
        (MODULE, {"metric": "requested", "budget": "4N"}),
        (FUNCTION, {"budget": "5N"}),
    ]
    assert merge(layers) == {"metric": ("requested", MODULE), "budget": ("5N", FUNCTION)}


@pytest.mark.parametrize("far", ["max", "max_gb", "max_gib"])
@pytest.mark.parametrize(("near", "nbytes"), [("max", 3), ("max_gb", 3_000_000_000), ("max_gib", 3 * 1024**3)])
def test_the_three_maxima_are_one_argument(far: str, near: str, nbytes: int) -> None:
    settings = settings_from([(MODULE, {far: 1, "budget": "4N"}), (FUNCTION, {near: 3})])
    assert settings.max_bytes == nbytes
    assert settings.named == {near, "budget"}


def test_a_layer_without_a_maximum_leaves_the_farther_one() -> None:
    assert settings_from([(MODULE, {"max_gib": 1}), (FUNCTION, {"budget": "4N"})]).max_bytes == 1024**3


@pytest.mark.parametrize(
    "together", [("max", "max_gb"), ("max", "max_gib"), ("max_gb", "max_gib"), ("max", "max_gb", "max_gib")]
)
def test_two_maxima_in_one_layer_are_refused(together: tuple[str, ...]) -> None:
    message = refusal(**dict.fromkeys(together, 1))
    assert message == f"{FUNCTION}: {' and '.join(together)} are given together; write one of them"


def test_a_nearer_none_takes_back_what_a_farther_layer_said() -> None:
    far = {"max_gib": 1, "budget": "4N", "gpu": "T4", "baseline": True}
    settings = settings_from([(MODULE, far), (FUNCTION, {"max_gb": None, "gpu": None, "baseline": None})])
    assert settings == settings_from([(FUNCTION, {"budget": "4N"})])


def test_a_bad_value_is_blamed_on_its_own_layer() -> None:
    with pytest.raises(MarkerError, match=r"^module's marker: budget=4: "):
        settings_from([(MODULE, {"budget": 4}), (FUNCTION, {"max": 1})])


def test_a_bad_value_that_is_overridden_is_not_looked_at() -> None:
    assert settings_from([(MODULE, {"budget": 4}), (FUNCTION, {"budget": "4N"})]).budget == 4.0


# -- worlds


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (0, (0,)),
        (3, (3,)),
        ("3", (3,)),
        ([0, 3], (0, 3)),
        ((3, 1), (3, 1)),
        (range(1, 3), (1, 2)),
        ("0, 3", (0, 3)),
        ("0 1\n2", (0, 1, 2)),
        ("all", (0, 1, 2, 3)),
        (" all ", (0, 1, 2, 3)),
    ],
)
def test_ranks_of_a_world_of_four(ranks: object, expected: tuple[int, ...]) -> None:
    assert parsed(world_size=4, ranks=ranks).ranks == expected


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_last_rank_is_in_the_world_and_the_next_is_not(world_size: int) -> None:
    assert parsed(world_size=world_size, ranks=[world_size - 1]).ranks == (world_size - 1,)
    assert refusal(world_size=world_size, ranks=[0, world_size]) == (
        f"{FUNCTION}: ranks=[0, {world_size}]: rank {world_size} is not in a world of {world_size}; "
        f"ranks go from 0 to {world_size - 1}"
    )


def test_ranks_meet_the_world_size_of_another_layer() -> None:
    settings = settings_from([("ini", {"ranks": "all"}), (FUNCTION, {"world_size": 2})])
    assert settings.ranks == (0, 1)
    with pytest.raises(MarkerError, match=r"^ini: ranks='1': rank 1 is not in a world of 1"):
        settings_from([("ini", {"ranks": "1"}), (FUNCTION, {"budget": "4N"})])


def test_single_is_a_world_of_one() -> None:
    assert parsed(strategy="single", world_size=1).strategy == "single"
    with pytest.raises(MarkerError) as caught:
        settings_from([(MODULE, {"strategy": "single"}), (FUNCTION, {"world_size": 2})])
    assert str(caught.value) == (
        f"{MODULE}: strategy='single' with world_size=2: one of them is wrong; "
        'a world of several ranks needs "ddp" or "fsdp"'
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_other_strategies_go_with_any_world(strategy: str) -> None:
    for world_size in (1, 8):
        assert parsed(strategy=strategy, world_size=world_size).world_size == world_size


# -- what settings and tolerances say


@pytest.mark.parametrize(("budget", "text"), [(None, ""), (4.0, "4N"), (4.5, "4.5N"), (0.0, "0N")])
def test_the_budget_in_words(budget: float | None, text: str) -> None:
    assert Settings(budget=budget).budget_text == text


@pytest.mark.parametrize("category", ["total", *CATEGORIES])
def test_the_tolerance_of_a_category(category: str) -> None:
    exact = category in {"parameters", "gradients", "optimizer_state"}
    by_default = Tolerance() if exact else Tolerance(fraction=0.02)
    one, all_of_them = Tolerance(nbytes=7), Tolerance(fraction=0.5)
    assert Tolerances().of(category) == by_default
    assert Tolerances(default=all_of_them).of(category) == all_of_them
    assert Tolerances(by_category={category: one}).of(category) == one
    assert Tolerances(all_of_them, {category: one}).of(category) == one
    assert Tolerances(by_category={"none of these": one}).of(category) == by_default
