"""Whether a call writes to memory that it also reads. Addresses are of each call, all else of its kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tritonite.engine.iteration import same_strides, span
from tritonite.engine.pointwise.placed import tensor_of
from tritonite.errors import Decline


class Extent(NamedTuple):
    """How an output and another tensor of a call lie in memory, whatever their addresses.

    `position` is of an argument, or the complement of another output's. An `identical` operand may have the output's
    address. `grains` are as `_grains` says.
    """

    written: int
    position: int
    written_bytes: int
    read_bytes: int
    identical: bool
    grains: tuple[tuple[int, int, int], ...]


def extents(
    outs: Sequence[torch.Tensor],
    shape: tuple[int, ...],
    strided: list[tuple[int, torch.Tensor]],
    placed: frozenset[int] = frozenset(),
) -> tuple[Extent, ...]:
    """Of every output and every other tensor, by whose positions in a call `strided` and `placed` go."""
    found = []
    for j, out in enumerate(outs):
        others = strided + [(~k, other) for k, other in enumerate(outs) if k != j]
        for position, read in others:
            identical = (
                position >= 0
                and position not in placed
                and read.dtype.itemsize == out.dtype.itemsize
                and tuple(read.shape) == shape
                and same_strides(shape, read.stride(), out.stride())
            )
            out_bytes = span(out.shape, out.stride()) * out.dtype.itemsize
            read_bytes = span(read.shape, read.stride()) * read.dtype.itemsize
            found.append(Extent(j, position, out_bytes, read_bytes, identical, _grains(out, read)))
    return tuple(found)


def _grains(written: torch.Tensor, read: torch.Tensor) -> tuple[tuple[int, int, int], ...]:
    """Ways to see that tensors do not share memory: both repeat after so many bytes, of which each has so many."""
    sides = [
        [(size, stride * x.dtype.itemsize) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
        for x in (written, read)
    ]
    found = []
    for least in sorted({stride for side in sides for _, stride in side}):
        grain = math.gcd(*(stride for side in sides for _, stride in side if stride >= least))
        own = [
            x.dtype.itemsize + sum((size - 1) * stride for size, stride in side if stride < least)
            for x, side in zip((written, read), sides, strict=True)
        ]
        if sum(own) <= grain:
            found.append((grain, *own))
    return tuple(found)


def check(found: Sequence[Extent], values: Sequence[Any], outs: Sequence[torch.Tensor]) -> None:
    """Raise Decline where an output of a call overlaps an operand, or another output."""
    for written, position, written_bytes, read_bytes, identical, grains in found:
        read = tensor_of(values[position] if position >= 0 else outs[~position])
        a, b = outs[written].data_ptr(), read.data_ptr()
        if a == b and identical:
            continue
        # Interleaved, as real and imaginary parts are, or halves of rows, they share nothing.
        apart = any([own_read <= (a - b) % grain <= grain - own for grain, own, own_read in grains])
        if a < b + read_bytes and b < a + written_bytes and not apart:
            raise Decline("output overlaps an input")
