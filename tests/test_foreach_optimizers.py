"""Up to twenty steps of torch.optim's classes against ATen's: with foreach=True under `use_gems`, and `fuse`d."""

import contextlib
import copy

import pytest
import torch
from conftest import FULL, some
from test_optim import CASES, NAMES, assert_near, assert_same_state, gradients, made
from torch.optim import SGD, Adam, RMSprop
from torch.optim import Muon as TorchMuon

import tritonite

DEVICE = tritonite.device
DTYPES = (torch.float32, torch.bfloat16)
# How far values may differ after 20 steps, in units of the dtype's resolution. A step rounds them several times.
ULPS = {torch.float32: 32, torch.bfloat16: 8}
# Two lists of options of a class follow each other, so that each class has both dtypes; the others have both here.
ALONE = [i for i, (kind, _) in enumerate(CASES) if [other for other, _ in CASES].count(kind) == 1]
PAIRS = some(range(len(CASES)), DTYPES) + ([] if FULL else [(i, DTYPES[1 - i % 2]) for i in ALONE])
EVERY_PAIR = pytest.mark.parametrize(
    ("case", "dtype"), PAIRS, ids=[f"{NAMES[i]} {str(dtype).removeprefix('torch.')}" for i, dtype in PAIRS]
)

# The first and the last options of each class; test_optim.py has steps with all of them.
FIRST = {kind: i for i, (kind, _) in reversed(list(enumerate(CASES)))}
LAST = {kind: i for i, (kind, _) in enumerate(CASES)}


def of_cases(indices):
    """Parametrize a test by the cases of these indices, or by all of them in the full set."""
    chosen = range(len(CASES)) if FULL else sorted(indices)
    return pytest.mark.parametrize("case", chosen, ids=[NAMES[i] for i in chosen])


def stepped(optimizer, params, numbers, serving=False):
    """Take steps with drawn gradients. With `serving` Tritonite serves all that the optimizer calls."""
    drawn = []
    for number in numbers:
        gradients(params, number)
        drawn.append([param.grad for param in params])
    with tritonite.use_gems() if serving else contextlib.nullcontext():
        for grads in drawn:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()


def assert_same(ours, theirs, ulps=32):
    """Compare (optimizer, parameters) with another pair: parameters and states."""
    for found, expected in zip(ours[1], theirs[1], strict=True):
        assert_near(found.detach(), expected.detach(), ulps)
    assert_same_state(ours[0], theirs[0], ulps)


def assert_lists_served(prefixes, least):
    """Assert that operators of these prefixes served `least` calls or more, and that none of them declined."""
    counts = {name: own for name, own in tritonite.stats().items() if name.startswith(prefixes)}
    declined = {name: dict(own.declined) for name, own in counts.items() if own.declined}
    assert not declined, declined
    assert sum(own.launched + own.replayed for own in counts.values()) >= least, counts


@EVERY_PAIR
def test_foreach_steps_are_atens(case, dtype):
    kind, options = CASES[case]
    steps = 20 if FULL else 8
    shapes = [(3, 4), (5,)]
    ours, theirs = (made(kind, {"foreach": True, **options}, False, dtype, shapes) for _ in range(2))
    stepped(*theirs, range(steps))
    stepped(*ours, range(steps), serving=True)
    # The difference of two means, of which a root is taken, cancels digits.
    assert_same(ours, theirs, 4 * ULPS[dtype] if options.get("centered") else ULPS[dtype])
    assert_lists_served("_foreach", steps)


def test_twenty_steps_of_muon_are_atens():
    """torch's Muon computes one parameter after the other, and has no lists."""
    options, shapes = {"ns_steps": 1, "weight_decay": 0.1}, [(3, 4)]
    theirs, ours, fused = (made(TorchMuon, options, i == 2, shapes=shapes) for i in range(3))
    stepped(*theirs, range(20))
    stepped(*ours, range(20), serving=True)
    assert_lists_served(("lerp", "mul", "add", "mm"), 20)
    stepped(*fused, range(20))
    for own in (ours, fused):
        for found, expected in zip(own[1], theirs[1], strict=True):
            # The orthogonalised update is a bfloat16 matrix, times a learning rate of 0.001.
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=20 * 5e-5)


@of_cases(FIRST.values())
def test_twenty_fused_steps_are_atens(case):
    kind, options = CASES[case]
    ours, theirs = (made(kind, options, fused) for fused in (True, False))
    for own in (ours, theirs):
        stepped(*own, range(20))
    assert_same(ours, theirs)
    assert_lists_served("tritonite_optim", 20)


@of_cases(LAST.values())
def test_twenty_fused_steps_of_bfloat16_with_float32_states(case):
    """A parameter is rounded once a step. In float64, from the parameters before the step, it is that number's."""
    kind, options = CASES[case]
    (ours, params), (precise, exact) = (
        made(kind, options, fused, dtype) for fused, dtype in ((True, torch.bfloat16), (False, torch.float64))
    )
    for number in range(1, 21):
        gradients(params, number)
        with torch.no_grad():
            for own, other in zip(exact, params, strict=True):
                own.copy_(other)
                own.grad = other.grad.double()
        ours.step()
        precise.step()
        for own, other in zip(params, exact, strict=True):
            assert_near(own.detach(), other.detach().to(torch.bfloat16), 1)
            for name, value in ours.state[own].items():
                if number == 1 and value.dtype is torch.bfloat16:
                    value = ours.state[own][name] = value.float()
                    precise.state[other][name].copy_(value)
                if torch.is_tensor(value):
                    reference = precise.state[other][name].double()
                    torch.testing.assert_close(value.double(), reference, rtol=1e-4, atol=1e-5)
    assert_lists_served("tritonite_optim", 20)


SCALED = [(Adam, {"amsgrad": True}), (SGD, {"momentum": 0.9}), (RMSprop, {})]


@pytest.mark.parametrize(("kind", "options"), SCALED, ids=str)
def test_a_scaler_skips_the_foreach_step_of_an_overflow(kind, options):
    def trained(serving):
        optimizer, params = made(kind, {"foreach": True, "weight_decay": 0.1, **options}, False)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, growth_interval=2)
        scaler.scale(torch.zeros((), device=DEVICE))
        history = []
        for number in range(1, 6):
            gradients(params, number)
            if number == 3:
                params[1].grad[4] = float("inf")
            with tritonite.use_gems() if serving else contextlib.nullcontext():
                scaler.step(optimizer)
                scaler.update()
            history.append([param.detach().clone() for param in params])
        return (optimizer, params), history, scaler.get_scale()

    (ours, history, scale), (theirs, _, expected) = trained(True), trained(False)
    assert_same(ours, theirs)
    assert scale == expected
    assert all(map(torch.equal, history[2], history[1])) and not torch.equal(history[3][0], history[2][0])
    assert_lists_served(("_foreach", "_amp"), 10)


@pytest.mark.parametrize(("kind", "options"), SCALED, ids=str)
def test_foreach_training_resumes_from_a_checkpoint(kind, options):
    """Half of the steps are ATen's, before the checkpoint or after it."""
    options = {"foreach": True, "maximize": True, **options}
    straight = made(kind, options, False)
    stepped(*straight, range(6))
    for first in (True, False):
        optimizer, params = made(kind, options, False)
        stepped(optimizer, params, range(3), serving=first)
        state = copy.deepcopy(optimizer.state_dict())
        second, resumed = made(kind, options, False)
        with torch.no_grad():
            for own, other in zip(resumed, params, strict=True):
                own.copy_(other)
        second.load_state_dict(state)
        stepped(second, resumed, range(3, 6), serving=not first)
        assert_same((second, resumed), straight)
    assert_lists_served("_foreach", 6)
