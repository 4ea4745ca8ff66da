"""Bilinear layers, sums of products of three tensors, linear combinations, and statistics of batches."""

import itertools

import pytest
import torch
from compositions import close, normal

import tritonite
from tritonite.errors import Decline
from tritonite.ops import multilinear

aten = torch.ops.aten
SERVED = ("_trilinear", "_compute_linear_combination", "batch_norm_update_stats")


@pytest.mark.parametrize("shape", [(5,), (2, 3), ()], ids=str)
def test_bilinear_layers(shape):
    module = torch.nn.Bilinear(6, 7, 4).to(tritonite.device)
    x, y = normal(*shape, 6, grad=True), normal(*shape, 7, grad=True)
    exact_module = torch.nn.Bilinear(6, 7, 4).to(tritonite.device)
    exact_module.load_state_dict(module.state_dict())
    exact = [each.detach().double().requires_grad_() for each in (x, y)]
    expected = exact_module.double()(*exact)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [*exact, *exact_module.parameters()], grad)
    with tritonite.use_gems(faster_only=False):
        found = module(x, y)
        grads = torch.autograd.grad(found, [x, y, *module.parameters()], grad.float())
    for own, reference in zip((found.detach(), *grads), (expected.detach(), *wanted), strict=True):
        close(own, reference, 256)


def _lists():
    """Yield the dimensions in which each of three tensors has the size 1, of three dimensions, and those summed."""
    masks = [[d for d in range(3) if mask >> d & 1] for mask in range(8)]
    for first, second, third in itertools.product(masks, repeat=3):
        if not set(first) & set(second) & set(third):
            yield first, second, third, masks[(len(first) + 3 * len(second) + 2 * len(third)) % 8]


def test_every_pattern_of_dimensions():
    sizes = (2, 3, 4)
    for turn, (*expanded, summed) in enumerate(list(_lists())[::4]):
        tensors = [normal(*[size for d, size in enumerate(sizes) if d not in dims]) for dims in expanded]
        expected = aten._trilinear(*[each.double() for each in tensors], *expanded, summed, turn % 3)
        found = tritonite.ops._trilinear(*tensors, *expanded, summed, turn % 3)
        close(found, expected, 64)


@pytest.mark.declines("ATen computes large products a slice at a time")
def test_a_large_product_declines(monkeypatch):
    monkeypatch.setattr(multilinear, "_LARGEST_PRODUCT", 100)
    x, weight, y = normal(5, 3), normal(6, 3, 4), normal(5, 4)
    with pytest.raises(Decline, match="a product of the first two"):
        multilinear._trilinear(x, weight, y, [1, 3], [0], [1, 2], [2, 3])


@pytest.mark.declines("ATen raises its own error")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"i2": (4, 5, 6)}, "sizes"),
        ({"expand1": [1, 1]}, "to expand at"),
        ({"expand3": [1]}, "to expand at"),
        ({"sumdim": [2, 2]}, "sumdim"),
        ({"unroll_dim": 4}, "unroll_dim"),
    ],
)
def test_wrong_sums_decline(change, reason):
    given = {"i1": (5, 3), "i2": (4, 3, 6), "i3": (5, 6), "expand1": [1, 3], "expand2": [0], "expand3": [1, 2]}
    given |= {"sumdim": [2, 3]} | change
    given |= {name: normal(*given[name]) for name in ("i1", "i2", "i3")}
    with pytest.raises(Decline, match=reason):
        multilinear._trilinear(**given)


@pytest.mark.declines("ATen has products of integers on a CPU alone")
def test_integers_decline():
    x = torch.ones(7, 5, dtype=torch.int8, device=tritonite.device)
    with pytest.raises(Decline, match=r"operands of torch\.int8"):
        multilinear._trilinear(x, x, x, [], [], [], [1], 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_linear_combinations(dtype):
    x, factors = normal(4, 3, 5, dtype=dtype), normal(6, 4, dtype=dtype)
    for each in (x, x.transpose(1, 2), x[:, ::2]):
        expected = torch.einsum("nt,t...->n...", factors.double(), each.double())
        found = tritonite.ops._compute_linear_combination(each, factors)
        close(found, expected, 64)
        assert found.is_contiguous()


def test_exponentials_of_matrices():
    """Exponentials of matrices are linear combinations of powers."""
    x = normal(3, 4, 4).double() / 4
    with tritonite.use_gems(include=SERVED, faster_only=False):
        found = torch.linalg.matrix_exp(x)
    torch.testing.assert_close(found, torch.linalg.matrix_exp(x))


@pytest.mark.parametrize("last", [False, True])
def test_running_statistics(last):
    x, mean, variance = normal(4, 3, 5, 6), normal(3), normal(3).abs()
    x = x.to(memory_format=torch.channels_last) if last else x
    own, other = (mean.clone(), variance.clone()), (mean.double(), variance.double())
    found = tritonite.ops.batch_norm_update_stats(x, *own, 0.25)
    expected = aten.batch_norm_update_stats(x.double(), *other, 0.25)
    for each, exact in zip((*found, *own), (*expected, *other), strict=True):
        close(each, exact)
    found = tritonite.ops.batch_norm_update_stats(x, None, None, 0.25)
    for each, exact in zip(found, expected, strict=True):
        close(each, exact)
