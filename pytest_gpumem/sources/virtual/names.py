"""One device, two names: C++ sees `vgpu:0` (PrivateUse1), Python sees `cuda:0`.

PyTorch's autograd engine cannot run a backward over fake `cuda` tensors without a GPU (a CPU build has no device
threads for them), but it can for a PrivateUse1 device. So the names are exchanged where Python meets C++:

* out: the properties `Tensor.device` and `is_cuda`;
* in: the fake mode's dispatch (every factory, `*_like`, `_to_copy`), and the few Python doors whose C++ looks at the
  device before it dispatches (`Tensor.to`, `.cuda`, `as_tensor`, `Generator`, the autocast getters).

Tried on torch 2.13 (CPU build) and 2.14 (CUDA build without a GPU).
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pytest_gpumem.sources.virtual.patches import Patches, private

NAME = "vgpu"
_CUDA = [torch.device("cuda", index) for index in range(64)]


class Ordinals:
    """How many device numbers there are: a process plays one card, by whichever number its rank's code calls it."""

    count = 1


def inner(device: Any) -> Any:
    """cuda -> vgpu, in whatever form a device is written; anything else unchanged.

    Raises RuntimeError, as CUDA does, for a number that no rank of the world has.
    """
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return device
        device = device.index or 0
    if isinstance(device, int) and not isinstance(device, bool):
        if not 0 <= device < Ordinals.count:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal (cuda:{device}; the test's world has {Ordinals.count})"
            )
        return torch.device(NAME, 0)
    return device


def outer(device: torch.device) -> torch.device:
    """vgpu -> cuda; anything else unchanged."""
    return _CUDA[0] if device.type == NAME else device


def is_virtual(tensor: object) -> bool:
    """True for a tensor on the virtual GPU (for a wrapper such as DTensor, look at its local tensor first)."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == NAME


def patch(patches: Patches) -> None:
    """Exchange the names everywhere, until `patches.undo()`."""
    _patch_out(patches)
    _patch_in(patches)
    _patch_moves(patches)
    _patch_display(patches)
    _patch_autocast(patches)


def _patch_out(patches: Patches) -> None:
    base = private(torch._C.TensorBase, "device").__get__

    def fake_device(tensor: FakeTensor) -> torch.device:
        return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else outer(tensor.fake_device)

    patches.set(FakeTensor, "device", property(fake_device))
    patches.set(FakeTensor, "is_cuda", property(is_virtual), optional=True)
    patches.set(torch.Tensor, "device", property(lambda tensor: outer(base(tensor))))
    is_cuda = private(torch._C.TensorBase, "is_cuda").__get__
    patches.set(torch.Tensor, "is_cuda", property(lambda tensor: is_cuda(tensor) or base(tensor).type == NAME))
    accelerator = torch.device("cuda")
    patches.set(torch._C, "_get_accelerator", lambda *args: accelerator)
    patches.set(torch.accelerator, "current_accelerator", lambda check_available=False: accelerator)
    patches.set(torch.accelerator, "is_available", lambda: True)
    patches.set(torch.accelerator, "device_count", lambda: 1)


def _patch_in(patches: Patches) -> None:
    normalize = private(FakeTensor, "_normalize_fake_device")
    patches.set(FakeTensor, "_normalize_fake_device", staticmethod(lambda device: normalize(inner(device))))

    def door(owner: Any, name: str, position: int) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = inner(kwargs["device"])
            if position < len(args) and isinstance(args[position], (str, torch.device)):
                args = (*args[:position], inner(args[position]), *args[position + 1 :])
            return original(*args, **kwargs)

        patches.set(owner, name, call)

    # `with torch.device(...)` looks functions up by identity in a set that is cached: fill it before they are wrapped.
    from torch.utils import _device

    private(_device, "_device_constructors")()
    door(torch.Tensor, "to", 1)
    door(torch, "as_tensor", 2)
    door(torch, "asarray", 2)
    wrapper = private(torch.Tensor, "_make_wrapper_subclass")

    def make_wrapper_subclass(cls: type, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = inner(kwargs["device"])
        return wrapper(cls, *args, **kwargs)

    patches.set(torch.Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper_subclass))
    patches.set(torch, "Generator", _HostGenerator("Generator", (), {}))


class _HostGenerator(type(torch.Generator)):  # type: ignore[misc]
    """torch.Generator("cuda") is a CPU generator here; isinstance still holds."""

    _real = torch.Generator

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        host = torch.device(device).type == "cuda" if not isinstance(device, int) else True
        return cls._real("cpu" if host else device)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._real)


def _patch_moves(patches: Patches) -> None:
    """Moving a parameter keeps its identity, as `.data =` does between the CPU and CUDA in C++."""

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
        kwargs = {} if memory_format is None else {"memory_format": memory_format}
        return self.to(torch.device(NAME, 0), non_blocking=non_blocking, **kwargs)

    patches.set(torch.Tensor, "cuda", cuda)
    patches.set(torch.Tensor, "pin_memory", lambda self, device=None: self)
    base_data = private(torch._C.TensorBase, "data")

    def set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
        same = isinstance(tensor, FakeTensor) and isinstance(new, FakeTensor) and tensor.fake_device == new.fake_device
        if not isinstance(new, FakeTensor) or same:
            base_data.__set__(tensor, new)
            return
        moved = new.detach()
        if isinstance(tensor, torch.nn.Parameter):
            become(tensor, torch.nn.Parameter(moved, tensor.requires_grad))
        else:
            become(tensor, moved.requires_grad_(tensor.requires_grad))

    patches.set(torch.Tensor, "data", property(base_data.__get__, set_data))
    patches.set(torch.utils, "swap_tensors", become)


def become(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """What torch.utils.swap_tensors does, less its check that nothing refers weakly to either of them.

    Whoever refers to the parameter (an optimizer, a tied module) should see the moved one.
    """
    if tensor is new:
        return
    tensor.__class__, new.__class__ = new.__class__, tensor.__class__
    for slot in copyreg._slotnames(type(tensor)):  # type: ignore[attr-defined]  # DTensor's _local_tensor and _spec
        here, there = getattr(tensor, slot), getattr(new, slot)
        setattr(tensor, slot, there)
        setattr(new, slot, here)
    mine, other = dict(tensor.__dict__), dict(new.__dict__)
    tensor.__dict__.clear()
    new.__dict__.clear()
    tensor.__dict__.update(other)
    new.__dict__.update(mine)
    private(torch._C, "_swap_tensor_impl")(tensor, new)


def _patch_display(patches: Patches) -> None:
    text = torch.Tensor.__format__

    def format_(self: torch.Tensor, spec: str) -> str:
        fake = isinstance(self, FakeTensor) and self.dim() == 0
        return format(self.item(), spec) if fake else str(text(self, spec))  # type: ignore[no-untyped-call]

    patches.set(torch.Tensor, "__format__", format_)
    patches.set(FakeTensor, "data_ptr", lambda self: 0)  # as it is, less the warning
    kind = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return kind(self).replace(NAME, "cuda")
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            return self.cuda().to(_LEGACY[dtype.rpartition(".")[2]])
        return kind(self, dtype, *args, **kwargs)

    patches.set(torch.Tensor, "type", type_)


_LEGACY = {
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "DoubleTensor": torch.float64,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
}


def _patch_autocast(patches: Patches) -> None:
    """autocast("cuda") is autocast("vgpu"): the getters and setters take the device's name."""

    def renamed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not args or isinstance(args[0], bool):  # the old forms without a device mean CUDA
                args = (NAME, *args)
            return original(NAME if args[0] == "cuda" else args[0], *args[1:])

        return call

    names = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")
    for name in (*names, "is_autocast_available", "_is_autocast_available"):
        for owner in (torch, torch._C):
            if hasattr(owner, name):
                patches.set(owner, name, renamed(getattr(owner, name)))
    dtype = private(torch._C, "get_autocast_dtype")
    patches.set(torch, "get_autocast_gpu_dtype", lambda: dtype("cuda"))
