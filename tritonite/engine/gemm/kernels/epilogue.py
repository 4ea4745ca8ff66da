"""Device functions shared by all kernels of products: which tile a program has, the epilogue, and the store."""

import triton
import triton.language as tl

from tritonite.engine.gemm.kernels.arguments import EpilogueArguments, GemmStrides, MatrixStrides, ResultTile
from tritonite.engine.pointwise.embedded import evaluate_result_program
from tritonite.language.indices import aligned_to

# Which tile


@triton.jit
def tile_index(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the (row, column) of tile number `tile` in a grid of `tiles_m` by `tiles_n` tiles.

    Consecutive numbers go down a group of GROUP_M rows of tiles, so that programs that run together share operands in
    the L2 cache.
    """
    group = tile // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    rest = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + rest % height, rest // height


@triton.jit
def own_index(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, INDEX: tl.constexpr):
    """Return the batch of a program's tile, and its row and column in the grid of tiles, for one tile a program."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)
    row, column = tile_index(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    return batch, row, column


@triton.jit
def triangle_index(tile, tiles, GROUP_M: tl.constexpr):
    """Return the (row, column) of tile number `tile` in the lower triangle of a grid of `tiles` by `tiles` tiles.

    The triangle is packed into a rectangle half as wide as the grid (rectangular full packed format, Gustavson et al.
    2010): tiles of the right half fill the space above the diagonal of the left half, transposed. `tile_index` orders
    the rectangle.
    """
    odd, half = tiles % 2, (tiles + 1) // 2
    i, j = tile_index(tile, tiles + 1 - odd, half, GROUP_M)
    row = i - 1 + odd
    return tl.where(row >= j, row, half + j - odd), tl.where(row >= j, j, half + i)


@triton.jit
def tile_at(batch, row, column, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INDEX: tl.constexpr):
    """Return the tile at `row` and `column` of the grid of tiles, with contiguous rows and columns."""
    rows = row.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column.to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    return ResultTile(batch, rows, columns, rows < M, columns < N)


@triton.jit
def clamped_start(tile, SIZE: tl.constexpr, last):
    """Return the first row (or column) of a tile of SIZE rows, at most `last`; both are multiples of 16.

    TMA copies of blocks that reach past the end of a tensor are slower than copies of blocks within it. A clamped tile
    overlaps the tile before it, and both write the same values to the rows that they share.
    """
    return tl.minimum(tile * SIZE, aligned_to(last, 16))


@triton.jit
def clamped_end(end, size):
    """Clamp the end of a group, which callers choose freely, to 0 and `size`."""
    return tl.minimum(tl.maximum(end, 0), size)


# Alignment that Triton does not detect


@triton.jit
def aligned_sizes(M, N, K, META: tl.constexpr):
    """Return M, N and K in a form that Triton's alignment analysis sees (`GemmMeta`)."""
    return aligned_to(M, META.m_multiple), aligned_to(N, META.n_multiple), aligned_to(K, META.k_multiple)


@triton.jit
def aligned(strides, MULTIPLE: tl.constexpr, ROW_MAJOR: tl.constexpr):
    """Return `MatrixStrides` of which MULTIPLE divides the row's if ROW_MAJOR, otherwise the column's."""
    row = aligned_to(strides.row, MULTIPLE if ROW_MAJOR else 1)
    return MatrixStrides(strides.batch, row, aligned_to(strides.column, 1 if ROW_MAJOR else MULTIPLE))


@triton.jit
def aligned_batches(strides, MULTIPLE: tl.constexpr):
    """Return `MatrixStrides` of which MULTIPLE divides the batch's."""
    return MatrixStrides(aligned_to(strides.batch, MULTIPLE), strides.row, strides.column)


@triton.jit
def aligned_strides(strides, META: tl.constexpr):
    """Return `GemmStrides` in a form that Triton's alignment analysis sees (`GemmMeta`), but for those of batches."""
    return GemmStrides(
        aligned(strides.a, META.a_multiple, META.a_inner),
        aligned(strides.b, META.b_multiple, not META.b_inner),
        aligned(strides.out, META.out_multiple, META.out_inner),
    )


# The epilogue


@triton.jit
def _load_broadcast(pointer, strides, tile, KIND: tl.constexpr):
    """Load an epilogue tensor's values for a tile, in a shape that broadcasts to the tile.

    KIND has bit 1 set if the tensor varies along rows, bit 2 if it varies along columns. `pointer` is the batch's.
    """
    if KIND == 0:
        value = tl.load(pointer)
    elif KIND == 1:
        value = tl.load(pointer + tile.rows * strides.row, mask=tile.row_mask, other=0)[:, None]
    elif KIND == 2:
        value = tl.load(pointer + tile.columns * strides.column, mask=tile.column_mask, other=0)[None, :]
    else:
        pointers = pointer + (tile.rows * strides.row)[:, None] + (tile.columns * strides.column)[None, :]
        value = tl.load(pointers, mask=tile.row_mask[:, None] & tile.column_mask[None, :], other=0)
    return value


@triton.jit
def _after_program(product, tile, operands, META: tl.constexpr):
    """Return the result of META.program for a tile of the product and of the epilogue's further operands."""
    PROGRAM: tl.constexpr = META.program
    KINDS: tl.constexpr = META.kinds
    FIRST: tl.constexpr = len(KINDS) - len(operands.more)
    values = ()
    for i in tl.static_range(len(operands.more)):
        strides = operands.strides[FIRST + i]
        pointer = operands.more[i] + tile.batch * strides.batch
        values = values + (_load_broadcast(pointer, strides, tile, KINDS[FIRST + i]),)
    return evaluate_result_program(PROGRAM, product, values)[0]


@triton.jit
def epilogue(product, tile, arguments, META: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return ACTIVATION(alpha * product * scales + beta * addend) for a tile, in the product's dtype.

    META.program, if there is one, makes the result of that, in a dtype of its own.

    Args:
        product: the tile of sums, (rows, columns).
        tile: `ResultTile`.
        arguments: `EpilogueArguments`.
        META: `EpilogueMeta`.
        ACTIVATION: a device function of a block, or None.
    """
    operands = arguments.operands
    COUNT: tl.constexpr = len(operands.scales)
    KINDS: tl.constexpr = META.kinds
    for i in tl.static_range(COUNT):
        strides = operands.strides[i]
        product *= _load_broadcast(operands.scales[i] + tile.batch * strides.batch, strides, tile, KINDS[i])
    if META.scaled:
        product *= arguments.alpha
    if operands.addend is not None:
        strides = operands.strides[COUNT]
        added = _load_broadcast(operands.addend + tile.batch * strides.batch, strides, tile, KINDS[COUNT])
        product += arguments.beta * added.to(product.dtype)
    if ACTIVATION is not None:
        product = ACTIVATION(product)
    if META.program is not None:
        product = _after_program(product, tile, operands, META)
    return product


@triton.jit
def epilogue_of_float64(product, tile, operands, alpha, beta, META: tl.constexpr, ACTIVATION: tl.constexpr):
    """Cast alpha and beta from the host's float64 to the product's dtype, then apply `epilogue`."""
    alpha, beta = tl.full((), alpha, product.dtype), tl.full((), beta, product.dtype)
    return epilogue(product, tile, EpilogueArguments(operands, alpha, beta), META, ACTIVATION)


@triton.jit
def store(total, out, strides, tile):
    """Store a `ResultTile` in the result's dtype. `strides` are the result's `MatrixStrides`."""
    pointers = out + tile.batch * strides.batch + (tile.rows * strides.row)[:, None]
    pointers += (tile.columns * strides.column)[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=tile.row_mask[:, None] & tile.column_mask[None, :])
