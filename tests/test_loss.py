"""Losses, distances and renorm where samples of schemas do not reach: several blocks, weights, wrong classes."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

import tritonite
from tritonite.errors import Decline
from tritonite.testing.judge import assert_close, to_reference

aten = torch.ops.aten
MEAN, SUM, NONE = 1, 2, 0


def same(name, *args, **kwargs):
    """Call our overload directly, so that a decline raises, and compare the results with ATen's."""
    packet, _, overload = name.partition(".")
    function = getattr(getattr(aten, packet), overload or "default")
    actual = tritonite.overloads()[name](*args, **kwargs)
    expected = function(*args, **kwargs)
    try:
        reference = function(*map(to_reference, args))
    except RuntimeError:
        reference = expected
    parts = (actual, expected, reference) if isinstance(actual, tuple) else ((actual,), (expected,), (reference,))
    # On a GPU, ATen leaves the total weight unwritten if there is no reduction.
    undefined = name == "nll_loss2d_forward" and args[3] == NONE and tritonite.device == "cuda"
    for ours, theirs, exact in list(zip(*parts, strict=True))[: 1 if undefined else None]:
        assert_close(ours, theirs, exact)
    return actual


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device=tritonite.device).to(dtype)


@pytest.mark.parametrize("reduction", [MEAN, SUM, NONE])
def test_losses_of_several_blocks(reduction, tiny_blocks):
    x, y = normal(37, 29), normal(29, 37).t()
    same("mse_loss", x, y, reduction)
    same("mse_loss", x, y[:, :1], reduction)
    same("smooth_l1_loss", x, y, reduction, 0.0)
    same("huber_loss", x, y, reduction, 0.5)
    same("soft_margin_loss", x, y.sign(), reduction)
    probability, target = x.sigmoid(), y.sigmoid()
    same("binary_cross_entropy", probability, target, None, reduction)
    same("binary_cross_entropy", probability, target, y[0], reduction)
    for weight, pos_weight in itertools.product((None, y[0].abs()), (None, y[1].abs())):
        same("binary_cross_entropy_with_logits", x, target, weight, pos_weight, reduction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_binary_cross_entropy_near_0_and_1(dtype):
    """Probabilities are near 0, 1/2 or 1, where one of the logarithms is small or subnormal."""
    ends = torch.cat([torch.tensor([0.0, -0.0, 1.0, 0.5, 1e-45, 3e-42, 1e-38]), 2.0 ** -torch.arange(1.0, 127.0, 0.37)])
    sides = [ends, 1 - ends, 0.5 - ends.clamp(max=0.5), 0.5 + ends.clamp(max=0.5), torch.linspace(0, 1, 1999)]
    x = torch.cat(sides).to(tritonite.device, dtype).clamp(0, 1)
    for target in (0.0, -0.0, 0.3, 1.0):
        same("binary_cross_entropy", x, torch.full_like(x, target), None, NONE)
    # Each probability alone, so that no other hides its error.
    for small in (x[x > 0.99], 1 - x[x > 0.99]):
        same("binary_cross_entropy", small, small.round(), None, SUM)


def test_equal_terms_of_binary_cross_entropy_cancel():
    """A weight of 0 for positive targets makes both terms the same product. Their difference must have no roundoff."""
    x = torch.full((7,), -66.25825925885117, dtype=torch.float64, device=tritonite.device)
    target, nothing = torch.full_like(x, 2.5), torch.zeros_like(x)
    assert not same("binary_cross_entropy_with_logits", x, target, -7 * torch.ones_like(x), nothing, NONE).any()


def test_losses_decline_what_aten_refuses_or_resizes():
    x, y = normal(4, 3), normal(4, 3)
    refused = {
        "mse_loss": [(x, y.double(), MEAN), (x, y, 3)],
        "smooth_l1_loss": [(x, y, MEAN, -1.0)],
        "huber_loss": [(x, y, MEAN, 0.0)],
        "huber_loss_backward": [(x, x, y, NONE, 0.0)],
        "soft_margin_loss": [(x[0], y, NONE), (x[0], y, MEAN)],
        "binary_cross_entropy": [(x, y[:1], None, NONE), (x, y, x.double(), MEAN)],
        "binary_cross_entropy_with_logits": [(x, y[0], None, None, MEAN), (x[0], y, None, y, SUM)],
        "dist": [(x, y.double(), 2), (x[:0], y[:0], math.inf)],
        "renorm": [(x, 0, 0, 1), (x, 2, 0, -1), (x[0], 2, 0, 1)],
    }
    for name, calls in refused.items():
        for args in calls:
            with pytest.raises(Decline):
                tritonite.overloads()[name](*args)


def test_binary_cross_entropy_writes_its_output():
    x, target = normal(5, 7).sigmoid(), normal(5, 7).sigmoid()
    out = torch.empty_like(x)
    op = tritonite.overloads()["binary_cross_entropy.out"]
    assert op(x, target, None, NONE, out=out) is out
    reference = aten.binary_cross_entropy(x.double(), target.double(), None, NONE)
    assert_close(out, aten.binary_cross_entropy(x, target, None, NONE), reference)
    with pytest.raises(Decline):
        op(x, target, x, NONE, out=x)


@pytest.mark.parametrize("p", [0, 1, 2, 3.5, -1, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_distances(p, dtype, tiny_blocks):
    same("dist", normal(37, 29, dtype=dtype), normal(29, dtype=dtype), p)


@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_renorm(p, dim, tiny_blocks):
    x = normal(3, 40, 4)
    result = same("renorm", x, p, dim, 4.0)
    copy = x.clone()
    assert tritonite.overloads()["renorm_"](copy, p, dim, 4.0) is copy
    assert torch.equal(copy, result)
    permuted = same("renorm", x.permute(2, 0, 1), p, dim, 4.0)
    assert permuted.is_contiguous()


def test_renorm_does_not_write_over_what_it_reads():
    x = normal(8, 8)
    with pytest.raises(Decline):
        tritonite.overloads()["renorm.out"](x[:4], 2, 0, 1.0, out=x[2:6])
    with pytest.raises(Decline):
        tritonite.overloads()["renorm_"](x[:1].expand(8, 8), 2, 0, 1.0)


def targets(*shape, classes, dtype=torch.int64):
    return torch.randint(0, classes, shape, device=tritonite.device).to(dtype)


@pytest.mark.parametrize("reduction", [MEAN, SUM, NONE])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss_of_rows(reduction, weighted, tiny_blocks):
    weight = normal(66).abs()[::2] if weighted else None
    target = targets(70, 3, classes=33)[:, 1]
    for x, wanted in ((normal(70, 33), target), (normal(33, 70).t(), target.to(torch.uint8))):
        _, total = same("nll_loss_forward", x, wanted, weight, reduction, 7)
        seed = normal(70, 2)[:, 0] if reduction == NONE else normal()
        same("nll_loss_backward", seed, x, wanted, weight, reduction, 7, total)


@pytest.mark.parametrize("classes", [5, 33, 301])
@pytest.mark.parametrize("reduction", [MEAN, SUM, NONE])
def test_nll_loss_of_misaligned_rows(reduction, classes, tiny_blocks):
    """The gradient is written in memory order. A program's block may hold several rows, or parts of rows."""
    x, target = normal(7, classes), targets(7, classes=classes)
    target[0], target[-1] = 0, classes - 1
    _, total = same("nll_loss_forward", x, target, None, reduction, -100)
    seed = normal(7) if reduction == NONE else normal()
    found = same("nll_loss_backward", seed, x, target, None, reduction, -100, total)
    assert found.count_nonzero() == 7


@pytest.mark.parametrize("reduction", [MEAN, SUM, NONE])
def test_nll_loss_of_one_row(reduction):
    x, weight = normal(9), normal(9).abs()
    target = torch.tensor(4, device=tritonite.device)
    for ignored in (-100, 4):
        _, total = same("nll_loss_forward", x, target, weight, reduction, ignored)
        same("nll_loss_backward", normal(), x, target, weight, reduction, ignored, total)


@pytest.mark.parametrize("reduction", [MEAN, SUM, NONE])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss_of_images(reduction, weighted, tiny_blocks):
    x, weight = normal(2, 11, 5, 8), normal(11).abs() if weighted else None
    target = targets(2, 8, 5, classes=11).transpose(1, 2)
    for values in (x, x.to(memory_format=torch.channels_last), normal(2, 22, 5, 8)[:, ::2]):
        _, total = same("nll_loss2d_forward", values, target, weight, reduction, 3)
    seed = normal(2, 5, 8) if reduction == NONE else normal()
    same("nll_loss2d_backward", seed, x, target, weight, reduction, 3, total)
    with pytest.raises(Decline):
        channels_last = x.to(memory_format=torch.channels_last)
        tritonite.overloads()["nll_loss2d_backward"](seed, channels_last, target, weight, reduction, 3, total)


def test_nll_loss_of_no_rows_and_of_ignored_ones():
    nothing, target = normal(0, 5), targets(0, classes=5)
    for reduction in (MEAN, SUM, NONE):
        same("nll_loss_forward", nothing, target, None, reduction, -100)
        same(
            "nll_loss_backward", normal(0) if not reduction else normal(), nothing, target, None, reduction, 0, normal()
        )
        same("nll_loss_forward", normal(3, 5), torch.full_like(targets(3, classes=5), 2), None, reduction, 2)


_BAD_DATA = {
    "label above": ("nll_loss(torch.zeros(4, 3), torch.tensor([0, 3, 1, 2]))", IndexError, "t < n_classes"),
    "label below": ("nll_loss(torch.zeros(4, 3), torch.tensor([0, -1, 1, 2]))", IndexError, "t < n_classes"),
    "label in an image": (
        "nll_loss(torch.zeros(1, 3, 2, 2), torch.full((1, 2, 2), 7))",
        IndexError,
        "t < n_classes",
    ),
    "input above 1": ("binary_cross_entropy(torch.full((3,), 2.0), torch.ones(3))", RuntimeError, "input_val <= one"),
    "input that is nan": (
        "binary_cross_entropy(torch.full((3,), torch.nan), torch.ones(3), reduction='none')",
        RuntimeError,
        "input_val <= one",
    ),
    "target below 0": ("binary_cross_entropy(torch.ones(3), -torch.ones(3))", RuntimeError, "target_val <= one"),
    "target just below 0": (
        "binary_cross_entropy(torch.full((3,), 0.5), torch.full((3,), -1e-45))",
        RuntimeError,
        "target_val <= one",
    ),
    "target just above 1": (
        "binary_cross_entropy(torch.full((3,), 0.5), torch.full((3,), 1 + 2**-23), reduction='none')",
        RuntimeError,
        "target_val <= one",
    ),
    "input below 0 among many": (
        "binary_cross_entropy(torch.arange(-1, 300000).clamp(max=1).float(), torch.ones(300001), reduction='sum')",
        RuntimeError,
        "input_val <= one",
    ),
    "target above 1 with a weight": (
        "binary_cross_entropy(torch.ones(3), torch.full((3,), 1.5), torch.zeros(3))",
        RuntimeError,
        "target_val <= one",
    ),
}


@pytest.mark.parametrize("case", _BAD_DATA)
def test_bad_data_stops_the_program_as_atens_kernels_do(case, device):
    text, error, message = _BAD_DATA[case]
    if device == "cpu":
        run = eval(f"lambda: functional.{text}", {"functional": functional, "torch": torch})
        with tritonite.use_gems():
            for _ in range(2):
                with pytest.raises(error):
                    run()
        return
    program = (
        "import tritonite, torch, torch.nn.functional as F\ntorch.set_default_device('cuda')\ntritonite.enable()\n"
        f"F.{text}\ntorch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode and "device-side assert" in done.stderr and message in done.stderr


@pytest.mark.parametrize("divide", ["//", "%", "fmod", "trunc"])
def test_integers_are_divided_by_zero_as_aten_does_on_a_cpu(divide, device):
    if device != "cpu":
        pytest.skip("a GPU does not raise, and what it gives is undefined")
    functions = {
        "//": lambda x, y: x // y,
        "%": lambda x, y: x % y,
        "fmod": torch.fmod,
        "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    }
    x = torch.arange(1, 4)
    with tritonite.use_gems():
        for divisor in (torch.tensor([1, 2, 3]), torch.tensor([1, 0, 3]), 0):
            if isinstance(divisor, torch.Tensor) and bool(divisor.all()):
                functions[divide](x, divisor)
            else:
                with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                    functions[divide](x, divisor)


def test_cross_entropy_forward_and_backward():
    x = normal(6, 10).requires_grad_()
    target = targets(6, classes=10)
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x, target), x)
    for _ in range(2):
        with tritonite.use_gems():
            (actual,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x, target), x)
        torch.testing.assert_close(actual, expected)
    counts = tritonite.stats()
    for name in ("nll_loss_forward", "nll_loss_backward"):
        assert counts[name].launched + counts[name].replayed == 2 and not counts[name].declined


def test_a_gradient_written_over_the_weight_is_atens(device):
    x, target, weight = (torch.rand(6, device=device) for _ in range(3))
    backward = torch.ops.aten.binary_cross_entropy_backward.grad_input
    expected, actual = weight.clone(), weight.clone()
    backward(x, x, target, expected, 0, grad_input=expected)
    with tritonite.use_gems():
        backward(x, x, target, actual, 0, grad_input=actual)
    assert torch.equal(actual, expected)


def test_a_gradient_written_over_the_incoming_gradient_is_atens(device):
    x, target, grad = (torch.rand(6, device=device) for _ in range(3))
    backward = torch.ops.aten.soft_margin_loss_backward.grad_input
    expected, actual = grad.clone(), grad.clone()
    backward(expected, x, target, 1, grad_input=expected)
    with tritonite.use_gems():
        backward(actual, x, target, 1, grad_input=actual)
    assert torch.equal(actual, expected)
    result = torch.empty_like(x)
    with tritonite.use_gems():
        backward(grad, x, target, 1, grad_input=result)
    torch.testing.assert_close(result, torch.ops.aten.soft_margin_loss_backward(grad, x, target, 1))
    counts = tritonite.stats()["soft_margin_loss_backward.grad_input"]
    assert counts.launched + counts.replayed == sum(counts.declined.values()) == 1


def test_smooth_l1_gradients_divide_before_they_multiply_on_a_cpu():
    """With a huge beta ATen's vectors round a small difference to 0, and multiply it by an infinite gradient."""
    if tritonite.device != "cpu":
        pytest.skip("ATen's GPU kernel multiplies first")
    x = torch.tensor([1e-30, 2.0, -1e-30, -3.0] * 4, dtype=torch.float64)
    grad = torch.full_like(x, math.inf)
    found = same("smooth_l1_loss_backward", grad, x, torch.zeros_like(x), SUM, 1e300)
    assert found.isnan().tolist() == [True, False] * 8


def test_huber_loss_of_an_infinite_distance(device):
    """An infinite distance is not below an infinite delta: the loss is inf * (inf - inf)."""
    x, y = (torch.tensor(each, device=device) for each in ([math.inf, -math.inf, 3.0, 0.5], [2.4, 2.4, math.inf, 0.0]))
    for delta in (math.inf, 1.0):
        assert same("huber_loss", x, y, NONE, delta).isnan().tolist() == [delta == math.inf] * 3 + [False]
