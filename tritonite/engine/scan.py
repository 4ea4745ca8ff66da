"""Scans: the results of a reduction over the elements so far, at every index of one dimension.

A program takes some rows and carries their states from block to block. If rows are too few to fill the device, several
programs share a row. A reduction then stores the state of each chunk first. Every program starts from the combined
states of the chunks before its own (Blelloch 1990, "Prefix Sums and Their Applications").
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
from tritonite.engine.rows.blocks import RowBlocks, cut, invariant, tile_elements
from tritonite.engine.rows.declare import INDEX, Reduction
from tritonite.engine.rows.kernels import project_states
from tritonite.engine.rows.load import OUT_KEPT, OUT_REDUCED, load, strided_pointers
from tritonite.engine.rows.space import RowSpace
from tritonite.engine.rows.states import combine_states, leaves, reduce_blocks
from tritonite.engine.rows.table import ROWS
from tritonite.language.indices import aligned_to
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.reduce import exact_log2
from tritonite.runtime.contract import settings
from tritonite.runtime.libentry import libentry


def _like(state: Any, data: np.ndarray) -> Any:
    """Return an interpreter tensor of `data` with the dtype of `state`."""
    return tl.tensor(TensorHandle(data, state.dtype), tl.block_type(state.dtype, list(data.shape)))


def _scan_in_interpreter(states: tuple[Any, ...], combine: Any) -> tuple[Any, ...]:
    """Return the scanned states, by doubling (Hillis and Steele 1986). Triton's own scan is slow in the interpreter."""
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
    """Return one column of a block. Only integer bits are added up, because a sum of floats would lose the sign of
    zeros.
    """
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
    """Return the scanned states, combined in an order that does not depend on a block's layout in threads.

    Neighbours are combined first, then pairs of pairs (Sklansky 1960, "Conditional-Sum Addition Logic").
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


# Functions over the second dimension of a block: the scan, the scan in a layout-independent order, the last column.
_scan = _scan_in_interpreter if devices.current.interpreted else _scan_in_compiler
_scan_in_order = _scan_in_interpreter if devices.current.interpreted else _scan_by_halves
_last = _last_in_interpreter if devices.current.interpreted else _last_in_compiler


@triton.jit
def _scan_block(values, outs, carried, rows, begin, n_scanned, META: tl.constexpr):
    """Store the results of `values`, which start at `begin` in each row, and return the scanned states.

    `carried` are the states of the elements before, or () if there are none.
    """
    kept_mask, strides = rows[1], rows[3]
    scanned = begin + tl.arange(0, META.block[1])
    mask = kept_mask[:, None] & (scanned < n_scanned)[None, :]
    states = leaves(values, rows, scanned, mask, (), META)
    states = _scan_in_order(states, META.follow) if META.invariant else _scan(states, META.follow)
    if len(carried) > 0:
        before = ()
        for i in tl.static_range(len(carried)):
            before = before + (tl.broadcast_to(carried[i][:, None], META.block),)
        states = combine_states(before, states, META.follow, META)
    results = project_states(states, (scanned + 1).to(tl.float64)[None, :], (), META, len(outs))
    for i in tl.static_range(len(outs)):
        pointers = strided_pointers(outs[i], rows, scanned, strides[OUT_KEPT][i], strides[OUT_REDUCED][i], META.aligned)
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
    META: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Scan `steps` blocks of each row of a program, starting from the states `partial` of the chunks before.

    A program reads a block before it stores it, and no other program reads that block, so an input may be an output.
    PARTIAL is the metadata of the reduction over the states of chunks.
    """
    wait_for_previous_launch()
    n_kept, n_scanned = sizes[0], aligned_to(sizes[1], META.aligned)
    kept = tl.program_id(0).to(META.index) * META.block[0] + tl.arange(0, META.block[0])
    kept_mask = kept < n_kept
    rows = (kept, kept_mask, shapes, strides)
    start = tl.program_id(1).to(META.index) * steps * META.block[1]
    carried = ()
    if len(partial) > 0:
        chunks = tl.program_id(1)
        span = (start * 0, tl.cdiv(chunks, PARTIAL.block[1]), chunks)
        carried = reduce_blocks(partial, (kept, kept_mask, ((), ()), partial_strides), span, (), PARTIAL, "")
    elif not META.single_block:
        for i in tl.static_range(len(META.init)):
            carried = carried + (tl.full((META.block[0],), META.init[i], META.states[i]),)
    scanned = start + tl.arange(0, META.block[1])
    scanned_mask = scanned < n_scanned
    values = load(inputs, rows, scanned, scanned_mask, META, 0, 1, "", "")
    if META.single_block:
        _scan_block(values, outs, carried, rows, start, n_scanned, META)
    else:
        for step in range(steps):
            # The next block is in flight while this one is scanned.
            scanned += META.block[1]
            scanned_mask = (scanned < n_scanned) & (step + 1 < steps)
            coming = load(inputs, rows, scanned, scanned_mask, META, 0, 1, "", "")
            states = _scan_block(values, outs, carried, rows, start + step * META.block[1], n_scanned, META)
            values = coming
            carried = ()
            for i in tl.static_range(len(META.states)):
                carried = carried + (_last(states[i]),)


def _blocks(space: RowSpace, inner: bool) -> RowBlocks:
    """Return the blocks of a scan along contiguous elements (`inner`) or along strided ones."""
    if settings().invariant:
        return invariant(space)
    device, tile = devices.current, tile_elements(space)
    n_kept, n_scanned = space.n_kept, space.n_reduced
    scarcity = ROWS[device.kind].scarcity
    if inner:
        scanned = power_of_2(n_scanned) if n_scanned <= device.row_elements else tile
        kept = min(power_of_2(n_kept), max(1, tile // scanned))
        warps = max(4, devices.warps(kept * scanned // 16))
    else:
        # One warp, whose threads have most of a column each, so that they exchange little. If columns are so few that
        # they are split, a thread has four (regressions: logcumsumexp_wide_columns).
        few, side = device.row_elements // 4, device.row_columns
        side *= 2 if scarcity * -(-n_kept // (2 * side)) <= device.programs else 1
        kept = min(power_of_2(n_kept), max(side, few // power_of_2(n_scanned)))
        scanned = min(power_of_2(n_scanned), max(1, few // kept))
        warps = 1
    return cut(space, kept, scanned, warps, scarcity=scarcity, least=4)


def scanned(
    reduction: Reduction,
    self: torch.Tensor,
    dim: int,
    result_dtypes: Sequence[torch.dtype],
    outs: Sequence[torch.Tensor],
    compute: torch.dtype,
) -> Sequence[torch.Tensor]:
    """Return the results of `reduction` over the elements so far along `dim`: the host function of scans.

    Results are fresh or in `outs`; an output may be the input. The reduction takes no numbers, and its count is that of
    the elements so far. Declines where ATen raises an error.
    """
    dims = dimensions(dim, self.dim())
    outs = outputs([self], [self.shape] * len(result_dtypes), result_dtypes, outs, in_place=[self])
    space = RowSpace.of((self,), dims, tuple(outs), (), INDEX in reduction.states)
    if space.n_kept and space.n_reduced:
        _launch(reduction, space, self, tuple(outs), compute)
    return outs


def _launch(
    reduction: Reduction,
    space: RowSpace,
    self: torch.Tensor,
    outs: tuple[torch.Tensor, ...],
    compute: torch.dtype,
) -> None:
    # If an operand's contiguous dimension is not the scanned one, blocks are tiles.
    along = zip((*space.reduced[0], *space.reduced[1]), (*space.kept[0], *space.kept[1]), strict=True)
    blocks = _blocks(space, space.n_kept == 1 or all(own[0] <= kept[0] for own, kept in along))
    # With strided rows a program has one warp, which would wait for every load that is not prefetched.
    meta = dataclasses.replace(reduction.meta(space, blocks, compute, (), [compute]), prefetch=not space.inner)
    partial: tuple[torch.Tensor, ...] = ()
    if blocks.splits > 1:
        partial = reduction.states_of_splits((self,), space, blocks, compute, meta, (0.0, 0.0))
    several = len(partial)
    columns = min(power_of_2(blocks.splits), max(1, blocks.columns // 4))
    chunks = meta.of_states(block=(blocks.rows, columns), whole=(False, False), single_block=False)
    scan[blocks.grid](
        *((self,), outs, partial, space.shapes, space.strides),
        (((1,),) * several, ((space.n_kept,),) * several, (), (), (), ()),
        *(space.sizes, blocks.steps),
        # A scan combines leaves; the stages of a reduction do not apply.
        META=dataclasses.replace(meta, stages=(), gather=None, whole=(False, False)),
        PARTIAL=chunks if partial else None,
        **blocks.options,
    )
