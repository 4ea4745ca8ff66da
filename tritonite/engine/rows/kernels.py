"""The kernels over rows, `reduce` and `transform_rows`, and the device functions that they and scans row_slice.

A row has the elements of one kept index, and a block has (kept, reduced) elements. Device functions pass two tuples:
`rows` is (kept indices, kept mask, shapes, strides); `span` is (start, number of blocks, length of a whole row).
`shapes` and `strides` are those of `RowSpace`. META, a `RowsMeta`, has all that is known at compile time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.rows.cooperative import states_of_row, take_ticket
from tritonite.engine.rows.meta import BOTH, KEPT, REDUCED, SEGMENTED
from tritonite.language.indices import aligned_to, strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.reduce import reduce_all, reduce_rows, reduce_rows_in_order
from tritonite.language.registers import from_registers, in_own_registers
from tritonite.runtime.libentry import libentry

_KEPT, _REDUCED, _SEGMENTED, _BOTH = (tl.constexpr(kind) for kind in (KEPT, REDUCED, SEGMENTED, BOTH))
# Indices of `strides`, which are `RowSpace.strides`.
INPUT_KEPT, INPUT_REDUCED, OUT_KEPT, OUT_REDUCED, ROW_TENSORS, ELEMENT_INDEX = (tl.constexpr(i) for i in range(6))


@triton.jit
def strided_pointers(
    base,
    rows,
    reduced,
    kept_strides,
    reduced_strides,
    ALIGNED: tl.constexpr,
    MISALIGNED: tl.constexpr = False,
    KEPT_ALIGNMENT: tl.constexpr = 1,
    ODD_STRIDES: tl.constexpr = False,
):
    """Return pointers to a block of an operand. KEPT_ALIGNMENT is `RowsMeta.kept_alignment`.

    Pointers of MISALIGNED rows start at their first whole vector. Without known contiguous elements, Triton 3.6 gives
    neighbouring threads elements of one row. The hint of pairs for ODD_STRIDES avoids that. It widens no load, because
    addresses are multiples of an element's size only.
    """
    kept, shapes = rows[0], rows[2]
    kept_offset = strided_offset(kept, shapes[0], kept_strides, KEPT_ALIGNMENT)
    if MISALIGNED:
        kept_offset += ALIGNED - 1
    kept_offset = aligned_to(kept_offset, ALIGNED)
    kept_offset = kept_offset[:, None]
    if ODD_STRIDES:
        kept_offset = tl.max_contiguous(kept_offset, [2, 1])
    # Two additions, so that constant offsets between a row's elements go into the load instructions.
    return (
        base
        + kept_offset
        + aligned_to(strided_offset(reduced, shapes[1], reduced_strides, ALIGNED), KEPT_ALIGNMENT)[None, :]
    )


@triton.jit
def inside(index, end, WHOLE: tl.constexpr):
    """Return which indices are below the end; all of a WHOLE block are, without a comparison."""
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
    META: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    EVICTION: tl.constexpr,
    CACHE_MODIFIER: tl.constexpr,
    CONVERTED: tl.constexpr = True,
):
    """Return a block's values of the operands from BEGIN to END.

    They are CONVERTED to the dtypes of META, or stay as in memory. CACHE_MODIFIER is for operands that are the same for
    every row. Where rows do not start at 16 bytes, elements come by scalar or narrow loads. Operands of the kind
    REDUCED then do too: two layouts would make the compiler exchange elements between threads.
    """
    kept, kept_mask, shapes, strides = rows
    # Without an alignment hint, 0 finds an element's segment by a multiplication.
    SEGMENT: tl.constexpr = META.segment if META.segment > 1 else 0
    values = ()
    for i in tl.static_range(BEGIN, END):
        if META.kinds[i] == _KEPT:
            # Two-dimensional pointers would make a thread load its row's value once for each of its elements.
            offset = strided_offset(kept, shapes[0], strides[INPUT_KEPT][i])
            value = tl.load(inputs[i] + offset, mask=kept_mask, other=0)[:, None]
        elif META.kinds[i] == _REDUCED and kept.shape[0] >= 16:
            offset = strided_offset(reduced, shapes[1], strides[INPUT_REDUCED][i])
            value = tl.load(inputs[i] + offset, mask=reduced_mask, other=0)[None, :]
        elif META.kinds[i] == _REDUCED:
            offset = strided_offset(reduced, shapes[1], strides[INPUT_REDUCED][i])[None, :]
            if META.aligned != 1 and len(strides[INPUT_REDUCED][i]) == 1:
                offset = tl.max_contiguous(offset, [1, max(1, META.aligned)])
            value = tl.load(inputs[i] + offset, mask=reduced_mask[None, :], other=0, cache_modifier=CACHE_MODIFIER)
        elif META.kinds[i] == _SEGMENTED:
            offset = strided_offset(reduced, shapes[1], strides[INPUT_REDUCED][i], SEGMENT, True)[None, :]
            offset += strided_offset(kept, shapes[0], strides[INPUT_KEPT][i])[:, None]
            value = tl.load(inputs[i] + offset, mask=kept_mask[:, None] & reduced_mask[None, :], other=0)
        else:
            pointers = strided_pointers(
                *(inputs[i], rows, reduced, strides[INPUT_KEPT][i], strides[INPUT_REDUCED][i]),
                *(META.aligned, META.misaligned, META.kept_alignment, META.odd_strides),
            )
            mask = kept_mask[:, None] & reduced_mask[None, :]
            # An operand with more segments than the first, such as a group norm's weight, is read again, so caches keep
            # it.
            if len(strides[INPUT_REDUCED][i]) > len(strides[INPUT_REDUCED][0]):
                value = tl.load(pointers, mask=mask, other=0)
            else:
                value = tl.load(pointers, mask=mask, other=0, eviction_policy=EVICTION)
        values = values + (value.to(META.dtypes[i]) if CONVERTED else value,)
    return values


@triton.jit
def as_columns(results):
    """Return the results of rows as columns, which broadcast along a row."""
    columns = ()
    for i in tl.static_range(len(results)):
        columns = columns + (results[i][:, None],)
    return columns


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


@triton.jit
def _extent(start, n_reduced, META: tl.constexpr):
    """Return a program's start in its rows and their length, in a form that tells the compiler more.

    If a block holds the row, the first half of the block needs no masks.
    """
    if META.held:
        start = tl.full((), 0, META.index)
        n_reduced = tl.maximum(n_reduced, META.block[1] // 2)
    return start, n_reduced


@triton.jit
def _edges(row, n_reduced, shapes, strides, META: tl.constexpr):
    """Return the length of a row's whole vectors, the indices of the elements outside them, and the mask of these.

    Indices are relative to the first whole vector: negative before it.
    """
    VECTOR_WIDTH: tl.constexpr = META.aligned
    offset = strided_offset(row, shapes[0], strides[INPUT_KEPT][0])
    before = (VECTOR_WIDTH - offset % VECTOR_WIDTH) % VECTOR_WIDTH
    length = (n_reduced - before) // VECTOR_WIDTH * VECTOR_WIDTH
    index = tl.arange(0, 2 * VECTOR_WIDTH) - VECTOR_WIDTH
    mask = tl.where(index < 0, index >= -before, index < n_reduced - before - length)
    return length, index + tl.where(index < 0, 0, length), mask


@triton.jit
def _reduce_edges(states, META: tl.constexpr):
    """Return the state of a row's edges as a scalar, so that they keep a layout of one element per thread."""
    flat = ()
    for i in tl.static_range(len(states)):
        flat = flat + (tl.reshape(states[i], (2 * META.aligned,)),)
    return reduce_all(flat, META.combine)


@triton.jit
def _steps_before(start, steps, n_reduced, COLUMNS: tl.constexpr):
    """Return the number of `steps` blocks from `start` on that begin before the row's end."""
    return tl.minimum(steps, tl.cdiv(n_reduced - start, COLUMNS))


@triton.jit
def _in_float64(number_0, number_1, COUNT: tl.constexpr):
    """Return the first COUNT numbers as float64 scalars, because Triton makes a constant of a 1."""
    numbers = ()
    if COUNT > 0:
        numbers = numbers + (tl.full((), number_0, tl.float64),)
    if COUNT > 1:
        numbers = numbers + (tl.full((), number_1, tl.float64),)
    return numbers


@triton.jit
def project_states(states, count, numbers, META: tl.constexpr, RESULTS: tl.constexpr):
    """Return the RESULTS results of rows with these states, over `count` elements (float64)."""
    results = META.project(*(states + (count,) + numbers))
    if RESULTS == 1:
        results = (results,)
    return results


@triton.jit
def all_loads_issued(steps, LOADS_FIRST: tl.constexpr):
    """Return true, with LOADS_FIRST in a form that keeps code behind a branch on it behind all loads.

    The assembler keeps loads in front of a barrier and their uses behind a branch. Else it saves registers: it loads
    and reduces some elements, then the next, and waits for memory every time.
    """
    if LOADS_FIRST:
        tl.debug_barrier()
        begun = steps >= 0
    else:
        begun = True
    return begun


@triton.jit
def _in_a_thread_each(states, ROWS: tl.constexpr):
    """Return states of rows, each in one thread, where a reduction leaves them in all threads of the row.

    Results are then computed once per row.
    """
    found = ()
    for i in tl.static_range(len(states)):
        found = found + (tl.gather(states[i], tl.arange(0, ROWS), 0),)
    return found


@triton.jit
def _write_reduced(states, outs, rows, n_kept, count, given, META: tl.constexpr):
    """Store the results of rows with these states or, without `project`, the states."""
    kept, kept_mask, shapes, strides = rows
    if META.project is None:
        for i in tl.static_range(len(outs)):
            tl.store(outs[i] + tl.program_id(1).to(META.index) * n_kept + kept, states[i], mask=kept_mask)
    else:
        numbers = _in_float64(given[0], given[1], META.numbers)
        # The projection of an extremum's index computes nothing that is worth the exchange.
        if META.block[0] > 1 and len(strides[ELEMENT_INDEX]) == 0 and not META.row_per_thread:
            states = _in_a_thread_each(states, META.block[0])
        results = project_states(states, tl.full((), count, tl.float64), numbers, META, len(outs))
        for i in tl.static_range(len(outs)):
            offset = strided_offset(kept, shapes[0], strides[ROW_TENSORS][i])
            result = tl.broadcast_to(results[i].to(outs[i].dtype.element_ty), (META.block[0],))
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
    META: tl.constexpr,
):
    """Reduce `steps` blocks of a program's rows, and store the rows' results or their states.

    `sizes` are the number of rows and their length. `count` is the number of elements that a row's results are of.
    """
    wait_for_previous_launch()
    n_kept, n_reduced = aligned_to(sizes[0], META.kept_alignment), aligned_to(sizes[1], META.aligned)
    kept = tl.program_id(0).to(META.index) * META.block[0] + tl.arange(0, META.block[0])
    kept_mask = inside(kept, n_kept, META.whole[0])
    start, n_reduced = _extent(tl.program_id(1).to(META.index) * steps * META.block[1], n_reduced, META)
    span = (start, _steps_before(start, steps, n_reduced, META.block[1]), n_reduced)
    leaf_numbers = _in_float64(number_0, number_1, META.leaf_numbers)
    rows, steps = (kept, kept_mask, shapes, strides), span[1]
    if META.single_block:
        reduced = start + tl.arange(0, META.block[1])
        mask = inside(reduced, n_reduced, META.whole[1])
        values = load(inputs, rows, reduced, mask, META, 0, META.leaf_operands, "", "")
        if all_loads_issued(steps, META.loads_first):
            states = reduce_block(values, rows, span, mask, leaf_numbers, META)
            _write_reduced(states, outs, rows, n_kept, count, (number_0, number_1), META)
    else:
        states = reduce_blocks(inputs, rows, span, leaf_numbers, META, "")
        _write_reduced(states, outs, rows, n_kept, count, (number_0, number_1), META)


@triton.jit
def _apply(values, results, numbers, outs, rows, reduced, reduced_mask, META: tl.constexpr, EVICTION: tl.constexpr):
    """Store the formula's results for a block, from its values and the rows' results."""
    kept_mask, strides = rows[1], rows[3]
    found = META.apply(*(values + as_columns(results[: META.applied]) + numbers))
    if len(outs) == 1:
        found = (found,)
    for i in tl.static_range(len(outs)):
        pointers = strided_pointers(
            *(outs[i], rows, reduced, strides[OUT_KEPT][i], strides[OUT_REDUCED][i]),
            *(META.aligned, META.misaligned, META.kept_alignment, META.odd_strides),
        )
        value = tl.broadcast_to(found[i].to(outs[i].dtype.element_ty), META.block)
        tl.store(pointers, value, mask=kept_mask[:, None] & reduced_mask[None, :], eviction_policy=EVICTION)


@triton.jit
def _read_and_apply(inputs, results, numbers, outs, rows, begin, n_reduced, META: tl.constexpr, WHOLE: tl.constexpr):
    """Transform a block of rows that is read for the second and last time."""
    CACHE_MODIFIER: tl.constexpr = META.weight_modifier
    reduced = begin + tl.arange(0, META.block[1])
    mask = inside(reduced, n_reduced, WHOLE)
    values = load(inputs, rows, reduced, mask, META, 0, len(META.kinds), "evict_first", CACHE_MODIFIER)
    _apply(values, results, numbers, outs, rows, reduced, mask, META, "evict_first")


@triton.jit
def _with_edges(states, edge_values, edges, edge_mask, rows, leaf_numbers, META: tl.constexpr):
    """Return the states of rows: those of their whole vectors combined with those of the elements outside."""
    # A name for the nested object, which Triton 3.6 needs.
    EDGES: tl.constexpr = META.edges
    more = leaves(edge_values[: META.leaf_operands], rows, edges, edge_mask[None, :], leaf_numbers, EDGES)
    return combine_states(states, _reduce_edges(more, META), META.combine, META)


@triton.jit
def _write_results(results, written, rows, mask, META: tl.constexpr):
    """Store the rows' results that META.written numbers."""
    kept, _, shapes, strides = rows
    for i in tl.static_range(len(written)):
        offset = strided_offset(kept, shapes[0], strides[ROW_TENSORS][i])
        tl.store(written[i] + offset, results[META.written[i]].to(written[i].dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["steps"])
def transform_rows(
    inputs,
    outs,
    row_tensors,
    shapes,
    strides,
    sizes,
    steps,
    count: tl.float64,
    number_0: tl.float64,
    number_1: tl.float64,
    META: tl.constexpr,
):
    """Reduce a program's rows and transform them. Rows that a block holds are read once, others twice.

    `row_tensors` are tensors with an element per row: the results to store, results that an earlier reduction has
    computed, and the scratch of cooperative rows. With given results, rows are only transformed. `steps` is a program's
    number of blocks of a row.

    The second reading should hit the caches. So the first asks them to keep a row (evict_last), and the second goes
    backwards, from the last block read. The second reading and the results are evict_first.
    """
    wait_for_previous_launch()
    written, given, scratch = row_tensors
    n_kept, n_reduced = aligned_to(sizes[0], META.kept_alignment), sizes[1]
    SINGLE_BLOCK: tl.constexpr = META.single_block and len(given) == 0
    if META.programs_per_row > 1:
        row, row_slice = take_ticket(scratch[0], META.programs_per_row, META.index)
    else:
        row, row_slice = tl.program_id(0).to(META.index), tl.program_id(1).to(META.index)
    kept = row * META.block[0] + tl.arange(0, META.block[0])
    kept_mask = inside(kept, n_kept, META.whole[0])
    rows = (kept, kept_mask, shapes, strides)
    # A name for the nested object, which Triton 3.6 needs.
    EDGES: tl.constexpr = META.edges
    if META.misaligned:
        n_reduced, edges, edge_mask = _edges(row, n_reduced, shapes, strides, META)
        edge_mask = edge_mask & (row_slice == 0)
        edge_values = load(inputs, rows, edges, edge_mask, EDGES, 0, len(META.kinds), "", "")
    n_reduced = aligned_to(n_reduced, META.aligned)
    start, n_reduced = _extent(row_slice * steps * META.block[1], n_reduced, META)
    steps = META.unrolled if META.unrolled > 0 else _steps_before(start, steps, n_reduced, META.block[1])
    numbers = _in_float64(number_0, number_1, META.numbers)
    leaf_numbers = _in_float64(number_0, number_1, META.leaf_numbers)
    span = (start, steps, n_reduced)
    if SINGLE_BLOCK:
        reduced = start + tl.arange(0, META.block[1])
        mask = inside(reduced, n_reduced, META.whole[1])
        values = load(inputs, rows, reduced, mask, META, 0, len(META.kinds), "", "")
        # Always, because a row that is held until it is written takes the registers anyway.
        if all_loads_issued(steps, True):
            states = reduce_block(values[: META.leaf_operands], rows, span, mask, leaf_numbers, META)
            if META.misaligned:
                states = _with_edges(states, edge_values, edges, edge_mask, rows, leaf_numbers, META)
            results = project_states(states, tl.full((), count, tl.float64), numbers, META, META.results)
            _write_results(results, written, rows, kept_mask, META)
            if META.misaligned:
                _apply(edge_values, results, numbers, outs, rows, edges, edge_mask, EDGES, "")
            _apply(values, results, numbers, outs, rows, reduced, mask, META, "")
    else:
        results = ()
        if len(given) > 0:
            for i in tl.static_range(len(given)):
                offset = strided_offset(kept, shapes[0], strides[ROW_TENSORS][len(written) + i])
                results = results + (tl.load(given[i] + offset, mask=kept_mask, other=0),)
        else:
            states = reduce_blocks(inputs, rows, span, leaf_numbers, META, "evict_last")
            if META.misaligned:
                states = _with_edges(states, edge_values, edges, edge_mask, rows, leaf_numbers, META)
            if META.programs_per_row > 1:
                states = states_of_row(states, scratch[0], row, row_slice, META)
            results = project_states(states, tl.full((), count, tl.float64), numbers, META, META.results)
        _write_results(
            results, written, rows, kept_mask & (row_slice == 0) if META.programs_per_row > 1 else kept_mask, META
        )
        if META.misaligned:
            _apply(edge_values, results, numbers, outs, rows, edges, edge_mask, EDGES, "")
        # Only the first of these blocks may go beyond the row's end. A misaligned row may have no whole vector, and no
        # block.
        first = tl.minimum(steps, 1) if META.misaligned else 1
        for later in tl.static_range(2):
            for step in range(1 if later else 0, steps if later else first):
                begin = start + (steps - 1 - step) * META.block[1]
                _read_and_apply(inputs, results, numbers, outs, rows, begin, n_reduced, META, META.whole[1] or later)
