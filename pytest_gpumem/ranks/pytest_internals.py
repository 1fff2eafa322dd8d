"""Every private door of pytest that this package uses. Tried with pytest 8.0, 8.4 and 9.2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback
from _pytest.config import _prepareconfig
from _pytest.main import wrap_session
from _pytest.runner import runtestprotocol


def run_phases(item: pytest.Item) -> None:
    """Set up, call and tear down ``item`` and all it needs, logging nothing."""
    runtestprotocol(item, log=False, nextitem=None)


def tear_down_to(session: pytest.Session, nextitem: pytest.Item | None) -> None:
    """Tear down the collectors that ``nextitem`` does not need (all of them for None)."""
    session._setupstate.teardown_exact(nextitem)


def is_set_up_beyond(session: pytest.Session, nextitem: pytest.Item | None) -> bool:
    """Whether a collector is set up that ``nextitem`` does not need."""
    needed = nextitem.listchain() if nextitem is not None else []
    active = list(session._setupstate.stack)
    return active != needed[: len(active)]


def capture_method(config: pytest.Config) -> str:
    """The value of ``--capture``: fd, sys, tee-sys or no."""
    return str(config.getoption("capture", "no"))


def start_fresh_capture(config: pytest.Config, stdout: int, stderr: int) -> None:
    """Empty the global capture and suspend it; from here on it shares nothing with the process forked from.

    The stream objects stay: logging handlers made while modules were imported hold them. With ``--capture=fd`` they write
    to the given descriptors, so that a dead process's output can be read.
    """
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    if manager is None:
        return
    if manager._global_capturing is None:
        manager.start_global_capturing()
    manager.suspend_global_capture()
    if capture_method(config) == "fd":
        capturing: Any = manager._global_capturing
        os.dup2(stdout, capturing.out.tmpfile.fileno(), inheritable=False)
        os.dup2(stderr, capturing.err.tmpfile.fileno(), inheritable=False)
    elif capture_method(config) != "no":
        manager.read_global_capture()


def captured(config: pytest.Config, item: pytest.Item, when: str, run: Callable[[], None]) -> None:
    """Call ``run`` with its output captured into the item's report sections."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    if manager is None:
        run()
    else:
        with manager.item_capture(when, item):
            run()


def flush_output(config: pytest.Config) -> None:
    """Empty the buffers of the standard streams and of the terminal reporter."""
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    for stream in (getattr(reporter, "_tw", None), sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            pass


def base_temp(config: pytest.Config) -> Path | None:
    """The session's temporary directory, made if it does not exist yet; None without the tmpdir plugin."""
    factory: Any = getattr(config, "_tmp_path_factory", None)
    return factory.getbasetemp() if factory is not None else None


def detach(config: pytest.Config) -> None:
    """Take away the plugins that talk over pipes and terminals of the process forked from.

    These are the pytest-xdist worker's link to its controller, and the debugger of ``--pdb`` and ``--trace``.
    """
    for name in ("pdbinvoke", "pdbtrace"):
        if config.pluginmanager.hasplugin(name):
            config.pluginmanager.unregister(name=name)
    for plugin in config.pluginmanager.get_plugins():
        if hasattr(plugin, "sendevent") and hasattr(plugin, "channel"):
            config.pluginmanager.unregister(plugin)


def silence_terminal(config: pytest.Config) -> None:
    """Let the terminal reporter, which other plugins expect to be there, write to nowhere."""
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter._tw._file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process


def prepare_config(args: Sequence[str], plugins: Sequence[object]) -> pytest.Config:
    """A config for ``args``, with the initial conftest files loaded and nothing configured yet."""
    return _prepareconfig(list(args), list(plugins))


def run_session(config: pytest.Config, do: Callable[[pytest.Config, pytest.Session], None]) -> None:
    """Configure, start a session, call ``do``. Errors go to stderr, as in any pytest run."""
    wrap_session(config, do)


def failure_repr(item: pytest.Item, summary: str, text: str) -> ReprExceptionInfo:
    """A longrepr that prints ``text`` and whose line in the short summary is ``summary``."""
    path, line, _ = item.location
    return ReprExceptionInfo(
        reprtraceback=ReprTraceback([ReprEntryNative([text + "\n"])], extraline=None, style="native"),
        reprcrash=ReprFileLocation(path, (line or 0) + 1, summary),
    )
