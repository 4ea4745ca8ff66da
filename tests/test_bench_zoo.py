"""Zoos of models: passes in autocast, the command's table, and a wrong answer among right ones."""

import itertools
import json

import pytest
import torch
from test_bench import bench

import tritonite
from tritonite.bench import models, timing
from tritonite.bench.models import apart
from tritonite.bench.results import Run
from tritonite.bench.timing import ATEN, Provider
from tritonite.cli.common import console

pytest.importorskip("transformers")

# Few operators: with all of them a pass in the interpreter takes long.
SOME = Provider("tritonite", lambda _: tritonite.use_gems(["relu", "gelu", "mean"]))


@pytest.mark.parametrize("name", ["resnet", "whisper"])
def test_a_zoo_runs_in_autocast_from_float32_weights(name):
    zoo = models.zoo("vision", models.Workload(torch.bfloat16, 1, 4, tiny=True))
    assert {each.name for each in zoo} == set(models.ZOOS["vision"])
    inference, training = (each for each in zoo if each.name == name)
    assert (inference.train, training.train) == (False, True)
    assert {each.workload.channels_last for each in (inference, training)} == {name in models.OF_IMAGES}
    _, result = models.measure([inference], (ATEN, SOME), 1)
    assert (result.model, result.dtype) == (inference.title, "bfloat16 autocast") and not result.failure
    assert set(result.times) == {"aten", "tritonite"} and 0 < result.call_shares["tritonite"] < 1
    if name == "resnet":
        (forward,), (step,) = (models.phases(name, each.workload, each.train) for each in (inference, training))
        with torch.inference_mode():
            assert forward.forward().dtype is torch.bfloat16
        gradients = step.forward()
        assert gradients.dtype is torch.float32 and gradients.abs().max() > 0


def toy(workload):
    return workload.model(lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU()))


def toy_forward(workload):
    model, x = toy(workload), workload.noise(2, 8)
    return [models.Phase("forward", 1, lambda: model(x))]


def toy_step(workload):
    model, x = toy(workload), workload.noise(2, 8)
    return [workload.training(model, lambda: model(x).float().square().mean(), model.parameters(), 1)]


def toy_wrong(workload):
    """Return a pass whose results are all different."""
    answers = itertools.count()
    return [models.Phase("forward", 1, lambda: torch.full((1, 1, 8), 2.0 ** next(answers)))]


def toy_constant(workload):
    x = workload.noise(2, 8)
    return [models.Phase("train", 1, x.sigmoid, trains=True)]


def test_the_command_measures_a_zoo(tmp_path, monkeypatch):
    for name, forward, step in (("wrong", toy_wrong, toy_constant), ("toy", toy_forward, toy_step)):
        monkeypatch.setitem(models.MODELS, name, forward)
        monkeypatch.setitem(models.STEPS, name, step)
    monkeypatch.setitem(models.ZOOS, "vision", ("wrong", "toy"))
    # Narrow terminals cut the headings of the table.
    monkeypatch.setattr(console, "width", 240)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e12)
    file, page = tmp_path / "results.json", tmp_path / "report.html"
    text = bench("--zoo", "vision", "--model", "toy", "--rounds", "1", "--json", file)
    for column in ("ATen device ms", "ATen host ms", "of calls", "device x", "host x", "every: of calls"):
        assert column in text
    assert text.count("every kernel") >= 2 and "wrong" not in text
    found = Run.load(file).models
    assert [(each.model, each.phase, each.dtype) for each in found] == [
        ("toy", "forward", "bfloat16 autocast"),
        ("toy", "train", "bfloat16 autocast"),
    ]
    for each in found:
        assert list(each.times) == ["aten", "tritonite", "every kernel"] and not each.failure
        assert set(each.call_shares) == {"tritonite", "every kernel"}
        assert 0 < each.call_shares["tritonite"] <= each.call_shares["every kernel"] <= 1
    # A wrong answer is printed, and the other passes are measured.
    text = bench("--zoo", "vision", "--model", "wrong", "--rounds", "1", "--json", file, "--html", page, code=1)
    assert "gives another answer than ATen for wrong forward, bfloat16 autocast" in text
    found = Run.load(file).models
    assert [(each.phase, bool(each.failure), len(each.times)) for each in found] == [
        ("forward", True, 0),
        ("train", False, 3),
    ]
    assert "wrong forward" in page.read_text()


@pytest.mark.parametrize("arguments", [("--zoo", "text"), ("--zoo", "vision", "--dtype", "float32")])
def test_other_zoos_and_dtypes_are_refused(arguments):
    bench(*arguments, code=2)


def in_this_process(module, task, turns, limit):
    assert module == apart.__name__ and turns.is_dir()
    return json.loads(json.dumps(apart._answer(task)))


def test_models_are_measured_apart(monkeypatch):
    monkeypatch.setattr(apart.processes, "answer", in_this_process)
    monkeypatch.setitem(models.MODELS, "toy", toy_forward)
    monkeypatch.setitem(models.STEPS, "toy", toy_step)
    workload = models.Workload(torch.float32, 1, 4, tiny=True)
    cases = [models.ModelCase("toy", workload, train) for train in (False, True)]
    found = {each.phase: each for each in apart.measure_apart(cases, ["patched"], True, 1, jobs=1, limit=60)}
    assert found.keys() == {"forward", "train"}
    for each in found.values():
        assert not each.failure and isinstance(each.unserved, list)
        assert set(each.times) == {"aten", "tritonite", "every kernel", "patched"}
        # The results with a profile come last.
        assert each.call_shares["tritonite"] > 0


def test_a_process_without_an_answer_is_a_failure(monkeypatch):
    monkeypatch.setattr(apart.processes, "answer", lambda *given: {"failure": "no answer within 1 s"})
    case = models.ModelCase("toy", models.Workload(torch.bfloat16, 3, 4, tiny=True), train=True)
    (found,) = apart.measure_apart([case], [], False, 1, jobs=2, limit=1)
    assert (found.model, found.phase, found.batch, found.failure) == ("toy", "train", 3, "no answer within 1 s")


def test_a_model_that_finds_memory_full_is_measured_again(monkeypatch):
    asked = []

    def answer(module, task, turns, limit):
        asked.append(task["model"])
        full = asked.count("large") == 1 and asked[-1] == "large"
        return {"failure": "torch.OutOfMemoryError: CUDA out of memory." if full else "wrong"}

    monkeypatch.setattr(apart.processes, "answer", answer)
    workload = models.Workload(torch.bfloat16, 1, 4, tiny=True)
    cases = [models.ModelCase(name, workload) for name in ("large", "small")]
    found = list(apart.measure_apart(cases, [], False, 1, jobs=1, limit=1))
    assert [(each.model, each.failure) for each in found] == [("small", "wrong"), ("large", "wrong")]
    assert asked == ["large", "small", "large"]


def test_a_process_measures_a_compiled_model():
    case = models.ModelCase("bert", models.Workload(torch.float32, 1, 4, tiny=True))
    (found,) = apart.measure_apart([case], ["compiled"], False, 1, jobs=2, limit=120)
    assert not found.failure and set(found.times) == {"aten", "tritonite", "compiled"}
