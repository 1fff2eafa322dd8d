"""Llama-7B on A100-40GB cards: DDP cannot hold its 4N however small the batch; FSDP over 8 ranks can, with room to spare."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

PARAMETERS = 6_738_415_616
GIB = 2**30

# `baseline=False`: what an out-of-memory error leaves behind is no figure to hold on to.
DDP = pytest.mark.gpumem(strategy="ddp", world_size=8, gpu="A100-40GB", baseline=False)
FSDP = pytest.mark.gpumem(strategy="fsdp", world_size=8, gpu="A100-40GB")


def tokens(batch, sequence):
    ids = torch.randint(0, 32_000, (batch, sequence))
    return {"input_ids": ids, "labels": ids}


def train(gpumem, batch, dtype=torch.bfloat16, steps=2):
    return gpumem.train(
        model=lambda: LlamaForCausalLM(LlamaConfig()),
        batch=batch,
        optimizer=torch.optim.AdamW,
        wrap=[LlamaDecoderLayer],
        dtype=dtype,
        steps=steps,
    )


@pytest.mark.gpumem(gpu="B200", budget="4N")
@pytest.mark.parametrize(("dtype", "gib"), [(torch.float32, 100.4), (torch.bfloat16, 50.2)], ids=["fp32", "bf16"])
def test_model_states_are_4n(gpumem, dtype, gib):
    """On a card that is big enough to see it: parameters N, gradients N, AdamW's two moments 2N."""
    report = train(gpumem, lambda: tokens(1, 8), dtype)
    states = sum(report.model_states.values())
    assert states == 4 * PARAMETERS * dtype.itemsize
    assert round(states / GIB, 1) == gib


@DDP
@pytest.mark.parametrize(("batch", "sequence"), [(1, 2048), (1, 128), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_ddp_runs_out_of_memory(gpumem, dtype, batch, sequence):
    """Shrinking the batch and the sequence to almost nothing does not help: the model states alone are too big."""
    with pytest.raises(torch.OutOfMemoryError):
        train(gpumem, lambda: tokens(batch, sequence), dtype)


@FSDP
@pytest.mark.gpumem(max_gb=40, budget="4N")
@pytest.mark.parametrize(
    ("dtype", "batch", "sequence"),
    [(torch.float32, 1, 2048), (torch.bfloat16, 2, 2048)],
    ids=["fp32-1x2048", "bf16-2x2048"],
)
def test_fsdp_fits(gpumem, dtype, batch, sequence):
    """Each rank keeps an eighth of the 4N; what is left takes a batch that DDP could not have at any size."""
    report = train(gpumem, lambda: tokens(batch, sequence), dtype)
    assert sum(report.model_states.values()) == 4 * PARAMETERS * dtype.itemsize // 8


@FSDP
@pytest.mark.parametrize(
    "sizes", [[(2, 512), (3, 512), (4, 512)], [(1, 512), (1, 1024), (1, 1536)]], ids=["batch", "sequence"]
)
def test_activations_grow_linearly(gpumem, sizes):
    """One step a size. Step 0 comes before the optimizer's state is there, so it is a step to warm up."""
    report = train(gpumem, [tokens(*size) for size in (sizes[0], *sizes)], steps=4)
    small, middle, large = (step.phases["forward"].end for step in report.steps[1:])
    assert large - middle == middle - small > 0
