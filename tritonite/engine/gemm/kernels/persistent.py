"""Triton's persistent kernels of products, which load by tensor descriptors: many tiles a program."""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.gemm.kernels.arguments import ResultTile
from tritonite.engine.gemm.kernels.epilogue import (
    clamped_end,
    clamped_start,
    epilogue_of_float64,
    store,
    tile_index,
)
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@triton.jit
def _load_tile(descriptor, batch, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Load a (ROWS, COLUMNS) tile by a descriptor of (batch, row, column), or TRANSPOSED (batch, column, row)."""
    if TRANSPOSED:
        tile = descriptor.load([batch, column, row]).reshape(COLUMNS, ROWS).T
    else:
        tile = descriptor.load([batch, row, column]).reshape(ROWS, COLUMNS)
    return tile


@triton.jit
def _add_block(total, a, b, a_batch, b_batch, row, column, inner, META: tl.constexpr):
    """Load a block of each operand at index `inner` along K, and add their product to `total`."""
    x = _load_tile(a, a_batch, row, inner, META.block_m, META.block_k, META.a_transposed)
    y = _load_tile(b, b_batch, inner, column, META.block_k, META.block_n, META.b_transposed)
    return tl.dot(x, y, total, META.precision, max_num_imprecise_acc=META.imprecise, out_dtype=META.accumulator)


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "K", "steps", "splits", "programs", "last_row", "last_column"])
def multiply_persistent(
    a,
    b,
    out,
    strides,
    added,
    batches,
    M,
    N,
    K,
    steps,
    splits,
    programs,
    last_row,
    last_column,
    alpha: tl.float64,
    beta: tl.float64,
    ACTIVATION: tl.constexpr,
    META: tl.constexpr,
):
    """Multiply persistently: each of `programs` programs has every `programs`-th tile, as in Triton's tutorial.

    a and b are tensor descriptors of 3 dimensions. `out` is one, too, or with its `strides` a pointer. With META.split
    each of `splits` slices of K, of `steps` blocks, has a result of its own. No tile starts after `last_row` and
    `last_column` (`clamped_start`). `added` is `EpilogueOperands`, META is `PersistentMeta`.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_K: tl.constexpr = META.block_k
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), splits * batches * tiles_m * tiles_n, programs, flatten=True):
        matrix = tile // (tiles_m * tiles_n)
        batch, first, last = matrix % batches, 0, tl.cdiv(K, BLOCK_K)
        if META.split:
            first = matrix // batches * steps
            last = tl.minimum(first + steps, last)
        row, column = tile_index(tile % (tiles_m * tiles_n), tiles_m, tiles_n, META.group_m)
        row, column = clamped_start(row, BLOCK_M, last_row), clamped_start(column, BLOCK_N, last_column)
        total = tl.zeros((BLOCK_M, BLOCK_N), META.accumulator)
        for step in range(first, last):
            total = _add_block(total, a, b, batch, batch, row, column, step * BLOCK_K, META)
        subtiles = (total,)
        if META.split_store:
            subtiles = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        WIDTH: tl.constexpr = BLOCK_N // len(subtiles)
        rows = row.to(META.index) + tl.arange(0, BLOCK_M)
        for i in tl.static_range(len(subtiles)):
            columns = column.to(META.index) + i * WIDTH + tl.arange(0, WIDTH)
            result = subtiles[i]
            if not META.split:
                own = ResultTile(batch.to(META.index), rows, columns, rows < M, columns < N)
                result = epilogue_of_float64(result, own, added, alpha, beta, META, ACTIVATION)
            if strides is not None:
                own = ResultTile(matrix.to(META.index), rows, columns, rows < M, columns < N)
                store(result, out, strides, own)
            else:
                out.store([matrix, row, column + i * WIDTH], result.to(META.result).reshape(1, BLOCK_M, WIDTH))


@triton.jit
def _tiles_of_groups(ends, M, GROUPS: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr, MULTIPLE: tl.constexpr):
    """Return each group's first row, end row, first tile and number of tiles, as blocks of LANES.

    `ends` has the end rows of GROUPS groups of M rows. A group's first tile starts at a multiple of MULTIPLE, at most
    the group's first row.
    """
    lane = tl.arange(0, LANES)
    end = clamped_end(tl.load(ends + lane, mask=lane < GROUPS, other=0), M)
    begin = clamped_end(tl.load(ends + lane - 1, mask=(lane > 0) & (lane < GROUPS), other=0), M)
    tiles = tl.where(begin < end, tl.cdiv(end - begin // MULTIPLE * MULTIPLE, BLOCK_M), 0)
    return begin, end, tl.cumsum(tiles, axis=0) - tiles, tiles


@libentry()
@triton.jit(do_not_specialize=["M", "programs"])
def multiply_groups(a, b, out, ends, scales, strides, M, N, K, programs, META: tl.constexpr):
    """Multiply rows of `a` by the matrix of `b` of their group, persistently. Group i ends at row ends[i].

    a and b are tensor descriptors, `out` is a pointer with `strides`. `scales` is `GroupScales` or None. META is
    `GroupsMeta`.
    """
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_N: tl.constexpr = META.block_n
    BLOCK_K: tl.constexpr = META.block_k
    begin, end, first, tiles = _tiles_of_groups(ends, M, META.groups, META.lanes, BLOCK_M, META.multiple)
    tiles_m, tiles_n = tl.sum(tiles, axis=0), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=True):
        row, column = tile_index(tile, tiles_m, tiles_n, META.group_m)
        own = (first <= row) & (row < first + tiles)
        group = tl.sum(tl.where(own, tl.arange(0, META.lanes), 0), axis=0)
        group_begin, group_end = tl.sum(tl.where(own, begin, 0), axis=0), tl.sum(tl.where(own, end, 0), axis=0)
        row -= tl.sum(tl.where(own, first, 0), axis=0)
        row, column = group_begin // META.multiple * META.multiple + row * BLOCK_M, column * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), META.accumulator)
        for step in range(tl.cdiv(K, BLOCK_K)):
            total = _add_block(total, a, b, 0, group, row, column, step * BLOCK_K, META)
        rows = row.to(META.index) + tl.arange(0, BLOCK_M)
        columns = column.to(META.index) + tl.arange(0, BLOCK_N)
        row_mask = (group_begin <= rows) & (rows < group_end)
        if scales is not None:
            of_group = scales.columns + group.to(META.index) * scales.group_stride
            total *= tl.load(scales.rows + rows, mask=row_mask, other=0.0)[:, None]
            total *= tl.load(of_group + columns, mask=columns < N, other=0.0)[None, :]
        store(total, out, strides, ResultTile(0, rows, columns, row_mask, columns < N))
