"""Fake quantisation where samples do not reach: ties, dtypes of zero points, disabled, wrong arguments, training."""

import itertools
import math

import pytest
import torch

import tritonite
from tritonite.errors import Decline

aten = torch.ops.aten
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def same(name, *args):
    """Call our overload directly, so that a decline raises, and compare bits and strides with ATen's."""
    results = zip(tritonite.overloads()[name](*args), getattr(aten, name)(*args), strict=True)
    for own, theirs in results:
        torch.testing.assert_close(own, theirs, atol=0, rtol=0, equal_nan=True, check_stride=True)


def ties(dtype):
    """Return numbers half way between multiples of 1/4, others, numbers far outside the range, infinities and nan."""
    numbers = [
        (torch.arange(-40, 40) / 8).double(),
        torch.randn(35, dtype=torch.float64) * 3,
        torch.tensor([1e6, -1e6, math.inf, -math.inf, math.nan]),
    ]
    return torch.cat([x.double() for x in numbers]).view(8, 15).to(tritonite.device, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_per_tensor(dtype):
    x = ties(dtype)
    for y, scale, zero_point in itertools.product((x, x.t(), x[:, ::2]), (0.25, 0.1), (-3, 0)):
        same("fake_quantize_per_tensor_affine_cachemask", y, scale, zero_point, -8, 7)
    scale, zero_point = torch.tensor([0.25], device=x.device), torch.tensor([2], dtype=torch.int32, device=x.device)
    for enabled in (0, 1):
        flag = torch.tensor([enabled], device=x.device)
        same("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", x, scale, zero_point, flag, 0, 255)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zero_dtype", [torch.int32, torch.float32, torch.float16])
def test_per_channel(dtype, zero_dtype):
    x = ties(dtype)
    for axis in (0, 1):
        scale = 0.125 + torch.arange(x.shape[axis], device=x.device) % 4 / 8
        zero_point = (torch.arange(x.shape[axis], device=x.device) % 5).to(zero_dtype)
        same("fake_quantize_per_channel_affine_cachemask", x, scale, zero_point, axis, -4, 7)


@pytest.mark.declines("wrong arguments")
def test_wrong_arguments():
    ops, x, one = tritonite.overloads(), ties(torch.float32), torch.ones(8, device=tritonite.device)
    with pytest.raises(Decline, match="outside"):
        ops["fake_quantize_per_tensor_affine_cachemask"](x, 0.5, 9, 0, 7)
    with pytest.raises(Decline, match="above"):
        ops["fake_quantize_per_tensor_affine_cachemask"](x, 0.5, 0, 8, 7)
    with pytest.raises(Decline, match="each channel"):
        ops["fake_quantize_per_channel_affine_cachemask"](x, one, one, 1, 0, 7)
    for name in ("fake_quantize_per_channel_affine_cachemask", "_fake_quantize_learnable_per_channel_affine"):
        with pytest.raises(Decline, match="without elements"):
            ops[name](x.new_empty(2, 0), one[:0], one[:0], 1, 0, 7)
    if tritonite.device == "cpu":
        with pytest.raises(Decline, match="zero_point"):
            ops["fake_quantize_per_channel_affine_cachemask"](x, one, (one * 9).int(), 0, 0, 7)


@pytest.mark.smoke
@pytest.mark.parametrize("channels", [False, True])
def test_learnable_gradients_of_several_blocks(channels, tiny_blocks):
    """Gradients of scale and zero point are sums over several blocks and programs."""
    x, grad = torch.randn(2, 23, 31, device=tritonite.device)
    size = 31 if channels else 1
    scale, zero_point = torch.rand(2, size, device=tritonite.device) + torch.tensor([[0.2], [1.0]]).to(tritonite.device)
    kind = "channel" if channels else "tensor"
    name, axis = f"_fake_quantize_learnable_per_{kind}_affine", (1,) if channels else ()
    arguments = (scale, zero_point, *axis, -4, 7, 0.5)
    with tritonite.use_gems(include="_fake_quantize*"):
        own = [getattr(aten, name)(x, *arguments), *getattr(aten, f"{name}_backward")(grad, x, *arguments)]
    theirs = [getattr(aten, name)(x, *arguments), *getattr(aten, f"{name}_backward")(grad, x, *arguments)]
    for result, expected in zip(own, theirs, strict=True):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
