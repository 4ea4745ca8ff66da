"""Host functions of convolutions by boxes of positions, which TMA copies: what they serve, box shapes, the launch."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite import devices
from tritonite.engine.convolution import hopper
from tritonite.engine.convolution.epilogue import Epilogue
from tritonite.engine.convolution.meta import Axes, FilterStrides, ImageStrides
from tritonite.engine.convolution.problem import Problem, image_strides, vector_multiple
from tritonite.engine.convolution.table import BoxTile, table
from tritonite.engine.gemm.kernels.hopper import in_shared_memory
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.runtime.contract import fusion

_CONSUMERS = hopper.CONSUMERS.value


@dataclass(frozen=True, kw_only=True)
class BoxMeta:
    """Facts of `hopper.convolve_boxes`.

    box: images, depths, heights and widths of a warp group's box, powers of two.
    block_m, block_n, block_k: positions of a box, columns, and channels of a block.
    filters_inner: channels are contiguous in the filters, otherwise columns are.
    strides: 1 or 2, along height and width.
    index: the dtype of element offsets.
    program, program_channels: the pointwise program of the result, or None, and which of its operands have an element
        for each channel.
    """

    box: tuple[int, int, int, int]
    block_m: int
    block_n: int
    block_k: int
    stages: int
    group_m: int
    filters_inner: bool
    strides: tuple[int, int]
    index: Any
    program: Any = None
    program_channels: tuple[bool, ...] = ()


class Sizes(NamedTuple):
    """Sizes of a result."""

    images: int
    depth: int
    height: int
    width: int
    columns: int


def serves(problem: Problem, input: torch.Tensor, filters: torch.Tensor, axes: Axes, strides: FilterStrides) -> bool:
    """Return whether the kernel serves a convolution, whose result is in channels-last order.

    It does for 16-bit floats, one group, strides that `serves_strides` is true for, and rows of channels of whole 16
    bytes. Dimensions of a filter have to follow each other in memory.
    """
    inner = strides.channel == 1
    size, contiguous = (problem.channels, "channel") if inner else (problem.columns, "column")
    return (
        bool(table().boxes)
        and problem.dtype.itemsize == 2
        and devices.has_wgmma(input.device)
        and problem.units == problem.merged == 1
        and problem.channels >= table().box_channels
        and serves_strides(axes)
        and is_addressable(input, problem.channels, image_strides(input), "channel")
        and is_addressable(filters, size, strides, contiguous)
        and _taps_follow(strides, axes)
    )


def serves_strides(axes: Axes) -> bool:
    """Return whether strides are 1, or 2 along a height and width that have odd elements."""
    return axes.depth.stride == 1 and all(
        axis.stride == 1 or (axis.stride == 2 and axis.size > 1) for axis in (axes.height, axes.width)
    )


def is_addressable(tensor: torch.Tensor, size: int, strides: ImageStrides | FilterStrides, contiguous: str) -> bool:
    """Return whether TMA can address a tensor: `vector_multiple` is 16 bytes, and no dimension is expanded."""
    expanded = 0 in [step for count, step in zip(tensor.shape, tensor.stride(), strict=True) if count > 1]
    return not expanded and vector_multiple(tensor, size, strides, contiguous) == 16 // tensor.dtype.itemsize


def serves_result(out: torch.Tensor) -> bool:
    """Return whether TMA can store a result."""
    return is_addressable(out, out.shape[1], image_strides(out), "channel")


def _filter_stride(strides: FilterStrides, axes: Axes) -> int:
    """Return the stride of the fastest dimension with more than one tap, or 0 for filters of one tap."""
    pairs = zip(reversed(axes), (strides.width, strides.height, strides.depth), strict=True)
    return next((step for axis, step in pairs if axis.taps > 1), 0)


def _taps_follow(strides: FilterStrides, axes: Axes) -> bool:
    """Return whether all taps of a filter are one dimension of one stride."""
    wanted = _filter_stride(strides, axes)
    for axis, step in zip(reversed(axes), (strides.width, strides.height, strides.depth), strict=True):
        if axis.taps > 1:
            if step != wanted:
                return False
            wanted *= axis.taps
    return True


@functools.lru_cache(maxsize=4096)
def box_of(rows: int, sizes: Sizes) -> tuple[tuple[int, int, int, int], int]:
    """Return the shape of a box of `rows` positions that leaves the fewest empty, and the number of boxes."""
    bounds = sizes[:4]
    sides = [[1 << i for i in range(power_of_2(size).bit_length())] for size in bounds[1:]]
    found = []
    for d, h, w in itertools.product(*sides):
        if d * h * w <= rows:
            box = rows // (d * h * w), d, h, w
            count = math.prod([-(-size // side) for size, side in zip(bounds, box, strict=True)])
            # Of equal counts the widest box: its rows are longest in memory.
            found.append((count, -w, -h, box))
    count, _, _, box = min(found)
    return box, count


def choose(sizes: Sizes, device: torch.device, size: int, result_size: int) -> BoxTile:
    """Return the tile with the least estimated time, and reduce its stages until it fits shared memory.

    The time is that of rounds of one program for each multiprocessor.

    Args:
        sizes: of the result.
        device: of the operands.
        size: bytes of an operand's element.
        result_size: bytes of a result's element, which a fused program decides.
    """
    multiprocessors = devices.multiprocessors(device)

    def cost(tile: BoxTile) -> float:
        _, boxes = box_of(tile.block_m // _CONSUMERS, sizes)
        tiles = -(-boxes // _CONSUMERS) * -(-sizes.columns // tile.block_n)
        return -(-tiles // multiprocessors) * tile.time

    tile = min(table().boxes, key=cost)
    while tile.stages > 1 and tile.shared(size, result_size) > devices.shared_memory(device):
        tile = tile._replace(stages=tile.stages - 1)
    return tile


def tap_fields(problem: Problem, axes: Axes) -> dict[str, int]:
    """Return the fields of `hopper.BoxWalk` and `hopper_filters.FilterWalk` that say where taps read."""
    fields = {"taps": problem.taps, "taps_h": axes.height.taps, "taps_w": axes.width.taps}
    for letter, axis in zip("dhw", axes, strict=True):
        fields |= {f"origin_{letter}": axis.origin, f"step_{letter}": axis.dilation}
    return fields


def convolve(
    problem: Problem,
    input: torch.Tensor,
    filters: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    axes: Axes,
    strides: FilterStrides,
    epilogue: Epilogue,
    tile: BoxTile | None = None,
) -> None:
    """Launch the kernel for a convolution that `serves` and `serves_result` are true for."""
    images, columns, *spatial = out.shape
    depth, height, width = spatial
    sizes = Sizes(images, depth, height, width, columns)
    tile = tile or choose(sizes, out.device, input.element_size(), out.element_size())
    rows = tile.block_m // _CONSUMERS
    box, boxes = box_of(rows, sizes)
    inner = strides.channel == 1
    counts = [-(-size // side) for size, side in zip(spatial, box[1:], strict=True)]
    tiles_m, tiles_n = -(-boxes // _CONSUMERS), -(-columns // tile.block_n)
    programs = min(tiles_m * tiles_n, devices.multiprocessors(out.device))
    boxes_d, boxes_h, boxes_w = counts
    walk = hopper.BoxWalk(
        boxes_d=boxes_d,
        boxes_h=boxes_h,
        boxes_w=boxes_w,
        **tap_fields(problem, axes),
        inner=-(-problem.channels // tile.block_k),
        tiles_n=tiles_n,
    )
    hopper.convolve_boxes[(programs,)](
        *input_blocks(input, axes, box, tile.block_k),
        _filter_blocks(filters, problem, axes, strides, tile),
        image_blocks(out, box, tile.block_n // 2),
        bias,
        epilogue.residual,
        epilogue.sums,
        epilogue.more,
        images=images,
        tiles_m=tiles_m,
        programs=programs,
        walk=walk,
        strides=image_strides(out),
        sizes=hopper.ResultSizes(depth, height, width, columns),
        ACTIVATION=epilogue.activation,
        META=BoxMeta(
            box=box,
            block_m=rows,
            block_n=tile.block_n,
            block_k=tile.block_k,
            stages=tile.stages,
            group_m=table().group_m,
            filters_inner=inner,
            strides=(axes.height.stride, axes.width.stride),
            index=offset_type(out),
            program=epilogue.program,
            program_channels=epilogue.channels,
        ),
        num_warps=4,
        **fusion(),
    )


def _descriptor(tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    # The stride of a dimension of size 1 may be anything, and TMA wants a multiple of 16 bytes.
    whole = [step if size > 1 else 8 * -(-shape[-1] // 8) for size, step in zip(shape, strides[:-1] + [1], strict=True)]
    return in_shared_memory(TensorDescriptor(tensor, shape, [*whole[:-1], 1], block))


def input_blocks(input: torch.Tensor, axes: Axes, box: tuple[int, int, int, int], channels: int) -> list[Any]:
    """Return the descriptors of an input for `hopper.load_view`."""
    rows, columns = axes.height.stride, axes.width.stride
    return [
        image_blocks(input[:, :, :, h::rows, w::columns], box, channels) if h < rows and w < columns else None
        for h in (0, 1)
        for w in (0, 1)
    ]


def image_blocks(image: torch.Tensor, box: tuple[int, int, int, int], channels: int) -> Any:
    """Return the descriptor of an (N, C, D, H, W) tensor in boxes of some channels."""
    order = (0, 2, 3, 4, 1)
    shape, strides = [image.shape[d] for d in order], [image.stride(d) for d in order]
    return _descriptor(image, shape, strides, [*box, channels])


def _filter_blocks(filters: torch.Tensor, problem: Problem, axes: Axes, strides: FilterStrides, tile: BoxTile) -> Any:
    """Return the descriptor of filters: blocks of columns and channels of one tap."""
    tap = _filter_stride(strides, axes)
    columns, channels = (
        (problem.columns, strides.column, tile.block_n),
        (problem.channels, strides.channel, tile.block_k),
    )
    first, last = (columns, channels) if strides.channel == 1 else (channels, columns)
    return _descriptor(filters, [first[0], problem.taps, last[0]], [first[1], tap, last[1]], [first[2], 1, last[2]])
