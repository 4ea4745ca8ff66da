"""Enabling, scopes and names."""

import asyncio
import threading
import warnings

import pytest
import scripts
import torch

import tritonite
from tritonite.errors import UnknownOperator
from tritonite.install.override import installed, registered

pytestmark = [pytest.mark.smoke, pytest.mark.host]


def launched(name):
    counts = tritonite.stats().get(name)
    return counts.launched + counts.replayed if counts else 0


def test_enable_serves_and_disable_stops(device):
    x = torch.ones(3, device=device)
    tritonite.enable()
    x + x
    tritonite.disable()
    x + x
    assert launched("add.Tensor") == 1


def test_everything_listed_is_installed_and_removed():
    with tritonite.use_gems():
        assert installed() == {name for name, op in tritonite.overloads().items() if op.has_place and op.verified}
    assert not installed()


@pytest.mark.parametrize("bare", [True, False])
def test_a_scope_decorates_functions(bare):
    def inside():
        """What it says."""
        return bool(installed())

    decorated = tritonite.use_gems(inside) if bare else tritonite.use_gems(include="add")(inside)
    assert decorated() and decorated() and decorated.__doc__ == "What it says." and not installed()


def test_a_decorated_generator_has_the_scope_while_it_runs_alone():
    seen = []

    @tritonite.use_gems
    def numbers():
        try:
            seen.append(bool(installed()))
            sent = yield 1
            seen.append(bool(installed()))
            yield sent
        except ValueError:
            yield bool(installed())
        finally:
            seen.append(bool(installed()))
        return 3

    running = numbers()
    assert next(running) == 1 and not installed()
    assert running.send(2) == 2 and not installed()
    assert running.throw(ValueError) is True and not installed()
    with pytest.raises(StopIteration, match="3"):
        next(running)
    other = numbers()
    next(other)
    other.close()
    assert seen == [True] * 5 and not installed()


def test_a_decorated_coroutine_has_the_scope_while_it_runs_alone():
    seen = []

    @tritonite.use_gems()
    async def inside():
        seen.append(bool(installed()))
        await asyncio.sleep(0)
        seen.append(bool(installed()))
        return 4

    async def outside():
        await asyncio.sleep(0)
        seen.append(bool(installed()))

    async def both():
        return await asyncio.gather(inside(), outside(), inside())

    assert asyncio.run(both()) == [4, None, 4]
    assert sorted(seen) == [False, True, True, True, True] and not installed()


def test_one_scope_is_entered_twice():
    scope = tritonite.use_gems(include="add")
    with scope:
        with scope:
            assert installed()
        assert installed()
    assert not installed()


def test_disable_within_a_scope_leaves_it_in_force_until_it_ends(device):
    tritonite.enable()
    with tritonite.use_gems(include="add"):
        tritonite.disable()
        torch.ones(3, device=device) + 1
        assert launched("add.Tensor") == 1
    assert not installed() and not registered()


def test_scope_restores_after_an_exception():
    with pytest.raises(ZeroDivisionError), tritonite.use_gems():
        raise ZeroDivisionError
    assert not installed()


def test_the_innermost_scope_decides():
    tritonite.enable(exclude="mul")
    outer = installed()
    with tritonite.use_gems(include="mul"):
        assert {name.partition(".")[0] for name in installed()} == {"mul", "mul_"}
        with tritonite.use_gems(include=["add.Tensor"]):
            assert installed() == {"add.Tensor"}
        assert "mul.Tensor" in installed()
    assert installed() == outer


def test_enable_within_a_scope_takes_effect_after_it():
    with tritonite.use_gems(include="add"):
        tritonite.enable(include="mul")
        assert "mul.Tensor" not in installed()
    assert "mul.Tensor" in installed()


def test_scopes_may_end_in_any_order():
    first, second = tritonite.use_gems(include="add"), tritonite.use_gems(include="mul")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "mul.Tensor" in installed()
    second.__exit__(None, None, None)
    assert not installed()


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("add", "add_.Tensor", "addcmul"),
        ("add.Tensor", "add.Tensor", "add.out"),
        ("bitwise_*", "bitwise_and_.Scalar", "add.Tensor"),
        ("abs.default", "abs", "abs.out"),
        (["relu", "exp"], "exp_", "tanh"),
    ],
)
def test_names(pattern, inside, outside):
    with tritonite.use_gems(include=pattern):
        assert inside in installed()
        assert outside not in installed()
    with tritonite.use_gems(exclude=pattern):
        assert inside not in installed()
        assert outside in installed()


def test_unknown_names_list_similar_names():
    with pytest.raises(UnknownOperator, match="did you mean 'sigmoid'"):
        tritonite.enable(include="sigmoidd")
    assert not installed()


def test_user_kernel_is_there_again_afterwards(device):
    key = tritonite.backend.dispatch_key
    library = torch.library.Library("aten", "IMPL")
    library.impl("special_bessel_j0", lambda x: torch.full_like(x, 42.0), key)
    x = torch.rand(3, device=device)
    try:
        with tritonite.use_gems():
            assert torch.special.bessel_j0(x)[0] != 42
            assert torch.special.bessel_j0(x.to(torch.complex64))[0] == 42
        assert torch.special.bessel_j0(x)[0] == 42
    finally:
        library._destroy()


def test_user_kernel_in_place_of_another_is_noticed(device):
    key = tritonite.backend.dispatch_key
    other, library = torch.library.Library("aten", "IMPL"), torch.library.Library("aten", "IMPL")
    other.impl("linalg_cholesky_ex", lambda *args: None, key)
    with tritonite.use_gems():
        pass
    other._destroy()
    library.impl("special_bessel_j0", lambda x: torch.full_like(x, 42.0), key)
    try:
        with tritonite.use_gems():
            assert torch.special.bessel_j0(torch.rand(3, device=device))[0] != 42
    finally:
        library._destroy()


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tritonite.use_gems():
            pass


def test_threads_see_the_override(device):
    x = torch.ones(8, device=device)
    results = []
    with tritonite.use_gems(include="add"):
        threads = [threading.Thread(target=lambda: results.append((x + 1).sum().item())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [16.0] * 4
    assert launched("add.Tensor") == 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_may_be_another():
    for name in ("cuda:1", "cuda:0", "cuda:1"):
        x = torch.randn(40, device=name)
        side = torch.cuda.Stream(name)
        expected = x.exp() * 2.5
        side.wait_stream(torch.cuda.current_stream(x.device))
        with tritonite.use_gems():
            torch.testing.assert_close(x.exp() * 2.5, expected)
            with torch.cuda.stream(side):
                torch.testing.assert_close(x.exp() * 2.5, expected)
            torch.testing.assert_close(torch.add(x, x, out=torch.empty_like(x)), x * 2)
        assert torch.cuda.current_device() == 0
    assert not tritonite.stats()["exp"].declined


def test_counts_and_reset(device):
    with tritonite.use_gems(include="add"):
        x = torch.ones(3, device=device)
        x + x
        x + x.to(torch.complex64)
    counts = tritonite.stats()["add.Tensor"]
    assert (counts.replayed + counts.launched, counts.declined) == (1, {"dtype torch.complex64": 1})
    tritonite.reset_stats()
    assert tritonite.stats() == {}


def test_importing_does_not_import_dynamo():
    code = "import sys, tritonite, tritonite.fused; assert 'torch._dynamo' not in sys.modules"
    scripts.run(code)


def test_graph_breaks_do_not_trace_tritonite(device, path):
    model = torch.nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step(x):
        model(x).sum().backward()
        optimizer.step()

    before = model.weight.detach().clone()
    tritonite.enable()
    torch.compile(step, backend="eager")(torch.randn(2, 4, device=device))
    assert launched("addmm") == 1 and launched("add_.Tensor") == 2
    assert not torch.equal(model.weight, before)


def test_a_scope_in_a_compiled_function_is_a_graph_break(device, path):
    def function(x):
        x = x + 1
        with tritonite.use_gems(include="exp"):
            y = x.exp()
        return y * 2 + torch.exp(x)

    x = torch.randn(4, device=device)
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), 3 * (x + 1).exp())
    assert launched("exp") == 2 and not installed()
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Tritonite"):
        torch.compile(function, backend="eager", fullgraph=True)(x)
