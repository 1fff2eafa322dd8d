"""autocast on the virtual GPU: the cast lists of CUDA, and its cache of weight casts.

The lists are AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE of
aten/src/ATen/autocast_mode.h; the cache is `cached_cast` of aten/src/ATen/autocast_mode.cpp: casts of leaf weights that
require grad are kept until the outermost region ends (`clear_cache`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pytest_gpumem.sources.virtual.names import NAME, is_virtual
from pytest_gpumem.sources.virtual.patches import Patches, private

_LOWER = """
_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu addmm
addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
""".split()
_FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm native_layer_norm
group_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
""".split()
_FP32_DTYPE = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm".split()
# CUDA registers these alone of each name (AT_FORALL_FP32 spells overloads out); the rest falls through.
_SKIPPED = ("out", "dimname", "names", "Dimname")


class _Cache:
    """Casts of leaf weights, kept while a region is open."""

    def __init__(self) -> None:
        self.casts: dict[tuple[int, torch.dtype], tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        cacheable = (
            torch.is_autocast_cache_enabled()
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and tensor.dtype == torch.float32
            and dtype != torch.float32
        )
        if not cacheable:
            return tensor.to(dtype)
        known = self.casts.get((id(tensor), dtype))
        if known is not None and known[0]() is tensor:
            return known[1]
        cast = tensor.to(dtype)
        self.casts[id(tensor), dtype] = weakref.ref(tensor), cast
        return cast


_CACHE = _Cache()
_LIBRARIES: list[torch.library.Library] = []


def register() -> None:
    """Register the cast lists for the device's autocast key, once in a process."""
    if _LIBRARIES:
        return
    fallthrough, impl = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _LIBRARIES.extend((fallthrough, impl))
    for name in _LOWER:
        for overload in _overloads(name):
            _register(impl, name, overload, None)
    for name in (*_FP32, *_FP32_DTYPE):
        for overload in _overloads(name):
            _register(impl, name, overload, torch.float32)


def patch(patches: Patches) -> None:
    """Empty the cache where PyTorch does: when the outermost region ends, until `patches.undo()`."""
    clear = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        _CACHE.casts.clear()
        clear()

    patches.set(torch, "clear_autocast_cache", clear_autocast_cache)


def _overloads(name: str) -> list[str]:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:  # not in this version of torch
        return []
    return [o for o in packet.overloads() if not any(part in o for part in _SKIPPED)]


def _register(library: torch.library.Library, name: str, overload: str, dtype: torch.dtype | None) -> None:
    operation = getattr(getattr(torch.ops.aten, name), overload)
    with contextlib.suppress(RuntimeError):  # an overload that has no dispatcher entry
        full = name if overload == "default" else f"{name}.{overload}"
        library.impl(full, _kernel(operation, dtype), "AutocastPrivateUse1")


def _kernel(operation: Any, fixed: torch.dtype | None) -> Callable[..., Any]:
    key = torch._C.DispatchKeySet(private(torch._C.DispatchKey, "AutocastPrivateUse1"))
    guard = private(torch._C, "_ExcludeDispatchKeyGuard")
    dtype_of = private(torch._C, "get_autocast_dtype")

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            local = getattr(value, "_local_tensor", value)
            eligible = is_virtual(local) and value.is_floating_point() and value.dtype not in (torch.float64, dtype)
            return _CACHE.cast(value, dtype) if eligible else value
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return [cast(item, dtype) for item in value]
        return value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with guard(key):
            dtype = fixed or dtype_of(NAME)
            return operation(*(cast(a, dtype) for a in args), **{k: cast(v, dtype) for k, v in kwargs.items()})

    return kernel
