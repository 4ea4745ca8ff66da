"""Triton's kernels for batched products that load through pointers, of any layout: one tile a program.

There are three ways to add up:

- multiply_tiles: tensor cores multiply blocks of at least 16 rows and 16 elements along K
- multiply_short_k: outer products in registers, for a K of one block of less than 16 elements
- multiply_few_rows: a sum for each element of b's block and each of less than 16 rows, and a reduction along K

`multiply_strided_columns` is `multiply_tiles` for a second operand whose columns are no multiple of 16 bytes long.

Arguments of all of them:

    strides: `GemmStrides`.
    ends: int32, where along K each batch's group ends, or None. A group starts where the one before ends.
    added: `EpilogueOperands`; alpha and beta are its factors, and ACTIVATION its function or None.
    steps: blocks of K of a program: all of them, or with split-K those of a slice.
    terms: batches of a and b that are added to one result; `strides` has their batch strides.
    META: `GemmMeta`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritonite.engine.gemm.kernels.arguments import ResultTile
from tritonite.engine.gemm.kernels.epilogue import (
    aligned_batches,
    aligned_sizes,
    aligned_strides,
    clamped_end,
    epilogue_of_float64,
    own_index,
    store,
    tile_at,
    tile_index,
)
from tritonite.language.indices import aligned_to
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


class _Rows(NamedTuple):
    """Rows of a: the batch's pointer, indices of rows, a mask of those to load, strides across and along K."""

    pointer: Any
    rows: Any
    mask: Any
    stride: Any
    inner_stride: Any
    # Where loads along K end; from there on a block has zeros.
    end: Any


class _Columns(NamedTuple):
    """Columns of b: pointers to their first elements, a mask of those to load, and the stride along K."""

    pointers: Any
    mask: Any
    inner_stride: Any
    # Where loads along K end; from there on a block has zeros.
    end: Any


# Before the sums


@triton.jit
def _tile_at(batch, row, column, M, N, META: tl.constexpr):
    """Return the tile at `row` and `column` of the grid of tiles (`epilogue.tile_at`)."""
    tile = tile_at(batch, row, column, M, N, META.block_m, META.block_n, META.index)
    columns = tile.columns
    if not META.b_inner and META.b_multiple == 1:
        # Triton (3.6) would give a thread as many neighbouring columns as it stores at once. It loads them one by one
        # here, so the lanes of a warp would load from distant sectors. A contiguity of 1 would hide that columns are
        # contiguous at all, and each lane would load from another row.
        columns = tl.max_contiguous(columns, 2)
    return ResultTile(batch, tile.rows, columns, tile.row_mask, tile.column_mask)


@triton.jit
def _along_k(ends, batch, K, steps, META: tl.constexpr):
    """Return where along K a program begins and ends: at its slice, or at the group of its batch."""
    begin = tl.program_id(1).to(META.index) * steps * META.block_k
    end = tl.minimum(begin + steps * META.block_k, K)
    if ends is not None:
        begin = clamped_end(tl.load(ends + batch - 1, mask=batch > 0, other=0), K).to(META.index)
        end = clamped_end(tl.load(ends + batch), K).to(META.index)
    return begin, end


@triton.jit
def rows_of(a, batch, tile, strides, M, end, META: tl.constexpr):
    """Return a tile's rows of one batch of a.

    Zeros that pad a are loaded, too, because a mask that ends within a vector would split the load.
    """
    mask = tile.row_mask
    if META.a_padding > 1:
        if META.a_inner:
            end = tl.cdiv(end, META.a_padding) * META.a_padding
        else:
            mask = tile.rows < tl.cdiv(M, META.a_padding) * META.a_padding
    pointer = a + batch * aligned_to(strides.batch, META.a_multiple)
    return _Rows(pointer, tile.rows, mask, strides.row, strides.column, end)


@triton.jit
def columns_of(b, batch, tile, strides, N, end, META: tl.constexpr):
    """Return a tile's columns of one batch of b, with zeros that pad b as in `rows_of`."""
    mask = tile.column_mask
    if META.b_padding > 1:
        if META.b_inner:
            end = tl.cdiv(end, META.b_padding) * META.b_padding
        else:
            mask = tile.columns < tl.cdiv(N, META.b_padding) * META.b_padding
    pointers = b + batch * aligned_to(strides.batch, META.b_multiple) + (tile.columns * strides.column)[None, :]
    return _Columns(pointers, mask, strides.row, end)


# Blocks of operands


@triton.jit
def _block_of_a(a, inner, EVERY: tl.constexpr, STRIDED: tl.constexpr):
    """Load a (rows, inner) block of `_Rows` at indices `inner` along K; with EVERY none reaches the end.

    Where a is STRIDED in both dimensions the block is loaded transposed: otherwise Triton (3.6) has the threads of a
    warp load from different rows.
    """
    if STRIDED:
        mask = a.mask[None, :]
        if not EVERY:
            mask &= (inner < a.end)[:, None]
        pointers = (a.pointer + inner * a.inner_stride)[:, None] + (a.rows * a.stride)[None, :]
        block = tl.trans(tl.load(pointers, mask=mask, other=0.0))
    else:
        mask = a.mask[:, None]
        if not EVERY:
            mask &= (inner < a.end)[None, :]
        pointers = (a.pointer + inner * a.inner_stride)[None, :] + (a.rows * a.stride)[:, None]
        block = tl.load(pointers, mask=mask, other=0.0)
    return block


@triton.jit
def _block_of_b(b, inner, EVERY: tl.constexpr):
    """Load an (inner, columns) block of `_Columns` at indices `inner` along K; with EVERY none reaches the end."""
    mask = b.mask[None, :]
    if not EVERY:
        mask &= (inner < b.end)[:, None]
    return tl.load(b.pointers + (inner * b.inner_stride)[:, None], mask=mask, other=0.0)


# Sums


@triton.jit
def zeros(ROWS: tl.constexpr, META: tl.constexpr):
    """Return sums of no products: ROWS rows as wide as a tile."""
    COLUMNS: tl.constexpr = META.block_n
    return tl.zeros((ROWS, COLUMNS), META.accumulator)


@triton.jit
def _dot(x, y, total, META: tl.constexpr):
    return tl.dot(x, y, total, META.precision, max_num_imprecise_acc=META.imprecise, out_dtype=META.accumulator)


@triton.jit
def add_blocks(total, a, b, begin, end, EVERY: tl.constexpr, META: tl.constexpr):
    """Add the products of blocks along K from `begin` to `end` to a tile's sums, by tensor cores.

    Elements loaded by less than 4 bytes cannot be copied asynchronously. With META.prefetch_a and META.prefetch_b the
    next block is loaded to registers while the one before is multiplied.
    """
    BLOCK_K: tl.constexpr = META.block_k
    first = begin + tl.arange(0, BLOCK_K)
    if META.prefetch_a:
        next_x = _block_of_a(a, first, False, META.a_strided)
    if META.prefetch_b:
        next_y = _block_of_b(b, first, False)
    for k in range(begin, end, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        if META.prefetch_b:
            y = next_y
        else:
            y = _block_of_b(b, inner, EVERY)
        if META.prefetch_a:
            x = next_x
        else:
            x = _block_of_a(a, inner, EVERY, META.a_strided)
        total = _dot(x, y, total, META)
        later = inner + BLOCK_K
        if META.prefetch_a:
            next_x = _block_of_a(a, later, False, META.a_strided)
        if META.prefetch_b:
            next_y = _block_of_b(b, later, False)
    return total


@triton.jit
def _add_rows(sums, a, first, M, inner, end, y, EVERY: tl.constexpr):
    """Add the products of rows of a, from `first` on, with a block of b to `sums`: a (BLOCK_K, BLOCK_N) tensor a row.

    `inner` are indices along K; with EVERY none reaches `end`. No tensor cores are used.
    """
    a_block, inner_mask, more = a.pointer + inner * a.inner_stride, inner < end, ()
    for i in tl.static_range(len(sums)):
        row_mask = first + i < M
        x = tl.load(a_block + (first + i) * a.stride, mask=row_mask if EVERY else row_mask & inner_mask, other=0.0)
        more = more + (sums[i] + x[:, None].to(y.dtype) * y,)  # type: ignore[assignment]
    return more


# After the sums


@triton.jit
def _write(total, out, tile, strides, added, batches, alpha, beta, ACTIVATION: tl.constexpr, META: tl.constexpr):
    """Apply the epilogue to a tile's sums and store the result, or with split-K store the sums of a slice."""
    if META.split:
        batch = tile.batch + tl.program_id(1).to(META.index) * batches
        tile = ResultTile(batch, tile.rows, tile.columns, tile.row_mask, tile.column_mask)
    else:
        total = epilogue_of_float64(total, tile, added, alpha, beta, META, ACTIVATION)
    store(total, out, aligned_batches(strides, META.out_multiple), tile)


# Kernels


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "steps"])
def multiply_tiles(
    a,
    b,
    out,
    ends,
    strides,
    added,
    batches,
    M,
    N,
    K,
    steps,
    terms,
    alpha: tl.float64,
    beta: tl.float64,
    ACTIVATION: tl.constexpr,
    META: tl.constexpr,
):
    """Multiply a tile of one batch by tensor cores."""
    wait_for_previous_launch()
    M, N, K = aligned_sizes(M, N, K, META)
    strides = aligned_strides(strides, META)
    batch, row, column = own_index(M, N, META.block_m, META.block_n, META.group_m, META.index)
    tile = _tile_at(batch, row, column, M, N, META)
    begin, end = _along_k(ends, batch, K, steps, META)
    total = zeros(META.block_m, META)
    for term in range(terms):
        rows = rows_of(a, batch + term, tile, strides.a, M, end, META)
        columns = columns_of(b, batch + term, tile, strides.b, N, end, META)
        total = add_blocks(total, rows, columns, begin, end, META.even_k, META)
    _write(total, out, tile, strides.out, added, batches, alpha, beta, ACTIVATION, META)


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "steps"])
def multiply_short_k(
    a,
    b,
    out,
    ends,
    strides,
    added,
    batches,
    M,
    N,
    K,
    steps,
    terms,
    alpha: tl.float64,
    beta: tl.float64,
    ACTIVATION: tl.constexpr,
    META: tl.constexpr,
):
    """Add outer products of a tile of one batch in registers, without shared memory. K has one block."""
    wait_for_previous_launch()
    BLOCK_K: tl.constexpr = META.block_k
    M, N, K = aligned_sizes(M, N, K, META)
    strides = aligned_strides(strides, META)
    batch, row, column = own_index(M, N, META.block_m, META.block_n, META.group_m, META.index)
    tile = _tile_at(batch, row, column, M, N, META)
    begin, end = _along_k(ends, batch, K, steps, META)
    total = zeros(META.block_m, META)
    for term in range(terms):
        rows = rows_of(a, batch + term, tile, strides.a, M, end, META)
        columns = columns_of(b, batch + term, tile, strides.b, N, end, META)
        # Pointers in two dimensions would load a row's element once for each column of a thread.
        a_rows = rows.pointer + tile.rows * rows.stride
        for i in tl.static_range(BLOCK_K):
            k, inner_mask = begin + i, True if META.even_k else begin + i < end
            x = tl.load(a_rows + k * rows.inner_stride, mask=tile.row_mask & inner_mask, other=0.0)
            y = tl.load(
                columns.pointers + k * columns.inner_stride, mask=tile.column_mask[None, :] & inner_mask, other=0.0
            )
            total += x.to(META.accumulator)[:, None] * y.to(META.accumulator)
    _write(total, out, tile, strides.out, added, batches, alpha, beta, ACTIVATION, META)


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "steps"])
def multiply_few_rows(
    a,
    b,
    out,
    ends,
    strides,
    added,
    batches,
    M,
    N,
    K,
    steps,
    terms,
    alpha: tl.float64,
    beta: tl.float64,
    ACTIVATION: tl.constexpr,
    META: tl.constexpr,
):
    """Multiply a tile of few rows with a sum for every element of b's block and row, and reduce along K at the end."""
    wait_for_previous_launch()
    BLOCK_M: tl.constexpr = META.block_m
    BLOCK_K: tl.constexpr = META.block_k
    M, N, K = aligned_sizes(M, N, K, META)
    strides = aligned_strides(strides, META)
    batch, row, column = own_index(M, N, BLOCK_M, META.block_n, META.group_m, META.index)
    tile = _tile_at(batch, row, column, M, N, META)
    begin, end = _along_k(ends, batch, K, steps, META)
    sums = ()
    for _ in tl.static_range(BLOCK_M):
        sums = sums + (zeros(BLOCK_K, META),)  # type: ignore[assignment]
    for term in range(terms):
        rows = rows_of(a, batch + term, tile, strides.a, M, end, META)
        columns = columns_of(b, batch + term, tile, strides.b, N, end, META)
        for k in range(begin, end, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K)
            y = _block_of_b(columns, inner, META.even_k).to(META.accumulator)
            sums = _add_rows(sums, rows, row.to(META.index) * BLOCK_M, M, inner, end, y, META.even_k)
    total = zeros(BLOCK_M, META)
    for i in tl.static_range(BLOCK_M):
        own = (tl.arange(0, BLOCK_M) == i)[:, None]
        total = tl.where(own, tl.sum(sums[i], axis=0)[None, :], total)
    _write(total, out, tile, strides.out, added, batches, alpha, beta, ACTIVATION, META)


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "steps"])
def multiply_strided_columns(
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
    alpha: tl.float64,
    beta: tl.float64,
    ACTIVATION: tl.constexpr,
    META: tl.constexpr,
):
    """Multiply a tile by tensor cores, for columns of b that are no multiple of 16 bytes long.

    The columns of a tile are META.column_stride columns from each other, and all begin at the same offset within 16
    bytes. Blocks of K start where those 16 bytes do. The elements before the first block and after the last are loaded
    one by one, as one more block or two.
    """
    wait_for_previous_launch()
    BLOCK_K: tl.constexpr = META.block_k
    STRIDE: tl.constexpr = META.column_stride
    M, N, K = aligned_sizes(M, N, K, META)
    strides = aligned_strides(strides, META)
    tiles_m, tiles_n = tl.cdiv(M, META.block_m), STRIDE * tl.cdiv(tl.cdiv(N, STRIDE), META.block_n)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(META.index)
    row, column = tile_index(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, META.group_m)
    rows = row.to(META.index) * META.block_m + tl.arange(0, META.block_m)
    # A tile has the columns first_column + STRIDE * multiples.
    multiples = (column // STRIDE).to(META.index) * META.block_n + tl.arange(0, META.block_n)
    first_column = (column % STRIDE).to(META.index)
    columns = multiples * STRIDE + first_column
    tile = ResultTile(batch, rows, columns, rows < M, columns < N)

    # Along K: elements before the columns' first 16-byte boundary, and elements in whole blocks after it.
    begin = tl.program_id(1).to(META.index) * steps * BLOCK_K
    column_step = strides.b.column * STRIDE
    b_first = b + (batch * strides.b.batch + first_column * strides.b.column)
    before = (-b_first.to(tl.int64) & 15).to(tl.int32) // (b.dtype.element_ty.primitive_bitwidth // 8)
    in_blocks = tl.maximum(K - before, 0) // BLOCK_K * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, in_blocks)
    x = rows_of(a + before * strides.a.column, batch, tile, strides.a, M, end, META)
    y_pointers = tl.multiple_of(b_first + before, 16) + (multiples * column_step)[None, :]
    y = _Columns(y_pointers, tile.column_mask, strides.b.row, end)
    total = add_blocks(zeros(META.block_m, META), x, y, begin, end, True, META)

    # The last slice adds what whole blocks left out: the elements before and after them.
    x = _Rows(a + batch * strides.a.batch, rows, tile.row_mask, strides.a.row, strides.a.column, K)
    y = _Columns(b_first + (multiples * column_step)[None, :], tile.column_mask, strides.b.row, K)
    last = tl.program_id(1) == tl.num_programs(1) - 1
    for k in tl.range(0, tl.where(last, K - in_blocks, 0), BLOCK_K, num_stages=1):
        inner = (k + tl.arange(0, BLOCK_K)).to(META.index)
        inner += tl.where(inner < before, 0, in_blocks)
        y_block = _block_of_b(y, inner, False)
        total = _dot(_block_of_a(x, inner, False, META.a_strided), y_block, total, META)
    _write(total, out, tile, strides.out, added, batches, alpha, beta, ACTIVATION, META)
