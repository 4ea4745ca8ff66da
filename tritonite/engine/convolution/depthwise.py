"""Depthwise convolutions and their gradients: choice of tiles, and launches.

Operands are volumes of any strides, (N, channels, depth, height, width), with sizes of 1 for absent dimensions. Filters
are (channels of the result, 1, depth, height, width). The channels of the result are a multiple of the input's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tritonite import devices
from tritonite.devices.tables import Tables
from tritonite.dtypes import TRITON_DTYPES, opmath
from tritonite.engine.convolution.depthwise_backward import add_depthwise_slices, sum_products
from tritonite.engine.convolution.depthwise_forward import convolve_depthwise
from tritonite.engine.convolution.depthwise_taps import DepthwiseFilterStrides, DepthwiseMeta, Window
from tritonite.engine.convolution.epilogue import NO_EPILOGUE, Epilogue
from tritonite.engine.convolution.meta import ImageStrides
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.runtime.contract import empty, fusion


class DepthwiseTable(NamedTuple):
    """Tiles of a kind of device.

    `along_positions` and `along_channels` are (channels, positions) of row-major and of channels-last tensors. A
    position of the latter is a run of `run` columns, which share what is read. `unrolled` is the largest filter whose
    taps are unrolled. In the gradient of the weight, `summed` replaces `along_positions`, a program has `group` taps,
    and `slices` x `elements` is the tile of the last sum.
    """

    along_positions: tuple[int, int] = (4, 256)
    along_channels: tuple[int, int] = (64, 16)
    run: int = 4
    unrolled: int = 64
    summed: tuple[int, int] = (4, 128)
    group: int = 9
    slices: int = 32
    elements: int = 32
    num_warps: int = 4


TABLE: Tables[DepthwiseTable] = Tables("depthwise", dict.fromkeys(devices.KINDS, DepthwiseTable()))
# A block of the interpreter costs milliseconds of Python.
TABLE["interpreter"] = DepthwiseTable(along_positions=(64, 1024), along_channels=(64, 1024), summed=(64, 1024))


def depthwise_table() -> DepthwiseTable:
    """Return the table of the current device."""
    return TABLE[devices.current.kind]


def depthwise_forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """Write the convolution of `input` to `out`, after an epilogue."""
    windows = _windows(weight, stride, padding, dilation)
    _convolve(input, weight, bias, out, _meta(out, input, windows, weight.shape[0] // max(1, input.shape[1])), epilogue)


def depthwise_backward_input(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    grad_input: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    bias: torch.Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """Write the gradient of the input to `grad_input`, plus a bias, after an epilogue. Elements gather their terms."""
    windows, multiplier = _windows(weight, stride, padding, dilation), weight.shape[0] // max(1, grad_input.shape[1])
    meta = _meta(grad_input, grad_output, windows, multiplier, transposed=True)
    _convolve(grad_output, weight, bias, grad_input, meta, epilogue)


def depthwise_backward_weight(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    grad_weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> None:
    """Write the gradient of the filters to `grad_weight`: sums by slices of tiles, then the sum of the slices."""
    if not grad_weight.numel():
        return
    table, channels = depthwise_table(), grad_weight.shape[0]
    windows = _windows(grad_weight, stride, padding, dilation)
    taps, positions = math.prod(grad_weight.shape[2:]), math.prod(grad_output.shape[2:])
    groups = -(-taps // table.group)
    meta = _meta(grad_output, input, windows, channels // input.shape[1], group=-(-taps // groups))
    channel_blocks, blocks = -(-channels // meta.channels), -(-positions // meta.positions)
    tiles = input.shape[0] * blocks
    slices = max(1, min(tiles, -(-devices.current.programs // (channel_blocks * groups))))
    partials = empty((slices, taps, channels), opmath(input.dtype), input.device)
    sum_products[(channel_blocks, groups, slices)](
        *(input, grad_output, partials, ImageStrides(*input.stride()), ImageStrides(*grad_output.stride())),
        *(channels, *input.shape[2:], *grad_output.shape[3:], positions, blocks, tiles),
        META=meta,
        num_warps=table.num_warps,
        **_options(),
    )
    rows = min(table.slices, power_of_2(slices))
    elements = min(power_of_2(channels * taps), table.slices * table.elements // rows)
    add_depthwise_slices[(-(-channels * taps // elements),)](
        *(partials, grad_weight, _filter_strides(grad_weight), channels, slices),
        META=dataclasses.replace(meta, channels=elements, positions=rows),
        num_warps=table.num_warps,
        **_options(),
    )


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    meta: DepthwiseMeta,
    epilogue: Epilogue,
) -> None:
    batch, channels, depth, height, width = out.shape
    positions = depth * height * -(-width // meta.run)
    blocks = -(-positions // meta.positions)
    grid = (batch * -(-channels // meta.channels) * blocks,)
    if all(grid):
        convolve_depthwise[grid](
            *(x, weight, bias, out, epilogue.residual, epilogue.sums),
            *(ImageStrides(*x.stride()), _filter_strides(weight)),
            *(0 if bias is None else bias.stride(0), ImageStrides(*out.stride())),
            *(channels, *x.shape[2:], *out.shape[3:], positions, blocks),
            ACTIVATION=epilogue.activation,
            META=meta,
            num_warps=depthwise_table().num_warps,
            **_options(),
        )


def _meta(
    tiled: torch.Tensor,
    read: torch.Tensor,
    windows: tuple[Window, Window, Window],
    multiplier: int,
    transposed: bool = False,
    group: int = 0,
) -> DepthwiseMeta:
    """Return the facts of a kernel with tiles of one tensor, whose taps read the other.

    `group` is the number of taps that a program has in the gradient of the weight, 0 for the other kernels.
    """
    table, (channels, *sizes) = depthwise_table(), tiled.shape[1:]
    taps, width, along_channels = math.prod([window.taps for window in windows]), windows[2], _along_channels(tiled)
    # A dimension without positions and taps to choose from has no coordinates.
    flat = [
        size == other == window.taps == 1 and not window.padding
        for size, other, window in zip(sizes, read.shape[2:], windows, strict=True)
    ]
    run = min(table.run, power_of_2(sizes[2]))
    columns = (run - 1) * width.stride + (width.taps - 1) * width.dilation + 1
    # Columns of a run share what is read only if their taps meet.
    shares = columns <= run * width.taps and not (transposed and width.stride > 1)
    if not along_channels or group or taps > table.unrolled or not shares:
        run = 1
    tile = table.along_channels if along_channels else table.summed if group else table.along_positions
    own_channels, positions = _tile(tile, channels, sizes[0] * sizes[1] * -(-sizes[2] // run))
    return DepthwiseMeta(
        # Offsets between samples are 64-bit.
        index=offset_type(tiled[:1], read[:1]),
        compute=TRITON_DTYPES[opmath(tiled.dtype)],
        channels=own_channels,
        positions=positions,
        multiplier=multiplier,
        rank=3 if not flat[0] else 2 if not flat[1] else 1,
        depth=windows[0],
        height=windows[1],
        width=width,
        group=group or (taps if taps <= table.unrolled else 1),
        run=run,
        transposed=transposed,
    )


def _tile(tile: tuple[int, int], channels: int, positions: int) -> tuple[int, int]:
    """Return the channels and positions of a tile. Where one is few, a tile has more of the other."""
    size, most_channels, most_positions = math.prod(tile), power_of_2(channels), power_of_2(positions)
    own_channels, own_positions = min(tile[0], most_channels), min(tile[1], most_positions)
    own_channels = min(size // own_positions, max(own_channels, most_channels))
    return own_channels, min(size // own_channels, max(own_positions, most_positions))


def _along_channels(tensor: torch.Tensor) -> bool:
    """Return whether channels have the smallest stride."""
    strides = [stride for size, stride in zip(tensor.shape[2:], tensor.stride()[2:], strict=True) if size > 1]
    return tensor.shape[1] > 1 and tensor.stride(1) < min(strides, default=math.inf)


def _windows(
    weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[Window, Window, Window]:
    depth, height, width = [
        # The stride and the dilation of a single tap without effect are those of most kernels.
        Window(taps, step, before, apart if taps > 1 else 1)
        for taps, step, before, apart in zip(weight.shape[2:], stride, padding, dilation, strict=True)
    ]
    return depth, height, width


def _filter_strides(weight: torch.Tensor) -> DepthwiseFilterStrides:
    channel, _, *others = weight.stride()
    return DepthwiseFilterStrides(channel, *others)


def _options() -> dict[str, object]:
    return {**devices.current.options, **fusion()}
