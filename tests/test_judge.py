"""The judge: which results pass and which do not."""

import math

import pytest
import torch

from tritonite.testing.judge import comparable, judge, judge_residuals

pytestmark = [pytest.mark.smoke, pytest.mark.host]


def judged(actual, aten, exact, dtype=torch.float32, **settings):
    results = (torch.tensor(values, dtype=dtype) for values in (actual, aten))
    return judge(*results, torch.tensor(exact, dtype=torch.float64), **settings)


def test_what_is_within_the_resolution_passes():
    assert judged([1 + 1e-6], [1.0], [1.0]).failure is None
    assert "1 of 2 elements differ, the first at [1]" in judged([1.0, 1 + 1e-5], [1.0, 1.0], [1.0, 1.0]).failure


def test_conjugated_views_are_compared():
    x = torch.tensor([1 + 2j])
    assert judge(x.conj(), torch.tensor([1 - 2j])).failure is None
    assert judge(x, x.conj()).failure is not None


@pytest.mark.parametrize("magnitude", [1.0, 1.9, 0.6, 3.9])
def test_atens_error_excuses_elements_of_its_magnitude(magnitude):
    """Elements of the same power of two as ATen's inexact element, and of the next two, are excused."""
    aten, exact = [1.01, magnitude], [1.0, magnitude]
    assert judged([1.0, magnitude * 1.015], aten, exact).failure is None
    assert judged([1.0, magnitude * 1.025], aten, exact).failure is not None


@pytest.mark.parametrize("magnitude", [1e-3, 0.2, 4.1, 1e3, 1e30, -8.0])
def test_atens_error_excuses_no_other_magnitude(magnitude):
    assert judged([1.0, magnitude * 1.015], [1.01, magnitude], [1.0, magnitude]).failure is not None


def test_atens_error_excuses_the_same_element_whatever_its_magnitude():
    assert judged([1e-3, 1.0], [1e-3 + 1e-4, 1.0], [1e-3 - 1e-4, 1.0]).failure is None


def test_cancelled_terms_are_as_large_as_the_largest_result_where_aten_alone_has_nan():
    ours, aten, exact = [torch.tensor(x) for x in ([1e-3 + 1e-6, 1.0], [float("nan"), 1.0], [1e-3, 1.0])]
    assert judge(ours, aten, exact.double(), cancels=True).failure is None
    assert judge(ours + 1e-5, aten, exact.double(), cancels=True).failure is not None
    assert judge(ours, aten, exact.double()).failure is not None


@pytest.mark.parametrize("aten", [1e-3, float("inf"), float("nan")])
def test_errors_at_0_excuse_nothing(aten):
    """The exponent of 0 is that of 1, and infinities and nan have none."""
    assert judged([0.0, 1.015], [aten, 1.0], [0.0, 1.0]).failure is not None


@pytest.mark.parametrize("extreme", [5e-324, 1.7e308])
def test_magnitudes_are_all_that_float64_has(extreme):
    assert judged([1.15, extreme], [1.1, extreme], [1.0, extreme], torch.float64).failure is None
    assert judged([1.15, extreme], [1.0, extreme / 2], [1.0, extreme], torch.float64).failure is not None


def test_a_sample_without_elements_passes():
    assert judged([], [], []).failure is None


def test_a_zero_has_atens_sign_where_it_is_compared():
    assert judged([0.0], [-0.0], [-0.0]).failure is not None
    assert judged([0.0], [-0.0], [-0.0], zero_sign=False).failure is None


def test_infinities_and_nan_are_atens():
    inf, nan = float("inf"), float("nan")
    assert judged([inf, nan], [inf, nan], [inf, nan]).failure is None
    assert judged([1.0], [nan], [nan]).failure is not None
    assert judged([-inf], [inf], [inf]).failure is not None
    # A reference that overflows the dtype counts as infinite.
    assert judged([inf], [inf], [1e39]).failure is None
    # ATen's result may round to a finite number.
    largest = torch.finfo(torch.float16).max
    assert judged([inf], [largest - 32], [largest + 20], torch.float16).failure is None
    assert judged([inf], [largest - 32], [largest + 10], torch.float16).failure is not None


def test_dtype_shape_and_strides_are_atens():
    x = torch.ones(2, 3)
    assert "dtype" in judge(x.double(), x).failure
    assert "shape" in judge(x[None], x).failure
    assert "strides" in judge(x.t().contiguous().t(), x).failure


def test_an_operators_results_are_compared_by_their_values():
    result, flag = torch.ones(2, 3), True
    assert comparable("add", [result, flag]) == [(result, "values"), (flag, "values")]
    assert comparable(None, [result])[0].extent == "values"


def test_random_numbers_and_unwritten_memory_are_not_compared_by_value():
    results = [torch.zeros(2, dtype=torch.int64)] * 4
    assert {each.extent for each in comparable("bernoulli", results)} == {"layout"}
    extents = [each.extent for each in comparable("_scaled_dot_product_efficient_attention", results)]
    assert extents == ["values", "values", "kind", "kind"]
    assert comparable("bernoulli", results)[0].kind == (torch.int64, (2,), torch.device("cpu"))


def test_a_choice_is_replaced_by_what_it_stands_for():
    x = torch.tensor([1.0, 3.0, 3.0])
    first, last = ([torch.tensor(3.0), torch.tensor(place)] for place in (1, 2))
    ours, aten = (comparable("median", results, ((x, 0), {})) for results in (first, last))
    assert [each.value.tolist() for each in ours] == [each.value.tolist() for each in aten] == [3.0, 3.0, 0]
    assert comparable("median", first)[1].value == 1
    wrong = comparable("median", [torch.tensor(3.0), torch.tensor(0)], ((x, 0), {}))
    assert wrong[1].value == 1


def test_solutions_are_judged_by_their_residuals():
    """Another solution of the same accuracy passes, also where a matrix is so close to singular that it differs."""
    x = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 2**-23]])
    right = torch.tensor([[2.0], [2.0]])
    results = [torch.tensor([[each], [2 - each]]) for each in (2.0, 1.0)]
    others = list(torch.linalg.lu_factor_ex(x))
    found = [comparable("_linalg_solve_ex", [each, *others]) for each in results]
    assert {each.extent for each in found[0]} == {"layout"}
    ours, aten = [results[0], *others], [results[1], *others]
    assert judge_residuals("_linalg_solve_ex", ((x, right), {}), ours, aten) is None
    wrong = [results[0] + 1e-3, *others]
    assert "n eps norm" in judge_residuals("_linalg_solve_ex", ((x, right), {}), wrong, aten)
    assert "strides" in judge_residuals("_linalg_solve_ex", ((x, right), {}), [ours[0], x, *others[1:]], aten)


@pytest.mark.parametrize("name", ["linalg_inv_ex", "linalg_cholesky_ex"])
def test_only_matrices_close_to_singular_ones_may_fail(name):
    """A pivot is 0 in one library, and roundoff in another."""
    singular, regular = torch.ones(1, 3, 3), torch.eye(3)[None]
    failed, passed = torch.tensor([3], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    for x, expected in ((singular, False), (regular, True)):
        failure = judge_residuals(name, ((x,), {}), [x, failed], [x, passed])
        assert (failure is not None) == expected


SIXTEEN_BITS = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def drawn(count=200, seed=1):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def towards_zero(x, dtype):
    """Return values truncated to the dtype, where rounding takes a number away from 0."""
    near = x.to(dtype)
    return torch.where(near.double().abs() > x.abs(), torch.nextafter(near, torch.zeros_like(near)), near)


def downwards(x, dtype):
    near = x.to(dtype)
    return torch.where(near.double() > x, torch.nextafter(near, torch.full_like(near, -math.inf)), near)


@SIXTEEN_BITS
@pytest.mark.parametrize("wrong", [towards_zero, downwards])
def test_truncated_results_fail(dtype, wrong):
    """Each element is within the resolution, but errors of all elements have one sign."""
    exact = drawn()
    ours, aten = wrong(exact, dtype), exact.to(dtype)
    assert judge(ours, aten, exact).failure.startswith("rounded")
    assert judge(ours[:16], aten[:16], exact[:16]).failure is None
    assert judge(aten, aten, exact).failure is None


@SIXTEEN_BITS
def test_a_bias_of_atens_own_is_excused(dtype):
    exact = drawn()
    ours = towards_zero(exact, dtype)
    assert judge(ours, ours.clone(), exact).failure is None
    # A bias in the other direction is not excused.
    away = torch.where(ours == exact.to(dtype), torch.nextafter(ours, ours * 2), exact.to(dtype))
    assert judge(ours, away, exact, terms=1e8).failure.startswith("rounded")


@SIXTEEN_BITS
def test_shared_errors_are_no_bias(dtype):
    """A rounded weight moves all results that it contributes to, ATen's and a kernel's in their own way."""
    exact = drawn()
    near = exact.to(dtype)
    aten = torch.where(drawn(seed=5) > -1.2, torch.nextafter(near, near * 2), near)
    ours = towards_zero(exact, dtype)
    assert judge(ours, aten, exact, terms=1e8).failure is None


@SIXTEEN_BITS
def test_errors_of_both_signs_are_no_bias(dtype):
    exact = drawn(2000)
    near = exact.to(dtype)
    ends = torch.where(drawn(2000, 2) > 0, math.inf, -math.inf).to(dtype)
    ours = torch.where(drawn(2000, 3) > 0, torch.nextafter(near, ends), near)
    assert judge(ours, near, exact, terms=1e8).failure is None


@SIXTEEN_BITS
def test_large_errors_of_one_sign_are_no_bias(dtype):
    """A sum of a row has an error that all results of the row share."""
    exact = drawn(2000)
    ours = (exact + 2.5 * torch.finfo(dtype).eps * exact.abs()).to(dtype)
    assert judge(ours, exact.to(dtype), exact, terms=1e12).failure is None


@SIXTEEN_BITS
def test_repeated_values_are_no_bias(dtype):
    """Errors of results of coarse inputs are not independent."""
    exact = drawn(4).repeat(100)
    assert judge(towards_zero(exact, dtype), exact.to(dtype), exact).failure is None


@SIXTEEN_BITS
def test_subnormal_results_have_no_bias(dtype):
    exact = drawn() / 4 * torch.finfo(dtype).smallest_normal
    assert judge(towards_zero(exact, dtype), exact.to(dtype), exact).failure is None


def test_float32_has_a_tolerance():
    """Formulas are computed in float32, and not rounded to it from a wider dtype."""
    exact = drawn()
    assert judge(towards_zero(exact, torch.float32), exact.float(), exact).failure is None


def test_overflow_of_intermediate_values_counts_in_neither_result():
    """In 16 bits infinity passes where ATen has nan and the reference is finite. In float32 it does not."""
    lost, found = float("nan"), float("inf")
    assert judged([found], [lost], [-3e4], torch.float16).failure is None
    assert judged([found], [-3e4], [-3e4], torch.float16).failure
    assert judged([found], [lost], [-3e4], torch.float32).failure
