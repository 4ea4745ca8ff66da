"""The kernels over rows, `reduce` and `transform_rows`, and the device functions that they and scans are made of.

A space has kept and reduced dimensions (see `space.Space`); a row is the elements of one kept index. A block is
two-dimensional, kept elements by reduced ones, and a program takes some blocks of some rows. Between device functions
travel `rows`, which are (the indices of kept elements, which of them there are, shapes, strides), and a `span` of each
row, which is (its start, the number of its blocks, the length of a whole row). `strides` are those of the inputs over
kept and over reduced dimensions, of the outputs over both, of tensors with an element for each row over the kept
dimensions, and of an element's index over the reduced ones. All else is known when a kernel is compiled: FACTS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.rows.cooperative import states_of_row, take_ticket
from tritonite.engine.rows.facts import BOTH, KEPT, PARTS, REDUCED
from tritonite.language.indices import aligned_to, strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.reduce import reduce_all, reduce_rows, reduce_rows_in_order
from tritonite.language.registers import from_registers, in_own_registers
from tritonite.runtime.libentry import libentry

_KEPT, _REDUCED, _PARTS, _BOTH = (tl.constexpr(kind) for kind in (KEPT, REDUCED, PARTS, BOTH))


@triton.jit
def strided_pointers(
    base,
    rows,
    reduced,
    kept_strides,
    reduced_strides,
    ALIGNED: tl.constexpr,
    SHIFTED: tl.constexpr = False,
    BESIDE: tl.constexpr = 1,
    ODD: tl.constexpr = False,
):
    """Pointers to a block; of rows that are SHIFTED from the first whole word on. BESIDE is `Facts.beside`.

    Where no two elements are known to be next to each other, Triton 3.6 gives neighbouring threads elements of the same
    row. So it is told of pairs of ODD rows, which nothing is loaded by: no more than the size of an element divides
    their addresses.
    """
    kept, shapes = rows[0], rows[2]
    kept_offset = strided_offset(kept, shapes[0], kept_strides, BESIDE)
    if SHIFTED:
        kept_offset += ALIGNED - 1
    kept_offset = aligned_to(kept_offset, ALIGNED)
    kept_offset = kept_offset[:, None]
    if ODD:
        kept_offset = tl.max_contiguous(kept_offset, [2, 1])
    # By two additions, so that constants between a row's elements can be part of what loads them.
    return (
        base + kept_offset + aligned_to(strided_offset(reduced, shapes[1], reduced_strides, ALIGNED), BESIDE)[None, :]
    )


@triton.jit
def inside(index, end, WHOLE: tl.constexpr):
    """Which of a block's indices are before the end; of a WHOLE block all are, at no cost."""
    if WHOLE:
        mask = tl.full(index.shape, True, tl.int1)
    else:
        mask = index < end
    return mask


@triton.jit
def load(
    inputs,
    rows,
    reduced,
    reduced_mask,
    FACTS: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    EVICTION: tl.constexpr,
    COMMON: tl.constexpr,
    CONVERTED: tl.constexpr = True,
):
    """The values in a block of the operands from BEGIN to END; COMMON is the cache modifier of what rows share.

    They are CONVERTED to what the reduction reads, or as they are in memory. Where rows do not start at 16 bytes,
    elements are loaded one by one, or by words of a few. What rows have in common is loaded so, too: with two layouts
    the compiler would pass elements from thread to thread.
    """
    kept, kept_mask, shapes, strides = rows
    # Which part an element is of is found by a product where there is nothing to hint at.
    PART: tl.constexpr = FACTS.part if FACTS.part > 1 else 0
    values = ()
    for i in tl.static_range(BEGIN, END):
        if FACTS.kinds[i] == _KEPT:
            # Two-dimensional pointers would have a thread load its row's value once for each of its elements.
            offset = strided_offset(kept, shapes[0], strides[0][i])
            value = tl.load(inputs[i] + offset, mask=kept_mask, other=0)[:, None]
        elif FACTS.kinds[i] == _REDUCED and kept.shape[0] >= 16:
            offset = strided_offset(reduced, shapes[1], strides[1][i])
            value = tl.load(inputs[i] + offset, mask=reduced_mask, other=0)[None, :]
        elif FACTS.kinds[i] == _REDUCED:
            offset = strided_offset(reduced, shapes[1], strides[1][i])[None, :]
            if FACTS.aligned != 1 and len(strides[1][i]) == 1:
                offset = tl.max_contiguous(offset, [1, max(1, FACTS.aligned)])
            value = tl.load(inputs[i] + offset, mask=reduced_mask[None, :], other=0, cache_modifier=COMMON)
        elif FACTS.kinds[i] == _PARTS:
            offset = strided_offset(reduced, shapes[1], strides[1][i], PART, True)[None, :]
            offset += strided_offset(kept, shapes[0], strides[0][i])[:, None]
            value = tl.load(inputs[i] + offset, mask=kept_mask[:, None] & reduced_mask[None, :], other=0)
        else:
            pointers = strided_pointers(
                *(inputs[i], rows, reduced, strides[0][i], strides[1][i]),
                *(FACTS.aligned, FACTS.shifted, FACTS.beside, FACTS.odd),
            )
            mask = kept_mask[:, None] & reduced_mask[None, :]
            # What is in more parts than the first operand is read again, such as a group norm's weights.
            if len(strides[1][i]) > len(strides[1][0]):
                value = tl.load(pointers, mask=mask, other=0)
            else:
                value = tl.load(pointers, mask=mask, other=0, eviction_policy=EVICTION)
        values = values + (value.to(FACTS.dtypes[i]) if CONVERTED else value,)
    return values


@triton.jit
def as_columns(results):
    columns = ()
    for i in tl.static_range(len(results)):
        columns = columns + (results[i][:, None],)
    return columns


@triton.jit
def leaves(values, rows, reduced, mask, numbers, FACTS: tl.constexpr):
    """The states of a block's elements, one each; where the mask is off, the identity."""
    SHAPE: tl.constexpr = FACTS.block
    shapes, index_strides = rows[2], rows[3][5]
    if FACTS.leaf is None:
        states = values
    elif len(index_strides) > 0:
        index = strided_offset(reduced, shapes[1], index_strides)
        states = FACTS.leaf(*(values + (tl.broadcast_to(index[None, :], SHAPE),) + numbers))
    else:
        states = FACTS.leaf(*(values + numbers))
    if FACTS.leaf is not None and len(FACTS.states) == 1:
        states = (states,)
    masked = ()
    for i in tl.static_range(len(FACTS.states)):
        state = tl.broadcast_to(states[i].to(FACTS.states[i]), SHAPE)
        masked = masked + (tl.where(mask, state, FACTS.init[i]).to(FACTS.states[i]),)
    return masked


@triton.jit
def combine_states(a, b, COMBINE: tl.constexpr, FACTS: tl.constexpr):
    both = COMBINE(*(a + b))
    if len(FACTS.states) == 1:
        both = (both,)
    states = ()
    for i in tl.static_range(len(FACTS.states)):
        states = states + (both[i].to(FACTS.states[i]),)
    return states


@triton.jit
def _by_stages(values, mask, count, column, FACTS: tl.constexpr, SOME: tl.constexpr, EXACT: tl.constexpr):
    """The state of each row of `values`, by a fold for each of the stages.

    Unless all have SOME elements those without have the identity. `column` is their count as the stages take it. Where
    sums are EXACT no stage has to refine another's.
    """
    results = ()
    for s in tl.static_range(len(FACTS.stages)):
        if EXACT and FACTS.stages[s].refining:
            folded = (results[s - 1],)
        else:
            elements = FACTS.stages[s].leaf(*(values + as_columns(results) + (column,)))
            elements = tl.where(mask, elements, FACTS.stages[s].init).to(FACTS.states[0])
            folded = reduce_rows((elements,), FACTS.stages[s].combine)
            if FACTS.stages[s].finish is not None:
                folded = (FACTS.stages[s].finish(*(folded + results)),)
        results = results + folded
    gathered = FACTS.gather(*(results + (count,)))
    states = ()
    for i in tl.static_range(len(FACTS.states)):
        state = gathered[i] if SOME else tl.where(count > 0.0, gathered[i], FACTS.init[i])
        states = states + (state.to(FACTS.states[i]),)
    return states


@triton.jit
def _grouped(block, FACTS: tl.constexpr):
    """A block with a row for each group of a row's elements, next to each other or else as far apart as can be."""
    ROWS: tl.constexpr = FACTS.block[0]
    GROUPS: tl.constexpr = FACTS.block[1] // FACTS.group
    if not FACTS.consecutive:
        block = tl.permute(tl.reshape(block, (ROWS, FACTS.group, GROUPS)), (0, 2, 1))
    return tl.reshape(block, (ROWS * GROUPS, FACTS.group))


@triton.jit
def _states_of_groups(values, span, mask, FACTS: tl.constexpr, WHOLE: tl.constexpr):
    """The states of groups of a block's elements, which one thread has: no barrier and no shuffle."""
    SHAPE: tl.constexpr = FACTS.block
    GROUP: tl.constexpr = FACTS.group
    GROUPS: tl.constexpr = SHAPE[1] // GROUP
    ROWS: tl.constexpr = SHAPE[0] * GROUPS
    begin, n_reduced = span[0], span[2]
    groups = ()
    for i in tl.static_range(len(values)):
        groups = groups + (_grouped(tl.broadcast_to(values[i], SHAPE), FACTS),)
    # Eighths of eight halves that are alike add up without rounding.
    EXACT: tl.constexpr = WHOLE and GROUP == 8
    if EXACT:
        # A number by itself is combined once for all groups.
        count = tl.full((), GROUP, tl.float32)
    elif WHOLE:
        count = tl.full((ROWS,), GROUP, tl.float32)
    else:
        # Where a group's elements begin, and how far apart they are.
        place = begin + tl.arange(0, ROWS) % GROUPS * (GROUP if FACTS.consecutive else 1)
        apart: tl.constexpr = 1 if FACTS.consecutive else GROUPS
        count = tl.minimum(tl.maximum(tl.cdiv(n_reduced - place, apart), 0), GROUP).to(tl.float32)
    column = count if EXACT else count[:, None]
    return _by_stages(groups, _grouped(mask, FACTS), count, column, FACTS, WHOLE, EXACT)


@triton.jit
def _states_of_block(values, rows, span, numbers, FACTS: tl.constexpr, WHOLE: tl.constexpr):
    """The states of a block's elements, from the span's start on, or of groups of them by stages."""
    reduced = span[0] + tl.arange(0, FACTS.block[1])
    mask = rows[1][:, None] & inside(reduced, span[2], WHOLE)[None, :]
    if len(FACTS.stages) > 0:
        states = _states_of_groups(values, span, mask, FACTS, WHOLE)
    else:
        states = leaves(values, rows, reduced, mask, numbers, FACTS)
    return states


@triton.jit
def _of_rows(states, FACTS: tl.constexpr):
    """The states of a block's elements or groups of them as a block, in which a row's are those of one row."""
    GROUPS: tl.constexpr = FACTS.block[1] // FACTS.group
    if len(FACTS.stages) > 0:
        found = ()
        for i in tl.static_range(len(states)):
            every = tl.broadcast_to(states[i], (FACTS.block[0] * GROUPS,))
            found = found + (tl.reshape(every, (FACTS.block[0], GROUPS)),)
        states = found
    return states


@triton.jit
def _folded(states, FACTS: tl.constexpr):
    """The states of rows, from those of their elements or of groups of them."""
    if FACTS.invariant:
        states = reduce_rows_in_order(states, FACTS.combine)
    else:
        states = reduce_rows(states, FACTS.combine)
    return states


@triton.jit
def _grown(states, values, count, FACTS: tl.constexpr):
    """States without their count, with one more element each, so that they have `count`."""
    share = 1.0 / tl.full((), count, FACTS.states[0])
    return FACTS.grow(*(states + values + (share,)))


@triton.jit
def _ungrown(FACTS: tl.constexpr):
    """The states of no elements at each of a block's places, without their count."""
    states = ()
    for i in tl.static_range(len(FACTS.states) - 1):
        states = states + (tl.full(FACTS.block, FACTS.init[i], FACTS.states[i]),)
    return states


@triton.jit
def _grown_last(states, values, mask, steps, FACTS: tl.constexpr):
    """States with the last of `steps` blocks, where the mask is on, and with their count."""
    grown = _grown(states, values, tl.maximum(steps, 1), FACTS)
    places = tl.broadcast_to(mask[None, :], FACTS.block)
    found = ()
    for i in tl.static_range(len(states)):
        found = found + (tl.where(places, grown[i], states[i]),)
    count = tl.where(places, steps, tl.maximum(steps - 1, 0)).to(FACTS.states[len(states)])
    return found + (count,)


@triton.jit
def fold_block(values, rows, span, mask, numbers, FACTS: tl.constexpr):
    """The states of rows of one block, of whose columns the mask says which there are."""
    start, steps, n_reduced = span
    if len(FACTS.stages) > 0:
        count = tl.minimum(n_reduced - start, FACTS.block[1]).to(tl.float64)
        counts = tl.broadcast_to(count, (FACTS.block[0],))
        states = _by_stages(values, rows[1][:, None] & mask[None, :], counts, count, FACTS, True, False)
    elif FACTS.grow is not None:
        states = reduce_rows(_grown_last(_ungrown(FACTS), values, mask, steps, FACTS), FACTS.combine)
    else:
        reduced = start + tl.arange(0, FACTS.block[1])
        states = _folded(leaves(values, rows, reduced, rows[1][:, None] & mask[None, :], numbers, FACTS), FACTS)
    return states


@triton.jit
def _grow_blocks(inputs, rows, span, FACTS: tl.constexpr, EVICTION: tl.constexpr):
    """The states of the elements at each place of a span's blocks.

    All places have as many elements, but for those that the last block does not have, so that their share is computed
    once for a block: combining counts that are tensors takes a division an element, 25 instructions in place of 7.
    """
    start, steps, n_reduced = span
    COLUMNS: tl.constexpr = FACTS.block[1]
    states = _ungrown(FACTS)
    reduced = start + tl.arange(0, COLUMNS)
    mask = inside(reduced, n_reduced, FACTS.whole[1])
    values = load(inputs, rows, reduced, mask, FACTS, 0, FACTS.folded, EVICTION, "")
    for step in range(1, steps):
        reduced += COLUMNS
        mask = inside(reduced, n_reduced, FACTS.whole[1])
        coming = load(inputs, rows, reduced, mask, FACTS, 0, FACTS.folded, EVICTION, "")
        states = _grown(states, values, step, FACTS)
        values = coming
    return _grown_last(states, values, mask, steps, FACTS)


@triton.jit
def _combine_blocks(inputs, rows, span, numbers, FACTS: tl.constexpr, EVICTION: tl.constexpr):
    """`fold_blocks`, by the states of every block's elements or of groups of them.

    Only the last block may go beyond the row's end. It comes after the loop, which has no masks: what a block has for
    its bounds, a comparison and two selections an element, was two thirds of some kernels' instructions. A fold is
    followed by a barrier, so the next block is loaded before one is folded.
    """
    start, steps, n_reduced = span
    COLUMNS: tl.constexpr = FACTS.block[1]
    WHOLE: tl.constexpr = FACTS.whole[1]
    FOLDED: tl.constexpr = FACTS.folded
    reduced = start + tl.arange(0, COLUMNS)
    mask = inside(reduced, n_reduced, WHOLE)
    values = load(inputs, rows, reduced, mask, FACTS, 0, FOLDED, EVICTION, "")
    reduced += COLUMNS
    mask = inside(reduced, n_reduced, WHOLE) & (steps > 1)
    coming = load(inputs, rows, reduced, mask, FACTS, 0, FOLDED, EVICTION, "")
    states = _states_of_block(values, rows, span, numbers, FACTS, WHOLE)
    for step in range(1, steps - 1):
        values = coming
        reduced += COLUMNS
        mask = inside(reduced, n_reduced, WHOLE)
        coming = load(inputs, rows, reduced, mask, FACTS, 0, FOLDED, EVICTION, "")
        own = (start + step * COLUMNS, steps, n_reduced)
        more = _states_of_block(values, rows, own, numbers, FACTS, True)
        states = combine_states(states, more, FACTS.follow, FACTS)
    # As the last pass of that loop, or of one like it, this takes registers that softmax does not have.
    if steps > 1:
        own = (start + (steps - 1) * COLUMNS, steps, n_reduced)
        more = _states_of_block(coming, rows, own, numbers, FACTS, WHOLE)
        states = combine_states(states, more, FACTS.follow, FACTS)
    return _folded(_of_rows(states, FACTS), FACTS)


@triton.jit
def _load_ahead(inputs, rows, reduced, mask, FACTS: tl.constexpr, EVICTION: tl.constexpr):
    """A block for the next turn of a loop, of which `_loaded_ahead` has the values then."""
    ahead = load(inputs, rows, reduced, mask, FACTS, 0, FACTS.folded, EVICTION, "", not FACTS.one_by_one)
    if FACTS.one_by_one:
        registers = ()
        for i in tl.static_range(len(ahead)):
            registers = registers + (in_own_registers(ahead[i]) if FACTS.kinds[i] == _BOTH else ahead[i],)
        ahead = registers
    return ahead


@triton.jit
def _loaded_ahead(ahead, inputs, FACTS: tl.constexpr):
    """The values of a block that `_load_ahead` has begun to load."""
    if FACTS.one_by_one:
        values = ()
        for i in tl.static_range(len(ahead)):
            values = values + (from_registers(ahead[i], inputs[i].dtype.element_ty).to(FACTS.dtypes[i]),)
        ahead = values
    return ahead


@triton.jit
def _combine_upright_blocks(inputs, rows, span, numbers, FACTS: tl.constexpr, EVICTION: tl.constexpr):
    """`fold_blocks` of rows that stand upright: what a thread has of each is combined place by place, at no barrier.

    So a block is loaded when it is wanted, by many programs at a time, and all whole ones without a mask: of a column
    that there is not nothing is written. Where a thread has registers for it the next block is loaded before one is
    combined: of elements that are loaded one by one the assembler has two on their way at a time otherwise.
    """
    start, steps, n_reduced = span
    COLUMNS: tl.constexpr = FACTS.block[1]
    FOLDED: tl.constexpr = FACTS.folded
    AHEAD: tl.constexpr = FACTS.ahead
    WHOLE: tl.constexpr = FACTS.whole[1]
    every = (rows[0], inside(rows[0], n_reduced, True), rows[2], rows[3])
    places = tl.arange(0, COLUMNS)
    mask = inside(start + places, n_reduced, WHOLE)
    values = load(inputs, rows, start + places, mask, FACTS, 0, FOLDED, EVICTION, "")
    whole = steps if WHOLE else tl.maximum(1, tl.minimum(steps, (n_reduced - start) // COLUMNS))
    if AHEAD:
        reduced = start + COLUMNS + places
        coming_mask = inside(reduced, n_reduced, WHOLE) & (steps > 1)
        coming = _load_ahead(inputs, rows, reduced, coming_mask, FACTS, EVICTION)
    states = _states_of_block(values, every, span, numbers, FACTS, WHOLE)
    for step in range(1, whole):
        begin = start + step * COLUMNS
        if AHEAD:
            values = _loaded_ahead(coming, inputs, FACTS)
            later = begin + places + COLUMNS
            later_mask = inside(later, n_reduced, WHOLE) & (step + 1 < steps)
            coming = _load_ahead(inputs, rows, later, later_mask, FACTS, EVICTION)
        else:
            all_places = inside(begin + places, n_reduced, True)
            values = load(inputs, rows, begin + places, all_places, FACTS, 0, FOLDED, EVICTION, "")
        more = _states_of_block(values, every, (begin, 1, n_reduced), numbers, FACTS, True)
        states = combine_states(states, more, FACTS.follow, FACTS)
    if not WHOLE:
        # One at most.
        for step in range(whole, steps):
            begin = start + step * COLUMNS
            if AHEAD:
                values = _loaded_ahead(coming, inputs, FACTS)
            else:
                mask = begin + places < n_reduced
                values = load(inputs, rows, begin + places, mask, FACTS, 0, FOLDED, EVICTION, "")
            more = _states_of_block(values, every, (begin, 1, n_reduced), numbers, FACTS, False)
            states = combine_states(states, more, FACTS.follow, FACTS)
    return reduce_rows(_of_rows(states, FACTS), FACTS.combine)


@triton.jit
def fold_blocks(inputs, rows, span, numbers, FACTS: tl.constexpr, EVICTION: tl.constexpr):
    """The state of each row's span of blocks."""
    if FACTS.grow is not None:
        states = reduce_rows(_grow_blocks(inputs, rows, span, FACTS, EVICTION), FACTS.combine)
    elif FACTS.upright:
        states = _combine_upright_blocks(inputs, rows, span, numbers, FACTS, EVICTION)
    else:
        states = _combine_blocks(inputs, rows, span, numbers, FACTS, EVICTION)
    return states


@triton.jit
def _extent(start, n_reduced, FACTS: tl.constexpr):
    """Where a program begins in its rows, and their length, as the compiler can see them.

    Of rows that a block holds the first half has no masks then, which were a third of softmax's instructions where rows
    are not aligned.
    """
    if FACTS.held:
        start = tl.full((), 0, FACTS.index)
        n_reduced = tl.maximum(n_reduced, FACTS.block[1] // 2)
    return start, n_reduced


@triton.jit
def _edges(row, n_reduced, shapes, strides, FACTS: tl.constexpr):
    """(the length of a row's whole words, the places of what is before and behind them, which of those there are).

    Places are counted from the first whole word on.
    """
    WORD: tl.constexpr = FACTS.aligned
    offset = strided_offset(row, shapes[0], strides[0][0])
    before = (WORD - offset % WORD) % WORD
    length = (n_reduced - before) // WORD * WORD
    place = tl.arange(0, 2 * WORD) - WORD
    mask = tl.where(place < 0, place >= -before, place < n_reduced - before - length)
    return length, place + tl.where(place < 0, 0, length), mask


@triton.jit
def _fold_edges(states, FACTS: tl.constexpr):
    """The state of a row's edges, as a number, which leaves them in a layout of their own: an element a thread."""
    flat = ()
    for i in tl.static_range(len(states)):
        flat = flat + (tl.reshape(states[i], (2 * FACTS.aligned,)),)
    return reduce_all(flat, FACTS.combine)


@triton.jit
def _steps_before(start, steps, n_reduced, COLUMNS: tl.constexpr):
    """How many of `steps` blocks from `start` on there are."""
    return tl.minimum(steps, tl.cdiv(n_reduced - start, COLUMNS))


@triton.jit
def _in_float64(number_0, number_1, COUNT: tl.constexpr):
    """The first COUNT numbers as scalars, whatever Triton made of them, which takes a 1 for a constant."""
    numbers = ()
    if COUNT > 0:
        numbers = numbers + (tl.full((), number_0, tl.float64),)
    if COUNT > 1:
        numbers = numbers + (tl.full((), number_1, tl.float64),)
    return numbers


@triton.jit
def project_states(states, count, numbers, FACTS: tl.constexpr, RESULTS: tl.constexpr):
    """The RESULTS of rows with these states; `count` of elements is float64."""
    results = FACTS.project(*(states + (count,) + numbers))
    if RESULTS == 1:
        results = (results,)
    return results


@triton.jit
def loads_begun(steps, AT_ONCE: tl.constexpr):
    """True, and if AT_ONCE the compiler does not know: what is behind a branch on it begins when all loads are begun.

    The assembler keeps loads before a barrier, and what is made of them behind a branch. Else it takes few registers by
    loading some, folding those and then loading more, and waits for memory every time: for eight rows of 33 elements in
    five turns.
    """
    if AT_ONCE:
        tl.debug_barrier()
        begun = steps >= 0
    else:
        begun = True
    return begun


@triton.jit
def _in_a_thread_each(states, ROWS: tl.constexpr):
    """States of rows, each in one thread, where a fold leaves them in every thread that had elements of the row.

    What is made of them is computed once then: of 64 rows of 64 halves, each of 128 threads computed four results.
    """
    found = ()
    for i in tl.static_range(len(states)):
        found = found + (tl.gather(states[i], tl.arange(0, ROWS), 0),)
    return found


@triton.jit
def _write_reduced(states, outs, rows, n_kept, count, given, FACTS: tl.constexpr):
    """Write the results of rows with these states or, without `project`, the states themselves."""
    kept, kept_mask, shapes, strides = rows
    if FACTS.project is None:
        for i in tl.static_range(len(outs)):
            tl.store(outs[i] + tl.program_id(1).to(FACTS.index) * n_kept + kept, states[i], mask=kept_mask)
    else:
        numbers = _in_float64(given[0], given[1], FACTS.numbers)
        # Of an extremum's place nothing is made.
        if FACTS.block[0] > 1 and len(strides[5]) == 0 and not FACTS.in_threads:
            states = _in_a_thread_each(states, FACTS.block[0])
        results = project_states(states, tl.full((), count, tl.float64), numbers, FACTS, len(outs))
        for i in tl.static_range(len(outs)):
            offset = strided_offset(kept, shapes[0], strides[4][i])
            result = tl.broadcast_to(results[i].to(outs[i].dtype.element_ty), (FACTS.block[0],))
            tl.store(outs[i] + offset, result, mask=kept_mask)


@libentry()
@triton.jit(do_not_specialize=["steps"])
def reduce(
    inputs,
    outs,
    shapes,
    strides,
    sizes,
    steps,
    count: tl.float64,
    number_0: tl.float64,
    number_1: tl.float64,
    FACTS: tl.constexpr,
):
    """A program reduces `steps` blocks of each of its rows, and writes the rows' results, or their states.

    `sizes` are the number of rows and their length, `count` is how many elements a row's results are of.
    """
    wait_for_previous_launch()
    n_kept, n_reduced = aligned_to(sizes[0], FACTS.beside), aligned_to(sizes[1], FACTS.aligned)
    kept = tl.program_id(0).to(FACTS.index) * FACTS.block[0] + tl.arange(0, FACTS.block[0])
    kept_mask = inside(kept, n_kept, FACTS.whole[0])
    start, n_reduced = _extent(tl.program_id(1).to(FACTS.index) * steps * FACTS.block[1], n_reduced, FACTS)
    span = (start, _steps_before(start, steps, n_reduced, FACTS.block[1]), n_reduced)
    leaf_numbers = _in_float64(number_0, number_1, FACTS.leaf_numbers)
    rows, steps = (kept, kept_mask, shapes, strides), span[1]
    if FACTS.once:
        reduced = start + tl.arange(0, FACTS.block[1])
        mask = inside(reduced, n_reduced, FACTS.whole[1])
        values = load(inputs, rows, reduced, mask, FACTS, 0, FACTS.folded, "", "")
        if loads_begun(steps, FACTS.at_once):
            states = fold_block(values, rows, span, mask, leaf_numbers, FACTS)
            _write_reduced(states, outs, rows, n_kept, count, (number_0, number_1), FACTS)
    else:
        states = fold_blocks(inputs, rows, span, leaf_numbers, FACTS, "")
        _write_reduced(states, outs, rows, n_kept, count, (number_0, number_1), FACTS)


@triton.jit
def _apply(values, results, numbers, outs, rows, reduced, reduced_mask, FACTS: tl.constexpr, EVICTION: tl.constexpr):
    """Write what the formula makes of a block's values and the rows' results."""
    kept_mask, strides = rows[1], rows[3]
    found = FACTS.apply(*(values + as_columns(results[: FACTS.applied]) + numbers))
    if len(outs) == 1:
        found = (found,)
    for i in tl.static_range(len(outs)):
        pointers = strided_pointers(
            *(outs[i], rows, reduced, strides[2][i], strides[3][i]),
            *(FACTS.aligned, FACTS.shifted, FACTS.beside, FACTS.odd),
        )
        value = tl.broadcast_to(found[i].to(outs[i].dtype.element_ty), FACTS.block)
        tl.store(pointers, value, mask=kept_mask[:, None] & reduced_mask[None, :], eviction_policy=EVICTION)


@triton.jit
def _read_and_apply(inputs, results, numbers, outs, rows, begin, n_reduced, FACTS: tl.constexpr, WHOLE: tl.constexpr):
    """Transform a block of rows that were read before and are not read again."""
    COMMON: tl.constexpr = FACTS.common
    reduced = begin + tl.arange(0, FACTS.block[1])
    mask = inside(reduced, n_reduced, WHOLE)
    values = load(inputs, rows, reduced, mask, FACTS, 0, len(FACTS.kinds), "evict_first", COMMON)
    _apply(values, results, numbers, outs, rows, reduced, mask, FACTS, "evict_first")


@triton.jit
def _with_edges(states, edge_values, edges, edge_mask, rows, leaf_numbers, FACTS: tl.constexpr):
    """The states of rows, from those of their whole words and what is in none."""
    # By a name of its own, for Triton 3.6.
    EDGES: tl.constexpr = FACTS.edges
    more = leaves(edge_values[: FACTS.folded], rows, edges, edge_mask[None, :], leaf_numbers, EDGES)
    return combine_states(states, _fold_edges(more, FACTS), FACTS.combine, FACTS)


@triton.jit
def _write_results(results, written, rows, mask, FACTS: tl.constexpr):
    """Write those of the rows' results that are asked for."""
    kept, _, shapes, strides = rows
    for i in tl.static_range(len(written)):
        offset = strided_offset(kept, shapes[0], strides[4][i])
        tl.store(written[i] + offset, results[FACTS.written[i]].to(written[i].dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["steps"])
def transform_rows(
    inputs,
    outs,
    of_rows,
    shapes,
    strides,
    sizes,
    steps,
    count: tl.float64,
    number_0: tl.float64,
    number_1: tl.float64,
    FACTS: tl.constexpr,
):
    """A program reduces its rows and transforms them: it reads them once where a block holds them, or else twice.

    `of_rows` are tensors with something for each row: the results to write, the rows' results where a reduction has
    found them before, so that nothing but transforming is left, and the scratch of cooperative rows.
    `steps` are a program's blocks of a row.

    Memory would be read twice but for the caches. So the first reading asks them to keep a row (evict_last), the second
    goes backwards, from what was read last, and it and the results ask for no room (evict_first).
    """
    wait_for_previous_launch()
    written, given, scratch = of_rows
    n_kept, n_reduced = aligned_to(sizes[0], FACTS.beside), sizes[1]
    ONCE: tl.constexpr = FACTS.once and len(given) == 0
    if FACTS.sharing > 1:
        row, share = take_ticket(scratch[0], FACTS.sharing, FACTS.index)
    else:
        row, share = tl.program_id(0).to(FACTS.index), tl.program_id(1).to(FACTS.index)
    kept = row * FACTS.block[0] + tl.arange(0, FACTS.block[0])
    kept_mask = inside(kept, n_kept, FACTS.whole[0])
    rows = (kept, kept_mask, shapes, strides)
    # By a name of its own, for Triton 3.6.
    EDGES: tl.constexpr = FACTS.edges
    if FACTS.shifted:
        n_reduced, edges, edge_mask = _edges(row, n_reduced, shapes, strides, FACTS)
        edge_mask = edge_mask & (share == 0)
        edge_values = load(inputs, rows, edges, edge_mask, EDGES, 0, len(FACTS.kinds), "", "")
    n_reduced = aligned_to(n_reduced, FACTS.aligned)
    start, n_reduced = _extent(share * steps * FACTS.block[1], n_reduced, FACTS)
    steps = FACTS.unrolled if FACTS.unrolled > 0 else _steps_before(start, steps, n_reduced, FACTS.block[1])
    numbers = _in_float64(number_0, number_1, FACTS.numbers)
    leaf_numbers = _in_float64(number_0, number_1, FACTS.leaf_numbers)
    span = (start, steps, n_reduced)
    if ONCE:
        reduced = start + tl.arange(0, FACTS.block[1])
        mask = inside(reduced, n_reduced, FACTS.whole[1])
        values = load(inputs, rows, reduced, mask, FACTS, 0, len(FACTS.kinds), "", "")
        # Always, since a row that is held until it is written takes the registers anyway.
        if loads_begun(steps, True):
            states = fold_block(values[: FACTS.folded], rows, span, mask, leaf_numbers, FACTS)
            if FACTS.shifted:
                states = _with_edges(states, edge_values, edges, edge_mask, rows, leaf_numbers, FACTS)
            results = project_states(states, tl.full((), count, tl.float64), numbers, FACTS, FACTS.results)
            _write_results(results, written, rows, kept_mask, FACTS)
            if FACTS.shifted:
                _apply(edge_values, results, numbers, outs, rows, edges, edge_mask, EDGES, "")
            _apply(values, results, numbers, outs, rows, reduced, mask, FACTS, "")
    else:
        results = ()
        if len(given) > 0:
            for i in tl.static_range(len(given)):
                offset = strided_offset(kept, shapes[0], strides[4][len(written) + i])
                results = results + (tl.load(given[i] + offset, mask=kept_mask, other=0),)
        else:
            states = fold_blocks(inputs, rows, span, leaf_numbers, FACTS, "evict_last")
            if FACTS.shifted:
                states = _with_edges(states, edge_values, edges, edge_mask, rows, leaf_numbers, FACTS)
            if FACTS.sharing > 1:
                states = states_of_row(states, scratch[0], row, share, FACTS)
            results = project_states(states, tl.full((), count, tl.float64), numbers, FACTS, FACTS.results)
        _write_results(results, written, rows, kept_mask & (share == 0) if FACTS.sharing > 1 else kept_mask, FACTS)
        if FACTS.shifted:
            _apply(edge_values, results, numbers, outs, rows, edges, edge_mask, EDGES, "")
        # Only the first of these blocks may go beyond the row's end. Of what has no whole word there is none.
        first = tl.minimum(steps, 1) if FACTS.shifted else 1
        for later in tl.static_range(2):
            for step in range(1 if later else 0, steps if later else first):
                begin = start + (steps - 1 - step) * FACTS.block[1]
                _read_and_apply(inputs, results, numbers, outs, rows, begin, n_reduced, FACTS, FACTS.whole[1] or later)
