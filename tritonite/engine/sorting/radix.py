"""Rows that no program holds, sorted digit by digit, the last digit first.

All digits are counted in one pass over the rows. Then there is one pass for each digit, in which a program ranks a
block by its digits and learns from the blocks before its own how many of each have come before, while those still work
(Adinets and Merrill 2022, "Onesweep", with the decoupled look-back of Merrill and Garland 2016). Programs take tickets,
so that those before a program's own have begun, whatever order the device starts them in.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dispatch.call import empty, zeros
from tritonite.engine.sorting.block import sort_integers
from tritonite.engine.sorting.keys import Keys, Rows, digit_of, ordered, words
from tritonite.errors import Decline
from tritonite.language.places import strided_offset
from tritonite.launch import libentry

# Elements of a program, and how many blocks of them one that counts takes.
_BLOCK = 2048
_COUNTED = 8
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
    """How many elements of each class all blocks before a program's have, which has left word of its `own`."""
    CLASSES: tl.constexpr = own.shape[0]
    classes = tl.arange(0, CLASSES)
    words = counts + block * CLASSES + classes
    before = tl.zeros((CLASSES,), tl.int32)
    if block > 0:
        looked = tl.zeros((CLASSES,), tl.int32) + (block - 1)
        pending = looked >= 0
        while tl.max(pending.to(tl.int32), axis=0) > 0:
            word = tl.load(counts + looked * CLASSES + classes, mask=pending, other=0, volatile=True)
            known = pending & ((word & 3) != 0)
            before += tl.where(known, word >> 2, 0)
            pending = pending & ((word & 3) != 2)
            looked -= (known & pending).to(tl.int32)
        tl.atomic_xchg(words, (before + own) * 4 + 2, sem="relaxed")
    return before


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
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program counts the digits of COUNTED blocks of its row, for all passes."""
    row = (tl.program_id(0) // blocks).to(INDEX)
    begin = (tl.program_id(0) % blocks).to(INDEX) * (BLOCK * COUNTED)
    source = words + strided_offset(row, shape, strides)
    digits = tl.arange(0, _DIGITS)
    for i in tl.static_range(PASSES):
        found = tl.zeros((_DIGITS,), tl.int32)
        for j in range(COUNTED):
            place = begin + j * BLOCK + tl.arange(0, BLOCK)
            mask = place < n
            key = ordered(tl.load(source + place * step, mask=mask, other=0), KEYS)
            found += tl.histogram(digit_of(key, 8 * i, KEYS), _DIGITS, mask=mask)
        tl.atomic_add(counts + (i * n_rows + row) * _DIGITS + digits, found, mask=found > 0, sem="relaxed")


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
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program moves a block of its row to where its digits begin, in order, as far as that is below `limit`."""
    ticket = tl.atomic_add(scratch, 1, sem="relaxed")
    row, block = (ticket // blocks).to(INDEX), ticket % blocks
    lane = tl.arange(0, BLOCK)
    place = (block * BLOCK + lane).to(INDEX)
    source = strided_offset(row, shape, strides[0])
    word = tl.load(words + source + place * steps[0], mask=place < n, other=0)
    digit = digit_of(ordered(word, KEYS), shift, KEYS)
    own = tl.histogram(digit, _DIGITS, mask=place < n)
    counts = scratch + COUNTER + row * blocks * _DIGITS
    leave_word(counts, block, own)
    # Within the block, digits in order, and elements of one digit in theirs.
    packed = sort_integers(tl.where(place < n, digit, _DIGITS) * BLOCK + lane)
    digit, lane_of = tl.minimum(packed // BLOCK, _DIGITS - 1), packed % BLOCK
    before = counted_before(counts, block, own)
    total = tl.load(totals + row * _DIGITS + tl.arange(0, _DIGITS))
    start = tl.cumsum(total, axis=0) - total + before - (tl.cumsum(own, axis=0) - own)
    target = (tl.gather(start, digit, 0) + lane).to(INDEX)
    mask = (place < n) & (target < limit)
    moved = (block * BLOCK + lane_of).to(INDEX)
    if len(values) > 0:
        again = tl.load(words + source + moved * steps[0], mask=mask, other=0)
        tl.store(values[0] + strided_offset(row, shape, strides[1]) + target * steps[1], again, mask=mask)
    if len(indices) > 0:
        number = moved
        if len(given) > 0:
            number = tl.load(given[0] + strided_offset(row, shape, strides[3]) + moved * steps[3], mask=mask, other=0)
        pointers = indices[0] + strided_offset(row, shape, strides[2]) + target * steps[2]
        tl.store(pointers, number.to(indices[0].dtype.element_ty), mask=mask)


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

    Where the keys' first digits are all the same, so many `passes` are enough for the others.
    """
    n = x.shape[dim]
    n_rows = math.prod(x.shape) // n
    check_length(n)
    block = _BLOCK
    blocks, passes = -(-n // block), keys.passes if passes is None else passes
    each = _COUNTER + n_rows * blocks * _DIGITS.value
    totals_of_all = passes * n_rows * _DIGITS.value
    scratch = zeros((totals_of_all + passes * each,), torch.int32, x.device)
    totals, scratch = scratch[:totals_of_all], scratch[totals_of_all:]
    rows = Rows((x,), dim)
    parts = -(-blocks // _COUNTED)
    facts = {"KEYS": keys, "BLOCK": block, "num_warps": 8}
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
