"""Products of floats and an int8 weight against float64: edges of tiles, strides, split K."""

import pytest
import torch

import tritonite
from tritonite.engine.gemm import select
from tritonite.errors import Decline

product = tritonite.overloads()["_weight_int8pack_mm"]


def check(x, weight, scales):
    result = product(x, weight, scales)
    assert result.dtype is x.dtype and result.is_contiguous()
    exact = x.double() @ weight.double().T * scales.double()
    size = x.double().abs() @ weight.double().abs().T * scales.double()
    bound = torch.finfo(x.dtype).eps * (exact.abs() + 1e-3 * size) + 1e-6 * size
    assert bool(((result - exact).abs() <= bound).all())


def operands(M, N, K, dtype):
    device = tritonite.device
    weight = torch.randint(-128, 128, (N, K), dtype=torch.int8, device=device)
    return torch.randn(M, K, device=device).to(dtype), weight, torch.rand(N, device=device).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 5, 7), (3, 33, 70), (70, 90, 129), (4, 3, 0), (0, 3, 4)])
def test_edges_of_tiles(M, N, K, dtype):
    check(*operands(M, N, K, dtype))


def test_strides_and_a_scale_of_another_dtype():
    x, weight, scales = operands(8, 12, 40, torch.bfloat16)
    check(x.t().contiguous().t(), weight.repeat(1, 2)[:, ::2], scales.float())


def test_slices_of_k(monkeypatch):
    of_tables = select.of_tables
    monkeypatch.setattr(select, "of_tables", lambda *given: of_tables(*given)._replace(splits=2))
    check(*operands(5, 20, 200, torch.float16))


@pytest.mark.parametrize("change", [{"x": torch.float64}, {"weight": torch.int32}])
def test_declines_other_dtypes(change):
    x, weight, scales = operands(2, 3, 16, torch.float32)
    with pytest.raises(Decline, match="operands of"):
        product(x.to(change.get("x", x.dtype)), weight.to(change.get("weight", weight.dtype)), scales)
