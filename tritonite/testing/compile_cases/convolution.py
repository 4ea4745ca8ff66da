"""Convolutions: layouts, strides, few and many channels, and the gradients, by every tile of the table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from tritonite import devices, registry
from tritonite.devices.tables import Tables
from tritonite.engine.convolution import filters, forward, launch, table
from tritonite.engine.convolution.epilogue import Epilogue
from tritonite.engine.convolution.groups import write_block_diagonal
from tritonite.engine.convolution.problem import Geometry
from tritonite.engine.pointwise.embedded import ResultProgram
from tritonite.fused.activations import ACTIVATIONS
from tritonite.install import library
from tritonite.registry.programs import from_text
from tritonite.testing.compile_cases.cases import KINDS, TARGETS, Case, compile_cases, launches


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0)


_OWN = {
    forward.convolve_tile.jit,
    filters.filter_gradient_tile.jit,
    filters.add_slices.jit,
    write_block_diagonal.jit,
}


def _calls(
    dtype: torch.dtype, channels: int, columns: int, stride: int, last: bool, groups: int = 1
) -> Iterator[tuple[str, Any]]:
    """Yield a convolution of images, its transpose and their gradients."""
    kept = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(2, channels, 32, 32, dtype=dtype).to(memory_format=kept)
    weight = torch.empty(columns, channels // groups, 3, 3, dtype=dtype).to(memory_format=kept)
    bias, size = torch.empty(columns, dtype=dtype), 32 // stride
    steps: tuple[Any, ...] = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], groups)
    yield "convolution", (x, weight, bias, *steps)
    grad = torch.empty(2, columns, size, size, dtype=dtype).to(memory_format=kept)
    yield "convolution_backward", (grad, x, weight, [columns], *steps, [True] * 3)


@compile_cases("convolution")
def convolutions(full: bool) -> Iterator[Case]:
    """Every tile, and every variant of the kernels."""
    kinds = KINDS if full else {"nvidia": ("sm_90",)}
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64) if full else (torch.bfloat16, torch.float32)
    for (kind, targets), dtype in itertools.product(kinds.items(), dtypes):
        limits = table.TABLE[kind]
        tiles = limits.forward[dtype.itemsize]
        for i, tile in enumerate(tiles):
            only: dict[int, tuple[table.Tile, ...]] = dict.fromkeys((2, 4, 8), (tile,))
            chosen = limits._replace(forward=only, filters=only)
            variants = itertools.product((3, 64), (1, 2), (False, True)) if full and not i else ((64, 1, i % 2 == 0),)
            for channels, stride, last in variants:
                yield from _cases(kind, targets, chosen, dtype, (channels, 72, stride, last))
        few = ((3, 64, 2, False), (24, 40, 2, True), (64, 64, 1, True, 16))
        for variant in (*few, (64, 64, 2, False, 8), (20, 20, 1, False, 2)) if full else few:
            yield from _cases(kind, targets, limits, dtype, variant)
        # A slice of K a program, and one program for all of K.
        for most in (1, 16):
            yield from _cases(kind, targets, limits._replace(most_splits=most, adding=0.0), dtype, (64, 64, 1, True))


def _box_epilogues(out: torch.Tensor, full: bool) -> Iterator[tuple[str, bool, Epilogue]]:
    """Yield epilogues of the kernel over boxes, with a label each, and whether for a transposed convolution."""
    yield "bias", False, Epilogue()
    yield "residual", True, Epilogue(None, out, out)
    for name, own in ACTIVATIONS.items():
        if full or name in ("relu", "gelu"):
            yield name, False, Epilogue(own.function, out)
    vector = out.new_empty(out.shape[1])
    steps = from_text("arithmetic.mul(t0, t1); activation.silu(s0); arithmetic.add(s1, t2, n0) -> s2", 3, 1)
    tensors = (out, vector[:, None, None, None])
    yield "program", False, Epilogue(None, out, None, ResultProgram.of(steps, out, tensors, (1,)), (out, vector), _MORE)


# Which operands of the program are vectors of channels.
_MORE = (False, True)


@compile_cases("convolution_boxes")
def boxes(full: bool) -> Iterator[Case]:
    """Tiles of the kernel over boxes of positions, with filters of both orders, and its epilogue."""
    cube = torch.channels_last_3d
    tiles = table.TABLE["nvidia"].boxes
    for dtype, tile in itertools.product((torch.float16, torch.bfloat16)[not full :], tiles):
        x = torch.empty(2, 128, 1, 28, 28, dtype=dtype).to(memory_format=cube)
        out = torch.empty(2, 136, 1, 28, 28, dtype=dtype).to(memory_format=cube)
        weight, bias = torch.empty(136, 128, 1, 3, 3, dtype=dtype).to(memory_format=cube), out.new_empty(136)
        turned = torch.empty(128, 136, 1, 3, 3, dtype=dtype).to(memory_format=cube)
        for label, transposed, epilogue in _box_epilogues(out, full and tile is tiles[0]):
            if tile is not tiles[0] and label not in ("bias", "residual"):
                continue
            geometry = Geometry((1, 1, 1), (0, 1, 1), (1, 1, 1), 1)
            run = launch.convolve_transposed if transposed else launch.convolve
            for laid in (weight.transpose(0, 1), turned) if transposed else (weight,):
                given = (x, laid, bias, out, geometry, "ieee", epilogue)
                for specialization in _by_boxes(run, given, boxes=(tile,), most_splits=1):
                    yield Case(f"{label} {dtype} {tile.block_m}x{tile.block_n}", specialization, ("sm_90",), True)


@compile_cases("convolution_boxes")
def boxes_of_float32_results(full: bool) -> Iterator[Case]:
    """Tiles of the kernel over boxes of positions whose fused program stores float32."""
    cube = torch.channels_last_3d
    x = torch.empty(2, 128, 1, 28, 28, dtype=torch.bfloat16).to(memory_format=cube)
    weight = torch.empty(136, 128, 1, 3, 3, dtype=torch.bfloat16).to(memory_format=cube)
    out = torch.empty(2, 136, 1, 28, 28).to(memory_format=cube)
    program = ResultProgram.of(from_text("arithmetic.mul(t0, n0) -> s0", 1, 1), out.bfloat16(), (), (1,))
    given = (x, weight, None, out, Geometry((1, 1, 1), (0, 1, 1), (1, 1, 1), 1), "ieee")
    for tile in table.TABLE["nvidia"].boxes:
        epilogue = Epilogue(program=program)
        for specialization in _by_boxes(launch.convolve, (*given, epilogue), boxes=(tile,), most_splits=1):
            yield Case(f"float32 results {tile.block_m}x{tile.block_n}", specialization, ("sm_90",), True)


@compile_cases("convolution_boxes")
def filter_boxes(full: bool) -> Iterator[Case]:
    """Tiles of the kernel of the filters' gradient over boxes of positions, in slices and in one."""
    cube = torch.channels_last_3d
    tiles = table.TABLE["nvidia"].filter_boxes
    for dtype, tile in itertools.product((torch.float16, torch.bfloat16)[not full :], tiles):
        for images in (1, 32):
            x = torch.empty(images, 136, 1, 16, 16, dtype=dtype).to(memory_format=cube)
            weight = torch.empty(72, 136, 1, 3, 3, dtype=dtype)
            grad = torch.empty(images, 72, 1, 16, 16, dtype=dtype).to(memory_format=cube)
            given = (x, grad, weight, Geometry((1, 1, 1), (0, 1, 1), (1, 1, 1), 1), "ieee")
            for specialization in _by_boxes(launch.filter_gradient, given, filter_boxes=(tile,)):
                yield Case(f"{images} {dtype} {tile.block_m}x{tile.block_n}", specialization, ("sm_90",))


@compile_cases("convolution_boxes")
def boxes_of_stride_two(full: bool) -> Iterator[Case]:
    """Convolutions over boxes of positions, and gradients of their filters, with strides of 2."""
    cube = torch.channels_last_3d
    for dtype, stride in itertools.product((torch.float16, torch.bfloat16)[not full :], ((2, 2), (2, 1), (1, 2))):
        x = torch.empty(2, 64, 1, 32, 32, dtype=dtype).to(memory_format=cube)
        sizes = [32 // step for step in stride]
        out = torch.empty(2, 136, 1, *sizes, dtype=dtype).to(memory_format=cube)
        weight = torch.empty(136, 64, 1, 3, 3, dtype=dtype).to(memory_format=cube)
        steps = (Geometry((1, *stride), (0, 1, 1), (1, 1, 1), 1), "ieee")
        calls = ((launch.convolve, (x, weight, None, out, *steps)), (launch.filter_gradient, (x, out, weight, *steps)))
        for call, arguments in calls:
            for specialization in _by_boxes(call, arguments, most_splits=1):
                yield Case(f"{call.__name__} {dtype} {stride}", specialization, ("sm_90",))


def _by_boxes(run: Any, given: tuple[Any, ...], **limits: Any) -> list[Any]:
    """Return the launches of a call on a device with warp-group products, with changed limits of its table."""
    changed = table.TABLE | {"nvidia": table.TABLE["nvidia"]._replace(**limits)}
    with mock.patch.object(devices, "has_wgmma", lambda _: True), mock.patch.object(table, "TABLE", changed):
        return list(launches(run, given, kind="nvidia", interpreted=False))


def _cases(
    kind: str, targets: tuple[str, ...], limits: table.ConvolutionTable, dtype: torch.dtype, variant: Any
) -> Any:
    for name, arguments in _calls(dtype, *variant):
        outer = table.TABLE
        table.TABLE = Tables(outer.engine, dict.fromkeys(outer, limits))
        try:
            found = launches(registry.overloads()[name], arguments, interpreted=False)
        finally:
            table.TABLE = outer
        for specialization in found:
            if specialization.kernel in _OWN:
                yield Case(f"{name} {dtype} {variant} {limits.forward[2][0][:3]}", specialization, targets)


@compile_cases("convolution")
def tf32_convolutions(full: bool) -> Iterator[Case]:
    """The kernels with TF32, and an activation, where torch allows TF32."""
    x, weight = torch.empty(2, 32, 1, 16, 16), torch.empty(48, 32, 1, 3, 3)
    out = torch.empty(2, 48, 1, 14, 14)
    steps: tuple[Any, ...] = (Geometry(), "tf32")
    calls = (
        (launch.convolve, (x, weight, None, out, *steps, Epilogue(_relu))),
        (launch.filter_gradient, (x, out, weight, *steps)),
    )
    for call, arguments in calls:
        for specialization in launches(call, arguments, interpreted=False):
            yield Case(f"{call.__name__} tf32", specialization, ("sm_90", "sm_80") if full else ("sm_90",))


@compile_cases("conv_bias_act")
def layers_with_activations(full: bool) -> Iterator[Case]:
    """Convolutions with a bias, a residual and an activation, and with its operand stored."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64) if full else (torch.bfloat16,)
    targets = tuple(TARGETS) if full else ("sm_90",)
    groups = {"groups": (1, (72, 64, 3, 3)), "depthwise": (64, (64, 1, 3, 3)), "one tap": (1, (72, 64, 1, 1))}
    variants = itertools.product(dtypes, groups.items(), (False, True), (None, *ACTIVATIONS))
    for dtype, (label, (count, shape)), last, activation in variants:
        if not full and (last or (activation != "silu" and label != "depthwise")):
            continue
        kept = torch.channels_last if last else torch.contiguous_format
        x = torch.empty(2, 64, 32, 32, dtype=dtype).to(memory_format=kept)
        padding = shape[2] // 2
        residual = torch.empty(2, shape[0], 32, 32, dtype=dtype).to(memory_format=kept)
        weight, bias = torch.empty(shape, dtype=dtype), torch.empty(shape[0])
        keeps = activation is not None and not ACTIVATIONS[activation].of_result
        steps = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], count)
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("conv_bias_act", (x, weight, bias, residual, activation, *steps, keeps)),
        ]
        if activation is not None:
            calls.append(("conv_bias_act_backward", (residual, residual, activation)))
        for name, arguments in calls:
            for specialization in launches(library.registered()[f"tritonite::{name}"], arguments, interpreted=False):
                yield Case(f"{name} {label} {dtype} {activation}", specialization, targets)
