"""What a rank process leaves behind, and the result that is made of it."""

from __future__ import annotations

import os
import pickle
import time
from dataclasses import dataclass, field
from typing import IO, Any, Literal, cast

import pytest

from pytest_gpumem.ranks import crash, pytest_internals, wire
from pytest_gpumem.ranks.child import Ending

Phase = Literal["setup", "call", "teardown"]
_KEPT_OUTPUT = 256 * 1024

GRACE = 1.0
"""Seconds between a rank's timeout and its end, in which it writes its tracebacks."""

PATIENCE = 180.0
"""Seconds that may go by for all but the rank itself, where it has a timeout: warming up, collecting anew."""


@dataclass(frozen=True)
class Remains:
    """All that is known of a rank process that has ended, however it ended.

    ``status`` is its exit status, negative for a signal. ``error`` says why no process ran the item at all.
    ``peak_resident_bytes`` is what the process itself held at most.
    """

    messages: bytes = b""
    stdout: str = ""
    stderr: str = ""
    fault: str = ""
    status: int = 0
    timed_out: bool = False
    timeout: float | None = None
    peak_resident_bytes: int | None = None
    error: str | None = None


@dataclass
class RankResult:
    """What came of one rank: its reports as far as they exist, and how its process died, if it did.

    A death or a timeout is also a failed report of the phase it happened in; where that was not the teardown,
    a passed teardown follows, which reporters wait for.
    """

    reports: list[pytest.TestReport]
    crash: str | None


def tail(file: IO[bytes]) -> str:
    """The end of an output file, as text."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(size - _KEPT_OUTPUT, 0))
    text = file.read().decode("utf-8", errors="replace")
    if size <= _KEPT_OUTPUT:
        return text
    return f"... the last {_KEPT_OUTPUT // 1024} KiB of {size // 1024} KiB:\n{text}"


def to_result(item: pytest.Item, remains: Remains, started: float) -> RankResult:
    """Turn ``remains`` into reports, and pass on the warnings and the session's state.

    ``started`` is the time.time() at which the process was asked for. Raises pytest.exit.Exception or
    KeyboardInterrupt where the test did.
    """
    told = _Told()
    try:
        for payload in wire.split(remains.messages)[0]:
            told.take(item, *pickle.loads(payload))
    except Exception as error:
        told.error = f"What the test's process sent cannot be read: {type(error).__name__}: {error}"
    if told.ending is None:
        return _died(item, remains, told, started)
    ending = told.ending
    item.session.shouldstop = ending.shouldstop or item.session.shouldstop
    item.session.shouldfail = ending.shouldfail or item.session.shouldfail
    if ending.exit is not None:
        raise pytest.exit.Exception(*ending.exit)
    if ending.interrupted is not None:
        raise KeyboardInterrupt(f"in the test's process, at {ending.interrupted}")
    return RankResult(told.reports, None)


@dataclass
class _Told:
    """What the process's own messages say."""

    reports: list[pytest.TestReport] = field(default_factory=list)
    main_thread: int | None = None
    phase: Phase = "setup"
    ending: Ending | None = None
    error: str | None = None

    def take(self, item: pytest.Item, kind: str, value: Any) -> None:
        if kind == "main_thread":
            self.main_thread = value
        elif kind == "phase":
            self.phase = value
        elif kind == "report":
            # A process that collected the item anew knows of no suffix that its node id was given here.
            value["nodeid"] = item.nodeid
            config = item.config
            report = config.hook.pytest_report_from_serializable(config=config, data=value)
            self.reports.append(cast(pytest.TestReport, report))
        elif kind == "warning":
            value["nodeid"] = item.nodeid if value["nodeid"] else ""
            item.ihook.pytest_warning_recorded.call_historic(kwargs=value)
        elif kind == "done":
            self.ending = value
        elif kind == "missing":
            self.error = value
        elif kind == "error":
            self.error = f"The test's process met an error outside the test:\n\n{value}"


def _died(item: pytest.Item, remains: Remains, told: _Told, started: float) -> RankResult:
    error = remains.error or told.error
    if error is not None:
        summary, text = error.strip().splitlines()[0], error
    else:
        summary, text = crash.describe(
            status=remains.status,
            phase=told.phase,
            fault=remains.fault,
            main_thread=told.main_thread,
            timeout=remains.timeout if remains.timed_out else None,
            peak_resident_bytes=remains.peak_resident_bytes,
        )
    sections = list(told.reports[-1].sections) if told.reports else []
    for name, output in (("stdout", remains.stdout), ("stderr", remains.stderr)):
        if output:
            sections.append((f"Captured {name} {told.phase}", output))
    threads = crash.all_threads(remains.fault)
    if threads:
        sections.append(("All threads", threads))

    stop = time.time()
    duration = stop - started - sum(report.duration for report in told.reports)
    longrepr = pytest_internals.failure_repr(item, summary, text)
    failed = _report(item, "failed", longrepr, told.phase, sections, duration, started, stop)
    if told.reports:
        failed.user_properties = list(told.reports[-1].user_properties)
    reports = [report for report in told.reports if report.when != told.phase or report.failed]
    reports.append(failed)
    if told.phase != "teardown":
        # Reporters such as JUnit XML write a test's output and close its entry when the teardown is reported.
        closing = _report(item, "passed", None, "teardown", sections, 0, stop, stop)
        closing.user_properties = failed.user_properties
        reports.append(closing)
    return RankResult(reports, summary)


def _report(
    item: pytest.Item,
    outcome: Literal["passed", "failed"],
    longrepr: Any,
    when: Phase,
    sections: list[tuple[str, str]],
    duration: float,
    start: float,
    stop: float,
) -> pytest.TestReport:
    keywords: dict[str, Literal[1]] = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(
        item.nodeid, item.location, keywords, outcome, longrepr, when, sections, duration, start, stop
    )
