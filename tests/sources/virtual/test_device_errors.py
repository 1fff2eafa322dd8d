"""What a virtual GPU cannot do, and what does not fit on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from virtual import play

from pytest_gpumem.sources.virtual.cards import find_card
from pytest_gpumem.sources.virtual.mode import CannotSimulate
from pytest_gpumem.sources.virtual.patches import Patches, PrivateApiGone, private
from pytest_gpumem.trace import OutOfMemory

GIB = 2**30


def test_out_of_memory_has_cudas_wording_and_is_counted() -> None:
    total = find_card("T4").total_memory

    def body(gpu: Any) -> Any:
        kept = torch.empty(10 * GIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as raised:
            torch.empty(5 * GIB, dtype=torch.uint8, device="cuda")
        return str(raised.value), torch.cuda.memory_stats()["num_ooms"], kept.numel(), torch.cuda.memory_allocated()

    run = play(body, card="T4")
    message, ooms, _, live = run.result
    assert message.startswith(
        f"CUDA out of memory. Tried to allocate 5.00 GiB. GPU 0 has a total capacity of {total / GIB:.2f} GiB of which "
        f"{(total - 10 * GIB) / GIB:.2f} GiB is free."
    )
    assert (ooms, live) == (1, 10 * GIB)
    assert run.report.out_of_memory is not None
    assert run.report.out_of_memory.requested == 5 * GIB
    assert run.report.out_of_memory.allocated == 10 * GIB
    assert sum(run.report.out_of_memory.composition.values()) == 10 * GIB


def test_the_last_byte_fits_and_the_next_does_not() -> None:
    total = find_card("A10G").total_memory // 512 * 512

    def body(gpu: Any) -> None:
        torch.empty(total, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total + 512, dtype=torch.uint8, device="cuda")

    play(body, card="A10G")


def big_net() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(16384, 16384, bias=False) for _ in range(3)])  # 1 GiB each


@pytest.mark.parametrize(("rows", "phase"), [(65536, "forward"), (1, "backward"), (2, "optimizer")])
def test_out_of_memory_in_each_phase_comes_out_as_itself(rows: int, phase: str) -> None:
    """In a backward, C++ cannot unwind a Python exception on this device: see sources/virtual/backward.py."""
    room = {"forward": 8, "backward": 5, "optimizer": 8}[phase]

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        net(torch.ones(rows, 16384, device="cuda")).sum().backward()
        optimizer.step()

    def body(gpu: Any) -> None:
        net = big_net().cuda()
        ballast = torch.empty(find_card("T4").total_memory - room * GIB, dtype=torch.uint8, device="cuda")
        optimizer = torch.optim.AdamW(net.parameters())
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            step(net, optimizer)
        del ballast
        optimizer.zero_grad()
        net(torch.ones(1, 16384, device="cuda")).sum().backward()  # the next step is whole again
        assert all(parameter.grad is not None for parameter in net.parameters())

    run = play(body, card="T4")
    assert run.report.out_of_memory is not None
    assert run.report.out_of_memory.phase == phase
    assert run.report.phases["forward"].peak > 0
    assert run.report.phases["backward"].end > 0


def test_an_error_in_a_backward_hook_comes_out_as_itself() -> None:
    def body(gpu: Any, hook: str) -> None:
        layer = nn.Linear(8, 8).cuda()

        def broken(*args: Any) -> None:
            raise KeyError("in the hook")

        if hook == "tensor":
            out = layer(torch.ones(2, 8, device="cuda"))
            out.register_hook(broken)
        elif hook == "accumulate":
            layer.weight.register_post_accumulate_grad_hook(broken)
            out = layer(torch.ones(2, 8, device="cuda"))
        else:
            layer.register_full_backward_hook(broken)
            out = layer(torch.ones(2, 8, device="cuda", requires_grad=True))
        with pytest.raises(KeyError, match="in the hook"):
            out.sum().backward()
        layer.zero_grad()

    for hook in ("tensor", "accumulate", "module"):
        play(lambda gpu, hook=hook: body(gpu, hook))


def test_an_error_in_a_custom_backward_comes_out_as_itself() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise LookupError("in the backward")

    def body(gpu: Any) -> None:
        x = torch.ones(3, device="cuda", requires_grad=True)
        with pytest.raises(LookupError, match="in the backward"):
            Broken.apply(x).sum().backward()

    play(body)


def test_a_kernel_without_a_fake_implementation_is_an_error_that_names_it() -> None:
    library = torch.library.Library("gpumem_test", "FRAGMENT")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: x.clone(), "CPU")

    def body(gpu: Any) -> None:
        assert torch.ops.gpumem_test.mystery(torch.ones(2)).tolist() == [1.0, 1.0]  # the host runs it
        with pytest.raises(CannotSimulate) as raised:
            torch.ops.gpumem_test.mystery(torch.ones(2, device="cuda"))
        assert "gpumem_test.mystery.default cannot be simulated" in str(raised.value)
        assert "torch.library.register_fake('gpumem_test::mystery')" in str(raised.value)

    play(body)
    library._destroy()


@pytest.mark.parametrize(
    ("use", "shape", "said"),
    [
        (lambda x: x.nonzero(), (12, 2), "nonzero"),
        (lambda x: x[x > 0], (12,), "nonzero"),
        (lambda x: torch.masked_select(x, x > 0), (12,), "masked_select"),
        (lambda x: x.unique(), (12,), "unique"),
        (lambda x: torch.unique_consecutive(x), (12,), "unique_consecutive"),
        (lambda x: torch.unique(x, dim=0), (3, 4), "unique"),
        (lambda x: torch.bincount(x.long().flatten(), minlength=5), (5,), "bincount"),
        (lambda x: torch.repeat_interleave(x.long().flatten()), (12,), "repeat_interleave"),
    ],
)
def test_shapes_that_depend_on_data_rest_on_a_stated_assumption(use: Any, shape: Any, said: str) -> None:
    run = play(lambda gpu: tuple(use(torch.ones(3, 4, device="cuda")).shape))
    assert run.result == shape
    assert any(assumption.startswith(said) for assumption in run.trace.assumptions)


def test_without_such_shapes_nothing_is_assumed() -> None:
    assert play(lambda gpu: torch.ones(3, device="cuda").sum()).trace.assumptions == ()


def test_tensors_of_two_devices_do_not_mix() -> None:
    def body(gpu: Any) -> None:
        with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
            torch.ones(3, device="cuda") + torch.ones(3)

    play(body)


def test_every_oom_is_an_event_of_the_trace() -> None:
    def body(gpu: Any) -> None:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    assert [e for e in play(body).trace.events if isinstance(e, OutOfMemory)] == [OutOfMemory(1 << 50)] * 2


def test_a_private_name_of_torch_that_is_gone_is_a_clear_error() -> None:
    with pytest.raises(
        PrivateApiGone, match=r"torch\.autograd\.no_such_name is not there in torch .*tried on torch 2\.11"
    ):
        private(torch.autograd, "no_such_name")
    with pytest.raises(PrivateApiGone, match="no_such_name"):
        Patches().set(torch.autograd, "no_such_name", None)


def test_world_and_process_group_agree() -> None:
    import torch.distributed as dist

    def body(gpu: Any) -> Any:
        with pytest.raises(ValueError, match=r"world_size=4.*virtual world has world_size=8"):
            dist.init_process_group("nccl", rank=2, world_size=4)
        dist.init_process_group("nccl")
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("nccl")
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        gathered = torch.empty(32, device="cuda")
        dist.all_gather_into_tensor(gathered, x)
        dist.barrier()
        return dist.get_rank(), dist.get_world_size()

    assert play(body, rank=2, world_size=8).result == (2, 8)
