"""A marked test while it runs, in the process that runs it: measured from its setup on, judged when its body is done."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from pytest_gpumem.baselines import BaselineStore, Environment
from pytest_gpumem.checks import Measured, run_checks
from pytest_gpumem.marker import Settings
from pytest_gpumem.measurement import Measurement, is_device_error, versions
from pytest_gpumem.options import Options
from pytest_gpumem.present import json as json_file
from pytest_gpumem.present import terminal
from pytest_gpumem.ranks import Assignment
from pytest_gpumem.results import RankMeasurement, TestResult
from pytest_gpumem.session import update_command
from pytest_gpumem.xdist import nodeid_of


class Running:
    """One rank of a test. `data` is what travels with the test's report: plain data, None until there is something."""

    def __init__(self, item: pytest.Item, settings: Settings, options: Options, assignment: Assignment) -> None:
        self.item = item
        self.settings = settings
        self.options = options
        self.assignment = assignment
        self.measurement = Measurement(settings, assignment.rank)
        self.data: dict[str, Any] | None = None

    def start(self) -> None:
        self.measurement.start()

    def stop(self) -> None:
        self.measurement.stop()

    def body_passed(self) -> None:
        """The test's body is done: its checks fail it as an assertion in it would."""
        __tracebackhide__ = True
        result = self._take(judge=self.assignment.reports)
        if result.failed:
            pytest.fail(terminal.failure(result), pytrace=False)
        self.item.add_report_section("call", "gpumem", terminal.passed(result))  # shown by -rP

    def body_raised(self, error: BaseException) -> BaseException:
        """The body raised: what was measured until then is kept. Gives the error to raise."""
        self._take(judge=False)
        if is_device_error(error) and not self.item.config.option.fulltrace:
            error.__context__ = None
            return error.with_traceback(_of_the_test(error, self.item.path))
        return error

    def _take(self, judge: bool) -> TestResult:
        mine = self.measurement.result()
        ranks = [mine, *(RankMeasurement.from_json(data) for data in self.assignment.other_ranks)]
        settings = self.settings
        trace = self.measurement.trace
        result = TestResult(
            nodeid=nodeid_of(self.item),
            environment=Environment(trace.source, trace.gpu, trace.world_size, mine.strategy),
            ranks=sorted(ranks, key=lambda rank: rank.report.rank),
            metric=settings.metric,
            budget_text=settings.budget_text,
            max_bytes=settings.max_bytes,
            versions=versions(),
            updates=settings.baseline is not False,
        )
        if settings.budget is not None and result.budget.n_local:
            result.budget_limit = result.budget.limit(settings.budget)
        if mine.report.out_of_memory is not None:
            self.item.add_report_section("call", "gpumem", terminal.out_of_memory(mine.report))
        if judge:
            self._judge(result)
        self.item.user_properties.extend(json_file.properties(result))
        self.data = result.to_json()
        return result

    def _judge(self, result: TestResult) -> None:
        store = BaselineStore(self.options.baseline_dir)
        result.baseline = store.find(nodeid_of(self.item), result.environment, result.versions)
        updating = self.options.update
        result.verdicts = run_checks(
            self.settings,
            Measured([rank.report for rank in result.ranks], [rank.budget for rank in result.ranks]),
            result.baseline,
            compare=not updating or (updating == "new" and result.baseline is not None),
            how=update_command(self.item.config, nodeid_of(self.item)),
        )


RUNNING: pytest.StashKey[Running] = pytest.StashKey()
"""Where the stash of a marked test holds it while it runs."""


def _of_the_test(error: BaseException, path: Path) -> TracebackType | None:
    """The frames of code beside the test. Those of libraries, dozens of them, say nothing about who used the memory.

    `--full-trace` shows all.
    """
    kept, traceback = [], error.__traceback__
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        if "site-packages" not in file.parts and file.is_relative_to(path.parent):
            kept.append(traceback)
        traceback = traceback.tb_next
    chain: TracebackType | None = None
    for entry in reversed(kept):
        chain = TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain or error.__traceback__
