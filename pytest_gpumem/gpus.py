"""The real GPUs of this machine, as NVML tells, without starting CUDA."""

from __future__ import annotations

import pynvml


def count() -> int:
    """How many NVIDIA GPUs the driver sees; 0 where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


def why_not_cuda() -> str:
    """The reason why tests do not run on real GPUs here."""
    if count() == 0:
        return 'no GPU on this machine; device="virtual" needs none'
    return 'this version of pytest-gpumem measures on virtual GPUs only; use device="virtual"'
