"""The host functions of divergences: strides, blocks, launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.divergence.kernels import divergence_backward, divergence_forward
from tritonite.engine.divergence.meta import LOG_TARGET, TARGET, DivergenceMeta
from tritonite.engine.divergence.table import divergence_table
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.runtime.contract import fusion


class Divergence(NamedTuple):
    """A divergence: its kind, one of `meta.KINDS`, and its numbers. Only "jsd" has a `beta`."""

    kind: str
    beta: float = 0.5
    temperature: float = 1.0


class Rows(NamedTuple):
    """Rows of logits of student and teacher, both (rows, classes), and what the losses of rows depend on.

    Attributes:
        student: logits, of any strides.
        teacher: logits, of any strides.
        scales: contiguous vectors of rows: the factors of the divergence and of the cross entropy. Without any, all
            rows count. The forward pass only asks which are 0.
        labels: None, or a contiguous vector of classes for the cross entropy.
    """

    student: torch.Tensor
    teacher: torch.Tensor
    scales: tuple[torch.Tensor, ...] = ()
    labels: torch.Tensor | None = None

    @property
    def label_vectors(self) -> tuple[torch.Tensor, ...]:
        return () if self.labels is None else (self.labels,)

    @property
    def compute(self) -> torch.dtype:
        return compute_dtype(self.student, self.teacher)


def compute_dtype(student: torch.Tensor, teacher: torch.Tensor) -> torch.dtype:
    """Return the dtype of losses and statistics."""
    return torch.promote_types(opmath(student.dtype), opmath(teacher.dtype))


def statistics_of(divergence: Divergence, labelled: bool) -> int:
    """Return how many values of a row the forward pass keeps."""
    return 4 if labelled and divergence.temperature != 1 else 3


def _launch_facts(
    rows: Rows, divergence: Divergence, columns: int, held: bool = False, *others: torch.Tensor
) -> dict[str, Any]:
    """Return the META parameter and compile options for blocks of at most `columns` elements of a row."""
    unit = devices.current.row_elements
    columns = min(columns, power_of_2(rows.student.shape[1]))
    # The number of rows depends on their length alone, so that a row's bits do not depend on the batch.
    block_rows = max(1, unit // 2 // columns)
    meta = DivergenceMeta(
        kind=divergence.kind,
        normalized=divergence.kind in (TARGET, LOG_TARGET),
        index=offset_type(rows.student, rows.teacher, *others),
        compute=TRITON_DTYPES[rows.compute],
        rows=block_rows,
        columns=columns,
        held=held,
        tempered=divergence.temperature != 1,
    )
    warps = divergence_table().warps * max(1, columns // unit)
    return {"META": meta, "num_warps": min(warps, devices.current.most_warps), **devices.current.options, **fusion()}


def forward(rows: Rows, losses: tuple[torch.Tensor, ...], statistics: torch.Tensor, divergence: Divergence) -> None:
    """Write the divergence of each row, with labels its cross entropy, and the statistics for the gradient.

    `losses` are contiguous vectors in `rows.compute`, `statistics` is (rows, `statistics_of`) of the same dtype.
    """
    table, unit = divergence_table(), devices.current.row_elements
    n_rows, n_columns = rows.student.shape
    # float64 takes twice the registers.
    held = table.held * unit * 4 // rows.compute.itemsize
    looped = table.looped * unit * 4 // rows.compute.itemsize
    fits = power_of_2(n_columns) <= held
    facts = _launch_facts(rows, divergence, held if fits else looped, fits)
    operands = rows.student, rows.teacher
    divergence_forward[(-(-n_rows // facts["META"].rows),)](
        *operands,
        *(rows.label_vectors, rows.scales, losses, statistics),
        *(tuple([each.stride(i) for each in operands]) for i in range(2)),
        *(n_rows, n_columns, divergence.beta, 1 / divergence.temperature),
        **facts,
    )


def backward(rows: Rows, gradient: torch.Tensor, statistics: torch.Tensor, divergence: Divergence) -> None:
    """Write the gradient by the student's logits of the losses times `rows.scales`; it may be the student itself."""
    n_rows, n_columns = rows.student.shape
    columns = divergence_table().gradient * devices.current.row_elements
    facts = _launch_facts(rows, divergence, columns, False, gradient)
    operands, meta = (rows.student, rows.teacher, gradient), facts["META"]
    divergence_backward[(-(-n_rows // meta.rows) * -(-n_columns // meta.columns),)](
        *(gradient, rows.student, rows.teacher),
        *(rows.label_vectors, rows.scales, statistics),
        *(tuple([each.stride(i) for each in operands]) for i in range(2)),
        *(n_rows, n_columns, divergence.beta, 1 / divergence.temperature),
        **facts,
    )
