"""Normalisation where samples do not reach: several blocks, running statistics, what only GPUs have in ATen."""

import pytest
import torch

import tritonite
from tritonite.errors import Decline
from tritonite.ops import normalization
from tritonite.testing.judge import assert_close

BN = (0.25, 1e-3)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device=tritonite.device).to(dtype)


@pytest.mark.parametrize("shape", [(3, 70, 5), (9, 2, 9, 11), (60, 7)])
@pytest.mark.parametrize(
    ("affine", "dtype", "input_dtype"),
    [
        (False, torch.float32, torch.float32),
        (True, torch.float32, torch.float32),
        (True, torch.float16, torch.float16),
        (True, torch.float32, torch.bfloat16),
        (False, torch.float32, torch.float16),
    ],
)
def test_batch_norm_keeps_running_statistics(shape, affine, dtype, input_dtype, tiny_blocks):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train", [False, True])
def test_batch_norm_gradients(train, dtype, tiny_blocks):
    """Those by parameters have the parameters' dtype, float32, whatever the input's is."""
    x, grad, weight = normal(9, 4, 70, dtype=dtype), normal(9, 4, 70, dtype=dtype), normal(4)
    running = [normal(4), normal(4).abs()]
    # On GPUs ATen takes one or the other for given statistics, which are the same.
    mean, rstd = running[0], (running[1] + BN[1]).rsqrt()
    args = [grad, x, weight, *running, mean, rstd]
    aten = torch.ops.aten.native_batch_norm_backward
    masks = [[True, True, True], [True, False, False], [False, True, False], [False, False, True]]
    if tritonite.device == "cuda" and not train:
        with pytest.raises(Decline, match="statistics handed on twice"):
            tritonite.overloads()["native_batch_norm_backward"](*args, train, BN[1], masks.pop(0))
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


def test_batch_norm_declines_what_aten_does_otherwise():
    batch_norm = tritonite.overloads()["native_batch_norm"]
    one, last = normal(1, 3), normal(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for x, statistics in ((one, (None, None)), (last, (None, None)), (normal(4, 3), (normal(3), None))):
        with pytest.raises(Decline):
            batch_norm(x, None, None, *statistics, True, *BN)
    with pytest.raises(Decline):
        batch_norm(normal(4, 3), None, None, None, None, False, *BN)


@pytest.mark.parametrize("which", ["mean", "rstd"])
def test_layer_norm_gradients_of_statistics_that_aten_misreads_are_atens(which, path):
    """ATen reads statistics one after the other in memory, whatever their strides."""
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [False, True])
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
        assert_close(by_weight, wide[1].grad.to(dtype), wide[1].grad)


def test_rms_norm_without_eps_takes_that_of_the_dtype_computed_in():
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


def test_masked_softmax_of_sources_and_of_keys(tiny_blocks):
    x = normal(2, 3, 4, 40)
    x = torch.cat([x] * 10, 2)
    sources = torch.rand(40, 40, device=tritonite.device) > 0.4
    keys = torch.rand(2, 40, device=tritonite.device) > 0.4
    masked_softmax = torch.ops.aten._masked_softmax
    for mask, kind in ((sources, 0), (keys, 1)):
        assert_close(
            tritonite.overloads()["_masked_softmax"](x, mask, -1, kind),
            masked_softmax(x, mask, -1, kind),
            masked_softmax(x.double(), mask, -1, kind),
        )
    with pytest.raises(Decline):
        tritonite.overloads()["_masked_softmax"](x, keys, -1, 0)


@pytest.mark.parametrize("kind", [2, None])
def test_masked_softmax_of_what_is_not_contiguous_is_atens(kind, path):
    """On a CPU ATen writes the shares of a contiguous copy, in its order, into a result of the input's layout."""
    x = normal(5, 4, 3).permute(2, 1, 0)
    mask = torch.rand(3, 4, 5, device=tritonite.device) > 0.7
    expected = torch.ops.aten._masked_softmax(x, mask, -1, kind)
    with tritonite.use_gems():
        for _ in range(2):
            actual = torch.ops.aten._masked_softmax(x, mask, -1, kind)
            torch.testing.assert_close(actual, expected, equal_nan=True, check_stride=True)
