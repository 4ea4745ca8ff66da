"""Filters of one tap as matrix products: of channels-last images over all positions, of others image by image."""

from __future__ import annotations

import math

import torch

from tritonite.engine.convolution.epilogue import NO_EPILOGUE, Epilogue
from tritonite.engine.convolution.problem import Geometry
from tritonite.engine.gemm import work
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.work import Sums


def is_product(filters: torch.Tensor, geometry: Geometry) -> bool:
    """Return whether a convolution is a matrix product at every position: its filters have one tap."""
    return geometry.is_pointwise and math.prod(filters.shape[2:]) == 1


def multiply(
    input: torch.Tensor,
    filters: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    geometry: Geometry,
    precision: str,
    epilogue: Epilogue = NO_EPILOGUE,
) -> bool:
    """Write the convolution of (N, C, D, H, W) with one-tap filters, (columns, C, 1, 1, 1), to `out`.

    Returns False, with nothing written, if filters have more taps or steps, a tensor is no matrix, or the epilogue has
    a second addend or stores sums. The choice of the form does not depend on N.
    """
    if not is_product(filters, geometry):
        return False
    residual = epilogue.residual
    if epilogue.sums is not None or (bias is not None and residual is not None):
        return False
    matrix, rows, to = filters[:, :, 0, 0, 0], _rows(input), _rows(out)
    if rows is not None and to is not None:
        addend = None if residual is None else residual.as_strided(to.shape, to.stride())[None]
        addend = addend if bias is None else bias[None, None, :]
        more = _operands(epilogue, to.shape, to.stride(), -1)
        product(rows[None], matrix.mT[None], to[None], _of_product(epilogue, addend, more), Sums(precision))
        return True
    images, results = _images(input), _images(out)
    if images is None or results is None:
        return False
    addend = None if residual is None else residual.as_strided(results.shape, results.stride())
    addend = addend if bias is None else bias[None, :, None]
    matrices = matrix.expand(images.shape[0], -1, -1)
    more = _operands(epilogue, results.shape, results.stride(), -2)
    product(matrices, images, results, _of_product(epilogue, addend, more), Sums(precision))
    return True


def _of_product(epilogue: Epilogue, addend: torch.Tensor | None, more: tuple[torch.Tensor, ...]) -> work.Epilogue:
    """Return the epilogue of a matrix product that adds one tensor, with `more` operands of the program."""
    beta = 0 if addend is None else 1
    return work.Epilogue(addend, beta=beta, activation=epilogue.activation, program=epilogue.program, more=more)


def _operands(epilogue: Epilogue, shape: torch.Size, strides: tuple[int, ...], dim: int) -> tuple[torch.Tensor, ...]:
    """Return the operands of a program as matrices of this shape and strides, whose channels are along `dim`."""
    return tuple(
        [
            (x if dim == -1 else x[:, None]).expand(shape) if vector else x.as_strided(shape, strides)
            for x, vector in zip(epilogue.more, epilogue.channels, strict=True)
        ]
    )


def multiply_filters(
    input: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, geometry: Geometry, precision: str
) -> bool:
    """Write the gradient of one-tap filters to `out`, (columns, C, 1, 1, 1). Returns False as `multiply` does."""
    if not is_product(out, geometry):
        return False
    rows, by_rows = _rows(input), _rows(grad)
    if rows is None or by_rows is None or not rows.shape[0]:
        return False
    product(by_rows.mT[None], rows[None], out[None, :, :, 0, 0, 0], work.NO_EPILOGUE, Sums(precision))
    return True


def positions_by_channels(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor as (batches, positions, channels), or None if it is no batch of matrices.

    Of a channels-last tensor the positions of all images are one matrix.
    """
    rows = _rows(tensor)
    if rows is not None:
        return rows[None]
    images = _images(tensor)
    return None if images is None else images.mT


def _merged(tensor: torch.Tensor, dims: tuple[int, ...]) -> int | None:
    """Return the stride of dimensions that are one in memory, or None if they are not."""
    step, reach = None, 0
    for d in reversed(dims):
        if tensor.shape[d] == 1:
            continue
        if step is None:
            step = tensor.stride(d)
        elif tensor.stride(d) != reach:
            return None
        reach = tensor.stride(d) * tensor.shape[d]
    return 1 if step is None else step


def _rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a channels-last tensor as (positions of all images, channels), or None if it has another layout."""
    step, channels = _merged(tensor, (0, 2, 3, 4)), tensor.shape[1]
    if step is None or tensor.stride(1) != 1 or step < channels:
        return None
    return tensor.as_strided((tensor.numel() // channels, channels), (step, 1))


def _images(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor as (images, channels, positions), or None if no view has this shape."""
    step, positions = _merged(tensor, (2, 3, 4)), math.prod(tensor.shape[2:])
    if step is None:
        return None
    return tensor.as_strided((*tensor.shape[:2], positions), (*tensor.stride()[:2], step))
