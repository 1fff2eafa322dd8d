"""A test suite as a user writes it, and whole pytest runs of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_gpumem.ranks import fork_is_safe

# `fill(n)` puts n bytes on the GPU, in blocks of whole 512 bytes. `linear()` has one parameter of 1024 bytes.
HEAD = """
import pytest
import torch
from torch import nn

def fill(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

def linear():
    return nn.Linear(16, 16, bias=False)

def rows():
    return torch.ones(4, 16)

def total(output, batch):
    return output.sum()
"""


class Suite:
    """Test modules in a directory of their own. What a run printed is `text(result)`."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path = pytester.path

    def write(self, text: str, name: str = "test_it") -> Suite:
        """A test module: `HEAD`, then `text`."""
        return self.write_plain(HEAD + text, f"{name}.py")

    def write_plain(self, text: str, name: str) -> Suite:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return self

    def ini(self, *settings: str) -> Suite:
        return self.write_plain("\n".join(["[pytest]", *settings, ""]), "pytest.ini")

    def run(self, *arguments: str) -> pytest.RunResult:
        """Run pytest here: in this process, which has torch, unless ranks cannot be forked from it any more."""
        if fork_is_safe() is not None:
            return self.run_apart(*arguments)
        return self.pytester.runpytest_inprocess("-p", "no:hypothesispytest", *arguments)

    def run_apart(self, *arguments: str) -> pytest.RunResult:
        """Run pytest here in a new process."""
        return self.pytester.runpytest_subprocess("-p", "no:hypothesispytest", *arguments)

    def measure(self, *arguments: str) -> dict[str, dict[str, Any]]:
        """Run, and give what the JSON file says of each test, by the test's name without its module."""
        self.run("--gpumem-json=figures.json", *arguments)
        return self.figures()

    def figures(self, name: str = "figures.json") -> dict[str, dict[str, Any]]:
        tests = json.loads((self.path / name).read_text())["tests"]
        return {test["nodeid"].partition("::")[2]: test for test in tests}

    def stored(self, name: str = "baselines/test_it.json") -> dict[str, dict[str, Any]]:
        """A baseline file's entries: test -> environment -> entry."""
        tests: dict[str, dict[str, Any]] = json.loads((self.path / name).read_text())["tests"]
        return tests

    def files(self, directory: str = "baselines") -> dict[str, bytes]:
        """Every file below a directory, with what is in it."""
        root = self.path / directory
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def text(result: pytest.RunResult) -> str:
    """Everything that a run printed, with one space wherever there were spaces and line ends."""
    return " ".join(" ".join([*result.outlines, *result.errlines]).split())


def outcomes(result: pytest.RunResult) -> dict[str, str]:
    """Test name -> PASSED, FAILED, ERROR, ...: from a run with -v and without workers."""
    found = {}
    for line in result.outlines:
        name, _, rest = line.partition(" ")
        if "::" in name and rest.split():
            found[name.partition("::")[2]] = rest.split()[0]
    return found


def peak(test: dict[str, Any], metric: str = "allocated") -> int:
    """The peak of a test's first rank, from the JSON file, in bytes."""
    nbytes: int = test["ranks"][0]["peak_bytes"][metric]
    return nbytes
