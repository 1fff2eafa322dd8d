"""Words for how a rank process died."""

from __future__ import annotations

import re
import signal

_MEANING = {
    "SIGSEGV": "segmentation fault",
    "SIGABRT": "it aborted",
    "SIGBUS": "bus error",
    "SIGFPE": "arithmetic error in native code",
    "SIGILL": "illegal instruction",
}
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)[^\n]*\n((?:  [^\n]*\n?)*)", re.MULTILINE)
_PYTEST_FRAME = re.compile(r'^  File ".*[/\\](?:_pytest|pluggy)[/\\]')


def describe(
    *,
    status: int,
    phase: str,
    fault: str,
    main_thread: int | None,
    timeout: float | None,
    peak_resident_bytes: int | None,
) -> tuple[str, str]:
    """One line that says how a process died, and the whole text of the failure.

    ``status`` is the exit status, negative for a signal; ``fault`` is what faulthandler wrote; ``timeout`` is
    the time limit in seconds where that was the cause.
    """
    during = f"in the {phase} phase"
    if timeout is not None:
        summary = f"the test's process did not finish within {timeout:g} s and was killed {during}"
        heading = "It hung here"
        frames = _frames(fault, main_thread)
    else:
        summary = f"the test's process {_manner(status)} {during}"
        heading = "It was here"
        frames = _frames(fault, None) or _frames(fault, main_thread)
    parts = [summary[0].upper() + summary[1:] + "."]
    if "SIGKILL" in summary:
        peak = "" if peak_resident_bytes is None else f" It held {peak_resident_bytes / 2**30:.2f} GiB at most."
        parts.append(f"The usual cause is the host running out of memory.{peak}")
        summary += "; the usual cause is the host running out of memory"
    if frames:
        parts.append(f"{heading} (most recent call first):\n" + "\n".join(frames))
    elif timeout is not None:
        parts.append("It left no traceback: it was stopped, or too deep in native code for Python's watchdog.")
    elif status < 0:
        parts.append("It left no Python traceback.")
    return summary, "\n\n".join(parts)


def all_threads(fault: str) -> str:
    """The tracebacks in ``fault`` where there is more than one thread, else an empty string."""
    threads = list(_THREAD.finditer(fault))
    return "\n".join(thread.group().rstrip() for thread in threads) if len(threads) > 1 else ""


def _manner(status: int) -> str:
    if status >= 0:
        return f"called os._exit({status}), or native code called exit({status}),"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}" + (f" ({_MEANING[name]})" if name in _MEANING else "")


def _frames(fault: str, thread: int | None) -> list[str]:
    """The frames of a thread (None: of the one that met the fault), without those of pytest around it."""
    for match in _THREAD.finditer(fault):
        current = match.group().startswith("Current thread")
        if current if thread is None else int(match.group(1), 16) == thread:
            break
    else:
        return []
    frames = match.group(2).splitlines()
    own = next((index for index, line in enumerate(frames) if _PYTEST_FRAME.match(line)), len(frames))
    if own == 0 or own == len(frames):
        return frames
    return [*frames[:own], f"  ({len(frames) - own} frames of pytest)"]
