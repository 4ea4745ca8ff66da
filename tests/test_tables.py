"""Tables of products by model of GPU: which one serves a device, estimates, and files that `tritonite tune` shares."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tritonite
from tritonite import cli, devices
from tritonite.devices import models
from tritonite.engine.gemm import cost, fitted, select
from tritonite.engine.gemm.problem import Problem
from tritonite.errors import InvalidTables, MismatchedTables
from tritonite.report.doctor import files
from tritonite.runtime import cache
from tritonite.tuning import session, sweep

DEVICE = torch.device(tritonite.device, 0) if tritonite.device == "cuda" else torch.device("cpu")
GPU = "Some GPU"
VERSIONS = {"architecture": "sm_90", "torch": torch.__version__}


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(fitted.VARIABLE, raising=False)
    caches = (fitted.fitted, cache.warn_once, select._fastest, select._aten_is_faster)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


H200 = cost.load(cost.FOLDER / "NVIDIA_H200.json")


@pytest.mark.parametrize(
    "name, architecture, model",
    [
        ("NVIDIA H200", "sm_90", "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", "sm_90", "NVIDIA H100"),
        ("NVIDIA GH200 480GB", "sm_90", "NVIDIA H200"),
        ("NVIDIA A100-SXM4-80GB", "sm_80", "NVIDIA A100"),
        ("NVIDIA L40S", "sm_89", "NVIDIA L40S"),
        ("NVIDIA GeForce RTX 4090", "sm_89", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA A10", "sm_86", "NVIDIA L40S"),
        ("NVIDIA B200", "sm_100", "NVIDIA B200"),
        ("NVIDIA GB300", "sm_103", "NVIDIA B200"),
        ("NVIDIA GeForce RTX 5080", "sm_120", "NVIDIA GeForce RTX 5090"),
    ],
)
def test_a_device_is_served_as_the_nearest_model(name, architecture, model):
    assert models.nearest(name, architecture).name == model


def test_devices_without_a_near_model_have_no_tables():
    for architecture in ("", "sm_70", "sm_110", "gfx942"):
        assert fitted.shipped("A GPU", architecture) == ({}, "none: tiles of products are chosen by rule")


def test_measured_models_have_files_and_others_have_none():
    files = {path.name for path in cost.FOLDER.glob("*.json")}
    assert files == {model.file for model in models.MODELS if model.measured}
    assert all(model.source for model in models.MODELS)


def test_the_page_has_the_numbers_of_the_models():
    page = (Path(__file__).parent.parent / "docs" / "tables.md").read_text()
    for model in models.MODELS:
        rates = [f"{each:,}" if each else "" for each in (model.float16, model.tf32, model.float8, model.float32)]
        cells = [model.name.removeprefix("NVIDIA "), str(model.multiprocessors), f"{model.bandwidth:,}", *rates]
        row = f"| {' | '.join([*cells, str(model.shared_memory), str(model.l2)])} |".replace("|  |", "| |")
        assert row in page, row


def test_the_origin_says_what_was_measured():
    origins = [fitted.shipped(*given).origin for given in (("NVIDIA H200", "sm_90"), ("NVIDIA H100 PCIe", "sm_90"))]
    assert origins == ["measured on NVIDIA H200", "measured on NVIDIA H200, the nearest; unmeasured on this GPU"]
    assert "by the data sheet of NVIDIA A100, unmeasured" in fitted.shipped("NVIDIA A100", "sm_80").origin


ESTIMATED = [model for model in models.MODELS if models.measured(model).architecture != model.architecture]


@pytest.mark.parametrize("model", ESTIMATED, ids=lambda model: model.name)
def test_estimated_tables_choose_tiles_for_every_product(model, monkeypatch, change_device):
    tma = model.architecture in ("sm_100", "sm_120")
    answers = {"multiprocessors": model.multiprocessors, "name_of": model.name, "architecture": model.architecture}
    answers |= {"has_wgmma": False, "has_tma": tma, "shared_memory": (model.shared_memory - 2) * 1024}
    for name, answer in answers.items():
        monkeypatch.setattr(devices, name, lambda device, answer=answer: answer)
    change_device(kind="nvidia", interpreted=False)
    for dtype in (torch.bfloat16, torch.float32):
        every = [fitted.shipped(model.name, model.architecture).tables[dtype.itemsize]]
        every += [each for each in (every[0].cached, every[0].short, every[0].pointers) if each]
        for table in every:
            assert table.aten is None and len(set(table.configs)) == len(table.configs)
            assert not any(each.warp_specialize or each.hopper_fp32 for each in table.configs)
            assert tma or not any(each.descriptors or each.bf16x6 for each in table.configs)
        small = [
            Problem(batches, M, N, K, dtype, dtype, True, b_inner)
            for batches, M, N, K in itertools.product((1, 8), (1, 17, 4001), (1, 30), (9, 600))
            for b_inner in (True, False)
        ]
        for problem in (*itertools.islice(sweep.drawn(dtype, 1), 60), *small):
            for descriptors in (True, False):
                config = select.fitting(select.unstored(problem, DEVICE, descriptors), problem, DEVICE)
                assert config.descriptors <= (tma and descriptors)
                assert config.shared(dtype.itemsize, 0) <= answers["shared_memory"]
        assert not select.aten_is_faster(small[-1], DEVICE)


def test_estimates_follow_the_data_sheets():
    model = models.known_as("NVIDIA A100-SXM4-40GB")
    (measured,) = [each for each in models.MODELS if each.measured]
    before, after = H200[2], fitted.shipped(model.name, "sm_80").tables[2]
    assert after.costs.memory == pytest.approx(before.costs.memory * 2039 / 4800)
    config = next(each for each in after.pointers.configs if each in before.pointers.configs)
    slower = (model.multiprocessors / model.float16) / (measured.multiprocessors / measured.float16)
    blocks = [table.pointers.block[table.pointers.configs.index(config)] for table in (before, after)]
    assert blocks[1] == pytest.approx(blocks[0] * slower)


# Files


def test_a_file_comes_before_own_tables_and_these_before_shipped_ones(tmp_path, monkeypatch):
    shipped = fitted.fitted(GPU, "sm_90")
    assert shipped.origin.startswith("measured on NVIDIA H200")
    fitted.save(fitted.own(GPU), GPU, VERSIONS, {2: H200[2]})
    assert fitted.fitted(GPU, "sm_90").origin == f"of tritonite tune, {fitted.own(GPU)}"
    assert fitted.tables(GPU, "sm_90").keys() == {2} and fitted.tables("Another", "sm_90").keys() == {2, 4}
    fitted.save(tmp_path / "shared.json", GPU, VERSIONS, {4: H200[4]})
    monkeypatch.setenv(fitted.VARIABLE, str(tmp_path / "shared.json"))
    assert fitted.tables(GPU, "sm_90").keys() == {4}
    assert fitted.versions_of(tmp_path / "shared.json") == VERSIONS


def test_a_shared_file_serves_as_the_table_of_its_model(tmp_path, monkeypatch):
    measured = [replace(each, measured=each.measured or "H100" in each.words) for each in models.MODELS]
    monkeypatch.setattr(models, "MODELS", tuple(measured))
    monkeypatch.setattr(cost, "FOLDER", tmp_path)
    fitted.save(tmp_path / "NVIDIA_H100.json", "NVIDIA H100 80GB HBM3", VERSIONS, {4: H200[4]})
    cost.save(tmp_path / "NVIDIA_H200.json", H200)
    fitted._file.cache_clear()
    try:
        served = [fitted.shipped(name, "sm_90") for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200")]
        assert [len(each.tables) for each in served] == [1, 2, 2]
        assert served[0].origin == "measured on NVIDIA H100" and "H200, the nearest" in served[2].origin
    finally:
        fitted._file.cache_clear()


def _damage(path, how):
    kept = json.loads(path.read_text())
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_text(path.read_text()[:-200])
    elif how == "changed":
        kept["products"]["4"]["tiles"][0]["block"] *= 2
        path.write_text(json.dumps(kept))
    elif how == "another file":
        path.write_text(json.dumps({"tiles": 3}))
    elif how == "another device":
        fitted.save(path, "Another GPU", VERSIONS, H200)
    else:
        path.write_bytes(b"\xff\x00")


DAMAGES = ("missing", "cut", "changed", "another file", "another device", "not text")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_one_error_and_at_work_one_warning(how, tmp_path, monkeypatch):
    path = tmp_path / "shared.json"
    fitted.save(path, GPU, VERSIONS, H200)
    _damage(path, how)
    with pytest.raises((InvalidTables, MismatchedTables), match=r"shared\.json") as raised:
        fitted.load(path, GPU)
    assert "\n" not in str(raised.value) and ("Another GPU" in str(raised.value)) is (how == "another device")
    monkeypatch.setenv(fitted.VARIABLE, str(path))
    with pytest.warns(UserWarning, match=r"shared\.json") as told:
        found = [fitted.tables(GPU, "sm_90") for _ in range(2)]
    assert len(told) == 1 and found[0].keys() == {2, 4}
    monkeypatch.setattr(devices, "name_of", lambda device: GPU)
    (finding,) = files.tables()
    assert finding.level == "warning" and "shared.json" in finding.message


def test_doctor_advises_to_measure_what_is_not_measured(monkeypatch):
    monkeypatch.setattr(devices, "name_of", lambda device: "NVIDIA H100 PCIe")
    for architecture, level in (("sm_90", "note"), ("", "ok")):
        monkeypatch.setattr(devices, "architecture", lambda device, own=architecture: own)
        (finding,) = files.tables()
        assert finding.level == level and ("tritonite tune" in finding.advice) is (level == "note")


# The session


def _run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, ["tune", *map(str, arguments)])


@pytest.fixture
def small_session(monkeypatch):
    """Let the command run anywhere, for a device of its own name, with small products and two tiles each."""
    monkeypatch.setattr(cli.tune, "_check_device", lambda: None)
    monkeypatch.setattr(devices, "name_of", lambda device: GPU)
    monkeypatch.setattr(sweep, "CANDIDATES", 2)
    monkeypatch.setattr(sweep, "STEPS", 3)
    for name in ("_LEAST_DRAWN", "_MOST_DRAWN"):
        monkeypatch.setattr(session, name, 3)
    # On a GPU kernels compile when they are timed.
    monkeypatch.setattr(session.tuner, "compile_all", lambda work, *_, **__: [None] * len(work))
    every = session._parts
    monkeypatch.setattr(session, "_parts", lambda start: [every(start)[0], every(start)[-1]])

    def drawn(dtype, seed):
        for M in itertools.cycle((17, 33, 64)):
            yield Problem(1, M, 48, 32, dtype, dtype, True, True)

    monkeypatch.setattr(sweep, "drawn", drawn)


def test_tables_are_fitted_stored_shared_and_found(small_session, tmp_path):
    file = tmp_path / "shared.json"
    done = _run("--seconds", 200, "--output", file, "--jobs", 1)
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.output.count("stored in") == 2 and "bfloat16 in memory" in done.output
    found = fitted.tables(GPU, "")
    assert found.keys() == {2, 4} and fitted.own(GPU).read_text() == file.read_text()
    assert found[2].costs != H200[2].costs or found[4].costs != H200[4].costs
    # The other user's machine.
    fitted.own(GPU).unlink()
    fitted.fitted.cache_clear()
    assert not fitted.tables(GPU, "")
    assert _run("--import", file).exit_code == 0
    fitted.fitted.cache_clear()
    assert fitted.tables(GPU, "").keys() == {2, 4}
    x = torch.randn(20, 20, device=DEVICE)
    expected = x @ x
    with tritonite.use_gems(include="mm", faster_only=False):
        torch.testing.assert_close(x @ x, expected)


@pytest.mark.parametrize("after, stored", [(0, False), (3, True)])
def test_an_interrupt_keeps_what_is_timed(small_session, monkeypatch, after, stored):
    timed = []

    def time_sample(sample, kind):
        if len(timed) == after:
            raise KeyboardInterrupt
        timed.append(sweep.Timed(sample.problem, 1.0, tuple((config, 2.0) for config in sample.configs)))
        return timed[-1]

    monkeypatch.setattr(sweep, "time_sample", time_sample)
    done = _run("--seconds", 200, "--jobs", 1)
    assert done.exit_code == 130 and "interrupted" in done.output
    assert fitted.own(GPU).exists() is stored
    assert ("nothing was stored" in done.output) is not stored
