"""torch.compile with the backend "tritonite": results, gradients and side effects as in eager mode."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tritonite
from tritonite.graph import backend

OPTIONS = {"fuse": False}


@pytest.fixture(autouse=True, params=(False, True), ids=("separate", "fused"))
def fresh(request):
    OPTIONS["fuse"] = request.param
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, options=(), **settings):
    return torch.compile(
        function, backend="tritonite", fullgraph=True, options={**OPTIONS, **dict(options)}, **settings
    )


def run(function, args, seed=3):
    """Return a function's results, and the gradients of its tensor arguments that require one."""
    torch.manual_seed(seed)
    args = [arg.detach().clone().requires_grad_(arg.requires_grad) if torch.is_tensor(arg) else arg for arg in args]
    results = function(*args)
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    wanted = [result for result in results if torch.is_tensor(result) and result.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(result) for result in wanted])
    return results, [arg.grad for arg in args if torch.is_tensor(arg) and arg.requires_grad], args


def assert_same(actual, expected):
    """Assert that results are equal: in all bits, or within the resolution of the dtype if operators may be fused."""
    tolerances = {} if OPTIONS["fuse"] else {"rtol": 0, "atol": 0}
    for found, wanted in zip(actual, expected, strict=True):
        if not torch.is_tensor(wanted):
            assert found == wanted
            continue
        assert found.dtype is wanted.dtype and found.shape == wanted.shape and found.stride() == wanted.stride()
        torch.testing.assert_close(found, wanted, equal_nan=True, **tolerances)


def check(function, *args, calls=3, graphs=None, **settings):
    """Assert that a compiled function equals the function with Tritonite enabled, when recorded and when replayed."""
    with tritonite.use_gems():
        expected = run(function, args)
    again = compiled(function, **settings)
    for _ in range(calls):
        for actual, wanted in zip(run(again, args), expected, strict=True):
            assert_same(actual, wanted)
    for graph in backend.graphs:
        assert not graph.reasons and graph.replayed == calls - 1, graph.reasons
    if graphs is not None:
        assert len(backend.graphs) == graphs
    return backend.graphs


def test_calls_are_replayed_from_one_plan(device):
    x, w = torch.randn(3, 8, device=device), torch.randn(8, 8, device=device)
    (graph,) = check(lambda x, w: torch.softmax(functional.gelu(x @ w) + 1, -1), x, w)
    (plan,) = graph.plans
    assert plan.launches == (2 if OPTIONS["fuse"] else 4) and plan.calls == 0
    if not OPTIONS["fuse"]:
        # Two of the three intermediate tensors share memory.
        assert 0 < plan.arena < plan.unplanned


def test_training(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    w = torch.randn(8, 8, device=device, requires_grad=True)
    scale = torch.randn(8, device=device, requires_grad=True)
    check(
        lambda x, w, scale: functional.layer_norm(functional.silu(x @ w), (8,), scale).square().mean(),
        x,
        w,
        scale,
        graphs=2,
    )


def test_arguments_are_changed_in_place(device):
    def function(x, y):
        x.mul_(2)
        y[1] = x[0]
        x[:, 1:3].add_(y[:, :2])
        return x + y

    check(function, torch.randn(3, 4, device=device), torch.randn(3, 4, device=device))


def test_a_change_in_place_is_seen_by_autograd(device):
    function = compiled(lambda x: x.add_(1).sum())
    for _ in range(3):
        x = torch.randn(4, device=device)
        weight = torch.randn(4, device=device, requires_grad=True)
        product = x * weight
        function(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_buffers_of_a_module(device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to(device)
    eager, x = copy.deepcopy(model), torch.randn(2, 3, 6, 6, device=device)
    again = compiled(model)
    for _ in range(3):
        with tritonite.use_gems():
            expected = eager(x)
        assert_same([again(x)], [expected])
        assert_same(model.state_dict().values(), eager.state_dict().values())


def test_results_may_be_views(device):
    def function(x):
        y = x * 2
        return y, y.t(), y[1:], x[1:], x, x.view(-1)

    x = torch.randn(3, 4, device=device)
    check(function, x)
    y, transposed, rows, own, same, flat = compiled(function)(x)
    assert (
        y.untyped_storage().data_ptr() == transposed.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    )
    assert same is x and own.untyped_storage().data_ptr() == flat.data_ptr() == x.data_ptr()


def test_results_do_not_share_memory_with_later_calls(device):
    function = compiled(lambda x: ((x + 1) * 2, (x * 3).exp()))
    kept = [function(torch.full((4,), float(i), device=device)) for i in range(4)]
    for i, (first, _) in enumerate(kept):
        assert (first == 2 * (i + 1)).all()


def test_one_tensor_for_two_arguments(device):
    x, y = torch.randn(4, device=device), torch.randn(4, device=device)
    function = compiled(lambda a, b: torch.where(a > b, a, b * 2) + a)
    for args in ((x, x), (x, y), (y, x), (x, x), (x, y)):
        with tritonite.use_gems():
            expected = torch.where(args[0] > args[1], args[0], args[1] * 2) + args[0]
        assert_same([function(*args)], [expected])


def test_dropout_and_random_numbers(device):
    x = torch.randn(8, 8, device=device, requires_grad=True)
    check(lambda x: functional.dropout(x, 0.4) + torch.rand_like(x) * torch.randn(8, device=x.device), x)


def test_every_call_draws_anew(device):
    function = compiled(lambda x: functional.dropout(x, 0.5))
    x = torch.ones(64, device=device)
    torch.manual_seed(5)
    drawn = [function(x) for _ in range(3)]
    assert not torch.equal(drawn[1], drawn[2])
    torch.manual_seed(5)
    with tritonite.use_gems():
        assert_same(drawn, [functional.dropout(x, 0.5) for _ in range(3)])


def test_autocast_within_a_graph(device):
    def function(x, w):
        with torch.autocast(device, dtype=torch.bfloat16):
            return (x @ w).float().softmax(-1)

    check(function, torch.randn(4, 16, device=device), torch.randn(16, 16, device=device, requires_grad=True))


def test_autocast_around_a_graph(device):
    def within(function):
        def call(*args):
            with torch.autocast(device, dtype=torch.bfloat16):
                return function(*args)

        return call

    function = lambda x, v, w: functional.gelu(x @ v) @ w
    x, v, w = (torch.randn(8, 8, device=device, requires_grad=i > 0) for i in range(3))
    with tritonite.use_gems():
        expected = run(within(function), (x, v, w))
    again = within(compiled(function))
    for _ in range(2):
        for actual, wanted in zip(run(again, (x, v, w)), expected, strict=True):
            assert_same(actual, wanted)


def test_checkpointing(device):
    def block(x, w):
        return functional.dropout(functional.gelu(x @ w), 0.3) @ w

    def function(x, w):
        return (
            checkpoint(block, x, w, use_reentrant=False).sum()
            + checkpoint(functional.silu, x, use_reentrant=False).sum()
        )

    x = torch.randn(4, 8, device=device, requires_grad=True)
    w = torch.randn(8, 8, device=device, requires_grad=True)
    again = compiled(function)
    # On a GPU AOTAutograd draws the random numbers of checkpointed functions in another way than eager execution.
    reference = function if device == "cpu" else torch.compile(function, backend="aot_eager")
    for _ in range(3):
        for actual, wanted in zip(run(again, (x, w)), run(reference, (x, w)), strict=True):
            for found, expected in zip(actual, wanted, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_new_shape_is_recorded_and_not_compiled(device):
    again = compiled(lambda x, w: torch.softmax(x @ w, -1).sum(0) * x.shape[0], dynamic=True)
    w = torch.randn(8, 8, device=device)
    torch._dynamo.utils.counters.clear()
    for rows in (3, 5, 17, 3, 64, 5):
        x = torch.randn(rows, 8, device=device)
        with tritonite.use_gems():
            expected = torch.softmax(x @ w, -1).sum(0) * rows
        assert_same([again(x, w)], [expected])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    (graph,) = backend.graphs
    assert len(graph.plans) == 4 and graph.replayed == 2


def test_the_number_of_plans_is_bounded(device):
    again = compiled(lambda x: x * 2 + 1, dynamic=True, options={"shapes": 2})
    for length in (3, 4, 5, 5):
        x = torch.randn(length, device=device)
        assert_same([again(x)], [x * 2 + 1])
    (graph,) = backend.graphs
    assert len(graph.plans) == 2 and graph.replayed == 1


def test_other_strides_and_alignment(device):
    again = compiled(lambda x: x.softmax(-1) + x, dynamic=True)
    base = torch.randn(8, 9, device=device)
    for x in (base, base[:, 1:], base.t(), base[::2], base[:, ::2], base[1:, 1:]):
        with tritonite.use_gems():
            expected = x.softmax(-1) + x
        for _ in range(2):
            assert_same([again(x)], [expected])


def test_requires_grad_may_differ_from_call_to_call(device):
    again = compiled(lambda x, w: (x @ w).exp())
    x, w = torch.randn(3, 4, device=device), torch.randn(4, 4, device=device)
    for needed in (False, True, False):
        given = w.clone().requires_grad_(needed)
        result = again(x, given)
        assert result.requires_grad is needed
        with torch.no_grad():
            assert not again(x, given).requires_grad


def test_sizes_that_depend_on_data(device):
    def function(x, count):
        picked = torch.nonzero(x > 0)
        number = count.sum().item()
        torch._check(number >= 0)
        torch._check(number <= x.shape[0])
        return (x[:, None] * 2)[picked[:, 0]], (x * 3).narrow(0, 0, number) + 1, picked.shape[0] + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        again = compiled(function)
        for seed in range(4):
            torch.manual_seed(seed)
            x, count = torch.randn(9, device=device), torch.tensor([seed, 1], device=device)
            with tritonite.use_gems():
                expected = function(x, count)
            assert_same(again(x, count), expected)
    (graph,) = backend.graphs
    assert graph.replayed == 3


def test_an_operator_without_a_kernel_runs_in_aten(device):
    x = torch.randn(4, 4, device=device)
    (graph,) = check(lambda x: torch.linalg.eigvals(x * 2).abs().exp(), x)
    (plan,) = graph.plans
    assert any("linalg_eig" in note.operator and note.reason == "no kernel" for note in plan.notes)


def test_an_operator_of_a_user(device):
    with torch.library._scoped_library("tritonite_graph_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x.exp() * 2, "CompositeExplicitAutograd")
        library.impl("twice", torch.empty_like, "Meta")
        twice = torch.ops.tritonite_graph_test.twice
        x = torch.randn(3, device=device)
        with tritonite.use_gems():
            expected = twice(x + 1) * 3
        again = compiled(lambda x: twice(x + 1) * 3)
        for _ in range(3):
            assert_same([again(x)], [expected])


def test_an_operator_outside_aten(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    check(lambda x: tritonite.fused.silu_and_mul(x * 2).sum(), x)


def test_control_flow(device):
    def function(x, flag):
        return torch.cond(flag.sum() > 0, lambda x: x.exp(), lambda x: x * 2, (x,)) + 1

    again = compiled(function)
    x = torch.randn(4, device=device)
    for value in (1, -1, 1, -1):
        flag = torch.tensor([value], device=device)
        with tritonite.use_gems():
            expected = function(x, flag)
        assert_same([again(x, flag)], [expected])


def test_an_error_in_the_middle_of_a_graph(device):
    def function(x, i):
        return (x * 2)[i].exp()

    again = compiled(function)
    x = torch.randn(4, device=device)
    good, bad = torch.tensor([0, 3], device=device), torch.tensor([0, 9], device=device)
    if device != "cpu":
        pytest.skip("an index out of range ends the CUDA context")
    for _ in range(2):
        with pytest.raises(IndexError):
            again(x, bad)
        assert_same([again(x, good)], [function(x, good)])


def test_a_singular_matrix_raises_as_in_eager(device):
    again = compiled(lambda x: torch.linalg.cholesky(x * 2) + 1)
    good, bad = torch.eye(3, device=device), -torch.eye(3, device=device)
    again(good)
    for _ in range(2):
        with pytest.raises(torch.linalg.LinAlgError):
            again(bad)
        again(good)


def test_threads(device):
    again = compiled(lambda x: (x.softmax(-1) @ x.t()).sum(-1))
    values = [torch.randn(4, 4, device=device) for _ in range(4)]
    again(values[0])
    with tritonite.use_gems():
        expected = [(x.softmax(-1) @ x.t()).sum(-1) for x in values]
    actual = [None] * len(values)

    def work(i):
        for _ in range(3):
            actual[i] = again(values[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(values))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert_same(actual, expected)


def test_only_selected_operators_run_as_kernels(device):
    x = torch.randn(8, device=device)
    again = compiled(lambda x: x.exp() * 2, options={"exclude": "exp"})
    again(x)
    (graph,) = backend.graphs
    assert [note.reason for note in graph.plans[0].notes] == ["no kernel", ""]


def test_unknown_options_and_modes():
    for settings in ({"mode": "max-autotune"}, {"options": {"shape": 3}}):
        with pytest.raises(Exception, match="tritonite"):
            torch.compile(lambda x: x + 1, backend="tritonite", **settings)(torch.randn(3))


def test_settings_in_force_hold_for_a_graph(device):
    x, w = torch.randn(3, 8, device=device), torch.randn(8, 8, device=device)
    again = compiled(lambda x, w: (x @ w).softmax(-1))
    again(x, w)
    with tritonite.use_gems(invariant=True):
        expected = (x @ w).softmax(-1)
        assert_same([again(x, w)], [expected])
    (graph,) = backend.graphs
    assert len(graph.plans) == 2


def test_explain_shows_the_plans(device):
    again = torch.compile(lambda x: torch.linalg.matrix_exp(x).exp().t(), backend="tritonite")
    assert "call it once" in tritonite.explain(again)
    again(torch.eye(3, device=device))
    text = tritonite.explain(again)
    for part in ("inference", "1 recorded", "arena of", "1 launch", "ATen: no kernel", "view"):
        assert part in text
    weight = torch.randn(3, device=device, requires_grad=True)
    model = torch.compile(nn.Linear(3, 3, device=device), backend="tritonite")
    (model(weight) * 2).sum().backward()
    assert "(forward)" in tritonite.explain(model) and "(backward)" in tritonite.explain(model)


def test_replayed_calls_are_counted(device):
    again = compiled(lambda x: x.exp() * 2)
    x = torch.randn(8, device=device)
    again(x)
    tritonite.reset_stats()
    again(x)
    again(x)
    names = ("tritonite::pointwise_program",) if OPTIONS["fuse"] else ("exp", "mul.Tensor")
    assert all(tritonite.stats()[name].replayed == 2 for name in names)


def test_an_input_is_freed_after_its_last_use(device):
    again = compiled(lambda x: torch.linalg.matrix_exp(x * 2) + 1)
    again(torch.eye(3, device=device))
    (graph,) = backend.graphs
    (plan,) = graph.plans
    steps = [type(step).__name__ for step in plan.steps]
    assert steps[:2] == ["LaunchStep", "FreeStep"] and plan.steps[1].inputs == (0,)
    # The result gets its memory when the last launch needs it.
    assert steps[-2:] == ["LaunchStep", "FreeStep"] and "AllocateStep" in steps[-3:]
