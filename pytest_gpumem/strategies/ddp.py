"""DistributedDataParallel: the whole model on every rank, gradients all-reduced in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

SHARDED = False


def parallelize(
    model: torch.nn.Module, device: torch.device, wrap: Sequence[type], options: dict[str, Any]
) -> torch.nn.Module:
    """The model in DistributedDataParallel; `options` are its keyword arguments. DDP wraps it whole: `wrap` means nothing."""
    return DistributedDataParallel(model.to(device), device_ids=[device.index], **options)
