"""Small models and training loops that run the same on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytest_gpumem.trace import Alloc, Free, MemoryTrace, Phase


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, three blocks and a head: 112,512 parameters in 21 tensors."""

    def __init__(self, width: int = 64, words: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(
    device: str,
    optimizer: Callable[..., torch.optim.Optimizer],
    wrap: Callable[[nn.Module], nn.Module] = lambda net: net,
    steps: int = 3,
) -> None:
    """A loop as a user writes it, with clipping."""
    ids = torch.randint(0, 100, (4, 16)).to(device)
    net: Any = wrap(Net().to(device))
    stepper = optimizer(net.parameters())
    for _ in range(steps):
        logits = net(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        del logits, loss
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        stepper.step()
        stepper.zero_grad()


def life(trace: MemoryTrace) -> list[Any]:
    """The trace from its first forward on: +requested bytes, -requested bytes, and where phases begin and end."""
    sizes: dict[int, int] = {}
    events: list[Any] = []
    for event in trace.events:
        if isinstance(event, Alloc):
            sizes[event.block] = event.requested
            events.append(event.requested)
        elif isinstance(event, Free):
            events.append(-sizes[event.block])
        elif isinstance(event, Phase):
            events.append((event.name, event.begins))
    return events[events.index(("forward", True)) :]
