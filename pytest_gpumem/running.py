"""A marked test while it runs, in the process that runs it: measured from its setup on, judged when its body is done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_gpumem.baselines import BaselineStore, Environment
from pytest_gpumem.checks import Measured, run_checks
from pytest_gpumem.marker import Settings
from pytest_gpumem.measurement import Measurement, versions
from pytest_gpumem.options import Options
from pytest_gpumem.present import json as json_file
from pytest_gpumem.present import terminal
from pytest_gpumem.ranks import Assignment
from pytest_gpumem.results import RankMeasurement, TestResult
from pytest_gpumem.session import update_command


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

    @contextlib.contextmanager
    def judged(self) -> Iterator[None]:
        """Around the test's body: its checks fail it as an assertion in it would. An error of the body's own comes first."""
        __tracebackhide__ = True
        try:
            yield
        except (pytest.skip.Exception, pytest.exit.Exception, KeyboardInterrupt):
            raise
        except BaseException:
            self._take(self.measurement.result(), judge=False)
            raise
        result = self._take(self.measurement.result(), judge=self.assignment.reports)
        if result is not None and result.failed:
            pytest.fail(terminal.failure(result), pytrace=False)

    def _take(self, mine: RankMeasurement, judge: bool) -> TestResult | None:
        if not self.assignment.reports:
            self.data = mine.to_json()
            return None
        ranks = [mine, *(RankMeasurement.from_json(data) for data in self.assignment.other_ranks)]
        settings = self.settings
        trace = self.measurement.trace
        result = TestResult(
            nodeid=self.item.nodeid,
            environment=Environment(trace.source, trace.gpu, trace.world_size, mine.strategy),
            ranks=sorted(ranks, key=lambda rank: rank.report.rank),
            metric=settings.metric,
            budget_text=settings.budget_text,
            max_bytes=settings.max_bytes,
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
        result.baseline = store.find(self.item.nodeid, result.environment, versions())
        updating = self.options.update
        result.verdicts = run_checks(
            self.settings,
            Measured([rank.report for rank in result.ranks], [rank.budget for rank in result.ranks]),
            result.baseline,
            compare=not updating or (updating == "new" and result.baseline is not None),
            how=update_command(self.item.config, self.item.nodeid),
        )
