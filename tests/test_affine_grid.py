"""cuDNN's affine grids and their gradients, which ATen has on CUDA only."""

import pytest
import torch

import tritonite
from tritonite.errors import Decline
from tritonite.testing.samples import facts, samples

NAMES = ("cudnn_affine_grid_generator", "cudnn_affine_grid_generator_backward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_samples_have_the_references_values(name, dtype):
    op = tritonite.overloads()[name]
    for sample in samples(op, dtype, tritonite.device):
        found = op(*sample.args, **sample.kwargs)
        exact = facts.REFERENCES[name](*sample.args, **sample.kwargs)
        assert found.dtype is dtype and found.is_contiguous()
        largest = sample.args[0].double().abs().max().item()
        bound = 40 * torch.finfo(dtype).eps * max(largest, 1e-30)
        torch.testing.assert_close(found.double(), exact, atol=bound, rtol=2 * torch.finfo(dtype).eps, equal_nan=True)


def test_one_row_declines():
    op = tritonite.overloads()[NAMES[0]]
    with pytest.raises(Decline, match="at least 2 rows"):
        op(torch.ones(2, 2, 3), 2, 3, 1, 4)
