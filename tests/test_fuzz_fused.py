"""The fuzzer of fused operators: a draw for each, each class of difference is seen, and a short run finds nothing."""

import inspect

import pytest
import torch
from conftest import FULL
from typer.testing import CliRunner

import tritonite
from tritonite import cli, fused
from tritonite.errors import Unsupported
from tritonite.testing.compositions import layers
from tritonite.testing.fuzz import Tally, chosen_names, fuzz, fuzz_one
from tritonite.testing.fuzz.fused import DRAWS, FusedCall, check_fused, draw_fused, named_fused
from tritonite.testing.fuzz.fused.drawing import Drawer
from tritonite.testing.fuzz.run import Chosen

PUBLIC = sorted(name for name in fused.__all__ if inspect.isfunction(getattr(fused, name)))


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(tritonite.device)


def call(function=None, served=True, written=(), reference=layers.rms_norm):
    """Return a call of rms_norm on rows between which are other elements; `function` takes the operator's place."""
    x = rows(3, 9)[:, 1:8].requires_grad_(not written)
    weight = rows(7).requires_grad_(not written)
    given = {"x": x, "weight": weight, "eps": 1e-2}
    return FusedCall("rms_norm", given, reference, written=written, served=served, function=function)


def found(function, **given):
    """Return the kind of the finding in a call, None without one."""
    finding = check_fused(call(function, **given))
    return finding and finding[0]


class WrongGradient(torch.autograd.Function):
    """The identity, with twice its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def changed(change):
    """Return rms_norm followed by `change` of its result and its x."""

    def function(x, weight, eps):
        return change(fused.rms_norm(x, weight, eps), x)

    return function


def spill(result, x):
    x.detach().untyped_storage()[0] = 1
    return result


def overwrite(result, x):
    x.detach().untyped_storage()[4 * x.storage_offset()] = 7
    return result


def refuse(error):
    def function(**_):
        raise error

    return function


def test_every_public_function_has_a_draw():
    assert sorted(DRAWS) == PUBLIC
    assert named_fused(None) == ["tritonite::" + name for name in PUBLIC]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (None, lambda result, x: result),
        ("value", lambda result, x: result + 1e-4),
        ("value", lambda result, x: torch.where(result == result.max(), torch.nan, result)),
        ("value", lambda result, x: result[:1]),
        ("results", lambda result, x: (result, result)),
        ("strides", lambda result, x: result.t().contiguous().t()),
        ("gradient", lambda result, x: result.detach()),
        ("gradient", lambda result, x: WrongGradient.apply(result)),
        ("gradient", lambda result, x: result + 0 * x.sum() + 1e-30 * x.exp().sum() + (x - x.detach())),
        ("stray", spill),
        ("stray", overwrite),
    ],
)
def test_a_difference_is_seen(kind, change):
    assert found(changed(change)) == kind


def test_errors_of_calls_that_must_be_served_are_findings():
    refusal = Unsupported(name="tritonite::rms_norm", reason="it rains")
    assert found(refuse(refusal)) == "declines" and found(refuse(ValueError("no"))) == "raises"


def test_calls_that_need_not_be_served_raise_unsupported_only():
    refusal = Unsupported(name="tritonite::rms_norm", reason="x has no dimension")
    assert found(refuse(refusal), served=False) is None
    assert found(refuse(IndexError("no")), served=False) == "raises"
    assert found(changed(lambda result, x: result + 1), served=False) is None
    assert found(changed(spill), served=False) == "stray"


def test_a_result_that_reads_beside_its_operand_is_seen():
    drawer = Drawer("a row within nan")
    views = [drawer.laid(torch.ones(3, 4)) for _ in range(40)]
    assert any(x.untyped_storage().nbytes() > 4 * x.numel() for x in views)
    for x in views:
        memory = torch.empty(0, device=x.device).set_(x.untyped_storage())
        assert (x == 1).all() and x.shape == (3, 4) and int((memory == 1).sum()) == len(set(_addresses(x)))
        assert int(memory.isnan().sum()) >= 4


def _addresses(x):
    return [
        sum(i * s for i, s in zip(index, x.stride(), strict=True))
        for index in torch.cartesian_prod(*[torch.arange(size) for size in x.shape]).tolist()
    ]


def test_arguments_that_a_call_writes_are_compared():
    def written(x, weight, eps):
        x.copy_(fused.rms_norm(x, weight, eps))

    def wrong(x, weight, eps):
        x.copy_(fused.rms_norm(x, weight, eps)).mul_(1.001)

    assert found(written, written=("x",)) is None and found(wrong, written=("x",)) == "value"
    assert found(lambda x, weight, eps: None, written=("x",)) == "value"


def test_quantised_values_may_be_rounded_to_either_side_but_no_further():
    x = rows(3, 40)
    given = {"x": x, "dtype": torch.int8}

    def shifted(steps):
        def function(**given):
            values, scale = fused.quantize(**given)
            return torch.where(values.abs() < 100, values + steps, values), scale

        return check_fused(FusedCall("quantize", given, layers.quantize, function=function))

    assert shifted(0) is None and shifted(1)[0] == "value"


@pytest.mark.parametrize("slack", [0.0, 1.0])
def test_sums_that_cancel_may_change_as_by_a_rounding_of_the_operands(slack):
    """The rounded product is 0 for an exact 6e-5, and operands changed by roundings have a sum up to 0.02."""
    x = torch.tensor([1 + 2**-7, 1 + 2**-6], dtype=torch.bfloat16, device=tritonite.device)
    given = {"x": x, "y": torch.tensor([1 + 2**-7, -1], dtype=torch.bfloat16, device=tritonite.device)}

    def sum_of_products(x, y):
        return (x.double() * y.double()).sum().to(torch.float32 if x.dtype is torch.bfloat16 else torch.float64)

    def kind(wrong):
        def function(x, y):
            return (x * y).float().sum() + wrong

        found = check_fused(FusedCall("rms_norm", given, sum_of_products, slack=slack, function=function))
        return found and found[0]

    assert kind(0.0) == (None if slack else "value") and kind(0.5) == "value"


def test_a_call_is_the_same_each_time_it_is_drawn():
    for name in named_fused(None):
        first, second = (draw_fused(name, 3, 5) for _ in range(2))
        assert str(first) == str(second)
        for a, b in zip(first.tensors, second.tensors, strict=True):
            assert torch.equal(a.cpu().nan_to_num(), b.cpu().nan_to_num()) if a.dtype.itemsize > 1 else True


def test_shapes_dtypes_and_layouts_are_drawn():
    calls = [draw_fused("tritonite::rms_norm", 5, number) for number in range(300)]
    tensors = [each.arguments["x"] for each in calls]
    assert {x.dtype for x in tensors} >= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    assert {0, 1} <= {x.numel() // max(1, x.shape[-1]) for x in tensors if x.dim()}
    assert {1, 64, 65} <= {x.shape[-1] for x in tensors if x.dim()}
    assert any(0 in x.stride() for x in tensors) and any(x.storage_offset() for x in tensors)
    assert any(x.dim() > 1 and x.stride(-1) > x.stride(-2) > 0 for x in tensors)
    assert any(not each.served for each in calls) and sum(each.served for each in calls) > 250
    given = [each.arguments for each in calls]
    assert {each["casting"] for each in given} == {"llama", "gemma", "none"}
    assert any("residual" in each for each in given) and any(each["weight"] is None for each in given)


@pytest.mark.parametrize(
    ("name", "operand", "dim"),
    [("linear_cross_entropy", "weight", 0), ("linear_dpo", "weight", 0), ("route", "logits", -1)],
)
def test_a_head_has_no_equal_rows_and_a_router_no_equal_logits(name, operand, dim):
    """Equal rows of a head leave roundoff as a gradient, and equal logits an undetermined choice of experts."""
    calls = [draw_fused(f"tritonite::{name}", 5, number) for number in range(200)]
    operands = [each.arguments[operand] for each in calls if each.served]
    assert not any(x.shape[dim] > 1 and x.stride(dim) == 0 for x in operands)
    assert any(0 in x.stride() for x in operands)


@pytest.mark.parametrize("name", named_fused(None))
def test_a_short_run_finds_nothing(name):
    for number in range(20 if FULL else 2):
        finding = fuzz_one(name, 20261128, number)
        assert finding is None, str(finding)


def test_one_call_in_five_is_of_a_fused_operator():
    chosen = Chosen(["add", "mul", "neg"], ["tritonite::swiglu", "tritonite::jsd"])
    turns = [chosen.turn(i) for i in range(40)]
    assert len(set(turns)) == 40
    names = [name for name, _ in turns]
    assert sum(name.startswith("tritonite::") for name in names) == 8
    assert [number for name, number in turns if name == "tritonite::jsd"] == [0, 1, 2, 3]
    assert [Chosen([], ["tritonite::jsd"]).turn(i) for i in range(2)] == [("tritonite::jsd", 0), ("tritonite::jsd", 1)]


def test_patterns_name_fused_operators_by_their_namespace():
    assert chosen_names("tritonite::*norm") == Chosen([], named_fused("tritonite::*norm"))
    assert "tritonite::rms_norm" in chosen_names("tritonite::*norm").fused
    both = chosen_names(["tritonite::swiglu", "neg"])
    assert both.fused == ["tritonite::swiglu"] and "neg" in both.overloads
    assert not chosen_names("*").fused and chosen_names(None).fused == named_fused(None)
    with pytest.raises(tritonite.errors.UnknownOperator):
        chosen_names("tritonite::no_such_operator")


def test_processes_check_fused_operators():
    tally = Tally()
    assert not list(fuzz(600, "tritonite::swiglu", 1, 1, tally, 3))
    assert (tally.calls, tally.fused) == (3, 3) and tally.served


def test_the_command_repeats_a_call():
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    result = runner.invoke(cli.app, ["verify", "--op", "tritonite::rms_norm", "--seed", "1", "--case", "3"])
    assert result.exit_code == 0, result.output
    assert "tritonite::rms_norm" in result.output and "1 calls, 1 of fused operators" in result.output
