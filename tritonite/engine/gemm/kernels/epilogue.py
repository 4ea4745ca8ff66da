"""What becomes of a product before it is written: scales, an addend, an activation; and where tiles are."""

import triton
import triton.language as tl

from tritonite.language.indices import aligned_to


@triton.jit
def place(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of a tile, in an order in which what GROUP_M rows of tiles read stays in a cache."""
    group = tile // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    rest = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + rest % height, rest // height


@triton.jit
def begin_within(tile, SIZE: tl.constexpr, last):
    """Where rows, or columns, of a tile of SIZE begin: none later than `last`, a multiple of 16 as SIZE is.

    A copy of a block in part beyond the end of a tensor takes longer than of one within: the share beyond, from the L2
    cache, 2.5 times as long. The last tile may share rows with the one before, and then both write the same.
    2,688 rows by 320 columns of K = 3,072 in tiles of 64 by 128 took 15.7 us, by 384 columns 10.6 (float16, H200).
    """
    return tl.minimum(tile * SIZE, aligned_to(last, 16))


@triton.jit
def _varying(pointer, strides, rows, columns, row_mask, column_mask, KIND: tl.constexpr):
    """What varies along the rows (KIND 1), the columns (2), both (3) or neither (0), to broadcast to a tile."""
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
    """ACTIVATION(alpha * product * scales + beta * addend), in the dtype of the product, as alpha and beta are.

    A `tile` is its batch, rows and columns, and which of them there are. `epilogue_arguments` are (addend, scales,
    strides, alpha, beta), where strides are (batch, row, column) of the scales and then of the addend, and KINDS what
    they vary along. Unless SCALED, alpha is 1.
    """
    batch, rows, columns, row_mask, column_mask = tile
    addend, scales, strides, alpha, beta = epilogue_arguments
    COUNT: tl.constexpr = len(scales)
    for i in tl.static_range(COUNT):
        pointer = scales[i] + batch * strides[i][0]
        product *= _varying(pointer, strides[i], rows, columns, row_mask, column_mask, KINDS[i])
    if SCALED:
        product *= alpha
    if addend is not None:
        pointer = addend + batch * strides[COUNT][0]
        added = _varying(pointer, strides[COUNT], rows, columns, row_mask, column_mask, KINDS[COUNT])
        product += beta * added.to(product.dtype)
    if ACTIVATION is not None:
        product = ACTIVATION(product)
    return product


@triton.jit
def epilogue_of_float64(
    product, tile, epilogue_arguments, SCALED: tl.constexpr, KINDS: tl.constexpr, ACTIVATION: tl.constexpr
):
    """The same of numbers as the host gives them, in float64."""
    addend, scales, strides, alpha, beta = epilogue_arguments
    alpha, beta = tl.full((), alpha, product.dtype), tl.full((), beta, product.dtype)
    return epilogue(product, tile, (addend, scales, strides, alpha, beta), SCALED, KINDS, ACTIVATION)


@triton.jit
def store(total, out, strides, tile):
    """Write a tile, as `epilogue` has it; `strides` are the result's (batch, row, column)."""
    batch, rows, columns, row_mask, column_mask = tile
    pointers = out + batch * strides[0] + (rows * strides[1])[:, None] + (columns * strides[2])[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
