"""Model states to the byte: what optimizers and strategies keep, against arithmetic done here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from virtual import Run, play

MIB = 2**20
# Four square matrices of 1 MiB each: no rounding to 512 bytes anywhere.
N = 4 * MIB


def model() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])


def steps(net: Any, optimizer: torch.optim.Optimizer, number: int = 2) -> None:
    for _ in range(number):
        net(torch.ones(1, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(make: Any, **kwargs: Any) -> Run:
    def body(gpu: Any) -> None:
        with torch.device("cuda"):
            net = model()
        steps(net, make(net.parameters(), **kwargs))

    return play(body)


@pytest.mark.parametrize(
    ("make", "options", "states"),
    [
        (torch.optim.AdamW, {}, 2),
        (torch.optim.Adam, {}, 2),
        (torch.optim.AdamW, {"amsgrad": True}, 3),
        (torch.optim.AdamW, {"fused": True}, 2),
        (torch.optim.AdamW, {"foreach": False}, 2),
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1),
        (torch.optim.RMSprop, {}, 1),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, 3),
        (torch.optim.Adagrad, {}, 1),
        (torch.optim.Adadelta, {}, 2),
        (torch.optim.Adamax, {}, 2),
        (torch.optim.NAdam, {}, 2),
        (torch.optim.RAdam, {}, 2),
    ],
)
def test_what_each_optimizer_keeps(make: Any, options: dict[str, Any], states: int) -> None:
    run = trained(make, **options)
    small = 4 * 4 * 4 if make is torch.optim.NAdam else 0  # mu_product, a scalar a tensor, is on the host; see below
    assert run.report.model_states["parameters"] == N
    assert run.report.model_states["gradients"] == N
    kept = run.report.model_states["optimizer_state"]
    assert states * N <= kept <= states * N + small + 4 * 8
    assert run.budget.per_n == 2 + states
    assert run.budget.n_bytes == N


def test_foreach_adamw_peaks_at_5n_and_the_for_loop_does_not() -> None:
    """The denominator of all parameters at once: `exp_avg_sq_sqrt` in `_multi_tensor_adam`, torch/optim/adam.py."""
    assert trained(torch.optim.AdamW).report.allocated == 5 * N
    assert trained(torch.optim.AdamW).report.peak_phase == "optimizer"
    assert trained(torch.optim.AdamW).report.optimizer_temporaries == N
    one = trained(torch.optim.AdamW, foreach=False).report
    assert 4 * N < one.allocated < 5 * N
    assert trained(torch.optim.AdamW, fused=True).report.allocated < 4 * N + MIB


def test_sgd_keeps_2n() -> None:
    run = trained(torch.optim.SGD, lr=0.1)
    assert sum(run.report.model_states.values()) == 2 * N


def test_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(1024, 256), nn.Linear(256, 1024, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids))

    def body(gpu: Any) -> bool:
        net = Tied().to("cuda")
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.zeros(1, 4, dtype=torch.long, device="cuda")).sum().backward()
        optimizer.step()
        return net.head.weight is net.embedding.weight

    run = play(body)
    assert run.result is True
    assert run.budget.n_bytes == 1024 * 256 * 4
    assert sum(run.report.model_states.values()) == 4 * 1024 * 256 * 4


def test_frozen_parameters_are_a_term_of_their_own() -> None:
    def body(gpu: Any) -> None:
        net = model().cuda()
        net[0].requires_grad_(False)
        steps(net, torch.optim.AdamW(p for p in net.parameters() if p.requires_grad))

    run = play(body)
    assert run.budget.n_bytes == 3 * MIB
    assert run.budget.frozen_bytes == MIB
    assert run.budget.limit(4) == 4 * 3 * MIB + MIB == run.budget.measured_bytes


def test_mixed_dtypes_follow_each_parameters_own() -> None:
    def body(gpu: Any) -> None:
        net = model().cuda()
        net[0].to(torch.bfloat16)
        net[1].to(torch.bfloat16)
        optimizer = torch.optim.AdamW(net.parameters())
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    run = play(body)
    assert run.budget.n_bytes == 2 * MIB // 2 + 2 * MIB
    assert run.report.model_states["optimizer_state"] == 2 * (2 * MIB // 2 + 2 * MIB)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_ddp_buckets_are_one_n_more_unless_gradients_are_views(view: bool) -> None:
    def body(gpu: Any) -> tuple[int, int]:
        gpu.world.start()
        net = nn.parallel.DistributedDataParallel(model().cuda(), device_ids=[0], gradient_as_bucket_view=view)
        built = torch.cuda.memory_allocated()
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.ones(1, 512, device="cuda")).sum().backward()
        backward = torch.cuda.memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
        steps(net, optimizer, 1)
        return built, backward

    run = play(body, world_size=8)
    built, backward = run.result
    assert built == 2 * N  # parameters and buckets
    assert backward == (3 - view) * N
    assert run.report.allocated == (6 - view) * N
    assert sum(run.report.model_states.values()) == 4 * N
    assert run.trace.strategy == "ddp"


def test_fsdp_shards_the_4n() -> None:
    from torch.distributed.fsdp import fully_shard

    def body(gpu: Any) -> tuple[int, int]:
        gpu.world.start()
        with torch.device("meta"):
            net = model()
        for layer in net:
            fully_shard(layer)
        fully_shard(net).to_empty(device="cuda")
        empty = torch.cuda.max_memory_allocated()
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.ones(1, 512, device="cuda")).sum().backward()
        optimizer.step()
        kept = torch.cuda.memory_allocated()
        optimizer.zero_grad()
        return empty, kept

    run = play(body, world_size=8)
    assert run.result == (N // 8, 4 * N // 8)  # the whole model never lands on one card
    assert sum(run.report.model_states.values()) == 4 * N // 8
    assert run.trace.units[0] == MIB
    assert run.trace.strategy == "fsdp"
    assert run.budget.shards == 8


def test_fsdp_pads_what_the_world_does_not_divide() -> None:
    """Rank 4 of 5 holds nothing of a 4-row matrix, and a row's padding of it all the same."""
    from torch.distributed.fsdp import fully_shard

    def body(gpu: Any) -> None:
        gpu.world.start()
        net = fully_shard(nn.Linear(256, 4, bias=False, device="cuda"))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(1, 256, device="cuda")).sum().backward()
        optimizer.step()

    for rank in (0, 4):
        run = play(body, rank=rank, world_size=5)
        assert run.budget.n_local == 256 * 4
        assert run.budget.padding_bytes == 256 * 4 - 4 * 256 * 4 // 5


def test_storage_resize_frees_and_takes_memory() -> None:
    def body(gpu: Any) -> list[int]:
        tensor = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        seen = [torch.cuda.memory_allocated()]
        for nbytes in (0, 2 * MIB):
            tensor.untyped_storage().resize_(nbytes)
            seen.append(torch.cuda.memory_allocated())
        view = tensor[:10]
        del tensor
        seen.append(torch.cuda.memory_allocated())
        del view
        return [*seen, torch.cuda.memory_allocated()]

    assert play(body).result == [MIB, 0, 2 * MIB, 2 * MIB, 0]


def test_tensors_of_no_bytes_take_none_and_small_ones_take_512() -> None:
    def body(gpu: Any) -> list[int]:
        kept, seen = [], []
        for size in (0, 1, 512, 513):
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            seen.append(torch.cuda.memory_allocated())
        return seen

    assert play(body).result == [0, 512, 1024, 2048]
