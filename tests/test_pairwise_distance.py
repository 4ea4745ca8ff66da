"""Distances between rows where samples do not reach: several tiles, many terms, batches, gradients, 64-bit offsets."""

import itertools
import math

import pytest
import torch
from conftest import served

import tritonite
from tritonite.engine import distances
from tritonite.testing.judge import assert_close, terms, to_reference

aten = torch.ops.aten
NORMS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.5, math.inf)


def same(name, *args):
    """Call our overload directly, so that a decline raises, and compare the result with ATen's."""
    actual, expected = tritonite.overloads()[name](*args), getattr(aten, name)(*args)
    assert actual.stride() == expected.stride()
    exact = getattr(aten, name)(*map(to_reference, args))
    assert_close(actual, expected, exact, terms(name, args, actual, exact))
    return actual


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device=tritonite.device).to(dtype)


@pytest.mark.parametrize(("p", "far"), [*((p, False) for p in NORMS), (2.0, True)])
def test_several_tiles_and_sums(p, far, monkeypatch):
    """Rows of both matrices make several tiles; there are more features than terms of a partial sum."""
    if far:
        monkeypatch.setattr(distances, "INT32_LIMIT", 1)
    x, y = normal(70, 37), normal(37, 131).t()
    distance = same("_cdist_forward", x, y, p, 2)
    same("_cdist_backward", normal(131, 70).t(), x, y, p, distance)
    distance = same("_pdist_forward", x, p)
    same("_pdist_backward", normal(2 * len(distance))[::2], x, p, distance)


@pytest.mark.smoke
@pytest.mark.parametrize("p", [0.5, 1.5, 3.5])
def test_gradients_of_negative_numbers_in_place_of_distances(p):
    x, y = normal(4, 5), normal(3, 5)
    slope = same("_cdist_backward", normal(4, 3), x, y, p, -aten._cdist_forward(x, y, p, 2))
    assert slope.isnan().all()


@pytest.mark.parametrize("p", NORMS)
def test_equal_rows(p):
    """Rows at distance 0 have no gradient, and equal features no part of it."""
    x = normal(6, 4)
    x[3] = x[1]
    x[4, 2] = x[5, 2]
    y = torch.cat([x[:2], x[4:]])
    same("_cdist_backward", normal(6, 4), x, y, p, same("_cdist_forward", x, y, p, None))
    same("_pdist_backward", normal(15), x, p, same("_pdist_forward", x, p))


@pytest.mark.smoke
@pytest.mark.parametrize("p", [1e-50, 1 + 1e-12, 2 + 1e-12, 1e39, 1e300])
def test_a_norm_is_chosen_by_p_in_the_dtype_of_the_operands_on_a_cpu(p):
    """In float32 these numbers are 0, 1, 2 and infinity. ATen's gradients are of the norm of p itself."""
    if tritonite.backend.aten != "cpu":
        pytest.skip("ATen's GPU kernels choose the norm by p in float64")
    x = torch.tensor([[1.0, 1, 1], [1, 1, 1], [0.5, 3, 1]], device=tritonite.device)
    distance = same("_pdist_forward", x, p)
    same("_pdist_backward", normal(3), x, p, distance)
    same("_cdist_backward", normal(3, 2), x, x[:2], p, same("_cdist_forward", x, x[:2], p, 2))


@pytest.mark.parametrize(("p", "mode"), [(1.0, 0), (2.0, 0), (2.0, 1), (2.0, 2)])
def test_batches_broadcast(p, mode):
    """Dimensions of batches broadcast, with strides that a view merges and with ones that it does not."""
    for first, second in itertools.product([(3, 1, 7, 5), (1, 7, 5), (2, 7, 5)], [(2, 4, 5), (4, 5), (3, 2, 4, 5)]):
        x, y = normal(*first), normal(*second)
        distance = same("_cdist_forward", x, y, p, mode)
        same("_cdist_backward", normal(*distance.shape), x, y, p, distance)
        same("_euclidean_dist", x, y)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bit_floats(dtype):
    x, y = normal(30, 20, dtype=dtype), normal(9, 20, dtype=dtype) + 3
    same("_cdist_forward", x, y, 2.0, None)
    same("_euclidean_dist", x, y)


def test_gradients_through_autograd():
    """`cdist` and `pdist` have the gradients of their formulas in float64, by differences and by a product."""
    for rows, p in itertools.product((5, 28), (1.0, 2.0, 3.0)):
        x, y = (normal(rows, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
        weight = normal(rows, rows, dtype=torch.float64)
        difference = (x[:, None] - y).abs()
        expected = torch.autograd.grad(((difference**p).sum(-1) ** (1 / p) * weight).sum(), (x, y))
        with tritonite.use_gems():
            loss = (torch.cdist(x, y, p) * weight).sum() + torch.pdist(x, p).sum()
            actual = torch.autograd.grad(loss - torch.pdist(x, p).sum(), (x, y))
        for own, exact in zip(actual, expected, strict=True):
            torch.testing.assert_close(own, exact)
    assert served("_cdist_backward") and served("_euclidean_dist") and served("_pdist_backward")


@pytest.mark.parametrize(
    ("first", "second"),
    [((0, 3), (4, 3)), ((4, 3), (0, 3)), ((4, 0), (2, 0)), ((0, 4, 3), (2, 3)), ((3, 4, 0), (2, 0))],
)
def test_empty(first, second):
    x, y = normal(*first), normal(*second)
    for p in (1.0, 2.0):
        distance = same("_cdist_forward", x, y, p, None)
        same("_cdist_backward", torch.ones_like(distance), x, y, p, distance)
    # Without rows or features ATen's gradient of `pdist` ends the process.
    if x.dim() == 2 and x.numel():
        distance = same("_pdist_forward", x, 2.0)
        same("_pdist_backward", torch.ones_like(distance), x, 2.0, distance)
