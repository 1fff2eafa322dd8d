"""pytest's way in: options, the marker, the fixture, and what is checked while tests are collected. Imports no torch."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem import availability, options
from pytest_gpumem.marker import ARGUMENTS, MarkerError
from pytest_gpumem.options import OPTIONS, SETTINGS
from pytest_gpumem.session import Session
from pytest_gpumem.xdist import refuse

if TYPE_CHECKING:
    from pytest_gpumem.fixture import GpuMem


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"gpumem({', '.join(f'{name}=None' for name in ARGUMENTS)}): measure the test's GPU memory and check it",
    )
    config.stash[OPTIONS] = options.read(config)
    config.pluginmanager.register(Session(config, config.stash[OPTIONS]), "gpumem_session")


def pytest_report_header(config: pytest.Config) -> str:
    chosen = config.stash[OPTIONS]
    if chosen.disabled:
        return "gpumem: disabled"
    gpu = chosen.above.get("gpu")
    card = f"{gpu} for every test" if gpu else f"{chosen.default_gpu} unless a test names its card"
    return f"gpumem: virtual GPUs, {card}"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    if (
        isinstance(collector, pytest.Module)
        and not collector.config.stash[OPTIONS].disabled
        and availability.concerns(collector.path)
    ):
        with availability.announced():
            return (yield)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Settings of every test that will run: a wrong argument ends the run before any test."""
    chosen = session.config.stash[OPTIONS]
    errors: dict[str, str] = {}
    marked = []
    for item in session.items:
        try:
            settings = options.settings_of(item, chosen)
        except MarkerError as error:
            errors[item.nodeid] = f"{item.nodeid}: {error}"
            continue
        if settings is not None:
            item.stash[SETTINGS] = settings
            marked.append(item)
    errors = errors or _wrong_baseline_files(chosen, marked)
    if errors:
        refuse(session, errors)
    elif marked:
        from pytest_gpumem.execution import Execution

        session.config.pluginmanager.register(Execution(session), "gpumem_execution")


def _wrong_baseline_files(chosen: options.Options, items: list[pytest.Item]) -> dict[str, str]:
    """The messages of the baseline files that these tests need and that cannot be read, by test module."""
    if not items:
        return {}
    from pytest_gpumem.baselines import BaselineError, BaselineStore, split_nodeid

    store = BaselineStore(chosen.baseline_dir)
    wrong = {}
    for module in sorted({split_nodeid(item.nodeid)[0] for item in items}):
        try:
            store.tests(module)
        except BaselineError as error:
            wrong[module] = str(error)
    return wrong


@pytest.fixture
def gpumem(request: pytest.FixtureRequest) -> GpuMem:
    """Training steps on a GPU that is measured: `.train`, `.parallelize`, `.steps`, `.measure`, `.report`, `.device`."""
    from pytest_gpumem.fixture import GpuMem
    from pytest_gpumem.running import RUNNING

    return GpuMem(request.node.stash[RUNNING].measurement)
