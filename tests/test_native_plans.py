"""Plans of the native dispatcher: the steps that a recorder notes, and launches that replay them."""

import gc
import struct
import types
import weakref

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

import tritonite
from tritonite.runtime.contract import random_state
from tritonite.runtime.recorder import Recorder, record
from tritonite.testing.stand_in import standing_in

pytestmark = pytest.mark.usefixtures("through_native", "no_plans")
on_a_gpu = pytest.mark.skipif(tritonite.device == "cpu", reason="streams and graphs are a GPU's")


@tritonite.libentry()
@triton.jit
def _scale(source, target, factor, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets, mask=offsets < n) * factor, mask=offsets < n)


def _twice_the_tail(xs):
    """A host function with a list as its argument, a temporary, views, two launches and a view as its result."""
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
        metadata = types.SimpleNamespace(num_warps=4, shared=0, target=GPUTarget("cuda", 90, 32))
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
def test_calls_that_a_plan_cannot_repeat_have_a_reason(device, run, reason):
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


def test_replays_draw_new_random_numbers(device, dispatcher):
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
def test_launches_with_descriptors_scratch_clusters_and_cooperation(device, dispatcher, host):
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


def test_plans_own_their_kernels(device, dispatcher, altered_launches):
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


def test_an_empty_grid_is_not_recorded():
    recorder = Recorder([])
    recorder.add(["i32"], [7], (4, 0, 1), None, print)
    assert recorder.plan([]).launches == []


def test_launches_with_a_hook_are_not_replayed(device):
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
