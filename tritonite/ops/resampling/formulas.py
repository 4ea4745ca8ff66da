"""Formulas of resampling: an output element as a weighted sum of input elements, and an input element's gradient.

A gradient is gathered: an input element looks at every output element that it may have contributed to. `reach`,
`shift` and the inverses of the scales give the first one, ceil((index + reach) / scale - shift), and `counts` the
number of candidates in each dimension. So there are no atomics, and the order of additions is fixed. A border element
that is several taps of an output has the sum of their weights: for an infinite gradient, ATen's sum of products may be
nan instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.dtypes import FLOATS
from tritonite.language.indices import read_at
from tritonite.language.interpolation import antialiased_span, antialiased_weight, nearest_index
from tritonite.registry import scalar_kernel

_SCALES = ("scale0", "scale1", "scale2")


@scalar_kernel(pointer=("source",), integers=("sizes",), index=("at",), exact=_SCALES, static=("exact",))
def nearest(source, sizes, at, scale0, scale1, scale2, exact):
    """The nearest input element."""
    scales = (scale0, scale1, scale2)
    indices = ()
    for d in tl.static_range(len(at)):
        indices = indices + (nearest_index(scales[d], at[d], sizes[d], exact),)
    return read_at(source, indices, at[0] >= 0, 0)


@scalar_kernel(
    pointer=("source",),
    integers=("sizes",),
    index=("at",),
    exact=_SCALES,
    static=("taps", "corners"),
    accepts=FLOATS,
)
def interpolated(source, sizes, at, scale0, scale1, scale2, taps, corners):
    """A weighted sum over the taps of each dimension, the last dimension first."""
    element = source[0].dtype.element_ty
    DTYPE: tl.constexpr = tl.float64 if element == tl.float64 else tl.float32
    rank: tl.constexpr = len(at)
    scales = (scale0, scale1, scale2)
    indices, weights = (), ()
    for d in tl.static_range(rank):
        own, weight = taps(scales[d].to(DTYPE), at[d], sizes[d], corners)
        indices = indices + (own,)
        weights = weights + (weight,)
    count: tl.constexpr = len(indices[0])
    values = ()
    for n in tl.static_range(count**rank):
        position = ()
        for d in tl.static_range(rank):
            position = position + (indices[d][n // count ** (rank - 1 - d) % count],)
        values = values + (read_at(source, position, at[0] >= 0, 0.0).to(DTYPE),)
    for d in tl.static_range(rank):
        sums = ()
        for n in tl.static_range(count ** (rank - 1 - d)):
            total = weights[rank - 1 - d][0] * values[n * count]
            for k in tl.static_range(1, count):
                total += weights[rank - 1 - d][k] * values[n * count + k]
            sums = sums + (total,)
        values = sums
    return values[0]


@triton.jit
def _inverse(scale):
    """Return the inverse of a scale, and 0 for a scale of 0, with which every output reads the first element."""
    return tl.where(scale == 0.0, 0.0, 1.0 / tl.where(scale == 0.0, 1.0, scale))


@triton.jit
def _first_candidate(index, scale, reach, shift, count, outputs):
    """Return the first of `count` outputs among which are all that the input element `index` contributes to."""
    first = tl.ceil((index.to(tl.float64) + reach) * _inverse(scale) - shift)
    last = (outputs - count).to(tl.float64)
    return tl.minimum(tl.maximum(first, 0.0), last).to(index.dtype)


@triton.jit
def _tap_weight(scale, output, size, at, taps: tl.constexpr, corners: tl.constexpr, stays: tl.constexpr):
    """Return the weight of the input element `at` in an output element, and whether it is one of the taps.

    Where the size `stays`, the input element with the output's index is the only tap.
    """
    if stays:
        return (output == at).to(scale.dtype), output == at
    indices, weights = taps(scale, output, size, corners)
    is_tap = indices[0] == at
    total = tl.where(is_tap, weights[0], 0.0)
    for k in tl.static_range(1, len(indices)):
        total += tl.where(indices[k] == at, weights[k], 0.0)
        is_tap = is_tap | (indices[k] == at)
    return total, is_tap


@scalar_kernel(
    pointer=("grad",),
    integers=("sizes", "outputs", "counts"),
    index=("at",),
    exact=(*_SCALES, "reach"),
    static=("taps", "corners", "stays"),
    accepts=FLOATS,
)
def interpolated_backward(
    grad,
    sizes,
    outputs,
    counts,
    at,
    scale0,
    scale1,
    scale2,
    reach,
    taps,
    corners,
    stays,
):
    """The gradients of all output elements with this element among their taps, times its weight.

    Bit d of `stays` says that the size of dimension d stays.
    """
    element = grad[0].dtype.element_ty
    DTYPE: tl.constexpr = tl.float64 if element == tl.float64 else tl.float32
    last: tl.constexpr = len(at) - 1
    shift: tl.constexpr = 0.0 if corners else 0.5
    scales = (scale0, scale1, scale2)
    first = ()
    outer = 1
    for d in tl.static_range(last + 1):
        first = first + (_first_candidate(at[d], scales[d], reach, shift, counts[d], outputs[d]),)
        if d < last:
            outer = outer * counts[d]
    total = tl.zeros(grad[0].shape, DTYPE)
    for n in range(outer):
        position, rest = (), n
        weight, are_taps = tl.full(grad[0].shape, 1.0, DTYPE), at[0] >= 0
        for d in tl.static_range(last):
            index = first[d] + rest % counts[d]
            rest = rest // counts[d]
            own, is_tap = _tap_weight(scales[d].to(DTYPE), index, sizes[d], at[d], taps, corners, stays >> d & 1)
            weight, are_taps = weight * own, are_taps & is_tap
            position = position + (index,)
        for k in range(counts[last]):
            # Triton 3.6 wants a variable of a loop to keep the type of the loop around it.
            column = first[last] + k
            along, is_near = _tap_weight(
                scales[last].to(DTYPE), column, sizes[last], at[last], taps, corners, stays >> last & 1
            )
            value = read_at(grad, position + (column,), are_taps & is_near, 0.0).to(DTYPE)
            total += weight * along * value
    return total


@scalar_kernel(
    pointer=("grad",),
    integers=("sizes", "outputs", "counts"),
    index=("at",),
    exact=(*_SCALES, "reach", "shift"),
    static=("exact", "adjoint"),
    accepts=FLOATS,
)
def nearest_backward(
    grad,
    sizes,
    outputs,
    counts,
    at,
    scale0,
    scale1,
    scale2,
    reach,
    shift,
    exact,
    adjoint,
):
    """The gradients of the output elements whose nearest element this is.

    With `adjoint` these are found among candidates by their nearest index. Otherwise they are a range, from inverse
    scales in float32.
    """
    element = grad[0].dtype.element_ty
    DTYPE: tl.constexpr = tl.float64 if element == tl.float64 else tl.float32
    rank: tl.constexpr = len(at)
    scales = (scale0, scale1, scale2)
    first, end = (), ()
    candidates = 1
    for d in tl.static_range(rank):
        if adjoint:
            start = _first_candidate(at[d], scales[d], reach, shift, counts[d], outputs[d])
            end = end + (start,)
        else:
            inverse = _inverse(scales[d]).to(tl.float32)
            offset = shift.to(tl.float32)
            start = tl.ceil(at[d].to(tl.float32) * inverse - offset).to(at[d].dtype)
            stop = tl.ceil((at[d] + 1).to(tl.float32) * inverse - offset).to(at[d].dtype)
            end = end + (tl.minimum(stop, outputs[d]),)
        first = first + (start,)
        candidates = candidates * counts[d]
    total = tl.zeros(grad[0].shape, DTYPE)
    for n in range(candidates):
        position, rest = (), n
        inside = at[0] >= 0
        for d in tl.static_range(rank):
            index = first[d] + rest % counts[d]
            rest = rest // counts[d]
            position = position + (index,)
            if adjoint:
                inside = inside & (nearest_index(scales[d], index, sizes[d], exact) == at[d])
            else:
                inside = inside & (index < end[d])
        total += read_at(grad, position, inside, 0.0).to(DTYPE)
    return total


@triton.jit
def _total_weight(scale, support, index, size, count, filter: tl.constexpr):
    """Return the sum of the weights under the filter of an output element, by which they are normalised."""
    first, end, centre = antialiased_span(scale, support, index, size)
    total = tl.zeros(first.shape, scale.dtype)
    for k in range(count):
        weight = antialiased_weight(scale, first + k, centre, filter)
        total += tl.where(first + k < end, weight, 0.0)
    return tl.where(total == 0.0, 1.0, total)


@scalar_kernel(
    pointer=("source",),
    integers=("sizes", "counts"),
    index=("at",),
    exact=("scale0", "scale1", "support0", "support1"),
    static=("filter",),
    accepts=FLOATS,
)
def antialiased(source, sizes, counts, at, scale0, scale1, support0, support1, filter):
    """A weighted mean of the elements under a filter as wide as an output element, or as the kernel if that is wider.

    `counts` are the most elements under the filter in each dimension.
    """
    element = source[0].dtype.element_ty
    DTYPE: tl.constexpr = tl.float64 if element == tl.float64 else tl.float32
    scale_y, scale_x = scale0.to(DTYPE), scale1.to(DTYPE)
    support_y, support_x = support0.to(DTYPE), support1.to(DTYPE)
    top, bottom, centre_y = antialiased_span(scale_y, support_y, at[0], sizes[0])
    left, right, centre_x = antialiased_span(scale_x, support_x, at[1], sizes[1])
    total = tl.zeros(source[0].shape, DTYPE)
    for j in range(counts[0]):
        y = top + j
        row = tl.zeros(source[0].shape, DTYPE)
        for i in range(counts[1]):
            x = left + i
            value = read_at(source, (y, x), (y < bottom) & (x < right), 0.0).to(DTYPE)
            row += antialiased_weight(scale_x, x, centre_x, filter) * value
        total += antialiased_weight(scale_y, y, centre_y, filter) * row
    total_y = _total_weight(scale_y, support_y, at[0], sizes[0], counts[0], filter)
    total_x = _total_weight(scale_x, support_x, at[1], sizes[1], counts[1], filter)
    return total / total_y / total_x


@scalar_kernel(
    integers=("size", "count"), index=("at",), exact=("scale", "support"), static=("filter", "dtype"), accepts=FLOATS
)
def total_weights(size, count, at, scale, support, filter, dtype):
    """The sum of the weights under the filter of each output element, before normalisation."""
    return _total_weight(scale.to(dtype), support.to(dtype), at, size, count, filter)


@triton.jit
def _normalised_weight(scale, support, output, size, at, total, filter: tl.constexpr):
    """Return the weight of the input element `at` in an output element, and whether it is under the filter."""
    first, end, centre = antialiased_span(scale, support, output, size)
    return antialiased_weight(scale, at, centre, filter) / total, (at >= first) & (at < end)


@scalar_kernel(
    pointer=("grad", "totals_y", "totals_x"),
    integers=("sizes", "outputs", "counts"),
    index=("at",),
    exact=("scale0", "scale1", "support0", "support1"),
    static=("filter",),
    accepts=FLOATS,
)
def antialiased_backward(
    grad,
    totals_y,
    totals_x,
    sizes,
    outputs,
    counts,
    at,
    scale0,
    scale1,
    support0,
    support1,
    filter,
):
    """The gradients of all output elements whose filters cover this element, times its normalised weight."""
    element = grad[0].dtype.element_ty
    DTYPE: tl.constexpr = tl.float64 if element == tl.float64 else tl.float32
    scale_y, scale_x = scale0.to(DTYPE), scale1.to(DTYPE)
    support_y, support_x = support0.to(DTYPE), support1.to(DTYPE)
    top = _first_candidate(at[0], scale0, 0.5 - support0, 0.5, counts[0], outputs[0])
    left = _first_candidate(at[1], scale1, 0.5 - support1, 0.5, counts[1], outputs[1])
    total = tl.zeros(grad[0].shape, DTYPE)
    everywhere = at[0] >= 0
    for j in range(counts[0]):
        y = top + j
        total_y = read_at(totals_y, (y,), everywhere, 1.0)
        weight_y, covers_y = _normalised_weight(scale_y, support_y, y, sizes[0], at[0], total_y, filter)
        for i in range(counts[1]):
            x = left + i
            total_x = read_at(totals_x, (x,), everywhere, 1.0)
            weight_x, covers_x = _normalised_weight(scale_x, support_x, x, sizes[1], at[1], total_x, filter)
            total += weight_y * weight_x * read_at(grad, (y, x), covers_y & covers_x, 0.0).to(DTYPE)
    return total
