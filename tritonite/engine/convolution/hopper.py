"""The warp-specialised kernel of channels-last convolutions, in Gluon, for Hopper's wgmma and TMA (sm_90).

A warp group multiplies a box of output positions, (images, depth, height, width). A filter's tap reads a box of the
same shape from the input, moved by the tap: one block of a tensor descriptor, whose elements outside of the image are
0. One warp copies the blocks of all taps and channels, and two warp groups multiply them and store their boxes.

With a stride of 2 a tap reads every second row, or column. The even and the odd ones are tensors of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonite.engine.convolution.epilogue import apply_epilogue
from tritonite.engine.gemm.kernels.epilogue import tile_index
from tritonite.engine.gemm.kernels.hopper import load, store
from tritonite.language.gluon import infer_layouts
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared_memory import init_barriers, new_barriers, new_blocks
from tritonite.runtime.libentry import libentry

# Activations and programs are written in Triton's language.
infer_layouts()
# Warp groups that multiply.
CONSUMERS = gl.constexpr(2)


class BoxWalk(NamedTuple):
    """Boxes, taps and blocks that the warps of a program walk along, which do not depend on the number of images.

    Along each dimension a tap reads at position * stride + origin + tap * step. No field is a tuple:
    within a loop, Triton 3.6 loses compile-time constants in a tuple within a tuple.

    boxes_d, boxes_h, boxes_w: boxes along depth, height and width.
    taps: of a filter; taps_h and taps_w those along height and width.
    inner: blocks of input channels.
    tiles_n: blocks of columns.
    """

    boxes_d: Any
    boxes_h: Any
    boxes_w: Any
    taps: Any
    taps_h: Any
    taps_w: Any
    origin_d: Any
    origin_h: Any
    origin_w: Any
    step_d: Any
    step_h: Any
    step_w: Any
    inner: Any
    tiles_n: Any


class ResultSizes(NamedTuple):
    """Sizes of a result, but for the number of images."""

    depth: Any
    height: Any
    width: Any
    columns: Any


class _Batch(NamedTuple):
    """Images, pairs of boxes, and programs."""

    images: Any
    tiles_m: Any
    programs: Any


class _Buffers(NamedTuple):
    """Shared memory: input boxes and filters by stage, and barriers that say when a stage is ready and when free."""

    x: Any
    filters: Any
    ready: Any
    free: Any


class _Results(NamedTuple):
    """The result's descriptor and staging buffers, and what the epilogue reads and writes by addresses."""

    out: Any
    staging: Any
    bias: Any
    residual: Any
    sums: Any
    more: Any
    strides: Any
    sizes: Any
    images: Any


@gluon.jit
def _corner(box, walk, BOX: gl.constexpr):
    """Return the first image, depth, height and width of a box."""
    w = box % walk.boxes_w
    rest = box // walk.boxes_w
    h = rest % walk.boxes_h
    rest = rest // walk.boxes_h
    d = rest % walk.boxes_d
    return rest // walk.boxes_d * BOX[0], d * BOX[1], h * BOX[2], w * BOX[3]


@gluon.jit
def met(offset, STRIDE: gl.constexpr):
    """Return where position 0 meets the input with a tap at `offset`, counted in steps of STRIDE, which is 1 or 2.

    The second result is 1 for odd elements of the input with a STRIDE of 2, otherwise 0.
    """
    return offset >> (STRIDE - 1), offset & (STRIDE - 1)


@gluon.jit
def load_view(x, view, at, ready, to, STRIDES: gl.constexpr):
    """Copy a box of the input, or with strides of 2 of its even or odd rows and columns.

    Args:
        x: four descriptors: of even rows and even columns, of even rows and odd columns, of odd rows and even columns,
            of odd rows and odd columns. Along a dimension with a stride of 1 the even ones have all elements, and the
            odd ones are None.
        view: the index of a descriptor.
        STRIDES: along height and width.
    """
    if (STRIDES[0] == 1 and STRIDES[1] == 1) or view == 0:
        load(x[0], at, ready, to)
    if STRIDES[1] == 2 and view == 1:
        load(x[1], at, ready, to)
    if STRIDES[0] == 2 and view == 2:
        load(x[2], at, ready, to)
    if STRIDES[0] == 2 and STRIDES[1] == 2 and view == 3:
        load(x[3], at, ready, to)


@gluon.jit
def _copy_blocks(x, filters, buffers, batch, walk, META: gl.constexpr):
    """Copy the blocks of every tile of this program to the stages, as they become free. One warp does this."""
    STAGES: gl.constexpr = META.stages
    BOX: gl.constexpr = META.box
    INNER: gl.constexpr = META.block_k
    STRIDES: gl.constexpr = META.strides
    BYTES: gl.constexpr = (CONSUMERS * META.block_m + META.block_n) * INNER * 2
    step = 0
    for tile in range(gl.program_id(0), batch.tiles_m * walk.tiles_n, batch.programs):
        row, column = tile_index(tile, batch.tiles_m, walk.tiles_n, META.group_m)
        first = row * CONSUMERS
        for block in range(walk.taps * walk.inner):
            stage, tap, channel = step % STAGES, block // walk.inner, block % walk.inner * INNER
            tap_w = tap % walk.taps_w
            tap_h = tap // walk.taps_w % walk.taps_h
            tap_d = tap // walk.taps_w // walk.taps_h
            move_d = walk.origin_d + tap_d * walk.step_d
            move_h, odd_h = met(walk.origin_h + tap_h * walk.step_h, STRIDES[0])
            move_w, odd_w = met(walk.origin_w + tap_w * walk.step_w, STRIDES[1])
            mbarrier.wait(buffers.free.index(stage), 1 - step // STAGES % 2)
            ready = buffers.ready.index(stage)
            mbarrier.expect(ready, BYTES)
            for i in gl.static_range(CONSUMERS):
                image, d, h, w = _corner(first + i, walk, BOX)
                at = [image, d + move_d, h + move_h, w + move_w, channel]
                load_view(x, 2 * odd_h + odd_w, at, ready, buffers.x.index(stage * CONSUMERS + i), STRIDES)
            column_first = column * META.block_n
            at = [column_first, tap, channel] if META.filters_inner else [channel, tap, column_first]
            load(filters, at, ready, buffers.filters.index(stage))
            step += 1


@gluon.jit
def _store_columns(total, results, staging, corner, column, ACTIVATION: gl.constexpr, META: gl.constexpr):
    """Apply the epilogue to columns of a box from `column` on, and store them by TMA through the buffer `staging`."""
    ROWS: gl.constexpr = total.shape[0]
    WIDTH: gl.constexpr = total.shape[1]
    BOX: gl.constexpr = META.box
    PROGRAM: gl.constexpr = META.program
    CHANNELS: gl.constexpr = META.program_channels
    sizes, strides = results.sizes, results.strides
    image, d, h, w = corner
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, total.type.layout))
    valid = columns < sizes.columns
    row = gl.arange(0, ROWS, gl.SliceLayout(1, total.type.layout))
    at_w = w + row % BOX[3]
    at_h = h + row // BOX[3] % BOX[2]
    at_d = d + row // (BOX[3] * BOX[2]) % BOX[1]
    at = image + row // (BOX[3] * BOX[2] * BOX[1])
    exists = (at < results.images) & (at_d < sizes.depth) & (at_h < sizes.height) & (at_w < sizes.width)
    offset = at.to(META.index) * strides.batch + at_d.to(META.index) * strides.depth
    offset += at_h.to(META.index) * strides.height + at_w.to(META.index) * strides.width
    offset = offset[:, None] + columns.to(META.index)[None, :]
    mask = exists[:, None] & valid[None, :]
    if results.bias is not None:
        total += gl.load(results.bias + columns, mask=valid, other=0.0).to(gl.float32)[None, :]
    channel = (columns[None, :], valid[None, :])
    residual, sums, more = results.residual, results.sums, results.more
    total = apply_epilogue(total, residual, sums, offset, mask, ACTIVATION, more, channel, PROGRAM, CHANNELS)
    tma.store_wait(pendings=0)
    staging.reshape((ROWS, WIDTH)).store(total.to(results.out.dtype))
    fence_async_shared()
    store(results.out, [image, d, h, w, column], staging)


@gluon.jit
def _multiply(results, buffers, batch, walk, ACTIVATION: gl.constexpr, META: gl.constexpr, CONSUMER: gl.constexpr):
    """Multiply and store box number CONSUMER of every pair of boxes, as one warp group."""
    STAGES: gl.constexpr = META.stages
    ROWS: gl.constexpr = META.block_m
    COLUMNS: gl.constexpr = META.block_n
    INNER: gl.constexpr = META.block_k
    WIDTH: gl.constexpr = COLUMNS // 2
    BOX: gl.constexpr = META.box
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    step, blocks = 0, walk.taps * walk.inner
    for tile in range(gl.program_id(0), batch.tiles_m * walk.tiles_n, batch.programs):
        row, column = tile_index(tile, batch.tiles_m, walk.tiles_n, META.group_m)
        total = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
        for block in range(blocks):
            stage = step % STAGES
            mbarrier.wait(buffers.ready.index(stage), step // STAGES % 2)
            x = buffers.x.index(stage * CONSUMERS + CONSUMER).reshape((ROWS, INNER))
            if META.filters_inner:
                y = buffers.filters.index(stage).reshape((COLUMNS, INNER)).permute((1, 0))
            else:
                y = buffers.filters.index(stage).reshape((INNER, COLUMNS))
            total = warpgroup_mma(x, y, total, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))
            # Only this block's product is in flight, so the stage of the block before is free.
            mbarrier.arrive(buffers.free.index((step + STAGES - 1) % STAGES), pred=block > 0)
            step += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(buffers.free.index((step + STAGES - 1) % STAGES))
        corner = _corner(row * CONSUMERS + CONSUMER, walk, BOX)
        column_blocks = total.reshape((ROWS, 2, WIDTH)).permute((0, 2, 1)).split()
        for i in gl.static_range(2):
            first = column * COLUMNS + i * WIDTH
            _store_columns(column_blocks[i], results, results.staging.index(CONSUMER), corner, first, ACTIVATION, META)
    tma.store_wait(pendings=0)


@libentry()
@gluon.jit(do_not_specialize=["images", "tiles_m", "programs"])
def convolve_boxes(
    x,
    x_odd_columns,
    x_odd_rows,
    x_odd,
    filters,
    out,
    bias,
    residual,
    sums,
    more,
    images,
    tiles_m,
    programs,
    walk,
    strides,
    sizes,
    ACTIVATION: gl.constexpr,
    META: gl.constexpr,
):
    """Write ACTIVATION(convolution + bias + residual) for pairs of boxes of positions, persistently.

    Args:
        x, out: tensor descriptors of (image, depth, height, width, channel), in boxes of META.box positions; those of
            `out` have half of a tile's columns.
        x_odd_columns, x_odd_rows, x_odd: None, or with strides of 2 further views of the input (`load_view`).
        filters: the tensor descriptor of (column, tap, channel), or without META.filters_inner of (channel, tap,
            column).
        bias: (columns,), contiguous, or None.
        residual, sums: addresses of tensors with the strides of the result, or None; sums before ACTIVATION go to
            `sums`.
        more: operands of META.program.
        images, tiles_m, programs: the numbers of images, of pairs of boxes, and of programs.
        walk: `BoxWalk`.
        strides, sizes: the result's `ImageStrides` and `ResultSizes`.
        ACTIVATION: a device function of a block, or None.
        META: `BoxMeta`.
    """
    STAGES: gl.constexpr = META.stages
    x_blocks = new_blocks(x, STAGES * CONSUMERS)
    filter_blocks = new_blocks(filters, STAGES)
    staging = new_blocks(out, CONSUMERS)
    ready, free = new_barriers(STAGES), new_barriers(STAGES)
    init_barriers((ready, free), (1, CONSUMERS))
    buffers = _Buffers(x_blocks, filter_blocks, ready, free)
    batch = _Batch(images, tiles_m, programs)
    results = _Results(out, staging, bias, residual, sums, more, strides, sizes, images)
    wait_for_previous_launch()
    gl.warp_specialize(
        [
            (_multiply, (results, buffers, batch, walk, ACTIVATION, META, 0)),
            (_multiply, (results, buffers, batch, walk, ACTIVATION, META, 1)),
            (_copy_blocks, ((x, x_odd_columns, x_odd_rows, x_odd), filters, buffers, batch, walk, META)),
        ],
        [4, 1],
        [240, 24],
    )
