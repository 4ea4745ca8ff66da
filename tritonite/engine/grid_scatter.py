"""The gradient of grid sampling's input: each output element adds to the pixels that it was made of, by atomics.

Grid values are arbitrary, so the outputs of a pixel cannot be enumerated. The order of additions differs from run to
run, as in ATen's kernels. Sums of 16-bit floats are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.iteration import INT32_LIMIT, offset_type
from tritonite.engine.movement import fill_zero, move
from tritonite.language import libdevice
from tritonite.language.grid import (
    BICUBIC,
    BILINEAR,
    NEAREST,
    cubic_neighbours,
    in_range,
    linear_neighbours,
    source_position,
    unnormalised,
)
from tritonite.language.indices import strided_offset
from tritonite.language.interpolation import cubic_weights
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry

_BLOCK = 256


@dataclass(frozen=True)
class GridMeta:
    """Compile-time facts: ATen's numbers of the interpolation and padding, and whether corners are aligned.

    `compute` is the dtype of positions and sums, `index` that of offsets, `block` the output elements of a program.
    """

    mode: int
    padding: int
    corners: bool
    compute: Any
    index: Any
    block: int


@triton.jit
def _add(total, steps, indices, sizes, value, mask):
    """Add a value to a pixel, if it is in the image."""
    offset = indices[0].to(sizes[0].dtype) * steps[0]
    inside = mask & in_range(indices[0], sizes[0])
    for d in tl.static_range(1, len(sizes)):
        offset += indices[d].to(sizes[0].dtype) * steps[d]
        inside = inside & in_range(indices[d], sizes[d])
    tl.atomic_add(total + offset, value, mask=inside, sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["n"])
def _scatter_grid(
    total,
    grad,
    points,
    shape,
    grad_strides,
    point_strides,
    total_strides,
    steps,
    coordinate_stride,
    sizes,
    n,
    META: tl.constexpr,
):
    """Add a block of output gradients to the sums. Spaces are fastest dimension first, `steps` and `sizes` slowest."""
    wait_for_previous_launch()
    MODE: tl.constexpr = META.mode
    PADDING: tl.constexpr = META.padding
    CORNERS: tl.constexpr = META.corners
    rank: tl.constexpr = len(sizes)
    linear = tl.program_id(0).to(META.index) * META.block + tl.arange(0, META.block)
    mask = linear < n
    value = tl.load(grad + strided_offset(linear, shape, grad_strides), mask=mask, other=0.0).to(META.compute)
    point = points + strided_offset(linear, shape, point_strides)
    own = total + strided_offset(linear, shape, total_strides)
    coordinates, extents = (), ()
    for d in tl.static_range(rank):
        # A size of 1 arrives as a constant, which has no dtype.
        extents = extents + (tl.full((), sizes[d], META.index),)  # type: ignore[assignment]
        read = tl.load(point + (rank - 1 - d) * coordinate_stride, mask=mask, other=0.0)
        coordinates = coordinates + (read.to(META.compute),)  # type: ignore[assignment]
    if MODE == BICUBIC:
        y = unnormalised(coordinates[0], extents[0], CORNERS)  # type: ignore[misc]
        x = unnormalised(coordinates[1], extents[1], CORNERS)  # type: ignore[misc]
        rows, weights_y = cubic_neighbours(y, extents[0], PADDING, CORNERS), cubic_weights(y - tl.floor(y))  # type: ignore[misc]
        columns, weights_x = cubic_neighbours(x, extents[1], PADDING, CORNERS), cubic_weights(x - tl.floor(x))  # type: ignore[misc]
        for j in tl.static_range(4):
            for i in tl.static_range(4):
                _add(own, steps, (rows[j], columns[i]), extents, weights_y[j] * weights_x[i] * value, mask)
    else:
        indices, weights = (), ()
        for d in tl.static_range(rank):
            position = source_position(coordinates[d], extents[d], PADDING, CORNERS)
            if MODE == NEAREST:
                indices = indices + ((libdevice.nearbyint(position).to(tl.int32),),)  # type: ignore[assignment]
            else:
                neighbours, weight = linear_neighbours(position)
                indices = indices + (neighbours,)  # type: ignore[assignment]
                weights = weights + (weight,)  # type: ignore[assignment]
        taps: tl.constexpr = 2 if MODE == BILINEAR else 1
        for k in tl.static_range(taps**rank):
            pixel = ()
            update = value
            for d in tl.static_range(rank):
                pixel = pixel + (indices[d][(k >> (rank - 1 - d)) % taps],)  # type: ignore[assignment,misc]
                if MODE == BILINEAR:
                    update = update * weights[d][(k >> (rank - 1 - d)) % taps]
            _add(own, steps, pixel, extents, update, mask)


def scatter_grid(
    out: torch.Tensor, grad: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, corners: bool
) -> None:
    """Write the gradient of the input of a grid sampling to `out`, of shape (N, C, *sizes).

    `grad` has the shape (N, C, *points), and `grid` (N, *points, number of dimensions).
    """
    compute = opmath(out.dtype)
    total = out if out.dtype is compute else empty(out.shape, compute, out.device)
    fill_zero(total)
    n = grad.numel()
    if n:
        index = tl.int64 if n >= INT32_LIMIT else offset_type(total, grad, grid)
        meta = GridMeta(mode, padding, corners, TRITON_DTYPES[compute], index, _BLOCK)
        shape = tuple(grad.shape[:0:-1])
        along = grid.stride()[1:-1]
        _scatter_grid[(-(-n // meta.block),)](
            *(total, grad, grid, shape, tuple(grad.stride()[::-1]), (*along[::-1], 0, grid.stride(0))),
            (*(0,) * len(along), total.stride(1), total.stride(0)),
            *(total.stride()[2:], grid.stride(-1), tuple(total.shape[2:]), n),
            META=meta,
        )
    if total is not out:
        move(total, out)
