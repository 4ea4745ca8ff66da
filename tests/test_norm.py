"""Normalisation where samples do not reach: several blocks, running statistics, what only GPUs have in ATen."""

import itertools
import sys

import pytest
import torch
from conftest import FULL, every_second

import tritonite
from tritonite.errors import Decline
from tritonite.ops import normalization
from tritonite.testing.judge import assert_close

batch_norm = sys.modules["tritonite.ops.batch_norm"]
BN = (0.25, 1e-3)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device=tritonite.device).to(dtype)


@every_second(
    ("shape", "kind"),
    [(3, 70, 5), (9, 2, 9, 11), (60, 7)],
    [
        (False, torch.float32, torch.float32),
        (True, torch.float32, torch.float32),
        (True, torch.float16, torch.float16),
        (True, torch.float32, torch.bfloat16),
        (False, torch.float32, torch.float16),
    ],
)
def test_batch_norm_keeps_running_statistics(shape, kind, tiny_blocks):
    affine, dtype, input_dtype = kind
    x, channels = normal(*shape, dtype=input_dtype) + 3, shape[1]
    weight, bias = (normal(channels, dtype=dtype), normal(channels, dtype=dtype)) if affine else (None, None)
    running = [normal(channels, dtype=dtype), normal(channels, dtype=dtype).abs()]
    expected, actual, wide = ([part.to(dtype) for part in running] for dtype in (None, None, torch.float64))
    exact = torch.native_batch_norm(
        *(part if part is None else part.double() for part in (x, weight, bias)), *wide, True, *BN
    )
    theirs = torch.native_batch_norm(x, weight, bias, *expected, True, *BN)
    with tritonite.use_gems():
        ours = torch.native_batch_norm(x, weight, bias, *actual, True, *BN)
    for parts in zip((*ours, *actual), (*theirs, *expected), (*exact, *wide), strict=True):
        assert_close(*parts)
    assert not tritonite.stats()["native_batch_norm"].declined


@every_second(("train", "dtype"), [False, True], [torch.float32, torch.bfloat16])
def test_batch_norm_gradients(train, dtype, tiny_blocks):
    """Gradients by parameters have the parameters' dtype, float32, whatever the input's dtype."""
    x, grad, weight = normal(9, 4, 70, dtype=dtype), normal(9, 4, 70, dtype=dtype), normal(4)
    running = [normal(4), normal(4).abs()]
    # For given statistics, ATen on GPUs reads the running ones or the saved ones, which are equal here.
    mean, rstd = running[0], (running[1] + BN[1]).rsqrt()
    args = [grad, x, weight, *running, mean, rstd]
    aten = torch.ops.aten.native_batch_norm_backward
    masks = [[True, True, True], [True, False, False], [False, True, False], [False, False, True]]
    for mask in masks:
        exact = aten(*(arg.double() for arg in args), train, BN[1], mask)
        theirs = aten(*args, train, BN[1], mask)
        ours = tritonite.overloads()["native_batch_norm_backward"](*args, train, BN[1], mask)
        for flag, *parts in zip(mask, ours, theirs, exact, strict=True):
            if flag:
                assert_close(*parts)
            else:
                assert parts[0] is None


def test_batch_norm_through_modules():
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6)).to(tritonite.device)
    x = normal(5, 8)
    expected = model(x)
    before = model[1].running_mean.clone()
    model[1].reset_running_stats()
    with tritonite.use_gems():
        actual = model(x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(model[1].running_mean, before)


def _outputs_and_gradients(model, x, dtype):
    """Return the results and gradients of a batch norm of images in `dtype`, with float32 parameters."""
    model, x = model.to(memory_format=torch.channels_last), x.detach().to(dtype).requires_grad_()
    result = model(x)
    seed = torch.linspace(-1, 2, x.numel(), device=x.device).bfloat16().to(dtype).reshape(x.shape)
    gradients = torch.autograd.grad(result, [x, *model.parameters()], seed)
    return [result.detach(), *gradients, *model.buffers()]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_batch_norm_of_images_with_float32_parameters(train, dtype, layout, tiny_blocks):
    x = normal(3, 6, 5, 4, dtype=dtype).to(memory_format=layout)
    models = [torch.nn.BatchNorm2d(6).to(tritonite.device, kind).train(train) for kind in (torch.float32,) * 2]
    exact = _outputs_and_gradients(torch.nn.BatchNorm2d(6).to(x.device, torch.float64).train(train), x, torch.float64)
    theirs = _outputs_and_gradients(models[0], x, dtype)
    tritonite.reset_stats()
    with tritonite.use_gems(include=["*batch_norm*"]):
        ours = _outputs_and_gradients(models[1], x, dtype)
    stats = tritonite.stats()
    assert sum(each.launched for each in stats.values()) == 2
    assert not any(each.declined for each in stats.values())
    for parts in zip(ours, theirs, exact, strict=True):
        if parts[0].is_floating_point():
            assert_close(*parts)
        else:
            assert torch.equal(*parts[:2])


@pytest.mark.parametrize(
    ("x", "kernels", "trained"),
    [
        (torch.empty(2, 3, 4, 5), False, (60, 20, 5, 1)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True, (60, 1, 15, 3)),
        (torch.empty(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d), True, (120, 1, 30, 6, 3)),
        (torch.empty(2, 7, 3).transpose(1, 2), False, (21, 7, 1)),
        (torch.empty(6, 3), True, (3, 1)),
    ],
)
def test_batch_norm_has_the_layouts_of_a_gpu(x, kernels, trained, monkeypatch):
    """On a GPU ATen's result has the input's layout, and its gradient the layout of the kernel that computes it."""
    monkeypatch.setattr("tritonite.ops.aten.on_cpu", lambda: False)
    assert batch_norm._result_strides(x) == x.stride()
    assert batch_norm.has_channels_last_kernels(x) is kernels
    for grad in (x, x.contiguous()):
        assert batch_norm._gradient_strides(grad, x, True, not kernels) == trained
        assert batch_norm._gradient_strides(grad, x, False, False) == x.contiguous().stride()


@pytest.mark.skipif(tritonite.device != "cpu", reason="on GPUs a result lies as its input does")
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 4, 5, 1), (20, 1, 4, 1)),
        ((3, 4, 5, 1), (20, 1, 4, 4)),
        ((3, 4, 1, 5), (20, 1, 7, 4)),
        ((1, 4, 3, 1, 6), (72, 1, 24, 72, 4)),
        ((3, 4, 1, 1), (4, 1, 4, 4)),
        ((3, 1, 5, 6), (30, 1, 6, 1)),
    ],
)
def test_layouts_with_dimensions_of_size_1_are_atens(shape, strides):
    """ATen tests for a layout in two ways, which differ for such strides. Its kernels refuse the other layout."""
    x = torch.randn(72 * 3).as_strided(shape, strides)
    channels, parameter = shape[1], torch.rand(shape[1])
    sizes = shape[0], channels, x[0, 0].numel(), 1
    statistics = torch.rand(channels), torch.rand(channels) + 1
    calls = {
        "native_batch_norm": lambda: torch.native_batch_norm(x, parameter, None, None, None, True, *BN),
        "native_group_norm": lambda: torch.native_group_norm(x, parameter, None, *sizes, 1e-3),
    }
    for name, grad in (("alike", x), ("contiguous", x.contiguous())):
        calls[f"native_batch_norm_backward {name}"] = lambda grad=grad: torch.ops.aten.native_batch_norm_backward(
            grad, x, parameter, *statistics, *statistics, True, 1e-3, [True] * 3
        )
    for name, call in calls.items():
        try:
            expected = call()
        except RuntimeError:
            expected = None
        with tritonite.use_gems(include=[name.split()[0]]):
            if expected is None:
                with pytest.raises(RuntimeError, match="is_contiguous"):
                    call()
                continue
            found = call()
        assert found[0].stride() == expected[0].stride()
        for own, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)
    assert tritonite.stats()["native_batch_norm"].launched == 1


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_cudnn_batch_norm(train, layout):
    """ATen's batch norm on CPUs has the same results in the same layouts and dtypes, and the same gradient."""
    x, grad = (normal(3, 5, 4, 6, dtype=torch.float16).to(memory_format=layout) for _ in range(2))
    given = [normal(5), normal(5), normal(5), normal(5).abs()]
    expected, actual = ([part.clone() for part in given] for _ in range(2))
    theirs = torch.native_batch_norm(x, *expected, train, *BN)
    *ours, reserve = batch_norm.cudnn_batch_norm(x, *actual, train, *BN)
    assert reserve.shape == (0,) and reserve.dtype is torch.uint8
    wide = torch.native_batch_norm(x.double(), *(part.double() for part in given), train, *BN)
    if not train:
        # In evaluation, cuDNN saves no statistics.
        assert all(part.shape == (0,) and part.dtype is torch.float32 for part in ours[1:])
    for parts in list(zip(ours, theirs, wide, strict=True))[: 3 if train else 1]:
        assert_close(*parts)
    torch.testing.assert_close(actual, expected)
    if train:
        args = given[0], None, None, *theirs[1:]
        theirs = torch.ops.aten.native_batch_norm_backward(grad, x, *args, True, BN[1], [True] * 3)
        ours = batch_norm.cudnn_batch_norm_backward(x, grad, *args, BN[1], reserve)
        for parts in zip(ours, theirs, strict=True):
            torch.testing.assert_close(*parts, atol=1e-2, rtol=1e-2, check_stride=True)


def test_cudnn_batch_norm_declines_what_cudnn_refuses():
    x = normal(3, 5, 4, 6)
    cases = [(x.bfloat16(), torch.float32), (x.half(), torch.float16), (x[..., ::2], torch.float32)]
    for given, dtype in cases:
        parameters = [normal(5).to(dtype).abs() for _ in range(4)]
        with pytest.raises(Decline):
            batch_norm.cudnn_batch_norm(given, *parameters, True, *BN)
    parameters = [normal(5).abs() for _ in range(4)]
    _, *saved, reserve = batch_norm.cudnn_batch_norm(x, *parameters, True, 0.1, 0.0)
    for eps in (-1.5, -1e-300, float("nan")):
        for train in (True, False):
            with pytest.raises(Decline):
                batch_norm.cudnn_batch_norm(x, *parameters, train, 0.1, eps)
        with pytest.raises(Decline):
            batch_norm.cudnn_batch_norm_backward(x, x, parameters[0], None, None, *saved, eps, reserve)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("shape", [(6, 5), (3, 5, 4, 2)])
def test_batch_norm_returns_gradients_outside_its_mask(shape, train, mask, weighted, monkeypatch):
    """ATen's channels-last kernel returns all gradients if it sums. Other kernels return those in the mask."""
    monkeypatch.setattr(batch_norm, "_gives_unasked", lambda *_: True)
    grad, x = normal(*shape), normal(*shape)
    weight, mean, rstd = normal(5) if weighted else None, normal(5), normal(5).abs() + 0.5
    # Statistics are equal: ATen's kernel for CPUs reads the running ones, and that for GPUs the saved ones.
    args = grad, x, weight, mean, rstd.pow(-2) - 1e-5, mean, rstd, train, 1e-5
    # ATen on GPUs refuses gradients by a weight that is not given.
    own = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
    expected = torch.ops.aten.native_batch_norm_backward(*own, [True] * 3)
    monkeypatch.setattr("tritonite.ops.aten.on_cpu", lambda: False)
    if not weighted and any(mask[1:]):
        with pytest.raises(Decline, match="without a weight"):
            batch_norm.native_batch_norm_backward(*args, list(mask))
        return
    found = batch_norm.native_batch_norm_backward(*args, list(mask))
    assert (found[0] is not None) == mask[0]
    unasked = train or any(mask[1:])
    for own, exact in zip(found[1:], expected[1:], strict=True):
        assert (own is not None) == unasked
        if unasked and weighted:
            torch.testing.assert_close(own.cpu(), exact, atol=1e-4, rtol=1e-4)
        elif unasked:
            assert own.shape == (0,) and own.dtype is torch.float32


def test_layouts_of_atens_channels_last_kernel():
    """The kernel serves two channels-last operands, and contiguous tensors of channels alone."""
    rows, images, row = normal(6, 5), normal(3, 5, 4, 2), normal(5)
    last, strided = images.to(memory_format=torch.channels_last), normal(10)[::2]
    assert batch_norm._gives_unasked(rows, rows, None, row, row)
    assert batch_norm._gives_unasked(last, last, row, row, row)
    for given in ((images, images, row), (images, last, row), (last, images, row), (last, last, strided)):
        assert not batch_norm._gives_unasked(*given, row, row)
    assert not batch_norm._gives_unasked(last, last, row, strided, row)


@every_second(
    ("shape", "dtype", "weighted"), [(6, 5), (3, 5, 4, 2), (3, 5, 4)], [torch.float32, torch.bfloat16], [True, False]
)
def test_batch_norm_returns_as_many_gradients_as_aten(shape, dtype, weighted):
    """Every output mask is tried in every layout, with given statistics and with the batch's."""
    masks, layouts = list(itertools.product([True, False], repeat=3)), [torch.contiguous_format]
    layouts += [torch.channels_last] if len(shape) == 4 else []
    tritonite.reset_stats()
    for mask, layout, train in itertools.product(masks, layouts, [True, False]):
        grad, x = (normal(*shape, dtype=dtype).to(memory_format=layout) for _ in range(2))
        weight, mean, rstd = normal(5, dtype=dtype) if weighted else None, normal(5), normal(5).abs() + 0.5
        kept = dtype if tritonite.device == "cpu" else torch.float32
        statistics = mean.to(dtype), rstd.to(dtype), mean.to(kept), rstd.to(kept)
        args = grad, x, weight, *statistics, train, 1e-5, list(mask)
        try:
            expected = torch.ops.aten.native_batch_norm_backward(*args)
        except RuntimeError:
            continue
        with tritonite.use_gems(include=["native_batch_norm_backward"]):
            found = torch.ops.aten.native_batch_norm_backward(*args)
        for own, aten in zip(found, expected, strict=True):
            assert (own is None) == (aten is None), (mask, layout, train)
            if own is not None:
                assert (own.shape, own.dtype) == (aten.shape, aten.dtype), (mask, layout, train)
    assert tritonite.stats()["native_batch_norm_backward"].launched


def test_batch_norm_declines_where_atens_result_differs():
    native = tritonite.overloads()["native_batch_norm"]
    for x, statistics in ((normal(1, 3), (None, None)), (normal(4, 3), (normal(3), None))):
        with pytest.raises(Decline):
            native(x, None, None, *statistics, True, *BN)
    with pytest.raises(Decline):
        native(normal(4, 3), None, None, None, None, False, *BN)


@pytest.mark.parametrize("which", ["mean", "rstd"])
def test_layer_norm_gradients_of_strided_statistics_are_atens(which, path):
    """ATen reads statistics as if they were contiguous, whatever their strides."""
    x, grad, weight = normal(2, 3, 4, 5), normal(2, 3, 4, 5), normal(5)
    statistics = dict(zip(("mean", "rstd"), torch.native_layer_norm(x, (5,), None, None, 1e-5)[1:], strict=True))
    arguments = [weight, weight, [True, True, True]]
    function, name = torch.ops.aten.native_layer_norm_backward, "native_layer_norm_backward"
    right = function(grad, x, [5], *statistics.values(), *arguments)
    statistics[which] = statistics[which].to(memory_format=torch.channels_last).as_strided((2, 3, 4, 1), (12, 1, 3, 1))
    misread = function(grad, x, [5], *statistics.values(), *arguments)
    assert not torch.allclose(misread[0], right[0])
    with tritonite.use_gems():
        for _ in range(2):
            torch.testing.assert_close(function(grad, x, [5], *statistics.values(), *arguments), misread)
    assert tritonite.stats()[name].declined and not tritonite.stats()[name].launched


@pytest.mark.smoke
@every_second(("dtype", "affine"), [torch.float32, torch.bfloat16], [False, True])
def test_rms_norm(dtype, affine, tiny_blocks):
    x, weight = normal(5, 3, 600, dtype=dtype), normal(600, dtype=dtype) if affine else None
    wide = x.double().requires_grad_(), weight.double().requires_grad_() if affine else None
    exact = torch.nn.functional.rms_norm(wide[0], (600,), wide[1], 1e-3)
    y, rstd = normalization._fused_rms_norm(x, (600,), weight, 1e-3)
    plain = torch.nn.functional.rms_norm(x.float(), (600,), weight.float() if affine else None, 1e-3).to(dtype)
    assert_close(y, plain, exact.detach())
    assert rstd.shape == (5, 3, 1) and rstd.dtype is torch.float32
    grad = normal(5, 3, 600, dtype=dtype)
    exact.backward(grad.double())
    by_x, by_weight = normalization._fused_rms_norm_backward(grad, x, (600,), rstd, weight, (True, affine))
    assert_close(by_x, wide[0].grad.to(dtype), wide[0].grad)
    assert (by_weight is None) == (not affine)
    if affine:
        assert_close(by_weight, wide[1].grad.to(dtype), wide[1].grad, terms=15)


@every_second(
    ("order", "shape"),
    [(1, 0, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)],
    [(2, 3, 17), (2, 17, 1), (4, 9, 2), (6, 10, 3), (8, 5, 7)],
)
def test_one_row_of_any_layout(shape, order, tiny_blocks):
    """The whole operand is one row, of any layout; the result is contiguous."""
    dense = normal(*[shape[d] for d in order])
    x = dense.permute([order.index(d) for d in range(3)])
    weight, grad = normal(*shape), normal(*shape)
    calls = {
        "native_layer_norm": lambda *_: torch.native_layer_norm(x, shape, weight, None, 1e-3),
        "native_layer_norm_backward": lambda mean, rstd: torch.ops.aten.native_layer_norm_backward(
            grad, x, shape, mean, rstd, weight, None, [True, True, False]
        )[:2],
    }
    statistics = calls["native_layer_norm"]()[1:]
    for name, call in calls.items():
        expected = call(*statistics)
        with tritonite.use_gems(include=[name]):
            found = call(*statistics)
        for own, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(own, theirs, atol=2e-5, rtol=2e-5)
        assert not tritonite.stats()[name].declined


def test_rms_norm_without_eps_uses_that_of_the_compute_dtype():
    x = normal(2, 8, dtype=torch.bfloat16) * 1e-3
    _, rstd = normalization._fused_rms_norm(x, (8,), None, None)
    exact = (x.double().square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).rsqrt()
    assert_close(rstd, exact.float(), exact)


def test_equal(tiny_blocks):
    x, other = normal(9, 500), normal(9, 500)
    other.copy_(x)
    with tritonite.use_gems():
        assert torch.equal(x, other) is True
        other[8, 499] += 1
        assert torch.equal(x, other) is False
        assert torch.equal(x.t(), x.t().contiguous()) and not torch.equal(x, x[:1])
        assert torch.equal(x[:0], other[:0]) and not torch.equal(x[:0], other[:0, :3])
        x[0, 0] = float("nan")
        assert not torch.equal(x, x)
    counts = tritonite.stats()["equal"]
    assert counts.launched and not counts.declined


def test_masked_softmax_with_each_type_of_mask(tiny_blocks):
    length = 40 if FULL else 12
    x = normal(2, 3, 4, length)
    x = torch.cat([x] * (length // 4), 2)
    sources = torch.rand(length, length, device=tritonite.device) > 0.4
    keys = torch.rand(2, length, device=tritonite.device) > 0.4
    masked_softmax = torch.ops.aten._masked_softmax
    for mask, kind in ((sources, 0), (keys, 1)):
        assert_close(
            tritonite.overloads()["_masked_softmax"](x, mask, -1, kind),
            masked_softmax(x, mask, -1, kind),
            masked_softmax(x.double(), mask, -1, kind),
        )
    with pytest.raises(Decline):
        tritonite.overloads()["_masked_softmax"](x, keys, -1, 0)


def test_gradients_of_masked_softmax_along_the_first_dimension():
    """Each thread holds a row of three operands, of which a power of two fit."""
    grad, output = (normal(4, 20, 36).to(torch.bfloat16) for _ in range(2))
    mask = output > 0.5
    exact = torch.ops.aten._masked_softmax_backward(grad.double(), output.double(), mask, 0)
    found = tritonite.overloads()["_masked_softmax_backward"](grad, output, mask, 0)
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-7)


# Only ATen's kernel for CPUs accepts a mask without a type.
@pytest.mark.parametrize("kind", [2] if tritonite.device == "cuda" else [2, None])
def test_masked_softmax_of_strided_inputs_is_atens(kind, path):
    """ATen on a CPU stores probabilities in contiguous order into a result of the input's layout."""
    x = normal(5, 4, 3).permute(2, 1, 0)
    mask = torch.rand(3, 4, 5, device=tritonite.device) > 0.7
    expected = torch.ops.aten._masked_softmax(x, mask, -1, kind)
    with tritonite.use_gems():
        for _ in range(2):
            actual = torch.ops.aten._masked_softmax(x, mask, -1, kind)
            torch.testing.assert_close(actual, expected, equal_nan=True, check_stride=True)


@every_second(
    ("shape_and_groups", "affine", "dtype"),
    # Four images of the third shape fill the device.
    [
        ((3 if FULL else 2, 4, 500), 2),
        ((2, 12, 81), 1),
        ((10 if FULL else 4, 6, 353), 2),
        ((2, 6, 1300), 6),
        ((1, 4, 16), 1),
    ],
    [False, True],
    [torch.float32, torch.bfloat16],
)
def test_group_norm_of_channels_of_long_groups(shape_and_groups, affine, dtype, tiny_blocks):
    """In groups too long for a program, a channel is a row with one weight."""
    shape, groups = shape_and_groups
    x, channels = normal(*shape, dtype=dtype) + 1, shape[1]
    weight, bias = (normal(channels, dtype=dtype), normal(channels, dtype=dtype)) if affine else (None, None)
    sizes = (shape[0], channels, shape[2], groups)
    aten = torch.ops.aten
    exact = aten.native_group_norm(
        x.double(), *(part if part is None else part.double() for part in (weight, bias)), *sizes, 1e-5
    )
    theirs = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    grad, saved, mask = normal(*shape, dtype=dtype), [part.clone() for part in theirs[1:]], (True, False, False)
    wide = [part if part is None else part.double() for part in (grad, x, *saved, weight)]
    exact_gradient = aten.native_group_norm_backward(*wide, *sizes, mask)[0]
    their_gradient = aten.native_group_norm_backward(grad, x, *saved, weight, *sizes, mask)[0]
    with tritonite.use_gems():
        ours = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
        gradient = aten.native_group_norm_backward(grad, x, *saved, weight, *sizes, mask)[0]
    for parts in zip(ours, theirs, exact, strict=True):
        assert_close(*parts)
    assert_close(gradient, their_gradient, exact_gradient, terms=shape[2] * channels // groups)
    for name in ("native_group_norm", "native_group_norm_backward"):
        assert not tritonite.stats()[name].declined
