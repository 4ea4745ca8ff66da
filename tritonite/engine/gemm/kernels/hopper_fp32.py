"""Products of float32 on Hopper, in Gluon: six asynchronous products of bfloat16 terms (bf16x6).

`language.bf16x6` has the method: a float32 operand is the sum of three bfloat16 terms. A Triton kernel waits for each
of the six products before it starts the next; here all are in flight at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonite.engine.gemm.kernels.arguments import EpilogueArguments, ResultTile
from tritonite.engine.gemm.kernels.epilogue import aligned, aligned_batches, aligned_sizes, epilogue, own_index, store
from tritonite.language.bf16x6 import split_terms
from tritonite.language.indices import aligned_to
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


class _Operand(NamedTuple):
    """An operand of a tile: the batch's pointer, the tile's first row (or column), and strides across and along K."""

    pointer: Any
    first: Any
    stride: Any
    inner_stride: Any


class _Bounds(NamedTuple):
    """Rows, columns, and the end along K of the tile's split-K slice; loads beyond give 0."""

    rows: Any
    columns: Any
    inner: Any


@gluon.jit
def shared_parts(ROWS_OF: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate shared memory for the three bfloat16 terms of a (ROWS_OF, COLUMNS) tile.

    Each term has an allocation of its own, because Triton puts a barrier between stores to slices of one.
    """
    WIDTH: gl.constexpr = min(128, 2 * COLUMNS)
    layout: gl.constexpr = gl.NVMMASharedLayout(WIDTH, 16, 2)
    first = gl.allocate_shared_memory(gl.bfloat16, [ROWS_OF, COLUMNS], layout)
    second = gl.allocate_shared_memory(gl.bfloat16, [ROWS_OF, COLUMNS], layout)
    return first, second, gl.allocate_shared_memory(gl.bfloat16, [ROWS_OF, COLUMNS], layout)


@gluon.jit
def store_parts(buffers, tile):
    """Store a float32 tile's three bfloat16 terms to shared memory."""
    first, second, third = split_terms(tile, "bf16x6")
    buffers[0].store(first)
    buffers[1].store(second)
    buffers[2].store(third)


@gluon.jit
def transposed(buffers):
    """Return transposed views of a tile's three terms in shared memory."""
    return buffers[0].permute((1, 0)), buffers[1].permute((1, 0)), buffers[2].permute((1, 0))


@gluon.jit
def in_registers(tile, layout: gl.constexpr):
    """Return a float32 tile's three terms in registers, as first operands of products whose results have `layout`."""
    first, second, third = split_terms(tile, "bf16x6")
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    first, second = gl.convert_layout(first, operand), gl.convert_layout(second, operand)
    return first, second, gl.convert_layout(third, operand)


@gluon.jit
def start_small_products(a, b, layout: gl.constexpr):
    """Start the five products that involve a second or third term, smallest first; return their sum, in flight."""
    M: gl.constexpr = a[0].shape[0]
    N: gl.constexpr = b[0].shape[1]
    total = gl.zeros((M, N), gl.float32, layout)
    total = warpgroup_mma(a[1], b[1], total, use_acc=False, is_async=True)
    total = warpgroup_mma(a[2], b[0], total, is_async=True)
    total = warpgroup_mma(a[0], b[2], total, is_async=True)
    total = warpgroup_mma(a[1], b[0], total, is_async=True)
    return warpgroup_mma(a[0], b[1], total, is_async=True)


# The products that `start_small_products` starts.
SMALL_PRODUCTS = gl.constexpr(5)


@gluon.jit
def start_main_product(a, b, total):
    """Start the product of the first terms, added to the finished small products.

    The small products of infinite elements are NaN, and are replaced by 0.
    """
    return warpgroup_mma(a[0], b[0], gl.where(total == total, total, 0.0), is_async=True)


@gluon.jit
def wait(a, total, OUTSTANDING: gl.constexpr):
    """Wait until at most OUTSTANDING products are in flight and return `total`; `a` stays in registers until then."""
    total, _first, _second, _third = warpgroup_mma_wait(OUTSTANDING, deps=(total, a[0], a[1], a[2]))
    return total


@gluon.jit
def _load_rows(a, k, bounds, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, layout: gl.constexpr):
    """Load a block of the first operand to the registers of the threads that multiply it."""
    rows = a.first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    inner = k + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    pointers = a.pointer + (rows * a.stride)[:, None] + (inner * a.inner_stride)[None, :]
    return gl.load(pointers, mask=(rows < bounds.rows)[:, None] & (inner < bounds.inner)[None, :], other=0.0)


@gluon.jit
def _load_columns(b, k, bounds, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, B_INNER: gl.constexpr):
    """Load a (BLOCK_K, BLOCK_N) block of the second operand, or its transpose if B_INNER: the contiguous way."""
    ALONG: gl.constexpr = min(32, (BLOCK_K if B_INNER else BLOCK_N) // 4)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ALONG, ALONG], [gl.num_warps(), 1], [1, 0])
    if B_INNER:
        columns = b.first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
        inner = k + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
        pointers = b.pointer + (columns * b.stride)[:, None] + (inner * b.inner_stride)[None, :]
        mask = (columns < bounds.columns)[:, None] & (inner < bounds.inner)[None, :]
    else:
        columns = b.first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        inner = k + gl.arange(0, BLOCK_K, gl.SliceLayout(1, layout))
        pointers = b.pointer + (inner * b.inner_stride)[:, None] + (columns * b.stride)[None, :]
        mask = (inner < bounds.inner)[:, None] & (columns < bounds.columns)[None, :]
    return gl.load(pointers, mask=mask, other=0.0)


@gluon.jit
def _multiply_block(
    state,
    k,
    a,
    b,
    bounds,
    here,
    there,
    CAREFUL: gl.constexpr,
    layout: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    B_INNER: gl.constexpr,
):
    """Multiply a block of K while the next one is loaded.

    Args:
        state: (sums so far, the terms of a's block in registers).
        k: the block's first index along K.
        here: the terms of b's block in shared memory.
        there: where the terms of b's next block are stored.
        CAREFUL: whether NaN of small products is replaced before the main product.

    Returns:
        The sums with this block's product, and the terms of a's next block.
    """
    total, x = state
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    y = here
    if B_INNER:
        y = transposed(here)
    fence_async_shared()
    product = start_small_products(x, y, layout)
    if not CAREFUL:
        product = warpgroup_mma(x[0], y[0], product, is_async=True)
    next_x = _load_rows(a, k + BLOCK_K, bounds, BLOCK_M, BLOCK_K, operand)
    next_y = _load_columns(b, k + BLOCK_K, bounds, BLOCK_N, BLOCK_K, B_INNER)
    following = in_registers(next_x, layout)
    store_parts(there, next_y)
    if CAREFUL:
        product = start_main_product(x, y, warpgroup_mma_wait(0, deps=(product,)))
    return total + wait(x, product, 0), following


@gluon.jit
def _sum_tile(
    a,
    b,
    bounds,
    begin,
    steps,
    even,
    odd,
    CAREFUL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    B_INNER: gl.constexpr,
):
    """Return a tile's sums over `steps` blocks of K from index `begin` on.

    The terms of b's blocks alternate between the shared memory buffers `even` and `odd`.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    total = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
    x = in_registers(_load_rows(a, begin, bounds, BLOCK_M, BLOCK_K, operand), layout)
    store_parts(even, _load_columns(b, begin, bounds, BLOCK_N, BLOCK_K, B_INNER))
    for i in range(0, steps // 2):
        k = begin + 2 * i * BLOCK_K
        state = total, x
        total, x = _multiply_block(
            state, k, a, b, bounds, even, odd, CAREFUL, layout, BLOCK_M, BLOCK_N, BLOCK_K, B_INNER
        )
        state = total, x
        total, x = _multiply_block(
            state, k + BLOCK_K, a, b, bounds, odd, even, CAREFUL, layout, BLOCK_M, BLOCK_N, BLOCK_K, B_INNER
        )
    if steps % 2 == 1:
        y = even
        if B_INNER:
            y = transposed(even)
        fence_async_shared()
        product = start_small_products(x, y, layout)
        product = start_main_product(x, y, warpgroup_mma_wait(0, deps=(product,)))
        total += wait(x, product, 0)
    return total


@libentry()
@gluon.jit(do_not_specialize=["batches", "M", "steps"])
def multiply_bf16x6(
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
    META: gl.constexpr,
):
    """Multiply float32 by six products of bfloat16 terms, one tile a program; arguments as in `pointers`.

    A tile has 64 rows for each warp group. Each group loads its rows of a's block to registers, where they are split
    into terms and multiplied. The terms of b's block go through shared memory, in two buffers: one is multiplied while
    the other is filled.

    The small products of infinite elements are NaN. A tile whose sums are not all finite is computed a second time.
    NaN of small products is then replaced by 0 before the main product is added.
    """
    wait_for_previous_launch()
    BLOCK_M: gl.constexpr = META.block_m
    BLOCK_N: gl.constexpr = META.block_n
    BLOCK_K: gl.constexpr = META.block_k
    B_INNER: gl.constexpr = META.b_inner
    M, N, K = aligned_sizes(M, N, K, META)
    batch, row, column = own_index(M, N, BLOCK_M, BLOCK_N, META.group_m, META.index)
    row, column = row.to(META.index) * BLOCK_M, column.to(META.index) * BLOCK_N
    begin = gl.program_id(1).to(META.index) * steps * BLOCK_K
    bounds = _Bounds(M, N, gl.minimum(begin + steps * BLOCK_K, K))
    count = gl.cdiv(bounds.inner - begin, BLOCK_K).to(gl.int32)
    pointer = a + batch * aligned_to(strides.a.batch, META.a_multiple)
    own_strides = aligned(strides.a, META.a_multiple, META.a_inner)
    own_a = _Operand(pointer, row, own_strides.row, own_strides.column)
    pointer = b + batch * aligned_to(strides.b.batch, META.b_multiple)
    own_strides = aligned(strides.b, META.b_multiple, not META.b_inner)
    own_b = _Operand(pointer, column, own_strides.column, own_strides.row)
    ROWS_OF: gl.constexpr = BLOCK_N if B_INNER else BLOCK_K
    COLUMNS: gl.constexpr = BLOCK_K if B_INNER else BLOCK_N
    even = shared_parts(ROWS_OF, COLUMNS)
    odd = shared_parts(ROWS_OF, COLUMNS)
    total = _sum_tile(own_a, own_b, bounds, begin, count, even, odd, False, BLOCK_M, BLOCK_N, BLOCK_K, B_INNER)
    finite = gl.min(gl.min((gl.abs(total) < float("inf")).to(gl.int32), 1), 0)
    if finite == 0:
        total = _sum_tile(own_a, own_b, bounds, begin, count, even, odd, True, BLOCK_M, BLOCK_N, BLOCK_K, B_INNER)
    # Store contiguous elements by the widest vectors that the alignment allows. In the accumulator's layout a warp
    # would store short segments of eight rows, each with several transactions where rows start within a sector.
    OUT_MULTIPLE: gl.constexpr = META.out_multiple
    OUT_INNER: gl.constexpr = META.out_inner
    ALONG: gl.constexpr = min(32, (BLOCK_N if OUT_INNER else BLOCK_M) // OUT_MULTIPLE)
    written: gl.constexpr = gl.BlockedLayout(
        [1, OUT_MULTIPLE] if OUT_INNER else [OUT_MULTIPLE, 1],
        [32 // ALONG, ALONG] if OUT_INNER else [ALONG, 32 // ALONG],
        [gl.num_warps(), 1] if OUT_INNER else [1, gl.num_warps()],
        [1, 0] if OUT_INNER else [0, 1],
    )
    total = gl.convert_layout(total, written)
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, written))
    columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, written))
    if META.split:
        batch += gl.program_id(1).to(META.index) * batches
    tile = ResultTile(batch, rows, columns, rows < M, columns < N)
    if not META.split:
        arguments = EpilogueArguments(added, alpha.to(gl.float32), beta.to(gl.float32))
        total = epilogue(total, tile, arguments, META, None)
    own_strides = aligned(strides.out, OUT_MULTIPLE, OUT_INNER)
    store(total, out, aligned_batches(own_strides, OUT_MULTIPLE), tile)
