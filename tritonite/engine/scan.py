"""Scans: what a reduction gives of the elements so far, at every place along one dimension of any layout.

A program takes some rows and goes along them block by block, carrying each row's state. Where there are too few rows
to fill the device, several programs share a row: the reduction's kernel first leaves the state of each one's chunk, and
every program starts from those of the chunks before its own (Blelloch 1990, "Prefix Sums and Their Applications").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.iteration import power_of_2
from tritonite.engine.reduction import (
    BOTH,
    INDEX,
    Blocks,
    Reduction,
    Space,
    combine_states,
    cut,
    dimensions,
    fold_blocks,
    leaves,
    load,
    outputs,
    project_states,
    strided_pointers,
    tile_elements,
    told,
)
from tritonite.launch import libentry


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
    found = tl.associative_scan(tuple(states.values), 1, combine.value, _semantic=_semantic, _generator=_generator)
    return tl.tuple(found)


def _last_in_interpreter(state: Any) -> Any:
    return _like(state, state.handle.data[:, -1].copy())


@triton.jit
def _last_in_compiler(state):
    """A sum of bits of which all others are 0, because one of floats would lose the sign of a zero."""
    if state.dtype == tl.float64:
        bits = state.to(tl.int64, bitcast=True)
    elif state.dtype == tl.float32:
        bits = state.to(tl.int32, bitcast=True)
    else:
        bits = state
    last = tl.arange(0, state.shape[1])[None, :] == state.shape[1] - 1
    return tl.sum(tl.where(last, bits, 0), axis=1).to(state.dtype, bitcast=True)


# Along the second dimension of a block: the states so far, and those in the last column.
_scan = _scan_in_interpreter if devices.current.interpreted else _scan_in_compiler
_last = _last_in_interpreter if devices.current.interpreted else _last_in_compiler


@triton.jit
def _scan_block(
    values,
    outs,
    carried,
    rows,
    begin,
    n_scanned,
    index_strides,
    LEAF: tl.constexpr,
    COMBINE: tl.constexpr,
    PROJECT: tl.constexpr,
    ALIGNED: tl.constexpr,
    INIT: tl.constexpr,
    STATES: tl.constexpr,
    KEPT: tl.constexpr,
    SCANNED: tl.constexpr,
):
    """Write the results of the `values` from `begin` on in each row, after the states `carried`; returns theirs."""
    kept, kept_mask, shapes, strides = rows
    SHAPE: tl.constexpr = (KEPT, SCANNED)
    scanned = begin + tl.arange(0, SCANNED)
    scanned_mask = scanned < n_scanned
    mask = kept_mask[:, None] & scanned_mask[None, :]
    states = _scan(leaves(values, scanned, shapes, index_strides, (), mask, LEAF, INIT, STATES, SHAPE), COMBINE)
    if len(carried) > 0:
        before = ()
        for i in tl.static_range(len(carried)):
            before = before + (tl.broadcast_to(carried[i][:, None], SHAPE),)
        states = combine_states(before, states, COMBINE, STATES)
    results = project_states(states, ((scanned + 1).to(tl.float64)[None, :],), PROJECT, len(outs))
    for i in tl.static_range(len(outs)):
        pointers = strided_pointers(outs[i], kept, scanned, shapes, strides[2][i], strides[3][i], ALIGNED)
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
    index_strides,
    n_kept,
    n_scanned,
    steps,
    LEAF: tl.constexpr,
    COMBINE: tl.constexpr,
    PROJECT: tl.constexpr,
    ALIGNED: tl.constexpr,
    INIT: tl.constexpr,
    KINDS: tl.constexpr,
    PARTIAL_KINDS: tl.constexpr,
    DTYPES: tl.constexpr,
    STATES: tl.constexpr,
    INDEX: tl.constexpr,
    KEPT: tl.constexpr,
    SCANNED: tl.constexpr,
    SPLITS: tl.constexpr,
    ONCE: tl.constexpr,
):
    """A program scans `steps` blocks of each of KEPT rows, after the chunks before, whose states are `partial`.

    It reads a block before it writes it, and no other program does, so that an input may be an output.
    """
    n_scanned = told(n_scanned, ALIGNED)
    kept = tl.program_id(0).to(INDEX) * KEPT + tl.arange(0, KEPT)
    kept_mask = kept < n_kept
    rows = (kept, kept_mask, shapes, strides)
    start = tl.program_id(1).to(INDEX) * steps * SCANNED
    carried = ()
    if len(partial) > 0:
        carried, _ = fold_blocks(
            partial,
            (kept, kept_mask, ((), ()), (strides[4], strides[5])),
            start * 0,
            tl.cdiv(tl.program_id(1), SPLITS),
            tl.program_id(1),
            (),
            (),
            None,
            COMBINE,
            COMBINE,
            (),
            None,
            True,
            INIT,
            PARTIAL_KINDS,
            STATES,
            len(STATES),
            STATES,
            KEPT,
            SPLITS,
            False,
            False,
            "",
        )
    elif not ONCE:
        for i in tl.static_range(len(INIT)):
            carried = carried + (tl.full((KEPT,), INIT[i], STATES[i]),)
    scanned = start + tl.arange(0, SCANNED)
    scanned_mask = scanned < n_scanned
    values = load(inputs, rows, scanned, scanned_mask, KINDS, DTYPES, 0, 1, ALIGNED, "", "")
    if ONCE:
        _scan_block(
            values,
            outs,
            carried,
            rows,
            start,
            n_scanned,
            index_strides,
            LEAF,
            COMBINE,
            PROJECT,
            ALIGNED,
            INIT,
            STATES,
            KEPT,
            SCANNED,
        )
    else:
        for step in range(steps):
            # The next block is on its way while one is scanned.
            scanned += SCANNED
            scanned_mask = (scanned < n_scanned) & (step + 1 < steps)
            coming = load(inputs, rows, scanned, scanned_mask, KINDS, DTYPES, 0, 1, ALIGNED, "", "")
            states = _scan_block(
                values,
                outs,
                carried,
                rows,
                start + step * SCANNED,
                n_scanned,
                index_strides,
                LEAF,
                COMBINE,
                PROJECT,
                ALIGNED,
                INIT,
                STATES,
                KEPT,
                SCANNED,
            )
            values = coming
            carried = ()
            for i in tl.static_range(len(STATES)):
                carried = carried + (_last(states[i]),)


def _blocks(space: Space, inner: bool) -> Blocks:
    device, tile = devices.current, tile_elements(space)
    n_kept, n_scanned = space.n_kept, space.n_reduced
    if inner:
        scanned = power_of_2(n_scanned) if n_scanned <= device.row_elements else tile
        kept = min(power_of_2(n_kept), max(1, tile // scanned))
        warps = max(4, kept * scanned // 512)
    else:
        # Of one warp, whose threads have most of a column each, so that little passes between them.
        few = device.row_elements // 4
        kept = min(power_of_2(n_kept), max(device.row_columns, few // power_of_2(n_scanned)))
        scanned = min(power_of_2(n_scanned), max(1, few // kept))
        warps = 1
    return cut(space, kept, scanned, warps, scarcity=4, least=4)


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
    sizes = {name: size for name, size in blocks.sizes.items() if name not in ("REDUCED", "WHOLE")}
    partial: tuple[torch.Tensor, ...] = ()
    if blocks.splits > 1:
        constants = reduction.constants(space, compute, ()) | blocks.sizes | {"DTYPES": (TRITON_DTYPES[compute],)}
        partial = reduction.states_of_chunks((self,), space, blocks, compute, constants)
    several = len(partial)
    scan[(blocks.programs, blocks.splits)](
        *((self,), outs, partial, space.shapes),
        (
            space.kept[0],
            space.reduced[0],
            space.kept[1],
            space.reduced[1],
            ((1,),) * several,
            ((space.n_kept,),) * several,
        ),
        *(space.index_strides, space.n_kept, space.n_reduced, blocks.steps),
        LEAF=reduction.leaf,
        PROJECT=reduction.project,
        ALIGNED=space.aligned,
        KINDS=space.kinds,
        PARTIAL_KINDS=(BOTH,) * several,
        DTYPES=(TRITON_DTYPES[compute],),
        SPLITS=min(power_of_2(blocks.splits), max(1, blocks.sizes["REDUCED"] // 4)),
        SCANNED=blocks.sizes["REDUCED"],
        **reduction.of_states(space, compute),
        **sizes,
    )
