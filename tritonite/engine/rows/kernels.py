"""The kernels over rows, `reduce` and `transform_rows`.

`load.py` and `states.py` have the device functions that scans share, and explain `rows`, `span` and META.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.pointwise.embedded import evaluate_result_program
from tritonite.engine.rows.cooperative import states_of_row, take_ticket
from tritonite.engine.rows.load import (
    ELEMENT_INDEX,
    INPUT_KEPT,
    OUT_KEPT,
    OUT_REDUCED,
    ROW_TENSORS,
    as_columns,
    inside,
    load,
    strided_pointers,
)
from tritonite.engine.rows.states import combine_states, leaves, reduce_block, reduce_blocks
from tritonite.language.indices import aligned_to, strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.reduce import reduce_all
from tritonite.runtime.libentry import libentry


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
def _after_row_epilogue(results, further, rows, FIRST: tl.constexpr, META: tl.constexpr):
    """Return the outputs of the epilogue, which reads the first of the rows' results, and the other results.

    `further` are the epilogue's operands, with an element per row. FIRST numbers the first of them among row tensors.
    """
    kept, kept_mask, shapes, strides = rows
    EPILOGUE: tl.constexpr = META.epilogue
    values = ()
    for i in tl.static_range(len(further)):
        offset = strided_offset(kept, shapes[0], strides[ROW_TENSORS][FIRST + i])
        values = values + (tl.load(further[i] + offset, mask=kept_mask, other=0),)
    first = tl.broadcast_to(results[0], (META.block[0],))
    return evaluate_result_program(EPILOGUE, first, values) + results[1:]


@triton.jit
def _write_reduced(states, row_tensors, rows, n_kept, count, given, META: tl.constexpr):
    """Store the results of rows with these states, or of the epilogue. Without `project` store the states."""
    kept, kept_mask, shapes, strides = rows
    outs, further = row_tensors
    if META.project is None:
        for i in tl.static_range(len(outs)):
            tl.store(outs[i] + tl.program_id(1).to(META.index) * n_kept + kept, states[i], mask=kept_mask)
    else:
        numbers = _in_float64(given[0], given[1], META.numbers)
        # The projection of an extremum's index computes nothing that is worth the exchange.
        if META.block[0] > 1 and len(strides[ELEMENT_INDEX]) == 0 and not META.row_per_thread:
            states = _in_a_thread_each(states, META.block[0])
        results = project_states(states, tl.full((), count, tl.float64), numbers, META, META.results)
        if META.epilogue is not None:
            results = _after_row_epilogue(results, further, rows, len(outs), META)
        for i in tl.static_range(len(outs)):
            offset = strided_offset(kept, shapes[0], strides[ROW_TENSORS][i])
            result = tl.broadcast_to(results[i].to(outs[i].dtype.element_ty), (META.block[0],))
            tl.store(outs[i] + offset, result, mask=kept_mask)


@libentry()
@triton.jit(do_not_specialize=["steps"])
def reduce(
    inputs,
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
    """Reduce `steps` blocks of a program's rows, and store the rows' results or their states.

    `row_tensors` are the outputs and the epilogue's operands, with an element per row. `sizes` are the number of rows
    and their length. `count` is the number of elements that a row's results are of.
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
            _write_reduced(states, row_tensors, rows, n_kept, count, (number_0, number_1), META)
    else:
        states = reduce_blocks(inputs, rows, span, leaf_numbers, META, "")
        _write_reduced(states, row_tensors, rows, n_kept, count, (number_0, number_1), META)


@triton.jit
def _after_epilogue(element, values, META: tl.constexpr):
    """Return the outputs of the epilogue, from a transformed block and the values that follow those of `apply`."""
    EPILOGUE: tl.constexpr = META.epilogue
    return evaluate_result_program(EPILOGUE, tl.broadcast_to(element, META.block), values[META.apply_values :])


@triton.jit
def _apply(values, results, numbers, outs, rows, reduced, reduced_mask, META: tl.constexpr, EVICTION: tl.constexpr):
    """Store the formula's results for a block, from its values and the rows' results."""
    kept_mask, strides = rows[1], rows[3]
    found = META.apply(*(values[: META.apply_values] + as_columns(results[: META.applied]) + numbers))
    if META.epilogue is not None:
        found = _after_epilogue(found, values, META)
    elif len(outs) == 1:
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
    more = leaves(edge_values[: META.leaf_values], rows, edges, edge_mask[None, :], leaf_numbers, EDGES)
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
            states = reduce_block(values[: META.leaf_values], rows, span, mask, leaf_numbers, META)
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
