"""Devices of other packages: found by entry point, left out if broken, and served as ours are."""

import dataclasses
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FULL
from plugins import checks_of

import tritonite
from tritonite import devices
from tritonite.devices import interpreter, plugins
from tritonite.devices.record import ENGINES
from tritonite.devices.tables import Tables
from tritonite.engine.rows.table import ROWS
from tritonite.errors import Decline, InvalidDevice
from tritonite.registry import overrides

FOLDER = Path(__file__).parent / "plugins"
HAS_HOOKS = hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")
PACKAGES = ("soft", "second")
# Each package's checks. Without the full set one of them runs the smoke checks, which take most of the time.
CHECKS = {
    package: [
        check
        for check in checks_of(FOLDER / "checks.py")
        if FULL or package == "soft" or not check.startswith("smoke_")
    ]
    for package in PACKAGES
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a function of a package that installs it once, and returns the environment of a process that has it."""
    if not HAS_HOOKS:
        pytest.skip("this torch has no hooks for devices in Python")
    if importlib.util.find_spec("pip") is None or importlib.util.find_spec("setuptools") is None:
        pytest.skip("needs pip and setuptools")
    found = {}

    def install(package):
        if package not in found:
            site, source = tmp_path_factory.mktemp(package), tmp_path_factory.mktemp("source")
            # Copies, because setuptools builds in the source's folder.
            sources = [shutil.copytree(FOLDER / name, source / name) for name in ("backend", package)]
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
            subprocess.run([*pip, "--target", site, *sources], check=True, capture_output=True)
            path = os.pathsep.join([str(FOLDER.parents[1]), str(site)])
            found[package] = os.environ | {"PYTHONPATH": path, "TRITONITE_NATIVE": "0"}
        return found[package]

    return install


@pytest.fixture(scope="module")
def results(installed):
    """Return a function of a package that runs its checks on its device, once each, in one process."""
    found = {}

    def run(package):
        if package not in found:
            command = [sys.executable, "-W", "ignore", FOLDER / "checks.py", package, *CHECKS[package]]
            done = subprocess.run(command, env=installed(package), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            found[package] = json.loads(done.stdout)
        return found[package]

    return run


@pytest.mark.smoke
@pytest.mark.host
@pytest.mark.parametrize(("package", "check"), [(package, check) for package in PACKAGES for check in CHECKS[package]])
def test_device(results, package, check):
    """A device in Python, installed by pip, runs Tritonite's kernels: tests/plugins/checks.py has the checks."""
    assert results(package)[check] == ""


def test_a_driver_for_storages_without_an_allocator_is_refused(installed):
    if os.environ.get("CXX") is None and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    code = "from tritonite.runtime import native; native._load_built().use_driver('soft', '/nowhere.so')"
    environment = installed("soft") | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (
        "device type soft gives tensors whose storages have no allocator: expected an allocator in C++" in done.stderr
    )


def _entry(name, loaded):
    def load():
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    return SimpleNamespace(name=name, dist=SimpleNamespace(name=f"{name}-package", version="1"), load=load, value="")


_OTHER = dataclasses.replace(
    interpreter.RECORD, kind="other", type="privateuseone", dispatch_key="PrivateUse1", like="interpreter"
)


@pytest.mark.parametrize(
    ("loaded", "reason"),
    [
        (ImportError("no driver\nwith details"), "ImportError: no driver"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (
            lambda: "other",
            "InvalidDevice: the record that the entry point gives is a str: expected a tritonite.devices.Device",
        ),
        (dataclasses.replace(_OTHER, kind="interpreter"), "tritonite's already"),
        (dataclasses.replace(_OTHER, dispatch_key="Other"), "dispatch_key is 'Other': expected one of PyTorch's keys"),
        (
            dataclasses.replace(_OTHER, dispatch_key="CPU"),
            "dispatch_key is 'CPU': expected another key, because a device is registered",
        ),
        (dataclasses.replace(_OTHER, dispatch_key="XPU"), "dispatch_key is 'XPU': expected PrivateUse1"),
        (dataclasses.replace(_OTHER, type="other"), "type is 'other': expected a device type of PyTorch"),
        (dataclasses.replace(_OTHER, aten="xpu"), "aten is 'xpu': expected 'cpu' or 'cuda'"),
        (dataclasses.replace(_OTHER, like="other"), "like is 'other': expected one of 'nvidia', 'amd'"),
        (dataclasses.replace(_OTHER, kind=""), "kind is '': expected a name"),
        (dataclasses.replace(_OTHER, kind="amd"), "kind is 'amd': expected another name than Tritonite's own"),
        (dataclasses.replace(_OTHER, interpreted=False), "target is '': expected the name of Triton's backend"),
        (dataclasses.replace(_OTHER, runtime=devices.Runtime), "expected an object of a subclass of Runtime"),
        (dataclasses.replace(_OTHER, programs=0), "programs is 0: expected an int of 1 or more"),
        (dataclasses.replace(_OTHER, warp_size=48), "warp_size is 48: expected a power of 2"),
        (dataclasses.replace(_OTHER, transpose_tile=64), "transpose_tile is 64: expected (rows, columns)"),
        (dataclasses.replace(_OTHER, tensor_cores=("float16",)), "tensor_cores is ('float16',): expected a frozenset"),
        (dataclasses.replace(_OTHER, unverified="random"), "unverified is 'random': expected a frozenset of names"),
        (dataclasses.replace(_OTHER, native="driver.cpp"), "expected a tritonite.devices.NativeDriver"),
        (dataclasses.replace(_OTHER, tables={"row": str}), "'row' in tables is no engine: expected an engine"),
        (dataclasses.replace(_OTHER, tables={"rows": 3}), "tables['rows'] is 3: expected a function"),
        (
            dataclasses.replace(_OTHER, overrides={"gelu": "module.gelu"}),
            "overrides['gelu'] is 'module.gelu': expected",
        ),
    ],
)
def test_a_broken_plugin_is_left_out_with_one_line(monkeypatch, loaded, reason):
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [_entry("bad", loaded)])
    monkeypatch.setattr(plugins, "broken", {})
    with pytest.warns(UserWarning, match="device plug-in 'bad' of bad-package 1 is left out") as warned:
        found = plugins.found()
    assert "other" not in [device.kind for device in found]
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    assert reason in plugins.broken["bad"]


def test_plugins_that_are_absent_or_present(monkeypatch):
    entries = [_entry("absent", lambda: None), _entry("there", _OTHER)]
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: entries)
    (*_, device) = plugins.found()
    assert device.kind == "other" and device.plugin == "there-package 1"
    assert device.served_by == "other (there-package 1)"


def test_a_kind_without_a_table_has_that_of_the_kind_it_is_like(monkeypatch):
    table = Tables("rows", {"interpreter": 3})
    record = dataclasses.replace(_OTHER, tables={"rows": lambda base: base + 1, "gemm": lambda base: None})
    monkeypatch.setattr(devices, "present", (*devices.present, record))
    assert table["other"] == 4 and table["interpreter"] == 3
    with pytest.raises(KeyError, match="unknown"):
        table["unknown"]


@pytest.mark.parametrize(
    ("change", "given"),
    [(lambda base: None, "returns NoneType"), (lambda base: base._replace(held=1), "raises ValueError")],
)
def test_a_function_that_gives_no_table_is_named(monkeypatch, change, given):
    monkeypatch.setattr(devices, "present", (*devices.present, dataclasses.replace(_OTHER, tables={"rows": change})))
    with pytest.raises(InvalidDevice, match=rf"tables\['rows'\] of other is a function that {given}"):
        Tables("rows", {"interpreter": ROWS["interpreter"]})["other"]


def test_engines_with_tables_are_all_known():
    importlib.import_module("tritonite.fused")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("tritonite.engine.")]
    found = {value.engine for module in modules for value in vars(module).values() if isinstance(value, Tables)}
    assert found == set(ENGINES)


@pytest.mark.parametrize(
    ("path", "given"),
    [("nowhere:gelu", "No module named 'nowhere'"), ("json:gelu", "no attribute 'gelu'"), ("json:__name__", "a str")],
)
def test_an_override_that_cannot_be_imported_is_named(monkeypatch, path, given):
    monkeypatch.setattr(devices, "current", dataclasses.replace(_OTHER, overrides={"gelu": path}), raising=False)
    with pytest.raises(InvalidDevice, match=f"overrides.*of other is '{path}'.*{given}.*: expected the module:name"):
        overrides.vendors("gelu")


def test_overrides_of_unknown_overloads_are_named(monkeypatch):
    names = {"sillu": "json:loads", "add": "json:loads", "silu": "json:loads", "tritonite::any": "json:loads"}
    monkeypatch.setattr(devices, "present", (*devices.present, dataclasses.replace(_OTHER, overrides=names)))
    add, sillu = map(str, overrides.unknown(tritonite.overloads()))
    assert "the key 'add' in the overrides of other" in add and "add.Tensor" in add
    assert "the key 'sillu'" in sillu and "did you mean 'silu'?" in sillu


@pytest.mark.parametrize("value", [torch.float64, torch.zeros(2, dtype=torch.float64), [torch.zeros(()).double()]])
def test_a_device_without_float64_declines_it(monkeypatch, value):
    record = dataclasses.replace(_OTHER, fp64=False)
    monkeypatch.setattr(devices, "present", (*devices.present, record))
    host = overrides.host_of("neg", lambda values, outs: values)
    assert host([value], ()) == [value]
    monkeypatch.setattr(devices, "current", record, raising=False)
    assert host([torch.float32, 1.5], ()) == [torch.float32, 1.5]
    with pytest.raises(Decline, match="float64"):
        host([value], ())
    with pytest.raises(Decline, match="float64"):
        host([1], [torch.zeros(2, dtype=torch.float64)])
