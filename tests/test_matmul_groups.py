"""Grouped products, and scaled products of float8."""

import contextlib

import pytest
import torch
from products import SPECIALIZED, check, matmul, normal, on_sm_90

import tritonite
from tritonite.engine.gemm import product
from tritonite.engine.gemm.table import Config
from tritonite.errors import Decline
from tritonite.testing.judge import assert_close


@pytest.mark.parametrize("ends", [(5, 8, 32), (0, 40, 50), (20, 20, 20)])
def test_groups_end_within_their_rows(ends):
    """Whatever the offsets, nothing beyond the rows is read or written."""
    a = normal(24, 48, dtype=torch.float16)
    offs = torch.tensor(ends, dtype=torch.int32, device=tritonite.device)
    matrices, rows = normal(3, 16, 16, dtype=torch.float16), torch.full((24, 16), 7.0, dtype=torch.float16)
    rows = rows.to(tritonite.device)
    product.grouped_product(a[:20, :16], matrices, offs, rows[:20])
    for begin, end, matrix in zip((0, *ends), ends, matrices, strict=False):
        check(rows[begin : min(end, 20)], torch.mm, a[begin : min(end, 20), :16], matrix)
    assert (rows[20:] == 7).all()
    (sums,) = matmul._grouped_mm(a[:16, :24], a[:, 32:], offs, None, None)
    for begin, end, actual in zip((0, *ends), ends, sums, strict=False):
        check(actual, torch.mm, a[:16, begin : min(end, 24)], a[begin : min(end, 24), 32:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ends", [(40, 40, 107, 200), (0, 0, 0, 200), (8, 16, 24, 32)])
def test_groups(dtype, ends, use_config):
    use_config(Config(32, 32, 32, descriptors=True))
    offs = torch.tensor(ends, dtype=torch.int32, device=tritonite.device)
    ranges = list(zip((0, *ends[:-1]), ends, strict=True))
    rows, square = normal(200, 64, dtype=dtype), normal(4, 64, 48, dtype=dtype)
    for b in (square, normal(4, 48, 64, dtype=dtype).mT):
        (out,) = matmul._grouped_mm(rows, b, offs, None, None)
        for own, (begin, end) in zip(b, ranges, strict=True):
            check(out[begin:end].contiguous(), torch.mm, rows[begin:end], own)
    for second in (normal(64, 200, dtype=dtype), normal(200, 64, dtype=dtype).mT):
        (out,) = matmul._grouped_mm(square.mT.contiguous(), second, offs, None, None)
        for own, (begin, end) in zip(square.mT, ranges, strict=True):
            check(out[:, begin:end].contiguous(), torch.mm, own, second[:, begin:end])
    for first in (normal(72, 200, dtype=dtype), normal(200, 72, dtype=dtype).mT):
        (out,) = matmul._grouped_mm(first, rows, offs, None, None)
        for own, (begin, end) in zip(out, ranges, strict=True):
            check(own.contiguous(), torch.mm, first[:, begin:end], rows[begin:end])


def test_layouts_of_groups_are_atens():
    a, b = normal(24, 16, dtype=torch.bfloat16), normal(3, 20, 16, dtype=torch.bfloat16).mT
    # On a GPU groups of columns end at multiples of 16 bytes.
    offs = torch.tensor([8, 8, 24], dtype=torch.int32, device=tritonite.device)
    for args in ((a, b, offs), (b.mT.contiguous().mT.mT, a.mT, offs), (normal(3, 8, 16, dtype=torch.bfloat16), b)):
        with tritonite.use_gems():
            actual = torch._grouped_mm(*args[:2], offs=args[2] if len(args) > 2 else None)
        expected = torch._grouped_mm(*args[:2], offs=args[2] if len(args) > 2 else None)
        assert actual.shape == expected.shape
        assert actual.stride() == expected.stride()
    assert not tritonite.stats()["_grouped_mm"].declined
    refused = [(a, b, offs.long()), (a, b, offs[:2]), (a, b, None), (a[:, 1:], b[:, 1:], offs), (b.mT[:2], b, None)]
    for wrong in refused:
        with pytest.raises(Decline):
            matmul._grouped_mm(*wrong, None, None)


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [1, 9, 100])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("use_fast_accum", [False, True])
def test_scaled(rows, dtype, use_fast_accum):
    a, b = normal(rows, 256).to(dtype), normal(48, 256).to(dtype).mT
    one, two = torch.tensor([0.25], device=tritonite.device), torch.tensor(2.0, device=tritonite.device)
    bias = normal(48, dtype=torch.bfloat16)
    for scales in ((one, two), (normal(rows, 1), normal(1, 48))):
        for added in (None, bias):
            args = (a, b, *scales, added, None, torch.bfloat16, use_fast_accum)
            exact = (a.double() @ b.double()) * scales[0].double() * scales[1].double()
            exact = exact if added is None else exact + added.double()
            (actual,) = matmul._scaled_mm(*args)
            on_gpu, aten = tritonite.device == "cuda", exact.bfloat16()
            if on_gpu:
                with contextlib.suppress(RuntimeError, ValueError):
                    # cuBLAS has no products of two float8_e5m2 operands, nor of every size.
                    aten = torch._scaled_mm(*args)
            # Hopper's tensor cores add these products in 14 bits (DeepSeek-V3's report, 3.3.2), not in 24.
            assert_close(actual, aten, exact, terms=256 * 100 * (2**20 if on_gpu else 1))
            error, aten_error = (actual.double() - exact).abs().max(), (aten.double() - exact).abs().max()
            # ATen's error is one rounding at least.
            assert error <= 2 * torch.maximum(aten_error, exact.abs().max() / 2**9)
    with pytest.raises(Decline):
        matmul._scaled_mm(a, b, one, two, None, None, dtype, False)


@on_sm_90
@pytest.mark.parametrize("name", ["wide", "split_store", "three consumer groups"])
@pytest.mark.parametrize("use_fast_accum", [False, True])
def test_warp_specialised_scaled_products(name, use_fast_accum, use_config):
    use_config(SPECIALIZED[name]._replace(BLOCK_N=128, BLOCK_K=128, num_stages=3))
    test_scaled(1504, torch.float8_e4m3fn, use_fast_accum)
    test_scaled(100, torch.float8_e5m2, use_fast_accum)
