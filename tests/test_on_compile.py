"""`on_compile`: who is told of a compiled kernel, and kernels that may not be compiled."""

import threading
import types
import warnings

import pytest
import torch
from without_gpu import run

import tritonite
from tritonite.errors import InvalidAction, KernelNotCompiled
from tritonite.runtime import compilation, contract

TARGET = object()


@pytest.fixture
def compiler(monkeypatch):
    """Replace Triton's compiler. Returns the set of kernels in its disk cache, which a compilation joins."""
    cached = set()

    def compile_(source, target=None, options=None):
        cached.add(source.name)
        return types.SimpleNamespace(hash=source.name, metadata_group={})

    monkeypatch.setattr(compilation.triton, "compile", compile_)
    monkeypatch.setattr(compilation, "in_disk_cache", lambda source, target, options: source.name in cached)
    monkeypatch.setattr(compilation, "_files", {})
    tritonite.reset_stats()
    yield cached
    tritonite.on_compile(None)
    tritonite.reset_stats()


def compile_kernel(name):
    signature = {"x": "*fp32", "sizes": ("i32", "i64"), "BLOCK": "constexpr", "fn": "constexpr", "META": "constexpr"}
    constants = {(2,): 64, (3,): compile_kernel, (4,): types.SimpleNamespace()}
    source = types.SimpleNamespace(name=name, signature=signature, constants=constants, make_ir=str)
    return compilation.compile_kernel(source, TARGET)


def test_a_function_is_told_of_each_kernel(compiler):
    told = []
    tritonite.on_compile(told.append)
    with contract.serving("add.Tensor"):
        compile_kernel("one")
    compile_kernel("one")
    assert [(each.kernel, each.overload, each.from_cache) for each in told] == [
        ("one", "add.Tensor", False),
        ("one", "", True),
    ]
    assert told[0].signature == "x: *fp32, sizes: (i32, i64), BLOCK=64, fn=compile_kernel, META=SimpleNamespace"
    assert told[0].seconds >= 0 and "one(x: *fp32" in str(told[0]) and "for add.Tensor compiled in" in str(told[0])
    tritonite.on_compile(None)
    compile_kernel("two")
    assert len(told) == 2


def test_raise_stops_before_the_compiler(compiler):
    with tritonite.on_compile("raise") as kernels:
        with (
            pytest.raises(KernelNotCompiled, match=r"kernel one\(x: \*fp32.* for mm is not compiled"),
            contract.serving("mm"),
        ):
            compile_kernel("one")
        assert not compiler and not kernels
        # What the disk cache has is loaded.
        compiler.add("two")
        compile_kernel("two")
    assert [each.kernel for each in kernels] == ["two"]
    compile_kernel("one")
    assert len(kernels) == 1


def test_warnings_are_for_kernels_compiled_anew(compiler):
    with tritonite.on_compile("warn"):
        with pytest.warns(tritonite.CompilationWarning, match="one"):
            compile_kernel("one")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compile_kernel("one")


def test_scopes_nest_and_hold_for_all_threads(compiler):
    told = []
    tritonite.on_compile("raise")
    with tritonite.on_compile(told.append) as outer, tritonite.on_compile(None) as inner:
        thread = threading.Thread(target=compile_kernel, args=("one",))
        thread.start(), thread.join()
    assert not told and [each.kernel for each in inner] == [each.kernel for each in outer] == ["one"]
    # The action of the process is in force again.
    with pytest.raises(KernelNotCompiled):
        compile_kernel("two")


def test_an_exception_ends_a_scope(compiler):
    with pytest.raises(ZeroDivisionError), tritonite.on_compile("raise"):
        raise ZeroDivisionError
    compile_kernel("one")


@pytest.mark.parametrize("action", ["ignore", 1])
def test_other_actions_are_refused(action):
    with pytest.raises(InvalidAction, match="'raise', 'warn', a function or None"):
        tritonite.on_compile(action)
    assert compilation.action_in_force() is None


def test_stats_and_reports_list_the_kernels(compiler):
    compile_kernel("one"), compile_kernel("one")
    stats = tritonite.stats()
    assert [each.from_cache for each in stats.compiled] == [False, True]
    assert "1 kernel compiled in 0.0 s, 1 loaded from Triton's disk cache" in str(stats)
    report = tritonite.report(lambda: compile_kernel("two") and torch.ones(3).exp())
    assert "two" in [each.kernel for each in report.compiled] and "kernel" in str(report).splitlines()[0]
    tritonite.reset_stats()
    assert not tritonite.stats().compiled


_COMPILED = """
import pytest
from tritonite.errors import KernelNotCompiled
from tritonite.install.python import record_dry

add, nonzero, x = overloads()["add.Tensor"], overloads()["nonzero"], torch.ones(64)
# By an engine's own launch and by Triton's, each before anything is compiled.
for op, args in ((add, (x, x)), (nonzero, (x,))):
    with tritonite.on_compile("raise") as kernels, pytest.raises(KernelNotCompiled, match=f"for {op.overload} is not"):
        op(*args)
    assert not kernels
# A dry recording compiles nothing, and its launch does not stay without a kernel.
with tritonite.on_compile("raise"):
    record_dry(add, [x, x.double(), 1])
CompiledKernel.function = None
with mock.patch.object(CompiledKernel, "run", mock.Mock()) as launch, tritonite.on_compile(None) as kernels:
    add(x, x.double())
    add(x, x.double())
assert launch.call_count == 2
(each,) = kernels
assert (each.kernel, each.overload, each.from_cache) == ("elementwise_flat", "add.Tensor", False) and each.seconds > 0
(files,) = compilation.kernel_files().values()
assert {"elementwise_flat.json", "elementwise_flat.cubin"} <= files.keys()
print("told")
"""


def test_calls_are_told_of_without_a_gpu(tmp_path):
    assert run(_COMPILED, tmp_path) == "told\n"
