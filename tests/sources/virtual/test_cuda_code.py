"""Code that says "cuda" runs unchanged."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from virtual import play


def test_the_card_is_there_and_is_the_one_that_was_asked_for() -> None:
    def body(gpu: Any) -> dict[str, Any]:
        free, total = torch.cuda.mem_get_info()
        return {
            "available": torch.cuda.is_available(),
            "count": torch.cuda.device_count(),
            "name": torch.cuda.get_device_name(0),
            "capability": torch.cuda.get_device_capability(),
            "total": torch.cuda.get_device_properties("cuda").total_memory,
            "info": (free, total),
            "bf16": torch.cuda.is_bf16_supported(),
            "current": torch.cuda.current_device(),
            "accelerator": torch.accelerator.current_accelerator(),
        }

    said = play(body, card="T4").result
    assert said["available"] is True
    assert said["count"] == 1
    assert said["name"] == "Tesla T4"
    assert said["capability"] == (7, 5)
    assert said["total"] == said["info"][0] == said["info"][1]
    assert said["current"] == 0
    assert said["accelerator"] == torch.device("cuda")
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3).cuda(),
        lambda: torch.ones(3).to("cuda"),
        lambda: torch.ones(3).to("cuda:0", non_blocking=True),
        lambda: torch.ones(3).to(device=torch.device("cuda")),
        lambda: torch.ones(3).to(torch.device("cuda", 0), torch.float16),
        lambda: torch.ones(3).pin_memory().cuda(non_blocking=True),
        lambda: torch.tensor([1.0, 2.0, 3.0], device="cuda"),
        lambda: torch.as_tensor([1.0, 2.0, 3.0], device="cuda"),
        lambda: torch.asarray([1.0, 2.0, 3.0], device="cuda"),
        lambda: torch.zeros(3, device=0),
        lambda: torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(0)),
        lambda: torch.empty_like(torch.ones(3), device="cuda"),
        lambda: torch.ones(5, device="cuda").new_zeros(3),
        lambda: torch.ones(3).type("torch.cuda.FloatTensor"),
        lambda: nn.Linear(1, 3).to("cuda").bias,
        lambda: nn.Linear(1, 3, device="cuda").bias,
        lambda: copy.deepcopy(nn.Linear(1, 3).cuda()).bias,
    ],
)
def test_every_way_onto_the_card(make: Any) -> None:
    def body(gpu: Any) -> tuple[Any, ...]:
        tensor = make()
        return (
            str(tensor.device),
            tensor.is_cuda,
            tensor.shape,
            tensor.get_device(),
            torch.cuda.memory_allocated() >= 512,
        )

    assert play(body).result == ("cuda:0", True, (3,), 0, True)


def test_with_torch_device_makes_tensors_on_the_card() -> None:
    def body(gpu: Any) -> list[str]:
        with torch.device("cuda"):
            made = [torch.ones(3), torch.arange(3), torch.as_tensor([1]), nn.Linear(2, 2).weight]
        return [str(tensor.device) for tensor in made]

    assert play(body).result == ["cuda:0"] * 4


def test_a_card_that_no_rank_has_is_refused_as_cuda_does() -> None:
    def body(gpu: Any) -> None:
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(3, device="cuda:1")

    play(body)
    assert str(play(lambda gpu: torch.ones(3, device="cuda:7").device, world_size=8).result) == "cuda:0"


def test_host_tensors_keep_their_values() -> None:
    def body(gpu: Any) -> Any:
        x = torch.arange(4.0)
        return (x * 2).tolist(), x.sum().item(), torch.randperm(5).sort().values.tolist()

    assert play(body).result == ([0.0, 2.0, 4.0, 6.0], 6.0, [0, 1, 2, 3, 4])


def test_scalars_of_data_that_does_not_exist_are_plausible() -> None:
    def body(gpu: Any) -> Any:
        loss = torch.rand(3, device="cuda").sum()
        return (
            loss.item(),
            float(loss),
            int(torch.ones(1, dtype=torch.long, device="cuda")),
            bool(loss > 2),
            f"{loss:.2f}",
        )

    assert play(body).result == (1.0, 1.0, 1, False, "1.00")


def test_results_come_back_to_the_host() -> None:
    def body(gpu: Any) -> Any:
        logits = torch.rand(2, 3, device="cuda")
        return logits.cpu().numpy().shape, logits.argmax(-1).tolist(), logits.detach().cpu().device.type

    assert play(body).result == ((2, 3), [1, 1], "cpu")


def test_memory_statistics_are_those_of_the_card() -> None:
    def body(gpu: Any) -> Any:
        first = torch.empty(1000, dtype=torch.uint8, device="cuda")
        second = torch.empty(2048, dtype=torch.uint8, device="cuda")
        del first
        seen = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
        torch.cuda.reset_peak_memory_stats()
        seen.append(torch.cuda.max_memory_allocated())
        stats = torch.cuda.memory_stats()
        seen += [stats["requested_bytes.all.current"], stats["allocation.all.allocated"], stats["num_ooms"]]
        del second
        torch.cuda.empty_cache()
        return seen

    assert play(body).result == [2048, 3072, 2048, 2048, 2, 0]
    assert play(lambda gpu: torch.cuda.memory_summary()).result.startswith("|==")


def test_streams_events_and_synchronisation_run() -> None:
    def body(gpu: Any) -> Any:
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        before = torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            inside = torch.cuda.current_stream() == stream
            x = torch.ones(3, device="cuda")
            x.record_stream(stream)
        stream.wait_stream(torch.cuda.current_stream())
        event.record()
        torch.cuda.synchronize()
        return inside, torch.cuda.current_stream() == before, event.query(), event.elapsed_time(event)

    assert play(body).result == (True, True, True, 0.0)


def test_autocast_casts_and_caches_weight_casts_until_the_region_ends() -> None:
    def body(gpu: Any) -> Any:
        layer = nn.Linear(512, 512, bias=False).cuda()
        x = torch.ones(4, 512, device="cuda")
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            first = layer(x)
            after = torch.cuda.memory_allocated()
            second = layer(x)
            again = torch.cuda.memory_allocated()
            normed = nn.functional.layer_norm(first, (512,))
            enabled = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return first.dtype, second.dtype, normed.dtype, after - before, again - after, enabled

    first, second, normed, cold, warm, enabled = play(body).result
    assert (first, second, normed) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert enabled == (True, torch.bfloat16)
    activations = 2 * 4 * 512 * 2  # the input's cast, kept for the weight's gradient, and the output
    assert cold == 512 * 512 * 2 + activations
    assert warm == activations  # the weight's cast is there already


def test_autocast_cache_is_emptied_with_the_region() -> None:
    def body(gpu: Any) -> int:
        layer = nn.Linear(512, 512, bias=False).cuda()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            layer(torch.ones(4, 512, device="cuda"))
        return torch.cuda.memory_allocated()

    assert play(body).result == 512 * 512 * 4


def test_an_amp_loop_with_a_scaler_steps() -> None:
    def body(gpu: Any) -> int:
        net = nn.Linear(512, 512, bias=False).cuda()
        optimizer, scaler = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cuda")
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = net(torch.ones(4, 512, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return len(optimizer.state)

    run = play(body)
    assert run.result == 1
    assert run.report.model_states["optimizer_state"] == 2 * 512 * 512 * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_drops_what_it_recomputes(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def run(on: bool) -> Any:
        def body(gpu: Any) -> int:
            blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda() for _ in range(4)]
            x = torch.ones(32, 64, device="cuda", requires_grad=True)
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if on else block(x)
            live = torch.cuda.memory_allocated()
            x.sum().backward()
            assert all(p.grad is not None for block in blocks for p in block.parameters())
            return live

        return play(body)

    full, checkpointed = run(False), run(True)
    inner = 4 * 2 * 32 * 256 * 4  # each block keeps GELU's input and output
    assert full.result - checkpointed.result == inner
    assert checkpointed.report.category_peaks["activations"] < full.report.category_peaks["activations"]


def test_a_data_loader_with_workers_feeds_real_batches() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    def body(gpu: Any) -> Any:
        data = TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8))
        batches = [(x.cuda(), y.tolist()) for x, y in DataLoader(data, batch_size=4, num_workers=1, pin_memory=True)]
        return [y for _, y in batches], batches[0][0].device.type

    assert play(body).result == ([[0, 1, 2, 3], [4, 5, 6, 7]], "cuda")


def test_moving_a_module_keeps_its_parameters_identity_and_ties() -> None:
    def body(gpu: Any) -> Any:
        net = nn.Linear(4, 4)
        weight, optimizer = net.weight, torch.optim.SGD(net.parameters(), lr=0.1)
        net.cuda()
        net.half()
        return net.weight is weight, optimizer.param_groups[0]["params"][0].is_cuda, weight.dtype

    assert play(body).result == (True, True, torch.float16)


def test_a_big_model_built_on_the_host_takes_no_memory() -> None:
    def body(gpu: Any) -> Any:
        layer = nn.Linear(1 << 17, 1 << 17, bias=False)  # 64 GiB
        return layer.weight.device.type, torch.cuda.memory_allocated(), layer.cuda().weight.is_cuda

    assert play(body).result == ("cpu", 0, True)


def test_state_dicts_load_and_save_on_the_host() -> None:
    def body(gpu: Any) -> Any:
        net = nn.Linear(4, 4).cuda()
        file = io.BytesIO()
        torch.save({name: tensor.cpu() for name, tensor in net.state_dict().items()}, file)
        file.seek(0)
        net.load_state_dict(torch.load(file))
        return sorted(net.state_dict())

    assert play(body).result == ["bias", "weight"]


def test_torch_is_given_back_as_it_was() -> None:
    names = ["Tensor.to", "Tensor.device", "Tensor.cuda", "cuda.is_available", "Generator", "UntypedStorage.resize_"]

    def seen() -> list[Any]:
        return [getattr(torch if "." not in n else getattr(torch, n.split(".")[0]), n.split(".")[-1]) for n in names]

    before = seen()
    play(lambda gpu: torch.ones(3).cuda())
    assert seen() == before
    assert not torch.cuda.is_available() or torch.version.cuda
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()  # the engine still runs on the host
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
