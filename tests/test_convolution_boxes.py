"""Convolutions and gradients by Hopper's kernels over boxes of positions: on a GPU, and their source as Python."""

import dataclasses
import math
import sys

import pytest
import torch
import warps
from compositions import close
from conftest import some
from torch.nn import functional
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from warps import Descriptor, Pointer, number

import tritonite
from tritonite import devices
from tritonite.engine.convolution import boxes, epilogue, hopper, hopper_filters, launch, slices, table
from tritonite.engine.convolution.epilogue import NO_EPILOGUE, Epilogue
from tritonite.engine.convolution.problem import Geometry
from tritonite.engine.convolution.table import BoxTile, FilterBoxTile
from tritonite.engine.gemm.kernels import epilogue as gemm_epilogue
from tritonite.engine.pointwise.embedded import ResultProgram
from tritonite.fused.activations import ACTIVATIONS
from tritonite.graph.fused_call import fused_call
from tritonite.install import library
from tritonite.registry.programs import from_text

ON_GPU = devices.current.type == "cuda"
TILES = table.TABLE["nvidia"].boxes if ON_GPU else (BoxTile(32, 64, 16, 3, 1.0),)
FILTER_TILES = table.TABLE["nvidia"].filter_boxes if ON_GPU else (FilterBoxTile(64, 32, 16, 3, 1.0),)
# What activations and the program below compute, for the source as Python.
TORCH = {
    "relu": torch.relu,
    "relu6": functional.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "hardswish": functional.hardswish,
}
FUNCTIONS = {own.function: TORCH[name] for name, own in ACTIVATIONS.items()}
STEPS = "arithmetic.mul(t0, t1); activation.silu(s0); arithmetic.add(s1, t2, n0) -> s2"
# Channels, columns, sizes, kernel, padding, dilation.
LAYERS = {
    "images": (32, 24, (9, 11), (3, 3), (1, 1), (1, 1)),
    "no padding": (40, 16, (6, 8), (3, 2), (0, 0), (1, 1)),
    "dilated": (32, 8, (10, 7), (3, 3), (4, 2), (2, 2)),
    "small images": (48, 24, (2, 3), (3, 3), (1, 1), (1, 1)),
    "sequences": (32, 16, (37,), (5,), (2,), (1,)),
    "volumes": (32, 8, (3, 4, 5), (2, 3, 3), (1, 0, 1), (1, 1, 1)),
    "one position": (32, 8, (1, 1), (3, 3), (1, 1), (1, 1)),
    "one row": (40, 8, (1, 9), (1, 3), (0, 1), (1, 1)),
    "much padding": (32, 8, (3, 3), (5, 5), (5, 4), (1, 1)),
}


def program(result, tensor, vector):
    """Compute what STEPS do, with the number 1."""
    return functional.silu(result * tensor) + vector


def as_python(function, grid, given, options, at_once):
    """Run a kernel's source as Python, a program after the other."""
    module = sys.modules[function.__module__]
    kernel = warps.Kernel(
        function,
        warps.device_functions(gemm_epilogue, epilogue, module),
        at_once,
        **warps.named_tuples(module),
        CONSUMERS=2,
        evaluate_result_program=lambda _, total, more: (program(total, *[each.float() for each in more]),),
    )
    kernel.products.in_flight = True
    to_kernel = {TensorDescriptor: as_descriptor, torch.Tensor: Pointer, tuple: lambda x: tuple(map(Pointer, x))}
    given = [to_kernel.get(type(each), lambda x: x)(each) for each in given]
    del options["num_warps"]
    options = {name: number(value) for name, value in options.items()}
    walk = options.pop("walk")
    walk = walk._replace(**{n: number(v) for n, v in walk._asdict().items() if isinstance(v, int)})
    options["META"] = dataclasses.replace(options["META"], index=torch.int64)
    if "ACTIVATION" in options:
        options["ACTIVATION"] = FUNCTIONS.get(options["ACTIVATION"])
    for program_id in range(grid[0]):
        kernel(program_id, *given, walk=walk, **options)


def as_descriptor(described):
    return Descriptor(described.base.as_strided(described.shape, described.strides), described.block_shape)


@pytest.fixture(params=["late", "at once"])
def launched(request, monkeypatch):
    """Run the kernels on a GPU, otherwise their source with two programs. Return the grids of their launches."""
    found = []

    class Launcher:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            found.append(grid[0])
            if ON_GPU:
                return self.kernel[grid]
            return lambda *given, **options: as_python(
                self.kernel.jit.fn, grid, given, options, request.param == "at once"
            )

    if ON_GPU and request.param == "late":
        pytest.skip("copies arrive as a GPU's do")
    monkeypatch.setattr(hopper, "convolve_boxes", Launcher(hopper.convolve_boxes))
    monkeypatch.setattr(hopper_filters, "filter_gradient_boxes", Launcher(hopper_filters.filter_gradient_boxes))
    if not ON_GPU:
        monkeypatch.setattr(warps.Block, "split", lambda tile: tile.unbind(-1), raising=False)
        monkeypatch.setattr(devices, "multiprocessors", lambda _: 2)
        monkeypatch.setattr(devices, "has_wgmma", lambda _: True)
    return found


def only(monkeypatch, **limits):
    kind = devices.current.kind
    monkeypatch.setattr(table, "TABLE", table.TABLE | {kind: table.TABLE[kind]._replace(**limits)})


@pytest.fixture(params=TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
def tile(request, monkeypatch):
    only(monkeypatch, boxes=(request.param,), most_splits=1)
    return request.param


@pytest.fixture(params=FILTER_TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
def filter_tile(request, monkeypatch):
    only(monkeypatch, filter_boxes=(request.param,), least_blocks=1)
    return request.param


def drawn(*shape, dtype):
    made = torch.randn(shape, dtype=torch.float64).to(dtype).to(tritonite.device)
    return made.permute(0, *range(2, made.dim()), 1).contiguous().permute(0, -1, *range(1, made.dim() - 1))


def volume(tensor, more=2):
    while tensor.dim() < 3 + more:
        tensor = tensor.unsqueeze(2)
    return tensor


def geometry_of(dims, padding, dilation, stride=(1, 1, 1)):
    fill = 3 - dims
    return Geometry((1,) * fill + stride[-dims:], (0,) * fill + padding, (1,) * fill + dilation, 1)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions(layer, transposed, launched, tile):
    channels, columns, sizes, kernel, padding, dilation = LAYERS[layer]
    dims, dtype = len(sizes), torch.bfloat16
    x = drawn(3, channels, *sizes, dtype=dtype)
    pair = (channels, columns) if transposed else (columns, channels)
    weight, bias = drawn(*pair, *kernel, dtype=dtype), torch.randn(columns).to(x)
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    options = {"padding": padding, "dilation": dilation}
    if transposed and any(p > d * (k - 1) for p, d, k in zip(padding, dilation, kernel, strict=True)):
        options["padding"] = padding = tuple([0] * dims)
    expected = getattr(functional, name)(x.double(), weight.double(), bias.double(), **options)
    out = drawn(*expected.shape, dtype=dtype).fill_(math.nan)
    run = launch.convolve_transposed if transposed else launch.convolve
    run(*map(volume, (x, weight)), bias, volume(out), geometry_of(dims, padding, dilation), "ieee", NO_EPILOGUE)
    close(out, expected, 4, 1e-2)
    assert len(launched) == 1


# Channels, columns, sizes, kernel, padding, stride.
STRIDED = {
    "both": (72, 24, (9, 12), (3, 3), (1, 1), (2, 2)),
    "one tap": (72, 24, (8, 9), (1, 1), (0, 0), (2, 2)),
    "rows": (72, 24, (9, 5), (3, 3), (1, 1), (2, 1)),
    "columns": (72, 24, (4, 9), (5, 5), (2, 0), (1, 2)),
    "sequences": (72, 24, (37,), (3,), (1,), (2,)),
    "patches": (40, 24, (8, 6), (2, 2), (0, 0), (2, 2)),
}


@pytest.mark.parametrize("layer", STRIDED)
def test_strides_of_two(layer, launched, tile):
    channels, columns, sizes, kernel, padding, stride = STRIDED[layer]
    dims, options = len(sizes), {"padding": padding, "stride": stride}
    x, weight = drawn(3, channels, *sizes, dtype=torch.float16), drawn(columns, channels, *kernel, dtype=torch.float16)
    expected = getattr(functional, f"conv{dims}d")(x.double(), weight.double(), **options)
    out = drawn(*expected.shape, dtype=torch.float16).fill_(math.nan)
    geometry = geometry_of(dims, padding, (1,) * dims, stride)
    launch.convolve(*map(volume, (x, weight)), None, volume(out), geometry, "ieee")
    close(out, expected, 4, 2e-3)
    assert len(launched) == 1


@pytest.mark.parametrize("layer", STRIDED)
def test_gradients_of_filters_of_stride_two(layer, launched, filter_tile):
    _, columns, sizes, kernel, padding, stride = STRIDED[layer]
    dims, options, columns = len(sizes), {"padding": padding, "stride": stride}, columns + 8
    x = drawn(2, filter_tile.block_m, *sizes, dtype=torch.float16)
    weight = torch.randn(columns, x.shape[1], *kernel, device=x.device, dtype=torch.float64, requires_grad=True)
    result = getattr(functional, f"conv{dims}d")(x.double(), weight, **options)
    grad = drawn(*result.shape, dtype=torch.float16)
    (expected,) = torch.autograd.grad(result, weight, grad.double())
    out = torch.full_like(expected, math.nan, dtype=torch.float16)
    geometry = geometry_of(dims, padding, (1,) * dims, stride)
    launch.filter_gradient(*map(volume, (x, grad, out)), geometry, "ieee")
    close(out, expected, result.shape[2:].numel() * 2, 2e-3)
    assert len(launched) == (layer != "columns")


def test_a_residual_and_sums(launched, tile):
    x, weight = drawn(2, 32, 7, 9, dtype=torch.float16), drawn(40, 32, 3, 3, dtype=torch.float16)
    bias, residual = torch.randn(40).to(x), drawn(2, 40, 7, 9, dtype=torch.float16)
    out, sums = torch.full_like(residual, math.nan), torch.full_like(residual, math.nan)
    own = Epilogue(None, volume(residual), volume(sums))
    launch.convolve(volume(x), volume(weight), bias, volume(out), geometry_of(2, (1, 1), (1, 1)), "ieee", own)
    exact = functional.conv2d(x.double(), weight.double(), bias.double(), padding=1) + residual.double()
    close(out, exact, 4, 2e-3)
    assert torch.equal(sums, out)
    assert len(launched) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_program(dtype, launched, tile):
    """The result has the program's dtype, which is float32 where autocast widens what a norm takes."""
    x, weight = drawn(2, 32, 7, 9, dtype=torch.float16), drawn(40, 32, 3, 3, dtype=torch.float16)
    like, vector = drawn(2, 40, 7, 9, dtype=torch.float16), torch.randn(40).to(x)
    out = torch.full_like(like, math.nan, dtype=dtype)
    made = ResultProgram.of(from_text(STEPS, 3, 1), out, (like, vector[:, None, None]), (1,))
    own = Epilogue(None, None, None, made, (volume(like), vector), (False, True))
    launch.convolve(volume(x), volume(weight), vector, volume(out), geometry_of(2, (1, 1), (1, 1)), "ieee", own)
    exact = functional.conv2d(x.double(), weight.double(), vector.double(), padding=1)
    exact = functional.silu(exact * like.double()) + vector.double()[:, None, None]
    close(out, exact, 8, 4e-3)
    assert len(launched) == 1


def test_a_graph_s_program(launched, tile):
    x, weight = drawn(2, 32, 7, 9, dtype=torch.bfloat16), drawn(40, 32, 3, 3, dtype=torch.bfloat16)
    like, vector = drawn(2, 40, 7, 9, dtype=torch.bfloat16), torch.randn(40, 1, 1).to(x)
    call = "convolution(t0, t1, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1) -> bfloat16"
    fused_call()
    run = library.registered()["tritonite::fused_call"]
    (out,) = run([], [], "", [x, weight], call, [], [like, vector], [1], STEPS)
    exact = functional.conv2d(x.double(), weight.double(), padding=1)
    close(out, functional.silu(exact * like.double()) + vector.double(), 8, 2e-2)
    assert len(launched) == 1


DTYPES, WIDTHS = (torch.bfloat16, torch.float16), ((40, 24), (72, 136), (32, 8))
CASES = some(tuple(ACTIVATIONS), DTYPES, (1, 3), (1, 0, 2), (3, 1, 5), WIDTHS, turns=3 if ON_GPU else 1)


@pytest.mark.parametrize(("activation", "dtype", "batch", "padding", "taps", "widths"), CASES)
@pytest.mark.parametrize("launched", ["at once"], indirect=True)
def test_layers(activation, dtype, batch, padding, taps, widths, launched, tile):
    channels, columns = widths
    x, weight = drawn(batch, channels, 6, 9, dtype=dtype), drawn(columns, channels, taps, taps, dtype=dtype)
    bias = torch.randn(columns).to(x.device)
    exact = functional.conv2d(x.double(), weight.double() / 8, bias.double(), padding=padding)
    residual = drawn(*exact.shape, dtype=dtype)
    exact = TORCH[activation](exact + residual.double())
    steps = {"padding": padding, "activation": activation}
    out = tritonite.fused.conv_bias_act(x, weight / 8, bias, residual=residual, **steps)
    close(out, exact, 4, 2e-3 if dtype is torch.float16 else 1.6e-2)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert len(launched) == 1


# Batch, channels, columns, sizes, kernel, padding, dilation, and whether the kernel over boxes serves the gradient.
# None stands for the channels of both warp groups.
GRADIENTS = {
    "boxes that fit": (4, 72, 40, (8, 12), (3, 3), (1, 1), (1, 1), True),
    "rows that do not fit": (2, None, 40, (9, 13), (3, 3), (1, 1), (1, 1), True),
    "dilated": (1, None, 32, (7, 10), (3, 3), (2, 2), (2, 2), True),
    "five taps": (3, None, 40, (3, 5), (5, 5), (2, 2), (1, 1), True),
    "sequences": (1, None, 32, (37,), (5,), (2,), (1,), True),
    "volumes": (2, None, 32, (3, 4, 5), (3, 1, 3), (1, 0, 1), (1, 1, 1), True),
    "padding that fits": (1, 32, 32, (6, 6), (3, 3), (2, 2), (1, 1), True),
    "no padding": (1, None, 32, (9, 9), (3, 3), (0, 0), (1, 1), False),
}


@pytest.mark.parametrize("layer", GRADIENTS)
def test_gradients_of_filters(layer, launched, filter_tile):
    batch, channels, columns, sizes, kernel, padding, dilation, served = GRADIENTS[layer]
    dims, options, channels = len(sizes), {"padding": padding, "dilation": dilation}, channels or filter_tile.block_m
    x = drawn(batch, channels, *sizes, dtype=torch.bfloat16)
    weight = torch.randn(columns, channels, *kernel, device=x.device, dtype=torch.float64, requires_grad=True)
    result = getattr(functional, f"conv{dims}d")(x.double(), weight, **options)
    grad = drawn(*result.shape, dtype=torch.bfloat16)
    (expected,) = torch.autograd.grad(result, weight, grad.double())
    out = torch.full_like(expected, math.nan, dtype=torch.bfloat16)
    launch.filter_gradient(*map(volume, (x, grad, out)), geometry_of(dims, padding, dilation), "ieee")
    close(out, expected, math.prod(result.shape[2:]) * batch, 1e-2)
    assert len(launched) == served


def test_an_infinite_input_beside_positions_that_do_not_exist(launched, filter_tile):
    channels = filter_tile.block_m
    x, grad = drawn(1, channels, 9, 9, dtype=torch.float16), drawn(1, 32, 9, 9, dtype=torch.float16)
    x[:, :, :, -1] = x[:, :, 0] = math.inf
    out = torch.full((32, channels, 3, 3), math.nan).to(x)
    launch.filter_gradient(*map(volume, (x, grad, out)), geometry_of(2, (1, 1), (1, 1)), "ieee")
    assert len(launched) == 1
    # This tap meets neither the first row nor the last column.
    x[:, :, :, -1] = x[:, :, 0] = 0
    expected = torch.einsum("chw,dhw->dc", x[0, :, 1:, :8].double(), grad[0, :, :8, 1:].double())
    close(out[:, :, 2, 0], expected, 64, 2e-3)


def test_slices_of_positions(launched, filter_tile, monkeypatch):
    added, add = [], slices.add
    monkeypatch.setattr(slices, "add", lambda *given: added.append(given) or add(*given))
    monkeypatch.setattr(devices, "multiprocessors", lambda _: 64)
    only(monkeypatch, adding=0.0)
    x, grad = drawn(2, 32, 8, 8, dtype=torch.float16), drawn(2, 48, 8, 8, dtype=torch.float16)
    out = torch.full((48, 32, 3, 3), math.nan).to(x)
    launch.filter_gradient(*map(volume, (x, grad, out)), geometry_of(2, (1, 1), (1, 1)), "ieee")
    expected = torch.nn.grad.conv2d_weight(x.double(), out.shape, grad.double(), padding=1)
    close(out, expected, 128, 2e-3)
    assert len(launched) == len(added) == 1


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (8, 1, 7, 7), (3, 1, 56, 56), (2, 1, 1, 3000), (5, 4, 6, 9)])
def test_boxes_cover_all_positions(rows, sizes):
    box, count = boxes.box_of(rows, boxes.Sizes(*sizes, 64))
    assert math.prod(box) == rows
    assert count == math.prod([-(-size // side) for size, side in zip(sizes, box, strict=True)])
    assert count * rows < 4 * max(rows, math.prod(sizes))


def test_calls_that_are_not_served(launched, tile):
    x, weight = drawn(2, 32, 6, 6, dtype=torch.bfloat16), drawn(16, 32, 3, 3, dtype=torch.bfloat16)
    out = drawn(2, 16, 6, 6, dtype=torch.bfloat16)

    one = geometry_of(2, (1, 1), (1, 1))

    def served(x=x, weight=weight, out=out, geometry=one):
        launch.convolve(volume(x), volume(weight), None, volume(out), geometry, "ieee")
        count = len(launched)
        launched.clear()
        return count == 1

    assert served()
    assert served(x.contiguous())  # by a copy
    assert not served(out=out.contiguous())
    assert not served(x[:1].expand_as(x))
    assert not served(weight=weight[:, :, :1].expand_as(weight))
    assert not served(x.float(), weight.float(), out.float())
    assert not served(x[:, :31], weight[:, :31])
    assert not served(weight=weight[:9], out=out[:, :9])
    three = Geometry((1, 3, 3), (0, 1, 1), (1, 1, 1), 1)
    assert not served(out=out[:, :, :2, :2], geometry=three)
    halves = Geometry((1, 1, 1), (0, 1, 1), (1, 1, 1), 2)
    assert not served(weight=weight[:, :16], geometry=halves)
