"""Operators over lists of tensors: launches, tables, replays, layouts, and what declines."""

import dataclasses

import pytest
import torch

import tritonite
from tritonite import devices
from tritonite.engine.lists import elementwise, table
from tritonite.errors import Decline
from tritonite.ops import aten, foreach
from tritonite.registry import overloads
from tritonite.runtime.recorder import record
from tritonite.testing.samples.foreach import placed

pytestmark = pytest.mark.smoke

SHAPES = ((5,), (300,), (), (0,), (3, 4), (1,), (2, 0, 3), (64,))


def tensors(*shapes, dtype=torch.float32):
    return [torch.randn(shape).mul(3).to(tritonite.device, dtype) for shape in shapes]


def copies(value):
    """Copy a list of tensors with the strides of each."""
    return [x.clone() for x in value] if isinstance(value, list) and torch.is_tensor(value[0]) else value


def kernels(name, *args, **kwargs):
    """Return the kernels that a call would launch, in order."""
    op = overloads()[name]
    leaves = [x for value in args if isinstance(value, list) for x in value if torch.is_tensor(x)]
    _, recorder = record(lambda: op.results(args, kwargs), leaves, dry=True)
    return [description.kernel for description in recorder.descriptions if 0 not in description.grid]


def served(name):
    counts = tritonite.stats()[name]
    assert not counts.declined, counts
    return counts.launched + counts.replayed


def compare(function, *args, **kwargs):
    """Compare a call's results and its first argument with ATen's, in values, dtypes and strides."""
    expected_args, actual_args = ([copies(value) for value in args] for _ in range(2))
    expected = function(*expected_args, **kwargs)
    with tritonite.use_gems():
        actual = function(*actual_args, **kwargs)
    if expected is None:
        expected, actual = expected_args[0], actual_args[0]
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        assert ours.stride() == theirs.stride()


def test_mixed_sizes_take_one_launch(device):
    xs = tensors(*SHAPES)
    assert kernels("_foreach_add.Scalar", xs, 2.0) == ["write_table", "elementwise_list"]
    compare(torch._foreach_add, xs, 2.0)
    assert served("_foreach_add.Scalar") == 1


def test_a_launch_for_each_dtype(device):
    xs = [x for dtype in (torch.float32, torch.float16, torch.int64) for x in tensors(*SHAPES, dtype=dtype)]
    assert kernels("_foreach_mul.Scalar", xs, 2) == ["write_table", "elementwise_list"] * 3
    compare(torch._foreach_mul, xs, 2)
    assert served("_foreach_mul.Scalar")


def test_one_tensor_and_one_of_its_dtype_are_computed_alone(device):
    (x,) = tensors((7,))
    assert kernels("_foreach_exp", [x]) == ["elementwise_flat"]
    assert kernels("_foreach_exp", [x, x.half(), x]) == ["write_table", "elementwise_list", "elementwise_flat"]


def test_other_layouts_are_computed_alone(device):
    xs = [*tensors((3, 4), (9,)), *[placed(x, "strided") for x in tensors((4, 6), (3, 5))]]
    found = kernels("_foreach_neg", xs)
    assert found[:2] == ["write_table", "elementwise_list"] and len(found) == 4
    compare(torch._foreach_neg, xs)
    compare(torch._foreach_add, xs, [x.clone() for x in xs], alpha=2)
    assert served("_foreach_neg") == served("_foreach_add.List") == 1


def test_permuted_strides_are_kept(device):
    xs, ys = ([placed(x, "permuted") for x in tensors((4, 6), (3, 5), (2, 3, 4))] for _ in range(2))
    assert kernels("_foreach_mul.List", xs, ys) == ["write_table", "elementwise_list"]
    compare(torch._foreach_mul, xs, ys)
    compare(torch._foreach_mul, xs, [y.contiguous() for y in ys])


def test_long_lists_take_several_launches_of_the_table(device):
    xs = tensors(*[(3,)] * 600)
    found = kernels("_foreach_sqrt", xs)
    assert found.count("write_table") == 5 and found.count("elementwise_list") == 1


def test_tables_in_several_launches_are_complete(device, monkeypatch):
    monkeypatch.setattr(table, "_CAPACITIES", (4, 8))
    xs = tensors(*[(3 + i % 5,) for i in range(21)])
    numbers = [0.5 + i for i in range(21)]
    assert kernels("_foreach_mul.ScalarList", xs, numbers).count("write_table") == 11 + 3
    compare(torch._foreach_mul, xs, numbers)


def test_programs_of_several_blocks(device, monkeypatch):
    monkeypatch.setattr(devices, "current", dataclasses.replace(devices.current, flat_bytes=128, programs=2))
    compare(torch._foreach_add, tensors((1000,), (1,), (333,), (32,)), 1.5)
    assert served("_foreach_add.Scalar") == 1


def test_replays_read_the_addresses_of_their_call(device, path):
    for _ in range(3):
        xs, ys = tensors(*SHAPES), tensors(*SHAPES)
        compare(torch._foreach_addcmul_, xs, ys, [y.clone() for y in ys], value=0.5)
    counts = tritonite.stats()["_foreach_addcmul_.Scalar"]
    assert (counts.launched, counts.replayed) == ((1, 2) if path == "native" else (3, 0))


def test_replays_read_the_numbers_of_their_call(device, path):
    xs = tensors(*SHAPES)
    for factor in (1.0, 2.5, -3.0):
        compare(torch._foreach_mul, xs, [factor + i for i in range(len(xs))])
        compare(torch._foreach_add, xs, xs, alpha=factor)
    for name in ("_foreach_mul.ScalarList", "_foreach_add.List"):
        counts = tritonite.stats()[name]
        assert (counts.launched, counts.replayed) == ((1, 2) if path == "native" else (3, 0))


def test_numbers_of_several_types(device, path):
    for dtype in (torch.float32, torch.float16, torch.int32, torch.bool):
        xs = tensors(*SHAPES[:6], dtype=dtype)
        for numbers in ([1, 2.5, True, 0.5, -1, 3], [1, 2, 3, 4, 5, 6], [True, False] * 3):
            compare(torch._foreach_mul, xs, numbers)
            compare(torch._foreach_div, [x.float() for x in xs], numbers)
    assert served("_foreach_mul.ScalarList")


def test_a_plan_for_aligned_addresses_does_not_serve_others(device, path):
    xs = tensors((64,), (7,), (33,))
    odd = [placed(x, "odd") for x in xs]
    for given in (xs, odd, xs, odd, [xs[0], odd[1], xs[2]]):
        compare(torch._foreach_mul_, [placed(x, "odd") if x.data_ptr() % 16 else x.clone() for x in given], 2.0)
        compare(torch._foreach_mul, given, 2.0)
    assert kernels("_foreach_mul.Scalar", [*xs, *odd], 2.0) == ["write_table", "elementwise_list"] * 2


def test_a_tensor_for_all_and_numbers_in_a_vector(device):
    xs, ys = tensors(*SHAPES), tensors(*SHAPES)
    two = torch.tensor(2.0, device=device)
    # Python's binding takes such a tensor for a number, if it is on the CPU.
    compare(torch.ops.aten._foreach_mul.Tensor, xs, two)
    compare(torch.ops.aten._foreach_add.Tensor, xs, two, alpha=3)
    compare(torch.ops.aten._foreach_div_.Tensor, xs, torch.tensor(4.0, dtype=torch.float64, device=device))
    compare(torch._foreach_addcdiv, xs, ys, [y + 5 for y in ys], torch.arange(float(len(xs))))
    assert served("_foreach_addcdiv.Tensor") == served("_foreach_div_.Tensor") == 1


def test_powers_on_a_gpu_take_no_roots_where_one_launch_computes_all(device, monkeypatch):
    xs = [torch.tensor([-float("inf"), -0.0, 4.0], device=device) for _ in range(2)]
    monkeypatch.setattr(aten, "on_cpu", lambda: False)
    with tritonite.use_gems():
        assert torch._foreach_pow(xs, 0.5)[0].tolist() == [float("inf"), 0.0, 2.0]
        assert str(torch._foreach_pow([xs[0], xs[1].double()], 0.5)[0].tolist()) == "[nan, -0.0, 2.0]"
    assert served("_foreach_pow.Scalar") == 2


def test_powers_of_a_number_on_a_gpu_keep_the_strides_of_exponents(device, monkeypatch):
    exponents = [torch.ones(3, 5, device=device).t() for _ in range(2)]
    monkeypatch.setattr(aten, "on_cpu", lambda: False)
    with tritonite.use_gems():
        assert torch._foreach_pow(2, exponents)[0].stride() == (1, 5)
    assert served("_foreach_pow.ScalarAndTensor") == 1


def test_powers_of_a_number_on_a_gpu_have_the_dtype_of_integers(device, monkeypatch):
    exponents = [torch.tensor([3, 0, -1], device=device)] * 2
    monkeypatch.setattr(aten, "on_cpu", lambda: False)
    with tritonite.use_gems():
        assert torch._foreach_pow(2, exponents)[1].tolist() == [8, 1, 0]
    assert served("_foreach_pow.ScalarAndTensor") == 1
    with pytest.raises(Decline, match="powers of a number of type float"):
        overloads()["_foreach_pow.ScalarAndTensor"](2.5, exponents)


def test_tensors_without_elements_are_dense(monkeypatch):
    monkeypatch.setattr(aten, "on_cpu", lambda: False)
    assert foreach._together([[torch.ones(2, 17), torch.empty(2, 3, 0, 3, 1)], 0.5])


def test_bounds_on_a_gpu_are_the_second_of_equal_operands_where_one_launch_computes_all(device, monkeypatch):
    xs = [torch.tensor([0.0, -0.0, float("nan"), 1.0, 2.0], device=device) for _ in range(2)]
    ys = [torch.tensor([-0.0, 0.0, 1.0, float("nan"), 1.0], device=device) for _ in range(2)]
    monkeypatch.setattr(aten, "on_cpu", lambda: False)
    with tritonite.use_gems():
        assert str(torch._foreach_maximum(xs, ys)[0].tolist()) == "[-0.0, 0.0, nan, nan, 2.0]"
        assert str(torch._foreach_minimum(xs, ys)[1].tolist()) == "[-0.0, 0.0, nan, nan, 1.0]"
    assert served("_foreach_maximum.List") == served("_foreach_minimum.List") == 1


def test_numbers_that_are_equal_to_alpha_share_the_launch(device):
    found = kernels("_foreach_add.ScalarList", tensors(*SHAPES), [1, 2, 1, 4, 5, 1, 7, 8])
    # The numbers are floats, and are written by a launch of their own.
    assert found == ["write_table", "write_table", "elementwise_list"]


@pytest.mark.parametrize("name", ["maximum", "minimum", "clamp_min", "clamp_max"])
def test_nan_wins(name, device):
    xs = [torch.tensor([1.0, float("nan"), -2.0, float("inf")], device=device) for _ in range(2)]
    ys = [torch.tensor([float("nan"), 1.0, 3.0, -float("inf")], device=device) for _ in range(2)]
    function = getattr(torch, f"_foreach_{name}")
    for other in (ys, 0.5, [0.5, float("nan")], float("nan")):
        if device != "cpu" and other is not ys and other != 0.5:
            continue
        compare(function, xs, other)


def test_copies_convert_broadcast_and_move(device, path):
    xs = [
        *tensors((4, 5), (7,), (), (3, 4)),
        *tensors((9,), (2, 2), dtype=torch.float16),
        *tensors((6,), dtype=torch.int64),
    ]
    ys = [torch.zeros_like(x) for x in xs]
    compare(torch._foreach_copy_, ys, xs)
    compare(torch._foreach_copy_, [y.to(torch.bfloat16) for y in ys], xs)
    compare(torch._foreach_copy_, tensors((3, 5), (2, 4)), tensors((5,), ()))
    compare(torch._foreach_copy_, xs[:2], [xs[0].t().contiguous().t(), xs[1]])
    compare(torch._foreach_zero_, xs)
    assert served("_foreach_copy_") == 4 and served("_foreach_zero_") == 1
    assert kernels("_foreach_copy_", ys[:3], [y.half() for y in ys[:3]]) == ["write_table", "elementwise_list"]


def test_copies_keep_the_bits_of_nan(device):
    bits = [torch.tensor([0x7FC01234, -0x3FFFFF], dtype=torch.int32, device=device) for _ in range(3)]
    ys = [torch.zeros(2, device=device) for _ in bits]
    with tritonite.use_gems():
        torch._foreach_copy_(ys, [x.view(torch.float32) for x in bits])
    assert all(torch.equal(y.view(torch.int32), x) for y, x in zip(ys, bits, strict=True))
    assert served("_foreach_copy_") == 1


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_foreach_clone"), reason="torch before 2.13 has no such operator")
def test_clones_have_atens_strides(device):
    xs = [torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last), *tensors((3, 4), ())]
    xs.append(placed(xs[1], "strided"))
    clone = torch.ops.aten._foreach_clone
    compare(clone, xs)
    compare(clone, xs, memory_format=torch.contiguous_format)
    compare(clone, [x.to(torch.complex64) for x in xs])
    assert served("_foreach_clone") == 3


def test_outputs_are_written(device):
    xs = tensors(*SHAPES)
    out = [torch.empty_like(x) for x in xs]
    with tritonite.use_gems():
        assert torch.ops.aten._foreach_exp.out(xs, out=out) is None
        torch.ops.aten._foreach_add.Scalar_out(xs, 1, out=xs[:])
    assert served("_foreach_exp.out") == served("_foreach_add.Scalar_out") == 1
    torch.testing.assert_close(out, torch._foreach_exp([x - 1 for x in xs]))


def overlapping(which, device):
    base = torch.arange(12.0, device=device)
    lists = {
        "twice": lambda: ([base, base], [base.clone(), base.clone()]),
        "views": lambda: ([base[:8], base[4:]], [base[:8].clone(), base[4:].clone()]),
        "swapped": lambda: ([base[:6], base[6:]], [base[6:], base[:6]]),
        "read later": lambda: ([base[:4], base[4:8]], [base[8:], base[:4]]),
    }
    return base, *lists[which]()


@pytest.mark.declines("ATen computes one tensor after the other")
@pytest.mark.parametrize("which", ["twice", "views", "swapped", "read later"])
def test_overlap_is_left_to_aten(which, device, path):
    results = []
    for include in ((), "*"):
        base, xs, ys = overlapping(which, device)
        with tritonite.use_gems(include=include):
            torch._foreach_add_(xs, ys)
        results.append(base.clone())
    assert torch.equal(*results)
    assert tritonite.stats()["_foreach_add_.List"].declined


def test_a_tensor_read_twice_or_in_place_is_served(device, path):
    (x, y) = tensors((5,), (9,))
    compare(torch._foreach_mul, [x, x, y], [x, y[:5], y])
    xs = [x.clone(), y.clone()]
    expected = [x + x, y + y]
    with tritonite.use_gems():
        torch._foreach_add_(xs, xs)
    torch.testing.assert_close(xs, expected)
    assert served("_foreach_add_.List") == served("_foreach_mul.List") == 1


def refused(xs, device):
    whole = [x.int() for x in xs]
    return {
        "lengths": lambda: torch._foreach_add(xs, xs[:1]),
        "numbers": lambda: torch._foreach_add(xs, [1.0]),
        "no tensors": lambda: torch._foreach_add([], 1.0),
        "shapes": lambda: torch._foreach_add(xs, [x[:-1] for x in xs]),
        "a float in place": lambda: torch._foreach_add_(whole, 0.5),
        "quotients in place": lambda: torch._foreach_div_(whole, 2),
        "roots in place": lambda: torch._foreach_sqrt_(whole),
        "bools subtracted": lambda: torch._foreach_sub([x > 0 for x in xs], [x > 0 for x in xs]),
        "integers divided": lambda: torch._foreach_addcdiv(whole, whole, whole),
        "a vector for all": lambda: torch.ops.aten._foreach_mul.Tensor(xs, torch.ones(2, device=device)),
        "a number for a vector": lambda: torch._foreach_addcmul(xs, xs, xs, torch.tensor(1.0)),
        "a short vector": lambda: torch._foreach_addcmul(xs, xs, xs, torch.ones(1)),
        "another dtype": lambda: torch.ops.aten._foreach_add.Scalar_out(xs, 1, out=[x.double() for x in xs]),
    }


@pytest.mark.declines("ATen raises an error")
@pytest.mark.parametrize("which", list(refused([torch.ones(2)], "cpu")))
def test_errors_are_atens(which, device, path):
    xs = tensors((5,), (9,))
    with pytest.raises(Exception) as expected:
        refused(xs, device)[which]()
    with tritonite.use_gems(), pytest.raises(type(expected.value)) as actual:
        refused(xs, device)[which]()
    assert str(actual.value) == str(expected.value)


@pytest.mark.declines("no kernel serves complex or sparse tensors")
def test_complex_and_sparse_tensors_are_atens(device, path):
    xs = tensors((5,), (9,))
    for own in ([x.to(torch.complex64) for x in xs], [xs[0], xs[1].to(torch.complex64)], [x.to_sparse() for x in xs]):
        expected = torch._foreach_mul(own, 2.0)
        with tritonite.use_gems():
            found = torch._foreach_mul(own, 2.0)
        assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(found, expected, strict=True))


def test_limits_hold_for_each_number(device, path):
    xs = tensors((5,), (9,), dtype=torch.int8)
    compare(torch._foreach_add, xs, [1, 2])
    with tritonite.use_gems():
        try:
            torch._foreach_add(xs, [1, 1000])
        except RuntimeError as error:
            assert "overflow" in str(error)
    assert "a number outside the range that kernels serve" in tritonite.stats()["_foreach_add.ScalarList"].declined


@pytest.mark.parametrize(
    ("dtype", "number", "element"), [(torch.int32, "i64", "*i32"), (torch.float16, "fp64", "*fp16")], ids=str
)
def test_operands_for_all_tensors_have_tritons_types(dtype, number, element, device, monkeypatch):
    found = []
    monkeypatch.setattr(elementwise, "Launch", lambda own, _: found.append(own) or (lambda *_: None))
    xs = tensors(*SHAPES, dtype=dtype)
    with tritonite.use_gems(include="*"):
        torch._foreach_add(xs, 2)
        torch.ops.aten._foreach_add.Tensor(xs, torch.ones((), dtype=dtype, device=device))
    # The second operand of each is alpha.
    assert [own.signature["operands"] for own in found] == [(number, number), (element, number)]


def test_explain_names_the_kernels(device):
    text = tritonite.explain("_foreach_add.Scalar", tensors(*SHAPES), 1.0)
    assert "write_table" in text and "elementwise_list of add" in text
