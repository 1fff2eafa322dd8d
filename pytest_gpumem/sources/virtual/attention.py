"""`scaled_dot_product_attention` as CUDA runs it: flash, memory-efficient or math, by CUDA's own conditions.

For a device that it does not know, C++ takes the math path, which makes the whole S x S matrix of scores. The choice here
is `select_sdp_backend` of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp with the conditions for dense tensors that
its `can_use_*_attention` list (some are in ../sdp_utils_cpp.h); what happens around the kernel is
`scaled_dot_product_attention` of ../attention.cpp.
"""

from __future__ import annotations

import math

import torch
from torch.nn.attention import SDPBackend

from pytest_gpumem.sources.virtual.patches import Patches, private

aten = torch.ops.aten
_CUDNN_FIRST = (9, 10)  # major compute capabilities where `check_prefer_cudnn_attention` puts cuDNN before flash
INSTEAD_OF_CUDNN = "attention: the flash kernel's tensors, where this card may run cuDNN's"


class Device:
    """The card whose kernels are chosen among. `assumptions` is where a choice that rests on one is counted."""

    capability: tuple[int, int] = (8, 0)
    assumptions: dict[str, int] = {}  # noqa: RUF012 - set for each virtual GPU


_LIBRARIES: list[torch.library.Library] = []


def register() -> None:
    """Put the choice before autograd for the virtual device, once in a process."""
    if not _LIBRARIES:
        library = torch.library.Library("aten", "IMPL")
        library.impl("scaled_dot_product_attention", attend, "AutogradPrivateUse1")
        _LIBRARIES.append(library)


def patch(patches: Patches, capability: tuple[int, int], assumptions: dict[str, int]) -> None:
    """Choose for a card of this compute capability, until `patches.undo()`."""
    patches.set(Device, "capability", capability)
    patches.set(Device, "assumptions", assumptions)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The operation, made of the one that CUDA would run."""
    backend = choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # convert_boolean_attn_mask
        zero = torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask.logical_not(), -math.inf, zero)
    out: torch.Tensor
    if backend == SDPBackend.FLASH_ATTENTION:
        size = query.size(-1)
        scale = scale if scale is not None else 1 / math.sqrt(size)
        padded = (_padded(tensor, 8) for tensor in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out if out.size(-1) == size else out[..., :size]
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        if attn_mask is not None:  # preprocess_mask
            columns = attn_mask.size(-1)
            attn_mask = _padded(attn_mask, 16)[..., :columns]
            attn_mask = attn_mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
        logsumexp = torch.is_grad_enabled() and _any_requires_grad(query, key, value)
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, logsumexp, dropout_p, is_causal, scale=scale
        )[0]
    else:
        out = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return out


def choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    gqa: bool,
) -> SDPBackend:
    """FLASH_ATTENTION, EFFICIENT_ATTENTION or MATH. Raises RuntimeError where all that fit are switched off."""
    shapes = _fused_shapes(query, key, value, gqa)
    order = [SDPBackend(number) for number in private(torch._C, "_get_sdp_priority_order")()]
    for backend in order:
        if backend == SDPBackend.FLASH_ATTENTION and shapes and _flash(query, key, value, mask, dropout, causal):
            if Device.capability[0] in _CUDNN_FIRST and torch.backends.cuda.cudnn_sdp_enabled():
                Device.assumptions[INSTEAD_OF_CUDNN] = Device.assumptions.get(INSTEAD_OF_CUDNN, 0) + 1
            return backend
        if backend == SDPBackend.EFFICIENT_ATTENTION and shapes and _efficient(query, key, value):
            return backend
        if backend == SDPBackend.MATH and torch.backends.cuda.math_sdp_enabled():
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _fused_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gqa: bool) -> bool:
    """check_tensor_shapes, check_batch_size_and_num_heads_dense and check_nonzero_sequence_lengths_dense."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    if not query.size(0) == key.size(0) == value.size(0) or 0 in (query.size(2), key.size(2)):
        return False
    heads, keys, values = query.size(1), key.size(1), value.size(1)
    return keys == values and (heads % keys == 0 if gqa and keys else heads == keys)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
) -> bool:
    """can_use_flash_attention."""
    size = query.size(-1)
    if not torch.backends.cuda.flash_sdp_enabled() or mask is not None or not (8, 0) <= Device.capability <= (12, 1):
        return False
    if not size == key.size(-1) == value.size(-1) or size > 256 or (causal and query.size(2) != key.size(2)):
        return False
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if any(tensor.stride(-1) != 1 and tensor.size(-1) != 1 for tensor in (query, key, value)):
        return False
    narrow = (8, 6) <= Device.capability <= (8, 9) or Device.capability >= (12, 0)
    if narrow and _any_requires_grad(query, key, value) and torch.is_grad_enabled():
        return size <= 192 or (dropout == 0 and size > 224)
    return True


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """can_use_mem_efficient_attention. CUDA's dtypes: no bfloat16 before compute capability 8."""
    dtypes = [torch.float16, torch.float32] + ([torch.bfloat16] if Device.capability >= (8, 0) else [])
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or not (5, 0) <= Device.capability <= (12, 1):
        return False
    if not query.dtype == key.dtype == value.dtype or query.dtype not in dtypes:
        return False
    alignment = _gemm_alignment(query.dtype)
    if query.size(-1) != key.size(-1) or any(t.size(-1) == 0 or t.size(-1) % alignment for t in (query, value)):
        return False
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return False
    aligned = all(tensor.storage_offset() % alignment == 0 for tensor in (query, key, value))
    return Device.capability < (8, 0) or aligned


def _gemm_alignment(dtype: torch.dtype) -> int:
    """minimum_gemm_alignment, in elements."""
    half = dtype in (torch.float16, torch.bfloat16)
    alignment = 4 if Device.capability >= (8, 0) else 1
    tensor_cores = Device.capability >= (8, 0) or (Device.capability >= (7, 0) and half)
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """pad_last_dim and pad_bias: a copy with the last dimension rounded up, or the tensor where it is round."""
    missing = -tensor.size(-1) % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _any_requires_grad(*tensors: torch.Tensor) -> bool:
    return any(tensor.requires_grad for tensor in tensors)
