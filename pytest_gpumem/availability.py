"""`torch.cuda.is_available()` while test modules are imported.

Many test modules write `device = "cuda" if torch.cuda.is_available() else "cpu"` at their top. For modules that speak of
gpumem the answer there is what it will be when their tests run: yes. Other modules see the truth.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WORDS = (re.compile(r"\bgpumem\b"), re.compile(r"\btorch\b"))


def concerns(path: Path) -> bool:
    """Whether a test module's text speaks of both gpumem and torch."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return all(word.search(text) for word in _WORDS)


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """One GPU is there, as far as `torch.cuda.is_available` and `device_count` say; nothing changes where one really is."""
    try:
        import torch
    except ImportError:  # the module's own import will say so
        yield
        return
    if torch.cuda.is_available():
        yield
        return
    cuda: Any = torch.cuda
    originals = cuda.is_available, cuda.device_count
    cuda.is_available, cuda.device_count = (lambda: True), (lambda: 1)
    try:
        yield
    finally:
        cuda.is_available, cuda.device_count = originals
