"""libentry over triton.jit, autotune and heuristics, and what it specialises on."""

import itertools
from typing import NamedTuple

import pytest
import scripts
import torch
import triton
import triton.language as tl

import tritonite
from tritonite import devices
from tritonite.devices import nvidia
from tritonite.errors import InvalidDeclaration
from tritonite.runtime import contract
from tritonite.runtime.launch import Launch, Specialization
from tritonite.runtime.libentry import _specialization
from tritonite.runtime.nested import flatten
from tritonite.testing.stand_in import standing_in

pytestmark = pytest.mark.smoke

CONFIGS = [triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128}, num_warps=4)]


@tritonite.libentry()
@triton.jit
def plain(x, out, n, scale, BLOCK: tl.constexpr = 64):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index, mask=index < n) * scale, mask=index < n)


@tritonite.libentry()
@triton.autotune(CONFIGS, key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(x, out, n, scale, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        value = tl.load(x + index)
    else:
        value = tl.load(x + index, mask=index < n)
    tl.store(out + index, value * scale, mask=index < n)


@tritonite.libentry()
@triton.heuristics({"BLOCK": lambda args: 64 if args["n"] < 100 else 256})
@triton.autotune([triton.Config({}, num_warps=4)], key=[])
@triton.jit
def reversed_nesting(x, out, n, scale, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index, mask=index < n) * scale, mask=index < n)


@pytest.mark.parametrize("kernel", [plain, tuned, reversed_nesting], ids=["jit", "autotune", "heuristics"])
def test_every_call_is_right(kernel, device):
    for n in (100, 128, 100, 1, 64, 256, 100):
        for scale in (2.0, 3, 1):
            x, out = torch.randn(n, device=device), torch.full((n,), float("nan"), device=device)
            kernel[lambda meta, n=n: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n, scale)
            torch.testing.assert_close(out, x * scale)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_where_their_tensors_are():
    for name in ("cuda:1", "cuda:0", "cuda:1"):
        x, out = torch.randn(200, device=name), torch.zeros(200, device=name)
        for kernel in (plain, tuned):
            kernel[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x, out, 200, 2.0)
            torch.testing.assert_close(out, x * 2)
    assert torch.cuda.current_device() == 0


def test_keyword_arguments_and_defaults(device):
    x, out = torch.randn(70, device=device), torch.empty(70, device=device)
    plain[(2,)](x, out=out, scale=0.5, n=70)
    torch.testing.assert_close(out, x * 0.5)
    plain[(1,)](x, out, 70, scale=4.0, BLOCK=128)
    torch.testing.assert_close(out, x * 4)


def test_config_hooks_run_on_every_launch(device):
    calls = []

    @tritonite.libentry()
    @triton.autotune([triton.Config({"BLOCK": 64}, pre_hook=lambda args: calls.append(args["n"]))], key=["n"])
    @triton.jit
    def hooked(x, n, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        tl.store(x + index, index, mask=index < n)

    x = torch.empty(8, device=device)
    for _ in range(3):
        hooked[(1,)](x, 8)
    assert calls == [8, 8, 8]


def test_a_missing_argument_is_an_error(device):
    with pytest.raises(TypeError):
        plain[(1,)](torch.ones(3, device=device))


def test_only_kernels_can_be_wrapped():
    with pytest.raises(InvalidDeclaration, match="libentry wraps"):
        tritonite.libentry()(lambda x: x)


def test_ints_are_not_specialised_by_value():
    kinds = {_specialization(n, True, True) for n in range(2, 1000) if n % 16}
    assert len(kinds) == 1
    assert _specialization(1, True, True) != _specialization(2, True, True) != _specialization(16, True, True)
    assert _specialization(2**31, True, True) != _specialization(2**30, True, True)
    assert _specialization(1, False, True) == _specialization(16, False, True) == _specialization(7, False, True)


def test_tensors_are_specialised_by_dtype_and_alignment():
    x = torch.empty(64)
    assert _specialization(x, True, True) == _specialization(x[16:], True, True) != _specialization(x[1:], True, True)
    assert _specialization(x, True, True) != _specialization(x.half(), True, True)
    assert _specialization((x, 3), True, True) == (_specialization(x, True, True), _specialization(3, True, True))
    assert _specialization(object(), True, True) is None


@pytest.mark.skipif(tritonite.device != "cuda", reason="the interpreter compiles nothing that could be cached")
def test_later_launches_do_not_walk_the_decorators(monkeypatch, device):
    x, out = torch.randn(100, device=device), torch.empty(100, device=device)

    def launch():
        tuned[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, out, 100, 2.0)

    launch()
    monkeypatch.setattr(type(tuned.fn), "run", lambda *args, **kwargs: pytest.fail("walked the decorators"))
    launch()
    torch.testing.assert_close(out, x * 2)


def test_it_decorates_without_parentheses():
    @tritonite.libentry
    @triton.jit
    def double(x, n, BLOCK: tl.constexpr):
        offset = tl.arange(0, BLOCK)
        tl.store(x + offset, 2 * tl.load(x + offset, mask=offset < n), mask=offset < n)

    x = torch.ones(5, device=tritonite.device)
    double[(1,)](x, 5, BLOCK=8)
    assert x.tolist() == [2.0] * 5


@pytest.mark.parametrize("specialize", [True, False])
def test_the_cache_tells_apart_what_triton_compiles_for(specialize):
    """Triton specializes elements of tuples in spite of do_not_specialize."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    values = (0, 1, 2, 16, 2**40, (1, 2), (2, 2), (16, 2), ((1,), 2), ((2,), 2), ((2,), 16))
    kinds = [repr(native_specialize_impl(BaseBackend, value, False, specialize, specialize)) for value in values]
    keys = [_specialization(value, specialize, specialize) for value in values]
    for (kind, key), (other, another) in itertools.combinations(zip(kinds, keys, strict=True), 2):
        assert kind == other or key != another


@pytest.mark.parametrize(
    "captured", [False, pytest.param(True, marks=pytest.mark.skipif(tritonite.device != "cuda", reason="needs a GPU"))]
)
def test_a_launch_reads_what_the_one_before_it_wrote(path, device, captured):
    """Also where a device prepares a launch while that one ends."""
    rows, columns = torch.zeros(257, 130, device=device), torch.zeros(130, 257, device=device)
    sums = torch.zeros(257, 1, device=device)

    def chain():
        for _ in range(20 if device == "cuda" else 2):
            torch.add(rows, 1, out=columns.t())
            torch.add(columns.t(), sums, out=rows)
            torch.mean(rows, 1, keepdim=True, out=sums)
            torch.sub(rows, sums - rows, out=rows)

    with tritonite.use_gems():
        chain()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain()
            rows.zero_(), columns.zero_(), sums.zero_()
            graph.replay()
    found = [x.cpu() for x in (rows, columns, sums)]
    for x in (rows, columns, sums):
        x.zero_()
    chain()
    for ours, x in zip(found, (rows, columns, sums), strict=True):
        torch.testing.assert_close(ours, x.cpu())


def test_a_launch_is_prepared_where_device_and_driver_can(monkeypatch):
    assert devices.prepares_launches("cuda", 90) and devices.prepares_launches("cuda", 100)
    assert not devices.prepares_launches("cuda", 80) and not devices.prepares_launches("hip", "gfx942")
    monkeypatch.setattr(nvidia, "sufficient_driver", lambda: False)
    assert not devices.prepares_launches("cuda", 90)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not nvidia.RECORD.runtime.has_dependent_launch(torch.device("cuda", 0))


@tritonite.libentry()
@triton.jit
def combined(x, y, out, above, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    a, b = tl.load(x + index), tl.load(y + index)
    tl.store(out + index, -a)
    tl.store(out + BLOCK + index, a + b)
    tl.store(out + 2 * BLOCK + index, a * b)
    tl.store(out + 3 * BLOCK + index, a - b)
    tl.store(above + index, (a > b).to(tl.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_arithmetic_of_every_dtype(dtype):
    x, y = torch.randn(2, 64, device=tritonite.device).to(dtype)
    out, above = x.new_empty(4, 64), torch.empty(64, dtype=torch.int32, device=tritonite.device)
    combined[(1,)](x, y, out, above, BLOCK=64)
    assert torch.equal(out, torch.stack([-x, x + y, x * y, x - y])) and torch.equal(above, (x > y).int())


class Row(NamedTuple):
    offset: int
    stride: int


class Layout(NamedTuple):
    source: Row
    target: Row
    n: int
    factor: float = 1.0


@tritonite.libentry()
@triton.jit
def scaled_row(source, target, layout, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    rows, mask = layout.source, index < layout.n
    value = tl.load(source + rows.offset + index * rows.stride, mask=mask) * layout.factor
    tl.store(target + layout.target.offset + index * layout.target.stride, value, mask=mask)


@triton.jit
def scaled_row_launched(operands, outs, layout, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    rows, mask = layout.source, index < layout.n
    factor = tl.full((), operands[1], tl.float64).to(tl.float32)
    value = tl.load(operands[0] + rows.offset + index * rows.stride, mask=mask) * factor
    tl.store(outs[0] + layout.target.offset + index * layout.target.stride, value, mask=mask)


INTEGERS = Layout(Row("i32", "i32"), Row("i32", "constexpr"), "i32", "constexpr")


def laid_out():
    """Return the specialisation of `scaled_row_launched` for rows that begin at an offset."""
    signature = {"operands": ("*fp32", "fp64"), "outs": ("*fp32",), "layout": INTEGERS, "BLOCK": "constexpr"}
    kinds = tuple(signature.values())
    return Specialization(
        scaled_row_launched,
        signature,
        {(2, 1, 1): 1, (2, 3): 1.0, (3,): 8},
        {},
        leading=(),
        trailing=(8,),
        types=tuple(flatten(kinds, kinds)),
    )


def by_libentry(x, factor):
    result = contract.empty((7,), x.dtype, x.device)
    scaled_row[(1,)](x, result, Layout(Row(2, 3), Row(2, 1), 5, factor), BLOCK=8)
    return result


def by_launch(x, factor):
    result = contract.empty((7,), x.dtype, x.device)
    specialization = laid_out().over((Layout(Row(2, 3), Row(2, 1), 5),), 1)
    Launch(specialization, x.device)([x, factor], [result])
    return result


@pytest.mark.parametrize("host", [by_libentry, by_launch])
def test_kernels_read_fields_by_name_in_replays_too(host, path, device):
    xs = [torch.arange(17.0, device=device) + i for i in range(3)]
    with standing_in("constant_pad_nd", lambda x, pad, value: host(x, value)) as runs:
        for x, factor in zip(xs, (0.5, 3.0, -2.0), strict=True):
            found = torch.constant_pad_nd(x, [0, 0], factor)
            assert torch.equal(found[2:], x[2::3] * factor)
        # Triton specialises elements of tuples, so that no plan repeats a compiled kernel with a number among them.
        replayed = path == "native" and (host is by_launch or device == "cpu")
        assert len(runs) == (1 if replayed else 3)


def test_a_named_tuple_is_no_tuple_to_the_cache():
    class Column(NamedTuple):
        stride: int
        offset: int

    kinds = {_specialization(value, True, True) for value in (Row(2, 3), Column(2, 3), (2, 3))}
    assert len(kinds) == 3 and _specialization(Row(2, 3), True, True) == _specialization(Row(5, 7), True, True)


_COMPILED = """
import torch, tritonite, test_libentry as kernels
from tritonite.testing.compile_cases.cases import TARGETS
layout = kernels.Layout(kernels.Row(2, 3), kernels.Row(2, 1), 5, 0.5)
x = torch.empty(17)
found = kernels.scaled_row.specialization((x, x, layout), {"BLOCK": 8}), kernels.laid_out()
assert type(found[0].signature["layout"]) is kernels.Layout
for each in found:
    each.compile(TARGETS["sm_90"])
with tritonite.runtime.libentry.compiling(TARGETS["sm_90"]):
    kernels.scaled_row[(1,)](x, x, layout, BLOCK=8)
print("compiled")
"""


def test_kernels_with_fields_compile_without_a_gpu():
    assert scripts.run(_COMPILED, interpreted=False) == "compiled\n"
