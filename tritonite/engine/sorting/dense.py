"""What there is of integers that lie close to each other: a bit for each integer of their range, and no sort.

Floats of 16 bits are integers in their order, but for nan, each of which there is, and -0.0, which is equal to another.
Programs find the range, until it is known to be too wide. Then they set the bits of what they meet, in shared memory
where it has room for all, and write the integers whose bits are set: how many are set before a word of bits is where
its integers go, and with the word it tells the rank of each. Whether the range is narrow enough is known on the device
alone, so that all programs end as they begin where it is not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import BOOL, FLOATS, INTS
from tritonite.engine.iteration import INT32_LIMIT, span
from tritonite.engine.sorting.keys import Keys, unsigned_key, words
from tritonite.engine.sorting.radix import check_length, route
from tritonite.engine.sorting.runs import Distinct, runs_before
from tritonite.engine.sorting.table import SORTING
from tritonite.language import libdevice
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import SHARED_BYTES, add_shared, alloc_shared, load_shared, or_shared, store_shared
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry

# Elements that a program takes at a time, by so many threads, and those of a thread where it does something at places.
_BLOCK, _THREADS, _EACH = 4096, 256, 8
# Words of bits that a program writes the integers of.
_WORDS = 512
# The integers that a range may have for each element.
_SPARSEST = 4
# Programs that a multiprocessor has at a time, so that each has bits, or counts, of its own in shared memory.
_TOGETHER = 4
# The words that the counter of tickets has for itself, so that it shares no cache line with others.
_COUNTER = 16
# How far apart programs begin to add to what is everybody's.
_APART = tl.constexpr(64)
# Half of an integer of 64 bits, counted from 0, is no more than this.
_LAST_HALF = tl.constexpr(2**63 - 1)
# What no range has beside numbers of 16 bits.
_NONE = tl.constexpr(2**30)


@triton.jit
def _extent(extrema):
    """(half of the least integer, half of the largest less that): each is below 2^63, as the integers are not."""
    least = (tl.load(extrema + 1, volatile=True) ^ _LAST_HALF) - 2**62
    return least, tl.load(extrema, volatile=True) - 2**62 - least


@triton.jit
def _integer(word, KEYS: tl.constexpr):
    """The integer that an element's bits stand for, of int64 where it has 64 bits and else of int32."""
    if KEYS.infinity > 0:
        key = unsigned_key(word, KEYS).to(tl.int32)
        integer = tl.where((key > 2 * KEYS.infinity) | (word == -(2 ** (KEYS.bits - 1))), _NONE, key)
    else:
        integer = word if KEYS.bits == 64 else word.to(tl.int32)
    return integer


@triton.jit
def _word(integer, KEYS: tl.constexpr):
    """The reverse."""
    if KEYS.infinity > 0:
        size = integer - KEYS.infinity
        integer = tl.where(size < 0, -(2 ** (KEYS.bits - 1)) - size, size)
    return integer


@libentry()
@triton.jit(do_not_specialize=["limit"])
def _find_extrema(extrema, x, step, n, limit: tl.int64, KEYS: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """A program looks at a block, unless what others have met is too far apart already.

    `extrema` begin as zeros: the largest half of an integer, and how far the least one is from the end.
    """
    wait_for_previous_launch()
    _, reach = _extent(extrema)
    if reach < limit:
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + place.to(INDEX) * step, mask=place < n, other=0)
        # In place of those that there are not.
        value = _integer(tl.where(place < n, value, tl.load(x)), KEYS)
        largest = (tl.max(value, axis=0).to(tl.int64) >> 1) + 2**62
        least = (tl.min(value, axis=0).to(tl.int64) >> 1) + 2**62
        tl.atomic_max(extrema, largest, sem="relaxed")
        tl.atomic_max(extrema + 1, least ^ _LAST_HALF, sem="relaxed")


@libentry()
@triton.jit(do_not_specialize=["limit"])
def _tell(flag, extrema, limit: tl.int64):
    """One program: a flag below 0 where the range is too wide."""
    wait_for_previous_launch()
    _, reach = _extent(extrema)
    tl.store(flag, tl.where(reach < limit, 0, -1).to(tl.int64))


@triton.jit
def _places(
    x, step, begin, n, first, KEYS: tl.constexpr, INDEX: tl.constexpr, THREADS: tl.constexpr, EACH: tl.constexpr
):
    """(the places in their range of the integers that threads have of a block, which of them there are).

    A thread has one of every THREADS, so that nothing has to change threads for what is done at places.
    """
    own = first if KEYS.bits == 64 else first.to(tl.int32)
    found, inside = (), ()
    for k in tl.static_range(EACH):
        place = begin + k * THREADS + tl.arange(0, THREADS)
        found = found + (tl.load(x + place.to(INDEX) * step, mask=place < n, other=0),)
        inside = inside + (place < n,)
    places = ()
    for k in tl.static_range(EACH):
        places = places + ((tl.where(inside[k], _integer(found[k], KEYS), own) - own).to(tl.int32),)
    return places, inside


@libentry()
@triton.jit(do_not_specialize=["limit", "rounds"])
def _mark(
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
    """A program sets the bits of the integers in so many blocks, and adds to their `counts`.

    Where they have room in shared memory, it collects them there first. Elsewhere it sets those that it does not see:
    its cache may have bits of before, but none of what it has set itself, so that no integer is waited for by all.
    """
    wait_for_previous_launch()
    half, reach = _extent(extrema)
    if reach < limit:
        BLOCK: tl.constexpr = THREADS * EACH
        lane = tl.arange(0, BLOCK)
        one = tl.full((THREADS,), 1, tl.int32)
        first = tl.program_id(0) * BLOCK
        apart = tl.num_programs(0) * BLOCK
        PER_ITEM: tl.constexpr = 1 if len(counts) > 0 else 32
        items = (2 * reach // PER_ITEM + (2 if PER_ITEM == 1 else 1)).to(tl.int32)
        if items < ROOM:
            own = alloc_shared(ROOM, tl.int32)
            for begin in range(0, items, BLOCK):
                store_shared(own, tl.minimum(begin + lane, ROOM - 1), tl.zeros((BLOCK,), tl.int32))
            tl.debug_barrier()
            for j in range(rounds):
                at, inside = _places(x, step, first + j * apart, n, half * 2, KEYS, INDEX, THREADS, EACH)
                for k in tl.static_range(EACH):
                    if len(counts) > 0:
                        # The last is for elements that there are not.
                        add_shared(own, tl.where(inside[k], at[k], ROOM - 1), one)
                    else:
                        bit = one << (at[k] & 31)
                        missing = inside[k] & ((load_shared(own, at[k] >> 5, one) & bit) == 0)
                        or_shared(own, at[k] >> 5, tl.where(missing, bit, 0))
            tl.debug_barrier()
            # Each program begins elsewhere, so that not all add to the same words at a time.
            begun = tl.program_id(0) * _APART % items
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
                at, inside = _places(x, step, first + j * apart, n, half * 2, KEYS, INDEX, THREADS, EACH)
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
    COUNTER: tl.constexpr,
    THREADS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """A program writes the integers of its words of bits, in order, and what they are counted as.

    To `ranks` it writes each word, with how many bits are set before it. Programs take tickets, so that those before a
    program's own have begun.
    """
    wait_for_previous_launch()
    half, reach = _extent(extrema)
    block = tl.atomic_add(scratch, 1, sem="relaxed").to(tl.int32)
    there = reach // 16 + 1
    if (reach < limit) & (block.to(tl.int64) * WORDS < there):
        at = block * WORDS + tl.arange(0, WORDS)
        word = tl.load(bits + at, mask=at < there, other=0)
        count = libdevice.popc(word)
        own = tl.sum(count, axis=0)
        before, _ = runs_before(scratch + COUNTER, block, own, tl.full((), -1, tl.int32), THREADS)
        tl.store(total, (before + own).to(tl.int64), mask=(block + 1).to(tl.int64) * WORDS >= there)
        rank = tl.cumsum(count, axis=0) - count + before
        if len(ranks) > 0:
            tl.store(ranks[0] + at, (word.to(tl.int64) << 32) | rank.to(tl.int64), mask=at < there)
        bit = tl.arange(0, 32)[None, :]
        found = ((word[:, None] >> bit) & 1) != 0
        target = rank[:, None] + libdevice.popc(word[:, None] & ~(tl.full((1, 32), -1, tl.int32) << bit))
        place = at[:, None] * 32 + bit
        tl.store(values + target, _word(half * 2 + place, KEYS).to(values.dtype.element_ty), mask=found)
        if len(lengths) > 0:
            tl.store(lengths[0] + target, tl.load(counts[0] + place, mask=found, other=0).to(tl.int64), mask=found)


@triton.jit
def _rank(entry, bit):
    """The rank of what has a bit of a word, by the word and how many are set before it."""
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
    """A program writes for each integer of its block how many there are before it."""
    wait_for_previous_launch()
    half, reach = _extent(extrema)
    if reach < limit:
        begin = tl.program_id(0) * (THREADS * EACH)
        at, inside = _places(x, step, begin, n, half * 2, KEYS, INDEX, THREADS, EACH)
        entries = ()
        for k in tl.static_range(EACH):
            entries = entries + (tl.load(ranks + (at[k] >> 5), mask=inside[k], other=0),)
        for k in tl.static_range(EACH):
            place = begin + k * THREADS + tl.arange(0, THREADS)
            tl.store(out + place, _rank(entries[k], at[k] & 31), mask=inside[k])


def serves(x: torch.Tensor) -> bool:
    """Whether a vector's elements may be told by bits: integers, so many that this takes less than a sort."""
    device = devices.current
    few_bits = x.dtype in (*INTS, *BOOL) or (x.dtype in FLOATS and x.dtype.itemsize == 2)
    kept = few_bits and (device.ptx or device.interpreted)
    return kept and x.numel() >= SORTING[device.kind].dense and route(x.numel(), Keys.of(x.dtype)) == "long"


class Dense:
    """The range of a vector's integers. `flag` is below 0 where it is too wide, which it `never` is of few bits."""

    def __init__(self, x: torch.Tensor, counted: bool) -> None:
        n = x.numel()
        check_length(n)
        # Where integers are counted, it is done in shared memory.
        most = min(2**30, _SPARSEST * n) if not counted else min(_SPARSEST * n, SHARED_BYTES // 4 - 2)
        bits = 8 * x.dtype.itemsize if x.dtype not in BOOL else 1
        self._places = min(most, 2**bits) // 2 * 2
        self.never = most >= 2**bits and not x.dtype.is_floating_point
        self._x, self._counted = words(x), counted
        self._extrema = zeros((2,), torch.int64, x.device)
        self._keys = Keys.of(x.dtype)
        self._facts = {
            "KEYS": self._keys,
            "INDEX": tl.int64 if span(x.shape, x.stride()) >= INT32_LIMIT else tl.int32,
            "num_warps": _THREADS // 32,
        }
        limit = self._places // 2
        self._given = (self._x, self._x.stride(0), n, limit)
        _find_extrema[(-(-n // _BLOCK),)](self._extrema, *self._given, BLOCK=_BLOCK, **self._facts)
        self.flag = empty((1,), torch.int64, x.device)
        if not self.never:
            _tell[(1,)](self.flag, self._extrema, limit)

    def write(self, out: Distinct) -> None:
        """Write what there is, unless the range is too wide."""
        device = self._x.device
        n_words = -(-self._places // 32) + 1
        bits = zeros((n_words,), torch.int32, device)
        counts = (zeros((SHARED_BYTES // 4,), torch.int32, device),) if self._counted else ()
        blocks = -(-self._x.numel() // (_THREADS * _EACH))
        constants = {"THREADS": _THREADS, "EACH": _EACH, **self._facts}
        programs = min(blocks, _TOGETHER * devices.multiprocessors(device))
        _mark[(programs,)](
            *(bits, counts, self._extrema, *self._given, -(-blocks // programs)),
            ROOM=SHARED_BYTES // 4,
            **constants,
        )
        ranks = empty((n_words,), torch.int64, device) if out.ranks is not None else None
        programs = -(-n_words // _WORDS)
        _write_set[(programs,)](
            *(words(out.values), () if ranks is None else (ranks,), () if out.lengths is None else (out.lengths,)),
            *(out.total, zeros((_COUNTER + programs,), torch.int64, device), bits, counts, self._extrema),
            self._given[-1],
            KEYS=self._keys,
            COUNTER=_COUNTER,
            THREADS=_THREADS,
            WORDS=_WORDS,
            num_warps=_THREADS // 32,
        )
        if ranks is not None:
            _look_up[(blocks,)](out.ranks, ranks, self._extrema, *self._given, **constants)
