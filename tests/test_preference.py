"""Losses of preferences against plain formulas of the papers in float64: values, gradients, metrics, errors."""

import math

import pytest
import torch
from compositions import close, normal

import tritonite
from tritonite import fused
from tritonite.errors import Unsupported
from tritonite.fused import LinearHead
from tritonite.testing.compositions.preference import (
    IGNORED,
    cpo,
    dpo,
    grpo,
    kto,
    likelihood,
    log_probabilities,
    orpo,
    simpo,
)
from tritonite.testing.tolerances import RTOL

CLASSES = 11
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def head(sequences=6, tokens=5, size=4, dtype=torch.float32, grad=False, bias=True):
    return LinearHead(
        normal(sequences, tokens, size, dtype=dtype, grad=grad),
        normal(CLASSES, size, dtype=dtype, grad=grad),
        normal(CLASSES, dtype=dtype, grad=grad) if bias else None,
    )


def targets(sequences=6, tokens=5, ignored=True):
    """Return targets of sequences of several lengths, padded at the end, one with a gap."""
    target = torch.randint(CLASSES, (sequences, tokens), device=tritonite.device)
    if ignored:
        for i in range(sequences):
            target[i, 1 + i % tokens :] = IGNORED
        target[-2, 0] = IGNORED
    return target


def double(given):
    if isinstance(given, LinearHead):
        return LinearHead(*[double(each) for each in given])
    if isinstance(given, torch.Tensor) and given.is_floating_point():
        return given.detach().double().requires_grad_(given.requires_grad)
    return given


def agree(ours, theirs, policy, terms=64):
    """Compare a loss and its gradients by the policy's input, weight and bias."""
    wide = double(policy)
    (loss, metrics), expected = ours(policy), theirs(wide)
    resolution = RTOL[policy.input.dtype]
    assert loss.dtype is (torch.float64 if policy.input.dtype is torch.float64 else torch.float32)
    close(loss.detach(), expected.detach(), terms, resolution)
    assert not any(each.requires_grad for each in metrics)
    own = [each for each in policy if each is not None]
    exact = [each for each in wide if each is not None]
    found = torch.autograd.grad(loss, own, allow_unused=True)
    wanted = torch.autograd.grad(expected, exact, allow_unused=True)
    for one, reference, parameter in zip(found, wanted, own, strict=True):
        assert one.dtype is parameter.dtype
        close(one, torch.zeros_like(one).double() if reference is None else reference, terms, resolution)
    return loss, metrics


def pair_cases():
    yield "dpo", fused.linear_dpo, dpo, True, {}
    yield "dpo", fused.linear_dpo, dpo, True, {"beta": 0.5, "label_smoothing": 0.2}
    yield "ipo", fused.linear_dpo, dpo, True, {"loss_type": "ipo", "average": True, "beta": 0.4}
    yield "ipo", fused.linear_dpo, dpo, True, {"loss_type": "ipo", "beta": 0.4}
    yield "hinge", fused.linear_dpo, dpo, True, {"loss_type": "hinge", "beta": 0.3}
    yield "orpo", fused.linear_orpo, orpo, False, {"beta": 0.7}
    yield "cpo", fused.linear_cpo, cpo, False, {"alpha": 0.5, "label_smoothing": 0.1}
    yield "cpo", fused.linear_cpo, cpo, False, {"alpha": 0.0}
    yield "simpo", fused.linear_simpo, simpo, False, {"gamma": 0.5, "label_smoothing": 0.1}


CASES = list(pair_cases())


def compare(case, policy, target, reference):
    _, ours, theirs, refers, options = case
    given = {"reference": reference} if refers else {}
    return agree(
        lambda own: ours(*own[:2], target, bias=own.bias, **given, **options),
        lambda own: theirs(own, target, **{name: double(each) for name, each in given.items()}, **options),
        policy,
    )


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_losses_of_pairs(case):
    torch.manual_seed(0)
    compare(case, head(grad=True), targets(), head())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case[0])
def test_losses_of_pairs_by_dtype(case, dtype):
    torch.manual_seed(1)
    compare(case, head(dtype=dtype, grad=True, bias=False), targets(), head(dtype=dtype))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_sequences_of_one_token(case):
    torch.manual_seed(2)
    policy, reference = head(2, 1, grad=True), head(2, 1)
    compare(case, policy, targets(2, 1, ignored=False), reference)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_pairs_without_targets_have_finite_losses_and_no_gradient(case):
    _, ours, _, refers, options = case
    policy, given = head(2, 3, grad=True), {"reference": head(2, 3)} if refers else {}
    target = torch.full((2, 3), IGNORED, device=tritonite.device)
    loss, metrics = ours(*policy[:2], target, bias=policy.bias, **given, **options)
    assert math.isfinite(loss.item()) and all(each.isfinite().all() for each in metrics)
    assert not any(each.any() for each in torch.autograd.grad(loss, policy))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_no_pairs(case):
    _, ours, _, refers, options = case
    policy, given = head(0, 3, grad=True), {"reference": head(0, 3)} if refers else {}
    loss, _ = ours(*policy[:2], targets(0, 3, ignored=False), bias=policy.bias, **given, **options)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, policy)[1].shape == policy.weight.shape


def test_reference_may_be_log_probabilities():
    torch.manual_seed(3)
    policy, reference, target = head(), head(), targets()
    known = log_probabilities(double(reference), target).sum(1).float()
    for options in ({}, {"loss_type": "ipo"}):
        loss, _ = fused.linear_dpo(*policy[:2], target, bias=policy.bias, reference=known, **options)
        close(loss, dpo(double(policy), target, double(reference), **options), 16)


def test_metrics_of_pairs():
    torch.manual_seed(4)
    policy, reference, target = head(), head(), targets()
    _, metrics = fused.linear_dpo(*policy[:2], target, bias=policy.bias, reference=reference, beta=0.3)
    own = log_probabilities(double(policy), target)
    rewards = 0.3 * (own.sum(1) - log_probabilities(double(reference), target).sum(1))
    close(metrics.chosen_log_probabilities, own.sum(1)[:3], 16)
    close(metrics.rejected_log_probabilities, own.sum(1)[3:], 16)
    close(metrics.chosen_rewards, rewards[:3], 16)
    close(metrics.rejected_rewards, rewards[3:], 16)
    close(metrics.nll, likelihood(own, target), 16)
    assert metrics.accuracy.item() == pytest.approx((rewards[:3] > rewards[3:]).double().mean().item())


def test_certain_completions_have_finite_odds():
    hidden = torch.zeros(2, 2, 3, device=tritonite.device, requires_grad=True)
    loss, _ = fused.linear_orpo(hidden, normal(1, 3), torch.zeros(2, 2, dtype=torch.long, device=tritonite.device))
    assert math.isfinite(loss.item()) and torch.autograd.grad(loss, hidden)[0].isfinite().all()


@pytest.mark.parametrize("kl", [0.0, -1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kto(kl, dtype):
    torch.manual_seed(5)
    policy, reference, target = head(5, dtype=dtype, grad=True), head(5, dtype=dtype), targets(5)
    desirable = torch.tensor([True, False, True, True, False], device=tritonite.device)
    options = {"beta": 0.4, "loss_weights": (1.0, 1.5)}
    _, metrics = agree(
        lambda own: fused.linear_kto(
            *own[:2], target, desirable, bias=own.bias, reference=reference, kl=torch.tensor(kl), **options
        ),
        lambda own: kto(own, target, desirable, double(reference), kl, **options),
        policy,
    )
    assert metrics.kl.item() == pytest.approx(max(0.0, kl))


LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]


@pytest.mark.smoke
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_grpo(loss_type, temperature):
    torch.manual_seed(6)
    policy, reference, target = head(4, 5, grad=True), head(4, 5), targets(4, 5, ignored=False)
    mask = torch.rand(4, 5, device=tritonite.device) < 0.7
    # One completion has no token that counts.
    mask[1] = False
    old = log_probabilities(double(policy), target, temperature).detach().float() + 0.4 * normal(4, 5)
    for advantages, refers, before, beta in (
        (normal(4), True, old, 0.3),
        (normal(4, 5), False, old, 0.0),
        (normal(4), True, None, 0.1),
    ):
        options = {"beta": beta, "epsilon": (0.1, 0.3), "temperature": temperature, "loss_type": loss_type}
        agree(
            lambda own: fused.linear_grpo(
                *(*own[:2], target, advantages),
                mask=mask,
                bias=own.bias,
                old_log_probabilities=before,
                reference=reference if refers else None,
                **options,
            ),
            lambda own: grpo(
                *(own, target, double(advantages), mask, double(before), double(reference) if refers else None),
                **options,
            ),
            policy,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_grpo_by_dtype(dtype):
    torch.manual_seed(7)
    policy, target, advantages = head(3, 4, dtype=dtype, grad=True), targets(3, 4, ignored=False), normal(3)
    mask = torch.ones(3, 4, dtype=torch.bool, device=tritonite.device)
    agree(
        lambda own: fused.linear_grpo(*own[:2], target, advantages, bias=own.bias),
        lambda own: grpo(own, target, double(advantages), mask, None, None, 0.0, (0.2, 0.2), 1.0, "grpo"),
        policy,
    )


def test_metrics_of_grpo():
    torch.manual_seed(8)
    policy, target = head(3, 4), targets(3, 4, ignored=False)
    own = log_probabilities(double(policy), target)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]], device=tritonite.device)
    # Ratios are e, beyond the limit, for tokens of the first completion only.
    old = own.float() - torch.tensor([[1.0], [0.0], [0.0]], device=tritonite.device)
    _, metrics = fused.linear_grpo(
        *(*policy[:2], target, torch.ones(3, device=tritonite.device)),
        mask=mask,
        bias=policy.bias,
        old_log_probabilities=old,
        reference=(own + 1).float(),
        beta=0.1,
    )
    assert metrics.clip_fraction.item() == pytest.approx(2 / 7)
    assert metrics.kl.item() == pytest.approx(math.e - 2, rel=1e-4)
    close(metrics.log_probabilities, own * mask, 16)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_tokens_have_no_part(loss_type):
    policy, target = head(2, 3, grad=True), targets(2, 3, ignored=False)
    # What belongs to masked tokens may be anything.
    old = torch.full((2, 3), math.nan, device=tritonite.device)
    loss, metrics = fused.linear_grpo(
        *(*policy[:2], target, normal(2)),
        mask=torch.zeros(2, 3, device=tritonite.device),
        bias=policy.bias,
        old_log_probabilities=old,
        reference=old,
        beta=0.1,
        loss_type=loss_type,
    )
    assert loss.item() == 0 and metrics.kl.item() == 0
    assert not any(each.any() for each in torch.autograd.grad(loss, policy))


def test_compiled_graphs_give_the_same():
    policy, reference, target = head(4, 3, grad=True), head(4, 3), targets(4, 3)
    chosen = torch.tensor([True, False, True, False], device=tritonite.device)

    def losses(hidden, weight, bias):
        options = {"bias": bias}
        return (
            fused.linear_dpo(hidden, weight, target, reference=reference, **options)[0]
            + fused.linear_orpo(hidden, weight, target, **options)[0]
            + fused.linear_cpo(hidden, weight, target, **options)[0]
            + fused.linear_simpo(hidden, weight, target, **options)[0]
            + fused.linear_kto(hidden, weight, target, chosen, reference=reference, **options)[0]
            + fused.linear_grpo(hidden, weight, target.clamp(min=0), hidden.detach()[:, 0, 0], **options)[0]
        )

    expected = losses(*policy)
    actual = torch.compile(losses, fullgraph=True, backend="aot_eager")(*policy)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, policy), torch.autograd.grad(expected, policy))


X, W, Y = torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(2, 3, dtype=torch.long)
KNOWN, GOOD = torch.zeros(2), torch.tensor([True, False])


def dpo_of(x, *args, **options):
    return fused.linear_dpo(x, *args, reference=KNOWN.to(x.device), **options)


def kto_of(x, *args, **options):
    return fused.linear_kto(x, *args, reference=KNOWN.to(x.device), **options)


WRONG = [
    (dpo_of, (X, W, Y), {"loss_type": "exp"}, "loss_type is 'exp'"),
    (dpo_of, (X, W, Y), {"label_smoothing": 0.7}, "label_smoothing is 0.7"),
    (dpo_of, (X, W, Y), {"label_smoothing": 0.1, "loss_type": "hinge"}, "only the loss 'sigmoid'"),
    (dpo_of, (X, W, Y[:1]), {}, "target has the shape"),
    (dpo_of, (X[:1], W, Y), {}, "target has the shape"),
    (dpo_of, (X, W, Y.float()), {}, "target is torch.float32"),
    (dpo_of, (X.int(), W, Y), {}, "input is torch.int32"),
    (fused.linear_dpo, (X, W, Y), {"reference": KNOWN[:1]}, "reference has the shape"),
    (fused.linear_dpo, (X, W, Y), {"reference": KNOWN.clone().requires_grad_()}, "reference has no gradient"),
    (fused.linear_orpo, (X, W, Y[0]), {}, "chosen first"),
    (fused.linear_cpo, (X, W, Y), {"label_smoothing": -1}, "label_smoothing is -1"),
    (fused.linear_simpo, (X, W, Y), {"label_smoothing": 1}, "label_smoothing is 1"),
    (kto_of, (X, W, Y, GOOD[:1]), {}, "desirable is torch.bool of the shape"),
    (kto_of, (X, W, Y, KNOWN), {}, "desirable is torch.float32"),
    (kto_of, (X, W, Y, GOOD), {"kl": KNOWN}, "kl has 2 elements"),
    (fused.linear_grpo, (X, W, Y, KNOWN), {"loss_type": "ppo"}, "loss_type is 'ppo'"),
    (fused.linear_grpo, (X, W, Y, KNOWN[:1]), {}, "advantages have the shape"),
    (fused.linear_grpo, (X, W, Y, KNOWN), {"mask": KNOWN}, "mask has the shape"),
    (fused.linear_grpo, (X, W, Y, KNOWN), {"beta": 0.1}, "needs a reference"),
    (fused.linear_grpo, (X, W, Y, KNOWN), {"temperature": 0.0}, "temperature is 0.0"),
    (fused.linear_grpo, (X, W, Y, KNOWN), {"old_log_probabilities": KNOWN}, "old_log_probabilities has the shape"),
    (fused.linear_grpo, (X, W, Y, KNOWN.clone().requires_grad_()), {}, "advantages have no gradient"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("function", "args", "options", "reason"), WRONG)
def test_wrong_arguments_are_refused(function, args, options, reason):
    for device in (tritonite.device, "meta"):
        move = lambda value: value.to(device) if isinstance(value, torch.Tensor) else value
        with pytest.raises(Unsupported, match=reason):
            function(*map(move, args), **{name: move(value) for name, value in options.items()})


def test_weights_of_float64_are_not_rounded_to_float32():
    torch.manual_seed(9)
    policy, target = head(4, dtype=torch.float64, grad=True), targets(4)
    desirable = torch.tensor([True, False, True, False], device=tritonite.device)
    known, options = torch.zeros(4, dtype=torch.float64, device=tritonite.device), {"beta": 0.1}
    agree(
        lambda own: fused.linear_kto(
            *own[:2], target, desirable, bias=own.bias, reference=known, kl=0.3, loss_weights=(1.1, 0.7), **options
        ),
        lambda own: kto(own, target, desirable, known, 0.3, loss_weights=(1.1, 0.7), **options),
        policy,
        terms=1,
    )
