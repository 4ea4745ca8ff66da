"""Block choice and launches of the cross-entropy kernels, over logits (..., classes) of any strides."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.cross_entropy import kernels
from tritonite.engine.cross_entropy.arguments import Classes, LossMeta, Partial, Results, Rows, Statistics, Targets
from tritonite.engine.cross_entropy.table import CROSS_ENTROPY, Block, CrossEntropyTable
from tritonite.engine.iteration import collapse, contiguous_strides, offset_type, power_of_2
from tritonite.runtime.contract import empty, settings

_PADDED = 16


class Loss(NamedTuple):
    """Numbers of a loss; `softcap` is None for none. `ignore_index` may be a symbol."""

    ignore_index: Any
    label_smoothing: float
    softcap: float | None
    z_loss: float

    @property
    def facts(self) -> dict[str, bool]:
        """Fields of `LossMeta`."""
        return {
            "softcap": self.softcap is not None,
            "smoothing": self.label_smoothing != 0,
            "z_loss": self.z_loss != 0,
        }

    @property
    def cap(self) -> float:
        return 1.0 if self.softcap is None else float(self.softcap)


def table() -> CrossEntropyTable:
    return CROSS_ENTROPY[devices.current.kind]


def _rows_of(x: torch.Tensor) -> Rows:
    """Return the layout of rows along the last dimension, counted in the order of the leading dimensions."""
    lead = tuple(x.shape[:-1])
    sizes, strides = collapse(lead, [contiguous_strides(lead), x.stride()[:-1]])
    return Rows(tuple(sizes[:-1]), tuple(strides[1]), x.stride(-1))


def buffer_for_logits(n_rows: int, n_classes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate logits whose rows have memory for a multiple of 16 classes, as vectors and TMA need."""
    return empty((n_rows, -(-n_classes // _PADDED) * _PADDED), dtype, device)[:, :n_classes]


def _meta(block: Block, n_columns: int, compute: torch.dtype, index: Any, **facts: Any) -> LossMeta:
    """Return the facts of a block, whose shape depends on the classes alone and so not on the number of rows."""
    columns = min(power_of_2(n_columns), block.elements)
    rows = max(1, block.elements // columns // 4) if columns < block.elements else 1
    return LossMeta(index=index, compute=TRITON_DTYPES[compute], rows=rows, columns=columns, **facts)


def _warps(block: Block, meta: LossMeta) -> int:
    """Return the warps of a program, fewer for a block smaller than the table's."""
    return max(1, min(block.warps, block.warps * meta.rows * meta.columns // block.elements))


def make_statistics(
    n_rows: int, logits: torch.Tensor, targets: Targets, loss: Loss, best: bool, maximum: bool = False
) -> Statistics:
    """Allocate the statistics of rows that a loss needs; with `best` and `maximum` these, too."""
    compute, device = opmath(logits.dtype), logits.device
    smoothing = loss.label_smoothing != 0
    return Statistics(
        empty((n_rows,), compute, device),
        empty((n_rows,), compute, device),
        empty((n_rows,), compute, device) if smoothing else None,
        empty((1,), compute, device) if smoothing and targets.weight is not None else None,
        empty((n_rows,), torch.int64, device) if best else None,
        empty((n_rows,), compute, device) if maximum else None,
    )


def _columns_of_slice(x: torch.Tensor, n_rows: int, n_columns: int) -> int:
    """Return the columns of a slice of rows that are too few for the device's multiprocessors, or all columns.

    In invariant mode rows are whole, because slices depend on the number of other rows.
    """
    meta = _meta(table().once, n_columns, opmath(x.dtype), None)
    programs, blocks = -(-n_rows // meta.rows), -(-n_columns // meta.columns)
    # Two programs for each multiprocessor, so that one computes while the other waits for memory.
    slices = 2 * devices.multiprocessors(x.device) // programs
    each = -(-blocks // max(1, slices))
    if settings().invariant or blocks - each < table().saved_blocks:
        return n_columns
    return each * meta.columns


def _read_slices(
    x: torch.Tensor, targets: Targets, statistics: Statistics, loss: Loss, classes: Classes, each: int, padded: bool
) -> None:
    """Fill the statistics of rows of logits by slices of `each` columns, and a launch that combines slices."""
    n_rows, block, index = math.prod(x.shape[:-1]), table().once, offset_type(x)
    n_slices, compute = -(-classes.own // each), opmath(x.dtype)
    meta = _meta(block, classes.own, compute, index, padded=padded, **loss.facts)
    shape = n_rows, n_slices
    partial = Partial(
        empty(shape, compute, x.device),
        empty(shape, compute, x.device),
        None if statistics.smooth is None else empty(shape, compute, x.device),
        None if statistics.best is None else empty(shape, torch.int64, x.device),
        None if statistics.weight_sum is None else empty((n_slices,), compute, x.device),
    )
    kernels.read_slices[(-(-n_rows // meta.rows), n_slices)](
        *(x, targets.weight, partial, _rows_of(x), classes, n_rows, each, loss.cap),
        META=meta,
        num_warps=_warps(block, meta),
    )
    kernels.combine_slices[(n_rows,)](
        *(x, targets, partial, statistics, _rows_of(x), classes, n_rows, n_slices, loss.ignore_index, loss.cap),
        META=LossMeta(index, TRITON_DTYPES[compute], 1, power_of_2(n_slices), softcap=loss.softcap is not None),
        num_warps=1,
    )


def read_rows(
    x: torch.Tensor, targets: Targets, statistics: Statistics, loss: Loss, classes: Classes, padded: bool = False
) -> None:
    """Fill the statistics of rows of logits, which are `padded` if they are of `buffer_for_logits`."""
    n_rows = math.prod(x.shape[:-1])
    if not n_rows:
        return
    each = _columns_of_slice(x, n_rows, classes.own)
    if each < classes.own:
        return _read_slices(x, targets, statistics, loss, classes, each, padded)
    block = table().once
    meta = _meta(block, classes.own, opmath(x.dtype), offset_type(x), padded=padded, **loss.facts)
    kernels.read_rows[(-(-n_rows // meta.rows),)](
        *(x, targets, statistics, _rows_of(x), classes, n_rows, loss.ignore_index, loss.cap),
        META=meta,
        num_warps=_warps(block, meta),
    )


def replace_by_gradient(x: torch.Tensor, targets: Targets, statistics: Statistics, loss: Loss) -> None:
    """Fill the statistics of logits of `buffer_for_logits`, and replace them by the gradient of the losses' sum."""
    n_rows, n_classes = math.prod(x.shape[:-1]), x.shape[-1]
    if _columns_of_slice(x, n_rows, n_classes) < n_classes:
        # Rows that one program each would read twice leave multiprocessors without work.
        classes = Classes(n_classes, n_classes, 0)
        read_rows(x, targets, statistics, loss, classes, padded=True)
        return write_gradient(None, x, x, targets, statistics, None, loss, classes, padded=True)
    block = table().twice if statistics.smooth is None and statistics.best is None else table().twice_with_states
    meta = _meta(block, n_classes, opmath(x.dtype), offset_type(x), padded=True, **loss.facts)
    kernels.replace_by_gradient[(-(-n_rows // meta.rows),)](
        *(x, targets, statistics, _rows_of(x), Classes(n_classes, n_classes, 0), n_rows),
        *(loss.ignore_index, loss.label_smoothing, loss.cap, loss.z_loss),
        META=meta,
        num_warps=_warps(block, meta),
    )


def write_gradient(
    grad: torch.Tensor | None,
    x: torch.Tensor,
    out: torch.Tensor,
    targets: Targets,
    statistics: Statistics,
    total: torch.Tensor | None,
    loss: Loss,
    classes: Classes,
    padded: bool = False,
) -> None:
    """Write the gradient by logits `x` to `out`, which may be `x`.

    `grad` is contiguous, of one element or one a row, or None for 1. With `total`, the total weight of the targets, the
    loss is a mean. `padded` logits are of `buffer_for_logits`.
    """
    n_rows = math.prod(x.shape[:-1])
    if not n_rows:
        return
    block = table().gradient
    index = offset_type(x, out)
    meta = _meta(block, classes.own, opmath(x.dtype), index, mean=total is not None, padded=padded, **loss.facts)
    kernels.write_gradient[(-(-n_rows // meta.rows), -(-classes.own // meta.columns))](
        *(grad, x, out, targets, statistics.lse, statistics.weight_sum, total, _rows_of(x), _rows_of(out), classes),
        *(
            n_rows,
            1 if grad is not None and grad.dim() else 0,
            loss.ignore_index,
            loss.label_smoothing,
            loss.cap,
            loss.z_loss,
        ),
        META=meta,
        num_warps=_warps(block, meta),
    )


def finish(
    targets: Targets,
    statistics: Statistics,
    shape: tuple[int, ...],
    loss: Loss,
    reduction: str,
    classes: int,
    with_z: bool,
) -> Results:
    """Return the losses of rows, a tensor of `shape`, or their sum or mean; with `with_z` the z-loss, too."""
    lse = statistics.lse
    compute, device = lse.dtype, lse.device
    reduced, n_rows = reduction != "none", lse.shape[0]
    shape = () if reduced else shape
    results = Results(
        empty(shape, compute, device),
        empty(shape, compute, device) if with_z else None,
        empty(shape, compute, device) if statistics.best is not None else None,
        empty((1,), compute, device) if reduction == "mean" else None,
    )
    block = table().rows
    rows = min(block.elements, power_of_2(max(1, n_rows)))
    meta = LossMeta(
        *(offset_type(lse), TRITON_DTYPES[compute], rows),
        reduced=reduced,
        mean=reduction == "mean",
        **loss.facts,
    )
    if n_rows or reduced:
        kernels.finish_losses[(1 if reduced else -(-n_rows // rows),)](
            *(targets, statistics, results, n_rows, classes),
            *(loss.ignore_index, loss.label_smoothing, loss.z_loss),
            META=meta,
            num_warps=block.warps if rows == block.elements else 4,
        )
    return results


def scale(
    x: torch.Tensor,
    out: torch.Tensor,
    grad: torch.Tensor,
    total: torch.Tensor | None,
    target: torch.Tensor | None = None,
    ignore_index: Any = 0,
) -> None:
    """Write a contiguous gradient times the loss's gradient; with `total`, over the total weight.

    `target` is contiguous and has the class of each row of x, or is None if x is no gradient by rows.
    """
    n = x.numel()
    if not n:
        return
    block = table().gradient
    index = offset_type(x.view(-1))
    meta = LossMeta(index, TRITON_DTYPES[opmath(x.dtype)], 1, block.elements, mean=total is not None)
    kernels.scale_gradient[(-(-n // block.elements),)](
        *(x, out, grad, total, target, n, x.shape[-1], ignore_index), META=meta, num_warps=block.warps
    )


def add_columns(x: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """Write the sums of a matrix's columns, contiguous along a row, to `out`, or add them to it."""
    block = table().gradient
    columns = min(power_of_2(x.shape[1]), 64)
    rows = max(1, block.elements // columns)
    meta = LossMeta(offset_type(x), TRITON_DTYPES[opmath(out.dtype)], rows, columns)
    kernels.add_columns[(-(-x.shape[1] // columns),)](
        *(x, out, x.stride(0), *x.shape), ACCUMULATE=accumulate, META=meta, num_warps=block.warps
    )
