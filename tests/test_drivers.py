"""Drivers of the native dispatcher on CPU tensors: HIP's against a stub of its functions, a plug-in's, and graphs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tritonite.runtime import native

SOURCES = Path(__file__).parent / "drivers"
STREAM = ("-DOWNER=hip", "-DSTREAM=HIPStream", "-DCURRENT=getCurrentHIPStream")
LIBRARIES = {"libamdhip64.so": ("hip.cpp",), "libc10_hip.so": ("torch_hip.cpp", *STREAM)}


def build(source, target, *definitions):
    """Build a shared library of a source in tests/drivers."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{target.name}", *definitions, "-o", target]
    headers = f"-I{Path(native.__file__).parent}"
    subprocess.run([*compiler.split(), *options, headers, SOURCES / source], check=True)


def printed(script, argument):
    """Return what a script in tests/drivers prints as JSON, in a process of its own with the native dispatcher."""
    changed = {"TRITONITE_NATIVE": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    changed["PYTHONPATH"] = os.pathsep.join([str(SOURCES.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", SOURCES / script, argument]
    done = subprocess.run(command, env=os.environ | changed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what replays.py prints: results of calls, calls of the stub, and errors, each by its name."""
    if torch.version.hip:
        pytest.skip("needs a machine without HIP")
    folder = tmp_path_factory.mktemp("libraries")
    for name, (source, *definitions) in LIBRARIES.items():
        build(source, folder / name, *definitions)
    return printed("replays.py", folder)


@pytest.fixture(scope="module")
def in_graphs(tmp_path_factory):
    """Return what graphs.py prints: whether results are right, and how often the driver was called, by name."""
    library = tmp_path_factory.mktemp("graphs") / "graphs.so"
    build("graphs.cpp", library)
    return printed("graphs.py", library)


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


def test_a_machine_without_hip_lacks_a_library(found):
    # HIP's own library may be installed without a PyTorch for HIP.
    missing = "libc10_hip.so is not loaded" if found["HIP's library"] else "libamdhip64.so cannot be loaded"
    assert missing in found["without HIP"]


def test_a_data_dependent_size_in_a_capture_is_atens(found):
    assert found["captured"] == [1, 1, 1, 1, 1]


def test_a_graph_follows_inputs_and_buffers_that_move(in_graphs):
    assert in_graphs["moved"] == [True] * 10 and in_graphs["arenas"] == 10
    assert in_graphs["moved by a call"] == [True] * 3
    assert in_graphs["outside"] == [True] * 3 and in_graphs["buffers outside"] == 3


@pytest.mark.parametrize("name", ["lazily cloned", "lazily cloned and copied to"])
def test_a_graph_writes_a_lazily_cloned_input_alone(in_graphs, name):
    assert in_graphs[name] and all(in_graphs[name])


def test_descriptors_get_an_address_when_it_has_changed(in_graphs):
    assert in_graphs["described"] == [True] * 5
    # The first input has two descriptors, the second one.
    assert in_graphs["addressed"] == [3, 0, 1, 3, 0]


@pytest.mark.parametrize(
    ("failing", "error", "after"),
    [
        ("refused address", "tritonite: addressing for a kernel of a graph failed: no more", "after it"),
        ("failed launch", "tritonite: launching a kernel of a graph failed: no more", "after a failed launch"),
        ("raised", "not today", "after an error"),
    ],
)
def test_a_graph_is_right_after_an_error_in_the_middle(in_graphs, failing, error, after):
    assert in_graphs[failing] == error and in_graphs[after] is True
    assert in_graphs["sets after errors"] == [1, 1, 1]


def test_a_graph_runs_within_itself(in_graphs):
    assert in_graphs["re-entered"] == [True] * 7


def test_threads_run_one_graph(in_graphs):
    assert in_graphs["wrong in threads"] == []


def test_few_sets_of_arguments_are_kept(in_graphs):
    assert in_graphs["sets after executions in turn"] == 1
    assert in_graphs["sets after 7 at a time"] == in_graphs["sets after threads"] == 4


def test_a_graph_asks_for_the_stream_again_after_a_call(in_graphs):
    assert in_graphs["streams"] == [2221, 2222, 2222, 3333]
    assert in_graphs["lookups"] == [2, 1, 1]


def test_a_graph_draws_anew_and_leaves_out_empty_grids(in_graphs):
    assert in_graphs["drawn"] == [3, True, False]
