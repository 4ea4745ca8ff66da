"""Sums of products of three tensors, as in bilinear layers, and linear combinations of the slices of a tensor."""

import math

import torch
import triton

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.work import NO_EPILOGUE, Sums
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.ops.matmul import precision_of
from tritonite.ops.reduction.sums import added_to_zero, same
from tritonite.registry import exclude, operator
from tritonite.runtime.contract import empty

# Elements of the product of the first two tensors, which ATen computes a slice at a time.
_LARGEST_PRODUCT = 2**27


@triton.jit
def _multiplied(x, y):
    return x * y


_total = Reduction((0.0,), same, add_states, added_to_zero)
sum_of_products = Reduction((0.0,), _multiplied, add_states, added_to_zero)


def _expanded(tensor, dims, total):
    """Return a tensor with dimensions of size 1 inserted at `dims`, which makes `total` dimensions."""
    if sorted(set(dims)) != sorted(dims) or any(not 0 <= d < total for d in dims) or tensor.dim() + len(dims) != total:
        raise Decline(f"a tensor of {tensor.dim()} dimensions to expand at {list(dims)}, to {total} dimensions")
    for d in sorted(dims):
        tensor = tensor.unsqueeze(d)
    return tensor


def _summed(tensor, dims):
    """Return the sums of a tensor over dimensions, which stay with the size 1."""
    if not dims:
        return tensor
    kept = [1 if d in dims else size for d, size in enumerate(tensor.shape)]
    out = empty(kept, tensor.dtype, tensor.device)
    reduced(_total, (tensor,), dims, True, (tensor.dtype,), (out,), opmath(tensor.dtype))
    return out


def _pair(left, right, dims):
    """Return the sums over `dims` of the product of two tensors of one rank; sizes of 1 broadcast."""
    sizes = list(zip(left.shape, right.shape, strict=True))
    left = _summed(left, tuple([d for d in dims if sizes[d][0] > 1 == sizes[d][1]]))
    right = _summed(right, tuple([d for d in dims if sizes[d][1] > 1 == sizes[d][0]]))
    inner = [d for d in dims if min(sizes[d]) > 1]
    others = [d for d in range(len(sizes)) if d not in dims and max(sizes[d]) > 1]
    batch = [d for d in others if min(sizes[d]) > 1]
    rows, columns = ([d for d in others if sizes[d][1 - i] == 1] for i in range(2))
    # Dimensions of size 1 go first.
    counts = [math.prod([max(sizes[d]) for d in own]) for own in (batch, rows, columns, inner)]
    a = _ordered(left, batch + rows + inner).reshape(counts[0], counts[1], counts[3])
    b = _ordered(right, batch + inner + columns).reshape(counts[0], counts[3], counts[2])
    out = empty(counts[:3], left.dtype, left.device)
    product(a, b, out, NO_EPILOGUE, Sums(precision_of(left.dtype)))
    order = batch + rows + columns
    whole = out.view([max(sizes[d]) for d in order])
    order += [d for d in range(len(sizes)) if d not in order]
    whole = whole[(..., *[None] * (len(sizes) - whole.dim()))]
    return whole.permute([order.index(d) for d in range(len(sizes))])


def _ordered(tensor, dims):
    return tensor.permute([*[d for d in range(tensor.dim()) if d not in dims], *dims])


@operator("_trilinear", accepts=FLOATS)
def _trilinear(i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim=1, outs=()):
    """Two matrix products: of the first two tensors, and of their product with the third."""
    total = i1.dim() + len(expand1)
    if i2.dtype is not i1.dtype or i3.dtype is not i1.dtype or i1.dtype not in FLOATS:
        # ATen multiplies batches of integers on a CPU, and refuses them on CUDA.
        raise Decline(
            f"operands of {i1.dtype}, {i2.dtype} and {i3.dtype}; served are three of one floating-point dtype"
        )
    if not 0 <= unroll_dim < total or any(not 0 <= d < total for d in sumdim) or len(set(sumdim)) < len(sumdim):
        raise Decline(f"unroll_dim {unroll_dim} and sumdim {list(sumdim)} for {total} dimensions")
    lists = (expand1, expand2, expand3)
    x, y, z = (_expanded(each, dims, total) for each, dims in zip((i1, i2, i3), lists, strict=True))
    sizes = []
    for d in range(total):
        own = {each.shape[d] for each, dims in zip((x, y, z), lists, strict=True) if d not in dims}
        if len(own) != 1 or 0 in own:
            raise Decline(f"sizes {sorted(own)} in dimension {d}; served is one that is not 0")
        sizes += own
    first = [d for d in sumdim if d in expand3]
    pair = [max(x.shape[d], y.shape[d]) for d in range(total) if d not in first]
    if math.prod(pair) > _LARGEST_PRODUCT:
        raise Decline(
            f"a product of the first two tensors of shape {tuple(pair)}; {_LARGEST_PRODUCT} elements are served"
        )
    shape = [size for d, size in enumerate(sizes) if d not in sumdim]
    (out,) = outputs((i1, i2, i3), [shape], [i1.dtype], outs)
    result = _pair(_pair(x, y, first), z, [d for d in sumdim if d not in expand3])
    out.copy_(result.reshape(shape))
    return (out,)


@operator("_compute_linear_combination", accepts=FLOATS)
def _compute_linear_combination(input, coefficients, outs=()):
    """Sum the slices of the first dimension, times coefficients."""
    if input.dim() == 0 or not input.numel() or coefficients.dim() != 2 or coefficients.dtype is not input.dtype:
        raise Decline(f"operands of shapes {tuple(input.shape)} and {tuple(coefficients.shape)}, or of two dtypes")
    if coefficients.shape[1] != input.shape[0] or not coefficients.numel():
        raise Decline(f"coefficients of shape {tuple(coefficients.shape)} for {input.shape[0]} slices")
    shape = (coefficients.shape[0], *input.shape[1:])
    factors = coefficients[(..., *[None] * (input.dim() - 1))]
    every = (coefficients.shape[0], *input.shape)
    (out,) = outputs((input, coefficients), [shape], [input.dtype], outs)
    operands = input[None].expand(every), factors.expand(every)
    # A sum of truth values is whether one is true: counted in int32, because 1-bit sums wrap around.
    compute = torch.int32 if input.dtype is torch.bool else opmath(input.dtype)
    return reduced(sum_of_products, operands, (1,), False, (input.dtype,), (out,), compute)


exclude("_compute_linear_combination.out", "ATen adds to the elements of its output instead of overwriting them")
