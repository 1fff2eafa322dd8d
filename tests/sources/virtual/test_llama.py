"""Llama-7B, real `transformers` code, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from virtual import Run, play

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# By hand: two 32000 x 4096 tables; 32 layers of four 4096 x 4096 and three 4096 x 11008 matrices and two norms; one norm.
NUMEL = 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096
N = 4 * NUMEL


def llama(strategy: str, world_size: int) -> Run:
    from transformers import LlamaConfig, LlamaForCausalLM

    def body(gpu: Any) -> tuple[int, int]:
        with torch.device("meta" if strategy == "fsdp" else "cuda"):
            net = LlamaForCausalLM(LlamaConfig())
        if strategy == "ddp":
            gpu.world.start()
            net = torch.nn.parallel.DistributedDataParallel(net)
        if strategy == "fsdp":
            from torch.distributed.fsdp import fully_shard

            gpu.world.start()
            for layer in net.model.layers:
                fully_shard(layer)
            fully_shard(net).to_empty(device="cuda")
        optimizer = torch.optim.AdamW(net.parameters())
        ids = torch.zeros(1, 8, dtype=torch.long, device="cuda")
        net(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

    return play(body, card="B200", world_size=world_size)


def test_the_parameters_are_26_953_662_464_bytes() -> None:
    assert N == 26_953_662_464
    run = llama("single", 1)
    assert run.budget.n_bytes == N
    assert run.report.model_states == {"parameters": N, "gradients": N, "optimizer_state": 2 * N}
    assert run.report.category_peaks["parameters"] == N
    kept, peak = run.result
    rotary = run.report.category_peaks["buffers"] + run.report.category_peaks["inputs"]
    assert kept == 4 * N + rotary
    assert peak == 5 * N + rotary


def test_fsdp_over_8_ranks_keeps_an_eighth() -> None:
    run = llama("fsdp", 8)
    eighth = {"parameters": N // 8, "gradients": N // 8, "optimizer_state": 2 * N // 8}
    assert run.report.model_states == eighth
    rotary = run.report.category_peaks["buffers"] + run.report.category_peaks["inputs"]
    assert run.result[0] == 4 * N // 8 + rotary
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert run.trace.units == (4 * (2 * 32000 * 4096 + 4096), *[4 * layer] * 32)


def test_ddp_keeps_the_4n_and_its_buckets_one_more() -> None:
    """And while foreach AdamW makes its denominators, the 6th N. No bucket rounds: every size here is a multiple of 512."""
    run = llama("ddp", 8)
    assert run.budget.n_bytes == N
    assert run.report.model_states == {"parameters": N, "gradients": N, "optimizer_state": 2 * N}
    frequencies = 512  # each forward broadcasts the rotary embedding's one buffer of 64 floats, as a flat copy
    assert run.report.category_peaks["communication"] == N + frequencies
    rotary = run.report.category_peaks["buffers"] + run.report.category_peaks["inputs"]
    assert run.result == (5 * N + rotary, 6 * N + rotary)
