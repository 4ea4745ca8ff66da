"""The build of the native dispatcher: torch's C++ standard, and compilers and folders that cannot be used."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from tritonite import devices
from tritonite.errors import BuildFailed
from tritonite.runtime import native

INCLUDE = Path(torch.__file__).parent / "include"


@pytest.fixture
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITONITE_CACHE", str(tmp_path / "built"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


@pytest.mark.parametrize("least, standard", [("201703", "c++17"), ("202002", "c++20"), ("202302", "c++23")])
def test_the_standard_is_what_the_headers_ask_for(tmp_path, least, standard):
    header = tmp_path / "ATen" / "ATen.h"
    header.parent.mkdir()
    header.write_text(f"#pragma once\n#if !defined(_MSC_VER) && __cplusplus < {least}L\n#error C++\n#endif\n")
    assert f"-std={standard}" in native.compilation("c++", tmp_path)


@pytest.mark.smoke
def test_the_headers_of_this_torch_ask_for_a_standard():
    asked = re.search(r"#error C\+\+(\d+)", (INCLUDE / "ATen" / "ATen.h").read_text())[1]
    assert f"-std=c++{asked}" in native.compilation("c++", INCLUDE)


def test_headers_that_ask_for_nothing_get_the_newest_standard_known(tmp_path):
    assert "-std=c++20" in native.compilation("c++", tmp_path)


@pytest.mark.parametrize("compiler", ["/nonexistent", "/etc", "/etc/passwd", "false", "no-such-compiler -O2"])
def test_a_compiler_that_does_not_work_is_a_failed_build_in_one_line(own_folder, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(BuildFailed) as failed:
        native.build()
    assert compiler.split()[0] in str(failed.value) and "\n" not in str(failed.value)


def test_a_failed_build_names_the_first_error_and_the_whole_output(own_folder, monkeypatch):
    monkeypatch.setattr(native, "_SOURCE", own_folder / "dispatcher.cpp")
    (own_folder / "dispatcher.cpp").write_text("int a = no_such;\nint b = nor_such;\n")
    with pytest.raises(BuildFailed, match=r"error: .*no_such") as failed:
        native.build()
    assert "\n" not in str(failed.value) and "nor_such" not in str(failed.value)
    (log,) = (own_folder / "built").glob("*.log")
    assert str(log) in str(failed.value) and "nor_such" in log.read_text()


@pytest.mark.parametrize(
    ("driver", "reason"), [("driver.cpp", "error: .*no_such"), ("absent.cpp", "No such file"), ("", ""), ("cuda", "")]
)
def test_a_plugins_driver_is_built_from_its_source(own_folder, monkeypatch, driver, reason):
    (own_folder / "driver.cpp").write_text("int a = no_such;\n")
    named = str(own_folder / driver) if reason else driver
    record = dataclasses.replace(devices.default, native=devices.NativeDriver(True, named))
    monkeypatch.setattr(devices, "default", record)
    if not reason:
        assert native.driver() == driver
        return
    with pytest.raises(BuildFailed, match=reason) as failed:
        native.driver()
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/nonexistent", "x" * 300, "lock in the way"])
def test_a_folder_that_cannot_be_used_is_a_failed_build(own_folder, monkeypatch, folder):
    (own_folder / "file").write_text("")
    (own_folder / "lock in the way" / "lock").mkdir(parents=True)
    monkeypatch.setenv("TRITONITE_CACHE", str(own_folder / folder))
    with pytest.raises(BuildFailed, match=re.escape(folder)) as failed:
        native.build()
    assert "\n" not in str(failed.value)
    monkeypatch.setenv("TRITONITE_NATIVE", "1")
    native.module.cache_clear()
    if native.wanted():
        with pytest.warns(UserWarning, match="slower Python path"):
            assert native.module() is None
    native.module.cache_clear()


def test_an_empty_setting_is_none(monkeypatch):
    monkeypatch.setenv("TRITONITE_CACHE", "")
    unset = native.library()
    monkeypatch.delenv("TRITONITE_CACHE")
    assert unset == native.library()
