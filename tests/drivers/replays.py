"""Replay plans on CPU tensors by a stub of HIP and by a plug-in's driver, and print what happens as JSON.

The native dispatcher takes the CPU for a device with a driver here. The "compiled kernels" are C functions.

    python replays.py FOLDER     with the libraries that test_drivers.py builds in FOLDER
"""

import ctypes
import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import tritonite  # noqa: F401 - before torch uses Triton

import torch  # isort: skip
from triton.backends.compiler import GPUTarget

from tritonite import devices
from tritonite.devices import NativeDriver
from tritonite.install import override
from tritonite.runtime import contract, native
from tritonite.testing.stand_in import standing_in

DISPATCHER = override.native_dispatcher()
GPU = GPUTarget("hip", "gfx942", 64)
FOLDER = Path(sys.argv[1])
X, Y = torch.arange(5.0), torch.full((5,), 2.0)


def error_of(call, *arguments):
    """Return the first line of the error that a call raises, or "" for none."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


class Compiled:
    """Stands for what Triton returns for a kernel of four warps."""

    def __init__(self, function, **metadata):
        self.function = function
        self.metadata = SimpleNamespace(**{"num_warps": 4, "shared": 1024, "target": GPU} | metadata)


def add_by(kernel):
    """Return a host function of `add`, whose recorded launch is a compiled kernel."""

    def run(self, other, alpha):
        out = contract.empty(self.shape, self.dtype, self.device)
        arguments = [self, other, out, self.numel()]
        contract.recorder().add(["*fp32", "*fp32", "*fp32", "i64"], arguments, (3, 2, 1), kernel, None)
        return out

    return run


def count_by(kernel):
    """Return a host function of `bincount`, whose result is as long as a compiled kernel says."""

    def run(self, weights, minlength):
        counter = contract.zeros((1,), torch.int64, self.device)
        contract.recorder().add(["*i64"], [counter], (1, 1, 1), kernel, None)
        (size,) = contract.read(counter)
        return contract.empty((size,), torch.int64, self.device)

    return run


def replayed(overload, run, call):
    """Return the result of a call that repeats a recorded one."""
    with standing_in(overload, run):
        call()
        hip.stub_calls()
        return call()


def driver_of(source, flags=""):
    """Return the path of a plug-in's driver, built from its source."""
    record = dataclasses.replace(devices.default, native=NativeDriver(True, str(source)))
    flagged = mock.patch.dict(os.environ, {"TRITONITE_NATIVE_FLAGS": flags})
    with mock.patch.object(devices, "default", record), flagged:
        return native.driver()


def loads(name):
    """Return whether a library can be loaded."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def called():
    return hip.stub_calls().decode().splitlines()


contract.set_strict(True)
found = {"without HIP": error_of(DISPATCHER.use_driver, "cpu", "hip")}
# The names of `hip_driver`.
found["HIP's library"] = any(loads(f"libamdhip64.so{version}") for version in ("", ".7", ".6", ".5"))
hip = ctypes.CDLL(str(FOLDER / "libamdhip64.so"))
hip.stub_calls.restype = ctypes.c_char_p
found["without PyTorch's"] = error_of(DISPATCHER.use_driver, "cpu", "hip")
ctypes.CDLL(str(FOLDER / "libc10_hip.so"))
DISPATCHER.use_driver("cpu", "hip")

names = {name: ctypes.cast(hip[f"stub_{name}"], ctypes.c_void_p).value for name in ("add", "count")}
add, count = add_by(Compiled(names["add"])), count_by(Compiled(names["count"]))
found["sum by HIP"] = replayed("add.Tensor", add, lambda: torch.add(X, Y)).tolist()
found["calls of a sum"] = called()
cooperative = add_by(Compiled(names["add"], num_warps=8, launch_cooperative_grid=True))
replayed("add.Tensor", cooperative, lambda: torch.add(X, Y))
found["calls of a cooperative sum"] = called()
early = add_by(Compiled(names["add"], launch_pdl=True))
found["a dependent launch"] = error_of(replayed, "add.Tensor", early, lambda: torch.add(X, Y))
found["length by HIP"] = len(replayed("bincount", count, lambda: torch.bincount(X.long())))
found["calls of a count"] = called()
DISPATCHER.try_driver("cpu", b"image", "add_nothing", 64, 2)
found["calls of a trial"] = called()

launched = "hipModuleLaunchKernel", "hipStreamSynchronize"
for name in ("hipModuleLoadData", "hipModuleGetFunction", *launched, "hipModuleUnload"):
    hip.stub_fail(name.encode())
    found[f"trial: {name}"] = error_of(DISPATCHER.try_driver, "cpu", b"image", "nothing", 64, 2)
hip.stub_fail(b"hipModuleLaunchKernel")
found["sum: hipModuleLaunchKernel"] = error_of(replayed, "add.Tensor", add, lambda: torch.add(X, Y))
for name in ("hipMemsetD8Async", "hipMemcpyDtoHAsync", "hipStreamSynchronize"):
    hip.stub_fail(name.encode())
    found[f"count: {name}"] = error_of(replayed, "bincount", count, lambda: torch.bincount(X.long()))
hip.stub_fail(b"captured")
with standing_in("bincount", count) as runs:
    torch.bincount(X.long())
    found["captured"] = torch.bincount(X.long()).tolist()
hip.stub_fail(b"")

source = Path(__file__).with_name("plugin.cpp")
plugin = driver_of(source)
DISPATCHER.use_driver("cpu", plugin)
found["sum by a plug-in"] = replayed("add.Tensor", add, lambda: torch.add(X, Y)).tolist()
found["length by a plug-in"] = len(replayed("bincount", count, lambda: torch.bincount(X.long())))
found["calls of HIP meanwhile"] = called()
found["trial by a plug-in"] = error_of(DISPATCHER.try_driver, "cpu", b"image", "nothing", 64, 2)
for flag in ("NOT_HERE", "OF_ANOTHER_VERSION", "WITHOUT_FILL"):
    found[flag] = error_of(DISPATCHER.use_driver, "cpu", driver_of(source, f"-D{flag}"))
found["no driver"] = error_of(DISPATCHER.use_driver, "cpu", str(FOLDER / "libc10_hip.so"))
found["no library"] = error_of(DISPATCHER.use_driver, "cpu", "/nowhere/driver.so")
print(json.dumps(found))
