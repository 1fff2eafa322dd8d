"""Inside a rank process: runs one item and sends what happened, as it happens.

Messages, in the order they are sent: ``("main_thread", ident)``; for each phase ``("phase", name)`` and
``("report", data)``; ``("warning", data)`` in between; last, one of ``("done", ending)`` and
``("error", traceback)``. A process that does not find its item sends ``("missing", text)`` alone.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import threading
import time
import traceback
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_gpumem.ranks import pytest_internals, wire
from pytest_gpumem.ranks.assignment import ASSIGNMENT, Assignment, enter_child


@dataclass(frozen=True)
class Outlets:
    """The descriptors that a rank process writes to. All but ``messages`` are files that outlive it."""

    messages: int
    stdout: int
    stderr: int
    fault: int


@dataclass(frozen=True)
class Ending:
    """How a rank process that came to its end stands towards the session."""

    shouldstop: bool | str = False
    shouldfail: bool | str = False
    exit: tuple[str, int | None] | None = None
    interrupted: str | None = None


def run_item(item: pytest.Item, assignment: Assignment, outlets: Outlets, timeout: float | None) -> None:
    """Run ``item`` as one rank and send everything to ``outlets``. Raises nothing but OSError.

    ``timeout`` is in seconds; when it has passed, the tracebacks of all threads are written, no more.
    """
    enter_child()
    faulthandler.enable(file=outlets.fault, all_threads=True)
    pytest_internals.start_fresh_capture(item.config, outlets.stdout, outlets.stderr)
    wire.send(outlets.messages, ("main_thread", threading.main_thread().ident))
    rank = RankPlugin(item.config, outlets, timeout)
    item.config.pluginmanager.register(rank, "gpumem-rank")
    item.stash[ASSIGNMENT] = assignment
    rank.active = True
    try:
        ending = _run(item)
    except Exception:
        rank.send(("error", traceback.format_exc()))
    else:
        rank.send(("done", ending))
    faulthandler.cancel_dump_traceback_later()
    pytest_internals.flush_output(item.config)


def _run(item: pytest.Item) -> Ending:
    session = item.session
    left: tuple[str, int | None] | None = None
    interrupted = None
    try:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    except pytest.exit.Exception as error:
        left = (error.msg or "", error.returncode)
    except KeyboardInterrupt as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        interrupted = f"{frame.filename}:{frame.lineno}"
    if left is not None or interrupted is not None:
        try:
            pytest_internals.tear_down_to(session, None)
        except (Exception, pytest.skip.Exception, pytest.fail.Exception):
            pass  # the interruption is what is reported
    return Ending(session.shouldstop, session.shouldfail, left, interrupted)


class RankPlugin:
    """Stands in for the run loop's own protocol, so that all wrappers around it run as for any other item."""

    def __init__(self, config: pytest.Config, outlets: Outlets, timeout: float | None) -> None:
        self.active = False  # registering a plugin replays the warnings recorded before
        self._config = config
        self._outlets = outlets
        self._pid = os.getpid()
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def send(self, message: tuple[str, Any]) -> None:
        if os.getpid() != self._pid:
            # A test forked and let its child run on into pytest: that copy must not report a second time.
            os._exit(1)
        wire.send(self._outlets.messages, message)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        pytest_internals.run_phases(item)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        self._enter("setup")
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        self._enter("call")
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        self._enter("teardown")
        return (yield)

    def _enter(self, phase: str) -> None:
        self.send(("phase", phase))
        if self._deadline is not None:
            # Anew for each phase: pytest cancels the watchdog whenever a test raises.
            left = max(self._deadline - time.monotonic(), 0.001)
            faulthandler.dump_traceback_later(left, file=self._outlets.fault)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self.send(("report", picklable(data)))
        return report

    @pytest.hookimpl
    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        if self.active:
            what = _plain_warning(warning_message)
            self.send(("warning", {"warning_message": what, "when": when, "nodeid": nodeid, "location": location}))


def _plain_warning(recorded: warnings.WarningMessage) -> warnings.WarningMessage:
    message: Any = recorded.message
    category: Any = recorded.category
    try:
        pickle.loads(pickle.dumps((message, category)))
    except Exception:
        message, category = Warning(f"{category.__name__}: {message}"), Warning
    return warnings.WarningMessage(message, category, recorded.filename, recorded.lineno, line=recorded.line)


def picklable(value: Any) -> Any:
    """``value`` itself, or a copy in which what cannot be pickled is replaced by its repr."""
    try:
        pickle.dumps(value)
    except Exception:
        if isinstance(value, dict):
            return {key: picklable(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(picklable(part) for part in value)
        return repr(value)
    return value
