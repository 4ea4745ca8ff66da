"""Weights of 8 and 4 bits in CUTLASS's interleaved layout, which torch's own conversion makes."""

import inspect

import pytest
import torch
from torch.quantization import _quantized_conversions

import tritonite
from tritonite.errors import Decline

pytestmark = pytest.mark.usefixtures("any_architecture")

linear = tritonite.overloads()["_mixed_dtypes_linear"]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def conversion():
    """Return torch's conversion, which refuses tensors that are not on a GPU, without this check."""
    name = "quantized_weight_reorder_for_mixed_dtypes_linear_cutlass"
    namespace = dict(vars(_quantized_conversions))
    exec(inspect.getsource(namespace[name]).replace('!= "cuda"', '== ""'), namespace)
    return namespace[name]


def interleaved(K, N, bits):
    """Return integers (K, N), and the bytes that store them."""
    numbers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (K, N), dtype=torch.int8)
    kind = torch.int8 if bits == 8 else torch.quint4x2
    packed = numbers if bits == 8 else _quantized_conversions.pack_int4_to_int8(numbers)
    return numbers.to(tritonite.device), conversion()(packed, kind).to(tritonite.device)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sizes", [(2, 64, 192), (40, 192, 128)])
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(None, torch.float16), ("none", torch.bfloat16), ("relu", torch.float16), ("silu", torch.bfloat16)],
)
def test_linear(bits, sizes, activation, dtype):
    M, K, N = sizes
    numbers, weight = interleaved(K, N, bits)
    x, bias = torch.randn(2, M, K, device=weight.device).to(dtype), torch.randn(N, device=weight.device).to(dtype)
    scale, added = torch.rand(N, device=weight.device).to(dtype) + 0.5, None if activation is None else bias
    exact = x.double() @ (numbers.double() * scale.double()) + (0 if added is None else added.double())
    exact = {"relu": torch.relu, "silu": torch.nn.functional.silu}.get(activation, lambda each: each)(exact)
    actual = linear(x, weight, scale, bias=added, activation=activation)
    assert actual.shape == (2, M, N) and actual.dtype is dtype
    assert (actual.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


def test_declines():
    weight = torch.zeros(64, 64, dtype=torch.uint8, device=tritonite.device)
    x, scale = torch.ones(3, 64, device=weight.device).half(), torch.ones(64, device=weight.device).half()
    for arguments, options, reason in (
        ((x.float(), weight, scale), {}, "16-bit floats"),
        ((x, weight, scale.bfloat16()), {}, "16-bit floats"),
        ((x[:, :32], weight, scale), {}, "columns for a weight"),
        ((x, weight, scale), {"activation": "relu"}, "without a bias"),
        ((x, weight, scale), {"bias": scale, "activation": "gelu"}, "no relu or silu"),
        ((x, weight, scale), {"bias": scale.float()}, "a bias of"),
        ((x, weight.mT, scale), {}, "contiguous"),
    ):
        with pytest.raises(Decline, match=reason):
            linear(*arguments, **{"bias": None, "activation": None} | options)
