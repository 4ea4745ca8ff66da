"""Stable counting sort of expert ids, for rows in the order of their experts.

Each of several programs has a span of ids. `count_ids` counts each expert's ids in each span. `sort_ids` adds the
counts of lower experts and of earlier spans to an id's rank among equal ids of its span, which gives its position. A
single program counts its ids itself. Nothing depends on the order in which programs run.

Ids outside 0..experts-1 belong to no expert: they follow all others, and their positions are stored as -1 - position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import power_of_2
from tritonite.engine.moe.table import moe_table
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty
from tritonite.runtime.libentry import libentry


@dataclass(frozen=True)
class _SortMeta:
    """Compile-time facts of the kernels.

    `lanes` is the number of experts rounded up to a power of 2. A step has `ids` ids, and `spans` counts of programs
    are read at a time. `alone` says that one program sorts all ids. `aligned` says that experts begin at multiples of
    the block size.
    """

    lanes: int
    ids: int
    spans: int
    alone: bool
    aligned: bool


@triton.jit
def _own_ids(ids, begin, n, experts, META: tl.constexpr):
    """Return (indices, ids) of a step: an id of no expert is -1, and -2 is behind the last id."""
    index = begin + tl.arange(0, META.ids)
    own = tl.load(ids + index, mask=index < n, other=-1)
    own = tl.where((own >= 0) & (own < experts), own, -1).to(tl.int32)
    return index, tl.where(index < n, own, -2)


@triton.jit
def _count_span(ids, begin, n, experts, steps, META: tl.constexpr):
    """Return the number of each expert's ids in the `steps` steps from `begin` on."""
    counts = tl.full((META.lanes,), 0, tl.int32)
    for step in range(steps):
        _, own = _own_ids(ids, begin + step * META.ids, n, experts, META)
        counts += tl.histogram(tl.maximum(own, 0), META.lanes, mask=own >= 0)
    return counts


@libentry()
@triton.jit(do_not_specialize=["n", "steps"])
def count_ids(counts, ids, n, experts, steps, META: tl.constexpr):
    """Count each expert's ids in the program's span: a row of `counts`, (programs, experts)."""
    wait_for_previous_launch()
    lane = tl.arange(0, META.lanes)
    own = _count_span(ids, tl.program_id(0) * steps * META.ids, n, experts, steps, META)
    tl.store(counts + tl.program_id(0) * experts + lane, own, mask=lane < experts)


@triton.jit
def _counts_of_spans(counts, experts, META: tl.constexpr):
    """Return each expert's ids in all spans, and in the spans before the program's."""
    lane = tl.arange(0, META.lanes)
    totals = tl.full((META.lanes,), 0, tl.int32)
    before = tl.full((META.lanes,), 0, tl.int32)
    for first in range(0, tl.num_programs(0), META.spans):
        span = (first + tl.arange(0, META.spans))[:, None]
        mask = (span < tl.num_programs(0)) & (lane < experts)[None, :]
        own = tl.load(counts + span * experts + lane[None, :], mask=mask, other=0)
        totals += tl.sum(own, axis=0)
        before += tl.sum(tl.where(span < tl.program_id(0), own, 0), axis=0)
    return totals, before


@triton.jit
def _pad_experts(out, expert_ids, totals, widths, starts, n, block_size, capacity, META: tl.constexpr):
    """Write `n` after each expert's ids and after the last expert's, and the expert of each block, or -1."""
    lane = tl.arange(0, META.lanes)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for more in range(program, block_size - 1, programs):
        tl.store(out + starts + totals + more, tl.zeros_like(lane) + n, mask=totals + more < widths)
    blocks = widths // block_size
    for more in range(program, tl.max(blocks, axis=0), programs):
        tl.store(expert_ids + starts // block_size + more, lane, mask=more < blocks)
    used = tl.sum(widths, axis=0)
    for begin in range(used + program * META.ids, capacity, programs * META.ids):
        index = begin + tl.arange(0, META.ids)
        tl.store(out + index, tl.zeros_like(index) + n, mask=index < capacity)
    for begin in range(used // block_size + program * META.ids, capacity // block_size, programs * META.ids):
        index = begin + tl.arange(0, META.ids)
        tl.store(expert_ids + index, tl.zeros_like(index) - 1, mask=index < capacity // block_size)


@libentry()
@triton.jit(do_not_specialize=["n", "steps", "capacity"])
def sort_ids(out, by_expert, used, ids, counts, n, experts, steps, block_size, capacity, META: tl.constexpr):
    """Sort the ids of the program's span.

    Without META.aligned `out` gets the position of each id, and `by_expert` the end of each expert's positions. With
    META.aligned `out`, of `capacity` elements, gets the index of the id at each position, `by_expert` the expert of
    each block, and `used` the number of positions.
    """
    wait_for_previous_launch()
    lane = tl.arange(0, META.lanes)
    begin = tl.program_id(0) * steps * META.ids
    if META.alone:
        totals = _count_span(ids, 0, n, experts, steps, META)
        before = tl.zeros_like(totals)
    else:
        totals, before = _counts_of_spans(counts, experts, META)
    widths = totals
    if META.aligned:
        widths = (totals + block_size - 1) // block_size * block_size
    ends = tl.cumsum(widths, axis=0)
    starts = ends - widths
    if META.aligned:
        _pad_experts(out, by_expert, totals, widths, starts, n, block_size, capacity, META)
        if tl.program_id(0) == 0:
            tl.store(used, tl.sum(widths, axis=0))
    elif tl.program_id(0) == 0:
        tl.store(by_expert + lane, ends, mask=lane < experts)
    next_position = starts + before
    next_other = tl.sum(totals, axis=0) + begin - tl.sum(before, axis=0)
    place = tl.arange(0, META.ids)
    for step in range(steps):
        index, own = _own_ids(ids, begin + step * META.ids, n, experts, META)
        equal_before = (own[:, None] == own[None, :]) & (place[None, :] < place[:, None])
        rank = tl.sum(equal_before.to(tl.int32), axis=1)
        position = tl.gather(next_position, tl.maximum(own, 0), axis=0) + rank
        if META.aligned:
            tl.store(out + position, index, mask=own >= 0)
        else:
            tl.store(out + index, tl.where(own >= 0, position, -1 - (next_other + rank)), mask=own > -2)
        next_position += tl.histogram(tl.maximum(own, 0), META.lanes, mask=own >= 0)
        next_other += tl.sum((own == -1).to(tl.int32), axis=0)


def _sort(
    out: torch.Tensor, by_expert: torch.Tensor, used: torch.Tensor, ids: torch.Tensor, experts: int, block_size: int
) -> None:
    """Sort contiguous `ids`; a `block_size` of 0 is for positions, another for aligned indices."""
    n, table = ids.numel(), moe_table()
    step = table.sorted_ids
    most = min(devices.multiprocessors(ids.device), n // (table.sorting_steps * step))
    programs = 1 if n <= table.sorted_alone * step else max(1, most)
    steps = triton.cdiv(triton.cdiv(n, step), programs)
    lanes = max(2, power_of_2(experts))
    meta = _SortMeta(
        lanes=lanes,
        ids=step,
        spans=max(1, min(table.counts // lanes, power_of_2(programs))),
        alone=programs == 1,
        aligned=block_size > 0,
    )
    counts = ids
    if programs > 1:
        counts = empty((programs, experts), torch.int32, ids.device)
        count_ids[(programs,)](counts, ids, n, experts, steps, META=meta, num_warps=4)
    sort_ids[(programs,)](
        *(out, by_expert, used, ids, counts, n, experts, steps, block_size, out.numel()), META=meta, num_warps=4
    )


def positions_by_expert(ids: torch.Tensor, inverse: torch.Tensor, ends: torch.Tensor) -> None:
    """Write each id's position in the stable order of experts to `inverse`, and each expert's last position + 1."""
    _sort(inverse, ends, ends, ids, ends.numel(), 0)


def aligned_ids(
    ids: torch.Tensor, indices: torch.Tensor, expert_ids: torch.Tensor, used: torch.Tensor, experts: int, block: int
) -> None:
    """Write the indices of ids in the order of experts, each expert's padded with the number of ids to whole blocks.

    `indices` has room for all blocks. `expert_ids` gets each block's expert, -1 for blocks after the last expert.
    `used` gets the number of indices with padding.
    """
    _sort(indices, expert_ids, used, ids, experts, block)
