"""A rank in a fresh interpreter, for where forking is unsafe: collects one item anew and runs it.

``spawn`` is the pytest process's side, ``main`` the new process's.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import pytest

from pytest_gpumem.ranks import processes, pytest_internals, wire
from pytest_gpumem.ranks.assignment import enter_child
from pytest_gpumem.ranks.child import Outlets, run_item
from pytest_gpumem.ranks.remains import GRACE, PATIENCE, Remains, tail
from pytest_gpumem.xdist import nodeid_of

_FILES = ("messages", "stdout", "stderr", "fault")
_START = "start"
_Waited = Literal["ended", "hung", "never started"]
# The parent's whole sys.path, before anything of this package is looked for.
_BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from pytest_gpumem.ranks.spawned import main; main({folder!r})"


@dataclass(frozen=True)
class _Request:
    """All that the new process needs to find the item and to run it as the pytest process would have."""

    args: tuple[str, ...]
    plugins: tuple[str, ...]
    worker: dict[str, Any]
    base_temp: str | None
    path: str
    name: str
    nodeid: str
    assignment: bytes
    warm_up: str
    timeout: float | None


def spawn(item: pytest.Item, assignment: bytes, timeout: float | None, warm_up: str) -> Remains:
    """Run ``item`` in a new interpreter. ``timeout`` is in seconds, from when the item starts there."""
    config = item.config
    pytest_internals.flush_output(config)
    with tempfile.TemporaryDirectory(prefix="gpumem-rank-") as folder, ExitStack() as files:
        Path(folder, "request").write_bytes(pickle.dumps(_request(item, assignment, timeout, warm_up)))
        opened = {name: files.enter_context(open(Path(folder, name), "w+b", buffering=0)) for name in (*_FILES, _START)}
        # Under fd capture nothing of the process's start belongs on the terminal.
        hidden = pytest_internals.capture_method(config) == "fd"
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP.format(path=sys.path, folder=folder)],
            cwd=config.invocation_params.dir,
            stdin=subprocess.DEVNULL,
            stdout=opened[_START] if hidden else None,
            stderr=opened[_START] if hidden else None,
            start_new_session=True,
        )
        try:
            waited = _wait(process, opened["messages"], timeout)
        finally:
            if process.returncode is None or hasattr(os, "killpg"):
                processes.kill_group(process.pid)
            process.wait()
        return Remains(
            messages=Path(folder, "messages").read_bytes(),
            stdout=tail(opened["stdout"]),
            stderr=tail(opened["stderr"]) or tail(opened[_START]),
            fault=tail(opened["fault"]),
            status=process.returncode,
            timed_out=waited == "hung",
            timeout=timeout,
            error=f"The test's process did not come to its test within {PATIENCE:g} s."
            if waited == "never started"
            else None,
        )


def _wait(process: subprocess.Popen[bytes], messages: IO[bytes], timeout: float | None) -> _Waited:
    """Wait for the process's end, or until its time is up."""
    running = False
    kill_at = None if timeout is None else time.monotonic() + PATIENCE
    while _runs(process):
        # The item runs from the first message on; before, an interpreter starts and collects.
        if timeout is not None and not running and os.fstat(messages.fileno()).st_size:
            running = True
            kill_at = time.monotonic() + timeout + GRACE
        if kill_at is not None and time.monotonic() >= kill_at:
            return "hung" if running else "never started"
        time.sleep(0.01)
    return "ended"


def _runs(process: subprocess.Popen[bytes]) -> bool:
    if hasattr(os, "waitid"):
        return not processes.has_ended(process.pid)  # reaped only after its group has been killed
    return process.poll() is None


def _request(item: pytest.Item, assignment: bytes, timeout: float | None, warm_up: str) -> _Request:
    config = item.config
    args = [str(arg) for arg in config.invocation_params.args]
    if config.pluginmanager.hasplugin("_cov"):
        args.append("--no-cov")  # a second measurement would erase the first one's data
    # This package is loaded before pytest looks which plugins' assertions it could rewrite.
    args.append("-Wignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning")
    nodeid = nodeid_of(item)
    base_temp = pytest_internals.base_temp(config)
    plain = {"workerid": "gpumem", "workercount": 1, "testrunuid": "gpumem", "mainargv": sys.argv}
    return _Request(
        args=tuple(args),
        plugins=tuple(plugin for plugin in config.invocation_params.plugins or () if isinstance(plugin, str)),
        worker=getattr(config, "workerinput", plain),
        base_temp=None if base_temp is None else tempfile.mkdtemp(prefix="rank-", dir=base_temp),
        path=str(item.path),
        name=nodeid.partition("::")[2],
        nodeid=nodeid,
        assignment=assignment,
        warm_up=warm_up,
        timeout=timeout,
    )


def main(folder: str) -> None:
    """Answer the request in ``folder``; never returns."""
    enter_child()
    try:
        request = pickle.loads(Path(folder, "request").read_bytes())
        with _outlets(folder) as outlets:
            try:
                _serve(request, outlets)
            except BaseException:
                wire.send(outlets.messages, ("error", traceback.format_exc()))
    finally:
        os._exit(0)


@contextmanager
def _outlets(folder: str) -> Iterator[Outlets]:
    with ExitStack() as files:
        fds = (files.enter_context(open(Path(folder, name), "r+b", buffering=0)).fileno() for name in _FILES)
        yield Outlets(*fds)


def _serve(request: _Request, outlets: Outlets) -> None:
    plugin = _Collection()
    config = pytest_internals.prepare_config(request.args, (*request.plugins, plugin))
    # As a worker of pytest-xdist: one process of several, which writes no report files, starts no workers.
    config.workerinput = request.worker  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    for option, value in {
        "dist": "no", "distload": False, "numprocesses": None, "maxprocesses": None, "looponfail": False,
        "usepdb": False, "basetemp": request.base_temp, "lf": False, "failedfirst": False, "stepwise": False,
    }.items():  # fmt: skip
        if hasattr(config.option, option):
            setattr(config.option, option, value)
    config.args = [f"{request.path}::{request.name}" if request.name else request.path]

    def collect_and_run(config: pytest.Config, session: pytest.Session) -> None:
        reason = ""
        try:
            config.hook.pytest_collection(session=session)
        except (pytest.UsageError, pytest.Session.Interrupted, pytest.Session.Failed) as error:
            reason = f": {error}"
        item = next((item for item in session.items if item.nodeid == request.nodeid), None)
        if item is None:
            text = "\n\n".join(
                [f"{request.nodeid} was not found when collected in a new process{reason}", *plugin.errors]
            )
            wire.send(outlets.messages, ("missing", text))
        else:
            _warm_up(request.warm_up)
            run_item(item, pickle.loads(request.assignment), outlets, request.timeout)
        os._exit(0)  # not through the session's end, where plugins write their files

    pytest_internals.run_session(config, collect_and_run)
    pytest_internals.flush_output(config)
    wire.send(outlets.messages, ("missing", "The test's process could not start pytest (see its output below)"))


def _warm_up(name: str) -> None:
    if name:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)()


class _Collection:
    """Keeps what went wrong, and the terminal quiet."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        pytest_internals.silence_terminal(config)

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(report.longreprtext)


if __name__ == "__main__":
    main(sys.argv[1])
