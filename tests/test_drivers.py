"""Drivers of the native dispatcher: HIP's against a stub of its functions, and a plug-in's, built from its source."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCES = Path(__file__).parent / "drivers"
STREAM = ("-DOWNER=hip", "-DSTREAM=HIPStream", "-DCURRENT=getCurrentHIPStream")
LIBRARIES = {"libamdhip64.so": ("hip.cpp",), "libc10_hip.so": ("torch_hip.cpp", *STREAM)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what replays.py prints: results of calls, calls of the stub, and errors, each by its name."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None or torch.version.hip:
        pytest.skip("needs a C++ compiler, and a machine without HIP")
    folder = tmp_path_factory.mktemp("libraries")
    for name, (source, *definitions) in LIBRARIES.items():
        options = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{name}", *definitions, "-o", folder / name]
        subprocess.run([*compiler.split(), *options, SOURCES / source], check=True)
    changed = {"TRITONITE_NATIVE": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    changed["PYTHONPATH"] = os.pathsep.join([str(SOURCES.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", SOURCES / "replays.py", folder]
    done = subprocess.run(command, env=os.environ | changed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("driver", ["HIP", "a plug-in"])
def test_replays_launch_read_and_clear(found, driver):
    assert found[f"sum by {driver}"] == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert found[f"length by {driver}"] == 3
    assert found["calls of HIP meanwhile"] == []


def test_launches_have_64_threads_a_warp_and_torchs_stream(found):
    grid_shared_stream = "3 2 1, {} 1 1, 1024, stream 69"
    assert found["calls of a sum"] == [f"hipModuleLaunchKernel({grid_shared_stream.format(256)})"]
    assert found["calls of a cooperative sum"] == [
        f"hipModuleLaunchCooperativeKernel({grid_shared_stream.format(512)})"
    ]


def test_sizes_are_read_in_the_order_of_the_stream(found):
    launch = "hipModuleLaunchKernel(1 1 1, 256 1 1, 1024, stream 69)"
    read = ["hipMemcpyDtoHAsync(8)", "hipStreamSynchronize()"]
    assert found["calls of a count"] == ["hipStreamIsCapturing()", "hipMemsetD8Async(0, 8)", launch, *read]


def test_a_trial_loads_launches_waits_and_unloads(found):
    load = ["hipModuleLoadData(image)", "hipModuleGetFunction(add_nothing)"]
    run = ["hipModuleLaunchKernel(1 1 1, 64 1 1, 0, stream 70)", "hipStreamSynchronize()"]
    assert found["calls of a trial"] == [*load, *run, "hipModuleUnload()"]


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        ("trial: hipModuleLoadData", "loading a kernel failed: invalid argument"),
        ("trial: hipModuleGetFunction", "finding a kernel failed: invalid argument"),
        ("trial: hipModuleLaunchKernel", "launching a kernel failed: invalid argument"),
        ("trial: hipStreamSynchronize", "waiting for a kernel failed: invalid argument"),
        ("trial: hipModuleUnload", "unloading a kernel failed: invalid argument"),
        ("trial by a plug-in", "finding a kernel failed: no kernels here"),
        ("sum: hipModuleLaunchKernel", "launching the kernel of aten::add.Tensor failed: invalid argument"),
        ("a dependent launch", "launching the kernel of aten::add.Tensor failed: operation not supported"),
        ("count: hipMemsetD8Async", "filling memory for the kernel of aten::bincount failed: invalid argument"),
        ("count: hipMemcpyDtoHAsync", "reading sizes for the kernel of aten::bincount failed: invalid argument"),
        ("count: hipStreamSynchronize", "waiting for sizes for the kernel of aten::bincount failed: invalid argument"),
    ],
)
def test_a_failing_function_is_one_error(found, failing, error):
    assert found[failing] == f"tritonite: {error}"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("without HIP", "libamdhip64.so cannot be loaded"),
        ("without PyTorch's", "libc10_hip.so is not loaded"),
        ("NOT_HERE", "gives no driver: no such device"),
        ("OF_ANOTHER_VERSION", "was built for version 2 of driver.h; this is version 1"),
        ("WITHOUT_FILL", "lacks a function"),
        ("no driver", "exports no tritonite_driver"),
        ("no library", "cannot be loaded: /nowhere/driver.so"),
    ],
)
def test_a_driver_that_cannot_be_used_says_why(found, name, error):
    assert error in found[name]


def test_a_data_dependent_size_in_a_capture_is_atens(found):
    assert found["captured"] == [1, 1, 1, 1, 1]
