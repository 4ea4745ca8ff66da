"""Elements of long rows by their rank: digit by digit, the first digit first, until one key is left.

Each pass counts the next digit of the elements that have all digits found so far. What a digit is follows from the
counts of the pass before, which every program adds up for itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dispatch.call import empty, zeros
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting import topk
from tritonite.engine.sorting.block import BY_RANK, select_rows, wanted_rank
from tritonite.engine.sorting.keys import Keys, Rows, ordered, with_sign, words
from tritonite.engine.sorting.radix import _COUNTER, check_length, counted_before, leave_word
from tritonite.engine.sorting.topk import key_of_rank, keys_of
from tritonite.language.places import strided_offset
from tritonite.language.shared import add, get, put, room
from tritonite.launch import libentry

_BLOCK = 2048
# An addition to shared memory is made by every thread that has its element: there are as many elements as threads.
_WARPS = 8
_COUNTED = 4
# The most bits of a digit that is counted in shared memory.
_SHARED_BITS = 11
_CLASSES = tl.constexpr(2)


def _warps() -> int:
    return min(_WARPS, max(1, _BLOCK // 32))


@triton.jit
def _key_by_digits(key, mask, rank, KEYS: tl.constexpr):
    """What `key_of_rank` returns, found by digits of 8 bits that are counted in shared memory, the first digit first.

    That takes as many rounds as a key has bytes and not bits.
    """
    ROWS: tl.constexpr = key.shape[0]
    BINS: tl.constexpr = ROWS * 256
    row = tl.arange(0, ROWS)
    digits = tl.arange(0, 256)
    bins = tl.arange(0, BINS)
    key = _unsigned(key, KEYS)
    found = tl.zeros((ROWS,), tl.int64)
    left = rank
    # The last is for what is not counted.
    own = room(BINS + 1, tl.int32)
    for i in tl.static_range(KEYS.bits // 8):
        tl.debug_barrier()
        put(own, bins, tl.zeros_like(bins))
        tl.debug_barrier()
        counted = mask
        if i > 0:
            counted = mask & ((key >> (KEYS.bits - 8 * i)) == found.to(key.dtype)[:, None])
        bin = row[:, None] * 256 + ((key >> (KEYS.bits - 8 - 8 * i)) & 255).to(tl.int32)
        add(own, tl.where(counted, bin, BINS), tl.zeros_like(bin) + 1)
        tl.debug_barrier()
        count = get(own, bins, tl.zeros_like(bins))
        # In two dimensions the sums of one row are made by few threads.
        if ROWS == 1:
            digit = tl.sum((tl.cumsum(count, axis=0) <= left).to(tl.int32), axis=0)
            left -= tl.sum(tl.where(digits < digit, count, 0), axis=0)
        else:
            count = tl.reshape(count, (ROWS, 256))
            digit = tl.sum((tl.cumsum(count, axis=1) <= left[:, None]).to(tl.int32), axis=1)
            left -= tl.sum(tl.where(digits[None, :] < digit[:, None], count, 0), axis=1)
        found = (found << 8) | digit
    return with_sign(found, KEYS)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n", "rank"])
def _select_held(
    values,
    indices,
    words,
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
    """A program writes one element of each of its rows, which it holds, by its rank, and its first place."""
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(INDEX)
    rows = row < n_rows
    mask = rows[:, None] & (column < n)[None, :]
    source = strided_offset(row, shape, strides[0])
    key = keys_of(words + source[:, None] + (column * step)[None, :], mask, KEYS)
    nans = tl.zeros((ROWS,), tl.int32)
    if MODE != 0 and KEYS.infinity > 0:
        nans = tl.sum((mask & (key == 2 ** (KEYS.bits - 1) - 1)).to(tl.int32), axis=1)
    rank = wanted_rank(n, nans, rank, MODE)
    if SHARED:
        found = _key_by_digits(key, mask, rank, KEYS).to(key.dtype)
    else:
        found = key_of_rank(key, mask, rank)
    place = tl.min(tl.where(mask & (key == found[:, None]), column[None, :], n), axis=1)
    word = tl.load(words + source + place.to(INDEX) * step, mask=rows, other=0)
    tl.store(values + strided_offset(row, shape, strides[1]), word, mask=rows)
    if len(indices) > 0:
        tl.store(indices[0] + strided_offset(row, shape, strides[2]), place.to(tl.int64), mask=rows)


@libentry()
@triton.jit(do_not_specialize=["n", "blocks"])
def _count_nans(
    nans, words, shape, strides, step, n, blocks, KEYS: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    """A program counts what is nan in its block."""
    row = (tl.program_id(0) // blocks).to(INDEX)
    place = (tl.program_id(0) % blocks).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + strided_offset(row, shape, strides) + place * step, mask=place < n, other=0)
    nan = ordered(word, KEYS) == 2 ** (KEYS.bits - 1) - 1
    tl.atomic_add(nans + row, tl.sum(nan.to(tl.int32), axis=0), sem="relaxed")


@triton.jit
def _narrowed(counts, state, row, BITS: tl.constexpr):
    """(digits, rank): the next digit added to those found, and the rank among the elements that have them all."""
    digits = tl.arange(0, 2**BITS)
    count = tl.load(counts + row.to(tl.int64) * 2**BITS + digits)
    found, rank = tl.load(state + row * 2), tl.load(state + row * 2 + 1)
    digit = tl.sum((tl.cumsum(count, axis=0) <= rank).to(tl.int32), axis=0)
    below = tl.sum(tl.where(digits < digit, count, 0), axis=0)
    return (found << BITS) | digit, rank - below


@triton.jit
def _unsigned(key, KEYS: tl.constexpr):
    """A key that counts from 0, without a sign."""
    if KEYS.bits == 64:
        result = (key ^ (-(2**63))).to(tl.uint64, bitcast=True)
    elif KEYS.bits == 32:
        result = (key ^ (-(2**31))).to(tl.uint32, bitcast=True)
    else:
        result = (key + 2 ** (KEYS.bits - 1)).to(tl.uint32, bitcast=True)
    return result


@libentry()
@triton.jit(do_not_specialize=["n", "blocks", "rank"])
def _count_digit(
    counts,
    state,
    counts_before,
    state_before,
    nans,
    words,
    shape,
    strides,
    step,
    n,
    blocks,
    rank,
    FIRST: tl.constexpr,
    SHARED: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    COUNTED: tl.constexpr,
    MODE: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program counts a digit in COUNTED blocks, of elements that have the digits found before."""
    DIGITS: tl.constexpr = 2**BITS
    row = (tl.program_id(0) // blocks).to(INDEX)
    part = tl.program_id(0) % blocks
    digits = tl.arange(0, DIGITS)
    if FIRST:
        found = tl.zeros((), tl.int64)
        left = wanted_rank(n, tl.load(nans + row), rank, MODE).to(tl.int64)
    else:
        found, left = _narrowed(counts_before, state_before, row, BITS)
    if part == 0:
        tl.store(state + row * 2, found)
        tl.store(state + row * 2 + 1, left)
    source = words + strided_offset(row, shape, strides)
    if SHARED:
        # The last is for what is not counted.
        own = room(DIGITS + 1, tl.int32)
        put(own, digits, tl.zeros((DIGITS,), tl.int32))
        tl.debug_barrier()
    else:
        here = tl.zeros((DIGITS,), tl.int32)
    for j in range(COUNTED):
        place = part.to(INDEX) * (BLOCK * COUNTED) + j * BLOCK + tl.arange(0, BLOCK)
        mask = place < n
        key = _unsigned(ordered(tl.load(source + place * step, mask=mask, other=0), KEYS), KEYS)
        if not FIRST:
            mask = mask & ((key >> (SHIFT + BITS)) == found.to(key.dtype))
        digit = ((key >> SHIFT) & (DIGITS - 1)).to(tl.int32)
        if SHARED:
            add(own, tl.where(mask, digit, DIGITS), tl.full((BLOCK,), 1, tl.int32))
        else:
            here += tl.histogram(digit, DIGITS, mask=mask)
    if SHARED:
        tl.debug_barrier()
        here = get(own, digits, tl.zeros((DIGITS,), tl.int32))
    tl.atomic_add(counts + row.to(tl.int64) * DIGITS + digits, here, mask=here > 0, sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["n", "blocks"])
def _find(
    found,
    counts,
    state,
    words,
    shape,
    strides,
    step,
    n,
    blocks,
    BITS: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program looks for the key of its row in its block; of its first place, n less that is left."""
    row = (tl.program_id(0) // blocks).to(INDEX)
    place = (tl.program_id(0) % blocks).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    digits, _ = _narrowed(counts, state, row, BITS)
    word = tl.load(words + strided_offset(row, shape, strides) + place * step, mask=place < n, other=0)
    same = (ordered(word, KEYS).to(tl.int64) == with_sign(digits, KEYS)) & (place < n)
    first = tl.max(tl.where(same, n - place, 0), axis=0)
    if first > 0:
        tl.atomic_max(found + row, first.to(tl.int32), sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n"])
def _write_found(
    values, indices, found, words, shape, strides, step, n_rows, n, INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = row < n_rows
    place = (n - tl.load(found + row, mask=mask, other=1)).to(INDEX)
    word = tl.load(words + strided_offset(row, shape, strides[0]) + place * step, mask=mask, other=0)
    tl.store(values + strided_offset(row, shape, strides[1]), word, mask=mask)
    if len(indices) > 0:
        tl.store(indices[0] + strided_offset(row, shape, strides[2]), place.to(tl.int64), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n", "blocks", "k"])
def _take_smallest(
    values,
    indices,
    counts,
    state,
    scratch,
    words,
    shape,
    strides,
    steps,
    n,
    blocks,
    k,
    COUNTER: tl.constexpr,
    CLASSES: tl.constexpr,
    BITS: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program moves what is smaller than the k-th key of its row, and behind that what is equal, as far as k goes."""
    ticket = tl.atomic_add(scratch, 1, sem="relaxed")
    row, block = (ticket // blocks).to(INDEX), ticket % blocks
    place = (block * BLOCK + tl.arange(0, BLOCK)).to(INDEX)
    digits, rank = _narrowed(counts, state, row, BITS)
    word = tl.load(words + strided_offset(row, shape, strides[0]) + place * steps[0], mask=place < n, other=0)
    key, last = ordered(word, KEYS).to(tl.int64), with_sign(digits, KEYS)
    smaller, equal = (key < last) & (place < n), (key == last) & (place < n)
    n_smaller, n_equal = tl.sum(smaller.to(tl.int32), axis=0), tl.sum(equal.to(tl.int32), axis=0)
    classes = tl.arange(0, CLASSES)
    own = tl.where(classes == 0, n_smaller, n_equal)
    leave_word(scratch + COUNTER + row * blocks * CLASSES, block, own)
    before = counted_before(scratch + COUNTER + row * blocks * CLASSES, block, own)
    first = tl.sum(tl.where(classes == 0, before, 0), axis=0) + tl.cumsum(smaller.to(tl.int32), axis=0) - 1
    behind = tl.sum(tl.where(classes == 1, before, 0), axis=0) + tl.cumsum(equal.to(tl.int32), axis=0) - 1
    target = tl.where(smaller, first.to(tl.int64), behind.to(tl.int64) + (k - 1 - rank)).to(INDEX)
    mask = (smaller | equal) & (target < k)
    tl.store(values + strided_offset(row, shape, strides[1]) + target * steps[1], word, mask=mask)
    pointers = indices + strided_offset(row, shape, strides[2]) + target * steps[2]
    tl.store(pointers, place.to(indices.dtype.element_ty), mask=mask)


def _bits(keys: Keys) -> int:
    """How many bits a digit has: in shared memory a program counts more different ones."""
    if not devices.current.ptx:
        return 8
    return -(-keys.bits // -(-keys.bits // _SHARED_BITS))


def _ranked(x: torch.Tensor, dim: int, rank: int, mode: int, keys: Keys) -> tuple[Any, Any, Rows, int, int, int]:
    """(counts of the last digit, what is known before it, rows of x, how many, blocks of each, bits of a digit)."""
    n = x.shape[dim]
    check_length(n)
    rows = Rows((x,), dim)
    bits = _bits(keys)
    passes = -(-keys.bits // bits)
    n_rows, blocks = math.prod(x.shape) // n, -(-n // _BLOCK)
    facts = {"KEYS": keys, "INDEX": rows.index, "BLOCK": _BLOCK, "num_warps": _warps()}
    space = (words(x), rows.shape, rows.strides[0], rows.steps[0], n)
    size = n_rows * 2**bits
    scratch = zeros((passes * size + n_rows,), torch.int32, x.device)
    nans = scratch[passes * size :]
    state = empty((passes, n_rows, 2), torch.int64, x.device)
    if mode != BY_RANK and keys.infinity:
        _count_nans[(n_rows * blocks,)](nans, *space, blocks, **facts)
    parts = -(-blocks // _COUNTED)
    for i in range(passes):
        counts, before = scratch[i * size :], scratch[max(i - 1, 0) * size :]
        _count_digit[(n_rows * parts,)](
            *(counts, state[i], before, state[max(i - 1, 0)], nans, *space, parts, rank),
            FIRST=i == 0,
            SHARED=devices.current.ptx,
            BITS=bits,
            SHIFT=bits * (passes - 1 - i),
            COUNTED=_COUNTED,
            MODE=mode,
            **facts,
        )
    return counts, state[passes - 1], rows, n_rows, blocks, bits


def select(x: torch.Tensor, dim: int, rank: int, mode: int, values: torch.Tensor, indices: torch.Tensor | None) -> None:
    """Select of rows of any length; results have size 1 along the dimension."""
    keys, n = Keys.of(x.dtype), x.shape[dim]
    if n <= topk.SORTED_AT_ONCE:
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
        words(values),
        () if indices is None else (indices,),
        *(words(x), rows.shape, rows.strides, rows.steps[0], rows.n_rows, x.shape[dim], rank),
        MODE=mode,
        KEYS=keys,
        # Of keys of 32 bits half as many rounds, of fewer instructions, cost less than counting.
        SHARED=shared,
        INDEX=rows.index,
        ROWS=each,
        COLUMNS=columns,
        # Of more threads than there are digits several would add up the same.
        num_warps=min(8 if shared else 16, topk.warps_for(each * columns, keys)),
    )


def _select_of_long_rows(
    x: torch.Tensor, dim: int, rank: int, mode: int, keys: Keys, values: torch.Tensor, indices: torch.Tensor | None
) -> None:
    counts, state, rows, n_rows, blocks, bits = _ranked(x, dim, rank, mode, keys)
    n = x.shape[dim]
    found = zeros((n_rows,), torch.int32, x.device)
    space = (words(x), rows.shape, rows.strides[0], rows.steps[0], n)
    _find[(n_rows * blocks,)](
        *(found, counts, state, *space, blocks),
        BITS=bits,
        KEYS=keys,
        INDEX=rows.index,
        BLOCK=_BLOCK,
        num_warps=_warps(),
    )
    rows = Rows((x, values, values if indices is None else indices), dim)
    _write_found[(-(-n_rows // 128),)](
        words(values),
        () if indices is None else (indices,),
        *(found, words(x), rows.shape, rows.strides, rows.steps[0], n_rows, n),
        INDEX=rows.index,
        BLOCK=128,
    )


def take_smallest(x: torch.Tensor, dim: int, k: int, keys: Keys, values: torch.Tensor, indices: torch.Tensor) -> None:
    """The k elements of each row whose keys are smallest, those of equals that come first, in no order of the keys."""
    counts, state, _, n_rows, blocks, bits = _ranked(x, dim, k - 1, BY_RANK, keys)
    rows = Rows((x, values, indices), dim)
    scratch = zeros((_COUNTER + n_rows * blocks * _CLASSES.value,), torch.int32, x.device)
    _take_smallest[(n_rows * blocks,)](
        *(words(values), indices, counts, state, scratch, words(x)),
        *(rows.shape, rows.strides, rows.steps, x.shape[dim], blocks, k),
        COUNTER=_COUNTER,
        CLASSES=_CLASSES.value,
        BITS=bits,
        KEYS=keys,
        INDEX=rows.index,
        BLOCK=_BLOCK,
        num_warps=_warps(),
    )
