"""Devices of other packages: found by entry point, left out if broken, and served as ours are."""

import dataclasses
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
from plugins import checks_of

from tritonite import devices
from tritonite.devices import interpreter, plugins
from tritonite.devices.tables import Tables

FOLDER = Path(__file__).parent / "plugins"
HAS_HOOKS = hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")
PACKAGES = ("soft", "second")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a function of a package that installs it and runs all checks on its device, once each, in one process."""
    if not HAS_HOOKS:
        pytest.skip("this torch has no hooks for devices in Python")
    if importlib.util.find_spec("pip") is None or importlib.util.find_spec("setuptools") is None:
        pytest.skip("needs pip and setuptools")
    found = {}

    def run(package):
        if package not in found:
            site, source = tmp_path_factory.mktemp(package), tmp_path_factory.mktemp("source")
            # Copies, because setuptools builds in the source's folder.
            sources = [shutil.copytree(FOLDER / name, source / name) for name in ("backend", package)]
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
            subprocess.run([*pip, "--target", site, *sources], check=True, capture_output=True)
            path = os.pathsep.join([str(FOLDER.parents[1]), str(site)])
            environment = os.environ | {"PYTHONPATH": path, "TRITONITE_NATIVE": "0"}
            command = [sys.executable, "-W", "ignore", FOLDER / "checks.py", package]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            found[package] = json.loads(done.stdout)
        return found[package]

    return run


@pytest.mark.smoke
@pytest.mark.host
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("check", checks_of(FOLDER / "checks.py"))
def test_device(results, package, check):
    """A device in Python, installed by pip, runs Tritonite's kernels: tests/plugins/checks.py has the checks."""
    assert results(package)[check] == ""


def _entry(name, loaded):
    def load():
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    return SimpleNamespace(name=name, dist=SimpleNamespace(name=f"{name}-package", version="1"), load=load, value="")


_OTHER = dataclasses.replace(interpreter.RECORD, kind="other", dispatch_key="PrivateUse1", like="interpreter")


@pytest.mark.parametrize(
    ("loaded", "reason"),
    [
        (ImportError("no driver\nwith details"), "ImportError: no driver"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: "other", "a tritonite.devices.Device is expected"),
        (dataclasses.replace(_OTHER, kind="interpreter"), "tritonite's already"),
        (dataclasses.replace(_OTHER, dispatch_key="Other"), "none of PyTorch's"),
        (dataclasses.replace(_OTHER, dispatch_key="CPU"), "at dispatch key CPU already"),
        (dataclasses.replace(_OTHER, type="other"), "other"),
        (dataclasses.replace(_OTHER, aten="xpu"), "'cpu' or 'cuda'"),
        (dataclasses.replace(_OTHER, like="other"), "like is 'other'"),
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
