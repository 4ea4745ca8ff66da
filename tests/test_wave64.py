"""Devices whose warps have 64 threads: results in the interpreter, and the threads of launches."""

import dataclasses
import json
from unittest import mock

import pytest
import scripts
import torch

import tritonite
from tritonite import devices
from tritonite.devices import amd
from tritonite.engine.indexing import write
from tritonite.engine.rows import blocks

pytestmark = pytest.mark.skipif(tritonite.device != "cpu", reason="replaces the record of the interpreter")


@pytest.fixture
def wide(monkeypatch):
    """Make this thread's device one of 64 threads a warp, with small blocks, so that rows take several programs."""
    record = dataclasses.replace(devices.current, warp_size=64, row_elements=256, row_columns=16, programs=8)
    monkeypatch.setattr(devices, "current", record)
    monkeypatch.setenv("TRITONITE_NATIVE", "0")


X = torch.randn(20, 90, generator=torch.Generator().manual_seed(3))
CALLS = {
    "rows": lambda x: [x.sum(1), x.mean(0), x.softmax(1), x.argmin(1)],
    "scans": lambda x: [x.cumsum(1), x.cummax(0).values],
    "sorts": lambda x: [*x.sort(1), *x[:, :3].topk(9, 0), x[:4].int().unique(), x[:2].kthvalue(40).values],
    "counts": lambda x: [x.abs().long().flatten().bincount(), x.histc(20, -2, 2), (x > 0).nonzero()],
    "writes": lambda x: [x.new_zeros(9).index_add(0, torch.arange(20) % 9, x[:, 0]), x.int().cumsum(0)],
    "products": lambda x: [x @ x.t(), x[:1] @ x.t()],
}


@pytest.mark.parametrize("family", CALLS)
def test_results_are_atens(wide, family):
    expected = CALLS[family](X)
    with tritonite.use_gems():
        found = CALLS[family](X)
    for own, aten in zip(found, expected, strict=True):
        torch.testing.assert_close(own, aten, rtol=1e-4, atol=1e-4)


def test_a_program_that_combines_has_an_element_for_each_thread(monkeypatch):
    monkeypatch.setattr(devices, "current", dataclasses.replace(devices.current, warp_size=64))
    assert [write._filling(block) for block in ((1, 8), (64, 1), (512, 4))] == [(32, 8), (256, 1), (512, 4)]


def test_a_row_per_thread_fills_wider_warps(monkeypatch):
    space = mock.Mock(n_reduced=4, n_kept=2**20, itemsize=4)
    widths = []
    for size in (32, 64):
        record = dataclasses.replace(devices.current, warp_size=size)
        monkeypatch.setattr(devices, "current", record)
        with mock.patch.object(blocks, "cut", lambda _, rows, *rest, **more: rows):
            widths.append(blocks._row_per_thread(space))
    assert widths[1] == 2 * widths[0]


def test_the_gpu_says_how_many_threads_a_warp_has(monkeypatch):
    """The record has 64, as CDNA GPUs; RDNA GPUs have 32."""
    amd._warp_size.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = mock.Mock(warp_size=32, shared_memory_per_block=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(devices, "current", amd.RECORD)
    assert (devices.warp_size(), devices.warps(512), devices.warps(1)) == (32, 16, 1)
    assert amd.RECORD.runtime.shared_memory(torch.device("cuda", 0), amd.RECORD) == 7
    amd._warp_size.cache_clear()


_LAUNCHES = """
import dataclasses, json
from unittest import mock
from tritonite import devices, registry
from tritonite.devices import amd
from tritonite.errors import Decline
from tritonite.testing.compile_cases.cases import recorded_launches
from tritonite.testing.samples import samples

host = {"type": "cpu", "dispatch_key": "CPU", "aten": "cpu", "runtime": devices.HostRuntime(), "native": None}
record = dataclasses.replace(amd.RECORD, **host, host_memory=True)
launches, wide = 0, []
with recorded_launches() as found, mock.patch.object(devices, "current", record):
    for op in list(registry.overloads().values())[::3]:
        if op.inplace or op.out_names or not op.declaration.accepts:
            continue
        sample = next(iter(samples(op, op.declaration.accepts[0])), None)
        found.clear()
        try:
            if sample is not None:
                op(*sample.args, **sample.kwargs)
        except Decline:
            continue
        launches += len(found)
        wide += [each.kernel.__name__ for each in found if 64 * each.options.get("num_warps", 4) > 1024]
print(json.dumps([launches, wide]))
"""


def test_no_program_on_amd_gpus_has_more_than_1024_threads():
    launches, wide = json.loads(scripts.run(_LAUNCHES, interpreted=False))
    assert launches > 60 and wide == []
