"""Checks on a device from a plug-in, run in a process of its own: python checks.py NAME [CHECK ...].

The process is one of its own because PyTorch gives PrivateUse1 one name. Prints a JSON object: errors by check, "" for
one that passes. Exits with 0 whatever it finds.
"""

import importlib
import json
import os
import sys
import threading
import time
import traceback
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch

import tritonite
from tritonite import devices
from tritonite.devices.tables import Tables
from tritonite.registry import overrides
from tritonite.runtime import contract
from tritonite.testing import opinfo, verify

NAME = sys.argv[1]
# One operator or more of every engine that a model needs.
PACKETS = ("add", "mul", "exp", "gelu", "where", "sum", "mean", "argmax", "_softmax", "native_layer_norm", "mm")
PACKETS += (
    "addmm",
    "cat",
    "index_select",
    "gather",
    "embedding",
    "sort",
    "cumsum",
    "fill_",
    "native_group_norm",
    "tril",
)
LAYOUTS = ("transposed*", "broadcast*", "zero_dim*")


def is_found():
    assert torch.accelerator.current_accelerator().type == NAME
    assert [device.kind for device in devices.present] == [NAME, "interpreter"]
    assert tritonite.device == NAME and tritonite.backend.kind == NAME
    assert tritonite.backend.served_by.startswith(f"{NAME} (")


def smoke_overloads():
    served = 0
    for name, op in tritonite.overloads().items():
        if op.packet in PACKETS and op.has_place:
            report = verify.check_overload(op, torch.float32, labels=LAYOUTS)
            assert not report.failures, (name, report.failures[:3])
            served += report.served
    assert served > 3 * len(PACKETS), served


def smoke_functions_and_gradients():
    served = 0
    for name, info in opinfo.infos().items():
        if opinfo.packet(info) in PACKETS and opinfo.supported(info, torch.float32):
            report = verify.check_opinfo(name, info, torch.float32, limit=2, most_elements=2**12)
            assert not report.failures, (name, report.failures[:3])
            served += report.served
    assert served > 3 * len(PACKETS), served


def aten_serves_convolutions():
    """Convolutions that Tritonite declines reach the CPU's kernels: PyTorch has operators of their own for these."""
    x, weight, bias = torch.randn(2, 4, 9), torch.randn(4, 3, 3), torch.randn(6)
    gradients = []
    for device in ("cpu", NAME):
        given = [each.to(device).detach().requires_grad_() for each in (x, weight, bias)]
        y = torch.nn.functional.conv_transpose1d(*given, groups=2)
        y.sum().backward()
        gradients.append([y.detach().cpu(), *[each.grad.cpu() for each in given]])
    torch.testing.assert_close(*gradients)


def tables_differ():
    """Every engine that the record names has a table that the record's function changes."""
    importlib.import_module("tritonite.fused")
    modules = [module for name, module in sys.modules.items() if name.startswith("tritonite.engine.")]
    tables = [value for module in modules for value in vars(module).values() if isinstance(value, Tables)]
    for engine in tritonite.backend.tables:
        changed = [table for table in tables if table.engine == engine]
        assert any(table[NAME] != table[tritonite.backend.like] for table in changed), engine


def overrides_are_right():
    """Every overload that the record overrides agrees with ATen, and the vendor's function serves a sample or more."""
    vendors, ran = overrides.vendors, set()

    def noted(overload):
        found = vendors(overload)
        if found is None:
            return None
        return found._replace(function=lambda *args, **options: ran.add(overload) or found.function(*args, **options))

    for name in tritonite.backend.overrides:
        with mock.patch.object(overrides, "vendors", noted):
            report = verify.check_overload(tritonite.overloads()[name], torch.float32)
        assert report.served and not report.failures, (name, report.failures[:3])
    assert ran == set(tritonite.backend.overrides), ran


def own_table():
    from tritonite.engine.rows.table import ROWS

    base = ROWS[tritonite.backend.like]
    assert ROWS[NAME] != base and ROWS[NAME]._replace(held_tiles=base.held_tiles) == base
    x = torch.randn(3, 3000, device=NAME)
    with tritonite.use_gems():
        y = torch.softmax(x, 1)
    torch.testing.assert_close(y.cpu(), torch.softmax(x.cpu(), 1))


def own_override():
    x = torch.randn(100, device=NAME)
    assert f"{NAME}'s host function serves the call" in tritonite.explain("gelu", x)
    assert "does not serve" in tritonite.explain("gelu", x.double())
    for each in (x, x.double(), x[::2]):
        with tritonite.use_gems():
            y = torch.nn.functional.gelu(each)
        torch.testing.assert_close(y.cpu(), torch.nn.functional.gelu(each.cpu()))
    assert tritonite.stats()["gelu"].launched == 3


def both_devices_at_once():
    x, failures = torch.randn(50, 20), []
    expected = torch.softmax(x @ x.t(), 1)

    def compute(device):
        y = x.to(device)
        for _ in range(2):
            z = torch.softmax(y @ y.t(), 1)
            failures.extend([device] * (not torch.allclose(z.cpu(), expected, atol=1e-5)))

    with tritonite.use_gems():
        threads = [threading.Thread(target=compute, args=(device,)) for device in ("cpu", NAME)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures and tritonite.stats()["mm"].launched >= 4
    on_device = x.to(NAME)
    torch.testing.assert_close(tritonite.ops.add(on_device, on_device).cpu(), tritonite.ops.add(x, x))
    assert f"device     {NAME}" in tritonite.explain("neg", on_device)
    assert "device     interpreter" in tritonite.explain("neg", x)


def streams_and_generator():
    module = torch.get_device_module(NAME)
    with module.stream(module.Stream()) as _:
        begin = module.current_stream().record_event()
        torch.ones(3, device=NAME).sum()
        end = module.current_stream().record_event()
    module.synchronize()
    tritonite.backend.runtime.synchronize(tritonite.backend)
    assert begin.elapsed_time(end) > 0
    for options in ({}, {"include": "*"}):
        with tritonite.use_gems(**options):
            module.manual_seed(3)
            first = torch.rand(100, device=NAME)
            second = torch.rand(100, device=NAME)
            module.manual_seed(3)
            again = torch.rand(100, device=NAME)
        assert torch.equal(first.cpu(), again.cpu()) and not torch.equal(first.cpu(), second.cpu())


def memory_is_given_back():
    used = []
    for _ in range(3):
        for _ in range(50):
            torch.empty(2**20, device=NAME).fill_(1)
        with open("/proc/self/statm") as file:
            used.append(int(file.read().split()[1]) * 4096)
    # 50 tensors have 200 MiB.
    assert used[-1] - used[0] < 100 * 2**20, used


def a_model_learns():
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
    model = torch.nn.Sequential(*layers)
    x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))
    losses = []
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for device in ("cpu", NAME):
        model = model.to(device)
        model.load_state_dict({name: value.to(device) for name, value in state.items()})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with tritonite.use_gems(include=None if device == NAME else ()):
            for _ in range(3):
                loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 1e-5, losses


CHECKS = (
    is_found,
    aten_serves_convolutions,
    tables_differ,
    overrides_are_right,
    own_table,
    own_override,
    both_devices_at_once,
)
CHECKS += (streams_and_generator, memory_is_given_back)
CHECKS += (a_model_learns, smoke_overloads, smoke_functions_and_gradients)

if __name__ == "__main__":
    torch.set_num_threads(1)
    contract.set_comparing(False)
    failed = {}
    chosen = [check for check in CHECKS if len(sys.argv) < 3 or check.__name__ in sys.argv[2:]]
    for check in chosen:
        begin = time.perf_counter()
        tritonite.reset_stats()
        try:
            check()
            failed[check.__name__] = ""
        except Exception:  # noqa: BLE001 - the test that started this process shows the error
            failed[check.__name__] = traceback.format_exc()
        sys.stderr.write(f"{check.__name__}: {time.perf_counter() - begin:.1f} s\n")
    sys.stdout.write(json.dumps(failed))
