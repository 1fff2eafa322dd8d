"""GPT-2 (124M) on one V100-16GB: every category held against its stored baseline, AdamW beside SGD."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def tokens():
    ids = torch.randint(0, 50_257, (4, 512))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.gpumem(gpu="V100-16GB", max_gb=16, baseline=True)
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(torch.optim.AdamW, marks=pytest.mark.gpumem(budget="4N")),
        pytest.param(torch.optim.SGD, marks=pytest.mark.gpumem(budget="2N")),
    ],
)
def test_gpt2(gpumem, optimizer):
    gpumem.train(model=lambda: GPT2LMHeadModel(GPT2Config()), batch=tokens, optimizer=optimizer)
