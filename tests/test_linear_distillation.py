"""Distillation through linear heads against a composition in float64: values, gradients, chunks, replays."""

import functools

import pytest
import scripts
import torch
from compositions import agree, as_tuple, close, normal
from conftest import every_second
from divergences import heads, labels_of, linear_jsd

import tritonite
from tritonite.testing.compositions.divergences import IGNORED, distilled

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def small_chunks(change_tables):
    """Make chunks of five tokens."""
    change_tables(cross_entropy={"chunk_tokens": 5, "chunk_share": 0.0, "chunk_multiple": 1})


@every_second(
    ("dtype", "weights", "reduction"),
    DTYPES,
    [(0.0, 1.0), (0.3, 0.7), (0.0, 0.4), (1.0, 0.0)],
    ["none", "sum", "mean"],
)
def test_linear_jsd(dtype, weights, reduction, small_chunks):
    torch.manual_seed(3)
    labels = labels_of(2, 6)
    options = {"beta": 0.3, "temperature": 2.0, "labels": labels, "loss_weights": weights, "reduction": reduction}
    operands = heads(2, 6, dtype=dtype)
    agree(functools.partial(linear_jsd, **options), functools.partial(distilled, **options), operands, None, 16, 256)


@pytest.mark.smoke
@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_linear_jsd_without_labels_and_biases(beta, small_chunks):
    for leading in ((7,), (2, 1, 3), (1,), ()):
        operands = heads(*leading, bias=False)
        options = {"beta": beta, "temperature": 1.0}
        agree(functools.partial(linear_jsd, **options), functools.partial(distilled, **options), operands, None, 16, 64)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_of_some_operands(reduction, small_chunks):
    for wanted in ((0,), (1,), (2,), (0, 2)):
        operands = heads(7)
        for i in range(3):
            operands[i].requires_grad_(i in wanted)
        options = {"labels": labels_of(7), "loss_weights": (0.5, 0.5), "reduction": reduction}
        agree(functools.partial(linear_jsd, **options), functools.partial(distilled, **options), operands, None, 16, 64)
    with torch.no_grad():
        close(linear_jsd(*operands, **options), distilled(*map(torch.Tensor.double, operands), **options), 16)


def test_strided_heads(small_chunks):
    student, _, _, teacher, _, teacher_bias = heads(4, 3)
    operands = [
        student.detach().transpose(0, 1).requires_grad_(),
        normal(6, 11).t().requires_grad_(),
        normal(22)[::2].requires_grad_(),
        teacher.transpose(0, 1),
        normal(22, 10)[::2, ::2],
        teacher_bias[:1].expand(11),
    ]
    agree(linear_jsd, distilled, operands, None, 16, 64)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_linear_jsd_of_ignored_tokens_and_of_none(reduction):
    for leading in ((3,), (0,), (2, 0)):
        operands = heads(*leading)
        labels = torch.full(leading, IGNORED, device=tritonite.device)
        loss = linear_jsd(*operands, labels=labels, loss_weights=(0.5, 0.5), reduction=reduction)
        assert not loss.any() and loss.shape == (leading if reduction == "none" else ())
        assert not any(each.any() for each in torch.autograd.grad(loss.sum(), operands[:3]))


def test_labels_out_of_range_give_nan():
    operands, labels = heads(3), torch.tensor([1, 11, 2], device=tritonite.device)
    losses = linear_jsd(*operands, labels=labels, loss_weights=(1.0, 1.0), reduction="none")
    assert losses.isnan().tolist() == [False, True, False]


def test_gradients_of_float16_survive_a_mean_of_many_tokens():
    # The mean's factor would make gradients of single logits vanish, were it applied to them.
    tokens = 2048
    student, weight, _, teacher, teacher_weight, _ = heads(1, dtype=torch.float16, bias=False, classes=64)
    operands = [student.detach().expand(tokens, -1).requires_grad_(), weight, None]
    operands += [teacher.expand(tokens, -1), teacher_weight, None]
    (found,) = torch.autograd.grad(linear_jsd(*operands), weight)
    wide = [each if each is None else each.detach().double().requires_grad_() for each in operands]
    (exact,) = torch.autograd.grad(distilled(*wide), wide[1])
    assert (found.double() - exact).abs().max() < 2e-3 * exact.abs().max()


def test_results_of_linear_jsd_are_deterministic(small_chunks):
    operands = heads(12)
    results = [torch.autograd.grad(linear_jsd(*operands), operands[:3]) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*map(as_tuple, results), strict=True))


def test_calls_are_replayed_by_the_native_dispatcher():
    """The test has a process of its own, because operators are registered once."""
    code = """
import torch, tritonite
from tritonite import fused

def leaf(*shape):
    return torch.randn(shape, device=tritonite.device).requires_grad_()

def reference(student, teacher, temperature):
    q, p = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    return (q.exp() * (q - p)).sum(-1)

labels = torch.tensor([0, -100, 2, 3, 1], device=tritonite.device)
for _ in range(3):
    x, y = leaf(5, 8), torch.randn(5, 8, device=tritonite.device)
    for options in ({}, {"labels": labels}):
        loss = fused.kl_divergence(x, y, reverse=True, temperature=2.0, reduction="none", **options)
        exact = reference(x, y, 2.0)
        if options:
            exact = exact * (labels != -100)
        torch.testing.assert_close(loss, exact)
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), x), torch.autograd.grad(exact.sum(), x))
    hidden, weight, bias = leaf(5, 3), leaf(8, 3), leaf(8)
    other, others = torch.randn(5, 3, device=tritonite.device), torch.randn(8, 3, device=tritonite.device)
    for reduction in ("none", "mean"):
        loss = fused.linear_jsd(hidden, weight, other, others, student_bias=bias, beta=1, labels=labels,
            loss_weights=(0.5, 0.5), reduction=reduction).sum()
        logits = hidden @ weight.T + bias
        exact = 0.5 * (reference(logits, other @ others.T, 1.0) * (labels != -100)).sum()
        exact = exact + 0.5 * torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        exact = exact / 4 if reduction == "mean" else exact
        torch.testing.assert_close(loss, exact)
        given = hidden, weight, bias
        torch.testing.assert_close(torch.autograd.grad(loss, given), torch.autograd.grad(exact, given))
    pairs = fused.linear_orpo(hidden[:4].unflatten(0, (2, 2)), weight, labels[:4].view(2, 2), bias=bias)
    torch.autograd.grad(pairs[0], given)
counts = tritonite.stats()
for name in ("divergence", "divergence_backward", "linear_divergence"):
    own = counts[f"tritonite::{name}"]
    assert own.launched and own.replayed >= own.launched and not own.unrecordable, (name, own)
"""
    scripts.run(code, TRITONITE_NATIVE="1")
