"""Selection of an element by rank, from rows of any length.

A row of at most 128 elements is sorted (`block.py`). A longer row that one program holds is bisected by key. For still
longer rows a radix select finds the key (`digit_search.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting import topk
from tritonite.engine.sorting.block import BY_RANK, select_rows, wanted_rank
from tritonite.engine.sorting.digit_search import FOUND_KEY, STATE_SIZE, block_of_program, searched
from tritonite.engine.sorting.keys import Keys, Rows, as_integers, shifted_to_signed, unsigned_key
from tritonite.engine.sorting.table import sorting_table
from tritonite.engine.sorting.topk import key_of_rank, keys_of
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import add_shared, alloc_shared, load_shared, store_shared
from tritonite.runtime.contract import zeros
from tritonite.runtime.libentry import libentry


@triton.jit
def _key_by_digits(key, mask, rank, KEYS: tl.constexpr):
    """Return what `key_of_rank` returns, with one round for each byte of the key instead of one for each bit.

    Each round counts a digit of 8 bits in shared memory, the highest digit first.
    """
    ROWS: tl.constexpr = key.shape[0]
    BINS: tl.constexpr = ROWS * 256
    row = tl.arange(0, ROWS)
    digits = tl.arange(0, 256)
    bins = tl.arange(0, BINS)
    key = _shifted_to_unsigned(key, KEYS)
    found = tl.zeros((ROWS,), tl.int64)
    left = rank
    # The last counter is for elements that are not counted.
    own = alloc_shared(BINS + 1, tl.int32)
    for i in tl.static_range(KEYS.bits // 8):
        tl.debug_barrier()
        store_shared(own, bins, tl.zeros_like(bins))
        tl.debug_barrier()
        counted = mask
        if i > 0:
            counted = mask & ((key >> (KEYS.bits - 8 * i)) == found.to(key.dtype)[:, None])
        bin = row[:, None] * 256 + ((key >> (KEYS.bits - 8 - 8 * i)) & 255).to(tl.int32)
        add_shared(own, tl.where(counted, bin, BINS), tl.zeros_like(bin) + 1)
        tl.debug_barrier()
        count = load_shared(own, bins, tl.zeros_like(bins))
        # One row is summed in one dimension, since Triton gives few threads to its sums in two.
        if ROWS == 1:
            digit = tl.sum((tl.cumsum(count, axis=0) <= left).to(tl.int32), axis=0)
            left -= tl.sum(tl.where(digits < digit, count, 0), axis=0)
        else:
            count = tl.reshape(count, (ROWS, 256))
            digit = tl.sum((tl.cumsum(count, axis=1) <= left[:, None]).to(tl.int32), axis=1)
            left -= tl.sum(tl.where(digits[None, :] < digit[:, None], count, 0), axis=1)
        found = (found << 8) | digit
    return shifted_to_signed(found, KEYS)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n", "rank"])
def _select_held(
    values,
    indices,
    x,
    shape,
    strides,
    step,
    n_rows,
    n,
    rank,
    MODE: tl.constexpr,
    KEYS: tl.constexpr,
    SHARED: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the element of a rank of each row that the program holds, and the first index of that element."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(INDEX)
    rows = row < n_rows
    mask = rows[:, None] & (column < n)[None, :]
    source = strided_offset(row, shape, strides[0])
    key = keys_of(x + source[:, None] + (column * step)[None, :], mask, KEYS)
    nans = tl.zeros((ROWS,), tl.int32)
    if MODE != 0 and KEYS.infinity > 0:
        nans = tl.sum((mask & (key == 2 ** (KEYS.bits - 1) - 1)).to(tl.int32), axis=1)
    rank = wanted_rank(n, nans, rank, MODE)
    if SHARED:
        found = _key_by_digits(key, mask, rank, KEYS).to(key.dtype)
    else:
        found = key_of_rank(key, mask, rank)
    index = tl.min(tl.where(mask & (key == found[:, None]), column[None, :], n), axis=1)
    value = tl.load(x + source + index.to(INDEX) * step, mask=rows, other=0)
    tl.store(values + strided_offset(row, shape, strides[1]), value, mask=rows)
    if len(indices) > 0:
        tl.store(indices[0] + strided_offset(row, shape, strides[2]), index.to(tl.int64), mask=rows)


@triton.jit
def _shifted_to_unsigned(key, KEYS: tl.constexpr):
    """Return a signed key shifted to start at 0, as an unsigned integer."""
    if KEYS.bits == 64:
        result = (key ^ (-(2**63))).to(tl.uint64, bitcast=True)
    elif KEYS.bits == 32:
        result = (key ^ (-(2**31))).to(tl.uint32, bitcast=True)
    else:
        result = (key + 2 ** (KEYS.bits - 1)).to(tl.uint32, bitcast=True)
    return result


@libentry()
@triton.jit(do_not_specialize=["n", "blocks"])
def _find_first(
    found,
    state,
    x,
    shape,
    strides,
    step,
    n,
    blocks,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the first index of the row's key in a block; the maximum over blocks of n minus that index is written."""
    wait_for_previous_launch()
    row = (tl.program_id(0) // blocks).to(INDEX)
    index = (tl.program_id(0) % blocks).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(state + row * STATE_SIZE + FOUND_KEY)
    value = tl.load(x + strided_offset(row, shape, strides) + index * step, mask=index < n, other=0)
    key = unsigned_key(value, KEYS)
    same = (key == wanted.to(key.dtype)) & (index < n)
    first = tl.max(tl.where(same, n - index, 0), axis=0)
    if first > 0:
        tl.atomic_max(found + row, first.to(tl.int32), sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n"])
def _write_found(values, indices, found, x, shape, strides, step, n_rows, n, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """Write the elements, and their indices, that `_find_first` has found in BLOCK rows."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = row < n_rows
    index = (n - tl.load(found + row, mask=mask, other=1)).to(INDEX)
    value = tl.load(x + strided_offset(row, shape, strides[0]) + index * step, mask=mask, other=0)
    tl.store(values + strided_offset(row, shape, strides[1]), value, mask=mask)
    if len(indices) > 0:
        tl.store(indices[0] + strided_offset(row, shape, strides[2]), index.to(tl.int64), mask=mask)


def select(x: torch.Tensor, dim: int, rank: int, mode: int, values: torch.Tensor, indices: torch.Tensor | None) -> None:
    """Write one element, and its index, of each row along `dim`. Results have size 1 along `dim`."""
    keys, n = Keys.of(x.dtype), x.shape[dim]
    if n <= sorting_table().topk.sorted_at_once:
        select_rows(x, dim, rank, mode, values, indices)
    elif topk.held(n, keys):
        _select_of_held_rows(x, dim, rank, mode, keys, values, indices)
    elif mode == BY_RANK and topk.serves(n, rank + 1, keys):
        topk.write_smallest(x, dim, rank + 1, keys, values, indices, rank)
    else:
        _select_of_long_rows(x, dim, rank, mode, keys, values, indices)


def _select_of_held_rows(
    x: torch.Tensor, dim: int, rank: int, mode: int, keys: Keys, values: torch.Tensor, indices: torch.Tensor | None
) -> None:
    rows = Rows((x, values, values if indices is None else indices), dim)
    columns = power_of_2(x.shape[dim])
    each = min(max(1, 1024 // columns), power_of_2(rows.n_rows))
    shared = devices.current.ptx and keys.bits == 64
    _select_held[(-(-rows.n_rows // each),)](
        as_integers(values),
        () if indices is None else (indices,),
        *(as_integers(x), rows.shape, rows.strides, rows.steps[0], rows.n_rows, x.shape[dim], rank),
        MODE=mode,
        KEYS=keys,
        # The bisection of 32-bit keys has half the rounds, of fewer instructions each, and costs less than counting.
        SHARED=shared,
        INDEX=rows.index,
        ROWS=each,
        COLUMNS=columns,
        # More threads than digits would only repeat sums.
        num_warps=min(8 if shared else 16, topk.warps_for(each * columns, keys)),
    )


def _select_of_long_rows(
    x: torch.Tensor, dim: int, rank: int, mode: int, keys: Keys, values: torch.Tensor, indices: torch.Tensor | None
) -> None:
    n = x.shape[dim]
    rows = Rows((x, values, values if indices is None else indices), dim)
    state = searched(x, rows, n, rank, mode, keys)
    n_rows, blocks = rows.n_rows, -(-n // sorting_table().select.block)
    found = zeros((n_rows,), torch.int32, x.device)
    space = (as_integers(x), rows.shape, rows.strides[0], rows.steps[0], n)
    _find_first[(n_rows * blocks,)](
        *(found, state, *space, blocks),
        KEYS=keys,
        INDEX=rows.index,
        **block_of_program(),
    )
    _write_found[(-(-n_rows // 128),)](
        as_integers(values),
        () if indices is None else (indices,),
        *(found, as_integers(x), rows.shape, rows.strides, rows.steps[0], n_rows, n),
        INDEX=rows.index,
        BLOCK=128,
    )
