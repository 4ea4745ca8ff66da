"""The checks of `tritonite doctor`, each of which passes and fails, and the command."""

import dataclasses
import json
import os
import types

import pytest
import torch
from typer.testing import CliRunner

import tritonite
from tritonite import cli, devices
from tritonite.report import doctor
from tritonite.report.doctor import clashes, files, machine, variables
from tritonite.runtime import native


@pytest.fixture
def kind(monkeypatch):
    """Return a function that makes the current device one of another kind."""

    def change(name, **fields):
        native = devices.NativeDriver(name == "nvidia") if name in ("nvidia", "interpreter") else None
        interpreted = name == "interpreter"
        target = {"nvidia": "cuda", "amd": "hip"}.get(name, "")
        fields = {"native": native, "interpreted": interpreted, "target": target, **fields}
        record = dataclasses.replace(devices.current, kind=name, **fields)
        monkeypatch.setattr(devices, "current", record)

    return change


def levels(check):
    return [each.level for each in check()]


def only(check, level):
    """Return the one finding of a level, which has advice."""
    (found,) = [each for each in check() if each.level == level]
    assert level == "ok" or found.advice
    return found


def test_the_device(kind, monkeypatch):
    kind("interpreter")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "gpu_driver_loaded", lambda: False)
    assert "interpreter" in only(machine.device, "note").message
    monkeypatch.setattr(machine, "gpu_driver_loaded", lambda: True)
    assert "finds no GPU" in only(machine.device, "error").message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "unset TRITON_INTERPRET" in only(machine.device, "warning").advice
    kind("none")
    assert "forbids the interpreter" in only(machine.device, "error").message


@pytest.mark.parametrize("capability, level", [((9, 0), "ok"), ((7, 5), "warning"), ((12, 0), "error")])
def test_torch_has_kernels_for_each_gpu(kind, monkeypatch, capability, level):
    kind("nvidia")
    for name, value in {
        "device_count": 1,
        "get_device_name": "a GPU",
        "get_device_capability": capability,
        "get_arch_list": ["sm_80", "sm_90"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "a GPU" in only(machine.device, level).message


@pytest.mark.parametrize("has, level", [((13, 0), "ok"), ((12, 2), "note"), ((11, 8), "error"), ((), "error")])
def test_the_driver_supports_torchs_cuda(kind, monkeypatch, has, level):
    kind("nvidia")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(machine, "cuda_driver", lambda: has)
    assert levels(machine.driver) == [level]


def test_there_is_no_driver_to_check_without_a_gpu(kind):
    kind("interpreter")
    assert levels(machine.driver) == []
    assert isinstance(machine.cuda_driver(), tuple)


def test_versions(monkeypatch):
    assert machine.least_versions() == {"torch": "2.10", "triton": "3.6"}
    monkeypatch.setattr(machine, "tritons_of_torch", lambda: "")
    assert levels(machine.versions) == ["ok", "ok"]
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert "2.9.1" in only(machine.versions, "error").message
    monkeypatch.setattr(machine, "tritons_of_torch", lambda: "1.0.0")
    assert "1.0.0" in only(machine.versions, "note").message


def test_versions_are_known_in_a_checkout(monkeypatch):
    def missing(name):
        raise machine.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(machine.importlib.metadata, "requires", missing)
    assert machine.least_versions() == {"torch": "2.10", "triton": "3.6"} and machine.tritons_of_torch() == ""


def test_compilers(kind, monkeypatch, tmp_path):
    kind("nvidia")
    for name in ("CC", "CXX", "TRITON_PTXAS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(native, "wanted", lambda: True)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(machine, "ptxas", lambda: "/bin/sh")
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").write_text("")
    assert levels(machine.compilers) == ["ok", "ok", "ok"]
    (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(native, "library", lambda: tmp_path / "none.so")
    assert "Python.h" in only(machine.compilers, "warning").message
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine, "ptxas", lambda: None)
    assert levels(machine.compilers) == ["error", "warning", "error"]
    kind("interpreter")
    monkeypatch.setattr(native, "wanted", lambda: False)
    assert levels(machine.compilers) == ["note"]


def test_caches(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setattr(files, "folders", lambda: [("a cache", "VARIABLE", folder)])
    free = 10 << 30
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
    assert "0 bytes, 10.0 GiB free" in only(files.caches, "ok").message
    folder.mkdir()
    (folder / "kernel").write_bytes(bytes(2048))
    assert "2 KiB" in only(files.caches, "ok").message
    free = 1 << 29
    assert "VARIABLE" in only(files.caches, "warning").advice
    free = 1 << 20
    assert levels(files.caches) == ["error"]
    monkeypatch.setattr(files.os, "statvfs", lambda path: types.SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert "noexec" in only(files.caches, "error").message
    monkeypatch.setattr(files, "folders", lambda: [("a cache", "VARIABLE", folder / "kernel" / "below")])
    assert "cannot be written" in only(files.caches, "error").message


def test_the_real_cache_folders_are_found(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITONITE_CACHE", str(tmp_path))
    assert tmp_path in [path for _, _, path in files.folders()]


def test_the_dispatcher(kind, monkeypatch, tmp_path):
    kind("interpreter")
    monkeypatch.delenv("TRITONITE_NATIVE", raising=False)
    assert "interpreter" in only(files.dispatcher, "ok").message
    monkeypatch.setenv("TRITONITE_NATIVE", "2")
    assert "0 or 1" in only(files.dispatcher, "error").advice
    kind("nvidia")
    monkeypatch.setenv("TRITONITE_NATIVE", "0")
    assert "Python" in only(files.dispatcher, "warning").message
    monkeypatch.delenv("TRITONITE_NATIVE")
    library = tmp_path / "dispatcher.so"
    monkeypatch.setattr(native, "library", lambda: library)
    assert "tritonite build" in only(files.dispatcher, "note").advice
    library.write_text("not a library")
    native.module.cache_clear()
    assert "slower Python path" in only(files.dispatcher, "warning").message
    # The warning comes once; the finding remains.
    assert only(files.dispatcher, "warning")
    native.module.cache_clear()
    loaded = types.ModuleType("dispatcher")
    monkeypatch.setattr(native, "module", lambda: loaded)
    monkeypatch.setattr(files, "_trial", lambda dispatcher: "")
    assert "native" in only(files.dispatcher, "ok").message
    monkeypatch.setattr(files, "_trial", lambda dispatcher: "launching a kernel failed: no image")
    assert "no image" in only(files.dispatcher, "error").message
    kind("amd", native=devices.NativeDriver(False, "hip"))
    assert "TRITONITE_NATIVE=1" in only(files.dispatcher, "ok").message


def test_a_trial_of_the_dispatcher_launches_a_kernel(monkeypatch):
    given = []

    def try_driver(*arguments):
        given.append(arguments)
        if len(given) > 1:
            raise RuntimeError("launching a kernel failed: no image\nwith details")

    metadata = types.SimpleNamespace(num_warps=4, name="_do_nothing", target=types.SimpleNamespace(warp_size=64))
    kernel = types.SimpleNamespace(metadata=metadata, kernel=b"code")
    monkeypatch.setattr(files, "ASTSource", lambda *given: None)
    monkeypatch.setattr(files.compilation, "compile_kernel", lambda source: kernel)
    monkeypatch.setattr(devices, "current_device", lambda: torch.device("cpu"))
    dispatcher = types.SimpleNamespace(try_driver=try_driver)
    assert files._trial(dispatcher) == "" and given == [("cpu", b"code", "_do_nothing", 256, 2)]
    assert files._trial(dispatcher) == "launching a kernel failed: no image"


def test_clashes_are_found():
    assert levels(clashes.clashes) in (["ok"], ["note"])
    own = torch.library.Library("aten", "IMPL")
    try:
        own.impl("cosh", torch.sinh, tritonite.backend.dispatch_key)
        found = only(clashes.clashes, "warning")
        assert "cosh" in found.message and "exclude=" in found.advice
        with tritonite.use_gems(include="cosh"):
            assert "1 are Tritonite's now" in only(clashes.clashes, "warning").message
    finally:
        own._destroy()
    assert "warning" not in levels(clashes.clashes)


@pytest.mark.parametrize(
    "path, owner",
    [
        ("/__w/pytorch/pytorch/build/aten/src/ATen/RegisterCPU_0.cpp", ""),
        ("/pytorch/torch/csrc/autograd/generated/VariableType_2.cpp", ""),
        (f"{clashes._TORCH}/_meta_registrations.py", ""),
        ("tritonite", ""),
        (f"{clashes._TORCH}/_native/registry.py", "torch._native"),
        ("/usr/lib/python3/dist-packages/flag_gems/runtime.py", "flag_gems"),
        ("/venv/lib/python3.11/site-packages/batch_invariant_ops.py", "batch_invariant_ops"),
        ("/home/me/train.py", "/home/me/train.py"),
    ],
)
def test_a_kernels_owner_follows_from_its_file(path, owner):
    assert clashes.owner_of(path) == owner


def test_torchs_own_overrides_are_a_note(monkeypatch):
    monkeypatch.setattr(clashes, "registrations", lambda: {"torch._native": {"topk"}})
    assert "topk" in only(clashes.clashes, "note").message


def test_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TRITON", "CUDA_", "PYTORCH_")):
            monkeypatch.delenv(name)
    assert levels(variables.environment) == ["ok"]
    monkeypatch.setenv("TRITONITE_NATVE", "1")
    assert "'TRITONITE_NATIVE'" in only(variables.environment, "warning").message
    monkeypatch.delenv("TRITONITE_NATVE")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "waits" in only(variables.environment, "warning").message
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    monkeypatch.setenv("TRITONITE_QUIET", "1")
    assert [each.level for each in variables.environment()] == ["note"]


def fixed(*findings):
    return {"first": lambda: findings, "second": lambda: [doctor.Finding("second", "ok", "well")]}


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, ["doctor", *arguments])


def test_the_command_exits_with_1_on_an_error_only(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", fixed(doctor.Finding("first", "warning", "[odd]", "look")))
    done = run()
    assert done.exit_code == 0 and "[odd]" in done.output and "-> look" in done.output
    assert "0 errors, 1 warnings" in done.output
    monkeypatch.setattr(doctor, "CHECKS", fixed(doctor.Finding("first", "error", "broken", "mend it")))
    assert run().exit_code == 1
    done = run("--json")
    assert done.exit_code == 1
    assert json.loads(done.output)[0] == {"check": "first", "level": "error", "message": "broken", "advice": "mend it"}


def test_a_check_that_raises_is_an_error_and_the_others_run(monkeypatch):
    def broken():
        raise OSError("no home")

    monkeypatch.setattr(doctor, "CHECKS", {"first": broken} | dict(list(fixed().items())[1:]))
    first, second = doctor.diagnose()
    assert first.level == "error" and "no home" in first.message and second.level == "ok"


def test_every_check_runs_here():
    found = {each.check for each in doctor.diagnose()}
    assert {"device", "versions", "caches", "dispatcher", "clashes", "environment"} <= found
