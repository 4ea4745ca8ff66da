"""pointwise_dynamic in the forms users of such libraries know."""
# Over 500 lines: one public function, `pointwise_dynamic`, and everything that its users may pass.

import copy
import pickle

import pytest
import scripts
import torch
import triton
import triton.language as tl
from torch._subclasses import FakeTensorMode

import tritonite
from tritonite import pointwise_dynamic
from tritonite.errors import InvalidArgument, InvalidDeclaration, NoGradient, Unsupported

pytestmark = pytest.mark.smoke


@pointwise_dynamic
def bare(x, y):
    return x * y + 1


@pointwise_dynamic()
@triton.jit
def called(x):
    return -x


@pointwise_dynamic(is_tensor=[True, True, False], promotion_methods=[(0, 1, "DEFAULT")])
@triton.jit
def with_number(x, y, alpha):
    return x + y * alpha


@pointwise_dynamic(dtypes=[None, float], promotion_methods=[(0, "INT_TO_FLOAT")])
@triton.jit
def with_type(x, scale):
    return x * scale


@pointwise_dynamic(
    num_inputs=2, num_outputs=3, promotion_methods=[(0, "DEFAULT"), (0, 1, "DEFAULT"), (0, 1, "ALWAYS_BOOL")]
)
@triton.jit
def several(x, y):
    small = tl.minimum(x, y)
    if x.dtype.is_floating():
        large = tl.maximum(x, y) * 1.0
    else:
        large = tl.maximum(x, y)
    for _ in tl.static_range(2):
        large = large + 1
    return small, large, x < y


@pointwise_dynamic(num_outputs=2, output_dtypes=[torch.float32, torch.int32])
def explicit(x):
    return x.to(tl.float32) * 2, x.to(tl.int32)


@triton.jit
def helper(x):
    return x * x


@pointwise_dynamic
def nested(x):
    return helper(x) + helper(x)


def test_bare_broadcasts_and_promotes(device):
    x, y = torch.randn(4, 5, device=device), torch.randn(5, device=device).double()
    result = bare(x, y)
    assert result.dtype is torch.float64
    torch.testing.assert_close(result, x * y + 1)
    torch.testing.assert_close(bare(x.t(), x.t()), x.t() * x.t() + 1)
    assert bare(x.t(), x.t()).stride() == (1, 5)


def test_numbers_for_tensors(device):
    x = torch.randn(4, device=device)
    torch.testing.assert_close(bare(x, 2), x * 2 + 1)
    torch.testing.assert_close(bare(x.half(), 0.1), (x.half().float() * 0.1 + 1).half())


def test_called_without_arguments(device):
    x = torch.arange(4, device=device)
    assert torch.equal(called(x), -x)


def test_numbers_by_is_tensor_and_by_dtypes(device):
    x = torch.randn(4, device=device)
    torch.testing.assert_close(with_number(x, x, 0.5), x * 1.5)
    torch.testing.assert_close(with_type(torch.arange(4, device=device), 0.5), torch.arange(4, device=device) * 0.5)
    with pytest.raises(Unsupported, match="alpha is declared a number"):
        with_number(x, x, x)


def test_several_outputs_each_with_its_promotion(device):
    x, y = torch.arange(5, device=device), torch.full((5,), 2.5, device=device)
    small, large, less = several(x, y)
    assert (small.dtype, large.dtype, less.dtype) == (torch.int64, torch.float32, torch.bool)
    assert large.tolist() == [4.5, 4.5, 4.5, 5, 6]
    assert less.tolist() == [True, True, True, False, False]


def test_output_dtypes(device):
    wide, ints = explicit(torch.tensor([1.5, -2.5], device=device))
    assert (wide.tolist(), ints.tolist(), ints.dtype) == ([3, -5], [1, -2], torch.int32)


def test_helpers_and_the_formula_itself(device):
    x = torch.randn(4, device=device)
    torch.testing.assert_close(nested(x), 2 * x * x)
    assert bare.__name__ == "bare"


def test_destinations(device):
    x, y = torch.randn(4, 5, device=device), torch.randn(4, 5, device=device)
    out = torch.empty(5, 4, device=device).t()
    assert bare(x, y, out0=out) is out
    torch.testing.assert_close(out, x * y + 1)
    less = torch.empty(4, 5, dtype=torch.bool, device=device)
    small, large, given = several(x, y, out2=less)
    assert given is less
    torch.testing.assert_close(small, torch.minimum(x, y))
    torch.testing.assert_close(large, torch.maximum(x, y) + 2)
    assert torch.equal(less, x < y)


def same(x):
    return x


def test_invalid_declarations_raise():
    with pytest.raises(InvalidDeclaration, match="num_inputs is for 3"):
        pointwise_dynamic(same, num_inputs=3)
    with pytest.raises(InvalidDeclaration, match="no promotion is called 'SOMEHOW'"):
        pointwise_dynamic(same, promotion_methods=[(0, "SOMEHOW")])
    with pytest.raises(InvalidDeclaration, match="outputs"):
        pointwise_dynamic(same, num_outputs=2, output_dtypes=[torch.int32])
    with pytest.raises(InvalidDeclaration, match="def"):
        pointwise_dynamic(lambda x: x)


@pytest.mark.declines("refused calls")
def test_invalid_calls_raise(device):
    with pytest.raises(Unsupported, match="broadcast"):
        bare(torch.ones(3, device=device), torch.ones(4, device=device))
    with pytest.raises(Unsupported, match="complex64"):
        called(torch.ones(3, dtype=torch.complex64, device=device))


@pointwise_dynamic
def both(x, y):
    return x * y, x + y


@both.gradient
def both_gradient(product, total, x, y):
    return product * y + total, product * x + total


@pointwise_dynamic(is_tensor=[True, False])
def scaled(x, alpha):
    return x * alpha


@scaled.gradient
def _(grad, x, alpha):
    return grad * alpha


def gradients(function, *operands):
    leaves = [each.clone().requires_grad_() for each in operands]
    results = function(*leaves)
    total = sum((result * result).sum() for result in (results if isinstance(results, tuple) else (results,)))
    return torch.autograd.grad(total, leaves)


def test_gradients_are_summed_where_operands_were_broadcast(device, path):
    x, y = torch.randn(3, 1, 4, device=device), torch.randn(5, 1, device=device)
    for found, expected in zip(gradients(both, x, y), gradients(lambda x, y: (x * y, x + y), x, y), strict=True):
        torch.testing.assert_close(found, expected)
    (found,) = gradients(lambda x: scaled(x, 2.5), x)
    torch.testing.assert_close(found, 2 * 2.5 * 2.5 * x)
    (found,) = gradients(lambda x: both(x, 3)[0], x)
    torch.testing.assert_close(found, 2 * 9 * x)


def test_gradients_have_their_tensors_dtypes(device):
    x, y = torch.randn(4, device=device).half().requires_grad_(), torch.randn(4, device=device).requires_grad_()
    both(x, y)[0].sum().backward()
    assert (x.grad.dtype, y.grad.dtype) == (torch.float16, torch.float32)
    integers = torch.arange(4, device=device)
    assert torch.equal(torch.autograd.grad(both(y, integers)[0].sum(), y)[0], integers.float())


def test_gradcheck(device):
    operands = [torch.randn(2, 3, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(both, operands)


def test_backward_without_a_gradient_names_the_remedy(device, path):
    x = torch.randn(4, device=device, requires_grad=True)
    result = bare(x, x)
    assert result.requires_grad
    with pytest.raises(NoGradient, match=r"@bare\.gradient"):
        result.sum().backward()
    with torch.no_grad():
        assert not bare(x, x).requires_grad
    (grad,) = torch.autograd.grad(both(x, x)[0].sum(), x, create_graph=True)
    with pytest.raises(NoGradient, match="both_backward has no gradient"):
        grad.sum().backward()
    with pytest.raises(Unsupported, match="no gradient"):
        bare(x, x, out0=torch.empty(4, device=device))


def test_forward_mode_is_refused(device, path):
    x = torch.randn(4, device=device)
    with pytest.raises(Unsupported, match="forward mode"):
        torch.func.jvp(called, (x,), (x,))


def test_a_gradient_that_does_not_fit_is_refused():
    with pytest.raises(InvalidDeclaration, match="has 1 parameters, not 3: 1 gradients of results and its own 2"):
        bare.gradient(same)
    with pytest.raises(InvalidDeclaration, match=r"give \[1\] results, but its arguments are for 2"):

        @both.gradient
        def wrong(product, total, x, y):
            return product * y + total * x


def test_vmap_moves_batches_to_the_front(device, path):
    x, y = torch.randn(3, 2, 4, device=device), torch.randn(3, 4, device=device)
    torch.testing.assert_close(torch.vmap(bare)(x, y), x * y[:, None] + 1)
    torch.testing.assert_close(torch.vmap(bare, (2, 1))(x, x[0]), (x * x[0] + 1).movedim(2, 0))
    torch.testing.assert_close(torch.vmap(bare, (0, None))(y, 2.0), y * 2 + 1)
    torch.testing.assert_close(torch.vmap(bare, (None, 0))(x[0], y), x[0] * y[:, None] + 1)
    found = torch.vmap(several)(y, y * 2)[2]
    assert found.dtype is torch.bool and torch.equal(found, y < y * 2)


def test_vmap_promotes_as_single_calls_do(device):
    x, factors = torch.randn(3, 4, device=device), torch.randn(3, device=device, dtype=torch.float64)
    found = torch.vmap(bare)(x, factors)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, x * factors.float()[:, None] + 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_hold_the_operators(device, dynamic, path):
    def function(x, y):
        product, total = both(x, y=y)
        below = torch.empty_like(product)
        scaled(product.detach(), 0.5, out0=below)
        return scaled(product, 0.5) + total, below

    operands = [torch.randn(3, 4, device=device), torch.randn(4, device=device)]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(*operands), function(*operands))
    first = lambda function: gradients(lambda x, y: function(x, y)[0], *operands)
    torch.testing.assert_close(first(compiled), first(function))


def test_an_operator_may_be_compiled_before_it_is_called(device):
    @pointwise_dynamic
    def difference(x, y):
        return x - y

    x = torch.randn(4, device=device)
    compiled = torch.compile(lambda x: difference(x, 1), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x - 1)


def test_fake_tensors_have_the_results_metadata(device):
    x, y = torch.randn(2, 3, 4, device=device).transpose(0, 2), torch.arange(3, device=device)[:, None]
    with FakeTensorMode() as mode:
        fakes = several(mode.from_tensor(x), mode.from_tensor(y))
        with pytest.raises(Unsupported, match="broadcast"):
            bare(mode.from_tensor(x), torch.empty(7, device=device))
    for fake, real in zip(fakes, several(x, y), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
            real.shape,
            real.stride(),
            real.dtype,
            real.device,
        )


def test_opcheck(device):
    x, out = torch.randn(3, 4, device=device), torch.empty(3, 4, device=device)
    both(x, x), both(x, 2.0), both(x, x, out1=out)
    packet = getattr(torch.ops.tritonite_dynamic, both.operator.partition("::")[2])
    assert sorted(packet.overloads()) == ["Scalar_y", "default", "out1"]
    leaf = x.clone().requires_grad_()
    torch.library.opcheck(packet.default, (leaf, leaf))
    torch.library.opcheck(packet.Scalar_y, (leaf, 2.0))
    torch.library.opcheck(packet.out1, (x, x), {"out1": out})


def test_functions_of_one_name_are_separate_operators(device):
    def make(step):
        @pointwise_dynamic
        def named(x):
            return x + 1

        @pointwise_dynamic
        def other(x):
            return x - 1

        return named if step > 0 else other

    first, second, third = make(1), make(1), make(-1)
    assert len({each.operator for each in (first, second, third)}) == 3
    x = torch.zeros(2, device=device)
    assert [torch.vmap(each)(x).tolist() for each in (first, second, third)] == [[1, 1], [1, 1], [-1, -1]]


def test_tensors_that_are_negated_when_they_are_read(device):
    x = torch.randn(4, dtype=torch.complex64, device=device).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(called(x), -x.resolve_neg())


def test_destinations_are_known_to_autograd(device, path):
    leaf, kept = torch.randn(4, device=device, requires_grad=True), torch.randn(4, device=device)
    saved = leaf * kept
    bare(kept, kept, out0=kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_copies_are_the_function_itself():
    assert copy.deepcopy({"f": bare})["f"] is bare and copy.copy(bare) is bare
    assert pickle.loads(pickle.dumps(bare)) is bare

    @pointwise_dynamic
    def local(x):
        return x

    with pytest.raises((pickle.PicklingError, AttributeError), match="local"):
        pickle.dumps(local)


@pointwise_dynamic
def branching(x):
    if x > 0:
        y = x
    else:
        y = -x
    return y


@pointwise_dynamic
def choosing(x):
    return x if x.to(tl.int1) else -x


@pytest.mark.parametrize("function", [branching, choosing])
@pytest.mark.skipif(tritonite.device != "cpu", reason="Triton's compiler raises its own error")
def test_a_branch_on_data_raises(function):
    for size in (1, 40):
        with pytest.raises(InvalidDeclaration, match=rf"{function.__name__}.*tl\.where"):
            function(torch.ones(size))


FACTOR = 3
CONSTANT = tl.constexpr(3)


def test_variables_outside_are_constants_of_triton(device):
    inner = 2
    named = tl.constexpr(4)

    def with_global(x):
        return x * FACTOR

    def with_local(x):
        return x * inner

    def with_operator(x):
        return bare(x, x)

    def with_function(x):
        return same(x)

    for function, name in ((with_global, "FACTOR"), (with_local, "inner"), (with_function, "same")):
        with pytest.raises(InvalidDeclaration, match=f"variable {name} .*tl.constexpr"):
            pointwise_dynamic(function)
    with pytest.raises(InvalidDeclaration, match=r"bare\.formula"):
        pointwise_dynamic(with_operator)

    @pointwise_dynamic
    def constant(x):
        return x * CONSTANT + named

    assert constant(torch.ones(1, device=device)).item() == 7


def test_results_are_counted():
    def two(x):
        return x, -x

    def one_or_two(x, flag):
        if flag is None:
            return x + 1
        return x, -x

    def named(x):
        pair = x, -x
        return pair

    inner = triton.jit(two)

    def called(x):
        return inner(x)

    for function in (two, named, called):
        assert len(pointwise_dynamic(function)(torch.ones(1, device=tritonite.device))) == 2
    with pytest.raises(InvalidDeclaration, match=r"give \[1, 2\] results"):
        pointwise_dynamic(one_or_two)
    with pytest.raises(InvalidDeclaration, match=r"give \[2\] results, but its arguments are for 3"):
        pointwise_dynamic(two, num_outputs=3)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_dtensors_are_refused(device, path, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        sharded = DTensor.from_local(torch.ones(4, device=device), init_device_mesh(device, (1,)))
        with pytest.raises(Unsupported, match="to_local"):
            called(sharded)
    finally:
        torch.distributed.destroy_process_group()


def test_calls_are_replayed_by_the_native_dispatcher(device):
    """The test has a process of its own, where the operators are registered with the native dispatcher."""
    code = """
import torch, tritonite
from tests.test_dynamic import both, several
x = torch.randn(3, 4, device=tritonite.device)
for number in (2.0, 3.5, -1.0):
    product, total = both(x, number)
    torch.testing.assert_close(product, x * number)
out = torch.empty_like(x)
for _ in range(2):
    assert several(x, x, out1=out)[1] is out
    torch.testing.assert_close(out, x + 2)
counts = {name.partition("test_dynamic_")[2]: each for name, each in tritonite.stats().items()}
for name, calls in (("both.Scalar_y", 3), ("several.out1", 2)):
    assert (counts[name].launched, counts[name].replayed) == (1, calls - 1), (name, counts)
"""
    scripts.run(code, TRITONITE_NATIVE="1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_meta_tensors_have_meta_results(dtype, path):
    x, y = torch.empty(3, 1, device="meta", dtype=dtype), torch.empty(4, device="meta")
    product, total = both(x, y)
    assert product.device.type == total.device.type == "meta"
    assert product.shape == (3, 4) and product.dtype is torch.float32 and both(x, 2.0)[0].dtype is dtype
    assert both(torch.empty(2**45, device="meta"), 2.0)[0].shape == (2**45,)
    assert tritonite.fused.silu_and_mul(torch.empty(4, 8, device="meta")).shape == (4, 4)
    with pytest.raises(Unsupported):
        both(x.to(torch.complex64), y)


def keyword_only(x, *, y):
    return x + y


def variadic(x, *y):
    return x


def without_result(x):
    x + 1


def returning_none(x):
    return None


def by_number(x, n):
    return x * n


REFUSED = {
    "y is keyword-only": (keyword_only, {}),
    r"\*y is variadic": (variadic, {}),
    "returns nothing": (without_result, {}),
    "returns nothing; a formula": (returning_none, {}),
    r"output_dtypes\[0\] is 'float32', not a torch.dtype": (by_number, {"output_dtypes": ["float32"]}),
    "output_dtypes is 'float32', not a list": (by_number, {"output_dtypes": "float32"}),
    r"dtypes\[1\] is 'int'": (by_number, {"dtypes": [None, "int"]}),
    r"is_tensor\[0\] is 'yes'": (by_number, {"is_tensor": ["yes", False]}),
    r"promotion_methods\[0\] is \('x', 'DEFAULT'\)": (by_number, {"promotion_methods": [("x", "DEFAULT")]}),
    "num_inputs is '2'": (by_number, {"num_inputs": "2"}),
    "it is a int, not a function": (3, {}),
    "it is a type": (int, {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_invalid_formulas_raise(reason):
    function, settings = REFUSED[reason]
    with pytest.raises(InvalidDeclaration, match=reason):
        pointwise_dynamic(function, **settings)


def test_numbers_of_another_type_are_refused(device, path):
    x = torch.ones(4, device=device)
    times = pointwise_dynamic(dtypes=[None, int])(by_number)
    assert times(x, 3)[0] == 3 and times(x, True)[0] == 1
    with pytest.raises(InvalidArgument, match=r"takes a number of type int for n, not 2.7 \(float\)"):
        times(x, 2.7)
    with pytest.raises(InvalidArgument, match="number of type bool for n, not 2 "):
        pointwise_dynamic(dtypes=[None, bool])(by_number)(x, 2)
    assert pointwise_dynamic(dtypes=[None, float])(by_number)(x, 2)[0] == 2
    with pytest.raises(InvalidArgument, match="takes a tensor for out0, not 3"):
        times(x, 3, out0=3)
    with pytest.raises(TypeError, match=r"by_number.*\(x, n\): missing"):
        times(x)
