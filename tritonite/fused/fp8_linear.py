"""Linear layers in training whose three products are float8, each operand with one scale computed anew in each call."""

from __future__ import annotations

import torch

from tritonite import devices
from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.gemm.work import Epilogue
from tritonite.engine.iteration import common_device
from tritonite.engine.quantized.conversions import to_float8
from tritonite.engine.quantized.products import float8_product
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_shape
from tritonite.fused.quantized import check_bias, check_operands, flattened
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x by a weight in float8, forward and backward: x @ weight.T + bias.

    Each call scales x and the weight by their largest magnitudes to float8_e4m3fn, and the gradient to float8_e5m2. A
    scale is the largest magnitude over the largest number of the dtype, or 1 if the quotient is no normal number. The
    gradients by x and by the weight are products of float8, too, with float32 sums. The bias is added in float32, and
    its gradient is not quantised. Forward keeps x and the weight for backward in float8. Every row depends on all rows
    through the scale, in invariant mode, too.

    Args:
        x: (..., K) of float16, bfloat16 or float32, of any strides.
        weight: (N, K) of x's dtype, of any strides.
        bias: (N,) of x's dtype or float32, or None.

    Returns a contiguous (..., N) tensor of x's dtype.

    Raises errors.Unsupported for other shapes or dtypes, for tensors on several devices, and on devices without
    float8_e4m3fn.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
    """
    result: torch.Tensor = torch.ops.tritonite.fp8_linear(x, weight, bias)[0]
    return result


def _check(x, weight, bias):
    check_operands(x, weight, SINGLE_FLOATS)
    if weight.dtype is not x.dtype:
        raise Decline(f"weight is {weight.dtype} and x {x.dtype}: give both one dtype")
    check_bias(x, weight.shape[0], bias, x.dtype)
    if not devices.has_float8(x.device):
        raise Decline("this device has no float8_e4m3fn: use torch.nn.functional.linear")


def _padded(rows: int) -> int:
    """Return the stride between rows of a transposed matrix in float8: the next multiple of 16."""
    return -(-rows // 16) * 16


def _fake(x, weight, bias=None):
    _check(x, weight, bias)
    (N, K), rows = weight.shape, flattened(x).shape[0]
    by_column = [x.new_empty_strided((K, size), (_padded(size), 1), dtype=torch.float8_e4m3fn) for size in (rows, N)]
    scales = [x.new_empty((1,), dtype=torch.float32) for _ in range(2)]
    return x.new_empty((*x.shape[:-1], N)), *by_column, *scales


def _save(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # The dispatcher leaves out trailing defaults.
    bias = inputs[2] if len(inputs) > 2 else None
    ctx.bias = None if bias is None else bias.dtype


def _gradient(ctx, grad, *_):
    if grad is None:
        return None, None, None
    by_x, by_weight = torch.ops.tritonite.fp8_linear_backward(grad, *ctx.saved_tensors, *ctx.needs_input_grad[:2])
    by_bias = None
    if ctx.bias is not None and ctx.needs_input_grad[2]:
        by_bias = flattened(grad).sum(0, dtype=torch.float32).to(ctx.bias)
    return by_x, by_weight, by_bias


@library_operator(
    "fp8_linear(Tensor x, Tensor weight, Tensor? bias=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    accepts=SINGLE_FLOATS,
    save=_save,
    gradient=_gradient,
)
def fp8_linear_host(x, weight, bias=None):
    """Return x @ weight.T + bias in float8, and both operands transposed with scales: Micikevicius et al. 2022."""
    _check(x, weight, bias)
    common_device((x, weight), ())
    out = empty((*x.shape[:-1], weight.shape[0]), x.dtype, x.device)
    narrow, by_column, scale = to_float8(flattened(x), torch.float8_e4m3fn, True, True)
    narrow_weight, weight_by_column, weight_scale = to_float8(weight, torch.float8_e4m3fn, True, True)
    scales = scale.view(1, 1), weight_scale.view(1, 1)
    epilogue = Epilogue(bias, scales, beta=0.0 if bias is None else 1.0)
    float8_product(narrow, narrow_weight, flattened(out), epilogue)
    return out, by_column, weight_by_column, scale, weight_scale


def _check_backward(grad, x, weight, x_scale, weight_scale):
    if grad.dtype not in SINGLE_FLOATS or not grad.dim():
        raise Decline(f"grad is {grad.dtype} of {grad.dim()} dimensions: it must be (..., N) of fp16, bf16 or float32")
    rows = flattened(grad).shape[0]
    for name, tensor, other in (("x", x, rows), ("weight", weight, grad.shape[-1])):
        if tensor.dtype is not torch.float8_e4m3fn or tensor.dim() != 2:
            raise Decline(f"{name} is {tensor.dtype} of {tensor.dim()} dimensions: it must be a float8_e4m3fn matrix")
        check_shape(name, tensor, (x.shape[0], other), "K rows and the size of grad")
        check_device(name, tensor, "grad", grad)
    for name, scale in (("x_scale", x_scale), ("weight_scale", weight_scale)):
        check_shape(name, scale, (1,), "one element")


def _fake_backward(grad, x, weight, x_scale, weight_scale, x_wanted, weight_wanted):
    _check_backward(grad, x, weight, x_scale, weight_scale)
    K, N = weight.shape
    by_x = grad.new_empty((*grad.shape[:-1], K)) if x_wanted else None
    return by_x, grad.new_empty((N, K)) if weight_wanted else None


@library_operator(
    "fp8_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, bool x_wanted, "
    "bool weight_wanted) -> (Tensor, Tensor)",
    fake=_fake_backward,
    accepts=SINGLE_FLOATS,
    pin=("x_wanted", "weight_wanted"),
)
def fp8_linear_backward_host(grad, x, weight, x_scale, weight_scale, x_wanted, weight_wanted):
    """Return the gradients of fp8_linear, of x (K, M) and weight (K, N) in float8; None for those not wanted."""
    _check_backward(grad, x, weight, x_scale, weight_scale)
    common_device((grad, x, weight), ())
    K, N = weight.shape
    by_x = empty((*grad.shape[:-1], K), grad.dtype, grad.device) if x_wanted else None
    by_weight = empty((N, K), grad.dtype, grad.device) if weight_wanted else None
    if x_wanted or weight_wanted:
        rows, columns, scale = to_float8(flattened(grad), torch.float8_e5m2, x_wanted, weight_wanted)
        if x_wanted:
            scales = scale.view(1, 1), weight_scale.view(1, 1)
            float8_product(rows, weight, flattened(by_x), Epilogue(scales=scales))
        if weight_wanted:
            float8_product(columns, x, by_weight, Epilogue(scales=(scale.view(1, 1), x_scale.view(1, 1))))
    return by_x, by_weight
