"""Triton's kernels for batched products, for every device.

`multiply` loads through pointers, any layout, one tile a program. `multiply_persistent` and `multiply_groups` load by
tensor descriptors, many tiles a program. Products of few tiles and a long K are split along K, and `reduce_split_k`
adds the partial products in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tritonite.engine.gemm.kernels.epilogue import clamped_start, epilogue_of_float64, store, tile_index
from tritonite.language.indices import aligned_to
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry

# The least rows, and the least elements along K, of a tensor core product.
LEAST = tl.constexpr(16)


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


@triton.jit
def _clamped_end(end, size):
    """Clamp the end of a group, which callers choose freely, to 0 and `size`."""
    return tl.minimum(tl.maximum(end, 0), size)


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "steps"])
def multiply(
    a,
    b,
    out,
    ends,
    addend,
    scales,
    strides,
    epilogue_strides,
    batches,
    M,
    N,
    K,
    steps,
    terms,
    alpha: tl.float64,
    beta: tl.float64,
    SCALED: tl.constexpr,
    KINDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INDEX: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    META: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Multiply a tile of one batch over `steps` blocks of K: all of them, or with SPLIT one slice.

    Args:
        strides: a's (batch, row, inner), b's (batch, inner, column) and the result's (batch, row, column).
        ends: int32, where along K each batch's group ends, or None. A group starts where the one before ends.
        terms: batches of a and b that are added to one result; `strides` has their batch strides.
        PRECISION: of float32: "ieee", "tf32", or "bf16x6", six products of bfloat16 terms (Henry, Tang and Heinecke
            2019).
        IMPRECISE: after how many elements along K tensor cores' float8 sums are added in float32.
        EVEN_K: whether BLOCK_K divides K and there are no `ends`.
        META: `GemmMeta`.

    There are three ways to add up, by tile size. Tensor cores multiply blocks of at least LEAST rows and LEAST elements
    along K. A K in blocks of less than LEAST is a sum of outer products in registers, without shared memory. Tiles of
    less than LEAST rows keep a sum for every element of b's block and row, and reduce along K at the end.

    Zeros that pad a or b are loaded, too, because a mask that ends within a vector would split the load. Elements
    loaded by less than 4 bytes cannot be copied asynchronously, so tensor cores' next block is loaded to registers
    while the one before is multiplied.

    META.column_stride serves b whose columns are no multiple of 16 bytes long. The columns of a tile are that many
    columns from each other, and all begin at the same offset within 16 bytes. Blocks of K start where those 16 bytes
    do; the elements before the first block and after the last are loaded one by one, as one more block or two.
    """
    wait_for_previous_launch()
    M, N, K = aligned_to(M, META.m_multiple), aligned_to(N, META.n_multiple), aligned_to(K, META.k_multiple)
    a_row = aligned_to(strides[0][1], META.a_multiple if META.a_inner else 1)
    a_inner_stride = aligned_to(strides[0][2], 1 if META.a_inner else META.a_multiple)
    b_inner_stride = aligned_to(strides[1][1], 1 if META.b_inner else META.b_multiple)
    b_column = aligned_to(strides[1][2], META.b_multiple if META.b_inner else 1)
    out_row = aligned_to(strides[2][1], META.out_multiple if META.out_inner else 1)
    out_column = aligned_to(strides[2][2], 1 if META.out_inner else META.out_multiple)
    STRIDED_COLUMNS: tl.constexpr = META.column_stride > 0
    COLUMN_STRIDE: tl.constexpr = META.column_stride if META.column_stride > 0 else 1
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), COLUMN_STRIDE * tl.cdiv(tl.cdiv(N, COLUMN_STRIDE), BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)
    row, column = tile_index(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    rows = row.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    # A tile has the columns first_column + COLUMN_STRIDE * multiples.
    multiples = (column // COLUMN_STRIDE).to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_column = (column % COLUMN_STRIDE).to(INDEX)
    columns = multiples * COLUMN_STRIDE + first_column
    if not META.b_inner and META.b_multiple == 1:
        # Triton (3.6) would give a thread as many neighbouring columns as it stores at once. It loads them one by one
        # here, so the lanes of a warp would load from distant sectors. A contiguity of 1 would hide that columns are
        # contiguous at all, and each lane would load from another row.
        columns = tl.max_contiguous(columns, 2)
    row_mask, column_mask = rows < M, columns < N
    begin = tl.program_id(1).to(INDEX) * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, K)
    if ends is not None:
        begin = _clamped_end(tl.load(ends + batch - 1, mask=batch > 0, other=0), K).to(INDEX)
        end = _clamped_end(tl.load(ends + batch), K).to(INDEX)
    a_first, b_first, column_step = a, b, b_column * COLUMN_STRIDE
    if STRIDED_COLUMNS:
        # Along K: elements before the columns' first 16-byte boundary, and elements in whole blocks after it.
        b_first += batch * strides[1][0] + first_column * b_column
        before = (-b_first.to(tl.int64) & 15).to(tl.int32) // (b.dtype.element_ty.primitive_bitwidth // 8)
        in_blocks = tl.maximum(K - before, 0) // BLOCK_K * BLOCK_K
        end = tl.minimum(begin + steps * BLOCK_K, in_blocks)
        a_first += before * a_inner_stride
    a_end, b_end, a_row_mask, b_column_mask = end, end, row_mask, column_mask
    if META.a_padding > 1:
        if META.a_inner:
            a_end = tl.cdiv(end, META.a_padding) * META.a_padding
        else:
            a_row_mask = rows < tl.cdiv(M, META.a_padding) * META.a_padding
    if META.b_padding > 1:
        if META.b_inner:
            b_end = tl.cdiv(end, META.b_padding) * META.b_padding
        else:
            b_column_mask = columns < tl.cdiv(N, META.b_padding) * META.b_padding
    OUTER: tl.constexpr = BLOCK_K < LEAST
    BY_ROWS: tl.constexpr = BLOCK_M < LEAST and not OUTER
    PREFETCH_A: tl.constexpr = META.prefetch_a and not BY_ROWS
    PREFETCH_B: tl.constexpr = META.prefetch_b and not BY_ROWS
    EVERY_K: tl.constexpr = EVEN_K or STRIDED_COLUMNS
    total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    sums = ()
    for _ in tl.static_range(BLOCK_M if BY_ROWS else 0):
        sums = sums + (tl.zeros((BLOCK_K, BLOCK_N), ACCUMULATOR),)  # type: ignore[assignment]
    for term in range(terms):
        a_batch = a_first + (batch + term) * aligned_to(strides[0][0], META.a_multiple)
        if STRIDED_COLUMNS:
            b_columns = tl.multiple_of(b_first + before, 16) + (multiples * column_step)[None, :]
        else:
            b_columns = b + (batch + term) * aligned_to(strides[1][0], META.b_multiple) + (columns * b_column)[None, :]
        if OUTER:
            # Pointers in two dimensions would load a row's element once for each column of a thread.
            a_rows = a_batch + rows * a_row
            for i in tl.static_range(BLOCK_K):
                k, inner_mask = begin + i, True if EVEN_K else begin + i < end
                x = tl.load(a_rows + k * a_inner_stride, mask=row_mask & inner_mask, other=0.0)
                y = tl.load(b_columns + k * b_inner_stride, mask=column_mask[None, :] & inner_mask, other=0.0)
                total += x.to(ACCUMULATOR)[:, None] * y.to(ACCUMULATOR)
        else:
            own_a = _Rows(a_batch, rows, a_row_mask, a_row, a_inner_stride, a_end)
            own_b = _Columns(b_columns, b_column_mask, b_inner_stride, b_end)
            first = begin + tl.arange(0, BLOCK_K)
            if PREFETCH_A:
                next_x = _block_of_a(own_a, first, False, META.a_strided)
            if PREFETCH_B:
                next_y = _block_of_b(own_b, first, False)
            for k in range(begin, end, BLOCK_K):
                inner = k + tl.arange(0, BLOCK_K)
                if PREFETCH_B:
                    y = next_y
                else:
                    y = _block_of_b(own_b, inner, EVERY_K)
                if BY_ROWS:
                    sums = _add_rows(sums, own_a, row.to(INDEX) * BLOCK_M, M, inner, end, y.to(ACCUMULATOR), EVERY_K)
                else:
                    if PREFETCH_A:
                        x = next_x
                    else:
                        x = _block_of_a(own_a, inner, EVERY_K, META.a_strided)
                    total = tl.dot(x, y, total, PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACCUMULATOR)
                    later = inner + BLOCK_K
                    if PREFETCH_A:
                        next_x = _block_of_a(own_a, later, False, META.a_strided)
                    if PREFETCH_B:
                        next_y = _block_of_b(own_b, later, False)
    if STRIDED_COLUMNS:
        # The last slice adds what whole blocks left out: the elements before and after them.
        every_a = _Rows(a + batch * strides[0][0], rows, row_mask, a_row, a_inner_stride, K)
        every_b = _Columns(b_first + (multiples * column_step)[None, :], column_mask, b_inner_stride, K)
        last = tl.program_id(1) == tl.num_programs(1) - 1
        for k in tl.range(0, tl.where(last, K - in_blocks, 0), BLOCK_K, num_stages=1):
            inner = (k + tl.arange(0, BLOCK_K)).to(INDEX)
            inner += tl.where(inner < before, 0, in_blocks)
            y = _block_of_b(every_b, inner, False)
            if BY_ROWS:
                sums = _add_rows(sums, every_a, row.to(INDEX) * BLOCK_M, M, inner, K, y.to(ACCUMULATOR), False)
            else:
                x = _block_of_a(every_a, inner, False, META.a_strided)
                total = tl.dot(x, y, total, PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACCUMULATOR)
    if BY_ROWS:
        for i in tl.static_range(BLOCK_M):
            own = (tl.arange(0, BLOCK_M) == i)[:, None]
            total = tl.where(own, tl.sum(sums[i], axis=0)[None, :], total)
    if SPLIT:
        batch += tl.program_id(1).to(INDEX) * batches
    tile = (batch, rows, columns, row_mask, column_mask)
    if not SPLIT:
        total = epilogue_of_float64(
            total, tile, (addend, scales, epilogue_strides, alpha, beta), SCALED, KINDS, ACTIVATION
        )
    store(total, out, (aligned_to(strides[2][0], META.out_multiple), out_row, out_column), tile)


@triton.jit
def _tile_of_program(M, N, INDEX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the program's tile of (batches, M, N) as `epilogue` takes it."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)
    row, column = tile_index(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, 1)
    rows = row.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column.to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    return batch, rows, columns, rows < M, columns < N


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "splits"])
def reduce_split_k(
    partials,
    out,
    addend,
    scales,
    strides,
    epilogue_strides,
    width,
    batches,
    M,
    N,
    splits,
    alpha: tl.float64,
    beta: tl.float64,
    SCALED: tl.constexpr,
    KINDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INDEX: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the partial products of `splits` slices of K in order, apply the epilogue and store the result.

    `partials` is (splits, batches, M, N) with a row stride of `width`. SPLITS, at least `splits`, is a constant, so
    that all loads are in flight at once.
    """
    wait_for_previous_launch()
    tile = _tile_of_program(M, N, INDEX, BLOCK_M, BLOCK_N)
    batch, rows, columns, row_mask, column_mask = tile
    mask = row_mask[:, None] & column_mask[None, :]
    pointers = partials + (batch * M + rows)[:, None] * width + columns[None, :]
    slice_stride = batches.to(INDEX) * M * width
    total = tl.load(pointers, mask=mask, other=0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pointers + split * slice_stride, mask=mask & (split < splits), other=0)
    total = epilogue_of_float64(total, tile, (addend, scales, epilogue_strides, alpha, beta), SCALED, KINDS, ACTIVATION)
    store(total, out, strides, tile)


@libentry()
@triton.jit(do_not_specialize=["M"])
def write_epilogue(
    out,
    addend,
    scales,
    strides,
    epilogue_strides,
    M,
    N,
    alpha: tl.float64,
    beta: tl.float64,
    SCALED: tl.constexpr,
    KINDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store the epilogue of a product without terms, whose sums are 0. Reads neither operand."""
    wait_for_previous_launch()
    tile = _tile_of_program(M, N, INDEX, BLOCK_M, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    total = epilogue_of_float64(total, tile, (addend, scales, epilogue_strides, alpha, beta), SCALED, KINDS, ACTIVATION)
    store(total, out, strides, tile)


@libentry()
@triton.jit(do_not_specialize=["batches", "rows"])
def copy_rows(
    source,
    out,
    source_strides,
    out_strides,
    batches,
    rows,
    columns,
    width,
    INDEX: tl.constexpr,
    SOURCE_MULTIPLE: tl.constexpr,
    OUT_MULTIPLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copy batches of rows, and fill each result row with zeros from the source's `columns` up to `width`.

    SOURCE_MULTIPLE divides `columns` and the source's strides, OUT_MULTIPLE `width` and the result's strides.
    """
    wait_for_previous_launch()
    columns, width = aligned_to(columns, SOURCE_MULTIPLE), aligned_to(width, OUT_MULTIPLE)
    blocks = tl.cdiv(width, BLOCK_N)
    row = (tl.program_id(0) // blocks).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % blocks).to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch, row, mask = row // rows, row % rows, (row < batches * rows)[:, None]
    first = batch * aligned_to(source_strides[0], SOURCE_MULTIPLE) + row * aligned_to(
        source_strides[1], SOURCE_MULTIPLE
    )
    pointers = source + first[:, None] + (column * source_strides[2])[None, :]
    value = tl.load(pointers, mask=mask & (column < columns)[None, :], other=0)
    first = batch * aligned_to(out_strides[0], OUT_MULTIPLE) + row * aligned_to(out_strides[1], OUT_MULTIPLE)
    pointers = out + first[:, None] + (column * out_strides[2])[None, :]
    tl.store(pointers, value, mask=mask & (column < width)[None, :])


@triton.jit
def _load_tile(descriptor, batch, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Load a (ROWS, COLUMNS) tile by a descriptor of (batch, row, column), or TRANSPOSED (batch, column, row)."""
    if TRANSPOSED:
        tile = descriptor.load([batch, column, row]).reshape(COLUMNS, ROWS).T
    else:
        tile = descriptor.load([batch, row, column]).reshape(ROWS, COLUMNS)
    return tile


@libentry()
@triton.jit(do_not_specialize=["batches", "M", "K", "steps", "splits", "programs", "last_row", "last_column"])
def multiply_persistent(
    a,
    b,
    out,
    out_strides,
    addend,
    scales,
    epilogue_strides,
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
    SCALED: tl.constexpr,
    KINDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    RESULT: tl.constexpr,
    INDEX: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Multiply persistently: each of `programs` programs has every `programs`-th tile, as in Triton's tutorial.

    a and b are tensor descriptors of 3 dimensions. `out` is one, too, or with `out_strides` a pointer. With SPLIT each
    of `splits` slices of K, of `steps` blocks, has a result of its own. SPLIT_STORE stores a tile in two subtiles,
    through half the shared memory. No tile starts after `last_row` and `last_column` (`clamped_start`).
    """
    wait_for_previous_launch()
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), splits * batches * tiles_m * tiles_n, programs, flatten=True):
        matrix = tile // (tiles_m * tiles_n)
        batch, first, last = matrix % batches, 0, tl.cdiv(K, BLOCK_K)
        if SPLIT:
            first = matrix // batches * steps
            last = tl.minimum(first + steps, last)
        row, column = tile_index(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row, column = clamped_start(row, BLOCK_M, last_row), clamped_start(column, BLOCK_N, last_column)
        total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
        for step in range(first, last):
            x = _load_tile(a, batch, row, step * BLOCK_K, BLOCK_M, BLOCK_K, A_TRANSPOSED)
            y = _load_tile(b, batch, step * BLOCK_K, column, BLOCK_K, BLOCK_N, B_TRANSPOSED)
            total = tl.dot(x, y, total, PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACCUMULATOR)
        subtiles = (total,)
        if SPLIT_STORE:
            subtiles = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        WIDTH: tl.constexpr = BLOCK_N // len(subtiles)
        rows = row.to(INDEX) + tl.arange(0, BLOCK_M)
        for i in tl.static_range(len(subtiles)):
            columns = column.to(INDEX) + i * WIDTH + tl.arange(0, WIDTH)
            result = subtiles[i]
            if not SPLIT:
                own = (batch.to(INDEX), rows, columns, rows < M, columns < N)
                result = epilogue_of_float64(
                    result, own, (addend, scales, epilogue_strides, alpha, beta), SCALED, KINDS, ACTIVATION
                )
            if len(out_strides) > 0:
                store(result, out, out_strides, (matrix.to(INDEX), rows, columns, rows < M, columns < N))
            else:
                out.store([matrix, row, column + i * WIDTH], result.to(RESULT).reshape(1, BLOCK_M, WIDTH))


@triton.jit
def _tiles_of_groups(ends, M, GROUPS: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr, MULTIPLE: tl.constexpr):
    """Return each group's first row, end row, first tile and number of tiles, as blocks of LANES.

    `ends` has the end rows of GROUPS groups of M rows. A group's first tile starts at a multiple of MULTIPLE, at most
    the group's first row.
    """
    lane = tl.arange(0, LANES)
    end = _clamped_end(tl.load(ends + lane, mask=lane < GROUPS, other=0), M)
    begin = _clamped_end(tl.load(ends + lane - 1, mask=(lane > 0) & (lane < GROUPS), other=0), M)
    tiles = tl.where(begin < end, tl.cdiv(end - begin // MULTIPLE * MULTIPLE, BLOCK_M), 0)
    return begin, end, tl.cumsum(tiles, axis=0) - tiles, tiles


@libentry()
@triton.jit(do_not_specialize=["M", "programs"])
def multiply_groups(
    a,
    b,
    out,
    ends,
    out_strides,
    M,
    N,
    K,
    programs,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    INDEX: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    MULTIPLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Multiply rows of `a` by the matrix of `b` of their group, persistently. Group i ends at row ends[i]."""
    wait_for_previous_launch()
    begin, end, first, tiles = _tiles_of_groups(ends, M, GROUPS, LANES, BLOCK_M, MULTIPLE)
    tiles_m, tiles_n = tl.sum(tiles, axis=0), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=True):
        row, column = tile_index(tile, tiles_m, tiles_n, GROUP_M)
        own = (first <= row) & (row < first + tiles)
        group = tl.sum(tl.where(own, tl.arange(0, LANES), 0), axis=0)
        group_begin, group_end = tl.sum(tl.where(own, begin, 0), axis=0), tl.sum(tl.where(own, end, 0), axis=0)
        row -= tl.sum(tl.where(own, first, 0), axis=0)
        row, column = group_begin // MULTIPLE * MULTIPLE + row * BLOCK_M, column * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
        for step in range(tl.cdiv(K, BLOCK_K)):
            x = _load_tile(a, 0, row, step * BLOCK_K, BLOCK_M, BLOCK_K, A_TRANSPOSED)
            y = _load_tile(b, group, step * BLOCK_K, column, BLOCK_K, BLOCK_N, B_TRANSPOSED)
            total = tl.dot(x, y, total, PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACCUMULATOR)
        rows = row.to(INDEX) + tl.arange(0, BLOCK_M)
        columns = column.to(INDEX) + tl.arange(0, BLOCK_N)
        row_mask = (group_begin <= rows) & (rows < group_end)
        store(total, out, out_strides, (0, rows, columns, row_mask, columns < N))
