"""Places in what is sorted, by binary search, and whether elements are among others.

Elements that are compared with few others are compared with each. What they may be equal to of many is in a table: with
a flag for all numbers of a dtype, or a hash table with open addressing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.places import in_row_major
from tritonite.engine.iteration import INT32_LIMIT, power_of_2
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import alloc_shared, load_shared, store_shared
from tritonite.runtime.contract import zeros
from tritonite.runtime.libentry import libentry

_BLOCK = 1024
# Programs of each multiprocessor that search from shared memory, what they search for at a time, and the rounds that
# there is room for by the size of an element.
_PROGRAMS, _QUERIES = 2, 2048
_LEVELS = {4: 13, 8: 12}
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
    wait_for_previous_launch()
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


@triton.jit
def _walked(node, length, LEVELS: tl.constexpr):
    """The place that a binary search looks at when it has come to a node: 1 is the first, 2 i and 2 i + 1 follow i."""
    low = node * 0
    high = low + length
    depth = low
    for level in tl.static_range(1, LEVELS):
        depth += (node >= 2**level).to(tl.int32)
    for level in tl.static_range(LEVELS - 1):
        middle = low + (high - low) // 2
        walks = level < depth
        right = ((node >> tl.maximum(depth - 1 - level, 0)) & 1) != 0
        low = tl.where(walks & right, middle + 1, low)
        high = tl.where(walks & (right == 0), middle, high)
    return low + (high - low) // 2


@libentry()
@triton.jit(do_not_specialize=["n", "length", "steps", "counted"])
def _search_from_shared(
    out,
    x,
    bounds,
    shape,
    strides,
    n,
    length,
    steps,
    counted,
    RIGHT: tl.constexpr,
    LEVELS: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same of one row of bounds, of which a program has in shared memory what the first rounds look at."""
    wait_for_previous_launch()
    KEPT: tl.constexpr = COMPUTE if COMPUTE.primitive_bitwidth >= 32 else tl.int32
    lane = tl.arange(0, BLOCK)
    own = alloc_shared(2**LEVELS, KEPT)
    for begin in range(0, 2**LEVELS, BLOCK):
        node = tl.minimum(begin + lane, 2**LEVELS - 1)
        place = _walked(tl.maximum(node, 1), length.to(tl.int32), LEVELS)
        store_shared(own, node, tl.load(bounds + place).to(COMPUTE).to(KEPT))
    tl.debug_barrier()
    for j in range(counted):
        linear = (tl.program_id(0) * counted + j).to(INDEX) * BLOCK + lane
        mask = linear < n
        value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(COMPUTE)
        low = tl.zeros((BLOCK,), tl.int32)
        high = low + length.to(tl.int32)
        node = low + 1
        for _ in tl.static_range(LEVELS):
            middle = (low + high) >> 1
            bound = load_shared(own, node, tl.zeros((BLOCK,), KEPT)).to(COMPUTE)
            stops = bound > value if RIGHT else bound >= value
            low = tl.where(stops, low, middle + 1)
            high = tl.where(stops, middle, high)
            node = 2 * node + (stops == 0).to(tl.int32)
        for _ in range(LEVELS, steps):
            middle = (low + high) >> 1
            searching = mask & (low < high)
            bound = tl.load(bounds + middle, mask=searching, other=0).to(COMPUTE)
            stops = bound > value if RIGHT else bound >= value
            low = tl.where(searching & (stops == 0), middle + 1, low)
            high = tl.where(searching & stops, middle, high)
        tl.store(out + linear, low.to(out.dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n", "length"])
def _check_sorter(flag, sorter, n, length, BLOCK: tl.constexpr):
    """A program makes the flag negative where a number in its block is no place in a row."""
    wait_for_previous_launch()
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
    compute = TRITON_DTYPES[opmath(x.dtype)]
    programs = _PROGRAMS * devices.multiprocessors(x.device)
    # As many rounds as surely have something to look at, as there is room for, and as queries pay for.
    most = _LEVELS[8 if x.dtype.itemsize == 8 else 4]
    levels = min(most, (length + 1).bit_length() - 1, (n // programs).bit_length() - 1)
    alone = sorter is None and bounds.dim() == 1 and 0 < length < 2**30
    if devices.current.ptx and alone and n >= programs * _QUERIES:
        counted = -(-n // (programs * _QUERIES))
        _search_from_shared[(-(-n // (counted * _QUERIES)),)](
            *(out, x, bounds, shape, strides, n, length, length.bit_length(), counted),
            RIGHT=right,
            LEVELS=levels,
            COMPUTE=compute,
            INDEX=integer if n + counted * _QUERIES < INT32_LIMIT else tl.int64,
            BLOCK=_QUERIES,
            num_warps=16,
        )
        return
    block = _block(n)
    _search[(-(-n // block),)](
        *(out, x, bounds, () if sorter is None else (sorter,), shape, strides, n),
        *(x.shape[-1] if x.dim() else 1, length, length.bit_length()),
        RIGHT=right,
        SEVERAL=bounds.dim() > 1,
        COMPUTE=compute,
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
    wait_for_previous_launch()
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(COMPUTE)
    found = tl.zeros((BLOCK,), tl.int1)
    for i in range(count):
        found = found | (value == tl.load(tests + i * step).to(COMPUTE))
    if INVERT:
        found = found == 0
    tl.store(out + linear, found, mask=mask)


@triton.jit
def _bits(value):
    """The bits by which numbers are told apart: both zeros have the same."""
    if value.dtype.is_floating():
        value = tl.where(value == 0, 0.0, value)
        value = value.to(tl.int64 if value.dtype.primitive_bitwidth == 64 else tl.int32, bitcast=True)
    return value.to(tl.int64 if value.dtype.primitive_bitwidth == 64 else tl.int32)


@triton.jit
def _slot(bits, size):
    """Where the search for an element begins, by the end of MurmurHash3 (Appleby 2011): all its bits matter."""
    if bits.dtype.primitive_bitwidth == 64:
        folded = (bits ^ (bits >> 32)) * 0x9E3779B1
        bits = (folded ^ (folded >> 29)).to(tl.int32)
    h = bits.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * tl.full((), 0x85EBCA6B, tl.uint32)
    h = (h ^ (h >> 13)) * tl.full((), 0xC2B2AE35, tl.uint32)
    return (h ^ (h >> 16)).to(tl.int64) & (size - 1)


@libentry()
@triton.jit(do_not_specialize=["n", "size"])
def _insert(
    table, x, shape, strides, n, size: tl.int64, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    """A program puts its elements into a table of so many slots, a power of 2, the free ones of which are 0.

    Behind the slots are one that tells whether there is a 0, and one for each lane that has nothing to put.
    """
    wait_for_previous_launch()
    lane = tl.arange(0, BLOCK)
    linear = tl.program_id(0).to(INDEX) * BLOCK + lane
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(COMPUTE)
    bits = _bits(value)
    tl.store(table + size + lane * 0, bits * 0 + 1, mask=mask & (bits == 0))
    # nan is equal to nothing.
    pending = mask & (bits != 0) & (value == value)
    slot = _slot(bits, size)
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        found = tl.atomic_cas(
            table + tl.where(pending, slot, size + 1 + lane), bits * 0, tl.where(pending, bits, 0), sem="relaxed"
        )
        pending = pending & (found != 0) & (found != bits)
        slot = (slot + 1) & (size - 1)


@libentry()
@triton.jit(do_not_specialize=["n", "size"])
def _among_inserted(
    out,
    x,
    table,
    shape,
    strides,
    n,
    size: tl.int64,
    INVERT: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program looks for its elements in such a table."""
    wait_for_previous_launch()
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(COMPUTE)
    bits = _bits(value)
    found = mask & (bits == 0) & (tl.load(table + size) != 0)
    pending = mask & (bits != 0) & (value == value)
    slot = _slot(bits, size)
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        there = tl.load(table + slot, mask=pending, other=0)
        found = found | (pending & (there == bits))
        pending = pending & (there != bits) & (there != 0)
        slot = (slot + 1) & (size - 1)
    if INVERT:
        found = found == 0
    tl.store(out + linear, found, mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _note(table, tests, shape, strides, n, least, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """A program sets the flags of its elements."""
    wait_for_previous_launch()
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(tests + strided_offset(linear, shape, strides), mask=mask, other=0).to(tl.int32)
    tl.store(table + (value - least), tl.full((BLOCK,), 1, tl.uint8), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _look_up(out, x, table, shape, strides, n, least, INVERT: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """A program looks up the flags of its elements."""
    wait_for_previous_launch()
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(tl.int32)
    found = tl.load(table + (value - least), mask=mask, other=0) != 0
    if INVERT:
        found = found == 0
    tl.store(out + linear, found, mask=mask)


def among_few(x: torch.Tensor, tests: torch.Tensor, invert: bool, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Whether elements are among the tests, a vector, compared as `dtype`; `out` is contiguous."""
    shape, strides, integer = in_row_major(x)
    block = _block(x.numel())
    _among_few[(-(-x.numel() // block),)](
        *(out, x, tests, shape, strides, x.numel(), tests.numel(), tests.stride(0) if tests.dim() else 0),
        INVERT=invert,
        COMPUTE=TRITON_DTYPES[dtype],
        INDEX=integer,
        BLOCK=block,
        num_warps=4,
    )


def among_many(x: torch.Tensor, tests: torch.Tensor, invert: bool, dtype: torch.dtype, out: torch.Tensor) -> None:
    """The same of many tests, by a table of them, half of which at least stays free."""
    size = power_of_2(2 * tests.numel())
    counter = torch.int64 if dtype.itemsize == 8 else torch.int32
    table = zeros((size + 1 + _BLOCK,), counter, x.device)
    for tensor in (tests, x):
        inserts = tensor is tests
        shape, strides, integer = in_row_major(tensor)
        block = _block(tensor.numel())
        kernel = _insert if inserts else _among_inserted
        kernel[(-(-tensor.numel() // block),)](
            *((table, tests) if inserts else (out, x, table)),
            *(shape, strides, tensor.numel(), size),
            **({} if inserts else {"INVERT": invert}),
            COMPUTE=TRITON_DTYPES[dtype],
            INDEX=integer,
            BLOCK=block,
            num_warps=4,
        )


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
