"""Top-k with large k from long rows: the elements up to the k-th key, which a radix select finds.

`write_few_smallest` stops the search as soon as few enough elements remain for one program to sort. `take_smallest`
finds the whole key, and does not sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting.block import BY_RANK
from tritonite.engine.sorting.digit_search import (
    FOUND_INDEX,
    FOUND_KEY,
    INDEX_SHIFT,
    KEY_SHIFT,
    RANK,
    STATE_SIZE,
    block_of_program,
    blocks_of_program,
    searched,
)
from tritonite.engine.sorting.keys import Keys, Rows, as_integers, unsigned_key
from tritonite.engine.sorting.lookback import TICKET_INT32, counts_before, publish_counts
from tritonite.engine.sorting.radix import holds, longest_held, sort_selected_rows
from tritonite.engine.sorting.table import sorting_table
from tritonite.engine.sorting.thread_tiles import index_in_block, load_block
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry

# Lanes of a program of one warp.
_LANES = 32
# The classes whose elements are counted: those before the k-th key, and those equal to it.
_CLASSES = tl.constexpr(2)


@libentry()
@triton.jit(do_not_specialize=["n", "blocks", "k"])
def _take_smallest(
    values,
    indices,
    state,
    scratch,
    x,
    layout,
    n,
    blocks,
    k,
    TICKET: tl.constexpr,
    CLASSES: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block's elements before the k-th key of its row, and after those the equal ones that are among the k.

    Elements keep their order within the two classes, whose counts in earlier blocks come by look-back.
    """
    wait_for_previous_launch()
    shape, strides, steps = layout.shape, layout.strides, layout.steps
    ticket = tl.atomic_add(scratch, 1, sem="relaxed")
    row, block = (ticket // blocks).to(INDEX), ticket % blocks
    index = (block * BLOCK + tl.arange(0, BLOCK)).to(INDEX)
    last, rank = tl.load(state + row * STATE_SIZE + FOUND_KEY), tl.load(state + row * STATE_SIZE + RANK)
    value = tl.load(x + strided_offset(row, shape, strides[0]) + index * steps[0], mask=index < n, other=0)
    key = unsigned_key(value, KEYS)
    last = last.to(key.dtype)
    smaller, equal = (key < last) & (index < n), (key == last) & (index < n)
    n_smaller, n_equal = tl.sum(smaller.to(tl.int32), axis=0), tl.sum(equal.to(tl.int32), axis=0)
    classes = tl.arange(0, CLASSES)
    own = tl.where(classes == 0, n_smaller, n_equal)
    publish_counts(scratch + TICKET + row * blocks * CLASSES, block, own)
    before = counts_before(scratch + TICKET + row * blocks * CLASSES, block, own)
    first = tl.sum(tl.where(classes == 0, before, 0), axis=0) + tl.cumsum(smaller.to(tl.int32), axis=0) - 1
    behind = tl.sum(tl.where(classes == 1, before, 0), axis=0) + tl.cumsum(equal.to(tl.int32), axis=0) - 1
    target = tl.where(smaller, first.to(tl.int64), behind.to(tl.int64) + (k - 1 - rank)).to(INDEX)
    mask = (smaller | equal) & (target < k)
    tl.store(values + strided_offset(row, shape, strides[1]) + target * steps[1], value, mask=mask)
    pointers = indices + strided_offset(row, shape, strides[2]) + target * steps[2]
    tl.store(pointers, index.to(indices.dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["programs", "counted", "slots"])
def _select_few(
    selected,
    selected_indices,
    counts,
    state,
    x,
    shape,
    strides,
    step,
    n,
    programs,
    counted,
    slots,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
):
    """Select the elements of `counted` chunks that are before or match the found bits, by a program of one warp.

    The elements of a chunk are written in order to contiguous slots of the row; chunks come in any order.
    """
    wait_for_previous_launch()
    row = (tl.program_id(0) // programs).to(INDEX)
    begin = (tl.program_id(0) % programs).to(INDEX) * (LANES * EACH * counted)
    source = x + strided_offset(row, shape, strides)
    target = row.to(tl.int64) * slots
    known = state + row * STATE_SIZE
    last = ((tl.load(known + FOUND_KEY) + 1) << tl.load(known + KEY_SHIFT)) - 1
    last_index = (((tl.load(known + FOUND_INDEX) + 1) << tl.load(known + INDEX_SHIFT)) - 1).to(tl.int32)
    for _ in range(counted):
        value = load_block(source, begin, step, n, LANES, EACH)
        chosen = ()
        before = ()
        counts_of = ()
        for i in tl.static_range(EACH):
            key, index = unsigned_key(value[i], KEYS), begin + index_in_block(i, LANES, EACH)
            smaller, equal = key < last.to(key.dtype), (key == last.to(key.dtype)) & (index <= last_index)
            chosen = chosen + ((index < n) & (smaller | equal),)  # type: ignore[assignment]
        # Four sums share an int32, 8 bits each, in which 32 lanes cannot overflow.
        some = 0
        for i in tl.static_range(0, EACH, 4):
            four = tl.zeros((LANES,), tl.int32)
            for m in tl.static_range(4):
                four += chosen[i + m].to(tl.int32) << 8 * m
            before = before + (tl.cumsum(four, axis=0),)  # type: ignore[assignment]
            counts_of = counts_of + (tl.sum(four, axis=0),)  # type: ignore[assignment]
            some |= counts_of[i // 4]
        if some != 0:
            n_chosen = 0
            for i in tl.static_range(EACH):
                n_chosen += (counts_of[i // 4] >> 8 * (i % 4)) & 255
            slot = tl.atomic_add(counts + row, n_chosen, sem="relaxed") - 1
            for i in tl.static_range(EACH):
                at = slot + ((before[i // 4] >> 8 * (i % 4)) & 255)
                slot += (counts_of[i // 4] >> 8 * (i % 4)) & 255
                tl.store(selected + target + at, value[i].to(selected.dtype.element_ty), mask=chosen[i])
                index = (begin + index_in_block(i, LANES, EACH)).to(tl.int32)
                tl.store(selected_indices + target + at, index, mask=chosen[i])
        begin += LANES * EACH


def take_smallest(x: torch.Tensor, dim: int, k: int, keys: Keys, values: torch.Tensor, indices: torch.Tensor) -> None:
    """Write the k elements of each row with the smallest keys, and their indices, not sorted by key.

    Of elements with the k-th key, those with the lowest indices are written.
    """
    n, rows = x.shape[dim], Rows((x, values, indices), dim)
    state = searched(x, rows, n, k - 1, BY_RANK, keys)
    blocks = -(-n // sorting_table().select.block)
    scratch = zeros((TICKET_INT32 + rows.n_rows * blocks * _CLASSES.value,), torch.int32, x.device)
    _take_smallest[(rows.n_rows * blocks,)](
        *(as_integers(values), indices, state, scratch, as_integers(x)),
        *(rows.layout, n, blocks, k),
        TICKET=TICKET_INT32,
        CLASSES=_CLASSES.value,
        KEYS=keys,
        INDEX=rows.index,
        **block_of_program(),
    )


def sorts_few(k: int, keys: Keys) -> bool:
    """Return whether one program can sort the k smallest elements of a row and the others that are selected."""
    return holds(_few(k, keys), keys)


def _few(k: int, keys: Keys) -> int:
    """Return the most elements to select for the k smallest: with 2 k, one digit of the keys is mostly enough."""
    return max(k, min(2 * power_of_2(k), longest_held(keys)))


def write_few_smallest(
    x: torch.Tensor, dim: int, k: int, keys: Keys, values: torch.Tensor, indices: torch.Tensor
) -> None:
    """Write the k smallest elements of each row in order, and their indices, if `sorts_few`.

    Of elements with equal keys, those with lower indices come first.
    """
    n, rows = x.shape[dim], Rows((x, values, indices), dim)
    slots = _few(k, keys)
    state = searched(x, rows, n, k - 1, BY_RANK, keys, slots)
    # Rows are numbered in the collapsed order of x, in which programs take them.
    selected = empty((rows.n_rows, slots), x.dtype, x.device)
    selected_indices = empty((rows.n_rows, slots), torch.int32, x.device)
    counts = zeros((rows.n_rows,), torch.int32, x.device)
    chosen = sorting_table().select
    chunks = -(-n // (_LANES * chosen.few_each))
    counted = blocks_of_program(rows.n_rows * chunks, chosen.few_programs, x.device)
    programs = -(-chunks // counted)
    _select_few[(rows.n_rows * programs,)](
        *(as_integers(selected), selected_indices, counts, state),
        *(as_integers(x), rows.shape, rows.strides[0], rows.steps[0], n, programs, counted, slots),
        KEYS=keys,
        INDEX=rows.index,
        LANES=_LANES,
        EACH=chosen.few_each,
        num_warps=1,
    )
    ordered_bits = (_LANES * chosen.few_each - 1).bit_length()
    sort_selected_rows(
        *(as_integers(selected), selected_indices, counts, rows, values, indices),
        *(keys, k, ordered_bits, (n - 1).bit_length()),
    )
