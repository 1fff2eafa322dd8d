"""pytest's way in: options, the marker, the fixture, and the hooks around a marked test. Imports no torch."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem import availability, options
from pytest_gpumem.marker import ARGUMENTS, MarkerError, Settings
from pytest_gpumem.ranks import ASSIGNMENT, Assignment, Isolation, conclude, in_child
from pytest_gpumem.session import Session

if TYPE_CHECKING:
    from pytest_gpumem.fixture import GpuMem
    from pytest_gpumem.running import Running

OPTIONS: pytest.StashKey[options.Options] = pytest.StashKey()
SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()
ISOLATION: pytest.StashKey[Isolation] = pytest.StashKey()
RUNNING: pytest.StashKey[Running] = pytest.StashKey()


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


# -- collection


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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Settings of every test that will run: a wrong argument ends the run before any test."""
    chosen = session.config.stash[OPTIONS]
    errors = []
    for item in session.items:
        try:
            settings = options.settings_of(item, chosen)
        except MarkerError as error:
            errors.append(f"{item.nodeid}: {error}")
            continue
        if settings is not None:
            item.stash[SETTINGS] = settings
    if errors:
        more = [f"... and {len(errors) - 20} more"] if len(errors) > 20 else []
        raise pytest.UsageError("\n".join([*errors[:20], *more]))
    marked = [item for item in session.items if SETTINGS in item.stash]
    _check_baseline_files(chosen, marked)
    if any(_isolated(item) for item in marked) and not session.config.option.collectonly and not in_child():
        session.stash[ISOLATION] = Isolation(session, warm_up="pytest_gpumem.measurement:warm_up")


def _check_baseline_files(chosen: options.Options, items: list[pytest.Item]) -> None:
    from pytest_gpumem.baselines import BaselineError, BaselineStore, split_nodeid

    store = BaselineStore(chosen.baseline_dir)
    try:
        for module in {split_nodeid(item.nodeid)[0] for item in items}:
            store.tests(module)
    except BaselineError as error:
        raise pytest.UsageError(str(error)) from None


# -- running


def _isolated(item: pytest.Item) -> bool:
    """In a process of its own: unless a debugger is asked for, or the test cannot run here anyway."""
    option = item.config.option
    settings = item.stash[SETTINGS]
    debugged = option.usepdb or getattr(option, "trace", False)
    disabled = item.config.stash[OPTIONS].disabled
    return settings.isolate and settings.device != "cuda" and not debugged and not disabled


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if ISOLATION in session.stash:
        session.stash[ISOLATION].start()


def pytest_unconfigure(config: pytest.Config) -> None:
    session = getattr(config.pluginmanager.get_plugin("session"), "stash", None)
    if session is not None and ISOLATION in session:
        session[ISOLATION].close()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if ISOLATION in session.stash:
        session.stash[ISOLATION].close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    isolation = item.session.stash.get(ISOLATION, None)
    if isolation is None or in_child() or SETTINGS not in item.stash or not _isolated(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in conclude(item, nextitem, _run_ranks(isolation, item)):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_ranks(isolation: Isolation, item: pytest.Item) -> list[pytest.TestReport]:
    """Play each rank in a process of its own; the first one goes last, sees the others' figures, and reports for all."""
    settings = item.stash[SETTINGS]
    first, *others = settings.ranks
    figures = []
    for rank in others:
        reports = isolation.run(item, Assignment(rank, reports=False), settings.timeout).reports
        if any(report.failed for report in reports):
            for report in reports:
                report.sections.append(("gpumem", f"this is rank {rank} of {settings.world_size}"))
            return reports
        figures += [report.gpumem for report in reports if hasattr(report, "gpumem")]
    return isolation.run(item, Assignment(first, other_ranks=tuple(figures)), settings.timeout).reports


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    if SETTINGS in item.stash:
        chosen, settings = item.config.stash[OPTIONS], item.stash[SETTINGS]
        if chosen.disabled:
            pytest.skip("gpumem is disabled")
        if settings.device == "cuda":
            _refuse_cuda(chosen)
        from pytest_gpumem.running import Running

        item.stash[RUNNING] = Running(item, settings, chosen, item.stash.get(ASSIGNMENT, Assignment(settings.ranks[0])))
        item.stash[RUNNING].start()
    return (yield)


def _refuse_cuda(chosen: options.Options) -> None:
    from pytest_gpumem.gpus import why_not_cuda

    reason = why_not_cuda()
    if chosen.cuda_required:
        pytest.fail(f"--gpumem-device=cuda: {reason}", pytrace=False)
    pytest.skip(f'device="cuda": {reason}')


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    running = item.stash.get(RUNNING, None)
    if running is None:
        return (yield)
    try:
        result = yield
    except (pytest.skip.Exception, pytest.exit.Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise running.body_raised(error)  # noqa: B904 - the same error
    running.body_passed()
    return result


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        running = item.stash.get(RUNNING, None)
        if running is not None:
            running.stop()
            del item.stash[RUNNING]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    running = item.stash.get(RUNNING, None)
    if running is not None and report.when == "call" and running.data is not None:
        report.gpumem = running.data
    return report


@pytest.fixture
def gpumem(request: pytest.FixtureRequest) -> GpuMem:
    """Training steps on a GPU that is measured: `.train`, `.parallelize`, `.steps`, `.measure`, `.report`, `.device`."""
    from pytest_gpumem.fixture import GpuMem

    return GpuMem(request.node.stash[RUNNING].measurement)
