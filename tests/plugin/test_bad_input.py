"""Whatever is wrong is said before any test runs where that is possible, and nothing is written.

The parsers' own messages are held in tests/test_marker.py and tests/test_baselines.py; here, what a run prints.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from .suites import Suite, text

USAGE_ERROR = pytest.ExitCode.USAGE_ERROR


# -- the marker


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("max_gbs=40", "unknown argument 'max_gbs'; did you mean 'max_gb'?"),
        ("growth=0", "unknown argument 'growth'; known: max_gb, max_gib, max, "),
        ("40", "takes keyword arguments only, got 40; write max_gb=40"),
        ('max_gb="forty"', "max_gb='forty': 'forty' is not a size; write a number or a string such as \"40 GiB\""),
        ("max_gb=-1", "max_gb=-1: -1 is negative"),
        ('limits={"activations": -1}', "limits={'activations': -1}: -1 is negative"),
        ('limits={"activation": 1}', "unknown category 'activation'; did you mean 'activations'?"),
        ("world_size=0", "world_size=0: a world has 1 rank or more"),
        ('gpu="A100-4GB"', 'unknown GPU "A100-4GB"; near: A100-40GB'),
        ('strategy="fspd"', "strategy='fspd': did you mean 'fsdp'?"),
        ('strategy="zero3"', "strategy='zero3': known: single, ddp, fsdp"),
        ('budget="4X"', "budget='4X': a budget is a number of N, such as \"4N\""),
        ('metric="reserved"', "metric='reserved': virtual GPUs know 'allocated' and 'requested' bytes only"),
        ('tolerance="some"', "tolerance='some': 'some' is not a tolerance; write \"2%\" or \"64 MiB\""),
        ("world_size=2, ranks=[0, 2]", "ranks=[0, 2]: rank 2 is not in a world of 2; ranks go from 0 to 1"),
        ('strategy="single", world_size=2', "strategy='single' with world_size=2: one of them is wrong"),
    ],
)
def test_a_wrong_argument_ends_the_run_and_names_the_test(suite: Suite, arguments: str, said: str) -> None:
    suite.write(
        f"""
from pathlib import Path
def test_plain(): Path("ran").touch()
class TestIt:
    @pytest.mark.gpumem({arguments})
    @pytest.mark.parametrize("n", [1])
    def test_it(self, n): Path("ran").touch()
"""
    )
    result = suite.run("--gpumem-json=figures.json", "--gpumem-update-baselines")
    assert result.ret == USAGE_ERROR
    assert "ERROR: test_it.py::TestIt::test_it[1]: gpumem marker: " in text(result)
    assert said in text(result)
    assert not Path("ran").exists()
    assert not Path("figures.json").exists()
    assert not Path("baselines").exists()


def test_every_wrong_test_is_named_and_those_left_out_are_not_looked_at(suite: Suite) -> None:
    suite.write("".join(f"@pytest.mark.gpumem(max_gb=-{n})\ndef test_{n}(): pass\n" for n in (1, 2, 3)))
    result = suite.run("-k", "not test_3")
    assert "test_it.py::test_1: gpumem marker: max_gb=-1:" in text(result)
    assert "test_it.py::test_2: gpumem marker: max_gb=-2:" in text(result)
    assert "test_3" not in text(result)


def test_a_wrong_argument_is_said_by_a_worker_too(suite: Suite) -> None:
    suite.write("@pytest.mark.gpumem(max_gb=-1)\ndef test_it(): open('ran', 'w')")
    result = suite.run_apart("-n", "1")
    result.assert_outcomes(errors=1)
    assert "test_it.py::test_it: gpumem marker: max_gb=-1: -1 is negative" in text(result)
    assert not Path("ran").exists()


# -- options and ini values


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--gpumem-gpu=A100-4GB", "--gpumem-gpu: gpu='A100-4GB': unknown GPU \"A100-4GB\"; near: A100-40GB"),
        ("--gpumem-device=tpu", "--gpumem-device: device='tpu': known: auto, cuda, virtual"),
        ("--gpumem-tolerance=some", "--gpumem-tolerance: tolerance='some': 'some' is not a tolerance"),
        ("--gpumem-json=missing/out.json", "--gpumem-json: the folder "),
        ("--gpumem-json=.", "is a folder; name a file"),
        ("--gpumem-update-baselines=some", "ignored explicit argument 'some'"),
        ("--gpumem-baseline-dir=test_it.py", "test_it.py is not a folder"),
        ("-o gpumem_max_gb=forty", "ini gpumem_max_gb: max_gb='forty': 'forty' is not a size"),
        ("-o gpumem_world_size=0", "ini gpumem_world_size: world_size='0': a world has 1 rank or more"),
        ("-o gpumem_limits=activation=1", "unknown category 'activation'; did you mean 'activations'?"),
        ("-o gpumem_update_baselines=some", "gpumem_update_baselines='some': known: all, new"),
        ("-o gpumem_disable=maybe", "gpumem_disable='maybe': write true or false"),
        ("-o gpumem_json=missing/out.json", "the folder "),
        # What later versions own is unknown, as any other word is.
        ("--gpumem-html=report.html", "unrecognized arguments: --gpumem-html=report.html"),
        ("--gpumem-markdown=report.md", "unrecognized arguments: --gpumem-markdown=report.md"),
        ("--gpumem-snapshot-dir=snapshots", "unrecognized arguments: --gpumem-snapshot-dir=snapshots"),
    ],
)
def test_a_wrong_option_ends_the_run(suite: Suite, arguments: str, said: str) -> None:
    suite.write("def test_plain(): open('ran', 'w')")
    result = suite.run(*arguments.split())
    assert result.ret == USAGE_ERROR
    assert said in text(result)
    assert sorted(path.name for path in suite.path.iterdir()) == ["test_it.py"]


def test_a_wrong_rank_in_the_ini_is_said_where_the_world_is_known(suite: Suite) -> None:
    suite.ini("gpumem_ranks = 7").write("@pytest.mark.gpumem(world_size=2)\ndef test_it(): pass")
    result = suite.run()
    assert result.ret == USAGE_ERROR
    assert "test_it.py::test_it: ini gpumem_*: ranks='7': rank 7 is not in a world of 2" in text(result)


# -- baselines


WHERE = "virtual A100-40GB x1 single"
GOOD = {
    "schema_version": 1,
    "tests": {
        "test_it": {
            WHERE: {
                "aggregation": "worst rank",
                "allocator": "",
                "at_peak": {"temporaries": 1024},
                "categories": {"temporaries": 1024},
                "metric": "allocated",
                "peak": 1024,
                "versions": {},
            }
        }
    },
}
WHOLE = json.dumps(GOOD, indent=2) + "\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (WHOLE[:200], "test_it.json:9: the baseline file is not JSON: "),
        ("<<<<<<< HEAD\n" + WHOLE, "test_it.json:1: the baseline file is not JSON: "),
        ("", "test_it.json:1: the baseline file is not JSON: "),
        (
            WHOLE.replace('"schema_version": 1', '"schema_version": 2'),
            "schema_version 2 is newer than this pytest-gpumem",
        ),
        (
            WHOLE.replace('"peak": 1024', '"peak": -1024'),
            f"test_it.json:5: test_it ({WHERE}): peak is -1024; a size is not negative",
        ),
        (
            WHOLE.replace('"temporaries": 1024', '"temporaries": "1024"'),
            f"test_it.json:5: test_it ({WHERE}): categories.temporaries is '1024'",
        ),
        ("[]", "not a baseline file"),
    ],
)
@pytest.mark.parametrize("update", [(), ("--gpumem-update-baselines",)], ids=["compare", "update"])
def test_a_bad_baseline_file_ends_the_run_and_stays_as_it_was(
    suite: Suite, content: str, said: str, update: tuple[str, ...]
) -> None:
    suite.write("@pytest.mark.gpumem\ndef test_it(): open('ran', 'w'); kept = fill(1024)")
    suite.write("@pytest.mark.gpumem\ndef test_other(): open('ran', 'w'); kept = fill(1024)", "test_other")
    suite.write_plain(content, "baselines/test_it.json")
    result = suite.run(*update)
    assert result.ret == USAGE_ERROR
    assert said in text(result)
    assert suite.files() == {"test_it.json": content.encode()}
    assert not Path("ran").exists()


def test_a_good_baseline_file_is_read(suite: Suite) -> None:
    """What the test above breaks is whole to begin with."""
    suite.write("@pytest.mark.gpumem(baseline=True)\ndef test_it(): kept = fill(1024)")
    suite.write_plain(WHOLE, "baselines/test_it.json").run().assert_outcomes(passed=1)


def test_the_file_of_a_module_that_does_not_run_is_not_in_the_way(suite: Suite) -> None:
    suite.write("@pytest.mark.gpumem\ndef test_it(): kept = fill(1024)")
    suite.write("def test_other(): pass", "test_other")
    suite.write_plain("not JSON", "baselines/test_it.json")
    suite.run("test_other.py").assert_outcomes(passed=1)


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/1").exists(), reason="needs a folder that cannot be written")
def test_a_baseline_folder_that_cannot_be_written(suite: Suite) -> None:
    suite.write("@pytest.mark.gpumem\ndef test_it(): open('ran', 'w'); kept = fill(1024)")
    # /proc takes no files from anybody, not even from root, which other folders' permissions do not stop.
    result = suite.run("--gpumem-update-baselines", "--gpumem-baseline-dir=/proc/1/baselines")
    assert result.ret == USAGE_ERROR
    assert "--gpumem-baseline-dir: /proc/1/baselines cannot be written" in text(result)
    assert not Path("ran").exists()


def test_a_write_that_fails_in_the_end_is_an_error_of_the_run(suite: Suite) -> None:
    suite.write(
        """
@pytest.mark.gpumem
def test_it(tmp_path):
    import pathlib
    pathlib.Path("baselines").write_text("a file where the folder goes")
    kept = fill(1024)
"""
    )
    result = suite.run("--gpumem-update-baselines")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "the baseline cannot be written" in text(result)
    assert Path("baselines").read_text() == "a file where the folder goes"


# -- the fixture


TRAIN = "gpumem.train(**{**dict(model=linear, batch=rows, loss=total), **dict(%s)})"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('model=lambda: "a model"', "model: the callable returned str, not a torch.nn.Module"),
        (
            "model=linear()",
            "model: expected a callable that builds the model, got Linear; write model=lambda: MyModel()",
        ),
        (
            'batch=lambda: torch.ones(4, 16, device="meta")',
            "batch: a tensor is on meta; put it on the CPU or on cuda:0",
        ),
        ("batch=rows()", "batch: expected a callable that makes a batch, or an iterable of batches, got Tensor"),
        ("batch=[rows()], steps=2", "batch: the iterable ended after 1; steps x accumulate = 2 batches are needed"),
        ("loss=lambda o, b: o.sum(0)", "the loss is a tensor of shape (16,); the loss must be a scalar tensor"),
        ("loss=lambda o, b: None", "the loss is NoneType; the loss must be a scalar tensor"),
        ("loss=lambda o, b: o.sum().item()", "the loss is float; the loss must be a scalar tensor"),
        ("loss=None", "the loss is a tensor of shape (4, 16); give loss=..., or let the model return a scalar tensor"),
        (
            "loss=lambda o, b: o.sum().detach()",
            "the loss does not require grad: no parameter is trainable, or gradients",
        ),
        ("model=lambda: linear().requires_grad_(False)", "the loss does not require grad: no parameter is trainable"),
        ('optimizer="adamw"', "optimizer: expected a class or a callable that takes the parameters, got str"),
        ("optimizer=torch.optim.AdamW(linear().parameters())", "takes the parameters, got AdamW"),
        ("optimizer=lambda parameters: None", "optimizer: expected an optimizer from <function "),
        ("optimizer=Odd", "step 0: Odd.step() ran, but no torch.optim.Optimizer stepped"),
        ("steps=0", "steps=0: a whole number of 1 or more"),
        ("steps=1.5", "steps=1.5: a whole number of 1 or more"),
        ("accumulate=0", "accumulate=0: a whole number of 1 or more"),
        ('dtype="bf16"', "dtype='bf16': expected a floating-point dtype such as torch.bfloat16"),
        ("dtype=torch.int8", "dtype=torch.int8: expected a floating-point dtype such as torch.bfloat16"),
        ('init="gpu"', 'init=\'gpu\': write "cpu" or "device", or leave it out'),
        ('strategy="fspd"', "unknown strategy 'fspd'; did you mean 'fsdp'?"),
        ('strategy="fsdp", wrap=[nn.Conv2d]', "wrap: no submodule is a Conv2d; the model has no submodules"),
        ('strategy="fsdp", wrap=nn.Linear', "expected a list of module classes, such as [LlamaDecoderLayer]"),
        ('strategy="fsdp", wrap=["Linear"]', "wrap=['Linear']: expected a list of module classes"),
        ("checkpoint=True", "checkpoint=True: name the classes of the modules to checkpoint in wrap=[...]"),
        ("batch_size=8", "strategy 'single' takes no options, got batch_size"),
    ],
)
def test_a_wrong_argument_of_train(suite: Suite, arguments: str, said: str) -> None:
    suite.write(
        f"""
class Odd:
    def __init__(self, parameters): pass
    def step(self): pass
    def zero_grad(self): pass

def test_it(gpumem): {TRAIN % arguments}
"""
    )
    result = suite.run("--gpumem-update-baselines")
    result.assert_outcomes(failed=1)
    assert said in text(result)
    assert "fixture.py:" not in text(result)  # the traceback ends where the user can mend it
    assert suite.files() == {}


@pytest.mark.parametrize(
    ("world_size", "arguments", "said"),
    [
        (2, "", 'world_size=2 needs a strategy: write strategy="ddp" or strategy="fsdp"'),
        (2, 'strategy="single"', 'strategy="single" in a world of 2: each rank would train alone'),
    ],
)
def test_a_world_needs_a_strategy(suite: Suite, world_size: int, arguments: str, said: str) -> None:
    suite.write(f"@pytest.mark.gpumem(world_size={world_size})\ndef test_it(gpumem): {TRAIN % arguments}")
    result = suite.run()
    result.assert_outcomes(failed=1)
    assert said in text(result)


LOOP = """
def test_it(gpumem):
    model = linear().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in gpumem.steps(2):
        loss = model(rows().to("cuda")).sum()
        {}
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("loss.backward(); optimizer.step()", ""),
        ("loss", "step 0 called no backward: it trained nothing. Call loss.backward() in it"),
        ("optimizer.step()", "step 0 called no backward"),
        ("loss.backward()", "2 steps, and no optimizer stepped: call optimizer.step() in them"),
    ],
)
def test_a_step_that_trains_nothing(suite: Suite, body: str, said: str) -> None:
    result = suite.write(LOOP.format(body)).run()
    result.assert_outcomes(passed=int(not said), failed=int(bool(said)))
    assert said in text(result)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("loss.backward(); optimizer.step()", ""),
        ("loss.backward()", "no optimizer stepped, so its state was not there to be measured"),
        ("optimizer.step()", "no gradients were seen: no step called backward"),
        ("loss", "No trainable parameter was seen on the GPU"),
    ],
)
def test_a_budget_where_only_the_marker_measures(suite: Suite, body: str, said: str) -> None:
    suite.write(
        f"""
@pytest.mark.gpumem(budget="4N")
def test_it():
    model = linear().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(rows().to("cuda")).sum()
    {body}
"""
    )
    result = suite.run()
    result.assert_outcomes(passed=int(not said), failed=int(bool(said)))
    assert said in text(result)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("gpumem.steps(0)", "steps: 0 steps measure nothing; write 1 or more"),
        ("gpumem.steps(None)", "steps: expected a number or an iterable of batches, got NoneType"),
        ("gpumem.steps('loader')", "steps: expected a number or an iterable of batches, got str"),
        ("gpumem.measure('')", "measure: '' cannot be a phase's name"),
        ("gpumem.measure(3)", "measure: 3 cannot be a phase's name"),
        ("gpumem.parallelize('model')", "model: expected a torch.nn.Module, got str"),
    ],
)
def test_wrong_arguments_of_the_other_methods(suite: Suite, call: str, said: str) -> None:
    result = suite.write(f"def test_it(gpumem): {call}").run()
    result.assert_outcomes(failed=1)
    assert said in text(result)


def test_a_batch_that_stayed_on_the_cpu(suite: Suite) -> None:
    result = suite.write("@pytest.mark.gpumem\ndef test_it(): linear().to('cuda')(rows())").run()
    result.assert_outcomes(failed=1)
    assert "cpu and cuda:0" in text(result)


def test_a_test_that_put_nothing_on_the_gpu_says_so(suite: Suite) -> None:
    suite.write("@pytest.mark.gpumem(max_gb=40)\ndef test_it(): linear()(rows()).sum().backward()")
    result = suite.run("--gpumem-update-baselines")
    result.assert_outcomes(failed=1)
    assert "gpumem: nothing was measured" in text(result)
    assert "The usual cause: the model and the batch stayed on the CPU." in text(result)
    assert suite.files() == {}
