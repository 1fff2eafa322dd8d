"""One rank, one card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

SHARDED = False


def parallelize(
    model: torch.nn.Module, device: torch.device, wrap: Sequence[type], options: dict[str, Any]
) -> torch.nn.Module:
    """The model on `device`. `wrap` means nothing here, so that one test can run under several strategies."""
    if options:
        raise TypeError(f"strategy 'single' takes no options, got {', '.join(options)}")
    return model.to(device)
