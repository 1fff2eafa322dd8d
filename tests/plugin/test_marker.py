"""Each argument of the marker, at the byte where it begins to fail."""

from __future__ import annotations

import os

import pytest

from .suites import Suite, outcomes, peak, text


def passes_and_fails(suite: Suite, cases: list[tuple[str, bool]], body: str) -> pytest.RunResult:
    """One test for each case (the marker's arguments, whether the test passes), in one run."""
    tests = [
        f"@pytest.mark.gpumem({arguments})\ndef test_{n}(gpumem): {body}" for n, (arguments, _) in enumerate(cases)
    ]
    result = suite.write("\n".join(tests)).run("-v")
    wanted = {f"test_{n}": "PASSED" if passed else "FAILED" for n, (_, passed) in enumerate(cases)}
    assert {name: outcome for name, outcome in outcomes(result).items() if name in wanted} == wanted
    return result


@pytest.mark.parametrize(
    ("limit", "at"),
    [
        ("max_gb=1", 10**9),  # a multiple of 512
        ("max_gb=0.512", 512 * 10**6),
        ("max_gib=1", 2**30),
        ("max_gib=0.25", 2**28),
        ('max="1 GiB"', 2**30),
        ('max="512 MB"', 512 * 10**6),
        ('max="1024"', 1024),
        ("max=1024", 1024),
    ],
)
def test_the_peak_may_reach_the_limit_and_no_more(suite: Suite, limit: str, at: int) -> None:
    suite.write(
        f"""
@pytest.mark.gpumem({limit})
@pytest.mark.parametrize("more", [0, 1])
def test_fits(more): kept = fill({at} + more)
"""
    )
    tests = suite.measure()
    assert [test["outcome"] for test in tests.values()] == ["passed", "failed"]
    assert [peak(test) for test in tests.values()] == [at, at + 512]
    (check,) = tests["test_fits[1]"]["checks"]
    assert (check["name"], check["limit_bytes"], check["value_bytes"]) == ("max", at, at + 512)


def test_a_peak_over_the_limit_says_by_how_much_and_where(suite: Suite) -> None:
    suite.write(
        """
@pytest.mark.gpumem(max="1 MiB")
def test_between(): kept = fill(2**20 + 1)
@pytest.mark.gpumem(max=1024)
def test_trained(gpumem): gpumem.train(model=linear, batch=rows, loss=total, optimizer=torch.optim.SGD)
"""
    )
    seen = text(suite.run())
    assert "FAILED max: peak 1,049,088 B is over the limit of 1,048,576 B by 512 B," in seen
    assert "outside all steps, phase between, rank 0" in seen
    assert "at step 0, phase backward, rank 0" in seen


def test_metric(suite: Suite) -> None:
    # 1000 bytes are asked for, 1024 handed out
    passes_and_fails(
        suite,
        [
            ('max=1000, metric="requested"', True),
            ('max=999, metric="requested"', False),
            ('max=1024, metric="allocated"', True),
            ('max=1023, metric="allocated"', False),
            ("max=1023", False),
        ],
        "kept = fill(1000)",
    )


TRAIN = "gpumem.train(model=linear, batch=rows, loss=total)"


def test_limits(suite: Suite) -> None:
    # AdamW over one parameter of 1024 bytes; its two counters of steps stay on the CPU
    result = passes_and_fails(
        suite,
        [
            ('limits={"parameters": 1024, "gradients": 1024, "optimizer_state": 2048}', True),
            ('limits={"parameters": 1023}', False),
            ('limits={"gradients": 1023}', False),
            ('limits={"optimizer_state": "1.9 KiB"}', False),
            ('limits={"communication": 0}', True),
        ],
        TRAIN,
    )
    assert "FAILED limits[gradients]: gradients peak at 1.0 KiB, over the limit of 1023 B by 1 B" in text(result)


def test_budget(suite: Suite) -> None:
    result = passes_and_fails(
        suite,
        [
            ('budget="4N"', True),
            ('budget="3.99N"', False),
            ('budget="4N", max=1', False),
        ],
        TRAIN,
    )
    assert "model states 4,096 B = 4N, over the budget of 3.99N" in text(result)


def test_the_budget_of_sgd_is_two_n(suite: Suite) -> None:
    train = TRAIN.replace("loss=total", "loss=total, optimizer=torch.optim.SGD")
    passes_and_fails(suite, [('budget="2N"', True), ('budget="1.99N"', False)], train)


@pytest.mark.parametrize("body", ["kept = fill(1000)", "linear().to('cuda')(rows().to('cuda'))"])
def test_a_budget_without_a_training_step_fails(suite: Suite, body: str) -> None:
    result = passes_and_fails(suite, [('budget="4N"', False)], body)
    assert "No trainable parameter was seen" in text(result) or "no gradients were seen" in text(result)


def test_baseline(suite: Suite) -> None:
    suite.write(
        """
import pathlib
nbytes = int(pathlib.Path("size").read_text())
@pytest.mark.gpumem(baseline=True)
def test_required(): kept = fill(nbytes)
@pytest.mark.gpumem(baseline=False)
def test_never(): kept = fill(nbytes)
@pytest.mark.gpumem
def test_where_stored(): kept = fill(nbytes)
@pytest.mark.gpumem(baseline=False)
def test_switched_off_later(): kept = fill(nbytes)
"""
    )
    suite.write_plain("1024", "size")
    without = suite.run("-v")
    assert outcomes(without)["test_required"] == "FAILED"
    without.assert_outcomes(passed=3, failed=1)
    suite.run("--gpumem-update-baselines").assert_outcomes(passed=4)
    assert sorted(suite.stored()) == ["test_required", "test_where_stored"]

    suite.write_plain("2048", "size")
    seen = outcomes(suite.run("-v"))
    assert seen["test_required"] == seen["test_where_stored"] == "FAILED"
    assert seen["test_never"] == "PASSED"


def test_a_stored_baseline_is_not_compared_where_that_is_switched_off(suite: Suite) -> None:
    suite.write("@pytest.mark.gpumem\ndef test_it(): kept = fill(1024)").run("--gpumem-update-baselines")
    assert suite.stored()
    suite.write("@pytest.mark.gpumem\ndef test_it(): kept = fill(4096)").run().assert_outcomes(failed=1)
    suite.write("@pytest.mark.gpumem(baseline=False)\ndef test_it(): kept = fill(4096)").run().assert_outcomes(passed=1)


TOLERANCES = [
    ('"5%"', True),
    ('"4.9%"', False),
    ("512", True),
    ("511", False),
    ('"0.5 KiB"', True),
    ('{"total": "5%", "temporaries": "512 B"}', True),
    ('{"total": "5%", "temporaries": 511}', False),
    ('{"total": 511, "temporaries": "5%"}', False),
    ('{"total": "5%"}', False),  # other categories keep their 2%
]


def test_tolerance(suite: Suite) -> None:
    body = """
TOLERANCES = [{}]
@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.gpumem(tolerance=t)) for n, t in enumerate(TOLERANCES)])
def test_it(n): kept = fill({})
"""
    written = ", ".join(tolerance for tolerance, _ in TOLERANCES)
    suite.write(body.format(written, 10240)).run("--gpumem-update-baselines")
    result = suite.write(body.format(written, 10752)).run("-v")  # 5% more
    seen = outcomes(result)
    assert {t: seen[f"test_it[{n}]"] == "PASSED" for n, (t, _) in enumerate(TOLERANCES)} == dict(TOLERANCES)
    assert "temporaries 10.0 KiB -> 10.5 KiB: +512 B (tolerance 4.9%)" in text(result)


def test_gpu_and_device(suite: Suite) -> None:
    suite.write(
        """
@pytest.mark.gpumem(gpu="T4")
def test_small():
    assert torch.cuda.get_device_name() == "Tesla T4"
    with pytest.raises(torch.OutOfMemoryError): fill(20 * 10**9)
    kept = fill(10**9)
@pytest.mark.gpumem(gpu="A100-40GB", device="virtual")
def test_large():
    assert "A100" in torch.cuda.get_device_name()
    kept = fill(20 * 10**9)
@pytest.mark.gpumem(device="auto")
def test_default(): kept = fill(1)
@pytest.mark.gpumem(gpu="a100 40gb")
def test_free_spelling(): kept = fill(1)
"""
    )
    tests = suite.measure()
    assert {name: (test["outcome"], test["gpu"], test["source"]) for name, test in tests.items()} == {
        "test_small": ("passed", "T4", "virtual"),
        "test_large": ("passed", "A100-40GB", "virtual"),
        "test_default": ("passed", "A100-40GB", "virtual"),
        "test_free_spelling": ("passed", "A100-40GB", "virtual"),
    }


def test_cuda_without_a_gpu_is_skipped_with_the_reason(suite: Suite) -> None:
    suite.write(
        """
@pytest.mark.gpumem(device="cuda")
def test_real(gpumem): pass
@pytest.mark.gpumem
def test_virtual(): kept = fill(1)
"""
    )
    result = suite.run("-rs")
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.fnmatch_lines(['SKIPPED*device="cuda": no GPU on this machine*device="virtual"*'])


def test_strategy_and_world_size(suite: Suite) -> None:
    # One parameter of 1024 bytes over 4 ranks: 256 bytes each, in a block of 512
    suite.write(
        """
import torch.distributed as dist
@pytest.mark.gpumem(world_size=4)
@pytest.mark.parametrize("strategy", [
    pytest.param(name, marks=pytest.mark.gpumem(strategy=name)) for name in ("ddp", "fsdp")
])
def test_spread(gpumem, strategy):
    assert (gpumem.rank, gpumem.world_size, gpumem.source, str(gpumem.device)) == (0, 4, "virtual", "cuda:0")
    report = gpumem.train(model=linear, batch=rows, loss=total, optimizer=torch.optim.SGD)
    assert report.strategy == strategy and dist.get_world_size() == 4
"""
    )
    tests = suite.measure()
    assert {
        test["strategy"]: (test["outcome"], test["world_size"], test["ranks"][0]["model_states"]["parameters"])
        for test in tests.values()
    } == {"ddp": ("passed", 4, 1024), "fsdp": ("passed", 4, 256)}


def test_ranks(suite: Suite) -> None:
    # Rank r puts 1024 * (1 + r) bytes on its card
    suite.write(
        """
@pytest.mark.parametrize("ranks", [
    pytest.param(r, marks=pytest.mark.gpumem(world_size=4, ranks=r), id=str(r)) for r in (0, [3, 0], "all", range(1, 3))
])
def test_some(gpumem, ranks):
    kept = fill(1024 * (1 + gpumem.rank))
@pytest.mark.gpumem(world_size=2, ranks="all", max=1024)
def test_the_worst_counts(gpumem):
    kept = fill(1024 * (1 + gpumem.rank))
"""
    )
    result = suite.run("--gpumem-json=figures.json")
    tests = suite.figures()
    played = {
        name: [(rank["rank"], rank["peak_bytes"]["allocated"]) for rank in test["ranks"]]
        for name, test in tests.items()
    }
    assert played["test_some[0]"] == [(0, 1024)]
    assert played["test_some[[3, 0]]"] == [(0, 1024), (3, 4096)]
    assert played["test_some[all]"] == [(0, 1024), (1, 2048), (2, 3072), (3, 4096)]
    assert played["test_some[range(1, 3)]"] == [(1, 2048), (2, 3072)]
    result.assert_outcomes(passed=4, failed=1)
    assert "peak 2.0 KiB is over the limit of 1.0 KiB by 1.0 KiB" in text(result)
    assert "rank 1 (worst of 2 measured)" in text(result)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_pass_decides(suite: Suite, rank: int) -> None:
    suite.write(
        f"""
pytestmark = pytest.mark.gpumem(world_size=2, ranks="all")
def test_raises(gpumem):
    kept = fill(1)
    assert gpumem.rank != {rank}
def test_runs_out(gpumem):
    kept = fill(2**30)
    if gpumem.rank == {rank}: fill(10**12)
@pytest.mark.xfail
def test_xfails(gpumem):
    kept = fill(1)
    assert gpumem.rank != {rank}
@pytest.mark.xfail(strict=True)
def test_xpasses(gpumem): kept = fill(1)
def test_skips(gpumem):
    if gpumem.rank == {rank}: pytest.skip("not on this rank")
    kept = fill(1)
def test_passes(gpumem): kept = fill(1)
"""
    )
    result = suite.run("--gpumem-json=figures.json")
    result.assert_outcomes(passed=1, failed=3, xfailed=1, skipped=1)
    outcomes = {name: test["outcome"] for name, test in suite.figures().items()}
    assert outcomes == {
        "test_raises": "failed",
        "test_runs_out": "failed",
        "test_xfails": "xfailed",
        "test_xpasses": "failed",
        "test_passes": "passed",
    }
    assert f"out of memory in phase between, rank {rank}: 931.323 GiB more did not fit" in text(result)
    assert text(result).count("this is rank 1 of 2") == (3 if rank == 1 else 1)  # an unexpected pass is rank 1's


def test_timeout(suite: Suite) -> None:
    suite.write(
        """
import signal
@pytest.mark.gpumem(timeout=0.2)
def test_hangs(): signal.pause()
@pytest.mark.gpumem(timeout=600)
def test_next(): kept = fill(1)
"""
    )
    result = suite.run()
    result.assert_outcomes(passed=1, failed=1)
    assert "did not finish within 0.2 s" in text(result)


def test_isolate(suite: Suite) -> None:
    suite.write_plain("import os\nPID = os.getpid()", "conftest.py")
    suite.write(
        """
import os, conftest
@pytest.mark.gpumem
def test_apart():
    assert os.getpid() != conftest.PID
    kept = fill(1024)
@pytest.mark.gpumem(isolate=False)
def test_here(gpumem):
    assert os.getpid() == conftest.PID
    gpumem.train(model=linear, batch=rows, loss=total)
@pytest.mark.gpumem(isolate=False, max=1023)
def test_here_too(): kept = fill(1024)
def test_afterwards():
    assert not torch.cuda.is_available()
    assert torch.ones(3).sum().item() == 3
"""
    )
    result = suite.run_apart("--gpumem-json=figures.json")
    result.assert_outcomes(passed=3, failed=1)
    tests = suite.figures()
    assert (peak(tests["test_apart"]), peak(tests["test_here_too"])) == (1024, 1024)
    assert tests["test_here"]["budget"]["measured_bytes"] == 4096


def test_markers_are_listed(suite: Suite) -> None:
    listed = " ".join(suite.run("--markers").outlines)
    assert "@pytest.mark.gpumem(max_gb=None, max_gib=None, max=None, metric=None, limits=None, budget=None" in listed
    assert not os.path.exists(suite.path / "baselines")
