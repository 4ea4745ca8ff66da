"""The native dispatcher: keys, declines, threads, scopes; without a GPU on CPU tensors and in the interpreter."""

import gc
import os
import threading

import pytest
import scripts
import torch
from torch.utils import _pytree as pytree

import tritonite
from tritonite.registry.names import overload_named
from tritonite.runtime import launch, native
from tritonite.runtime.interpreted import InterpretedCall
from tritonite.testing.judge import poisoned
from tritonite.testing.samples import samples

pytestmark = pytest.mark.usefixtures("through_native", "no_plans")


def check(overload, *calls, replayed):
    """Make the calls, compare each with ATen's, and count how many were replayed."""
    for call in calls:
        with tritonite.use_gems():
            actual = call()
        expected = call()
        torch.testing.assert_close(actual, expected)
        assert actual.stride() == expected.stride()
    counts = tritonite.stats()[overload]
    assert counts.replayed == replayed, counts
    assert counts.replayed + counts.launched + sum(counts.declined.values()) == len(calls)


def test_the_second_call_replays(device):
    x, y = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)
    check("add.Tensor", *[lambda: x + y] * 3, replayed=2)


def test_sizes_are_in_the_key(device):
    x = torch.randn(8, 6, device=device)
    check("exp", lambda: x.exp(), lambda: x[:4].exp(), lambda: x[:, :1].exp(), replayed=0)


def test_strides_are_in_the_key(device):
    x, y = torch.randn(6, 6, device=device), torch.randn(6, 6, device=device)
    check("add.Tensor", lambda: x + y, lambda: x + y.t(), lambda: x.t() + y.t(), replayed=0)


def test_dtypes_are_in_the_key(device):
    x = torch.ones(5, dtype=torch.int32, device=device)
    check("add.Tensor", lambda: x + x, lambda: x.float() + x, lambda: x + x.float(), replayed=0)


def test_alignment_is_in_the_key(device):
    x = torch.randn(33, device=device)
    check("exp", lambda: x[:32].exp(), lambda: x[1:].exp(), lambda: x[1:].exp(), replayed=1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices_are_in_the_key():
    x, y = (torch.ones(5, device=f"cuda:{i}") for i in (0, 1))
    check("exp", lambda: x.exp(), lambda: y.exp(), lambda: y.exp(), replayed=1)


def test_shared_memory_is_in_the_key(device):
    x, y = torch.randn(6, device=device), torch.randn(6, device=device)
    check("add_.Tensor", lambda: x.clone().add_(y), lambda: (z := x.clone()).add_(z), replayed=0)
    tritonite.reset_stats()
    buffer = torch.arange(12.0, device=device)
    with tritonite.use_gems():
        for by in (6, 6, 3, 3, 6):
            if by == 6:
                assert torch.add(buffer[:6], 1, out=buffer[by : by + 6]).tolist() == [1, 2, 3, 4, 5, 6]
                continue
            with pytest.raises(RuntimeError, match=r"overlap|memory location"):
                torch.add(buffer[:6], 1, out=buffer[by : by + 6])
    counts = tritonite.stats()["add.out"]
    assert (counts.replayed, counts.launched, counts.declined) == (2, 1, {"output overlaps an input": 2})


def test_types_of_numbers_are_in_the_key_but_not_their_values(device):
    x, i = torch.randn(6, device=device), torch.arange(6, device=device)
    check("mul.Tensor", *[lambda s=s: x * s for s in (0.1, 0.2, -3.5)], replayed=2)
    check("add.Tensor", *[lambda a=a: torch.add(x, x, alpha=a) for a in (0.5, 2.5, 7.0)], replayed=2)
    check("sub.Tensor", *[lambda a=a: x - a for a in (0.5, 2.5, 7.0)], replayed=2)
    check("clamp", *[lambda a=a: x.clamp(-a, a) for a in (0.5, 0.25, 1.0)], replayed=2)
    check("rsub.Scalar", *[lambda a=a: torch.rsub(x, a, alpha=a + 1) for a in (0.5, 2.5, 7.0)], replayed=2)
    tritonite.reset_stats()
    check("mul.Tensor", lambda: i * 2, lambda: i * 2.0, lambda: i * True, lambda: i * 5, replayed=1)


def test_numbers_that_decide_the_kernel_are_in_the_key(device):
    x = torch.randn(6, device=device)
    check("softshrink", *[lambda a=a: torch.nn.functional.softshrink(x, a) for a in (0.1, 0.7)], replayed=0)
    check("polygamma", lambda: torch.polygamma(1, x), lambda: torch.polygamma(2, x), replayed=0)
    check("div.Tensor_mode", *[lambda m=m: torch.div(x, 0.3, rounding_mode=m) for m in ("floor", "trunc")], replayed=0)
    check("clamp", lambda: x.clamp(0.0, 1.0), lambda: x.clamp(0.0), lambda: x.clamp(max=0.5), replayed=0)


def test_omitted_tensors_are_in_the_key(device):
    x, low, high = (torch.randn(6, device=device) for _ in range(3))
    for replayed in (3, 6):
        tritonite.reset_stats()
        calls = [lambda: torch.clamp(x, low), lambda: torch.clamp(x, max=high), lambda: torch.clamp(x, low, high)]
        check("clamp.Tensor", *calls, *calls, replayed=replayed)
        out = torch.empty_like(x)
        with tritonite.use_gems():
            torch.clamp(x, max=high, out=out)
        assert torch.equal(out, torch.clamp(x, max=high))


def test_numbers_that_do_not_fit_go_to_aten(device):
    i = torch.arange(6, dtype=torch.int8, device=device)
    check("add.Tensor", lambda: i + 1, lambda: i + 1000, lambda: i + 2, replayed=1)
    assert tritonite.stats()["add.Tensor"].declined == {"a number outside the range that kernels serve": 1}


def outcome(function, *args, **kwargs):
    """Return what a call returns, or the text of the error that it raises."""
    try:
        return function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


NUMBERED = [
    (name, argument)
    for name, op in tritonite.overloads().items()
    for _, argument, kind in op.enumerations
    if kind is not torch.dtype and op.has_place and not op.out_names
]


@pytest.mark.declines("the integers name no dtype")
@pytest.mark.parametrize(("name", "argument"), NUMBERED)
def test_unknown_enumerators_go_to_aten(name, argument, device):
    """Through Python, PyTorch itself reads beyond its tables for them before it calls a kernel."""
    op, function = tritonite.overloads()[name], overload_named(name)
    sample = next(iter(samples(op, torch.float32, device)))
    for number in (-1, 100):
        kwargs = {**sample.kwargs, argument: number}
        torch.manual_seed(0)
        expected, found = outcome(function, *sample.args, **kwargs), []
        tritonite.reset_stats()
        with tritonite.use_gems(include=[name if "." in name else f"{name}.default"]):
            for _ in range(2):
                torch.manual_seed(0)
                found.append(outcome(function, *sample.args, **kwargs))
        if argument == "memory_format":
            # For an unknown layout PyTorch's dispatcher looks for no kernel.
            assert tritonite.stats()[name].declined == {"an integer that names no dtype, layout or memory format": 2}
        for each in found:
            if isinstance(expected, str):
                assert each == expected
                continue
            for ours, theirs in zip(pytree.tree_leaves(each), pytree.tree_leaves(expected), strict=True):
                assert ours.stride() == theirs.stride() and ours.layout is theirs.layout
                torch.testing.assert_close(ours, theirs)


def test_ambient_settings_are_in_the_key(device):
    i = torch.arange(1, 6, device=device)
    with tritonite.use_gems():
        assert (i / 2).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (i / 2).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(True)
        try:
            assert (i / 2).tolist() == [0.5, 1.0, 1.5, 2.0, 2.5]
        finally:
            torch.use_deterministic_algorithms(False)
    assert tritonite.stats()["div.Tensor"].replayed == 0


def test_declines_are_remembered(device):
    x = torch.randn(4, dtype=torch.complex64, device=device)
    check("add.Tensor", *[lambda: x + x] * 3, replayed=0)
    assert tritonite.stats()["add.Tensor"].declined == {"dtype torch.complex64": 3}
    sparse = torch.eye(3, device=device).to_sparse()
    with tritonite.use_gems():
        assert torch.equal((sparse * 2).to_dense(), torch.eye(3, device=device) * 2)


def test_explain_shows_recorded_plans(device):
    x = torch.randn(4, device=device)
    for call, arguments in ((lambda: x * 0.5, (x, 0.5)), (lambda: x + x, (x, x))):
        name = "mul.Tensor" if arguments[1] is not x else "add.Tensor"
        assert "next call is recorded" in tritonite.explain(name, *arguments)
        with tritonite.use_gems():
            call()
            assert "replayed from a plan" in tritonite.explain(name, *arguments)
    z = x.to(torch.complex64)
    with tritonite.use_gems():
        z * z
    assert "remembered" in tritonite.explain("mul.Tensor", z, z)


def test_lazy_clones_are_materialised_before_writes(device):
    x = torch.zeros(6, device=device)
    with tritonite.use_gems(include="add"):
        for _ in range(3):
            clone = torch._lazy_clone(x)
            clone.add_(1)
            assert clone.tolist() == [1.0] * 6 and x.tolist() == [0.0] * 6
    assert tritonite.stats()["add_.Tensor"].replayed == 2


def test_several_outputs_and_given_outputs(device):
    x = torch.randn(5, device=device)
    expected = torch.frexp(x)
    mantissa, exponent = torch.empty_like(x), torch.empty(5, dtype=torch.int32, device=device)
    for _ in range(2):
        mantissa.zero_(), exponent.zero_()
        with tritonite.use_gems():
            fresh, given = torch.frexp(x), torch.frexp(x, out=(mantissa, exponent))
            assert x.add_(0) is x
        assert given[0] is mantissa and given[1] is exponent
        for actual in (fresh, given):
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    counts = tritonite.stats()
    assert [counts[name].replayed for name in ("frexp.Tensor", "frexp.Tensor_out", "add_.Tensor")] == [1, 1, 1]


def test_empty_and_zero_dim(device):
    x = torch.randn(0, 3, device=device)
    check("exp", *[lambda: x.exp()] * 2, replayed=1)
    y = torch.randn((), device=device)
    check("sin", *[lambda: y.sin()] * 2, replayed=1)


def test_products_without_elements(device):
    a, b = torch.randn(5, 0, device=device).bfloat16(), torch.randn(0, 8, device=device).bfloat16()
    check("mm", *[lambda: a @ b] * 2, replayed=1)


def test_replayed_outputs_are_written(device):
    x = torch.randn(40, 50, device=device)[:, ::3]
    with poisoned():
        check("exp", *[lambda: x.exp()] * 2, replayed=1)


def test_the_least_used_plan_is_evicted(device, dispatcher):
    dispatcher.set_most_plans(3)
    try:
        sizes = (1, 2, 3, 1, 4)
        check("exp", *[lambda n=n: torch.ones(n, device=device).exp() for n in sizes], replayed=1)
        assert dispatcher.counts("exp")[2] == 3
        tritonite.reset_stats()
        check("exp", *[lambda n=n: torch.ones(n, device=device).exp() for n in (1, 3, 4, 2)], replayed=3)
    finally:
        dispatcher.set_most_plans(1024)


def test_a_failure_leaves_the_cache_usable(device, dispatcher, monkeypatch):
    x = torch.ones(5, device=device)

    def fail(*_):
        raise MemoryError("full")

    with tritonite.use_gems():
        with monkeypatch.context() as patch:
            patch.setattr(launch.Launch, "__call__", fail)
            with pytest.raises(MemoryError, match="full"):
                x.exp()
        for _ in range(2):
            torch.testing.assert_close(x.exp(), torch.full_like(x, 2.718281828))
    assert tritonite.stats()["exp"].replayed == 1


def test_many_threads(device):
    ops = (torch.add, torch.mul, torch.maximum, torch.sub)
    failures = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(12):
            n = int(torch.randint(1, 5, (), generator=generator))
            x, y = torch.rand(n, generator=generator), torch.rand(n, generator=generator)
            op = ops[int(torch.randint(len(ops), (), generator=generator))]
            expected = getattr(x.numpy(), f"__{op.__name__}__", None)
            actual = op(x.to(device), y.to(device)).cpu()
            wanted = torch.from_numpy(expected(y.numpy())) if expected else torch.where(x > y, x, y)
            if not torch.equal(actual, wanted):
                failures.append((op, x, y))

    with tritonite.use_gems(include=["add", "mul", "maximum", "sub"]):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert sum(counts.replayed for counts in tritonite.stats().values()) > 0


def test_scopes_change_while_other_threads_call(device):
    x, stop, failures = torch.ones(4, device=device), threading.Event(), []

    def work():
        while not stop.is_set():
            if not torch.equal(x + x, torch.full_like(x, 2.0)):
                failures.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(60):
        with tritonite.use_gems(include="add"), tritonite.use_gems(include="mul"):
            pass
    stop.set()
    thread.join()
    assert not failures


def test_a_users_kernel_is_registered_and_removed(device):
    x = torch.rand(3, dtype=torch.complex64, device=device)
    library = torch.library.Library("aten", "IMPL")
    library.impl("exp2", lambda x: torch.full_like(x, 42.0), tritonite.backend.dispatch_key)
    try:
        with tritonite.use_gems():
            assert torch.exp2(x)[0] == 42
    finally:
        library._destroy()
    with tritonite.use_gems():
        torch.testing.assert_close(torch.exp2(x), 2**x)


@pytest.mark.skipif(tritonite.device != "cpu", reason="a GPU's context does not survive a fork")
def test_a_forked_child_replays():
    x = torch.ones(4)
    with tritonite.use_gems(include="add"):
        _ = x + x
        child = os.fork()
        if not child:
            os._exit(0 if (x + x).tolist() == [2.0] * 4 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_plans_hold_no_tensors(device):
    before = len([o for o in gc.get_objects() if type(o) is torch.Tensor])
    with tritonite.use_gems(include="exp"):
        for n in range(1, 9):
            torch.ones(n, device=device).exp()
    gc.collect()
    assert len([o for o in gc.get_objects() if type(o) is torch.Tensor]) <= before + 1


on_host = pytest.mark.skipif(tritonite.device != "cpu", reason="a replay on a GPU runs no Python to count")
on_a_gpu = pytest.mark.skipif(tritonite.device == "cpu", reason="streams and graphs are a GPU's")


@on_a_gpu
def test_numbers_on_the_device_go_to_aten():
    """ATen's pow of a number makes a tensor of it on the device, which still counts as a number."""
    z = torch.randn(5, dtype=torch.complex64, device="cuda")
    check("pow.Scalar", *[lambda: torch.pow(2, z)] * 3, replayed=0)
    assert tritonite.stats()["pow.Tensor_Tensor_out"].declined == {"a number on the device": 3}


def test_calls_go_through_python_without_a_compiler(monkeypatch, tmp_path, device):
    monkeypatch.setenv("TRITONITE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    native.module.cache_clear()
    with pytest.warns(UserWarning, match="slower Python path"):
        assert native.module() is None
    native.module.cache_clear()


_ROTATES = """
import torch
from tritonite import device, fused
from tritonite.install import override
query, angles = torch.randn(2, 5, 3, 8, device=device), torch.randn(5, 4, device=device)
assert override.native_dispatcher() is not None
version = query._version
for _ in range(2):
    fused.rotary_embedding_(query, None, angles.cos(), angles.sin())
print(query._version - version)
"""


def test_an_operator_outside_aten_counts_versions():
    """Calls bump the version of arguments that they write. The call path is chosen at registration, once a process."""
    assert scripts.run(_ROTATES, TRITONITE_NATIVE="1").split() == ["2"]


@pytest.fixture
def interpreted(monkeypatch):
    """Return the list of the names of kernels that run in the interpreter from then on, by `Launch` or a plan."""
    names = []
    run, replay = launch.Launch._interpret, InterpretedCall.__call__

    def noting(self, values):
        names.append(self.specialization.kernel.__name__)
        run(self, values)

    def noting_replay(self, leaves, grid):
        names.append(self.kernel.__name__)
        replay(self, leaves, grid)

    monkeypatch.setattr(launch.Launch, "_interpret", noting)
    monkeypatch.setattr(InterpretedCall, "__call__", noting_replay)
    return names


@on_host
def test_a_table_is_written_again_only_for_other_addresses_or_numbers(interpreted):
    xs, others = ([torch.ones(n) for n in (3, 5)] for _ in range(2))
    calls = [(xs, [1.0, 2.0]), (xs, [1.0, 2.0]), (xs, [1.0, 2.0]), (others, [1.0, 2.0]), (others, [3.0, 2.0])]
    written = []
    with tritonite.use_gems():
        for tensors, numbers in calls:
            torch._foreach_mul_(tensors, numbers)
            written.append(interpreted.count("write_table") > 0)
            interpreted.clear()
    # The first call is recorded, and keeps no table.
    assert written == [True, True, False, True, True]
    assert [x[0].item() for x in (*xs, *others)] == [1, 8, 3, 4]


@on_host
def test_a_table_has_the_addresses_of_fresh_results(interpreted):
    xs = [torch.ones(3), torch.ones(5)]
    with tritonite.use_gems():
        results = [torch._foreach_add(xs, 1) for _ in range(3)]
    assert all(x.eq(2).all() for result in results for x in result)
    assert interpreted.count("elementwise_list") == 3


def test_numbers_in_a_cpu_tensor_are_read_on_each_call(dispatcher):
    xs, scalars = [torch.ones(3, device=tritonite.device), torch.ones(5, device=tritonite.device)], torch.ones(2)
    with tritonite.use_gems():
        for number in (2.0, 3.0):
            scalars.fill_(number)
            found = torch._foreach_addcmul(xs, xs, xs, scalars)
            assert [x[0].item() for x in found] == [1 + number] * 2
    counts = tritonite.stats()["_foreach_addcmul.Tensor"]
    assert counts.launched == 2 and not counts.replayed and not counts.declined
