"""What one rank process is told about its place in the test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Assignment:
    """The part of a test that one process runs.

    ``reports`` is true for the process whose TestReports stand for the test. ``other_ranks`` holds what
    earlier processes of the same test left as results; it must be picklable.
    """

    rank: int = 0
    reports: bool = True
    other_ranks: tuple[Any, ...] = ()


ASSIGNMENT: pytest.StashKey[Assignment] = pytest.StashKey()
"""Where an item's stash holds its assignment, inside the rank process."""

_in_child = False


def in_child() -> bool:
    """Whether this process is a rank process, started to run one item."""
    return _in_child


def enter_child() -> None:
    """Mark this process as a rank process, for good."""
    global _in_child
    _in_child = True
