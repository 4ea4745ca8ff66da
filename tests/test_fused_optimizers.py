"""ATen's fused optimisers, by themselves and as torch.optim calls them."""

import contextlib
import copy
import itertools
import math

import pytest
import torch
from conftest import FULL, some
from test_fuzz import outcomes

import tritonite
from tritonite.engine.lists import elementwise, table
from tritonite.errors import Decline
from tritonite.runtime.stats import counts, totals
from tritonite.testing.fuzz.check import difference

OPTIMIZERS = {
    "adam": (torch.optim.Adam, "_fused_adam_"),
    "adamw": (torch.optim.AdamW, "_fused_adamw_"),
    "sgd": (torch.optim.SGD, "_fused_sgd_"),
    "adagrad": (torch.optim.Adagrad, "_fused_adagrad_"),
}
DECAYING = {"weight_decay": 0.1, "maximize": True}
OPTIONS = {
    "adam": ({}, {"amsgrad": True, **DECAYING}),
    "adamw": ({"betas": (0.8, 0.95), "weight_decay": 0.0}, {"amsgrad": True, **DECAYING}),
    "sgd": ({}, {"momentum": 0.9, "dampening": 0.3, **DECAYING}, {"momentum": 0.9, "nesterov": True}),
    "adagrad": ({}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5, **DECAYING}),
}
CASES = [(name, options) for name, each in OPTIONS.items() for options in each]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    # A step may round to the other of two neighbours.
    torch.bfloat16: {"rtol": 3e-2, "atol": 1e-3},
}


def _parameters(dtype, device):
    """Return parameters of fewer elements than a vector of ATen's SGD on a CPU, which is wrong for whole vectors."""
    torch.manual_seed(1)
    shapes = ((3, 4), (5,), (), (1, 2, 3), (0, 3))
    values = [torch.randn(shape).to(device, dtype) for shape in shapes] + [torch.randn(3, 2).to(device, dtype).t()]
    return [torch.nn.Parameter(x) for x in values]


def _gradients(parameters, step):
    generator = torch.Generator().manual_seed(step)
    for x in parameters:
        drawn = torch.randn(x.shape, generator=generator)
        x.grad = torch.empty_like(x).copy_(drawn)


def _stepped(optimizer, steps, serving=False):
    """Take steps with drawn gradients, by kernels if `serving`."""
    (group,) = optimizer.param_groups
    scope = tritonite.use_gems(include="*") if serving else contextlib.nullcontext()
    for step in steps:
        _gradients(group["params"], step)
        with scope:
            optimizer.step()
    return group["params"]


def _states(optimizer):
    """Return the tensors of an optimizer's state."""
    states = optimizer.state_dict()["state"].values()
    return [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]


def fused(make, parameters, **options):
    """Return a fused optimizer, or skip the test where torch has none of the class on the device."""
    probe = torch.nn.Parameter(torch.ones(1, device=tritonite.device))
    probe.grad = torch.ones_like(probe)
    try:
        make([probe], fused=True).step()
    except RuntimeError as error:
        if "supported devices" not in str(error):
            raise
        pytest.skip(f"this torch has no fused {make.__name__} on {tritonite.device}")
    return make(parameters, lr=options.pop("lr", 0.02), fused=True, **options)


def _close(ours, aten):
    for own, other in zip(ours, aten, strict=True):
        torch.testing.assert_close(own, other, **TOLERANCES[own.dtype])


@pytest.mark.parametrize(("case", "dtype"), some(CASES, DTYPES))
def test_twenty_steps_are_atens(case, dtype, device, path):
    name, options = case
    make, overload = OPTIMIZERS[name]
    ours, aten = (fused(make, _parameters(dtype, device), **options) for _ in range(2))
    _close(_stepped(ours, range(20), serving=True), _stepped(aten, range(20)))
    _close(_states(ours), _states(aten))
    found = counts(overload)
    assert found.launched + found.replayed == 20 and not found.declined


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tensor_is_a_learning_rate(name, device, path):
    make, overload = OPTIMIZERS[name]
    ours, aten = (
        fused(make, _parameters(torch.float32, device), lr=torch.tensor(0.02, device=device)) for _ in range(2)
    )
    for step in range(4):
        for optimizer in (ours, aten):
            optimizer.param_groups[0]["lr"].mul_(0.5)
        _close(_stepped(ours, [step], serving=True), _stepped(aten, [step]))
    found = counts(f"{overload}.tensor_lr")
    assert found.launched + found.replayed == 4 and not found.declined


@pytest.mark.parametrize("kind", ["foreach", "single tensor"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_implementations_are_atens(name, kind, device):
    options = {"foreach": kind == "foreach", **OPTIONS[name][-1]}
    ours, aten = (OPTIMIZERS[name][0](_parameters(torch.float32, device), lr=0.02, **options) for _ in range(2))
    _close(_stepped(ours, range(2), serving=True), _stepped(aten, range(2)))


@pytest.mark.smoke
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_is_trained(name, device):
    make, overload = OPTIMIZERS[name]
    steps = 20 if FULL else 10
    x = torch.randn(6, 4, device=device)
    y = x.sin().sum(1, keepdim=True)

    def train(serving):
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
        optimizer = fused(make, model.parameters())
        with tritonite.use_gems(include="*") if serving else contextlib.nullcontext():
            for _ in range(steps):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
        return float(loss.detach()), [p.detach() for p in model.parameters()]

    (ours, found), (aten, expected) = train(True), train(False)
    assert math.isclose(ours, aten, rel_tol=1e-3)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
    assert counts(overload).launched + counts(overload).replayed == steps


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_skips_a_step(name, device, path):
    """As `torch.amp.GradScaler` does: the kernel unscales gradients, and changes nothing if one is infinite."""
    make, overload = OPTIMIZERS[name]

    def train(serving):
        optimizer = fused(make, _parameters(torch.float32, device))
        scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=2)
        scaler.scale(torch.zeros((), device=device))
        parameters = optimizer.param_groups[0]["params"]
        history = []
        for step in range(4):
            _gradients(parameters, step)
            if step == 2:
                parameters[1].grad[3] = float("inf")
            with tritonite.use_gems(include="_fused*") if serving else contextlib.nullcontext():
                scaler.step(optimizer)
            scaler.update()
            history.append([x.detach().clone() for x in parameters])
            history[-1] += [x.grad.clone() for x in parameters]
        return history, scaler.get_scale(), _states(optimizer)

    (ours, scale, states), (aten, expected, others) = train(True), train(False)
    for own, other in zip(ours, aten, strict=True):
        _close(own, other)
    _close(states, others)
    assert scale == expected
    kept = len(ours[1]) // 2
    assert all(map(torch.equal, ours[2][:kept], ours[1][:kept]))
    assert counts(overload).launched + counts(overload).replayed == 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_from_a_checkpoint(name, device):
    make, _ = OPTIMIZERS[name]
    options = OPTIONS[name][1]
    whole = fused(make, _parameters(torch.float32, device), **options)
    expected = _stepped(whole, range(6), serving=True)
    first = fused(make, _parameters(torch.float32, device), **options)
    _stepped(first, range(3), serving=True)
    checkpoint = copy.deepcopy(([x.detach() for x in first.param_groups[0]["params"]], first.state_dict()))
    second = fused(make, map(torch.nn.Parameter, checkpoint[0]), **options)
    second.load_state_dict(checkpoint[1])
    assert all(map(torch.equal, _stepped(second, range(3, 6), serving=True), expected))


def test_one_plan_serves_other_numbers(device, path):
    """Numbers are arguments of the plan. Nothing of a step is read by the host, so that a CUDA graph captures it."""
    ours, aten = (torch.optim.AdamW(_parameters(torch.float32, device), fused=True, amsgrad=True) for _ in range(2))
    numbers = itertools.product((0.01, 0.3), ((0.9, 0.99), (0.5, 0.6)), (0.0, 0.2), (1e-8, 1e-3))
    for step, (lr, betas, weight_decay, eps) in enumerate(numbers):
        for optimizer in (ours, aten):
            optimizer.param_groups[0].update(lr=lr, betas=betas, weight_decay=weight_decay, eps=eps)
        _close(_stepped(ours, [step], serving=True), _stepped(aten, [step]))
    found = counts("_fused_adamw_")
    assert (found.launched, found.replayed) == ((1, 15) if path == "native" else (16, 0))
    assert not found.unrecordable and not found.declined


def _lists(device, sizes=(5, 0, 33, 1), dtype=torch.float32):
    """Return parameters, gradients, means and squares of gradients, and step counts."""
    parameters, grads, means, squares = ([torch.randn(n, device=device).to(dtype) for n in sizes] for _ in range(4))
    steps = [torch.full((), float(i + 1), device=device) for i in range(len(sizes))]
    return parameters, grads, means, [x.abs() for x in squares], steps


ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.01, "dampening": 0.1, "nesterov": False, "maximize": False}
SGD |= {"is_first_step": False}


def _adam(device, name="_fused_adam_", given=None, **changes):
    """Call Adam on lists, some of which `given` replaces by position, and with other numbers."""
    parameters, grads, means, squares, steps = _lists(device)
    lists = [parameters, grads, means, squares, [], steps]
    for position, own in (given or {}).items():
        lists[position] = own
    return tritonite.overloads()[name](*lists, **ADAM | changes)


@pytest.mark.parametrize("sizes", [(33,), (33, 5, 70), (3,) * (600 if FULL else 100)], ids=len)
def test_a_step_is_one_launch(sizes, device, monkeypatch):
    """The table of many parameters takes several launches, their update takes one."""
    launched = []

    class Launch(elementwise.Launch):
        def __init__(self, specialization, device):
            launched.append(specialization.kernel.__name__)
            super().__init__(specialization, device)

    for module in (elementwise, table):
        monkeypatch.setattr(module, "Launch", Launch)
    parameters, grads, means, squares, steps = _lists(device, sizes)
    expected = [[x.clone() for x in own] for own in (parameters, grads, means, squares)]
    torch._fused_adam_(*expected, [], steps, **ADAM)
    tritonite.overloads()["_fused_adam_"](parameters, grads, means, squares, [], steps, **ADAM)
    for own, other in zip((parameters, grads, means, squares), expected, strict=True):
        torch.testing.assert_close(torch.cat(own), torch.cat(other), rtol=1e-5, atol=1e-6)
    # A single parameter is updated by the kernel of pointwise operators.
    assert launched.count("elementwise_list") == (len(sizes) > 1)
    assert launched.count("write_table") == {1: 0, 3: 1, 100: 2, 600: 9}[len(sizes)]


def test_dtypes_are_launched_apart(device):
    """`torch.optim` calls an operator for each dtype."""
    parameters = [*_parameters(torch.float32, device), *_parameters(torch.bfloat16, device)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    _stepped(optimizer, range(2), serving=True)
    assert counts("_fused_adamw_").launched + counts("_fused_adamw_").replayed == 4


@pytest.mark.parametrize("step", [1.0, 10.0, 1e4, 1e7])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999, 0.999999])
def test_bias_corrections_are_accurate(step, beta, device):
    """float32 would round 1 - 0.999999 to four digits."""
    x, grad, mean = torch.zeros(8, device=device), torch.ones(8, device=device), torch.zeros(8, device=device)
    square = torch.full((8,), 0.25, device=device)
    numbers = ADAM | {"lr": 1.0, "beta1": beta, "beta2": beta, "weight_decay": 0.0, "eps": 0.0}
    steps = [torch.tensor(step, device=device)]
    tritonite.overloads()["_fused_adam_"]([x], [grad], [mean], [square], [], steps, **numbers)
    correction = -math.expm1(step * math.log1p(beta - 1)) if beta else 1.0
    expected = -(1 - beta) / correction / math.sqrt((beta * 0.25 + (1 - beta)) / correction)
    torch.testing.assert_close(x.double(), torch.full_like(x, expected).double(), rtol=1e-6, atol=0.0)


def test_nothing_changes_after_an_overflow(device):
    """Gradients keep their infinities, and states their values."""
    parameters, grads, means, squares, steps = _lists(device)
    grads[2][7] = float("inf")
    lists = [parameters, grads, means, squares, [x.clone() for x in squares], steps]
    before = copy.deepcopy(lists)
    one = torch.ones((), device=device)
    tritonite.overloads()["_fused_adamw_"](*lists, **ADAM | {"amsgrad": True}, grad_scale=one * 4, found_inf=one)
    for own, kept in zip(lists, before, strict=True):
        assert all(map(torch.equal, own, kept))


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_buffer_of_a_first_step_is_not_read(nesterov, device):
    parameters, grads, *_ = _lists(device)
    buffers = [torch.full_like(x, float("nan")) for x in grads]
    expected = [x - 0.01 * (g + 0.1 * x) * (1.9 if nesterov else 1.0) for x, g in zip(parameters, grads, strict=True)]
    kept = [g + 0.1 * x for x, g in zip(parameters, grads, strict=True)]
    numbers = SGD | {"is_first_step": True, "nesterov": nesterov}
    tritonite.overloads()["_fused_sgd_"](parameters, grads, buffers, **numbers)
    torch.testing.assert_close(parameters, expected)
    torch.testing.assert_close(buffers, kept)


def test_infinite_parameters_without_decay(device):
    parameters, grads, means, squares, steps = _lists(device)
    parameters[2][:] = float("inf")
    kept = [x.clone() for x in means]
    _adam(device, given={0: parameters, 1: grads, 2: means, 3: squares, 5: steps}, weight_decay=0.0)
    torch.testing.assert_close(means, [0.9 * m + 0.1 * g for m, g in zip(kept, grads, strict=True)])


def test_functional_forms_leave_their_arguments(device):
    parameters, grads, means, squares, steps = _lists(device)
    lists = [parameters, grads, means, squares, [], steps]
    before = copy.deepcopy(lists)
    results = tritonite.overloads()["_fused_adam"](*lists, **ADAM)
    assert [len(own) for own in results] == [4, 4, 4, 4, 0]
    for own, kept in zip(lists, before, strict=True):
        assert all(map(torch.equal, own, kept))
    addresses = {x.data_ptr() for own in lists for x in own if x.numel()}
    assert not addresses & {x.data_ptr() for own in results for x in own if x.numel()}
    outs = [torch.empty_like(x) for x in parameters]
    tritonite.overloads()["_fused_adam.out"](*lists, **ADAM, out=outs)
    for own, kept in zip(lists, before, strict=True):
        assert all(map(torch.equal, own, kept))
    assert all(map(torch.equal, outs, results[0]))


def _strided(device):
    return [torch.randn(8, 8, device=device)[:, ::2] for _ in range(4)]


REFUSED = {
    "no parameters": (lambda d: _adam(d, given={i: [] for i in (0, 1, 2, 3, 5)}), "lists of 0"),
    "lists of two lengths": (lambda d: _adam(d, given={1: _lists(d)[1][:3]}), "lists of 4, 4, 4, 3"),
    "16-bit parameters with float32 states": (
        lambda d: _adam(d, given={0: _lists(d, dtype=torch.bfloat16)[0]}),
        "where the first is torch.bfloat16",
    ),
    "parameters of two dtypes": (
        lambda d: _adam(d, given={i: [x.double(), *own] for i, (x, *own) in enumerate(_lists(d)[:4])}),
        "where the first is torch.float64",
    ),
    "complex parameters": (
        lambda d: _adam(d, given={i: [x.cfloat() for x in own] for i, own in enumerate(_lists(d)[:4])}),
        "complex64",
    ),
    "other strides": (
        lambda d: _adam(
            d,
            given={0: [torch.randn(4, 3, device=d)], 1: [torch.randn(3, 4, device=d).t()]}
            | {i: [torch.ones(4, 3, device=d)] for i in (2, 3)}
            | {5: [torch.ones((), device=d)]},
        ),
        "different strides",
    ),
    "parameters that are not dense": (
        lambda d: _adam(d, given={i: _strided(d) for i in range(4)}),
        "not dense",
    ),
    "steps of another dtype": (
        lambda d: _adam(d, given={5: [x.double() for x in _lists(d)[4]]}),
        "step of 1 elements of torch.float64",
    ),
    "steps of two elements": (lambda d: _adam(d, given={5: [torch.ones(2, device=d)] * 4}), "step of 2 elements"),
    "a scale of another dtype": (
        lambda d: _adam(d, grad_scale=torch.ones((), device=d, dtype=torch.float64)),
        "grad_scale of 1 elements of torch.float64",
    ),
    "two flags": (lambda d: _adam(d, found_inf=torch.ones(2, device=d)), "found_inf of 2 elements"),
    "two learning rates": (
        lambda d: _adam(d, "_fused_adam_.tensor_lr", lr=torch.ones(2, device=d)),
        "lr of 2 elements",
    ),
    "maxima without AMSGrad": (lambda d: _adam(d, given={4: _lists(d)[3]}), "without amsgrad"),
    "AMSGrad without maxima": (lambda d: _adam(d, amsgrad=True), "lists of 4, 4, 4, 0"),
    "a beta above 1": (lambda d: _adam(d, beta2=1.5), "outside the range"),
    "momentum without buffers": (
        lambda d: tritonite.overloads()["_fused_sgd_"](*_lists(d)[:2], [], **SGD),
        "outside the range",
    ),
    "buffers without momentum": (
        lambda d: tritonite.overloads()["_fused_sgd_"](*_lists(d)[:3], **SGD | {"momentum": 0.0}),
        "outside the range",
    ),
}


@pytest.mark.declines("what ATen refuses, or reads as another dtype")
@pytest.mark.parametrize("case", REFUSED)
def test_what_aten_refuses_is_declined(case, device):
    call, reason = REFUSED[case]
    with pytest.raises(Decline, match=reason):
        call(device)


@pytest.mark.declines("memory that two tensors share")
@pytest.mark.parametrize(
    # Two parameters may have the same gradient, which is read only.
    ("first", "second"),
    [(i, j) for i, j in itertools.product(range(4), repeat=2) if (i, j) != (1, 1)],
)
def test_shared_memory_is_declined(first, second, device):
    """An element of one list in another, of the same parameter or of the next one."""
    lists = [list(own) for own in _lists(device, (6, 6))[:4]]
    i = int(first == second)
    lists[first][0] = lists[second][i]
    before = copy.deepcopy(lists)
    with pytest.raises(Decline, match="shares memory"):
        _adam(device, given={**dict(enumerate(lists)), 5: [torch.ones((), device=device)] * 2})
    assert all(
        torch.equal(x, y) for own, kept in zip(lists, before, strict=True) for x, y in zip(own, kept, strict=True)
    )


def test_steps_may_be_one_tensor(device):
    """Steps are read only. They are tensors of one element of any shape."""
    parameters, grads, means, squares, _ = _lists(device)
    expected = [[x.clone() for x in own] for own in (parameters, grads, means, squares)]
    step = torch.full((1, 1), 3.0, device=device)
    torch._fused_adam_(*expected, [], [step] * 4, **ADAM)
    _adam(device, given={0: parameters, 1: grads, 2: means, 3: squares, 5: [step] * 4})
    _close(parameters, expected[0])
    assert step.item() == 3.0


def test_a_declined_step_is_atens(device, path):
    """Nothing is written before a decline, and ATen's kernel takes the step."""
    lists = _lists(device)
    given = [*lists[:4], [], [x.long() for x in lists[4]]]
    if tritonite.device == "cuda":
        pytest.skip("ATen's CUDA kernel reads integer steps as float32")
    expected = [[x.clone() for x in own] for own in given]
    torch._fused_adam_(*expected, **ADAM)
    with tritonite.use_gems():
        torch._fused_adam_(*given, **ADAM)
        torch.ones(2, device=device) + 1
    for own, other in zip(given, expected, strict=True):
        assert all(map(torch.equal, own, other))
    assert sum(totals().declined.values()) == 1


@pytest.mark.skipif(tritonite.device != "cuda", reason="CUDA graphs")
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_a_cuda_graph_captures_a_step(make, device):
    rate = torch.tensor(0.02, device=device)
    ours, aten = (
        make(_parameters(torch.float32, device), lr=rate, fused=True, capturable=True, amsgrad=True) for _ in range(2)
    )
    _stepped(aten, [0] * 5)
    parameters = _stepped(ours, [0] * 2, serving=True)
    _gradients(parameters, 0)
    graph = torch.cuda.CUDAGraph()
    with tritonite.use_gems(include="*"), torch.cuda.graph(graph):
        ours.step()
    for _ in range(3):
        graph.replay()
    _close(parameters, aten.param_groups[0]["params"])
    _close(_states(ours), _states(aten))


@pytest.mark.parametrize("overload", ["_fused_adam_", "_fused_adamw_"])
def test_the_sign_of_a_moment_of_zero_is_not_compared(overload):
    one = torch.ones(3, device=tritonite.device)
    given = {"self": [one], "grads": [0 * one], "exp_avgs": [-one], "exp_avg_sqs": [one], "max_exp_avg_sqs": []}
    given |= {"state_steps": [one[0].clone()], "lr": 0.5, "beta1": 0.0, "beta2": 0.5, "weight_decay": 0.0, "eps": 1e-3}
    given |= {"amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}

    def negated(call):
        call.run()
        call.arguments["exp_avgs"][0].neg_()

    call, expected, actual = outcomes(overload, given, lambda call, result: result, negated)
    aten, ours = (each.call.arguments["exp_avgs"][0] for each in (expected, actual))
    assert aten.signbit().any() != ours.signbit().any()
    assert difference(call, expected, actual, True) is None
    ours += 0.1
    assert difference(call, expected, actual, True)[0] == "value"
