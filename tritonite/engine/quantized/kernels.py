"""Products of quantised matrices by tensor cores: a tile of one matrix's rows times another's, one tile a program.

Both operands have K as their last dimension, as x and the weight of a linear layer have. Each kernel ends with the
epilogue of `engine.gemm`, or with split-K stores the sums of a slice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.gemm.kernels.arguments import EpilogueArguments, MatrixStrides, ResultTile
from tritonite.engine.gemm.kernels.epilogue import epilogue, own_index, store, tile_at
from tritonite.engine.quantized.formats import decoded_float8, less_constant, unpacked_int4
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@triton.jit
def own_tile(M, N, META: tl.constexpr):
    """Return the tile of the result that a program computes."""
    _, row, column = own_index(M, N, META.block_m, META.block_n, META.group_m, META.index)
    return tile_at(tl.full((), 0, META.index), row, column, M, N, META.block_m, META.block_n, META.index)


@triton.jit
def slice_of_k(K, steps, BLOCK: tl.constexpr, INDEX: tl.constexpr):
    """Return where along K a program's slice of `steps` blocks begins and ends."""
    begin = tl.program_id(1).to(INDEX) * steps * BLOCK
    return begin, tl.minimum(begin + steps * BLOCK, K)


@triton.jit
def block_of(pointer, rows, row_mask, inner, end, strides, EVERY: tl.constexpr):
    """Load the (rows, inner) block of a matrix, 0 from `end` along K on; with EVERY no index reaches the end."""
    pointers = pointer + (rows * strides.row)[:, None] + (inner * strides.column)[None, :]
    mask = row_mask[:, None]
    if not EVERY:
        mask &= (inner < end)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def scales_of(pointer, rows, row_mask, group, strides, ROWS: tl.constexpr):
    """Load a scale for each of `rows`, in one group along K; ROWS neighbours share a scale."""
    return tl.load(pointer + (rows // ROWS) * strides.row + group * strides.column, mask=row_mask, other=0.0)


@triton.jit
def write(total, out, tile, strides, added, META: tl.constexpr, ACTIVATION: tl.constexpr = None):
    """Store the epilogue of a tile's sums, or with split-K the sums of a slice, which is a batch of `out`."""
    if META.split:
        batch = tl.program_id(1).to(META.index)
        tile = ResultTile(batch, tile.rows, tile.columns, tile.row_mask, tile.column_mask)
    else:
        total = epilogue(total, tile, EpilogueArguments(added, 1.0, 1.0), META, ACTIVATION)
    store(total, out, MatrixStrides(strides.batch, strides.row, strides.column), tile)


@libentry()
@triton.jit(do_not_specialize=["M", "steps"])
def multiply_float8(a, b, out, a_scale, b_scale, strides, added, M, N, K, steps, META: tl.constexpr):
    """Multiply a tile of a (M, K) by b (N, K) transposed, both float8, with a scale for each block of K.

    Each block's product has an accumulator of its own, which is multiplied by both scales and added in float32
    (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3). Operands that arrive as bytes, on devices without
    float8, are decoded in registers.

    Args:
        a_scale: float32, (M / META.a_rows, K / META.group_k), both rounded up; None if META.a_rows is 0.
        b_scale: the same for b.
        strides: `Float8Strides`.
        added: `EpilogueOperands`.
        steps: blocks of K in a slice of split-K.
        META: `Float8Meta`.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_K: tl.constexpr = META.block_k
    A_FORMAT: tl.constexpr = META.a_format
    B_FORMAT: tl.constexpr = META.b_format
    tile = own_tile(M, N, META)
    begin, end = slice_of_k(K, steps, BLOCK_K, META.index)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(begin, end, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        x = block_of(a, tile.rows, tile.row_mask, inner, end, strides.a, META.even_k)
        y = block_of(b, tile.columns, tile.column_mask, inner, end, strides.b, META.even_k)
        if A_FORMAT != "":
            x = decoded_float8(x, A_FORMAT)
        if B_FORMAT != "":
            y = decoded_float8(y, B_FORMAT)
        product = tl.dot(x, tl.trans(y), out_dtype=tl.float32)
        if META.a_rows > 0:
            group = k // META.group_k
            product *= scales_of(a_scale, tile.rows, tile.row_mask, group, strides.a_scale, META.a_rows)[:, None]
            product *= scales_of(b_scale, tile.columns, tile.column_mask, group, strides.b_scale, META.b_rows)[None, :]
        total += product
    write(total, out, tile, strides.out, added, META)


@libentry()
@triton.jit(do_not_specialize=["N", "steps"])
def multiply_int4(weight, x, out, scales, zeros, strides, added, M, N, K, steps, META: tl.constexpr):
    """Multiply a tile of a packed weight (M, K) by x (N, K) transposed; numbers are dequantised in registers.

    The weight is the first operand, which tensor cores read from registers.

    Args:
        weight: uint8, (M, K / 2).
        scales: x's dtype, (M, K / META.group_k), rounded up.
        zeros: the same, or None for zeros of 8.
        strides: `Int4Strides`.
        added: `EpilogueOperands`.
        steps: blocks of K in a slice of split-K.
        META: `Int4Meta`.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_K: tl.constexpr = META.block_k
    DTYPE: tl.constexpr = x.dtype.element_ty
    tile = own_tile(M, N, META)
    # In bytes of the weight, because Triton loses the alignment of a quotient.
    begin, end = slice_of_k(K // 2, steps, BLOCK_K // 2, META.index)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(begin, end, BLOCK_K // 2):
        pairs = first + tl.arange(0, BLOCK_K // 2)
        inner = 2 * first + tl.arange(0, BLOCK_K)
        group = 2 * first // META.group_k
        packed = block_of(weight, tile.rows, tile.row_mask, pairs, end, strides.weight, META.even_k)
        scale = scales_of(scales, tile.rows, tile.row_mask, group, strides.scales, 1)
        y = block_of(x, tile.columns, tile.column_mask, inner, 2 * end, strides.x, META.even_k)
        numbers = unpacked_int4(packed, DTYPE)
        if zeros is None:
            numbers = less_constant(numbers, 8.0)
        else:
            numbers -= scales_of(zeros, tile.rows, tile.row_mask, group, strides.zeros, 1)[:, None]
        total = tl.dot(numbers * scale[:, None], tl.trans(y), total, out_dtype=tl.float32)
    write(total, out, tile, strides.out, added, META)


@libentry()
@triton.jit(do_not_specialize=["N", "steps"])
def multiply_int8(weight, x, out, strides, added, M, N, K, steps, ACTIVATION: tl.constexpr, META: tl.constexpr):
    """Multiply a tile of an int8 weight (M, K) by floats x (N, K) transposed; numbers are converted in registers.

    Args:
        strides: `Int8Strides`.
        added: `EpilogueOperands`.
        steps: blocks of K in a slice of split-K.
        ACTIVATION: the epilogue's function, or None.
        META: `QuantizedMeta`.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_K: tl.constexpr = META.block_k
    tile = own_tile(M, N, META)
    begin, end = slice_of_k(K, steps, BLOCK_K, META.index)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(begin, end, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        numbers = block_of(weight, tile.rows, tile.row_mask, inner, end, strides.weight, META.even_k)
        y = block_of(x, tile.columns, tile.column_mask, inner, end, strides.x, META.even_k)
        total = tl.dot(numbers.to(y.dtype), tl.trans(y), total, input_precision="ieee", out_dtype=tl.float32)
    write(total, out, tile, strides.out, added, META, ACTIVATION)
