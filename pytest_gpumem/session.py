"""The pytest process's part: results are gathered, baselines and the JSON file written once, the summary printed.

Under pytest-xdist this is the controller's; workers only send what they collected.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.options import Options
from pytest_gpumem.xdist import is_worker

if TYPE_CHECKING:  # the rest is imported where it is first needed: a run without marked tests does without
    from pytest_gpumem.baselines import Baseline, BaselineStore
    from pytest_gpumem.results import TestResult

COLLECTED = "gpumem_collected"  # the key under which a worker sends its node ids


class Session:
    """Registered as a plugin of the run."""

    def __init__(self, config: pytest.Config, options: Options) -> None:
        self.config = config
        self.options = options
        self.results: dict[str, TestResult] = {}
        self.collected: set[str] = set()
        self.errors_in_collection = False
        self.updated: list[tuple[str, str, dict[str, int], dict[str, int]]] = []
        self.obsolete: list[str] = []
        self.removed: list[str] = []
        self.problems: list[str] = []

    @property
    def is_worker(self) -> bool:
        return is_worker(self.config)

    # -- gathering

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.collected.update(item.nodeid for item in items)  # before anything is deselected

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.errors_in_collection |= report.failed

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.collected.update(getattr(node, "workeroutput", {}).get(COLLECTED, ()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = getattr(report, "gpumem", None)
        expected = hasattr(report, "wasxfail")
        if data is None or report.when != "call" or (report.skipped and not expected):
            return
        from pytest_gpumem.results import TestResult

        result = TestResult.from_json(data)
        result.outcome = ("xpassed" if report.passed else "xfailed") if expected else report.outcome
        result.updates &= report.passed and not expected
        self.results[result.nodeid] = result

    # -- writing

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_worker:
            output: dict[str, Any] = self.config.workeroutput  # type: ignore[attr-defined]  # pytest-xdist's
            output[COLLECTED] = sorted(self.collected)
            return
        broken = session.exitstatus in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR)
        if self.config.option.collectonly or broken:
            return
        from pytest_gpumem.baselines import BaselineError, BaselineStore

        try:
            self._baselines(BaselineStore(self.options.baseline_dir))
            if self.options.json is not None:
                self._json(self.options.json)
        except (BaselineError, OSError) as error:
            self.problems.append(str(error))
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _baselines(self, store: BaselineStore) -> None:
        from pytest_gpumem.baselines import split_nodeid

        touched = set()
        if self.options.update:
            for result in self.results.values():
                if self._update(store, result):
                    touched.add(split_nodeid(result.nodeid)[0])
        gone = self._obsolete(store)
        if self.options.update == "all" and self._whole_directories() is not None:
            for module, name in gone:
                store.remove(module, name)
                touched.add(module)
            self.removed = [f"{module}::{name}" for module, name in gone]
        else:
            self.obsolete = [f"{module}::{name}" for module, name in gone]
        store.write(touched)

    def _update(self, store: BaselineStore, result: TestResult) -> bool:
        if not result.updates or not any(rank.report.allocations for rank in result.ranks):
            return False
        old = store.find(result.nodeid, result.environment, {})
        if old is not None and self.options.update == "new":
            return False
        new = result.new_baseline(allocator_configuration())
        if old is not None and old.to_json() == new.to_json():
            return False
        store.put(result.nodeid, result.environment, new)
        self.updated.append((result.nodeid, result.environment.key, _sizes(old), _sizes(new)))
        return True

    def _obsolete(self, store: BaselineStore) -> list[tuple[str, str]]:
        """Stored tests that no longer exist, as far as this run can tell: their module was collected whole, or is gone."""
        from pytest_gpumem.baselines import split_nodeid

        if self.errors_in_collection or not self.collected:
            return []
        modules = {split_nodeid(nodeid)[0] for nodeid in self.collected}
        directories = self._whole_directories()
        by_node = any("::" in argument for argument in self.config.args)
        found = []
        for module in store.modules():
            whole = module in modules and not by_node
            gone = (
                directories is not None and not (self.config.rootpath / module).exists() and _below(module, directories)
            )
            if whole or gone:
                found += [(module, name) for name in store.tests(module) if f"{module}::{name}" not in self.collected]
        return found

    def _whole_directories(self) -> list[str] | None:
        """The directories that were collected whole, relative to the root; None where files or tests were picked."""
        option = self.config.option
        picked = getattr(option, "lf", False) or getattr(option, "ignore", None) or getattr(option, "ignore_glob", None)
        paths = [Path(os.path.abspath(self.config.invocation_params.dir / argument)) for argument in self.config.args]
        if picked or self.errors_in_collection or not all(path.is_dir() for path in paths):
            return None
        root = self.config.rootpath
        return [path.relative_to(root).as_posix() for path in paths if path.is_relative_to(root)]

    def _json(self, path: Path) -> None:
        from pytest_gpumem.present import json as json_file

        results = list(self.results.values())
        versions = {name: version for result in results for name, version in result.versions.items()}
        json_file.write(path, results, {"versions": versions})

    # -- telling

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.is_worker:
            return
        write = terminalreporter.write_line
        shown = bool(self.results) and self.config.get_verbosity() >= 0
        if not (shown or self.updated or self.obsolete or self.removed or self.problems):
            return
        from pytest_gpumem.present import terminal

        terminalreporter.write_sep("=", "gpumem")
        if shown:
            write(terminal.summary(list(self.results.values())))
        if self.updated:
            write(f"\n{len(self.updated)} baseline(s) stored in {self.options.baseline_dir}\n")
            write(terminal.updates(self.updated))
        if self.removed:
            write("\nobsolete baselines removed (their tests are gone):")
            write("\n".join(f"  {name}" for name in self.removed))
        if self.obsolete:
            write("\nobsolete baselines (their tests are gone):")
            write("\n".join(f"  {name}" for name in self.obsolete))
            write("To remove them, update from a whole folder: pytest --gpumem-update-baselines")
        for problem in self.problems:
            write(f"ERROR: {problem}", red=True)


def _below(module: str, directories: Iterable[str]) -> bool:
    return any(directory in ("", ".") or module.startswith(f"{directory}/") for directory in directories)


def _sizes(baseline: Baseline | None) -> dict[str, int]:
    return {} if baseline is None else {**baseline.categories, "all, at the peak": baseline.peak}


def allocator_configuration() -> str:
    """What configures PyTorch's allocator from the environment; "" for its defaults."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def update_command(config: pytest.Config, nodeid: str) -> str:
    """The command that stores this test's figures, with the options that its environment hangs on."""
    words = ["pytest", nodeid, "--gpumem-update-baselines"]
    for name in ("device", "gpu", "baseline_dir"):
        value = config.getoption(f"gpumem_{name}")
        if value is not None:
            words.append(f"--gpumem-{name.replace('_', '-')}={value}")
    return shlex.join(words)
