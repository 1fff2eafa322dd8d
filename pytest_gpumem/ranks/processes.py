"""Ending process groups, and ties between a process and its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def has_ended(pid: int) -> bool:
    """Whether a child process has ended; it stays a zombie, so that its number and its group's stay taken.

    Not on macOS with Python < 3.13, nor on Windows.
    """
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def kill_group(pid: int) -> None:
    """Kill the group that ``pid`` leads, and ``pid`` itself if it has not made its group yet."""
    if not hasattr(os, "killpg"):
        os.kill(pid, signal.SIGTERM)
        return
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def follow_parent(parent: int, number: int) -> None:
    """Have the kernel send this process the signal ``number`` when ``parent`` ends (Linux; else nothing)."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
