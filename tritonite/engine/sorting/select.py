"""Selection of elements by rank, and top-k with large k, from rows of any length.

`select` returns the element of a rank. A row of at most 128 elements is sorted (`block.py`). A longer row that one
program holds is bisected by key. For still longer rows a radix select finds the key digit by digit, the highest digit
first: each launch counts the next digit of the elements whose higher digits match, and the last program of a row picks
the digit.

`write_few_smallest` and `take_smallest` find the k-th key of long rows in the same way, and then select the elements up
to it. `write_few_smallest` stops as soon as few enough elements remain for one program to sort.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting import topk
from tritonite.engine.sorting.block import BY_RANK, select_rows, wanted_rank
from tritonite.engine.sorting.keys import Keys, Rows, as_integers, shifted_to_signed, signed_key, unsigned_key
from tritonite.engine.sorting.lookback import TICKET_INT32, check_length, counts_before, publish_counts
from tritonite.engine.sorting.radix import holds, longest_held, sort_selected_rows
from tritonite.engine.sorting.table import sorting_table
from tritonite.engine.sorting.thread_tiles import index_in_block, load_block
from tritonite.engine.sorting.topk import key_of_rank, keys_of
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import add_shared, alloc_shared, load_shared, store_shared
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry

# Lanes of a program of one warp.
_LANES = 32
# The classes whose elements are counted: those before the k-th key, and those equal to it.
_CLASSES = tl.constexpr(2)
# The state of a row's search has _STATE int64, whose offsets follow: the high bits of the key that are found, the
# number of low bits that are not; the same of an index among elements of that key; the rank among the elements that
# match the found bits, and the number of those.
_STATE = tl.constexpr(6)
_KEY = tl.constexpr(0)
_KEY_SHIFT = tl.constexpr(1)
_INDEX = tl.constexpr(2)
_INDEX_SHIFT = tl.constexpr(3)
_RANK = tl.constexpr(4)
_MATCHING = tl.constexpr(5)
# The index shift when no bit of an index has been searched for.
_ALL_INDICES = tl.constexpr(31)


def _block_of_program() -> dict[str, int]:
    """Return the elements of a block, and the warps of a program."""
    return {"BLOCK": sorting_table().select.block, "num_warps": _warps()}


def _warps() -> int:
    """Return the number of warps of a program."""
    chosen = sorting_table().select
    return min(chosen.warps, max(1, chosen.block // 32))


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


@libentry()
@triton.jit(do_not_specialize=["n", "blocks"])
def _count_nans(nans, x, shape, strides, step, n, blocks, KEYS: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """Count the nan in a block of a row."""
    wait_for_previous_launch()
    row = (tl.program_id(0) // blocks).to(INDEX)
    index = (tl.program_id(0) % blocks).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + strided_offset(row, shape, strides) + index * step, mask=index < n, other=0)
    nan = signed_key(value, KEYS) == 2 ** (KEYS.bits - 1) - 1
    tl.atomic_add(nans + row, tl.sum(nan.to(tl.int32), axis=0), sem="relaxed")


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


@dataclass(frozen=True)
class DigitMeta:
    """Compile-time facts of a launch that counts a digit.

    The digit has `bits` bits from `shift` on, of the key or, with `of_index`, of the index among elements of the key
    that is found. `first` says that no bit is found yet. `shared` counts in shared memory. `mode` says how nan count in
    the rank. `index` is the type of offsets, `block` the elements of a block.
    """

    first: bool
    of_index: bool
    bits: int
    shift: int
    mode: int
    shared: bool
    keys: Keys
    index: Any
    block: int


@libentry()
@triton.jit(do_not_specialize=["programs", "counted", "rank", "enough"])
def _count_digit(
    counts,
    done,
    state,
    nans,
    x,
    shape,
    strides,
    step,
    n,
    programs,
    counted,
    rank,
    enough,
    META: tl.constexpr,
):
    """Count a digit in `counted` blocks of a row, of the elements that match the bits found so far.

    The last of the row's `programs` picks the digit, writes the row's state and zeroes the counts for the next launch.
    Nothing is done if at most `enough` elements are before or match the bits found so far.
    """
    wait_for_previous_launch()
    BITS: tl.constexpr = META.bits
    SHIFT: tl.constexpr = META.shift
    BLOCK: tl.constexpr = META.block
    DIGITS: tl.constexpr = 2**BITS
    row = (tl.program_id(0) // programs).to(META.index)
    program = tl.program_id(0) % programs
    digits = tl.arange(0, DIGITS)
    known = state + row * _STATE
    if META.first:
        found = tl.zeros((), tl.int64)
        left = wanted_rank(n, tl.load(nans + row), rank, META.mode).to(tl.int64)
        matching = found + n
    else:
        found, left, matching = tl.load(known + _KEY), tl.load(known + _RANK), tl.load(known + _MATCHING)
    if rank - left + matching > enough:
        above = tl.load(known + _INDEX) if META.of_index else found
        source = x + strided_offset(row, shape, strides)
        if META.shared:
            # The last counter is for elements that are not counted.
            own = alloc_shared(DIGITS + 1, tl.int32)
            store_shared(own, digits, tl.zeros((DIGITS,), tl.int32))
            tl.debug_barrier()
        else:
            here = tl.zeros((DIGITS,), tl.int32)
        for j in range(counted):
            index = program.to(META.index) * (BLOCK * counted) + j * BLOCK + tl.arange(0, BLOCK)
            mask = index < n
            key = unsigned_key(tl.load(source + index * step, mask=mask, other=0), META.keys)
            if META.of_index:
                mask = mask & (key == found.to(key.dtype))
                key = index
            if not META.first:
                mask = mask & ((key >> (SHIFT + BITS)) == above.to(key.dtype))
            digit = ((key >> SHIFT) & (DIGITS - 1)).to(tl.int32)
            if META.shared:
                add_shared(own, tl.where(mask, digit, DIGITS), tl.full((BLOCK,), 1, tl.int32))
            else:
                here += tl.histogram(digit, DIGITS, mask=mask)
        if META.shared:
            tl.debug_barrier()
            here = load_shared(own, digits, tl.zeros((DIGITS,), tl.int32))
        pointers = counts + row.to(tl.int64) * DIGITS + digits
        tl.atomic_add(pointers, here, mask=here > 0, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(done + row, 1, sem="acq_rel") == programs - 1:
            count = tl.load(pointers, volatile=True)
            digit = tl.sum((tl.cumsum(count, axis=0) <= left).to(tl.int32), axis=0)
            tl.store(known + _KEY, found if META.of_index else (found << BITS) | digit)
            tl.store(known + _KEY_SHIFT, tl.full((), 0 if META.of_index else SHIFT, tl.int64))
            tl.store(known + _INDEX, (above << BITS) | digit if META.of_index else tl.zeros((), tl.int64))
            tl.store(known + _INDEX_SHIFT, tl.full((), SHIFT if META.of_index else _ALL_INDICES, tl.int64))
            tl.store(known + _RANK, left - tl.sum(tl.where(digits < digit, count, 0), axis=0))
            tl.store(known + _MATCHING, tl.sum(tl.where(digits == digit, count, 0), axis=0).to(tl.int64))
            tl.store(pointers, tl.zeros_like(count))
            tl.store(done + row, 0)


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
    wanted = tl.load(state + row * _STATE + _KEY)
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
    last, rank = tl.load(state + row * _STATE + _KEY), tl.load(state + row * _STATE + _RANK)
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
    known = state + row * _STATE
    last = ((tl.load(known + _KEY) + 1) << tl.load(known + _KEY_SHIFT)) - 1
    last_index = (((tl.load(known + _INDEX) + 1) << tl.load(known + _INDEX_SHIFT)) - 1).to(tl.int32)
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


def _blocks_of_program(blocks: int, programs: int, device: torch.device) -> int:
    """Return how many blocks a program takes so that each multiprocessor has `programs`, a power of two."""
    each = blocks // (programs * devices.multiprocessors(device))
    return 1 << min(sorting_table().select.most_counted, max(1, each)).bit_length() - 1


def _digits(keys: Keys, n: int, k: int, enough: int) -> Iterator[tuple[bool, int, int]]:
    """Yield (whether it is a digit of the index, its bits, its shift) for each digit, the highest of the key first.

    Digits of the index follow only if `enough` elements of a row may be selected, until no more than that can match.
    """
    most = sorting_table().select.shared_bits if devices.current.ptx else 8
    shift = keys.bits
    while shift:
        bits = min(most, shift)
        shift -= bits
        yield False, bits, shift
    # Rounded up to whole digits, so that rows of many lengths share compiled kernels.
    shift = -(-(n - 1).bit_length() // most) * most
    while enough and 2**shift > enough - k + 1:
        bits = min(most, shift)
        shift -= bits
        yield True, bits, shift


def _searched(x: torch.Tensor, rows: Rows, n: int, rank: int, mode: int, keys: Keys, enough: int = 0) -> torch.Tensor:
    """Return the state of each row's search for the key of a rank, once all digits are found.

    The search of a row stops earlier if at most `enough` of its elements are before or match the bits found so far.
    """
    check_length(n)
    chosen = sorting_table().select
    n_rows, blocks = rows.n_rows, -(-n // chosen.block)
    space = (as_integers(x), rows.shape, rows.strides[0], rows.steps[0], n)
    passes = list(_digits(keys, n, rank + 1, enough))
    size = n_rows * 2 ** max(bits for _, bits, _ in passes)
    scratch = zeros((size + 2 * n_rows,), torch.int32, x.device)
    nans = scratch[size + n_rows :]
    state = empty((n_rows, _STATE.value), torch.int64, x.device)
    if mode != BY_RANK and keys.infinity:
        _count_nans[(n_rows * blocks,)](*(nans, *space, blocks), KEYS=keys, INDEX=rows.index, **_block_of_program())
    counted = _blocks_of_program(n_rows * blocks, chosen.programs, x.device)
    programs = -(-blocks // counted)
    for i, (of_index, bits, shift) in enumerate(passes):
        meta = DigitMeta(
            first=i == 0,
            of_index=of_index,
            bits=bits,
            shift=shift,
            mode=mode,
            shared=devices.current.ptx,
            keys=keys,
            index=rows.index,
            block=chosen.block,
        )
        _count_digit[(n_rows * programs,)](
            *(scratch, scratch[size:], state, nans, *space, programs, counted, rank, enough),
            META=meta,
            num_warps=_warps(),
        )
    return state


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
    state = _searched(x, rows, n, rank, mode, keys)
    n_rows, blocks = rows.n_rows, -(-n // sorting_table().select.block)
    found = zeros((n_rows,), torch.int32, x.device)
    space = (as_integers(x), rows.shape, rows.strides[0], rows.steps[0], n)
    _find_first[(n_rows * blocks,)](
        *(found, state, *space, blocks),
        KEYS=keys,
        INDEX=rows.index,
        **_block_of_program(),
    )
    _write_found[(-(-n_rows // 128),)](
        as_integers(values),
        () if indices is None else (indices,),
        *(found, as_integers(x), rows.shape, rows.strides, rows.steps[0], n_rows, n),
        INDEX=rows.index,
        BLOCK=128,
    )


def take_smallest(x: torch.Tensor, dim: int, k: int, keys: Keys, values: torch.Tensor, indices: torch.Tensor) -> None:
    """Write the k elements of each row with the smallest keys, and their indices, not sorted by key.

    Of elements with the k-th key, those with the lowest indices are written.
    """
    n, rows = x.shape[dim], Rows((x, values, indices), dim)
    state = _searched(x, rows, n, k - 1, BY_RANK, keys)
    blocks = -(-n // sorting_table().select.block)
    scratch = zeros((TICKET_INT32 + rows.n_rows * blocks * _CLASSES.value,), torch.int32, x.device)
    _take_smallest[(rows.n_rows * blocks,)](
        *(as_integers(values), indices, state, scratch, as_integers(x)),
        *(rows.layout, n, blocks, k),
        TICKET=TICKET_INT32,
        CLASSES=_CLASSES.value,
        KEYS=keys,
        INDEX=rows.index,
        **_block_of_program(),
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
    state = _searched(x, rows, n, k - 1, BY_RANK, keys, slots)
    # Rows are numbered in the collapsed order of x, in which programs take them.
    selected = empty((rows.n_rows, slots), x.dtype, x.device)
    selected_indices = empty((rows.n_rows, slots), torch.int32, x.device)
    counts = zeros((rows.n_rows,), torch.int32, x.device)
    chosen = sorting_table().select
    chunks = -(-n // (_LANES * chosen.few_each))
    counted = _blocks_of_program(rows.n_rows * chunks, chosen.few_programs, x.device)
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
