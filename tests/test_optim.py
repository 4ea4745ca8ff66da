"""Fused optimizers against torch's with foreach=False: parameters, states, checkpoints, hooks, schedulers, refusals."""
# Over 500 lines: every optimiser is compared with torch.optim by the same few functions.

import copy
import pickle
from unittest import mock

import pytest
import scripts
import torch
import triton.language as tl
from conftest import every_second, some
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim import Muon as TorchMuon

import tritonite
from tritonite import optim
from tritonite.engine.lists import elementwise
from tritonite.errors import InvalidArgument, InvalidDeclaration, Unsupported, UnsupportedOptimizer
from tritonite.install import library, override
from tritonite.optim import rules, updates

DEVICE = tritonite.device
SHAPES = [(3, 4), (5,), (), (4, 3)]
CASES = [
    (Adam, {}),
    (Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"amsgrad": True, "betas": (0.5, 0.9), "eps": 1e-3}),
    (NAdam, {"weight_decay": 0.1}),
    (NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    # Four steps are rectified, after one that is not.
    (RAdam, {"betas": (0.9, 0.8), "weight_decay": 0.1}),
    (RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (Adamax, {"weight_decay": 0.1, "maximize": True}),
    (Adadelta, {"weight_decay": 0.1}),
    (Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}),
    (SGD, {"weight_decay": 0.1, "maximize": True}),
    (SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (RMSprop, {"weight_decay": 0.1}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (ASGD, {"weight_decay": 0.1, "t0": 1}),
    (Rprop, {"maximize": True}),
]
NAMES = [f"{kind.__name__} {options}" for kind, options in CASES]
EVERY_CASE = pytest.mark.parametrize(("kind", "options"), CASES, ids=NAMES)


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [torch.nn.Parameter(x.to(dtype).to(DEVICE)) for x in made]


def gradients(params, step):
    """Set gradients; the second parameter has none in the first step."""
    generator = torch.Generator().manual_seed(step)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.grad = None if i == 1 and step == 0 else grad.to(param.dtype).to(DEVICE)


def made(kind, options, fused, dtype=torch.float32, shapes=SHAPES):
    params = parameters(dtype, shapes)
    if kind is not TorchMuon and not fused:
        options = {"foreach": False, **options}
    optimizer = kind(params, **options)
    return (optim.fuse(optimizer) if fused else optimizer), params


def step(optimizer, params, numbers):
    for number in numbers:
        gradients(params, number)
        optimizer.step()


def assert_near(found, expected, ulps=32):
    """Compare tensors to `ulps` of the dtype, at 1 and relative."""
    assert found.dtype is expected.dtype and found.shape == expected.shape
    assert found.stride() == expected.stride() and found.device == expected.device
    near = ulps * (torch.finfo(found.dtype).eps if found.is_floating_point() else 0)
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def assert_same_state(found, expected, ulps=32, loaded=False):
    """Compare two state_dicts: keys, dtypes, shapes, values, and the groups' numbers.

    `load_state_dict` moves all state but step counts to the parameter's device, so `loaded` state may be elsewhere.
    """
    found, expected = found.state_dict(), expected.state_dict()
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        for name, value in state.items():
            own = found["state"][index][name]
            assert_near(own, value.to(own.device) if loaded else value, ulps)
    for ours, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert {**ours, "foreach": None} == {**theirs, "foreach": None}


def launched(function, *args):
    """Return the number of list launches of a call, recorded anew if the native dispatcher has plans."""
    for name in library.registered():
        if override._native is not None and name.startswith("tritonite_optim::"):
            override._native.clear(name)
    with mock.patch.object(elementwise, "_launch", side_effect=elementwise._launch) as launch:
        function(*args)
    return launch.call_count


@pytest.mark.smoke
@every_second("case,dtype", range(len(CASES)), [torch.float32, torch.float64])
def test_parameters_and_states_are_those_of_torch(case, dtype):
    kind, options = CASES[case]
    ours, theirs = made(kind, options, True, dtype), made(kind, options, False, dtype)
    for own in (ours, theirs):
        step(*own, range(4))
    for found, expected in zip(ours[1], theirs[1], strict=True):
        assert_near(found, expected)
    assert_same_state(ours[0], theirs[0])


@pytest.mark.parametrize(
    ("case", "dtype"), some(range(len(CASES)), [torch.bfloat16, torch.float16]), ids=lambda value: str(value)
)
def test_sixteen_bit_parameters_are_rounded_once(case, dtype):
    kind, options = CASES[case]
    ours, params = made(kind, options, True, dtype)
    precise, exact = made(kind, options, False, torch.float64)
    with torch.no_grad():
        for param, rounded in zip(exact, params, strict=True):
            param.copy_(rounded)
    gradients(params, 1)
    for param, rounded in zip(exact, params, strict=True):
        param.grad = rounded.grad.double()
    ours.step()
    precise.step()
    for found, expected in zip(params, exact, strict=True):
        assert_near(found, expected.to(dtype), ulps=1)


@pytest.mark.parametrize(
    ("kind", "lr"),
    [
        *((kind, 0.01) for kind in (Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, RMSprop, ASGD, Rprop)),
        *((kind, "tensor") for kind in (AdamW, NAdam)),
    ],
)
def test_step_counts_on_the_device_give_the_same_numbers(kind, lr):
    options = {"betas": (0.9, 0.8)} if kind is RAdam else {"weight_decay": 0.1} if kind in (AdamW, NAdam) else {}
    given = torch.tensor(0.01, device=DEVICE) if lr == "tensor" else lr
    ours, theirs = (
        made(kind, {"capturable": True, "lr": given, **options}, True),
        made(kind, {"lr": 0.01, **options}, False),
    )
    for own in (ours, theirs):
        step(*own, range(4))
    for found, expected in zip(ours[1], theirs[1], strict=True):
        assert_near(found, expected)
    for own, other in zip(ours[0].state.values(), theirs[0].state.values(), strict=True):
        assert own["step"].device == ours[1][0].device and own["step"] == other["step"].to(DEVICE)


@pytest.mark.parametrize("kind", [Adam, Adagrad, SGD])
def test_options_of_atens_fused_kernels(kind):
    options = {"lr": 0.1, "weight_decay": 0.1} | ({"momentum": 0.9} if kind is SGD else {})
    ours, theirs = made(kind, {"fused": True, **options}, True), made(kind, options, False)
    for own in (ours, theirs):
        step(*own, range(3))
    for found, expected in zip(ours[1], theirs[1], strict=True):
        assert_near(found, expected)


@pytest.mark.smoke
def test_a_step_is_one_launch_a_dtype():
    params = [
        torch.nn.Parameter(torch.ones(n, dtype=dtype, device=DEVICE))
        for dtype in (torch.float32, torch.bfloat16)
        for n in (8, 16, 24)
    ]
    optimizer = optim.fuse(AdamW(params))
    for param in params:
        param.grad = torch.ones_like(param)
    assert launched(optimizer.step) == 2
    params[0].grad = params[3].grad = None
    assert launched(optimizer.step) == 2
    for param in params:
        param.grad = torch.ones_like(param)
    # Parameters of different steps, too.
    assert launched(optimizer.step) == 2


def test_step_counts_of_parameters_with_and_without_gradients():
    ours, theirs = made(Adam, {}, True), made(Adam, {}, False)
    for optimizer, params in (ours, theirs):
        for number in range(6):
            gradients(params, 1 + number)
            if number % 3 == 1:
                params[0].grad = None
            optimizer.step()
    assert_same_state(ours[0], theirs[0])


def model_and_loss():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(DEVICE)
    x, y = torch.randn(6, 3).to(DEVICE), torch.randn(6, 2).to(DEVICE)
    return model, lambda: torch.nn.functional.mse_loss(model(x), y)


def trained(fused, when="before"):
    """Train with two groups, a scheduler, hooks and a closure. Returns (model, losses, notes of the hooks)."""
    model, loss_of = model_and_loss()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "weight_decay": 0.2}]
    optimizer = AdamW(groups, lr=0.05, foreach=False)
    if fused and when == "before":
        optim.fuse(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if fused and when == "after":
        optim.fuse(optimizer)
    notes, losses = [], []
    optimizer.register_step_pre_hook(lambda *_: notes.append("pre"))
    optimizer.register_step_post_hook(lambda *_: notes.append("post"))

    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    for _ in range(4):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    extra = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    extra.grad = torch.ones_like(extra)
    optimizer.step()
    return [*model.parameters(), extra], losses, notes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("when", ["before", "after"])
def test_groups_schedulers_hooks_and_closures(when):
    found, losses, notes = trained(True, when)
    expected, expected_losses, expected_notes = trained(False)
    assert notes == expected_notes == ["pre", "post"] * 5
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for own, other in zip(found, expected, strict=True):
        assert_near(own, other)


@pytest.mark.parametrize(("kind", "options"), [(AdamW, {}), (SGD, {"momentum": 0.9}), (Adagrad, {"fused": True})])
def test_grad_scaler_skips_the_step_of_an_overflow(kind, options):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    optimizer, params = made(kind, {"lr": 0.1, **options}, True)
    plain, expected = (
        made(kind, {"lr": 0.1}, False) if "fused" in options else made(kind, {"lr": 0.1, **options}, False)
    )
    gradients(params, 1)
    gradients(expected, 1)
    scaler.scale(torch.zeros((), device=DEVICE))
    for param in params:
        param.grad *= 4
    scaler.step(optimizer)
    scaler.update()
    plain.step()
    for own, other in zip(params, expected, strict=True):
        assert_near(own, other)
    before = [param.detach().clone() for param in params]
    params[0].grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(own, other) for own, other in zip(params, before, strict=True))


@pytest.mark.parametrize(("kind", "options"), [CASES[3], CASES[4], CASES[13], CASES[16]], ids=str)
@pytest.mark.parametrize("to_fused", [True, False])
def test_training_resumes_from_a_checkpoint_of_the_other_kind(kind, options, to_fused, tmp_path):
    first, params = made(kind, options, not to_fused)
    step(first, params, range(4))
    torch.save((first.state_dict(), [param.detach() for param in params]), tmp_path / "checkpoint")
    state, values = torch.load(tmp_path / "checkpoint")
    second, resumed = made(kind, options, to_fused)
    with torch.no_grad():
        for param, value in zip(resumed, values, strict=True):
            param.copy_(value)
    second.load_state_dict(state)
    straight, expected = made(kind, options, False)
    step(straight, expected, range(4))
    step(second, resumed, range(4, 7))
    step(straight, expected, range(4, 7))
    assert_same_state(second, straight, loaded=True)
    for own, other in zip(resumed, expected, strict=True):
        assert_near(own, other)


def test_a_fused_optimizer_can_be_unfused_copied_and_pickled():
    optimizer, params = made(AdamW, {}, True)
    plain, expected = made(AdamW, {}, False)
    step(optimizer, params, range(3))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert_same_state(other, optimizer, 0)
    assert optim.fuse(optimizer) is optimizer
    assert optim.unfuse(optimizer) is optimizer and "step" not in vars(optimizer)
    assert optim.unfuse(optimizer) is optimizer
    assert launched(step, optimizer, params, [3]) == 0
    step(plain, expected, range(4))
    assert_same_state(optimizer, plain)


def test_complex_parameters_count_as_pairs_of_real_ones():
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64).to(DEVICE))
        for kind, options in ((Adam, {"amsgrad": True}), (SGD, {"momentum": 0.9}), (Rprop, {})):
            optimizer = kind([param], foreach=False, **options)
            optimizer = optim.fuse(optimizer) if fused else optimizer
            for number in range(2):
                param.grad = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(number)).to(
                    DEVICE
                )
                optimizer.step()
        found.append(param.detach())
    torch.testing.assert_close(*found)


def test_strides_of_parameters_and_gradients_may_differ():
    found = []
    for fused in (True, False):
        param = torch.nn.Parameter(parameters(shapes=[(4, 3)])[0].detach().t())
        other = torch.nn.Parameter(parameters(shapes=[(4, 6)])[0].detach()[:, ::2])
        optimizer = SGD([param, other], momentum=0.9, foreach=False)
        optimizer = optim.fuse(optimizer) if fused else optimizer
        for number in range(2):
            gradients([param, other], number + 1)
            optimizer.step()
        found.append(
            [param.detach(), other.detach(), *[state["momentum_buffer"] for state in optimizer.state.values()]]
        )
    for own, expected in zip(*found, strict=True):
        assert_near(own, expected)


def test_shards_are_updated_where_they_are():
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(DEVICE, (1,))
        plain, expected = made(AdamW, {}, False)
        params = [torch.nn.Parameter(DTensor.from_local(x.detach(), mesh, [Shard(0)])) for x in parameters()[:2]]
        params += parameters()[2:]
        optimizer = optim.fuse(AdamW(params))
        for number in (1, 2):
            gradients(expected, number)
            for param, other in zip(params, expected, strict=True):
                whole = isinstance(param, DTensor)
                param.grad = DTensor.from_local(other.grad, mesh, [Shard(0)]) if whole else other.grad
            plain.step()
            assert launched(optimizer.step) == 1
        assert isinstance(optimizer.state[params[0]]["exp_avg"], DTensor)
        for param, other in zip(params, expected, strict=True):
            assert_near(param.to_local() if isinstance(param, DTensor) else param, other)
    finally:
        distributed.destroy_process_group()


@pytest.mark.declines("sparse gradients take torch's own step")
def test_sparse_gradients_take_the_own_step():
    for kind in (SGD, Adagrad):
        found = []
        for fused in (True, False):
            param = torch.nn.Parameter(parameters(shapes=[(4, 3)])[0].detach())
            optimizer = kind([param], foreach=False)
            optimizer = optim.fuse(optimizer) if fused else optimizer
            param.grad = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 3), (4, 3), check_invariants=False).to(DEVICE)
            optimizer.step()
            found.append(param.detach())
        assert torch.equal(*found)
    param.grad = param.grad.coalesce()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optim.fuse(Adam([param])).step()


@pytest.mark.declines("parameters that share memory take torch's own step")
def test_tensors_that_no_kernel_serves_take_the_own_step():
    found = []
    for fused in (True, False):
        base = torch.arange(6.0, device=DEVICE)
        params = [torch.nn.Parameter(base[:4]), torch.nn.Parameter(base[2:])]
        optimizer = Adam(params, lr=0.1, foreach=False)
        optimizer = optim.fuse(optimizer) if fused else optimizer
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        found.append(base)
        assert optimizer.state[params[0]]["step"] == 2
    assert torch.equal(*found)


def test_a_new_learning_rate_needs_no_new_overload():
    optimizer, params = made(SGD, {"lr": 0.1}, True)
    step(optimizer, params, [1])
    known = dict(rules.sgd._overloads)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
    step(optimizer, params, [2])
    assert rules.sgd._overloads == known


def test_calls_are_replayed_by_the_native_dispatcher():
    """The test has a process of its own, where the operators are registered with the native dispatcher."""
    code = """
import torch, tritonite
params = [torch.nn.Parameter(torch.ones(n, device=tritonite.device)) for n in (8, 16, 5)]
expected = [torch.nn.Parameter(param.detach().cpu().clone()) for param in params]
ours, theirs = tritonite.optim.fuse(torch.optim.AdamW(params)), torch.optim.AdamW(expected, foreach=False)
# Gradients keep their memory, as with zero_grad(set_to_none=False), and thus their alignment.
for param in params:
    param.grad = torch.empty_like(param)
for i in range(5):
    for param, other in zip(params, expected):
        param.grad.fill_(0.5 + i)
        other.grad = param.grad.cpu()
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        optimizer.step()
for param, other in zip(params, expected):
    torch.testing.assert_close(param.detach().cpu(), other.detach())
(counts,) = [value for name, value in tritonite.stats().items() if name.startswith("tritonite_optim::adam")]
assert (counts.launched, counts.replayed) == (1, 4), counts
"""
    scripts.run(code, TRITONITE_NATIVE="1")


@optim.rule(state=("momentum",), numbers=("lr", "beta", "step"), flags=("negative",))
def signed_momentum(param, grad, momentum, lr, beta, step, negative):
    if negative:
        grad = -grad
    momentum = beta * momentum + (1 - beta) * grad
    return param - lr / step * tl.where(momentum > 0, 1.0, -1.0), momentum


@pytest.mark.smoke
def test_an_optimizer_of_a_rule():
    params = [torch.nn.Parameter(x.detach().bfloat16()) for x in parameters()[:2]] + parameters()[2:]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5, "negative": True}]
    optimizer = optim.Optimizer(groups, signed_momentum, lr=0.25, beta=0.75, state_dtype=torch.float32)
    expected = [param.detach().double() for param in params]
    momenta = [torch.zeros_like(x) for x in expected]
    for number in (1, 2, 3):
        gradients(params, number)
        optimizer.step()
        for i, param in enumerate(params):
            grad = param.grad.double() * (1 if i < 2 else -1)
            momenta[i] = 0.75 * momenta[i] + 0.25 * grad
            expected[i] -= (0.25 if i < 2 else 0.5) / number * torch.where(momenta[i] > 0, 1.0, -1.0)
    for i, param in enumerate(params):
        torch.testing.assert_close(param.detach().double(), expected[i], rtol=0.03, atol=0.03)
        assert optimizer.state[param]["momentum"].dtype is torch.float32
        torch.testing.assert_close(optimizer.state[param]["momentum"].double(), momenta[i], rtol=1e-5, atol=1e-5)
    other = optim.Optimizer(params, signed_momentum, lr=0.25, beta=0.75, state_dtype=torch.float32)
    other.add_param_group({"params": [torch.nn.Parameter(torch.ones(1, device=DEVICE))]})
    saved = optimizer.state_dict()
    again = optim.Optimizer(groups, signed_momentum, lr=0.25, beta=0.75, state_dtype=torch.float32)
    again.load_state_dict(saved)
    assert_same_state(again, optimizer, 0)
    assert_same_state(copy.deepcopy(optimizer), optimizer, 0)


def test_lion():
    params = parameters()
    optimizer = optim.Optimizer(params, rules.lion, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1)
    before = [param.detach().clone() for param in params]
    gradients(params, 1)
    assert launched(optimizer.step) == 1
    for param, old in zip(params, before, strict=True):
        torch.testing.assert_close(param.detach(), old - 0.1 * (param.grad.sign() + 0.1 * old))
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], 0.01 * param.grad)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"ns_steps": 2}, torch.float32),
        ({"ns_steps": 1, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}, torch.float32),
        ({"ns_steps": 1, "nesterov": False}, torch.bfloat16),
    ],
    ids=str,
)
def test_muon(options, dtype):
    shapes = [(3, 4), (5, 3), (3, 4)]
    theirs = made(TorchMuon, options, False, dtype, shapes)
    params = parameters(dtype, shapes)
    for ours in ((optim.Muon(params, **options), params), made(TorchMuon, options, True, dtype, shapes)):
        step(*ours, [1, 2])
        if ours[1] is params:
            step(*theirs, [1, 2])
        assert_same_state(ours[0], theirs[0], 4)
        for found, expected in zip(ours[1], theirs[1], strict=True):
            # The orthogonalised update is a bfloat16 matrix, times a learning rate of 0.001.
            torch.testing.assert_close(found, expected, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=5e-5)


def test_muon_takes_parts_of_limited_memory(monkeypatch):
    shapes = [(2, 8), (8, 2), (2, 8), (2, 8)]
    monkeypatch.setattr(updates, "_MOST_OF_MUON", 32)
    ours, theirs = (
        made(TorchMuon, {"ns_steps": 1}, True, shapes=shapes),
        made(TorchMuon, {"ns_steps": 1}, False, shapes=shapes),
    )
    gradients(ours[1], 1)
    # Momentum and update of two matrices of one shape, and of two of different shapes.
    assert launched(ours[0].step) == 4
    step(*theirs, [1])
    for found, expected in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-5)


def test_optimizers_that_are_refused():
    (param,) = parameters(shapes=[(2, 2)])
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(UnsupportedOptimizer, match=r"cannot be fused: .* Served are Adadelta, .*"):
            optim.fuse(kind([param]))
    with pytest.raises(UnsupportedOptimizer, match="differentiable"):
        optim.fuse(Adam([param], differentiable=True))

    class Own(Adam):
        def step(self, closure=None):
            return super().step(closure)

    with pytest.raises(UnsupportedOptimizer, match="no rule computes its step"):
        optim.fuse(Own([param]))


def test_rules_that_are_refused():
    with pytest.raises(InvalidDeclaration, match="name momentum"):
        optim.rule(state=("momentum",))(lambda_free)
    with pytest.raises(InvalidDeclaration, match="not a tuple of names"):
        optim.rule(numbers="lr")
    (param,) = parameters(shapes=[(2, 2)])
    with pytest.raises(InvalidArgument, match="the numbers beta, lr"):
        optim.Optimizer([param], signed_momentum, lr=0.1)
    with pytest.raises(InvalidArgument, match="a rule"):
        optim.Optimizer([param], torch.add)
    with pytest.raises(TypeError, match="has no parameter 'decay'"):
        signed_momentum([param], [param], decay=1.0)


def lambda_free(param, grad, lr):
    return param - lr * grad


@pytest.mark.declines("an integer parameter")
def test_a_rule_raises_unsupported_before_it_writes():
    params = [torch.zeros(3, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)]
    with pytest.raises(Unsupported):
        rules.lion(params, params, exp_avg=params, lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0)
    assert not params[0].any()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_function_takes_a_step():
    model, loss_of = model_and_loss()
    optimizer = optim.fuse(AdamW(model.parameters()))

    @torch.compile(backend="eager")
    def train():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss

    losses = [train().item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert all(state["step"] == 3 for state in optimizer.state.values())
    # Dynamo has replaced methods of torch's classes.
    for kind in (AdamW, SGD, Adagrad):
        ours, theirs = made(kind, {}, True), made(kind, {}, False)
        for own in (ours, theirs):
            step(*own, [0])
        assert_same_state(ours[0], theirs[0])
