"""The tools of `make check` besides linters."""

import ast
import importlib.metadata
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import mutants
import mutate
import pytest
from packaging.version import Version

import tritonite
from tritonite import errors

TOOLS = Path(__file__).parent.parent / "tools"


def load(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parameters(count):
    return ", ".join(f"p{i}" for i in range(count))


@pytest.mark.parametrize(
    "source, rule",
    [
        ("from x import *", "star import"),
        ("globals()['x'] = 1", "globals()"),
        ("print(1)", "print outside"),
        ("import torch.library", "nothing registers"),
        ("from torch import library", "nothing registers"),
        ("from torch.library import Library", "nothing registers"),
        ("torch.library.impl('aten::add', 'CPU')", "nothing registers"),
        ("torch._C._dispatch_library('IMPL', 'aten', 'CPU', '', 0)", "nothing registers"),
        ("try:\n    pass\nexcept:\n    pass", "broad except"),
        ("try:\n    pass\nexcept Exception:\n    pass", "broad except"),
        ("try:\n    pass\nexcept (KeyError, BaseException):  # noqa: BLE001\n    pass", "broad except"),
        ("@libentry()\n@triton.jit\ndef kernel(x):\n    tl.store(x, 1)", "does not wait"),
        ("# TO" + "DO: later", "unfinished"),
        ("# SPDX-" + "License-Identifier: Apache-2.0", "licence"),
        ('def f():\n    """Of the rows those that are long."""', "opens with 'Of'"),
        ("# A thread has so many elements.", "'so many'"),
        ("x.device.type == 'cuda'", "a kind of device"),
        ("devices.current.kind in ('nvidia', 'amd')", "a kind of device"),
        ("x.is_cuda", "a kind of device"),
        ("torch.cuda.synchronize()", "a kind of device"),
        ("torch.version.hip", "a kind of device"),
        (f"@triton.jit\ndef kernel({parameters(21)}):\n    pass", "kernel has 21 parameters"),
        (f"@gluon.jit(do_not_specialize=['p0'])\ndef kernel({parameters(20)}, *, last):\n    pass", "21 parameters"),
        (f"class Kernel:\n    def launch({parameters(13)}):\n        pass", "launch has 13 parameters"),
        ("x = 1\n" * 501, "501 lines"),
        ('"""A table."""\n\nimport x\n# Over 500 lines: one table.\n' + "x = 1\n" * 500, "504 lines"),
    ],
)
def test_house_rules_find(source, rule):
    found = list(load("house_rules").breaches(source, "tritonite/module.py"))
    assert len(found) == 1 and rule in found[0]


def test_house_rules_allow_what_has_its_place():
    breaches = load("house_rules").breaches
    assert not list(breaches("import torch\ntorch.library._impls", "tritonite/install/override.py"))
    assert not list(breaches("print(1)", "tritonite/testing/targets.py"))
    assert not list(breaches("torch.cuda.synchronize()", "tritonite/devices/cuda.py"))
    assert not list(breaches("devices.current.aten == 'cuda'", "tritonite/ops/sums.py"))
    assert not list(breaches("try:\n    pass\nexcept Exception:  # noqa: BLE001 - why\n    pass", "tritonite/x.py"))
    assert not list(breaches(f"@triton.jit\ndef kernel({parameters(20)}):\n    pass", "tritonite/x.py"))
    for decorator in ("operator('add')", "cuda_operator('add', FLOATS)", "app.command()"):
        assert not list(breaches(f"@{decorator}\ndef host({parameters(13)}):\n    pass", "tritonite/x.py"))
    for head in ('"""A table."""\n\n# Over 500 lines: one table.\n', "# Over 500 lines: one table.\n"):
        assert not list(breaches(head + "x = 1\n" * 500, "tritonite/x.py"))


@pytest.mark.parametrize("name", ["operator_table", "operator_stubs"])
def test_what_is_generated_goes_stale(name, monkeypatch, tmp_path):
    tool = load(name)
    monkeypatch.setattr(tool, "PATH", tmp_path / "generated")
    monkeypatch.setattr("sys.argv", [name, "--check"])
    assert tool.main() == 1
    monkeypatch.setattr("sys.argv", [name])
    assert tool.main() == 0
    monkeypatch.setattr("sys.argv", [name, "--check"])
    assert tool.main() == 0
    tool.PATH.write_text(tool.PATH.read_text().replace("gelu", "gélu", 1))
    assert tool.main() == 1


def test_stubs_are_functions_of_every_operator():
    tool = load("operator_stubs")
    defined = {each.name for each in ast.parse("\n".join(tool.definitions())).body}
    missing = set(dir(tritonite.ops)) - defined
    assert all(name.startswith("__") or inspect.ismodule(getattr(tritonite.ops, name)) for name in missing)


def test_a_wheel_has_all_of_the_package(tmp_path):
    # The import fails in a process that has imported distutils, which setuptools replaces.
    if Version(importlib.metadata.version("setuptools")) < Version("77.0.3"):
        pytest.skip("needs setuptools 77.0.3")
    root = TOOLS.parent
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(root / "tritonite", tmp_path / "tritonite", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools import build_meta; print(build_meta.build_wheel('wheel'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    held = set(zipfile.ZipFile(tmp_path / "wheel" / done.stdout.split()[-1]).namelist())
    files = [path for path in (root / "tritonite").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert not [path for path in files if path.relative_to(root).as_posix() not in held]


def _wheel_of_torch(folder, version, least):
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch/include/ATen/ATen.h", f"#if __cplusplus < {least}L\n#error old\n#endif\n")
        wheel.writestr("torch/lib/large", "")
        wheel.writestr(
            f"torch-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(
            f"torch-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"torch-{version}.dist-info/RECORD", "")


def test_the_dispatcher_is_compiled_against_the_headers_of_a_wheel(monkeypatch, tmp_path, capsys):
    tool = load("torch_headers")
    _wheel_of_torch(tmp_path, "9.9", "202002")
    source = tmp_path / "dispatcher.cpp"
    source.write_text("#include <ATen/ATen.h>\nint main() { return 0; }\n")
    monkeypatch.setattr(tool.native, "_SOURCE", source)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["torch_headers.py", str(tmp_path / "headers"), "9.9"])
    assert tool.main() == 0 and "torch 9.9: compiles" in capsys.readouterr().out
    assert not (tmp_path / "headers" / "torch-9.9" / "lib").exists()
    source.write_text("#include <ATen/NoSuch.h>\n")
    assert tool.main() == 1 and "NoSuch.h" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["torch_headers.py", str(tmp_path / "headers"), "9.8"])
    with pytest.raises(SystemExit, match=r"headers of torch 9\.8; is a package index in reach"):
        tool.main()


def test_the_page_of_errors_lists_what_users_meet():
    tool = load("site_pages")
    page = tool.errors(tool.ERRORS.read_text())
    heads = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    kinds = {
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
    }
    assert set(heads) == kinds - {"Decline", "TritoniteError", "did_you_mean"}
    assert "> environment variable {name}={value} is not valid: expected {expected}" in page
    assert "template" not in page and "did_you_mean" not in page


def test_the_versions_that_are_said_to_be_supported_are_tested():
    root = TOOLS.parent
    makefile, project = (root / "Makefile").read_text(), (root / "pyproject.toml").read_text()
    readme = (root / "README.md").read_text()
    for name, says in (("torch", "torch {} to {}"), ("triton", "{} to {}")):
        oldest, newest = re.search(rf"^{name.upper()}_VERSIONS := (.*)", makefile, re.MULTILINE)[1].split()
        least, most = (version.removesuffix(".0") for version in (oldest, newest))
        assert f'"{name}>={least}"' in project and says.format(least, most) in readme
        # The page of versions has a row for what is tested, and for what constraints.txt pins.
        page, pins = (root / "docs" / "versions.md").read_text(), (root / "constraints.txt").read_text()
        for version in (oldest, newest, re.search(rf"^{name}==(.*)", pins, re.MULTILINE)[1]):
            assert re.search(rf"^\| {re.escape(version.removesuffix('.0'))}", page, re.MULTILINE), version


def test_mutants_are_many_in_every_family():
    families = {mutant.family for mutant in mutants.MUTANTS}
    assert len(mutants.MUTANTS) >= 80 and len(families) == 16
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
    assert all(mutant.packets or mutant.tests for mutant in mutants.MUTANTS)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_the_source(mutant):
    """A mutant differs once and still compiles."""
    source = (TOOLS.parent / "tritonite" / mutant.file).read_text()
    changed = mutate.applied(mutant, source)
    assert changed != source
    if mutant.file.endswith(".py"):
        ast.parse(changed)


@pytest.fixture
def copy(tmp_path):
    (tmp_path / "tritonite").mkdir()
    (tmp_path / "tritonite" / "module.py").write_text("value = 1\n")
    return tmp_path


def mutant(**changed):
    given = {"name": "one", "family": "rows", "file": "module.py", "old": "= 1", "new": "= 2"}
    return mutants.Mutant(**given | changed)


def python(name, code):
    return mutate.Step(name, [sys.executable, "-c", code])


SEES = "from tritonite import module; import sys; sys.exit(module.value - 1)"


@pytest.mark.parametrize(
    ("codes", "found_by"),
    [(("", SEES), "tests"), ((SEES, ""), "samples"), (("", ""), ""), (("import os; os.abort()", ""), "samples")],
)
def test_a_step_finds_a_mutant_or_none_does(codes, found_by, copy):
    steps = [python(name, code) for name, code in zip(("samples", "tests"), codes, strict=True)]
    assert mutate.tried(mutant(), copy, steps).found_by == found_by
    assert (copy / "tritonite" / "module.py").read_text() == "value = 1\n"


def test_nothing_is_found_in_a_clean_copy(copy):
    assert mutate.tried(mutant(), copy, [python("samples", SEES)], clean=True).found_by == ""


def test_tests_that_do_not_run_find_nothing(copy):
    for old, step in (("= 1", python("tests", "import sys; sys.exit(5)")), ("= 3", python("tests", ""))):
        with pytest.raises(mutate.Stale):
            mutate.tried(mutant(old=old), copy, [step])
    assert (copy / "tritonite" / "module.py").read_text() == "value = 1\n"


def test_a_mutants_steps_are_samples_fuzzed_calls_and_tests():
    steps = list(mutate.steps_of(mutant(packets=("floor_divide",), tests="tests/test_rows.py -k 'a or b'"), 7, 3))
    assert [step.name for step in steps] == ["samples", "fuzz", "tests"]
    assert steps[0].command[-3:-1] == ["floor_divide", "floor_divide.Scalar"]
    assert steps[1].command[-5:-3] == ["3", "7"] and steps[2].command[-2:] == ["-k", "a or b"]
    with pytest.raises(mutate.Stale):
        list(mutate.steps_of(mutant(packets=("nothing",)), 7, 3))


def test_survivors_are_in_the_docs(monkeypatch, tmp_path):
    page = tmp_path / "correctness.md"
    page.write_text(mutate.DOCS.read_text())
    monkeypatch.setattr(mutate, "DOCS", page)
    monkeypatch.setattr("sys.argv", ["mutate", "--check"])
    assert mutate.main() == 0
    monkeypatch.setattr(mutate, "MUTANTS", [*mutate.MUTANTS, mutant(survives="No test can.")])
    assert mutate.main() == 1
    monkeypatch.setattr("sys.argv", ["mutate", "--docs"])
    assert mutate.main() == 0 and "- **one** (rows). No test can." in page.read_text()
    monkeypatch.setattr("sys.argv", ["mutate", "--check"])
    assert mutate.main() == 0


PTX = """
.visible .entry {name}(
\t.param .u32 {name}_param_0
)
{{
\t.loc\t1 {line} 3
\tld.param.b32 \t%r1, [{name}_param_0]; // {name}.py:{line}
\tadd.s32 \t%r2, %r1, {added};
}}
"""


def test_a_digest_does_not_depend_on_names_and_lines():
    tool = load("ptx_digest")
    texts = [
        tool.normalized(PTX.format(name=name, line=line, added=1)) for name, line in (("first", 10), ("other", 12))
    ]
    assert texts[0] == texts[1] and "add.s32" in texts[0] and ".loc" not in texts[0]
    assert tool.normalized(PTX.format(name="first", line=10, added=2)) != texts[0]


def test_kernels_that_differ_are_named():
    tool = load("ptx_digest")
    before = [tool.Kernel(digest, "sm_90", label) for digest, label in (("a", "add"), ("a", "add again"), ("b", "mul"))]
    after = [tool.Kernel(digest, "sm_90", label) for digest, label in (("b", "renamed"), ("a", "add"), ("c", "new"))]
    assert tool.differences(before, after) == ["- sm_90 add again", "+ sm_90 new"]
    assert tool.differences(before, before[::-1]) == []


def test_a_suite_in_parts_repeats_what_has_not_passed(tmp_path):
    (tmp_path / "test_two.py").write_text("def test_right():\n    pass\n\ndef test_wrong():\n    assert 0\n")
    record = tmp_path / "record.txt"
    command = [sys.executable, TOOLS / "suite_by_parts.py", "--record", record, "--commit", "abc", "test_two.py"]
    first, second = (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False) for _ in range(2)
    )
    assert "1 failed, 1 passed" in first.stdout and "1 failed in" in second.stdout
    outcomes = [line.split("\t") for line in record.read_text().splitlines()]
    assert [outcome for outcome, *_ in outcomes] == ["passed", "failed", "failed"]
    assert all(commit == "abc" for _, commit, *_ in outcomes)
    assert load("suite_by_parts").passed_tests([record]) == {"test_two.py::test_right"}
    assert "assert 0" in record.with_suffix(".failures").read_text()


def test_records_of_a_suite_are_merged(tmp_path):
    first, second, into = (tmp_path / name for name in ("first.txt", "second.txt", "all.gz"))
    first.write_text("failed\ta\tGPU\tb.py::b\npassed\ta\tGPU\ta.py::a\n")
    second.write_text("passed\tb\tGPU\tb.py::b\n")
    tool = load("suite_by_parts")
    assert tool.merge(into, [first]) == {"failed": 1, "passed": 1}
    before = into.read_bytes()
    assert tool.merge(into, []) and into.read_bytes() == before
    assert tool.merge(into, [second]) == {"passed": 2}
    assert tool.passed_tests([into], "b") == {"b.py::b"}


def test_a_suite_in_parts_ends_when_time_is_up(tmp_path):
    (tmp_path / "test_slow.py").write_text(
        "import time, pytest\n\n@pytest.mark.parametrize('i', range(9))\n"
        "def test_slow(i):\n    time.sleep(30 * (i > 1))\n"
    )
    command = [sys.executable, TOOLS / "suite_by_parts.py", "--record", tmp_path / "record", "--commit", "abc"]
    command += ["--seconds", "0", "-n", "2", "test_slow.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "time is up" in done.stdout
    assert (tmp_path / "record").read_text().startswith("passed\tabc")


def test_the_processes_of_a_suite_take_gpus_in_turn(monkeypatch):
    tool = load("suite_by_parts")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw5")
    monkeypatch.delenv("TRITONITE_SUITE_GPUS", raising=False)
    assert tool.visible_gpu() is None
    monkeypatch.setenv("TRITONITE_SUITE_GPUS", "2")
    assert tool.visible_gpu() == "1"
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert tool.visible_gpu() is None
