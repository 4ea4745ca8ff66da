"""Conversions to float8 with one scale for a tensor, and between 16-bit floats and packed 4-bit integers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.engine.gemm.kernels.arguments import MatrixStrides
from tritonite.engine.gemm.kernels.epilogue import own_index, store, tile_at
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.engine.quantized.formats import less_constant, nibbles_of_int4
from tritonite.engine.quantized.table import quantized_table
from tritonite.engine.rows.declare import Reduction, reduced
from tritonite.language.math import maximum_nan, true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.contract import empty, empty_strided
from tritonite.runtime.libentry import libentry

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# Bytes that rows of a transposed float8 copy are a multiple of, so that TMA can address them.
_ALIGNMENT = 16


class _CastStrides(NamedTuple):
    """`MatrixStrides` of a matrix, of its cast and of its transposed cast."""

    x: Any
    out: Any
    transposed: Any


@triton.jit
def _magnitude(x):
    return tl.abs(x)


@triton.jit
def _only(state, count):
    return state


_LARGEST_MAGNITUDE = Reduction((0.0,), _magnitude, maximum_nan, _only)


@libentry()
@triton.jit(do_not_specialize=["M"])
def cast_float8(
    x,
    largest,
    out,
    transposed,
    scale,
    strides,
    M,
    N,
    LARGEST: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Divide a tile of x by its tensor's scale, clamp it to LARGEST, and store it as float8.

    The scale is the largest magnitude over LARGEST, or 1 if the quotient is no normal number.

    Args:
        largest: float32, the largest magnitude in x.
        out: (M, N), or None.
        transposed: the same values, whose strides are those of a transposed matrix; or None.
        scale: float32, one element, written.
        strides: `_CastStrides`.
    """
    wait_for_previous_launch()
    # An empty matrix has one program, which writes the scale.
    batch, row, column = own_index(tl.maximum(M, 1), tl.maximum(N, 1), BLOCK_M, BLOCK_N, 1, INDEX)
    tile = tile_at(batch, row, column, M, N, BLOCK_M, BLOCK_N, INDEX)
    factor = true_divide(tl.load(largest), tl.full((), LARGEST, tl.float32))
    factor = tl.where(factor < 1.1754943508222875e-38, 1.0, factor)
    tl.store(scale, factor, mask=tl.program_id(0) == 0)
    pointers = x + (tile.rows * strides.x.row)[:, None] + (tile.columns * strides.x.column)[None, :]
    mask = tile.row_mask[:, None] & tile.column_mask[None, :]
    value = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    value = true_divide(value, factor)
    # Comparisons are false for nan, which stays.
    value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    if out is not None:
        store(value, out, strides.out, tile)
    if transposed is not None:
        # The select keeps the copies' conversions apart: ptxas 12.8 loses float8 numbers that both copies store.
        store(tl.where(mask, value, 0.0), transposed, strides.transposed, tile)


def to_float8(
    x: torch.Tensor, dtype: torch.dtype, plain: bool, transposed: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Return a matrix in float8 as it is and transposed, None where not wanted, and its scale, float32 of shape (1,).

    The transposed matrix is (columns, rows), row-major, with rows of a multiple of 16 bytes.
    """
    M, N = x.shape
    scale = empty((1,), torch.float32, x.device)
    out = empty((M, N), dtype, x.device) if plain else None
    width = -(-M // _ALIGNMENT) * _ALIGNMENT
    other = empty_strided((N, M), (width, 1), dtype, x.device) if transposed else None
    (largest,) = reduced(_LARGEST_MAGNITUDE, (x,), None, False, (torch.float32,), (), torch.float32)
    table = quantized_table()
    # Square tiles, because rows and columns are both written along.
    side = 1 << (table.elements.bit_length() - 1) // 2
    rows, columns = min(power_of_2(M), side), min(power_of_2(N), side)
    written = [each for each in (out, other) if each is not None]
    cast_float8[(max(1, -(-M // rows) * -(-N // columns)),)](
        *(x, largest, out, None if other is None else other.t(), scale),
        strides=_CastStrides(*[_strides(each) for each in (x, out, None if other is None else other.t())]),
        M=M,
        N=N,
        LARGEST=_LARGEST[dtype],
        INDEX=offset_type(x, *written),
        BLOCK_M=rows,
        BLOCK_N=columns,
        num_warps=4,
    )
    return out, other, scale


def _strides(tensor: torch.Tensor | None) -> MatrixStrides:
    return MatrixStrides(0, 0, 0) if tensor is None else MatrixStrides(0, *tensor.stride())


@triton.jit
def _pairs(weight, rows, row_mask, pairs, end, strides):
    """Load the numbers at even and at odd indices along a row, as float32; 0 from `end` pairs on."""
    mask = row_mask[:, None] & (pairs < end)[None, :]
    pointers = weight + (rows * strides.row)[:, None] + (2 * pairs * strides.column)[None, :]
    even = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(pointers + strides.column, mask=mask, other=0.0).to(tl.float32)
    return even, odd


@triton.jit
def _rounded(x):
    """Return x rounded to the nearest integer, ties to even, for magnitudes below 2**22; not all devices have rint."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _nearest(x, scale, zero):
    """Return the integers of 0 to 15 nearest to x / scale + zero, where `zero` is an integer."""
    number = _rounded(true_divide(x, scale)) + zero
    return tl.minimum(tl.maximum(number, 0.0), 15.0).to(tl.uint8)


@libentry()
@triton.jit(do_not_specialize=["N"])
def pack_int4(
    weight,
    packed,
    scales,
    zeros,
    strides,
    N,
    half,
    half_group,
    groups,
    INDEX: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantise one group of some rows to 4 bits, in two passes: the range of the group, then its numbers.

    Args:
        weight: (N, 2 * half), with `strides`.
        packed: uint8, (N, half), contiguous.
        scales: (N, groups), contiguous.
        zeros: the same; or None for zeros of 8 and a scale of the largest magnitude / 7.
        half_group: bytes in a group.
    """
    wait_for_previous_launch()
    rows = (tl.program_id(0) // groups).to(INDEX) * ROWS + tl.arange(0, ROWS)
    group = (tl.program_id(0) % groups).to(INDEX)
    row_mask = rows < N
    begin = group * half_group
    end = tl.minimum(begin + half_group, half)
    low, high = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, COLUMNS):
        even, odd = _pairs(weight, rows, row_mask, start + tl.arange(0, COLUMNS), end, strides)
        low, high = tl.minimum(low, tl.minimum(even, odd)), tl.maximum(high, tl.maximum(even, odd))
    least, most = tl.min(low, axis=1), tl.max(high, axis=1)
    if zeros is None:
        scale = true_divide(tl.maximum(-least, most), tl.full((ROWS,), 7.0, tl.float32))
    else:
        scale = true_divide(most - least, tl.full((ROWS,), 15.0, tl.float32))
    scale = scale.to(scales.dtype.element_ty)
    # Numbers are those nearest to the weight under the rounded scale.
    wide = scale.to(tl.float32)
    wide = tl.where(wide == 0.0, 1.0, wide)
    tl.store(scales + rows * groups + group, wide.to(scales.dtype.element_ty), mask=row_mask)
    zero = tl.full((ROWS,), 8.0, tl.float32)
    if zeros is not None:
        zero = tl.minimum(_rounded(true_divide(-least, wide)), 15.0)
        tl.store(zeros + rows * groups + group, zero.to(zeros.dtype.element_ty), mask=row_mask)
    for start in range(begin, end, COLUMNS):
        pairs = start + tl.arange(0, COLUMNS)
        even, odd = _pairs(weight, rows, row_mask, pairs, end, strides)
        byte = _nearest(even, wide[:, None], zero[:, None]) | (_nearest(odd, wide[:, None], zero[:, None]) << 4)
        mask = row_mask[:, None] & (pairs < end)[None, :]
        tl.store(packed + (rows * half)[:, None] + pairs[None, :], byte, mask=mask)


def packed_int4(
    weight: torch.Tensor, group: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return a matrix of an even number of columns in 4 bits: two numbers a byte, scales and zeros of groups."""
    N, K = weight.shape
    half, groups = K // 2, -(-K // group)
    packed = empty((N, half), torch.uint8, weight.device)
    scales = empty((N, groups), weight.dtype, weight.device)
    zeros = None if symmetric else empty((N, groups), weight.dtype, weight.device)
    if N and K:
        table = quantized_table()
        columns = min(power_of_2(min(half, group // 2)), table.columns)
        rows = min(power_of_2(N), max(1, table.elements // columns))
        pack_int4[(-(-N // rows) * groups,)](
            *(weight, packed, scales, zeros),
            strides=_strides(weight),
            N=N,
            half=half,
            half_group=min(half, group // 2),
            groups=groups,
            INDEX=offset_type(weight),
            ROWS=rows,
            COLUMNS=columns,
            num_warps=4,
        )
    return packed, scales, zeros


class _PackedStrides(NamedTuple):
    """`MatrixStrides` of packed numbers, of their scales and of their zeros."""

    packed: Any
    scales: Any
    zeros: Any


@triton.jit
def _per_group(pointer, rows, groups, strides, mask):
    return tl.load(pointer + (rows * strides.row)[:, None] + (groups * strides.column)[None, :], mask=mask, other=0.0)


@libentry()
@triton.jit(do_not_specialize=["N"])
def unpack_int4(
    packed,
    scales,
    zeros,
    out,
    strides,
    N,
    half,
    half_group,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store (numbers - zeros) * scales for a tile of bytes, two numbers each.

    `out` is (N, 2 * half), contiguous. `strides` are `_PackedStrides`. The zeros are 8 without a tensor of them.
    """
    wait_for_previous_launch()
    DTYPE: tl.constexpr = out.dtype.element_ty
    batch, row, column = own_index(N, half, BLOCK_M, BLOCK_N, 1, INDEX)
    tile = tile_at(batch, row, column, N, half, BLOCK_M, BLOCK_N, INDEX)
    mask = tile.row_mask[:, None] & tile.column_mask[None, :]
    pointers = packed + (tile.rows * strides.packed.row)[:, None] + (tile.columns * strides.packed.column)[None, :]
    low, high = nibbles_of_int4(tl.load(pointers, mask=mask, other=0), DTYPE)
    groups = tile.columns // half_group
    scale = _per_group(scales, tile.rows, groups, strides.scales, mask)
    if zeros is None:
        low, high = less_constant(low, 8.0), less_constant(high, 8.0)
    else:
        zero = _per_group(zeros, tile.rows, groups, strides.zeros, mask)
        low, high = low - zero, high - zero
    value = tl.interleave(low * scale, high * scale)
    columns = 2 * column.to(INDEX) * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
    pointers = out + (tile.rows * 2 * half)[:, None] + columns[None, :]
    tl.store(pointers, value, mask=tile.row_mask[:, None] & (columns < 2 * half)[None, :])


def unpacked(packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int) -> torch.Tensor:
    """Return the matrix that packed numbers stand for, in the dtype of their scales."""
    N, half = packed.shape
    out = empty((N, 2 * half), scales.dtype, packed.device)
    if N and half:
        table = quantized_table()
        columns = min(power_of_2(half), table.columns)
        rows = min(power_of_2(N), max(1, table.elements // columns))
        unpack_int4[(-(-N // rows) * -(-half // columns),)](
            *(packed, scales, zeros, out),
            strides=_PackedStrides(*[_strides(each) for each in (packed, scales, zeros)]),
            N=N,
            half=half,
            half_group=min(half, group // 2),
            INDEX=offset_type(packed, out),
            BLOCK_M=rows,
            BLOCK_N=columns,
            **{"num_warps": 4, **devices.current.options},
        )
    return out
