"""A line on stderr for work that takes seconds: once a cause, and none where it is turned off."""

import fcntl
import itertools
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import FULL

import tritonite
from tritonite.runtime import native, progress


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(progress, "_told", set())
    monkeypatch.setattr(progress, "_seconds", {})
    monkeypatch.delenv("TRITONITE_QUIET", raising=False)


def test_a_long_block_is_reported_while_it_runs(capsys):
    with progress.timed("compiling", "compiling", watched=True):
        time.sleep(0.5)
        assert capsys.readouterr().err == "tritonite: compiling\n"
    with progress.timed("compiling", "compiling", watched=True):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_short_blocks_add_up(capsys, monkeypatch):
    clock = itertools.count(0.0, 0.02)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    for _ in range(3):
        assert capsys.readouterr().err == ""
        with progress.timed("interpreting", "slow"):
            pass
    assert capsys.readouterr().err == "tritonite: slow\n"
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


@pytest.mark.parametrize("how", ["variable", "level"])
def test_progress_can_be_turned_off(how, capsys, monkeypatch):
    if how == "variable":
        monkeypatch.setenv("TRITONITE_QUIET", "1")
    else:
        monkeypatch.setattr(logging.getLogger("tritonite"), "level", logging.ERROR)
        logging.getLogger("tritonite").manager._clear_cache()
    progress.tell("waiting", "waiting")
    logging.getLogger("tritonite").manager._clear_cache()
    assert capsys.readouterr().err == ""


def test_waiting_for_a_build_is_reported(tmp_path, capsys):
    path = tmp_path / "lock"
    with path.open("w") as theirs, path.open("w") as ours:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        release = threading.Timer(0.5, fcntl.flock, (theirs, fcntl.LOCK_UN))
        release.start()
        native._wait_for(ours, tmp_path)
        release.join()
    assert f"waiting for another process that builds the native dispatcher in {tmp_path}" in capsys.readouterr().err


@pytest.mark.skipif(not tritonite.backend.interpreted, reason="kernels are compiled here")
def test_interpreting_is_reported(capsys):
    x = torch.randn(64, 64)
    with tritonite.use_gems(include="*", faster_only=False):
        for _ in range(200):
            x.softmax(-1)
            if "interpreting" in progress._told:
                break
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Triton's interpreter on the CPU" in err


def test_importing_starts_no_thread():
    code = "import threading, tritonite; assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("setting", ["1", "true", "YES", None] if FULL else ["true", None])
def test_the_interpreter_is_on_as_triton_reads_it_and_where_triton_came_first(setting):
    """The test has a process of its own, as on a machine whose GPUs are hidden."""
    code = """
import triton
import triton.language as tl
import torch, tritonite
assert tritonite.backend.interpreted
x = torch.randn(5, 70)
with tritonite.use_gems(include="*", faster_only=False):
    results = x.softmax(-1), x.sum(0), x @ x.T, x.sort(1)[0], torch.rand(8), x.cumsum(1)
assert not any(each.declined for each in tritonite.stats().values())
torch.testing.assert_close(results[2], x @ x.T)


@tritonite.libentry()
@triton.jit
def sums(x, out, BLOCK: tl.constexpr):
    values = tl.load(x + tl.arange(0, BLOCK))
    tl.store(out, values.sum(0) + tl.cdiv(5, 2))


out = torch.zeros(1)
sums[(1,)](x, out, BLOCK=64)
torch.testing.assert_close(out[0], x.flatten()[:64].sum() + 3)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} | ({} if setting is None else {"TRITON_INTERPRET": setting})
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
