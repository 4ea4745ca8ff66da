"""Files of recorded graphs: what they hold, who may load them, and that a process that does records nothing."""

import collections
import contextlib
import json
import os
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tritonite
from tritonite import devices
from tritonite.errors import InvalidArtifact, MismatchedGraph, NoSavedPlan, UnsavableGraph
from tritonite.graph.plan import GraphPlan
from tritonite.graph.saving import binaries, files, names, steps, values
from tritonite.runtime import artifact, compilation
from tritonite.runtime.plan import LaunchStep

Pair = collections.namedtuple("Pair", "first second")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "graph.tritonite"


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def recorded(function, *calls):
    """Return a recorded function after calls with these arguments."""
    found = tritonite.record(function)
    for args in calls:
        found(*args)
    return found


def rewritten(path, change):
    """Write a file again with another description of its graphs."""
    contents = artifact.read(path)
    described = json.loads(contents.entries["graphs.json"])
    change(described)
    artifact.write(path, contents.entries | {"graphs.json": json.dumps(described).encode()}, ())


def test_a_module_in_training(device, file):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Dropout(0.3)).to(device)
    x, scale = torch.randn(2, 3, 5, 5, device=device), torch.randn(1, device=device)
    function = recorded(lambda x, scale: {"y": model(x) * scale["k"], "n": 3}, (x, {"k": scale}))
    assert tritonite.save(function, file) == 1
    loaded = tritonite.load(file)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = function(x, {"k": scale})
        torch.manual_seed(seed)
        actual = loaded(x, {"k": scale})
        assert torch.equal(actual["y"], expected["y"]) and actual["n"] == 3
    # Its own statistics have been counted, as those of the model have.
    mean = model[1].running_mean
    assert any(each.shape == mean.shape and torch.equal(each, mean) for each in loaded.constants)
    assert loaded.replayed == 2 and len(loaded.plans) == 1


def test_the_structure_of_arguments_and_results(device, file):
    def function(pair, more, *, alpha=1.0):
        return Pair(pair.first * alpha, [more["x"] + 1, None]), collections.OrderedDict(b=pair.second)

    x = torch.randn(3, device=device)
    found = recorded(function)
    for alpha in (1.0, 2.0):
        found(Pair(x, x), {"x": x}, alpha=alpha)
    assert tritonite.save(found, file) == 2
    loaded = tritonite.load(file)
    for alpha in (2.0, 1.0):
        pair, ordered = loaded(Pair(x, x), {"x": x}, alpha=alpha)
        assert torch.equal(pair.first, x * alpha) and torch.equal(pair.second[0], x + 1) and pair.second[1] is None
        assert type(ordered) is collections.OrderedDict and ordered["b"] is x


def test_calls_of_aten_and_of_python(device, file):
    def function(x, y):
        found = torch.nonzero(x > 0)
        y.mul_(2)
        return found * 2, torch.linalg.eigvalsh(y @ y.T), y[1:], torch.fft.fft(x).real

    x, y = torch.randn(8, device=device), torch.randn(3, 3, device=device)
    found = recorded(function, (x, y.clone()))
    tritonite.save(found, file)
    loaded = tritonite.load(file)
    own, other = y.clone(), y.clone()
    for given in (x, -x):
        for actual, expected in zip(loaded(given, own), found(given, other), strict=True):
            torch.testing.assert_close(actual, expected)
    assert torch.equal(own, other)


def test_tensors_by_value_share_memory(device, file):
    whole = torch.randn(100, device=device)
    first, second, tied = whole[10:30], whole[20:50:2], whole.view(10, 10)[:, 1]
    function = recorded(
        lambda x: (x + first[:5] + second[:5] + tied[:5], first.add_(1))[0], (torch.ones(5, device=device),)
    )
    tritonite.save(function, file)
    loaded = tritonite.load(file)
    x = torch.ones(5, device=device)
    for _ in range(2):
        # What was written is read by the next call, also where the tensors overlap.
        assert torch.equal(loaded(x), function(x))


def test_tensors_by_name(device, file):
    model, other = nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)
    x = torch.randn(2, 4, device=device)
    function = recorded(lambda x: torch.relu(model(x)), (x,))
    tritonite.save(function, file, model)
    with zipfile.ZipFile(file) as found:
        assert not any("tensors" in name for name in found.namelist())
    for each in (model, other):
        loaded = tritonite.load(file, each)
        torch.testing.assert_close(loaded(x), torch.relu(each(x)))
        assert loaded.constants[0] is each.weight or loaded.constants[1] is each.weight
    with pytest.raises(MismatchedGraph, match="is saved by name"):
        tritonite.load(file)
    with pytest.raises(MismatchedGraph, match=r"of the module has .*\[5"):
        tritonite.load(file, nn.Linear(4, 5).to(device))


def test_large_tensors_are_divided(device, file, monkeypatch):
    monkeypatch.setattr("tritonite.graph.saving.tensors._CHUNK", 64)
    weight = torch.randn(50, device=device)
    tritonite.save(recorded(lambda x: x * weight, (weight,)), file)
    assert torch.equal(tritonite.load(file)(weight), weight * weight)
    contents = artifact.read(file)
    assert [name for name in contents.entries if name.startswith("tensors")] == [f"tensors/0.{i}" for i in range(4)]
    monkeypatch.setattr(files, "_MOST_BYTES", 100)
    with pytest.raises(UnsavableGraph, match="have 200 bytes, and a file holds 100; give save their module"):
        tritonite.save(recorded(lambda x: x * weight, (weight,)), file)
    del contents.entries["tensors/0.2"]
    artifact.write(file, contents.entries, ())
    with pytest.raises(MismatchedGraph, match="storage 0 has not 200 bytes"):
        tritonite.load(file)


def test_a_compiled_graph_takes_a_list(device, file):
    import tritonite.graph

    compiled = torch.compile(lambda x, y: torch.softmax(x * y, -1), backend="tritonite")
    x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    expected = compiled(x, y)
    graph = tritonite.graph.backend.graphs[-1]
    tritonite.save(graph, file)
    (actual,) = tritonite.load(file)(x, y)
    assert torch.equal(actual, expected)
    with pytest.raises(UnsavableGraph, match=r"function of torch\.compile"):
        tritonite.save(compiled, file)


def test_torch_keeps_no_graph_of_ours(device):
    """`torch.compiler`'s files do not hold what the backend compiles, as the guide says."""
    import tritonite.graph

    assert tritonite.graph.backend
    torch.compiler.reset()
    compiled = torch.compile(lambda x: torch.softmax(x * 2, -1), backend="tritonite", fullgraph=True)
    x = torch.ones(4, 8, device=device)
    if hasattr(compiled, "aot_compile"):
        with pytest.raises(AssertionError, match="CompiledGraph"):
            compiled.aot_compile(((x,), {}))
    compiled(x)
    assert torch.compiler.save_cache_artifacts() is None


def test_what_has_no_plan_is_refused(device, file):
    x = torch.randn(4, 4, device=device)
    function = recorded(lambda x, flag: x + 1 if flag else x @ x, (x, True))
    tritonite.save(function, file)
    loaded = tritonite.load(file)
    for args, match in (
        ((x[:2], True), r"given are float32 \[2, 4\].* the file serves float32 \[4, 4\]"),
        ((x.double(), True), "given are float64"),
        ((x, False), "given are .*False"),
        ((x.t(), True), r"strides \[1, 4\]"),
    ):
        with pytest.raises(NoSavedPlan, match=match):
            loaded(*args)
    with torch.enable_grad(), pytest.raises(NoSavedPlan, match="with gradients enabled"):
        loaded(x, True)
    with tritonite.use_gems(include=["add"], invariant=True), pytest.raises(NoSavedPlan, match="settings of trit"):
        loaded(x, True)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NoSavedPlan, match="deterministic algorithms is True now, and was False"):
            loaded(x, True)
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(NoSavedPlan, match="aligned, share memory"):
        loaded(torch.randn(17, device=device)[1:].view(4, 4), True)
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(NoSavedPlan, match="FakeTensor of float32"):
        loaded(mode.from_tensor(x), True)


def test_what_cannot_be_saved_is_named(device, file):
    x = torch.randn(4, device=device)
    with pytest.raises(UnsavableGraph, match="has no plan; call it once"):
        tritonite.save(tritonite.record(lambda x: x), file)
    with pytest.raises(UnsavableGraph, match=r"what tritonite\.record returned"):
        tritonite.save(torch.relu, file)
    with pytest.raises(UnsavableGraph, match="Flag cannot be saved"):

        class Flag:
            pass

        tritonite.save(recorded(lambda x, flag: x + 1, (x, Flag())), file)
    sparse = torch.eye(4, device=device).to_sparse()
    function = recorded(lambda x: torch.mv(sparse, x), (x,))
    with pytest.raises(UnsavableGraph):
        tritonite.save(function, file)
    assert not file.exists()


@pytest.mark.parametrize("fact", ["tritonite", "torch", "triton", "kind", "device", "capability"])
def test_other_versions_and_devices_are_refused(fact, device, file, monkeypatch):
    tritonite.save(recorded(lambda x: x + 1, (torch.ones(3, device=device),)), file)
    words, _ = artifact._FACTS[fact]
    theirs = artifact.facts()[fact]
    monkeypatch.setitem(artifact._FACTS, fact, (words, lambda: "another"))
    with pytest.raises(MismatchedGraph) as caught:
        tritonite.load(file)
    assert f"graphs are for {words} {theirs}, and this process has another" in str(caught.value)


def test_damaged_files_are_refused(device, file):
    x = torch.ones(3, device=device)
    function = recorded(lambda x: x + 1, (x,))

    def refused(change, match):
        tritonite.save(function, file)
        rewritten(file, change)
        with pytest.raises(InvalidArtifact, match=match):
            tritonite.load(file)

    def step(described):
        return next(each for each in described["kinds"][0]["plans"][0]["plan"]["steps"] if "launch" in each)

    refused(lambda described: described.update(format=0), "format of its graphs is 0")
    refused(lambda described: described["kinds"][0].pop("plans"), "cannot be read")
    refused(lambda described: step(described).update(kernel={"hash": "a" * 64}), "lacks the kernel")
    tritonite.save_kernels(file)
    with pytest.raises(InvalidArtifact, match="holds no graphs"):
        tritonite.load(file)


@pytest.mark.skipif(not devices.current.interpreted, reason="a GPU's files have binaries")
@pytest.mark.parametrize(
    "name", ["os:system", "tritonite.runtime.cache:os.system", "tritonite.graph:record", "builtins:eval"]
)
def test_a_file_names_kernels_alone(name, device, file):
    tritonite.save(recorded(lambda x: x + 1, (torch.ones(3, device=device),)), file)

    def change(described):
        for each in described["kinds"][0]["plans"][0]["plan"]["steps"]:
            if "launch" in each:
                each["kernel"]["name"] = {"function": name}

    rewritten(file, change)
    with pytest.raises(InvalidArtifact, match="is no kernel"):
        tritonite.load(file)


def test_values_survive():
    given = [1, -(2**63), 2.5, float("inf"), "a", None, True, 1j, (1, [2, {"k": (3,)}]), slice(1, None), b"ab"]
    given += [torch.float16, torch.strided, torch.channels_last, torch.device("cpu"), frozenset((1, 2))]
    text = json.dumps(values.encoded(given))
    assert values.decoded(json.loads(text)) == given
    assert values.decoded(values.encoded(-0.0)).hex() == "-0x0.0p+0"
    for bad in ([1], {"float": "1", "list": []}, {"eval": "1"}, {"torch": "load"}, {"function": "os:system"}):
        with pytest.raises(ValueError, match=r"."):
            values.decoded(bad)


def test_names_lead_back():
    from tritonite.ops import grid_sampling
    from tritonite.registry.programs import formulas

    for formula in (each.formula for each in (*formulas().values(), *grid_sampling._GRID_GRADIENTS.values())):
        assert names.named(names.name_of(formula)) is formula


_LOADING = """
import sys
import torch, tritonite
from torch.fx.experimental import proxy_tensor
from tritonite.graph import compiled
from tritonite.runtime import contract, recorder

def never(*args, **kwargs):
    raise AssertionError("traced or recorded")

proxy_tensor.make_fx = compiled.record_graph = recorder.Recorder.__init__ = torch.fx.Tracer.trace = never
torch.backends.cudnn.conv.fp32_precision = sys.argv[2]
contract.set_comparing(False)  # as for the process that saved it
tritonite.on_compile("raise")
loaded = tritonite.load(sys.argv[1])
x = torch.arange(32.0, device=tritonite.device).view(4, 8) / 10
with torch.no_grad():
    found = loaded(x)
assert "torch._dynamo.convert_frame" not in sys.modules or not torch._dynamo.utils.counters
assert not tritonite.stats().compiled or all(each.from_cache for each in tritonite.stats().compiled)
assert loaded.replayed == 1
print(found.sum().item().hex())
"""


def test_a_process_that_loads_a_file_traces_and_records_nothing(device, file):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 2)).to(device)
    x = torch.arange(32.0, device=device).view(4, 8) / 10
    function = recorded(model, (x,))
    tritonite.save(function, file)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LOADING, str(file), torch.backends.cudnn.conv.fp32_precision],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == function(x).sum().item().hex()


def test_launches_on_a_gpu_have_binaries(file, monkeypatch, tmp_path):
    """A launch keeps its parameters, and gets the handle of a binary of the file."""
    key, handles = "c" * 64, iter((17,))
    metadata = {"hash": key, "name": "add", "shared": 48, "target": {"backend": "cuda", "arch": 90, "warp_size": 32}}
    for name, data in (("add.json", json.dumps(metadata).encode()), ("add.cubin", b"binary")):
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(
        compilation, "_files", {key: {name: str(tmp_path / name) for name in ("add.json", "add.cubin")}}
    )
    parameters = [
        (True, 0, 16, torch.float32),
        (False, 1, 0, b"descriptor"),
        ("slot", 0),
        ("drawn", 0, 1),
        2**64 - 1,
        0,
    ]
    launch = LaunchStep(parameters, (4, 1, 1), 5, 128, 48, 2, True, True, SimpleNamespace(hash=key))
    plan = GraphPlan(torch.device("cpu"), [2.0], [None], [launch, launch])
    assert steps.hashes(plan) == {key} and not steps.calls_by_key(plan)
    artifact.write(file, {"plan.json": json.dumps(steps.plan_as_json(plan)).encode()}, steps.hashes(plan))
    contents = artifact.read(file)
    loaded = []

    def load_binary(*given):
        loaded.append(given)
        return object(), next(handles), 0, 0, 1024

    utils = SimpleNamespace(load_binary=load_binary)
    monkeypatch.setattr(binaries, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    owner_of = binaries.loader(contents.kernels, torch.device("cuda", 1))
    again = steps.plan_of(json.loads(contents.entries["plan.json"]), owner_of)
    assert loaded == [("add", b"binary", 48, 1)]
    for step in again.steps:
        assert step[:2] == launch[:2] and step[3:8] == launch[3:8]
        assert step.function == 17 and step.owner.hash == key
    with pytest.raises(ValueError, match="lacks the kernel"):
        owner_of("d" * 64)


def test_plans_survive(device):
    """Every step of a plan is equal after it was JSON, but for functions of the process."""
    function = recorded(
        lambda x: torch.dropout(torch.cat([x, x.sin()]), 0.5, True).cumsum(0), (torch.ones(5, device=device),)
    )
    (plan,) = function.graphs[0].plans
    described = json.loads(json.dumps(steps.plan_as_json(plan)))
    again = steps.plan_of(described, lambda key: None) if devices.current.interpreted else plan
    assert isinstance(again, GraphPlan) and steps.plan_as_json(again) == described
    assert (again.launches, again.calls, again.arena, again.draws) == (
        plan.launches,
        plan.calls,
        plan.arena,
        plan.draws,
    )
