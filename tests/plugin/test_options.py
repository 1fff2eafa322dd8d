"""Command-line options, their ini twins, and who overrides whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .suites import Suite, outcomes, peak, text

PLAIN = "@pytest.mark.gpumem\ndef test_it(): kept = fill(1024)"


# -- precedence

# One test for each place that can name the card; the nearer ones inherit what the farther ones say besides.
LAYERS = """
pytestmark = pytest.mark.gpumem(gpu="V100-16GB", max=2048, world_size=2)

def test_module(): kept = fill(1024)

@pytest.mark.gpumem(gpu="V100-32GB", world_size=3)
class TestClass:
    def test_class(self): kept = fill(1024)

    @pytest.mark.gpumem(gpu="A100-80GB")
    def test_function(self): kept = fill(1024)

    @pytest.mark.gpumem(gpu="A100-80GB", world_size=4)
    @pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.gpumem(gpu="H100-80GB", max=4096))])
    def test_param(self, n): kept = fill(1024)
"""


def seen(test: dict[str, Any]) -> tuple[str, int, int]:
    """The card, the world size and the limit that counted for a test."""
    return test["gpu"], test["world_size"], test["checks"][0]["limit_bytes"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("-o", "gpumem_gpu=T4", "-o", "gpumem_max=512", "-o", "gpumem_world_size=9")],
    ids=["without an ini", "with an ini"],
)
def test_a_nearer_marker_overrides_a_farther_one_argument_by_argument(suite: Suite, arguments: tuple[str, ...]) -> None:
    tests = suite.write(LAYERS).measure(*arguments)
    assert {name: seen(test) for name, test in tests.items()} == {
        "test_module": ("V100-16GB", 2, 2048),
        "TestClass::test_class": ("V100-32GB", 3, 2048),
        "TestClass::test_function": ("A100-80GB", 3, 2048),
        "TestClass::test_param[0]": ("A100-80GB", 4, 2048),
        "TestClass::test_param[1]": ("H100-80GB", 4, 4096),
    }


def test_the_command_line_overrides_every_marker(suite: Suite) -> None:
    tests = suite.write(LAYERS).measure("--gpumem-gpu=B200", "-o", "gpumem_gpu=T4")
    assert {test["gpu"] for test in tests.values()} == {"B200"}
    assert {test["world_size"] for test in tests.values()} == {2, 3, 4}


def test_an_ini_value_counts_where_nothing_nearer_does(suite: Suite) -> None:
    suite.ini("gpumem_gpu = T4", "gpumem_max = 2 KiB")
    suite.write(
        """
@pytest.mark.gpumem
def test_marker(): kept = fill(1024)
def test_fixture(gpumem): kept = fill(1024)
@pytest.mark.gpumem(max=512)
def test_limit(): kept = fill(512)
@pytest.mark.gpumem(gpu="L4")
def test_card(): kept = fill(1024)
"""
    )
    assert {name: seen(test) for name, test in suite.measure().items()} == {
        "test_marker": ("T4", 1, 2048),
        "test_fixture": ("T4", 1, 2048),
        "test_limit": ("T4", 1, 512),
        "test_card": ("L4", 1, 2048),
    }


def test_a_marker_s_limit_replaces_the_ini_s_in_another_unit(suite: Suite) -> None:
    suite.ini("gpumem_max_gb = 1")
    tests = suite.write("@pytest.mark.gpumem(max=2048)\ndef test_it(): kept = fill(1)").measure()
    assert seen(tests["test_it"])[2] == 2048


@pytest.mark.parametrize(
    ("ini", "passes"),
    [
        ("gpumem_max_gb = 0.000004", False),
        ("gpumem_max_gb = 1", True),
        ("gpumem_max_gib = 0.000003", False),
        ("gpumem_max = 4400", False),
        ("gpumem_max = 4400\ngpumem_metric = requested", True),
        ("gpumem_limits = parameters = 1 KiB, gradients = 1 KiB", True),
        ("gpumem_limits = parameters = 1 KiB, gradients = 1023", False),
        ("gpumem_budget = 4N", True),
        ("gpumem_budget = 3N", False),
        ("gpumem_baseline = true", False),
        ("gpumem_baseline = false", True),
        ("gpumem_world_size = 2", False),  # needs a strategy
        ("gpumem_world_size = 2\ngpumem_strategy = ddp", True),
        ("gpumem_world_size = 2\ngpumem_strategy = ddp\ngpumem_ranks = 0 1", True),
        ("gpumem_timeout = 600", True),
        ("gpumem_device = virtual", True),
    ],
)
def test_every_argument_has_an_ini_twin(suite: Suite, ini: str, passes: bool) -> None:
    # Requested: parameters, gradients and two moments of 1 KiB each, a step counter, the batch and its output of 256 bytes
    suite.ini(*ini.splitlines())
    suite.write(
        "def test_it(gpumem): gpumem.train(model=linear, batch=rows, loss=total, "
        "optimizer=lambda p: torch.optim.AdamW(p, fused=True))"
    )
    suite.run().assert_outcomes(passed=int(passes), failed=int(not passes))


def test_isolate_and_tolerance_in_the_ini(suite: Suite) -> None:
    suite.write_plain("import os\nPID = os.getpid()", "conftest.py").ini(
        "gpumem_isolate = false", "gpumem_tolerance = 512 B"
    )
    suite.write(
        """
import os, conftest
@pytest.mark.gpumem(baseline=True)
def test_it():
    assert os.getpid() == conftest.PID
    kept = fill(10240)
"""
    )
    suite.run_apart("--gpumem-update-baselines").assert_outcomes(passed=1)
    suite.write("@pytest.mark.gpumem(baseline=True)\ndef test_it(): kept = fill(10752)").run(
        "-o", "gpumem_isolate=true"
    ).assert_outcomes(passed=1)
    suite.write("@pytest.mark.gpumem(baseline=True)\ndef test_it(): kept = fill(10753)").run(
        "-o", "gpumem_isolate=true"
    ).assert_outcomes(failed=1)


# -- one option after the other


@pytest.mark.parametrize("marked", ["", 'device="auto"', 'device="virtual"', 'device="cuda"'])
def test_device_cuda_fails_where_there_is_no_gpu(suite: Suite, marked: str) -> None:
    suite.write(f"@pytest.mark.gpumem({marked})\ndef test_it(): kept = fill(1)\ndef test_plain(): pass")
    result = suite.run("--gpumem-device=cuda")
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["--gpumem-device=cuda: no GPU on this machine*"])


def test_device_virtual_plays_what_asks_for_cuda(suite: Suite) -> None:
    suite.write('@pytest.mark.gpumem(device="cuda")\ndef test_it(): kept = fill(1)')
    assert suite.measure("--gpumem-device=virtual")["test_it"]["source"] == "virtual"
    suite.ini("gpumem_device = cuda")
    suite.run("--gpumem-device=virtual").assert_outcomes(passed=1)


def test_device_cuda_in_the_ini_skips_as_the_marker_does(suite: Suite) -> None:
    suite.ini("gpumem_device = cuda").write(PLAIN).run().assert_outcomes(skipped=1)


def test_gpu(suite: Suite) -> None:
    suite.write('@pytest.mark.gpumem(gpu="T4")\ndef test_it(): kept = fill(30 * 10**9)')
    suite.run().assert_outcomes(failed=1)
    suite.run("--gpumem-gpu=a100-80gb").assert_outcomes(passed=1)
    suite.write("@pytest.mark.gpumem\ndef test_it(): kept = fill(41 * 10**9)").ini("gpumem_gpu = T4")
    suite.run().assert_outcomes(failed=1)
    suite.run("--gpumem-gpu=A100-40GB").assert_outcomes(passed=1)  # its 40 GB are 42.3e9 bytes


@pytest.mark.parametrize(
    ("arguments", "header"),
    [
        ((), "gpumem: virtual GPUs, A100-40GB unless a test names its card"),
        (("--gpumem-gpu=T4",), "gpumem: virtual GPUs, T4 for every test"),
        (("-o", "gpumem_gpu=T4"), "gpumem: virtual GPUs, T4 unless a test names its card"),
        (("--gpumem-disable",), "gpumem: disabled"),
    ],
)
def test_the_header_says_where_tests_run(suite: Suite, arguments: tuple[str, ...], header: str) -> None:
    assert header in suite.write("def test_it(): pass").run(*arguments).outlines


UPDATED = """
import pathlib
nbytes = int(pathlib.Path("size").read_text())
@pytest.mark.gpumem
def test_old(): kept = fill(nbytes)
@pytest.mark.gpumem
@pytest.mark.skipif(nbytes < 2048, reason="not yet")
def test_new(): kept = fill(nbytes)
"""


@pytest.mark.parametrize("first", [("--gpumem-update-baselines",), ("--gpumem-update-baselines=new",)])
@pytest.mark.parametrize(
    ("then", "old", "new"),
    [
        (("--gpumem-update-baselines",), 2048, 2048),
        (("--gpumem-update-baselines=all",), 2048, 2048),
        (("--gpumem-update-baselines=new",), 1024, 2048),
        (("-o", "gpumem_update_baselines=all"), 2048, 2048),
        (("-o", "gpumem_update_baselines=new"), 1024, 2048),
        (("-o", "gpumem_update_baselines=all", "--gpumem-update-baselines=new"), 1024, 2048),
        (("-o", "gpumem_update_baselines=new", "--gpumem-update-baselines"), 2048, 2048),
        ((), 1024, None),
    ],
)
def test_update_baselines(
    suite: Suite, first: tuple[str, ...], then: tuple[str, ...], old: int, new: int | None
) -> None:
    suite.write_plain("1024", "size").write(UPDATED).run(*first).assert_outcomes(passed=1, skipped=1)
    suite.write_plain("2048", "size").run(*then)
    peaks = {name: entry["virtual A100-40GB x1 single"]["peak"] for name, entry in suite.stored().items()}
    assert peaks == {"test_old": old} | ({"test_new": new} if new is not None else {})


def test_a_test_name_after_the_option_is_no_value_of_it(suite: Suite) -> None:
    suite.write(PLAIN + "\n@pytest.mark.gpumem\ndef test_other(): kept = fill(1)")
    suite.run("--gpumem-update-baselines", "test_it.py::test_it").assert_outcomes(passed=1)
    assert list(suite.stored()) == ["test_it"]


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ((), "baselines"),
        (("--gpumem-baseline-dir=kept",), "tests/kept"),  # from where the command is given
        (("-o", "gpumem_baseline_dir=kept"), "kept"),  # from the root directory
        (("-o", "gpumem_baseline_dir=other", "--gpumem-baseline-dir=../kept/deep"), "kept/deep"),
    ],
)
def test_baseline_dir(suite: Suite, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], where: str) -> None:
    suite.ini().write(PLAIN, "tests/test_it")
    monkeypatch.chdir(suite.path / "tests")
    suite.run("--gpumem-update-baselines", *arguments).assert_outcomes(passed=1)
    assert [path.relative_to(suite.path).as_posix() for path in suite.path.rglob("test_it.json")] == [
        f"{where}/tests/test_it.json"
    ]
    result = suite.write(PLAIN.replace("1024", "8192"), "tests/test_it").run(*arguments)
    result.assert_outcomes(failed=1)


def test_a_baseline_dir_with_an_absolute_path(suite: Suite, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    suite.write(PLAIN).run("--gpumem-update-baselines", f"--gpumem-baseline-dir={elsewhere}")
    assert [path.name for path in elsewhere.iterdir()] == ["test_it.json"]


@pytest.mark.parametrize(
    ("arguments", "passes"),
    [
        ((), False),
        (("--gpumem-tolerance=50%",), True),
        (("--gpumem-tolerance=1 KiB",), True),
        (("--gpumem-tolerance=1023",), False),
        (("-o", "gpumem_tolerance=50%"), True),
        (("-o", "gpumem_tolerance=50%", "--gpumem-tolerance=1%"), False),
    ],
)
def test_tolerance(suite: Suite, arguments: tuple[str, ...], passes: bool) -> None:
    suite.write("@pytest.mark.gpumem\ndef test_it(): kept = fill(2048)").run("--gpumem-update-baselines")
    result = suite.write("@pytest.mark.gpumem\ndef test_it(): kept = fill(3072)").run(*arguments)
    result.assert_outcomes(passed=int(passes), failed=int(not passes))


def test_tolerance_on_the_command_line_overrides_the_marker_s(suite: Suite) -> None:
    text_of = '@pytest.mark.gpumem(tolerance="100%")\ndef test_it(): kept = fill({})'
    suite.write(text_of.format(2048)).run("--gpumem-update-baselines")
    suite.write(text_of.format(3072)).run().assert_outcomes(passed=1)
    suite.run("--gpumem-tolerance=1%").assert_outcomes(failed=1)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("--gpumem-json=out.json",), "tests/out.json"),
        (("-o", "gpumem_json=out.json"), "tests/out.json"),
        (("-o", "gpumem_json=other.json", "--gpumem-json=../out.json"), "out.json"),
    ],
)
def test_json(suite: Suite, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], where: str) -> None:
    suite.ini().write(PLAIN, "tests/test_it")
    monkeypatch.chdir(suite.path / "tests")
    suite.run(*arguments).assert_outcomes(passed=1)
    (written,) = suite.path.rglob("*.json")
    assert written == suite.path / where
    (test,) = json.loads(written.read_text())["tests"]
    assert (test["nodeid"], peak(test)) == ("tests/test_it.py::test_it", 1024)


def test_json_is_written_where_no_test_was_measured(suite: Suite) -> None:
    suite.write("def test_it(): pass").run("--gpumem-json=out.json").assert_outcomes(passed=1)
    assert json.loads((suite.path / "out.json").read_text()) == {
        "schema_version": 1,
        "environment": {"versions": {}},
        "tests": [],
    }


@pytest.mark.parametrize("arguments", [("--gpumem-disable",), ("-o", "gpumem_disable=true")])
def test_disable(suite: Suite, arguments: tuple[str, ...]) -> None:
    suite.write(
        """
from pathlib import Path
@pytest.mark.gpumem(max=0)
def test_marked(): Path("ran").touch()
def test_fixture(gpumem): Path("ran").touch()
@pytest.mark.gpumem(device="cuda")
def test_cuda(): Path("ran").touch()
@pytest.mark.gpumem(isolate=False)
def test_here(): Path("ran").touch()
def test_plain(): assert not torch.cuda.is_available()
"""
    )
    result = suite.run("-rs", "--gpumem-update-baselines", *arguments)
    result.assert_outcomes(skipped=4, passed=1)
    assert "gpumem is disabled" in text(result)
    assert not Path("ran").exists()
    assert not Path("baselines").exists()


def test_disable_can_be_taken_back(suite: Suite) -> None:
    suite.ini("gpumem_disable = true").write(PLAIN).run().assert_outcomes(skipped=1)
    suite.run("-o", "gpumem_disable=false").assert_outcomes(passed=1)


def test_help_shows_every_option_and_ini_value(suite: Suite) -> None:
    shown = suite.run("--help")
    for option in (
        "--gpumem-device=DEVICE",
        "--gpumem-gpu=CARD",
        "--gpumem-update-baselines",
        "--gpumem-update-baselines=new",
        "--gpumem-baseline-dir=DIR",
        "--gpumem-tolerance=TOLERANCE",
        "--gpumem-json=FILE",
        "--gpumem-disable",
    ):
        assert any(line.strip().startswith(option) or f", {option}" in line for line in shown.outlines), option
    for ini in ("gpumem_max_gb (string)", "gpumem_baseline_dir (string)", "gpumem_disable (string)"):
        assert ini in text(shown)


def test_strict_markers_and_strict_config_know_the_plugin_s_words(suite: Suite) -> None:
    suite.ini("gpumem_gpu = T4", "gpumem_baseline_dir = kept").write(PLAIN)
    result = suite.run("--strict-markers", "--strict-config", "-v", "-Werror")
    assert outcomes(result) == {"test_it": "PASSED"}
