"""Muon: momentum, orthogonalised by Newton-Schulz iterations (Jordan et al. 2024).

Parameters of one shape are orthogonalised together, by batched products.
"""

from __future__ import annotations

import math

import torch

from tritonite import ops, registry
from tritonite.dtypes import FLOATS
from tritonite.engine.gemm.symmetric import symmetric_product
from tritonite.errors import Decline, Unsupported
from tritonite.install import library
from tritonite.optim import rules
from tritonite.optim.tensors import Tensors, number
from tritonite.registry import library_operator
from tritonite.runtime.contract import empty


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
        gram = _symmetric(matrices.mT if tall else matrices)
        # A is symmetric, so that A A^T is A^2.
        polynomial = _symmetric(gram, gram, beta=b, alpha=c)
        left, right = (matrices, polynomial) if tall else (polynomial, matrices)
        matrices = ops.baddbmm(matrices, left, right, beta=a)
    return matrices


def _symmetric(
    x: torch.Tensor, addend: torch.Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> torch.Tensor:
    """Return alpha * X X^T + beta * addend by the operator below, below autograd: there is no gradient to record."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        result: torch.Tensor = torch.ops.tritonite.symmetric_product(x, addend, beta, alpha)
    return result


def _check(x: torch.Tensor, addend: torch.Tensor | None) -> None:
    if x.dim() != 3 or x.dtype not in FLOATS:
        raise Decline(f"x has the shape {tuple(x.shape)} and is {x.dtype}: it must be batches of matrices of floats")
    shape = (x.shape[0], x.shape[1], x.shape[1])
    if addend is not None and (tuple(addend.shape), addend.dtype, addend.device) != (shape, x.dtype, x.device):
        given = f"shape {tuple(addend.shape)} of {addend.dtype} on {addend.device}"
        raise Decline(f"an addend of {given}; served is {shape} of {x.dtype} on {x.device}")


def _fake_symmetric(x, addend=None, beta=0.0, alpha=1.0):
    _check(x, addend)
    return x.new_empty((x.shape[0], x.shape[1], x.shape[1]))


@library_operator(
    "symmetric_product(Tensor x, Tensor? addend=None, float beta=0.0, float alpha=1.0) -> Tensor",
    fake=_fake_symmetric,
    accepts=FLOATS,
    pin=("beta", "alpha"),
)
def _symmetric_host(x, addend=None, beta=0.0, alpha=1.0):
    """Return alpha * X X^T + beta * addend, of batches of matrices and of symmetric matrices."""
    _check(x, addend)
    out = empty((x.shape[0], x.shape[1], x.shape[1]), x.dtype, x.device)
    symmetric_product(x, out, addend, alpha, beta)
    return (out,)


def _lr_ratio(shape: torch.Size, adjust: str | None) -> float:
    """Return the factor of the learning rate for a parameter's shape, as torch.optim.Muon's `adjust_lr_fn` has it."""
    rows, columns = shape
    if adjust is None or adjust == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else 1.0


library.register(registry.declarations)
