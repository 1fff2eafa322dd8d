"""The pytest process's own part in ending an isolated item."""

from __future__ import annotations

import pytest

from pytest_gpumem.ranks import pytest_internals


def conclude(
    item: pytest.Item, nextitem: pytest.Item | None, reports: list[pytest.TestReport]
) -> list[pytest.TestReport]:
    """Tear down what earlier tests left set up in this process and ``nextitem`` does not need.

    Returns ``reports``; where the tearing down fails, with that failure as the item's teardown.
    """
    if item.session.shouldfail or item.session.shouldstop:
        nextitem = None
    if not pytest_internals.is_set_up_beyond(item.session, nextitem):
        return reports

    def tear_down() -> None:
        pytest_internals.tear_down_to(item.session, nextitem)

    call = pytest.CallInfo.from_call(
        lambda: pytest_internals.captured(item.config, item, "teardown", tear_down),
        when="teardown",
        reraise=(pytest.exit.Exception, KeyboardInterrupt),
    )
    if call.excinfo is None:
        return reports
    failed: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
    return [report for report in reports if report.when != "teardown" or report.failed] + [failed]
