"""`torch.cuda` on a virtual GPU: the bindings below it are replaced, PyTorch's own Python above them stays."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.cuda.nvtx

from pytest_gpumem.sources.virtual.allocator import Allocator
from pytest_gpumem.sources.virtual.cards import Card
from pytest_gpumem.sources.virtual.device import STREAMS, Event, ExternalStream, Stream, set_stream
from pytest_gpumem.sources.virtual.patches import Patches


def patch(patches: Patches, card: Card, allocator: Allocator) -> None:
    """Make `torch.cuda` speak of `card` and `allocator`, until `patches.undo()`."""
    properties = _properties(card)
    cudart = _cudart(card, allocator)
    for name, binding in _bindings(card, allocator).items():
        patches.set(torch._C, name, binding, optional=True)  # a CPU build has none of them
    answers: dict[str, Any] = {
        "_cudart": cudart,
        "_initialized": True,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **kwargs: call(),
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "cudart": lambda: cudart,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: card.compute_capability,
        "get_device_name": lambda device=None: card.name,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.compute_capability[0] >= 8,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "current_stream": lambda device=None: STREAMS.current,
        "default_stream": lambda device=None: STREAMS.default,
        "default_generators": (torch._C.Generator(),),
        "is_current_stream_capturing": lambda: False,
        "get_arch_list": lambda: [_architecture(card)],
    }
    for name, answer in answers.items():
        patches.set(torch.cuda, name, answer, optional=True)
    for module in (torch.cuda.memory, torch.cuda.random):
        for name in ("_lazy_init", "is_initialized", "_lazy_call"):
            if name in vars(module):
                patches.set(module, name, answers[name])
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        patches.set(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)
    patches.set(torch.version, "cuda", torch.version.cuda or "12.8")
    patches.set(torch.backends.cuda, "is_built", lambda: True)


def _architecture(card: Card) -> str:
    return "sm_{}{}".format(*card.compute_capability)


def _properties(card: Card) -> Any:
    """What `torch.cuda.get_device_properties` gives, as far as the card's table knows."""
    return types.SimpleNamespace(
        name=card.name,
        major=card.compute_capability[0],
        minor=card.compute_capability[1],
        total_memory=card.total_memory,
        multi_processor_count=card.multi_processor_count,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )


def _cudart(card: Card, allocator: Allocator) -> Any:
    def nothing(*args: Any) -> int:
        return 0

    return types.SimpleNamespace(
        cudaError=types.SimpleNamespace(success=0),
        cudaMemGetInfo=lambda device=0: (card.total_memory - allocator.allocated, card.total_memory),
        cudaProfilerStart=nothing,
        cudaProfilerStop=nothing,
        cudaHostRegister=nothing,
        cudaHostUnregister=nothing,
        cudaDeviceSynchronize=nothing,
        cudaGetErrorString=str,
    )


def _bindings(card: Card, allocator: Allocator) -> dict[str, Any]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def snapshot(*args: Any) -> dict[str, Any]:
        return {"segments": [], "device_traces": [[]], "allocator_settings": {}, "external_annotations": []}

    silent = (
        "_cuda_setDevice _cuda_init _cuda_synchronize _cuda_emptyCache _cuda_ipc_collect _cuda_sleep "
        "_cuda_setMemoryFraction _cuda_record_memory_history _cuda_record_memory_history_legacy "
        "_cuda_setMemoryMetadata _cuda_set_sync_debug_mode _cuda_clearCublasWorkspaces _cuda_lock_mutex "
        "_cuda_unlock_mutex _cuda_resetAccumulatedHostMemoryStats _cuda_resetPeakHostMemoryStats"
    )
    return {
        **dict.fromkeys(silent.split(), nothing),
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_exchangeDevice": lambda index: 0,
        "_cuda_maybeExchangeDevice": lambda index: 0,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_memoryStats": lambda device=0: allocator.stats(),
        "_cuda_resetPeakMemoryStats": lambda device=0: allocator.reset_peak(),
        "_cuda_resetAccumulatedMemoryStats": lambda device=0: allocator.reset_accumulated(),
        "_cuda_hostMemoryStats": dict,
        "_cuda_getMemoryFraction": lambda device=0: 1.0,
        "_cuda_memorySnapshot": snapshot,
        "_cuda_getMemoryMetadata": lambda: "",
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_getArchFlags": lambda: _architecture(card),
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_getCurrentBlasHandle": lambda: 0,
        "_cuda_getCurrentRawStream": lambda device: STREAMS.current.stream_id,
        "_cuda_getCurrentStream": lambda device: (STREAMS.current.stream_id, 0, 1),
        "_cuda_getDefaultStream": lambda device: (0, 0, 1),
        "_cuda_setStream": set_stream,
    }
