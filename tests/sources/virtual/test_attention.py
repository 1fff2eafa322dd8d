"""Which kernel attention runs on which card, and what that kernel keeps, worked out by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from virtual import Run, play

from pytest_gpumem.sources.virtual.attention import INSTEAD_OF_CUDNN
from pytest_gpumem.trace import Alloc

BATCH, HEADS, LENGTH, SIZE = 2, 4, 48, 64
half, bfloat, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64


def attend(
    card: str,
    dtype: torch.dtype,
    size: int = SIZE,
    keys: int = LENGTH,
    heads: int = HEADS,
    mask: Any = None,
    **options: Any,
) -> Run:
    """Attention forward and backward; `keys` and `heads` are those of key and value, `mask` is its dtype."""

    def body(gpu: Any) -> torch.Size:
        grad = options.pop("grad", True)
        query = torch.randn(BATCH, HEADS, LENGTH, size, dtype=dtype, device="cuda", requires_grad=grad)
        key = torch.randn(BATCH, heads, keys, size, dtype=dtype, device="cuda", requires_grad=grad)
        value = torch.randn(BATCH, heads, keys, size, dtype=dtype, device="cuda", requires_grad=grad)
        bias = None if mask is None else torch.ones(LENGTH, keys, dtype=mask, device="cuda")
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, bias, **options)
        if grad:
            out.backward(torch.ones_like(out))
            assert query.grad is not None
            assert query.grad.shape == query.shape
        return out.shape

    run = play(body, card)
    assert run.result == (BATCH, HEADS, LENGTH, size)
    return run


def made_by(run: Run, operation: str) -> Counter[int]:
    """Requested bytes of each tensor that the operation made, as often as it made one."""
    return Counter(e.requested for e in run.trace.events if isinstance(e, Alloc) and e.op == f"aten::{operation}")


def kernel(run: Run) -> str:
    made = [name for name in ("flash", "efficient") if made_by(run, f"_scaled_dot_product_{name}_attention")]
    assert len(made) + bool(made_by(run, "_safe_softmax")) == 1
    return made[0] if made else "math"


@pytest.mark.parametrize(
    ("card", "dtype", "options", "expected"),
    [
        ("A100-40GB", bfloat, {}, "flash"),
        ("A100-40GB", half, {"is_causal": True}, "flash"),
        ("A100-40GB", single, {}, "efficient"),
        ("A100-40GB", double, {}, "math"),
        ("V100-16GB", half, {}, "efficient"),
        ("V100-16GB", single, {}, "efficient"),
        ("V100-16GB", bfloat, {}, "math"),
        ("T4", bfloat, {}, "math"),
        ("L4", bfloat, {}, "flash"),
        ("A100-40GB", bfloat, {"mask": torch.bool}, "efficient"),
        ("A100-40GB", bfloat, {"is_causal": True, "keys": 64}, "efficient"),
        ("A100-40GB", bfloat, {"keys": 64}, "flash"),
        ("A100-40GB", bfloat, {"size": 60}, "flash"),
        ("A100-40GB", bfloat, {"size": 256}, "flash"),
        ("A100-40GB", bfloat, {"size": 264}, "efficient"),
        ("A100-40GB", single, {"size": 62}, "math"),
        ("V100-16GB", single, {"size": 62}, "efficient"),
        ("RTX-3090", bfloat, {"size": 192}, "flash"),
        ("RTX-3090", bfloat, {"size": 224}, "efficient"),
        ("RTX-3090", bfloat, {"size": 224, "grad": False}, "flash"),
        ("RTX-3090", bfloat, {"size": 256}, "flash"),
        ("RTX-3090", bfloat, {"size": 256, "dropout_p": 0.1}, "efficient"),
        ("A100-40GB", bfloat, {"heads": 2, "enable_gqa": True}, "flash"),
    ],
)
def test_the_kernel_is_the_one_that_cuda_takes(
    card: str, dtype: torch.dtype, options: dict[str, Any], expected: str
) -> None:
    run = attend(card, dtype, **options)
    assert kernel(run) == expected
    assert run.trace.assumptions == ()


def test_flash_keeps_its_output_a_float_a_row_and_the_random_state() -> None:
    run = attend("A100-40GB", bfloat)
    output, rows = BATCH * HEADS * LENGTH * SIZE * 2, BATCH * HEADS * LENGTH * 4
    assert made_by(run, "_scaled_dot_product_flash_attention") == {output: 1, rows: 1, 16: 1, 8: 1}
    assert made_by(run, "_scaled_dot_product_flash_attention_backward") == {output: 3}


def test_flash_pads_heads_to_8_elements() -> None:
    """The backward cuts the gradients of all three back, into tensors of their own."""
    run = attend("A100-40GB", bfloat, size=60)
    padded, cut = BATCH * HEADS * LENGTH * 64 * 2, BATCH * HEADS * LENGTH * 60 * 2
    assert made_by(run, "constant_pad_nd") == {padded: 3, cut: 3}
    assert made_by(run, "_scaled_dot_product_flash_attention")[padded] == 1


@pytest.mark.parametrize(("grad", "rows"), [(True, 64), (False, 0)])
def test_efficient_keeps_a_float_for_each_of_its_rows_in_32s(grad: bool, rows: int) -> None:
    """48 rows are 64 of the kernel's; without gradients there is nothing to keep for."""
    run = attend("A100-40GB", single, grad=grad)
    output = BATCH * HEADS * LENGTH * SIZE * 4
    sizes = Counter({output: 1, 8: 2})
    if rows:
        sizes[BATCH * HEADS * rows * 4] += 1
    assert made_by(run, "_scaled_dot_product_efficient_attention") == sizes


@pytest.mark.parametrize(("keys", "padded"), [(48, {}), (50, {LENGTH * 64 * 4: 1})])
def test_efficient_wants_mask_rows_of_16_elements(keys: int, padded: dict[int, int]) -> None:
    run = attend("A100-40GB", single, keys=keys, mask=torch.bool)
    assert made_by(run, "logical_not") == {LENGTH * keys: 1}
    assert made_by(run, "where")[LENGTH * keys * 4] + made_by(run, "where.self")[LENGTH * keys * 4] == 1
    assert made_by(run, "constant_pad_nd") == padded


@pytest.mark.parametrize("allowed", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION])
def test_sdpa_kernel_is_obeyed(allowed: SDPBackend) -> None:
    with sdpa_kernel(allowed):
        run = attend("A100-40GB", bfloat)
    assert kernel(run) == ("math" if allowed == SDPBackend.MATH else "efficient")


def test_no_kernel_that_fits_is_an_error() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        attend("A100-40GB", single)


@pytest.mark.parametrize("card", ["H100-80GB", "B200"])
def test_flash_in_place_of_cudnn_is_stated(card: str) -> None:
    run = attend(card, bfloat)
    assert kernel(run) == "flash"
    assert run.trace.assumptions == (INSTEAD_OF_CUDNN,)
