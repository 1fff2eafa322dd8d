"""The marker's arguments: parsed, merged and validated into one frozen dataclass.

Nearer markers override farther ones argument by argument (module < class < function < `pytest.param`); ini values lie
below all markers, command-line options above them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpumem.categories import CATEGORIES
from pytest_gpumem.units import GB, GIB, Tolerance, parse_size, parse_tolerance

METRICS = ("allocated", "requested")
DEVICES = ("auto", "cuda", "virtual")
STRATEGIES = ("single", "ddp", "fsdp")
DEFAULT_GPU = "A100-40GB"
MAX_WORLD_SIZE = 1 << 20


class MarkerError(ValueError):
    """An argument of the marker (or its ini or command-line twin) is wrong. The message names the argument."""


@dataclass(frozen=True)
class Tolerances:
    """A tolerance for each category; `total` is for the peak itself."""

    default: Tolerance | None = None
    by_category: Mapping[str, Tolerance] = field(default_factory=dict)

    def of(self, category: str) -> Tolerance:
        """The tolerance of a category, or of "total". Unless said otherwise: exact for model states, 2% for the rest."""
        if category in self.by_category:
            return self.by_category[category]
        if self.default is not None:
            return self.default
        exact = category in ("parameters", "gradients", "optimizer_state")
        return Tolerance() if exact else Tolerance(fraction=0.02)


@dataclass(frozen=True)
class Settings:
    """What one test asks for. Sizes are bytes, `timeout` is seconds; None is "not asked for".

    `named` holds the arguments that somebody wrote, as against defaults.
    """

    max_bytes: int | None = None
    metric: str = "allocated"
    limits: Mapping[str, int] = field(default_factory=dict)
    budget: float | None = None
    baseline: bool | None = None
    tolerance: Tolerances = field(default_factory=Tolerances)
    device: str = "auto"
    gpu: str = DEFAULT_GPU
    strategy: str | None = None
    world_size: int = 1
    ranks: tuple[int, ...] = (0,)
    timeout: float | None = None
    isolate: bool = True
    named: frozenset[str] = frozenset()

    @property
    def budget_text(self) -> str:
        return f"{self.budget:g}N" if self.budget is not None else ""


# Every argument, with the sentence that `pytest --help` and the README show for it.
ARGUMENTS: dict[str, str] = {
    "max_gb": "limit on the peak of the worst rank, in GB (10^9 bytes)",
    "max_gib": "the same in GiB (2^30 bytes)",
    "max": 'the same as a string: "40 GiB"',
    "metric": 'what max holds: "allocated" (default) or "requested"',
    "limits": 'limit on each category\'s own peak: {"activations": "10 GiB"}',
    "budget": 'limit on the model states in units of N, the bytes of the trainable parameters: "4N"',
    "baseline": "True: a missing baseline fails. False: never compare. Left out: compare where one is stored",
    "tolerance": '"2%", "64 MiB" or a dict of these per category',
    "device": '"auto", "cuda" or "virtual"',
    "gpu": 'the card: "A100-40GB"',
    "strategy": '"single", "ddp" or "fsdp"',
    "world_size": "how many ranks",
    "ranks": 'which ranks of a virtual world to play: 0, [0, 7] or "all" (default 0)',
    "timeout": "seconds after which the test fails",
    "isolate": "False runs the test in pytest's own process (for a debugger)",
}


def near_miss(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" or a list of what there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def merge(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, tuple[Any, str]]:
    """Argument -> (value, where it was said), from layers of (where, arguments), the farthest first.

    `max`, `max_gb` and `max_gib` are three ways to say one thing: a nearer one replaces any farther one. A nearer None takes
    back what a farther layer said.
    """
    merged: dict[str, tuple[Any, str]] = {}
    maxima = ("max", "max_gb", "max_gib")
    for where, arguments in layers:
        for name in arguments:
            if name not in ARGUMENTS:
                raise MarkerError(f"{where}: unknown argument {name!r}; {near_miss(name, ARGUMENTS)}")
        said = [name for name in maxima if arguments.get(name) is not None]
        if len(said) > 1:
            raise MarkerError(f"{where}: {' and '.join(said)} are given together; write one of them")
        if any(name in arguments for name in maxima):
            for name in maxima:
                merged.pop(name, None)
        merged.update({name: (value, where) for name, value in arguments.items()})
    return {name: said for name, said in merged.items() if said[0] is not None}


def settings_from(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> Settings:
    """Settings from layers of (where, arguments), the farthest first. Raises MarkerError."""
    merged = merge(layers)
    values: dict[str, Any] = {}
    for name, (value, where) in merged.items():
        try:
            key, parsed = _PARSERS[name](value)
        except (ValueError, TypeError) as error:
            raise MarkerError(f"{where}: {name}={value!r}: {error}") from None
        values[key] = parsed
    world_size = values.get("world_size", 1)
    ranks = values.pop("ranks", (0,))
    where = merged["ranks"][1] if "ranks" in merged else ""
    if ranks == "all":
        ranks = tuple(range(world_size))
    if max(ranks) >= world_size:
        raise MarkerError(
            f"{where}: ranks={merged['ranks'][0]!r}: rank {max(ranks)} is not in a world of {world_size}; "
            f"ranks go from 0 to {world_size - 1}"
        )
    if values.get("strategy") == "single" and world_size > 1:
        raise MarkerError(
            f"{merged['strategy'][1]}: strategy='single' with world_size={world_size}: one of them is wrong; "
            'a world of several ranks needs "ddp" or "fsdp"'
        )
    return Settings(**values, ranks=ranks, named=frozenset(merged))


# -- one parser an argument: value -> (field of Settings, parsed value) ------------------------------------------------


def _max(unit: int) -> Any:
    return lambda value: ("max_bytes", parse_size(value, unit))


def _metric(value: object) -> tuple[str, str]:
    if value in ("active", "reserved"):
        known = " and ".join(repr(metric) for metric in METRICS)
        raise ValueError(f"virtual GPUs know {known} bytes only: they have no model of the allocator's segments yet")
    return _choice("metric", METRICS)(value)


def _choice(field_name: str, known: tuple[str, ...]) -> Callable[[object], tuple[str, str]]:
    def parse(value: object) -> tuple[str, str]:
        if value not in known:
            raise ValueError(near_miss(str(value), known))
        return field_name, str(value)

    return parse


def _limits(value: object) -> tuple[str, dict[str, int]]:
    return "limits", {name: parse_size(size) for name, size in _by_category(value, "limits").items()}


def _tolerance(value: object) -> tuple[str, Tolerances]:
    if isinstance(value, Mapping) or (isinstance(value, str) and "=" in value):
        parsed = {name: parse_tolerance(size) for name, size in _by_category(value, "tolerance", ("total",)).items()}
        return "tolerance", Tolerances(by_category=parsed)
    return "tolerance", Tolerances(default=parse_tolerance(value))


def _by_category(value: object, name: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    if isinstance(value, str):  # from an ini file: "activations = 10 GiB, gradients = 1 GiB"
        pairs = [part.partition("=") for part in re.split(r"[,\n]", value) if part.strip()]
        value = {key.strip(): size.strip() for key, _, size in pairs}
    if not isinstance(value, Mapping):
        raise ValueError(f'{name} is a dict of categories: {{"activations": "10 GiB"}}')
    for category in value:
        if category not in CATEGORIES + more:
            raise ValueError(f"unknown category {category!r}; {near_miss(str(category), CATEGORIES + more)}")
    return dict(value)


def _budget(value: object) -> tuple[str, float]:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*N\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError('a budget is a number of N, such as "4N"')
    return "budget", float(match[1])


def _flag(field_name: str) -> Any:
    def parse(value: object) -> tuple[str, bool]:
        word = str(value).lower() if isinstance(value, (bool, str)) else ""
        if word not in ("true", "false"):
            raise ValueError("write True or False")
        return field_name, word == "true"

    return parse


def _gpu(value: object) -> tuple[str, str]:
    from pytest_gpumem.sources.virtual.cards import find_card  # plain data; not wanted where no test is marked

    if not isinstance(value, str):
        raise ValueError('the card\'s name is a string, such as "A100-40GB"')
    return "gpu", find_card(value).key


def _integer(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip()):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("write a whole number")
    return value


def _world_size(value: object) -> tuple[str, int]:
    number = _integer(value)
    if not 1 <= number <= MAX_WORLD_SIZE:
        raise ValueError("a world has 1 rank or more" if number < 1 else f"a world has at most {MAX_WORLD_SIZE} ranks")
    return "world_size", number


def _ranks(value: object) -> tuple[str, Any]:
    if isinstance(value, str):
        if value.strip() == "all":
            return "ranks", "all"
        value = [part for part in re.split(r"[,\s]+", value) if part]
    numbers = [_integer(item) for item in value] if isinstance(value, (list, tuple, range)) else [_integer(value)]
    if not numbers:
        raise ValueError("at least one rank")
    if min(numbers) < 0:
        raise ValueError("ranks count from 0")
    if len(set(numbers)) < len(numbers):
        raise ValueError("a rank is named twice")
    return "ranks", tuple(numbers)


def _timeout(value: object) -> tuple[str, float]:
    number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
    if not 0 < number < float("inf"):
        raise ValueError("a number of seconds above 0")
    return "timeout", number


_PARSERS: dict[str, Any] = {
    "max_gb": _max(GB),
    "max_gib": _max(GIB),
    "max": _max(1),
    "metric": _metric,
    "limits": _limits,
    "budget": _budget,
    "baseline": _flag("baseline"),
    "tolerance": _tolerance,
    "device": _choice("device", DEVICES),
    "gpu": _gpu,
    "strategy": _choice("strategy", STRATEGIES),
    "world_size": _world_size,
    "ranks": _ranks,
    "timeout": _timeout,
    "isolate": _flag("isolate"),
}
