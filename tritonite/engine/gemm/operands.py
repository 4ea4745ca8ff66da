"""Operands of products as kernels read them: orientation, alignment, padded copies, and TMA descriptors."""

from __future__ import annotations

import math
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite import devices
from tritonite.engine.gemm import cost_pointers, select
from tritonite.engine.gemm.kernels.arguments import MatrixStrides
from tritonite.engine.gemm.kernels.copies import copy_rows
from tritonite.engine.gemm.kernels.meta import GemmMeta
from tritonite.engine.gemm.problem import FEW, Problem, common_multiple
from tritonite.engine.gemm.table import limits
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.runtime.contract import empty, settings

# Orientation


def is_transposed(out: torch.Tensor) -> bool:
    """Return whether to compute the transpose of a (batches, M, N) result.

    A small N below M is computed as few rows, which have kernels of their own. If neither is small, a column-major
    result is transposed.
    """
    M, N = out.shape[1:]
    few = min(M, N) <= FEW
    return (few and N < M) or (not few and out.stride(2) != 1 == out.stride(1))


def is_column_major(tensor: torch.Tensor) -> bool:
    """Return whether columns are contiguous and rows are not; a row of one element does not count as contiguous."""
    return tensor.stride(2) != 1 or (tensor.shape[2] == 1 != tensor.shape[1] and tensor.stride(1) == 1)


# Alignment


def meta(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **more: Any) -> GemmMeta:
    """Return the facts of kernels that load through pointers: those of the layout, and `more` fields of `GemmMeta`.

    Only sizes of contiguous dimensions matter. A multiple of 16 of N or K is left out, because Triton detects it by
    itself and telling it again would cost registers.
    """
    inner = a.stride(2) == 1, b.stride(1) == 1, out.stride(2) == 1
    other = a.stride(1) == 1, b.stride(2) == 1, out.stride(1) == 1
    by_rows = inner[0], not inner[1], inner[2]
    vector, out_vector = 16 // a.dtype.itemsize, 16 // out.dtype.itemsize
    M, N, K = a.shape[1], b.shape[2], a.shape[2]
    a_multiple, b_multiple, out_multiple = [
        common_multiple(most, tensor, rows) if along or across else 1
        for tensor, most, rows, along, across in zip(
            (a, b, out), (vector, vector, out_vector), by_rows, inner, other, strict=True
        )
    ]
    n_multiple, k_multiple = [1 if size % 16 == 0 else math.gcd(vector, size) for size in (N, K)]
    return GemmMeta(
        m_multiple=1 if inner[0] and inner[2] else math.gcd(vector, M),
        n_multiple=n_multiple,
        k_multiple=k_multiple,
        a_multiple=a_multiple,
        b_multiple=b_multiple,
        out_multiple=out_multiple,
        a_inner=inner[0],
        b_inner=inner[1],
        out_inner=inner[2],
        a_strided=not (inner[0] or other[0]),
        **more,
    )


def with_column_stride(problem: Problem) -> Problem:
    """Return the problem with strided tiles of columns where they pay, but never in invariant mode.

    These tiles are for few rows alone, and in invariant mode M must not decide anything.
    """
    return problem if settings().invariant else problem.with_column_stride()


# Descriptors


def has_descriptor(tensor: torch.Tensor) -> bool:
    """Return whether TMA can address a tensor: one contiguous dimension, all other strides multiples of 16 bytes."""
    inner = 1 if is_column_major(tensor) else 2
    vector = 16 // tensor.dtype.itemsize
    strides = [tensor.stride(d) for d in range(3) if d != inner and tensor.shape[d] > 1]
    aligned = tensor.data_ptr() % 16 == 0 and all(stride > 0 and stride % vector == 0 for stride in strides)
    return tensor.numel() > 0 and tensor.stride(inner) == 1 and aligned


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a descriptor of (1, rows, columns) blocks, or of (1, columns, rows) blocks of a column-major tensor."""
    if is_column_major(tensor):
        tensor, rows, columns = tensor.mT, columns, rows
    shape = tensor.shape
    # The stride of a dimension of size 1 may be anything, and a descriptor needs a multiple of 16 bytes.
    row = tensor.stride(1) if shape[1] > 1 else padded_width(shape[2], tensor.dtype)
    batch = tensor.stride(0) if shape[0] > 1 else shape[1] * row
    return TensorDescriptor(tensor, list(shape), [batch, row, 1], [1, rows, columns])


def last_start(size: int, tile: int, disjoint: bool) -> int:
    """Return the last index that a tile of a dimension of `size` may start at, a multiple of 16 (`clamped_start`).

    The last tile then ends with the dimension, or less than 16 after it. If tiles must be `disjoint`, the last one
    starts where the one before ends.
    """
    return (-(-size // tile) - 1) * tile if disjoint else max(0, -(-(size - tile) // 16) * 16)


# Padded copies


def can_be_row_major(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether TMA can address b, and contiguous copies of a and of the result."""
    aligned = all(tensor.shape[2] * tensor.dtype.itemsize % 16 == 0 for tensor in (a, out))
    return aligned and has_descriptor(b[:1])


def row_major(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a, b and the result in the layout that they have for any M: copies, or new memory, where they differ."""
    if a.stride(2) != 1 or not has_descriptor(a):
        a = empty(a.shape, a.dtype, a.device).copy_(a)
    if not has_descriptor(b):
        b = padded_like(b).copy_(b)
    if out.stride(2) != 1 or not has_descriptor(out):
        out = empty(out.shape, out.dtype, out.device)
    return a, b, out


def worth_copying(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[bool, bool, bool]:
    """Return which of a, b and the result to pad, by the estimated time of the copies and of the product together.

    Padding lets TMA load fp16 and bf16, which needs all three, and lets pointers load float32 by vectors of 16 bytes.
    """
    problem, tensors, none = Problem.of(a, b, out), (a, b, out), (False, False, False)
    by_tma = problem.dtype.itemsize == 2
    if by_tma:
        can = not has_descriptor(a), not has_descriptor(b), not has_descriptor(out)
        choices = [none, can]
    else:
        can = problem.a_vector < 16, problem.b_vector < 16, False
        choices = [none, (can[0], False, False), (False, can[1], False), can]
    if can == none or not (by_tma or a.dtype is torch.float32) or not devices.has_tma(out.device):
        return none
    if limits().outer_k >= problem.K:
        return none

    fixed = select.fixed_costs(problem.dtype, out.device)

    def time(copied: tuple[bool, bool, bool]) -> float:
        if copied == none:
            return select.microseconds(with_column_stride(problem), out.device, False)
        vectors = problem.a_vector, problem.b_vector, problem.out_vector
        a_vector, b_vector, out_vector = [16 if copy else own for copy, own in zip(copied, vectors, strict=True)]
        a_pitch, b_pitch = (0 if copied[0] else problem.a_pitch), (0 if copied[1] else problem.b_pitch)
        padded = problem._replace(
            a_inner=problem.a_inner or (copied[0] and copied_row_major(a)),
            a_vector=a_vector,
            b_vector=b_vector,
            out_vector=out_vector,
            a_pitch=a_pitch,
            b_pitch=b_pitch,
        )
        sizes = [x.numel() * x.dtype.itemsize for x, copy in zip(tensors, copied, strict=True) if copy]
        return select.microseconds(padded, out.device, by_tma and copied == can) + cost_pointers.copying(sizes, fixed)

    return min(choices, key=time)


def copied_row_major(a: torch.Tensor) -> bool:
    """Return whether a copy of the first operand is row-major whatever its layout, since few rows are soon copied."""
    return a.shape[0] * a.shape[1] <= limits().copied_rows


def padded_copy(tensor: torch.Tensor, row_major: bool = False) -> torch.Tensor:
    """Copy a tensor to rows that start at multiples of 16 bytes, with zeros between them.

    A column-major tensor keeps its layout, with padded columns, unless the copy is to be `row_major`.
    """
    copy = padded_like(tensor, row_major)
    copy_padded(tensor, copy, max(copy.stride()[1:]))
    return copy


def copy_padded(source: torch.Tensor, out: torch.Tensor, width: int | None = None) -> None:
    """Copy (batches, rows, columns) to `out`, and fill each row of `out` with zeros up to `width` elements."""
    if out.stride(2) != 1 == out.stride(1):
        source, out = source.mT, out.mT
    batches, rows, columns = source.shape
    width = width or columns
    block = min(power_of_2(width), 512)
    height = max(1, min(power_of_2(batches * rows), limits().copied_elements // block))
    vector = 16 // source.dtype.itemsize
    source_multiple, out_multiple = [
        math.gcd(vector, size, *(stride for dim, stride in enumerate(x.stride()[:2]) if x.shape[dim] > 1))
        for x, size in ((source, columns), (out, width))
    ]
    copy_rows[(-(-batches * rows // height) * -(-width // block),)](
        *(source, out),
        source_strides=MatrixStrides(*source.stride()),
        out_strides=MatrixStrides(*out.stride()),
        batches=batches,
        rows=rows,
        columns=columns,
        width=width,
        INDEX=offset_type(source, out),
        SOURCE_MULTIPLE=source_multiple,
        OUT_MULTIPLE=out_multiple,
        BLOCK_M=height,
        BLOCK_N=block,
    )


def padded_like(tensor: torch.Tensor, row_major: bool = False) -> torch.Tensor:
    """Allocate a tensor of the same shape whose rows start at multiples of 16 bytes.

    A column-major tensor keeps its layout, with columns that start so, unless the result is to be `row_major`.
    """
    if not row_major and tensor.stride(1) == 1 != tensor.stride(2):
        return padded_like(tensor.mT).mT
    *rows, columns = tensor.shape
    return empty((*rows, padded_width(columns, tensor.dtype)), tensor.dtype, tensor.device)[..., :columns]


def padded_width(columns: int, dtype: torch.dtype) -> int:
    """Return the row stride, in elements, of rows of `columns` padded to a multiple of 16 bytes."""
    vector = 16 // dtype.itemsize
    return -(-columns // vector) * vector
