"""Reductions of every tensor of a list to one element, and of all tensors together: checks and launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.iteration import (
    common_device,
    is_dense,
    never_overlaps_itself,
    output_strides,
    shares_written_memory,
    span,
)
from tritonite.engine.lists.reduce_kernels import (
    INPUTS,
    ReduceListMeta,
    combine_all,
    combine_list,
    reduce_list,
    scale_list,
)
from tritonite.engine.lists.table import Table, choose_blocks
from tritonite.engine.movement import move
from tritonite.engine.rows.declare import Reduction
from tritonite.errors import Decline
from tritonite.runtime.contract import empty, empty_strided, settings

# The most blocks of a program.
_MOST_STEPS = 16
# Elements of the largest block.
_BLOCK = 2048
# Tensors of a program, and partial states of each that are combined at a time: where no tensor has more, and where one
# has.
_FEW_STATES, _MANY_STATES = (16, 32), (1, 256)
# Partial states that the one program of a whole list's reduction combines at a time.
_STATES_OF_ALL = 1024


class Task(NamedTuple):
    """The reduction of one tensor.

    Attributes:
        reduction: a `Reduction` whose state is one value without an index.
        compute: the dtype of the state.
        result: the dtype of the result.
        number: the number that `project`, and a parametric `leaf`, take; None for a reduction without.
    """

    reduction: Reduction
    compute: torch.dtype
    result: torch.dtype
    number: float | None = None

    def meta(self, **fields: object) -> ReduceListMeta:
        """Return the compile-time parameters of kernels, `fields` among them."""
        (init,) = self.reduction.init(self.compute) if callable(self.reduction.init) else self.reduction.init
        return ReduceListMeta(
            leaf=self.reduction.leaf,
            combine=self.reduction.combine,
            project=self.reduction.project,
            init=init,
            compute=TRITON_DTYPES[self.compute],
            leaf_number=self.reduction.parametric,
            number=self.number is not None,
            **fields,  # type: ignore[arg-type]
        )


class _Kind(NamedTuple):
    """Facts that the tensors of one launch have in common."""

    task: Task
    memory: torch.dtype
    aligned: bool


def reduce_each(
    tensors: Sequence[torch.Tensor], tasks: Sequence[Task], outs: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Reduce each tensor to one element by its task, in `outs` or in fresh 0-d tensors.

    A tensor with gaps or overlapping elements is reduced by launches of its own. Raises Decline before anything is
    written.
    """
    device = _device_of(tensors, outs)
    if outs:
        _check_results(tensors, tasks, outs)
    results = list(outs) or [empty((), task.result, device) for task in tasks]
    groups: dict[_Kind, list[int]] = {}
    for i, (x, task) in enumerate(zip(tensors, tasks, strict=True)):
        if is_dense(x.shape, x.stride()) or not x.numel():
            groups.setdefault(_Kind(task, x.dtype, _is_aligned(x)), []).append(i)
        else:
            numbers = () if task.number is None else (task.number,)
            task.reduction.run((x,), tuple(range(x.dim())), (results[i],), task.compute, numbers)
    for kind, members in groups.items():
        own = [tensors[i] for i in members]
        block, steps = _blocks([x.numel() for x in own])
        table = Table([x.numel() for x in own], block * steps)
        # Rows INPUTS and RESULTS.
        table.add_tensors(own)
        table.add_tensors([results[i] for i in members])
        written = table.write(device)
        partial = empty((table.programs,), kind.task.compute, device)
        _reduce(kind, table, written, partial, 0, block, steps)
        few = max([x.numel() for x in own]) <= block * steps * _FEW_STATES[1]
        rows, states = _FEW_STATES if few else _MANY_STATES
        meta = kind.task.meta(block=states, rows=rows, result=TRITON_DTYPES[kind.task.result])
        programs = -(-table.count // rows)
        combine_list[(programs,)](written, partial, table.count, kind.task.number or 0.0, META=meta, num_warps=1)
    return results


def clip_by_total(tensors: Sequence[torch.Tensor], task: Task, limit: float) -> torch.Tensor:
    """Reduce all tensors together, and multiply them by min(limit / (result + 1e-6), 1) in place.

    Returns the result, a 0-d tensor. Raises Decline before anything is written, and for tensors with gaps.
    """
    device = _device_of(tensors, ())
    _check_written(tensors, ())
    if not all([is_dense(x.shape, x.stride()) for x in tensors if x.numel()]):
        raise Decline("a tensor with gaps between its elements")
    groups: dict[_Kind, list[torch.Tensor]] = {}
    for x in tensors:
        own = task._replace(compute=torch.float64 if x.dtype is torch.float64 else torch.float32)
        groups.setdefault(_Kind(own, x.dtype, _is_aligned(x)), []).append(x)
    tables = []
    programs = 0
    for kind, members in groups.items():
        block, steps = _blocks([x.numel() for x in members])
        table = Table([x.numel() for x in members], block * steps)
        table.add_tensors(members)
        tables.append((kind, table, table.write(device), programs, block, steps))
        programs += table.programs
    partial = empty((programs,), task.compute, device)
    for kind, table, written, first, block, steps in tables:
        _reduce(kind, table, written, partial, first, block, steps)
    total, factor = empty((), task.result, device), empty((), task.compute, device)
    meta = task.meta(block=_STATES_OF_ALL, result=TRITON_DTYPES[task.result])
    size = sum([x.numel() for x in tensors])
    combine_all[(1,)](partial, total, factor, programs, size, task.number or 0.0, limit, META=meta, num_warps=4)
    for kind, table, written, _, block, steps in tables:
        _scale(kind.memory, kind.aligned, table, INPUTS.value, written, factor, None, block, steps)
    return total


def scale_each(
    tensors: Sequence[torch.Tensor],
    factor: torch.Tensor,
    flag: torch.Tensor | None,
    outs: Sequence[torch.Tensor],
) -> None:
    """Write each tensor times the element of `factor` to its output, in one pass over all of a dtype.

    The element of `flag`, unless that is None, becomes 1 if an element of a tensor is inf or nan. An output may be its
    tensor. Tensors with gaps are copied first. Raises Decline before anything is written.
    """
    flags = () if flag is None else (flag,)
    device = _device_of((*tensors, factor, *flags), outs)
    in_place = all([x is out for x, out in zip(tensors, outs, strict=True)])
    _check_written((*outs, *flags), (factor,) if in_place else (*tensors, factor))
    groups: dict[tuple[torch.dtype, bool], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    copied = []
    for x, out in zip(tensors, outs, strict=True):
        if not x.numel():
            continue
        source, target = x, out
        if not (is_dense(x.shape, x.stride()) and x.stride() == out.stride()):
            source = target = empty(tuple(x.shape), x.dtype, device)
            move(x, source)
            copied.append((target, out))
        groups.setdefault((x.dtype, _is_aligned(source) and _is_aligned(target)), []).append((source, target))
    for (memory, aligned), members in groups.items():
        sizes = [source.numel() for source, _ in members]
        block, steps = _blocks(sizes)
        table = Table(sizes, block * steps)
        row = table.add_tensors([source for source, _ in members])
        if not all([source is target for source, target in members]):
            row = table.add_tensors([target for _, target in members])
        _scale(memory, aligned, table, row, table.write(device), factor, flag, block, steps)
    for target, out in copied:
        move(target, out)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor with the shape, dtype and strides of `tensor`, contiguous if that has gaps, as ATen's clone."""
    shape, own = tuple(tensor.shape), tuple(tensor.stride())
    strides = own if is_dense(shape, own) else output_strides(shape, [(shape, own)], False)
    return empty_strided(shape, strides, tensor.dtype, tensor.device)


def _reduce(
    kind: _Kind, table: Table, written: torch.Tensor, partial: torch.Tensor, first: int, block: int, steps: int
) -> None:
    """Launch `reduce_list` for a table, whose states follow the `first` states of `partial`."""
    if not table.programs:
        return
    meta = kind.task.meta(block=block, memory=TRITON_DTYPES[kind.memory], aligned=kind.aligned)
    reduce_list[(table.programs,)](
        *(written, partial, first, table.count, table.search_steps, steps, kind.task.number or 0.0),
        META=meta,
        num_warps=devices.current.num_warps,
    )


def _scale(
    memory: torch.dtype,
    aligned: bool,
    table: Table,
    row: int,
    written: torch.Tensor,
    factor: torch.Tensor,
    flag: torch.Tensor | None,
    block: int,
    steps: int,
) -> None:
    """Launch `scale_list` for a table whose row `row` has the results' addresses."""
    if not table.programs:
        return
    compute = torch.float64 if memory is torch.float64 else torch.float32
    scale_list[(table.programs,)](
        *(written, factor, flag, table.count, table.search_steps, steps),
        MEMORY=TRITON_DTYPES[memory],
        COMPUTE=TRITON_DTYPES[compute],
        ALIGNED=aligned,
        BLOCK=block,
        ROW=row,
        num_warps=devices.current.num_warps,
    )


def _blocks(sizes: Sequence[int]) -> tuple[int, int]:
    """Return (elements of a block, blocks of a program) for tensors of these sizes."""
    if settings().invariant:
        # The order of a tensor's sum must not depend on other tensors.
        return _BLOCK, _MOST_STEPS
    return choose_blocks(_BLOCK, sizes, _MOST_STEPS)


def _is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % 16 == 0


def _device_of(tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> torch.device:
    """Return the one device of all tensors. Declines lists without tensors, other devices and unknown dtypes."""
    if not tensors:
        raise Decline("lists without tensors")
    device, scalars = common_device(tensors, outs)
    if scalars:
        raise Decline("a tensor on another device")
    for x in (*tensors, *outs):
        if x.dtype not in TRITON_DTYPES:
            raise Decline(f"dtype {x.dtype}")
    return device


def _check_results(tensors: Sequence[torch.Tensor], tasks: Sequence[Task], outs: Sequence[torch.Tensor]) -> None:
    """Decline outputs that are not 0-d tensors of their tasks' dtypes, or that share memory with another tensor."""
    if len(outs) != len(tensors):
        raise Decline(f"{len(outs)} outputs for {len(tensors)} tensors")
    for out, task in zip(outs, tasks, strict=True):
        if out.dim() or out.dtype is not task.result:
            raise Decline(f"output of shape {tuple(out.shape)} and dtype {out.dtype} for a 0-d {task.result}")
    _check_written(outs, tensors)


def _check_written(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
    """Decline written tensors that share memory with each other or with a read tensor, or whose elements overlap."""
    spans = []
    for writes, tensors in ((True, written), (False, read)):
        for x in tensors:
            if writes and not never_overlaps_itself(x.shape, x.stride()):
                raise Decline("a written tensor whose elements overlap")
            if x.numel():
                start = x.data_ptr()
                spans.append((start, start + span(x.shape, x.stride()) * x.itemsize, writes))
    if shares_written_memory(spans):
        raise Decline("a written tensor shares memory with another tensor of the call")
