"""Binary search: the number of sorted bounds that come before each element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.indexing.indices import in_row_major
from tritonite.engine.iteration import INT32_LIMIT
from tritonite.engine.searching.table import searching_table
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import alloc_shared, load_shared, store_shared
from tritonite.runtime.contract import zeros
from tritonite.runtime.libentry import libentry


def block_size(n: int) -> int:
    """Return the elements of a program: fewer if n is small, so that programs fill the device."""
    table = searching_table()
    return table.block if n >= table.block * devices.current.programs else table.small_block


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
    """Count for each element of a block the bounds before it, with a binary search.

    If there are SEVERAL rows of `length` bounds, an element searches in the row that its index divided by `per_row`
    gives. RIGHT also counts bounds that equal the element. With a `sorter`, bounds are read in its order.
    """
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
        at = first + middle
        if len(sorter) > 0:
            at = first + tl.load(sorter[0] + at, mask=searching, other=0).to(INDEX)
        bound = tl.load(bounds + at, mask=searching, other=0).to(COMPUTE)
        # ATen's comparison: a nan bound never stops the search, and a nan element is stopped by no bound.
        stops = bound > value if RIGHT else bound >= value
        low = tl.where(searching & (stops == 0), middle + 1, low)
        high = tl.where(searching & stops, middle, high)
    tl.store(out + linear, low.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _bound_of_node(node, length, LEVELS: tl.constexpr):
    """Return the index of the bound that a node of the search tree compares with.

    Node 1 is the root. Node i has the children 2 i (to the left) and 2 i + 1 (to the right).
    """
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
    """Count for each element of `counted` blocks the bounds before it, in one row of bounds.

    The first LEVELS rounds read bounds from shared memory, in the order of the search tree; later rounds read memory.
    """
    wait_for_previous_launch()
    KEPT: tl.constexpr = COMPUTE if COMPUTE.primitive_bitwidth >= 32 else tl.int32
    lane = tl.arange(0, BLOCK)
    own = alloc_shared(2**LEVELS, KEPT)
    for begin in range(0, 2**LEVELS, BLOCK):
        node = tl.minimum(begin + lane, 2**LEVELS - 1)
        at = _bound_of_node(tl.maximum(node, 1), length.to(tl.int32), LEVELS)
        store_shared(own, node, tl.load(bounds + at).to(COMPUTE).to(KEPT))
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
    """Set the flag to -1 if an index in the block is out of range for a row of `length` bounds."""
    wait_for_previous_launch()
    linear = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(sorter + linear, mask=linear < n, other=0)
    wrong = (index < 0) | (index >= length)
    tl.atomic_min(flag, -1, mask=tl.max(wrong.to(tl.int32), axis=0) > 0)


def check_sorter(sorter: torch.Tensor) -> torch.Tensor:
    """Return a flag on the device: -1 if a contiguous sorter has an index that is out of range, 0 if not."""
    flag = zeros((1,), torch.int64, sorter.device)
    if sorter.numel():
        block = searching_table().block
        _check_sorter[(-(-sorter.numel() // block),)](flag, sorter, sorter.numel(), sorter.shape[-1], BLOCK=block)
    return flag


def search(x: torch.Tensor, bounds: torch.Tensor, sorter: torch.Tensor | None, right: bool, out: torch.Tensor) -> None:
    """Write for each element of x the number of bounds before it, to a contiguous `out`.

    Bounds are contiguous and of the dtype of x: one row, or a row for each row of x.
    """
    n, length = x.numel(), bounds.shape[-1]
    if not n:
        return
    shape, strides, integer = in_row_major(x)
    compute = TRITON_DTYPES[opmath(x.dtype)]
    table = searching_table()
    programs = table.shared_programs * devices.multiprocessors(x.device)
    # Rounds in shared memory: no more than there is room for, than the shortest search has, and than the elements of a
    # program repay.
    most = table.shared_levels[8 if x.dtype.itemsize == 8 else 4]
    levels = min(most, (length + 1).bit_length() - 1, (n // programs).bit_length() - 1)
    alone = sorter is None and bounds.dim() == 1 and 0 < length < 2**30
    if devices.current.ptx and alone and n >= programs * table.shared_queries:
        counted = -(-n // (programs * table.shared_queries))
        block = counted * table.shared_queries
        _search_from_shared[(-(-n // block),)](
            *(out, x, bounds, shape, strides, n, length, length.bit_length(), counted),
            RIGHT=right,
            LEVELS=levels,
            COMPUTE=compute,
            INDEX=integer if n + block < INT32_LIMIT else tl.int64,
            BLOCK=table.shared_queries,
            num_warps=16,
        )
        return
    block = block_size(n)
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
