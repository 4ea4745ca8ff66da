"""The search for the key of a rank in long rows, digit by digit, the highest digit first: radix select.

Each launch counts the next digit of the elements whose higher digits match, and the last program of a row picks the
digit. Selection by rank and top-k with large k both begin with `searched`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.sorting.block import BY_RANK, wanted_rank
from tritonite.engine.sorting.keys import Keys, Rows, as_integers, signed_key, unsigned_key
from tritonite.engine.sorting.lookback import check_length
from tritonite.engine.sorting.table import sorting_table
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import add_shared, alloc_shared, load_shared, store_shared
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry

# The state of a row's search has STATE_SIZE int64, whose offsets follow: the high bits of the key that are found, the
# number of low bits that are not; the same of an index among elements of that key; the rank among the elements that
# match the found bits, and the number of those.
STATE_SIZE = tl.constexpr(6)
FOUND_KEY = tl.constexpr(0)
KEY_SHIFT = tl.constexpr(1)
FOUND_INDEX = tl.constexpr(2)
INDEX_SHIFT = tl.constexpr(3)
RANK = tl.constexpr(4)
_MATCHING = tl.constexpr(5)
# The index shift when no bit of an index has been searched for.
_ALL_INDICES = tl.constexpr(31)


def block_of_program() -> dict[str, int]:
    """Return the elements of a block, and the warps of a program."""
    return {"BLOCK": sorting_table().select.block, "num_warps": _warps()}


def _warps() -> int:
    """Return the number of warps of a program."""
    chosen = sorting_table().select
    return min(chosen.warps, devices.warps(chosen.block))


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
    KEYS: tl.constexpr = META.keys
    DIGITS: tl.constexpr = 2**BITS
    row = (tl.program_id(0) // programs).to(META.index)
    program = tl.program_id(0) % programs
    digits = tl.arange(0, DIGITS)
    known = state + row * STATE_SIZE
    if META.first:
        found = tl.zeros((), tl.int64)
        left = wanted_rank(n, tl.load(nans + row), rank, META.mode).to(tl.int64)
        matching = found + n
    else:
        found, left, matching = tl.load(known + FOUND_KEY), tl.load(known + RANK), tl.load(known + _MATCHING)
    if rank - left + matching > enough:
        above = tl.load(known + FOUND_INDEX) if META.of_index else found
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
            key = unsigned_key(tl.load(source + index * step, mask=mask, other=0), KEYS)
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
            tl.store(known + FOUND_KEY, found if META.of_index else (found << BITS) | digit)
            tl.store(known + KEY_SHIFT, tl.full((), 0 if META.of_index else SHIFT, tl.int64))
            tl.store(known + FOUND_INDEX, (above << BITS) | digit if META.of_index else tl.zeros((), tl.int64))
            tl.store(known + INDEX_SHIFT, tl.full((), SHIFT if META.of_index else _ALL_INDICES, tl.int64))
            tl.store(known + RANK, left - tl.sum(tl.where(digits < digit, count, 0), axis=0))
            tl.store(known + _MATCHING, tl.sum(tl.where(digits == digit, count, 0), axis=0).to(tl.int64))
            tl.store(pointers, tl.zeros_like(count))
            tl.store(done + row, 0)


def blocks_of_program(blocks: int, programs: int, device: torch.device) -> int:
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


def searched(x: torch.Tensor, rows: Rows, n: int, rank: int, mode: int, keys: Keys, enough: int = 0) -> torch.Tensor:
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
    state = empty((n_rows, STATE_SIZE.value), torch.int64, x.device)
    if mode != BY_RANK and keys.infinity:
        _count_nans[(n_rows * blocks,)](*(nans, *space, blocks), KEYS=keys, INDEX=rows.index, **block_of_program())
    counted = blocks_of_program(n_rows * blocks, chosen.programs, x.device)
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
