"""A regression that no functional test sees, and the baseline does.

`KEEP_LOGITS=1 pytest example_suite/test_regression.py` plays a change that keeps an fp32 copy of the logits "for a metric".
"""

import os

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

kept = {}


def tokens():
    ids = torch.randint(0, 50_257, (8, 512))
    return {"input_ids": ids, "labels": ids}


def loss(output, batch):
    if os.environ.get("KEEP_LOGITS"):
        kept["logits"] = output.logits.float()
    return output.loss


@pytest.mark.gpumem(gpu="A10G", baseline=True)
def test_finetune(gpumem):
    gpumem.train(model=lambda: GPT2LMHeadModel(GPT2Config()), batch=tokens, loss=loss, dtype=torch.bfloat16)
