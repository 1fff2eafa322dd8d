"""The fake mode under every operation: shapes are worked out, data is not, and each new storage is told to `Storages`.

CPU tensors stay real (samplers, collators, schedules and metrics keep their values) unless they are big, so that a 7B
model built on the CPU needs no memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from pytest_gpumem.sources.storages import Storages
from pytest_gpumem.sources.virtual.attention import attend
from pytest_gpumem.sources.virtual.backward import Backward
from pytest_gpumem.sources.virtual.names import NAME, inner
from pytest_gpumem.sources.virtual.patches import private
from pytest_gpumem.sources.virtual.rules import RULES, plausible

aten = torch.ops.aten
BIG = 1 << 20  # elements; a CPU factory above this makes a fake tensor

_SAME = (aten.equal.default, aten.allclose.default)  # compared with itself, what data there would be is equal
_ITEM = aten._local_scalar_dense.default
_TO_COPY = aten._to_copy.default
_COPY_ = aten.copy_.default
_ATTENTION = aten.scaled_dot_product_attention.default
_RECORD_STREAM = aten.record_stream.default


class CannotSimulate(RuntimeError):
    """An operation that a virtual GPU cannot play. The message names it and the way out."""


class VirtualMode(FakeTensorMode):
    """Runs operations on the virtual GPU (and on fake CPU tensors); lets real CPU tensors pass.

    `assumptions` collects the statements of the rules that were used. `on_collective` is called with
    (operation, arguments, keyword arguments, result) of every collective, and of FSDP2's copies around them.
    """

    avoid_device_init = True  # torch.tensor(..., device="cuda") must not ask for a real kernel

    def __init__(self) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True, shape_env=None)
        self.storages: Storages | None = None
        self.backward: Backward | None = None
        self.assumptions: dict[str, int] = {}
        self.on_collective: Any = None
        self._inside = 0

    def __deepcopy__(self, memo: Any) -> VirtualMode:
        return self  # a copied model's tensors hold their mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True
        if self.backward is not None and self.backward.aborted:
            return self.backward.refused
        try:
            return self._dispatch(func, types, args, dict(kwargs or {}))
        except BaseException as error:
            if self.backward is not None and self.backward.running:
                return self.backward.abort(error)
            raise error from None

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if any(kind is not FakeTensor and not _plain(kind) for kind in types):
            return NotImplemented  # DTensor and the like unwrap first
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        device = kwargs.get("device")
        if device is not None:
            device = kwargs["device"] = inner(device)
        if FakeTensor not in types and (device is None or device.type != NAME):
            return self._host(func, types, args, kwargs, device)
        if func is _ITEM:
            return plausible(args[0])
        if func in _SAME:
            return True
        if func is _RECORD_STREAM:
            return None
        known = RULES.get(func)
        if known is not None:
            function, assumption = known
            self.assumptions[assumption] = self.assumptions.get(assumption, 0) + 1
            with self:
                return function(*args, **kwargs)
        if func is _TO_COPY and device is not None and device.type == "cpu":
            source = args[0]
            if source.numel() <= BIG and source.fake_device.type == NAME:  # device to host: small results are real
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        if func is _COPY_ and not isinstance(args[0], FakeTensor):
            return args[0]
        return self._fake(func, types, args, kwargs)

    def _host(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any], device: Any) -> Any:
        if not types and (device is None or device.type == "cpu") and _elements(args) > BIG:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)

    def _fake(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if _is_composite(func):
            with self:  # what it is made of are operations of their own (they arrive whole in inference mode)
                return attend(*args, **kwargs) if func is _ATTENTION else func.decompose(*args, **kwargs)
        try:
            # Where a shape is worked out by a decomposition, its steps come through here too: CUDA runs one kernel instead.
            self._inside += 1
            try:
                out = super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._inside -= 1
        except (UnsupportedOperatorException, DynamicOutputShapeException, DataDependentOutputException) as error:
            raise CannotSimulate(_cannot(func, error)) from None
        if out is NotImplemented:
            return out
        from_host = (func is _TO_COPY or func is _COPY_) and bool(args) and _on_host(args[-1 if func is _COPY_ else 0])
        if self._inside:
            return out
        self._see(out, func, from_host)
        if self.on_collective is not None and func.namespace in ("c10d", "_c10d_functional", "fsdp"):
            self.on_collective(func, args, kwargs, out)
        return out

    def _see(self, out: Any, func: Any, from_host: bool) -> None:
        if isinstance(out, FakeTensor):
            if out.fake_device.type == NAME and self.storages is not None:
                self.storages.see(out, func._name, from_host)
        elif isinstance(out, (list, tuple)):
            for item in out:
                self._see(item, func, from_host)


@functools.cache
def _is_composite(func: Any) -> bool:
    """CompositeImplicitAutograd: an operation that has no kernel of its own on any device."""
    has_kernel = private(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    try:
        return bool(has_kernel(func.name(), "CompositeImplicitAutograd"))
    except RuntimeError:  # prim::device and the like are known to TorchScript only
        return False


def _plain(kind: Any) -> bool:
    """A type without a dispatch of its own: Tensor, Parameter, Buffer, FakeTensor and their subclasses."""
    return issubclass(kind, FakeTensor) or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _on_host(value: object) -> bool:
    if isinstance(value, FakeTensor):
        return value.fake_device.type == "cpu"
    return isinstance(value, torch.Tensor)


def _elements(args: Any) -> int:
    """Elements of the tensor that a factory makes: its size comes first (`full(size, value)`, `arange(n)`)."""
    size = args[0] if args and isinstance(args[0], (list, tuple, torch.Size)) else args[:1]
    return math.prod(n for n in size if isinstance(n, int))


def _cannot(func: Any, error: Exception) -> str:
    if isinstance(error, UnsupportedOperatorException):
        return (
            f"{func} cannot be simulated on a virtual GPU: it has no fake implementation. "
            f"Register one with torch.library.register_fake({func.namespace + '::' + func._opname!r}), "
            'or run the test on a GPU with gpumem(device="cuda").'
        )
    return (
        f"{func} cannot be simulated on a virtual GPU: its result depends on data, which fake tensors do not have. "
        'Give it a fixed shape in the test, or run the test on a GPU with gpumem(device="cuda").'
    )
