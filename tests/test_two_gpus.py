"""tools/two_gpus.py with a tiny model in the interpreter: every way to share a step gives one process's gradients."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import parallel_llama
import pytest
import torch
import two_gpus

import tritonite

TOOL = Path(two_gpus.__file__)
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]
TITLES = [way.title for way in parallel_llama.ways()]
# What PyTorch has no rules for on the CPU.
GPUS_ONLY = {title for title in TITLES if "ring" in title}


def run(folder):
    """Return the process and the rows of the tool's JSON."""
    file = folder / "rows.json"
    command = [sys.executable, "-W", "ignore", str(TOOL), "--quick", "--repeat", "1", "--json", str(file)]
    given = os.environ | {"PYTHONPATH": str(TOOL.parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=given, check=False, capture_output=True, text=True, timeout=300)
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return done, {(row["way"], row["tritonite"]): row for row in rows}


@pytest.fixture(scope="module")
def all_ways(tmp_path_factory):
    """Run the tool once, because most of its time is the start of two processes."""
    if tritonite.device == "cuda" and torch.cuda.device_count() < two_gpus.PROCESSES:
        pytest.skip("needs two GPUs")
    return run(tmp_path_factory.mktemp("two"))


def test_all_ways_end_well(all_ways):
    done, rows = all_ways
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert len(rows) == 2 * len(TITLES)
    assert all(f"| {title} | on |" in done.stdout for title in TITLES)


@pytest.mark.parametrize("title", TITLES)
def test_a_step_is_that_of_one_process(title, all_ways):
    _, rows = all_ways
    off, on = rows[title, False], rows[title, True]
    if tritonite.device == "cpu" and title in GPUS_ONLY:
        assert (
            off["status"]
            == on["status"]
            == "not run: PyTorch has context_parallel for the attention kernels of GPUs only"
        )
        return
    assert off["status"] == on["status"] == "equal", (off, on)
    assert off["served"] == 0 and on["served"] > 100 and on["declined"] == 0, on


class Wrong:
    """A way whose gradients are those of one process, but for one parameter."""

    def __init__(self, change):
        self.change = change

    def __call__(self, case):
        loss, grads = parallel_llama.one_process(case)
        self.change(grads)
        return loss, grads


def compared(change):
    """Return the row of a way that changes gradients, on one process without a group."""
    torch.manual_seed(0)
    size = parallel_llama.TINY
    text = torch.randint(size.vocabulary, (1, size.sequence + 1))
    case = parallel_llama.Case(size, None, parallel_llama.Llama(size), text[:, :-1], text[:, 1:])
    expected = parallel_llama.one_process(case)
    way = parallel_llama.Way(Wrong(change), "changed")
    return two_gpus.joined([two_gpus.compare(way, case, False, expected)], set(expected[1]))


@pytest.mark.skipif(tritonite.device != "cpu", reason="tensors are made on the CPU")
def test_wrong_gradients_are_found():
    assert compared(lambda grads: None).status == "equal"
    row = compared(lambda grads: grads["norm.weight"].mul_(1.001))
    assert (row.status, row.worst) == ("differs", "norm.weight")
    assert compared(lambda grads: grads["norm.weight"].fill_(float("nan"))).status == "differs"
    assert compared(lambda grads: grads.pop("embed.weight")).status == "no gradient of embed.weight"
    assert not compared(lambda grads: grads.clear()).is_right
