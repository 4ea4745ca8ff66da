"""Rows that several programs share within one launch: their tickets, and the states that they leave."""

import inspect
import math
import sys
import threading

import numpy as np
import pytest
import torch
from conftest import served
from triton.runtime import interpreter

import tritonite
from tritonite import devices
from tritonite.engine.rows import cooperative
from tritonite.engine.rows.table import Cooperative
from tritonite.testing.judge import assert_close

_SOFTMAX = sys.modules["tritonite.ops.softmax"]


@pytest.fixture
def cooperative_launches(monkeypatch, change_device):
    """Return the scratch of every launch of cooperative rows, on a device that makes few rows cooperative."""
    change_device(row_elements=4096, programs=1, forward_progress=True)
    found, scratch = [], cooperative.scratch

    def note(*args):
        found.append(scratch(*args))
        return found[-1]

    monkeypatch.setattr(cooperative, "scratch", note)
    return found


@pytest.fixture
def in_threads(monkeypatch):
    """Run eight programs of a launch at a time in the interpreter, none of which knows its number."""
    if not devices.current.interpreted:
        pytest.skip("programs of the interpreter")
    one_at_a_time, rewrite = threading.Lock(), interpreter.InterpretedFunction.rewrite

    def rewrite_in_turn(self):
        # Python 3.11's parser fails where two threads build syntax trees at the same time.
        with one_at_a_time:
            return rewrite(self)

    def run(self, *args, **kwargs):
        names = inspect.getfullargspec(self.fn).args
        bound = inspect.getcallargs(self.fn, *args, **{name: kwargs[name] for name in names if name in kwargs})
        bound |= {name: interpreter._implicit_cvt(bound[name]) for name in names if name not in self.constexprs}
        programs, failed = iter(range(math.prod(self.grid))), []

        def work():
            with np.errstate(all="ignore"):
                for _ in programs:
                    try:
                        self.fn(**bound)
                    except Exception as error:  # noqa: BLE001 - whatever it is, the test fails by it
                        failed.append(error)

        scope = interpreter._patch_lang(self.fn)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
        scope.restore()
        assert not failed and not any(thread.is_alive() for thread in threads)

    monkeypatch.setattr(interpreter.InterpretedFunction, "rewrite", rewrite_in_turn)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_programs_take_tickets_for_slices_of_a_row(
    dtype, device, cooperative_launches, in_threads, change_tables, change_device
):
    change_device(row_elements=32)
    few = {"cooperative": Cooperative(256, 4, 4), "cooperative_staged": Cooperative(256, 3, 4)}
    few["cooperative_16bit"] = few["cooperative_staged"]
    change_tables(rows={"cooperative_bytes": 256, **few})
    x, grad = (torch.randn(4, 1000, device=device).to(dtype) for _ in range(2))
    x[1] *= 40
    functions = [
        (lambda x: _SOFTMAX._softmax_(x, 1, False), lambda x: x.softmax(1), (x,)),
        (lambda x: _SOFTMAX._log_softmax_(x, 1, False), lambda x: x.log_softmax(1), (x,)),
    ]
    # Reductions of several 16-bit operands have no cooperative rows.
    for name in ("_log_softmax_backward_data", "_softmax_backward_data")[: dtype.itemsize // 2]:
        ours, aten = getattr(_SOFTMAX, name), getattr(torch, name)
        operands = grad, x.log_softmax(1) if "log" in name else x.softmax(1)
        functions.append((*[lambda g, y, f=f: f(g, y, 1, g.dtype) for f in (ours, aten)], operands))
    for ours, aten, operands in functions:
        (result,) = ours(*operands)
        assert_close(result + 0.0, aten(*operands) + 0.0, aten(*[value.double() for value in operands]))
        scratch = cooperative_launches.pop()
        tickets, states = int(scratch[0]), scratch[scratch != 0][1:]
        # Every program took a ticket, and published each state of its row.
        assert tickets > 4 and tickets % 4 == 0 and len(states) % tickets == 0 and (states % 2 == 1).all()
    assert not cooperative_launches


on_a_gpu = pytest.mark.skipif(
    not devices.current.forward_progress or devices.current.type == "cpu", reason="programs that run at the same time"
)


@on_a_gpu
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("n", "dtype"),
    [(n, dtype) for n in (98_312, 128_256, 500_000) for dtype in (torch.float16, torch.bfloat16)]
    + [(n, torch.float32) for n in (49_160, 65_536)],
    ids=str,
)
def test_rows_shared_by_programs(n, dtype, device, cooperative_launches):
    x, grad = (torch.randn(3, n, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(n, device=device).to(dtype) for _ in range(2))
    x[1] *= 40
    functions = {
        "_softmax": (lambda x: x.softmax(1), (x,)),
        "_log_softmax": (lambda x: x.log_softmax(1), (x,)),
        "_softmax_backward_data": (lambda g, y: torch._softmax_backward_data(g, y, 1, g.dtype), (grad, x.softmax(1))),
        "_log_softmax_backward_data": (
            lambda g, y: torch._log_softmax_backward_data(g, y, 1, g.dtype),
            (grad, x.log_softmax(1)),
        ),
        "native_layer_norm": (lambda *args: torch.native_layer_norm(args[0], (n,), *args[1:], 1e-5), (x, weight, bias)),
    }
    for name, (function, operands) in functions.items():
        cooperative_launches.clear()
        with tritonite.use_gems():
            ours = [function(*operands) for _ in range(3)]
        exact = function(*[value.double() for value in operands])
        for all_of_one in zip(
            *[y if isinstance(y, tuple) else (y,) for y in (*ours, function(*operands), exact)], strict=True
        ):
            # Signs of zeros are not compared, because ATen's formula differs.
            assert_close(all_of_one[0] + 0.0, *[y + 0.0 for y in all_of_one[3:]])
            assert all(torch.equal(all_of_one[0], again) for again in all_of_one[1:3])
        alone = dtype.itemsize < 4 and name in ("native_layer_norm", "_softmax_backward_data")
        assert bool(cooperative_launches) is not alone and served(name)
    x[2, n - 1], x[0, 5] = math.nan, -math.inf
    with tritonite.use_gems():
        y = x.softmax(1)
    assert y[2].isnan().all() and not y[:2].isnan().any() and y[0, 5] == 0


@on_a_gpu
def test_shared_rows_on_streams_and_in_graphs(device, cooperative_launches):
    x = torch.randn(600, 128_256, device=device, dtype=torch.float16)
    with tritonite.use_gems():
        expected, transposed = x.softmax(1), x.flip(0).softmax(1)
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        found = []
        for i in range(6):
            with torch.cuda.stream(streams[i % 2]):
                found.append(x.softmax(1))
        torch.cuda.synchronize()
        assert cooperative_launches and all(torch.equal(y, expected) for y in found)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x.softmax(1)
    for rows, results in ((x.clone(), expected), (x.flip(0), transposed)):
        x.copy_(rows)
        graph.replay()
        assert torch.equal(y, results)
