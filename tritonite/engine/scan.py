"""Scans: what a reduction gives of the elements so far, at every place along one dimension of any layout.

A program takes some rows and goes along them block by block, carrying each row's state. Where there are too few rows
to fill the device, several programs share a row: the reduction's kernel first leaves the state of each one's chunk, and
every program starts from those of the chunks before its own (Blelloch 1990, "Prefix Sums and Their Applications").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tritonite import devices
from tritonite.engine.iteration import power_of_2
from tritonite.engine.outputs import dimensions, outputs
from tritonite.engine.rows.blocks import Blocks, cut, invariant, tile_elements
from tritonite.engine.rows.declare import INDEX, Reduction
from tritonite.engine.rows.kernels import (
    aligned_to,
    combine_states,
    fold_blocks,
    leaves,
    load,
    project_states,
    strided_pointers,
)
from tritonite.engine.rows.space import Space
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.reduce import exact_log2
from tritonite.runtime.contract import settings
from tritonite.runtime.libentry import libentry


def _like(state: Any, data: np.ndarray) -> Any:
    return tl.tensor(TensorHandle(data, state.dtype), tl.block_type(state.dtype, list(data.shape)))


def _scan_in_interpreter(states: tuple[Any, ...], combine: Any) -> tuple[Any, ...]:
    """By doubling (Hillis and Steele 1986): Triton's own scan runs element by element there."""
    columns = np.arange(states[0].handle.data.shape[1])
    step = 1
    while step < len(columns):
        found = combine(*[_like(state, np.roll(state.handle.data, step, 1)) for state in states], *states)
        found = found if isinstance(found, tuple) else (found,)
        both = zip(states, found, strict=True)
        states = tuple([_like(old, np.where(columns < step, old.handle.data, new.handle.data)) for old, new in both])
        step *= 2
    return states


@tl.core.builtin
def _scan_in_compiler(states, combine, _semantic=None, _generator=None):
    found = tl.associative_scan(
        tuple(states.values), 1, getattr(combine, "value", combine), _semantic=_semantic, _generator=_generator
    )
    return tl.tuple(found)


def _last_in_interpreter(state: Any) -> Any:
    return _like(state, state.handle.data[:, -1].copy())


@triton.jit
def _at(state, COLUMN: tl.constexpr):
    """What is in a column: a sum of bits of which all others are 0, as one of floats would lose the sign of a zero."""
    if state.dtype == tl.float64:
        bits = state.to(tl.int64, bitcast=True)
    elif state.dtype == tl.float32:
        bits = state.to(tl.int32, bitcast=True)
    else:
        bits = state
    wanted = tl.arange(0, state.shape[1])[None, :] == COLUMN
    return tl.sum(tl.where(wanted, bits, 0), axis=1).to(state.dtype, bitcast=True)


@triton.jit
def _last_in_compiler(state):
    return _at(state, state.shape[1] - 1)


@triton.jit
def _scan_by_halves(states, COMBINE: tl.constexpr):
    """Neighbours first, and a group's first half before its second: in an order that no layout in threads decides.

    Sklansky 1960, "Conditional-Sum Addition Logic".
    """
    ROWS: tl.constexpr = states[0].shape[0]
    LENGTH: tl.constexpr = states[0].shape[1]
    for i in tl.static_range(exact_log2(LENGTH)):
        groups, before = (), ()
        for j in tl.static_range(len(states)):
            group = tl.reshape(states[j], (ROWS * LENGTH // 2 ** (i + 1), 2 ** (i + 1)))
            groups = groups + (group,)
            before = before + (tl.broadcast_to(_at(group, 2**i - 1)[:, None], group.shape),)
        found = COMBINE(*(before + groups))
        if len(states) == 1:
            found = (found,)
        second = tl.arange(0, 2 ** (i + 1))[None, :] >= 2**i
        states = ()
        for j in tl.static_range(len(groups)):
            states = states + (tl.reshape(tl.where(second, found[j], groups[j]), (ROWS, LENGTH)),)
    return states


# Along the second dimension of a block: the states so far, also in one order for all layouts, and those in the last
# column.
_scan = _scan_in_interpreter if devices.current.interpreted else _scan_in_compiler
_scan_in_order = _scan_in_interpreter if devices.current.interpreted else _scan_by_halves
_last = _last_in_interpreter if devices.current.interpreted else _last_in_compiler


@triton.jit
def _scan_block(values, outs, carried, rows, begin, n_scanned, FACTS: tl.constexpr):
    """Write the results of the `values` from `begin` on in each row, after the states `carried`; returns theirs."""
    kept_mask, strides = rows[1], rows[3]
    scanned = begin + tl.arange(0, FACTS.block[1])
    mask = kept_mask[:, None] & (scanned < n_scanned)[None, :]
    states = leaves(values, rows, scanned, mask, (), FACTS)
    states = _scan_in_order(states, FACTS.follow) if FACTS.invariant else _scan(states, FACTS.follow)
    if len(carried) > 0:
        before = ()
        for i in tl.static_range(len(carried)):
            before = before + (tl.broadcast_to(carried[i][:, None], FACTS.block),)
        states = combine_states(before, states, FACTS.follow, FACTS)
    results = project_states(states, (scanned + 1).to(tl.float64)[None, :], (), FACTS, len(outs))
    for i in tl.static_range(len(outs)):
        pointers = strided_pointers(outs[i], rows, scanned, strides[2][i], strides[3][i], FACTS.aligned)
        tl.store(pointers, results[i].to(outs[i].dtype.element_ty), mask=mask)
    return states


@libentry()
@triton.jit(do_not_specialize=["steps"])
def scan(
    inputs,
    outs,
    partial,
    shapes,
    strides,
    partial_strides,
    sizes,
    steps,
    FACTS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """A program scans `steps` blocks of each of its rows, after the chunks before, whose states are `partial`.

    It reads a block before it writes it, and no other program does, so that an input may be an output. PARTIAL are the
    facts by which the states of chunks are folded.
    """
    wait_for_previous_launch()
    n_kept, n_scanned = sizes[0], aligned_to(sizes[1], FACTS.aligned)
    kept = tl.program_id(0).to(FACTS.index) * FACTS.block[0] + tl.arange(0, FACTS.block[0])
    kept_mask = kept < n_kept
    rows = (kept, kept_mask, shapes, strides)
    start = tl.program_id(1).to(FACTS.index) * steps * FACTS.block[1]
    carried = ()
    if len(partial) > 0:
        chunks = tl.program_id(1)
        span = (start * 0, tl.cdiv(chunks, PARTIAL.block[1]), chunks)
        carried = fold_blocks(partial, (kept, kept_mask, ((), ()), partial_strides), span, (), PARTIAL, "")
    elif not FACTS.once:
        for i in tl.static_range(len(FACTS.init)):
            carried = carried + (tl.full((FACTS.block[0],), FACTS.init[i], FACTS.states[i]),)
    scanned = start + tl.arange(0, FACTS.block[1])
    scanned_mask = scanned < n_scanned
    values = load(inputs, rows, scanned, scanned_mask, FACTS, 0, 1, "", "")
    if FACTS.once:
        _scan_block(values, outs, carried, rows, start, n_scanned, FACTS)
    else:
        for step in range(steps):
            # The next block is on its way while one is scanned.
            scanned += FACTS.block[1]
            scanned_mask = (scanned < n_scanned) & (step + 1 < steps)
            coming = load(inputs, rows, scanned, scanned_mask, FACTS, 0, 1, "", "")
            states = _scan_block(values, outs, carried, rows, start + step * FACTS.block[1], n_scanned, FACTS)
            values = coming
            carried = ()
            for i in tl.static_range(len(FACTS.states)):
                carried = carried + (_last(states[i]),)


# Rows are cut where so many times the programs would not fill the device.
_SCARCITY = 4


def _blocks(space: Space, inner: bool) -> Blocks:
    if settings().invariant:
        return invariant(space)
    device, tile = devices.current, tile_elements(space)
    n_kept, n_scanned = space.n_kept, space.n_reduced
    if inner:
        scanned = power_of_2(n_scanned) if n_scanned <= device.row_elements else tile
        kept = min(power_of_2(n_kept), max(1, tile // scanned))
        warps = max(4, kept * scanned // 512)
    else:
        # Of one warp, whose threads have most of a column each, so that little passes between them. Where columns are
        # so few that they are cut, a thread has four: logcumsumexp of (65536, 1024) halves took 597 us with two, and
        # takes 381 (H200).
        few, side = device.row_elements // 4, device.row_columns
        side *= 2 if _SCARCITY * -(-n_kept // (2 * side)) <= device.programs else 1
        kept = min(power_of_2(n_kept), max(side, few // power_of_2(n_scanned)))
        scanned = min(power_of_2(n_scanned), max(1, few // kept))
        warps = 1
    return cut(space, kept, scanned, warps, scarcity=_SCARCITY, least=4)


def scanned(
    reduction: Reduction,
    self: torch.Tensor,
    dim: int,
    result_dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor],
    compute: torch.dtype,
) -> Sequence[torch.Tensor]:
    """What `reduction` gives of the elements so far along `dim`, fresh or in `outs`: the host function of scans.

    The reduction takes no numbers; its count is that of the elements so far.
    An output may be the input itself. Declines where ATen must raise an error.
    """
    dims = dimensions(dim, self.dim())
    outs = outputs([self], [self.shape] * len(result_dtypes), result_dtypes, outs, in_place=[self])
    space = Space.of((self,), dims, tuple(outs), (), INDEX in reduction.states)
    if space.n_kept and space.n_reduced:
        _launch(reduction, space, self, tuple(outs), compute)
    return outs


def _launch(
    reduction: Reduction,
    space: Space,
    self: torch.Tensor,
    outs: tuple[torch.Tensor, ...],
    compute: torch.dtype,
) -> None:
    # Across the grain of an operand it takes tiles, as it does where operands differ.
    along = zip((*space.reduced[0], *space.reduced[1]), (*space.kept[0], *space.kept[1]), strict=True)
    blocks = _blocks(space, space.n_kept == 1 or all(own[0] <= kept[0] for own, kept in along))
    # Where rows stand upright a program is of one warp, which waits for all that is not on its way.
    facts = dataclasses.replace(reduction.facts(space, blocks, compute, (), [compute]), ahead=not space.inner)
    partial: tuple[torch.Tensor, ...] = ()
    if blocks.splits > 1:
        partial = reduction.states_of_splits((self,), space, blocks, compute, facts, (0.0, 0.0))
    several = len(partial)
    columns = min(power_of_2(blocks.splits), max(1, blocks.columns // 4))
    chunks = facts.of_states(block=(blocks.rows, columns), whole=(False, False), once=False)
    scan[blocks.grid](
        *((self,), outs, partial, space.shapes, space.strides),
        (((1,),) * several, ((space.n_kept,),) * several, (), (), (), ()),
        *(space.sizes, blocks.steps),
        # Elements are scanned by their leaves, whatever a reduction's stages would do.
        FACTS=dataclasses.replace(facts, stages=(), gather=None, whole=(False, False)),
        PARTIAL=chunks if partial else None,
        **blocks.options,
    )
