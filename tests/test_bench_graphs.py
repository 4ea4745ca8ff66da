"""`tritonite bench --graphs`: what its processes measure, its results, and the table of the guide."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tritonite
from tritonite.bench import processes
from tritonite.bench.graphs import measure, results, run, ways
from tritonite.bench.graphs.results import GraphResult, GraphRun
from tritonite.bench.graphs.subjects import Subject
from tritonite.bench.results import Machine, Timing
from tritonite.bench.turns import Turns
from tritonite.errors import InvalidResults

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

MACHINE = Machine("GPU", "nvidia", {"torch": "2.13"}, "", "tritonite bench --graphs", "2026-01-01", 1e12)
GOOD = {"shape": "1x16", "cold": 1.5, "steady": {"median": 1500.0, "low": 1400.0, "high": 1600.0}, "failure": ""}


@pytest.fixture
def task(tmp_path):
    usual = {"model": "bert", "phase": "prefill", "dtype": "float32", "batch": 1, "tokens": 4, "tiny": True}
    usual |= {"rounds": 2, "file": "", "turns": str(tmp_path / "turns"), "only_start": False}
    return lambda way, **given: usual | {"way": way} | given


@pytest.fixture
def small(monkeypatch, device):
    """Have a linear layer stand in for the models."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).to(device)
    made = Subject(module, module, lambda shape: (torch.ones(2 + shape, 4, device=device),))
    monkeypatch.setattr(measure, "subject", lambda *given: made)
    yield made
    tritonite.disable()
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("way", ["eager", "tritonite", "tritonite-graph"])
def test_a_way_is_measured(way, small, task):
    found = measure.measured(task(way))
    assert found["failure"] == "" and found["shape"] == "2x4"
    assert found["cold"] > 0 and found["new_shape"] > 0 and found["later_shape"] > 0
    named = {"model": "m", "phase": "p", "dtype": "float32", "way": way}
    result = GraphResult.of_json(named | json.loads(json.dumps(found)))
    assert isinstance(result.steady, Timing) and result.steady.median >= result.host.low


def test_a_file_is_written_and_loaded(small, task, tmp_path):
    file = str(tmp_path / "graph")
    assert measure.measured(task("tritonite-record", file=file))["failure"] == ""
    before = tritonite.on_compile(None)
    try:
        found = measure.measured(task("tritonite-file", file=file))
    finally:
        tritonite.on_compile(None)
    assert found["failure"] == "" and found["new_shape"] is None
    assert set(measure.measured(task("eager", only_start=True))) == {"cold"}
    del before


def test_a_training_step_is_measured(small, task, monkeypatch):
    trained = Subject(small.module, lambda x: small.module(x).square().mean(), small.inputs, trains=True)
    monkeypatch.setattr(measure, "subject", lambda *given: trained)
    assert measure.measured(task("eager"))["failure"] == ""


def test_a_wrong_answer_is_a_failure(small, task, monkeypatch):
    monkeypatch.setitem(ways.WAYS, "wrong", lambda call, module, file: lambda x: call(x) + 1)
    assert "similarity" in measure.measured(task("wrong"))["failure"]


def test_processes_and_their_answers(monkeypatch, tmp_path):
    asked = []

    def answer(given, caches, limit):
        asked.append((given["way"], given["only_start"], caches))
        if given["way"] == "tritonite-record":
            Path(given["file"]).touch()
        return {"cold": 0.5} if given["only_start"] else dict(GOOD)

    monkeypatch.setattr(run, "_answer", answer)
    plan = run.Plan(models=["llama"], ways=["inductor", "tritonite-file"])
    found = sorted(run.measure(plan), key=run.position)
    # A training step has no file; the file of each other phase is written by another process, with other caches.
    assert [(each.phase, each.way) for each in found] == [
        ("prefill", "inductor"),
        ("prefill", "tritonite-file"),
        ("decode", "inductor"),
        ("decode", "tritonite-file"),
        ("train", "inductor"),
    ]
    assert run.count(plan) == len(found) and found[0].cached == 0.5 and found[1].cached is None
    assert [each[:2] for each in asked[:4]] == [
        ("inductor", False),
        ("inductor", True),
        ("tritonite-record", False),
        ("tritonite-file", False),
    ]
    assert asked[0][2] == asked[1][2] != asked[2][2] != asked[3][2]


def test_a_process_that_fails_or_takes_long(monkeypatch, tmp_path):
    monkeypatch.setattr(processes.sys, "executable", "/bin/false")
    given = {"turns": str(tmp_path / "turns")}
    assert run._answer(given, str(tmp_path), 60.0) == {"failure": "it ended with exit code 1"}
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(slow))
    assert run._answer(given, str(tmp_path), 0.2) == {"failure": "no answer within 0 s"}
    assert processes.parsed("a warning\n" + json.dumps(GOOD)) == GOOD
    for output in ("", "no answer", "[1]"):
        assert processes.parsed(output) == {"failure": "the process gave no answer"}
    assert processes._reason("Traceback:\n  File\nValueError: bad\n    hint\n") == "ValueError: bad"


def state(process):
    """Return a process's state: S if it sleeps, T if it was stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def settles(process, expected):
    until = time.monotonic() + 10
    while state(process) != expected:
        assert time.monotonic() < until
        time.sleep(0.01)
    return True


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_the_others_are_stopped_while_one_runs_alone(tmp_path, sleeper):
    turns = Turns(tmp_path)
    begin = time.perf_counter()
    assert turns.stopped(begin, begin + 1) == 0
    with turns.joined(sleeper.pid):
        with turns.alone():
            assert settles(sleeper, "T")
            middle = time.perf_counter()
        assert settles(sleeper, "S")
        end = time.perf_counter()
        alone = Turns(tmp_path).stopped(begin, end)
        assert 0 < middle - begin - 1e-3 < alone < end - begin
        assert 0 < turns.stopped(middle, end) < alone and turns.stopped(end, end + 1) == 0


def test_the_others_go_on_when_the_one_that_runs_alone_is_killed(tmp_path, sleeper):
    turns = Turns(tmp_path)
    source = "import time; from pathlib import Path; from tritonite.bench.turns import Turns\n"
    source += f"with Turns(Path({str(tmp_path)!r})).alone(): time.sleep(60)"
    with turns.joined(sleeper.pid):
        killed = subprocess.Popen([sys.executable, "-W", "ignore", "-c", source], start_new_session=True)
        with turns.joined(killed.pid):
            until = time.monotonic() + 60
            while state(sleeper) != "T":
                assert time.monotonic() < until and killed.poll() is None
                time.sleep(0.05)
            killed.kill()
            killed.wait()
        assert settles(sleeper, "S")


def test_no_process_outlives_the_end(tmp_path, sleeper):
    turns = Turns(tmp_path)
    turns.end()
    with turns.joined(sleeper.pid):
        assert sleeper.wait(10) == -signal.SIGKILL


def test_a_file_is_read_when_another_process_has_written_it(monkeypatch):
    def answer(given, caches, limit):
        if given["way"] == "tritonite-record" and not given["only_start"]:
            time.sleep(0.2)
            Path(given["file"]).touch()
        if given["way"] == "tritonite-file":
            assert Path(given["file"]).exists()
        return {"cold": 0.5} if given["only_start"] else dict(GOOD)

    monkeypatch.setattr(run, "_answer", answer)
    plan = run.Plan(models=["vit", "bert"], jobs=4)
    found = sorted(run.measure(plan), key=run.position)
    assert [(each.model, each.way) for each in found] == [
        (model, way) for model in ("bert", "vit") for way in ways.WAYS
    ]
    assert not any(each.failure for each in found)


def test_results_as_json_and_as_a_table(tmp_path):
    made = GraphResult.of_json({"model": "bert", "phase": "prefill", "dtype": "float32", "way": "eager", **GOOD})
    failed = GraphResult("bert", "prefill", "float32", "inductor", failure="a|b")
    GraphRun(MACHINE, [made, failed]).save(tmp_path / "x.json")
    again = GraphRun.load(tmp_path / "x.json")
    assert again.machine == MACHINE and again.results[0] == made and again.results[1].failure == "a|b"
    lines = list(results.table(again))
    assert lines[0].startswith("| GPU | way | cold start, s |")
    assert lines[2] == "| bert prefill, float32, 1x16 | eager | 1.50 |  |  |  | 1.50 |  |"
    assert lines[3] == "|  | inductor | failed: a/b |  |  |  |  |  |"
    assert len({line.count("|") for line in lines}) == 1
    for text in ("", "{}", '{"schema": 2}', '{"schema": 1, "machine": {}, "results": []}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(InvalidResults):
            GraphRun.load(tmp_path / "x.json")


def test_the_table_of_the_guide(tmp_path, monkeypatch):
    import readme_tables

    monkeypatch.setattr(readme_tables, "FOLDER", tmp_path)
    assert "bench --graphs" in "\n".join(readme_tables.graphs())
    GraphRun(MACHINE, [GraphResult("vit", "forward", "float32", "eager", cold=1.0)]).save(tmp_path / "graphs.json")
    assert list(readme_tables.graphs())[2].startswith("| vit forward | eager | 1.00 |")


@pytest.mark.parametrize("given", [["--model", "t5"], ["--provider", "compile"]])
def test_unknown_names_are_refused(given):
    from tritonite.cli import app

    found = CliRunner().invoke(app, ["bench", "--graphs", *given])
    assert found.exit_code == 2 and "is none of" in found.output


def test_the_command(monkeypatch, tmp_path):
    from tritonite.cli import app

    monkeypatch.setattr(run, "_answer", lambda given, caches, limit: dict(GOOD))
    path = tmp_path / "graphs.json"
    given = ["bench", "--graphs", "--quick", "--model", "bert", "--provider", "eager", "--json", str(path)]
    found = CliRunner().invoke(app, given)
    assert found.exit_code == 0, found.output
    assert "| bert prefill" in found.output and GraphRun.load(path).results[0].cold == 1.5


def test_a_failure_names_the_place_in_the_package():
    errors = """a warning
Traceback (most recent call last):
  File "/somewhere/tritonite/bench/models/apart.py", line 90, in <module>
    run()
  File "/somewhere/tritonite/engine/gemm/select.py", line 12, in choose
    compile()
  File "/somewhere/triton/compiler.py", line 1, in compile
    raise
RuntimeError: PassManager::run failed"""
    place = "tritonite/engine/gemm/select.py:12, in choose"
    assert processes._reason(errors) == f"RuntimeError: PassManager::run failed ({place})"
    # PyTorch's errors of CUDA end with hints that are not indented.
    hints = "\nSearch for `cudaErrorMemoryAllocation' in the manual.\nCompile with `TORCH_USE_CUDA_DSA`.\n"
    found = processes._reason(errors.replace("PassManager::run failed", "CUDA error: out of memory") + hints)
    assert found == f"RuntimeError: CUDA error: out of memory ({place})" and processes.memory_is_full(found)
    assert processes.memory_is_full("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert not processes.memory_is_full("CUDA error: an illegal memory access was encountered")
    assert processes._reason("ValueError: no\n") == "ValueError: no" and processes._reason("") == ""
