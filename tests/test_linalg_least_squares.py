"""Least squares of tall and wide matrices through torch.linalg, against ATen's 'gels', and gradients."""

import pytest
import torch

import tritonite
from tritonite.errors import Decline

NAME = "linalg_lstsq"


def matrices(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=tritonite.device)


@pytest.mark.parametrize("shape", [(5, 3), (2, 9, 4), (2, 4, 9), (2, 3, 4, 4), (3, 20, 17)])
@pytest.mark.parametrize("columns", [2, 40])
def test_solutions_and_layouts(shape, columns):
    a, b = matrices(*shape), matrices(*shape[:-1], columns)
    found = tritonite.overloads()[NAME](a, b, None, "gels")
    expected = torch.ops.aten.linalg_lstsq(a, b, None, driver="gels")
    for own, theirs in zip(found, expected, strict=True):
        assert own.dtype is theirs.dtype and own.shape == theirs.shape and own.stride() == theirs.stride()
        torch.testing.assert_close(own, theirs)


def test_vectors_and_replay():
    for _ in range(3):
        a, b = matrices(2, 7, 3), matrices(2, 7)
        with tritonite.use_gems(include=[NAME], faster_only=False):
            found = torch.linalg.lstsq(a, b, driver="gels")
        torch.testing.assert_close(found.solution, torch.linalg.lstsq(a, b, driver="gels").solution)


def test_gradients():
    a, b = matrices(6, 3).requires_grad_(), matrices(6, 2).requires_grad_()
    with tritonite.use_gems(include=[NAME], faster_only=False):
        assert torch.autograd.gradcheck(lambda x, y: torch.linalg.lstsq(x, y, driver="gels").solution, (a, b))


@pytest.mark.declines("full rank")
@pytest.mark.parametrize("shape", [(4, 4), (2, 7, 4), (2, 4, 7)])
@pytest.mark.parametrize("change", ["equal", "zero", "nan"])
def test_singular_matrices_are_atens_on_a_cpu(shape, change):
    """ATen raises on a CPU for a diagonal with 0, and on a GPU for no matrix."""
    if tritonite.backend.aten != "cpu":
        pytest.skip("ATen's GPU kernels raise for no matrix")
    a, b = matrices(*shape), matrices(*shape[:-1], 2)
    tall = a if shape[-2] >= shape[-1] else a.mT
    tall[..., 1] = {"equal": tall[..., 0], "zero": 0.0, "nan": torch.nan}[change]

    def outcome():
        try:
            return torch.linalg.lstsq(a, b, driver="gels").solution
        except RuntimeError as error:
            return error

    expected = outcome()
    with tritonite.use_gems(include=[NAME], faster_only=False):
        found = outcome()
    assert type(found) is type(expected) and (change != "zero" or isinstance(found, RuntimeError))
    if isinstance(found, torch.Tensor):
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    ("change", "match"),
    [({"driver": "gelsd"}, "driver 'gelsd'"), ({"rows": 4}, "right-hand sides"), ({"n": 9000}, "up to")],
)
def test_declines(change, match):
    n = change.get("n", 5)
    with pytest.raises(Decline, match=match):
        tritonite.overloads()[NAME](
            matrices(n, 3), matrices(change.get("rows", n), 2), None, change.get("driver", "gels")
        )
