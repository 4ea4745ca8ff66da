"""Radix sort by digits of 8 bits, the lowest digit first.

A program ranks its elements by a digit. The lanes of a warp find out which of them have the same digit, and number it
with the warp's own counter in shared memory. Sums of the counters over digits and warps are the offsets at which each
warp's elements of a digit start. The program then permutes the elements through shared memory. A row that fits in
one program's registers is sorted by one such permutation a digit (`sort_held_rows`).

A longer row is sorted by several programs (`sort_long_rows`), after Onesweep (Adinets and Merrill 2022). One launch
counts all digits of the row. Then each digit has a launch, in which a program sorts a block by the digit. It gets the
counts of earlier blocks, which may still run, by look-back (`lookback.py`). A digit that all elements of a row share
needs no pass: `_plan_passes` finds such digits on the device and tells each pass between which buffers it moves a row.
"""

# Over 500 lines: rows of one program and rows of several share the ranking by a digit.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import INT32_LIMIT, power_of_2
from tritonite.engine.sorting.block import sort_rows
from tritonite.engine.sorting.keys import Keys, RowLayout, Rows, as_integers, digit_of
from tritonite.engine.sorting.lookback import TICKET_INT32, check_length, counts_before, is_skipped, publish_counts
from tritonite.engine.sorting.table import sorting_table
from tritonite.engine.sorting.thread_tiles import index_in_block, load_block
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared import add_shared, alloc_shared, load_shared, store_shared, warp_rank
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry

_DIGITS = tl.constexpr(256)
# The keys of indices, which are sorted as they are.
_INDEX_KEYS = Keys(bits=32, infinity=0, signed=False, descending=False)


@dataclass(frozen=True)
class RadixMeta:
    """Compile-time facts of the kernels.

    `keys` and `index_keys` are the orders of elements and of the numbers that go with them; `index` is the type of
    offsets. A block has `threads` with `each` elements.

    Only `_count_digits` uses the last three. A program counts the digits of all `passes` in `counted` blocks. Each
    counter has `copies`, in neighbouring banks of shared memory.
    """

    keys: Keys
    index: Any
    threads: int
    each: int
    index_keys: Keys = _INDEX_KEYS
    passes: int = 0
    counted: int = 0
    copies: int = 0


@triton.jit
def _digits_of(values, shift, valid, KEYS: tl.constexpr):
    """Return the digits of a program's elements: bits `shift` to `shift + 7` of their keys.

    Elements from index `valid` on are behind the row's end. They get the last digit, and a stable sort keeps them last.
    """
    EACH: tl.constexpr = len(values)
    THREADS: tl.constexpr = values[0].shape[0]
    found = ()
    for k in tl.static_range(EACH):
        digit = digit_of(values[k], shift, KEYS)
        found = found + (tl.where(index_in_block(k, THREADS, EACH) < valid, digit, 255),)
    return found


@triton.jit
def _own_room(values):
    """Declare a program's shared memory, which its warps' counters and the buffer of a permutation take in turn."""
    THREADS: tl.constexpr = values[0].shape[0]
    return alloc_shared(max(len(values) * THREADS, (THREADS + 31) // 32 * 256), values[0].dtype)


@triton.jit
def positions_by_digit(counters, digits):
    """Return (each element's position in a stable order of the digits, the number of elements of each digit).

    Each warp numbers its elements of a digit with counters of its own.
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
    # The position of each warp's first element of a digit.
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
    """Permute elements to positions, each of which occurs once, through shared memory."""
    EACH: tl.constexpr = len(elements)
    THREADS: tl.constexpr = positions[0].shape[0]
    tl.debug_barrier()
    for k in tl.static_range(EACH):
        store_shared(buffer, positions[k], elements[k])
    tl.debug_barrier()
    found = ()
    for k in tl.static_range(EACH):
        found = found + (load_shared(buffer, index_in_block(k, THREADS, EACH), elements[k]),)
    return found


@triton.jit
def _sort_by_one_digit(own, values, payloads, digits):
    """Return a program's elements, and a 32-bit payload of each, in a stable order of the digits.

    `own` is the program's shared memory.
    """
    positions, _ = positions_by_digit(own, digits)
    return _exchange(own, values, positions), _exchange(own, payloads, positions)


@libentry()
@triton.jit(do_not_specialize=["n", "limit", "passes", "shift", "given_passes"])
def _sort_held(
    values,
    indices,
    x,
    given,
    counts,
    layout,
    n,
    limit,
    passes,
    shift,
    given_passes,
    META: tl.constexpr,
):
    """Sort the program's row; write its first `limit` elements, and their indices or the numbers `given` for them.

    With `counts`, which has the length of each row, the row is first sorted by the given numbers: by `given_passes`
    digits from bit `shift` on.
    """
    wait_for_previous_launch()
    THREADS: tl.constexpr = META.threads
    EACH: tl.constexpr = META.each
    KEYS: tl.constexpr = META.keys
    INDEX_KEYS: tl.constexpr = META.index_keys
    shape, strides, steps = layout.shape, layout.strides, layout.steps
    row = tl.program_id(0).to(META.index)
    if len(counts) > 0:
        n = tl.load(counts[0] + row)
    begin = tl.zeros((), META.index)
    value = load_block(x + strided_offset(row, shape, strides[0]), begin, steps[0], n, THREADS, EACH)
    payload = ()
    if len(given) > 0:
        payload = load_block(given[0] + strided_offset(row, shape, strides[3]), begin, steps[3], n, THREADS, EACH)
    elif len(indices) > 0:
        for k in tl.static_range(EACH):
            payload = payload + (index_in_block(k, THREADS, EACH),)
    own = _own_room(value)
    if len(counts) > 0:
        for i in range(given_passes):
            digits = _digits_of(payload, shift + 8 * i, n, INDEX_KEYS)
            value, payload = _sort_by_one_digit(own, value, payload, digits)
    for i in range(passes):
        value, payload = _sort_by_one_digit(own, value, payload, _digits_of(value, 8 * i, n, KEYS))
    for k in tl.static_range(EACH):
        index = begin + index_in_block(k, THREADS, EACH)
        mask = index < limit
        if len(values) > 0:
            pointers = values[0] + strided_offset(row, shape, strides[1]) + index * steps[1]
            tl.store(pointers, value[k].to(values[0].dtype.element_ty), mask=mask)
        if len(indices) > 0:
            pointers = indices[0] + strided_offset(row, shape, strides[2]) + index * steps[2]
            tl.store(pointers, payload[k].to(indices[0].dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["n", "blocks"])
def _count_digits(
    counts,
    skip_flag,
    x,
    shape,
    strides,
    step,
    n_rows,
    n,
    blocks,
    META: tl.constexpr,
):
    """Count the digits of all passes in `META.counted` blocks of a row, unless the skip flag is 0.

    Neighbouring threads take the copies of a counter in turn. So threads whose digits are equal do not all wait for one
    counter.
    """
    wait_for_previous_launch()
    if is_skipped(skip_flag):
        return
    PASSES: tl.constexpr = META.passes
    COPIES: tl.constexpr = META.copies
    THREADS: tl.constexpr = META.threads
    EACH: tl.constexpr = META.each
    KEYS: tl.constexpr = META.keys
    COUNTERS: tl.constexpr = PASSES * COPIES * _DIGITS
    row = (tl.program_id(0) // blocks).to(META.index)
    begin = (tl.program_id(0) % blocks).to(META.index) * (THREADS * EACH * META.counted)
    source = x + strided_offset(row, shape, strides)
    digits = tl.arange(0, _DIGITS)
    # The last counter is for lanes behind the row's end.
    own = alloc_shared(COUNTERS + 1, tl.int32)
    for i in tl.static_range(PASSES * COPIES):
        store_shared(own, digits + i * _DIGITS, tl.zeros((_DIGITS,), tl.int32))
    tl.debug_barrier()
    one = tl.full((THREADS,), 1, tl.int32)
    copy = tl.arange(0, THREADS) % COPIES
    for j in range(META.counted):
        first = begin + j * (THREADS * EACH)
        value = load_block(source, first, step, n, THREADS, EACH)
        for k in tl.static_range(EACH):
            inside = first + index_in_block(k, THREADS, EACH) < n
            for i in tl.static_range(PASSES):
                digit = digit_of(value[k], 8 * i, KEYS) + i * _DIGITS
                add_shared(own, tl.where(inside, digit * COPIES + copy, one * COUNTERS), one)
    tl.debug_barrier()
    for i in tl.static_range(PASSES):
        found = tl.zeros((_DIGITS,), tl.int32)
        for j in tl.static_range(COPIES):
            found += load_shared(own, (digits + i * _DIGITS) * COPIES + j, found)
        tl.atomic_add(counts + (i * n_rows + row) * _DIGITS + digits, found, mask=found > 0, sem="relaxed")


# The route of a row in a pass, as bits; 0 if the pass does not move the row. The first pass that moves it reads the
# input and the final one writes the result; others read one of two buffers and write the other. _SECOND says that the
# pass writes the second buffer.
_MOVES = tl.constexpr(1)
_FIRST = tl.constexpr(2)
_FINAL = tl.constexpr(4)
_SECOND = tl.constexpr(8)


@libentry()
@triton.jit(do_not_specialize=["n_rows", "n"])
def _plan_passes(routes, totals, skip_flag, n_rows, n, PASSES: tl.constexpr):
    """Write the row's route in each pass, and replace the counts of its digits by their exclusive prefix sums.

    A pass whose digit all elements share is left out, but one pass has to move the row so that the result is written.
    If the skip flag is 0, all routes are 0.
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
    wanted = is_skipped(skip_flag) == 0
    first = 1
    for i in tl.static_range(PASSES):
        move = moves[i] | (alone if i == 0 else 0)
        route = _MOVES | first * _FIRST | tl.where(left == 1, _FINAL, 0) | (left & 1) * _SECOND
        tl.store(routes + i * n_rows + row, tl.where((move != 0) & wanted, route, 0))
        first = tl.where(move != 0, 0, first)
        left -= move


@libentry()
@triton.jit(do_not_specialize=["n", "blocks", "limit", "shift", "buffer_stride"])
def _sort_by_digit(
    values,
    indices,
    x,
    given,
    value_buffers,
    payload_buffers,
    starts,
    routes,
    scratch,
    layout,
    n,
    blocks,
    limit,
    shift,
    buffer_stride: tl.int64,
    TICKET: tl.constexpr,
    META: tl.constexpr,
):
    """Sort a block of a row by the digit at bit `shift`, and scatter it to the digits' positions in the row.

    `starts` has the position of each digit's first element. The row's route says which buffers are read and written;
    each operand has two, `buffer_stride` elements after each other. The result gets the first `limit` elements.
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    THREADS: tl.constexpr = META.threads
    EACH: tl.constexpr = META.each
    KEYS: tl.constexpr = META.keys
    shape, strides, steps = layout.shape, layout.strides, layout.steps
    ticket = tl.atomic_add(scratch, 1, sem="relaxed")
    row, block = (ticket // blocks).to(INDEX), ticket % blocks
    route = tl.load(routes + row)
    if route != 0:
        first, final = (route & _FIRST) != 0, (route & _FINAL) != 0
        written = tl.where((route & _SECOND) != 0, buffer_stride, 0)
        begin = block * (THREADS * EACH)
        valid = tl.minimum(n - begin, THREADS * EACH)
        own_row = row.to(tl.int64) * n
        # A pass reads the buffer that the pass before it has written.
        source = tl.where(
            first, x + strided_offset(row, shape, strides[0]), value_buffers + own_row + (buffer_stride - written)
        )
        step = tl.where(first, steps[0], 1)
        value = load_block(source, begin.to(INDEX), step.to(INDEX), n, THREADS, EACH)
        buffer = _own_room(value)
        positions, own = positions_by_digit(buffer, _digits_of(value, shift, valid, KEYS))
        counts = scratch + TICKET + row.to(tl.int64) * blocks * _DIGITS
        publish_counts(counts, block, own)
        value = _exchange(buffer, value, positions)
        # Payloads are loaded only now, in registers that values had, so that more programs are resident.
        payload = ()
        if len(indices) > 0:
            source = payload_buffers + own_row + (buffer_stride - written)
            if len(given) > 0:
                source = tl.where(first, given[0] + strided_offset(row, shape, strides[3]), source)
                step = tl.where(first, steps[3], 1)
                payload = load_block(source, begin.to(INDEX), step.to(INDEX), n, THREADS, EACH)
            else:
                for k in tl.static_range(EACH):
                    index = begin + index_in_block(k, THREADS, EACH)
                    mask = (index < n) & (first == 0)
                    payload = payload + (tl.load(source + index, mask=mask, other=index),)
            payload = _exchange(buffer, payload, positions)
        before = counts_before(counts, block, own)
        digits = tl.arange(0, _DIGITS)
        start = tl.load(starts + row.to(tl.int64) * _DIGITS + digits) + before - (tl.cumsum(own, axis=0) - own)
        table = alloc_shared(_DIGITS, tl.int32)
        store_shared(table, digits, start)
        tl.debug_barrier()
        target, inside, step = value_buffers + own_row + written, first | True, tl.full((), 1, INDEX)
        if len(values) > 0:
            target = tl.where(final, values[0] + strided_offset(row, shape, strides[1]), target)
            step = tl.where(final, steps[1], 1).to(INDEX)
        else:
            inside = final == 0
        most = tl.where(final, limit, n)
        for k in tl.static_range(EACH):
            index = index_in_block(k, THREADS, EACH)
            moved = index + load_shared(table, digit_of(value[k], shift, KEYS), index)
            mask = (index < valid) & (moved < most)
            tl.store(target + moved.to(INDEX) * step, value[k].to(x.dtype.element_ty), mask=mask & inside)
            if len(indices) > 0:
                tl.store(payload_buffers + own_row + written + moved, payload[k], mask=mask & (final == 0))
                pointers = indices[0] + strided_offset(row, shape, strides[2]) + moved.to(INDEX) * steps[2]
                tl.store(pointers, payload[k].to(indices[0].dtype.element_ty), mask=mask & final)


def _threads(elements: int, each: int) -> int:
    """Return the number of threads of a block of `elements` elements, `each` of them in a thread."""
    return max(1 if devices.current.interpreted else 32, elements // each)


def _options(threads: int, alone: bool = False) -> dict[str, int]:
    """Return compile options of a block of this many threads.

    `alone` says that keys have 32 bits at most and no indices go with them, which takes fewer registers.
    """
    device = devices.current
    chosen = sorting_table().radix
    registers = {"maxnreg": chosen.registers_alone if alone else chosen.registers} if device.ptx else {}
    return {"num_warps": max(1, threads // 32), **registers}


def _held_meta(keys: Keys, index: Any, elements: int) -> RadixMeta:
    """Return the facts of a kernel that holds a row of `elements` elements, a power of two."""
    each = min(sorting_table().radix.each, max(1, elements // 32))
    return RadixMeta(keys, index, _threads(elements, each), each)


def longest_held(keys: Keys) -> int:
    """Return the length of the longest row that one program sorts."""
    return sorting_table().radix.held_bytes // max(4, keys.bits // 8)


def sort_held_rows(
    x: torch.Tensor,
    dim: int,
    keys: Keys,
    values: torch.Tensor | None,
    indices: torch.Tensor | None,
    given: torch.Tensor | None = None,
) -> None:
    """Sort rows that one program each holds, and write the first elements of each.

    The size of `values`, or else of `indices`, along `dim` is the number of elements that are written. `indices` gets
    the indices of the elements, or the 32-bit numbers `given` for them.
    """
    any_target = values if values is not None else indices
    assert any_target is not None
    operands = (x, any_target, any_target if indices is None else indices, x if given is None else given)
    rows = Rows(operands, dim)
    meta = _held_meta(keys, rows.index, power_of_2(x.shape[dim]))
    _sort_held[(rows.n_rows,)](
        () if values is None else (as_integers(values),),
        () if indices is None else (indices,),
        as_integers(x),
        () if given is None or indices is None else (given,),
        (),
        *(rows.layout, x.shape[dim], any_target.shape[dim], keys.passes, 0, 0),
        META=meta,
        **_options(meta.threads),
    )


def sort_selected_rows(
    selected: torch.Tensor,
    selected_indices: torch.Tensor,
    counts: torch.Tensor,
    rows: Rows,
    values: torch.Tensor,
    indices: torch.Tensor,
    keys: Keys,
    limit: int,
    ordered_bits: int,
    bits: int,
) -> None:
    """Sort elements that were selected from rows by key and then by index, and write the first `limit` of each row.

    `selected` has the elements' bits in a matrix, of which row i has `counts[i]` elements; one program sorts a row.
    `rows` is the layout of (input, values, indices). Indices have `bits` bits. Elements whose indices differ only in
    the last `ordered_bits` are in order already.
    """
    n_rows, slots = selected.shape
    strides = [slots]
    for size in rows.shape:
        strides.append(strides[-1] * size)
    own = tuple(strides)
    layout = RowLayout(rows.shape, (own, *rows.strides[1:], own), (1, *rows.steps[1:], 1))
    meta = _held_meta(keys, tl.int64 if n_rows * slots >= INT32_LIMIT else rows.index, power_of_2(slots))
    _sort_held[(n_rows,)](
        (as_integers(values),),
        (indices,),
        selected,
        (selected_indices,),
        (counts,),
        *(layout, slots, limit, keys.passes, ordered_bits, -(-max(0, bits - ordered_bits) // 8)),
        META=meta,
        **_options(meta.threads),
    )


def holds(n: int, keys: Keys) -> bool:
    """Return whether one program can sort a row of n elements by digits."""
    return n <= longest_held(keys) and (devices.current.ptx or devices.current.interpreted)


def route(n: int, keys: Keys) -> str:
    """Return how rows of n elements are sorted.

    "network" is a sorting network in registers, "held" a radix sort by one program a row, "long" one by several.
    """
    if n <= sorting_table().network:
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
    """Sort rows of any length, as `sort_held_rows` does."""
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
    skip_flag: torch.Tensor | None = None,
) -> None:
    """Sort rows by several programs each, as `sort_held_rows` does.

    `passes` is the number of digits to sort by, all by default; higher digits must be equal. If the value of the
    `skip_flag`, on the device, is 0, nothing is written.
    """
    n = x.shape[dim]
    n_rows = math.prod(x.shape) // n
    check_length(n)
    any_target = values if values is not None else indices
    assert any_target is not None
    alone = indices is None and keys.bits <= 32
    chosen = sorting_table().radix
    each = chosen.each_64bit if keys.bits == 64 else chosen.each_alone if alone else chosen.each_with_indices
    threads = _threads(chosen.block // chosen.each * each, each)
    blocks = -(-n // (threads * each))
    passes = keys.passes if passes is None else passes
    # A pass has a ticket counter and the published counts of its blocks.
    scratch_of_pass = TICKET_INT32 + n_rows * blocks * _DIGITS.value
    n_totals = passes * n_rows * _DIGITS.value
    scratch = zeros((n_totals + passes * scratch_of_pass,), torch.int32, x.device)
    totals, scratch = scratch[:n_totals], scratch[n_totals:]
    routes = empty((passes, n_rows), torch.int32, x.device)
    source = as_integers(x)
    rows = Rows((x,), dim)
    counters = -(-n // (chosen.block * chosen.counted))
    flag = () if skip_flag is None else (skip_flag,)
    meta = RadixMeta(
        keys,
        rows.index,
        threads=_threads(chosen.block, chosen.each),
        each=chosen.each,
        passes=passes,
        counted=chosen.counted,
        copies=min(chosen.copies, 32 // passes),
    )
    _count_digits[(n_rows * counters,)](
        *(totals, flag, source, rows.shape, rows.strides[0], rows.steps[0], n_rows, n, counters),
        META=meta,
        **_options(meta.threads),
    )
    _plan_passes[(n_rows,)](routes, totals, flag, n_rows, n, PASSES=passes, num_warps=8)
    shape = (min(2, passes - 1), n_rows, n)
    value_buffers = empty(shape, source.dtype, x.device)
    payload_buffers = empty(shape if indices is not None else (0,), torch.int32, x.device)
    operands = (x, any_target, any_target if indices is None else indices, x if given is None else given)
    rows = Rows(operands, dim)
    for i in range(passes):
        _sort_by_digit[(n_rows * blocks,)](
            () if values is None else (as_integers(values),),
            () if indices is None else (indices,),
            source,
            () if given is None or indices is None else (given,),
            *(value_buffers, payload_buffers, totals[i * n_rows * _DIGITS.value :], routes[i]),
            scratch[i * scratch_of_pass :],
            *(rows.layout, n, blocks, any_target.shape[dim], 8 * i, n_rows * n),
            TICKET=TICKET_INT32,
            META=RadixMeta(keys, rows.index, threads, each),
            **_options(threads, alone),
        )
