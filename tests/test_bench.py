"""Benchmark cases, clocks and the command, in the interpreter where there is no GPU."""

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from test_tools import load
from typer.testing import CliRunner

import tritonite
from tritonite import cli
from tritonite.bench import attention, cases, console, drawn, indexing, models, random, run, timing, workers
from tritonite.bench.fused import PAIRS
from tritonite.bench.results import Machine, ModelResult, Result, Run, Timing
from tritonite.errors import InvalidProvider
from tritonite.testing.judge import judge, terms

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
SMALL = ["--shape", "16x64"] if tritonite.backend.interpreted else ["--shape", "16x8192"]


def bench(*arguments, code=0):
    result = runner.invoke(cli.app, ["bench", *SMALL, "--rounds", "2", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return " ".join(result.output.split())


@functools.cache
def chosen(op, dtype=torch.float32):
    return next(case for case in cases.cases(measures=["device"]) if case.op == op and case.dtype is dtype)


def name(case):
    return f"{case.op} {case.label} {case.dtype} {case.measure}"


def test_every_operator_has_cases():
    packets = {op.packet for op in tritonite.overloads().values() if not op.out_names and op.schema.returns}
    # This operator waits for the device.
    packets.remove("equal")
    packets -= cases.ONLY_ON_CPUS if tritonite.device == "cuda" else set()
    assert {case.packet for case in cases.cases() if case.pair is None} == packets
    keys = list(map(name, cases.cases()))
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    "case", [case for i, case in enumerate(cases.cases(measures=["device"])) if i % 41 == 0], ids=name
)
def test_cases_can_be_called(case):
    # In some cases other arguments have the shape, too.
    if not tritonite.backend.interpreted and case.pair is None and case.family not in indexing.FAMILIES:
        op = tritonite.overloads()[case.overload]
        shape = cases._shapes(op)[1] if op.family in ("linalg", "matmul") else (16, 64)
        case = dataclasses.replace(case, operands=cases._alike(op, shape))
    try:
        sample = case.sample()
        result = run.function_of(case.overload, sample)(*sample.args, **sample.kwargs)
    except NotImplementedError as error:
        pytest.skip(f"ATen does not serve it on this device: {error}")
    assert isinstance(result, (torch.Tensor, tuple, list))


def test_aten_accepts_the_dtype_of_every_case():
    found = {case.dtype for case in cases.cases(ops=["view_as_complex_copy"])}
    assert found == {torch.float16, torch.float32}


@pytest.mark.parametrize("op", PAIRS)
def test_fused_cases_have_compositions(op):
    case = next(cases.cases(measures=["device"], ops=[op]))
    # The last case measures the host.
    shape = case.pair.shapes[1] if case.pair.shapes else cases.INTERPRETED[0]
    if not tritonite.backend.interpreted:
        case = dataclasses.replace(case, operands=functools.partial(cases._of_pair, case.pair, shape))
    results = list(run.run([case], [timing.TRITONITE], rounds=1))
    if not results:
        pytest.skip("ATen does not serve it on this device")
    assert not results[0].failure and set(results[0].times) == {"aten", "tritonite"}


def test_bytes_of_cases_are_those_of_their_tensors(device):
    x, row = torch.zeros(8, 16, device=device), torch.zeros(16, device=device)
    sample = cases.Sample("", (x, row.expand(8, 16), 2), {"alpha": 1})
    assert cases.bytes_moved("add", sample, [x]) == 4 * (128 + 16 + 128)
    assert cases.bytes_moved("zero", cases.Sample("", (x,), {}), [x.half()]) == 2 * 128


def test_quick_cases_are_a_subset():
    def keys(found):
        return set(map(name, found))

    assert keys(cases.cases(quick=True)) < keys(cases.cases())


def test_timings_are_medians_and_quartiles():
    assert Timing.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Timing(3.0, 2.0, 4.0)
    assert Timing.of([1.0, 2.0]) == Timing(1.5, 1.25, 1.75)
    assert Timing(3.0, 2.0, 4.0).spread == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", ["device", "host"] if tritonite.device == "cpu" else ["device", "host", "graph"])
def test_providers_take_turns(kind, device, monkeypatch):
    monkeypatch.setattr(timing, "_HOST_CALLS", 1)
    order, x = [], torch.zeros(4, device=device)

    def provider(name):
        @contextlib.contextmanager
        def scope(op):
            order.append(name)
            assert op == "exp"
            yield

        return timing.Provider(name, scope)

    a, b = provider("a"), provider("b")
    times = timing.measure({a: x.exp, b: x.exp}, "exp", kind, rounds=3)
    assert set(times) == {"a", "b"} and all(0 < t.low <= t.median <= t.high for t in times.values())
    assert order == ["a", "b"] * (1 if kind == "graph" else 4)


def test_times_are_in_microseconds_by_the_clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def lasting(seconds):
        def call():
            now[0] += seconds

        return call

    slow = timing.Provider("slow")
    times = timing.measure({timing.ATEN: lasting(1e-4), slow: lasting(2e-3)}, "exp", "host", rounds=1)
    assert times["aten"].median == pytest.approx(100) and times["slow"].median == pytest.approx(2000)


@contextlib.contextmanager
def wrong():
    """exp with a small error."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("exp", lambda x: torch.exp2(x), tritonite.backend.dispatch_key)
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.filterwarnings("ignore:(?s).*verrid")
def test_a_wrong_answer_is_not_timed_in_a_case():
    case = chosen("exp")
    (result,) = run.run([case], [timing.Provider("wrong", lambda _: wrong())], rounds=1)
    assert not result.times and "wrong gives another answer than ATen" in result.failure
    results = list(run.run([case], [timing.TRITONITE], rounds=1))
    if not results:
        pytest.skip("ATen does not serve it on this device")
    assert not results[0].failure and set(results[0].times) == {"aten", "tritonite"}


def test_roundoff_grows_with_the_terms():
    own, aten, exact = torch.tensor([3e-6]), torch.tensor([0.0]), torch.tensor([0.0], dtype=torch.float64)
    assert judge(own, aten, exact).failure and not judge(own, aten, exact, terms=64).failure
    assert judge(10 * own, aten, exact, terms=64).failure


def test_operands_of_no_elements_have_one_term():
    nothing = torch.empty(0, 3)
    assert terms("native_group_norm_backward", (nothing, nothing), nothing) == 1


@pytest.mark.parametrize(
    ("alpha", "scale"), [(3e38, 3e38), (1e300, 1e60), (-4.0, 4.0), (0.5, 1.0), (float("inf"), 1.0)]
)
def test_roundoff_of_products_scales_with_their_factors(alpha, scale):
    a = torch.ones(4, 16)
    assert terms("addmm", (a[:, :4], a, a.mT), a, None, alpha) == terms("addmm", (a[:, :4], a, a.mT), a) * scale**2
    assert terms("sum", (a,), a[0], None, alpha) == terms("sum", (a,), a[0])


def test_long_products_allow_the_truncation_of_tensor_cores():
    # cuBLAS has the same error without split-K: partial sums are 360 on average.
    wide = torch.Generator().manual_seed(0)
    a, b = [torch.rand(13824, generator=wide).mul(6).sub(3).half() for _ in range(2)]
    own, aten, exact = [torch.tensor([value]) for value in (0.1270751953125, 0.135498046875, 0.13667864765739068)]
    few, many = [terms("mm", (a[None, :n], b[:n, None]), own) for n in (1024, 13824)]
    for term, wrong in ((few, True), (many, False)):
        assert bool(judge(own.half(), aten.half(), exact.double(), terms=term).failure) is wrong
    assert judge(own.half() - 0.02, aten.half(), exact.double(), terms=many).failure
    assert terms("mm", (a.float()[None], b.float()[:, None]), own) < many


def test_terms_of_products_count_all_batches():
    a = torch.ones(8, 4, 16)
    assert terms("addbmm", (a[0, :, :4], a, a.mT), a[0]) == (8 * terms("bmm", (a, a.mT), a) ** 0.5) ** 2


def test_an_error_is_a_result():
    def fail():
        raise RuntimeError("no\nmore")

    (result,) = run.run([chosen("exp")], [timing.Provider("broken", lambda _: fail())], rounds=1)
    assert result.failure == "RuntimeError: no" and not result.times


def test_calls_that_aten_refuses_are_skipped(monkeypatch):
    def refuse(*_):
        raise NotImplementedError("not for this dtype")

    monkeypatch.setattr(run, "function_of", lambda *_: refuse)
    assert list(run.run([chosen("exp")], [timing.TRITONITE])) == []


@pytest.mark.parametrize("text", ["inductor", "x=", "=a:b", "x=nowhere:f", "x=math:nothing", "aten=math:pi"])
def test_unknown_providers_are_refused(text):
    with pytest.raises(InvalidProvider):
        run.provider(text)


def fragile():
    """Yield cases: one ends its process, one raises, two run out of memory, and two pass."""

    def end(make):
        os._exit(3)

    def refuse(make):
        raise ValueError("no\nmore")

    def exhaust(make):
        raise torch.OutOfMemoryError

    def launch(make):
        raise RuntimeError("CUDA error: out of memory")

    operands = [None, end, refuse, exhaust, None, launch]
    return [chosen("exp") if made is None else dataclasses.replace(chosen("exp"), operands=made) for made in operands]


def test_a_case_that_ends_its_process_fails_alone():
    found = dict(workers.checks(fragile, 6, (), 2))
    assert sorted(found) == list(range(6)) and found[5] is None
    assert found[0] == found[4] == run.check(chosen("exp"), [timing.TRITONITE]) and not found[0].failure
    assert "exit code 3" in found[1].failure and found[2].failure == "ValueError: no" and found[3] is None
    assert not multiprocessing.active_children()


def endless():
    return [dataclasses.replace(chosen("exp"), operands=lambda make: time.sleep(1000))]


def test_a_case_that_hangs_fails(monkeypatch):
    monkeypatch.setattr(workers, "_PATIENCE", 1.0)
    (found,) = workers.checks(endless, 1, (), 2)
    assert found == (0, run.Check(failure="no answer within 1 s")) and not multiprocessing.active_children()


def test_several_processes_check_the_same_cases_as_one(tmp_path):
    arguments = ["--op", "neg", "--op", "s*mm", "--op", "celu*", "--measure", "device"]
    files = [tmp_path / f"{jobs}.json" for jobs in (1, 2)]
    for jobs, file in enumerate(files, 1):
        bench(*arguments, "--jobs", jobs, "--json", file)
    one, two = ([dataclasses.replace(each, times={}) for each in Run.load(file).results] for file in files)
    assert one == two and len(one) > 2
    assert all(set(each.times) == {"aten", "tritonite"} and not each.declined for each in Run.load(files[1]).results)


def test_checked_cases_are_not_checked_again(monkeypatch):
    monkeypatch.setattr(run, "check", None)
    checks = [run.Check(1, 2, "wrong"), run.Check(taken=False), run.Check(3, 4, declined="why")]
    results = list(run.run([chosen("exp")] * 3, [timing.TRITONITE], 1, checks))
    assert [each.failure for each in results] == ["wrong", ""] and [each.bytes for each in results] == [1, 3]
    assert not results[0].times and results[1].times and results[1].declined == "why"


def test_ctrl_c_ends_the_processes_that_check(monkeypatch):
    def stopped(*_):
        assert multiprocessing.active_children()
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", stopped)
    assert "interrupted" in bench("--op", "neg", "--jobs", 2, code=130)
    assert not multiprocessing.active_children()


def test_waves_grow_and_have_every_case():
    assert [len(wave) for wave in workers.waves(40, 4)] == [4, 8, 16, 12]
    assert [index for wave in workers.waves(40, 4) for index in wave] == list(range(40))
    assert list(workers.waves(0, 4)) == []


def numbered():
    """Yield cases whose operands note in a file that they were made."""

    def made(number, make):
        Path(os.environ["CHECKED"]).joinpath(str(number)).touch()
        return (make(2),)

    return [dataclasses.replace(chosen("exp"), operands=functools.partial(made, i)) for i in range(5)]


def test_no_process_checks_while_a_wave_is_timed(monkeypatch, tmp_path):
    monkeypatch.setenv("CHECKED", str(tmp_path))
    with contextlib.closing(workers.checks(numbered, 5, (), 1)) as found:
        assert next(found)[0] == 0
        time.sleep(0.2)
        assert {file.name for file in tmp_path.iterdir()} == {"0"}
        assert [index for index, _ in found] == [1, 2, 3, 4]


def test_results_are_lines_before_they_are_a_table():
    text = bench("--op", "neg", "--measure", "device", "--dtype", "float32", "--jobs", 2)
    assert text.index("float32 device: aten ") < text.index("roofline")


def test_long_checks_are_told_of(monkeypatch):
    monkeypatch.setattr(console, "_TOLD_EVERY", -1.0)
    assert "1 of 1 cases checked" in bench("--op", "neg", "--measure", "device", "--dtype", "float32", "--jobs", 2)


def test_few_cases_are_checked_in_one_process(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert [workers.usual_jobs(count) for count in (0, 1, 8, 10_000)] == [1, 1, 2, 8]


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "other", types.SimpleNamespace(scope=contextlib.nullcontext))
    monkeypatch.setattr(sys, "argv", ["cli.py", "bench", "--op", "a b"])
    file = tmp_path / "deep" / "results.json"
    text = bench(
        "--op", "neg", "--dtype", "float16", "--measure", "device", "--provider", "other=other:scope", "--json", file
    )
    assert "neg" in text and "16x" in text and "geometric mean" in text
    assert ("interpreter" in text) is tritonite.backend.interpreted
    found = Run.load(file)
    assert found.providers() == ["aten", "tritonite", "other"] and len(found.results) == 1
    assert found.machine.copy_bandwidth > 0 and found.machine.command == "tritonite bench --op 'a b'"


@pytest.mark.parametrize("at_random", [False, True])
def test_shards_cover_all_cases_once(at_random):
    which = functools.partial(drawn.cases, 6, 3) if at_random else functools.partial(cases.chosen, True, ["device"])
    parts = [cases.shard(which, i, 3) for i in range(3)]
    assert sorted(name(case) for part in parts for case in part) == sorted(map(name, which()))
    assert all(parts) and max(map(len, parts)) < len(which())
    if not at_random:
        operators = [{case.op for case in part} for part in parts]
        assert sum(map(len, operators)) == len(set.union(*operators))
    times = {"aten": Timing(1.0, 1.0, 1.0)}
    results = [
        [Result(c.op, c.family, c.label, str(c.dtype), c.measure, 1, 1, times=times, number=c.number) for c in part]
        for part in parts
    ]
    machine = Machine("", "", {}, "", "", "", 1e12)
    whole = Run.of_shards([Run(machine, each) for each in results], "tritonite bench")
    assert [(each.op, each.label, each.number) for each in whole.results] == [
        (case.op, case.label, case.number) for case in which()
    ]


@pytest.mark.parametrize("part", ["2/2", "1", "a/b", "-1/2"])
def test_malformed_shards_are_refused(part):
    assert "is not I/N" in bench("--op", "neg", f"--part={part}", code=2)


def test_every_gpu_measures_a_shard(tmp_path, monkeypatch):
    tool, file = load("bench_on_gpus"), tmp_path / "results.json"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # Both processes use the first GPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    options = ["--op", "neg", "--op", "relu", "--dtype", "float16", "--measure", "device", "--rounds", "1", *SMALL]
    monkeypatch.setattr(sys, "argv", ["bench_on_gpus.py", *options, "--json", str(file)])
    assert tool.main() == 0
    assert {result.op for result in Run.load(file).results} == {"neg", "relu"}


def test_the_command_measures_models(tmp_path):
    pytest.importorskip("transformers")
    file, page = tmp_path / "results.json", tmp_path / "report.html"
    text = bench("--model", "bert", "--tokens", "3", "--batch", "2", "--json", file, "--html", page)
    assert "bert prefill" in text and "tokens/s" in text and "gelu" in text
    (found,) = Run.load(file).models
    assert (found.batch, found.tokens, set(found.times)) == (2, 3, {"aten", "tritonite"})
    assert "bert" in page.read_text()


def test_the_command_compares(tmp_path, monkeypatch):
    def took(own):
        times = {"aten": Timing(10.0, 9.9, 10.1), "tritonite": Timing(own, own - 0.1, own + 0.1)}
        return lambda *_: dict(times)

    monkeypatch.setattr(timing, "measure", took(10.0))
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e12)
    file = tmp_path / "results.json"
    bench("--op", "neg", "--dtype", "float16", "--json", file)
    assert "0 cases slower" in bench("--op", "neg", "--dtype", "float16", "--compare", file)
    monkeypatch.setattr(timing, "measure", took(30.0))
    assert "1 cases slower" in bench("--op", "neg", "--dtype", "float16", "--compare", file, code=1)


def test_ctrl_c_keeps_measured_results(tmp_path, monkeypatch):
    measured = run.run

    def stopped(chosen, *rest):
        yield from measured(chosen[:1], *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", stopped)
    file = tmp_path / "results.json"
    assert "interrupted" in bench("--op", "neg", "--json", file, code=130)
    found = Run.load(file)
    assert found.interrupted and len(found.results) == 1


def test_a_killed_run_leaves_its_results(tmp_path, monkeypatch):
    file, seen = tmp_path / "results.json", []

    def measured(*_, **__):
        for packet in ("neg", "abs"):
            times = dict.fromkeys(("aten", "tritonite"), Timing(1, 1, 1))
            yield Result(packet, "arithmetic", "64x64", "float32", "device", 1, 1, times=times)
            seen.append(Run.load(file))

    monkeypatch.setattr(run, "run", measured)
    monkeypatch.setattr(console, "_SAVED_EVERY", -1.0)
    bench("--op", "neg", "--json", file)
    assert [len(each.results) for each in seen] == [1, 2] and all(each.interrupted for each in seen)
    assert not Run.load(file).interrupted


def test_ctrl_c_keeps_the_models_passes(tmp_path, monkeypatch):
    passed = ModelResult("bert", "prefill", "float32", 1, 3, {"aten": Timing(1, 1, 1)}, {"aten": Timing(1, 1, 1)})

    def stopped(*_, **__):
        yield passed
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "measure", stopped)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e12)
    file = tmp_path / "results.json"
    assert "interrupted" in bench("--model", "bert", "--model", "llama", "--json", file, code=130)
    found = Run.load(file)
    assert found.interrupted and found.models == [passed]


@pytest.mark.parametrize(
    "arguments",
    [("--op", "no_such"), ("--measure", "nothing"), ("--dtype", "float23", "--op", "neg"), ("--model", "gpt")],
)
def test_contradictory_options_are_refused(arguments):
    bench(*arguments, code=2)


def test_rates_are_of_this_machine():
    assert 1e8 < timing.copy_bandwidth() < 1e14
    rates = dict(timing.matmul_rates([torch.float32]))
    assert set(rates) == {"float32"} and 1e8 < rates["float32"] < 1e16


def test_roofline_shares():
    machine = Machine("x", "nvidia", {}, "", "", "", copy_bandwidth=1e12, matmul_rates={"float16": 1e14})
    case = functools.partial(cases_result, times={"aten": Timing(2.0, 2.0, 2.0)})
    assert Run(machine).roofline_share(case(bytes=10**6), "aten") == pytest.approx(0.5)
    assert Run(machine).roofline_share(case(bytes=10**3, flops=10**8), "aten") == pytest.approx(0.5)
    assert Run(machine).roofline_share(case(bytes=10**6, measure="host"), "aten") is None


def cases_result(**fields):
    from tritonite.bench.results import Result

    base = {"op": "x", "family": "f", "label": "1", "dtype": "float16", "measure": "device", "elements": 1}
    return Result(**{**base, **fields})


def test_packed_decoding_has_few_queries():
    """The label says how many queries a sequence has; each query sees all keys."""
    heads = attention.Heads(3, 4, 2, 32, 16, queries=1)
    query, key, value, *starts = attention.packed_forward("_flash_attention_forward", heads, torch.empty).args[:5]
    assert (query.shape, key.shape, value.shape) == ((3, 4, 16), (96, 2, 16), (96, 2, 16))
    assert [each.tolist() for each in starts] == [[0, 1, 2, 3], [0, 32, 64, 96]]


def test_cases_of_dtypes_that_an_operator_lacks_are_left_out():
    """view_as_real_copy has no float16 sample, and float16 cannot count as far as randperm needs."""
    chosen = [*cases.cases(ops=["view_as_real_copy"], measures=("device",))]
    assert {run.check(case, [run.TRITONITE]).taken for case in chosen if case.dtype is torch.float16} == {False}
    with pytest.raises(NotImplementedError):
        random.given("randperm", (4096,), torch.float16)["n"]()
