"""Maxima over windows at random positions, and their gradients: fractional max pooling (Graham 2014)."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, FLOATS_OF_16_BITS, TRITON_DTYPES
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.engine.windows.geometry import fractional_over, unrolled_loop
from tritonite.engine.windows.taps import count_of, product, row_major, tap_of, unrolled_tap, zeros_for
from tritonite.errors import Decline
from tritonite.language.indices import read_at
from tritonite.language.math import true_divide
from tritonite.ops import aten
from tritonite.ops.pooling.images import batched, check_gradient, check_images, decline_where_aten_raises
from tritonite.ops.pooling.maximum import (
    gradient_of_maxima,
    larger_of,
    row_major_strides,
    sum_of_chosen,
    value_and_index,
)
from tritonite.registry import operator, scalar_kernel


@triton.jit
def _rounded(x, to: tl.constexpr):
    """Round to 16 bits where ATen computes in them."""
    return x if to is None else x.to(to).to(tl.float32)


@triton.jit
def _start(window, sample, size, count, kernel, rounds_to: tl.constexpr):
    """Return the first position of a window: floor((window + sample) a) - floor(sample a), and for the last size - k.

    The distance of windows is a = (size - kernel) / (count - 1).
    """
    zero = sample * 0.0
    whole = _rounded(zero + (size - kernel).to(zero.dtype), rounds_to)
    parts = _rounded(zero + tl.maximum(count - 1, 1).to(zero.dtype), rounds_to)
    distance = _rounded(true_divide(whole, parts), rounds_to)
    shifted = _rounded(_rounded(window.to(zero.dtype), rounds_to) + sample, rounds_to)
    start = _rounded(shifted * distance, rounds_to).to(tl.int32) - _rounded(sample * distance, rounds_to).to(tl.int32)
    return tl.where(window == count - 1, size - kernel, start.to(window.dtype))


@scalar_kernel(
    pointer=("source", "samples"),
    integers=("sizes", "counts", "kernels", "dilations"),
    index=("at",),
    static=("unrolled", "reversed", "rounds_to"),
    accepts=FLOATS,
    output_dtypes=(None, None),
)
def _fractional_maximum(source, samples, sizes, counts, kernels, dilations, at, unrolled, reversed, rounds_to):
    """Maximum of a window and its index. Samples have a number for each dimension, the last first if `reversed`."""
    best = zeros_for(source) + float("-inf")
    begins, ends = (), ()
    for d in tl.static_range(len(at)):
        sample = read_at(samples, (len(at) - 1 - d if reversed else d,), at[0] >= 0, 0.0).to(best.dtype)
        begin = _start(at[d], sample, sizes[d], counts[d], kernels[d], rounds_to)
        begins, ends = begins + (begin,), ends + (begin + kernels[d],)
    index = tl.broadcast_to(row_major(begins, sizes), best.shape)
    if unrolled is not None:
        for n in tl.static_range(count_of(unrolled)):
            tap = unrolled_tap(unrolled, n)
            best, index = larger_of(source, tap, begins, ends, sizes, dilations, best, index)
    else:
        for n in range(product(kernels, 0)):
            best, index = larger_of(source, tap_of(n, kernels), begins, ends, sizes, dilations, best, index)
    return best, index


def _check(self, kernel_size, output_size):
    """Return the sizes of the images. Decline arguments for which ATen raises."""
    rank = len(kernel_size)
    check_images(self, rank, 1 if self.dim() == rank + 1 else 0)
    sizes = tuple(self.shape[-rank:])
    every = zip(sizes, output_size, kernel_size, strict=True)
    # ATen refuses volumes whose windows need all elements.
    fits = [count + kernel - 1 + (rank == 3) <= size for size, count, kernel in every]
    if not all(fits) or min(*kernel_size, *output_size) < 1:
        raise Decline(f"{list(output_size)} windows of {list(kernel_size)} in images of {list(sizes)}")
    return sizes


def _pooled(rank, self, kernel_size, output_size, random_samples, outs):
    if len(kernel_size) != rank or len(output_size) != rank:
        raise Decline(f"kernel_size {list(kernel_size)} and output_size {list(output_size)} for {rank} dimensions")
    sizes = _check(self, kernel_size, output_size)
    images = batched(self, rank)
    batch, channels = images.shape[:2]
    samples = random_samples
    if samples.dtype is not self.dtype or samples.dim() != 3:
        raise Decline(f"samples of {samples.dtype} and shape {tuple(samples.shape)} for {self.dtype}")
    if samples.shape[0] < batch or tuple(samples.shape[1:]) != (channels, rank):
        raise Decline(f"samples of shape {tuple(samples.shape)} for images of {tuple(images.shape)}")
    shape = (*self.shape[:-rank], *output_size)
    outs = value_and_index(self, (samples,), shape, row_major_strides(self, shape), outs)
    if not outs[0].numel():
        return outs
    samples = samples[:batch].reshape(batch, channels, rank, *[1] * (rank - 1))
    kernels = tuple(kernel_size)
    dims = tuple(range(2, 2 + rank))
    # ATen's kernel for CPUs computes positions in the dtype of the samples, and that for GPUs in float32.
    narrow = aten.on_cpu() and self.dtype in FLOATS_OF_16_BITS
    rounds_to = TRITON_DTYPES[self.dtype] if narrow else None
    _fractional_maximum.run(
        (
            *(Gathered(images, dims), Gathered(samples, (2,)), sizes, tuple(output_size), kernels, (1,) * rank, dims),
            *(unrolled_loop(kernels), rank == 2, rounds_to),
        ),
        tuple([batched(out, rank) for out in outs]),
    )
    return outs


def _gradient(rank, grad_output, self, kernel_size, output_size, indices, outs):
    """Return the gradient by the elements of maxima at `indices`.

    The samples are not known, so the windows that may cover an element are those of all samples.
    """
    decline_where_aten_raises()
    if len(kernel_size) != rank or len(output_size) != rank:
        raise Decline(f"kernel_size {list(kernel_size)} and output_size {list(output_size)} for {rank} dimensions")
    sizes = _check(self, kernel_size, output_size)
    counts, kernels = tuple(output_size), tuple(kernel_size)
    check_gradient(grad_output, self, counts)
    # In 16 bits a position may be rounded to any other.
    margin = max(sizes) if aten.on_cpu() and self.dtype in FLOATS_OF_16_BITS else 1
    over = fractional_over(sizes, counts, kernels, margin)
    numbers = (sizes, counts, kernels, (1,) * rank, (1,) * rank, (margin,) * rank)
    return gradient_of_maxima(sum_of_chosen, grad_output, self, indices, numbers, over, row_major_strides, outs)


@operator("fractional_max_pool2d", accepts=FLOATS)
def fractional_max_pool2d(self, kernel_size, output_size, random_samples, outs=()):
    return _pooled(2, self, kernel_size, output_size, random_samples, outs)


@operator("fractional_max_pool3d", accepts=FLOATS)
def fractional_max_pool3d(self, kernel_size, output_size, random_samples, outs=()):
    return _pooled(3, self, kernel_size, output_size, random_samples, outs)


@operator("fractional_max_pool2d_backward", accepts=FLOATS)
def fractional_max_pool2d_backward(grad_output, self, kernel_size, output_size, indices, outs=()):
    return _gradient(2, grad_output, self, kernel_size, output_size, indices, outs)


@operator("fractional_max_pool3d_backward", accepts=FLOATS)
def fractional_max_pool3d_backward(grad_output, self, kernel_size, output_size, indices, outs=()):
    return _gradient(3, grad_output, self, kernel_size, output_size, indices, outs)
