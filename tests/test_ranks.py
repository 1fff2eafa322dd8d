"""Ranks in processes of their own, seen from whole pytest runs through a plugin as small as one can be."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import pytest_gpumem
from pytest_gpumem.ranks import Assignment, crash, fork_is_safe, wire
from pytest_gpumem.ranks.child import picklable

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

CONFTEST = """
import os, pytest
from pytest_gpumem import ranks

PID = os.getpid()

def pytest_addoption(parser):
    parser.addoption("--rank-method", default=None)
    parser.addoption("--rank-timeout", type=float, default=None)
    parser.addoption("--rank-warm-up", default="")

def pytest_configure(config):
    config.addinivalue_line("markers", "isolated: in a process of its own")

@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    option = session.config.option
    isolation = ranks.Isolation(session, option.rank_warm_up, option.rank_method)
    session.config.isolation = isolation
    isolation.start()
    try:
        return (yield)
    finally:
        isolation.close()
        isolation.close()

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if item.get_closest_marker("isolated") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    assignment = ranks.Assignment(rank=3, other_ranks=({"peak": 7},))
    result = item.config.isolation.run(item, assignment, item.config.option.rank_timeout)
    for report in ranks.conclude(item, nextitem, result.reports):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True

def pytest_runtest_logreport(report):
    if hasattr(report, "gpumem"):
        print("extra:", report.when, report.gpumem)

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    assignment = item.stash.get(ranks.ASSIGNMENT, None)
    if assignment is not None:
        report.gpumem = {"rank": assignment.rank, "others": assignment.other_ranks, "child": ranks.in_child()}
    return report
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def environment(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the small plugin; returns the temporary directory of the runs in it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(pytest_gpumem.__file__).parents[1]))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    temporary = pytester.mkdir("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    pytester.makeconftest(CONFTEST)
    return temporary


@pytest.fixture
def run(pytester: pytest.Pytester, environment: Path) -> Run:
    """Runs a test module's text with options."""

    def run(text: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_it="import os, pytest, signal, subprocess, sys, time\n" + text)
        return pytester.runpytest_subprocess("-p", "no:gpumem", *options, timeout=100)

    return run


METHODS = pytest.mark.parametrize("method", ["--rank-method=fork", "--rank-method=spawn"])


@METHODS
def test_outcomes_sections_and_properties_come_back(run: Run, method: str) -> None:
    result = run(
        """
import conftest, warnings
pytestmark = pytest.mark.isolated

@pytest.fixture
def broken_setup(): raise ValueError("broken setup")
@pytest.fixture
def broken_teardown():
    yield
    raise ValueError("broken teardown")

def test_passes(record_property, request):
    print("printed by a passing test")
    record_property("peak", (1, 2))
    assert (conftest.PID == os.getpid()) == (request.config.option.rank_method == "spawn")
def test_fails():
    print("to stdout"); print("to stderr", file=sys.stderr); os.system("echo from below")
    assert [1, 2, 3] == [1, 2, 4]
def test_skips(): pytest.skip("not today")
@pytest.mark.xfail(reason="known")
def test_xfails(): assert 0
@pytest.mark.xfail(strict=True)
def test_xpasses(): pass
def test_setup(broken_setup): pass
def test_teardown(broken_teardown): print("before the teardown")
def test_warns(): warnings.warn("careful there")
def test_unpicklable(record_property): record_property("odd", lambda: 0)
""",
        method,
        "-rA",
        "--junitxml=out.xml",
        "-ojunit_family=xunit1",
    )
    result.assert_outcomes(passed=4, failed=2, skipped=1, xfailed=1, errors=2, warnings=1)
    result.stdout.fnmatch_lines(
        [
            "*_ ERROR at setup of test_setup _*",
            "*ValueError: broken setup",
            "*_ ERROR at teardown of test_teardown _*",
            "*ValueError: broken teardown",
            "*before the teardown*",
            "*At index 2 diff: 3 != 4*",
            "*Captured stdout call*",
            "to stdout",
            "from below",
            "*Captured stderr call*",
            "to stderr",
            "*XPASS(strict)*",
            "*UserWarning: careful there*",
            "printed by a passing test",
            "SKIPPED*test_it.py:*: not today",
        ]
    )
    junit = Path("out.xml").read_text(encoding="utf-8")
    assert '<property name="peak" value="(1, 2)"' in junit
    assert "lambda" in junit


@METHODS
def test_assignment_is_given_and_extra_attributes_survive(run: Run, method: str) -> None:
    result = run(
        """
from pytest_gpumem import ranks
@pytest.mark.isolated
def test_given(request):
    assert ranks.in_child()
    assert request.node.stash[ranks.ASSIGNMENT] == ranks.Assignment(3, True, ({"peak": 7},))
def test_not_given(request):
    assert not ranks.in_child()
    assert ranks.ASSIGNMENT not in request.node.stash
""",
        method,
        "-s",
    )
    result.assert_outcomes(passed=2)
    for phase in ("setup", "call", "teardown"):
        result.stdout.fnmatch_lines([f"*extra: {phase} {{'rank': 3, 'others': ({{'peak': 7}},), 'child': True}}"])


@pytest.mark.parametrize("capture", ["fd", "sys", "tee-sys", "no"])
def test_every_kind_of_capture(run: Run, capture: str) -> None:
    result = run(
        """
@pytest.mark.isolated
def test_prints(capsys):
    print("swallowed by capsys")
    assert capsys.readouterr().out
    with capsys.disabled(): print("past all capture")
    print("kept")
    assert 0
@pytest.mark.isolated
def test_native():
    print("printed"); print("oops", file=sys.stderr)
    assert 0
""",
        f"--capture={capture}",
        "--tb=short",
    )
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert "swallowed" not in text
    assert text.count("past all capture\n") == 1
    assert text.count("\nkept\n") == (2 if capture == "tee-sys" else 1)
    assert text.count("printed\n") == {"fd": 1, "sys": 1, "tee-sys": 2, "no": 1}[capture] + text.count('print("printed')
    assert ("- Captured stdout call -" in text) == (capture != "no")


@pytest.mark.parametrize("capture", ["fd", "sys", "tee-sys"])
def test_a_log_handler_made_at_import_writes_into_the_capture(run: Run, capture: str) -> None:
    """A library's handler holds the sys.stderr of the moment in which it was imported."""
    result = run(
        """
import logging
handler = logging.StreamHandler(sys.stderr)
sys.stderr.write("while collecting\\n")

@pytest.mark.isolated
def test_logs():
    handler.emit(logging.LogRecord("x", logging.WARNING, __file__, 1, "watch out", (), None))
    assert 0
""",
        f"--capture={capture}",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Captured stderr call*", "watch out"], consecutive=True)
    assert "closed file" not in result.stdout.str() + result.stderr.str()


def test_fixtures_are_torn_down_where_they_were_set_up(run: Run) -> None:
    result = run(
        """
PID = os.getpid()
def tell(what): open("log", "a").write(f"{what} {os.getpid() == PID}\\n")
@pytest.fixture(scope="session")
def session_wide():
    tell("session up")
    yield
    tell("session down")
@pytest.fixture(scope="module")
def module_wide(session_wide):
    tell("module up")
    yield
    tell("module down")
def test_1(module_wide): tell("1")
@pytest.mark.isolated
def test_2(module_wide): tell("2")
def test_3(module_wide): tell("3")
@pytest.mark.isolated
def test_4(module_wide): tell("4")
"""
    )
    result.assert_outcomes(passed=4)
    assert Path("log").read_text().splitlines() == [
        "session up True", "module up True", "1 True",
        "session up False", "module up False", "2 False", "module down False", "session down False",
        "3 True",
        "session up False", "module up False", "4 False", "module down False", "session down False",
        "module down True", "session down True",
    ]  # fmt: skip


def test_a_failing_teardown_left_over_in_the_parent_is_reported(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(test_later="def test_later(): pass")
    result = run(
        """
@pytest.fixture(scope="module")
def module_wide(request):
    yield
    print("told while tearing down")
    raise ValueError("left over")
def test_1(module_wide): pass
@pytest.mark.isolated
def test_2(): pass
""",
        "--junitxml=out.xml",
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_2*",
            "*ValueError: left over",
            "*Captured stdout teardown*",
            "told while*",
        ]
    )
    assert 'errors="1" failures="0" skipped="0"' in Path("out.xml").read_text(encoding="utf-8")


DEATHS = {
    "os.kill(os.getpid(), signal.SIGSEGV)": "killed by SIGSEGV (segmentation fault) in the call phase",
    "os.abort()": "killed by SIGABRT (it aborted) in the call phase",
    "os._exit(3)": "called os._exit(3)*in the call phase",
    "os._exit(0)": "called os._exit(0)*in the call phase",
    "os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL in the call phase",
}


@METHODS
@pytest.mark.parametrize("death", DEATHS)
def test_a_death_fails_its_own_test_only(run: Run, death: str, method: str) -> None:
    result = run(
        f"""
pytestmark = pytest.mark.isolated
@pytest.fixture
def prints(): print("printed by the fixture")
def deeper(): {death}
def test_dies(prints):
    print("printed before"); os.system("echo from below; echo complaint >&2")
    deeper()
def test_goes_on(): pass
""",
        method,
        "--junitxml=out.xml",
        "-ojunit_logging=all",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            f"The test's process *{DEATHS[death]}.",
            "*Captured stdout setup*",
            "printed by the fixture",
            "*Captured stdout call*",
            "printed before",
            "from below",
            "*Captured stderr call*",
            "complaint",
            "FAILED test_it.py::test_dies - the test's process *",
        ]
    )
    if "SIGSEGV" in death or "abort" in death:
        result.stdout.fnmatch_lines(
            ["*most recent call first*", "*test_it.py*in deeper", "*in test_dies", "*frames of pytest)"]
        )
    if "SIGKILL" in death:
        result.stdout.fnmatch_lines(["*host running out of memory*"])
    assert "printed before" in Path("out.xml").read_text(encoding="utf-8")


@pytest.mark.parametrize(("phase", "outcomes"), [("setup", {"errors": 1}), ("teardown", {"passed": 1, "errors": 1})])
def test_death_outside_the_call(run: Run, phase: str, outcomes: dict[str, int]) -> None:
    result = run(
        f"""
@pytest.fixture
def fixture():
    if {phase == "setup"}: os._exit(4)
    yield
    os._exit(4)
@pytest.mark.isolated
def test_dies(fixture): pass
"""
    )
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines([f"*ERROR at {phase} of test_dies*", f"*os._exit(4)*in the {phase} phase."])


HANGS = {
    "time.sleep(1000)": True,
    "import ctypes; ctypes.PyDLL(None).sleep(1000)": True,  # holds the GIL
    "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 60)); time.sleep(1000)": True,
    "os.kill(os.getpid(), signal.SIGSTOP)": False,
}


@pytest.mark.parametrize("hang", HANGS)
def test_timeout(run: Run, hang: str) -> None:
    result = run(
        f"""
pytestmark = pytest.mark.isolated
import threading
def deeper(): {hang}
def test_hangs():
    threading.Thread(target=time.sleep, args=[1000], daemon=True).start()
    deeper()
def test_goes_on(): pass
""",
        "--rank-timeout=0.7",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*did not finish within 0.7 s and was killed in the call phase."])
    if HANGS[hang]:
        result.stdout.fnmatch_lines(["*It hung here*", "*in deeper", "*in test_hangs", "*frames of pytest)"])
        result.stdout.fnmatch_lines(["*All threads*", "Thread 0x*"])
    else:
        result.stdout.fnmatch_lines(["It left no traceback: it was stopped*"])


def test_timeout_in_teardown_after_a_failure(run: Run) -> None:
    result = run(
        """
@pytest.fixture
def slow_to_end():
    yield
    time.sleep(1000)
@pytest.mark.isolated
def test_hangs(slow_to_end): assert 0
""",
        "--rank-timeout=0.7",
    )
    result.assert_outcomes(failed=1, errors=1)
    result.stdout.fnmatch_lines(["*did not finish within 0.7 s*teardown phase.", "*It hung here*", "*in slow_to_end"])


def test_timeout_of_a_spawned_rank(run: Run) -> None:
    result = run(
        "@pytest.mark.isolated\ndef test_hangs(): time.sleep(1000)",
        "--rank-timeout=0.5",
        "--rank-method=spawn",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*did not finish within 0.5 s*", "*It hung here*", "*in test_hangs"])


LIVES = """
def lives(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
"""


@on_linux
@METHODS
def test_what_a_test_leaves_running_is_killed(run: Run, method: str) -> None:
    result = run(
        LIVES
        + """
@pytest.mark.isolated
def test_leaves():
    if os.fork() == 0:
        time.sleep(1000)
    process = subprocess.Popen(["sleep", "1000"])
    assert lives(process.pid)
    open("pid", "w").write(str(process.pid))
def test_gone():
    pid = int(open("pid").read())
    while lives(pid): time.sleep(0.01)
""",
        method,
    )
    result.assert_outcomes(passed=2)


@on_linux
def test_nothing_is_left_of_fifty_tests(run: Run, environment: Path) -> None:
    result = run(
        """
def children(pid): return [int(child) for child in open(f"/proc/{pid}/task/{pid}/children").read().split()]
def fds(pid): return len(os.listdir(f"/proc/{pid}/fd"))
def figures():
    server, = children(os.getpid())
    return fds(os.getpid()), fds(server), children(server), sorted(os.listdir(os.environ["TMPDIR"]))
@pytest.mark.isolated
def test_first(): pass
def test_before():
    global before
    before = figures()
@pytest.mark.isolated
@pytest.mark.parametrize("number", range(50))
def test_many(number):
    if number == 30: os._exit(1)
def test_after():
    assert figures() == before
""",
    )
    result.assert_outcomes(passed=52, failed=1)
    assert not list(environment.iterdir())


def test_spawned_ranks_leave_no_files(run: Run, environment: Path) -> None:
    run("@pytest.mark.isolated\ndef test_passes(tmp_path): pass", "--rank-method=spawn").assert_outcomes(passed=1)
    assert not list(environment.iterdir())


@METHODS
def test_temporary_directories_are_distinct(run: Run, method: str) -> None:
    result = run(
        """
MIXED = [pytest.param(number, marks=[pytest.mark.isolated] * (number % 3)) for number in range(4)]
@pytest.mark.parametrize("number", MIXED)
def test_it(number, tmp_path):
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").touch()
""",
        method,
        "--basetemp=base",
    )
    result.assert_outcomes(passed=4)
    assert len(list(Path("base").rglob("mine"))) == 4


def test_exitfirst(run: Run) -> None:
    result = run("pytestmark = pytest.mark.isolated\ndef test_1(): assert 0\ndef test_2(): pass", "-x")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])


def test_session_state_set_by_a_test(run: Run) -> None:
    result = run(
        "pytestmark = pytest.mark.isolated\n"
        "def test_1(request): request.session.shouldstop = 'that is enough'\n"
        "def test_2(): pass"
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*that is enough*"])


@METHODS
def test_pytest_exit(run: Run, method: str) -> None:
    result = run(
        """
pytestmark = pytest.mark.isolated
@pytest.fixture
def fixture():
    yield
    open("torn down", "w")
def test_1(fixture): pytest.exit("no point in going on", returncode=7)
def test_2(): pass
""",
        method,
    )
    assert result.ret == 7
    result.stdout.fnmatch_lines(["*Exit: no point in going on*"])
    assert Path("torn down").exists()


def test_keyboard_interrupt_in_a_test(run: Run) -> None:
    result = run(
        "pytestmark = pytest.mark.isolated\ndef test_1(): raise KeyboardInterrupt\ndef test_2(): open('no', 'w')"
    )
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*KeyboardInterrupt: in the test's process, at *test_it.py:3*"])
    assert not Path("no").exists()


@on_linux
@METHODS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_session(
    pytester: pytest.Pytester, environment: Path, number: signal.Signals, method: str
) -> None:
    if number == signal.SIGKILL and method.endswith("spawn"):
        pytest.skip("a spawned rank is not watched over by a server")
    pytester.makepyfile(
        test_it="""
import os, pytest, time
@pytest.mark.isolated
def test_hangs():
    open("pid.part", "w").write(f"{os.getpid()} {os.getppid()}")
    os.rename("pid.part", "pid")
    time.sleep(1000)
"""
    )
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:gpumem", method],
        stdout=subprocess.PIPE,
        start_new_session=True,
        # Whoever runs this suite in a shell's background has SIGINT ignored, and so would this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not Path("pid").exists():
        assert session.poll() is None
        time.sleep(0.01)
    session.send_signal(number)
    session.communicate()
    assert session.returncode in (pytest.ExitCode.INTERRUPTED, -signal.SIGKILL)
    for pid in Path("pid").read_text().split():
        while int(pid) != os.getpid() and int(pid) != session.pid and _lives(int(pid)):
            time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@on_linux
def test_a_warm_up_that_hangs_ends_with_the_session(run: Run) -> None:
    Path("warm.py").write_text("import ctypes\ndef up(): ctypes.PyDLL(None).sleep(1000)\n")
    result = run(
        """
def test_plain():
    server, = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()
    open("pid", "w").write(server)
    os.kill(os.getpid(), signal.SIGKILL)
""",
        "--rank-warm-up=warm:up",
    )
    assert result.ret == -signal.SIGKILL
    while _lives(int(Path("pid").read_text())):
        time.sleep(0.01)


@on_linux
def test_a_dead_server_costs_one_test(run: Run) -> None:
    result = run(
        "pytestmark = pytest.mark.isolated\n"
        "def test_1():\n    os.kill(os.getppid(), signal.SIGKILL)\n    time.sleep(1000)\n"
        "def test_2(): pass"
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["The test was lost: the fork server has ended (status -9)"])


def test_under_xdist_ranks_are_forked(run: Run) -> None:
    pytest.importorskip("xdist")
    result = run(
        """
import conftest, warnings
@pytest.mark.parametrize("number", range(8))
@pytest.mark.isolated
def test_isolated(number):
    assert conftest.PID != os.getpid()
    print("printed by", number)
    warnings.warn(f"warned by {number}")
    assert number != 3
    if number == 5: os.abort()
@pytest.mark.parametrize("number", range(8))
def test_plain(number):
    assert conftest.PID == os.getpid()
""",
        "-n2",
    )
    result.assert_outcomes(passed=14, failed=2, warnings=7)
    result.stdout.fnmatch_lines(["printed by 3"])
    result.stdout.fnmatch_lines(["*killed by SIGABRT*"])


def test_autograd_in_the_parent_does_not_matter(run: Run) -> None:
    pytest.importorskip("torch")
    result = run(
        """
def train():
    import torch
    weight = torch.randn(512, 512, requires_grad=True)
    (weight @ weight).sum().backward()
    assert weight.grad is not None
def test_1(): train()
@pytest.mark.isolated
def test_2():
    assert "warmed_up" in os.environ
    assert "torch" in sys.modules
    train()
def test_3(): train()
""",
        "--rank-timeout=60",
        "--rank-warm-up=warm:up",
    )
    # The first run fails for want of the module, which shows that the warm-up is not skipped.
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*Warming up the fork server failed.*", "*No module named 'warm'"])
    Path("warm.py").write_text("import os\ndef up():\n    import torch\n    os.environ['warmed_up'] = '1'\n")
    again = run(Path("test_it.py").read_text(), "--rank-timeout=60", "--rank-warm-up=warm:up")
    again.assert_outcomes(passed=3)


@on_linux
def test_parallel_work_before_the_fork_does_not_matter(run: Run) -> None:
    pytest.importorskip("torch")
    result = run(
        """
import torch
torch.set_num_threads(2)
def work():
    value = torch.randn(1000, 1000)
    return (value @ value + value.exp()).sum()
work()
@pytest.mark.isolated
def test_1(): work()
def test_2(): work()
""",
        "--rank-timeout=30",
    )
    result.assert_outcomes(passed=2)


@METHODS
def test_warnings_as_errors(run: Run, method: str) -> None:
    result = run(
        "import warnings\npytestmark = pytest.mark.isolated\n"
        "def test_warns(): warnings.warn('no', DeprecationWarning)\ndef test_passes(): pass",
        "-Werror",
        method,
    )
    result.assert_outcomes(passed=1, failed=1)


@METHODS
def test_large_output(pytester: pytest.Pytester, run: Run, method: str) -> None:
    pytester.makepyfile(
        sees="""
class Seen: config = None
def pytest_configure(config): Seen.config = config
def pytest_runtest_logreport(report):
    if report.when == 'call' and 'prints' in report.nodeid: Seen.config.seen = len(report.capstdout)
"""
    )
    result = run(
        """
@pytest.mark.isolated
def test_prints(request):
    for _ in range(10 * 1024): print("x" * 1023)
def test_seen(request): assert request.config.seen == 10 * 1024 * 1024
""",
        method,
        "-psees",
    )
    result.assert_outcomes(passed=2)


def test_spawned_ranks_get_options_and_plugins(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(given_plugin="import pytest\n@pytest.fixture\ndef from_plugin(): return 1")
    pytester.makefile(".ini", other="[pytest]\nmarkers = from_ini\n    isolated\nxfail_strict = true")
    result = run(
        """
import warnings
@pytest.mark.isolated
@pytest.mark.from_ini
class TestClass:
    @pytest.mark.parametrize("name", ["a::b", "c d[e]"])
    def test_it(self, name, from_plugin, request):
        assert request.config.option.rank_timeout == 50
        assert request.config.getini("xfail_strict")
        assert "from" in request.config.option.markexpr
""",
        "--rank-method=spawn",
        "--rank-timeout=50",
        "-p",
        "given_plugin",
        "-c",
        "other.ini",
        "-m",
        "from_ini",
        "--strict-markers",
        "--junitxml=out.xml",
    )
    result.assert_outcomes(passed=2)


def test_a_spawned_rank_that_does_not_find_its_test(run: Run) -> None:
    result = run(
        """
import conftest
from pytest_gpumem import ranks
if not ranks.in_child():
    @pytest.mark.isolated
    def test_sometimes(): pass
else:
    raise RuntimeError("not here")
""",
        "--rank-method=spawn",
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*::test_sometimes was not found when collected in a new process*", "*RuntimeError: not here"]
    )


def test_a_test_that_forks_and_runs_on_reports_once(run: Run) -> None:
    run("@pytest.mark.isolated\ndef test_forks(): os.fork()").assert_outcomes(passed=1)


def test_faulthandler_of_pytest_does_not_disturb(run: Run) -> None:
    result = run(
        "@pytest.mark.isolated\ndef test_hangs(): time.sleep(1000)",
        "--rank-timeout=0.7",
        "-o",
        "faulthandler_timeout=600",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*It hung here*", "*in test_hangs"])


def test_threads_forbid_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="mine")
    thread.start()
    try:
        assert fork_is_safe() == "the thread 'mine' is running" or sys.platform == "darwin"
    finally:
        end.set()
        thread.join()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "macOS" in str(fork_is_safe())


def test_messages_cut_short_are_left_out() -> None:
    reading, writing = os.pipe()
    wire.send(writing, ("phase", "call"))
    wire.send(writing, ("report", {}))
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        raw = pipe.read()
    payloads, used = wire.split(raw)
    assert [pickle.loads(payload) for payload in payloads] == [("phase", "call"), ("report", {})]
    assert used == len(raw)
    assert wire.split(raw[:-1])[0] == payloads[:1]
    assert wire.split(raw[:3]) == ([], 0)


def test_what_cannot_be_pickled_becomes_its_repr() -> None:
    value = {"kept": [1, (2,)], "odd": [threading.Lock(), 3]}
    copy = picklable(value)
    assert copy["kept"] == [1, (2,)]
    assert copy["odd"][0].startswith("<unlocked")
    assert copy["odd"][1] == 3
    assert pickle.loads(pickle.dumps(Assignment(1, False, ({"a": 1},)))).other_ranks == ({"a": 1},)


def test_main_thread_is_shown_though_faulthandler_lists_it_last() -> None:
    fault = (
        "Timeout (0:00:05)!\n"
        "Thread 0x0000000000000bad (most recent call first):\n"
        '  File "threading.py", line 1 in wait\n\n'
        "Thread 0x0000000000000abc (most recent call first):\n"
        '  File "model.py", line 7 in forward\n'
        '  File "/x/_pytest/python.py", line 1 in runtest\n'
    )
    summary, text = crash.describe(
        status=-9, phase="call", fault=fault, main_thread=0xABC, timeout=5, peak_resident_bytes=None
    )
    assert summary == "the test's process did not finish within 5 s and was killed in the call phase"
    assert text.endswith('call first):\n  File "model.py", line 7 in forward\n  (1 frames of pytest)')
    assert "memory" not in text
    assert crash.all_threads(fault).count("Thread") == 2
