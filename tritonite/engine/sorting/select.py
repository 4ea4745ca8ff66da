"""Elements of long rows by their rank: digit by digit, the first digit first, until one key is left.

Each pass counts the next digit of the elements that have all digits found so far. What a digit is finds the last of a
row's programs. Of many elements of a row the digits are found until few enough are left for one program to sort.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting import topk
from tritonite.engine.sorting.block import BY_RANK, select_rows, wanted_rank
from tritonite.engine.sorting.keys import Keys, Rows, ordered, unsigned_key, with_sign, words
from tritonite.engine.sorting.radix import (
    _COUNTER,
    check_length,
    counted_before,
    holds,
    leave_word,
    load_each,
    longest_held,
    place_of,
    sort_taken_rows,
)
from tritonite.engine.sorting.topk import key_of_rank, keys_of
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import add_shared, alloc_shared, load_shared, store_shared
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry

_BLOCK = 2048
# An addition to shared memory is made by every thread that has its element: there are as many elements as threads.
_WARPS = 8
# How many programs of that kind, and of one warp, a multiprocessor has at a time; how many blocks one takes at most.
_PROGRAMS, _SMALL_PROGRAMS, _MOST_COUNTED = 4, 32, 16
# The elements that a program of one warp takes at a time: so many of each lane.
_LANES, _EACH = (32, 4) if devices.current.interpreted else (32, 16)
# The most bits of a digit that is counted in shared memory.
_SHARED_BITS = 11
_CLASSES = tl.constexpr(2)
# What is known of a key of a rank: it without some last bits, how many those are, the same of its place, its rank among
# those that are like it in what is known, and how many there are.
_KNOWN = tl.constexpr(6)
# How many bits of a place are not known where none is.
_ALL_PLACES = tl.constexpr(31)


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
    wait_for_previous_launch()
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
    wait_for_previous_launch()
    row = (tl.program_id(0) // blocks).to(INDEX)
    place = (tl.program_id(0) % blocks).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + strided_offset(row, shape, strides) + place * step, mask=place < n, other=0)
    nan = ordered(word, KEYS) == 2 ** (KEYS.bits - 1) - 1
    tl.atomic_add(nans + row, tl.sum(nan.to(tl.int32), axis=0), sem="relaxed")


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
@triton.jit(do_not_specialize=["parts", "counted", "rank", "enough"])
def _count_digit(
    counts,
    done,
    state,
    nans,
    words,
    shape,
    strides,
    step,
    n,
    parts,
    counted,
    rank,
    enough,
    FIRST: tl.constexpr,
    PLACES: tl.constexpr,
    SHARED: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    MODE: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program counts a digit in `counted` blocks, of elements that have the digits found before, unless those do.

    The last of a row's programs finds the digit, and leaves the counts as they were before. Of elements that have all
    digits of the key, digits of their PLACES are counted.
    """
    wait_for_previous_launch()
    DIGITS: tl.constexpr = 2**BITS
    row = (tl.program_id(0) // parts).to(INDEX)
    part = tl.program_id(0) % parts
    digits = tl.arange(0, DIGITS)
    known = state + row * _KNOWN
    if FIRST:
        found = tl.zeros((), tl.int64)
        left = wanted_rank(n, tl.load(nans + row), rank, MODE).to(tl.int64)
        same = found + n
    else:
        found, left, same = tl.load(known), tl.load(known + 4), tl.load(known + 5)
    if rank - left + same > enough:
        above = tl.load(known + 2) if PLACES else found
        source = words + strided_offset(row, shape, strides)
        if SHARED:
            # The last is for what is not counted.
            own = alloc_shared(DIGITS + 1, tl.int32)
            store_shared(own, digits, tl.zeros((DIGITS,), tl.int32))
            tl.debug_barrier()
        else:
            here = tl.zeros((DIGITS,), tl.int32)
        for j in range(counted):
            place = part.to(INDEX) * (BLOCK * counted) + j * BLOCK + tl.arange(0, BLOCK)
            mask = place < n
            key = unsigned_key(tl.load(source + place * step, mask=mask, other=0), KEYS)
            if PLACES:
                mask = mask & (key == found.to(key.dtype))
                key = place
            if not FIRST:
                mask = mask & ((key >> (SHIFT + BITS)) == above.to(key.dtype))
            digit = ((key >> SHIFT) & (DIGITS - 1)).to(tl.int32)
            if SHARED:
                add_shared(own, tl.where(mask, digit, DIGITS), tl.full((BLOCK,), 1, tl.int32))
            else:
                here += tl.histogram(digit, DIGITS, mask=mask)
        if SHARED:
            tl.debug_barrier()
            here = load_shared(own, digits, tl.zeros((DIGITS,), tl.int32))
        pointers = counts + row.to(tl.int64) * DIGITS + digits
        tl.atomic_add(pointers, here, mask=here > 0, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(done + row, 1, sem="acq_rel") == parts - 1:
            count = tl.load(pointers, volatile=True)
            digit = tl.sum((tl.cumsum(count, axis=0) <= left).to(tl.int32), axis=0)
            tl.store(known, found if PLACES else (found << BITS) | digit)
            tl.store(known + 1, tl.full((), 0 if PLACES else SHIFT, tl.int64))
            tl.store(known + 2, (above << BITS) | digit if PLACES else tl.zeros((), tl.int64))
            tl.store(known + 3, tl.full((), SHIFT if PLACES else _ALL_PLACES, tl.int64))
            tl.store(known + 4, left - tl.sum(tl.where(digits < digit, count, 0), axis=0))
            tl.store(known + 5, tl.sum(tl.where(digits == digit, count, 0), axis=0).to(tl.int64))
            tl.store(pointers, tl.zeros_like(count))
            tl.store(done + row, 0)


@libentry()
@triton.jit(do_not_specialize=["n", "blocks"])
def _find(
    found,
    state,
    words,
    shape,
    strides,
    step,
    n,
    blocks,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program looks for the key of its row in its block; of its first place, n less that is left."""
    wait_for_previous_launch()
    row = (tl.program_id(0) // blocks).to(INDEX)
    place = (tl.program_id(0) % blocks).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(state + row * _KNOWN)
    word = tl.load(words + strided_offset(row, shape, strides) + place * step, mask=place < n, other=0)
    key = unsigned_key(word, KEYS)
    same = (key == wanted.to(key.dtype)) & (place < n)
    first = tl.max(tl.where(same, n - place, 0), axis=0)
    if first > 0:
        tl.atomic_max(found + row, first.to(tl.int32), sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n"])
def _write_found(
    values, indices, found, words, shape, strides, step, n_rows, n, INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    wait_for_previous_launch()
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
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program moves what is smaller than the k-th key of its row, and behind that what is equal, as far as k goes."""
    wait_for_previous_launch()
    ticket = tl.atomic_add(scratch, 1, sem="relaxed")
    row, block = (ticket // blocks).to(INDEX), ticket % blocks
    place = (block * BLOCK + tl.arange(0, BLOCK)).to(INDEX)
    last, rank = tl.load(state + row * _KNOWN), tl.load(state + row * _KNOWN + 4)
    word = tl.load(words + strided_offset(row, shape, strides[0]) + place * steps[0], mask=place < n, other=0)
    key = unsigned_key(word, KEYS)
    last = last.to(key.dtype)
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


@libentry()
@triton.jit(do_not_specialize=["parts", "counted", "slots"])
def _take_few(
    taken,
    places,
    counts,
    state,
    words,
    shape,
    strides,
    step,
    n,
    parts,
    counted,
    slots,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
):
    """A program of one warp takes of `counted` chunks what is not behind the digits found.

    What is taken of a chunk stays together, in order, wherever that is among all of its row.
    """
    wait_for_previous_launch()
    row = (tl.program_id(0) // parts).to(INDEX)
    begin = (tl.program_id(0) % parts).to(INDEX) * (LANES * EACH * counted)
    source = words + strided_offset(row, shape, strides)
    target = row.to(tl.int64) * slots
    known = state + row * _KNOWN
    last = ((tl.load(known) + 1) << tl.load(known + 1)) - 1
    last_place = (((tl.load(known + 2) + 1) << tl.load(known + 3)) - 1).to(tl.int32)
    for _ in range(counted):
        word = load_each(source, begin, step, n, LANES, EACH)
        chosen = ()
        before = ()
        counts_of = ()
        for i in tl.static_range(EACH):
            key, place = unsigned_key(word[i], KEYS), begin + place_of(i, LANES, EACH)
            smaller, equal = key < last.to(key.dtype), (key == last.to(key.dtype)) & (place <= last_place)
            chosen = chosen + ((place < n) & (smaller | equal),)  # type: ignore[assignment]
        # Of four elements of each lane the sums are parts of one word: there are no more lanes than it has room for.
        some = 0
        for i in tl.static_range(0, EACH, 4):
            four = tl.zeros((LANES,), tl.int32)
            for m in tl.static_range(4):
                four += chosen[i + m].to(tl.int32) << 8 * m
            before = before + (tl.cumsum(four, axis=0),)  # type: ignore[assignment]
            counts_of = counts_of + (tl.sum(four, axis=0),)  # type: ignore[assignment]
            some |= counts_of[i // 4]
        if some != 0:
            taken_of = 0
            for i in tl.static_range(EACH):
                taken_of += (counts_of[i // 4] >> 8 * (i % 4)) & 255
            slot = tl.atomic_add(counts + row, taken_of, sem="relaxed") - 1
            for i in tl.static_range(EACH):
                at = slot + ((before[i // 4] >> 8 * (i % 4)) & 255)
                slot += (counts_of[i // 4] >> 8 * (i % 4)) & 255
                tl.store(taken + target + at, word[i].to(taken.dtype.element_ty), mask=chosen[i])
                tl.store(places + target + at, (begin + place_of(i, LANES, EACH)).to(tl.int32), mask=chosen[i])
        begin += LANES * EACH


def _shares(blocks: int, programs: int, device: torch.device) -> int:
    """How many blocks a program takes, so that a multiprocessor has so many programs if there are as many."""
    each = blocks // (programs * devices.multiprocessors(device))
    return 1 << min(_MOST_COUNTED, max(1, each)).bit_length() - 1


def _digits(keys: Keys, n: int, k: int, enough: int) -> Iterator[tuple[bool, int, int]]:
    """(whether it is of the place, bits, shift) of each digit, the first one first.

    Those of places follow where `enough` of a row's elements may be kept, as far as to tell so many of it apart.
    """
    # In shared memory a program counts more different ones.
    most = _SHARED_BITS if devices.current.ptx else 8
    shift = keys.bits
    while shift:
        bits = min(most, shift)
        shift -= bits
        yield False, bits, shift
    # From a bit that is the same for rows of many lengths, of which kernels are not to be compiled for each.
    shift = -(-(n - 1).bit_length() // most) * most
    while enough and 2**shift > enough - k + 1:
        bits = min(most, shift)
        shift -= bits
        yield True, bits, shift


def _known(x: torch.Tensor, rows: Rows, n: int, rank: int, mode: int, keys: Keys, enough: int = 0) -> torch.Tensor:
    """What is known of the keys of a rank in rows, once all of their digits are found.

    Or once not more than `enough` elements of a row are before what has the digits found so far, or have them.
    """
    check_length(n)
    n_rows, blocks = rows.n_rows, -(-n // _BLOCK)
    facts = {"KEYS": keys, "INDEX": rows.index, "BLOCK": _BLOCK, "num_warps": _warps()}
    space = (words(x), rows.shape, rows.strides[0], rows.steps[0], n)
    passes = list(_digits(keys, n, rank + 1, enough))
    size = n_rows * 2 ** max(bits for _, bits, _ in passes)
    scratch = zeros((size + 2 * n_rows,), torch.int32, x.device)
    nans = scratch[size + n_rows :]
    state = empty((n_rows, _KNOWN.value), torch.int64, x.device)
    if mode != BY_RANK and keys.infinity:
        _count_nans[(n_rows * blocks,)](nans, *space, blocks, **facts)
    counted = _shares(n_rows * blocks, _PROGRAMS, x.device)
    parts = -(-blocks // counted)
    for i, (places, bits, shift) in enumerate(passes):
        _count_digit[(n_rows * parts,)](
            *(scratch, scratch[size:], state, nans, *space, parts, counted, rank, enough),
            FIRST=i == 0,
            PLACES=places,
            SHARED=devices.current.ptx,
            BITS=bits,
            SHIFT=shift,
            MODE=mode,
            **facts,
        )
    return state


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
    n = x.shape[dim]
    rows = Rows((x, values, values if indices is None else indices), dim)
    state = _known(x, rows, n, rank, mode, keys)
    n_rows, blocks = rows.n_rows, -(-n // _BLOCK)
    found = zeros((n_rows,), torch.int32, x.device)
    space = (words(x), rows.shape, rows.strides[0], rows.steps[0], n)
    _find[(n_rows * blocks,)](
        *(found, state, *space, blocks),
        KEYS=keys,
        INDEX=rows.index,
        BLOCK=_BLOCK,
        num_warps=_warps(),
    )
    _write_found[(-(-n_rows // 128),)](
        words(values),
        () if indices is None else (indices,),
        *(found, words(x), rows.shape, rows.strides, rows.steps[0], n_rows, n),
        INDEX=rows.index,
        BLOCK=128,
    )


def take_smallest(x: torch.Tensor, dim: int, k: int, keys: Keys, values: torch.Tensor, indices: torch.Tensor) -> None:
    """The k elements of each row whose keys are smallest, those of equals that come first, in no order of the keys."""
    n, rows = x.shape[dim], Rows((x, values, indices), dim)
    state = _known(x, rows, n, k - 1, BY_RANK, keys)
    blocks = -(-n // _BLOCK)
    scratch = zeros((_COUNTER + rows.n_rows * blocks * _CLASSES.value,), torch.int32, x.device)
    _take_smallest[(rows.n_rows * blocks,)](
        *(words(values), indices, state, scratch, words(x)),
        *(rows.shape, rows.strides, rows.steps, n, blocks, k),
        COUNTER=_COUNTER,
        CLASSES=_CLASSES.value,
        KEYS=keys,
        INDEX=rows.index,
        BLOCK=_BLOCK,
        num_warps=_warps(),
    )


def sorts_few(k: int, keys: Keys) -> bool:
    """Whether a program holds the k smallest of a row, and some more."""
    return holds(_few(k, keys), keys)


def _few(k: int, keys: Keys) -> int:
    """How many elements to take for the k smallest: twice as many are mostly known by their keys' first digit."""
    return max(k, min(2 * power_of_2(k), longest_held(keys)))


def write_few_smallest(
    x: torch.Tensor, dim: int, k: int, keys: Keys, values: torch.Tensor, indices: torch.Tensor
) -> None:
    """The k smallest elements of each row in order, those of equals that come first, where `sorts_few` is true."""
    n, rows = x.shape[dim], Rows((x, values, indices), dim)
    slots = _few(k, keys)
    state = _known(x, rows, n, k - 1, BY_RANK, keys, slots)
    # Rows in the order in which programs take those of x, so that what is taken of each is a row of its own.
    taken = empty((rows.n_rows, slots), x.dtype, x.device)
    places = empty((rows.n_rows, slots), torch.int32, x.device)
    counts = zeros((rows.n_rows,), torch.int32, x.device)
    chunks = -(-n // (_LANES * _EACH))
    counted = _shares(rows.n_rows * chunks, _SMALL_PROGRAMS, x.device)
    parts = -(-chunks // counted)
    _take_few[(rows.n_rows * parts,)](
        *(words(taken), places, counts, state, words(x), rows.shape, rows.strides[0], rows.steps[0]),
        *(n, parts, counted, slots),
        KEYS=keys,
        INDEX=rows.index,
        LANES=_LANES,
        EACH=_EACH,
        num_warps=1,
    )
    ordered_bits = (_LANES * _EACH - 1).bit_length()
    sort_taken_rows(*(words(taken), places, counts, rows, values, indices, keys, k, ordered_bits, (n - 1).bit_length()))
