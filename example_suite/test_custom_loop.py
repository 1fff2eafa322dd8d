"""A training loop of one's own. The marker is all it takes: no fixture, and no line that knows of virtual GPUs."""

import pytest
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.gpumem(gpu="T4", max_gb=2, budget="4N")
def test_mixed_precision_loop():
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device)
    losses = []
    for _ in range(3):
        inputs = torch.randn(64, 1024).to(device)
        with torch.autocast(device, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(inputs), inputs)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert torch.cuda.max_memory_allocated() < 1e9
