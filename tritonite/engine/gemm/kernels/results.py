"""Triton's kernels that write results without multiplying: the sums of split-K, and products without terms."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.gemm.kernels.epilogue import epilogue_of_float64, own_index, store, tile_at
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "splits"])
def reduce_split_k(
    partials,
    out,
    strides,
    added,
    width,
    batches,
    M,
    N,
    splits,
    alpha: tl.float64,
    beta: tl.float64,
    ACTIVATION: tl.constexpr,
    META: tl.constexpr,
    INDEX: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the partial products of `splits` slices of K in order, apply the epilogue and store the result.

    `partials` is (splits, batches, M, N) with a row stride of `width`. `strides` are the result's. SPLITS, at least
    `splits`, is a constant, so that all loads are in flight at once. META is `EpilogueMeta`.
    """
    wait_for_previous_launch()
    batch, row, column = own_index(M, N, BLOCK_M, BLOCK_N, 1, INDEX)
    tile = tile_at(batch, row, column, M, N, BLOCK_M, BLOCK_N, INDEX)
    mask = tile.row_mask[:, None] & tile.column_mask[None, :]
    pointers = partials + (batch * M + tile.rows)[:, None] * width + tile.columns[None, :]
    slice_stride = batches.to(INDEX) * M * width
    total = tl.load(pointers, mask=mask, other=0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pointers + split * slice_stride, mask=mask & (split < splits), other=0)
    total = epilogue_of_float64(total, tile, added, alpha, beta, META, ACTIVATION)
    store(total, out, strides, tile)


@libentry()
@triton.jit(do_not_specialize=["M"])
def write_epilogue(
    out,
    strides,
    added,
    M,
    N,
    alpha: tl.float64,
    beta: tl.float64,
    ACTIVATION: tl.constexpr,
    META: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store the epilogue of a product without terms, whose sums are 0. Reads neither operand."""
    wait_for_previous_launch()
    batch, row, column = own_index(M, N, BLOCK_M, BLOCK_N, 1, INDEX)
    tile = tile_at(batch, row, column, M, N, BLOCK_M, BLOCK_N, INDEX)
    total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    total = epilogue_of_float64(total, tile, added, alpha, beta, META, ACTIVATION)
    store(total, out, strides, tile)
