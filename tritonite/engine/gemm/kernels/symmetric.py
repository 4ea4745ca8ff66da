"""Triton's kernel for products of matrices with their transposes, X X^T, by tiles of the lower triangle.

A tile below the diagonal is stored twice, as it is and transposed. On the diagonal the lower triangle is stored twice.
The result is symmetric in every bit, for half the operations of a product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.gemm.kernels.arguments import ResultTile
from tritonite.engine.gemm.kernels.epilogue import (
    aligned_batches,
    aligned_sizes,
    aligned_strides,
    epilogue_of_float64,
    store,
    tile_at,
    triangle_index,
)
from tritonite.engine.gemm.kernels.pointers import add_blocks, columns_of, rows_of, zeros
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@triton.jit
def _store_twice(value, out, strides, tile, on_diagonal):
    """Store a tile and its transpose. on_diagonal says that both are one tile, of which the lower triangle is stored.

    Two threads sum an element of a tile on the diagonal and its mirror image, and tensor cores need not add in one
    order.
    """
    if on_diagonal:
        value = tl.where(tile.rows[:, None] >= tile.columns[None, :], value, tl.trans(value))
    else:
        mirrored = ResultTile(tile.batch, tile.columns, tile.rows, tile.column_mask, tile.row_mask)
        store(tl.trans(value), out, strides, mirrored)
    store(value, out, strides, tile)


@libentry()
@triton.jit
def multiply_symmetric(
    x,
    out,
    strides,
    added,
    N,
    K,
    alpha: tl.float64,
    beta: tl.float64,
    META: tl.constexpr,
):
    """Multiply a tile of the lower triangle of one batch's alpha * X X^T + beta * addend by tensor cores.

    Args:
        x: batches of (N, K) matrices.
        out: batches of symmetric (N, N) matrices.
        strides: `GemmStrides` of X, its transpose and the result.
        added: `EpilogueOperands`; the addend is symmetric, and only its lower triangle counts.
        alpha, beta: factors of the product and of the addend.
        META: `GemmMeta`, with square tiles.
    """
    wait_for_previous_launch()
    _, N, K = aligned_sizes(N, N, K, META)
    strides = aligned_strides(strides, META)
    tiles = tl.cdiv(N, META.block_m)
    count = tiles * (tiles + 1) // 2
    batch = (tl.program_id(0) // count).to(META.index)
    row, column = triangle_index(tl.program_id(0) % count, tiles, META.group_m)
    tile = tile_at(batch, row, column, N, N, META.block_m, META.block_n, META.index)
    begin = tl.full((), 0, META.index)
    rows = rows_of(x, batch, tile, strides.a, N, begin + K, META)
    columns = columns_of(x, batch, tile, strides.b, N, begin + K, META)
    total = add_blocks(zeros(META.block_m, META), rows, columns, begin, begin + K, META.even_k, META)
    total = epilogue_of_float64(total, tile, added, alpha, beta, META, None)
    # Rounded first: a transposed tile passes through shared memory.
    value = total.to(out.dtype.element_ty)
    _store_twice(value, out, aligned_batches(strides.out, META.out_multiple), tile, row == column)
