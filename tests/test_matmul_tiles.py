"""Random products by any tile in Hopper's tables, not only by the tile that would be chosen."""

import math
import random
from unittest import mock

import pytest
import torch
from conftest import FULL

from tritonite import devices
from tritonite.engine.gemm import cost as gemm_cost
from tritonite.engine.gemm import product as products
from tritonite.engine.gemm import select, table
from tritonite.engine.gemm.work import Epilogue

TABLES = gemm_cost.load(gemm_cost.FOLDER / "NVIDIA_H200.json")
DTYPES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-4}
# Seed 282 has a tile of strided columns with split-K, whose partial products have another stride.
SEEDS, CASES = (*range(50 if FULL else 2), 282), 40


def between(draw, low, high):
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def operand(draw, batches, rows, columns, dtype):
    """Return a row-major or column-major operand at any address, with gaps, or interleaved with other batches."""
    layout = draw.choice(("rows", "columns", "every other", "pitched", "between batches", "anywhere"))
    if layout == "columns":
        return torch.randn(batches, columns, rows).to(dtype).mT
    if layout == "every other":
        return torch.randn(batches, rows, columns, 2).to(dtype)[..., 0]
    if layout == "pitched":
        return torch.randn(batches, rows, columns + draw.choice((1, 3, 8))).to(dtype)[..., :columns]
    if layout == "between batches":
        return torch.randn(rows, batches, columns).to(dtype).transpose(0, 1)
    if layout == "anywhere":
        count = batches * rows * columns
        return torch.randn(count + draw.choice((1, 2, 3, 5))).to(dtype)[-count:].view(batches, rows, columns)
    return torch.randn(batches, rows, columns).to(dtype)


@pytest.fixture
def drawn(request, change_tables, set_copy_time, monkeypatch):
    """Choose random tiles of a table; return the random generator and a setter of random thresholds."""
    draw, usual = random.Random(request.param), select.choose
    torch.manual_seed(request.param)

    def any_tiles(of, device, descriptors, warp_specialized=False):
        # For nothing else, as no device is asked for its name then, and no estimate is kept for other tests.
        with mock.patch.object(select, "_tables", lambda _: TABLES):
            fitted = select.table_for(of, device, descriptors)
        tiles = select._shortened(fitted.candidates[select.possible(of, device, fitted, False, descriptors)], of)
        tiles = tiles[tiles["warp_specialize"] == 0]
        if table.limits().outer_k >= of.K or not len(tiles):
            return usual(of, device, descriptors, warp_specialized)
        tile = tiles[draw.randrange(len(tiles))]
        whole = fitted.configs[tile["number"]]._replace(hopper_fp32=False)
        own = {name: int(tile[name]) for name in ("BLOCK_N", "BLOCK_K", "splits")}
        return select.without_idle(whole._replace(**own), whole, of)

    def thresholds(size):
        near = [int(size * math.exp(draw.uniform(-0.5, 2))) for _ in range(3)]
        values = {
            "cached_bytes": (0, *near, 19 * 2**20),
            "alike_columns": (4, 10, 64),
            "strided_k": (10, 100, 768),
            "strided_k_vectors": (10, 100, 3000),
            "slice_k": (16, 64, 128),
            "slice_rounds": (2, 1000),
        }
        change_tables(gemm={name: draw.choice(some) for name, some in values.items()})
        set_copy_time(draw.choice((-1e9, 0.0, 2.0, 1e9)))

    monkeypatch.setattr(select, "choose", any_tiles)
    return draw, thresholds


@pytest.mark.skipif(not devices.current.interpreted, reason="draws tiles that a GPU would have to compile each time")
@pytest.mark.parametrize("drawn", SEEDS, indirect=True)
def test_any_tile_of_a_table(drawn):
    draw, thresholds = drawn
    for _ in range(CASES):
        dtype = draw.choice(list(DTYPES))
        batches, M = draw.choice((1, 1, 1, 2, 3)), draw.choice((between(draw, 1, 150), draw.randint(1, 17)))
        lengths = between(draw, 1, 40), between(draw, 1, 300), draw.randint(60, 140), draw.randint(256, 700)
        N, K = between(draw, 1, 300), draw.choice((*lengths, lengths[-1]))
        if batches * M * N * K > 4e6:
            continue
        thresholds(dtype.itemsize * batches * (M * K + K * N + M * N))
        a, b = operand(draw, batches, M, K, dtype), operand(draw, batches, K, N, dtype)
        out = torch.full((batches, N, M), math.nan, dtype=dtype).mT
        out = out if draw.random() < 0.3 else torch.full((batches, M, N), math.nan, dtype=dtype)
        shape = draw.choice((None, None, (N,), (M, 1), (batches, M, N), (1, M, N)))
        addend = None if shape is None else torch.randn(shape).to(dtype)
        products.product(a, b, out, Epilogue(addend, alpha=2.0, beta=0.5))
        expected = 2 * a.double() @ b.double() + (0 if addend is None else addend.double() / 2)
        error = (out.double() - expected).abs() / (1 + expected.abs() + K**0.5)
        assert error.max() < DTYPES[dtype], (batches, M, N, K, a.stride(), b.stride(), out.stride())
