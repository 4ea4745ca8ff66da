"""Connectionist temporal classification against ATen and its gradient in float64: lengths, blanks, layouts, blocks."""

import itertools

import pytest
import torch
from conftest import served
from torch.nn import functional

import tritonite
from tritonite.engine.ctc import launch

aten = torch.ops.aten
STEPS, CLASSES = 9, 6


def sequences(lengths, dtype=torch.float32, steps=STEPS, classes=CLASSES, blank=0):
    """Return log-probabilities, and padded targets with repeated labels and without blanks."""
    log_probs = torch.randn(steps, len(lengths), classes, device=tritonite.device, dtype=dtype).log_softmax(-1)
    targets = torch.randint(0, classes - 1, (len(lengths), max(lengths) + 1), device=tritonite.device)
    targets = targets + (targets >= blank)
    targets[:, 1::3] = targets[:, :-1:3][:, : targets[:, 1::3].shape[1]]
    return log_probs, targets


def reference(log_probs, targets, steps, labels, blank, zero_infinity, grad):
    """Return ATen's losses and gradient in float64."""
    wide = log_probs.double()
    losses, log_alpha = aten._ctc_loss(wide, targets, steps, labels, blank, zero_infinity)
    arguments = (wide, targets, steps, labels, losses, log_alpha, blank, zero_infinity)
    return losses, aten._ctc_loss_backward(grad.double(), *arguments)


def check(log_probs, targets, steps, labels, blank=0, zero_infinity=False):
    """Compare a direct call of both operators, so that a decline raises, with ATen in float64."""
    ops = tritonite.overloads()
    grad = torch.rand(len(steps), device=tritonite.device, dtype=log_probs.dtype)
    given = (log_probs, targets, steps, labels)
    losses, log_alpha = ops["_ctc_loss"](*given, blank, zero_infinity)
    gradient = ops["_ctc_loss_backward"](grad, *given, losses, log_alpha, blank, zero_infinity)
    expected, exact = reference(*given, blank, zero_infinity, grad)
    assert log_alpha.shape == (len(steps), len(log_probs), 2 * max(labels) + 1) and gradient.is_contiguous()
    tolerance = 1e-10 if log_probs.dtype is torch.float64 else 2e-5
    torch.testing.assert_close(losses.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gradient.double(), exact, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("blank", [0, 3])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_lengths(dtype, blank, zero_infinity):
    """Sequences without labels, without steps, and with too few steps are among those of a batch."""
    steps, labels = [9, 5, 7, 4, 0, 0, 1, 2], [3, 0, 5, 4, 0, 2, 1, 3]
    log_probs, targets = sequences(labels, dtype, blank=blank)
    check(log_probs, targets, steps, labels, blank, zero_infinity)
    joined = torch.cat([row[:count] for row, count in zip(targets, labels, strict=True)])
    check(log_probs, joined.int(), steps, labels, blank, zero_infinity)


def test_layouts():
    log_probs, targets = sequences([3, 2])
    for layout in itertools.permutations(range(3)):
        back = [layout.index(d) for d in range(3)]
        check(log_probs.permute(layout).contiguous().permute(back), targets.t().contiguous().t(), [9, 8], [3, 2])


def test_several_blocks(monkeypatch):
    """Extended labels make several blocks, in each of which a recursion runs over all steps."""
    monkeypatch.setattr(launch, "_MOST_POSITIONS", 8)
    log_probs, targets = sequences([17, 5], steps=30)
    check(log_probs, targets, [30, 11], [17, 5])


def test_more_labels_than_a_tile():
    log_probs, targets = sequences([66], torch.float64, steps=80)
    check(log_probs, targets, [80], [66])


@pytest.mark.smoke
@pytest.mark.parametrize("as_tensors", [False, True])
def test_through_autograd(as_tensors):
    steps, labels = [9, 8, 6], [4, 1, 2]
    log_probs, targets = sequences(labels)
    lengths = [torch.tensor(x) if as_tensors else tuple(x) for x in (steps, labels)]
    results = []
    for scope in (tritonite.use_gems(include="_ctc*"), tritonite.use_gems(include=())):
        x = log_probs.clone().requires_grad_()
        with scope:
            loss = functional.ctc_loss(x, targets, *lengths, zero_infinity=True)
            results.append((loss.detach(), *torch.autograd.grad(loss, x)))
    for own, theirs in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs)
    assert served("_ctc_loss") and served("_ctc_loss_backward")
