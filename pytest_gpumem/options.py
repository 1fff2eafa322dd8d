"""Command-line options and ini values: declared here, read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.marker import ARGUMENTS, DEFAULT_GPU, DEVICES, MarkerError, Settings, near_miss, settings_from


def add(parser: pytest.Parser) -> None:
    """Declare every option and ini value. Options default to None, so that their ini twins count."""
    group = parser.getgroup("gpumem", "GPU memory regression tests")
    group.addoption("--gpumem-device", metavar="DEVICE", help=f"where tests run: {', '.join(DEVICES)}")
    group.addoption("--gpumem-gpu", metavar="CARD", help="the card to play, for every test: A100-40GB, H100-80GB, ...")
    group.addoption(
        "--gpumem-update-baselines",
        "--gpumem-update-baselines=all",
        dest="gpumem_update_baselines",
        action="store_const",
        const="all",
        help="store the figures of the tests that ran and passed their other checks",
    )
    group.addoption(
        "--gpumem-update-baselines=new",
        dest="gpumem_update_baselines",
        action="store_const",
        const="new",
        help="the same, but only where no baseline is stored yet",
    )
    group.addoption("--gpumem-baseline-dir", metavar="DIR", help="where baselines are stored (default: baselines)")
    group.addoption("--gpumem-tolerance", metavar="TOLERANCE", help='how far figures may move: "2%%" or "64 MiB"')
    group.addoption("--gpumem-json", metavar="FILE", help="write every figure to FILE as JSON")
    group.addoption(
        "--gpumem-disable", action="store_const", const="true", help="skip marked tests and measure nothing"
    )
    for name, help_text in ARGUMENTS.items():
        parser.addini(f"gpumem_{name}", f"default of the gpumem marker's {name}: {help_text}", default=None)
    parser.addini("gpumem_baseline_dir", "twin of --gpumem-baseline-dir", default=None)
    parser.addini("gpumem_update_baselines", "twin of --gpumem-update-baselines: all or new", default=None)
    parser.addini("gpumem_json", "twin of --gpumem-json", default=None)
    parser.addini("gpumem_disable", "twin of --gpumem-disable: true or false", default=None)


@dataclass(frozen=True)
class Options:
    """What the command line and the ini file say about the whole run.

    `above` and `below` are arguments of the marker that lie above and below all markers. `update` is "", "all" or "new".
    """

    above: Mapping[str, Any]
    below: Mapping[str, Any]
    update: str
    baseline_dir: Path
    json: Path | None
    disabled: bool

    @property
    def cuda_required(self) -> bool:
        return self.above.get("device") == "cuda"

    @property
    def default_gpu(self) -> str:
        return str(self.above.get("gpu") or self.below.get("gpu") or DEFAULT_GPU)


def read(config: pytest.Config) -> Options:
    """Read and check them. Raises pytest.UsageError that names the option and says what would be right."""
    above = {name: config.getoption(f"gpumem_{name}") for name in ("device", "gpu", "tolerance")}
    above = {name: value for name, value in above.items() if value is not None}
    below = {name: config.getini(f"gpumem_{name}") for name in ARGUMENTS}
    below = {name: value for name, value in below.items() if value not in (None, "")}
    for where, values in (("--gpumem-{}", above), ("ini gpumem_{}", below)):
        for name, value in values.items():
            if name != "ranks":  # its sense depends on the world's size
                _check(where.format(name), name, value)
    update = _either(config, "update_baselines") or ""
    if update not in ("", "all", "new"):
        raise pytest.UsageError(f"gpumem_update_baselines={update!r}: {near_miss(update, ('all', 'new'))}")
    disabled = (_either(config, "disable") or "false").lower()
    if disabled not in ("true", "false"):
        raise pytest.UsageError(f"gpumem_disable={disabled!r}: write true or false")
    json = _either(config, "json")
    return Options(
        above=above,
        below=below,
        update=update,
        baseline_dir=_directory(config, update),
        json=_writable(config.invocation_params.dir / json) if json else None,
        disabled=disabled == "true",
    )


def _check(where: str, name: str, value: Any) -> None:
    try:
        settings_from([(where, {name: value})])
    except MarkerError as error:
        raise pytest.UsageError(str(error)) from None


def _either(config: pytest.Config, name: str) -> str | None:
    value = config.getoption(f"gpumem_{name}")
    value = value if value is not None else config.getini(f"gpumem_{name}")
    return str(value) if value else None


def _directory(config: pytest.Config, update: str) -> Path:
    option = config.getoption("gpumem_baseline_dir")
    directory: Path
    if option is not None:
        directory = config.invocation_params.dir / option
    else:
        directory = config.rootpath / (config.getini("gpumem_baseline_dir") or "baselines")
    if directory.exists() and not directory.is_dir():
        raise pytest.UsageError(f"--gpumem-baseline-dir: {directory} is not a folder")
    if update:
        nearest = directory
        while not nearest.exists():
            nearest = nearest.parent
        if not nearest.is_dir() or not _can_write(nearest):
            raise pytest.UsageError(f"--gpumem-baseline-dir: {directory} cannot be written (looked at {nearest})")
    return directory


def _can_write(folder: Path) -> bool:
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _writable(path: Path) -> Path:
    if not path.parent.is_dir():
        raise pytest.UsageError(f"--gpumem-json: the folder {path.parent} does not exist")
    if path.is_dir():
        raise pytest.UsageError(f"--gpumem-json: {path} is a folder; name a file")
    return path


OPTIONS: pytest.StashKey[Options] = pytest.StashKey()
SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()
"""Where the config's stash holds its options, and a marked test's stash its settings."""


def settings_of(item: pytest.Item, options: Options) -> Settings | None:
    """The test's settings; None for a test that has neither the marker nor the fixture. Raises MarkerError."""
    marked = item.get_closest_marker("gpumem") is not None
    if not isinstance(item, pytest.Function) or not (marked or "gpumem" in item.fixturenames):
        return None
    layers: list[tuple[str, Mapping[str, Any]]] = [("ini gpumem_*", options.below)]
    for mark in _markers(item):
        if mark.args:
            raise MarkerError(f"gpumem marker: takes keyword arguments only, got {mark.args[0]!r}; write max_gb=40")
        layers.append(("gpumem marker", mark.kwargs))
    layers.append(("command line", options.above))
    return settings_from(layers)


def _markers(item: pytest.Function) -> list[pytest.Mark]:
    """The test's gpumem markers, the farthest first. pytest lists a function's own before those of its `pytest.param`."""
    nearest_first = [mark for _, mark in item.iter_markers_with_node("gpumem")]
    callspec = getattr(item, "callspec", None)
    of_param = [mark for mark in getattr(callspec, "marks", ()) if mark.name == "gpumem"]
    others = [mark for mark in nearest_first if not any(mark is param for param in of_param)]
    return [*reversed(others), *reversed(of_param)]
