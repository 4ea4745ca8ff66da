"""The layout of results of ATen's libraries for Fourier transforms, cuFFT and MKL."""

from __future__ import annotations

from collections.abc import Sequence

from tritonite.engine.iteration import contiguous_strides


def library_strides(
    shape: Sequence[int], strides: Sequence[int], dims: Sequence[int], out_shape: Sequence[int]
) -> tuple[int, ...]:
    """Return the strides of a result after one call of the library over `dims`, for an operand of shape and strides.

    The result is contiguous in the order: other dimensions, by their strides, then `dims`.
    """
    others = sorted(_partition(len(shape), dims), key=lambda d: -strides[d])
    return contiguous_strides(out_shape, [*others, *dims][::-1])


def by_stride(dims: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return dimensions by their strides, the largest first."""
    return sorted(dims, key=lambda d: -strides[d])


def _partition(rank: int, dims: Sequence[int]) -> list[int]:
    """Return the dimensions outside `dims` in the order of std::partition, on which equal strides depend."""
    order = list(range(rank))
    first, last = 0, rank
    while True:
        while first < last and order[first] not in dims:
            first += 1
        if first == last:
            return order[:first]
        last -= 1
        while first < last and order[last] in dims:
            last -= 1
        if first == last:
            return order[:first]
        order[first], order[last] = order[last], order[first]
        first += 1
