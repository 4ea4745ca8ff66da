"""cuDNN's grids of positions under affine maps of images, and their gradients. Corners are at -1 and 1."""

import torch

from tritonite.dtypes import opmath
from tritonite.engine.movement import result
from tritonite.errors import Decline
from tritonite.ops.creation import affine_grid, between
from tritonite.ops.multilinear import sum_of_products
from tritonite.registry import operator
from tritonite.runtime.contract import empty

# cuDNN refuses bfloat16.
_FLOATS = (torch.float16, torch.float32, torch.float64)


def _check(given, shape, sizes):
    if given.dtype not in _FLOATS or tuple(given.shape) != shape:
        raise Decline(f"a tensor of {given.dtype} and shape {tuple(given.shape)}; floats of shape {shape} are served")
    if min(sizes) < 1 or min(sizes[2:]) < 2:
        raise Decline(f"sizes {sizes}; at least 2 rows and columns are served, between which corners differ")


@operator(
    "cudnn_affine_grid_generator",
    accepts=_FLOATS,
    cuda_only=("cudnn_affine_grid_generator", "cudnn_affine_grid_generator.out"),
)
def cudnn_affine_grid_generator(theta, N, C, H, W, outs=()):
    """Map each position of an image, as `affine_grid_generator` does if corners are aligned."""
    _check(theta, (N, 2, 3), (N, C, H, W))
    return affine_grid(theta, (N, C, H, W), True, outs)


@operator(
    "cudnn_affine_grid_generator_backward",
    accepts=_FLOATS,
    cuda_only=("cudnn_affine_grid_generator_backward", "cudnn_affine_grid_generator_backward.out"),
)
def cudnn_affine_grid_generator_backward(grad, N, C, H, W, outs=()):
    """Sum the gradients of all positions, times the position's coordinates and times 1."""
    _check(grad, (N, H, W, 2), (N, C, H, W))
    out = result((grad,), (N, 2, 3), grad.dtype, outs)
    compute = opmath(grad.dtype)
    for k, (first, count) in enumerate(((-1.0, W), (-1.0, H), (1.0, 1))):
        factors = empty((count,), compute, grad.device)
        between.run((first, 1.0, count, 0), (factors,))
        factors = factors[:, None, None] if k == 1 else factors[:, None]
        sum_of_products.run((grad, factors.expand(grad.shape)), (1, 2), (out[..., k],), compute)
    return (out,)
