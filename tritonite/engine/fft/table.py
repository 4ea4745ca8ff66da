"""Blocks of Fourier transforms for each kind of device, and the calls for which ATen's library is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables


class FftTable(NamedTuple):
    """Choices of a kind of device.

    `longest`: the longest transform of a program; longer ones take two passes. A float64 one may be half as long.
    `longest_signal`: the longest transform of two passes.
    `kept_roots`: the longest transform for which a recorded call keeps its roots of unity in device memory.
    `elements`: elements of a program, if there are enough transforms.
    `elements_per_thread`: elements of a program for each of its threads.
    `faster_to_real`: the longest transforms to float32 that were measured faster than ATen's, which copies its operand:
        of one dimension, and of two. ATen serves all others unless `faster_only` is off.
    """

    longest: int = 8192
    longest_signal: int = 2**22
    kept_roots: int = 2**14
    elements: int = 2048
    elements_per_thread: int = 16
    faster_to_real: tuple[int, ...] = (3072, 256)


TABLE: Tables[FftTable] = Tables("fft", dict.fromkeys(devices.KINDS, FftTable()))
# Blocks in the interpreter are large because every block costs milliseconds of Python.
TABLE["interpreter"] = FftTable(elements=16384)


def fft_table() -> FftTable:
    """Return the table of the current device."""
    return TABLE[devices.current.kind]


def aten_is_faster(lengths: Sequence[int], to_float32: bool) -> bool:
    """Return whether ATen's library was not measured slower at transforms of these lengths."""
    longest = fft_table().faster_to_real
    return not to_float32 or len(lengths) > len(longest) or max(lengths) > longest[len(lengths) - 1]
