"""Depthwise convolutions and their gradients against torch's in float64."""

import pytest
import torch
from compositions import close, normal
from conftest import some

import tritonite
from tritonite.engine import iteration
from tritonite.engine.convolution import depthwise
from tritonite.errors import Decline
from tritonite.testing.judge import to_reference
from tritonite.testing.samples import REFERENCES, samples

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CONVOLUTIONS = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)


@pytest.fixture(params=[(1, 16), (4, 4)], ids=str)
def small_tiles(request, monkeypatch, change_device):
    """Make tiles so small that channels and positions have several, and filters several groups of taps."""
    small = depthwise.DepthwiseTable(request.param, request.param[::-1], 2, 6, request.param, 4, slices=2, elements=8)
    monkeypatch.setattr(depthwise, "TABLE", dict.fromkeys(depthwise.TABLE, small))
    change_device(programs=12)


def volume(tensor):
    """View a sequence or an image, or filters for these, as a volume."""
    return tensor.reshape(*tensor.shape[:2], *[1] * (5 - tensor.dim()), *tensor.shape[2:])


def laid(tensor, layout):
    """Return the values in a layout: row-major, channels-last, or with gaps along all dimensions."""
    if layout == "channels last":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "gaps":
        wide = tensor.new_zeros([2 * size + 1 for size in tensor.shape])
        tensor = wide[(slice(1, None, 2),) * tensor.dim()].copy_(tensor)
    return tensor


def check(x, weight, bias, stride=1, padding=0, dilation=1, layout="row-major"):
    """Compare a convolution and its gradients with torch's."""
    rank, channels = x.dim() - 2, x.shape[1]
    wide = [None if each is None else each.double().requires_grad_() for each in (x, weight, bias)]
    exact = CONVOLUTIONS[rank - 1](*wide, stride, padding, dilation, channels)
    grad = torch.randn_like(exact).to(x.dtype)
    given = [each for each in wide if each is not None]
    grads = torch.autograd.grad(exact, given, grad.double())
    triples = [
        (fill,) * (3 - rank) + (each if isinstance(each, tuple) else (each,) * rank)
        for each, fill in ((stride, 1), (padding, 0), (dilation, 1))
    ]
    x, weight, grad = (laid(volume(each), layout) for each in (x, weight, grad))
    out, by_x, by_weight = (laid(torch.full_like(each, float("nan")), layout) for each in (grad, x, weight))
    depthwise.depthwise_forward(x, weight, bias, out, *triples)
    depthwise.depthwise_backward_input(grad, weight, by_x, *triples)
    depthwise.depthwise_backward_weight(grad, x, by_weight, *triples)
    taps, positions = weight[0].numel(), grad[:, 0].numel()
    close(out, volume(exact.detach()), taps)
    close(by_x, volume(grads[0]), taps * weight.shape[0] // max(1, channels))
    close(by_weight, volume(grads[1]), positions)


@pytest.mark.parametrize(
    ("dtype", "layout", "rank", "taps", "window", "multiplier"),
    some(
        DTYPES,
        ("row-major", "channels last", "gaps"),
        (1, 2, 3),
        (1, 2, 3, 5, 7),
        ((1, 0, 1), (1, 1, 1), (2, 1, 1), (1, 2, 2), (3, 2, 2), (2, 6, 3)),
        (1, 2, 3),
        turns=4,
    ),
)
def test_convolution(dtype, layout, rank, taps, window, multiplier):
    taps = min(taps, 3) if rank == 3 else taps
    stride, padding, dilation = window
    sizes = [max(1, dilation * (taps - 1) + 1 - 2 * padding) + extra for extra in (4, 1, 2)[:rank]]
    x, weight = normal(2, 5, *sizes, dtype=dtype), normal(5 * multiplier, 1, *[taps] * rank, dtype=dtype)
    bias = normal(5 * multiplier, dtype=dtype) if multiplier != 2 else None
    check(x, weight, bias, stride, padding, dilation, layout)


@pytest.mark.parametrize("layout", ["row-major", "channels last"])
@pytest.mark.parametrize("taps", [2, 3])
def test_several_tiles(taps, layout, small_tiles):
    """Channels, positions, slices and groups of taps have several tiles; a filter of more taps is looped over."""
    check(normal(2, 3, 3, 4), normal(6, 1, taps, taps), normal(6), 1, 1, 1, layout)


@pytest.mark.parametrize("layout", ["row-major", "channels last", "gaps"])
@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 1, 4, 5), (1, 1, 1, 1), (2, 3, 1, 1)], ids=str)
def test_no_samples_and_one_channel(shape, layout):
    for taps, padding in (((1, 1), 0), ((3, 1), (1, 0)), ((3, 3), 1)):
        check(normal(*shape), normal(2 * shape[1], 1, *taps), normal(2 * shape[1]), 1, padding, 1, layout)


@pytest.mark.smoke
def test_windows_differ_by_dimension():
    x, weight = normal(2, 3, 6, 9, 7), normal(6, 1, 2, 3, 1)
    triples = (2, 1, 3), (1, 2, 0), (1, 3, 1)
    grad = torch.nn.functional.conv3d(x, weight, None, *triples, 3)
    out, by_x, by_weight = (torch.empty_like(each) for each in (grad, x, weight))
    depthwise.depthwise_forward(x, weight, None, out, *triples)
    close(out, torch.nn.functional.conv3d(x.double(), weight.double(), None, *triples, 3), 6)
    depthwise.depthwise_backward_input(grad, weight, by_x, *triples)
    depthwise.depthwise_backward_weight(grad, x, by_weight, *triples)
    wide, own = x.double().requires_grad_(), weight.double().requires_grad_()
    torch.nn.functional.conv3d(wide, own, None, *triples, 3).backward(grad.double())
    close(by_x, wide.grad, 12)
    close(by_weight, own.grad, 500)


@pytest.mark.smoke
def test_padding_has_no_terms():
    """A tap outside the input adds nothing, even if it is inf; nor does one between the strides of a gradient."""
    x, weight = normal(1, 2, 1, 3, 3), torch.full((2, 1, 1, 3, 3), float("inf"), device=tritonite.device)
    weight[..., 1, 1] = 1.0
    out, window = torch.empty(1, 2, 1, 1, 1, device=x.device), ((1, 1, 1), (0, 1, 1), (1, 1, 1))
    x = x[..., :1, :1]
    depthwise.depthwise_forward(x, weight, None, out, *window)
    assert torch.equal(out, x)
    by_x = torch.empty_like(x)
    depthwise.depthwise_backward_input(out, weight, by_x, *window)
    assert torch.equal(by_x, out)
    out.fill_(float("inf"))
    by_weight = torch.empty_like(weight)
    depthwise.depthwise_backward_weight(out, x, by_weight, *window)
    assert by_weight.isinf().sum() == 2 and (by_weight == 0).sum() == 16


@pytest.mark.parametrize("layout", ["row-major", "channels last"])
def test_samples_are_independent_of_the_batch(layout, small_tiles):
    x, weight = normal(2, 3, 1, 3, 5), normal(3, 1, 1, 3, 3)
    window = ((1, 1, 1), (0, 1, 1), (1, 1, 1))
    x = laid(x, layout)
    whole, one = torch.empty_like(x), torch.empty_like(x[1:2])
    depthwise.depthwise_forward(x, weight, None, whole, *window)
    depthwise.depthwise_forward(x[1:2], weight, None, one, *window)
    assert torch.equal(whole[1:2], one)
    depthwise.depthwise_backward_input(x, weight, whole, *window)
    depthwise.depthwise_backward_input(x[1:2], weight, one, *window)
    assert torch.equal(whole[1:2], one)


def test_offsets_of_64_bits(monkeypatch):
    monkeypatch.setattr(iteration, "INT32_LIMIT", 1)
    check(normal(2, 3, 4, 5), normal(6, 1, 3, 3), normal(6), 2, 1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["_conv_depthwise2d", "conv_depthwise3d"])
def test_cuda_only_operators(name, dtype):
    op, out = tritonite.overloads()[name], tritonite.overloads()[f"{name}.out"]
    for sample in samples(op, dtype, tritonite.device):
        if sample.label.startswith("extreme"):
            continue
        exact = REFERENCES[name](*sample.map(to_reference).args)
        result = op(*sample.args)
        assert result.is_contiguous() and result.dtype is dtype
        close(result, exact, 24)
        given = torch.full_like(result, float("nan"))
        assert out(*sample.args, out=given) is given and torch.equal(given, result)


def test_declines():
    ops, x, weight = tritonite.overloads(), normal(2, 3, 4, 5), normal(6, 1, 2, 2)
    window = (1, 1), (0, 0), (1, 1)
    op = ops["_conv_depthwise2d"]
    for arguments, reason in (
        ((x, weight, (2, 2), None, (0, 1), *window[1:]), "a positive window"),
        ((x[:0], weight, (2, 2), None, *window), "input of shape"),
        ((x, weight, (3, 2), None, *window), "filters of shape"),
        ((x, weight.double(), (2, 2), None, *window), "filters of torch"),
        ((x, weight, (2, 2), weight[:5, 0, 0, 0], *window), "bias of shape"),
        ((x[:, :, :1], weight, (2, 2), None, *window), "result of sizes"),
        ((x, weight, (2, 2), None, (1,), *window[1:]), "a window of 1"),
    ):
        with pytest.raises(Decline, match=reason):
            op(*arguments)
    with pytest.raises(Decline, match="not contiguous"):
        ops["_conv_depthwise2d.out"](x, weight, (2, 2), None, *window, out=normal(2, 6, 4, 3).mT)
