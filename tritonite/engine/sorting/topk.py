"""The k smallest keys of rows, without sorting the rows.

A row is split into groups, neighbours into different ones. The k-th smallest of the groups' least elements is a bound:
at least k elements are not behind it, and what comes before it is in fewer than k groups. So few elements are left to
be sorted, and how many at most is known before. Elements of one key are told apart by their places, those that come
first being smaller, so that ties change nothing.

Rows that a program holds are read once. Of longer ones the first kernel finds the groups' least elements, the second
the bound, and the third takes what is not behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import power_of_2
from tritonite.engine.sorting.block import sort_integers, sort_pairs
from tritonite.engine.sorting.keys import Keys, Rows, ordered, words
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry

# The bytes of keys of the longest row that a program holds, and the words of them that a thread has.
_HELD, _PER_THREAD = 32 * 1024, 16
# The most elements that a program sorts, by the key's bits.
_MOST_SORTED = {8: 4096, 16: 4096, 32: 4096, 64: 1024}
# Rows that are sorted as they are in less time than two kernels take.
SORTED_AT_ONCE = 128
# Elements that a program takes at a time, and groups of a long row: a program has at least so many.
_BLOCK = 2048
_LEAST_GROUPS, _MOST_GROUPS, _OWN_GROUPS = 1024, 4096, 128
# What programs for each multiprocessor share long rows, and into how many parts groups are cut at most.
_PROGRAMS, _MOST_PARTS = 4, 16


@triton.jit
def last_key(KEYS: tl.constexpr):
    """A key behind which there is none: that of what a row does not have."""
    return (2**63 if KEYS.bits == 64 else 2**31) - 1


@triton.jit
def keys_of(pointers, mask, KEYS: tl.constexpr):
    """The keys of words, and the last key where a mask is not set."""
    return tl.where(mask, ordered(tl.load(pointers, mask=mask, other=0), KEYS), last_key(KEYS))


@triton.jit
def key_of_rank(key, mask, rank):
    """The key of a rank among each row's that a mask has set: that from which on more than `rank` are not behind it."""
    low = tl.min(key, axis=1)
    high = tl.max(tl.where(mask, key, low[:, None]), axis=1)
    while tl.max((low < high).to(tl.int32), axis=0) > 0:
        middle = (low & high) + ((low ^ high) >> 1)
        enough = tl.sum((key <= middle[:, None]).to(tl.int32), axis=1) > rank
        searching = low < high
        low = tl.where(searching & (enough == 0), middle + 1, low)
        high = tl.where(searching & enough, middle, high)
    return low


@triton.jit
def _packed(key, place, WORD: tl.constexpr):
    """A key and a place as one integer, in whose order they are."""
    HALF: tl.constexpr = WORD.primitive_bitwidth // 2
    return (key.to(WORD) << HALF) | place.to(WORD)


@triton.jit
def _leave(taken, taken_places, begin, target, key, place, mask, KEYS: tl.constexpr):
    """Write keys and places where they are taken, so far behind where their rows begin."""
    if KEYS.bits == 64:
        tl.store(taken + begin + target, key, mask=mask)
        tl.store(taken_places[0] + begin + target, place.to(tl.int32), mask=mask)
    else:
        tl.store(taken + begin + target, _packed(key, place, taken.dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n", "k", "slots"])
def _take_of_rows(
    taken,
    taken_places,
    counts,
    words,
    shape,
    strides,
    step,
    n_rows,
    n,
    k,
    slots,
    GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program takes of each of its rows, which it holds, what can be of the k smallest."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(INDEX)
    mask = (row < n_rows)[:, None] & (column < n)[None, :]
    key = keys_of(words + strided_offset(row, shape, strides)[:, None] + (column * step)[None, :], mask, KEYS)
    if GROUPS < COLUMNS:
        least = tl.min(tl.reshape(key, (ROWS, COLUMNS // GROUPS, GROUPS)), axis=1)
        # Groups that have no element are no part of the search.
        bound = key_of_rank(least, (row < n_rows)[:, None] & (tl.arange(0, GROUPS) < n)[None, :], k - 1)
    else:
        bound = key_of_rank(key, mask, k - 1)
    smaller = mask & (key < bound[:, None])
    equal = mask & (key == bound[:, None])
    both = smaller.to(tl.int32) + (equal.to(tl.int32) << 16)
    count = tl.sum(both, axis=1)
    before = tl.cumsum(both, axis=1) - both
    n_smaller = count & 0xFFFF
    # Where there are k smaller ones, none that is equal is wanted.
    n_equal = tl.minimum(count >> 16, tl.maximum(k - n_smaller, 0))
    chosen = smaller | (equal & ((before >> 16) < n_equal[:, None]))
    target = tl.where(smaller, before & 0xFFFF, n_smaller[:, None] + (before >> 16))
    place = tl.broadcast_to(column[None, :], (ROWS, COLUMNS))
    _leave(taken, taken_places, (row.to(tl.int64) * slots)[:, None], target, key, place, chosen, KEYS)
    tl.store(counts + row, n_smaller + n_equal, mask=row < n_rows)


@libentry()
@triton.jit(do_not_specialize=["n", "sides", "parts", "stripes"])
def _find_least(
    least,
    least_places,
    words,
    shape,
    strides,
    step,
    n,
    sides,
    parts,
    stripes,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    GROUPS: tl.constexpr,
    OWN: tl.constexpr,
    STRIPES: tl.constexpr,
):
    """A program finds the least elements of OWN groups of a part of its row, which has `stripes` of GROUPS elements."""
    wait_for_previous_launch()
    side = tl.program_id(0) % sides
    part = tl.program_id(0) // sides % parts
    row = tl.program_id(0) // (sides * parts)
    source = words + strided_offset(row.to(INDEX), shape, strides)
    group = side * OWN + tl.arange(0, OWN)
    stripe = tl.arange(0, STRIPES)
    best = tl.full((STRIPES, OWN), last_key(KEYS), tl.int64 if KEYS.bits == 64 else tl.int32)
    best_place = tl.zeros((STRIPES, OWN), tl.int32) + n
    for begin in range(part * stripes, (part + 1) * stripes, STRIPES):
        place = (begin + stripe).to(INDEX)[:, None] * GROUPS + group[None, :]
        mask = (place < n) & (begin + stripe < (part + 1) * stripes)[:, None]
        key = keys_of(source + place * step, mask, KEYS)
        better = mask & ((key < best) | (best_place == n))
        best = tl.where(better, key, best)
        best_place = tl.where(better, place.to(tl.int32), best_place)
    key = tl.min(best, axis=0)
    place = tl.min(tl.where(best == key[None, :], best_place, n), axis=0)
    target = (row * parts + part).to(tl.int64) * GROUPS
    _leave(least, least_places, target, group, key, place, place >= 0, KEYS)


@triton.jit
def _taken_at(taken, taken_places, source, mask, KEYS: tl.constexpr):
    """(keys, places) that were left."""
    WORD: tl.constexpr = taken.dtype.element_ty
    if KEYS.bits == 64:
        key = tl.load(taken + source, mask=mask, other=last_key(KEYS))
        place = tl.load(taken_places[0] + source, mask=mask, other=2**31 - 1)
    else:
        HALF: tl.constexpr = WORD.primitive_bitwidth // 2
        packed = tl.load(taken + source, mask=mask, other=2 ** (2 * HALF - 1) - 1)
        key, place = (packed >> HALF).to(tl.int32), (packed & (2**HALF - 1)).to(tl.int32)
    return key, place


@libentry()
@triton.jit(do_not_specialize=["parts", "k", "n"])
def _find_bound(bounds, least, least_places, parts, k, n, KEYS: tl.constexpr, GROUPS: tl.constexpr):
    """A program finds the k-th smallest of its row's groups' least elements: its key and its place."""
    wait_for_previous_launch()
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[None, :]
    key, place = _taken_at(least, least_places, row * parts * GROUPS + group, group >= 0, KEYS)
    for part in range(1, parts):
        more, more_place = _taken_at(least, least_places, (row * parts + part) * GROUPS + group, group >= 0, KEYS)
        better = (more < key) | ((more == key) & (more_place < place))
        key, place = tl.where(better, more, key), tl.where(better, more_place, place)
    # A group that has no element has the place n.
    bound = key_of_rank(key, place < n, k - 1)
    left = k - 1 - tl.sum((key < bound[:, None]).to(tl.int32), axis=1)
    equal = key == bound[:, None]
    last = key_of_rank(tl.where(equal, place, 2**31 - 1), equal, left)
    zero = tl.arange(0, 1)
    tl.store(bounds + row * 2 + zero, bound.to(tl.int64))
    tl.store(bounds + row * 2 + 1 + zero, last.to(tl.int64))


@libentry()
@triton.jit(do_not_specialize=["n", "parts", "slots"])
def _take_to_bound(
    taken,
    taken_places,
    counts,
    bounds,
    words,
    shape,
    strides,
    step,
    n,
    parts,
    slots,
    COUNTED: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes, in no order, what is not behind its row's bound of COUNTED blocks."""
    wait_for_previous_launch()
    row = tl.program_id(0) // parts
    begin = (tl.program_id(0) % parts).to(INDEX) * (BLOCK * COUNTED)
    source = words + strided_offset(row.to(INDEX), shape, strides)
    bound = tl.load(bounds + row * 2)
    if KEYS.bits < 64:
        bound = bound.to(tl.int32)
    last = tl.load(bounds + row * 2 + 1).to(INDEX)
    counter = counts + row + tl.zeros((BLOCK,), tl.int32)
    for j in range(COUNTED):
        place = begin + j * BLOCK + tl.arange(0, BLOCK)
        mask = place < n
        key = keys_of(source + place * step, mask, KEYS)
        chosen = mask & ((key < bound) | ((key == bound) & (place <= last)))
        target = tl.atomic_add(counter, 1, mask=chosen, sem="relaxed")
        chosen = chosen & (target < slots)
        _leave(taken, taken_places, row.to(tl.int64) * slots, target, key, place, chosen, KEYS)


@triton.jit
def _merged(best, more):
    """The first halves of rows in order, and as many more elements."""
    ROWS: tl.constexpr = best.shape[0]
    HALF: tl.constexpr = more.shape[1]
    first, _ = tl.split(tl.permute(tl.reshape(best, (ROWS, 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.join(first, more), (ROWS, 2 * HALF))


@libentry()
@triton.jit(do_not_specialize=["n_rows", "k", "first", "slots"])
def _sort_taken(
    values,
    indices,
    taken,
    taken_places,
    counts,
    words,
    shape,
    strides,
    steps,
    n_rows,
    k,
    first,
    slots,
    MERGES: tl.constexpr,
    KEYS: tl.constexpr,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program sorts what was taken of its rows, and writes those from `first` to the k-th, and their places.

    Where more was taken than it sorts at a time, it merges the rest into the better half, half as many at a time.
    """
    wait_for_previous_launch()
    WORD: tl.constexpr = taken.dtype.element_ty
    HALF: tl.constexpr = WORD.primitive_bitwidth // 2
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, WIDTH)
    count = tl.load(counts + row, mask=row < n_rows, other=0)[:, None]
    begin = (row.to(tl.int64) * slots)[:, None]
    # Where there is more to come, this is taken for the better half and what is to be merged into it.
    mask = lane[None, :] < (tl.minimum(count, WIDTH // 2) if MERGES else count)
    key = tl.load(taken + begin + lane[None, :], mask=mask, other=2 ** (2 * HALF - 1) - 1)
    if KEYS.bits == 64:
        place = tl.load(taken_places[0] + begin + lane[None, :], mask=mask, other=2**31 - 1)
    if MERGES:
        half = tl.arange(0, WIDTH // 2)[None, :]
        most = tl.maximum(tl.max(tl.max(count, axis=1), axis=0), WIDTH // 2 + 1)
        for behind in range(WIDTH // 2, most, WIDTH // 2):
            left = behind + half < count
            source = begin + behind + half
            more = tl.load(taken + source, mask=left, other=2 ** (2 * HALF - 1) - 1)
            if KEYS.bits == 64:
                more_places = tl.load(taken_places[0] + source, mask=left, other=2**31 - 1)
                key, place = sort_pairs(_merged(key, more), _merged(place, more_places))
            else:
                key = sort_integers(_merged(key, more))
    elif KEYS.bits == 64:
        key, place = sort_pairs(key, place)
    else:
        key = sort_integers(key)
    if KEYS.bits < 64:
        place = key & (2**HALF - 1)
    place = place.to(INDEX)
    mask = (row < n_rows)[:, None] & ((lane >= first) & (lane < k))[None, :]
    target = (lane - first).to(INDEX)
    word = tl.load(words + strided_offset(row, shape, strides[0])[:, None] + place * steps[0], mask=mask, other=0)
    tl.store(values + strided_offset(row, shape, strides[1])[:, None] + (target * steps[1])[None, :], word, mask=mask)
    if len(indices) > 0:
        pointers = indices[0] + strided_offset(row, shape, strides[2])[:, None] + (target * steps[2])[None, :]
        tl.store(pointers, place.to(tl.int64), mask=mask)


class _Taken(NamedTuple):
    """What is taken of rows: how much of each, and so many `slots` for it, of keys and places in one or in two."""

    keys: torch.Tensor
    places: tuple[torch.Tensor, ...]
    counts: torch.Tensor
    slots: int

    @classmethod
    def of(cls, n_rows: int, n: int, slots: int, keys: Keys, device: torch.device) -> _Taken:
        return cls(*_pairs(n_rows * slots, n, keys, device), zeros((n_rows,), torch.int32, device), slots)


def _pairs(count: int, n: int, keys: Keys, device: torch.device) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Room for keys and places, n at most."""
    if keys.bits == 64:
        return empty((count,), torch.int64, device), (empty((count,), torch.int32, device),)
    narrow = keys.bits <= 16 and n < 2**16
    return empty((count,), torch.int32 if narrow else torch.int64, device), ()


def _take_held(x: torch.Tensor, rows: Rows, n: int, k: int, keys: Keys) -> tuple[_Taken, int]:
    """(what is taken of rows that a program holds, how many elements to sort at a time)."""
    columns = max(16, power_of_2(n))
    groups = max(128, power_of_2(4 * k))
    if groups * 2 > columns or groups > n:
        groups, slots, width = columns, k, power_of_2(k)
    else:
        slots, width = min(n, (k - 1) * (columns // groups) + 1), power_of_2(2 * k)
    taken = _Taken.of(rows.n_rows, n, slots, keys, x.device)
    held = min(max(1, 1024 // columns), power_of_2(rows.n_rows))
    _take_of_rows[(-(-rows.n_rows // held),)](
        *(taken.keys, taken.places, taken.counts, words(x), rows.shape, rows.strides[0], rows.steps[0]),
        *(rows.n_rows, n, k, slots),
        GROUPS=groups,
        KEYS=keys,
        INDEX=rows.index,
        ROWS=held,
        COLUMNS=columns,
        num_warps=warps_for(held * columns, keys),
    )
    return taken, width


def _take_streamed(x: torch.Tensor, rows: Rows, n: int, k: int, keys: Keys) -> tuple[_Taken, int]:
    """The same of longer rows."""
    groups = min(_MOST_GROUPS, max(_LEAST_GROUPS, power_of_2(4 * k)))
    # As many programs as fill the device: across the groups first, whose least elements need no comparison then.
    stripes = -(-n // groups)
    wanted = -(-_PROGRAMS * devices.multiprocessors(x.device) // rows.n_rows)
    own = max(min(_OWN_GROUPS, groups), groups // power_of_2(wanted))
    sides = groups // own
    at_a_time = max(1, _BLOCK // own)
    parts = max(1, min(_MOST_PARTS, -(-wanted // sides), stripes // at_a_time))
    each = -(-stripes // parts)
    least, least_places = _pairs(rows.n_rows * parts * groups, n, keys, x.device)
    space = (words(x), rows.shape, rows.strides[0], rows.steps[0], n)
    facts: dict[str, Any] = {"KEYS": keys, "INDEX": rows.index}
    _find_least[(rows.n_rows * parts * sides,)](
        *(least, least_places, *space, sides, parts, each),
        GROUPS=groups,
        OWN=own,
        STRIPES=at_a_time,
        num_warps=8,
        **facts,
    )
    bounds = empty((rows.n_rows, 2), torch.int64, x.device)
    _find_bound[(rows.n_rows,)](bounds, least, least_places, parts, k, n, KEYS=keys, GROUPS=groups, num_warps=8)
    taken = _Taken.of(rows.n_rows, n, min(n, (k - 1) * stripes + 1), keys, x.device)
    blocks = -(-n // _BLOCK)
    counted = power_of_2(max(1, min(8, blocks // wanted)))
    parts = -(-blocks // counted)
    _take_to_bound[(rows.n_rows * parts,)](
        *(taken.keys, taken.places, taken.counts, bounds, *space, parts, taken.slots),
        COUNTED=counted,
        BLOCK=_BLOCK,
        num_warps=8,
        **facts,
    )
    return taken, power_of_2(2 * k)


def serves(n: int, k: int, keys: Keys) -> bool:
    """Whether there is room to sort what may be the k smallest of rows of n, and less of that than of all."""
    most = _MOST_SORTED[keys.bits]
    if n >= 2**31:
        return False
    if held(n, keys):
        return n > SORTED_AT_ONCE and power_of_2(k) * 2 <= power_of_2(n) and power_of_2(k) <= most
    return power_of_2(2 * k) <= min(most, _MOST_GROUPS)


def warps_for(elements: int, keys: Keys) -> int:
    """How many warps hold so many keys."""
    return min(16, max(1, elements * max(1, keys.bits // 32) // (32 * _PER_THREAD)))


def held(n: int, keys: Keys) -> bool:
    """Whether a program holds a row of so many."""
    return power_of_2(n) * max(32, keys.bits) // 8 <= _HELD


def write_smallest(
    x: torch.Tensor,
    dim: int,
    k: int,
    keys: Keys,
    values: torch.Tensor,
    indices: torch.Tensor | None,
    first: int = 0,
) -> None:
    """The smallest elements of each row in order, from that of the rank `first` to the k-th, where `serves` is true."""
    n = x.shape[dim]
    # One order of rows for what is read, taken and written.
    rows = Rows((x, values, values if indices is None else indices), dim)
    taken, width = (_take_held if held(n, keys) else _take_streamed)(x, rows, n, k, keys)
    width = max(width, 16)
    each = min(max(1, 512 // width), power_of_2(rows.n_rows))
    _sort_taken[(-(-rows.n_rows // each),)](
        words(values),
        () if indices is None else (indices,),
        *(taken.keys, taken.places, taken.counts, words(x), rows.shape, rows.strides, rows.steps),
        *(rows.n_rows, k, first, taken.slots),
        MERGES=taken.slots > width,
        KEYS=keys,
        INDEX=rows.index,
        ROWS=each,
        WIDTH=width,
        num_warps=min(16, max(1, each * width // (128 if width <= 512 else 256))),
    )
