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
