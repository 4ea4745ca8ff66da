"""Randomly drawn bench cases: reproducible by seed, of sizes that models have, and reported together."""

import dataclasses
import functools
import statistics

import pytest
import torch
from torch.utils import _pytree as pytree
from typer.testing import CliRunner

import tritonite
from tritonite import cli
from tritonite.bench import drawing, drawn, families, fused_family, percentiles, run, timing
from tritonite.bench.fused import PAIRS
from tritonite.bench.results import Machine, Result, Run, Timing, quantile
from tritonite.testing.samples import Sample

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
ATTEMPTS = 12


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Return sizes for the interpreter, on a GPU as well."""
    sizes_of(monkeypatch, drawing.TINY)


def sizes_of(monkeypatch, sizes):
    monkeypatch.setattr(drawn, "Source", functools.partial(drawing.Source, sizes=sizes))


def told(cases):
    return [(case.op, case.family, case.label, case.dtype, case.number) for case in cases]


def operands(case):
    """Return the operands of a case's call, on the meta device."""
    made = case.operands(lambda *shape: torch.empty(shape, dtype=case.dtype, device="meta"))
    found = (made.args, made.kwargs) if isinstance(made, Sample) else list(made)
    return [value for value in pytree.tree_leaves(found) if isinstance(value, torch.Tensor)]


def bench(*arguments, code=0):
    result = runner.invoke(cli.app, ["bench", "--rounds", "1", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return " ".join(result.output.split())


def test_a_seed_draws_the_same_and_another_seed_does_not():
    first = told(drawn.cases(10, 7))
    assert first == told(drawn.cases(10, 7)) and len(first) == 10 * len(drawing.FAMILIES)
    assert first != told(drawn.cases(10, 8))


def test_a_case_by_its_number_is_the_one_among_others():
    (alone,) = drawn.cases(0, 7, [4], families=["norms"])
    assert told([alone])[0] in told(drawn.cases(5, 7))
    values = (pytree.tree_leaves(case.sample().args) for case in (alone, drawn.cases(5, 7, families=["norms"])[4]))
    for a, b in zip(*values, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_another_operator_changes_few_draws():
    names = [f"operator{i}" for i in range(100)]
    pairs = [[drawing.named(drawing.Source(f"{i}"), among) for among in (names, [*names, "new"])] for i in range(300)]
    assert sum(before != after for before, after in pairs) < 15 and len({after for _, after in pairs}) > 50


@pytest.mark.parametrize("family", drawing.FAMILIES)
def test_drawn_calls_are_served(family):
    checks = [run.check(case, [timing.TRITONITE]) for case in drawn.cases(ATTEMPTS, 3, families=[family])]
    assert [check.failure for check in checks] == [""] * ATTEMPTS
    assert sum(check.taken and not check.declined for check in checks) > ATTEMPTS / 2


def test_sizes_are_those_of_models(monkeypatch):
    sizes_of(monkeypatch, drawing.OF_MODELS)
    cases = drawn.cases(60, 1)
    counts = [[each.numel() for each in operands(case)] for case in cases]
    assert max(map(max, counts)) <= 2**28 and max(map(sum, counts)) <= 2**29
    assert statistics.median(map(max, counts)) > 10_000
    products = [case for case in cases if case.family == "products"]
    widths = {size for case in products for each in operands(case) for size in each.shape}
    assert any(size % 8 for size in widths if size > 300) and 2e9 < max(case.flops for case in products) < 1e13
    dimensions = {operands(case)[0].dim() for case in cases if case.family == "reductions"}
    assert dimensions == {1, 2, 3, 4}


def test_every_layout_is_drawn():
    layouts = [drawing.laid(drawing.Source(str(i)), (4, 6, 8))(torch.empty) for i in range(60)]
    assert {tuple(each.shape) for each in layouts} == {(4, 6, 8)}
    strides = {each.stride() for each in layouts}
    assert {(48, 8, 1), (48, 1, 6), (96, 16, 2), (144, 24, 1)} <= strides and len(strides) > 6


def test_sizes_are_split_into_a_given_number():
    for i in range(50):
        sizes = drawing.split(drawing.Source(str(i)), 1000, i % 4)
        assert len(sizes) == i % 4 and torch.Size(sizes).numel() <= 1000 and min(sizes, default=1) >= 1


def test_short_calls_are_captured(monkeypatch):
    sizes_of(monkeypatch, drawing.OF_MODELS)
    monkeypatch.setattr(tritonite, "backend", dataclasses.replace(tritonite.backend, profiled=True))
    for case in drawn.cases(40, 1, families=["pointwise"]):
        count = max(each.numel() for each in operands(case))
        assert case.measure == ("graph" if count < 2**20 else "device") or 2**20 <= count < 2**26
    assert {case.measure for case in drawn.cases(40, 1, families=["products"])} == {"graph", "device"}
    assert {case.measure for case in drawn.cases(4, 1, measures=["host"])} == {"host"}


def test_calls_that_cannot_be_captured_are_measured_without_a_graph(monkeypatch):
    def measure(calls, op, kind, rounds):
        if kind == "graph":
            raise RuntimeError("operation not permitted when stream is capturing")
        return {"aten": Timing(2, 2, 2), "tritonite": Timing(1, 1, 1)}

    monkeypatch.setattr(timing, "measure", measure)
    (case,) = drawn.cases(0, 7, [1], ["graph"], families=["softmax"])
    (result,) = run.run([case], [timing.TRITONITE])
    assert result.measure == "device" and result.times and not result.failure


def test_the_last_of_a_family_registers_itself(monkeypatch):
    monkeypatch.setattr(drawing, "FAMILIES", dict(drawing.FAMILIES))

    @drawing.family("copies")
    def copies(random):
        return families.Call("exp", "exp", lambda make: [make(random.randrange(1, 9))])

    assert list(drawing.FAMILIES)[-1] == "copies"


def drawn_run():
    def result(speedup, number, **fields):
        times = {"aten": Timing(speedup, speedup, speedup), "tritonite": Timing(1, 1, 1)}
        given = {"op": "mm", "family": "products", "label": str(number), "dtype": "float16", "measure": "graph"}
        return Result(**given, elements=1, bytes=1, times=times, number=number, **fields)

    results = [result(speedup, number) for number, speedup in enumerate((4.0, 1.0, 2.0))]
    results.append(result(0.1, 3, declined="mm: too thin"))
    return Run(Machine("x", "nvidia", {}, "", "tritonite bench", "", 1e12, seed=7), results)


def test_percentiles_are_of_what_kernels_served():
    found = drawn_run()
    products, every = percentiles.percentiles(found)
    assert (products.family, products.dtype, products.cases, products.served) == ("products", "float16", 4, 3)
    assert products.speedups == (1.0, pytest.approx(1.2), 2.0, pytest.approx(2.0))
    assert every.family == "all" and every.speedups == products.speedups
    assert percentiles.declines(found) == [("mm: too thin", 1)]
    assert [speedup for speedup, _ in percentiles.worst(found, 2)] == [1.0, 2.0]
    _, lowest = percentiles.worst(found)[0]
    assert percentiles.reproduction(found, lowest) == "tritonite bench --seed 7 --family products --case 1"
    assert not list(percentiles.percentiles(Run(found.machine, [])))


def test_quantiles_are_between_neighbours():
    assert [quantile([1, 2, 4], share) for share in (0, 0.25, 0.5, 1)] == [1, 1.5, 2, 4]


def test_the_command_draws_and_draws_again(tmp_path):
    file, page = tmp_path / "drawn.json", tmp_path / "page.html"
    text = bench("--drawn", 2, "--seed", 5, "--family", "softmax", "--family", "norms", "--json", file, "--html", page)
    assert "geometric mean" in text and "tritonite bench --seed 5 --family softmax --case" in text
    found = Run.load(file)
    assert found.machine.seed == 5 and [each.number for each in found.results] == [0, 1, 0, 1]
    assert "Drawn at random" in page.read_text()
    again = tmp_path / "again.json"
    bench("--seed", 5, "--family", "norms", "--case", 1, "--json", again, "--jobs", 1)
    (result,) = Run.load(again).results
    assert result.key in {each.key for each in found.results if each.number == 1}


def test_processes_check_what_is_drawn(tmp_path):
    if tritonite.device == "cuda":
        pytest.skip("other processes draw sizes of models")
    for jobs in (1, 2):
        bench("--drawn", 2, "--family", "softmax", "--jobs", jobs, "--json", tmp_path / f"{jobs}.json")
    one, two = ([each.key for each in Run.load(tmp_path / f"{jobs}.json").results] for jobs in (1, 2))
    assert one == two and len(one) == 2


def test_fused_operators_are_drawn_at_sizes_of_models(monkeypatch):
    sizes_of(monkeypatch, drawing.OF_MODELS)
    cases = drawn.cases(400, 1, families=["fused"])
    assert len({case.op for case in cases}) > 0.9 * len(PAIRS) and all(case.pair is PAIRS[case.op] for case in cases)
    counts = [[each.numel() for each in operands(case)] for case in cases]
    assert max(map(max, counts)) <= 2**28 and max(map(sum, counts)) <= 2**29
    assert statistics.median(map(max, counts)) > 100_000


def test_pairs_with_shapes_of_their_own_have_a_draw():
    """Other pairs take (rows, width)."""
    assert {name for name, pair in PAIRS.items() if pair.shapes is not None} <= set(fused_family.SHAPES) <= set(PAIRS)


def test_drawn_fused_operators_are_timed_beside_their_composition(tmp_path):
    file = tmp_path / "drawn.json"
    bench("--drawn", 2, "--seed", 5, "--family", "fused", "--json", file)
    found = Run.load(file).results
    assert [each.number for each in found] == [0, 1] and all(set(each.times) == {"aten", "tritonite"} for each in found)
    again = tmp_path / "again.json"
    bench("--seed", 5, "--family", "fused", "--case", 1, "--json", again, "--jobs", 1)
    assert [each.key for each in Run.load(again).results] == [found[1].key]
