"""Compile-time facts of the kernels of Fourier transforms, and how they address a signal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton


@dataclass(frozen=True)
class FftMeta:
    """Compile-time facts of a pass.

    length: elements of a transform, the product of `radices`.
    radices: the radix of each stage, in order.
    batch: transforms of a program, a power of 2.
    batch_fastest: whether neighbouring threads have neighbouring transforms, not neighbouring elements of one.
    hermitian: whether the input has the first half of a spectrum, whose conjugate is transformed.
    twiddled: whether results are multiplied by roots of unity, between both passes of a long transform.
    compute: the dtype computed in.
    index: the dtype of offsets.
    """

    length: int
    radices: tuple[int, ...]
    batch: int
    batch_fastest: bool
    hermitian: bool
    twiddled: bool
    compute: Any
    index: Any


class Signal(NamedTuple):
    """The elements of a signal that a transform reads or writes.

    Element i of transform n of the signal is the signal's element i * step + n * inner_step. `length` is the number of
    elements of the signal; those beyond are not stored. `stride` is that between elements in memory.
    """

    stride: Any
    step: Any
    inner_step: Any
    length: Any


@triton.constexpr_function
def stages(meta: FftMeta) -> int:
    """Return the number of stages."""
    return len(meta.radices)


@triton.constexpr_function
def radix_of(meta: FftMeta, stage: int) -> int:
    """Return the radix of a stage."""
    return meta.radices[stage]


@triton.constexpr_function
def radix_lanes(meta: FftMeta, stage: int) -> int:
    """Return the power of 2 that holds the radix of a stage."""
    return 1 << (meta.radices[stage] - 1).bit_length()


@triton.constexpr_function
def butterflies(meta: FftMeta, stage: int) -> int:
    """Return the butterflies of a stage in one transform."""
    return meta.length // meta.radices[stage]


@triton.constexpr_function
def butterfly_lanes(meta: FftMeta, stage: int) -> int:
    """Return the power of 2 that holds the butterflies of a stage in one transform."""
    return 1 << (meta.length // meta.radices[stage] - 1).bit_length()


@triton.constexpr_function
def done(meta: FftMeta, stage: int) -> int:
    """Return the product of the radices before a stage: the length of the transforms that are done."""
    product = 1
    for radix in meta.radices[:stage]:
        product *= radix
    return product
