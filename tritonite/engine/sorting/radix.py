"""Rows sorted digit by digit, of 8 bits, the last digit first.

A program ranks its elements by a digit: the lanes of a warp ask each other which have the same one, and count it with
those that came before, by counters of each warp's own in shared memory. Sums of them over digits and warps are where
each begins. The elements then change places through shared memory. That is all for rows that a program holds.

Of longer rows all digits are counted in one pass. Then there is one pass for each digit, in which a program sorts a
block by it and learns from the blocks before its own how many of each digit have come before, while those still work
(Adinets and Merrill 2022, "Onesweep", with the decoupled look-back of Merrill and Garland 2016). Programs take tickets,
so that those before a program's own have begun, whatever order the device starts them in. A digit that all elements of
a row share, as the first ones of small integers are, has a pass that moves nothing: each pass learns from what has been
counted between which buffers it moves a row, if at all.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import INT32_LIMIT, power_of_2
from tritonite.engine.sorting import block
from tritonite.engine.sorting.block import sort_rows
from tritonite.engine.sorting.keys import Keys, Rows, digit_of, words
from tritonite.engine.sorting.table import SORTING
from tritonite.errors import Decline
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import add_shared, alloc_shared, load_shared, store_shared, warp_rank
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry

# The elements that a thread has of a row that its program holds, and that a program of as many threads as there are
# digits would have; those of a thread where several programs share a row, where they have 64 bits, and of keys alone,
# as many as there are registers for; how many blocks of them a program that counts takes, and how many counters it has
# of a digit.
_EACH = 4 if devices.current.interpreted else 16
_BLOCK = 4096
_SHARED_EACH, _WIDE_EACH, _ALONE_EACH = (4, 4, 4) if devices.current.interpreted else (24, 20, 16)
_COUNTED = 8
_COPIES = 2 if devices.current.interpreted else 8
# The longest row that a program holds, in bytes: what its elements change places through has 48 KiB at most.
_HELD = 32 * 1024
_DIGITS = tl.constexpr(256)
# Places, in order.
_PLACES = Keys(bits=32, infinity=0, signed=False, descending=False)
# The words that the counter of tickets has for itself, so that it shares no cache line with counts.
_COUNTER = 32
# Counts have two bits of a word for what they are of: nothing yet, a block, or all blocks up to one.
_MOST = 2**29


def check_length(n: int) -> None:
    """Decline rows that programs cannot share."""
    if not (devices.current.forward_progress or devices.current.interpreted):
        raise Decline("long rows on a device whose programs may not wait for each other")
    if n >= _MOST:
        raise Decline("rows whose counts take more than 30 bits")


@triton.jit
def unwanted(flag):
    """Whether there is a flag, and it is 0."""
    return tl.load(flag[0]) == 0 if len(flag) > 0 else False


@triton.jit
def leave_word(counts, block, own):
    """Tell the programs behind of how many elements of each class a block has.

    `counts` are the words of its row, as many for each block as there are classes. The first block is all up to it.
    """
    CLASSES: tl.constexpr = own.shape[0]
    words = counts + block * CLASSES + tl.arange(0, CLASSES)
    tl.atomic_xchg(words, own * 4 + tl.where(block == 0, 2, 1), sem="relaxed")


@triton.jit
def counted_before(counts, block, own):
    """How many elements of each class all blocks before a program's have, which has published its `own`.

    Each class is looked for by itself, in several blocks at a time, as far as their programs have published theirs.
    """
    CLASSES: tl.constexpr = own.shape[0]
    AT_ONCE: tl.constexpr = 8 if CLASSES > 32 else 16
    classes = tl.arange(0, CLASSES)
    before = tl.zeros((CLASSES,), tl.int32)
    if block > 0:
        looked = tl.zeros((CLASSES,), tl.int32) + (block - 1)
        while tl.max(looked, axis=0) >= 0:
            pointers = counts + looked.to(tl.int64) * CLASSES + classes
            found = ()
            for j in tl.static_range(AT_ONCE):
                found = found + (tl.load(pointers - j * CLASSES, mask=looked >= j, other=0, volatile=True),)
            pending = looked >= 0
            for j in tl.static_range(AT_ONCE):
                known = pending & ((found[j] & 3) != 0)
                before += tl.where(known, found[j] >> 2, 0)
                looked -= known.to(tl.int32)
                pending = known & ((found[j] & 3) == 1)
                # All blocks up to this one are in it.
                looked = tl.where(known & ((found[j] & 3) == 2), -1, looked)
        words = counts + block * CLASSES + classes
        tl.atomic_xchg(words, (before + own) * 4 + 2, sem="relaxed")
    return before


@triton.jit
def place_of(k, THREADS: tl.constexpr, EACH: tl.constexpr):
    """The places of the threads' k-th elements in a block: each warp has a part of it, and lanes' are neighbours."""
    LANES: tl.constexpr = min(32, THREADS)
    thread = tl.arange(0, THREADS)
    return (thread // LANES * (LANES * EACH) + thread % LANES) + k * LANES


@triton.jit
def load_each(source, begin, step, n, THREADS: tl.constexpr, EACH: tl.constexpr):
    """A program's elements of a row from `begin` on, as int64 where they have 64 bits and else as int32."""
    found = ()
    for k in tl.static_range(EACH):
        place = begin + place_of(k, THREADS, EACH)
        word = tl.load(source + place * step, mask=place < n, other=0)
        found = found + (word if word.dtype.primitive_bitwidth == 64 else word.to(tl.int32),)
    return found


@triton.jit
def _digits_of(words, shift, valid, KEYS: tl.constexpr):
    """Those of a program's elements, of 8 bits of their keys from `shift` on.

    From place `valid` on there are no elements: they have the last digit, and stay behind all others by being there.
    """
    EACH: tl.constexpr = len(words)
    THREADS: tl.constexpr = words[0].shape[0]
    found = ()
    for k in tl.static_range(EACH):
        digit = digit_of(words[k], shift, KEYS)
        found = found + (tl.where(place_of(k, THREADS, EACH) < valid, digit, 255),)
    return found


@triton.jit
def _own_room(words):
    """Where a program's elements change places, and before that each warp has its counters."""
    THREADS: tl.constexpr = words[0].shape[0]
    return alloc_shared(max(len(words) * THREADS, (THREADS + 31) // 32 * 256), words[0].dtype)


@triton.jit
def positions_by_digit(counters, digits):
    """(where a program's elements belong in order of their digits, those of equal ones as they are; how many of each).

    Each warp numbers its own elements of each digit, by counters of its own.
    """
    EACH: tl.constexpr = len(digits)
    THREADS: tl.constexpr = digits[0].shape[0]
    LANES: tl.constexpr = min(32, THREADS)
    WARPS: tl.constexpr = THREADS // LANES
    every = tl.arange(0, _DIGITS)
    none = tl.zeros((_DIGITS,), tl.int32)
    tl.debug_barrier()
    for w in tl.static_range(WARPS):
        store_shared(counters, every + w * _DIGITS, none)
    tl.debug_barrier()
    own = tl.arange(0, THREADS) // LANES * _DIGITS
    numbers = ()
    for k in tl.static_range(EACH):
        numbers = numbers + (warp_rank(counters, own + digits[k]),)
    tl.debug_barrier()
    counts = ()
    total = none
    for w in tl.static_range(WARPS):
        counts = counts + (load_shared(counters, every + w * _DIGITS, none),)
        total += counts[w]
    # Where each warp's elements of a digit begin.
    start = tl.cumsum(total, axis=0) - total
    tl.debug_barrier()
    for w in tl.static_range(WARPS):
        store_shared(counters, every + w * _DIGITS, start)
        start += counts[w]
    tl.debug_barrier()
    positions = ()
    for k in tl.static_range(EACH):
        positions = positions + (numbers[k] + load_shared(counters, own + digits[k], numbers[k]),)
    return positions, total


@triton.jit
def _exchange(buffer, elements, positions):
    """Elements moved to positions, each of which there is once."""
    EACH: tl.constexpr = len(elements)
    THREADS: tl.constexpr = positions[0].shape[0]
    tl.debug_barrier()
    for k in tl.static_range(EACH):
        store_shared(buffer, positions[k], elements[k])
    tl.debug_barrier()
    found = ()
    for k in tl.static_range(EACH):
        found = found + (load_shared(buffer, place_of(k, THREADS, EACH), elements[k]),)
    return found


@triton.jit
def _sort_by_one_digit(own, words, numbers, digits):
    """A program's elements, and numbers beside them, in order of a digit that it has of each, by its `own` room."""
    positions, _ = positions_by_digit(own, digits)
    return _exchange(own, words, positions), _exchange(own, numbers, positions)


@libentry()
@triton.jit(do_not_specialize=["n", "limit", "passes", "shift", "given_passes"])
def _sort_held(
    values,
    indices,
    words,
    given,
    counts,
    shape,
    strides,
    steps,
    n,
    limit,
    passes,
    shift,
    given_passes,
    PLACES: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """A program sorts its row and writes the first `limit` elements, and the places or numbers `given` of them.

    Where a row has as many elements as `counts` tell, equal ones are put in order of what is given of them first, from
    bit `shift` on.
    """
    wait_for_previous_launch()
    row = tl.program_id(0).to(INDEX)
    if len(counts) > 0:
        n = tl.load(counts[0] + row)
    begin = tl.zeros((), INDEX)
    word = load_each(words + strided_offset(row, shape, strides[0]), begin, steps[0], n, THREADS, EACH)
    beside = ()
    if len(given) > 0:
        beside = load_each(given[0] + strided_offset(row, shape, strides[3]), begin, steps[3], n, THREADS, EACH)
    elif len(indices) > 0:
        for k in tl.static_range(EACH):
            beside = beside + (place_of(k, THREADS, EACH),)
    own = _own_room(word)
    if len(counts) > 0:
        for i in range(given_passes):
            digits = _digits_of(beside, shift + 8 * i, n, PLACES)
            word, beside = _sort_by_one_digit(own, word, beside, digits)
    for i in range(passes):
        word, beside = _sort_by_one_digit(own, word, beside, _digits_of(word, 8 * i, n, KEYS))
    for k in tl.static_range(EACH):
        place = begin + place_of(k, THREADS, EACH)
        mask = place < limit
        if len(values) > 0:
            pointers = values[0] + strided_offset(row, shape, strides[1]) + place * steps[1]
            tl.store(pointers, word[k].to(values[0].dtype.element_ty), mask=mask)
        if len(indices) > 0:
            pointers = indices[0] + strided_offset(row, shape, strides[2]) + place * steps[2]
            tl.store(pointers, beside[k].to(indices[0].dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n", "blocks"])
def _count_digits(
    counts,
    unless,
    words,
    shape,
    strides,
    step,
    n_rows,
    n,
    blocks,
    PASSES: tl.constexpr,
    COUNTED: tl.constexpr,
    COPIES: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """A program counts the digits of COUNTED blocks of its row, for all passes, or nothing where a flag is 0.

    Neighbours among its threads have counters of their own, in other banks of shared memory, so that elements of few
    different digits do not wait for each other.
    """
    wait_for_previous_launch()
    if unwanted(unless):
        return
    COUNTERS: tl.constexpr = PASSES * COPIES * _DIGITS
    row = (tl.program_id(0) // blocks).to(INDEX)
    begin = (tl.program_id(0) % blocks).to(INDEX) * (THREADS * EACH * COUNTED)
    source = words + strided_offset(row, shape, strides)
    digits = tl.arange(0, _DIGITS)
    # The last is for elements that there are not.
    own = alloc_shared(COUNTERS + 1, tl.int32)
    for i in tl.static_range(PASSES * COPIES):
        store_shared(own, digits + i * _DIGITS, tl.zeros((_DIGITS,), tl.int32))
    tl.debug_barrier()
    one = tl.full((THREADS,), 1, tl.int32)
    copy = tl.arange(0, THREADS) % COPIES
    for j in range(COUNTED):
        first = begin + j * (THREADS * EACH)
        word = load_each(source, first, step, n, THREADS, EACH)
        for k in tl.static_range(EACH):
            inside = first + place_of(k, THREADS, EACH) < n
            for i in tl.static_range(PASSES):
                digit = digit_of(word[k], 8 * i, KEYS) + i * _DIGITS
                add_shared(own, tl.where(inside, digit * COPIES + copy, one * COUNTERS), one)
    tl.debug_barrier()
    for i in tl.static_range(PASSES):
        found = tl.zeros((_DIGITS,), tl.int32)
        for j in tl.static_range(COPIES):
            found += load_shared(own, (digits + i * _DIGITS) * COPIES + j, found)
        tl.atomic_add(counts + (i * n_rows + row) * _DIGITS + digits, found, mask=found > 0, sem="relaxed")


# What a pass has to do for a row: nothing, or to move it, from the input or into the result if it is the first or last
# to do so; else from and into either of two buffers.
_MOVES = tl.constexpr(1)
_FIRST = tl.constexpr(2)
_FINAL = tl.constexpr(4)
_SECOND = tl.constexpr(8)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n"])
def _plan_passes(routes, totals, unless, n_rows, n, PASSES: tl.constexpr):
    """A program finds where the digits of its row begin, from how many of each there are, and what passes have to do.

    A pass by a digit that all elements share would move nothing. One pass does, to write the result, but where a flag
    says that nothing is to be moved, by being 0.
    """
    wait_for_previous_launch()
    row = tl.program_id(0).to(tl.int64)
    digits = tl.arange(0, _DIGITS)
    moves = ()
    left = 0
    for i in tl.static_range(PASSES):
        pointers = totals + (i * n_rows + row) * _DIGITS + digits
        total = tl.load(pointers)
        tl.store(pointers, tl.cumsum(total, axis=0) - total)
        moves = moves + ((tl.max(total, axis=0) < n).to(tl.int32),)
        left += moves[i]
    alone = tl.where(left == 0, 1, 0)
    left += alone
    wanted = unwanted(unless) == 0
    first = 1
    for i in tl.static_range(PASSES):
        move = moves[i] | (alone if i == 0 else 0)
        route = _MOVES | first * _FIRST | tl.where(left == 1, _FINAL, 0) | (left & 1) * _SECOND
        tl.store(routes + i * n_rows + row, tl.where((move != 0) & wanted, route, 0))
        first = tl.where(move != 0, 0, first)
        left -= move


@libentry()
@triton.jit(do_not_specialize=["n", "blocks", "limit", "shift", "apart"])
def _sort_by_digit(
    values,
    indices,
    words,
    given,
    buffers,
    buffered,
    starts,
    routes,
    scratch,
    shape,
    strides,
    steps,
    n,
    blocks,
    limit,
    shift,
    apart: tl.int64,
    COUNTER: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """A program moves a block of its row to where its digits begin, in order, if the row's route has this pass move it.

    Of `buffers` for elements, and those `buffered` beside them, there are two, so many elements `apart`. Into the
    result it moves what is below `limit`.
    """
    wait_for_previous_launch()
    ticket = tl.atomic_add(scratch, 1, sem="relaxed")
    row, block = (ticket // blocks).to(INDEX), ticket % blocks
    route = tl.load(routes + row)
    if route != 0:
        first, final = (route & _FIRST) != 0, (route & _FINAL) != 0
        other = tl.where((route & _SECOND) != 0, apart, 0)
        begin = block * (THREADS * EACH)
        valid = tl.minimum(n - begin, THREADS * EACH)
        own_row = row.to(tl.int64) * n
        # The buffers change roles: what one pass wrote the next one reads.
        source = tl.where(first, words + strided_offset(row, shape, strides[0]), buffers + own_row + (apart - other))
        step = tl.where(first, steps[0], 1)
        word = load_each(source, begin.to(INDEX), step.to(INDEX), n, THREADS, EACH)
        exchanged = _own_room(word)
        positions, own = positions_by_digit(exchanged, _digits_of(word, shift, valid, KEYS))
        counts = scratch + COUNTER + row.to(tl.int64) * blocks * _DIGITS
        leave_word(counts, block, own)
        word = _exchange(exchanged, word, positions)
        # Read no sooner, so that threads need fewer registers, and multiprocessors have more programs.
        beside = ()
        if len(indices) > 0:
            source = buffered + own_row + (apart - other)
            if len(given) > 0:
                source = tl.where(first, given[0] + strided_offset(row, shape, strides[3]), source)
                step = tl.where(first, steps[3], 1)
                beside = load_each(source, begin.to(INDEX), step.to(INDEX), n, THREADS, EACH)
            else:
                for k in tl.static_range(EACH):
                    place = begin + place_of(k, THREADS, EACH)
                    mask = (place < n) & (first == 0)
                    beside = beside + (tl.load(source + place, mask=mask, other=place),)
            beside = _exchange(exchanged, beside, positions)
        before = counted_before(counts, block, own)
        digits = tl.arange(0, _DIGITS)
        start = tl.load(starts + row.to(tl.int64) * _DIGITS + digits) + before - (tl.cumsum(own, axis=0) - own)
        table = alloc_shared(_DIGITS, tl.int32)
        store_shared(table, digits, start)
        tl.debug_barrier()
        target, inside, step = buffers + own_row + other, first | True, tl.full((), 1, INDEX)
        if len(values) > 0:
            target = tl.where(final, values[0] + strided_offset(row, shape, strides[1]), target)
            step = tl.where(final, steps[1], 1).to(INDEX)
        else:
            inside = final == 0
        most = tl.where(final, limit, n)
        for k in tl.static_range(EACH):
            place = place_of(k, THREADS, EACH)
            moved = place + load_shared(table, digit_of(word[k], shift, KEYS), place)
            mask = (place < valid) & (moved < most)
            tl.store(target + moved.to(INDEX) * step, word[k].to(words.dtype.element_ty), mask=mask & inside)
            if len(indices) > 0:
                tl.store(buffered + own_row + other + moved, beside[k], mask=mask & (final == 0))
                pointers = indices[0] + strided_offset(row, shape, strides[2]) + moved.to(INDEX) * steps[2]
                tl.store(pointers, beside[k].to(indices[0].dtype.element_ty), mask=mask & final)


def _threads(elements: int, each: int, alone: bool = False) -> dict[str, int]:
    """The threads that have so many elements of a row, and how many each has, no more than it can rank.

    `alone` if they are keys of 32 bits at most, without places.
    """
    device = devices.current
    threads = max(1 if device.interpreted else 32, elements // each)
    chosen = SORTING[device.kind]
    options = {"maxnreg": chosen.registers_alone if alone else chosen.registers} if device.ptx else {}
    return {"THREADS": threads, "EACH": each, "num_warps": max(1, threads // 32), **options}


def longest_held(keys: Keys) -> int:
    """The longest row that a program holds."""
    return _HELD // max(4, keys.bits // 8)


def sort_held_rows(
    x: torch.Tensor,
    dim: int,
    keys: Keys,
    values: torch.Tensor | None,
    indices: torch.Tensor | None,
    given: torch.Tensor | None = None,
) -> None:
    """Sort rows that a program holds; what is written of each is as many as there are in `values`, or `indices`.

    Numbers `given` for places have 32 bits.
    """
    any_target = values if values is not None else indices
    assert any_target is not None
    operands = (x, any_target, any_target if indices is None else indices, x if given is None else given)
    rows, length = Rows(operands, dim), power_of_2(x.shape[dim])
    _sort_held[(rows.n_rows,)](
        () if values is None else (words(values),),
        () if indices is None else (indices,),
        words(x),
        () if given is None or indices is None else (given,),
        (),
        *(rows.shape, rows.strides, rows.steps, x.shape[dim], any_target.shape[dim], keys.passes, 0, 0),
        PLACES=_PLACES,
        KEYS=keys,
        INDEX=rows.index,
        **_threads(length, min(_EACH, max(1, length // 32))),
    )


def sort_taken_rows(
    taken: torch.Tensor,
    places: torch.Tensor,
    counts: torch.Tensor,
    rows: Rows,
    values: torch.Tensor,
    indices: torch.Tensor,
    keys: Keys,
    limit: int,
    ordered_bits: int,
    bits: int,
) -> None:
    """Sort words taken of rows, which a program holds, by their keys and then their places, and write `limit` of each.

    Of each of the `rows`, of which values and indices are the second and third tensors, there are as many as `counts`
    tell. Places have so many `bits`, of which those that differ in the last ones alone are in order.
    """
    n_rows, slots = taken.shape
    strides = [slots]
    for size in rows.shape:
        strides.append(strides[-1] * size)
    own, length = tuple(strides), power_of_2(slots)
    _sort_held[(n_rows,)](
        (words(values),),
        (indices,),
        taken,
        (places,),
        (counts,),
        *(rows.shape, (own, *rows.strides[1:], own), (1, *rows.steps[1:], 1), slots, limit, keys.passes),
        *(ordered_bits, -(-max(0, bits - ordered_bits) // 8)),
        PLACES=_PLACES,
        KEYS=keys,
        INDEX=tl.int64 if n_rows * slots >= INT32_LIMIT else rows.index,
        **_threads(length, min(_EACH, max(1, length // 32))),
    )


def holds(n: int, keys: Keys) -> bool:
    """Whether a program sorts rows of a length by their digits."""
    return n <= longest_held(keys) and (devices.current.ptx or devices.current.interpreted)


def route(n: int, keys: Keys) -> str:
    """What sorts rows of a length: a "network" in registers, one program that holds a row, or several."""
    if n <= min(block.LONGEST, SORTING[devices.current.kind].network):
        return "network"
    return "held" if holds(n, keys) else "long"


def sort_along(
    x: torch.Tensor,
    dim: int,
    keys: Keys,
    values: torch.Tensor | None,
    indices: torch.Tensor | None,
    given: torch.Tensor | None = None,
) -> None:
    """Sort rows of any length; numbers `given` for places have 32 bits."""
    chosen = {"network": sort_rows, "held": sort_held_rows, "long": sort_long_rows}[route(x.shape[dim], keys)]
    chosen(x, dim, keys, values, indices, given)


def sort_long_rows(
    x: torch.Tensor,
    dim: int,
    keys: Keys,
    values: torch.Tensor | None,
    indices: torch.Tensor | None,
    given: torch.Tensor | None = None,
    passes: int | None = None,
    unless: torch.Tensor | None = None,
) -> None:
    """Sort rows of any length; what is written of each is as many as there are in `values`, or `indices`.

    Numbers `given` for places have 32 bits. Where the keys' first digits are all the same, so many `passes` are enough
    for the others. Nothing is done where a flag says `unless`, by being 0.
    """
    n = x.shape[dim]
    n_rows = math.prod(x.shape) // n
    check_length(n)
    any_target = values if values is not None else indices
    assert any_target is not None
    alone = indices is None and keys.bits <= 32
    each = _WIDE_EACH if keys.bits == 64 else _ALONE_EACH if alone else _SHARED_EACH
    facts = _threads(_BLOCK // _EACH * each, each, alone)
    blocks = -(-n // (facts["THREADS"] * facts["EACH"]))
    passes = keys.passes if passes is None else passes
    apart = _COUNTER + n_rows * blocks * _DIGITS.value
    totals_of_all = passes * n_rows * _DIGITS.value
    scratch = zeros((totals_of_all + passes * apart,), torch.int32, x.device)
    totals, scratch = scratch[:totals_of_all], scratch[totals_of_all:]
    routes = empty((passes, n_rows), torch.int32, x.device)
    source = words(x)
    rows = Rows((x,), dim)
    parts = -(-n // (_BLOCK * _COUNTED))
    flag = () if unless is None else (unless,)
    _count_digits[(n_rows * parts,)](
        *(totals, flag, source, rows.shape, rows.strides[0], rows.steps[0], n_rows, n, parts),
        PASSES=passes,
        COUNTED=_COUNTED,
        COPIES=min(_COPIES, 32 // passes),
        KEYS=keys,
        INDEX=rows.index,
        **_threads(_BLOCK, _EACH),
    )
    _plan_passes[(n_rows,)](routes, totals, flag, n_rows, n, PASSES=passes, num_warps=8)
    shape = (min(2, passes - 1), n_rows, n)
    buffers = empty(shape, source.dtype, x.device)
    buffered = empty(shape if indices is not None else (0,), torch.int32, x.device)
    operands = (x, any_target, any_target if indices is None else indices, x if given is None else given)
    rows = Rows(operands, dim)
    for i in range(passes):
        _sort_by_digit[(n_rows * blocks,)](
            () if values is None else (words(values),),
            () if indices is None else (indices,),
            source,
            () if given is None or indices is None else (given,),
            *(buffers, buffered, totals[i * n_rows * _DIGITS.value :], routes[i], scratch[i * apart :]),
            *(rows.shape, rows.strides, rows.steps, n, blocks, any_target.shape[dim], 8 * i, n_rows * n),
            COUNTER=_COUNTER,
            KEYS=keys,
            INDEX=rows.index,
            **facts,
        )
