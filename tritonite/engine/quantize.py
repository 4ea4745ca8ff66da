"""Quantisation of rows, or of a formula of two tensors' rows, to float8_e4m3fn or int8.

`language/quantize.py` has the formulas of scales and rounding. `quantize_tensor` is the host function. A program of
`quantize_rows` handles some rows: whole ones if a scale belongs to a row, else one chunk of each. A computed scale of a
whole tensor follows from its largest magnitude, which a reduction before finds.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.iteration import as_matrix, common_device, offset_type, power_of_2
from tritonite.engine.rows.declare import Reduction, reduced
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.quantize import BLOCK, block_maxima, inverse_scale, quantized, scale_of
from tritonite.runtime.contract import empty, zeros
from tritonite.runtime.libentry import libentry


class Quantization(NamedTuple):
    """The quantised values' dtype, granularity, and scale, which is None where scales are computed."""

    dtype: torch.dtype
    granularity: str
    scale: torch.Tensor | None

    @property
    def reduces(self) -> bool:
        """Return whether one scale is computed for the whole tensor."""
        return self.granularity == "tensor" and self.scale is None


@triton.jit
def magnitude(x):
    """Return |x|, 0 for nan, which counts for nothing as in scales of rows."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def larger(a, b):
    """Return the larger of two magnitudes."""
    return tl.maximum(a, b)


@triton.jit
def only(state, count):
    """Return the state of a reduction as its result."""
    return state


_LARGEST = Reduction((0.0,), magnitude, larger, only)


@dataclass(frozen=True)
class QuantizeMeta:
    """The compile-time parameters of `quantize_rows`.

    `formula` computes a value from those of the operands, in float32, and from `statics`; None for one operand. A
    program handles `rows` rows in `chunks` chunks of `columns` elements. With no chunks it reads its rows twice, chunk
    by chunk, because registers do not hold them. `most` is the largest value of the quantised dtype. Triton's caches
    identify a function within an object by its name alone, so `__repr__` includes a digest of the formula's source.
    """

    index: Any
    rows: int
    columns: int
    chunks: int
    granularity: str
    most: float
    formula: Any = None
    statics: tuple[Any, ...] = ()

    @functools.cached_property
    def _digest(self) -> str:
        values = [getattr(self, field.name) for field in fields(self)]
        return hashlib.sha256(repr((values, getattr(self.formula, "cache_key", ""))).encode()).hexdigest()[:24]

    def __repr__(self) -> str:
        return f"QuantizeMeta_{self._digest}"


@triton.jit
def _values(operands, row, index, mask, row_strides, column_strides, META: tl.constexpr):
    """Return a block of the formula's values as float32, rounded to the operands' dtype; 0 outside the mask."""
    ELEMENT: tl.constexpr = operands[0].dtype.element_ty
    offset = row[:, None] * row_strides[0] + index[None, :] * column_strides[0]
    value = tl.load(operands[0] + offset, mask=mask, other=0).to(tl.float32)
    if len(operands) > 1:
        offset = row[:, None] * row_strides[1] + index[None, :] * column_strides[1]
        other = tl.load(operands[1] + offset, mask=mask, other=0).to(tl.float32)
        value = META.formula(*((value, other) + META.statics)).to(ELEMENT).to(tl.float32)
    return value


@libentry()
@triton.jit
def quantize_rows(
    operands,
    out,
    scales,
    largest,
    row_strides,
    column_strides,
    n_rows,
    n_columns,
    META: tl.constexpr,
):
    """Quantise META.rows rows; `scales` are those stored, or read if one is given for the tensor.

    `largest` is the largest magnitude of the tensor, float32, or None where its scale is not computed.
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    ROWS: tl.constexpr = META.rows
    COLUMNS: tl.constexpr = META.columns
    CHUNKS: tl.constexpr = META.chunks
    MOST: tl.constexpr = META.most
    OUT: tl.constexpr = out.dtype.element_ty
    strides = row_strides, column_strides
    # One dimension of the grid, because a long row has more chunks than the second may have programs.
    programs_per_row = 1 if META.granularity == "token" else tl.cdiv(n_columns, COLUMNS)
    row = (tl.program_id(0) // programs_per_row).to(INDEX) * ROWS + tl.arange(0, ROWS)
    row_mask = row < n_rows
    column = tl.arange(0, COLUMNS).to(INDEX)
    out_rows = out + row[:, None] * n_columns
    if META.granularity == "token":
        maxima = tl.zeros((ROWS, COLUMNS), tl.float32)
        held = ()
        if CHUNKS > 0:
            for chunk in tl.static_range(CHUNKS):
                index = chunk * COLUMNS + column
                mask = row_mask[:, None] & (index < n_columns)[None, :]
                held = held + (_values(operands, row, index, mask, *strides, META),)
                maxima = tl.maximum(maxima, tl.abs(tl.where(mask, held[chunk], 0.0)))
        else:
            for begin in range(0, n_columns, COLUMNS):
                index = begin + column
                mask = row_mask[:, None] & (index < n_columns)[None, :]
                value = _values(operands, row, index, mask, *strides, META)
                maxima = tl.maximum(maxima, tl.abs(tl.where(mask, value, 0.0)))
        scale = scale_of(tl.max(maxima, 1), MOST)
        tl.store(scales + row, scale, mask=row_mask)
        factor = inverse_scale(scale)[:, None]
        if CHUNKS > 0:
            for chunk in tl.static_range(CHUNKS):
                index = chunk * COLUMNS + column
                mask = row_mask[:, None] & (index < n_columns)[None, :]
                tl.store(out_rows + index[None, :], quantized(held[chunk] * factor, MOST, OUT), mask=mask)
        else:
            for begin in range(0, n_columns, COLUMNS):
                index = begin + column
                mask = row_mask[:, None] & (index < n_columns)[None, :]
                value = _values(operands, row, index, mask, *strides, META)
                tl.store(out_rows + index[None, :], quantized(value * factor, MOST, OUT), mask=mask)
    else:
        first = (tl.program_id(0) % programs_per_row).to(INDEX) * COLUMNS
        index = first + column
        mask = row_mask[:, None] & (index < n_columns)[None, :]
        value = _values(operands, row, index, mask, *strides, META)
        if META.granularity == "block":
            BLOCKS: tl.constexpr = max(1, COLUMNS // BLOCK)
            scale = scale_of(block_maxima(tl.where(mask, value, 0.0), BLOCKS), MOST)
            block = first // BLOCK + tl.arange(0, BLOCKS)
            n_blocks = tl.cdiv(n_columns, BLOCK)
            pointers = scales + row[:, None] * n_blocks + block[None, :]
            tl.store(pointers, scale, mask=row_mask[:, None] & (block < n_blocks)[None, :])
            value = tl.reshape(value, (ROWS, BLOCKS, COLUMNS // BLOCKS)) * inverse_scale(scale)[:, :, None]
            value = tl.reshape(value, (ROWS, COLUMNS))
        elif largest is not None:
            # The magnitude of a formula is rounded as its values are.
            found = tl.load(largest + tl.arange(0, 1)).to(operands[0].dtype.element_ty).to(tl.float32)
            scale = scale_of(found, MOST)
            tl.store(scales + tl.arange(0, 1), scale, mask=tl.program_id(0) == 0)
            value = value * inverse_scale(scale)[:, None]
        else:
            value = value * inverse_scale(tl.load(scales))
        tl.store(out_rows + index[None, :], quantized(value, MOST, OUT), mask=mask)


def most_of(dtype: torch.dtype) -> float:
    """Return the largest value of a quantised dtype."""
    return float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def scales_shape(shape: torch.Size | tuple[int, ...], wanted: Quantization) -> tuple[int, ...] | None:
    """Return the shape of the scales that are computed for a tensor, or None where the scale is given."""
    if wanted.granularity == "tensor":
        return (1,) if wanted.reduces else None
    return (*shape[:-1], 1 if wanted.granularity == "token" else -(-shape[-1] // BLOCK.value))


def quantized_outputs(
    shape: torch.Size | tuple[int, ...], like: torch.Tensor, wanted: Quantization
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return memory for quantised values and their scales on a tensor's device; scales of empty rows are 0."""
    own = scales_shape(shape, wanted)
    values = empty(shape, wanted.dtype, like.device)
    make = empty if values.numel() else zeros
    return values, None if own is None else make(own, torch.float32, like.device)


def quantize_tensor(
    operands: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    scales: torch.Tensor | None,
    wanted: Quantization,
    formula: Any = None,
    statics: tuple[Any, ...] = (),
    maximum: Reduction = _LARGEST,
) -> None:
    """Quantise one tensor, or a formula of two of one shape, into `out` and `scales`, which are contiguous.

    `maximum` finds the formula's largest magnitude, for a computed scale of the tensor.
    """
    scale = wanted.scale if scales is None else scales
    assert scale is not None
    common_device((*operands, scale), (out,))
    if not out.numel():
        return
    largest = None
    if wanted.reduces:
        (largest,) = reduced(maximum, operands, None, False, (torch.float32,), (), torch.float32)
    operands = tuple([as_matrix(each) for each in operands])
    n_rows, n_columns = operands[0].shape
    tile = devices.current.row_elements
    columns = min(power_of_2(n_columns), max(BLOCK.value, tile // 2))
    n_chunks = -(-n_columns // columns)
    # Registers hold four tiles in float32.
    chunks = n_chunks if n_chunks * columns <= 4 * tile else 0
    by_token = wanted.granularity == "token"
    elements = columns * max(1, chunks) if by_token else columns
    rows = max(1, min(tile // 2 // elements, power_of_2(n_rows)))
    quantize_rows[(-(-n_rows // rows) * (1 if by_token else n_chunks),)](
        *(operands, out.view(n_rows, n_columns), scale, largest),
        *(tuple([each.stride(0) for each in operands]), tuple([each.stride(1) for each in operands])),
        *(n_rows, n_columns),
        META=QuantizeMeta(
            index=offset_type(*operands, out),
            rows=rows,
            columns=columns,
            chunks=chunks if by_token else 1,
            granularity=wanted.granularity,
            most=most_of(wanted.dtype),
            formula=formula,
            statics=statics,
        ),
        num_warps=4 if rows * elements <= tile // 2 else 8,
        **devices.current.options,
    )
