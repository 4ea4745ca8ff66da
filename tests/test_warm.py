"""`warm`: the kernels that it finds, the processes that compile them, and everything that it leaves unchanged."""

import io
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from triton.runtime import driver
from typer.testing import CliRunner
from without_gpu import run

import tritonite
import tritonite.fused
from tritonite import cli, devices
from tritonite.errors import InvalidShapes, NoDevice
from tritonite.install.override import installed
from tritonite.runtime import compilation, progress
from tritonite.warming import collect as collecting
from tritonite.warming import state
from tritonite.warming.collect import collect
from tritonite.warming.warm import _variants, resized


class Trainer:
    """A training step of a model with dropout and running statistics."""

    def __init__(self, device):
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses = []

    def step(self, x, classes):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), classes)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def contents(self):
        """Return copies of all tensors, the random state, and the addresses of gradients."""
        own = self.optimizer.state.values()
        tensors = [*self.model.state_dict().values(), *(each for values in own for each in values.values())]
        gradients = [each.grad for each in self.model.parameters()]
        tensors += [each for each in gradients if each is not None]
        generators = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if tritonite.device == "cuda" else [])]
        return [each.clone() for each in (*tensors, *generators)], list(map(id, gradients))


def target():
    """Return what kernels are compiled for; None in the interpreter, which compiles none."""
    return None if tritonite.backend.interpreted else driver.active.get_current_target()


def gathered(function, *args, **kwargs):
    """Collect the kernels of a call, and return the overloads that could not be recorded."""
    return collect(function, args, kwargs, compilation.Collector(target()))


# Small tensors are restored, and writes to large ones left out: by the limit, all are the one or the other.
@pytest.mark.parametrize("limit", [0, 2**16])
def test_a_training_step_changes_nothing(device, limit, monkeypatch):
    monkeypatch.setattr(state, "_SMALL", limit)
    trainer = Trainer(device)
    x, classes = torch.randn(6, 8, device=device), torch.randint(4, (6,), device=device)
    # The second step finds gradients and states of the optimizer.
    for _ in range(2):
        before, gradients = trainer.contents()
        others = random.getstate(), np.random.get_state()[1].tolist()
        assert gathered(trainer.step, x, classes) == {}
        after, same = trainer.contents()
        assert len(before) == len(after) and all(map(torch.equal, before, after)) and gradients == same
        assert others == (random.getstate(), np.random.get_state()[1].tolist())
        trainer.step(x, classes)
    assert len(trainer.losses) == 4 and all(map(np.isfinite, trainer.losses))


def test_a_fused_optimizer_goes_on_as_before(device):
    trainers = []
    for _ in range(2):
        torch.manual_seed(0)
        trainers.append(Trainer(device))
        tritonite.optim.fuse(trainers[-1].optimizer)
    x, classes = torch.randn(6, 8, device=device), torch.randint(4, (6,), device=device)
    for _ in range(5):
        # Looking at a call of the one leaves both alike.
        assert gathered(trainers[0].step, x, classes) == {}
        for trainer in trainers:
            torch.manual_seed(1)
            trainer.step(x, classes)
    first, second = (list(trainer.model.parameters()) for trainer in trainers)
    assert all(map(torch.equal, first, second))


def test_random_numbers_caches_and_buffers_are_as_before(device):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(2, 2**15, device=device))
            self.register_buffer("position", torch.zeros((), dtype=torch.int64, device=device))
            self.register_buffer("last", None)

        def forward(self, x, generator):
            noise = torch.rand(x.shape, generator=generator, device=device) + random.random() + np.random.rand()
            self.position.add_(1)
            # Code that branches on a counter sees its new value.
            assert self.position == 1
            self.cache[self.position.item()].copy_(x + noise)
            self.last = self.cache.sum(0)
            return self.last

    model, x, generator = Cached(), torch.randn(2**15, device=device), torch.Generator(device)
    states = generator.get_state(), random.getstate()
    assert gathered(model, x, generator=generator) == {}
    assert not model.cache.any() and not model.position and model.last is None
    assert torch.equal(generator.get_state(), states[0]) and random.getstate() == states[1]


def test_operators_outside_aten_are_not_run(device):
    seen = []

    def function(x):
        y = tritonite.fused.silu_and_mul(x)
        seen.append(y)
        return y.exp().sum().backward()

    x = torch.randn(3, 8, device=device, requires_grad=True)
    assert gathered(function, x) == {} and x.grad is None
    assert seen[0].shape == (3, 4) and not seen[0].any()


def test_a_recording_goes_on_after_sizes_that_data_decides(device, monkeypatch):
    kernels = []
    monkeypatch.setattr(
        "tritonite.runtime.recorder.Recorder.described", lambda self, launch: kernels.append(launch.kernel)
    )
    assert gathered(torch.nonzero, torch.ones(5, device=device)) == {}
    assert len(kernels) == 2


@pytest.mark.declines("a dtype that no kernel serves")
def test_declined_calls_and_errors_of_the_function(device):
    x = torch.ones(3, device=device).to(torch.complex64)
    assert gathered(torch.exp, x) == {}
    with pytest.raises(ZeroDivisionError):
        gathered(lambda: 1 // 0)
    assert not installed() and compilation.collector() is None


def test_calls_alike_are_recorded_once(device, monkeypatch):
    recorded = []
    monkeypatch.setattr(collecting, "record_dry", lambda op, values: recorded.append(op.overload) or ((), None))
    x = torch.ones(6, 4, device=device)

    def layers(scale):
        for _ in range(3):
            torch.add(x, x, alpha=scale)

    collector = compilation.Collector(target())
    for scale in (2, 2, 2.0):
        collect(layers, (scale,), {}, collector)
    # Memory of its own, memory further on, other sizes, other strides, another alignment, another dtype.
    others = (x.clone(), x[1:2], x[:1], x.mT.contiguous().mT, torch.ones(25, device=device)[1:].view(6, 4), x.long())
    for other in others:
        collect(torch.add, (x, other), {}, collector)
    assert recorded.count("add.Tensor") == 2 + len(others)


def test_the_selection_in_force_decides(device):
    collector = compilation.Collector(target())
    with tritonite.use_gems(include="exp"):
        before = tritonite.stats().get("exp")
        collect(torch.exp, (torch.ones(3, device=device),), {}, collector)
        assert installed() >= {"exp"}
    # ATen computed the call.
    assert tritonite.stats().get("exp") == before


def test_variants_of_a_call():
    x, mask = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    listed = list(_variants((x,), {"mask": mask}, {(0, 1): [2, 7], ("mask", -1): [2, 7]}))
    assert [(a.shape[1], named["mask"].shape[1]) for (a,), named in listed] == [(2, 2), (7, 7)]
    assert listed[1][0][0][0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert list(_variants((x,), {}, [(x,), (mask,)])) == [((x,), {}), ((mask,), {})]
    assert list(_variants((x,), {}, None)) == [((x,), {})]
    for shapes in ({(0, 1): [1], (0, 0): [1, 2]}, {(1, 0): [1]}, {(0, 2): [1]}, [x], {}):
        with pytest.raises(InvalidShapes):
            list(_variants((x,), {}, shapes))


def test_a_resized_tensor_keeps_its_memory_format():
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert resized(image, 2, 6).is_contiguous(memory_format=torch.channels_last)
    assert resized(image.requires_grad_(), 0, 1).requires_grad and resized(image, 0, 0).shape == (0, 3, 4, 4)


@pytest.mark.skipif(not devices.current.interpreted, reason="of the interpreter")
def test_the_interpreter_has_nothing_to_compile(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_told", set())
    monkeypatch.delenv("TRITONITE_QUIET", raising=False)
    calls = []
    done = tritonite.warm(calls.append, 1, shapes=[(1,), (2,)])
    assert not calls and done.calls == 2 and not done.kernels and "nothing to compile" in str(done)
    assert capsys.readouterr().err == "tritonite: nothing to compile: kernels run in Triton's interpreter here\n"


def test_without_a_device_there_is_an_error(change_device):
    change_device(dispatch_key="", interpreted=False)
    with pytest.raises(NoDevice):
        tritonite.warm(torch.exp, torch.ones(3))


def test_a_bar_is_for_terminals_alone(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("TRITONITE_QUIET", raising=False)
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.Bar("compiling", 2) as bar:
            bar.advance("one"), bar.advance("two")
        assert ("2/2 two" in stream.getvalue()) == stream.isatty()


@pytest.mark.skipif(not devices.current.interpreted, reason="compiles a whole model")
def test_the_command():
    pytest.importorskip("transformers")
    runner = CliRunner(env={"COLUMNS": "200", "TRITONITE_QUIET": "1"})
    result = runner.invoke(cli.app, ["warm", "--model", "bert", "--tokens", "4", "--tokens", "5"])
    assert result.exit_code == 0 and result.output.count("nothing to compile") == 2
    assert runner.invoke(cli.app, ["warm", "--model", "none"]).exit_code == 2


_COMPILED = """
import os
import tritonite.fused
from tritonite.warming import workers

x = torch.ones(64)
linear = torch.nn.Linear(64, 64)

def function(x):
    y = tritonite.fused.silu_and_mul(linear(x[None])).sum()
    y.backward()
    return (x > 0).nonzero()

needed = needed_by(function, x)
names = {each.source.name for each in needed}
assert {"elementwise_flat", "_count", "_write_coordinates"} <= names
assert {"gt.Scalar", "nonzero", "tritonite::silu_and_mul"} <= {each.overload for each in needed}
# A call that is looked at again needs nothing new.
assert {each.source.hash() for each in needed_by(function, x)} == {each.source.hash() for each in needed}
needed = [each for each in needed if each.overload in ("gt.Scalar", "nonzero")]
failed = {}
with tritonite.on_compile("raise") as kernels:
    assert warm.compile_all(needed, TARGET, 2, failed) == (len(needed), set()) and not failed
    # The processes compiled, and this one did not.
    assert not kernels
    assert warm.compile_all(needed, TARGET, 2, failed) == (0, set()) and not failed
    for each in needed:
        warm._load(each, failed)
    assert not failed and [each.from_cache for each in kernels] == [True] * len(needed)
    assert [each.overload for each in kernels] == [each.overload for each in needed]
    # A call finds what was compiled.
    CompiledKernel.function = None
    with mock.patch.object(CompiledKernel, "run", mock.Mock()) as launch:
        overloads()["gt.Scalar"](x, 0)
    assert launch.call_count == 1

# A kernel that does not compile, and a process that ends.
source = needed[0].source
broken = needed[0]._replace(source=type(source)(source.fn, {"nothing": "i32"}, {}, {}))
assert [each.error != "" for each in workers.build([broken], TARGET, 1)] == [True]
assert warm.compile_all([*needed, broken], TARGET, 1, failed) == (0, {id(broken)})
assert list(failed) == [source.name]
with mock.patch.object(workers, "_compile", lambda each, target: os._exit(1)):
    errors = [each.error for each in workers.build(needed, TARGET, 2)]
assert errors == ["the process ended early"] * 2 + ["no process is left"] * (len(needed) - 2), errors
with mock.patch.object(workers, "_compile", lambda each, target: __import__("time").sleep(60)), \\
        mock.patch.object(workers, "_PATIENCE", 0.2):
    errors = [each.error for each in workers.build(needed, TARGET, 1)]
assert errors == ["the process does not answer"] + ["no process is left"] * (len(needed) - 1), errors
print("warm")
"""


def test_processes_compile_without_a_gpu(tmp_path):
    assert run(_COMPILED, tmp_path) == "warm\n"
