"""ATen's promises about results besides values: layout, aliasing, errors, overlap."""
# Over 500 lines: one subject, what a call promises besides values, over the operators that every test here draws.

import copy
import gc
import inspect
import itertools
import math
import pickle
import sys
from unittest import mock

import pytest
import torch
import triton.language as tl

import tritonite
from tritonite import devices, registry
from tritonite.engine.pointwise.blocks import inverse
from tritonite.engine.pointwise.declare import Iteration
from tritonite.errors import Decline, InvalidDeclaration
from tritonite.ops import arithmetic
from tritonite.registry import Op
from tritonite.testing import targets
from tritonite.testing.judge import assert_close, to_reference

pytestmark = [pytest.mark.smoke, pytest.mark.host]

SHAPES = {
    "contiguous": lambda: torch.randn(4, 6, 8),
    "permuted": lambda: torch.randn(4, 6, 8).permute(2, 0, 1),
    "sliced": lambda: torch.randn(8, 6, 16)[::2, :, ::2],
    "expanded": lambda: torch.randn(4, 1, 8).expand(4, 6, 8),
    "row": lambda: torch.randn(8),
    "column": lambda: torch.randn(4, 1, 1),
    "zero_dim": lambda: torch.randn(()),
    "channels_last": lambda: torch.randn(2, 4, 6, 8).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 3, 4, 6, 8).to(memory_format=torch.channels_last_3d),
    "size_one": lambda: torch.randn(4, 1, 6, 8).to(memory_format=torch.channels_last),
    "empty": lambda: torch.randn(4, 0, 8),
    "flipped": lambda: torch.randn(8, 6, 4).permute(2, 1, 0),
    "number": lambda: 1.5,
}


def same(function, *args):
    expected = function(*args)
    with tritonite.use_gems():
        actual = function(*args)
    assert_close(actual, expected, function(*map(to_reference, args)))
    return actual


def served(name):
    counts = tritonite.stats()[name]
    return counts.launched + counts.replayed


def on(device, value):
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("names", list(itertools.combinations_with_replacement(SHAPES, 2)), ids="-".join)
def test_result_layout_is_atens(names, device, request):
    a, b = (on(device, SHAPES[name]()) for name in names)
    if not isinstance(a, torch.Tensor):
        same(torch.relu, torch.tensor(a))
        return
    try:
        torch.add(a, b)
    except RuntimeError as error:
        request.applymarker(pytest.mark.declines("shapes that do not broadcast"))
        with tritonite.use_gems(), pytest.raises(RuntimeError) as raised:
            torch.add(a, b)
        assert str(raised.value) == str(error)
        return
    before = torch.add(a, b)
    with tritonite.use_gems():
        assert torch.add(a, b).stride() == before.stride()
        if isinstance(b, torch.Tensor):
            assert torch.add(b, a).stride() == torch.ops.aten.add.Tensor(b, a).stride()
    same(torch.add, a, b)
    same(torch.exp, a)
    same(torch.where, a > 0, a, b)


@pytest.mark.parametrize("wide", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("narrow", [torch.float16, torch.int8, torch.uint8, torch.bool, torch.float64])
def test_promotion_is_atens(wide, narrow, device):
    """Tensors, zero-dim tensors and numbers of every category are combined with each other."""
    a = torch.ones(3, device=device).to(wide)
    for b in (torch.ones(3).to(narrow), torch.ones(()).to(narrow), 2, 2.5, True):
        b = on(device, b)
        for function in (torch.add, torch.mul, torch.true_divide, torch.eq, torch.atan2):
            try:
                expected = function(a, b)
            except (RuntimeError, TypeError):
                continue
            with tritonite.use_gems():
                actual = function(a, b)
            assert actual.dtype == expected.dtype, (function, b)
            torch.testing.assert_close(actual, expected)


def test_default_dtype_is_part_of_the_key(device):
    x = torch.arange(3, device=device)
    with tritonite.use_gems():
        assert torch.exp(x).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.exp(x).dtype is torch.float64
            assert (x * 0.5).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_in_place_and_out_return_their_destination(device):
    x, out = torch.randn(4, 4, device=device), torch.empty(4, 4, device=device)
    with tritonite.use_gems():
        assert x.add_(1) is x
        assert torch.exp(x, out=out) is out
        assert x.t().mul_(2)._base is x
    assert served("exp.out") == 1


def test_out_of_wrong_shape_is_resized_as_aten_does(device):
    x = torch.randn(4, 4, device=device)
    with tritonite.use_gems():
        out = torch.empty(0, device=device)
        torch.exp(x, out=out)
        assert_close(out, x.exp())
        with pytest.warns(UserWarning, match="resized"):
            torch.exp(x, out=torch.empty(3, device=device))


@pytest.mark.declines("a GPU's kernels write no float64 output of a float32 result")
def test_out_in_another_dtype_and_layout(device):
    x = torch.randn(4, 6, device=device)
    out = torch.empty(6, 4, dtype=torch.float64, device=device).t()
    expected = torch.empty_like(out)
    torch.exp(x, out=expected)
    with tritonite.use_gems():
        torch.exp(x, out=out)
    assert_close(out, expected, expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.add_(x.t()),
        lambda x: x[1:].add_(x[:-1]),
        lambda x: x[:1].expand(4, 4).add_(1),
        lambda x: torch.add(x.view(-1)[:8], 1, out=x.view(-1)[4:12]),
        lambda x: torch.arange(3, device=x.device).add_(1.5),
        lambda x: torch.bitwise_and(x, x),
        lambda x: torch.neg(x > 0),
        lambda x: torch.add(x, x, out=torch.empty(4, 4, dtype=torch.int32, device=x.device)),
        lambda x: torch.add(x, torch.ones(3, device=x.device)),
        lambda x: torch.sub(x > 0, x > 0),
        lambda x: torch.add(torch.ones(3, dtype=torch.int32, device=x.device), 1, alpha=0.5),
        lambda x: x.masked_fill(x, 1.0),
        lambda x: x.to(torch.complex64).masked_fill(x, torch.ones((), device=x.device)),
    ],
)
def test_errors_are_atens(call, device):
    x = torch.randn(4, 4, device=device)
    with pytest.raises(RuntimeError) as expected:
        call(x.clone())
    with tritonite.use_gems(), pytest.raises(RuntimeError) as actual:
        call(x.clone())
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("owner", ["cpu", tritonite.device])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, torch.tensor(1e300, dtype=torch.float64)),
        (torch.float16, torch.tensor(70000.0)),
        (torch.float16, torch.tensor(2**40)),
        (torch.int8, torch.tensor(300)),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_is_refused(dtype, value, owner, device, path):
    x, mask, value = torch.ones(4, 4, device=device, dtype=dtype), torch.eye(4, device=device) > 0, value.to(owner)
    small = value.new_ones(())
    x.masked_fill(mask, small)
    with tritonite.use_gems():
        for _ in range(2):
            assert torch.equal(x.masked_fill(mask, small), x)
            with pytest.raises(RuntimeError, match="without overflow"):
                x.masked_fill(mask, value)
            with pytest.raises(RuntimeError, match="without overflow"):
                x.masked_fill_(mask, value)


@pytest.mark.declines("no kernel serves such numbers")
def test_numbers_beyond_64_bits_are_atens(device, path):
    """A bool is True for any number but 0, while a kernel takes numbers of 64 bits."""
    x, number = torch.tensor([True, False], device=device), 2**63
    calls = {
        "fill.Scalar": lambda: torch.ops.aten.fill.Scalar(x, number),
        "masked_fill.Scalar": lambda: x.masked_fill(x, number),
        "add.Tensor": lambda: torch.add(x, x, alpha=number),
        "add_.Tensor": lambda: x.clone().add_(x, alpha=number),
    }
    for name, call in calls.items():
        expected = call()
        with tritonite.use_gems(include=name):
            assert torch.equal(call(), expected) and torch.equal(call(), expected)
        assert not served(name)


def test_arguments_are_checked_for_tensors_without_elements(device, path):
    x = torch.ones(0, 4, device=device)
    with tritonite.use_gems():
        for number in (1.0, 2.0, 1e300):
            calls = (
                lambda: x.masked_fill(x > 0, number),
                lambda: x.clone().fill_(number),
                lambda: x.add(x, alpha=number),
            )
            for call in calls:
                if number < 1e300:
                    assert call().shape == (0, 4)
                    continue
                with pytest.raises(RuntimeError, match="without overflow"):
                    call()
    assert served("masked_fill.Scalar") and served("add.Tensor")


def test_aliasing_that_is_allowed(device):
    x = torch.randn(4, 4, device=device)
    expected = (x + x) * x
    with tritonite.use_gems():
        y = x.clone()
        y.add_(y)
        y.mul_(x)
        assert_close(y, expected)
        z = torch.arange(8.0, device=device)
        z[::2].add_(z[1::2])
    assert z.tolist() == [1, 1, 5, 3, 9, 5, 13, 7]


def test_a_plan_of_equal_tensors_does_not_serve_overlapping_ones(device):
    base = torch.arange(9.0, device=device)
    with tritonite.use_gems():
        base[:4].add_(torch.ones(4, device=device))
        with pytest.raises(RuntimeError, match="single memory location"):
            base[:4].add_(base[1:5])


@pytest.mark.declines("no kernel accepts the dtype")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, dtype=torch.complex64),
        lambda: torch.randn(3).to(torch.float8_e5m2),
        lambda: torch.randn(3, 3).to_sparse(),
        lambda: torch.tensor([1, 2], dtype=torch.uint16),
        lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    ],
    ids=["complex", "float8", "sparse", "uint16", "nested"],
)
def test_declined_calls_give_atens_result(make):
    value = make()
    outcomes = []
    for context in (tritonite.use_gems(include="nextafter"), tritonite.use_gems()):
        with context:
            try:
                outcomes.append((type(r := torch.abs(value)), r.dtype, str(r)))
            except (RuntimeError, NotImplementedError) as error:
                outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_subclass_and_parameter(device):
    class Tagged(torch.Tensor):
        pass

    x = torch.randn(3, device=device)
    with tritonite.use_gems():
        assert type(torch.exp(x.as_subclass(Tagged))) is Tagged
        assert_close(torch.exp(torch.nn.Parameter(x)).detach(), x.exp(), x.double().exp())


def test_negative_and_conjugate_views(device):
    x = torch.randn(4, dtype=torch.complex64, device=device).conj().imag
    assert x.is_neg()
    same(torch.add, x, x)
    assert_close(tritonite.ops.add(x, x), x + x)


def test_fake_tensors_and_tracing(device):
    from torch._subclasses import FakeTensorMode

    def function(x, y):
        return torch.nn.functional.gelu(x) * y + x.exp()

    x, y = torch.randn(4, 4, device=device), torch.randn(4, device=device)
    expected = function(x, y)
    with tritonite.use_gems():
        with FakeTensorMode() as mode:
            fake = function(mode.from_tensor(x), mode.from_tensor(y))
        assert fake.shape == expected.shape
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, y), expected)
        torch.testing.assert_close(torch.func.vmap(function)(x, y), torch.func.vmap(function)(x, y))
        torch.testing.assert_close(torch.func.vmap(lambda a: a.exp() + 1)(x), x.exp() + 1)


def test_gradients_flow_through_atens_formulas(device):
    x = torch.randn(4, 4, device=device, dtype=torch.float64, requires_grad=True)
    with tritonite.use_gems():
        assert torch.autograd.gradcheck(torch.tanh, (x,), nondet_tol=0)
        assert torch.autograd.gradgradcheck(torch.sigmoid, (x,))
    assert served("tanh_backward") > 0


def test_wrapped_numbers_decline_as_numbers(device):
    """A declined call must still see that 2.0 is a number, not a float64 tensor."""
    with tritonite.use_gems():
        assert (torch.ones(3, device=device).to(torch.complex64) * 2.0).dtype is torch.complex64
        assert (torch.ones((), dtype=torch.complex64, device=device) * 2.0).dtype is torch.complex64
        assert (torch.ones(3, dtype=torch.uint16, device=device) * 2.0).dtype is torch.float32
        for x in (torch.ones(3, dtype=torch.uint16, device=device), torch.ones((), dtype=torch.uint16, device=device)):
            with pytest.raises(NotImplementedError, match="not implemented for 'UInt16'"):
                torch.sub(x, 1, alpha=7)


@pytest.mark.declines("ATen refuses the call")
@pytest.mark.parametrize("number", [0.5, 2, True], ids=str)
def test_a_number_with_a_float8_scalar_is_refused(number, device, path):
    x = torch.ones((), device=device).to(torch.float8_e4m3fn)
    with tritonite.use_gems():
        for call in (torch.add, torch.mul, torch.div):
            with pytest.raises(NotImplementedError):
                call(x, number)


def test_numbers_alone_are_of_the_default_dtype():
    pairs = ((1.5, 2.5), (1, 2.5), (1.5, True), (1, 2))
    expected = [torch.add(*pair) for pair in pairs] + [torch.div(*pair) for pair in pairs]
    with tritonite.use_gems():
        actual = [torch.add(*pair) for pair in pairs] + [torch.div(*pair) for pair in pairs]
    torch.testing.assert_close(actual, expected)


def test_direct_calls(device):
    x = torch.randn(4, 4, device=device)
    assert_close(tritonite.ops.add(x, 2.0, alpha=3), torch.add(x, 2.0, alpha=3))
    y = x.clone()
    assert tritonite.ops.relu_(y) is y
    assert_close(tritonite.ops.add(self=x, other=x), x + x)
    assert tritonite.ops.relu_(self=y) is y
    assert_close(y, x.relu())
    assert tritonite.ops.add(x.to(torch.complex64), 1).dtype is torch.complex64
    with pytest.raises(AttributeError, match="no operator 'addd'"):
        tritonite.ops.addd  # noqa: B018
    assert tritonite.stats() == {}


def recorded(monkeypatch):
    """Return the list of overloads whose host functions run from here on."""
    seen, results = [], registry.Op.results
    monkeypatch.setattr(
        registry.Op, "results", lambda self, *args: (seen.append(self.overload), results(self, *args))[1]
    )
    return seen


def test_direct_calls_record_gradients(device, monkeypatch):
    seen = recorded(monkeypatch)
    x, y = torch.randn(3, 4, device=device, requires_grad=True), torch.randn(4, device=device)
    result = tritonite.ops.mul(x, y)
    assert type(result.grad_fn) is type((x * y).grad_fn) and seen == ["mul.Tensor"]
    result.sum().backward()
    torch.testing.assert_close(x.grad, y.expand(3, 4))
    assert tritonite.ops.mm(x, y[:, None]).grad_fn is not None and seen[1:] == ["mm"]
    with torch.no_grad():
        assert not tritonite.ops.mul(x, 2).requires_grad
    with pytest.raises(RuntimeError, match="leaf Variable"):
        tritonite.ops.add_(x, 1)
    with pytest.raises(RuntimeError, match=r"out=\.\.\. arguments don't support"):
        tritonite.ops.add(x, y, out=torch.empty(3, 4, device=device))
    assert torch.autograd.gradcheck(tritonite.ops.tanh, x.detach().double().requires_grad_())


def test_direct_calls_count_versions(device):
    leaf, kept, out = (torch.randn(4, device=device, requires_grad=grad) for grad in (True, False, False))
    saved = leaf * kept
    tritonite.ops.add_(kept, 1)
    assert tritonite.ops.add(kept, 1, out=out) is out and (kept._version, out._version) == (1, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_direct_calls_under_transforms(device):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    class Tagged(torch.Tensor):
        pass

    x, y, ops = torch.randn(3, 4, device=device), torch.randn(4, device=device), tritonite.ops
    assert_close(torch.vmap(lambda x: ops.add(x, y))(x), x + y)
    torch.testing.assert_close(torch.func.grad(lambda x: ops.mul(x, y).sum())(x), y.expand(3, 4))
    assert_close(torch.func.jvp(lambda x: ops.mul(x, x), (x,), (x,))[1], 2 * x * x)
    assert_close(torch.compile(lambda x: ops.add(x, y) * 2, fullgraph=True, backend="aot_eager")(x), (x + y) * 2)
    assert "aten.add" in make_fx(lambda x: ops.add(x, 1))(x).code
    assert type(ops.exp(x.as_subclass(Tagged))) is Tagged
    with FakeTensorMode() as mode:
        assert ops.add(mode.from_tensor(x), 1).shape == x.shape


def test_direct_calls_follow_autocast(device):
    x = torch.randn(4, 4, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tritonite.ops.mm(x, x).dtype is torch.bfloat16
    assert tritonite.ops.mm(x, x).dtype is torch.float32


def test_direct_calls_are_pickled_by_name():
    assert pickle.loads(pickle.dumps(tritonite.ops.add)) is tritonite.ops.add
    assert copy.deepcopy([tritonite.ops.add])[0] is tritonite.ops.add


def test_names_that_aten_does_not_know(capsys, monkeypatch):
    for declare in (registry.pointwise("sigmodi"), registry.operator("sigmodi", accepts=(torch.float32,))):
        with pytest.raises(InvalidDeclaration, match=r"ATen has no operator of this name.*'sigmoid'"):
            declare(lambda self: self)
    for arguments, message in ((["swoosh"], "no operator is called 'swoosh'"), (["--part", "2/2"], "is not I/N")):
        monkeypatch.setattr(sys, "argv", ["targets", *arguments])
        with pytest.raises(SystemExit) as stopped:
            targets.main()
        assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_direct_call_with_several_outputs(device):
    mantissa, exponent = tritonite.ops.frexp(torch.tensor([8.0, 0.3], device=device))
    assert exponent.tolist() == [4, -1]
    assert mantissa[0] == 0.5


def test_explain(device):
    x = torch.randn(64, 64, device=device)
    text = tritonite.explain("add.Tensor", x, x.half())
    assert "computed in float32" in text
    assert "elementwise_flat of add" in text
    assert "ATen: dtype torch.complex64" in tritonite.explain("add.Tensor", x, x.to(torch.complex64))
    with pytest.raises(tritonite.errors.UnknownOperator):
        tritonite.explain("nothing")


def test_caches_are_bounded(device):
    """A process that sees many shapes keeps a limited number of iterations."""
    before = sum(type(value) is Iteration for value in gc.get_objects())
    with tritonite.use_gems(include="neg"):
        for n in range(3000):
            torch.neg(torch.empty(0, n, device=device))
    assert served("neg") == 3000
    assert sum(type(value) is Iteration for value in gc.get_objects()) - before < 2000


def test_interleaved_destinations_are_served(device):
    x = torch.rand(4, 20, device=device)
    expected = x.clone()
    torch.neg(expected[:, ::2], out=expected[:, 1::2])
    with tritonite.use_gems():
        torch.neg(x[:, ::2], out=x[:, 1::2])
        polar = torch.polar(x, x)
    assert torch.equal(x, expected)
    assert_close(torch.view_as_real(polar), torch.view_as_real(torch.polar(x, x)))
    assert served("neg.out") and served("polar") and not tritonite.stats()["polar"].declined


_OVERLAPPING = pytest.mark.declines("the output overlaps the input")


@pytest.mark.parametrize(
    ("begin", "serves"),
    [
        (0, True),
        pytest.param(1, False, marks=_OVERLAPPING),
        pytest.param(9, False, marks=_OVERLAPPING),
        (10, True),
        (12, True),
    ],
)
def test_columns_of_a_matrix_may_be_the_output_for_other_columns(device, begin, serves):
    x = torch.rand(4, 3, 22, device=device)[:, 1:]
    expected = -x[..., :10]
    with tritonite.use_gems(include="neg"):
        torch.neg(x[..., :10], out=x[..., begin : begin + 10])
    assert bool(served("neg.out")) == serves
    assert not serves or torch.equal(x[..., begin : begin + 10], expected)


@pytest.mark.skipif(tritonite.device != "cuda", reason="gigabytes of elements take minutes in the interpreter")
def test_more_elements_than_32_bits_count(device):
    x = torch.zeros(2**31 + 64, dtype=torch.int8, device=device)
    x[2**31 - 1 :: 63] = 5
    with tritonite.use_gems():
        flat, strided = x + 1, x[1::2] + 1
    assert served("add.Tensor") == 2
    assert torch.equal(flat, torch.add(x, 1))
    assert torch.equal(strided, torch.add(x[1::2], 1))


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 10, 25, 641, 2**16 - 1, 2**16 + 1, 2**30, 2**30 + 1, 2**31 - 1])
def test_indices_are_divided_by_multiplication(divisor):
    """Kernels divide 32-bit indices by multiplication. The divisors use every bit."""
    multiplier, shift = inverse(divisor)
    assert -(2**31) <= multiplier < 2**31
    multiples = [divisor * factor for factor in (1, 2, 3, 1000, (2**31 - 1) // divisor)]
    places = [place + step for place in (0, 2**30, *multiples) for step in (-1, 0, 1) if 0 <= place + step < 2**31]
    for place in places:
        total = (place * (multiplier % 2**32) >> 32) + place
        assert total < 2**32
        assert total >> shift == place // divisor


def test_explain_refuses_what_aten_refuses(device):
    x = torch.randn(4, 4, device=device)
    for arguments in ((x, torch.ones(3, device=device)), (x,), (x, x, x, x)):
        with pytest.raises(RuntimeError) as expected:
            torch.ops.aten.add.Tensor(*arguments)
        with pytest.raises(RuntimeError) as actual:
            tritonite.explain("add.Tensor", *arguments)
        assert str(expected.value)[:5] != "aten:" or str(actual.value) == str(expected.value)
    assert "PARTS" not in tritonite.explain("relu", x)


def test_explain_computes_nothing(device):
    x, out = torch.randn(4, 4, device=device), torch.full((4, 4), 7.0, device=device)
    text = tritonite.explain("addmm.out", x, x, x, alpha=3.0, out=out)
    assert "multiply" in text and (out == 7).all()
    tritonite.explain("mul_.Tensor", out, x)
    assert (out == 7).all()
    assert "sizes that data decides" in tritonite.explain("equal", x, x)


def test_a_fused_product_does_not_overflow_before_the_addition(device, monkeypatch):
    """With a factor of 1, ATen on a GPU fuses product and addition. With another factor it rounds the product."""
    if devices.current.interpreted:
        monkeypatch.setattr(arithmetic, "ON_CPU", tl.constexpr(False))
    addcmul = tritonite.overloads()["addcmul"]
    infinite, large = (torch.full((3,), number, device=device) for number in (math.inf, 3e38))
    assert addcmul(infinite, large, -7 * torch.ones_like(large)).isposinf().all()
    assert addcmul(-large, large, 1.5 * torch.ones_like(large)).isfinite().all()
    assert addcmul(infinite, large, -7 * torch.ones_like(large), value=0.5).isnan().all()
    whole = torch.arange(3, device=device)
    assert addcmul(whole, whole, whole).tolist() == [0, 2, 6] and addcmul(whole, whole, whole, value=3)[2] == 14


def test_incomplete_gamma_functions_near_0(device):
    """For small orders Q is small, and 1 - P would cancel."""
    a = torch.tensor([1e-6, 1e-3, 0.02, 0.16], dtype=torch.float64, device=device)
    x = torch.tensor([1.02, 0.9, 1.08, 1.16], dtype=torch.float64, device=device)
    # Values computed by mpmath.
    exact = torch.tensor(
        [2.1217130367269328e-07, 0.0002604296998218178, 0.003926017669801399, 0.031809301624878605], dtype=torch.float64
    )
    with tritonite.use_gems():
        torch.testing.assert_close(torch.special.gammaincc(a, x).cpu(), exact, rtol=2e-14, atol=0)


def test_every_operator_is_a_function_for_direct_calls():
    assert dir(tritonite.ops)
    for name in dir(tritonite.ops):
        assert not inspect.ismodule(getattr(tritonite.ops, name)), name


def test_direct_calls_of_composite_operators_run_their_steps(device):
    x = torch.randn(4, 8, device=device)
    seen = []
    with mock.patch.object(Op, "results", lambda op, *_: seen.append(op.overload) or decline()):
        torch.testing.assert_close(tritonite.ops.softmax(x, 1), x.softmax(1))
    assert seen == ["_softmax"]


def decline():
    raise Decline("a test")


def test_vector_norm_of_a_number_along_a_dimension(device):
    """ATen returns the absolute value only if no dimension is given, and else a root of a power."""
    x = torch.tensor(-0.5, device=device)
    for dim in (None, [0], [-1]):
        expected = torch.linalg.vector_norm(x, 500.0, dim)
        with tritonite.use_gems():
            assert torch.equal(torch.linalg.vector_norm(x, 500.0, dim), expected)
