"""Linear layers of quantised operands: float8 with scales of blocks, rows or tensors, and int8.

Products are exact or summed in float32, and scales are multiplied in float32 before the result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tritonite.dtypes import FLOAT8_NAMES, SINGLE_FLOATS
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.work import NO_EPILOGUE, Epilogue
from tritonite.engine.iteration import common_device
from tritonite.engine.quantized.products import BlockScales, float8_product
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_shape
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty

# The least elements along K that may share a scale: those of one tensor core product of float8.
_LEAST_GROUP = 32
# The result's dtype unless one is given.
_DEFAULT = torch.bfloat16


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Multiply float8 x by a float8 weight: (x @ weight.T) * x_scale * weight_scale.T + bias.

    Sums are added in float32 after each block of K, because tensor cores add float8 products less precisely. Devices
    without float8 multiply in float16, to which operands are decoded in registers.

    Args:
        x: (..., K) of float8_e4m3fn or float8_e5m2, of any strides.
        weight: (N, K) of either float8 dtype, of any strides.
        x_scale: float32, (..., 1) with x's leading dimensions for a scale a row, or one element for a scale of x.
        weight_scale: float32, (N, 1) or (N,) for a scale a row, or one element.
        bias: (N,) of out_dtype or float32, or None.
        out_dtype: float16, bfloat16 or float32.

    Returns a contiguous (..., N) tensor of out_dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
    """
    result: torch.Tensor = torch.ops.tritonite.linear_fp8(x, weight, x_scale, weight_scale, bias, out_dtype)
    return result


def linear_fp8_blocks(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    block: tuple[int, int] = (128, 128),
) -> torch.Tensor:
    """Multiply float8 x by a float8 weight, each with a scale for every block along K, and add the bias.

    Element (m, n) is the sum over blocks k of (x_k @ weight_k.T)[m, n] * x_scale[m, k] * weight_scale[n // block_n, k].
    Each block's product is scaled and added in float32. Few rows of x are summed over slices of K by several programs.

    Args:
        x: (..., K) of float8_e4m3fn or float8_e5m2, of any strides.
        weight: (N, K) of either float8 dtype, of any strides.
        x_scale: float32, (..., ceil(K / block_k)) with x's leading dimensions.
        weight_scale: float32, (ceil(N / block_n), ceil(K / block_k)).
        bias: (N,) of out_dtype or float32, or None.
        out_dtype: float16, bfloat16 or float32.
        block: (block_n, block_k): the weight's rows and the elements along K that share a scale; block_k is a multiple
            of 32.

    Returns a contiguous (..., N) tensor of out_dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.
    """
    result: torch.Tensor = torch.ops.tritonite.linear_fp8_blocks(
        x, weight, x_scale, weight_scale, bias, out_dtype, block
    )
    return result


def linear_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Multiply int8 x by an int8 weight: (x @ weight.T) * x_scale * weight_scale + bias, with exact int32 sums.

    Args:
        x: int8, (..., K), of any strides.
        weight: int8, (N, K), of any strides.
        x_scale: float32, (..., 1) with x's leading dimensions for a scale a row, or one element for a scale of x.
        weight_scale: float32, (N,) or (N, 1) for a scale a row, or one element.
        bias: (N,) of out_dtype or float32, or None.
        out_dtype: float16, bfloat16 or float32.

    Returns a contiguous (..., N) tensor of out_dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Dettmers et al. 2022, "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale".
    """
    result: torch.Tensor = torch.ops.tritonite.linear_int8(x, weight, x_scale, weight_scale, bias, out_dtype)
    return result


def check_operands(x: torch.Tensor, weight: torch.Tensor, served: Sequence[torch.dtype]) -> None:
    """Decline operands of a linear layer whose dtypes are not `served`, or whose shapes do not fit."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in served:
            names = " or ".join(str(each) for each in served)
            raise Decline(f"{name} is {tensor.dtype}: it may be {names}")
    if not x.dim():
        raise Decline("x has no dimension: it must be (..., K)")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise Decline(
            f"weight has the shape {tuple(weight.shape)}: it must be (N, {x.shape[-1]}), of x's last dimension"
        )
    check_device("weight", weight, "x", x)


def check_bias(x: torch.Tensor, rows: int, bias: torch.Tensor | None, out_dtype: torch.dtype | None) -> None:
    """Decline a result's dtype that is not served, None for bfloat16, and a bias that does not fit it."""
    out_dtype = out_dtype or _DEFAULT
    if out_dtype not in SINGLE_FLOATS:
        raise Decline(f"out_dtype is {out_dtype}: it may be float16, bfloat16 or float32")
    if bias is not None:
        check_shape("bias", bias, (rows,), "that of weight's rows")
        if bias.dtype not in (out_dtype, torch.float32):
            raise Decline(f"bias is {bias.dtype}: it may be {out_dtype}, as the result is, or torch.float32")
        check_device("bias", bias, "x", x)


def _check_scale(name: str, scale: torch.Tensor, x: torch.Tensor) -> None:
    if scale.dtype is not torch.float32:
        raise Decline(f"{name} is {scale.dtype}: it must be torch.float32")
    check_device(name, scale, "x", x)


def _check_row_scales(x, weight, x_scale, weight_scale, bias, out_dtype):
    check_bias(x, weight.shape[0], bias, out_dtype)
    rows = weight.shape[0]
    for name, scale, shapes in (
        ("x_scale", x_scale, [(*x.shape[:-1], 1)]),
        ("weight_scale", weight_scale, [(rows,), (rows, 1)]),
    ):
        _check_scale(name, scale, x)
        if tuple(scale.shape) not in [*shapes, (), (1,)]:
            wanted = " or ".join(str(shape) for shape in shapes)
            raise Decline(f"{name} has the shape {tuple(scale.shape)}: it must be {wanted}, or one element")


def flattened(x: torch.Tensor) -> torch.Tensor:
    """Return (..., K) as (rows, K): a view where strides allow it, otherwise a copy."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _row_scales(x_scale: torch.Tensor, weight_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales that broadcast to a (rows, N) result."""
    return x_scale.reshape(-1, 1), weight_scale.reshape(1, -1)


def _result(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    common_device((x, weight), ())
    return empty((*x.shape[:-1], weight.shape[0]), out_dtype or _DEFAULT, x.device)


def _fake_fp8(x, weight, x_scale, weight_scale, bias=None, out_dtype=None):
    check_operands(x, weight, tuple(FLOAT8_NAMES))
    _check_row_scales(x, weight, x_scale, weight_scale, bias, out_dtype)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or _DEFAULT)


@library_operator(
    "linear_fp8(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias=None, "
    "ScalarType? out_dtype=None) -> Tensor",
    fake=_fake_fp8,
    accepts=tuple(FLOAT8_NAMES),
)
def linear_fp8_host(x, weight, x_scale, weight_scale, bias=None, out_dtype=None):
    """Return the product of float8 matrices with scales of rows or tensors: Micikevicius et al. 2022."""
    check_operands(x, weight, tuple(FLOAT8_NAMES))
    _check_row_scales(x, weight, x_scale, weight_scale, bias, out_dtype)
    out = _result(x, weight, out_dtype)
    epilogue = Epilogue(bias, _row_scales(x_scale, weight_scale), beta=0.0 if bias is None else 1.0)
    float8_product(flattened(x), weight, flattened(out), epilogue)
    return (out,)


def _check_blocks(x, weight, x_scale, weight_scale, bias, out_dtype, block):
    check_operands(x, weight, tuple(FLOAT8_NAMES))
    check_bias(x, weight.shape[0], bias, out_dtype)
    if len(block) != 2 or min(block) < 1 or block[1] % _LEAST_GROUP:
        raise Decline(f"block is {tuple(block)}: it must be (rows, elements along K), the latter a multiple of 32")
    (N, K), (rows, group) = weight.shape, block
    for name, scale, shape, whose in (
        ("x_scale", x_scale, (*x.shape[:-1], -(-K // group)), "a scale for each block of a row"),
        ("weight_scale", weight_scale, (-(-N // rows), -(-K // group)), "a scale for each block"),
    ):
        _check_scale(name, scale, x)
        check_shape(name, scale, shape, whose)


def _fake_blocks(x, weight, x_scale, weight_scale, bias=None, out_dtype=None, block=(128, 128)):
    _check_blocks(x, weight, x_scale, weight_scale, bias, out_dtype, block)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or _DEFAULT)


@library_operator(
    "linear_fp8_blocks(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias=None, "
    "ScalarType? out_dtype=None, int[2] block=[128, 128]) -> Tensor",
    fake=_fake_blocks,
    accepts=tuple(FLOAT8_NAMES),
    leading=("x", "x_scale"),
    pin=("block",),
)
def linear_fp8_blocks_host(x, weight, x_scale, weight_scale, bias=None, out_dtype=None, block=(128, 128)):
    """Return the product of float8 matrices with scales of blocks: DeepSeek-AI 2024, section 3.3."""
    _check_blocks(x, weight, x_scale, weight_scale, bias, out_dtype, block)
    out = _result(x, weight, out_dtype)
    epilogue = NO_EPILOGUE if bias is None else Epilogue(bias, beta=1.0)
    scales = BlockScales(flattened(x_scale), weight_scale, (1, block[0]), block[1])
    float8_product(flattened(x), weight, flattened(out), epilogue, scales)
    return (out,)


def _fake_int8(x, weight, x_scale, weight_scale, bias=None, out_dtype=None):
    check_operands(x, weight, (torch.int8,))
    _check_row_scales(x, weight, x_scale, weight_scale, bias, out_dtype)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or _DEFAULT)


@library_operator(
    "linear_int8(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias=None, "
    "ScalarType? out_dtype=None) -> Tensor",
    fake=_fake_int8,
    accepts=(torch.int8,),
)
def linear_int8_host(x, weight, x_scale, weight_scale, bias=None, out_dtype=None):
    """Return the product of int8 matrices with scales of rows or tensors: Dettmers et al. 2022."""
    check_operands(x, weight, (torch.int8,))
    _check_row_scales(x, weight, x_scale, weight_scale, bias, out_dtype)
    out = _result(x, weight, out_dtype)
    epilogue = Epilogue(bias, _row_scales(x_scale, weight_scale), beta=0.0 if bias is None else 1.0)
    product(flattened(x).unsqueeze(0), weight.t().unsqueeze(0), flattened(out).unsqueeze(0), epilogue)
    return (out,)
