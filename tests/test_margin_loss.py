"""Margin losses where samples do not reach: several programs and blocks, repeated labels, wrong classes, gradients."""

import itertools
import math

import pytest
import torch
from conftest import served
from torch.nn import functional

import tritonite
from tritonite.errors import Decline
from tritonite.testing.judge import assert_close, to_reference

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def same(name, *args):
    """Call our overload directly, so that a decline raises, and compare the results with ATen's for CPUs.

    On an H200 ATen (torch 2.11) gives a gradient of 0 to a label that 59 classes violate, in `multilabel_margin_loss`.
    """
    actual, on_cpu = tritonite.overloads()[name](*args), [x.cpu() if torch.is_tensor(x) else x for x in args]
    expected, exact = getattr(aten, name)(*on_cpu), getattr(aten, name)(*map(to_reference, on_cpu))
    parts = (actual, expected, exact) if isinstance(actual, tuple) else ((actual,), (expected,), (exact,))
    for ours, theirs, reference in zip(*parts, strict=True):
        assert_close(ours.cpu(), theirs, reference, 16.0)
    return actual


def normal(*shape):
    return torch.randn(shape, device=tritonite.device)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_classes_of_several_blocks(reduction, tiny_blocks):
    """Rows make several programs and classes several blocks, in rows and in columns."""
    x, target = normal(37, 45), torch.arange(37, device=tritonite.device) * 7 % 45
    grad = normal(37) if reduction == NONE else normal(1).sum()
    for p, weight, scores in ((1, None, x), (2, normal(90)[::2].abs(), x.t().contiguous().t())):
        same("multi_margin_loss", scores, target, p, 0.5, weight, reduction)
        same("multi_margin_loss_backward", grad, scores, target, p, 0.5, weight, reduction)


def test_infinite_weights_of_classes():
    """A weight counts where a margin is violated, and nowhere else."""
    x, weight = torch.tensor([[0.0, 3.0, -3.0]] * 2, device=tritonite.device), normal(3).abs()
    weight[0] = math.inf
    target, grad = torch.tensor([0, 1], device=tritonite.device), torch.tensor(2.0, device=tritonite.device)
    for p in (1, 2):
        same("multi_margin_loss", x, target, p, 1.0, weight, NONE)
        same("multi_margin_loss_backward", grad, x, target, p, 1.0, weight, SUM)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_labels_of_several_blocks(reduction, tiny_blocks):
    """Labels end at the first negative one; some occur twice, and a row has none."""
    x = normal(5, 70)
    target = torch.randint(0, 70, (5, 70), device=tritonite.device)
    target[0, 4], target[1, 0], target[2, 1:3], target[2, 5] = -1, -1, target[2, 0], -1
    target[3:, 9] = -1
    grad = normal(5) if reduction == NONE else normal(1).sum()
    _, is_target = same("multilabel_margin_loss_forward", x, target, reduction)
    same("multilabel_margin_loss_backward", grad, x, target, reduction, is_target)


@pytest.mark.smoke
def test_few_dimensions():
    """A vector is one row, and a number a row of one class."""
    index = torch.tensor([1], device=tritonite.device)
    for reduction, target in itertools.product((NONE, MEAN), (index, index[0])):
        same("multi_margin_loss", normal(4), target, 1, 1.0, None, reduction)
        same("multi_margin_loss", normal(1, 4), target, 2, 1.0, None, reduction)
        same("multi_margin_loss_backward", normal(1).sum(), normal(4), target, 1, 1.0, None, reduction)
        labels = torch.tensor([2, 0, -1, 5], device=tritonite.device)[:3]
        _, is_target = same("multilabel_margin_loss_forward", normal(3), labels, reduction)
        same("multilabel_margin_loss_backward", normal(1).sum(), normal(3), labels, reduction, is_target)
        same("multilabel_margin_loss_forward", normal(1).sum(), index[0] * 0, reduction)


@pytest.mark.skipif(tritonite.device != "cpu", reason="an assertion on a GPU ends the process")
@pytest.mark.declines("the interpreter declines where a GPU's assertion fails")
def test_wrong_classes():
    ops, x = tritonite.overloads(), normal(2, 3)
    for wrong in (3, -1):
        with pytest.raises(Decline, match="out of bounds"):
            ops["multi_margin_loss"](x, torch.tensor([0, wrong]), 1, 1.0, None, MEAN)
    for wrong in (3, -2):
        with pytest.raises(Decline, match="out of range"):
            ops["multilabel_margin_loss_forward"](x, torch.tensor([[0, 1, 2], [-1, wrong, 0]]), MEAN)


@pytest.mark.smoke
@pytest.mark.declines(r"outside \[0, 1\]")
@pytest.mark.parametrize("mark", [-0.5, 2.0, float("nan")])
def test_marks_of_labels_outside_0_to_1_are_atens_on_a_cpu(mark):
    if tritonite.backend.aten != "cpu":
        pytest.skip("ATen's GPU kernels read any mark")
    x, target = torch.randn(2, 3, device=tritonite.device), torch.tensor([[0, -1, 0], [2, 1, -1]])
    marks = torch.tensor([[1.0, 0, 0], [0, 1, mark]])
    with tritonite.use_gems(include="multilabel*", faster_only=False):
        with pytest.raises(RuntimeError, match="is_target"):
            torch.ops.aten.multilabel_margin_loss_backward(torch.ones(()), x, target, 1, marks)
        torch.ops.aten.multilabel_margin_loss_backward(torch.ones(()), x, target, 1, marks.nan_to_num().clamp(0, 1))


def test_through_autograd():
    x, target = normal(6, 5), torch.randint(0, 5, (6, 5), device=tritonite.device)
    target[:, 3] = -1
    results = []
    for dtype, names in ((torch.float64, ()), (torch.float32, "mult*margin*")):
        own = x.to(dtype, copy=True).requires_grad_()
        with tritonite.use_gems(include=names):
            loss = functional.multi_margin_loss(own, target[:, 0], p=2) + functional.multilabel_margin_loss(own, target)
            results += torch.autograd.grad(loss, own)
    torch.testing.assert_close(results[1].double(), results[0], atol=1e-6, rtol=1e-5)
    assert served("multi_margin_loss_backward") and served("multilabel_margin_loss_backward")


@pytest.mark.declines("p is")
@pytest.mark.parametrize("p", [float("nan"), float("inf")])
def test_an_exponent_that_is_no_integer_raises_as_in_aten(p, device):
    x, target = torch.randn(4, 5, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    with tritonite.use_gems(include="multi_margin_loss", faster_only=False), pytest.raises(RuntimeError):
        torch.ops.aten.multi_margin_loss(x, target, p)


@pytest.mark.parametrize("margin", [True, 1j])
def test_a_margin_that_is_no_number_is_atens(margin, device):
    """ATen raises for bfloat16 on a CPU, and for a complex margin."""
    x = torch.randn(4, 5, device=device)
    target = torch.zeros(4, dtype=torch.int64, device=device)
    for name, given in (("multi_margin_loss", (x, target)), ("multi_margin_loss_backward", (x[0, 0], x, target))):
        with pytest.raises(Decline, match="margin is"):
            tritonite.overloads()[name](*given, 1, margin)


@pytest.mark.parametrize(("dtype", "margin"), [(torch.float16, 7e4), (torch.float32, -1e300)])
def test_a_margin_that_overflows_the_dtype_is_atens(dtype, margin, device):
    x, target = torch.randn(4, 5, device=device, dtype=dtype), torch.zeros(4, dtype=torch.int64, device=device)
    for name, given in (("multi_margin_loss", (x, target)), ("multi_margin_loss_backward", (x[0, 0], x, target))):
        with pytest.raises(Decline, match="outside the range"):
            tritonite.overloads()[name](*given, 1, margin)
