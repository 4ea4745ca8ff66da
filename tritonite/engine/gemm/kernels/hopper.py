"""The warp-specialised kernel of products, in Gluon, for tensor cores that read shared memory (sm_90).

One warp copies operand blocks by TMA, and one to three warp groups (consumers) multiply them and store results.
Barriers in shared memory say when a block is ready and when its buffer is free. CUTLASS has the same two schedules for
Hopper: "cooperative", where consumers share a tile, and "ping-pong", where each has every other tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonite.engine.gemm.kernels.arguments import EpilogueArguments, ResultTile
from tritonite.engine.gemm.kernels.epilogue import clamped_start, epilogue, tile_index
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared_memory import init_barriers, new_barriers, new_blocks
from tritonite.runtime.libentry import libentry

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor as AnyLayout

# Triton 3.9 renamed both functions.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


class _Sizes(NamedTuple):
    """Run-time sizes of a launch.

    `tiles` counts all tiles of all batches and split-K slices; `tiles_m` and `tiles_n` those of a matrix. K has
    `blocks` blocks, and a split-K slice `steps` of them. No tile starts after `last_row` and `last_column`.
    """

    M: Any
    N: Any
    batches: Any
    tiles: Any
    tiles_m: Any
    tiles_n: Any
    blocks: Any
    steps: Any
    programs: Any
    last_row: Any
    last_column: Any


class _Buffers(NamedTuple):
    """Shared memory: operand blocks by stage, and barriers.

    `ready` says that a stage's blocks have arrived and `free` that they have been multiplied; `turns` whose turn it is
    to multiply (ping-pong), and `addend_ready` that a consumer's tile of the addend has arrived.
    """

    a: Any
    b: Any
    b_more: Any
    ready: Any
    free: Any
    turns: Any
    addend_ready: Any


class _Results(NamedTuple):
    """Descriptors of the result and the addend, and the staging buffers of both in shared memory.

    Those named `more` are for the last META.more_n columns of a tile.
    """

    out: Any
    out_more: Any
    staging: Any
    staging_more: Any
    addend: Any
    addend_more: Any


@gluon.jit
def _copy_operands(a, b, b_more, buffers, sizes, META: gl.constexpr):
    """Copy the blocks of every tile of this program to the stages, as they become free. One warp does this."""
    STAGES: gl.constexpr = META.stages
    # Blocks of a in a stage: one, or one for each consumer.
    COPIES: gl.constexpr = buffers.a.shape[0] // STAGES
    ROWS: gl.constexpr = buffers.a.shape[3] if META.a_transposed else buffers.a.shape[2]
    COLUMNS: gl.constexpr = buffers.b.shape[2] if META.b_transposed else buffers.b.shape[3]
    INNER: gl.constexpr = buffers.a.shape[2] if META.a_transposed else buffers.a.shape[3]
    BYTES: gl.constexpr = (COPIES * ROWS + COLUMNS + META.more_n) * INNER * buffers.a.dtype.primitive_bitwidth // 8
    step = 0
    for tile in range(gl.program_id(0), sizes.tiles, sizes.programs):
        matrix = tile // (sizes.tiles_m * sizes.tiles_n)
        batch, begin = matrix % sizes.batches, matrix // sizes.batches * sizes.steps
        row, column = tile_index(tile % (sizes.tiles_m * sizes.tiles_n), sizes.tiles_m, sizes.tiles_n, META.group_m)
        row = clamped_start(row, COPIES * ROWS, sizes.last_row)
        column = clamped_start(column, COLUMNS + META.more_n, sizes.last_column)
        for block in range(begin, gl.minimum(begin + sizes.steps, sizes.blocks)):
            stage, inner = step % STAGES, block * INNER
            mbarrier.wait(buffers.free.index(stage), 1 - step // STAGES % 2)
            ready = buffers.ready.index(stage)
            mbarrier.expect(ready, BYTES)
            for i in gl.static_range(COPIES):
                first = row + i * ROWS
                a_start = [batch, inner, first] if META.a_transposed else [batch, first, inner]
                load(a, a_start, ready, buffers.a.index(stage * COPIES + i))
            b_start = [batch, column, inner] if META.b_transposed else [batch, inner, column]
            load(b, b_start, ready, buffers.b.index(stage))
            if META.more_n > 0:
                first = column + COLUMNS
                b_more_start = [batch, first, inner] if META.b_transposed else [batch, inner, first]
                load(b_more, b_more_start, ready, buffers.b_more.index(stage))
            step += 1


@gluon.jit
def _store_subtile(subtile, out, staging, start, sizes, arguments, META: gl.constexpr, PENDING: gl.constexpr):
    """Apply the epilogue to a subtile and store it by TMA through the buffer `staging`.

    `start` is (matrix, row, column) in the result. With META.addend_by_tma the buffer holds the addend at first. At
    most PENDING earlier stores may still read their buffers.
    """
    matrix, row, column = start
    ROWS: gl.constexpr = subtile.shape[0]
    WIDTH: gl.constexpr = subtile.shape[1]
    if META.out_transposed:
        buffer = staging.reshape((WIDTH, ROWS)).permute((1, 0))
    else:
        buffer = staging.reshape((ROWS, WIDTH))
    rows = row.to(META.index) + gl.arange(0, ROWS, gl.SliceLayout(1, subtile.type.layout))
    columns = column.to(META.index) + gl.arange(0, WIDTH, gl.SliceLayout(0, subtile.type.layout))
    batch = (matrix % sizes.batches).to(META.index)
    own = ResultTile(batch, rows, columns, rows < sizes.M, columns < sizes.N)
    result = epilogue(subtile, own, arguments, META, None)
    if META.addend_by_tma:
        result += arguments.beta * buffer.load(subtile.type.layout).to(gl.float32)
    tma.store_wait(pendings=PENDING)
    buffer.store(result.to(out.dtype))
    fence_async_shared()
    store(out, [matrix, column, row] if META.out_transposed else [matrix, row, column], staging)


@gluon.jit
def _copy_addend(results, ready, start, batches, META: gl.constexpr, CONSUMER: gl.constexpr):
    """Copy the addend of a tile to the consumer's staging buffers, once earlier results have left them."""
    matrix, row, column = start
    ROWS: gl.constexpr = results.staging.shape[3] if META.out_transposed else results.staging.shape[2]
    WIDTH: gl.constexpr = results.staging.shape[2] if META.out_transposed else results.staging.shape[3]
    BYTES: gl.constexpr = ROWS * (2 * WIDTH + META.more_n) * results.staging.dtype.primitive_bitwidth // 8
    batch = matrix % batches if META.addend_batched else 0
    tma.store_wait(pendings=0)
    mbarrier.expect(ready, BYTES)
    for i in gl.static_range(2):
        first = column + i * WIDTH
        from_here = [batch, first, row] if META.out_transposed else [batch, row, first]
        load(results.addend, from_here, ready, results.staging.index(2 * CONSUMER + i))
    if META.more_n > 0:
        first = column + 2 * WIDTH
        from_here = [batch, first, row] if META.out_transposed else [batch, row, first]
        load(results.addend_more, from_here, ready, results.staging_more.index(CONSUMER))


@gluon.jit
def _prefetch_addend(start, sizes, operands, ROWS: gl.constexpr, COLUMNS: gl.constexpr, META: gl.constexpr):
    """Prefetch the addend of a tile into the L2 cache, if the addend varies along both rows and columns."""
    matrix, row, column = start
    COUNT: gl.constexpr = len(operands.scales)
    KINDS: gl.constexpr = META.kinds
    OUT_TRANSPOSED: gl.constexpr = META.out_transposed
    if KINDS[COUNT] == 3:
        strides = operands.strides[COUNT]
        LINE: gl.constexpr = 1024 // operands.addend.dtype.element_ty.primitive_bitwidth
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])
        LENGTH: gl.constexpr = ROWS if OUT_TRANSPOSED else COLUMNS
        each = gl.arange(0, COLUMNS if OUT_TRANSPOSED else ROWS, gl.SliceLayout(1, layout))[:, None]
        line = gl.arange(0, max(1, LENGTH // LINE), gl.SliceLayout(0, layout))[None, :] * LINE
        rows, columns = (line, each) if OUT_TRANSPOSED else (each, line)
        rows = gl.minimum(row + rows, sizes.M - 1).to(META.index)
        columns = gl.minimum(column + columns, sizes.N - 1).to(META.index)
        first = operands.addend + (matrix % sizes.batches).to(META.index) * strides.batch
        address = (first + rows * strides.row + columns * strides.column).to(gl.int64)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _b_operand(block, COLUMNS: gl.constexpr, INNER: gl.constexpr, B_TRANSPOSED: gl.constexpr):
    """Return a block of b in shared memory as (INNER, COLUMNS)."""
    if B_TRANSPOSED:
        operand = block.reshape((COLUMNS, INNER)).permute((1, 0))
    else:
        operand = block.reshape((INNER, COLUMNS))
    return operand


@gluon.jit
def _consume(results, buffers, sizes, arguments, META: gl.constexpr, CONSUMER: gl.constexpr):
    """Multiply and store, as warp group number CONSUMER: its rows of every tile, or with ping-pong every other tile."""
    STAGES: gl.constexpr = META.stages
    COPIES: gl.constexpr = buffers.a.shape[0] // STAGES
    ROWS: gl.constexpr = results.staging.shape[3] if META.out_transposed else results.staging.shape[2]
    COLUMNS: gl.constexpr = buffers.b.shape[2] if META.b_transposed else buffers.b.shape[3]
    INNER: gl.constexpr = buffers.a.shape[2] if META.a_transposed else buffers.a.shape[3]
    WIDTH: gl.constexpr = results.staging.shape[2] if META.out_transposed else results.staging.shape[3]
    BUFFERS: gl.constexpr = META.buffers
    MORE: gl.constexpr = META.more_n
    PINGPONG: gl.constexpr = META.pingpong
    # Which of the row sharers this consumer is.
    SHARER: gl.constexpr = 0 if PINGPONG else CONSUMER
    DEPTH: gl.constexpr = 256 // buffers.a.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, DEPTH])
    layout_more: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(MORE, 16), DEPTH])
    first_tile, step, turn = gl.program_id(0), 0, 0
    addends = 0
    if PINGPONG:
        first_tile += CONSUMER * sizes.programs
        step = CONSUMER * sizes.blocks
    for tile in range(first_tile, sizes.tiles, META.turns * sizes.programs):
        matrix = tile // (sizes.tiles_m * sizes.tiles_n)
        begin = matrix // sizes.batches * sizes.steps
        row, column = tile_index(tile % (sizes.tiles_m * sizes.tiles_n), sizes.tiles_m, sizes.tiles_n, META.group_m)
        row = clamped_start(row, META.row_sharers * ROWS, sizes.last_row) + SHARER * ROWS
        column = clamped_start(column, COLUMNS + MORE, sizes.last_column)
        total = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
        total_more = gl.zeros((ROWS, max(MORE, 16)), gl.float32, layout_more)
        if META.addend_by_tma:
            ready = buffers.addend_ready.index(CONSUMER)
            _copy_addend(results, ready, (matrix, row, column), sizes.batches, META, CONSUMER)
        elif arguments.operands.addend is not None:
            WHOLE: gl.constexpr = COLUMNS * (2 if MORE > 0 else 1)
            _prefetch_addend((matrix, row, column), sizes, arguments.operands, ROWS, WHOLE, META)
        if PINGPONG:
            mbarrier.wait(buffers.turns.index(CONSUMER), (turn + 1 - CONSUMER) % 2)
            turn += 1
        for block in range(begin, gl.minimum(begin + sizes.steps, sizes.blocks)):
            stage = step % STAGES
            mbarrier.wait(buffers.ready.index(stage), step // STAGES % 2)
            if META.a_transposed:
                x = buffers.a.index(stage * COPIES + SHARER).reshape((INNER, ROWS)).permute((1, 0))
            elif COPIES == 1:
                x = buffers.a.index(stage).reshape((META.row_sharers * ROWS, INNER)).slice(SHARER * ROWS, ROWS)
            else:
                x = buffers.a.index(stage * COPIES + SHARER).reshape((ROWS, INNER))
            y = _b_operand(buffers.b.index(stage), COLUMNS, INNER, META.b_transposed)
            if META.blockwise:
                partial = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
                partial = warpgroup_mma(x, y, partial, use_acc=False, is_async=True)
                total += warpgroup_mma_wait(0, deps=(partial,))
                mbarrier.arrive(buffers.free.index(stage))
            else:
                total = warpgroup_mma(x, y, total, is_async=True)
                if MORE > 0:
                    y_more = _b_operand(buffers.b_more.index(stage), MORE, INNER, META.b_transposed)
                    total_more = warpgroup_mma(x, y_more, total_more, is_async=True)
                    total, total_more = warpgroup_mma_wait(2, deps=(total, total_more))
                else:
                    total = warpgroup_mma_wait(1, deps=(total,))
                # Only this block's product is in flight, so the stage of the block before is free.
                mbarrier.arrive(buffers.free.index((step + STAGES - 1) % STAGES), pred=block > begin)
            step += 1
        if PINGPONG:
            mbarrier.arrive(buffers.turns.index(1 - CONSUMER))
        if not META.blockwise:
            if MORE > 0:
                total, total_more = warpgroup_mma_wait(0, deps=(total, total_more))
            else:
                total = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(buffers.free.index((step + STAGES - 1) % STAGES))
        # With ping-pong the blocks of the other consumer's tile come next.
        step += (META.turns - 1) * sizes.blocks
        if META.addend_by_tma:
            mbarrier.wait(buffers.addend_ready.index(CONSUMER), addends % 2)
            addends += 1
        subtiles = total.reshape((ROWS, 2, WIDTH)).permute((0, 2, 1)).split()
        for i in gl.static_range(2):
            _store_subtile(
                subtiles[i],
                results.out,
                results.staging.index(CONSUMER * BUFFERS + i % BUFFERS),
                (matrix, row, column + i * WIDTH),
                sizes,
                arguments,
                META,
                BUFFERS - 1,
            )
        if MORE > 0:
            _store_subtile(
                total_more,
                results.out_more,
                results.staging_more.index(CONSUMER),
                (matrix, row, column + COLUMNS),
                sizes,
                arguments,
                META,
                BUFFERS - 1,
            )
    tma.store_wait(pendings=0)


def in_shared_memory(descriptor: AnyLayout) -> TensorDescriptor:
    """Return a descriptor whose blocks have the swizzled shared memory layout that tensor cores read."""
    size, block = descriptor.base.dtype.itemsize, list(descriptor.block_shape)
    layout = gl.NVMMASharedLayout(min(128, block[-1] * size), 8 * size, len(block))
    return TensorDescriptor(descriptor.base, descriptor.shape, descriptor.strides, block, layout)


@libentry()
@gluon.jit(do_not_specialize=["batches", "M", "N", "K", "steps", "splits", "programs", "last_row", "last_column"])
def multiply_warp_specialized(
    a,
    b,
    b_more,
    out,
    out_more,
    copied,
    copied_more,
    batches,
    M,
    N,
    K,
    steps,
    splits,
    programs,
    last_row,
    last_column,
    added,
    alpha: tl.float64,
    beta: tl.float64,
    META: gl.constexpr,
):
    """Multiply tiles persistently, by META.consumers warp groups and a warp that copies.

    Args:
        a, b, out: tensor descriptors of (batch, row, column), or (batch, column, row) for transposed operands. Blocks
            of `out` have half of a tile's columns, without the last META.more_n.
        b_more, out_more: the descriptors for the last META.more_n columns of a tile, or None.
        copied, copied_more: descriptors of an addend that TMA copies, or None.
        steps: blocks of K in each of the `splits` slices. Each slice has a result of its own in `out`.
        programs: the stride, in tiles, from one tile of a program to its next.
        last_row, last_column: the last row and column that a tile may start at (`clamped_start`).
        added: `EpilogueOperands`, without an addend that TMA copies. alpha and beta are the factors of the epilogue.
        META: `HopperGemmMeta`.

    A copied addend arrives in the staging buffers while its tile is multiplied, and META.buffers are two then. Threads
    that load an addend in the accumulator's layout would wait for memory after the last product.

    With cooperative consumers the tensor cores are idle while a tile is stored. With ping-pong one consumer multiplies
    while the other stores.

    float8 without fast accumulation (META.blockwise) adds each block's product in registers. Three consumers that wait
    for nothing but their own products keep the tensor cores busy during these additions.

    Triton's own warp specialisation refuses descriptors made on the host. In Gluon a name bound to a loop variable is
    not carried along. A constant passed to a partition in a tuple becomes a run-time value.
    """
    gl.static_assert(
        META.stages > 1, "a stage is freed while the next block is multiplied: with one stage both would wait"
    )
    ROWS: gl.constexpr = META.row_sharers * (out.block_shape[2] if META.out_transposed else out.block_shape[1])
    COLUMNS: gl.constexpr = b.block_shape[1] if META.b_transposed else b.block_shape[2]
    INNER: gl.constexpr = a.block_shape[1] if META.a_transposed else a.block_shape[2]
    COPIES: gl.constexpr = ROWS // (a.block_shape[2] if META.a_transposed else a.block_shape[1])
    STAGES: gl.constexpr = META.stages
    CONSUMERS: gl.constexpr = META.consumers
    SHARERS: gl.constexpr = META.row_sharers
    a_blocks = new_blocks(a, STAGES * COPIES)
    b_blocks = new_blocks(b, STAGES)
    staging = new_blocks(out, CONSUMERS * META.buffers)
    b_blocks_more, staging_more = b_blocks, staging
    if META.more_n > 0:
        b_blocks_more = new_blocks(b_more, STAGES)
        staging_more = new_blocks(out_more, CONSUMERS)
    ready, free = new_barriers(STAGES), new_barriers(STAGES)
    turns, addend_ready = new_barriers(2), new_barriers(CONSUMERS)
    init_barriers((ready, free), (1, SHARERS))
    init_barriers((turns,), (1,))
    init_barriers((addend_ready,), (1,))
    tiles_m, tiles_n = gl.cdiv(M, ROWS), gl.cdiv(N, COLUMNS + META.more_n)
    buffers = _Buffers(a_blocks, b_blocks, b_blocks_more, ready, free, turns, addend_ready)
    results = _Results(out, out_more, staging, staging_more, copied, copied_more)
    tiles = splits * batches * tiles_m * tiles_n
    blocks = gl.cdiv(K, INNER)
    sizes = _Sizes(M, N, batches, tiles, tiles_m, tiles_n, blocks, steps, programs, last_row, last_column)
    arguments = EpilogueArguments(added, alpha.to(gl.float32), beta.to(gl.float32))
    wait_for_previous_launch()
    # Both lists leave out the first partition: the warps of each, and the registers of a thread. Copying needs few.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (results, buffers, sizes, arguments, META, 0)),
                (_copy_operands, (a, b, b_more, buffers, sizes, META)),
            ],
            [1],
            [24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (results, buffers, sizes, arguments, META, 0)),
                (_consume, (results, buffers, sizes, arguments, META, 1)),
                (_copy_operands, (a, b, b_more, buffers, sizes, META)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (results, buffers, sizes, arguments, META, 0)),
                (_consume, (results, buffers, sizes, arguments, META, 1)),
                (_consume, (results, buffers, sizes, arguments, META, 2)),
                (_copy_operands, (a, b, b_more, buffers, sizes, META)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
