"""Linear layers of groups of rows, each with a weight of its own, forward and backward.

The gradient by the rows is a product of groups, too. The gradient by a weight sums over the rows of its group: a
product whose inner dimension is divided among the groups.
"""

from __future__ import annotations

import torch

from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.gemm import operands
from tritonite.engine.gemm.product import grouped_product, product
from tritonite.engine.gemm.work import Sums
from tritonite.engine.iteration import common_device
from tritonite.engine.moe.groups import add_bias, clear_ungrouped
from tritonite.engine.movement import fill_zero
from tritonite.engine.segmented import Segments, reduce_segments
from tritonite.errors import Decline
from tritonite.fused.check import check_device, check_shape
from tritonite.ops.matmul import precision_of
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight[g].T + bias[g] for the rows of each group g.

    Group g has the rows from offsets[g - 1], or 0, to offsets[g]. Rows behind the last group give 0 and have a gradient
    of 0, as an empty group's weight has. fp16 and bf16 are summed in float32 and rounded once. The host does not wait
    for the offsets.

    Args:
        x: (S, K) of float16, bfloat16 or float32, of any strides.
        weight: (E, N, K) of x's dtype, of any strides, with at least one group.
        offsets: (E,) of int32, the ends of the groups, which do not decrease.
        bias: (E, N) of x's dtype or float32, or None.

    Returns a contiguous tensor (S, N) of x's dtype.

    Raises errors.Unsupported for other shapes or dtypes, and for tensors on several devices.

    Source: Gale et al. 2022, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts".
    """
    result: torch.Tensor = torch.ops.tritonite.grouped_linear(x, weight, offsets, bias)
    return result


def _check_rows(name: str, rows: torch.Tensor, offsets: torch.Tensor) -> None:
    """Decline rows that are no matrix of a served dtype, and offsets that are no int32 vector on the rows' device."""
    if rows.dim() != 2:
        raise Decline(f"{name} has the shape {tuple(rows.shape)}: it must be a matrix of rows")
    if rows.dtype not in SINGLE_FLOATS:
        raise Decline(f"{name} is {rows.dtype}: it may be float16, bfloat16 or float32")
    if offsets.dtype is not torch.int32 or offsets.dim() != 1 or not len(offsets):
        raise Decline(
            f"offsets is {offsets.dtype} of shape {tuple(offsets.shape)}: it must be int32 of shape (groups,), with at "
            "least one group"
        )
    check_device("offsets", offsets, name, rows)


def _check_weight(name: str, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, dim: int) -> None:
    """Decline a weight that does not fit the rows, whose elements lie along dimension `dim` of the weight."""
    _check_rows(name, rows, offsets)
    if weight.dim() != 3 or weight.shape[dim] != rows.shape[1] or weight.shape[0] != len(offsets):
        raise Decline(
            f"weight has the shape {tuple(weight.shape)}: it must be (groups, outputs, inputs), with {len(offsets)} "
            f"groups as offsets has, and with {rows.shape[1]} in dimension {dim} as {name} has columns"
        )
    if weight.dtype is not rows.dtype:
        raise Decline(f"weight is {weight.dtype} and {name} {rows.dtype}: give both one dtype")
    check_device("weight", weight, name, rows)


def _check_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is None:
        return
    check_shape("bias", bias, weight.shape[:2], "that of weight without its last dimension")
    if bias.dtype not in (x.dtype, torch.float32):
        raise Decline(f"bias is {bias.dtype}: it may be {x.dtype}, as x is, or torch.float32")
    check_device("bias", bias, "x", x)


def _addressable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of three dimensions as TMA addresses it: itself, or a copy with padded rows."""
    # The layout of a dimension of 1 is ambiguous.
    if 1 not in tensor.shape[1:] and operands.has_descriptor(tensor):
        return tensor
    return operands.padded_copy(tensor, 1 in tensor.shape[1:])


def _multiply(rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """Write rows times their group's matrix of (groups, K, N) to `out`; rows behind the last group are not written."""
    if not (rows.shape[1] and out.numel()):
        fill_zero(out)
        return
    a, b = _addressable(rows.unsqueeze(0))[0], _addressable(matrices)
    grouped_product(a, b, offsets, out, Sums(precision_of(rows.dtype)))


def _fake(x, weight, offsets, bias=None):
    _check_weight("x", x, weight, offsets, 2)
    _check_bias(x, weight, bias)
    return x.new_empty((x.shape[0], weight.shape[1]))


def _save(ctx, inputs, output):
    x, weight, offsets, bias = inputs
    ctx.save_for_backward(x, weight, offsets)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradient(ctx, grad):
    x, weight, offsets = ctx.saved_tensors
    library = torch.ops.tritonite
    by_x = library.grouped_linear_backward_input(grad, weight, offsets) if ctx.needs_input_grad[0] else None
    by_weight = library.grouped_linear_backward_weight(grad, x, offsets) if ctx.needs_input_grad[1] else None
    by_bias = None
    if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
        by_bias = library.grouped_linear_backward_bias(grad, offsets, ctx.bias_dtype)
    return by_x, by_weight, None, by_bias


@library_operator(
    "grouped_linear(Tensor x, Tensor weight, Tensor offsets, Tensor? bias=None) -> Tensor",
    fake=_fake,
    accepts=SINGLE_FLOATS,
    save=_save,
    gradient=_gradient,
)
def grouped_linear_host(x, weight, offsets, bias=None):
    """Return rows times the transposed weight of their group, plus its bias: Gale et al. 2022."""
    _check_weight("x", x, weight, offsets, 2)
    _check_bias(x, weight, bias)
    common_device((x, weight, offsets) if bias is None else (x, weight, offsets, bias), ())
    ends = offsets.contiguous()
    out = empty((x.shape[0], weight.shape[1]), x.dtype, x.device)
    if bias is None:
        _multiply(x, weight.mT, ends, out)
        clear_ungrouped(out, ends)
        return (out,)
    # The sum with the bias is rounded once.
    sums = out if x.dtype is torch.float32 else empty(out.shape, torch.float32, x.device)
    _multiply(x, weight.mT, ends, sums)
    add_bias(sums, bias, ends, out)
    return (out,)


def _fake_input(grad, weight, offsets):
    _check_weight("grad", grad, weight, offsets, 1)
    return grad.new_empty((grad.shape[0], weight.shape[2]))


@library_operator(
    "grouped_linear_backward_input(Tensor grad, Tensor weight, Tensor offsets) -> Tensor",
    fake=_fake_input,
    accepts=SINGLE_FLOATS,
)
def grouped_linear_backward_input_host(grad, weight, offsets):
    """Return the gradient of grouped_linear by the rows."""
    _check_weight("grad", grad, weight, offsets, 1)
    common_device((grad, weight, offsets), ())
    ends = offsets.contiguous()
    out = empty((grad.shape[0], weight.shape[2]), grad.dtype, grad.device)
    _multiply(grad, weight, ends, out)
    clear_ungrouped(out, ends)
    return (out,)


def _check_both(grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> None:
    _check_rows("x", x, offsets)
    check_shape("grad", grad, (x.shape[0], grad.shape[-1] if grad.dim() else 0), "as many rows as x")
    if grad.dtype is not x.dtype:
        raise Decline(f"grad is {grad.dtype} and x {x.dtype}: give both one dtype")
    check_device("grad", grad, "x", x)


def _fake_weight(grad, x, offsets):
    _check_both(grad, x, offsets)
    return x.new_empty((offsets.shape[0], grad.shape[1], x.shape[1]))


@library_operator(
    "grouped_linear_backward_weight(Tensor grad, Tensor x, Tensor offsets) -> Tensor",
    fake=_fake_weight,
    accepts=SINGLE_FLOATS,
)
def grouped_linear_backward_weight_host(grad, x, offsets):
    """Return the gradient of grouped_linear by the weight, 0 for groups without rows."""
    _check_both(grad, x, offsets)
    common_device((grad, x, offsets), ())
    out = empty((len(offsets), grad.shape[1], x.shape[1]), x.dtype, x.device)
    product(grad.mT[None], x[None], out, sums=Sums(precision_of(x.dtype), ends=offsets.contiguous()))
    return (out,)


def _check_sum(grad: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> None:
    _check_rows("grad", grad, offsets)
    if dtype not in (grad.dtype, torch.float32):
        raise Decline(f"dtype is {dtype}: it may be {grad.dtype}, as grad is, or torch.float32")


def _fake_bias(grad, offsets, dtype):
    _check_sum(grad, offsets, dtype)
    return grad.new_empty((offsets.shape[0], grad.shape[1]), dtype=dtype)


@library_operator(
    "grouped_linear_backward_bias(Tensor grad, Tensor offsets, ScalarType dtype) -> Tensor",
    fake=_fake_bias,
    accepts=SINGLE_FLOATS,
)
def grouped_linear_backward_bias_host(grad, offsets, dtype):
    """Return the gradient of grouped_linear by the bias: the sum of each group's rows."""
    _check_sum(grad, offsets, dtype)
    common_device((grad, offsets), ())
    (rows, columns), groups = grad.shape, len(offsets)
    out = empty((groups, columns), dtype, grad.device)
    segments = Segments(offsets.contiguous(), True, 1, rows, columns, groups)
    segments.launch(reduce_segments, (out, grad.contiguous()), None, "sum")
    return (out,)
