"""Device functions shared by all kernels of products: which tile a program has, the epilogue, and the store."""

import triton
import triton.language as tl

from tritonite.language.indices import aligned_to


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
def clamped_start(tile, SIZE: tl.constexpr, last):
    """Return the first row (or column) of a tile of SIZE rows, at most `last`; both are multiples of 16.

    TMA copies of blocks that reach past the end of a tensor are slower than copies of blocks within it. A clamped tile
    overlaps the tile before it, and both write the same values to the rows that they share.
    """
    return tl.minimum(tile * SIZE, aligned_to(last, 16))


@triton.jit
def _load_broadcast(pointer, strides, rows, columns, row_mask, column_mask, KIND: tl.constexpr):
    """Load an epilogue tensor's values for a tile, in a shape that broadcasts to the tile.

    KIND has bit 1 set if the tensor varies along rows, bit 2 if it varies along columns. `strides` are (batch, row,
    column).
    """
    if KIND == 0:
        value = tl.load(pointer)
    elif KIND == 1:
        value = tl.load(pointer + rows * strides[1], mask=row_mask, other=0)[:, None]
    elif KIND == 2:
        value = tl.load(pointer + columns * strides[2], mask=column_mask, other=0)[None, :]
    else:
        pointers = pointer + (rows * strides[1])[:, None] + (columns * strides[2])[None, :]
        value = tl.load(pointers, mask=row_mask[:, None] & column_mask[None, :], other=0)
    return value


@triton.jit
def epilogue(product, tile, epilogue_arguments, SCALED: tl.constexpr, KINDS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return ACTIVATION(alpha * product * scales + beta * addend) for a tile, in the product's dtype.

    Args:
        product: the tile of sums, (rows, columns).
        tile: (batch, rows, columns, row_mask, column_mask): indices in the result, and which of them exist.
        epilogue_arguments: (addend, scales, strides, alpha, beta). `strides` has a (batch, row, column) for each scale,
            then one for the addend. alpha and beta have the product's dtype.
        SCALED: whether to multiply by alpha; otherwise alpha is 1.
        KINDS: which dimensions each scale, then the addend, varies along (`_load_broadcast`).
        ACTIVATION: a device function of a block, or None.
    """
    batch, rows, columns, row_mask, column_mask = tile
    addend, scales, strides, alpha, beta = epilogue_arguments
    COUNT: tl.constexpr = len(scales)
    for i in tl.static_range(COUNT):
        pointer = scales[i] + batch * strides[i][0]
        product *= _load_broadcast(pointer, strides[i], rows, columns, row_mask, column_mask, KINDS[i])
    if SCALED:
        product *= alpha
    if addend is not None:
        pointer = addend + batch * strides[COUNT][0]
        added = _load_broadcast(pointer, strides[COUNT], rows, columns, row_mask, column_mask, KINDS[COUNT])
        product += beta * added.to(product.dtype)
    if ACTIVATION is not None:
        product = ACTIVATION(product)
    return product


@triton.jit
def epilogue_of_float64(
    product, tile, epilogue_arguments, SCALED: tl.constexpr, KINDS: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Cast alpha and beta from the host's float64 to the product's dtype, then apply `epilogue`."""
    addend, scales, strides, alpha, beta = epilogue_arguments
    alpha, beta = tl.full((), alpha, product.dtype), tl.full((), beta, product.dtype)
    return epilogue(product, tile, (addend, scales, strides, alpha, beta), SCALED, KINDS, ACTIVATION)


@triton.jit
def store(total, out, strides, tile):
    """Store a tile (as in `epilogue`) in the result's dtype. `strides` are the result's (batch, row, column)."""
    batch, rows, columns, row_mask, column_mask = tile
    pointers = out + batch * strides[0] + (rows * strides[1])[:, None] + (columns * strides[2])[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
