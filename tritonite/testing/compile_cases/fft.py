"""Fourier transforms of every radix, of the longest signals of a program, and in two passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite import registry
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, launches, unit_strides


def _calls(real: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield calls by overload. Lengths have all radices, the most lanes a program may have, or need two passes."""
    kind = {torch.float32: torch.complex64, torch.float64: torch.complex128}[real]
    for length in (1, 7, 420, 2401, 4096):
        yield "_fft_c2c", (torch.empty(64, length, dtype=kind), [1], 0, True)
    yield "_fft_c2c", (torch.empty(400, 64, dtype=kind), [0], 1, False)
    yield "_fft_r2c", (torch.empty(4, 512, 400, dtype=real), [1, 2], 0, True)
    yield "_fft_c2r", (torch.empty(4, 512, 201, dtype=kind), [1, 2], 2, 400)
    yield "_fft_c2c", (torch.empty(2, 2**16, dtype=kind), [1], 0, True)
    yield "_fft_r2c", (torch.empty(2, 5**5 * 7, dtype=real), [1], 0, True)
    yield "_fft_c2r", (torch.empty(2, 2**15 + 1, dtype=kind), [1], 0, 2**16)


@compile_cases("fft")
def transforms(full: bool) -> Iterator[Case]:
    """Transforms of complex and real numbers; without `full` in float32 alone."""
    for dtype in (torch.float32, torch.float64) if full else (torch.float32,):
        for name, arguments in _calls(dtype):
            for specialization in launches(registry.overloads()[name], arguments):
                label = f"{name} {dtype} {tuple(arguments[0].shape)}"
                yield Case(label, specialization, tuple(TARGETS) if full else ("sm_90",), True)
    # The longest transforms that one program holds.
    for name, arguments in _longest() if full else ():
        for specialization in launches(registry.overloads()[name], arguments):
            yield Case(f"{name} longest {arguments[0].dtype}", specialization, ("sm_90", "sm_100"), True)


@compile_cases("fft")
def strides_of_one(full: bool) -> Iterator[Case]:
    """Each number among strides, steps and sizes equal to 1 in turn, in one pass and in two, over a batch of two."""
    for length in (12, 2**14):
        x = torch.empty(2, 3, length + 1, dtype=torch.complex64)[..., :length].transpose(0, 1)
        for specialization in launches(registry.overloads()["_fft_c2c"], (x, [2], 0, True)):
            for i, variant in enumerate(unit_strides(specialization)):
                yield Case(f"_fft_c2c of {length} with number {i} of 1", variant, ("sm_90",))


def _longest() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield transforms with the most lanes: 7203 = 3 * 7 ** 4 elements in float32, 3072 = 3 * 2 ** 10 in float64."""
    yield "_fft_c2c", (torch.empty(2, 7203, dtype=torch.complex64), [1], 0, True)
    yield "_fft_c2c", (torch.empty(2, 3072, dtype=torch.complex128), [1], 0, True)
