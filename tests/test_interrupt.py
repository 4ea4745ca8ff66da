"""Ctrl-C during long commands: no traceback, no process left behind, what was found so far, exit code 130."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from tritonite import cli
from tritonite.testing import fuzz as fuzzer
from tritonite.testing import verify as verification

# A shell's background jobs, and what they start, ignore SIGINT.
RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tritonite import cli
sys.argv, ready = {arguments!r}, open({pipe!r}, "w")
{patch}
cli.main()
"""
# Says that a worker process has started, and then lets the fuzzer go on.
FUZZ = """
from tritonite.testing.fuzz import run
begin = run._Worker.__init__
def started(self, *arguments):
    begin(self, *arguments)
    print(self.process.pid, file=ready, flush=True)
run._Worker.__init__ = started
"""
# Says that a case is measured, and measures the next for ever.
BENCH = """
import time
from tritonite.bench import run
measured = run.run
def slow(chosen, *rest):
    yield from measured(chosen[:1], *rest)
    print(0, file=ready, flush=True)
    while True:
        time.sleep(1)
run.run = slow
"""


def interrupt(tmp_path, patch, *arguments):
    """Run a command, send its process group SIGINT as a terminal does once `patch` is ready, and return its end."""
    pipe = str(tmp_path / "ready")
    os.mkfifo(pipe)
    code = RUN.format(arguments=["tritonite", *arguments], pipe=pipe, patch=patch)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"COLUMNS": "200", "TERM": "dumb"},
    )
    with open(pipe) as ready:
        worker = int(ready.readline())
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    if worker:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
    return process.returncode, out, errors


def test_the_fuzzer_stops_its_processes(tmp_path):
    code, out, errors = interrupt(tmp_path, FUZZ, "verify", "--op", "neg", "--fuzz", "60", "--jobs", "1")
    assert code == 130 and "interrupted" in out and "0 findings" in out and errors == ""


def test_a_benchmark_prints_what_it_has_measured(tmp_path):
    arguments = ("bench", "--op", "neg", "--dtype", "float32", "--rounds", "1", "--jobs", "1")
    code, out, errors = interrupt(tmp_path, BENCH, *arguments)
    assert code == 130 and "neg" in out and "interrupted" in out and errors == ""


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, arguments)


def test_verify_prints_what_it_has_checked(monkeypatch):
    def reports(*_):
        yield verification.Report("neg", torch.float32, samples=2, served=2)
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "verify", reports)
    done = run("verify")
    assert done.exit_code == 130 and "2 samples, 0 of 1 checks failed" in done.output and "neg" in done.output


def test_the_fuzzer_prints_what_it_has_found(monkeypatch):
    closed = []

    def fuzz(seconds, op, seed, jobs, tally):
        try:
            tally.calls = tally.served = 7
            yield fuzzer.Finding("value", "neg", 0, 1, "neg(x)", "wrong")
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    monkeypatch.setattr(fuzzer, "fuzz", fuzz)
    done = run("verify", "--fuzz", "60")
    assert done.exit_code == 130 and closed and "wrong" in done.output and "7 calls" in done.output


def test_any_command_ends_without_a_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
