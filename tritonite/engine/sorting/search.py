"""Places in what is sorted, by binary search, and whether elements are among others."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dispatch.call import zeros
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.places import in_row_major
from tritonite.engine.iteration import INT32_LIMIT
from tritonite.language.places import strided_offset
from tritonite.launch import libentry

_BLOCK = 1024
# Test elements that are compared one by one.
FEW = 64
# The dtypes all of whose elements a table has a flag for, by the least of them.
TABLES = {torch.uint8: 0, torch.int8: -(2**7), torch.int16: -(2**15)}


def _block(n: int) -> int:
    """How many elements a program takes: fewer where there are few, so that all of the device works."""
    device = devices.current
    return _BLOCK if device.interpreted or n >= _BLOCK * device.programs else 256


@libentry()
@triton.jit(do_not_specialize=["n", "steps"])
def _search(
    out,
    x,
    bounds,
    sorter,
    shape,
    strides,
    n,
    per_row,
    length,
    steps,
    RIGHT: tl.constexpr,
    SEVERAL: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program finds for each element of its block how many of the bounds, `length` in a row, come before it."""
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(COMPUTE)
    first = linear // per_row * length if SEVERAL else linear * 0
    low = linear * 0
    high = low + length
    for _ in range(steps):
        middle = low + (high - low) // 2
        searching = mask & (low < high)
        place = first + middle
        if len(sorter) > 0:
            place = first + tl.load(sorter[0] + place, mask=searching, other=0).to(INDEX)
        bound = tl.load(bounds + place, mask=searching, other=0).to(COMPUTE)
        # As ATen asks, so that what is compared with nan comes before it.
        stops = bound > value if RIGHT else bound >= value
        low = tl.where(searching & (stops == 0), middle + 1, low)
        high = tl.where(searching & stops, middle, high)
    tl.store(out + linear, low.to(out.dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n", "length"])
def _check_sorter(flag, sorter, n, length, BLOCK: tl.constexpr):
    """A program makes the flag negative where a number in its block is no place in a row."""
    linear = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(sorter + linear, mask=linear < n, other=0)
    wrong = (place < 0) | (place >= length)
    tl.atomic_min(flag, -1, mask=tl.max(wrong.to(tl.int32), axis=0) > 0)


def check_sorter(sorter: torch.Tensor) -> torch.Tensor:
    """A number that is negative where a contiguous sorter has what is no place in a row."""
    flag = zeros((1,), torch.int64, sorter.device)
    if sorter.numel():
        _check_sorter[(-(-sorter.numel() // _BLOCK),)](flag, sorter, sorter.numel(), sorter.shape[-1], BLOCK=_BLOCK)
    return flag


def search(x: torch.Tensor, bounds: torch.Tensor, sorter: torch.Tensor | None, right: bool, out: torch.Tensor) -> None:
    """Find elements among contiguous bounds of the same dtype: of one row, or of as many as x has.

    `out` is contiguous.
    """
    n, length = x.numel(), bounds.shape[-1]
    if not n:
        return
    shape, strides, integer = in_row_major(x)
    block = _block(n)
    _search[(-(-n // block),)](
        *(out, x, bounds, () if sorter is None else (sorter,), shape, strides, n),
        *(x.shape[-1] if x.dim() else 1, length, length.bit_length()),
        RIGHT=right,
        SEVERAL=bounds.dim() > 1,
        COMPUTE=TRITON_DTYPES[opmath(x.dtype)],
        INDEX=tl.int64 if bounds.numel() >= INT32_LIMIT else integer,
        BLOCK=block,
        num_warps=4,
    )


@libentry()
@triton.jit(do_not_specialize=["n", "count"])
def _among_few(
    out,
    x,
    tests,
    shape,
    strides,
    n,
    count,
    step,
    INVERT: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program compares its elements with each of the tests."""
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(COMPUTE)
    found = tl.zeros((BLOCK,), tl.int1)
    for i in range(count):
        found = found | (value == tl.load(tests + i * step).to(COMPUTE))
    if INVERT:
        found = found == 0
    tl.store(out + linear, found, mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n", "count", "steps"])
def _among_sorted(
    out,
    x,
    tests,
    shape,
    strides,
    n,
    count,
    steps,
    INVERT: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program looks for its elements in what is sorted, nan last."""
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(COMPUTE)
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + count
    for _ in range(steps):
        middle = low + (high - low) // 2
        searching = mask & (low < high)
        before = tl.load(tests + middle, mask=searching, other=0).to(COMPUTE) < value
        low = tl.where(searching & before, middle + 1, low)
        high = tl.where(searching & (before == 0), middle, high)
    inside = mask & (low < count)
    found = inside & (tl.load(tests + low, mask=inside, other=0).to(COMPUTE) == value)
    if INVERT:
        found = found == 0
    tl.store(out + linear, found, mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _note(table, tests, shape, strides, n, least, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """A program sets the flags of its elements."""
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(tests + strided_offset(linear, shape, strides), mask=mask, other=0).to(tl.int32)
    tl.store(table + (value - least), tl.full((BLOCK,), 1, tl.uint8), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _look_up(out, x, table, shape, strides, n, least, INVERT: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """A program looks up the flags of its elements."""
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(tl.int32)
    found = tl.load(table + (value - least), mask=mask, other=0) != 0
    if INVERT:
        found = found == 0
    tl.store(out + linear, found, mask=mask)


def _among(kernel: Any, x: torch.Tensor, tests: torch.Tensor, last: int, invert: bool, dtype: Any, out: Any) -> None:
    """Launch a kernel that takes `last` after how many tests there are."""
    shape, strides, integer = in_row_major(x)
    block = _block(x.numel())
    kernel[(-(-x.numel() // block),)](
        *(out, x, tests, shape, strides, x.numel(), tests.numel(), last),
        INVERT=invert,
        COMPUTE=TRITON_DTYPES[dtype],
        INDEX=integer,
        BLOCK=block,
        num_warps=4,
    )


def among_few(x: torch.Tensor, tests: torch.Tensor, invert: bool, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Whether elements are among the tests, a vector, compared as `dtype`; `out` is contiguous."""
    step = tests.stride(0) if tests.dim() else 0
    _among(_among_few, x, tests, step, invert, dtype, out)


def among_sorted(x: torch.Tensor, tests: torch.Tensor, invert: bool, dtype: torch.dtype, out: torch.Tensor) -> None:
    """The same of contiguous tests in order."""
    _among(_among_sorted, x, tests, tests.numel().bit_length(), invert, dtype, out)


def among_all(x: torch.Tensor, tests: torch.Tensor, invert: bool, out: torch.Tensor) -> None:
    """The same of one of the dtypes of TABLES, by a table of all that there are."""
    least = TABLES[x.dtype]
    table = zeros((2 ** (8 * x.dtype.itemsize),), torch.uint8, x.device)
    for kernel, tensor, operands in ((_note, tests, (table, tests)), (_look_up, x, (out, x, table))):
        shape, strides, integer = in_row_major(tensor)
        block = _block(tensor.numel())
        kernel[(-(-tensor.numel() // block),)](
            *(*operands, shape, strides, tensor.numel(), least),
            **({"INVERT": invert} if kernel is _look_up else {}),
            INDEX=integer,
            BLOCK=block,
            num_warps=4,
        )
