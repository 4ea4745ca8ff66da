"""The warp-specialised kernel of the gradient of filters, channels-last, in Gluon (sm_90).

A tap's gradient is a product over output positions of the input, moved by the tap, and of the output's gradient. A
block of positions is a box, (images, depth, height, width). One warp copies boxes of both tensors, and two warp groups
multiply them: each has a tap and a block of input channels, and both have the same block of output channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tritonite.engine.convolution.hopper import CONSUMERS, load_view, met
from tritonite.engine.gemm.kernels.epilogue import tile_index
from tritonite.engine.gemm.kernels.hopper import load
from tritonite.language.order import wait_for_previous_launch
from tritonite.language.shared_memory import init_barriers, new_barriers, new_blocks
from tritonite.runtime.libentry import libentry


class FilterWalk(NamedTuple):
    """Boxes, taps and tiles that the warps of a program walk along, which do not depend on the number of images.

    Along each dimension a tap reads at position * stride + origin + tap * step. No field is a tuple:
    within a loop, Triton 3.6 loses compile-time constants in a tuple within a tuple.

    boxes_d, boxes_h, boxes_w: boxes along depth, height and width.
    empty_d, empty_h, empty_w: positions of the boxes along depth, height and width that do not exist.
    taps: of a filter; taps_h and taps_w those along height and width.
    blocks: blocks of input channels.
    tiles_m, tiles_n: pairs of (tap, block of input channels), and blocks of output channels.
    """

    boxes_d: Any
    boxes_h: Any
    boxes_w: Any
    empty_d: Any
    empty_h: Any
    empty_w: Any
    taps: Any
    taps_h: Any
    taps_w: Any
    origin_d: Any
    origin_h: Any
    origin_w: Any
    step_d: Any
    step_h: Any
    step_w: Any
    blocks: Any
    tiles_m: Any
    tiles_n: Any


class FilterSizes(NamedTuple):
    """Channels of the input and of the output, and elements of the result of a slice."""

    channels: Any
    columns: Any
    slice_stride: Any


class _Slices(NamedTuple):
    """Boxes of all positions and of a slice, tiles of all slices, and programs."""

    boxes: Any
    steps: Any
    tiles: Any
    programs: Any


class _Buffers(NamedTuple):
    """Shared memory: boxes by stage, and barriers that say when a stage is ready and when free."""

    x: Any
    grad: Any
    ready: Any
    free: Any


@gluon.jit
def _tile_of(tile, slices, walk, META: gl.constexpr):
    """Return a tile's pair, its block of output channels, its slice, and the slice's first box and the box after it."""
    own = walk.tiles_m * walk.tiles_n
    pair, column = tile_index(tile % own, walk.tiles_m, walk.tiles_n, META.group_m)
    slice_of = tile // own
    begin = slice_of * slices.steps
    return pair, column, slice_of, begin, gl.minimum(begin + slices.steps, slices.boxes)


@gluon.jit
def _tap_of(unit, walk):
    """Return the depth, height and width of the tap of a (tap, block of channels), and the block."""
    tap = unit // walk.blocks
    rest = tap // walk.taps_w
    return rest // walk.taps_h, rest % walk.taps_h, tap % walk.taps_w, unit % walk.blocks


@gluon.jit
def _move(unit, walk, STRIDES: gl.constexpr):
    """Return where the first output position meets the input with a tap, and the view of the input (`load_view`)."""
    tap_d, tap_h, tap_w, _ = _tap_of(unit, walk)
    move_d = walk.origin_d + tap_d * walk.step_d
    move_h, odd_h = met(walk.origin_h + tap_h * walk.step_h, STRIDES[0])
    move_w, odd_w = met(walk.origin_w + tap_w * walk.step_w, STRIDES[1])
    return move_d, move_h, move_w, 2 * odd_h + odd_w


@gluon.jit
def _corner(box, move, walk, BOX: gl.constexpr):
    """Return the first image, depth, height and width of a box.

    Boxes reach beyond the first position for taps that read at or before it, otherwise beyond the last. The taps of
    positions that do not exist are outside of the input then. Otherwise the zero that TMA gives for such a position's
    gradient would be multiplied by an element of the input, which may be infinite.
    """
    move_d, move_h, move_w, _ = move
    w = box % walk.boxes_w
    rest = box // walk.boxes_w
    h = rest % walk.boxes_h
    rest = rest // walk.boxes_h
    d = rest % walk.boxes_d
    first_d = d * BOX[1] - (move_d <= 0).to(gl.int32) * walk.empty_d
    first_h = h * BOX[2] - (move_h <= 0).to(gl.int32) * walk.empty_h
    first_w = w * BOX[3] - (move_w <= 0).to(gl.int32) * walk.empty_w
    return rest // walk.boxes_d * BOX[0], first_d, first_h, first_w


@gluon.jit
def _copy_boxes(x, grad, buffers, slices, walk, META: gl.constexpr):
    """Copy the boxes of every tile of this program to the stages, as they become free. One warp does this."""
    STAGES: gl.constexpr = META.stages
    BOX: gl.constexpr = META.box
    STRIDES: gl.constexpr = META.strides
    BYTES: gl.constexpr = (CONSUMERS * META.block_m + META.block_n) * META.block_k * 2
    step = 0
    for tile in range(gl.program_id(0), slices.tiles, slices.programs):
        pair, column, _, begin, end = _tile_of(tile, slices, walk, META)
        first = pair * CONSUMERS
        own = _move(first, walk, STRIDES)
        for box in range(begin, end):
            stage = step % STAGES
            image, d, h, w = _corner(box, own, walk, BOX)
            mbarrier.wait(buffers.free.index(stage), 1 - step // STAGES % 2)
            ready = buffers.ready.index(stage)
            mbarrier.expect(ready, BYTES)
            for i in gl.static_range(CONSUMERS):
                # The last pair may be a single one, which is copied twice.
                unit = gl.minimum(first + i, walk.taps * walk.blocks - 1)
                move_d, move_h, move_w, view = _move(unit, walk, STRIDES)
                channel = unit % walk.blocks * META.block_m
                at = [image, d + move_d, h + move_h, w + move_w, channel]
                load_view(x, view, at, ready, buffers.x.index(stage * CONSUMERS + i), STRIDES)
            load(grad, [image, d, h, w, column * META.block_n], ready, buffers.grad.index(stage))
            step += 1


@gluon.jit
def _store_gradient(total, out, unit, column, slice_of, walk, strides, sizes, META: gl.constexpr):
    """Store the gradient of a tap for a block of input channels and one of output channels."""
    INDEX: gl.constexpr = META.index
    tap_d, tap_h, tap_w, block = _tap_of(unit, walk)
    channel = block * META.block_m + gl.arange(0, total.shape[0], gl.SliceLayout(1, total.type.layout))
    columns = column * META.block_n + gl.arange(0, total.shape[1], gl.SliceLayout(0, total.type.layout))
    at_tap = tap_d.to(INDEX) * strides.depth + tap_h.to(INDEX) * strides.height + tap_w.to(INDEX) * strides.width
    rows = at_tap + channel.to(INDEX) * strides.channel
    offset = rows[:, None] + (columns.to(INDEX) * strides.column)[None, :]
    exists = (channel < sizes.channels) & (unit < walk.taps * walk.blocks)
    mask = exists[:, None] & (columns < sizes.columns)[None, :]
    pointers = out + slice_of.to(gl.int64) * sizes.slice_stride + offset
    gl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply(out, buffers, slices, walk, strides, sizes, META: gl.constexpr, CONSUMER: gl.constexpr):
    """Multiply and store number CONSUMER of every pair of (tap, block of channels), as one warp group."""
    STAGES: gl.constexpr = META.stages
    ROWS: gl.constexpr = META.block_m
    COLUMNS: gl.constexpr = META.block_n
    POSITIONS: gl.constexpr = META.block_k
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    step = 0
    for tile in range(gl.program_id(0), slices.tiles, slices.programs):
        pair, column, slice_of, begin, end = _tile_of(tile, slices, walk, META)
        total = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
        for box in range(begin, end):
            stage = step % STAGES
            mbarrier.wait(buffers.ready.index(stage), step // STAGES % 2)
            x = buffers.x.index(stage * CONSUMERS + CONSUMER).reshape((POSITIONS, ROWS)).permute((1, 0))
            y = buffers.grad.index(stage).reshape((POSITIONS, COLUMNS))
            total = warpgroup_mma(x, y, total, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))
            # Only this box's product is in flight, so the stage of the box before is free.
            mbarrier.arrive(buffers.free.index((step + STAGES - 1) % STAGES), pred=box > begin)
            step += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(buffers.free.index((step + STAGES - 1) % STAGES))
        _store_gradient(total, out, pair * CONSUMERS + CONSUMER, column, slice_of, walk, strides, sizes, META)


@libentry()
@gluon.jit(do_not_specialize=["boxes", "steps", "tiles", "programs"])
def filter_gradient_boxes(
    x,
    x_odd_columns,
    x_odd_rows,
    x_odd,
    grad,
    out,
    boxes,
    steps,
    tiles,
    programs,
    walk,
    strides,
    sizes,
    META: gl.constexpr,
):
    """Write the sums of slices of the positions, for pairs of (tap, block of input channels), persistently.

    Args:
        x, grad: tensor descriptors of (image, depth, height, width, channel), in boxes of META.box positions: the
            input, and the gradient of the convolution's result.
        x_odd_columns, x_odd_rows, x_odd: None, or with strides of 2 further views of the input (`load_view`).
        out: the gradient of the filters, or of each slice of them.
        boxes, steps, tiles, programs: the fields of `_Slices`.
        walk: `FilterWalk`.
        strides: `FilterStrides` of `out`.
        sizes: `FilterSizes`.
        META: `FilterBoxMeta`.
    """
    STAGES: gl.constexpr = META.stages
    x_blocks = new_blocks(x, STAGES * CONSUMERS)
    grad_blocks = new_blocks(grad, STAGES)
    ready, free = new_barriers(STAGES), new_barriers(STAGES)
    init_barriers((ready, free), (1, CONSUMERS))
    slices = _Slices(boxes, steps, tiles, programs)
    buffers = _Buffers(x_blocks, grad_blocks, ready, free)
    wait_for_previous_launch()
    gl.warp_specialize(
        [
            (_multiply, (out, buffers, slices, walk, strides, sizes, META, 0)),
            (_multiply, (out, buffers, slices, walk, strides, sizes, META, 1)),
            (_copy_boxes, ((x, x_odd_columns, x_odd_rows, x_odd), grad, buffers, slices, walk, META)),
        ],
        [4, 1],
        [240, 24],
    )
