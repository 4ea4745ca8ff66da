"""Linear layers whose weight has 4 bits an element: products, and packing and dequantising of weights.

A weight element is (number - zero) * scale, where number is 0 to 15, and zero and scale belong to a group of elements
along K. Packed weights have two numbers a byte: the low nibble is the number at the even index.
"""

from __future__ import annotations

import torch

from tritonite.dtypes import FLOATS_OF_16_BITS
from tritonite.engine.gemm.work import NO_EPILOGUE, Epilogue
from tritonite.engine.iteration import common_device
from tritonite.engine.quantized.conversions import packed_int4, unpacked
from tritonite.engine.quantized.products import int4_product
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_shape
from tritonite.fused.quantized import check_bias, flattened
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty


def linear_int4(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    group: int = 128,
) -> torch.Tensor:
    """Multiply x by a weight of packed 4-bit numbers: x @ ((numbers - zeros) * scales).T + bias.

    The weight is dequantised in registers, to x's dtype, with the bits that `dequantize_int4` returns. Sums are
    float32. Few rows of x are summed over slices of K by several programs. The gradient by x multiplies by the
    dequantised weight; weight, scales and zeros have no gradient.

    Args:
        x: (..., K) of float16 or bfloat16, of any strides.
        weight: uint8, (N, K / 2), as `pack_int4` returns it: the low nibble is the number at the even index.
        scales: (N, ceil(K / group)) of x's dtype.
        zeros: the same, or None for zeros of 8.
        bias: (N,) of x's dtype or float32, or None.
        group: elements along K that share a scale: a multiple of 16, or at least K.

    Returns a contiguous (..., N) tensor of x's dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Frantar et al. 2024, "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models".
    """
    result: torch.Tensor = torch.ops.tritonite.linear_int4(x, weight, scales, zeros, bias, group)
    return result


def pack_int4(
    weight: torch.Tensor, group: int = 128, *, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise a weight to 4 bits by rounding to the nearest number, and pack two numbers a byte.

    A group's scale is its range, 0 included, over 15, and its zero is the number that stands for 0. With `symmetric`
    the scale is the largest magnitude over 7, and 8 stands for 0.

    Args:
        weight: (N, K) of float16 or bfloat16, of any strides; K is even.
        group: elements along K that share a scale: a multiple of 16, or at least K.
        symmetric: whether zeros are 8.

    Returns (packed, scales, zeros): uint8 (N, K / 2), whose low nibble is the number at the even index, and two tensors
    (N, ceil(K / group)) of weight's dtype; zeros are None if `symmetric`.

    Raises errors.Unsupported for other shapes or dtypes.

    Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers":
    its grid, with rounding to nearest.
    """
    packed, scales, zeros = torch.ops.tritonite.pack_int4(weight.detach(), group, symmetric)
    return packed, scales, zeros


def dequantize_int4(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None, *, group: int = 128
) -> torch.Tensor:
    """Return the weight that packed 4-bit numbers stand for: (numbers - zeros) * scales, in scales' dtype.

    Args:
        weight: uint8, (N, K / 2), as `pack_int4` returns it.
        scales: (N, ceil(K / group)) of float16 or bfloat16.
        zeros: the same, or None for zeros of 8.
        group: elements along K that share a scale: a multiple of 16, or at least K.

    Returns a contiguous (N, K) tensor of scales' dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
    """
    result: torch.Tensor = torch.ops.tritonite.dequantize_int4(weight, scales, zeros, group)
    return result


def _check_group(K: int, group: int) -> None:
    if group < 1 or (group % 16 and group < K):
        raise Decline(f"group is {group}: it must be a multiple of 16, or at least K, {K}")


def _check_weight(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int) -> None:
    if weight.dtype is not torch.uint8:
        raise Decline(f"weight is {weight.dtype}: it must be torch.uint8, with two numbers a byte")
    if weight.dim() != 2:
        raise Decline(f"weight has the shape {tuple(weight.shape)}: it must be (N, K / 2)")
    N, K = weight.shape[0], 2 * weight.shape[1]
    _check_group(K, group)
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor is not None:
            check_shape(name, tensor, (N, -(-K // group)), "one element for each group")
            if tensor.dtype not in FLOATS_OF_16_BITS or tensor.dtype is not scales.dtype:
                raise Decline(
                    f"{name} is {tensor.dtype}: it may be float16 or bfloat16, one dtype for scales and zeros"
                )
            check_device(name, tensor, "weight", weight)


def _check(x, weight, scales, zeros, bias, group):
    if x.dtype not in FLOATS_OF_16_BITS:
        raise Decline(f"x is {x.dtype}: it may be float16 or bfloat16")
    _check_weight(weight, scales, zeros, group)
    if not x.dim() or x.shape[-1] != 2 * weight.shape[1]:
        raise Decline(
            f"x has the shape {tuple(x.shape)}: its last dimension must be {2 * weight.shape[1]}, as in weight"
        )
    if scales.dtype is not x.dtype:
        raise Decline(f"scales is {scales.dtype}: it must be {x.dtype}, as x is")
    check_device("weight", weight, "x", x)
    check_bias(x, weight.shape[0], bias, x.dtype)


def _fake(x, weight, scales, zeros=None, bias=None, group=128):
    _check(x, weight, scales, zeros, bias, group)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _save(ctx, inputs, output):
    # The dispatcher leaves out trailing defaults.
    given = list(inputs)
    zeros, bias, group = given[3:] + [None, None, 128][len(given) - 3 :]
    ctx.save_for_backward(*inputs[1:3], zeros)
    ctx.group, ctx.bias = group, None if bias is None else bias.dtype


def _gradient(ctx, grad):
    by_x = by_bias = None
    if ctx.needs_input_grad[0]:
        by_x = grad @ torch.ops.tritonite.dequantize_int4(*ctx.saved_tensors, ctx.group)
    if ctx.bias is not None and ctx.needs_input_grad[4]:
        by_bias = flattened(grad).sum(0, dtype=torch.float32).to(ctx.bias)
    return by_x, None, None, None, by_bias, None


@library_operator(
    "linear_int4(Tensor x, Tensor weight, Tensor scales, Tensor? zeros=None, Tensor? bias=None, int group=128)"
    " -> Tensor",
    fake=_fake,
    accepts=FLOATS_OF_16_BITS,
    save=_save,
    gradient=_gradient,
    leading=("x",),
    pin=("group",),
)
def linear_int4_host(x, weight, scales, zeros=None, bias=None, group=128):
    """Return the product of 16-bit floats and packed 4-bit integers: Frantar et al. 2024."""
    _check(x, weight, scales, zeros, bias, group)
    common_device((x, weight), ())
    out = empty((*x.shape[:-1], weight.shape[0]), x.dtype, x.device)
    epilogue = NO_EPILOGUE if bias is None else Epilogue(bias, beta=1.0)
    int4_product(flattened(x), weight, scales, zeros, group, flattened(out), epilogue)
    return (out,)


def _check_packing(weight, group):
    if weight.dtype not in FLOATS_OF_16_BITS:
        raise Decline(f"weight is {weight.dtype}: it may be float16 or bfloat16")
    if weight.dim() != 2 or weight.shape[1] % 2:
        raise Decline(f"weight has the shape {tuple(weight.shape)}: it must be (N, K) with an even K")
    _check_group(weight.shape[1], group)


def _fake_packing(weight, group=128, symmetric=False):
    _check_packing(weight, group)
    N, K = weight.shape
    scales = weight.new_empty((N, -(-K // group)))
    packed = weight.new_empty((N, K // 2), dtype=torch.uint8)
    return packed, scales, None if symmetric else torch.empty_like(scales)


@library_operator(
    "pack_int4(Tensor weight, int group=128, bool symmetric=False) -> (Tensor, Tensor, Tensor)",
    fake=_fake_packing,
    accepts=FLOATS_OF_16_BITS,
    pin=("group", "symmetric"),
)
def pack_int4_host(weight, group=128, symmetric=False):
    """Return a weight in 4 bits, its scales and its zeros: Frantar et al. 2022, with rounding to nearest."""
    _check_packing(weight, group)
    common_device((weight,), ())
    return packed_int4(weight, group, symmetric)


def _fake_dequantized(weight, scales, zeros=None, group=128):
    _check_weight(weight, scales, zeros, group)
    return scales.new_empty((weight.shape[0], 2 * weight.shape[1]))


@library_operator(
    "dequantize_int4(Tensor weight, Tensor scales, Tensor? zeros=None, int group=128) -> Tensor",
    fake=_fake_dequantized,
    accepts=(torch.uint8,),
    pin=("group",),
)
def dequantize_int4_host(weight, scales, zeros=None, group=128):
    """Return the weight that packed 4-bit integers stand for: Frantar et al. 2022."""
    _check_weight(weight, scales, zeros, group)
    common_device((weight, scales), ())
    return (unpacked(weight, scales, zeros, group),)
