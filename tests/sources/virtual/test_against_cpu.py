"""The virtual GPU against real tensors on the CPU: the same code, the same bytes, where no rule of CUDA's applies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpu_source import cpu_source
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from workloads import Net, life, train

from pytest_gpumem import report
from pytest_gpumem.report import RankReport
from pytest_gpumem.sources.virtual.cards import find_card
from pytest_gpumem.sources.virtual.gpu import VirtualGpu
from pytest_gpumem.trace import MemoryTrace


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def on_cpu(optimizer: Any, wrap: Callable[[nn.Module], nn.Module] = lambda net: net) -> MemoryTrace:
    with cpu_source() as recorder:
        train("cpu", optimizer, wrap)
    return recorder.trace


def on_virtual(
    optimizer: Any, wrap: Callable[[nn.Module], nn.Module] = lambda net: net, world_size: int = 1
) -> MemoryTrace:
    with VirtualGpu(find_card("A100-40GB"), world_size=world_size) as gpu:
        if world_size > 1 or wrap is not on_virtual.__defaults__[0]:
            gpu.world.start()
        train("cuda", optimizer, wrap)
        if dist.is_initialized():
            dist.destroy_process_group()
    return gpu.trace


def phases(figures: RankReport) -> list[Any]:
    return [(s.index, s.end, {n: (p.peak, p.end) for n, p in s.phases.items()}) for s in figures.steps]


def test_every_allocation_and_free_is_the_same_in_order() -> None:
    cpu, virtual = on_cpu(sgd), on_virtual(sgd)
    assert life(virtual) == life(cpu)
    assert len(life(cpu)) > 600
    mine, oracle = report.build(virtual), report.build(cpu)
    assert mine.peak_bytes == oracle.peak_bytes
    assert mine.category_peaks == oracle.category_peaks
    assert mine.at_peak == oracle.at_peak
    assert phases(mine) == phases(oracle)


def test_a_first_run_in_a_process_is_no_different_from_a_second() -> None:
    """Fake tensors cache what operations give; the first time, some shapes are worked out by decompositions."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode.cache_clear()
    first, second = on_virtual(sgd), on_virtual(sgd)
    assert life(first) == life(second)


def test_adamw_differs_by_the_step_counts_that_cuda_keeps_on_the_host() -> None:
    mine, oracle = report.build(on_virtual(adamw)), report.build(on_cpu(adamw))
    tensors = len(list(Net().parameters()))
    assert oracle.peak_bytes["requested"] - mine.peak_bytes["requested"] == 4 * tensors  # float32 scalars
    assert oracle.category_peaks["optimizer_state"] - mine.category_peaks["optimizer_state"] == 512 * tensors
    for category in ("parameters", "gradients", "activations", "inputs", "temporaries"):
        assert mine.category_peaks[category] == oracle.category_peaks[category]


@pytest.fixture
def gloo() -> Iterator[None]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.05}, {"gradient_as_bucket_view": True}],
    ids=["default", "small buckets", "bucket views"],
)
def test_ddp_against_the_real_reducer(gloo: None, options: dict[str, Any]) -> None:
    def wrap(net: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(net, **options)

    oracle = report.build(on_cpu(sgd, wrap))
    dist.destroy_process_group()
    mine = report.build(on_virtual(sgd, wrap))
    assert mine.peak_bytes == oracle.peak_bytes
    assert phases(mine) == phases(oracle)
    assert mine.category_peaks["gradients"] == oracle.category_peaks["gradients"]


@pytest.mark.parametrize("world_size", [2, 4, 7])
def test_fsdp_against_real_tensors(world_size: int) -> None:
    """7 ranks divide no dimension: every shard is padded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def wrap(net: nn.Module, **options: Any) -> nn.Module:
        for block in net.blocks:
            fully_shard(block, **options)
        return fully_shard(net, **options)

    def wrap_on_cpu(net: nn.Module) -> nn.Module:
        return wrap(net, mesh=init_device_mesh("cpu", (world_size,)))

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        oracle = report.build(on_cpu(sgd, wrap_on_cpu))
    finally:
        dist.destroy_process_group()
    mine = report.build(on_virtual(sgd, wrap, world_size))
    for category in ("parameters", "gradients", "optimizer_state", "activations", "inputs"):
        assert mine.category_peaks[category] == oracle.category_peaks[category]
    # What is left is the mesh: four tensors of rank numbers, on the host here, and taken for device memory by the oracle.
    mesh = oracle.category_peaks["other"]
    assert 0 < mesh <= 4 * 512
    assert mine.category_peaks["other"] == 0
    for step, real in zip(mine.steps, oracle.steps, strict=True):
        for name, phase in step.phases.items():
            assert (phase.peak, phase.end) == (real.phases[name].peak - mesh, real.phases[name].end - mesh), name
