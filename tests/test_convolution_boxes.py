"""Convolutions by Hopper's kernel over boxes of positions: on a GPU, and its source as plain Python."""

import dataclasses
import math

import pytest
import torch
import warps
from compositions import close
from torch.nn import functional
from warps import Descriptor, Pointer, number

import tritonite
from tritonite import devices
from tritonite.engine.convolution import boxes, epilogue, hopper, launch, table
from tritonite.engine.convolution.epilogue import NO_EPILOGUE, Epilogue
from tritonite.engine.convolution.problem import Geometry
from tritonite.engine.convolution.table import BoxTile
from tritonite.engine.gemm.kernels import epilogue as gemm_epilogue

ON_GPU = devices.current.type == "cuda"
TILES = table.TABLE["nvidia"].boxes if ON_GPU else (BoxTile(32, 64, 16, 3, 1.0),)
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


@pytest.fixture(params=["late", "at once"])
def launched(request, monkeypatch):
    """Run the kernel on a GPU, otherwise its source with two programs. Return the grids of its launches."""
    found, kernel_of = [], hopper.convolve_boxes

    class Launcher:
        def __getitem__(self, grid):
            found.append(grid[0])
            if ON_GPU:
                return kernel_of[grid]

            def run(*given, num_warps, walk, **options):
                kernel = warps.Kernel(
                    kernel_of.jit.fn,
                    warps.device_functions(hopper, epilogue, gemm_epilogue),
                    request.param == "at once",
                    **warps.named_tuples(hopper, gemm_epilogue),
                    CONSUMERS=2,
                )
                kernel.products.in_flight = True
                blocks = [Descriptor(x.base.as_strided(x.shape, x.strides), x.block_shape) for x in given[:3]]
                pointers = [x if x is None else Pointer(x) for x in given[3:]]
                options["META"] = dataclasses.replace(options["META"], index=torch.int64)
                counted = walk._replace(**{n: number(v) for n, v in walk._asdict().items() if isinstance(v, int)})
                for program in range(grid[0]):
                    kernel(program, *blocks, *pointers, walk=counted, **options)

            return run

    if ON_GPU and request.param == "late":
        pytest.skip("copies arrive as a GPU's do")
    monkeypatch.setattr(boxes.hopper, "convolve_boxes", Launcher())
    if not ON_GPU:
        monkeypatch.setattr(warps.Block, "split", lambda tile: tile.unbind(-1), raising=False)
        monkeypatch.setattr(devices, "multiprocessors", lambda _: 2)
        monkeypatch.setattr(devices, "has_wgmma", lambda _: True)
    return found


@pytest.fixture(params=TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
def tile(request, monkeypatch):
    kind = devices.current.kind
    only = table.TABLE[kind]._replace(boxes=(request.param,), most_splits=1)
    monkeypatch.setattr(table, "TABLE", table.TABLE | {kind: only})
    return request.param


def drawn(*shape, dtype):
    made = torch.randn(shape, dtype=torch.float64).to(dtype).to(tritonite.device)
    return made.permute(0, *range(2, made.dim()), 1).contiguous().permute(0, -1, *range(1, made.dim() - 1))


def volume(tensor, more=2):
    while tensor.dim() < 3 + more:
        tensor = tensor.unsqueeze(2)
    return tensor


def geometry_of(dims, padding, dilation):
    fill = 3 - dims
    return Geometry((1, 1, 1), (0,) * fill + padding, (1,) * fill + dilation, 1)


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
    two = Geometry((1, 2, 2), (0, 1, 1), (1, 1, 1), 1)
    assert not served(out=out[:, :, :3, :3], geometry=two)
    halves = Geometry((1, 1, 1), (0, 1, 1), (1, 1, 1), 2)
    assert not served(weight=weight[:, :16], geometry=halves)
