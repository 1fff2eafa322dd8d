"""A world of any size played by one process: collectives that move nothing, and allocate what the real ones do.

The process group is PyTorch's own `FakeProcessGroup`; FSDP2 and DDP, its C++ Reducer included, run as they are above it.
DDP's check that parameter shapes agree across ranks reads data and is left out; its first all-reduce hook is a Python one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pytest_gpumem.categories import COMMUNICATION
from pytest_gpumem.sources.virtual.names import NAME
from pytest_gpumem.sources.virtual.patches import Patches, private

if TYPE_CHECKING:
    from pytest_gpumem.sources.recorder import Recorder

BACKEND = "gpumem_virtual"

# In-place collectives work on memory that has an owner already; a reduce-scatter's result becomes a gradient.
_WEAK = ("allreduce", "all_reduce", "broadcast", "reduce_", "reduce_scatter", "_reduce_scatter", "wait_tensor")


class World:
    """The world that this process plays one rank of."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def start(self) -> None:
        """Start the default process group, unless it is there. Called on first use: most tests need none."""
        if not dist.is_initialized():
            _register_backend()
            from torch.testing._internal.distributed.fake_pg import FakeStore

            names = ",".join(f"{device}:{BACKEND}" for device in ("cpu", "cuda", NAME))
            _INIT(names, rank=self.rank, world_size=self.size, store=FakeStore())

    def environment(self) -> dict[str, str]:
        """What torchrun sets for a rank; the virtual world has one card a host, so that each rank's card is cuda:0."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }


_INIT = dist.init_process_group
_registered = False


def _register_backend() -> None:
    global _registered
    if _registered:
        return
    from torch.testing._internal.distributed import fake_pg

    create = private(fake_pg, "_create_fake_pg")
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda", NAME])
    _registered = True


def patch(patches: Patches, world: World, recorder: Recorder) -> None:
    """Let `torch.distributed`, DDP and FSDP2 speak to `world`, until `patches.undo()`."""
    _patch_start(patches, world)
    _patch_ddp(patches, recorder)
    _patch_dtensor(patches, recorder)


def _patch_dtensor(patches: Patches, recorder: Recorder) -> None:
    """DTensor works out global shapes on fake tensors of its own; with a fake mode on it takes that one. It allocates nothing."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = private(ShardingPropagator, "_propagate_tensor_meta_non_cached")

    @functools.wraps(propagate)
    def untracked(*args: Any, **kwargs: Any) -> Any:
        with recorder.storages.untracked():
            return propagate(*args, **kwargs)

    patches.set(ShardingPropagator, "_propagate_tensor_meta_non_cached", untracked)


def _patch_start(patches: Patches, world: World) -> None:
    @functools.wraps(dist.init_process_group)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            raise ValueError("trying to initialize the default process group twice!")
        for name, is_ in (("world_size", world.size), ("rank", world.rank)):
            asked = kwargs.get(name, -1)
            if asked not in (-1, None, is_):
                raise ValueError(
                    f"init_process_group({name}={asked}): the test's virtual world has {name}={is_}; "
                    f"leave {name} out, or change world_size in the gpumem marker"
                )
        world.start()

    patches.set(dist, "init_process_group", init_process_group)
    patches.set(dist.distributed_c10d, "init_process_group", init_process_group)


def claim_collective(recorder: Recorder, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """What a collective (or one of FSDP2's copies around it) returns or writes to belongs to `communication`."""
    weak = func._opname.startswith(_WEAK)
    written = [
        kwargs.get(argument.name, args[position] if position < len(args) else None)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    _claim(recorder, [written, out], weak)


def _claim(recorder: Recorder, value: Any, weak: bool) -> None:
    if isinstance(value, torch.Tensor):
        recorder.claim(value, COMMUNICATION, weak)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _claim(recorder, item, weak)


def _all_reduced(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The bucket is reduced where it lies: Reducer::run_allreduce_hook in torch/csrc/distributed/c10d/reducer.cpp."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _patch_ddp(patches: Patches, recorder: Recorder) -> None:
    from torch.nn.parallel import distributed

    patches.set(distributed, "_verify_param_shape_across_processes", lambda *args, **kwargs: True)
    cls = distributed.DistributedDataParallel
    init = cls.__init__
    helper = private(cls, "_ddp_init_helper")

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("device_ids"):
            kwargs["device_ids"] = None  # the module is where it is: there is one card
        kwargs.pop("output_device", None)
        init(self, *args, **kwargs)

    @functools.wraps(helper)
    def _ddp_init_helper(self: Any, *args: Any, **kwargs: Any) -> None:
        before = len(recorder.trace.events)
        helper(self, *args, **kwargs)
        recorder.claim_since(before, COMMUNICATION)  # the buckets: Reducer::initialize_buckets

    forward = private(cls, "_pre_forward")

    @functools.wraps(forward)
    def _pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._comm_hooks and "_gpumem_hooked" not in vars(self):
            self._gpumem_hooked = True
            # The fake group's all-reduce ends without a result, and the Reducer's own hook insists on one.
            private(dist, "_register_comm_hook")(self.reducer, None, _all_reduced)
        before = len(recorder.trace.events)
        rebuilt = self._has_rebuilt_buckets
        result = forward(self, *args, **kwargs)
        if self._has_rebuilt_buckets and not rebuilt:
            recorder.claim_since(before, COMMUNICATION)
        return result

    patches.set(cls, "_pre_forward", _pre_forward)
    patches.set(cls, "__init__", __init__)
    patches.set(cls, "_ddp_init_helper", _ddp_init_helper)
