"""Products of float32 by Hopper's kernel of bfloat16 terms: its algorithm without a GPU, its values, and its bits."""

import dataclasses
import itertools
import math

import pytest
import torch
import warps
from test_attention_hopper import drawn, on_sm_90
from warps import Pointer, number

from tritonite import devices
from tritonite.engine.gemm import cost
from tritonite.engine.gemm import launch as gemm_launch
from tritonite.engine.gemm.kernels import epilogue, hopper_fp32
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.table import Config
from tritonite.engine.gemm.work import Epilogue, Work

_TILES = [tile for tile in cost.load(cost.FOLDER / "NVIDIA_H200.json")[4].configs if tile.hopper_fp32]


def cut(x, _):
    """Split a tensor into three terms of 8 bits each, by truncation. Only the first term of infinity is not 0."""
    found = []
    for _term in range(3):
        first = (x.contiguous().view(torch.int32) & -65536).view(torch.float32)
        found.append(warps.block(first.bfloat16()))
        x = x - first
    return tuple(found)


def operands(batches, M, N, K, a_columns=False, b_columns=False):
    a, b = drawn(batches, M, K, dtype=torch.float32), drawn(batches, K, N, dtype=torch.float32)
    return a.mT.contiguous().mT if a_columns else a, b.mT.contiguous().mT if b_columns else b


def not_finite(a, b):
    """Set elements to infinity and nan, next to zeros, numbers of few bits and the largest finite number."""
    for i, value in enumerate((math.inf, -math.inf, math.nan, 3.4e38)):
        a[0, 1 + i, i], b[-1, i + 5, i] = value, value
    b[0, 0], b[0, 1] = 0, 2
    return a, b


@pytest.fixture(params=[False, True], ids=["late", "at once"])
def in_python(request, monkeypatch):
    """Let the host function run the kernel's source as plain Python."""

    def write(total, out, strides, tile):
        batch, rows, columns, row_mask, column_mask = tile
        pointers = out + batch * strides[0] + (rows * strides[1])[:, None] + (columns * strides[2])[None, :]
        pointers.store(total, row_mask[:, None] & column_mask[None, :])

    class Launcher:
        def __getitem__(self, grid):
            def launch(a, b, out, *, num_warps, maxnreg=None, **options):
                kernel = warps.Kernel(
                    hopper_fp32.multiply_bf16x6.jit.fn,
                    warps.device_functions(epilogue, hopper_fp32),
                    request.param,
                    split_terms=cut,
                    store=write,
                    **warps.named_tuples(epilogue, hopper_fp32),
                )
                added = options["added"]
                options |= {
                    **{"a": Pointer(a), "b": Pointer(b), "out": Pointer(out)},
                    "added": added._replace(addend=None if added.addend is None else Pointer(added.addend)),
                    "META": dataclasses.replace(options["META"], index=torch.int64),
                }
                for name in ("alpha", "beta"):
                    options[name] = torch.tensor(options[name])
                for name in ("batches", "M", "N", "K", "steps"):
                    options[name] = number(options[name])
                for split, tile in itertools.product(range(grid[1]), range(grid[0])):
                    kernel((tile, split), **options)

            return launch

    monkeypatch.setattr(gemm_launch, "multiply_bf16x6", Launcher())
    monkeypatch.setattr(Work, "suits_bf16x6", property(lambda work: True))


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize(("K", "splits"), [(64, 1), (97, 1), (31, 1), (200, 3)])
@pytest.mark.parametrize("columns", [(False, False), (True, True)])
def test_products_follow_each_other(in_python, columns, K, splits):
    """Nothing is read before it has been written, or overwritten before the products that read it have ended."""
    a, b = operands(2, 70, 40, K, *columns)
    addend, out = drawn(2, 70, 40, dtype=torch.float32), torch.full((2, 70, 43), math.nan)[..., :-3]
    config = Config(64, 32, 32, 4, bf16x6=True, hopper_fp32=True, splits=splits)
    product(a, b, out, Epilogue(addend, beta=0.5), config=config)
    torch.testing.assert_close(out.double(), a.double() @ b.double() + addend.double() / 2, atol=1e-5, rtol=1e-6)


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
def test_infinite_sums_are_computed_again(in_python):
    a, b = not_finite(*operands(1, 30, 20, 70))
    out = torch.full((1, 30, 20), math.nan)
    product(a, b, out, config=Config(64, 32, 32, 4, bf16x6=True, hopper_fp32=True))
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), atol=1e-4, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("splits", [1, 2])
def test_products_with_activations_use_the_portable_kernel(change_device, splits, monkeypatch):
    """An activation is a Triton function, whose blocks have no layout in Gluon. With split-K it follows the sum."""
    change_device(interpreted=False)
    tile, launched = _TILES[0]._replace(splits=splits), []
    for kernel in (gemm_launch.multiply_tiles, gemm_launch.multiply_bf16x6, gemm_launch.reduce_split_k):
        monkeypatch.setattr(kernel, "run", lambda *_, name=kernel.jit.__name__, **given: launched.append(name))
    for activation in (None, object()):
        a, b = operands(1, 64, 64, 512)
        product(a, b, torch.empty_like(a[..., :64]), Epilogue(activation=activation), config=tile)
    ends = ["reduce_split_k"] * (splits - 1)
    second = "multiply_bf16x6" if splits > 1 else "multiply_tiles"
    assert launched == ["multiply_bf16x6", *ends, second, *ends]


def check(a, b, config, addend=None):
    """Compare with float64, and check that memory around the result is unchanged."""
    whole = a.new_full((a.shape[0], a.shape[1] + 1, b.shape[2] + 3), math.nan)
    out = whole[:, :-1, :-3]
    product(a, b, out, Epilogue(addend, beta=1.0), config=config)
    exact = a.double() @ b.double() + (0 if addend is None else addend.double())
    torch.testing.assert_close(out, exact.float(), atol=1e-4, rtol=1e-5, equal_nan=True)
    assert whole[:, -1].isnan().all() and whole[..., -3:].isnan().all()
    return out


@on_sm_90
@pytest.mark.parametrize("tile", _TILES, ids=lambda tile: f"{tile.BLOCK_M}x{tile.BLOCK_N}{'T' * tile.transposed}")
@pytest.mark.parametrize("columns", [*itertools.product((False, True), repeat=2)])
def test_values(tile, columns):
    for M, N, K, splits in ((200, 136, 320, 1), (131, 77, 333, 3), (1, 300, 33, 1), (64, 5, 1000, 2)):
        a, b = operands(2, M, N, K, *columns)
        check(a, b, tile._replace(splits=splits), addend=drawn(2, M, N, dtype=torch.float32))
        check(a[..., 1:], b[:, 1:], tile)
        check(*not_finite(*operands(1, M + 9, N + 9, K, *columns)), tile)


@on_sm_90
def test_any_tile_gives_the_same_bits():
    """All tiles of an orientation give the same bits, also where another element of a tile is not finite."""
    a, b = operands(1, 300, 200, 700)
    for transposed in (False, True):
        found = [check(a, b, tile) for tile in _TILES if tile.transposed == transposed]
        assert all([torch.equal(found[0], other) for other in found])
        a[0, 7, 3] = math.inf
        again = check(a, b, next(tile for tile in _TILES if tile.transposed == transposed))
        assert torch.equal(found[0][:, 8:], again[:, 8:])
        a[0, 7, 3] = 1
