"""Attention in float32 on Hopper: the calls its kernels serve, their algorithm without a GPU, and their values."""

import dataclasses
import math
import types

import pytest
import torch
import warps
from test_attention_hopper import BROADCASTS, by_definition, drawn, on_sm_90, problem, result, with_bias, with_extremes
from warps import Pointer, number

import tritonite
from tritonite import devices
from tritonite.engine.attention import arguments, backward, forward, prologue, scores
from tritonite.engine.attention.dropout import Dropout
from tritonite.engine.attention.hopper import (
    backward_dkdv,
    backward_dq,
    fp32_backward,
    fp32_forward,
    fp32_tiles,
)
from tritonite.engine.attention.problem import Packed, Problem
from tritonite.engine.gemm.kernels import hopper_fp32

_KERNELS = {
    fp32_forward: ("attend_fp32",),
    fp32_backward: ("attend_backward_dq_fp32", "attend_backward_dkdv_fp32"),
}


def wide(**sizes):
    return problem(dtype=torch.float32, **sizes)


def packed(queries, keys, causal=False, last=False, logarithms=True, D=64, ratio=1):
    """Return a problem of packed sequences, given by numbers of queries and keys."""
    rows, columns = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (queries, keys)]
    shapes = (1, 2 * ratio, int(rows[-1]), D), (1, 2, int(columns[-1]), D), (1, 2, int(columns[-1]), D)
    starts = [places.to(torch.int32).to(tritonite.device) for places in (rows, columns)]
    work = Problem(*[drawn(*shape, dtype=torch.float32) for shape in shapes], None, None, causal, 0, "ieee")
    return work._replace(packed=Packed(*starts, max(queries), max(keys), last, logarithms))


def sequences(work):
    """Yield each sequence of a packed problem, with its slices of queries and keys."""
    starts = [places.tolist() for places in work.packed[:2]]
    for i in range(work.batch):
        rows, columns = [slice(*places[i : i + 2]) for places in starts]
        diagonal = (columns.stop - columns.start) - (rows.stop - rows.start) if work.packed.last else 0
        own = work.query[:, :, rows], work.key[:, :, columns], work.value[:, :, columns]
        yield Problem(*own, None, None, work.causal, diagonal, "ieee"), rows, columns


def check_packed(work, attend, differentiate, far=1e-5):
    out, rows = result(work), work.query.shape[2]
    longest = -(-work.packed.queries // 32) * 32
    shape = (1, out.shape[1], rows) if work.packed.logarithms else (work.batch, out.shape[1], longest)
    logsumexp = torch.full(shape, math.nan, device=out.device)
    attend(work, out, logsumexp, "0")
    grad, grads = drawn(*out.shape, dtype=torch.float32), tuple([torch.full_like(x, math.nan) for x in work[:3]])
    differentiate(work, grad, out, logsumexp, grads)
    for i, (own, places, columns) in enumerate(sequences(work)):
        expected, logarithms = by_definition(own, "0")
        count = places.stop - places.start
        found = logsumexp[:, :, places] if work.packed.logarithms else logsumexp[i : i + 1, :, :count]
        torch.testing.assert_close(out[:, :, places].double(), expected, atol=far, rtol=far)
        torch.testing.assert_close(found.double(), logarithms, atol=far, rtol=far)
        assert work.packed.logarithms or logsumexp[i, :, count:].isposinf().all()
        exact = gradients(own, grad[:, :, places])[:3]
        for each, rows, wanted in zip(grads, (places, columns, columns), exact, strict=True):
            torch.testing.assert_close(each[:, :, rows].double(), wanted, atol=4 * far, rtol=far)


def gradients(work, grad):
    """Return gradients by query, key, value and bias in float64; a row that sees no key has none."""
    own = [x.detach().double().requires_grad_() for x in work[:3]]
    bias = torch.zeros((), device=grad.device) if work.bias is None else work.bias
    hidden = ~bias if bias.dtype is torch.bool else bias.isneginf()
    bias = bias.double().masked_fill(hidden, 0).requires_grad_()
    key, value = [x.repeat_interleave(work.ratio, 1) for x in own[1:]]
    scores = own[0] @ key.mT * work.factor
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=grad.device)
    seen = (seen.tril(work.diagonal) if work.causal else seen) & ~hidden
    added = 0 if work.bias is not None and work.bias.dtype is torch.bool else bias
    out = (scores + added).masked_fill(~seen, -1e300).softmax(-1) * seen @ value
    return torch.autograd.grad(out, [*own, bias], grad.double(), allow_unused=True)


@pytest.fixture
def of_hopper(monkeypatch):
    monkeypatch.setattr(devices, "has_wgmma", lambda device: True)
    of_gpu = lambda precision, _: "bf16x6" if precision == "ieee" else precision
    monkeypatch.setattr(fp32_tiles, "dot_precision", of_gpu)


def test_serves_float32_of_any_layout(of_hopper, monkeypatch):
    work = wide()
    assert fp32_forward.serves(work, result(work)) and fp32_backward.serves(work, result(work), work[:3])
    odd = work._replace(query=drawn(2, 4, 20, 67, dtype=torch.float32)[..., 1:65], bias=drawn(20, 21)[:, 1:] > 0)
    for other in (with_bias(work), odd, wide(D=1), wide(D=24, V=64), packed([5, 9], [3, 20])):
        assert fp32_forward.serves(other, result(other))
    others = [
        problem(),
        wide(D=72),
        wide(V=128),
        work._replace(key=work.key[:, :, :0], value=work.value[:, :, :0]),
        work._replace(query=work.query.mT.contiguous().mT),
        work._replace(dropout=Dropout(0.5, False)),
        work._replace(precision="tf32"),
    ]
    assert not any(fp32_forward.serves(other, result(other)) for other in others)
    monkeypatch.setattr(devices, "has_wgmma", lambda device: False)
    assert not fp32_forward.serves(work, result(work))


@pytest.fixture(params=[False, True], ids=["late", "at once"])
def in_python(request, monkeypatch):
    """The host functions launch what the kernels' sources do as plain Python."""
    as_is = {"heads", "batch_heads", "group", "blocks", "strides"}

    def given(name, value):
        if name == "META":
            return types.SimpleNamespace(**dataclasses.asdict(dataclasses.replace(value, index=torch.int64)))
        if isinstance(value, tuple):
            return type(value)(*[given(name, each) for each in value])
        if isinstance(value, torch.Tensor):
            return Pointer(value)
        if name == "scale":
            return torch.tensor(value).double()
        return value if name in as_is else number(value)

    def cut(x, _):
        """Split a tensor into three terms of 8 bits each, by truncation."""
        found = []
        for _part in range(3):
            first = (x.contiguous().view(torch.int32) & -65536).view(torch.float32)
            found.append(warps.block(first.bfloat16()))
            x = x - first
        return tuple(found)

    class Launcher:
        def __init__(self, kernel, module):
            self.names = list(kernel.jit.signature.parameters)
            # The kernel's own module comes last: its functions replace others of the same name.
            modules = hopper_fp32, scores, prologue, backward_dq, backward_dkdv, fp32_tiles, module
            helpers, constants = (
                warps.device_functions(*modules),
                {"ROWS": 64, "SMALL_PRODUCTS": 5, "LOG2E": scores.LOG2E.value},
            )
            self.kernel = warps.Kernel(kernel.jit.fn, helpers, request.param, split_terms=cut, **constants)

        def __getitem__(self, grid):
            def launch(*args, num_warps, maxnreg=None, **kwargs):
                kwargs |= dict(zip(self.names, args, strict=False))
                options = dict.fromkeys(devices.current.options)
                values = {name: given(name, value) for name, value in kwargs.items() if name not in options}
                for program in range(*grid):
                    self.kernel(program, **values)

            return launch

    for module, names in _KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Launcher(getattr(module, name), module))
    monkeypatch.setattr(arguments, "empty", lambda *given: torch.empty(given[0]).fill_(math.nan))


def added(work):
    """Return the problem with its mask converted to an additive bias."""
    if work.bias is None or work.bias.dtype is not torch.bool:
        return work
    return work._replace(bias=torch.zeros(work.bias.shape, device=work.bias.device).masked_fill(~work.bias, -math.inf))


def check(work, attend, differentiate, far=1e-5):
    """Compare both passes with float64. Results are views of nan memory, whose other elements must stay nan."""
    out = torch.full((*result(work).shape[:3], work.value.shape[3] + 5), math.nan, device=work.query.device)[..., :-5]
    rows = out.shape[2]
    logsumexp = torch.full((*out.shape[:2], -(-rows // 32) * 32), math.nan, device=out.device)
    attend(work, out, logsumexp, "0")
    expected, logarithms = by_definition(added(work), "0")
    torch.testing.assert_close(out.double(), expected, atol=far, rtol=far)
    torch.testing.assert_close(logsumexp[..., :rows].double(), logarithms, atol=far, rtol=far)
    assert logsumexp[..., rows:].isposinf().all()
    grad = drawn(*out.shape, dtype=torch.float32)
    of_bias = None
    if work.bias is not None and work.bias.dtype is torch.float32:
        of_bias = torch.full(work.bias.shape, math.nan, device=out.device)
    kept = None
    for _ in range(2):
        whole = [x.new_full((*x.shape[:2], x.shape[2] + 3, x.shape[3] + 3), math.nan) for x in work[:3]]
        grads = tuple([x[:, :, :-3, :-3] for x in whole])
        differentiate(work, grad, out, logsumexp[..., :rows], grads, of_bias)
        *exact, exact_bias = gradients(work, grad)
        for own, around, each in zip(grads, whole, exact, strict=True):
            torch.testing.assert_close(own.double(), each, atol=4 * far, rtol=far)
            assert around[:, :, -3:].isnan().all() and around[..., -3:].isnan().all()
        if of_bias is not None:
            torch.testing.assert_close(of_bias.double(), exact_bias, atol=4 * far, rtol=far)
        assert kept is None or all(map(torch.equal, kept, grads))
        kept = [x.clone() for x in grads]


CASES = [
    {"S": 70, "T": 70, "H": 2},
    {"S": 66, "T": 150, "H": 2, "diagonal": 84, "scale": -0.3},
    {"S": 100, "T": 40, "H": 2, "diagonal": -60, "V": 32},
    {"S": 65, "T": 100, "H": 2, "causal": False, "D": 24, "V": 40},
    {"S": 1, "T": 33, "causal": False, "D": 48, "shared": 1, "scale": 0.0},
    {"S": 40, "T": 64, "H": 2, "diagonal": -200},
]


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize("sizes", CASES)
def test_products_follow_each_other(in_python, sizes):
    """Nothing is read before it has been written, or overwritten before the products that read it have ended."""
    check(wide(B=1, **sizes), fp32_forward.attention, fp32_backward.attention_backward)


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize("in_python", [False], indirect=True, ids=["late"])
@pytest.mark.parametrize("broadcast", [*BROADCASTS, "mask"])
@pytest.mark.parametrize("sizes", CASES[2:4])
def test_a_bias_and_its_gradient(in_python, sizes, broadcast):
    """The bias has blocks of -inf, and rows that see no key."""
    work = with_bias(wide(B=1, **sizes), "full" if broadcast == "mask" else broadcast)
    work = work._replace(bias=~work.bias.isneginf()) if broadcast == "mask" else work
    check(work, fp32_forward.attention, fp32_backward.attention_backward)


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize("in_python", [False], indirect=True, ids=["late"])
def test_biases_of_the_least_and_largest_numbers(in_python):
    """Next to such numbers the logsumexp does not hold the logarithm of the number of keys."""
    work = with_extremes(wide(B=1, S=80, T=100, H=2, causal=False), 61, 5)
    check(work, fp32_forward.attention, fp32_backward.attention_backward)


PACKED = [
    {"queries": [40, 0, 70, 3], "keys": [50, 30, 70, 100]},
    {"queries": [40, 66, 1], "keys": [50, 0, 33], "causal": True, "last": True, "logarithms": False, "ratio": 2},
    {"queries": [70, 20], "keys": [40, 70], "causal": True, "D": 24},
]


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize("given", PACKED)
def test_packed_sequences_of_several_lengths(in_python, given):
    check_packed(packed(**given), fp32_forward.attention, fp32_backward.attention_backward)


@on_sm_90
@pytest.mark.parametrize("given", PACKED)
def test_values_of_packed_sequences(given):
    work = packed(**given)
    assert fp32_forward.serves(work, result(work)) and fp32_backward.serves(work, result(work), work[:3])
    check_packed(work, forward.attention, backward.attention_backward)


def run(work, **far):
    assert fp32_forward.serves(work, result(work)) and fp32_backward.serves(work, result(work), work[:3])
    check(work, forward.attention, backward.attention_backward, **far)


@on_sm_90
@pytest.mark.parametrize("sizes", [*CASES, {"S": 700, "D": 64}, {"S": 300, "T": 1000, "causal": False, "D": 33}])
def test_values(sizes):
    run(wide(**sizes))


@on_sm_90
@pytest.mark.parametrize("broadcast", [*BROADCASTS, "mask"])
@pytest.mark.parametrize("sizes", [*CASES[1:4], {"S": 300, "T": 301, "causal": False}])
def test_values_with_a_bias(sizes, broadcast):
    work = with_bias(wide(**sizes), "full" if broadcast == "mask" else broadcast)
    run(work._replace(bias=~work.bias.isneginf()) if broadcast == "mask" else work)


@on_sm_90
def test_values_with_biases_of_the_least_and_largest_numbers():
    run(with_extremes(wide(S=300, T=301, causal=False), 120, 130))


@on_sm_90
def test_registers_capped_for_three_programs():
    """There are enough programs for three on a multiprocessor."""
    heads = 2 * devices.multiprocessors(torch.device("cuda")) + 1
    run(wide(B=1, H=heads, shared=heads, S=50, T=60, causal=False))


@on_sm_90
@pytest.mark.parametrize("D", [64, 40])
def test_layouts_and_misaligned_rows(D):
    for work in (
        wide(S=130, D=D)._replace(query=drawn(2, 130, 3, 4, D, dtype=torch.float32).permute(2, 0, 3, 1, 4)[1]),
        wide(S=130, D=D)._replace(query=drawn(2, 4, 130, D + 3, dtype=torch.float32)[..., 1 : D + 1]),
        wide(S=130, D=D)._replace(key=drawn(2, 1, 130, D, dtype=torch.float32).expand(2, 2, 130, D)),
    ):
        run(work)


@on_sm_90
@pytest.mark.parametrize("causal", [False, True])
def test_infinities_and_nan(causal):
    """The first term of infinity is infinite, all terms of nan are nan, and masked values reach no gradient of keys."""
    work = wide(S=70, T=300, causal=causal, H=2)
    work.key[0, 0, 3, 5], work.query[..., 5] = math.inf, -1
    work.value[0, 1].view(torch.int32)[4, 2] = 0x7F800001
    out = result(work)
    forward.attention(work, out, None, "0")
    torch.testing.assert_close(out.double(), by_definition(work)[0], atol=1e-5, rtol=1e-5, equal_nan=True)
    if causal:
        work = wide(S=70, T=300)
        out, grad, logsumexp = result(work), drawn(2, 4, 70, 64, dtype=torch.float32), torch.empty(2, 4, 70).cuda()
        forward.attention(work, out, logsumexp, "0")
        work.key[:, :, 70:], work.value[:, :, 70:] = math.inf, math.nan
        grads = tuple([torch.full_like(x, math.nan) for x in work[:3]])
        backward.attention_backward(work, grad, out, logsumexp, grads)
        for found in grads[1:]:
            assert found.isfinite().all() and not found[:, :, 70:].any()


@on_sm_90
def test_operators_are_served():
    query, key, value = [drawn(1, 3, 100, 64, dtype=torch.float32).requires_grad_() for _ in range(3)]
    with tritonite.use_gems():
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        found = torch.autograd.grad(out.sum(), (query, key, value))
    wide_ones = [x.detach().double().requires_grad_() for x in (query, key, value)]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide_ones)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    for own, each in zip(found, torch.autograd.grad(exact.sum(), wide_ones), strict=True):
        torch.testing.assert_close(own.double(), each, atol=4e-5, rtol=1e-5)
