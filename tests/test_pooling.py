"""Pooling against ATen and float64: kinds of windows, layouts, nan, gradients of modules, 64-bit offsets."""

import math
from unittest import mock

import pytest
import torch

import tritonite
from tritonite.engine.pointwise import declare, specialize
from tritonite.engine.windows import geometry
from tritonite.errors import Decline

aten = torch.ops.aten
DEVICE = tritonite.device


def _same(name, *args, served=True, correct=True):
    """Check that a kernel serves a call with ATen's results and strides. Returns these.

    If ATen is not `correct`, values are those of row-major operands.
    """
    function = getattr(aten, name)
    expected = function(*args)
    if not correct:
        expected.copy_(function(*[x.contiguous() if isinstance(x, torch.Tensor) else x for x in args]))
    tritonite.reset_stats()
    with tritonite.use_gems(include=[name], faster_only=False):
        actual = function(*args)
    counts = tritonite.stats()[name]
    assert (counts.launched + counts.replayed > 0) is served
    every = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (actual, expected)), strict=True)
    for own, theirs in every:
        assert own.stride() == theirs.stride()
        torch.testing.assert_close(own, theirs, equal_nan=True)
    return expected


def _images(*shape, layout="row-major"):
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if layout == "channels-last" else x


LAYOUTS = ("row-major", "channels-last")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel, stride, pad, dilation, ceil", [(5, 2, 2, 1, True), (3, 2, 1, 2, False)])
def test_maxima_and_their_gradients_are_atens(layout, kernel, stride, pad, dilation, ceil):
    x = _images(2, 3, 13, 17, layout=layout)
    how = [kernel] * 2, [stride] * 2, [pad] * 2, [dilation] * 2, ceil
    values, indices = _same("max_pool2d_with_indices", x, *how)
    _same("max_pool2d_with_indices_backward", torch.randn_like(values), x, *how, indices)


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inside, divisor", [(True, None), (False, None), (True, -3)])
def test_averages_and_their_gradients_are_atens(layout, inside, divisor):
    x = _images(2, 3, 13, 17, layout=layout)
    how = [5, 4], [2, 3], [2, 1], True, inside, divisor
    out = _same("avg_pool2d", x, *how)
    # ATen's kernel for channels-last GPU tensors forgets the padding (pytorch issue 188344).
    padded = layout == "channels-last" and DEVICE == "cuda"
    _same("avg_pool2d_backward", torch.randn_like(out), x, *how, correct=not padded)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [[1, 1], [4, 3], [7, 29]])
def test_adaptive_windows_may_overlap_or_repeat_elements(layout, size):
    x = _images(2, 3, 12, 17, layout=layout)
    out = _same("_adaptive_avg_pool2d", x, size)
    _same("_adaptive_avg_pool2d_backward", torch.randn_like(out), x)
    values, indices = _same("adaptive_max_pool2d", x, size)
    _same("adaptive_max_pool2d_backward", torch.randn_like(values), x, indices)


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_last_nan_and_the_first_of_equal_elements_are_the_maximum(size):
    x = torch.zeros(1, 1, 8, 8, device=DEVICE)
    x[0, 0, 1, 1] = x[0, 0, 6, 2] = math.nan
    _, indices = _same("adaptive_max_pool2d", x, [size] * 2)
    assert size != 1 or indices.item() == 50
    _same("adaptive_max_pool2d", torch.full_like(x, -math.inf), [size] * 2)


@pytest.mark.parametrize("count", [1, 5, 11])
def test_gradients_of_fractional_windows_reach_every_maximum(count):
    x, samples = _images(2, 3, 12, 14), torch.rand(2, 3, 2, device=DEVICE)
    samples[0, 0] = 0.999999
    values, indices = _same("fractional_max_pool2d", x, [2, 3], [count, count], samples)
    _same("fractional_max_pool2d_backward", torch.randn_like(values), x, [2, 3], [count, count], indices)


def test_maxima_are_written_back():
    values, indices = torch.nn.functional.max_pool3d(_images(2, 3, 4, 6, 6), 2, return_indices=True)
    _same("max_unpool3d", values, indices, [4, 6, 6], [2] * 3, [0] * 3)


@pytest.mark.declines("an output with strides")
def test_an_output_of_maxima_written_back_has_the_strides_that_aten_gives_it():
    values = _images(2, 3, 4, 5, layout="channels-last")
    indices = torch.arange(20, device=DEVICE).view(4, 5).expand(2, 3, 4, 5).contiguous()
    outs = [torch.empty(2, 3, 8, 5, device=DEVICE) for _ in range(2)]
    expected = torch.ops.aten.max_unpool2d.out(values, indices, [8, 5], out=outs[0])
    with tritonite.use_gems(include="max_unpool2d*", faster_only=False):
        found = torch.ops.aten.max_unpool2d.out(values, indices, [8, 5], out=outs[1])
    assert found.stride() == expected.stride() and torch.equal(found, expected)


@pytest.mark.parametrize("module", ["AvgPool1d", "AvgPool3d", "MaxPool2d", "AdaptiveAvgPool2d", "AdaptiveMaxPool3d"])
def test_modules_have_float64s_gradients(module):
    sizes = (2, 3, *(6, 7, 5)[: int(module[-2])])
    pool = getattr(torch.nn, module)(3)
    x = _images(*sizes).requires_grad_()
    wide = x.detach().double().requires_grad_()
    expected = pool(wide)
    expected.square().sum().backward()
    with tritonite.use_gems(faster_only=False):
        actual = pool(x)
        actual.square().sum().backward()
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.grad.double(), wide.grad, atol=1e-5, rtol=1e-5)


def test_offsets_of_64_bits_give_the_same_results():
    x = _images(2, 3, 9, 8, layout="channels-last")
    with (
        mock.patch.object(declare, "INT32_LIMIT", 8),
        mock.patch.object(specialize, "INT32_LIMIT", 8),
        mock.patch.object(geometry, "INT32_LIMIT", 64),
    ):
        _same("max_pool2d_with_indices", x, [3, 2], [2, 1], [1, 1], [1, 1], False)
        out = _same("_adaptive_avg_pool2d", x, [4, 5])
        _same("_adaptive_avg_pool2d_backward", out, x)


def test_outputs_in_another_layout_are_left_to_aten():
    x = _images(2, 3, 8, 8)
    out = torch.empty(2, 3, 4, 4, device=DEVICE).to(memory_format=torch.channels_last)
    with pytest.raises(Decline, match="an output with strides"):
        tritonite.overloads()["avg_pool2d.out"](x, [2, 2], [2, 2], [0, 0], False, True, None, out=out)


@pytest.mark.declines("ATen raises")
def test_padding_beyond_half_the_window_is_refused():
    x = _images(2, 3, 8, 8)
    # Half of the kernel, whatever its dilation.
    for kernel, dilation in ((2, 1), (3, 3)):
        with tritonite.use_gems(), pytest.raises(RuntimeError, match="pad should be"):
            torch.nn.functional.max_pool2d(x, kernel, padding=2, dilation=dilation)


@pytest.mark.declines("channels-last images")
def test_a_volume_with_the_strides_of_images_is_refused_on_a_cpu():
    if tritonite.backend.aten != "cpu":
        pytest.skip("ATen's GPU kernels pool such volumes")
    x = _images(2, 3, 4, 6, layout="channels-last")
    with tritonite.use_gems(include="max_pool3d*"), pytest.raises(RuntimeError, match="Unsupported memory format"):
        torch.ops.aten.max_pool3d_with_indices(x, [2, 2, 2])
    values, indices = torch.ops.aten.max_pool3d_with_indices(x.contiguous(), [2, 2, 2])
    for volume, grad in ((x, values), (torch.zeros(2, 6, 8, 12, device=DEVICE), x)):
        how = [2] * 3, [2] * 3, [0] * 3, [1] * 3, False
        chosen = indices if grad is values else torch.zeros(2, 3, 4, 6, dtype=torch.int64, device=DEVICE)
        with tritonite.use_gems(include="max_pool3d*"), pytest.raises(RuntimeError, match="Unsupported memory format"):
            torch.ops.aten.max_pool3d_with_indices_backward(grad, volume, *how, chosen)
