"""Tuned tiles: the store that processes share, the choice from it, and the candidates."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from triton.backends.compiler import GPUTarget
from typer.testing import CliRunner

import tritonite
from tritonite import cli, devices
from tritonite.engine.gemm import cost as gemm_cost
from tritonite.engine.gemm import fitted, select, store
from tritonite.engine.gemm.operands import has_descriptor, worth_copying
from tritonite.engine.gemm.problem import Problem
from tritonite.engine.gemm.table import Config, FixedCosts
from tritonite.errors import ATEN_IS_FASTER, Decline
from tritonite.runtime import contract
from tritonite.tuning import sweep, tuner

PROBLEM = Problem(1, 64, 256, 512, torch.bfloat16, torch.bfloat16, True, True)
DEVICE = torch.device(tritonite.device, 0) if tritonite.device == "cuda" else torch.device("cpu")


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONITE_TUNE", str(tmp_path / "folder" / "tune.sqlite"))
    store.known.cache_clear()
    yield
    store.known.cache_clear()


def test_what_is_stored_is_chosen():
    config = Config(32, 64, 32, 4, 2, splits=2, descriptors=True)
    assert select.choose(PROBLEM, DEVICE, True) != config
    store.save(devices.name_of(DEVICE), PROBLEM.key, config, 12.5)
    assert select.choose(PROBLEM, DEVICE, True) == config
    assert select.choose(PROBLEM, DEVICE, False) == select.unstored(PROBLEM, DEVICE, False)
    assert select.choose(PROBLEM._replace(K=1024), DEVICE, True) != config
    faster = config._replace(BLOCK_K=64)
    store.save(devices.name_of(DEVICE), PROBLEM.key, faster, 11.0)
    assert select.choose(PROBLEM, DEVICE, True) == faster


def test_tables_come_with_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_SHIPPED", tmp_path)
    (tmp_path / "Some_GPU.json").write_text(json.dumps({"a": list(Config(1, 2, 4)), "b": list(Config(1, 2, 8))}))
    store.save("Some GPU", "b", Config(16, 16, 16), 1.0)
    assert store.known("Some GPU") == {"a": Config(1, 2, 4), "b": Config(16, 16, 16)}
    assert store.known("Another") == {}


def _write(worker):
    for i in range(20):
        store.save("device", f"{worker} {i}", Config(16, 32, 64), 1.0)


def test_many_processes_write_at_once():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(_write, range(2), chunksize=1)
    assert len(store.known("device")) == 40


def test_a_product_runs_by_what_is_stored():
    a, b, _ = tuner.operands(PROBLEM, tritonite.device)
    store.save(devices.name_of(DEVICE), PROBLEM.key, Config(32, 64, 32, splits=2), 1.0)
    (actual,) = sys.modules["tritonite.ops.matmul"].mm(a[0], b[0])
    torch.testing.assert_close(actual, a[0] @ b[0])


@pytest.mark.parametrize("M", [1, 8, 512])
def test_candidates(M):
    problem = Problem(1, M, 4096, 4096, torch.bfloat16, torch.bfloat16, True, False)
    found = list(tuner.candidates(problem))
    assert 1 < len(found) == len(set(found))
    # Kernels of one row have no other.
    assert all(M == 1 or config.BLOCK_M > 1 for config in found)
    assert all(config.splits * config.BLOCK_K <= problem.K for config in found)


def test_candidates_compile_in_processes_without_a_gpu():
    good, bad = Config(64, 64, 64, descriptors=True), Config(64, 64, 48)
    errors = tuner.compile_all([(PROBLEM, good), (PROBLEM, bad)], 2, GPUTarget("cuda", 90, 32))
    assert errors[0] is None
    # The error of a device function is the cause of its caller's.
    assert "power of 2" in str(errors[1].__cause__)


def test_the_command_says_what_is_wrong():
    run = CliRunner().invoke
    if tritonite.device == "cpu":
        assert type(run(cli.app, ["tune"]).exception).__name__ == "NothingToMeasure"
        return
    assert run(cli.app, ["tune", "--shape", "4x4"]).exit_code == 2
    done = run(cli.app, ["tune", "--shape", "64x256x512", "--dtype", "bfloat16", "--layout", "nt"])
    assert done.exit_code == 0, done.output
    assert PROBLEM.key in store.known(devices.name_of(DEVICE))


def _table():
    return gemm_cost.load(gemm_cost.FOLDER / "NVIDIA_H200.json")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_model_chooses_what_fits(dtype, monkeypatch):
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 132)
    table, seen = _table()[dtype.itemsize], set()
    small = [
        Problem(batches, M, N, K, dtype, dtype, a_inner, b_inner)
        for batches, M, N, K in itertools.product((1, 8), (1, 17, 256, 4001), (1, 10, 30), (2, 600))
        for a_inner, b_inner in itertools.product((True, False), repeat=2)
    ]
    for problem in (*itertools.islice(sweep.drawn(dtype, 1), 300), *small):
        for warp_specialized in (True, False):
            chosen = select.fastest(problem, DEVICE, table, warp_specialized)
            config = select.fitting(chosen, problem, DEVICE)
            result = problem.result.itemsize if config.splits == 1 else 4
            assert config.num_stages > 1 or (chosen.num_stages == 1 and problem.K <= config.BLOCK_K)
            assert warp_specialized or not config.warp_specialize
            assert config.shared(dtype.itemsize, result if config.descriptors else 0) <= devices.shared_memory(DEVICE)
            assert config.splits == 1 or 128 * config.splits <= problem.K
            seen.add(chosen._replace(splits=1))
    assert len(seen) > 10


def test_a_program_alone_on_a_multiprocessor_is_faster():
    config = Config(16, 32, 64, programs=2)
    tiles, costs = gemm_cost.records([config]), _table()[2].costs._replace(shared=0.5)
    problems = [PROBLEM._replace(M=16, N=32 * count, K=4096) for count in (132, 264, 396)]
    work = [gemm_cost.work(problem, tiles, 132) for problem in problems]
    assert [(int(each.rounds[0]), float(each.last[0])) for each in work] == [(1, 0.5), (1, 1.0), (2, 0.5)]
    busy = costs._replace(launch=0, memory=1e30, l2=1e30, sharpness=1)
    one, two, three = [float(gemm_cost.microseconds(each, 1.0, 0.0, busy)[0]) for each in work]
    assert one == pytest.approx(64 * 1.25 / 1.5) and two == pytest.approx(64) and three == pytest.approx(one + two)


def test_operands_in_l2_have_separate_costs(monkeypatch):
    for name, answer in {"multiprocessors": 132, "name_of": "A GPU", "architecture": "sm_90"}.items():
        monkeypatch.setattr(devices, name, lambda device, answer=answer: answer)
    small, large = [PROBLEM._replace(M=16, N=4096, K=K) for K in (512, 8192)]
    for dtype in (torch.bfloat16, torch.float32):
        table = _table()[dtype.itemsize]
        near, far = [select.table_for(x._replace(dtype=dtype, result=dtype), DEVICE, True) for x in (small, large)]
        assert (near.costs, far.costs) == (table.cached.costs, table.costs)


@pytest.fixture
def of_hopper(monkeypatch, change_device):
    """Make choices as on an sm_90 GPU."""
    answers = {"multiprocessors": 132, "name_of": "A GPU", "architecture": "sm_90", "has_wgmma": True}
    for name, answer in answers.items():
        monkeypatch.setattr(devices, name, lambda device, answer=answer: answer)
    change_device(kind="nvidia", interpreted=False)


def _products(dtype):
    """Yield products, row-major and column-major: operands and result, and the operands without 16-byte loads."""
    odd = lambda *sizes: sizes[-1] * dtype.itemsize % 16 != 0
    made = {"dtype": dtype, "device": DEVICE}
    for M, K, N in itertools.product((24, 427, 2048), (1600, 2559), (96, 5497)):
        for columns in (False, True):
            a, b = [
                torch.empty(1, *sizes[::-1], **made).mT if columns else torch.empty(1, *sizes, **made)
                for sizes in ((M, K), (K, N))
            ]
            unaligned = odd(M if columns else K), odd(K if columns else N), odd(N)
            yield (a, b, torch.empty(1, M, N, **made)), unaligned


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_operands_are_copied_if_that_saves_time(dtype, of_hopper, set_copy_time, monkeypatch):
    """A product costs 10 in its own layout, and 1 with operands in a layout for fast kernels."""

    def time(problem, device, descriptors):
        fast = descriptors if dtype.itemsize == 2 else min(problem.a_vector, problem.b_vector) == 16
        return 1.0 if fast else 10.0

    monkeypatch.setattr(select, "microseconds", time)
    for operands, unaligned in _products(dtype):
        wanted = unaligned if dtype.itemsize == 2 else (*unaligned[:2], False)
        for cost in (0.1, 8.9, 9.1, 100.0):
            set_copy_time(cost / max(1, sum(wanted)))
            expected = wanted if any(wanted) and cost < 9 else (False,) * 3
            assert worth_copying(*operands) == expected


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_products_without_terms_have_tiles(dtype, of_hopper):
    empty = Problem(1, 64, 256, 0, dtype, dtype, True, True)
    assert all(select.unstored(empty, DEVICE, descriptors).splits == 1 for descriptors in (False, True))


def test_other_devices_use_the_same_tiles_in_portable_kernels():
    found = gemm_cost.without_wgmma(_table()[4])
    for table in (found, found.cached):
        assert not any(config.hopper_fp32 for config in table.configs)
        assert len(set(table.configs)) == len(table.configs)


def test_a_table_without_bf16x3_tiles(of_hopper, monkeypatch):
    assert all(select.has_invariant_tiles(dtype, DEVICE) for dtype in (torch.float32, torch.float16))
    assert not select.has_invariant_tiles(torch.float64, DEVICE)
    monkeypatch.setattr(select, "_tables", lambda device: {4: gemm_cost.without_wgmma(_table()[4])})
    assert not select.has_invariant_tiles(torch.float32, DEVICE) and select.has_invariant_tiles(torch.float16, DEVICE)


def _timed_as(table, dtype, count):
    """Yield drawn problems, with the times of ATen that a table gives."""
    for problem in itertools.islice(sweep.drawn(dtype, 3), count):
        yield sweep.Timed(problem, select.least_microseconds(problem, table, 132), ())


def test_the_model_of_aten_is_fitted(tmp_path):
    table = _table()[2]
    true = dataclasses.replace(table.aten, costs=table.aten.costs._replace(launch=9.0), block=table.aten.block * 1.3)
    fitted = sweep.fit_aten(list(_timed_as(true, torch.bfloat16, 150)), table, 132)
    assert fitted.aten.costs.launch == pytest.approx(9, rel=0.1)
    for seen, found in zip(
        _timed_as(true, torch.bfloat16, 40), _timed_as(fitted.aten, torch.bfloat16, 40), strict=True
    ):
        assert found.aten == pytest.approx(seen.aten, rel=0.1)
    gemm_cost.save(tmp_path / "table.json", {2: fitted})
    loaded = gemm_cost.load(tmp_path / "table.json")[2]
    assert loaded.aten.block == pytest.approx(fitted.aten.block, rel=1e-3)
    assert loaded.pointers.configs == table.pointers.configs


def test_products_that_aten_computes_faster_decline(monkeypatch):
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(select, "table_for", lambda problem, *_: _table()[problem.dtype.itemsize])
    problems = list(itertools.islice(sweep.drawn(torch.bfloat16, 4), 40))
    for aten, left in ((0.0, True), (1e9, False)):
        select._aten_is_faster.cache_clear()
        monkeypatch.setattr(select, "least_microseconds", lambda *_, aten=aten: aten)
        assert all(select.aten_is_faster(problem, DEVICE) is left for problem in problems)
        if not left:
            continue
        # Calls without a model of ATen, with K of 0, or with tuned tiles do not decline.
        for other in ({"dtype": torch.float32, "result": torch.float32}, {"result": torch.float32}, {"K": 0}):
            assert not select.aten_is_faster(problems[0]._replace(**other), DEVICE)
        store.save(devices.name_of(DEVICE), problems[0].key, Config(64, 64, 64), 1.0)
        assert not select.aten_is_faster(problems[0], DEVICE)
    select._aten_is_faster.cache_clear()


def test_products_decline_under_faster_only_alone(monkeypatch):
    monkeypatch.setattr(select, "aten_is_faster", lambda problem, *_: problem.M == 64)
    a, b = torch.randn(64, 32, device=DEVICE).bfloat16(), torch.randn(32, 48, device=DEVICE).bfloat16()
    mm = tritonite.overloads()["mm"]
    with contract.under(contract.Settings(faster_only=True, invariant=False)):
        with pytest.raises(Decline, match=ATEN_IS_FASTER):
            mm(a, b)
        assert mm(a[:32], b).shape == (32, 48)
        # Misaligned operands use other kernels, for which no model compares with ATen.
        assert mm(torch.randn(64, 33, device=DEVICE).bfloat16()[:, 1:], b).shape == (64, 48)
    with contract.under(contract.Settings(faster_only=False, invariant=False)):
        assert mm(a, b).shape == (64, 48)


def test_copies_count_towards_the_time_of_aten(set_copy_time, monkeypatch):
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(select, "table_for", lambda problem, *_: _table()[problem.dtype.itemsize])
    monkeypatch.setattr(select, "least_microseconds", lambda *_: 0.0)
    set_copy_time(1e9)
    assert select.aten_is_faster(PROBLEM, DEVICE) and not select.aten_is_faster(PROBLEM, DEVICE, copied=(32,))
    select._aten_is_faster.cache_clear()


def test_aten_copies_addends_other_than_a_bias(monkeypatch):
    copied = []
    monkeypatch.setattr(select, "aten_is_faster", lambda *given: copied.append(given[3]))
    a, b, added = (torch.randn(16, 16, device=DEVICE).bfloat16() for _ in range(3))
    addmm = tritonite.overloads()["addmm"]
    with contract.under(contract.Settings(faster_only=True, invariant=False)):
        tritonite.overloads()["mm"](a, b)
        addmm(added[0], a, b)
        addmm(added, a, b, beta=0)
        addmm(added[0], a, b, beta=0.5)
        addmm(added, a, b)
    assert copied == [(), (), (), (512,), (512,)]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float32, sweep.Kind.MEMORY), *((torch.bfloat16, kind) for kind in (sweep.Kind.SHORT, sweep.Kind.POINTERS))],
    ids=str,
)
def test_a_sweep_is_fitted(dtype, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 132)
    shipped, descriptors = _table()[dtype.itemsize], kind is not sweep.Kind.POINTERS
    table = {sweep.Kind.SHORT: shipped.short, sweep.Kind.POINTERS: shipped.pointers}.get(kind, shipped)
    true = dataclasses.replace(table, block=table.block * 1.5, costs=table.costs._replace(launch=9.0))
    timed = []
    for problem in itertools.islice(sweep.problems_of(kind, dtype, 2), 60):
        tiles = true.candidates[select.possible(problem, DEVICE, true, descriptors, descriptors)]
        tiles = tiles[::5] if kind is sweep.Kind.MEMORY else tiles
        times = select.estimates(problem, tiles, true, 132)
        configs = [true.configs[tile["number"]]._replace(splits=int(tile["splits"])) for tile in tiles]
        timed.append(sweep.Timed(problem, 1.0, tuple(zip(configs, times.tolist(), strict=True))))
    monkeypatch.setattr(sweep, "STEPS", 300)
    fitted = sweep.fit(timed, table, 132)
    assert fitted.costs.launch == pytest.approx(9, rel=0.1)
    assert sweep.regret(timed, fitted, 132) < 1.01
    path = tmp_path / "tables.json"
    gemm_cost.save(path, {dtype.itemsize: dataclasses.replace(fitted, cached=table, pointers=fitted)})
    loaded = gemm_cost.load(path)[dtype.itemsize]
    assert loaded.cached.block == pytest.approx(table.block, rel=1e-3)
    for found in (loaded, loaded.pointers):
        assert found.configs == fitted.configs and found.b_inner == fitted.b_inner
        assert found.block == pytest.approx(fitted.block, rel=1e-3)


@pytest.mark.skipif(tritonite.device == "cpu", reason="there is no GPU to fit the tables to")
def test_the_tables_are_fitted_to_this_gpu(tmp_path):
    """The fit runs in a process that has not called cuBLAS before."""
    own = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    code = "from tritonite import cli; cli.app(['tune', '--seconds', '60', '--jobs', '4'])"
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "tritonite").glob("*.json")
    found, shipped = fitted.load(file, devices.name_of(DEVICE))[2], _table()[2]
    assert found.pointers.configs == shipped.pointers.configs and found.short.configs == shipped.short.configs


def test_problems_timed_through_pointers_have_no_descriptors():
    for problem in itertools.islice(sweep.problems_of(sweep.Kind.POINTERS, torch.float16, 3), 50):
        operands = tuner.operands(problem, "meta", empty=True)
        assert 16 < problem.M <= sweep.MOST_ROWS and not all(map(has_descriptor, operands))
        assert problem == Problem.of(*operands)


def test_pitches_that_are_no_multiple_of_cache_lines_cost_more():
    """A pitch of 4,096 16-bit elements is whole lines, 4,112 whole sectors, and 4,104 neither."""
    lengthy = Problem(1, 1024, 1024, 4096, torch.float16, torch.float16, True, True)
    tiles = gemm_cost.records([Config(64, 128, 128, descriptors=True), Config(64, 128, 128)])
    pitches = (0, 4096, 4112, 4104)
    split = [list(gemm_cost.work(lengthy._replace(a_pitch=pitch), tiles, 132).split_bytes) for pitch in pitches]
    rows = 2 * 8 * 16 * 4096 * 64
    assert split == [[0, 0], [0, 0], [rows, 0], [2 * rows, 0]]


def test_tables_of_a_file(tmp_path):
    """Load tiles by the former name of `hopper_fp32`, and keep costs that are not fitted."""
    path = tmp_path / "table.json"
    path.write_text((gemm_cost.FOLDER / "NVIDIA_H200.json").read_text().replace("hopper_fp32", "in_parts"))
    assert gemm_cost.load(path)[4].configs == _table()[4].configs
    fixed = FixedCosts(block_latency=1.5)
    gemm_cost.save(path, {2: dataclasses.replace(_table()[2], fixed=fixed)})
    assert gemm_cost.load(path)[2].fixed == fixed and gemm_cost.load(path)[2].cached.fixed == FixedCosts()
