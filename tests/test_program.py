"""Programs of pointwise formulas: bits of the operators one by one, layouts, dtypes, numbers, and text."""

import pytest
import torch

import tritonite
from tritonite.engine.pointwise.program import program
from tritonite.errors import Decline, Unsupported
from tritonite.graph.program import pointwise_program
from tritonite.install import library
from tritonite.registry.programs import as_text, formulas, from_text
from tritonite.runtime.recorder import record

pytestmark = pytest.mark.smoke
functional = torch.nn.functional

GATE = "arithmetic.mul(t0, t1); activation.gelu(s0, 'tanh'); arithmetic.add(s1, t2, n0) -> s2, s0"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def run(text, *tensors, numbers=()):
    return from_text(text, len(tensors), len(numbers)).run((*tensors, *numbers))


def gate(x, y, z, alpha):
    product = x * y
    return torch.add(functional.gelu(product, approximate="tanh"), z, alpha=alpha), product


def check(function, text, *tensors, numbers=()):
    """Compare a program with the operators one by one: all bits, dtypes, strides; and with ATen's values."""
    actual = run(text, *tensors, numbers=numbers)
    with tritonite.use_gems():
        served = function(*tensors, *numbers)
    for ours, theirs, reference in zip(actual, served, function(*tensors, *numbers), strict=True):
        assert ours.dtype is theirs.dtype
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ours, reference, equal_nan=True)


def layouts(dtype, device):
    x, y, z = (torch.randn(5, 6, device=device).to(dtype) for _ in range(3))
    yield x, y, z
    yield x.t().contiguous().t(), y, z[0]
    yield x[:, ::2], y[:, :1], z[:, 3:]
    yield x[:, None], y[None], z[0, 0]
    yield x[:1, :1], y[:1, :1], z[:1, :1]
    yield x[0, 0], y[0, 0], z[0, 0]
    yield x[:0], y[:0], z[:0]
    yield x.expand(3, 5, 6), y, z.expand(3, 5, 6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_are_those_of_the_operators(device, dtype):
    for operands in layouts(dtype, device):
        if operands[0].dim() and operands[2].dim() < operands[0].dim() and operands[0].shape != operands[1].shape:
            # The product has another shape than the sum, or the operands broadcast against each other.
            check(lambda *given: gate(*given)[:1], GATE.replace(", s0", ""), *operands, numbers=(1.5,))
        else:
            check(gate, GATE, *operands, numbers=(1.5,))


def test_every_intermediate_is_rounded(device):
    x = torch.full((4,), 1.0, dtype=torch.bfloat16, device=device)
    small = torch.full((4,), 2.0**-9, dtype=torch.bfloat16, device=device)
    text = "arithmetic.add(t0, t1, n0); arithmetic.sub(s0, t0, n1) -> s1"
    (actual,) = run(text, x, small, numbers=(1, 1))
    # The sum rounds to 1 in bfloat16.
    assert actual.tolist() == [0.0] * 4


def test_integers_bools_and_mixed_dtypes(device):
    x = torch.tensor([[3, -7, 120], [0, 5, 9]], dtype=torch.int8, device=device)
    y = torch.tensor([2, 2, 3], dtype=torch.int32, device=device)
    mask = torch.tensor([True, False, True], device=device)
    half = torch.randn(2, 3, device=device).half()
    names = formulas()
    gt = next(name for name in names if name.endswith(".gt"))
    both = next(name for name in names if name.endswith(".bitwise_and"))
    text = (
        f"arithmetic.mul(t0, t1); conditional.where(t2, s0, t0); {gt}(s0, n0); {both}(s2, t2); "
        "arithmetic.add(s0, t3, n1) -> s1, s2, s3, s4"
    )
    actual = run(text, x, y, mask, half, numbers=(5, 1))
    with tritonite.use_gems():
        expected = torch.where(mask, x * y, x), x * y > 5, (x * y > 5) & mask, x * y + half
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("to", (torch.bool, torch.uint8, torch.int16, torch.float16, torch.float64), ids=str)
def test_conversions_are_atens(device, to):
    x = torch.tensor([-300.7, -1.0, 0.0, 0.4, 3.9, 255.0, 70000.0], device=device).to(torch.float32)
    name = str(to).removeprefix("torch.")
    (actual,) = run(f"arithmetic.mul(t0, n0); convert(s0, {name}) -> s1", x, numbers=(1.0,))
    with tritonite.use_gems():
        expected = (x * 1.0).to(to)
    assert torch.equal(actual, expected)
    assert actual.dtype is to


def test_a_conversion_keeps_strides(device):
    for x in (torch.randn(4, 1, 1, 2, device=device).as_strided((4, 1, 1, 2), (2, 8, 8, 1)), torch.randn(4, 6)[:, ::2]):
        (actual,) = run("arithmetic.neg(t0); convert(s0, float64) -> s1", x.to(device))
        with tritonite.use_gems():
            assert actual.stride() == (-x.to(device)).double().stride()


def test_numbers_arrive_in_the_launch(device):
    x = torch.randn(7, device=device)
    own = from_text("arithmetic.add(t0, n0, n1); arithmetic.mul(s0, n2) -> s1", 1, 3)
    for numbers in ((1, 1, 2.5), (0.25, 2, 3), (float("inf"), 1, 1), (True, 1, 2)):
        with tritonite.use_gems():
            expected = torch.add(x, numbers[0], alpha=numbers[1]) * numbers[2]
        assert torch.equal(own.run((x, *numbers))[0], expected)
    with pytest.raises(Decline, match="range"):
        own.run((x, 10.0**300, 1, 1))


def test_declines(device):
    x, y = torch.randn(3, 4, device=device), torch.randn(4, device=device)
    with pytest.raises(Decline, match="has not the shape"):
        run("arithmetic.neg(t1); arithmetic.add(t0, s0, n0) -> s0, s1", x, y, numbers=(1,))
    with pytest.raises(Decline, match="do not broadcast"):
        run("arithmetic.mul(t0, t1); arithmetic.neg(s0) -> s1", x, y[:3])
    with pytest.raises(Decline, match="dtype"):
        run("activation.silu(t0); arithmetic.neg(s0) -> s1", x.int())
    for text in ("arithmetic.nothing(t0) -> s0", "arithmetic.neg(q0) -> s0", "neg", "arithmetic.neg(t0) -> ", "f(", ""):
        with pytest.raises(Decline, match="no program"):
            run(text, x)
    assert torch.equal(pointwise_program()([x], [], "arithmetic.neg(t0) -> s0")[0], -x)
    with pytest.raises(Unsupported, match="no program"):
        pointwise_program()([x], [], "arithmetic.nothing(t0) -> s0")


def test_equal_programs_are_one_object():
    own = from_text(GATE, 3, 1)
    assert program(3, 1, own.steps, own.results) is own
    assert as_text(3, 1, own.steps, own.results) == GATE


def arguments(kernel, dtype, device):
    """Return a tensor or a number for each parameter of a formula, None for a compile-time constant."""
    for role, name in ((role, name) for name, role in kernel.parameters.items()):
        if role in ("promoted", "own"):
            boolean = name in ("mask", "condition")
            yield torch.rand(3, 5, device=device).mul(3).to(torch.bool if boolean else dtype)
        else:
            yield None if role == "static" else 1


def test_every_formula_can_be_a_step(device):
    served = 0
    for name, kernel in formulas().items():
        if "static" in kernel.parameters.values() or "promoted" not in kernel.parameters.values():
            continue
        dtype = torch.float32 if torch.float32 in kernel.accepts else kernel.accepts[0]
        values = list(arguments(kernel, dtype, device))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        numbers = [value for value in values if not isinstance(value, torch.Tensor)]
        names = iter(f"t{i}" for i in range(len(tensors))), iter(f"n{i}" for i in range(len(numbers)))
        given = ", ".join(next(names[not isinstance(value, torch.Tensor)]) for value in values)
        stored = ", ".join(f"s{j}" for j in range(len(kernel.output_dtypes)))
        actual = run(f"{name}({given}) -> {stored}", *tensors, numbers=numbers)
        for ours, theirs in zip(actual, kernel.run(values), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=name)
        served += 1
    assert served > 100


def test_a_call_has_a_plan(device):
    pointwise_program()
    op = library.registered()["tritonite::pointwise_program"]
    tensors = [torch.randn(4, 6, device=device) for _ in range(3)]
    _, recorder = record(lambda: op.results((tensors, [1.0], GATE), {}), tensors)
    assert recorder.reason == ""
    assert len(recorder.descriptions) == 0
    _, recorder = record(lambda: op.results((tensors, [1.0], GATE), {}), tensors, dry=True)
    assert [own.formula for own in recorder.descriptions] == ["evaluate_program"]


def test_fake_results_have_the_shapes_of_real_ones(device):
    x = torch.randn(4, 6, device=device).bfloat16()
    torch.library.opcheck(
        pointwise_program(), ([x, x.t().contiguous().t(), x[0]], [1.0], GATE), test_utils="test_faketensor"
    )
