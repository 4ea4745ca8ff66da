"""Unique integers of a narrow range, found with a bitmap instead of a sort.

Launches, first to last: `_find_extrema` finds the range. `_write_flag` writes whether it is narrow enough.
`_set_bits` sets the bit of each integer, in shared memory if the bitmap fits. `_write_set` writes the integers whose
bits are set, at the number of bits set before. `_look_up` writes the rank of each element.

The host does not know whether the range is narrow enough, so that all programs end at once if it is not.

16-bit floats are mapped to integers in their order. A float that the map cannot serve makes the range too wide: nan,
each of which counts as unique, and -0.0, which equals 0.0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import BOOL, FLOATS, INTS
from tritonite.engine.iteration import INT32_LIMIT, span
from tritonite.engine.sorting.keys import Keys, as_integers, unsigned_key
from tritonite.engine.sorting.lookback import TICKET_INT64, check_length, runs_before
from tritonite.engine.sorting.radix import route
from tritonite.engine.sorting.runs import Distinct
from tritonite.engine.sorting.table import sorting_table
from tritonite.language import libdevice
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import add_shared, alloc_shared, load_shared, or_shared, store_shared
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry

# Distance between the words at which programs start to merge into the common bitmap, so that few collide.
_STAGGER = tl.constexpr(64)
# The largest sum of an integer's half, rounded down, and 2^62. Subtracting from it turns a minimum into a maximum.
_LAST_HALF = tl.constexpr(2**63 - 1)
# An integer too far from all 16-bit keys for any range.
_NONE = tl.constexpr(2**30)


@triton.jit
def _extent(extrema):
    """Return (half of the least integer, half of the largest one minus that).

    Integers are halved, rounded down, so that their difference fits in an int64.
    """
    least = (tl.load(extrema + 1, volatile=True) ^ _LAST_HALF) - 2**62
    return least, tl.load(extrema, volatile=True) - 2**62 - least


@triton.jit
def _integer_of(value, KEYS: tl.constexpr):
    """Return the integer of an element's bits, as int64 or int32; _NONE for nan and -0.0."""
    if KEYS.infinity > 0:
        key = unsigned_key(value, KEYS).to(tl.int32)
        integer = tl.where((key > 2 * KEYS.infinity) | (value == -(2 ** (KEYS.bits - 1))), _NONE, key)
    else:
        integer = value if KEYS.bits == 64 else value.to(tl.int32)
    return integer


@triton.jit
def _bits_of(integer, KEYS: tl.constexpr):
    """Return the bits of the element that `_integer_of` maps to an integer."""
    if KEYS.infinity > 0:
        size = integer - KEYS.infinity
        integer = tl.where(size < 0, -(2 ** (KEYS.bits - 1)) - size, size)
    return integer


@libentry()
@triton.jit(do_not_specialize=["limit"])
def _find_extrema(extrema, x, step, n, limit: tl.int64, KEYS: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """Add a block to the extrema, unless the range of other blocks already reaches the limit.

    `extrema` has two int64, at first 0: the largest half plus 2^62, and _LAST_HALF minus the least such number. The
    limit is half of the integers that a range may have.
    """
    wait_for_previous_launch()
    _, reach = _extent(extrema)
    if reach < limit:
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + index.to(INDEX) * step, mask=index < n, other=0)
        # Lanes behind the end have the first element, which changes no extremum.
        value = _integer_of(tl.where(index < n, value, tl.load(x)), KEYS)
        largest = (tl.max(value, axis=0).to(tl.int64) >> 1) + 2**62
        least = (tl.min(value, axis=0).to(tl.int64) >> 1) + 2**62
        tl.atomic_max(extrema, largest, sem="relaxed")
        tl.atomic_max(extrema + 1, least ^ _LAST_HALF, sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["limit"])
def _write_flag(flag, extrema, limit: tl.int64):
    """Write -1 if the range is too wide and 0 if it is not, by one program."""
    wait_for_previous_launch()
    _, reach = _extent(extrema)
    tl.store(flag, tl.where(reach < limit, 0, -1).to(tl.int64))


@triton.jit
def _bit_numbers(
    x, step, begin, n, first, KEYS: tl.constexpr, INDEX: tl.constexpr, THREADS: tl.constexpr, EACH: tl.constexpr
):
    """Return (the elements' bit numbers in the bitmap, the mask of valid elements) of a block, as tuples by thread.

    A bit number is an integer minus `first`, the least of the range. Thread t has elements t, t + THREADS, ..., so that
    no value has to move between threads for accesses to the bitmap.
    """
    own = first if KEYS.bits == 64 else first.to(tl.int32)
    found, inside = (), ()
    for k in tl.static_range(EACH):
        index = begin + k * THREADS + tl.arange(0, THREADS)
        found = found + (tl.load(x + index.to(INDEX) * step, mask=index < n, other=0),)
        inside = inside + (index < n,)
    numbers = ()
    for k in tl.static_range(EACH):
        numbers = numbers + ((tl.where(inside[k], _integer_of(found[k], KEYS), own) - own).to(tl.int32),)
    return numbers, inside


@libentry()
@triton.jit(do_not_specialize=["limit", "rounds"])
def _set_bits(
    bits,
    counts,
    extrema,
    x,
    step,
    n,
    limit: tl.int64,
    rounds,
    ROOM: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Set the bits of the integers in `rounds` blocks of the program, and add to their `counts` if there are any.

    If the bitmap or the counts of the range fit in shared memory, the program collects them there and merges once.
    Otherwise it sets bits in memory that it does not see set yet. Its cache may have an old value, which only costs a
    needless atomic, and frequent integers are not set again and again.
    """
    wait_for_previous_launch()
    half, reach = _extent(extrema)
    if reach < limit:
        BLOCK: tl.constexpr = THREADS * EACH
        lane = tl.arange(0, BLOCK)
        one = tl.full((THREADS,), 1, tl.int32)
        first = tl.program_id(0) * BLOCK
        stride = tl.num_programs(0) * BLOCK
        # Integers of an int32 in shared memory: a count has one, a word of bits 32.
        PER_ITEM: tl.constexpr = 1 if len(counts) > 0 else 32
        items = (2 * reach // PER_ITEM + (2 if PER_ITEM == 1 else 1)).to(tl.int32)
        if items < ROOM:
            own = alloc_shared(ROOM, tl.int32)
            for begin in range(0, items, BLOCK):
                store_shared(own, tl.minimum(begin + lane, ROOM - 1), tl.zeros((BLOCK,), tl.int32))
            tl.debug_barrier()
            for j in range(rounds):
                at, inside = _bit_numbers(x, step, first + j * stride, n, half * 2, KEYS, INDEX, THREADS, EACH)
                for k in tl.static_range(EACH):
                    if len(counts) > 0:
                        # The last count is for lanes behind the end.
                        add_shared(own, tl.where(inside[k], at[k], ROOM - 1), one)
                    else:
                        bit = one << (at[k] & 31)
                        missing = inside[k] & ((load_shared(own, at[k] >> 5, one) & bit) == 0)
                        or_shared(own, at[k] >> 5, tl.where(missing, bit, 0))
            tl.debug_barrier()
            # Each program begins elsewhere, so that few add to the same words at a time.
            begun = tl.program_id(0) * _STAGGER % items
            for begin in range(0, items, BLOCK):
                inside = begin + lane < items
                item = (tl.minimum(begin + lane, items - 1) + begun) % items
                found = load_shared(own, item, lane)
                if len(counts) > 0:
                    tl.atomic_add(counts[0] + item, found, mask=inside & (found > 0), sem="relaxed")
                    word, found = item >> 5, tl.where(found > 0, tl.full((BLOCK,), 1, tl.int32) << (item & 31), 0)
                else:
                    word = item
                seen = tl.load(bits + word, mask=inside, other=0)
                tl.atomic_or(bits + word, found, mask=inside & ((found & ~seen) != 0), sem="relaxed")
        else:
            for j in range(rounds):
                at, inside = _bit_numbers(x, step, first + j * stride, n, half * 2, KEYS, INDEX, THREADS, EACH)
                seen = ()
                for k in tl.static_range(EACH):
                    seen = seen + (tl.load(bits + (at[k] >> 5), mask=inside[k], other=0),)
                for k in tl.static_range(EACH):
                    bit = one << (at[k] & 31)
                    tl.atomic_or(bits + (at[k] >> 5), bit, mask=inside[k] & ((seen[k] & bit) == 0), sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["limit"])
def _write_set(
    values,
    ranks,
    lengths,
    total,
    scratch,
    bits,
    counts,
    extrema,
    limit: tl.int64,
    KEYS: tl.constexpr,
    TICKET: tl.constexpr,
    THREADS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Write the integers of WORDS words of the bitmap in order, and the integers' counts.

    An int64 of `ranks` gets a word of the bitmap in its upper half, and the number of bits set before it in its lower
    half. Look-back (`lookback.py`) gives the number of bits of earlier programs.
    """
    wait_for_previous_launch()
    half, reach = _extent(extrema)
    block = tl.atomic_add(scratch, 1, sem="relaxed").to(tl.int32)
    n_words = reach // 16 + 1
    if (reach < limit) & (block.to(tl.int64) * WORDS < n_words):
        at = block * WORDS + tl.arange(0, WORDS)
        word = tl.load(bits + at, mask=at < n_words, other=0)
        count = libdevice.popc(word)
        own = tl.sum(count, axis=0)
        before, _ = runs_before(scratch + TICKET, block, own, tl.full((), -1, tl.int32), THREADS)
        tl.store(total, (before + own).to(tl.int64), mask=(block + 1).to(tl.int64) * WORDS >= n_words)
        rank = tl.cumsum(count, axis=0) - count + before
        if len(ranks) > 0:
            tl.store(ranks[0] + at, (word.to(tl.int64) << 32) | rank.to(tl.int64), mask=at < n_words)
        bit = tl.arange(0, 32)[None, :]
        found = ((word[:, None] >> bit) & 1) != 0
        target = rank[:, None] + libdevice.popc(word[:, None] & ~(tl.full((1, 32), -1, tl.int32) << bit))
        number = at[:, None] * 32 + bit
        tl.store(values + target, _bits_of(half * 2 + number, KEYS).to(values.dtype.element_ty), mask=found)
        if len(lengths) > 0:
            tl.store(lengths[0] + target, tl.load(counts[0] + number, mask=found, other=0).to(tl.int64), mask=found)


@triton.jit
def _rank(entry, bit):
    """Return the rank of an integer by its bit in a word, and the entry of `ranks` for that word."""
    before = (entry >> 32).to(tl.int32) & ~(tl.full(bit.shape, -1, tl.int32) << bit)
    return (entry & 0x7FFFFFFF) + libdevice.popc(before)


@libentry()
@triton.jit(do_not_specialize=["limit"])
def _look_up(
    out,
    ranks,
    extrema,
    x,
    step,
    n,
    limit: tl.int64,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Write the rank of each element of a block among the unique integers."""
    wait_for_previous_launch()
    half, reach = _extent(extrema)
    if reach < limit:
        begin = tl.program_id(0) * (THREADS * EACH)
        at, inside = _bit_numbers(x, step, begin, n, half * 2, KEYS, INDEX, THREADS, EACH)
        entries = ()
        for k in tl.static_range(EACH):
            entries = entries + (tl.load(ranks + (at[k] >> 5), mask=inside[k], other=0),)
        for k in tl.static_range(EACH):
            index = begin + k * THREADS + tl.arange(0, THREADS)
            tl.store(out + index, _rank(entries[k], at[k] & 31), mask=inside[k])


def serves(x: torch.Tensor) -> bool:
    """Return whether a bitmap may replace the sort of a vector: enough elements, integers or 16-bit floats."""
    device = devices.current
    served = x.dtype in (*INTS, *BOOL) or (x.dtype in FLOATS and x.dtype.itemsize == 2)
    served = served and (device.ptx or device.interpreted)
    return served and x.numel() >= sorting_table().bitmap.least and route(x.numel(), Keys.of(x.dtype)) == "long"


class Dense:
    """The range of a vector's integers, and the unique ones of them.

    `flag`, on the device, is -1 if the range is too wide and 0 if it is not. It is not written if the range is `never`
    too wide, which holds for integers of few bits.
    """

    def __init__(self, x: torch.Tensor, counted: bool) -> None:
        n, chosen = x.numel(), sorting_table().bitmap
        check_length(n)
        # Counts of a range have to fit in shared memory.
        most = min(chosen.sparsest * n, chosen.shared_bytes // 4 - 2 if counted else 2**30)
        bits = 8 * x.dtype.itemsize if x.dtype not in BOOL else 1
        self._width = min(most, 2**bits) // 2 * 2
        self.never = most >= 2**bits and not x.dtype.is_floating_point
        self._x, self._counted = as_integers(x), counted
        self._extrema = zeros((2,), torch.int64, x.device)
        self._keys = Keys.of(x.dtype)
        self._facts = {
            "KEYS": self._keys,
            "INDEX": tl.int64 if span(x.shape, x.stride()) >= INT32_LIMIT else tl.int32,
            "num_warps": devices.warps(chosen.threads),
        }
        limit = self._width // 2
        self._given = (self._x, self._x.stride(0), n, limit)
        programs = -(-n // chosen.block)
        _find_extrema[(programs,)](self._extrema, *self._given, BLOCK=chosen.block, **self._facts)
        self.flag = empty((1,), torch.int64, x.device)
        if not self.never:
            _write_flag[(1,)](self.flag, self._extrema, limit)

    def write(self, out: Distinct) -> None:
        """Write the unique integers, unless the range is too wide."""
        device, chosen = self._x.device, sorting_table().bitmap
        n_words = -(-self._width // 32) + 1
        bits = zeros((n_words,), torch.int32, device)
        counts = (zeros((chosen.shared_bytes // 4,), torch.int32, device),) if self._counted else ()
        blocks = -(-self._x.numel() // (chosen.threads * chosen.each))
        constants = {"THREADS": chosen.threads, "EACH": chosen.each, **self._facts}
        programs = min(blocks, chosen.programs * devices.multiprocessors(device))
        _set_bits[(programs,)](
            *(bits, counts, self._extrema, *self._given, -(-blocks // programs)),
            ROOM=chosen.shared_bytes // 4,
            **constants,
        )
        ranks = empty((n_words,), torch.int64, device) if out.ranks is not None else None
        programs = -(-n_words // chosen.words)
        _write_set[(programs,)](
            *(
                as_integers(out.values),
                () if ranks is None else (ranks,),
                () if out.lengths is None else (out.lengths,),
            ),
            *(out.total, zeros((TICKET_INT64 + programs,), torch.int64, device), bits, counts, self._extrema),
            self._given[-1],
            KEYS=self._keys,
            TICKET=TICKET_INT64,
            THREADS=chosen.threads,
            WORDS=chosen.words,
            num_warps=devices.warps(chosen.threads),
        )
        if ranks is not None:
            _look_up[(blocks,)](out.ranks, ranks, self._extrema, *self._given, **constants)
