"""The native dispatcher: keys, plans, declines; where there is no GPU, on CPU tensors and in the interpreter."""

import gc
import os
import struct
import subprocess
import sys
import threading
import types
import weakref

import pytest
import torch
import triton
import triton.language as tl
from conftest import calls_through
from triton.tools.tensor_descriptor import TensorDescriptor

import tritonite
from tritonite.install import override
from tritonite.registry.names import overload_named
from tritonite.runtime import launch, native
from tritonite.runtime.contract import random_state
from tritonite.runtime.recorder import Recorder, record
from tritonite.testing.judge import poisoned
from tritonite.testing.samples import samples
from tritonite.testing.stand_in import standing_in


@pytest.fixture(scope="module", autouse=True)
def through_native():
    """This module's calls go through the native dispatcher, where the others' go through Python."""
    with calls_through("native"):
        yield


@pytest.fixture
def dispatcher():
    return override.native_dispatcher()


@pytest.fixture(autouse=True)
def no_plans(dispatcher):
    for name in tritonite.overloads():
        dispatcher.clear(name)


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


def test_what_shares_memory_is_in_the_key(device):
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


def test_numbers_types_are_in_the_key_and_their_values_are_not(device):
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


def test_tensors_not_given_keep_their_place(device):
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
def test_ints_that_name_nothing_go_to_aten(name, argument, device):
    """Through Python PyTorch itself reads beyond its tables for them, before it calls a kernel."""
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
            # For a layout that there is not PyTorch's dispatcher looks for no kernel.
            assert tritonite.stats()[name].declined == {"an integer that names no dtype, layout or memory format": 2}
        for each in found:
            if isinstance(expected, str):
                assert each == expected
                continue
            assert each.stride() == expected.stride() and each.layout is expected.layout
            torch.testing.assert_close(each, expected)


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


def test_explain_shows_what_is_kept(device):
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


def test_lazy_clones_are_written_apart(device):
    x = torch.zeros(6, device=device)
    with tritonite.use_gems(include="add"):
        for _ in range(3):
            clone = torch._lazy_clone(x)
            clone.add_(1)
            assert clone.tolist() == [1.0] * 6 and x.tolist() == [0.0] * 6
    assert tritonite.stats()["add_.Tensor"].replayed == 2


def test_several_outputs_and_given_ones(device):
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


def test_products_of_nothing(device):
    a, b = torch.randn(5, 0, device=device).bfloat16(), torch.randn(0, 8, device=device).bfloat16()
    check("mm", *[lambda: a @ b] * 2, replayed=1)


def test_replayed_outputs_are_written(device):
    x = torch.randn(40, 50, device=device)[:, ::3]
    with poisoned():
        check("exp", *[lambda: x.exp()] * 2, replayed=1)


def test_plans_are_few_and_the_least_used_goes_first(device, dispatcher):
    dispatcher.set_most_plans(3)
    try:
        sizes = (1, 2, 3, 1, 4)
        check("exp", *[lambda n=n: torch.ones(n, device=device).exp() for n in sizes], replayed=1)
        assert dispatcher.counts("exp")[2] == 3
        tritonite.reset_stats()
        check("exp", *[lambda n=n: torch.ones(n, device=device).exp() for n in (1, 3, 4, 2)], replayed=3)
    finally:
        dispatcher.set_most_plans(1024)


def test_a_failure_leaves_the_cache_sound(device, dispatcher, monkeypatch):
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


def test_scopes_come_and_go_while_others_call(device):
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


def test_a_users_kernel_comes_and_goes(device):
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


@tritonite.libentry()
@triton.jit
def _scale(source, target, factor, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets, mask=offsets < n) * factor, mask=offsets < n)


def _twice_the_tail(xs):
    """A host function: a temporary, views, two launches, a view as its result, a list as its argument."""
    temporary = torch.empty_like(xs[1])
    _scale[(1,)](xs[1], temporary, 2.0, xs[1].numel(), BLOCK=16)
    result = torch.empty(xs[1].numel(), device=xs[1].device)
    _scale[(1,)](temporary[2:], result.view(-1, 1)[2:], 1.0, xs[1].numel() - 2, BLOCK=16)
    return result[2:]


def _recorded(run, *leaves):
    results, recorder = record(lambda: (run(),), leaves)
    return results, recorder.plan(results), recorder.reason


def test_a_host_function_is_recorded(device):
    xs = [torch.zeros(2, device=device), torch.arange(8.0, device=device)]
    results, made, reason = _recorded(lambda: _twice_the_tail(xs), *xs)
    assert results[0].tolist() == [4.0, 6.0, 8.0, 10.0, 12.0, 14.0] and not reason
    assert [len(step.parameters) for step in made.launches] == ([2, 2] if tritonite.device == "cpu" else [6, 6])
    sources = [[p[:3] for p in step.parameters if type(p) is tuple and len(p) == 4] for step in made.launches]
    assert sources == [[(False, 1, 0), (True, 0, 0)], [(True, 0, 8), (True, 1, 8)]]
    assert made.results == [((True, 1, 8), ((6,), (1,), torch.float32))]


def test_constants_have_their_parameters_types(device):
    recorder = Recorder([])

    class Compiled:
        metadata = types.SimpleNamespace(num_warps=4, shared=0)
        function = 1

    recorder.add(["fp64", "i32", "fp32", "i64", "i1"], [1, 7, 2, -1, True], (1, 1, 1), Compiled(), print)
    made = recorder.plan([])
    expected = [struct.unpack("<Q", struct.pack("<d", 1.0))[0], 7, 0x40000000, 2**64 - 1, 1, 0, 0]
    assert made.launches[0].parameters == expected


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x: x.t().exp(), "aten.exp"),
        (lambda x: x.cumsum(0), "aten.cumsum"),
        (lambda x: torch.ones(2, device=x.device), "the host function calls"),
    ],
)
def test_what_no_plan_repeats_is_counted(device, run, reason):
    x = torch.randn(3, 4, device=device)
    results, made, told = _recorded(lambda: run(x), x)
    assert made is None and reason in told and len(results) == 1


def test_lists_views_and_temporaries_replay(device, dispatcher):
    with standing_in("cat", lambda xs, dim: _twice_the_tail(xs)) as calls:
        for start in (0.0, 3.0):
            xs = [torch.zeros(2, device=device), torch.arange(8.0, device=device) + start]
            assert torch.cat(xs).tolist() == [2 * (start + i) for i in range(2, 8)]
        assert len(calls) == 1 and dispatcher.counts("cat")[0] == 1
        assert torch.cat(xs[:1] + xs).tolist() != torch.cat(xs).tolist()
        assert len(calls) == 2


@tritonite.libentry()
@triton.jit(do_not_specialize=["seed", "offset"])
def _noise(target, seed: tl.int64, offset: tl.int64, BLOCK: tl.constexpr):
    counters = tl.arange(0, BLOCK)
    tl.store(target + counters, tl.rand(seed, offset.to(tl.int32) + counters))


def _drawn(x, generator):
    target = torch.empty_like(x)
    _noise[(1,)](target, *random_state(x.device, 4, generator), BLOCK=8)
    return target


def test_random_numbers_are_drawn_anew(device, dispatcher):
    x = torch.zeros(8, device=device)
    with standing_in("bernoulli", _drawn) as calls:
        torch.manual_seed(5)
        first = [torch.bernoulli(x) for _ in range(3)]
        torch.manual_seed(5)
        again = [torch.bernoulli(x) for _ in range(3)]
        assert len(calls) == 1 and not torch.equal(first[0], first[1])
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        own = [torch.bernoulli(x, generator=torch.Generator(device).manual_seed(5)) for _ in range(2)]
        assert len(calls) == 2 and torch.equal(*own) and torch.equal(own[0], first[0])


@tritonite.libentry()
@triton.jit
def _through_descriptor(source, target, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(target + offsets, source.load([0, 0]) * 2)


def _doubled(x):
    target = torch.empty_like(x)
    _through_descriptor[(1,)](TensorDescriptor.from_tensor(x, [16, 16]), target, ROWS=16, COLUMNS=16)
    return target


@tritonite.libentry()
@triton.jit
def _with_scratch(source, target, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    descriptor = tl.make_tensor_descriptor(source, [ROWS, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS])
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(target + offsets, descriptor.load([0, 0]) * 2)


def _doubled_with_scratch(x):
    target = torch.empty_like(x)
    _with_scratch[(1,)](x, target, ROWS=16, COLUMNS=16)
    return target


def _doubled_by(**options):
    def host(x):
        target = torch.empty_like(x)
        _scale[(1,)](x, target, 2.0, x.numel(), BLOCK=256, **options)
        return target

    return host


@pytest.mark.parametrize(
    "host",
    [_doubled, _doubled_with_scratch, _doubled_by(num_ctas=2), _doubled_by(launch_cooperative_grid=True)],
    ids=["descriptor", "scratch", "cluster", "cooperative"],
)
def test_what_launches_may_need(device, dispatcher, host):
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.uint8, device=device))
    # Several sizes, so that later tensors have other addresses.
    xs = [torch.randn(16 + n, 16, device=device)[n:] for n in range(4)]
    with standing_in("tril", lambda x, diagonal: host(x)) as calls:
        for x in xs:
            assert torch.equal(torch.tril(x), 2 * x)
        assert len(calls) == 1


@pytest.fixture
def altered_launches(monkeypatch):
    """Return a list of functions that alter recorded launches."""
    changes = []
    plan_of = Recorder.plan

    def altered(recorder, results):
        made = plan_of(recorder, results)
        for change in changes:
            made.steps = [change(step) for step in made.steps]
        return made

    monkeypatch.setattr(Recorder, "plan", altered)
    return changes


def test_a_failed_launch_names_the_operator(device, altered_launches):
    def fail(values, grid):
        raise OSError("no kernel")

    x = torch.randn(16, 16, device=device)
    with standing_in("triu", lambda x, diagonal: _doubled_by()(x)) as calls:
        change = {"owner": fail} if tritonite.device == "cpu" else {"threads": 4096}
        altered_launches.append(lambda step: step._replace(**change))
        assert torch.equal(torch.triu(x), 2 * x)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="kernel of aten::triu failed: "):
                torch.triu(x)
        altered_launches.clear()
        for _ in range(2):
            assert torch.equal(torch.triu(x[1:]), 2 * x[1:])
        assert len(calls) == 2


def test_plans_keep_their_kernels_alive_and_let_them_go(device, dispatcher, altered_launches):
    class Owner:
        def __call__(self, values, grid):
            pass

    alive = []

    def owned(step):
        owner = Owner()
        alive.append(weakref.ref(owner))
        return step._replace(owner=owner)

    altered_launches.append(owned)
    x = torch.randn(16, 16, device=device)
    with standing_in("diag_embed", lambda x, *_: _doubled_by()(x)):
        torch.diag_embed(x)
        gc.collect()
        assert len(alive) == 1 and alive[0]() is not None
        dispatcher.clear("diag_embed")
        gc.collect()
        assert alive[0]() is None


def test_a_launch_of_nothing_is_no_launch():
    recorder = Recorder([])
    recorder.add(["i32"], [7], (4, 0, 1), None, print)
    assert recorder.plan([]).launches == []


def test_launches_that_are_watched_are_not_replayed(device):
    x, seen = torch.ones(4, device=device), []

    def watch(metadata):
        seen.append(metadata.get()["name"])

    with tritonite.use_gems(include="exp"):
        x.exp(), x.exp()
        triton.knobs.runtime.launch_enter_hook.add(watch)
        try:
            x.exp(), x.exp()
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(watch)
        x.exp()
    assert tritonite.stats()["exp"].replayed == 2
    assert seen == ([] if tritonite.device == "cpu" else ["elementwise_flat"] * 2)


on_host = pytest.mark.skipif(tritonite.device != "cpu", reason="a replay on a GPU runs no Python to count")
on_a_gpu = pytest.mark.skipif(tritonite.device == "cpu", reason="streams and graphs are a GPU's")


@on_a_gpu
def test_replays_follow_the_current_stream():
    x = torch.zeros(1 << 20, device="cuda")
    side = torch.cuda.Stream()
    with tritonite.use_gems(include="add"):
        _ = x + x
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            x.copy_(torch.ones(1 << 20).pin_memory(), non_blocking=True)
            y = x + x
        side.synchronize()
    assert tritonite.stats()["add.Tensor"].replayed == 1
    assert torch.equal(y.cpu(), torch.full((1 << 20,), 2.0))


@on_a_gpu
def test_numbers_on_the_device_go_to_aten():
    """ATen's pow of a number makes a tensor of it on the device, which still counts as a number."""
    z = torch.randn(5, dtype=torch.complex64, device="cuda")
    check("pow.Scalar", *[lambda: torch.pow(2, z)] * 3, replayed=0)
    assert tritonite.stats()["pow.Tensor_Tensor_out"].declined == {"a number on the device": 3}


@on_a_gpu
def test_graphs_capture_replays():
    x, y = torch.randn(64, device="cuda"), torch.randn(64, device="cuda")

    def run():
        return torch.sigmoid(x * 2.0 + y).clamp(0.25, 0.75) - y

    with tritonite.use_gems():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
            declined = (x.double() * 3.0).float()
    assert all(tritonite.stats()[name].replayed for name in ("mul.Tensor", "add.Tensor", "sigmoid", "clamp"))
    for _ in range(2):
        x.copy_(torch.randn(64)), y.copy_(torch.randn(64))
        graph.replay()
        torch.testing.assert_close(captured, run())
        torch.testing.assert_close(declined, x * 3.0)


def test_no_compiler_means_the_python_path(monkeypatch, tmp_path, device):
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
    environment = os.environ | {"TRITONITE_NATIVE": "1"}
    done = subprocess.run([sys.executable, "-c", _ROTATES], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]


@pytest.fixture
def interpreted(monkeypatch):
    """Return the list of the names of kernels that `Launch` runs in the interpreter from then on."""
    names = []
    run = launch.Launch._interpret

    def noting(self, values):
        names.append(self.specialization.kernel.__name__)
        run(self, values)

    monkeypatch.setattr(launch.Launch, "_interpret", noting)
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
