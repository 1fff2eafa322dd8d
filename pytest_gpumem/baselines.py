"""The store of baselines: one JSON file a test module, read by tests, written once by the session.

`<directory>/<path of the test module>.json`:
`{"schema_version": 1, "tests": {<class and name with parameters>: {<environment>: {...figures...}}}}`, keys sorted, sizes in
bytes. An environment is what figures may not be compared across: "virtual A100-40GB x8 fsdp".
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pytest_gpumem.categories import CATEGORIES

SCHEMA_VERSION = 1


class BaselineError(Exception):
    """A baseline file cannot be read or written. The message names it, and the line where there is one."""


@dataclass(frozen=True)
class Environment:
    """What a baseline belongs to besides its test."""

    source: str
    gpu: str
    world_size: int
    strategy: str

    @property
    def key(self) -> str:
        return f"{self.source} {self.gpu} x{self.world_size} {self.strategy}"


@dataclass(frozen=True)
class Baseline:
    """One test's stored figures in one environment, in bytes, of the worst rank.

    `peak` is of `metric`; `categories` are each category's own peak; `at_peak` sums to the allocated peak. `versions` are
    those it was recorded with; `current` (not stored) are those of this run.
    """

    peak: int
    categories: Mapping[str, int]
    at_peak: Mapping[str, int]
    metric: str = "allocated"
    aggregation: str = "worst rank"
    allocator: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    current: Mapping[str, str] = field(default_factory=dict)

    def differing_versions(self) -> list[str]:
        """ "torch 2.12.0 (now 2.13.0)" for each version that is not the same in this run."""
        return [
            f"{name} {was} (now {self.current.get(name, 'absent')})"
            for name, was in sorted(self.versions.items())
            if self.current and self.current.get(name) != was
        ]

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        del data["current"]
        return data


def split_nodeid(nodeid: str) -> tuple[str, str]:
    """The test module's path and the rest: "tests/test_a.py::TestB::test_c[x]" -> ("tests/test_a.py", "TestB::test_c[x]")."""
    path, _, name = nodeid.partition("::")
    return path, name


class BaselineStore:
    """The baselines below one directory. Files are read once and kept."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, dict[str, dict[str, Any]]] = {}

    def path(self, module: str) -> Path:
        """The file of a test module, given by its path relative to pytest's root directory."""
        parts = [part for part in Path(module).with_suffix(".json").parts if part not in ("..", os.sep)]
        return self.directory.joinpath(*parts)

    def find(self, nodeid: str, environment: Environment, current: Mapping[str, str]) -> Baseline | None:
        """The stored baseline, or None. Raises BaselineError where its file cannot be read."""
        module, name = split_nodeid(nodeid)
        entry = self.tests(module).get(name, {}).get(environment.key)
        if entry is None:
            return None
        return Baseline(
            peak=entry["peak"],
            categories=entry["categories"],
            at_peak=entry["at_peak"],
            metric=entry["metric"],
            aggregation=entry["aggregation"],
            allocator=entry["allocator"],
            versions=entry["versions"],
            current=current,
        )

    def tests(self, module: str) -> dict[str, dict[str, Any]]:
        """Test name -> environment key -> entry, of one test module. Raises BaselineError."""
        if module not in self._files:
            path = self.path(module)
            self._files[module] = read_file(path) if path.exists() else {}
        return self._files[module]

    def put(self, nodeid: str, environment: Environment, baseline: Baseline) -> None:
        """Change an entry in memory; `write` makes it last."""
        module, name = split_nodeid(nodeid)
        self.tests(module).setdefault(name, {})[environment.key] = baseline.to_json()

    def remove(self, module: str, name: str) -> None:
        self.tests(module).pop(name, None)

    def write(self, modules: Iterable[str]) -> None:
        """Write these modules' files, each in one piece or not at all; one without tests is deleted. Raises BaselineError."""
        for module in sorted(set(modules)):
            path, tests = self.path(module), self._files[module]
            try:
                if tests:
                    _write(path, {"schema_version": SCHEMA_VERSION, "tests": tests})
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise BaselineError(f"{path}: the baseline cannot be written: {error.strerror or error}") from None

    def modules(self) -> list[str]:
        """The test modules that have a file here, as paths with forward slashes."""
        if not self.directory.is_dir():
            return []
        files = sorted(self.directory.rglob("*.json"))
        return [file.relative_to(self.directory).with_suffix(".py").as_posix() for file in files]


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=2, sort_keys=True) + "\n"
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_file(path: Path) -> dict[str, dict[str, Any]]:
    """The tests of a baseline file. Raises BaselineError that names the file, and the line or the entry that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BaselineError(f"{path}: the baseline file cannot be read: {error}") from None
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        reason = getattr(error, "msg", "nested too deeply")
        raise BaselineError(f"{path}:{line}: the baseline file is not JSON: {reason}. Restore it from git.") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is int and version > SCHEMA_VERSION:
        raise BaselineError(
            f"{path}: schema_version {version} is newer than this pytest-gpumem reads ({SCHEMA_VERSION}): update pytest-gpumem."
        )
    if version != SCHEMA_VERSION or not isinstance(data.get("tests"), dict):
        raise BaselineError(f"{path}: not a baseline file: it needs schema_version {SCHEMA_VERSION} and tests.")
    for name, environments in data["tests"].items():
        if not isinstance(environments, dict):
            raise BaselineError(f"{path}: {name}: expected environments, found {type(environments).__name__}")
        for environment, entry in environments.items():
            _check_entry(entry, f"{path}:{_line(text, name, environment)}: {name} ({environment})")
    tests: dict[str, dict[str, Any]] = data["tests"]
    return tests


def _line(text: str, *keys: str) -> int:
    """The line of the last of these keys, each looked for after the one before it."""
    at = 0
    for key in keys:
        at = max(text.find(json.dumps(key) + ":", at), at)
    return text.count("\n", 0, at) + 1


_FIELDS = {
    "peak": int,
    "categories": dict,
    "at_peak": dict,
    "metric": str,
    "aggregation": str,
    "allocator": str,
    "versions": dict,
}


def _check_entry(entry: Any, where: str) -> None:
    if not isinstance(entry, dict):
        raise BaselineError(f"{where}: expected figures, found {type(entry).__name__}")
    for key, kind in _FIELDS.items():
        if type(entry.get(key)) is not kind:
            raise BaselineError(f"{where}: {key} should be {'a whole number' if kind is int else kind.__name__}")
    sizes = {"peak": entry["peak"]}
    for group in ("categories", "at_peak"):
        for category, nbytes in entry[group].items():
            if category not in CATEGORIES:
                raise BaselineError(f"{where}: {group}: unknown category {category!r}")
            sizes[f"{group}.{category}"] = nbytes
    for key, nbytes in sizes.items():
        if type(nbytes) is not int:
            raise BaselineError(f"{where}: {key} is {nbytes!r}; a size is a whole number of bytes")
        if nbytes < 0:
            raise BaselineError(f"{where}: {key} is {nbytes}; a size is not negative")
