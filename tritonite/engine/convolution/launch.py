"""Host functions of convolutions and of their gradients: operands, tiles, launches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.convolution import boxes, depthwise, filter_boxes, groups, product, select, slices
from tritonite.engine.convolution.epilogue import NO_EPILOGUE, Epilogue, with_program
from tritonite.engine.convolution.filters import filter_gradient_tile
from tritonite.engine.convolution.forward import convolve_tile
from tritonite.engine.convolution.meta import Axes, FilterMeta, FilterStrides, ForwardMeta, Strides
from tritonite.engine.convolution.problem import Geometry, Problem, filter_strides, image_strides, vector_multiple
from tritonite.engine.convolution.table import Tile, table
from tritonite.engine.gemm import work
from tritonite.engine.gemm.launch import add_slices as add_partial_products
from tritonite.engine.iteration import contiguous_strides, offset_type
from tritonite.engine.movement import move
from tritonite.errors import Decline
from tritonite.runtime.contract import empty, empty_strided, fusion


def problem_of(input: torch.Tensor, filters: torch.Tensor, out: torch.Tensor, geometry: Geometry) -> Problem:
    """Return the problem of a convolution, with filters (groups * columns, channels, depth, height, width)."""
    columns, channels = filters.shape[0] // geometry.groups, filters.shape[1]
    positions, taps = math.prod(out.shape[2:]), math.prod(filters.shape[2:])
    own = Problem(input.dtype, input.shape[0], positions, columns, channels, taps, geometry.groups, 1)
    return select.merged(own)


def transposed_problem_of(input: torch.Tensor, filters: torch.Tensor, out: torch.Tensor, geometry: Geometry) -> Problem:
    """Return the problem of a transposed convolution, with filters (groups * channels, columns, ...).

    Positions and taps are those of one phase, rounded up.
    """
    columns, channels = filters.shape[1], filters.shape[0] // geometry.groups
    positions = math.prod([-(-size // step) for size, step in zip(out.shape[2:], geometry.stride, strict=True)])
    taps = math.prod([-(-size // step) for size, step in zip(filters.shape[2:], geometry.stride, strict=True)])
    own = Problem(input.dtype, input.shape[0], positions, columns, channels, taps, geometry.groups, geometry.phases)
    return select.merged(own)


def convolve(
    input: torch.Tensor,
    filters: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    geometry: Geometry,
    precision: str,
    epilogue: Epilogue = NO_EPILOGUE,
    tile: Tile | None = None,
) -> None:
    """Write activation(convolution + bias + residual) to `out`.

    Args:
        input: (N, groups * channels, D, H, W), of any strides, like all tensors but the bias.
        filters: (groups * columns, channels, kernel depth, height, width).
        bias: (groups * columns,), contiguous, or None.
        out: (N, groups * columns, D', H', W').
        geometry: stride, padding, dilation and groups.
        precision: of float32 products: "ieee" or "tf32".
        epilogue: activation, residual, and where to store the activation's operand.
        tile: the tile, and slices of K; by default `select.forward_tile` chooses.

    With `settings().invariant` an image's result does not depend on the other images.
    """
    if not out.numel():
        return
    out, epilogue = with_program(out, epilogue)
    if product.multiply(input, filters, bias, out, geometry, precision, epilogue):
        return
    if _is_depthwise(filters, geometry):
        _check_depthwise(epilogue)
        depthwise.depthwise_forward(input, filters, bias, out, *geometry[:3], epilogue)
        return
    problem = problem_of(input, filters, out, geometry)
    axes = geometry.axes(input.shape[2:], out.shape[2:], filters.shape[2:])
    filters, strides = _product_filters(problem, filters, axes, geometry.groups, False)
    _run(_Product(problem, input, filters, bias, axes, strides, precision), out, epilogue, tile)


def convolve_transposed(
    input: torch.Tensor,
    filters: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    geometry: Geometry,
    precision: str,
    epilogue: Epilogue = NO_EPILOGUE,
    tile: Tile | None = None,
) -> None:
    """Write activation(transposed convolution + bias + residual) to `out`: the gradient of a convolution by its input.

    Arguments are those of `convolve`, but filters are (groups * channels, columns, ...), and positions of `out` that no
    tap reaches are activation(bias + residual).
    """
    if not out.numel():
        return
    out, epilogue = with_program(out, epilogue)
    if product.multiply(input, filters.transpose(0, 1), bias, out, geometry, precision, epilogue):
        return
    if _is_depthwise(filters, geometry):
        _check_depthwise(epilogue)
        depthwise.depthwise_backward_input(input, filters, out, *geometry[:3], bias, epilogue)
        return
    problem = transposed_problem_of(input, filters, out, geometry)
    axes = geometry.transposed_axes(input.shape[2:], out.shape[2:], filters.shape[2:])
    filters, strides = _product_filters(problem, filters, axes, geometry.groups, True)
    _run(_Product(problem, input, filters, bias, axes, strides, precision), out, epilogue, tile)


def filter_gradient(
    input: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    geometry: Geometry,
    precision: str,
    tile: Tile | None = None,
) -> None:
    """Write the gradient of the filters to `out`, (groups * columns, channels, kernel depth, height, width).

    `grad` is the gradient of the result of `convolve`. The sums of slices of the positions are added up in a fixed
    order. For a transposed convolution `input` is the gradient of its result, and `grad` its input.
    """
    if not out.numel() or product.multiply_filters(input, grad, out, geometry, precision):
        return
    if _is_depthwise(out, geometry):
        depthwise.depthwise_backward_weight(grad, input, out, *geometry[:3])
        return
    problem = problem_of(input, out, grad, geometry)
    input, grad = channels_last(input, problem), channels_last(grad, problem)
    axes = geometry.axes(input.shape[2:], grad.shape[2:], out.shape[2:])
    by_boxes = None if tile else filter_boxes.choose(problem, input, grad, axes)
    if by_boxes is not None:
        filter_boxes.filter_gradient(problem, input, grad, out, axes, by_boxes)
        return
    tile = tile or select.filter_tile(problem, grad.device)
    steps, count = select.slices(problem, tile, grad.device)
    result, strides = out, filter_strides(out, geometry.groups)
    partial = count > 1 or problem.merged > 1
    if partial:
        result = slices.partial_gradients(out, problem, count)
        strides = groups.merged_strides(result)
    facts = _facts(problem, tile, axes, precision, input, grad)
    meta = FilterMeta(
        split=count > 1,
        input_multiple=vector_multiple(input, problem.channels, image_strides(input), "channel"),
        grad_multiple=vector_multiple(grad, problem.columns, image_strides(grad), "channel"),
        input_inner=input.stride(1) == 1,
        out_inner=grad.stride(1) == 1,
        index=offset_type(input, grad, result),
        **facts,
    )
    rows = problem.taps * -(-problem.channels // tile.block_m)
    rows = -(-problem.inner // tile.block_m) if meta.folded else rows
    filter_gradient_tile[(rows * -(-problem.columns // tile.block_n) * problem.groups, count)](
        *(input, grad, result, axes),
        strides=Strides(image_strides(input), strides, image_strides(grad)),
        batches=problem.batches,
        channels=problem.channels,
        columns=problem.columns,
        steps=steps,
        slice_stride=result[0].numel() if count > 1 else 0,
        META=meta,
        **_options(tile),
    )
    if partial:
        slices.add(result, out, problem, axes)


def _is_depthwise(filters: torch.Tensor, geometry: Geometry) -> bool:
    """Return whether every group of a convolution has one input channel, or of a transposed one one output channel."""
    return geometry.groups > 1 and filters.shape[1] == 1


def _check_depthwise(epilogue: Epilogue) -> None:
    """Decline a program for the kernels of depthwise convolutions, which have none."""
    if epilogue.program is not None:
        raise Decline("a depthwise convolution; the program is launched by itself")


def channels_last(tensor: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Return a tensor in channels-last order: a copy if its elements would be loaded one by one otherwise."""
    if not select.copies_images(problem, tensor):
        return tensor
    strides = contiguous_strides(tensor.shape, (1, 4, 3, 2, 0))
    copy = empty_strided(tensor.shape, strides, tensor.dtype, tensor.device)
    move(tensor, copy)
    return copy


def _product_filters(
    problem: Problem, filters: torch.Tensor, axes: Axes, groups_of_filters: int, transposed: bool
) -> tuple[torch.Tensor, FilterStrides]:
    """Return the filters of a product and their strides: block-diagonal for merged groups, or a copy."""
    if problem.merged > 1:
        return groups.block_diagonal(filters, problem, axes, groups_of_filters, transposed)
    if select.copies_filters(problem, filters):
        filters = _with_contiguous(filters, int(transposed))
    return filters, filter_strides(filters, groups_of_filters, transposed)


def _with_contiguous(filters: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a copy of filters in which dimension `dim`, 0 or 1, is contiguous, and taps are slowest.

    The copy is not kept for the next call: writes by `.data`, by other libraries and by replays of CUDA
    graphs change no version counter. Filters in channels-last order need no copy.
    """
    strides = contiguous_strides(filters.shape, (dim, 1 - dim, 4, 3, 2))
    copy = empty_strided(filters.shape, strides, filters.dtype, filters.device)
    move(filters, copy)
    return copy


class _Product(NamedTuple):
    """The operands of a convolution as a matrix product."""

    problem: Problem
    input: torch.Tensor
    filters: torch.Tensor
    bias: torch.Tensor | None
    axes: Axes
    strides: FilterStrides
    precision: str


def _run(operands: _Product, out: torch.Tensor, epilogue: Epilogue, tile: Tile | None) -> None:
    """Launch the convolution, and with slices of K the sum of the slices."""
    problem, bias, matrices = operands.problem, operands.bias, product.positions_by_channels(out)
    operands = operands._replace(input=channels_last(operands.input, problem))
    # The sum of slices adds a bias, and nothing of the shape of the result.
    splits = matrices is not None and epilogue.residual is None and epilogue.sums is None and not epilogue.program
    by_boxes = tile is None and boxes.serves_result(out)
    by_boxes = by_boxes and boxes.serves(*operands[:3], operands.axes, operands.strides)
    tile = tile or select.forward_tile(problem, out.device, splits=splits)
    if by_boxes and tile.splits == 1:
        _, input, filters, _, axes, strides, _ = operands
        boxes.convolve(problem, input, filters, bias, out, axes, strides, epilogue)
        return
    if tile.splits == 1 or matrices is None:
        _launch(operands, out, epilogue, tile)
        return
    batches, rows, columns = matrices.shape
    partials = empty((tile.splits * batches, rows, columns), problem.accumulator, out.device)
    # The first slice, in channels-last order.
    first = partials.as_strided(out.shape, contiguous_strides(out.shape, (1, 4, 3, 2, 0)))
    _launch(operands._replace(bias=None), first, NO_EPILOGUE, tile)
    of_product = work.Epilogue(activation=epilogue.activation)
    if bias is not None:
        of_product = of_product._replace(addend=bias[None, None, :], beta=1)
    add_partial_products(partials, matrices, of_product.expanded(matrices.shape), columns, tile.splits, **fusion())


def _launch(operands: _Product, out: torch.Tensor, epilogue: Epilogue, tile: Tile) -> None:
    """Launch the kernel of convolutions. The results of slices of K follow each other from `out` on."""
    problem, input, filters, bias, axes, strides, precision = operands
    filters_inner = strides.channel == 1
    vector = problem.channels if filters_inner else problem.columns
    contiguous = "channel" if filters_inner else "column"
    own = image_strides(input)
    meta = ForwardMeta(
        phased=problem.phases > 1,
        split=tile.splits > 1,
        merged=problem.merged,
        input_inner=input.stride(1) == 1,
        out_inner=out.stride(1) == 1,
        input_multiple=vector_multiple(input, problem.channels, own, "channel"),
        filters_inner=filters_inner,
        filters_multiple=vector_multiple(filters, vector, strides, contiguous),
        index=offset_type(input, filters, out),
        program=epilogue.program,
        program_channels=epilogue.channels,
        **_facts(problem, tile, axes, precision, input),
    )
    tiles = -(-problem.rows // tile.block_m) * -(-problem.columns // tile.block_n)
    convolve_tile[(tiles * problem.units, tile.splits)](
        *(input, filters, bias, out, epilogue.residual, epilogue.sums, epilogue.more, axes),
        strides=Strides(own, strides, image_strides(out)),
        batches=problem.batches,
        channels=problem.channels,
        columns=problem.columns,
        slice_stride=out.numel() if tile.splits > 1 else 0,
        ACTIVATION=epilogue.activation,
        META=meta,
        **_options(tile),
    )


def _facts(problem: Problem, tile: Tile, axes: Axes, precision: str, *tensors: torch.Tensor) -> dict[str, Any]:
    """Return the fields of the kernels' `TileMeta` that both kernels have."""
    device, dtype = tensors[0].device, problem.dtype
    if select.is_folded(problem) and precision == "tf32":
        # As ATen's: cuDNN has no TF32 kernels for so few channels.
        precision = "ieee"
    exact = precision == "ieee" and dtype is torch.float32 and not devices.current.interpreted
    bf16x6 = exact and tile.bf16x6 and devices.has_tma(device)
    return {
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "block_k": tile.block_k,
        "group_m": table().group_m,
        "accumulator": TRITON_DTYPES[problem.accumulator],
        "precision": "bf16x6" if bf16x6 else precision,
        "dims": 3 if _is_used(axes.depth) else 2 if _is_used(axes.height) else 1,
        "bounded": problem.phases > 1 or any(map(_may_miss, axes)),
        "folded": select.is_folded(problem),
    }


def _is_used(axis: Any) -> bool:
    """Return whether an axis is more than one position and one tap that meets it."""
    return (axis.size, axis.positions, axis.taps, axis.origin) != (1, 1, 1, 0)


def _may_miss(axis: Any) -> bool:
    """Return whether a tap meets no element of the input at some output position."""
    reach = (axis.taps - 1) * axis.dilation
    least, most = axis.origin + min(reach, 0), (axis.positions - 1) * axis.stride + axis.origin + max(reach, 0)
    return least < 0 or most >= axis.size


def _options(tile: Tile) -> dict[str, Any]:
    """Return the compile options of a tile's kernel."""
    return {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **devices.current.options,
        **fusion(),
    }
