"""The warp-specialised kernel for products of matrices, in Gluon, for tensor cores that read shared memory (sm_90).

One warp copies blocks, and groups of four multiply them and write results; barriers tell each when to go on. So no
group waits for another, nor what is read for what is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

from tritonite.engine.gemm.kernels.epilogue import begin_within, epilogue, place
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor as AnyLayout

# By their names since Triton 3.9, or before.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _copy(a, b, b_more, buffers, sizes, ORDER: gl.constexpr):
    """What one warp does: copy blocks of both operands to where the one before has been multiplied."""
    xs, ys, ys_more, ready, free, _, _ = buffers
    _, _, batches, count, tiles_m, tiles_n, blocks, steps, programs, last_row, last_column = sizes
    A_TRANSPOSED: gl.constexpr = ORDER[0]
    B_TRANSPOSED: gl.constexpr = ORDER[1]
    GROUP_M: gl.constexpr = ORDER[2]
    STAGES: gl.constexpr = ys.shape[0]
    COPIES: gl.constexpr = xs.shape[0] // STAGES
    ROWS: gl.constexpr = xs.shape[3] if A_TRANSPOSED else xs.shape[2]
    COLUMNS: gl.constexpr = ys.shape[2] if B_TRANSPOSED else ys.shape[3]
    INNER: gl.constexpr = xs.shape[2] if A_TRANSPOSED else xs.shape[3]
    MORE: gl.constexpr = ORDER[6]
    BYTES: gl.constexpr = (COPIES * ROWS + COLUMNS + MORE) * INNER * xs.dtype.primitive_bitwidth // 8
    step = 0
    for tile in range(gl.program_id(0), count, programs):
        written = tile // (tiles_m * tiles_n)
        batch, begin = written % batches, written // batches * steps
        row, column = place(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row = begin_within(row, COPIES * ROWS, last_row)
        column = begin_within(column, COLUMNS + MORE, last_column)
        for block in range(begin, gl.minimum(begin + steps, blocks)):
            stage, inner = step % STAGES, block * INNER
            mbarrier.wait(free.index(stage), 1 - step // STAGES % 2)
            here = ready.index(stage)
            mbarrier.expect(here, BYTES)
            for i in gl.static_range(COPIES):
                first = row + i * ROWS
                place_a = [batch, inner, first] if A_TRANSPOSED else [batch, first, inner]
                load(a, place_a, here, xs.index(stage * COPIES + i))
            load(b, [batch, column, inner] if B_TRANSPOSED else [batch, inner, column], here, ys.index(stage))
            if MORE > 0:
                first = column + COLUMNS
                place_b = [batch, first, inner] if B_TRANSPOSED else [batch, inner, first]
                load(b_more, place_b, here, ys_more.index(stage))
            step += 1


@gluon.jit
def _write(
    tile,
    out,
    here,
    place_out,
    sizes,
    epilogue_arguments,
    ORDER: gl.constexpr,
    SCALED: gl.constexpr,
    KINDS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    INDEX: gl.constexpr,
    PENDING: gl.constexpr,
):
    """Write a tile through the buffer `here`, as soon as all but PENDING writes before have left theirs.

    What has been copied there is added.
    """
    M, N, batches, _, _, _, _, _, _, _, _ = sizes
    written, row, column = place_out
    OUT_TRANSPOSED: gl.constexpr = ORDER[5]
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    if OUT_TRANSPOSED:
        buffer = here.reshape((WIDTH, ROWS)).permute((1, 0))
    else:
        buffer = here.reshape((ROWS, WIDTH))
    rows = row.to(INDEX) + gl.arange(0, ROWS, gl.SliceLayout(1, tile.type.layout))
    columns = column.to(INDEX) + gl.arange(0, WIDTH, gl.SliceLayout(0, tile.type.layout))
    own = (written % batches).to(INDEX), rows, columns, rows < M, columns < N
    result = epilogue(tile, own, epilogue_arguments, SCALED, KINDS, ACTIVATION)
    if ORDER[8] > 0:
        result += epilogue_arguments[4] * buffer.load(tile.type.layout).to(gl.float32)
    tma.store_wait(pendings=PENDING)
    buffer.store(result.to(out.dtype))
    fence_async_shared()
    store(out, [written, column, row] if OUT_TRANSPOSED else [written, row, column], here)


@gluon.jit
def _copy_addend(results, arrived, place_out, batches, ORDER: gl.constexpr, WHICH: gl.constexpr):
    """Copy what is added to a tile to where its result will be written through, once the one before has left."""
    _, _, staging, staging_more, added, added_more = results
    written, row, column = place_out
    OUT_TRANSPOSED: gl.constexpr = ORDER[5]
    MORE: gl.constexpr = ORDER[6]
    ROWS: gl.constexpr = staging.shape[3] if OUT_TRANSPOSED else staging.shape[2]
    WIDTH: gl.constexpr = staging.shape[2] if OUT_TRANSPOSED else staging.shape[3]
    BYTES: gl.constexpr = ROWS * (2 * WIDTH + MORE) * staging.dtype.primitive_bitwidth // 8
    batch = written % batches if ORDER[8] == 2 else 0
    tma.store_wait(pendings=0)
    mbarrier.expect(arrived, BYTES)
    for i in gl.static_range(2):
        first = column + i * WIDTH
        from_here = [batch, first, row] if OUT_TRANSPOSED else [batch, row, first]
        load(added, from_here, arrived, staging.index(2 * WHICH + i))
    if MORE > 0:
        first = column + 2 * WIDTH
        from_here = [batch, first, row] if OUT_TRANSPOSED else [batch, row, first]
        load(added_more, from_here, arrived, staging_more.index(WHICH))


@gluon.jit
def _begin_to_load(
    place_out,
    sizes,
    epilogue_arguments,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    KINDS: gl.constexpr,
    OUT_TRANSPOSED: gl.constexpr,
    INDEX: gl.constexpr,
):
    """Bring to the L2 cache the lines of what is added to a tile, if it lies as the result does."""
    M, N, batches, _, _, _, _, _, _, _, _ = sizes
    written, row, column = place_out
    addend, scales, strides, _, _ = epilogue_arguments
    COUNT: gl.constexpr = len(scales)
    if KINDS[COUNT] == 3:
        LINE: gl.constexpr = 1024 // addend.dtype.element_ty.primitive_bitwidth
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])
        LENGTH: gl.constexpr = ROWS if OUT_TRANSPOSED else COLUMNS
        each = gl.arange(0, COLUMNS if OUT_TRANSPOSED else ROWS, gl.SliceLayout(1, layout))[:, None]
        line = gl.arange(0, max(1, LENGTH // LINE), gl.SliceLayout(0, layout))[None, :] * LINE
        rows, columns = (line, each) if OUT_TRANSPOSED else (each, line)
        rows, columns = gl.minimum(row + rows, M - 1).to(INDEX), gl.minimum(column + columns, N - 1).to(INDEX)
        first = addend + (written % batches).to(INDEX) * strides[COUNT][0]
        address = (first + rows * strides[COUNT][1] + columns * strides[COUNT][2]).to(gl.int64)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _as_operand(y, COLUMNS: gl.constexpr, INNER: gl.constexpr, B_TRANSPOSED: gl.constexpr):
    if B_TRANSPOSED:
        operand = y.reshape((COLUMNS, INNER)).permute((1, 0))
    else:
        operand = y.reshape((INNER, COLUMNS))
    return operand


@gluon.jit
def _multiply(
    results,
    buffers,
    sizes,
    epilogue_arguments,
    ORDER: gl.constexpr,
    SCALED: gl.constexpr,
    KINDS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    INDEX: gl.constexpr,
    WHICH: gl.constexpr,
):
    """What a group of four warps does: multiply its rows, those of number WHICH, of every tile and write them.

    With PINGPONG groups take turns with whole tiles: one begins to multiply when the other has all blocks of its own.
    """
    out, out_more, staging, staging_more, _, _ = results
    xs, ys, ys_more, ready, free, turns, arrived = buffers
    _, _, batches, count, tiles_m, tiles_n, blocks, steps, programs, last_row, last_column = sizes
    A_TRANSPOSED: gl.constexpr = ORDER[0]
    B_TRANSPOSED: gl.constexpr = ORDER[1]
    GROUP_M: gl.constexpr = ORDER[2]
    CONSUMERS: gl.constexpr = ORDER[3]
    BLOCKWISE: gl.constexpr = ORDER[4]
    OUT_TRANSPOSED: gl.constexpr = ORDER[5]
    STAGES: gl.constexpr = ys.shape[0]
    COPIES: gl.constexpr = xs.shape[0] // STAGES
    ROWS: gl.constexpr = staging.shape[3] if OUT_TRANSPOSED else staging.shape[2]
    COLUMNS: gl.constexpr = ys.shape[2] if B_TRANSPOSED else ys.shape[3]
    INNER: gl.constexpr = xs.shape[2] if A_TRANSPOSED else xs.shape[3]
    WIDTH: gl.constexpr = staging.shape[2] if OUT_TRANSPOSED else staging.shape[3]
    BUFFERS: gl.constexpr = staging.shape[0] // CONSUMERS
    MORE: gl.constexpr = ORDER[6]
    PINGPONG: gl.constexpr = ORDER[7]
    ADDED: gl.constexpr = ORDER[8]
    # How many groups have rows of a tile, and which of them are this one's; and how many have tiles of their own.
    SHARING: gl.constexpr = 1 if PINGPONG else CONSUMERS
    PART: gl.constexpr = 0 if PINGPONG else WHICH
    TURNS: gl.constexpr = CONSUMERS if PINGPONG else 1
    DEPTH: gl.constexpr = 256 // xs.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, DEPTH])
    layout_more: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(MORE, 16), DEPTH])
    first_tile, step, turn = gl.program_id(0), 0, 0
    arrivals = 0
    if PINGPONG:
        first_tile += WHICH * programs
        step = WHICH * blocks
    for tile in range(first_tile, count, TURNS * programs):
        written = tile // (tiles_m * tiles_n)
        begin = written // batches * steps
        row, column = place(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row = begin_within(row, SHARING * ROWS, last_row) + PART * ROWS
        column = begin_within(column, COLUMNS + MORE, last_column)
        total = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
        total_more = gl.zeros((ROWS, max(MORE, 16)), gl.float32, layout_more)
        if ADDED > 0:
            _copy_addend(results, arrived.index(WHICH), (written, row, column), batches, ORDER, WHICH)
        elif epilogue_arguments[0] is not None:
            _begin_to_load(
                (written, row, column),
                sizes,
                epilogue_arguments,
                ROWS,
                COLUMNS * (2 if MORE > 0 else 1),
                KINDS,
                OUT_TRANSPOSED,
                INDEX,
            )
        if PINGPONG:
            mbarrier.wait(turns.index(WHICH), (turn + 1 - WHICH) % 2)
            turn += 1
        for block in range(begin, gl.minimum(begin + steps, blocks)):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES % 2)
            if A_TRANSPOSED:
                x = xs.index(stage * COPIES + PART).reshape((INNER, ROWS)).permute((1, 0))
            elif COPIES == 1:
                x = xs.index(stage).reshape((SHARING * ROWS, INNER)).slice(PART * ROWS, ROWS)
            else:
                x = xs.index(stage * COPIES + PART).reshape((ROWS, INNER))
            y = _as_operand(ys.index(stage), COLUMNS, INNER, B_TRANSPOSED)
            if BLOCKWISE:
                part = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
                part = warpgroup_mma(x, y, part, use_acc=False, is_async=True)
                total += warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(free.index(stage))
            else:
                total = warpgroup_mma(x, y, total, is_async=True)
                if MORE > 0:
                    y_more = _as_operand(ys_more.index(stage), MORE, INNER, B_TRANSPOSED)
                    total_more = warpgroup_mma(x, y_more, total_more, is_async=True)
                    total, total_more = warpgroup_mma_wait(2, deps=(total, total_more))
                else:
                    total = warpgroup_mma_wait(1, deps=(total,))
                # The block before this one has been multiplied.
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=block > begin)
            step += 1
        if PINGPONG:
            mbarrier.arrive(turns.index(1 - WHICH))
        if not BLOCKWISE:
            if MORE > 0:
                total, total_more = warpgroup_mma_wait(0, deps=(total, total_more))
            else:
                total = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
        # The other group's blocks are between this tile's and the next.
        step += (TURNS - 1) * blocks
        if ADDED > 0:
            mbarrier.wait(arrived.index(WHICH), arrivals % 2)
            arrivals += 1
        subtiles = total.reshape((ROWS, 2, WIDTH)).permute((0, 2, 1)).split()
        for i in gl.static_range(2):
            # What was last in these BUFFERS has been read out of shared memory.
            _write(
                subtiles[i],
                out,
                staging.index(WHICH * BUFFERS + i % BUFFERS),
                (written, row, column + i * WIDTH),
                sizes,
                epilogue_arguments,
                ORDER,
                SCALED,
                KINDS,
                ACTIVATION,
                INDEX,
                BUFFERS - 1,
            )
        if MORE > 0:
            _write(
                total_more,
                out_more,
                staging_more.index(WHICH),
                (written, row, column + COLUMNS),
                sizes,
                epilogue_arguments,
                ORDER,
                SCALED,
                KINDS,
                ACTIVATION,
                INDEX,
                BUFFERS - 1,
            )
    tma.store_wait(pendings=0)


def in_shared_memory(descriptor: AnyLayout) -> TensorDescriptor:
    """The same with the layout in which tensor cores take a block, swizzled over 128 bytes at most."""
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
    added,
    added_more,
    batches,
    M,
    N,
    K,
    steps,
    splits,
    programs,
    last_row,
    last_column,
    addend,
    scales,
    epilogue_strides,
    alpha: tl.float64,
    beta: tl.float64,
    SCALED: gl.constexpr,
    KINDS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    INDEX: gl.constexpr,
    ORDER: gl.constexpr,
    BUFFERS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """As `triton.multiply_persistent`, by CONSUMERS groups of warps that multiply and write, and one warp that copies.

    ORDER is whether a and b are transposed, GROUP_M, CONSUMERS, whether sums over blocks are added in float32
    (BLOCKWISE), whether the result is transposed, how many columns a tile has besides, those of `b_more` and
    `out_more`, PINGPONG, and what of `added` and `added_more` is copied as blocks are: nothing, 0, one matrix for all
    batches, 1, or one for each, 2. Blocks are powers of two, and the tiles that fill a device seldom are. The blocks
    are the descriptors'. Each of `splits` parts of K, of `steps` blocks, is a result. A tile is written in two
    subtiles, by way of BUFFERS of them. CUTLASS has kernels like both for Hopper, "cooperative" and "ping-pong".

    An addend that is copied comes to where its tile is written through, while the tile is multiplied; BUFFERS are two
    then. Where threads load it in the layout in which tensor cores leave results, all wait for it: 6 matrices of 1,296
    by 1,296, K = 64, plus such an addend took 44 us so, and take 20 with a copy (float16, H200).

    Groups that share a tile write it at the same time, and tensor cores wait meanwhile. With PINGPONG two groups have
    every other tile each, so that one multiplies while the other writes: 1,976 rows by 5,504 of K = 576 take 25.1 us
    in place of 27.6, 2,880 by 14,336 of K = 768 92 in place of 102 (float16, H200). Of one round of tiles one group
    does it all, and so tiles of 64 rows by 128 are as fast as larger ones: 418 rows by 7,168, K = 2,048, 24 us for 28.

    float8 without fast accumulation adds each block of K in registers of its own. Where all warps wait for each block
    they multiply and add in step: 956 us at 8192 cubed, cuBLAS 751. Three groups that wait for nothing but their own
    blocks multiply while another adds: 771 us. With two groups, tiles of 128x128 read a fifth more of the L2 cache
    (955), and those of 128x256 spill. For half types a warp that only copies gained 1 to 4 %, most where K is short.

    Triton's own warp specialisation refuses descriptors that the host made. In Gluon a name bound to a loop variable is
    not carried along, and what a partition is given in a tuple is no constant.
    """
    gl.static_assert(STAGES > 1, "a block is done with when the next is multiplied, and with one stage both would wait")
    A_TRANSPOSED: gl.constexpr = ORDER[0]
    B_TRANSPOSED: gl.constexpr = ORDER[1]
    CONSUMERS: gl.constexpr = ORDER[3]
    SHARING: gl.constexpr = 1 if ORDER[7] else CONSUMERS
    ROWS: gl.constexpr = SHARING * (out.block_shape[2] if ORDER[5] else out.block_shape[1])
    COLUMNS: gl.constexpr = b.block_shape[1] if B_TRANSPOSED else b.block_shape[2]
    INNER: gl.constexpr = a.block_shape[1] if A_TRANSPOSED else a.block_shape[2]
    COPIES: gl.constexpr = ROWS // (a.block_shape[2] if A_TRANSPOSED else a.block_shape[1])
    xs = gl.allocate_shared_memory(a.dtype, [STAGES * COPIES] + a.block_shape, a.layout)
    ys = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_shape, b.layout)
    staging = gl.allocate_shared_memory(out.dtype, [CONSUMERS * BUFFERS] + out.block_shape, out.layout)
    MORE: gl.constexpr = ORDER[6]
    ys_more, staging_more = ys, staging
    if MORE > 0:
        ys_more = gl.allocate_shared_memory(b.dtype, [STAGES] + b_more.block_shape, b_more.layout)
        staging_more = gl.allocate_shared_memory(out.dtype, [CONSUMERS] + out_more.block_shape, out_more.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=SHARING)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(arrived.index(i), count=1)
    tiles_m, tiles_n = gl.cdiv(M, ROWS), gl.cdiv(N, COLUMNS + MORE)
    buffers = xs, ys, ys_more, ready, free, turns, arrived
    results = out, out_more, staging, staging_more, added, added_more
    count = splits * batches * tiles_m * tiles_n
    sizes = M, N, batches, count, tiles_m, tiles_n, gl.cdiv(K, INNER), steps, programs, last_row, last_column
    epilogue_arguments = addend, scales, epilogue_strides, alpha.to(gl.float32), beta.to(gl.float32)
    wait_for_previous_launch()
    # As many of 65,536 registers for each thread; what copies needs few.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_multiply, (results, buffers, sizes, epilogue_arguments, ORDER, SCALED, KINDS, ACTIVATION, INDEX, 0)),
                (_copy, (a, b, b_more, buffers, sizes, ORDER)),
            ],
            [1],
            [24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_multiply, (results, buffers, sizes, epilogue_arguments, ORDER, SCALED, KINDS, ACTIVATION, INDEX, 0)),
                (_multiply, (results, buffers, sizes, epilogue_arguments, ORDER, SCALED, KINDS, ACTIVATION, INDEX, 1)),
                (_copy, (a, b, b_more, buffers, sizes, ORDER)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (results, buffers, sizes, epilogue_arguments, ORDER, SCALED, KINDS, ACTIVATION, INDEX, 0)),
                (_multiply, (results, buffers, sizes, epilogue_arguments, ORDER, SCALED, KINDS, ACTIVATION, INDEX, 1)),
                (_multiply, (results, buffers, sizes, epilogue_arguments, ORDER, SCALED, KINDS, ACTIVATION, INDEX, 2)),
                (_copy, (a, b, b_more, buffers, sizes, ORDER)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
