"""Rows sorted digit by digit, the last digit first.

A program ranks its elements by 4 bits at a time. How many of each of 16 digits a thread has seen are 16 counters in one
word, and how many the threads before it have, four in each of four words, of which prefix sums are taken (Satish,
Harris and Garland 2009, "Designing efficient sorting algorithms for manycore GPUs"). The elements then change places
through shared memory. That is all for rows that a program holds.

Of longer rows all digits of 8 bits are counted in one pass. Then there is one pass for each digit, in which a program
sorts a block by it and learns from the blocks before its own how many of each digit have come before, while those still
work (Adinets and Merrill 2022, "Onesweep", with the decoupled look-back of Merrill and Garland 2016). Programs take
tickets, so that those before a program's own have begun, whatever order the device starts them in.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dispatch.call import empty, zeros
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting import block
from tritonite.engine.sorting.block import sort_rows
from tritonite.engine.sorting.keys import Keys, Rows, digit_of, ordered, words
from tritonite.engine.sorting.shared import count, exchange, look_up, sums_before
from tritonite.errors import Decline
from tritonite.language.places import strided_offset
from tritonite.launch import libentry
from tritonite.tune.sorting import SORTING

# Elements of a program and of each of its threads, and how many blocks of them one that counts takes.
_BLOCK = 4096
_EACH = 4 if devices.current.interpreted else 16
_COUNTED = 8
# The longest row that a program holds, in bytes: what its elements change places through has 48 KiB at most.
_HELD = 32 * 1024
# A word's four counters, each of them once.
_EVERY = tl.constexpr(0x0001000100010001)
# The digits that there are, and those of elements that there are not.
_DIGITS = tl.constexpr(256)
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
def leave_word(counts, block, own):
    """Tell the programs behind of how many elements of each class a block has.

    `counts` are the words of its row, as many for each block as there are classes. The first block is all up to it.
    """
    CLASSES: tl.constexpr = own.shape[0]
    words = counts + block * CLASSES + tl.arange(0, CLASSES)
    tl.atomic_xchg(words, own * 4 + tl.where(block == 0, 2, 1), sem="relaxed")


@triton.jit
def counted_before(counts, block, own):
    """How many elements of each class all blocks before a program's have, which has left word of its `own`.

    Each class is looked for by itself, in several blocks at a time, as far as their programs have left word.
    """
    CLASSES: tl.constexpr = own.shape[0]
    AT_ONCE: tl.constexpr = 4 if CLASSES > 32 else 16
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
def positions_by_nibble(nibbles):
    """Where elements in blocked order belong by 4 bits of theirs, those of equal bits in their order."""
    EACH: tl.constexpr = len(nibbles)
    seen = tl.zeros(nibbles[0].shape, tl.int64)
    one = seen + 1
    # Of 4 bits too, and all together in as many registers as one takes.
    among = seen
    for k in tl.static_range(EACH):
        shift = (nibbles[k] * 4).to(tl.int64)
        among |= ((seen >> shift) & 15) << (4 * k)
        # A counter has no place for a 16th.
        if k + 1 < EACH:
            seen += one << shift
    last = nibbles[EACH - 1]
    last_field = one << ((last & 3) * 16).to(tl.int64)
    words = ()
    for w in tl.static_range(4):
        fields = (seen >> (16 * w)) & 0xFFFF
        fields = (fields | (fields << 24)) & 0x000000FF000000FF
        fields = (fields | (fields << 12)) & 0x000F000F000F000F
        words = words + (fields + tl.where((last >> 2) == w, last_field, 0),)
    before, totals = sums_before(words)
    smaller = seen - seen
    starts = ()
    for w in tl.static_range(4):
        # Each counter and those below it.
        upto = totals[w] * _EVERY
        starts = starts + (before[w] + (upto << 16) + smaller,)
        smaller += ((upto >> 48) & 0xFFFF) * _EVERY
    positions = ()
    for k in tl.static_range(EACH):
        low = tl.where((nibbles[k] & 4) != 0, starts[1], starts[0])
        high = tl.where((nibbles[k] & 4) != 0, starts[3], starts[2])
        word = tl.where((nibbles[k] & 8) != 0, high, low)
        start = ((word >> ((nibbles[k] & 3) * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)
        positions = positions + (start + ((among >> (4 * k)) & 15).to(tl.int32),)
    return positions


@triton.jit
def _load_striped(source, begin, step, n, FILL: tl.constexpr, THREADS: tl.constexpr, EACH: tl.constexpr):
    """A program's elements of a row from `begin` on, as int64 where they have 64 bits and else as int32."""
    lane = tl.arange(0, THREADS)
    found = ()
    for k in tl.static_range(EACH):
        place = begin + k * THREADS + lane
        word = tl.load(source + place * step, mask=place < n, other=FILL)
        found = found + (word if word.dtype.primitive_bitwidth == 64 else word.to(tl.int32),)
    return found


@triton.jit
def _digits_of(words, shift, KEYS: tl.constexpr, BITS: tl.constexpr):
    """Those of a program's elements, of so many bits of their keys from `shift` on."""
    found = ()
    for k in tl.static_range(len(words)):
        found = found + (digit_of(ordered(words[k], KEYS), shift, KEYS, BITS),)
    return found


@triton.jit
def _sort_striped(words, numbers, shift, passes, KEYS: tl.constexpr):
    """A program's elements, and numbers beside them, in order of so many times 4 bits of their keys from `shift` on."""
    EACH: tl.constexpr = len(words)
    THREADS: tl.constexpr = words[0].shape[0]
    lane = tl.arange(0, THREADS)
    positions = ()
    for k in tl.static_range(EACH):
        positions = positions + (lane + k * THREADS,)
    # All exchanges are one, so that they have one buffer: the first is for blocked order, the last for striped.
    for i in range(passes + 1):
        words, numbers = exchange(words, numbers, positions, i == passes)
        if i < passes:
            positions = positions_by_nibble(_digits_of(words, shift + 4 * i, KEYS, 4))
    return words, numbers


@libentry()
@triton.jit(do_not_specialize=["n", "limit", "passes"])
def _sort_held(
    values,
    indices,
    words,
    given,
    shape,
    strides,
    steps,
    n,
    limit,
    passes,
    LAST: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """A program sorts its row and writes the first `limit` elements, and the places or numbers `given` of them."""
    row = tl.program_id(0).to(INDEX)
    begin = tl.zeros((), INDEX)
    word = _load_striped(words + strided_offset(row, shape, strides[0]), begin, steps[0], n, LAST, THREADS, EACH)
    number = ()
    if len(given) > 0:
        number = _load_striped(given[0] + strided_offset(row, shape, strides[3]), begin, steps[3], n, 0, THREADS, EACH)
    elif len(indices) > 0:
        for k in tl.static_range(EACH):
            number = number + (tl.arange(0, THREADS) + k * THREADS,)
    word, number = _sort_striped(word, number, 0, passes, KEYS)
    for k in tl.static_range(EACH):
        place = begin + k * THREADS + tl.arange(0, THREADS)
        mask = place < limit
        if len(values) > 0:
            pointers = values[0] + strided_offset(row, shape, strides[1]) + place * steps[1]
            tl.store(pointers, word[k].to(values[0].dtype.element_ty), mask=mask)
        if len(indices) > 0:
            pointers = indices[0] + strided_offset(row, shape, strides[2]) + place * steps[2]
            tl.store(pointers, number[k].to(indices[0].dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n", "blocks"])
def _count_digits(
    counts,
    words,
    shape,
    strides,
    step,
    n_rows,
    n,
    blocks,
    PASSES: tl.constexpr,
    COUNTED: tl.constexpr,
    LAST: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """A program counts the digits of COUNTED blocks of its row, for all passes."""
    row = (tl.program_id(0) // blocks).to(INDEX)
    begin = (tl.program_id(0) % blocks).to(INDEX) * (THREADS * EACH * COUNTED)
    source = words + strided_offset(row, shape, strides)
    digits = tl.arange(0, _DIGITS)
    found = ()
    for _ in tl.static_range(PASSES):
        found = found + (tl.zeros((_DIGITS,), tl.int32),)
    for j in range(COUNTED):
        word = _load_striped(source, begin + j * (THREADS * EACH), step, n, LAST, THREADS, EACH)
        counted = ()
        for i in tl.static_range(PASSES):
            counted = counted + (found[i] + count(_digits_of(word, 8 * i, KEYS, 8), _DIGITS),)
        found = counted
    # What stands for elements that there are not has been counted too.
    absent = tl.maximum(begin + THREADS * EACH * COUNTED - n, 0).to(tl.int32)
    for i in tl.static_range(PASSES):
        last = digit_of(ordered(tl.full((_DIGITS,), LAST, words.dtype.element_ty), KEYS), 8 * i, KEYS)
        own = found[i] - tl.where(digits == last, absent, 0)
        tl.atomic_add(counts + (i * n_rows + row) * _DIGITS + digits, own, mask=own > 0, sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["n", "blocks", "limit", "shift"])
def _sort_by_digit(
    values,
    indices,
    words,
    given,
    totals,
    scratch,
    shape,
    strides,
    steps,
    n,
    blocks,
    limit,
    shift,
    COUNTER: tl.constexpr,
    LAST: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """A program moves a block of its row to where its digits begin, in order, as far as that is below `limit`."""
    BLOCK: tl.constexpr = THREADS * EACH
    ticket = tl.atomic_add(scratch, 1, sem="relaxed")
    row, block = (ticket // blocks).to(INDEX), ticket % blocks
    digits = tl.arange(0, _DIGITS)
    begin = block.to(INDEX) * BLOCK
    word = _load_striped(words + strided_offset(row, shape, strides[0]), begin, steps[0], n, LAST, THREADS, EACH)
    number = ()
    if len(given) > 0:
        number = _load_striped(given[0] + strided_offset(row, shape, strides[3]), begin, steps[3], n, 0, THREADS, EACH)
    elif len(indices) > 0:
        for k in tl.static_range(EACH):
            number = number + (tl.arange(0, THREADS) + (block * BLOCK + k * THREADS),)
    own = count(_digits_of(word, shift, KEYS, 8), _DIGITS)
    counts = scratch + COUNTER + row * blocks * _DIGITS
    leave_word(counts, block, own)
    word, number = _sort_striped(word, number, shift, 2, KEYS)
    before = counted_before(counts, block, own)
    total = tl.load(totals + row * _DIGITS + digits)
    start = tl.cumsum(total, axis=0) - total + before - (tl.cumsum(own, axis=0) - own)
    # What stands for elements that there are not is the last of its digit.
    last = digit_of(ordered(tl.full((_DIGITS,), LAST, words.dtype.element_ty), KEYS), shift, KEYS)
    absent = tl.maximum(begin + BLOCK - n, 0).to(tl.int32)
    beyond = tl.sum(tl.where(digits <= last, own, 0), axis=0)
    starts = look_up(start, _digits_of(word, shift, KEYS, 8))
    for k in tl.static_range(EACH):
        lane = tl.arange(0, THREADS) + k * THREADS
        target = starts[k] + lane
        mask = ((lane < beyond - absent) | (lane >= beyond)) & (target < limit)
        target = target.to(INDEX)
        if len(values) > 0:
            pointers = values[0] + strided_offset(row, shape, strides[1]) + target * steps[1]
            tl.store(pointers, word[k].to(values[0].dtype.element_ty), mask=mask)
        if len(indices) > 0:
            pointers = indices[0] + strided_offset(row, shape, strides[2]) + target * steps[2]
            tl.store(pointers, number[k].to(indices[0].dtype.element_ty), mask=mask)


def _threads(elements: int, registers: int, digits: int = 1) -> dict[str, int]:
    """The threads that have so many elements of a row, and as many elements each as they can rank."""
    device = devices.current
    threads = max(1 if device.interpreted else max(32, digits), elements // _EACH)
    each = min(_EACH, max(1, elements // threads))
    options = {"maxnreg": registers} if device.ptx else {}
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
    rows = Rows(operands, dim)
    _sort_held[(rows.n_rows,)](
        () if values is None else (words(values),),
        () if indices is None else (indices,),
        words(x),
        () if given is None or indices is None else (given,),
        *(rows.shape, rows.strides, rows.steps, x.shape[dim], any_target.shape[dim], keys.bits // 4),
        LAST=keys.last_word,
        KEYS=keys,
        INDEX=rows.index,
        **_threads(power_of_2(x.shape[dim]), SORTING[devices.current.kind].held_registers),
    )


def route(n: int, keys: Keys) -> str:
    """What sorts rows of a length: a "network" in registers, one program that holds a row, or several."""
    device = devices.current
    if n <= min(block.LONGEST, SORTING[device.kind].network):
        return "network"
    return "held" if n <= longest_held(keys) and (device.ptx or device.interpreted) else "long"


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
) -> None:
    """Sort rows of any length; what is written of each is as many as there are in `values`, or `indices`.

    Numbers `given` for places have 32 bits. Where the keys' first digits are all the same, so many `passes` are enough
    for the others.
    """
    n = x.shape[dim]
    n_rows = math.prod(x.shape) // n
    check_length(n)
    threads = _threads(_BLOCK, SORTING[devices.current.kind].long_registers, _DIGITS.value)
    blocks = -(-n // (threads["THREADS"] * threads["EACH"]))
    passes = keys.passes if passes is None else passes
    each = _COUNTER + n_rows * blocks * _DIGITS.value
    totals_of_all = passes * n_rows * _DIGITS.value
    scratch = zeros((totals_of_all + passes * each,), torch.int32, x.device)
    totals, scratch = scratch[:totals_of_all], scratch[totals_of_all:]
    rows = Rows((x,), dim)
    parts = -(-blocks // _COUNTED)
    facts = {"KEYS": keys, "LAST": keys.last_word, **threads}
    _count_digits[(n_rows * parts,)](
        *(totals, words(x), rows.shape, rows.strides[0], rows.steps[0], n_rows, n, parts),
        PASSES=passes,
        COUNTED=_COUNTED,
        INDEX=rows.index,
        **facts,
    )
    shape = [*x.shape[:dim], *x.shape[dim + 1 :], n]
    source, numbers = words(x), given
    for i in range(passes):
        last = i == passes - 1
        if last:
            into, numbered = None if values is None else words(values), indices
        else:
            into = empty(shape, source.dtype, x.device).movedim(-1, dim)
            numbered = None if indices is None else empty(shape, torch.int32, x.device).movedim(-1, dim)
        any_target = into if into is not None else numbered
        assert any_target is not None
        operands = (source, any_target, any_target if numbered is None else numbered)
        rows = Rows((*operands, source if numbers is None else numbers), dim)
        _sort_by_digit[(n_rows * blocks,)](
            () if into is None else (into,),
            () if numbered is None else (numbered,),
            source,
            () if numbers is None or numbered is None else (numbers,),
            *(totals[i * n_rows * _DIGITS.value :], scratch[i * each :]),
            *(rows.shape, rows.strides, rows.steps, n, blocks, any_target.shape[dim], 8 * i),
            COUNTER=_COUNTER,
            INDEX=rows.index,
            **facts,
        )
        if not last:
            assert into is not None
            source, numbers = into, numbered
