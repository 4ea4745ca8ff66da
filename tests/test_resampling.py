"""Resampling: factors far from 1, gradients by gathering, both searches of nearest's gradient, large offsets."""

import itertools

import pytest
import torch
from conftest import served
from torch.nn import functional

import tritonite
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.ops.resampling.formulas import nearest_backward

_MODES = {
    "nearest": ("upsample_nearest", (1, 2, 3)),
    "nearest-exact": ("_upsample_nearest_exact", (1, 2, 3)),
    "linear": ("upsample_linear", (1,)),
    "bilinear": ("upsample_bilinear", (2,)),
    "trilinear": ("upsample_trilinear", (3,)),
    "bicubic": ("upsample_bicubic", (2,)),
}
_CASES = [(mode, n) for mode, (_, dimensions) in _MODES.items() for n in dimensions]


def _weights(size, outputs, scale, radius, kernel):
    """Return the matrix of normalised antialiased weights, (outputs, size), in float64."""
    centres = scale * (torch.arange(outputs, dtype=torch.float64) + 0.5)
    distances = torch.arange(size, dtype=torch.float64) + 0.5 - centres[:, None]
    weights = kernel((distances / max(scale, 1.0)).abs()) * (distances.abs() < radius * max(scale, 1.0))
    return weights / weights.sum(1, keepdim=True)


def _cubic(x):
    near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


@pytest.mark.parametrize(("mode", "dimensions"), _CASES)
def test_interpolation_and_its_gradient(mode, dimensions, device):
    """A module's call and its gradient are ATen's in float64, up and down, by sizes and by factors."""
    name = f"{_MODES[mode][0]}{dimensions}d"
    inputs = (5, 8, 3)[-dimensions:]
    arguments = [{"size": (9, 3, 7)[-dimensions:]}, {"scale_factor": (0.61, 1.7, 2.5)[-dimensions:]}]
    if not mode.startswith("nearest"):
        arguments = [given | {"align_corners": corners} for given in arguments for corners in (False, True)]
    for given in arguments:
        x = torch.randn(2, 3, *inputs, dtype=torch.float64, device=device, requires_grad=True)
        expected = functional.interpolate(x, mode=mode, **given)
        grad = torch.randn_like(expected)
        (of_input,) = torch.autograd.grad(expected, x, grad)
        with tritonite.use_gems(include="*upsample*", faster_only=False):
            found = functional.interpolate(x, mode=mode, **given)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(torch.autograd.grad(found, x, grad)[0], of_input)
    assert served(name)
    assert served(f"{name}_backward")


@pytest.mark.parametrize("corners", [False, True], ids=["edges", "corners"])
@pytest.mark.parametrize("name", ["upsample_bilinear2d", "upsample_bicubic2d"])
def test_factors_far_from_one(name, corners, device):
    """A pixel becomes many, and many become one; a gradient then looks at one output or at all of them."""
    operator, backward = (getattr(torch.ops.aten, each) for each in (name, f"{name}_backward"))
    for inputs, outputs in (((1, 2), (12, 9)), ((17, 12), (1, 2)), ((3, 1), (1, 15)), ((1, 1), (1, 1))):
        x = torch.randn(1, 2, *inputs, dtype=torch.float64, device=device)
        grad = torch.randn(1, 2, *outputs, dtype=torch.float64, device=device)
        given = (outputs, (1, 2, *inputs), corners)
        expected = operator(x, outputs, corners), backward(grad, *given)
        with tritonite.use_gems(include=f"{name}*", faster_only=False):
            torch.testing.assert_close((operator(x, outputs, corners), backward(grad, *given)), expected)
    assert served(name)
    assert served(f"{name}_backward")


@pytest.mark.parametrize("exact", [False, True], ids=["nearest", "exact"])
def test_both_searches_of_the_gradient_of_nearest_agree(exact, device):
    """ATen's GPU kernels find a range by the inverse scale, its CPU kernels compare the index of each output."""
    for size, outputs in itertools.product((1, 2, 5, 8), (1, 3, 8, 16)):
        grad = torch.randn(2, outputs, dtype=torch.float64, device=device)
        found = []
        for adjoint in (False, True):
            out = torch.full((2, size), torch.nan, dtype=torch.float64, device=device)
            operands = (Gathered(grad, (1,)), (size,), (outputs,), (outputs,), (1,))
            shift = 0.5 if exact else 0.0
            nearest_backward.run((*operands, size / outputs, 1.0, 1.0, 0.0, shift, exact, adjoint), (out,))
            found.append(out)
        torch.testing.assert_close(*found)
        torch.testing.assert_close(found[0].sum(1), grad.sum(1))


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"])
def test_antialiased_is_a_product_with_weights(name, device):
    """Also for one column of outputs, where ATen's CPU kernel repeats the first row."""
    radius, kernel = (1.0, lambda x: (1 - x).clamp(min=0)) if "bilinear" in name else (2.0, _cubic)
    for inputs, outputs in (((9, 7), (4, 1)), ((3, 5), (8, 5)), ((20, 11), (3, 2))):
        x = torch.randn(2, 2, *inputs, dtype=torch.float64)
        rows, columns = (_weights(n, m, n / m, radius, kernel) for n, m in zip(inputs, outputs, strict=True))
        grad = torch.randn(2, 2, *outputs, dtype=torch.float64)
        with tritonite.use_gems(include=f"{name}*", faster_only=False):
            found = getattr(torch.ops.aten, name)(x.to(device), outputs, False)
            of_input = getattr(torch.ops.aten, f"{name}_backward")(grad.to(device), outputs, x.shape, False)
        torch.testing.assert_close(found.cpu(), rows @ x @ columns.T)
        torch.testing.assert_close(of_input.cpu(), rows.T @ grad @ columns)
    assert served(name)
    assert served(f"{name}_backward")


@pytest.mark.parametrize("name", ["upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"])
def test_small_weights_are_as_accurate_as_large_ones(name, device):
    """Pixels of a diagonal give single weights, here at coordinates that float32 represents."""
    width, scales = 63, (None, 4096 / 517)
    forward, backward = (getattr(torch.ops.aten, each) for each in (name, f"{name}_backward"))
    image = torch.eye(8, device=device).view(1, 8, 1, 8)
    grad = torch.eye(width, device=device).view(1, width, 1, width)
    sizes = (1, width), (1, width, 1, 8)
    exact = forward(image.double(), sizes[0], False, *scales), backward(grad.double(), *sizes, False, *scales)
    with tritonite.use_gems(include=f"{name}*", faster_only=False):
        found = forward(image, sizes[0], False, *scales), backward(grad, *sizes, False, *scales)
    assert served(name) and served(f"{name}_backward")
    for own, other in zip(found, exact, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-6, atol=1e-20)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["upsample_nearest2d", "upsample_bilinear2d", "_upsample_bilinear2d_aa"])
def test_layouts_and_large_offsets(name, device, monkeypatch):
    """Results keep channels last, read any strides, and have 64-bit offsets where an extent needs them."""
    monkeypatch.setattr("tritonite.engine.pointwise.declare.INT32_LIMIT", 8)
    monkeypatch.setattr("tritonite.engine.pointwise.specialize.INT32_LIMIT", 8, raising=False)
    corners = () if "nearest" in name else (False,)
    x = torch.randn(2, 5, 6, 4, device=device)
    every = (x, x.to(memory_format=torch.channels_last), x[:, ::2, :, 1:], x.expand(2, 5, 6, 4).transpose(2, 3))
    for source in every:
        expected = getattr(torch.ops.aten, name)(source, (9, 3), *corners)
        with tritonite.use_gems(include=f"{name}*", faster_only=False):
            found = getattr(torch.ops.aten, name)(source, (9, 3), *corners)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
    assert served(name)


def test_factors_of_an_output(device):
    """`vec_out` takes a size or factors."""
    x, out = torch.randn(1, 2, 4, 6, device=device), torch.empty(1, 2, 6, 3, device=device)
    expected = functional.interpolate(x, (6, 3), mode="bilinear")
    with tritonite.use_gems(include="upsample_bilinear2d*", faster_only=False):
        for size, factors in (((6, 3), None), (None, (1.5, 0.5))):
            torch.ops.aten.upsample_bilinear2d.vec_out(x, size, False, factors, out=out.fill_(torch.nan))
            torch.testing.assert_close(out, expected)
    assert served("upsample_bilinear2d.vec_out")


@pytest.mark.declines("1 dimension")
@pytest.mark.parametrize("name", ["upsample_nearest2d", "upsample_bilinear2d"])
def test_a_size_of_another_rank_raises(name, device):
    """`vec_out` of images gets sequences and one size: ATen's check is of the operator's rank, not of the input's."""
    x, corners = torch.randn(5, 3, 4, device=device), (False,) if "linear" in name else ()
    with tritonite.use_gems(include=f"{name}*", faster_only=False), pytest.raises(RuntimeError, match="output_size"):
        getattr(torch.ops.aten, name).vec_out(x, [6], *corners, None, out=torch.empty(5, 3, 6, device=device))


@pytest.mark.parametrize("name", ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"])
def test_antialiasing_along_one_dimension(name, device):
    """A nan spreads to the elements to which it does in ATen, also along a dimension whose size stays the same."""
    x = torch.randn(1, 2, 5, 4, device=device)
    x[0, 0, 2, 1] = torch.nan
    operator = getattr(torch.ops.aten, name)
    for outputs, scales in (((5, 4), ()), ((5, 4), (1.1, 1.2)), ((5, 3), ()), ((7, 4), (1.5, 1.1))):
        expected = operator(x, outputs, False, *scales)
        with tritonite.use_gems(include=f"{name}*", faster_only=False):
            torch.testing.assert_close(operator(x, outputs, False, *scales), expected, equal_nan=True)
    assert served(name)


@pytest.mark.parametrize("corners", [False, True], ids=["edges", "corners"])
@pytest.mark.parametrize("inputs", [(5, 3, 4), (5, 6, 4), (5, 3, 7), (2, 3, 4)])
def test_a_nan_gradient_spreads_as_in_aten(inputs, corners, device):
    """ATen's CPU kernels copy along a dimension whose size stays, so that a nan does not reach a neighbour there."""
    for n, name in enumerate(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), 1):
        grad = torch.randn(1, 2, *(5, 3, 4)[-n:], device=device)
        grad[0, 0][(1,) * n] = torch.nan
        given = grad, grad.shape[2:], (1, 2, *inputs[-n:]), corners
        operator = getattr(torch.ops.aten, f"{name}_backward")
        expected = operator(*given)
        with tritonite.use_gems(include=f"{name}*", faster_only=False):
            torch.testing.assert_close(operator(*given), expected, equal_nan=True)
        assert served(f"{name}_backward")


def test_deterministic_algorithms_are_served(device):
    """Gradients are gathered in a fixed order."""
    grad = torch.randn(1, 3, 8, 8, device=device)
    given = (grad, (8, 8), (1, 3, 3, 5), False)
    expected = torch.ops.aten.upsample_bilinear2d_backward(*given)
    torch.use_deterministic_algorithms(True)
    try:
        with tritonite.use_gems(include="upsample_bilinear2d*", faster_only=False):
            found = [torch.ops.aten.upsample_bilinear2d_backward(*given) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], expected)
    assert served("upsample_bilinear2d_backward")
