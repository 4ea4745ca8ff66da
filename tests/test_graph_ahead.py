"""Kernels of a graph compiled ahead: the dry walk over its calls, and the threads that compile what it finds."""

import pytest
import torch
from torch import nn
from without_gpu import run

import tritonite
from tritonite.errors import Unsupported
from tritonite.graph import compiled, recording
from tritonite.graph.ahead import Walk
from tritonite.runtime.hollow import DataUnknown, hollow, is_hollow


def walked(recorded, inputs):
    """Return (the walk over the only graph, its outputs)."""
    (graph,) = recorded.graphs
    walk = Walk(inputs[0].device)
    with torch.no_grad():
        outputs = walk.run(graph.lowered, [hollow(x.shape, x.stride(), x.dtype, x.device) for x in inputs])
    return walk, outputs


def layouts(tensors):
    return [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in tensors]


class Block(nn.Module):
    """A norm, products, attention, views, a sum, and an operator without a kernel."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:-1], 3, 2, 8).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return torch.geqrf(x)[0] * 2, nn.functional.gelu(x).sum(-1)


@pytest.mark.parametrize("fuse", [False, True])
def test_a_walk_describes_what_runs(device, fuse):
    block, x = Block().to(device), torch.randn(2, 5, 16, device=device)
    recorded = tritonite.record(block, options={"fuse": fuse})
    with torch.no_grad():
        expected = recorded(x)
    (plan,) = recorded.graphs[0].plans
    walk, outputs = walked(recorded, [x])
    ran = [note.operator for note in plan.notes if not note.view and not note.reason]
    assert walk.served == ran and len(ran) >= 5 and any(note.operator == "geqrf" for note in plan.notes)
    assert layouts(outputs) == layouts(expected)


def test_a_walk_reads_no_memory(device):
    """ATen's operators get no tensor without memory, not even a view of one."""
    weight = torch.randn(4, 3, device=device)
    recorded = tritonite.record(lambda x: torch.geqrf(x @ weight)[0], options={"fuse": False})
    x = torch.randn(2, 5, 4, device=device)
    with torch.no_grad():
        expected = recorded(x)
    assert any(note.operator == "_unsafe_view" for note in recorded.graphs[0].plans[0].notes)
    _, outputs = walked(recorded, [x])
    assert layouts(outputs) == layouts([expected])


@pytest.mark.parametrize("name", ["_unsafe_view", "view", "_reshape_alias", "as_strided", "detach", "alias", "split"])
def test_views_of_a_tensor_without_memory_have_none(device, name):
    given = {"_reshape_alias": ([3, 2], [2, 1]), "as_strided": ([3], [2]), "split": (1,), "detach": (), "alias": ()}
    x = hollow((2, 3), (3, 1), torch.float32, device)
    found = getattr(torch.ops.aten, name)(x, *given.get(name, ([3, 2],)))
    for view in found if isinstance(found, (list, tuple)) else [found]:
        assert is_hollow(view)
        with pytest.raises(DataUnknown):
            view + 1
        with pytest.raises(DataUnknown):
            torch.empty(view.shape, out=view)


def test_a_walk_covers_both_passes_of_a_training_step(device, monkeypatch):
    def record(lowered, inputs, of):
        walk = Walk(of)
        with torch.no_grad():
            walk.run(lowered, [hollow(x.shape, x.stride(), x.dtype, x.device) for x in inputs])
        outputs, plan = recording.record_graph(lowered, inputs, of)
        walks.append((walk.served, [note.operator for note in plan.notes if not note.view and not note.reason]))
        return outputs, plan

    walks = []
    monkeypatch.setattr(compiled, "record_graph", record)
    torch._dynamo.reset()
    block = Block().to(device)
    step = torch.compile(lambda x: block.out(block.norm(x)).softmax(-1).var(), backend="tritonite", dynamic=False)
    step(torch.randn(3, 16, device=device)).backward()
    assert len(walks) == 2 and all(walked == ran and len(ran) >= 2 for walked, ran in walks)


def test_a_walk_writes_nothing_and_draws_nothing(device):
    recorded = tritonite.record(lambda x, y: (x.add_(y), nn.functional.dropout(y, 0.5)), options={"fuse": False})
    x, y = torch.zeros(4, device=device), torch.ones(4, device=device)
    with torch.no_grad():
        recorded(x, y)
    before, state = x.clone(), torch.get_rng_state()
    walk, (_, dropped) = walked(recorded, [x, y])
    assert "add_.Tensor" in walk.served and layouts([dropped]) == layouts([y])
    assert torch.equal(x, before) and torch.equal(torch.get_rng_state(), state)


def test_a_walk_stops_where_sizes_depend_on_data(device):
    recorded = tritonite.record(lambda x: (x.exp() > 1).nonzero(), options={"fuse": False})
    x = torch.randn(4, device=device)
    with torch.no_grad():
        recorded(x)
    with pytest.raises(Unsupported):
        walked(recorded, [x])


_COMPILED = """
from torch.fx.experimental.proxy_tensor import make_fx
from tritonite.graph.ahead import Ahead
from tritonite.graph.lowered import lower

def function(x, y):
    return torch.sort(x.softmax(-1) @ y), x.exp().sum(0)

given = torch.randn(32, 64), torch.randn(64, 16)
selected = frozenset(("_softmax", "mm", "exp", "sum.dim_IntList"))
lowered = lower(make_fx(function)(*given), selected)
needed = needed_by(function, *given)
needed = [each for each in needed if each.overload in selected]
assert len(needed) >= 4
beside, first = mock.Mock(side_effect=Ahead(lowered, given, given[0].device).beside), needed[1]
with tritonite.on_compile(None) as kernels, compilation.ahead_of(beside):
    with compilation.contract.serving(first.overload):
        compilation.compile_kernel(first.source, TARGET, first.options)
    # All of the graph's kernels were compiled, each once; a later compilation starts no threads.
    assert sorted(each.kernel for each in kernels) == sorted(each.source.name for each in needed), kernels
    assert not any(each.from_cache for each in kernels)
    assert {each.overload for each in kernels} == selected
    assert all(compilation.in_disk_cache(each.source, TARGET, each.options) for each in needed)
    compilation.compile_kernel(first.source, TARGET, first.options | {"num_stages": 5})
    assert beside.call_count == 1
# The first compilation may be that of a call, by either way to launch. Its kernel is compiled once.
CompiledKernel.function = None
x, y = given[0].half(), given[1].half()
calls = {"sum.dim_IntList": lambda: torch.sum(x, [0]), "exp": lambda: x.exp(), "mm": lambda: x @ y}
arguments = {"sum.dim_IntList": (x, [0]), "exp": (x,), "mm": (x, y)}
for (overload, call), other in zip(calls.items(), (torch.sin, torch.cos, torch.tanh)):
    lowered = lower(make_fx(lambda x, y: (call(), other(x)))(x, y), frozenset((overload, other.__name__)))
    with tritonite.on_compile(None) as kernels, compilation.ahead_of(Ahead(lowered, (x, y), x.device).beside), \
            mock.patch.object(CompiledKernel, "run", mock.Mock()), compilation.contract.serving(overload):
        overloads()[overload](*arguments[overload])
    made = [(each.kernel, each.signature) for each in kernels]
    assert len(set(made)) == len(made) and {each.overload for each in kernels} == {overload, other.__name__}, kernels
# A kernel that the disk cache has starts none, either, and under "raise" no kernel is compiled.
with compilation.ahead_of(mock.Mock(side_effect=AssertionError)), tritonite.on_compile("raise"):
    compilation.compile_kernel(first.source, TARGET, first.options)
    try:
        compilation.compile_kernel(first.source, TARGET, first.options | {"num_stages": 6})
    except tritonite.errors.KernelNotCompiled:
        print("ahead")
"""


def test_threads_compile_without_a_gpu(tmp_path):
    assert run(_COMPILED, tmp_path) == "ahead\n"


def test_a_capture_is_told_apart_by_sizes(monkeypatch):
    from torch._inductor import cudagraph_trees

    from tritonite.graph.cudagraphs import _capturing

    def capture(compiled, inputs, static, **options):
        keys.append([each for each in inputs if isinstance(each, int)])
        return lambda inputs: [compiled(inputs), options]

    keys = []
    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", capture)
    run = _capturing(lambda inputs: inputs[0] + 1, (), {"is_backward": False})
    assert not keys and run._boxed_call
    assert run([3, torch.ones(3)]) == [4, {"is_backward": False}]
    assert run([4, torch.ones(4)])[0] == 5 and keys == [[3]]
