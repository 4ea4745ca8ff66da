"""The wheel of a compiled dispatcher: installed where there is no compiler, used if it fits, and told if not."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

from tritonite.errors import UnusableFile
from tritonite.runtime import cache, native
from tritonite.runtime.native import prebuilt

LOADED = """
import tritonite
from tritonite.runtime import native
print(native.module().__file__, native.path(), native.state(), sep="\\n")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder into which pip has installed a wheel of this process's dispatcher."""
    folder = tmp_path_factory.mktemp("prebuilt")
    wheel = native.write_wheel("0.1.0", folder / "wheels")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target"]
    subprocess.run([*command, folder / "site", wheel], check=True, capture_output=True)
    return folder / "site"


@pytest.fixture
def own_copy(installed, tmp_path, monkeypatch):
    """Return the installed package's folder, as a copy on this process's path."""
    package = tmp_path / "site" / prebuilt.PACKAGE
    package.mkdir(parents=True)
    for file in (installed / prebuilt.PACKAGE).iterdir():
        if file.is_file():
            (package / file.name).write_bytes(file.read_bytes())
    monkeypatch.syspath_prepend(str(package.parent))
    cache.warn_once.cache_clear()
    yield package
    sys.modules.pop(prebuilt.PACKAGE, None)
    cache.warn_once.cache_clear()


def test_a_machine_without_a_compiler_loads_the_wheel(installed, tmp_path):
    settings = {"CXX": "/nonexistent", "TRITONITE_CACHE": str(tmp_path / "empty"), "TRITONITE_NATIVE": "1"}
    path = os.pathsep.join([str(installed), *sys.path])
    command = [sys.executable, "-W", "error:calls", "-W", "error:the prebuilt", "-c", LOADED]
    done = subprocess.run(
        command, env=os.environ | settings | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    library = str(installed / prebuilt.PACKAGE / "dispatcher.so")
    assert done.stdout.split("\n")[:3] == [library, library, "native dispatcher, prebuilt"]
    assert not (tmp_path / "empty").exists()


def test_the_wheel_names_what_it_is_for(installed):
    (info,) = installed.glob("*.dist-info")
    assert torch.__version__.replace("+", ".") in info.name
    assert f"Requires-Dist: torch=={torch.__version__.split('+')[0]}\n" in (info / "METADATA").read_text()


DIFFERENT = {"torch": "2.0.0", "python": "3.1", "machine": "abacus", "cxx11_abi": 7, "flags": ["-g"], "sources": "?"}


@pytest.mark.parametrize("fact", [*DIFFERENT, "damaged", "no library"])
def test_a_library_that_does_not_fit_is_told_once_and_not_used(fact, own_copy):
    facts = own_copy / "facts.json"
    assert native.build() == own_copy / "dispatcher.so"
    if fact in DIFFERENT:
        facts.write_text(json.dumps(json.loads(facts.read_text()) | {fact: DIFFERENT[fact]}))
    elif fact == "damaged":
        facts.write_text("{")
    else:
        (own_copy / "dispatcher.so").unlink()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert native.build() == native.build() == native.path() == native.library()
    (warning,) = told
    assert "prebuilt dispatcher is not used" in str(warning.message) and "\n" not in str(warning.message)
    assert fact not in DIFFERENT or str(DIFFERENT[fact]) in str(warning.message)


@pytest.mark.parametrize("folder", ["/proc/nonexistent", "/etc/passwd"])
def test_a_folder_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "library").write_bytes(b"")
    with pytest.raises(UnusableFile, match=r"cannot be written"):
        prebuilt.write_wheel(tmp_path / "library", native._facts(), "1", type(tmp_path)(folder))
