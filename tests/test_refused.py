"""Odd arguments get ATen's answer or exception, and no answer of a kernel."""

import contextlib

import pytest
import torch
from triton.compiler import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

import tritonite
from tritonite.errors import Decline
from tritonite.registry import overloads
from tritonite.runtime import cache, contract, launch
from tritonite.testing.fuzz import Call
from tritonite.testing.fuzz.check import check


def declined(name):
    return dict(tritonite.stats()[name].declined)


def fuzzed(name, **arguments):
    """Return the fuzzer's finding on a call, or None."""
    return check(Call(overloads()[name], arguments))


@pytest.mark.smoke
def test_no_operator_takes_more_dimensions_than_aten(device):
    deep = torch.ones([1] * 65, device=device)
    for name, op in overloads().items():
        if not any(op.takes_tensors):
            continue
        arguments = list(zip(op.schema.arguments, op.takes_tensors, strict=True))
        values = [[deep] if "List" in str(a.type) else deep if takes else None for a, takes in arguments]
        keywords = {a.name: value for (a, _), value in zip(arguments, values, strict=True) if a.kwarg_only}
        with pytest.raises(Decline, match="65 dimensions"):
            op(*values[: op.positional], **keywords)
            pytest.fail(name)


DEEP = {
    "amin": lambda x: x.amin(-1),
    "aminmax": lambda x: x.aminmax(dim=-1),
    "all.dim": lambda x: x.all(-1),
    "flip": lambda x: x.flip(-1),
    "sum.dim_IntList": lambda x: x.sum(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "renorm": lambda x: x.renorm(1, -1, 5),
    "mvlgamma": lambda x: (x + 5).mvlgamma(2),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.declines("flip serves fewer dimensions") if name == "flip" else ())
        for name in DEEP
    ],
)
def test_many_dimensions(name, device, path):
    """ATen refuses 65 dimensions, and 64 that become 65; it serves 63."""
    x = torch.rand(3, device=device)
    for rank in (65, 64 if name == "mvlgamma" else 65, 63):
        deep = x.view(*[1] * (rank - 1), 3)
        with tritonite.use_gems(include="*"):
            if rank > 63:
                with pytest.raises(RuntimeError, match="only tensors with up to 64 dims"):
                    DEEP[name](deep)
                assert declined(name)
            else:
                found = DEEP[name](deep)
    tritonite.disable()
    torch.testing.assert_close(found, DEEP[name](deep))


@pytest.mark.declines("12 on a CPU")
@pytest.mark.parametrize("name", ["gelu", "gelu_backward"])
def test_more_dimensions_than_onednn_has(name):
    if tritonite.backend.aten != "cpu":
        pytest.skip("ATen's GPU kernel takes 64 dimensions")
    x = torch.rand([1] * 11 + [14, 14])
    operator = getattr(torch.ops.aten, name)
    with tritonite.use_gems(), pytest.raises(RuntimeError, match="dimensions"):
        operator(x) if name == "gelu" else operator(x, x)


@pytest.mark.skipif(not hasattr(torch.Tensor, "has_names"), reason="this torch's tensors have no names")
def test_named_dimensions_are_atens(device, path):
    """A call of the same shape without names may have been recorded before."""
    if path == "python":
        pytest.skip("PyTorch converts no named tensor for a kernel in Python")
    plain = torch.randn(3, 4, device=device)
    for function in (lambda x: x + x, lambda x: x.sum(1), lambda x: x.softmax(1), lambda x: x.clone()):
        for x in (plain, plain.refine_names("row", "column")):
            expected = function(x)
            with tritonite.use_gems():
                found = function(x)
            assert found.names == expected.names
            torch.testing.assert_close(found.rename(None), expected.rename(None))


def raising(error):
    def host(values, outs):
        raise error

    return host


def test_errors_of_host_functions_decline_before_anything_is_launched():
    with contextlib.ExitStack() as stack:
        stack.callback(contract.set_strict, contract.set_strict(False))
        for error in (TypeError("a"), ValueError("b"), IndexError("c"), OverflowError("d")):
            with pytest.raises(Decline, match=type(error).__name__) as raised:
                contract.run_host(raising(error), (), (), False, falls_back=True)
            assert not raised.value.lasting
            with pytest.raises(type(error)):
                contract.run_host(raising(error), (), (), False)
        with pytest.raises(RuntimeError):
            contract.run_host(raising(RuntimeError()), (), (), False, falls_back=True)

        def host(values, outs):
            contract.note_launch()
            raise ValueError

        with pytest.raises(ValueError):
            contract.run_host(host, (), (), False, falls_back=True)
    with pytest.raises(TypeError):
        contract.run_host(raising(TypeError()), (), (), False, falls_back=True)


FAILURES = [
    PTXASError("ptxas fatal"),
    OutOfResources(262424, 232448, "shared memory"),
    CompilationError("", None, "no such name"),
    RuntimeError("PassManager::run failed"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_calls_whose_kernel_does_not_compile_decline(error, monkeypatch):
    told = []
    monkeypatch.setattr(cache, "warn_once", told.append)

    def host(values, outs):
        if values:
            contract.note_launch()
        with launch.declining_failures(host):
            contract.note_launch()
            raise error

    def run(values, writes):
        return contract.run_host(host, values, (), writes, falls_back=True, overload="mm")

    with pytest.raises(type(error)):
        run((), False)
    with contextlib.ExitStack() as stack:
        stack.callback(contract.set_strict, contract.set_strict(False))
        for values, writes in (((), False), ((1,), False), ((), True)):
            with pytest.raises(Decline, match="its kernel host does not compile") as raised:
                run(values, writes)
            assert raised.value.__cause__ is error
        assert told == [f"mm: {raised.value.reason}"] * 3
        with pytest.raises(type(error)):
            run((1,), True)
        with pytest.raises(type(error)):
            host((), ())


def test_errors_of_launches_pass_through():
    def host(values, outs):
        with launch.declining_failures(host):
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with contextlib.ExitStack() as stack:
        stack.callback(contract.set_strict, contract.set_strict(False))
        with pytest.raises(RuntimeError, match="illegal memory access"):
            contract.run_host(host, (), (), False, falls_back=True)


def test_launching_host_functions_are_detected(device):
    x, noted = torch.ones(4, device=device), []
    for name, arguments in (("neg", (x,)), ("sum", (x,))):

        def host(values, outs, name=name, arguments=arguments):
            overloads()[name].declaration.host([*arguments, None][: len(overloads()[name].names)], ())
            noted.append(contract._local.launched)

        contract.run_host(host, (), (), False)
    assert noted == [True, True]


REFUSED = {
    "slice_backward": lambda x: torch.ops.aten.slice_backward(x, [-1, 4], 0, 0, 3, 1),
    "slice_backward of -3 columns": lambda x: torch.ops.aten.slice_backward(x, [3, -3], 1, 0, 4, 1),
    "full_like": lambda x: torch.ops.aten.full_like(x, 1.0, memory_format=torch.channels_last_3d),
    "full_like of coordinates": lambda x: torch.ops.aten.full_like(
        x, 1.0, layout=torch.sparse_coo, memory_format=torch.contiguous_format
    ),
}


@pytest.mark.declines("ATen refuses the arguments")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_arguments_raise_atens_error(name, device, path):
    x = torch.ones(3, 4, device=device)
    with pytest.raises(Exception) as expected:
        REFUSED[name](x)
    with tritonite.use_gems(include="*"), pytest.raises(type(expected.value)) as found:
        REFUSED[name](x)
    assert str(found.value) == str(expected.value)
    assert declined(name.partition(" ")[0])


def test_put_in_deterministic_mode(device, path):
    def put(accumulate):
        x, index = torch.zeros(5, device=device), torch.tensor([0, 1, 1], device=device)
        return x.put_(index, torch.ones(3, device=device), accumulate)

    torch.use_deterministic_algorithms(True)
    try:
        with tritonite.use_gems(include="*"):
            for accumulate in (False, True):
                if accumulate and device == "cpu":
                    assert put(True).tolist() == [1, 2, 0, 0, 0]
                    continue
                # ATen adds by atomics on a GPU.
                with pytest.raises(RuntimeError, match="deterministic"):
                    put(accumulate)
    finally:
        torch.use_deterministic_algorithms(False)


def gaps(*shape, dtype=torch.float32):
    """Return a strided output, in memory that begins before it."""
    room = torch.zeros([2 * size + 1 for size in shape], dtype=dtype, device=tritonite.device)
    return room[tuple(slice(1, None, 2) for _ in shape)]


_NO_FACTORY = pytest.param(torch.complex64, marks=pytest.mark.declines("no factory here makes complex numbers"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, _NO_FACTORY], ids=str)
def test_factories_write_outputs_of_any_layout_and_dtype(dtype, device):
    for name, arguments in {
        "arange.out": {"end": 60},
        "linspace.out": {"start": 0.0, "end": 3.0, "steps": 60},
        "fft_fftfreq.out": {"n": 60, "d": 0.25},
        "fft_rfftfreq.out": {"n": 118, "d": 0.25},
        "hann_window.out": {"window_length": 60},
        "full.out": {"size": [60], "fill_value": 2.5},
        "randperm.out": {"n": 60},
    }.items():
        for out in (gaps(60, dtype=dtype), torch.zeros(60, dtype=dtype, device=device), gaps(59, dtype=dtype)):
            assert fuzzed(name, **arguments, out=out) is None


@pytest.mark.declines("no kernel writes outputs of other layouts")
@pytest.mark.parametrize("written", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_batch_norm_leaves_outputs_of_other_layouts_and_dtypes_to_aten(written, dtype, device):
    x = torch.randn(5, 3, 4, device=device)
    outs = [torch.zeros(shape, device=device) for shape in ((5, 3, 4), (3,), (3,))]
    outs[written] = gaps(*outs[written].shape, dtype=dtype)
    arguments = {"input": x, "weight": None, "bias": None, "training": True, "momentum": 0.1, "eps": 1e-5}
    named = dict(zip(("out", "save_mean", "save_invstd"), outs, strict=True))
    if dtype is torch.float32:
        found = fuzzed("_native_batch_norm_legit.no_stats_out", **arguments, **named)
        assert found is None
    else:
        with pytest.raises(Decline):
            overloads()["_native_batch_norm_legit.no_stats_out"](*arguments.values(), **named)


# Overloads with outputs, of most families, with their arguments.
X = torch.linspace(-2, 2, 12).view(3, 4)
OUTS = {
    "add.out": (X, X),
    "sum.IntList_out": (X, [1]),
    "amax.out": (X, [0]),
    "var.correction_out": (X, [1]),
    "_softmax.out": (X, 1, False),
    "_log_softmax_backward_data.out": (X.half(), X.half(), 1, torch.float16),
    "cumsum.out": (X, 1),
    "mm.out": (X, X.t()),
    "cat.out": ([X, X],),
    "gather.out": (X, 1, torch.zeros(3, 4, dtype=torch.int64)),
    "triu.out": (X,),
    "clamp.out": (X, -1.0, 1.0),
    "mse_loss.out": (X, X.flip(0)),
    "index_select.out": (X, 0, torch.tensor([2, 0])),
    "bitwise_and.Tensor_out": (X.long(), X.long()),
    "lt.Tensor_out": (X, X.flip(0)),
    "bmm.out": (X[None], X.t()[None]),
}


def shared(result, first):
    """Return memory of an argument, from its second element on, in the result's shape."""
    if first.dtype is not result.dtype or first.numel() <= result.numel():
        return None
    return first.as_strided(result.shape, result.stride(), 1)


OUTPUTS = {
    "gaps": lambda result, first: gaps(*result.shape, dtype=result.dtype),
    "transposed": lambda result, first: torch.zeros_like(result.mT.contiguous()).mT if result.dim() > 1 else None,
    "float64": lambda result, first: torch.zeros_like(result, dtype=torch.float64),
    "int32": lambda result, first: torch.zeros_like(result, dtype=torch.int32),
    "complex": lambda result, first: torch.zeros_like(result, dtype=torch.complex64),
    "longer": lambda result, first: result.new_zeros([size + 1 for size in result.shape]),
    "shared": shared,
}


_OVERLAPPING = pytest.param("shared", marks=pytest.mark.declines("the output overlaps the input"))


@pytest.mark.parametrize("layout", [*(name for name in OUTPUTS if name != "shared"), _OVERLAPPING])
def test_outputs_of_any_layout_dtype_and_memory(layout, device):
    """Values, bytes around the elements, and exceptions are ATen's."""
    for name, given in OUTS.items():
        op = overloads()[name]
        moved = [value.to(device).clone() if isinstance(value, torch.Tensor) else value for value in given]
        moved = [
            [x.to(device) for x in value] if isinstance(value, list) and value[0] is X else value for value in moved
        ]
        positional = [a.name for a in op.schema.arguments if not a.kwarg_only]
        arguments = dict(zip(positional, moved, strict=False))
        for a in op.schema.arguments[len(moved) :]:
            if a.has_default_value():
                arguments[a.name] = a.default_value
        (written,) = op.out_names
        result = Call(op, {**arguments, written: torch.empty(0, dtype=_result_dtype(name), device=device)}).run()
        first = moved[0][0] if isinstance(moved[0], list) else moved[0]
        out = OUTPUTS[layout](result, first)
        if out is not None:
            assert check(Call(op, {**arguments, written: out})) is None, name


def _result_dtype(name):
    types = {"_log_softmax_backward_data.out": torch.float16, "bitwise_and.Tensor_out": torch.int64}
    return types.get(name, torch.bool if name.startswith("lt") else torch.float32)
