"""What passes for ATen's answer, and what does not."""

import pytest
import torch

from tritonite.testing.judge import comparable, judge

pytestmark = pytest.mark.smoke


def judged(actual, aten, exact, dtype=torch.float32, **settings):
    results = (torch.tensor(values, dtype=dtype) for values in (actual, aten))
    return judge(*results, torch.tensor(exact, dtype=torch.float64), **settings)


def test_what_is_within_the_resolution_passes():
    assert judged([1 + 1e-6], [1.0], [1.0]).failure is None
    assert "1 of 2 elements differ, the first at [1]" in judged([1.0, 1 + 1e-5], [1.0, 1.0], [1.0, 1.0]).failure


def test_what_is_to_be_conjugated_when_it_is_read_is_compared():
    x = torch.tensor([1 + 2j])
    assert judge(x.conj(), torch.tensor([1 - 2j])).failure is None
    assert judge(x, x.conj()).failure is not None


@pytest.mark.parametrize("magnitude", [1.0, 1.9, 0.6, 3.9])
def test_atens_error_excuses_elements_of_its_magnitude(magnitude):
    """A power of two and the next two, as errors may be of what an element was rounded from."""
    aten, exact = [1.01, magnitude], [1.0, magnitude]
    assert judged([1.0, magnitude * 1.015], aten, exact).failure is None
    assert judged([1.0, magnitude * 1.025], aten, exact).failure is not None


@pytest.mark.parametrize("magnitude", [1e-3, 0.2, 4.1, 1e3, 1e30, -8.0])
def test_atens_error_excuses_no_other_magnitude(magnitude):
    assert judged([1.0, magnitude * 1.015], [1.01, magnitude], [1.0, magnitude]).failure is not None


def test_atens_error_excuses_the_same_element_whatever_its_magnitude():
    assert judged([1e-3, 1.0], [1e-3 + 1e-4, 1.0], [1e-3 - 1e-4, 1.0]).failure is None


@pytest.mark.parametrize("aten", [1e-3, float("inf"), float("nan")])
def test_what_is_wrong_at_0_excuses_nothing(aten):
    """The exponent of 0 is that of 1, and what is not finite has none."""
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


def test_what_is_not_finite_is_atens():
    inf, nan = float("inf"), float("nan")
    assert judged([inf, nan], [inf, nan], [inf, nan]).failure is None
    assert judged([1.0], [nan], [nan]).failure is not None
    assert judged([-inf], [inf], [inf]).failure is not None
    # What overflows the dtype is infinite in it.
    assert judged([inf], [inf], [1e39]).failure is None


def test_dtype_shape_and_strides_are_atens():
    x = torch.ones(2, 3)
    assert "dtype" in judge(x.double(), x).failure
    assert "shape" in judge(x[None], x).failure
    assert "strides" in judge(x.t().contiguous().t(), x).failure


def test_an_operators_results_are_compared_by_their_values():
    result, flag = torch.ones(2, 3), True
    assert comparable("add", [result, flag]) == [(result, "values"), (flag, "values")]
    assert comparable(None, [result])[0].extent == "values"


def test_random_numbers_and_memory_that_aten_leaves_are_not_compared_by_values():
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
