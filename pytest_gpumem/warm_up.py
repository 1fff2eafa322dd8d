"""What the process that ranks are forked from has ready for them."""

from __future__ import annotations

import importlib


def warm_up() -> None:
    """Import what every rank needs, once. Runs nothing and starts no thread: a fork must stay safe."""
    for module in (
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.testing._internal.distributed.fake_pg",
        "pytest_gpumem.fixture",
    ):
        importlib.import_module(module)
    from pytest_gpumem.sources.virtual import attention, autocast, device
    from pytest_gpumem.sources.virtual.mode import VirtualMode

    device.register()
    autocast.register()
    attention.register()
    VirtualMode()  # imports torch._dynamo
