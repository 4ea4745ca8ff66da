"""Overlap of a call's outputs with its operands. Extents depend on the kind of a call, addresses on each call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tritonite.engine.iteration import same_strides, span
from tritonite.engine.pointwise.gathered import tensor_of
from tritonite.errors import Decline


class Extent(NamedTuple):
    """The memory that an output and another tensor of a call span, relative to their addresses.

    `position` is an argument's, or the complement of another output's. An `identical` operand may have the output's
    address. `periods` are those of `_periods`.
    """

    written: int
    position: int
    written_bytes: int
    read_bytes: int
    identical: bool
    periods: tuple[tuple[int, int, int], ...]


def extents(
    outs: Sequence[torch.Tensor],
    shape: tuple[int, ...],
    strided: list[tuple[int, torch.Tensor]],
    gathered: frozenset[int] = frozenset(),
) -> tuple[Extent, ...]:
    """Return an extent for every output and every other tensor of a call.

    `strided` and `gathered` have the positions of the operands.
    """
    found = []
    for j, out in enumerate(outs):
        others = strided + [(~k, other) for k, other in enumerate(outs) if k != j]
        for position, read in others:
            identical = (
                position >= 0
                and position not in gathered
                and read.dtype.itemsize == out.dtype.itemsize
                and tuple(read.shape) == shape
                and same_strides(shape, read.stride(), out.stride())
            )
            out_bytes = span(out.shape, out.stride()) * out.dtype.itemsize
            read_bytes = span(read.shape, read.stride()) * read.dtype.itemsize
            found.append(Extent(j, position, out_bytes, read_bytes, identical, _periods(out, read)))
    return tuple(found)


def _periods(written: torch.Tensor, read: torch.Tensor) -> tuple[tuple[int, int, int], ...]:
    """Return (period, bytes of `written`, bytes of `read`) triples that can show that tensors share no memory.

    The period divides the larger strides of both tensors. The bytes are those that a tensor's smaller strides span.
    """
    sides = [
        [(size, stride * x.dtype.itemsize) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
        for x in (written, read)
    ]
    found = []
    for least in sorted({stride for side in sides for _, stride in side}):
        period = math.gcd(*(stride for side in sides for _, stride in side if stride >= least))
        own = [
            x.dtype.itemsize + sum((size - 1) * stride for size, stride in side if stride < least)
            for x, side in zip((written, read), sides, strict=True)
        ]
        if sum(own) <= period:
            found.append((period, *own))
    return tuple(found)


def check(found: Sequence[Extent], values: Sequence[Any], outs: Sequence[torch.Tensor]) -> None:
    """Raise Decline if an output of a call overlaps an operand or another output."""
    for written, position, written_bytes, read_bytes, identical, periods in found:
        read = tensor_of(values[position] if position >= 0 else outs[~position])
        a, b = outs[written].data_ptr(), read.data_ptr()
        if a == b and identical:
            continue
        # Interleaved tensors share no memory, such as real and imaginary parts, or column slices of a matrix.
        interleaved = any([own_read <= (a - b) % period <= period - own for period, own, own_read in periods])
        if a < b + read_bytes and b < a + written_bytes and not interleaved:
            raise Decline("output overlaps an input")
