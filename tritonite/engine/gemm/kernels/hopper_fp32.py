"""Products of float32 on Hopper, in Gluon: as three parts of bfloat16 each, whose products follow each other.

`language.bf16x6` has the method. In a kernel of Triton's each of the six products of two operands' parts is waited for
before the next begins; here they are under way at once.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonite.engine.gemm.kernels.epilogue import epilogue, place, store
from tritonite.language.bf16x6 import split_terms
from tritonite.language.indices import aligned_to
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@gluon.jit
def shared_parts(ROWS_OF: gl.constexpr, COLUMNS: gl.constexpr):
    """Room for the three parts of a tile in shared memory.

    Each has its own: with a barrier Triton would part what is written to parts of one.
    """
    WIDTH: gl.constexpr = min(128, 2 * COLUMNS)
    layout: gl.constexpr = gl.NVMMASharedLayout(WIDTH, 16, 2)
    first = gl.allocate_shared_memory(gl.bfloat16, [ROWS_OF, COLUMNS], layout)
    second = gl.allocate_shared_memory(gl.bfloat16, [ROWS_OF, COLUMNS], layout)
    return first, second, gl.allocate_shared_memory(gl.bfloat16, [ROWS_OF, COLUMNS], layout)


@gluon.jit
def store_parts(buffers, tile):
    """Write a tile's three parts to shared memory."""
    first, second, third = split_terms(tile, "bf16x6")
    buffers[0].store(first)
    buffers[1].store(second)
    buffers[2].store(third)


@gluon.jit
def transposed(buffers):
    """The parts of a tile's transpose, in shared memory."""
    return buffers[0].permute((1, 0)), buffers[1].permute((1, 0)), buffers[2].permute((1, 0))


@gluon.jit
def in_registers(tile, layout: gl.constexpr):
    """A tile's parts as first operands of products that are laid out so."""
    first, second, third = split_terms(tile, "bf16x6")
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    first, second = gl.convert_layout(first, operand), gl.convert_layout(second, operand)
    return first, second, gl.convert_layout(third, operand)


@gluon.jit
def begin(a, b, layout: gl.constexpr):
    """Start the five smaller products of parts."""
    M: gl.constexpr = a[0].shape[0]
    N: gl.constexpr = b[0].shape[1]
    total = gl.zeros((M, N), gl.float32, layout)
    total = warpgroup_mma(a[1], b[1], total, use_acc=False, is_async=True)
    total = warpgroup_mma(a[2], b[0], total, is_async=True)
    total = warpgroup_mma(a[0], b[2], total, is_async=True)
    total = warpgroup_mma(a[1], b[0], total, is_async=True)
    return warpgroup_mma(a[0], b[1], total, is_async=True)


# How many `begin` starts.
BEGUN = gl.constexpr(5)


@gluon.jit
def go_on(a, b, total):
    """Start the largest product, after the smaller ones, which of infinite elements are nan, have been waited for."""
    return warpgroup_mma(a[0], b[0], gl.where(total == total, total, 0.0), is_async=True)


@gluon.jit
def end(a, total, OUTSTANDING: gl.constexpr):
    """The product of parts in registers once no more than so many are under way; these are kept until then."""
    total, _first, _second, _third = warpgroup_mma_wait(OUTSTANDING, deps=(total, a[0], a[1], a[2]))
    return total


@gluon.jit
def _load_rows(a, k, ends, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, layout: gl.constexpr):
    """A block of the first operand, each thread what it multiplies of it, of sectors that four lanes or eight share."""
    pointer, row, along_row, along_inner = a
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    inner = k + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    pointers = pointer + (rows * along_row)[:, None] + (inner * along_inner)[None, :]
    return gl.load(pointers, mask=(rows < ends[0])[:, None] & (inner < ends[2])[None, :], other=0.0)


@gluon.jit
def _load_columns(b, k, ends, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, B_INNER: gl.constexpr):
    """A block of the second operand, or its transpose where elements along K are next to each other."""
    pointer, column, along_inner, along_column = b
    ALONG: gl.constexpr = min(32, (BLOCK_K if B_INNER else BLOCK_N) // 4)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ALONG, ALONG], [gl.num_warps(), 1], [1, 0])
    if B_INNER:
        columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
        inner = k + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
        pointers = pointer + (columns * along_column)[:, None] + (inner * along_inner)[None, :]
        mask = (columns < ends[1])[:, None] & (inner < ends[2])[None, :]
    else:
        columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        inner = k + gl.arange(0, BLOCK_K, gl.SliceLayout(1, layout))
        pointers = pointer + (inner * along_inner)[:, None] + (columns * along_column)[None, :]
        mask = (inner < ends[2])[:, None] & (columns < ends[1])[None, :]
    return gl.load(pointers, mask=mask, other=0.0)


@gluon.jit
def _take(
    state,
    k,
    a,
    b,
    ends,
    here,
    there,
    CAREFUL: gl.constexpr,
    layout: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    B_INNER: gl.constexpr,
):
    """The sums and the product of a block of K, and the first operand's next block in parts.

    The block's parts are in registers, `x`, and in shared memory, `here`. The next block comes under the products of
    this one, and its parts are written `there`.
    """
    total, x = state
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    y = here
    if B_INNER:
        y = transposed(here)
    fence_async_shared()
    product = begin(x, y, layout)
    if not CAREFUL:
        product = warpgroup_mma(x[0], y[0], product, is_async=True)
    next_x = _load_rows(a, k + BLOCK_K, ends, BLOCK_M, BLOCK_K, operand)
    next_y = _load_columns(b, k + BLOCK_K, ends, BLOCK_N, BLOCK_K, B_INNER)
    following = in_registers(next_x, layout)
    store_parts(there, next_y)
    if CAREFUL:
        product = go_on(x, y, warpgroup_mma_wait(0, deps=(product,)))
    return total + end(x, product, 0), following


@gluon.jit
def _sums(
    a,
    b,
    ends,
    begin_at,
    steps,
    even,
    odd,
    CAREFUL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    B_INNER: gl.constexpr,
):
    """The sums of a tile over `steps` blocks of K, whose parts are in turn in `even` and in `odd` shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    total = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
    x = in_registers(_load_rows(a, begin_at, ends, BLOCK_M, BLOCK_K, operand), layout)
    store_parts(even, _load_columns(b, begin_at, ends, BLOCK_N, BLOCK_K, B_INNER))
    for i in range(0, steps // 2):
        k = begin_at + 2 * i * BLOCK_K
        state = total, x
        total, x = _take(state, k, a, b, ends, even, odd, CAREFUL, layout, BLOCK_M, BLOCK_N, BLOCK_K, B_INNER)
        state = total, x
        total, x = _take(state, k + BLOCK_K, a, b, ends, odd, even, CAREFUL, layout, BLOCK_M, BLOCK_N, BLOCK_K, B_INNER)
    if steps % 2 == 1:
        y = even
        if B_INNER:
            y = transposed(even)
        fence_async_shared()
        product = begin(x, y, layout)
        product = go_on(x, y, warpgroup_mma_wait(0, deps=(product,)))
        total += end(x, product, 0)
    return total


@libentry()
@gluon.jit(do_not_specialize=["batches", "M", "steps"])
def multiply_in_parts(
    a,
    b,
    out,
    addend,
    scales,
    strides,
    epilogue_strides,
    batches,
    M,
    N,
    K,
    steps,
    alpha: tl.float64,
    beta: tl.float64,
    SCALED: gl.constexpr,
    KINDS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    INDEX: gl.constexpr,
    SPLIT: gl.constexpr,
    ALIGNED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """As `triton.multiply`, of float32 by products of bfloat16 parts, in tiles of 64 rows for each group of four warps.

    Of a block of K the first operand goes from memory to the registers where it is multiplied, each group's own rows;
    the second by way of shared memory, in two buffers: the parts of a block are cut and written, and the next is on its
    way, while the one before is multiplied. The smaller products of what is infinite are nan. Sums that are not finite
    are computed again, with the smaller products looked at before the largest is added.
    """
    wait_for_previous_launch()
    EVERY_A: gl.constexpr = ALIGNED[3]
    EVERY_B: gl.constexpr = ALIGNED[4]
    EVERY_OUT: gl.constexpr = ALIGNED[5]
    A_INNER: gl.constexpr = ALIGNED[6]
    B_INNER: gl.constexpr = ALIGNED[7]
    M, N, K = aligned_to(M, ALIGNED[0]), aligned_to(N, ALIGNED[1]), aligned_to(K, ALIGNED[2])
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    batch = (gl.program_id(0) // (tiles_m * tiles_n)).to(INDEX)
    row, column = place(gl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    row, column = row.to(INDEX) * BLOCK_M, column.to(INDEX) * BLOCK_N
    begin_at = gl.program_id(1).to(INDEX) * steps * BLOCK_K
    ends = M, N, gl.minimum(begin_at + steps * BLOCK_K, K)
    count = gl.cdiv(ends[2] - begin_at, BLOCK_K).to(gl.int32)
    own_a = (
        a + batch * aligned_to(strides[0][0], EVERY_A),
        row,
        aligned_to(strides[0][1], EVERY_A if A_INNER else 1),
        aligned_to(strides[0][2], 1 if A_INNER else EVERY_A),
    )
    own_b = (
        b + batch * aligned_to(strides[1][0], EVERY_B),
        column,
        aligned_to(strides[1][1], 1 if B_INNER else EVERY_B),
        aligned_to(strides[1][2], EVERY_B if B_INNER else 1),
    )
    ROWS_OF: gl.constexpr = BLOCK_N if B_INNER else BLOCK_K
    COLUMNS: gl.constexpr = BLOCK_K if B_INNER else BLOCK_N
    even = shared_parts(ROWS_OF, COLUMNS)
    odd = shared_parts(ROWS_OF, COLUMNS)
    total = _sums(own_a, own_b, ends, begin_at, count, even, odd, False, BLOCK_M, BLOCK_N, BLOCK_K, B_INNER)
    finite = gl.min(gl.min((gl.abs(total) < float("inf")).to(gl.int32), 1), 0)
    if finite == 0:
        total = _sums(own_a, own_b, ends, begin_at, count, even, odd, True, BLOCK_M, BLOCK_N, BLOCK_K, B_INNER)
    # A warp writes what is next to each other, as many elements a thread as addresses allow. What tensor cores leave in
    # its threads are parts of eight rows, and where those begin within a sector three times as many writes.
    OUT_INNER: gl.constexpr = ALIGNED[8]
    ALONG: gl.constexpr = min(32, (BLOCK_N if OUT_INNER else BLOCK_M) // EVERY_OUT)
    written: gl.constexpr = gl.BlockedLayout(
        [1, EVERY_OUT] if OUT_INNER else [EVERY_OUT, 1],
        [32 // ALONG, ALONG] if OUT_INNER else [ALONG, 32 // ALONG],
        [gl.num_warps(), 1] if OUT_INNER else [1, gl.num_warps()],
        [1, 0] if OUT_INNER else [0, 1],
    )
    total = gl.convert_layout(total, written)
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, written))
    columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, written))
    if SPLIT:
        batch += gl.program_id(1).to(INDEX) * batches
    tile = batch, rows, columns, rows < M, columns < N
    if not SPLIT:
        arguments = addend, scales, epilogue_strides, alpha.to(gl.float32), beta.to(gl.float32)
        total = epilogue(total, tile, arguments, SCALED, KINDS, ACTIVATION)
    out_row = aligned_to(strides[2][1], EVERY_OUT if OUT_INNER else 1)
    out_column = aligned_to(strides[2][2], 1 if OUT_INNER else EVERY_OUT)
    store(total, out, (aligned_to(strides[2][0], EVERY_OUT), out_row, out_column), tile)
