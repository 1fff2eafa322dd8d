"""The hooks around marked tests while they run. Registered only in a run that has some: it brings torch in.

In pytest's own process a marked test is handed to processes of its own, one a rank; in these, its phases are measured.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pytest_gpumem.options import OPTIONS, SETTINGS, Options
from pytest_gpumem.ranks import ASSIGNMENT, Assignment, Isolation, conclude, in_child
from pytest_gpumem.running import RUNNING, Running


class Execution:
    """A plugin of the run. `isolation` is None where no test needs a process of its own, and inside such a process."""

    def __init__(self, session: pytest.Session) -> None:
        isolated = any(SETTINGS in item.stash and _isolated(item) for item in session.items)
        wanted = isolated and not session.config.option.collectonly and not in_child()
        self.isolation = Isolation(session, warm_up="pytest_gpumem.warm_up:warm_up") if wanted else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        if self.isolation is not None:
            self.isolation.start()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self.close()

    def pytest_unconfigure(self) -> None:
        self.close()

    def close(self) -> None:
        if self.isolation is not None:
            self.isolation.close()

    # -- in pytest's own process

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if self.isolation is None or in_child() or SETTINGS not in item.stash or not _isolated(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in conclude(item, nextitem, _run_ranks(self.isolation, item)):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    # -- in a process of its own, or wherever else the test runs

    # No wrapper: a skip in one would keep pytest's own wrappers from beginning what they end in the teardown.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if SETTINGS not in item.stash:
            return
        chosen, settings = item.config.stash[OPTIONS], item.stash[SETTINGS]
        if chosen.disabled:
            pytest.skip("gpumem is disabled")
        if settings.device == "cuda":
            _refuse_cuda(chosen)
        assignment = item.stash.get(ASSIGNMENT, Assignment(settings.ranks[0]))
        item.stash[RUNNING] = Running(item, settings, chosen, assignment)
        item.stash[RUNNING].start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        running = item.stash.get(RUNNING, None)
        if running is None:
            return (yield)
        try:
            result = yield
        except (pytest.skip.Exception, pytest.exit.Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise running.body_raised(error)  # noqa: B904 - the same error
        running.body_passed()
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            running = item.stash.get(RUNNING, None)
            if running is not None:
                running.stop()
                del item.stash[RUNNING]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        running = item.stash.get(RUNNING, None)
        if running is not None and report.when == "call" and running.data is not None:
            report.gpumem = running.data
        return report


def _isolated(item: pytest.Item) -> bool:
    """In a process of its own: unless a debugger is asked for, or the test cannot run here anyway."""
    option = item.config.option
    settings = item.stash[SETTINGS]
    debugged = option.usepdb or getattr(option, "trace", False)
    return settings.isolate and settings.device != "cuda" and not debugged and not item.config.stash[OPTIONS].disabled


def _run_ranks(isolation: Isolation, item: pytest.Item) -> list[pytest.TestReport]:
    """Play each rank in a process of its own; the first one goes last, sees the others' figures, and reports for all."""
    settings = item.stash[SETTINGS]
    first, *others = settings.ranks
    figures = []
    for rank in others:
        reports = isolation.run(item, Assignment(rank, reports=False), settings.timeout).reports
        if not all(report.passed for report in reports):
            for report in reports:
                report.sections.append(("gpumem", f"this is rank {rank} of {settings.world_size}"))
            return reports
        figures += [figure for report in reports if hasattr(report, "gpumem") for figure in report.gpumem["ranks"]]
    return isolation.run(item, Assignment(first, other_ranks=tuple(figures)), settings.timeout).reports


def _refuse_cuda(chosen: Options) -> None:
    from pytest_gpumem.gpus import why_not_cuda

    reason = why_not_cuda()
    if chosen.cuda_required:
        pytest.fail(f"--gpumem-device=cuda: {reason}", pytrace=False)
    pytest.skip(f'device="cuda": {reason}')
