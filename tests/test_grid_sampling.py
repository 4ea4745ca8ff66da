"""Grid sampling: every interpolation and padding with gradients, sums of 16-bit floats, values that are no position."""

import pytest
import torch
from conftest import served

import tritonite
from tritonite.errors import Decline

_ALL = [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1)]


def _operands(rank, sizes, dtype, device):
    points = (4, 3, 2)[:rank]
    image = torch.randn(2, 3, *sizes[:rank], dtype=dtype, device=device)
    grid = torch.empty(2, *points, rank, dtype=dtype, device=device).uniform_(-2.5, 2.5)
    return image, grid, torch.randn(2, 3, *points, dtype=dtype, device=device)


@pytest.mark.parametrize("padding", [0, 1, 2], ids=["zeros", "border", "reflection"])
@pytest.mark.parametrize(("rank", "mode"), _ALL)
def test_outputs_and_gradients(rank, mode, padding, device):
    """Results are ATen's in float64, with positions far outside the image and with a single pixel."""
    name = f"grid_sampler_{rank}d"
    operator, backward = (getattr(torch.ops.aten, each) for each in (name, f"{name}_backward"))
    for sizes in ((3, 5, 4), (1, 1, 1)):
        image, grid, grad = _operands(rank, sizes, torch.float64, device)
        for corners in (False, True):
            given = (image, grid, mode, padding, corners)
            expected = operator(*given), *backward(grad, *given, [True, True])
            with tritonite.use_gems(include=f"{name}*", faster_only=False):
                found = operator(*given), *backward(grad, *given, [True, True])
            torch.testing.assert_close(found, expected)
    assert served(name)
    assert served(f"{name}_backward")


def test_small_cubic_weights_and_slopes_are_as_accurate_as_large_ones(device):
    """Pixels of a diagonal give single weights, here at positions that float32 represents."""
    image = torch.eye(8, device=device).view(8, 1, 1, 8)
    x = torch.arange(-1021, 1024, 37, device=device) / 1024
    grid = torch.stack((x, torch.zeros_like(x)), -1).expand(8, 1, -1, 2)
    grad = torch.ones(8, 1, 1, len(x), device=device)

    def sampled(dtype):
        given = (image.to(dtype), grid.to(dtype), 2, 0, False)
        slopes = torch.ops.aten.grid_sampler_2d_backward(grad.to(dtype), *given, [True, True])
        return torch.ops.aten.grid_sampler_2d(*given), *slopes

    exact = sampled(torch.float64)
    with tritonite.use_gems(include="grid_sampler_2d*", faster_only=False):
        found = sampled(torch.float32)
    assert served("grid_sampler_2d") and served("grid_sampler_2d_backward")
    for own, other in zip(found, exact, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=2e-6, atol=1e-20)


@pytest.mark.smoke
def test_strided_operands_and_large_offsets(device, monkeypatch):
    monkeypatch.setattr("tritonite.engine.pointwise.declare.INT32_LIMIT", 8)
    monkeypatch.setattr("tritonite.engine.iteration.INT32_LIMIT", 8)
    image, grid, grad = _operands(2, (6, 5), torch.float32, device)
    image = image.to(memory_format=torch.channels_last)[:, :, ::2]
    grid = grid.movedim(-1, 0).contiguous().movedim(0, -1)
    grad = grad.transpose(2, 3).contiguous().transpose(2, 3)
    given = (image, grid, 0, 0, False)
    expected = (
        torch.ops.aten.grid_sampler_2d(*given),
        *torch.ops.aten.grid_sampler_2d_backward(grad, *given, [True, True]),
    )
    with tritonite.use_gems(include="grid_sampler_2d*", faster_only=False):
        found = (
            torch.ops.aten.grid_sampler_2d(*given),
            *torch.ops.aten.grid_sampler_2d_backward(grad, *given, [True, True]),
        )
    torch.testing.assert_close(found, expected)
    assert [x.stride() for x in found] == [x.stride() for x in expected]


@pytest.mark.parametrize("padding", [1, 2], ids=["border", "reflection"])
def test_the_sign_of_a_gradient_that_a_border_makes_zero(padding, device):
    image = torch.arange(1.0, 6.0, dtype=torch.float64, device=device).view(1, 1, 1, 5)
    x = torch.tensor([-4.9, -3.1, -2.875, -1.125, -1.0, 0.1, 1.0, 1.125, 2.875, 3.1, 5.1], device=device)
    grid = torch.stack((x, torch.zeros_like(x)), -1).double().view(1, 1, -1, 2)
    grad = torch.ones(1, 1, 1, len(x), dtype=torch.float64, device=device)
    for corners in (False, True):
        given = (grad, image, grid, 0, padding, corners, [True, True])
        expected = torch.ops.aten.grid_sampler_2d_backward(*given)[1]
        with tritonite.use_gems(include="grid_sampler_2d*", faster_only=False):
            found = torch.ops.aten.grid_sampler_2d_backward(*given)[1]
        torch.testing.assert_close(found, expected)
        assert torch.equal(found.signbit(), expected.signbit())


def test_the_input_gradient_is_optional(device):
    image, grid, grad = _operands(2, (3, 4), torch.float32, device)
    with tritonite.use_gems(include="grid_sampler_2d*", faster_only=False):
        of_image, of_grid = torch.ops.aten.grid_sampler_2d_backward(grad, image, grid, 0, 0, False, [False, True])
    assert of_image is None
    expected = torch.ops.aten.grid_sampler_2d_backward(grad, image, grid, 0, 0, False, [True, True])[1]
    torch.testing.assert_close(of_grid, expected)
    assert served("grid_sampler_2d_backward")


def test_many_16_bit_gradients_of_a_pixel_are_summed_in_float32(device):
    """In bfloat16 the sum of ones would stop at 256."""
    grid = torch.zeros(1, 30, 20, 2, dtype=torch.bfloat16, device=device)
    image, grad = torch.zeros(1, 1, 1, 1).to(grid), torch.ones(1, 1, 30, 20).to(grid)
    with tritonite.use_gems(include="grid_sampler_2d*", faster_only=False):
        found, _ = torch.ops.aten.grid_sampler_2d_backward(grad, image, grid, 1, 0, False, [True, True])
    assert found.item() == 600
    assert served("grid_sampler_2d_backward")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e20])
def test_values_that_are_no_position_are_outside(value, device):
    """ATen's GPU kernels put positions that int32 does not represent outside the image."""
    image, grid, _ = _operands(2, (3, 4), torch.float32, device)
    with tritonite.use_gems(include="grid_sampler_2d*", faster_only=False):
        found = torch.ops.aten.grid_sampler_2d(image, torch.full_like(grid, value), 0, 0, False)
    assert not found.any()
    assert served("grid_sampler_2d")


def test_an_empty_batch(device):
    image, grid = torch.empty(0, 3, 4, 5, device=device), torch.empty(0, 2, 3, 2, device=device)
    with tritonite.use_gems(include="grid_sampler_2d*", faster_only=False):
        assert torch.ops.aten.grid_sampler_2d(image, grid, 0, 0, False).shape == (0, 3, 2, 3)
    assert served("grid_sampler_2d")


@pytest.mark.smoke
def test_cudnn_samples_bilinearly_with_corners_aligned(device):
    image, grid, grad = _operands(2, (5, 4), torch.float32, device)
    given = (image, grid, 0, 0, True)
    sampled = tritonite.ops.cudnn_grid_sampler(image, grid)
    torch.testing.assert_close(sampled, torch.ops.aten.grid_sampler_2d(*given))
    gradients = tritonite.ops.cudnn_grid_sampler_backward(image, grid, grad)
    torch.testing.assert_close(gradients, torch.ops.aten.grid_sampler_2d_backward(grad, *given, [True, True]))


@pytest.mark.parametrize(
    ("image", "grid"), [((2, 3, 4, 5), (2, 3, 0, 2)), ((0, 3, 4, 5), (0, 3, 2, 2)), ((1, 1025, 2, 2), (1, 2, 2, 2))]
)
def test_what_cudnn_refuses_is_declined(image, grid, device):
    grad = torch.zeros(*image[:2], *grid[1:3], device=device)
    image, grid = torch.zeros(image, device=device), torch.zeros(grid, device=device)
    for name, given in (("cudnn_grid_sampler", ()), ("cudnn_grid_sampler_backward", (grad,))):
        with pytest.raises(Decline, match="cuDNN"):
            tritonite.overloads()[name](image, grid, *given)
