"""Grid sampling: interpolation of images and volumes at the positions that a grid gives, and its gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS
from tritonite.engine.grid_scatter import scatter_grid
from tritonite.engine.movement import fill_zero, result
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.grid import (
    BICUBIC,
    BILINEAR,
    NEAREST,
    ZEROS,
    cubic_derivatives,
    cubic_neighbours,
    in_range,
    linear_neighbours,
    position_derivative,
    source_position,
    unnormalised,
)
from tritonite.language.indices import read_at
from tritonite.language.interpolation import cubic_weights
from tritonite.ops.aten import ON_CPU
from tritonite.ops.scatter import refuse_if_deterministic
from tritonite.registry import operator as any_operator
from tritonite.registry import scalar_kernel

operator = functools.partial(any_operator, tensors_only=True)
_COORDINATES = ("first", "second", "third")
_STATIC = ("mode", "padding", "corners")


@triton.jit
def _coordinates(first, second, third, rank: tl.constexpr):
    """Return the grid values in the order of the image's dimensions, as a tuple; `third` is None for images."""
    if rank == 2:
        found = (first, second)
    else:
        found = (first, second, third)
    return found


@triton.jit
def _inside(indices, sizes):
    inside = in_range(indices[0], sizes[0])
    for d in tl.static_range(1, len(sizes)):
        inside = inside & in_range(indices[d], sizes[d])
    return inside


@triton.jit
def _pixel(source, lead, indices, sizes):
    """Load a pixel in float32 or float64, 0 outside the image. `lead` are indices of dimensions before the image's."""
    value = read_at(source, lead + indices, _inside(indices, sizes), 0.0)
    return value.to(tl.float64 if value.dtype == tl.float64 else tl.float32)


@triton.jit
def _corner(indices, k: tl.constexpr):
    """Return one of two indices for each dimension: bits of k, the last dimension's lowest."""
    rank: tl.constexpr = len(indices)
    found = ()
    for d in tl.static_range(rank):
        found = found + (indices[d][(k >> (rank - 1 - d)) & 1],)
    return found


@triton.jit
def _corner_weight(weights, k: tl.constexpr, without: tl.constexpr):
    """Return the product of a corner's weights along all dimensions but `without`."""
    rank: tl.constexpr = len(weights)
    found = tl.full(weights[0][0].shape, 1.0, weights[0][0].dtype)
    for d in tl.static_range(rank):
        if d != without:
            found = found * weights[d][(k >> (rank - 1 - d)) & 1]
    return found


@scalar_kernel(pointer=("source",), own=_COORDINATES, integers=("sizes",), static=_STATIC, accepts=FLOATS)
def _sampled(source, first, second, third, sizes, mode, padding, corners):
    """The pixels around a position, weighted."""
    rank: tl.constexpr = len(sizes)
    coordinates = _coordinates(first, second, third, rank)
    if mode == BICUBIC:
        y = unnormalised(coordinates[0], sizes[0], corners)
        x = unnormalised(coordinates[1], sizes[1], corners)
        rows, weights_y = cubic_neighbours(y, sizes[0], padding, corners), cubic_weights(y - tl.floor(y))
        columns, weights_x = cubic_neighbours(x, sizes[1], padding, corners), cubic_weights(x - tl.floor(x))
        total = weights_y[0] * 0.0
        for j in tl.static_range(4):
            row = weights_x[0] * _pixel(source, (), (rows[j], columns[0]), sizes)
            for i in tl.static_range(1, 4):
                row += weights_x[i] * _pixel(source, (), (rows[j], columns[i]), sizes)
            total += weights_y[j] * row
    elif mode == NEAREST:
        indices = ()
        for d in tl.static_range(rank):
            position = source_position(coordinates[d], sizes[d], padding, corners)
            indices = indices + (libdevice.nearbyint(position).to(tl.int32),)
        total = _pixel(source, (), indices, sizes)
    else:
        indices, weights = (), ()
        for d in tl.static_range(rank):
            own, weight = linear_neighbours(source_position(coordinates[d], sizes[d], padding, corners))
            indices, weights = indices + (own,), weights + (weight,)
        total = _pixel(source, (), _corner(indices, 0), sizes) * _corner_weight(weights, 0, -1)
        for k in tl.static_range(1, 2**rank):
            total += _pixel(source, (), _corner(indices, k), sizes) * _corner_weight(weights, k, -1)
    return total


def _grid_gradient(grad, source, first, second, third, channels, sizes, mode, padding, corners):
    """Return the derivatives of the sum of an output position's channels by its coordinates, times their gradients."""
    rank: tl.constexpr = len(sizes)
    coordinates = _coordinates(first, second, third, rank)
    everywhere = grad[1]
    zeros = tl.zeros(grad[0].shape, first.dtype)
    sum0, sum1, sum2 = zeros, zeros, zeros
    if mode == BICUBIC:
        y = unnormalised(coordinates[0], sizes[0], corners)
        x = unnormalised(coordinates[1], sizes[1], corners)
        rows, columns = cubic_neighbours(y, sizes[0], padding, corners), cubic_neighbours(x, sizes[1], padding, corners)
        weights_y, weights_x = cubic_weights(y - tl.floor(y)), cubic_weights(x - tl.floor(x))
        slopes_y, slopes_x = cubic_derivatives(y - tl.floor(y)), cubic_derivatives(x - tl.floor(x))
        for c in range(channels):
            gradient = read_at(grad, (c,), everywhere, 0.0).to(first.dtype)
            for j in tl.static_range(4):
                for i in tl.static_range(4):
                    value = _pixel(source, (c,), (rows[j], columns[i]), sizes)
                    sum0 += value * (slopes_y[j] * weights_x[i]) * gradient
                    sum1 += value * (weights_y[j] * slopes_x[i]) * gradient
    else:
        indices, weights = (), ()
        for d in tl.static_range(rank):
            own, weight = linear_neighbours(source_position(coordinates[d], sizes[d], padding, corners))
            indices, weights = indices + (own,), weights + (weight,)
        for c in range(channels):
            gradient = read_at(grad, (c,), everywhere, 0.0).to(first.dtype)
            for k in tl.static_range(2**rank):
                value = _pixel(source, (c,), _corner(indices, k), sizes)
                # A corner outside the image adds nothing, even if the gradient is infinite.
                here = tl.where(_inside(_corner(indices, k), sizes), gradient, 0.0)
                change = value * _corner_weight(weights, k, 0) * here
                sum0 += change if (k >> (rank - 1)) & 1 else -change
                change = value * _corner_weight(weights, k, 1) * here
                sum1 += change if (k >> (rank - 2)) & 1 else -change
                if rank == 3:
                    change = value * _corner_weight(weights, k, 2) * here
                    sum2 += change if k & 1 else -change
    # Bicubic sampling pads the pixels, not the position. Where a border clips, ATen's kernel of images for CPUs has a
    # derivative of +0, and its kernels for GPUs have a zero with the sign of a reflection.
    own_padding: tl.constexpr = ZEROS if mode == BICUBIC else padding
    sum0 *= position_derivative(coordinates[0], sizes[0], own_padding, corners, ON_CPU)
    sum1 *= position_derivative(coordinates[1], sizes[1], own_padding, corners, ON_CPU)
    if rank == 2:
        found = (sum0, sum1)
    else:
        found = (sum0, sum1, sum2 * position_derivative(coordinates[2], sizes[2], own_padding, corners, ON_CPU))
    return found


_GRID_GRADIENTS = {
    rank: scalar_kernel(
        pointer=("grad", "source"),
        own=_COORDINATES,
        integers=("channels", "sizes"),
        static=_STATIC,
        output_dtypes=(None,) * rank,
        accepts=FLOATS,
    )(_grid_gradient)
    for rank in (2, 3)
}


def _check(input, grid, mode, padding, rank):
    """Decline what ATen refuses, and dtypes that are not one floating-point dtype."""
    if input.dtype not in FLOATS or grid.dtype is not input.dtype:
        raise Decline(f"dtypes {input.dtype} and {grid.dtype}; one floating-point dtype is served")
    if input.dim() != rank + 2 or grid.dim() != rank + 2 or grid.shape[-1] != rank:
        raise Decline(f"shapes {list(input.shape)} and {list(grid.shape)}; {rank} dimensions are sampled")
    if input.shape[0] != grid.shape[0] or 0 in input.shape[2:]:
        raise Decline(f"shapes {list(input.shape)} and {list(grid.shape)}; batches are equal and images not empty")
    if not 0 <= mode <= 4 - rank or not 0 <= padding <= 2:
        raise Decline(f"interpolation {mode} and padding {padding} of {rank} dimensions")


def _planes(grid: torch.Tensor, channels: int = 1) -> tuple[Any, Any, Any]:
    """Return views of a grid's values in the order of the image's dimensions, repeated for each channel."""
    values = [grid[..., d].unsqueeze(1) for d in reversed(range(grid.shape[-1]))]
    values = [value.expand(value.shape[0], channels, *value.shape[2:]) for value in values]
    first, second, third = (*values, None)[:3]
    return first, second, third


def _forward(rank, input, grid, mode, padding, corners, outs):
    _check(input, grid, mode, padding, rank)
    out = result((input, grid), (*input.shape[:2], *grid.shape[1:-1]), input.dtype, outs)
    source = Gathered(input, tuple(range(2, rank + 2)))
    _sampled.run((source, *_planes(grid, input.shape[1]), tuple(input.shape[2:]), mode, padding, corners), (out,))
    return (out,)


def _backward(rank, grad_output, input, grid, mode, padding, corners, output_mask, outs):
    _check(input, grid, mode, padding, rank)
    refuse_if_deterministic()
    if grad_output.dtype is not input.dtype or grad_output.shape != (*input.shape[:2], *grid.shape[1:-1]):
        raise Decline(f"a gradient of {grad_output.dtype} and shape {list(grad_output.shape)} for {list(grid.shape)}")
    if len(output_mask) != 2:
        raise Decline(f"a mask of {len(output_mask)} flags; 2 are served")
    if outs and not output_mask[0]:
        raise Decline("an output for a gradient that is masked off")
    tensors = (grad_output, input, grid)
    grad_input = result(tensors, input.shape, input.dtype, outs[:1]) if output_mask[0] else None
    # ATen computes the grid's gradient whatever the mask.
    grad_grid = result(tensors, grid.shape, grid.dtype, outs[1:])
    if mode == NEAREST.value:
        fill_zero(grad_grid)
    else:
        channels = tuple(range(1, rank + 2))
        operands = (Gathered(grad_output, (1,)), Gathered(input, channels), *_planes(grid), input.shape[1])
        written = [plane for plane in _planes(grad_grid) if plane is not None]
        _GRID_GRADIENTS[rank].run((*operands, tuple(input.shape[2:]), mode, padding, corners), written)
    if grad_input is not None:
        scatter_grid(grad_input, grad_output, grid, mode, padding, corners)
    return grad_input, grad_grid


@operator("grid_sampler_2d", accepts=FLOATS)
def grid_sampler_2d(input, grid, interpolation_mode, padding_mode, align_corners, outs=()):
    return _forward(2, input, grid, interpolation_mode, padding_mode, align_corners, outs)


@operator("grid_sampler_3d", accepts=FLOATS)
def grid_sampler_3d(input, grid, interpolation_mode, padding_mode, align_corners, outs=()):
    return _forward(3, input, grid, interpolation_mode, padding_mode, align_corners, outs)


@operator("grid_sampler_2d_backward", accepts=FLOATS)
def grid_sampler_2d_backward(
    grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask, outs=()
):
    given = (grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask)
    return _backward(2, *given, outs)


@operator("grid_sampler_3d_backward", accepts=FLOATS)
def grid_sampler_3d_backward(
    grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask, outs=()
):
    given = (grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask)
    return _backward(3, *given, outs)


# cuDNN samples images bilinearly, with zeros around them and corners aligned.
_AS_CUDNN = (BILINEAR.value, ZEROS.value, True)
_CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64)
_MOST_CUDNN_CHANNELS = 1024


def _check_cudnn(input, grid):
    """Raise Decline for a call that ATen refuses to pass to cuDNN."""
    if input.dtype not in _CUDNN_DTYPES:
        raise Decline(f"dtype {input.dtype}; cuDNN samples float16, float32 and float64")
    if not (input.numel() and grid.numel()):
        raise Decline("images or grid without elements, which cuDNN does not sample")
    if input.dim() == 4 and input.shape[1] > _MOST_CUDNN_CHANNELS:
        raise Decline(f"{input.shape[1]} channels; cuDNN samples at most {_MOST_CUDNN_CHANNELS}")


@operator("cudnn_grid_sampler", accepts=_CUDNN_DTYPES, cuda_only=("cudnn_grid_sampler", "cudnn_grid_sampler.out"))
def cudnn_grid_sampler(self, grid, outs=()):
    _check_cudnn(self, grid)
    return _forward(2, self, grid, *_AS_CUDNN, outs)


@operator(
    "cudnn_grid_sampler_backward",
    accepts=_CUDNN_DTYPES,
    cuda_only=("cudnn_grid_sampler_backward", "cudnn_grid_sampler_backward.out"),
)
def cudnn_grid_sampler_backward(self, grid, grad_output, outs=()):
    _check_cudnn(self, grid)
    return _backward(2, grad_output, self, grid, *_AS_CUDNN, (True, True), outs)
