"""Membership: whether each element of a tensor equals one of the test elements.

- `among_few` compares each element with each test.
- `among_all` has a table with a flag for every value of a dtype of 8 or 16 bits.
- `among_many` has a hash table of the tests, with open addressing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.indexing.indices import in_row_major
from tritonite.engine.iteration import power_of_2
from tritonite.engine.searching.search import block_size
from tritonite.engine.searching.table import searching_table
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import zeros
from tritonite.runtime.libentry import libentry

# The most tests that every element is compared with.
FEW = 64
# The dtypes that `among_all` serves, with the least value of each.
TABLES = {torch.uint8: 0, torch.int8: -(2**7), torch.int16: -(2**15)}


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
    """Compare the elements of a block with each of `count` tests."""
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
    """Return an integer that is equal for equal numbers: the bits, with -0.0 as 0.0."""
    if value.dtype.is_floating():
        value = tl.where(value == 0, 0.0, value)
        value = value.to(tl.int64 if value.dtype.primitive_bitwidth == 64 else tl.int32, bitcast=True)
    return value.to(tl.int64 if value.dtype.primitive_bitwidth == 64 else tl.int32)


@triton.jit
def _first_slot(bits, size):
    """Return the slot at which the search for an element begins, by MurmurHash3's finalizer (Appleby 2011)."""
    if bits.dtype.primitive_bitwidth == 64:
        mixed = (bits ^ (bits >> 32)) * 0x9E3779B1
        bits = (mixed ^ (mixed >> 29)).to(tl.int32)
    h = bits.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * tl.full((), 0x85EBCA6B, tl.uint32)
    h = (h ^ (h >> 13)) * tl.full((), 0xC2B2AE35, tl.uint32)
    return (h ^ (h >> 16)).to(tl.int64) & (size - 1)


@libentry()
@triton.jit(do_not_specialize=["n", "size"])
def _insert(
    table, x, shape, strides, n, size: tl.int64, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    """Insert the elements of a block into a hash table of `size` slots, a power of 2. Free slots are 0.

    Slot `size` is a flag: whether 0 was inserted. Then each lane has a slot, to which it swaps when it has no element.
    """
    wait_for_previous_launch()
    lane = tl.arange(0, BLOCK)
    linear = tl.program_id(0).to(INDEX) * BLOCK + lane
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(COMPUTE)
    bits = _bits(value)
    tl.store(table + size + lane * 0, bits * 0 + 1, mask=mask & (bits == 0))
    # nan equals nothing, so it is not inserted.
    pending = mask & (bits != 0) & (value == value)
    slot = _first_slot(bits, size)
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        found = tl.atomic_cas(
            table + tl.where(pending, slot, size + 1 + lane), bits * 0, tl.where(pending, bits, 0), sem="relaxed"
        )
        pending = pending & (found != 0) & (found != bits)
        slot = (slot + 1) & (size - 1)


@libentry()
@triton.jit(do_not_specialize=["n", "size"])
def _look_up_hashed(
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
    """Look up the elements of a block in a hash table that `_insert` has filled."""
    wait_for_previous_launch()
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(COMPUTE)
    bits = _bits(value)
    found = mask & (bits == 0) & (tl.load(table + size) != 0)
    pending = mask & (bits != 0) & (value == value)
    slot = _first_slot(bits, size)
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
def _set_flags(table, tests, shape, strides, n, least, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """Set the flags of the test elements of a block."""
    wait_for_previous_launch()
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(tests + strided_offset(linear, shape, strides), mask=mask, other=0).to(tl.int32)
    tl.store(table + (value - least), tl.full((BLOCK,), 1, tl.uint8), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n"])
def _look_up_flags(
    out, x, table, shape, strides, n, least, INVERT: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    """Look up the flags of the elements of a block."""
    wait_for_previous_launch()
    linear = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = linear < n
    value = tl.load(x + strided_offset(linear, shape, strides), mask=mask, other=0).to(tl.int32)
    found = tl.load(table + (value - least), mask=mask, other=0) != 0
    if INVERT:
        found = found == 0
    tl.store(out + linear, found, mask=mask)


def among_few(x: torch.Tensor, tests: torch.Tensor, invert: bool, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Write whether each element equals one of few tests, compared as `dtype`.

    The tests are a vector or a single number, and `out` is contiguous. `invert` negates the result.
    """
    shape, strides, integer = in_row_major(x)
    block = block_size(x.numel())
    _among_few[(-(-x.numel() // block),)](
        *(out, x, tests, shape, strides, x.numel(), tests.numel(), tests.stride(0) if tests.dim() else 0),
        INVERT=invert,
        COMPUTE=TRITON_DTYPES[dtype],
        INDEX=integer,
        BLOCK=block,
        num_warps=4,
    )


def among_many(x: torch.Tensor, tests: torch.Tensor, invert: bool, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Write whether each element equals one of many tests, as `among_few` does.

    At least half of the hash table stays free.
    """
    size = power_of_2(2 * tests.numel())
    bits = torch.int64 if dtype.itemsize == 8 else torch.int32
    # Each lane of a program has a slot of its own behind the hash table.
    table = zeros((size + 1 + searching_table().slots,), bits, x.device)
    for tensor in (tests, x):
        inserts = tensor is tests
        shape, strides, integer = in_row_major(tensor)
        block = block_size(tensor.numel())
        kernel = _insert if inserts else _look_up_hashed
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
    """Write whether each element equals one of the tests, as `among_few` does, for the dtypes of TABLES."""
    least = TABLES[x.dtype]
    table = zeros((2 ** (8 * x.dtype.itemsize),), torch.uint8, x.device)
    for kernel, tensor, operands in ((_set_flags, tests, (table, tests)), (_look_up_flags, x, (out, x, table))):
        shape, strides, integer = in_row_major(tensor)
        block = block_size(tensor.numel())
        kernel[(-(-tensor.numel() // block),)](
            *(*operands, shape, strides, tensor.numel(), least),
            **({"INVERT": invert} if kernel is _look_up_flags else {}),
            INDEX=integer,
            BLOCK=block,
            num_warps=4,
        )
