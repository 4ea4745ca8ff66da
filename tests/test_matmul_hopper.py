"""Products by Hopper's warp-specialised kernel: its source as plain Python."""

import dataclasses
import math
import types

import pytest
import torch
import warps
from test_attention_hopper import drawn
from warps import Descriptor, Pointer, number

from tritonite import devices
from tritonite.engine.gemm import launch as gemm_launch
from tritonite.engine.gemm.kernels import epilogue, hopper
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.table import Config
from tritonite.engine.gemm.work import Epilogue, Sums

pytestmark = pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")


def of_known_width(allocate):
    """Return shared memory whose dtype has a width in bits, as a compiler's has."""

    def allocate_shared_memory(dtype, shape, layout):
        memory = allocate(dtype, shape, layout)
        memory.dtype = types.SimpleNamespace(primitive_bitwidth=8 * dtype.itemsize)
        return memory

    return allocate_shared_memory


@pytest.fixture(params=[False, True], ids=["late", "at once"])
def launched(request, monkeypatch):
    """Let the host function run the kernel's source; return (programs, whether the addend was copied by TMA)."""
    found, source = [], hopper.multiply_warp_specialized.jit.fn

    class Launcher:
        def __getitem__(self, grid):
            def launch(*descriptors, num_warps, maxnreg=None, **options):
                kernel = warps.Kernel(
                    source,
                    warps.device_functions(epilogue, hopper),
                    request.param,
                    _prefetch_addend=lambda *_: None,
                    **warps.named_tuples(epilogue, hopper),
                )
                language = kernel.scope["gl"]
                language.allocate_shared_memory = of_known_width(language.allocate_shared_memory)
                language.static_assert = lambda *_: None
                kernel.products.in_flight = True
                given = [x and Descriptor(x.base, x.block_shape) for x in descriptors]
                added = options["added"]
                options |= {
                    **{name: torch.tensor(options[name]) for name in ("alpha", "beta")},
                    "added": added._replace(addend=None if added.addend is None else Pointer(added.addend)),
                    "META": dataclasses.replace(options["META"], index=torch.int64),
                }
                names = ("batches", "M", "N", "K", "steps", "splits", "programs", "last_row", "last_column")
                options |= {name: number(options[name]) for name in names}
                found.append((grid[0], given[5] is not None))
                for program in range(grid[0]):
                    kernel(program, *given, **options)

            return launch

    monkeypatch.setattr(gemm_launch.hopper, "multiply_warp_specialized", Launcher())
    monkeypatch.setattr(warps.Block, "split", lambda tile: tile.unbind(-1), raising=False)
    monkeypatch.setattr(devices, "multiprocessors", lambda _: 3)
    return found


_TILE = Config(64, 32, 32, 4, 3, descriptors=True, warp_specialize=True)
TILES = {
    "one consumer group": _TILE,
    "two consumer groups": _TILE._replace(BLOCK_M=128, num_warps=8),
    "three consumer groups": _TILE._replace(BLOCK_M=192, num_warps=12),
    "more columns": _TILE._replace(MORE_N=16),
    "transposed": _TILE._replace(BLOCK_M=128, num_warps=8, transposed=True),
    "ping-pong": _TILE._replace(num_warps=8, pingpong=True),
    "ping-pong with more columns": _TILE._replace(num_warps=8, pingpong=True, MORE_N=16),
    "ping-pong transposed": _TILE._replace(num_warps=8, pingpong=True, transposed=True),
    "split_store": _TILE._replace(split_store=True),
}


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("addend", ["none", "bias", "one", "own"])
def test_products_follow_each_other(name, addend, launched):
    """A program takes many tiles. Nothing is read before it has arrived, or overwritten before it was stored."""
    config, (batches, M, N, K) = TILES[name], (2, 200, 120, 72)
    a, b = drawn(batches, M, K, dtype=torch.float16), drawn(batches, N, K, dtype=torch.float16).mT
    shape = {"none": None, "bias": (N,), "one": (M, N), "own": (batches, M, N)}[addend]
    added = None if shape is None else drawn(*shape, dtype=torch.float16)
    out = torch.full((batches, M, N), math.nan, dtype=torch.float16)
    product(a, b, out, Epilogue(added, alpha=0.5, beta=2.0 if shape else 0.0), config=config)
    expected = a.double() @ b.double() / 2 + (0 if added is None else 2 * added.double())
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    ((programs, copied),) = launched
    assert programs < batches * -(-M // 64) * -(-N // 48)
    assert copied == (addend in ("one", "own") and not config.split_store)


@pytest.mark.parametrize("columns", [(True, False), (False, True), (True, True)])
def test_addends_in_the_results_layout_and_in_another(columns, launched):
    """An addend in the result's layout is copied by TMA. One in another layout is loaded."""
    (M, N, K), (out_columns, added_columns) = (200, 120, 72), columns
    a, b = drawn(1, M, K, dtype=torch.float16), drawn(1, K, N, dtype=torch.float16)
    added = drawn(1, N, M, dtype=torch.float16).mT if added_columns else drawn(1, M, N, dtype=torch.float16)
    expected = a.double() @ b.double() + added.double()
    out = torch.full((1, N, M) if out_columns else (1, M, N), math.nan, dtype=torch.float16)
    out = out.mT if out_columns else out
    out = added if out_columns == added_columns else out
    product(a, b, out, Epilogue(added, beta=1.0), config=TILES["ping-pong"])
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    assert launched[0][1] == (out_columns == added_columns)


@pytest.mark.parametrize("name", ["one consumer group", "two consumer groups", "three consumer groups"])
def test_each_block_is_added_in_registers(name, launched):
    """A float8 product without fast accumulation waits for the product of each block, whose stage is free then."""
    (M, N, K), config = (200, 120, 144), TILES[name]
    a, b = drawn(1, M, K, dtype=torch.float16), drawn(1, N, K, dtype=torch.float16).mT
    out = torch.full((1, M, N), math.nan, dtype=torch.float16)
    product(a, b, out, Epilogue(), Sums(blockwise=True), config=config)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=4e-3, rtol=2e-3)
    assert len(launched) == 1
