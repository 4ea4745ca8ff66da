"""Reductions over any dimensions of any layout, and row operators: one pair of kernels, and the choice of their blocks.

A reduction is declared as `init / leaf / combine / project`: what each element contributes to a state, how two states
become one, and what results the last one has. A row operator applies a formula to every element and its row's results,
as softmax does.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritonite import devices
from tritonite.dispatch.call import empty
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.iteration import (
    INT32_LIMIT,
    collapse,
    common_device,
    never_overlaps_itself,
    power_of_2,
    span,
)
from tritonite.errors import Decline
from tritonite.launch import libentry

# The dtype of a state that is an element's index in the reduced dimensions, and the identity's, which is beyond all.
INDEX = "index"
# Whether an operand varies along the kept dimensions, along the reduced ones, or along both.
_KEPT, _REDUCED, BOTH = 1, 2, 3
# Bytes for which a multiprocessor's own cache has no room beside rows.
_BEYOND_CACHE = 2**17
_MOST_UNROLLED = 4
# What half of a multiprocessor's programs read in a cycle, while the other half waits.
_BYTES_A_CYCLE = 26
# Bytes of a row that programs share, of a block of it, and how many they are: all of a row's must be at work at a time.
_SHARED, _SHARED_BLOCK, _MOST_SHARING = 3 * 2**16, 2**14, 8


@triton.jit
def strided_offset(linear, shape, strides):
    """Where element `linear` of a space is, fastest dimension first; `shape` leaves out the slowest."""
    offset = linear * 0
    rest = linear
    for d in tl.static_range(len(strides) - 1):
        offset += (rest % shape[d]) * strides[d]
        rest = rest // shape[d]
    return offset + rest * strides[len(strides) - 1]


@triton.jit
def told(x, ALIGNED: tl.constexpr):
    """x, a multiple of ALIGNED, so that Triton knows: by itself it knows of arguments whether 16 divides them."""
    return x // ALIGNED * ALIGNED if ALIGNED > 1 else x


@triton.jit
def strided_pointers(base, kept, reduced, shapes, kept_strides, reduced_strides, ALIGNED: tl.constexpr = 1):
    kept_offset = told(strided_offset(kept, shapes[0], kept_strides), ALIGNED)[:, None]
    return base + (kept_offset + strided_offset(reduced, shapes[1], reduced_strides)[None, :])


@triton.jit
def inside(index, end, WHOLE: tl.constexpr):
    """Which of a block's indices are before the end; of a WHOLE block all are, at no cost."""
    if WHOLE:
        mask = tl.full(index.shape, True, tl.int1)
    else:
        mask = index < end
    return mask


@triton.jit
def _widened(value):
    """bfloat16 to float32, by an instruction for each of a pair: what Triton compiles takes two for the second."""
    pair: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return tl.inline_asm_elementwise(pair, "=r,=r,r", [value], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def load(
    inputs,
    rows,
    reduced,
    reduced_mask,
    KINDS: tl.constexpr,
    DTYPES: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVICTION: tl.constexpr,
    COMMON: tl.constexpr,
    PAIRS: tl.constexpr = False,
):
    """The values in a block of the operands from BEGIN to END; COMMON is how caches take what rows have in common.

    `rows` are the indices of kept elements, which of them there are, and the shapes and strides of all. With PAIRS
    registers have two halves that are next to each other.
    """
    kept, kept_mask, shapes, strides = rows
    values = ()
    for i in tl.static_range(BEGIN, END):
        if KINDS[i] == 1:
            # Two-dimensional pointers would have a thread load its row's value once for each of its elements.
            offset = strided_offset(kept, shapes[0], strides[0][i])
            value = tl.load(inputs[i] + offset, mask=kept_mask, other=0)[:, None]
        elif KINDS[i] == 2 and kept.shape[0] >= 16:
            offset = strided_offset(reduced, shapes[1], strides[1][i])
            value = tl.load(inputs[i] + offset, mask=reduced_mask, other=0)[None, :]
        elif KINDS[i] == 2:
            offset = strided_offset(reduced, shapes[1], strides[1][i])[None, :]
            if not ALIGNED:
                # One by one, as elements of rows are taken, or they would have to go from thread to thread.
                offset = tl.max_contiguous(offset, [1, 1])
            value = tl.load(inputs[i] + offset, mask=reduced_mask[None, :], other=0, cache_modifier=COMMON)
        else:
            pointers = strided_pointers(inputs[i], kept, reduced, shapes, strides[0][i], strides[1][i], ALIGNED)
            mask = kept_mask[:, None] & reduced_mask[None, :]
            value = tl.load(pointers, mask=mask, other=0, eviction_policy=EVICTION)
        if PAIRS and value.dtype == tl.bfloat16:
            value = _widened(value)
        values = values + (value.to(DTYPES[i]),)
    return values


@triton.jit
def leaves(
    values,
    reduced,
    shapes,
    index_strides,
    numbers,
    mask,
    LEAF: tl.constexpr,
    INIT: tl.constexpr,
    STATES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """What a block's elements contribute; where the mask is off, the identity."""
    if LEAF is None:
        states = values
    elif len(index_strides) > 0:
        index = strided_offset(reduced, shapes[1], index_strides)
        states = LEAF(*(values + (tl.broadcast_to(index[None, :], SHAPE),) + numbers))
    else:
        states = LEAF(*(values + numbers))
    if LEAF is not None and len(INIT) == 1:
        states = (states,)
    masked = ()
    for i in tl.static_range(len(INIT)):
        state = tl.broadcast_to(states[i].to(STATES[i]), SHAPE)
        masked = masked + (tl.where(mask, state, INIT[i]).to(STATES[i]),)
    return masked


@triton.jit
def combine_states(a, b, COMBINE: tl.constexpr, STATES: tl.constexpr):
    both = COMBINE(*(a + b))
    if len(STATES) == 1:
        both = (both,)
    states = ()
    for i in tl.static_range(len(STATES)):
        states = states + (both[i].to(STATES[i]),)
    return states


def _fold_in_interpreter(states: tuple[Any, ...], combine: Any) -> tuple[Any, ...]:
    """By halves: Triton's own reduction runs element by element there."""
    while states[0].shape[1] > 1:
        rows, columns = states[0].shape
        halves = [tl.split(tl.reshape(state, (rows, columns // 2, 2))) for state in states]
        found = combine(*[left for left, _ in halves], *[right for _, right in halves])
        states = found if isinstance(found, tuple) else (found,)
    return tuple([tl.reshape(state, (state.shape[0],)) for state in states])


@tl.core.builtin
def _fold_in_compiler(states, combine, _semantic=None, _generator=None):
    found = tl.reduce(
        tuple(states.values), 1, getattr(combine, "value", combine), _semantic=_semantic, _generator=_generator
    )
    return tl.tuple(found)


# Along the second dimension of a block.
_fold = _fold_in_interpreter if devices.current.interpreted else _fold_in_compiler


@tl.core.builtin
def _fold_all(states, combine, _semantic=None, _generator=None):
    found = tl.reduce(tuple(states.values), 0, combine.value, _semantic=_semantic, _generator=_generator)
    found = found if isinstance(found, tuple) else (found,)
    # Numbers suit any layout; to bring a block of one to another's, threads would write it for each element of that.
    return tl.tuple([tl.full((1,), state, state.dtype, _semantic=_semantic) for state in found])


@triton.jit
def as_columns(results):
    columns = ()
    for i in tl.static_range(len(results)):
        columns = columns + (results[i][:, None],)
    return columns


@triton.jit
def _staged(
    values,
    mask,
    count,
    column,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
    INIT: tl.constexpr,
    STATES: tl.constexpr,
    SOME: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The state of each row of `values`, by a fold for each of the stages.

    Unless all have SOME elements those without have the identity. `column` is their count as the stages take it. Where
    sums are EXACT no stage has to refine another's.
    """
    results = ()
    for s in tl.static_range(len(STAGES)):
        if EXACT and STAGES[s][3]:
            folded = (results[s - 1],)
        else:
            elements = STAGES[s][0](*(values + as_columns(results) + (column,)))
            folded = _fold((tl.where(mask, elements, STAGES[s][2]).to(STATES[0]),), STAGES[s][1])
            if len(STAGES[s]) > 5:
                folded = (STAGES[s][5](*(folded + results)),)
        results = results + folded
    gathered = GATHER(*(results + (count,)))
    states = ()
    for i in tl.static_range(len(STATES)):
        state = gathered[i] if SOME else tl.where(count > 0.0, gathered[i], INIT[i])
        states = states + (state.to(STATES[i]),)
    return states


@triton.jit
def _grouped(block, ROWS: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr):
    if ALIGNED:
        groups = tl.reshape(block, (ROWS, GROUP))
    else:
        groups = tl.trans(tl.reshape(block, (GROUP, ROWS)))
    return groups


@triton.jit
def _group_states(
    values,
    begin,
    n_reduced,
    mask,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
    INIT: tl.constexpr,
    STATES: tl.constexpr,
    SHAPE: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The states of GROUP of a block's elements each, which one thread has.

    Where rows are ALIGNED they are next to each other; else a thread loads one by one, as far apart as can be.
    """
    ROWS: tl.constexpr = SHAPE[0] * SHAPE[1] // GROUP
    groups = ()
    for i in tl.static_range(len(values)):
        groups = groups + (_grouped(tl.broadcast_to(values[i], SHAPE), ROWS, GROUP, ALIGNED),)
    # Eighths of eight halves that are alike add up without rounding.
    EXACT: tl.constexpr = WHOLE and GROUP == 8
    if EXACT:
        # A number by itself is combined once for all groups.
        count = tl.full((), GROUP, tl.float32)
    elif WHOLE:
        count = tl.full((ROWS,), GROUP, tl.float32)
    else:
        # Where a group's elements begin, and how far apart they are.
        place = begin + tl.arange(0, ROWS) % (SHAPE[1] // GROUP) * (GROUP if ALIGNED else 1)
        apart: tl.constexpr = 1 if ALIGNED else ROWS
        count = tl.minimum(tl.maximum(tl.cdiv(n_reduced - place, apart), 0), GROUP).to(tl.float32)
    column = count if EXACT else count[:, None]
    mask = _grouped(mask, ROWS, GROUP, ALIGNED)
    return _staged(groups, mask, count, column, STAGES, GATHER, INIT, STATES, WHOLE, EXACT)


@triton.jit
def _states_of_block(
    values,
    rows,
    begin,
    n_reduced,
    index_strides,
    numbers,
    LEAF: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
    INIT: tl.constexpr,
    STATES: tl.constexpr,
    KEPT: tl.constexpr,
    REDUCED: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """What the elements of a block contribute, or groups of them that have STAGES."""
    SHAPE: tl.constexpr = (KEPT, REDUCED)
    kept_mask, shapes = rows[1], rows[2]
    reduced = begin + tl.arange(0, REDUCED)
    mask = kept_mask[:, None] & inside(reduced, n_reduced, WHOLE)[None, :]
    if len(STAGES) > 0:
        states = _group_states(
            values, begin, n_reduced, mask, STAGES, GATHER, INIT, STATES, SHAPE, GROUP, ALIGNED or KEPT > 1, WHOLE
        )
    else:
        states = leaves(values, reduced, shapes, index_strides, numbers, mask, LEAF, INIT, STATES, SHAPE)
    return states


@triton.jit
def fold_blocks(
    inputs,
    rows,
    start,
    steps,
    n_reduced,
    index_strides,
    numbers,
    LEAF: tl.constexpr,
    COMBINE: tl.constexpr,
    FOLLOW: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    INIT: tl.constexpr,
    KINDS: tl.constexpr,
    DTYPES: tl.constexpr,
    LEAF_INPUTS: tl.constexpr,
    STATES: tl.constexpr,
    KEPT: tl.constexpr,
    REDUCED: tl.constexpr,
    WHOLE: tl.constexpr,
    ONCE: tl.constexpr,
    EVICTION: tl.constexpr,
    PAIRS: tl.constexpr = False,
):
    """The state of the elements in `steps` blocks of each row from `start` on, and, if ONCE, the only block's values.

    Only the last block may go beyond the row's end, and does not if WHOLE.
    """
    # As many as a thread loads at once.
    GROUP: tl.constexpr = 128 // inputs[0].dtype.element_ty.primitive_bitwidth
    kept_mask = rows[1]
    reduced = start + tl.arange(0, REDUCED)
    mask = inside(reduced, n_reduced, WHOLE)
    values = load(inputs, rows, reduced, mask, KINDS, DTYPES, 0, LEAF_INPUTS, ALIGNED, EVICTION, "", PAIRS)
    if ONCE and len(STAGES) > 0:
        count = tl.minimum(n_reduced - start, REDUCED).to(tl.float64)
        counts = tl.broadcast_to(count, (KEPT,))
        both_masks = kept_mask[:, None] & mask[None, :]
        states = _staged(values, both_masks, counts, count, STAGES, GATHER, INIT, STATES, True, False)
    else:
        if not ONCE:
            # The next block is on its way while one is folded.
            reduced += REDUCED
            mask = inside(reduced, n_reduced, WHOLE) & (steps > 1)
            coming = load(inputs, rows, reduced, mask, KINDS, DTYPES, 0, LEAF_INPUTS, ALIGNED, EVICTION, "", PAIRS)
        states = _states_of_block(
            values,
            rows,
            start,
            n_reduced,
            index_strides,
            numbers,
            LEAF,
            STAGES,
            GATHER,
            INIT,
            STATES,
            KEPT,
            REDUCED,
            GROUP,
            ALIGNED,
            WHOLE,
        )
    if not ONCE:
        for step in range(1, steps - 1):
            values = coming
            reduced += REDUCED
            mask = inside(reduced, n_reduced, WHOLE)
            coming = load(inputs, rows, reduced, mask, KINDS, DTYPES, 0, LEAF_INPUTS, ALIGNED, EVICTION, "", PAIRS)
            more = _states_of_block(
                values,
                rows,
                start + step * REDUCED,
                n_reduced,
                index_strides,
                numbers,
                LEAF,
                STAGES,
                GATHER,
                INIT,
                STATES,
                KEPT,
                REDUCED,
                GROUP,
                ALIGNED,
                True,
            )
            states = combine_states(states, more, FOLLOW, STATES)
        # As the last pass of that loop, or of one like it, this takes registers that softmax does not have.
        if steps > 1:
            more = _states_of_block(
                coming,
                rows,
                start + (steps - 1) * REDUCED,
                n_reduced,
                index_strides,
                numbers,
                LEAF,
                STAGES,
                GATHER,
                INIT,
                STATES,
                KEPT,
                REDUCED,
                GROUP,
                ALIGNED,
                WHOLE,
            )
            states = combine_states(states, more, FOLLOW, STATES)
        if len(STAGES) > 0:
            groups = ()
            for i in tl.static_range(len(states)):
                every = tl.broadcast_to(states[i], (KEPT * REDUCED // GROUP,))
                groups = groups + (tl.reshape(every, (KEPT, REDUCED // GROUP)),)
            states = groups
    if len(STAGES) == 0 or not ONCE:
        states = _fold(states, COMBINE)
    return states, values


@triton.jit
def _steps_before(start, steps, n_reduced, REDUCED: tl.constexpr):
    """How many of `steps` blocks from `start` on there are."""
    return tl.minimum(steps, tl.cdiv(n_reduced - start, REDUCED))


@triton.jit
def _numbers(count, number_0, number_1, COUNTED: tl.constexpr, NUMBERS: tl.constexpr):
    """Scalars of float64 whatever Triton made of them, which takes a 1 for a constant."""
    numbers = ()
    if COUNTED:
        numbers = numbers + (tl.full((), count, tl.float64),)
    if NUMBERS > 0:
        numbers = numbers + (tl.full((), number_0, tl.float64),)
    if NUMBERS > 1:
        numbers = numbers + (tl.full((), number_1, tl.float64),)
    return numbers


@triton.jit
def project_states(states, numbers, PROJECT: tl.constexpr, RESULTS: tl.constexpr):
    results = PROJECT(*(states + numbers))
    if RESULTS == 1:
        results = (results,)
    return results


@libentry()
@triton.jit(do_not_specialize=["steps"])
def reduce(
    inputs,
    outs,
    shapes,
    strides,
    index_strides,
    n_kept,
    n_reduced,
    steps,
    count: tl.float64,
    number_0: tl.float64,
    number_1: tl.float64,
    LEAF: tl.constexpr,
    COMBINE: tl.constexpr,
    FOLLOW: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    PROJECT: tl.constexpr,
    INIT: tl.constexpr,
    KINDS: tl.constexpr,
    DTYPES: tl.constexpr,
    STATES: tl.constexpr,
    NUMBERS: tl.constexpr,
    LEAF_NUMBERS: tl.constexpr,
    INDEX: tl.constexpr,
    KEPT: tl.constexpr,
    REDUCED: tl.constexpr,
    WHOLE: tl.constexpr,
    ONCE: tl.constexpr,
):
    """A program reduces `steps` blocks of each of KEPT rows; where it has no PROJECT it writes their states.

    Without LEAF its inputs are such states.
    """
    n_reduced = told(n_reduced, ALIGNED)
    kept = tl.program_id(0).to(INDEX) * KEPT + tl.arange(0, KEPT)
    kept_mask = inside(kept, n_kept, WHOLE[0])
    start = tl.program_id(1).to(INDEX) * steps * REDUCED
    steps = _steps_before(start, steps, n_reduced, REDUCED)
    states, _ = fold_blocks(
        inputs,
        (kept, kept_mask, shapes, strides),
        start,
        steps,
        n_reduced,
        index_strides,
        _numbers(count, number_0, number_1, False, LEAF_NUMBERS),
        LEAF,
        COMBINE,
        FOLLOW,
        STAGES,
        GATHER,
        ALIGNED,
        INIT,
        KINDS,
        DTYPES,
        len(KINDS),
        STATES,
        KEPT,
        REDUCED,
        WHOLE[1],
        ONCE,
        "",
    )
    if PROJECT is None:
        for i in tl.static_range(len(outs)):
            tl.store(outs[i] + tl.program_id(1).to(INDEX) * n_kept + kept, states[i], mask=kept_mask)
    else:
        results = project_states(states, _numbers(count, number_0, number_1, True, NUMBERS), PROJECT, len(outs))
        for i in tl.static_range(len(outs)):
            offset = strided_offset(kept, shapes[0], strides[2][i])
            result = tl.broadcast_to(results[i].to(outs[i].dtype.element_ty), (KEPT,))
            tl.store(outs[i] + offset, result, mask=kept_mask)


@triton.jit
def _apply(
    values,
    results,
    numbers,
    outs,
    rows,
    reduced,
    reduced_mask,
    ALIGNED: tl.constexpr,
    APPLY: tl.constexpr,
    SHAPE: tl.constexpr,
    EVICTION: tl.constexpr,
):
    kept, kept_mask, shapes, strides = rows
    found = APPLY(*(values + as_columns(results) + numbers))
    if len(outs) == 1:
        found = (found,)
    for i in tl.static_range(len(outs)):
        pointers = strided_pointers(outs[i], kept, reduced, shapes, strides[2][i], strides[3][i], ALIGNED)
        value = tl.broadcast_to(found[i].to(outs[i].dtype.element_ty), SHAPE)
        tl.store(pointers, value, mask=kept_mask[:, None] & reduced_mask[None, :], eviction_policy=EVICTION)


@triton.jit
def _read_and_apply(
    inputs,
    results,
    numbers,
    outs,
    rows,
    reduced,
    n_reduced,
    KINDS: tl.constexpr,
    DTYPES: tl.constexpr,
    ALIGNED: tl.constexpr,
    APPLY: tl.constexpr,
    SHAPE: tl.constexpr,
    WHOLE: tl.constexpr,
    COMMON: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Transform a block of rows that were read before and are not read again."""
    mask = inside(reduced, n_reduced, WHOLE)
    values = load(inputs, rows, reduced, mask, KINDS, DTYPES, 0, len(KINDS), ALIGNED, "evict_first", COMMON, PAIRS)
    _apply(values, results, numbers, outs, rows, reduced, mask, ALIGNED, APPLY, SHAPE, "evict_first")


@triton.jit
def _take_turns(TURNS: tl.constexpr):
    """Wait, in the second half of the programs that start at first, until memory has read the rows of the others.

    From then on some read while others write. TURNS are the number of those programs and the wait in cycles.
    """
    program = tl.program_id(0)
    if (program >= TURNS[0] // 2) & (program < TURNS[0]):
        spin: tl.constexpr = """{
            .reg .u64 begin, now;
            .reg .pred early;
            mov.u64 begin, %clock64;
        again:
            mov.u64 now, %clock64;
            sub.u64 now, now, begin;
            setp.lt.u64 early, now, $1;
            @early bra again;
            mov.u32 $0, 0;
        }"""
        cycles = tl.full((), TURNS[1], tl.int64)
        tl.inline_asm_elementwise(spin, "=r,l", [cycles], dtype=tl.int32, is_pure=False, pack=1)


@libentry()
@triton.jit
def clear(words, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + index, tl.zeros((BLOCK,), words.dtype.element_ty), mask=index < count)


@triton.jit
def _states_of_row(
    states,
    words,
    row,
    part,
    COMBINE: tl.constexpr,
    INIT: tl.constexpr,
    STATES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The states of a row, from those of its PARTS, which their programs leave in `words` for each other."""
    PADDED: tl.constexpr = triton.next_power_of_2(PARTS)
    parts = tl.arange(0, PADDED)
    own = words + row * (len(STATES) * PARTS)
    for i in tl.static_range(len(STATES)):
        # A word says both what a state is and that it is there, so that nothing has to come in order.
        word = states[i].to(tl.uint32, bitcast=True).to(tl.int64) * 2 + 1
        tl.atomic_xchg(own + (i * PARTS + part + tl.arange(0, 1)), word, sem="relaxed")
    every = ()
    for i in tl.static_range(len(STATES)):
        pointers = own + i * PARTS + parts
        found = tl.load(pointers, mask=parts < PARTS, other=1, volatile=True)
        while tl.min(found & 1) == 0:
            found = tl.load(pointers, mask=parts < PARTS, other=1, volatile=True)
        state = (found >> 1).to(tl.uint32).to(STATES[i], bitcast=True)
        every = every + (tl.where(parts < PARTS, state, INIT[i]),)
    return _fold_all(every, COMBINE)


@libentry()
@triton.jit(do_not_specialize=["steps"])
def transform_rows(
    inputs,
    outs,
    given,
    words,
    results_out,
    shapes,
    strides,
    n_kept,
    n_reduced,
    steps,
    count: tl.float64,
    number_0: tl.float64,
    number_1: tl.float64,
    LEAF: tl.constexpr,
    COMBINE: tl.constexpr,
    FOLLOW: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    PROJECT: tl.constexpr,
    APPLY: tl.constexpr,
    INIT: tl.constexpr,
    KINDS: tl.constexpr,
    DTYPES: tl.constexpr,
    LEAF_INPUTS: tl.constexpr,
    STATES: tl.constexpr,
    RESULTS: tl.constexpr,
    APPLIED: tl.constexpr,
    WRITTEN: tl.constexpr,
    NUMBERS: tl.constexpr,
    LEAF_NUMBERS: tl.constexpr,
    INDEX: tl.constexpr,
    KEPT: tl.constexpr,
    REDUCED: tl.constexpr,
    WHOLE: tl.constexpr,
    ONCE: tl.constexpr,
    STEPS: tl.constexpr,
    COMMON: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    TURNS: tl.constexpr,
):
    """A program reduces KEPT rows and transforms them, reading them once where REDUCED holds them, or else twice.

    With `given`, the rows' results (RESULTS of them), it only transforms, `steps` blocks of each. Loops over blocks are
    unrolled where every row has STEPS of them. PARTS programs that share a row, of which each has `steps` blocks, wait
    for each other's states in `words`, which are 0 before, or, if they started EARLY, once the launch before has ended.
    """
    n_reduced = told(n_reduced, ALIGNED)
    if len(TURNS) > 0:
        _take_turns(TURNS)
    row, part = tl.program_id(0).to(INDEX), tl.program_id(1).to(INDEX)
    if PARTS > 1:
        # Those of a row are next to each other, and start when their turn comes.
        row, part = row // PARTS, row % PARTS
    kept = row * KEPT + tl.arange(0, KEPT)
    kept_mask = inside(kept, n_kept, WHOLE[0])
    rows = (kept, kept_mask, shapes, strides)
    start = part * steps * REDUCED
    steps = STEPS if STEPS > 0 else _steps_before(start, steps, n_reduced, REDUCED)
    numbers = _numbers(count, number_0, number_1, False, NUMBERS)
    leaf_numbers = _numbers(count, number_0, number_1, False, LEAF_NUMBERS)
    SHAPE: tl.constexpr = (KEPT, REDUCED)
    results = ()
    reduced = start + tl.arange(0, REDUCED)
    reduced_mask = inside(reduced, n_reduced, WHOLE[1])
    if len(given) > 0:
        for i in tl.static_range(len(given)):
            offset = strided_offset(kept, shapes[0], strides[4][len(results_out) + i])
            results = results + (tl.load(given[i] + offset, mask=kept_mask, other=0),)
    else:
        if ONCE:
            rest = load(inputs, rows, reduced, reduced_mask, KINDS, DTYPES, LEAF_INPUTS, len(KINDS), ALIGNED, "", "")
        states, values = fold_blocks(
            inputs,
            rows,
            start,
            steps,
            n_reduced,
            (),
            leaf_numbers,
            LEAF,
            COMBINE,
            FOLLOW,
            STAGES,
            GATHER,
            ALIGNED,
            INIT,
            KINDS,
            DTYPES,
            LEAF_INPUTS,
            STATES,
            KEPT,
            REDUCED,
            WHOLE[1],
            ONCE,
            "" if ONCE else "evict_last",
            len(TURNS) > 0,
        )
        if EARLY:
            gdc_wait()
        if PARTS > 1:
            states = _states_of_row(states, words[0], row, part, COMBINE, INIT, STATES, PARTS)
        results = project_states(states, _numbers(count, number_0, number_1, True, NUMBERS), PROJECT, RESULTS)
    for i in tl.static_range(len(results_out)):
        offset = strided_offset(kept, shapes[0], strides[4][i])
        mask = kept_mask & (part == 0) if PARTS > 1 else kept_mask
        tl.store(results_out[i] + offset, results[WRITTEN[i]].to(results_out[i].dtype.element_ty), mask=mask)
    applied = ()
    for i in tl.static_range(APPLIED):
        applied = applied + (results[i],)
    if ONCE and len(given) == 0:
        _apply(values + rest, applied, numbers, outs, rows, reduced, reduced_mask, ALIGNED, APPLY, SHAPE, "")
    else:
        # Backwards: what was read last is the likeliest to be in a cache. Only the first of these may not be whole.
        for later in tl.static_range(2):
            for step in range(1 if later else 0, steps if later else 1):
                _read_and_apply(
                    inputs,
                    applied,
                    numbers,
                    outs,
                    rows,
                    start + (steps - 1 - step) * REDUCED + tl.arange(0, REDUCED),
                    n_reduced,
                    KINDS,
                    DTYPES,
                    ALIGNED,
                    APPLY,
                    SHAPE,
                    WHOLE[1] or later,
                    COMMON,
                    len(TURNS) > 0,
                )


@dataclass(frozen=True, eq=False)
class Stage:
    """A fold of a block's rows: `leaf(*values, *results, count)`, `combine` and `finish(folded, *results)`, if any.

    One that is `refining` makes the result before it more exact, which a sum of what adds up without rounding need not.
    """

    init: float | Callable[[torch.dtype], float]
    leaf: Any
    combine: Any
    finish: Any = None
    refining: bool = False

    def constants(self, compute: torch.dtype) -> tuple[Any, ...]:
        init = self.init(compute) if callable(self.init) else self.init
        finish = () if self.finish is None else (self.finish,)
        return self.leaf, self.combine, init, self.refining, self._source, *finish

    @functools.cached_property
    def _source(self) -> int:
        """A number for the functions' source, as Triton's disk cache knows those within tuples by their names alone."""
        keys = [getattr(function, "cache_key", "") for function in (self.leaf, self.combine, self.finish)]
        return int(hashlib.sha256("".join(keys).encode()).hexdigest()[:15], 16)


@dataclass(frozen=True, eq=False)
class Reduction:
    """How a set of elements becomes results, in functions of `triton.jit`.

    Args:
        init: the identity of `combine`, a number for each of the state's values but the index; or a function from the
            dtype computed in to them.
        leaf: the state of one element, from the operands' values, its index where the state has one, and, if
            `parametric`, the call's numbers.
        combine: (*state, *state) -> state, associative and commutative.
        follow: the same where all elements of the second state come after those of the first, if that costs less.
        project: the results, from the state, the count of elements and the numbers; both are float64.
        states: dtypes of the state's values: None for the dtype computed in, INDEX, which comes last, for an index.
        results: how many results there are.
        parametric: whether `leaf` takes the numbers.
        stages: a cheaper way to the state of a block of elements next to each other, a fold each.
        gather: the state, from the results of the stages and the count of elements in the block.
    """

    init: tuple[Any, ...] | Callable[[torch.dtype], tuple[Any, ...]]
    leaf: Any
    combine: Any
    project: Any
    states: tuple[torch.dtype | str | None, ...] = (None,)
    results: int = 1
    parametric: bool = False
    stages: tuple[Stage, ...] = ()
    gather: Any = None
    follow: Any = None

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        dims: Sequence[int],
        outs: Sequence[torch.Tensor],
        compute: torch.dtype,
        numbers: Sequence[float] = (),
        dtypes_read: Sequence[torch.dtype] | None = None,
    ) -> None:
        """Reduce `inputs`, of one shape, over `dims` into `outs`, which have the other dimensions, or all with size 1.

        Values are read as `compute` or as `dtypes_read`.
        """
        space = Space.of(tuple(inputs), tuple(dims), (), tuple(outs), INDEX in self.states)
        if not space.n_kept:
            return
        blocks = _blocks(space, len(self.states))
        constants = self.constants(space, compute, numbers) | blocks.sizes
        read = tuple(TRITON_DTYPES[dtype] for dtype in dtypes_read or [compute] * len(inputs))
        count, first, second = float(space.n_reduced), *_padded(numbers)
        shapes, n_kept = space.shapes, space.n_kept
        if blocks.splits == 1:
            reduce[(blocks.programs, 1)](
                *(tuple(inputs), tuple(outs), shapes, (space.kept[0], space.reduced[0], space.kept[2])),
                *(space.index_strides, n_kept, space.n_reduced, blocks.steps, count, first, second),
                LEAF=self.leaf,
                PROJECT=self.project,
                KINDS=space.kinds,
                DTYPES=read,
                **constants,
            )
            return
        partial = self.states_of_chunks(tuple(inputs), space, blocks, compute, constants | {"DTYPES": read}, numbers)
        # The states of all splits, in rows of their own.
        steps, last = _second(blocks.splits, n_kept)
        reduce[(-(-n_kept // last["KEPT"]), 1)](
            *(
                partial,
                tuple(outs),
                (shapes[0], ()),
                (((1,),) * len(partial), ((n_kept,),) * len(partial), space.kept[2]),
            ),
            *((), n_kept, blocks.splits, steps, count, first, second),
            LEAF=None,
            PROJECT=self.project,
            KINDS=(BOTH,) * len(partial),
            DTYPES=constants["STATES"],
            **constants | last | {"STAGES": (), "GATHER": None, "FOLLOW": self.combine, "ALIGNED": 1},
        )

    def states_of_chunks(
        self,
        inputs: tuple[torch.Tensor, ...],
        space: Space,
        blocks: Blocks,
        compute: torch.dtype,
        constants: dict[str, Any],
        numbers: Sequence[float] = (),
    ) -> tuple[torch.Tensor, ...]:
        """For each of the state's values a tensor of (splits, n_kept): what programs that share rows find of them."""
        dtypes = self._dtypes(space, compute)
        partial = tuple([empty((blocks.splits, space.n_kept), dtype, inputs[0].device) for dtype in dtypes])
        reduce[(blocks.programs, blocks.splits)](
            *(inputs, partial, space.shapes, (space.kept[0], space.reduced[0], ())),
            *(space.index_strides, space.n_kept, space.n_reduced, blocks.steps, 0.0, *_padded(numbers)),
            LEAF=self.leaf,
            PROJECT=None,
            KINDS=space.kinds,
            **constants,
        )
        return partial

    def _dtypes(self, space: Space, compute: torch.dtype) -> list[torch.dtype]:
        found = {None: compute, INDEX: torch.int64 if space.integer is tl.int64 else torch.int32}
        return [found.get(dtype, dtype) for dtype in self.states]  # type: ignore[arg-type, misc]

    def of_states(self, space: Space, compute: torch.dtype) -> dict[str, Any]:
        """The constants of kernels that combine states."""
        init = self.init(compute) if callable(self.init) else self.init
        states = self._dtypes(space, compute)
        return {
            "COMBINE": self.combine,
            "INIT": (*init, torch.iinfo(states[-1]).max) if INDEX in self.states else init,
            "STATES": tuple(TRITON_DTYPES[dtype] for dtype in states),
            "INDEX": space.integer,
        }

    def constants(self, space: Space, compute: torch.dtype, numbers: Sequence[float]) -> dict[str, Any]:
        """The constants of kernels that fold blocks."""
        return self.of_states(space, compute) | {
            # Where elements lie in the order of their indices.
            "FOLLOW": self.follow if self.follow and space.index_strides == (1,) else self.combine,
            "STAGES": tuple(stage.constants(compute) for stage in self.stages) if space.inner else (),
            "GATHER": self.gather if space.inner else None,
            "ALIGNED": space.aligned or int(not space.inner),
            "NUMBERS": len(numbers),
            "LEAF_NUMBERS": len(numbers) if self.parametric else 0,
        }


@dataclass(frozen=True, eq=False)
class RowTransform:
    """A formula over every element and the results of a reduction of its row: `apply(*values, *results, *numbers)`.

    The reduction's leaf takes the first `leaf_inputs` of the operands, or all, and `apply` the first `applied` results.
    With `flushing` what libdevice's functions find may be 0 where it is subnormal.
    """

    reduction: Reduction
    apply: Any
    leaf_inputs: int | None = None
    applied: int | None = None
    flushing: bool = False

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        dims: Sequence[int],
        outs: Sequence[torch.Tensor],
        compute: torch.dtype,
        numbers: Sequence[float] = (),
        row_outs: Sequence[torch.Tensor] = (),
        written: Sequence[int] = (),
    ) -> None:
        """Transform `inputs`, of one shape, into `outs` of that shape, where rows lie along `dims`.

        `row_outs` receive those results of the rows that `written` numbers.
        """
        reduction, leaf_inputs = self.reduction, self.leaf_inputs or len(inputs)
        space = Space.of(tuple(inputs), tuple(dims), tuple(outs), tuple(row_outs), False)
        if not space.n_kept:
            return
        blocks = _blocks_transformed(space, inputs[:leaf_inputs], bool(reduction.stages), compute)
        count, first, second = float(space.n_reduced), *_padded(numbers)
        given: tuple[torch.Tensor, ...] = ()
        words: tuple[torch.Tensor, ...] = ()
        early = blocks.parts > 1 and devices.has_tma(inputs[0].device)
        if blocks.parts > 1:
            words = (empty((space.n_kept, len(reduction.states), blocks.parts), torch.int64, inputs[0].device),)
            clear[(-(-words[0].numel() // 1024),)](words[0], words[0].numel(), BLOCK=1024, EARLY=early)
        if blocks.splits > 1:
            shape = [1 if d in dims else size for d, size in enumerate(inputs[0].shape)]
            given = tuple([empty(shape, compute, inputs[0].device) for _ in range(reduction.results)])
            reduction.run(inputs[:leaf_inputs], dims, given, compute, numbers)
            space = Space.of(tuple(inputs), tuple(dims), tuple(outs), (*row_outs, *given), False)
        common = sum([x.dtype.itemsize for x, kind in zip(inputs, space.kinds, strict=True) if kind == _REDUCED])
        transform_rows[(blocks.programs, blocks.splits)](
            *(tuple(inputs), tuple(outs), given, words, tuple(row_outs), space.shapes),
            *((space.kept[0], space.reduced[0], space.kept[1], space.reduced[1], space.kept[2]), space.n_kept),
            *(space.n_reduced, blocks.steps, count, first, second),
            LEAF=reduction.leaf,
            PROJECT=reduction.project,
            APPLY=self.apply,
            KINDS=space.kinds,
            DTYPES=(TRITON_DTYPES[compute],) * len(inputs),
            LEAF_INPUTS=leaf_inputs,
            RESULTS=reduction.results,
            APPLIED=self.applied or reduction.results,
            WRITTEN=tuple(written),
            STEPS=blocks.steps if _unrolled(space, inputs, blocks, leaf_inputs, bool(reduction.stages)) else 0,
            COMMON=".cg" if common * space.n_reduced >= _BEYOND_CACHE else "",
            PARTS=blocks.parts,
            EARLY=early,
            TURNS=blocks.turns,
            **reduction.constants(space, compute, numbers)
            | blocks.sizes
            | ({"launch_pdl": True} if early else {})
            | (devices.current.flushing if self.flushing else {}),
        )


class Space(NamedTuple):
    """The kept and the reduced dimensions, each collapsed and fastest first, and the operands' strides over them.

    `kept` and `reduced` hold strides of the inputs, of outputs of the same shape, and of those of the kept dimensions
    alone; `shapes` leave out the slowest dimension of each. Rows of inputs that are `aligned` start at 16 bytes; where
    it is above 1 it divides their length and all strides between them, as 16 does not.
    """

    n_kept: int
    n_reduced: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    kept: tuple[tuple[tuple[int, ...], ...], ...]
    reduced: tuple[tuple[tuple[int, ...], ...], ...]
    index_strides: tuple[int, ...]
    kinds: tuple[int, ...]
    integer: Any
    aligned: int

    @property
    def inner(self) -> bool:
        """Whether elements that are reduced, and not those that are kept, are next to each other."""
        full = next((i for i, kind in enumerate(self.kinds) if kind == BOTH), None)
        if full is None:
            return True
        return self.n_kept == 1 or self.reduced[0][full][0] <= self.kept[0][full][0]

    @classmethod
    def of(
        cls,
        inputs: tuple[torch.Tensor, ...],
        dims: tuple[int, ...],
        outs: tuple[torch.Tensor, ...],
        kept_outs: tuple[torch.Tensor, ...],
        indexed: bool,
    ) -> Space:
        shape = inputs[0].shape
        kept = [d for d in range(len(shape)) if d not in dims]
        full = [tensor.stride() for tensor in (*inputs, *outs)]
        small = [[out.stride(d) for d in kept] if out.dim() == len(shape) else list(out.stride()) for out in kept_outs]
        kept_sizes, kept_strides = collapse([shape[d] for d in kept], [[own[d] for d in kept] for own in full] + small)
        sizes = [shape[d] for d in dims]
        places = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        reduced_sizes, reduced_strides = collapse(
            sizes, [[own[d] for d in dims] for own in full] + ([places] if indexed else [])
        )
        every = len(full)
        kinds = tuple(
            [_KEPT * any(kept_strides[i]) + _REDUCED * any(reduced_strides[i]) or _KEPT for i in range(every)]
        )
        wide = math.prod(shape) >= INT32_LIMIT or any(
            [
                span((*kept_sizes, *reduced_sizes), (*kept_strides[i], *reduced_strides[i])) >= INT32_LIMIT
                for i in range(every)
            ]
        )
        n, n_reduced = len(inputs), math.prod(reduced_sizes)
        apart = [own if kind == BOTH else [] for own, kind in zip(kept_strides, kinds, strict=False)]
        return cls(
            math.prod(kept_sizes),
            n_reduced,
            (tuple(kept_sizes[:-1]), tuple(reduced_sizes[:-1])),
            tuple(
                [tuple(map(tuple, part)) for part in (kept_strides[:n], kept_strides[n:every], kept_strides[every:])]
            ),
            tuple([tuple(map(tuple, part)) for part in (reduced_strides[:n], reduced_strides[n:every])]),
            tuple(reduced_strides[every]) if indexed else (),
            kinds[:n],
            tl.int64 if wide else tl.int32,
            _alignment([x.dtype.itemsize for x in inputs], apart, n_reduced),
        )


def _alignment(sizes: Sequence[int], strides: Sequence[Sequence[int]], n_reduced: int) -> int:
    """`Space.aligned`, of inputs of elements of these `sizes`, and of all operands' strides between rows."""
    if any(step * size % 16 for size, own in zip(sizes, strides, strict=False) for step in own):
        return 0
    common = math.gcd(16, n_reduced, *[step for own in strides for step in own])
    return common if common < 16 and all(common * size % 16 == 0 for size in sizes) else 1


class Blocks(NamedTuple):
    """How a space is cut; `sizes` are what the kernels are compiled for.

    Of the `programs` as many as `parts` share a row and wait for each other; others that do are `splits` of a second
    dimension, whose states another launch combines. With `turns` half of those that start first wait (`_take_turns`).
    """

    programs: int
    splits: int
    steps: int
    sizes: dict[str, Any]
    parts: int = 1
    turns: tuple[int, ...] = ()


def tile_elements(space: Space) -> int:
    """What a program takes at a time: of small spaces a quarter, so that more of the device works."""
    tile = devices.current.row_elements
    return tile // 4 if space.n_kept * space.n_reduced <= 64 * tile else tile


def cut(space: Space, kept: int, reduced: int, warps: int, scarcity: int, least: int) -> Blocks:
    """KEPT by REDUCED elements at a time, by `warps` or as many as a program has.

    Where `scarcity` times the programs would not fill the device, several share a row that has `least` blocks or more.
    """
    device = devices.current
    programs, splits, steps = -(-space.n_kept // kept), 1, -(-space.n_reduced // reduced)
    if scarcity * programs <= device.programs and steps >= least:
        each = -(-steps // min(-(-device.programs // programs), steps))
        splits, steps = -(-steps // each), each
    sizes = _sizes(space.n_kept, space.n_reduced, kept, reduced, steps, warps) | device.options
    return Blocks(programs, splits, steps, sizes)


def _blocks(space: Space, states: int) -> Blocks:
    """For a reduction to so many states."""
    tile = tile_elements(space)
    if space.inner:
        reduced = min(power_of_2(space.n_reduced), tile)
        kept = min(power_of_2(space.n_kept), max(1, tile // reduced))
        warps = kept * reduced // 1024
        if space.n_reduced > tile == devices.current.row_elements and not (space.aligned and states > 1):
            # What a thread has is less, and more of them wait for memory.
            warps *= 2
            while not space.aligned and reduced > 1024 and 4 * (-space.n_reduced % reduced) > space.n_reduced:
                # It loads as long for elements that there are not.
                warps, reduced = warps // 2, reduced // 2
    else:
        kept = min(power_of_2(space.n_kept), devices.current.row_columns)
        reduced = min(power_of_2(space.n_reduced), max(1, tile // kept))
        warps = kept * reduced // 1024
    return cut(space, kept, reduced, max(4, warps), scarcity=2, least=8)


def _blocks_transformed(space: Space, folded: Sequence[torch.Tensor], staged: bool, compute: torch.dtype) -> Blocks:
    """For a row operator, whose reduction takes the operands `folded`, by stages or not."""
    device, tile = devices.current, tile_elements(space)
    n_kept, n_reduced, size = space.n_kept, space.n_reduced, folded[0].dtype.itemsize
    longest = 4 * device.row_elements
    if not space.inner:
        # Rows that are read twice are few at a time, so that a cache holds them.
        kept = min(power_of_2(n_kept), device.row_columns // 4)
        reduced = min(power_of_2(n_reduced), max(1, tile // kept))
        blocks = cut(space, kept, reduced, max(4, kept * reduced // 1024), scarcity=2, least=8)
        if blocks.splits > 1:
            # Others reduce them: elements next to each other are the more.
            kept = min(power_of_2(n_kept), 4 * device.row_columns // size)
            blocks = cut(space, kept, max(1, tile // kept), 4, scarcity=2, least=8)
        return blocks
    reduced = min(power_of_2(n_reduced), longest)
    kept = min(power_of_2(n_kept), max(1, tile // reduced))
    warps = max(4, kept * reduced // 1024)
    if n_reduced > longest:
        warps = device.most_warps
        if 2 * n_kept <= device.programs:
            # Many programs share such a row.
            warps, reduced = warps // 2, reduced // 2
        elif not space.aligned:
            # Every element takes a register of its own.
            reduced //= 2
        elif device.waiting and compute is torch.float32 and _gains_by_sharing(space, size, staged):
            return _shared(space, size, staged)
        elif device.ptx and staged and size < 4 and _gains_by_turns(space, folded[0], longest):
            return _in_turns(space, folded[0], longest)
        elif staged and size < 4 and n_reduced <= 4 * longest:
            # Two programs on a multiprocessor, whose rows of 128 KB a cache holds.
            warps //= 2
        elif staged and size <= 4 and n_reduced > 2 * longest:
            reduced *= 2
        elif not staged and len(space.kinds) > 2:
            # More of them do not fit the registers.
            reduced //= 2
    elif space.kinds.count(BOTH) == 1 and tile == device.row_elements and reduced <= tile // 4:
        # A warp by itself waits for no other; half types want two rows.
        kept, warps = min(power_of_2(n_kept), max(tile // 4 // reduced, 4 // size)), 1
    elif not space.aligned and not staged and n_reduced > device.row_elements:
        warps *= 2
    return cut(space, kept, reduced, warps, scarcity=2, least=8)


def _gains_by_sharing(space: Space, size: int, staged: bool) -> bool:
    """Whether rows of elements of `size` are transformed faster by programs that share them."""
    row = space.n_reduced * size
    if row <= _SHARED or space.shapes != ((), ()):
        return False
    if _REDUCED in space.kinds:
        # It comes from a cache for every row, and in half types is a third of what does.
        return staged and (size == 4 or row >= 2**19)
    return staged or space.kinds.count(BOTH) > 1


def _gains_by_turns(space: Space, x: torch.Tensor, longest: int) -> bool:
    """Whether rows of halves, in blocks of the `longest`, are transformed faster by some programs after others."""
    two = space.kinds.count(_REDUCED) == 2 and space.shapes == ((), ())
    return (
        two and 3 * longest < space.n_reduced <= 4 * longest and space.n_kept >= 4 * devices.multiprocessors(x.device)
    )


def _in_turns(space: Space, x: torch.Tensor, longest: int) -> Blocks:
    """For such rows, by two programs on a multiprocessor."""
    half = x.dtype is torch.float16
    # More warps need registers that float32 from bfloat16 takes.
    sizes = _sizes(space.n_kept, space.n_reduced, 1, longest, 4, 32 if half else 16) | devices.current.options
    turns = 2 * devices.multiprocessors(x.device), space.n_reduced * x.dtype.itemsize // _BYTES_A_CYCLE
    return Blocks(space.n_kept, 1, 4, sizes | ({"maxnreg": 32} if half else {}), turns=turns)


def _shared(space: Space, size: int, staged: bool) -> Blocks:
    """For rows that no cache holds before they are read again, of elements of `size`, by programs that share them."""
    reduced = _SHARED_BLOCK // size
    blocks = -(-space.n_reduced // reduced)
    steps = max(3 if staged else 4, -(-blocks // _MOST_SHARING))
    sizes = _sizes(space.n_kept, space.n_reduced, 1, reduced, steps, 8 if staged else 16) | devices.current.options
    parts = -(-blocks // steps)
    return Blocks(space.n_kept * parts, 1, steps, sizes, parts)


def _unrolled(space: Space, inputs: Sequence[torch.Tensor], blocks: Blocks, leaf_inputs: int, staged: bool) -> bool:
    """Whether that makes a row operator faster.

    It does in half types where rows have something in common besides, and on shared rows, in any dtype, where operands
    are not folded and all parts have as many blocks.
    """
    if blocks.parts > 1:
        even = -(-space.n_reduced // blocks.sizes["REDUCED"]) % blocks.steps == 0
        return not staged and leaf_inputs < len(inputs) and even and blocks.steps <= _MOST_UNROLLED
    few = blocks.splits == 1 < blocks.steps <= _MOST_UNROLLED and (blocks.steps == _MOST_UNROLLED or not staged)
    both = inputs[0].dtype.itemsize < 4 and len(inputs) > 1 == space.kinds.count(BOTH)
    return few and both and space.inner and blocks.sizes["WHOLE"][1]


def _second(splits: int, n_kept: int) -> tuple[int, dict[str, Any]]:
    """The steps and blocks that combine the states of `splits` programs."""
    kept = min(power_of_2(n_kept), 32)
    reduced = min(power_of_2(splits), max(1, devices.current.row_elements // kept))
    steps = -(-splits // reduced)
    return steps, _sizes(n_kept, splits, kept, reduced, steps, 4)


def _sizes(n_kept: int, n_reduced: int, kept: int, reduced: int, steps: int, warps: int) -> dict[str, Any]:
    """The blocks, whether the last of them are as large as the others, and whether a program has one of a row."""
    whole = (n_kept % kept == 0, n_reduced % reduced == 0 != n_reduced)
    sizes = {"KEPT": kept, "REDUCED": reduced, "WHOLE": whole, "ONCE": steps <= 1}
    return sizes | {"num_warps": min(devices.current.most_warps, warps)}


def _padded(numbers: Sequence[float]) -> tuple[float, float]:
    first, second = (*numbers, 0.0, 0.0)[:2]
    return first, second


def reduced(
    reduction: Reduction,
    inputs: Sequence[torch.Tensor],
    dim: int | Sequence[int] | None,
    keepdim: bool,
    result_dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor],
    compute: torch.dtype,
    *,
    numbers: Sequence[float] = (),
    read: Sequence[torch.dtype] | None = None,
    empty: bool = True,
    keep_empty: bool = False,
) -> Sequence[torch.Tensor]:
    """The results of a reduction over `dim`, fresh or in `outs`: the host function of most reductions.

    No dimensions stand for all of them, unless `keep_empty`. Declines where ATen must raise an error: for wrong
    dimensions, for outputs of another shape or dtype, and for sets of no elements unless `empty`.
    """
    shape = tuple(inputs[0].shape)
    dims = dimensions(dim, len(shape), keep_empty)
    if not empty and any(shape[d] == 0 for d in dims):
        raise Decline("a set of no elements")
    result = tuple(1 if i in dims else size for i, size in enumerate(shape) if keepdim or i not in dims)
    outs = outputs(inputs, [result] * len(result_dtypes), result_dtypes, outs)
    reduction.run(inputs, dims, outs, compute, numbers, read)
    return outs


def dimensions(dim: int | Sequence[int] | None, rank: int, keep_empty: bool = False) -> tuple[int, ...]:
    """Dimensions from 0, in order; declines for those that there are not, or that are there twice."""
    given = (dim,) if isinstance(dim, int) else dim
    if given is None or (not len(given) and not keep_empty):
        return tuple(range(rank))
    limit = max(rank, 1)
    if any(not -limit <= d < limit for d in given):
        raise Decline("a dimension that there is not")
    found = sorted(d % limit for d in given)
    if len(set(found)) < len(found):
        raise Decline("a dimension twice")
    return tuple(d for d in found if rank)


def outputs(
    inputs: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
    result_dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor],
    in_place: Sequence[torch.Tensor] = (),
) -> Sequence[torch.Tensor]:
    """Contiguous outputs, or `outs` where they can be written: of these shapes and dtypes, apart from all inputs.

    An output may be one of the `in_place` inputs itself.
    """
    device, scalars = common_device(inputs, outs)
    if scalars:
        raise Decline("a tensor on another device")
    for tensor in inputs:
        if tensor.dtype not in TRITON_DTYPES:
            raise Decline(f"dtype {tensor.dtype}")
    if not outs:
        return tuple(empty(shape, dtype, device) for shape, dtype in zip(shapes, result_dtypes, strict=True))
    for i, (out, shape, dtype) in enumerate(zip(outs, shapes, result_dtypes, strict=True)):
        if tuple(out.shape) != tuple(shape) or out.dtype is not dtype:
            raise Decline("output has another shape or dtype")
        if not never_overlaps_itself(out.shape, out.stride()):
            raise Decline("output overlaps itself")
        apart = [x for x in inputs if not (any(x is y for y in in_place) and _same_elements(out, x))]
        if any(_may_overlap(out, other) for other in (*apart, *outs[:i])):
            raise Decline("output overlaps an input")
    return outs


def _same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.data_ptr() == b.data_ptr() and a.dtype.itemsize == b.dtype.itemsize
    return same and a.shape == b.shape and a.stride() == b.stride()


def _may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    starts = a.data_ptr(), b.data_ptr()
    ends = [
        start + span(tensor.shape, tensor.stride()) * tensor.dtype.itemsize if tensor.numel() else start
        for start, tensor in zip(starts, (a, b), strict=True)
    ]
    return starts[0] < ends[1] and starts[1] < ends[0]
