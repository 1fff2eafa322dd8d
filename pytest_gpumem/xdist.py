"""What goes another way where pytest-xdist runs the tests."""

from __future__ import annotations

import pytest


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def nodeid_of(item: pytest.Item) -> str:
    """The node id as a plain run knows it: in its workers, `--dist=loadgroup` appends the test's group to it."""
    grouped = is_worker(item.config) and getattr(item.config.option, "loadgroup", False)
    if grouped and item.get_closest_marker("xdist_group") is not None:
        return item.nodeid.rpartition("@")[0]
    return item.nodeid


def refuse(session: pytest.Session, errors: dict[str, str]) -> None:
    """End the run before any test: `errors` are whole messages, by the node that each is about.

    A usage error in a worker would reach nobody, so each message goes to the controller as an error in collecting its test.
    """
    if not is_worker(session.config):
        shown = list(errors.values())
        more = [f"... and {len(shown) - 20} more"] if len(shown) > 20 else []
        raise pytest.UsageError("\n".join([*shown[:20], *more]))
    for nodeid, message in errors.items():
        report = pytest.CollectReport(nodeid, "failed", message, None)
        session.config.hook.pytest_collectreport(report=report)
    session.items.clear()
