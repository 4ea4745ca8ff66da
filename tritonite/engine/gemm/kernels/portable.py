"""Triton's kernels for products of matrices in batches.

A program multiplies tiles of rows and columns. Where the device copies tiles by itself (tensor descriptors), programs
stay and take tile after tile; for every other layout they load through pointers. Few tiles of a long inner dimension
are split along it (split-K), and a second launch adds the partial products, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.gemm.kernels.epilogue import begin_within, epilogue_of_float64, place, store
from tritonite.language.indices import aligned_to
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry

# Tensor cores multiply as many rows; fewer are added up one by one.
LEAST = tl.constexpr(16)


@triton.jit
def _add_rows(sums, a, stride, first, M, mask, y, EVEN_K: tl.constexpr):
    """The sums of as many rows of `a` from the `first` on, `stride` apart, with their products with a block of b."""
    more = ()
    for i in tl.static_range(len(sums)):
        here = first + i < M
        x = tl.load(a + (first + i) * stride, mask=here if EVEN_K else here & mask, other=0.0)
        more = more + (sums[i] + x[:, None].to(y.dtype) * y,)  # type: ignore[assignment]
    return more


@triton.jit
def _block_of_a(a, rows, row_stride, row_mask, inner, inner_stride, end, EVERY: tl.constexpr, STRIDED: tl.constexpr):
    """Rows of a at the indices `inner` along K, with zeros from the end on, or of EVERY index.

    Where a is STRIDED along both, Triton (3.6) would have the threads of a warp load from different rows.
    """
    if STRIDED:
        mask = row_mask[None, :]
        if not EVERY:
            mask &= (inner < end)[:, None]
        pointers = (a + inner * inner_stride)[:, None] + (rows * row_stride)[None, :]
        block = tl.trans(tl.load(pointers, mask=mask, other=0.0))
    else:
        mask = row_mask[:, None]
        if not EVERY:
            mask &= (inner < end)[None, :]
        block = tl.load((a + inner * inner_stride)[None, :] + (rows * row_stride)[:, None], mask=mask, other=0.0)
    return block


@triton.jit
def _block_of_b(columns, column_mask, inner, inner_stride, end, EVERY: tl.constexpr):
    """The same of b's columns, given by pointers to them."""
    mask = column_mask[None, :]
    if not EVERY:
        mask &= (inner < end)[:, None]
    return tl.load(columns + (inner * inner_stride)[:, None], mask=mask, other=0.0)


@triton.jit
def _within(end, size):
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
    summed,
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
    ALIGNED: tl.constexpr,
    PADDED: tl.constexpr,
    AHEAD: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """A program multiplies a tile of a batch over `steps` blocks of K, which with SPLIT is a part of all.

    `strides` are a's (batch, row, inner), b's (batch, inner, column) and the result's (batch, row, column); of a sum of
    products, the batch's are those of its terms. With `ends`, which tell where it ends, each batch has a part of K.
    Tiles of less than LEAST rows add them up along K one by one, without tensor cores. Of a K in blocks of less than
    that each index adds an outer product, which has nothing to do with shared memory and waits for no other thread:
    what such products take is the time to write them. ALIGNED is what divides M, N, K, the strides of a, of b and of
    the result, but for strides of 1, whether those are a's and b's along K and the result's along its columns, and
    whether a has none. Triton knows of multiples of 16 alone, and would load elements one by one: products of float32
    with 1,368 columns took three times as long. Where a or b is PADDED with zeros to so many elements, where its rows
    or columns end, those are loaded, too: a mask that cuts a vector would take it apart. AHEAD is whether a's and b's
    elements are loaded by less than 4 bytes. Nothing copies so few asynchronously, so tensor cores' next block of them
    is loaded to registers while one is multiplied. The assembler would wait for each load by itself where registers
    are scarce.

    Columns of b whose length is no multiple of 16 bytes begin anywhere within them, and only those APART columns from
    each other begin alike. A tile takes such, so that its blocks of K can be where 16 bytes of all of its columns are.
    What is before the first of these blocks and behind the last is loaded element by element, as one block or two.

    float32 is multiplied as three bfloat16 each, by six products (bf16x6; Henry, Tang and Heinecke 2019): 1.25 to 1.33
    of cuBLAS's speed with a fifth of its error at 4096 cubed. Operands of tf32x3 must lie along K in shared memory, and
    it took 1.5 to 2.6 times as long; plain FMA is at 0.85.
    """
    wait_for_previous_launch()
    M, N, K = aligned_to(M, ALIGNED[0]), aligned_to(N, ALIGNED[1]), aligned_to(K, ALIGNED[2])
    EVERY_A: tl.constexpr = ALIGNED[3]
    EVERY_B: tl.constexpr = ALIGNED[4]
    EVERY_OUT: tl.constexpr = ALIGNED[5]
    A_INNER: tl.constexpr = ALIGNED[6]
    B_INNER: tl.constexpr = ALIGNED[7]
    A_STRIDED: tl.constexpr = ALIGNED[9]
    a_row = aligned_to(strides[0][1], EVERY_A if A_INNER else 1)
    a_inner_stride = aligned_to(strides[0][2], 1 if A_INNER else EVERY_A)
    b_inner_stride = aligned_to(strides[1][1], 1 if B_INNER else EVERY_B)
    b_column = aligned_to(strides[1][2], EVERY_B if B_INNER else 1)
    out_row = aligned_to(strides[2][1], EVERY_OUT if ALIGNED[8] else 1)
    out_column = aligned_to(strides[2][2], 1 if ALIGNED[8] else EVERY_OUT)
    COLUMNS_APART: tl.constexpr = APART if APART > 0 else 1
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), COLUMNS_APART * tl.cdiv(tl.cdiv(N, COLUMNS_APART), BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)
    row, column = place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    rows = row.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    # A tile's columns are multiples of COLUMNS_APART from the first one.
    multiples = (column // COLUMNS_APART).to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_column = (column % COLUMNS_APART).to(INDEX)
    columns = multiples * COLUMNS_APART + first_column
    if not B_INNER and EVERY_B == 1:
        # As many neighbours as a thread stores at once it would load one by one, each from another sector. Told of one
        # alone, Triton 3.6 does not see that columns are next to each other, and each thread loads from another row.
        columns = tl.max_contiguous(columns, 2)
    row_mask, column_mask = rows < M, columns < N
    begin = tl.program_id(1).to(INDEX) * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, K)
    if ends is not None:
        begin = _within(tl.load(ends + batch - 1, mask=batch > 0, other=0), K).to(INDEX)
        end = _within(tl.load(ends + batch), K).to(INDEX)
    a_first, b_first, column_apart = a, b, b_column * COLUMNS_APART
    if APART > 0:
        # How much of K is before 16 bytes of the columns, and how much is in blocks behind that.
        b_first += batch * strides[1][0] + first_column * b_column
        before = (-b_first.to(tl.int64) & 15).to(tl.int32) // (b.dtype.element_ty.primitive_bitwidth // 8)
        in_blocks = tl.maximum(K - before, 0) // BLOCK_K * BLOCK_K
        end = tl.minimum(begin + steps * BLOCK_K, in_blocks)
        a_first += before * a_inner_stride
    a_end, b_end, a_row_mask, b_column_mask = end, end, row_mask, column_mask
    if PADDED[0] > 1:
        if A_INNER:
            a_end = tl.cdiv(end, PADDED[0]) * PADDED[0]
        else:
            a_row_mask = rows < tl.cdiv(M, PADDED[0]) * PADDED[0]
    if PADDED[1] > 1:
        if B_INNER:
            b_end = tl.cdiv(end, PADDED[1]) * PADDED[1]
        else:
            b_column_mask = columns < tl.cdiv(N, PADDED[1]) * PADDED[1]
    OUTER: tl.constexpr = BLOCK_K < LEAST
    BY_ROWS: tl.constexpr = BLOCK_M < LEAST and not OUTER
    AHEAD_A: tl.constexpr = AHEAD[0] and not BY_ROWS
    AHEAD_B: tl.constexpr = AHEAD[1] and not BY_ROWS
    EVERY_K: tl.constexpr = EVEN_K or APART > 0
    total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    sums = ()
    for _ in tl.static_range(BLOCK_M if BY_ROWS else 0):
        sums = sums + (tl.zeros((BLOCK_K, BLOCK_N), ACCUMULATOR),)  # type: ignore[assignment]
    for term in range(summed):
        a_batch = a_first + (batch + term) * aligned_to(strides[0][0], EVERY_A)
        if APART > 0:
            b_columns = tl.multiple_of(b_first + before, 16) + (multiples * column_apart)[None, :]
        else:
            b_columns = b + (batch + term) * aligned_to(strides[1][0], EVERY_B) + (columns * b_column)[None, :]
        if OUTER:
            # By pointers in two dimensions a thread would load a row's element once for each of its columns.
            a_rows = a_batch + rows * a_row
            for i in tl.static_range(BLOCK_K):
                k, there = begin + i, True if EVEN_K else begin + i < end
                x = tl.load(a_rows + k * a_inner_stride, mask=row_mask & there, other=0.0)
                y = tl.load(b_columns + k * b_inner_stride, mask=column_mask[None, :] & there, other=0.0)
                total += x.to(ACCUMULATOR)[:, None] * y.to(ACCUMULATOR)
        else:
            first = begin + tl.arange(0, BLOCK_K)
            if AHEAD_A:
                x_coming = _block_of_a(a_batch, rows, a_row, a_row_mask, first, a_inner_stride, a_end, False, A_STRIDED)
            if AHEAD_B:
                y_coming = _block_of_b(b_columns, b_column_mask, first, b_inner_stride, b_end, False)
            for k in range(begin, end, BLOCK_K):
                inner = k + tl.arange(0, BLOCK_K)
                if AHEAD_B:
                    y = y_coming
                else:
                    y = _block_of_b(b_columns, b_column_mask, inner, b_inner_stride, b_end, EVERY_K)
                if BY_ROWS:
                    a_inner, first_row = a_batch + inner * a_inner_stride, row.to(INDEX) * BLOCK_M
                    sums = _add_rows(sums, a_inner, a_row, first_row, M, inner < end, y.to(ACCUMULATOR), EVERY_K)
                else:
                    if AHEAD_A:
                        x = x_coming
                    else:
                        x = _block_of_a(
                            a_batch, rows, a_row, a_row_mask, inner, a_inner_stride, a_end, EVERY_K, A_STRIDED
                        )
                    total = tl.dot(x, y, total, PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACCUMULATOR)
                    later = inner + BLOCK_K
                    if AHEAD_A:
                        x_coming = _block_of_a(
                            a_batch, rows, a_row, a_row_mask, later, a_inner_stride, a_end, False, A_STRIDED
                        )
                    if AHEAD_B:
                        y_coming = _block_of_b(b_columns, b_column_mask, later, b_inner_stride, b_end, False)
    if APART > 0:
        a_batch = a + batch * strides[0][0]
        b_columns = b_first + (multiples * column_apart)[None, :]
        last = tl.program_id(1) == tl.num_programs(1) - 1
        for k in tl.range(0, tl.where(last, K - in_blocks, 0), BLOCK_K, num_stages=1):
            inner = (k + tl.arange(0, BLOCK_K)).to(INDEX)
            inner += tl.where(inner < before, 0, in_blocks)
            y = _block_of_b(b_columns, column_mask, inner, b_inner_stride, K, False)
            if BY_ROWS:
                a_inner, first_row = a_batch + inner * a_inner_stride, row.to(INDEX) * BLOCK_M
                sums = _add_rows(sums, a_inner, a_row, first_row, M, inner < K, y.to(ACCUMULATOR), False)
            else:
                x = _block_of_a(a_batch, rows, a_row, row_mask, inner, a_inner_stride, K, False, A_STRIDED)
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
    store(total, out, (aligned_to(strides[2][0], EVERY_OUT), out_row, out_column), tile)


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
    """The end of split-K: the sum of `splits` partial products, which lie one after the other, and the epilogue.

    There are SPLITS of them at most, so that all are on their way at once. Their rows are `width` elements apart.
    """
    wait_for_previous_launch()
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)
    row, column = place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, 1)
    rows = row.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column.to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = rows < M, columns < N
    mask = row_mask[:, None] & column_mask[None, :]
    pointers = partials + (batch * M + rows)[:, None] * width + columns[None, :]
    apart = batches.to(INDEX) * M * width
    total = tl.load(pointers, mask=mask, other=0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pointers + split * apart, mask=mask & (split < splits), other=0)
    tile = (batch, rows, columns, row_mask, column_mask)
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
    """Write the epilogue of a product whose sums are 0 because they have no terms. Reads no operand."""
    wait_for_previous_launch()
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)
    row, column = place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, 1)
    rows = row.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column.to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = (batch, rows, columns, rows < M, columns < N)
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
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A copy of batches of rows, with zeros from the source's `columns` on up to a `width` of the result.

    ALIGNED is what divides the source's columns and strides, and the result's width and strides.
    """
    wait_for_previous_launch()
    columns, width = aligned_to(columns, ALIGNED[0]), aligned_to(width, ALIGNED[1])
    blocks = tl.cdiv(width, BLOCK_N)
    row = (tl.program_id(0) // blocks).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % blocks).to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch, row, mask = row // rows, row % rows, (row < batches * rows)[:, None]
    first = batch * aligned_to(source_strides[0], ALIGNED[0]) + row * aligned_to(source_strides[1], ALIGNED[0])
    pointers = source + first[:, None] + (column * source_strides[2])[None, :]
    value = tl.load(pointers, mask=mask & (column < columns)[None, :], other=0)
    first = batch * aligned_to(out_strides[0], ALIGNED[1]) + row * aligned_to(out_strides[1], ALIGNED[1])
    pointers = out + first[:, None] + (column * out_strides[2])[None, :]
    tl.store(pointers, value, mask=mask & (column < width)[None, :])


@triton.jit
def _copy_tile(descriptor, batch, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr):
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
    """A persistent kernel, as in Triton's tutorial: each of `programs` multiplies every so many-th tile.

    Operands are tensor descriptors of 3 dimensions, and so is the result, unless it has `out_strides`. With SPLIT each
    of `splits` parts of K, of `steps` blocks, is a result. With SPLIT_STORE a tile is written in two subtiles, by way
    of half the shared memory. No tile begins after `last_row` and `last_column` (`begin_within`).
    """
    wait_for_previous_launch()
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), splits * batches * tiles_m * tiles_n, programs, flatten=True):
        written = tile // (tiles_m * tiles_n)
        batch, first, last = written % batches, 0, tl.cdiv(K, BLOCK_K)
        if SPLIT:
            first = written // batches * steps
            last = tl.minimum(first + steps, last)
        row, column = place(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row, column = begin_within(row, BLOCK_M, last_row), begin_within(column, BLOCK_N, last_column)
        total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
        for step in range(first, last):
            x = _copy_tile(a, batch, row, step * BLOCK_K, BLOCK_M, BLOCK_K, A_TRANSPOSED)
            y = _copy_tile(b, batch, step * BLOCK_K, column, BLOCK_K, BLOCK_N, B_TRANSPOSED)
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
                store(result, out, out_strides, (written.to(INDEX), rows, columns, rows < M, columns < N))
            else:
                out.store([written, row, column + i * WIDTH], result.to(RESULT).reshape(1, BLOCK_M, WIDTH))


@triton.jit
def _tiles_of_groups(ends, M, GROUPS: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr, MULTIPLE: tl.constexpr):
    """For each group of M rows the first row and the end, its first tile and the count; tiles start at a MULTIPLE."""
    lane = tl.arange(0, LANES)
    end = _within(tl.load(ends + lane, mask=lane < GROUPS, other=0), M)
    begin = _within(tl.load(ends + lane - 1, mask=(lane > 0) & (lane < GROUPS), other=0), M)
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
    """As `multiply_persistent`, where rows of `a` are in groups, which have a matrix of `b` each and end at `ends`."""
    wait_for_previous_launch()
    begin, end, first, tiles = _tiles_of_groups(ends, M, GROUPS, LANES, BLOCK_M, MULTIPLE)
    tiles_m, tiles_n = tl.sum(tiles, axis=0), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=True):
        row, column = place(tile, tiles_m, tiles_n, GROUP_M)
        own = (first <= row) & (row < first + tiles)
        group = tl.sum(tl.where(own, tl.arange(0, LANES), 0), axis=0)
        group_begin, group_end = tl.sum(tl.where(own, begin, 0), axis=0), tl.sum(tl.where(own, end, 0), axis=0)
        row -= tl.sum(tl.where(own, first, 0), axis=0)
        row, column = group_begin // MULTIPLE * MULTIPLE + row * BLOCK_M, column * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
        for step in range(tl.cdiv(K, BLOCK_K)):
            x = _copy_tile(a, 0, row, step * BLOCK_K, BLOCK_M, BLOCK_K, A_TRANSPOSED)
            y = _copy_tile(b, group, step * BLOCK_K, column, BLOCK_K, BLOCK_N, B_TRANSPOSED)
            total = tl.dot(x, y, total, PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACCUMULATOR)
        rows = row.to(INDEX) + tl.arange(0, BLOCK_M)
        columns = column.to(INDEX) + tl.arange(0, BLOCK_N)
        row_mask = (group_begin <= rows) & (rows < group_end)
        store(total, out, out_strides, (0, rows, columns, row_mask, columns < N))
