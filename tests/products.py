"""Operands, tiles and the comparison of the tests of products."""

import sys

import pytest
import torch

import tritonite
from tritonite import devices
from tritonite.engine.gemm.table import Config
from tritonite.testing.judge import assert_close, terms

# The family's module, whose name is its operator's in `tritonite.ops`.
matmul = sys.modules["tritonite.ops.matmul"]
CONFIGS = {
    "pointers": Config(32, 32, 16),
    "split-K": Config(16, 64, 16, splits=3),
    "one row": Config(1, 32, 32),
    "one row, split-K": Config(1, 32, 32, splits=2),
    "four rows": Config(4, 32, 32),
    "four rows, split-K": Config(4, 32, 32, splits=2),
    "descriptors": Config(32, 64, 32, descriptors=True),
    "descriptors, split-K": Config(32, 64, 32, descriptors=True, splits=3),
    "split_store": Config(64, 32, 32, descriptors=True, split_store=True),
    "transposed": Config(64, 32, 32, descriptors=True, transposed=True),
    "transposed, split-K": Config(64, 16, 32, transposed=True, splits=3),
    "bf16x6": Config(64, 64, 32, bf16x6=True),
}
FLOATS = (torch.float32, torch.bfloat16, torch.float64)
# Warp-specialised tiles.
_SPECIALIZED = Config(128, 128, 64, 8, 4, descriptors=True, warp_specialize=True)
SPECIALIZED = {
    "wide": _SPECIALIZED._replace(BLOCK_N=256, num_stages=3),
    "tall": _SPECIALIZED._replace(BLOCK_M=256, GROUP_M=1),
    "split_store": _SPECIALIZED._replace(split_store=True, num_stages=6),
    "three consumer groups": _SPECIALIZED._replace(BLOCK_M=192, num_warps=12, num_stages=2),
    "two programs": _SPECIALIZED._replace(BLOCK_M=64, num_warps=4, num_stages=3, programs=2),
    "transposed": _SPECIALIZED._replace(BLOCK_N=16, transposed=True),
    "split-K": _SPECIALIZED._replace(num_stages=3, splits=3),
    "transposed, split-K": _SPECIALIZED._replace(BLOCK_N=32, transposed=True, splits=2),
    "more columns": _SPECIALIZED._replace(MORE_N=64, split_store=True),
    "more columns, transposed": _SPECIALIZED._replace(BLOCK_N=64, MORE_N=16, transposed=True, splits=2),
    "ping-pong": _SPECIALIZED._replace(split_store=True, num_stages=6, pingpong=True),
    "ping-pong, transposed": _SPECIALIZED._replace(BLOCK_M=64, num_stages=3, pingpong=True, transposed=True),
    "ping-pong, more columns": _SPECIALIZED._replace(MORE_N=64, split_store=True, pingpong=True),
}
LAYOUTS = ("plain", "transposed", "strided")
on_sm_90 = pytest.mark.skipif(
    not devices.has_wgmma(torch.device(tritonite.device)), reason="Gluon's kernel is for sm_90, which it needs to run"
)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device=tritonite.device).to(dtype)


def laid_out(rows, columns, layout, dtype, batches=()):
    if layout == "transposed":
        return normal(*batches, columns, rows, dtype=dtype).mT
    if layout == "strided":
        return normal(*batches, rows, 2 * columns, dtype=dtype)[..., ::2]
    return normal(*batches, rows, columns, dtype=dtype)


def check(actual, function, *operands, **keywords):
    expected = function(*operands, **keywords)
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in operands]
    assert_close(actual, expected, function(*wide, **keywords), terms=terms("mm", operands, expected))
