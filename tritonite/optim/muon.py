"""Muon: momentum, orthogonalised by Newton-Schulz iterations (Jordan et al. 2024).

Parameters of one shape are orthogonalised together, by batched products.
"""

from __future__ import annotations

import math

import torch

from tritonite import ops
from tritonite.errors import Unsupported
from tritonite.optim import rules
from tritonite.optim.tensors import Tensors, number


def update_muon(own: Tensors) -> None:
    """Take a step of Muon. Raises Unsupported before anything is written."""
    options = own.options
    if options["ns_steps"] >= 100 or len(options["ns_coefficients"]) != 3 or any([x.dim() != 2 for x in own.grads]):
        raise Unsupported(name="tritonite::muon", reason="options that torch.optim.Muon refuses")
    lr, momentum = number(options["lr"]), number(options["momentum"])
    buffers = own.state("momentum_buffer")
    assert buffers is not None
    shapes: dict[tuple[torch.Size, torch.device], list[int]] = {}
    for i, grad in enumerate(own.grads):
        shapes.setdefault((grad.shape, grad.device), []).append(i)
    batches = {
        kind: torch.empty(len(members), *kind[0], dtype=torch.bfloat16, device=kind[1])
        for kind, members in shapes.items()
    }
    updates = list(own.grads)
    for kind, members in shapes.items():
        for i, matrix in zip(members, batches[kind].unbind(), strict=True):
            updates[i] = matrix
    rules.muon_momentum(
        buffers,
        own.grads,
        update=updates,
        one_minus_momentum=1 - momentum,
        momentum=momentum,
        nesterov=options["nesterov"],
    )
    ratios = [1.0] * len(updates)
    for kind, members in shapes.items():
        found = orthogonalized(
            batches[kind], tuple(map(number, options["ns_coefficients"])), options["ns_steps"], number(options["eps"])
        )
        for i, matrix in zip(members, found.unbind(), strict=True):
            updates[i], ratios[i] = matrix, _lr_ratio(kind[0], options["adjust_lr_fn"])
    shrink = 1 - lr * number(options["weight_decay"])
    rates = [lr * ratio for ratio in ratios]
    try:
        rules.muon_update(own.params, updates, lr=rates if len(set(rates)) > 1 else rates[0], shrink=shrink)
    except Unsupported:
        # The momentum is written, so that torch's own step would repeat it.
        for param, update, rate in zip(own.params, updates, rates, strict=True):
            param.mul_(shrink).add_(update, alpha=-rate)


def orthogonalized(matrices: torch.Tensor, coefficients: tuple[float, ...], steps: int, eps: float) -> torch.Tensor:
    """Return matrices with singular values near 1, and the given matrices' singular vectors.

    Args:
        matrices: (batch, rows, columns) in bfloat16, overwritten.
        coefficients: (a, b, c) of an iteration X <- a X + (b A + c A^2) X, where A = X X^T; for matrices with more rows
            than columns, X <- X (a + b A + c A^2), where A = X^T X.
        steps: the number of iterations.
        eps: the least norm by which a matrix is divided.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp_(min=eps)
    matrices.div_(norms)
    for _ in range(steps):
        gram = ops.bmm(matrices.mT, matrices) if tall else ops.bmm(matrices, matrices.mT)
        polynomial = ops.baddbmm(gram, gram, gram, beta=b, alpha=c)
        left, right = (matrices, polynomial) if tall else (polynomial, matrices)
        matrices = ops.baddbmm(matrices, left, right, beta=a)
    return matrices


def _lr_ratio(shape: torch.Size, adjust: str | None) -> float:
    """Return the factor of the learning rate for a parameter's shape, as torch.optim.Muon's `adjust_lr_fn` has it."""
    rows, columns = shape
    if adjust is None or adjust == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else 1.0
