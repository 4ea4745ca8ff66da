"""States of rows: the device functions that reduce a block, or the blocks of a span, to a state per row.

`rows` is as in `load.py`. `span`, a tuple, is (start, number of blocks, length of a whole row).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.rows.load import ELEMENT_INDEX, as_columns, inside, load
from tritonite.engine.rows.meta import BOTH
from tritonite.language.indices import strided_offset
from tritonite.language.reduce import reduce_rows, reduce_rows_in_order
from tritonite.language.registers import from_registers, in_own_registers

_BOTH = tl.constexpr(BOTH)


@triton.jit
def leaves(values, rows, reduced, mask, numbers, META: tl.constexpr):
    """Return the state of each element of a block, the identity where the mask is off."""
    SHAPE: tl.constexpr = META.block
    shapes, index_strides = rows[2], rows[3][ELEMENT_INDEX]
    if META.leaf is None:
        states = values
    elif len(index_strides) > 0:
        index = strided_offset(reduced, shapes[1], index_strides)
        states = META.leaf(*(values + (tl.broadcast_to(index[None, :], SHAPE),) + numbers))
    else:
        states = META.leaf(*(values + numbers))
    if META.leaf is not None and len(META.states) == 1:
        states = (states,)
    masked = ()
    for i in tl.static_range(len(META.states)):
        state = tl.broadcast_to(states[i].to(META.states[i]), SHAPE)
        masked = masked + (tl.where(mask, state, META.init[i]).to(META.states[i]),)
    return masked


@triton.jit
def combine_states(a, b, COMBINE: tl.constexpr, META: tl.constexpr):
    """Return the combination of two tuples of states, in the dtypes of the state."""
    both = COMBINE(*(a + b))
    if len(META.states) == 1:
        both = (both,)
    states = ()
    for i in tl.static_range(len(META.states)):
        states = states + (both[i].to(META.states[i]),)
    return states


@triton.jit
def _by_stages(values, mask, count, column, META: tl.constexpr, SOME: tl.constexpr, EXACT: tl.constexpr):
    """Return the state of each row of `values`, by one reduction per stage.

    If SOME is set every row has elements; else empty rows get the identity. `count` has the elements of each row, and
    `column` is the same for the stages. With EXACT sums, refining stages are skipped.
    """
    results = ()
    for s in tl.static_range(len(META.stages)):
        if EXACT and META.stages[s].refining:
            reduced_values = (results[s - 1],)
        else:
            elements = META.stages[s].leaf(*(values + as_columns(results) + (column,)))
            elements = tl.where(mask, elements, META.stages[s].init).to(META.states[0])
            reduced_values = reduce_rows((elements,), META.stages[s].combine)
            if META.stages[s].finish is not None:
                reduced_values = (META.stages[s].finish(*(reduced_values + results)),)
        results = results + reduced_values
    gathered = META.gather(*(results + (count,)))
    states = ()
    for i in tl.static_range(len(META.states)):
        state = gathered[i] if SOME else tl.where(count > 0.0, gathered[i], META.init[i])
        states = states + (state.to(META.states[i]),)
    return states


@triton.jit
def _grouped(block, META: tl.constexpr):
    """Return a block with a row for each group of a row's elements, which are contiguous or strided by the groups."""
    ROWS: tl.constexpr = META.block[0]
    GROUPS: tl.constexpr = META.block[1] // META.group
    if not META.consecutive:
        block = tl.permute(tl.reshape(block, (ROWS, META.group, GROUPS)), (0, 2, 1))
    return tl.reshape(block, (ROWS * GROUPS, META.group))


@triton.jit
def _states_of_groups(values, span, mask, META: tl.constexpr, WHOLE: tl.constexpr):
    """Return the states of groups of a block's elements. A thread has a whole group: no barrier, no shuffle."""
    SHAPE: tl.constexpr = META.block
    GROUP: tl.constexpr = META.group
    GROUPS: tl.constexpr = SHAPE[1] // GROUP
    ROWS: tl.constexpr = SHAPE[0] * GROUPS
    begin, n_reduced = span[0], span[2]
    groups = ()
    for i in tl.static_range(len(values)):
        groups = groups + (_grouped(tl.broadcast_to(values[i], SHAPE), META),)
    # The mean of eight equal 16-bit floats is exact in float32, so no stage needs to refine it.
    EXACT: tl.constexpr = WHOLE and GROUP == 8
    if EXACT:
        # A scalar count is combined once for all groups.
        count = tl.full((), GROUP, tl.float32)
    elif WHOLE:
        count = tl.full((ROWS,), GROUP, tl.float32)
    else:
        # The first element of each group, and the stride between its elements.
        first = begin + tl.arange(0, ROWS) % GROUPS * (GROUP if META.consecutive else 1)
        stride: tl.constexpr = 1 if META.consecutive else GROUPS
        count = tl.minimum(tl.maximum(tl.cdiv(n_reduced - first, stride), 0), GROUP).to(tl.float32)
    column = count if EXACT else count[:, None]
    return _by_stages(groups, _grouped(mask, META), count, column, META, WHOLE, EXACT)


@triton.jit
def _states_of_block(values, rows, span, numbers, META: tl.constexpr, WHOLE: tl.constexpr):
    """Return the states of a block's elements from the span's start on, or of groups of them if there are stages."""
    reduced = span[0] + tl.arange(0, META.block[1])
    mask = rows[1][:, None] & inside(reduced, span[2], WHOLE)[None, :]
    if len(META.stages) > 0:
        states = _states_of_groups(values, span, mask, META, WHOLE)
    else:
        states = leaves(values, rows, reduced, mask, numbers, META)
    return states


@triton.jit
def _states_by_row(states, META: tl.constexpr):
    """Return the states of a block, one row of states for each row. With stages a state is that of a group."""
    GROUPS: tl.constexpr = META.block[1] // META.group
    if len(META.stages) > 0:
        found = ()
        for i in tl.static_range(len(states)):
            every = tl.broadcast_to(states[i], (META.block[0] * GROUPS,))
            found = found + (tl.reshape(every, (META.block[0], GROUPS)),)
        states = found
    return states


@triton.jit
def _reduce_states(states, META: tl.constexpr):
    """Return the state of each row, from those of its elements or groups."""
    if META.invariant:
        states = reduce_rows_in_order(states, META.combine)
    else:
        states = reduce_rows(states, META.combine)
    return states


@triton.jit
def _grown(states, values, count, META: tl.constexpr):
    """Return states without their count, each extended by one element, so that it has `count` elements."""
    weight = 1.0 / tl.full((), count, META.states[0])
    return META.grow(*(states + values + (weight,)))


@triton.jit
def _ungrown(META: tl.constexpr):
    """Return empty states without their count, one for each element of a block."""
    states = ()
    for i in tl.static_range(len(META.states) - 1):
        states = states + (tl.full(META.block, META.init[i], META.states[i]),)
    return states


@triton.jit
def _grown_last(states, values, mask, steps, META: tl.constexpr):
    """Return states extended by the last of `steps` blocks where the mask is on, with their count."""
    grown = _grown(states, values, tl.maximum(steps, 1), META)
    valid = tl.broadcast_to(mask[None, :], META.block)
    found = ()
    for i in tl.static_range(len(states)):
        found = found + (tl.where(valid, grown[i], states[i]),)
    count = tl.where(valid, steps, tl.maximum(steps - 1, 0)).to(META.states[len(states)])
    return found + (count,)


@triton.jit
def reduce_block(values, rows, span, mask, numbers, META: tl.constexpr):
    """Reduce one block to a state per row. `mask` marks valid columns."""
    start, steps, n_reduced = span
    if len(META.stages) > 0:
        count = tl.minimum(n_reduced - start, META.block[1]).to(tl.float64)
        counts = tl.broadcast_to(count, (META.block[0],))
        states = _by_stages(values, rows[1][:, None] & mask[None, :], counts, count, META, True, False)
    elif META.grow is not None:
        states = reduce_rows(_grown_last(_ungrown(META), values, mask, steps, META), META.combine)
    else:
        reduced = start + tl.arange(0, META.block[1])
        states = _reduce_states(leaves(values, rows, reduced, rows[1][:, None] & mask[None, :], numbers, META), META)
    return states


@triton.jit
def _grow_blocks(inputs, rows, span, META: tl.constexpr, EVICTION: tl.constexpr):
    """Return the state of every lane of a block, over the blocks of a span.

    All lanes have the same count, except where the last block is masked. So 1 / count is computed once for a block.
    Combining states with counts of their own takes a division per element.
    """
    start, steps, n_reduced = span
    COLUMNS: tl.constexpr = META.block[1]
    states = _ungrown(META)
    reduced = start + tl.arange(0, COLUMNS)
    mask = inside(reduced, n_reduced, META.whole[1])
    values = load(inputs, rows, reduced, mask, META, 0, META.leaf_operands, EVICTION, "")
    for step in range(1, steps):
        reduced += COLUMNS
        mask = inside(reduced, n_reduced, META.whole[1])
        coming = load(inputs, rows, reduced, mask, META, 0, META.leaf_operands, EVICTION, "")
        states = _grown(states, values, step, META)
        values = coming
    return _grown_last(states, values, mask, steps, META)


@triton.jit
def _combine_blocks(inputs, rows, span, numbers, META: tl.constexpr, EVICTION: tl.constexpr):
    """Return the state of each row of a row reduction, from the states of every block's elements or groups.

    Only the last block may go beyond the row's end. It is handled after the loop, which so has no masks; bounds cost a
    comparison and two selections per element. A reduction ends with a barrier, so the next block is loaded before the
    present one is reduced.
    """
    start, steps, n_reduced = span
    COLUMNS: tl.constexpr = META.block[1]
    WHOLE: tl.constexpr = META.whole[1]
    LEAF_OPERANDS: tl.constexpr = META.leaf_operands
    reduced = start + tl.arange(0, COLUMNS)
    mask = inside(reduced, n_reduced, WHOLE)
    values = load(inputs, rows, reduced, mask, META, 0, LEAF_OPERANDS, EVICTION, "")
    reduced += COLUMNS
    mask = inside(reduced, n_reduced, WHOLE) & (steps > 1)
    coming = load(inputs, rows, reduced, mask, META, 0, LEAF_OPERANDS, EVICTION, "")
    states = _states_of_block(values, rows, span, numbers, META, WHOLE)
    for step in range(1, steps - 1):
        values = coming
        reduced += COLUMNS
        mask = inside(reduced, n_reduced, WHOLE)
        coming = load(inputs, rows, reduced, mask, META, 0, LEAF_OPERANDS, EVICTION, "")
        own = (start + step * COLUMNS, steps, n_reduced)
        more = _states_of_block(values, rows, own, numbers, META, True)
        states = combine_states(states, more, META.follow, META)
    # As a last iteration of the loop, or of a second loop, this takes registers that softmax does not have.
    if steps > 1:
        own = (start + (steps - 1) * COLUMNS, steps, n_reduced)
        more = _states_of_block(coming, rows, own, numbers, META, WHOLE)
        states = combine_states(states, more, META.follow, META)
    return _reduce_states(_states_by_row(states, META), META)


@triton.jit
def _load_ahead(inputs, rows, reduced, mask, META: tl.constexpr, EVICTION: tl.constexpr):
    """Load a block for the next iteration, which takes the values from `_loaded_ahead`."""
    ahead = load(inputs, rows, reduced, mask, META, 0, META.leaf_operands, EVICTION, "", not META.scalar_loads)
    if META.scalar_loads:
        registers = ()
        for i in tl.static_range(len(ahead)):
            registers = registers + (in_own_registers(ahead[i]) if META.kinds[i] == _BOTH else ahead[i],)
        ahead = registers
    return ahead


@triton.jit
def _loaded_ahead(ahead, inputs, META: tl.constexpr):
    """Return the values of a block that `_load_ahead` has loaded."""
    if META.scalar_loads:
        values = ()
        for i in tl.static_range(len(ahead)):
            values = values + (from_registers(ahead[i], inputs[i].dtype.element_ty).to(META.dtypes[i]),)
        ahead = values
    return ahead


@triton.jit
def _combine_column_blocks(inputs, rows, span, numbers, META: tl.constexpr, EVICTION: tl.constexpr):
    """Return the state of each row of a column reduction. Lanes are combined without barriers.

    Whole blocks are combined without a mask, because states of missing rows are not stored. With META.prefetch the next
    block is loaded before the present one is combined: the assembler keeps only two scalar loads in flight otherwise.
    """
    start, steps, n_reduced = span
    COLUMNS: tl.constexpr = META.block[1]
    LEAF_OPERANDS: tl.constexpr = META.leaf_operands
    PREFETCH: tl.constexpr = META.prefetch
    WHOLE: tl.constexpr = META.whole[1]
    unmasked = (rows[0], inside(rows[0], n_reduced, True), rows[2], rows[3])
    lanes = tl.arange(0, COLUMNS)
    mask = inside(start + lanes, n_reduced, WHOLE)
    values = load(inputs, rows, start + lanes, mask, META, 0, LEAF_OPERANDS, EVICTION, "")
    whole = steps if WHOLE else tl.maximum(1, tl.minimum(steps, (n_reduced - start) // COLUMNS))
    if PREFETCH:
        reduced = start + COLUMNS + lanes
        coming_mask = inside(reduced, n_reduced, WHOLE) & (steps > 1)
        coming = _load_ahead(inputs, rows, reduced, coming_mask, META, EVICTION)
    states = _states_of_block(values, unmasked, span, numbers, META, WHOLE)
    for step in range(1, whole):
        begin = start + step * COLUMNS
        if PREFETCH:
            values = _loaded_ahead(coming, inputs, META)
            later = begin + lanes + COLUMNS
            later_mask = inside(later, n_reduced, WHOLE) & (step + 1 < steps)
            coming = _load_ahead(inputs, rows, later, later_mask, META, EVICTION)
        else:
            all_lanes = inside(begin + lanes, n_reduced, True)
            values = load(inputs, rows, begin + lanes, all_lanes, META, 0, LEAF_OPERANDS, EVICTION, "")
        more = _states_of_block(values, unmasked, (begin, 1, n_reduced), numbers, META, True)
        states = combine_states(states, more, META.follow, META)
    if not WHOLE:
        # At most one block.
        for step in range(whole, steps):
            begin = start + step * COLUMNS
            if PREFETCH:
                values = _loaded_ahead(coming, inputs, META)
            else:
                mask = begin + lanes < n_reduced
                values = load(inputs, rows, begin + lanes, mask, META, 0, LEAF_OPERANDS, EVICTION, "")
            more = _states_of_block(values, unmasked, (begin, 1, n_reduced), numbers, META, False)
            states = combine_states(states, more, META.follow, META)
    return reduce_rows(_states_by_row(states, META), META.combine)


@triton.jit
def reduce_blocks(inputs, rows, span, numbers, META: tl.constexpr, EVICTION: tl.constexpr):
    """Return the state of each row, over a span of blocks."""
    if META.grow is not None:
        states = reduce_rows(_grow_blocks(inputs, rows, span, META, EVICTION), META.combine)
    elif META.column_reduction:
        states = _combine_column_blocks(inputs, rows, span, numbers, META, EVICTION)
    else:
        states = _combine_blocks(inputs, rows, span, numbers, META, EVICTION)
    return states
