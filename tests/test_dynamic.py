"""pointwise_dynamic in the forms users of such libraries know."""

import pytest
import torch
import triton
import triton.language as tl

from tritonite import pointwise_dynamic
from tritonite.errors import InvalidDeclaration, Unsupported

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


def test_what_cannot_be_declared():
    with pytest.raises(InvalidDeclaration, match="num_inputs says 3"):
        pointwise_dynamic(same, num_inputs=3)
    with pytest.raises(InvalidDeclaration, match="no promotion is called 'SOMEHOW'"):
        pointwise_dynamic(same, promotion_methods=[(0, "SOMEHOW")])
    with pytest.raises(InvalidDeclaration, match="outputs"):
        pointwise_dynamic(same, num_outputs=2, output_dtypes=[torch.int32])
    with pytest.raises(InvalidDeclaration, match="def"):
        pointwise_dynamic(lambda x: x)


def test_what_cannot_be_run(device):
    with pytest.raises(Unsupported, match="broadcast"):
        bare(torch.ones(3, device=device), torch.ones(4, device=device))
    with pytest.raises(Unsupported, match="complex64"):
        called(torch.ones(3, dtype=torch.complex64, device=device))
