from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from .suites import Suite


@pytest.fixture(scope="session")
def torch_imported() -> Iterator[None]:
    """Torch and all that ranks need, imported once, and left out of the garbage collections that end each pytest run."""
    from pytest_gpumem.warm_up import warm_up

    warm_up()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, torch_imported: None) -> Suite:
    # A module that is written twice within a second would be read from the cache of its first version.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
    return Suite(pytester)
