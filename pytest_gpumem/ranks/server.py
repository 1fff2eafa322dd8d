"""The fork server: a copy of the pytest process, taken before any test ran, that forks one process per rank.

It never runs a test itself. So a rank's result does not depend on what ran before it, and no rank is forked
from a process whose autograd engine has started its threads.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import signal
import socket
import tempfile
import time
import traceback
import warnings
from types import FrameType
from typing import IO, Any, NoReturn

import pytest

from pytest_gpumem.ranks import openmp, processes, pytest_internals, wire
from pytest_gpumem.ranks.child import Outlets, run_item
from pytest_gpumem.ranks.remains import GRACE, PATIENCE, Remains, tail

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD) if hasattr(signal, "SIGHUP") else ()


def fork() -> int:
    """os.fork() without the warning about threads: whether forking is safe has been looked at before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class ServerDied(Exception):
    """The fork server is gone."""


class Server:
    """The pytest process's handle on its fork server."""

    def __init__(self, session: pytest.Session, warm_up: str) -> None:
        self._index = {id(item): index for index, item in enumerate(session.items)}
        # All ranks share the session's temporary directory; made later, each would get its own.
        pytest_internals.base_temp(session.config)
        pytest_internals.flush_output(session.config)
        ours, theirs = socket.socketpair()
        self._parent = os.getpid()
        openmp.end_threads()
        self._pid = fork()
        if self._pid == 0:
            try:
                ours.close()
                _Serving(session, theirs, self._parent).serve(warm_up)
            finally:
                os._exit(0)
        theirs.close()
        self._socket = ours
        self._reader = wire.Reader(ours.fileno())

    def knows(self, item: pytest.Item) -> bool:
        """Whether ``item`` had been collected when the server was forked."""
        return id(item) in self._index

    def run(self, item: pytest.Item, assignment: bytes, timeout: float | None) -> Remains:
        """Run ``item`` in a new process, which is killed where the wait is interrupted. Raises ServerDied."""
        fd = self._socket.fileno()
        try:
            wire.send(fd, ("run", self._index[id(item)], assignment, timeout))
            within = None if timeout is None else timeout + GRACE + PATIENCE
            remains = self._reader.receive(within)
        except OSError:
            remains = None
        except BaseException:
            self._abort()
            raise
        if remains is None:
            raise ServerDied(f"the fork server has ended (status {self.close()})")
        assert isinstance(remains, Remains)
        return remains

    def _abort(self) -> None:
        try:
            wire.send(self._socket.fileno(), ("abort",))
            self._reader.receive(PATIENCE)  # each request has its answer: the next one must not take this one
        except BaseException:
            self.close()

    def close(self) -> int | None:
        """End the server and any running rank; the exit status (negative for a signal) where it is known."""
        if self._pid == 0 or os.getpid() != self._parent:
            return None
        self._socket.close()
        pid, self._pid = self._pid, 0
        deadline = time.monotonic() + 5
        try:
            while time.monotonic() < deadline:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.002)
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ChildProcessError:
            return None


class _Abort(Exception):
    """The pytest process does not want the result any more."""


class _Gone(Exception):
    """The pytest process has ended."""


class _Serving:
    """The server's own side."""

    def __init__(self, session: pytest.Session, control: socket.socket, parent: int) -> None:
        self._session = session
        self._control = control
        self._requests = wire.Reader(control.fileno())
        self._parent = parent
        self._child = 0
        self._error: str | None = None
        self._handlers = {number: signal.getsignal(number) for number in _HANDLED}
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)

    def serve(self, warm_up: str) -> None:
        """Serve until the pytest process is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGHUP, self._leave)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            pytest_internals.detach(self._session.config)
            processes.follow_parent(self._parent, signal.SIGKILL)  # though warming up may hang in native code
            self._warm_up(warm_up)
            processes.follow_parent(self._parent, signal.SIGTERM)
            while True:
                self._wait_for_control()
                request = self._requests.receive()
                if request is None:
                    return
                if request[0] == "run":
                    wire.send(self._control.fileno(), self._run(*request[1:]))
        except (_Gone, OSError):
            pass
        finally:
            if self._child:
                processes.kill_group(self._child)

    def _leave(self, number: int, frame: FrameType | None) -> NoReturn:
        raise _Gone

    def _warm_up(self, name: str) -> None:
        if name:
            module, _, function = name.partition(":")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    getattr(importlib.import_module(module), function)()
            except Exception:
                self._error = f"Warming up the fork server failed.\n\n{traceback.format_exc()}"
        openmp.end_threads()
        # What is here stays, here and in the children: let no collection touch, and so copy, its pages.
        gc.collect()
        gc.freeze()

    def _wait_for_control(self) -> None:
        while not select.select([self._control], [], [], 1)[0]:
            self._look_for_parent()

    def _look_for_parent(self) -> None:
        # Its end of the socket may live on in processes that it has forked.
        if os.getppid() != self._parent:
            raise _Gone

    def _run(self, index: int, assignment: bytes, timeout: float | None) -> Remains:
        if self._error is not None:
            return Remains(error=self._error)
        with (
            tempfile.TemporaryFile(buffering=0) as stdout,
            tempfile.TemporaryFile(buffering=0) as stderr,
            tempfile.TemporaryFile(buffering=0) as fault,
        ):
            receiving, sending = os.pipe()
            outlets = Outlets(sending, stdout.fileno(), stderr.fileno(), fault.fileno())
            server = os.getpid()
            self._child = fork()
            if self._child == 0:
                os.close(receiving)
                self._be_child(server, index, assignment, outlets, timeout)
            os.close(sending)
            try:
                return self._watch(receiving, stdout, stderr, fault, timeout)
            finally:
                os.close(receiving)

    def _be_child(
        self, server: int, index: int, assignment: bytes, outlets: Outlets, timeout: float | None
    ) -> NoReturn:
        try:
            os.setsid()  # a group of its own, and no terminal that could stop it
            processes.follow_parent(server, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for end in (self._control, self._woken, self._waker):
                end.close()
            run_item(self._session.items[index], pickle.loads(assignment), outlets, timeout)
        except BaseException:
            wire.send(outlets.messages, ("error", traceback.format_exc()))
        finally:
            os._exit(0)

    def _watch(
        self, receiving: int, stdout: IO[bytes], stderr: IO[bytes], fault: IO[bytes], timeout: float | None
    ) -> Remains:
        os.set_blocking(receiving, False)
        kill_at = None if timeout is None else time.monotonic() + timeout + GRACE
        timed_out = False
        messages = bytearray()
        sources: list[Any] = [receiving, self._control, self._woken]
        while True:
            # In this order, so that all it wrote has been read when it is found to have ended.
            ended = processes.has_ended(self._child)
            if receiving in sources and not _drain(receiving, messages):
                sources.remove(receiving)
            if ended:
                break
            try:
                self._listen(sources, kill_at)
            except _Abort:
                kill_at = 0.0
            if kill_at is not None and time.monotonic() >= kill_at:
                timed_out, kill_at = True, None
                processes.kill_group(self._child)
        processes.kill_group(self._child)  # what it left running
        _, status, usage = os.wait4(self._child, 0)
        self._child = 0
        return Remains(
            messages=bytes(messages),
            stdout=tail(stdout),
            stderr=tail(stderr),
            fault=tail(fault),
            status=os.waitstatus_to_exitcode(status),
            timed_out=timed_out,
            timeout=timeout,
            peak_resident_bytes=usage.ru_maxrss * 1024,
        )

    def _listen(self, sources: list[Any], kill_at: float | None) -> None:
        wait = 1.0 if kill_at is None else min(1.0, max(kill_at - time.monotonic(), 0.0))
        ready = select.select(sources, [], [], wait)[0]
        if self._woken in ready:
            self._woken.recv(4096)
        if self._control in ready:
            if self._requests.receive() is None:
                raise _Gone
            raise _Abort
        if not ready:
            self._look_for_parent()


def _drain(fd: int, into: bytearray) -> bool:
    """Read what is there; false at the end of file."""
    while True:
        try:
            chunk = os.read(fd, 1 << 20)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        into += chunk
