"""Running an item as a rank in a process of its own, and bringing its reports back."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from pytest_gpumem.ranks import pytest_internals, spawned
from pytest_gpumem.ranks.assignment import Assignment, in_child
from pytest_gpumem.ranks.remains import RankResult, Remains, to_result
from pytest_gpumem.ranks.server import Server, ServerDied


def fork_is_safe() -> str | None:
    """The reason why this process must not be forked, or None where it may be."""
    if not hasattr(os, "fork"):
        return "this system cannot fork"
    if sys.platform == "darwin":
        return "system libraries of macOS do not survive a fork"
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "CUDA is initialized in this process"
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not _belongs_to_execnet(thread):
            return f"the thread {thread.name!r} is running"
    if any(name.startswith("pt_autograd") for name in _native_thread_names()):
        return "PyTorch's autograd threads are running"
    return None


def _belongs_to_execnet(thread: threading.Thread) -> bool:
    """Whether ``thread`` receives for a pytest-xdist worker: it holds no lock that a forked copy needs."""
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "execnet":
            return True
        frame = frame.f_back
    return False


def _native_thread_names() -> list[str]:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(path.read_text())
        except OSError:
            pass  # it has ended
    return names


class Isolation:
    """Runs items of a session as ranks, one process at a time.

    ``warm_up`` names a function, "module:function", that is called without arguments in the processes that
    ranks come from, to import what ranks need; it must not compute anything. ``method`` is "fork", "spawn" or
    None for fork where that is safe.
    """

    def __init__(self, session: pytest.Session, warm_up: str = "", method: str | None = None) -> None:
        if method not in (None, "fork", "spawn"):
            raise ValueError(f"method must be 'fork', 'spawn' or None, not {method!r}")
        self._session = session
        self._warm_up = warm_up
        self._method = method
        self._server: Server | None = None
        self._started = False

    def start(self) -> None:
        """Fork the fork server; call it after collection and before any test runs. Later calls do nothing."""
        if self._started:
            return
        if in_child():
            raise RuntimeError("a rank process cannot isolate tests")
        self._started = True
        method = self._method or ("spawn" if fork_is_safe() else "fork")
        if method == "fork":
            self._server = Server(self._session, self._warm_up)

    def run(self, item: pytest.Item, assignment: Assignment, timeout: float | None) -> RankResult:
        """Run ``item`` as one rank; ``timeout`` is in seconds, None for no limit.

        Raises pytest.exit.Exception and KeyboardInterrupt where the test did. Anything else is in the result.
        """
        self.start()
        started = time.time()
        payload = pickle.dumps(assignment)
        if self._server is not None and self._server.knows(item):
            pytest_internals.flush_output(item.config)
            try:
                remains = self._server.run(item, payload, timeout)
            except ServerDied as error:
                self._server = None  # from here on ranks are spawned: tests may have run in this process
                remains = Remains(error=f"The test was lost: {error}")
        else:
            remains = spawned.spawn(item, payload, timeout, self._warm_up)
        return to_result(item, remains, started)

    def close(self) -> None:
        """End the fork server and wait for it. Later calls do nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
