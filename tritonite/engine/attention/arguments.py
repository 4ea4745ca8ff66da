"""Arguments that the kernels for all devices and Hopper's float32 kernels share: tensors, strides, sizes, grids."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.engine.attention.problem import Problem
from tritonite.engine.attention.prologue import BackwardStrides, TileSizes
from tritonite.runtime.contract import empty


def tile_sizes(problem: Problem, heads: int, blocks: int, group: int) -> dict[str, Any]:
    """Return the `TileSizes` of `heads` heads with `blocks` blocks each, and the factor of scores, by parameter."""
    extent = problem.queries, problem.keys, problem.diagonal
    sizes = TileSizes(heads, problem.batch * heads, group, blocks, *extent)
    return sizes._asdict() | {"scale": problem.factor}


def forward_arguments(
    problem: Problem, out: torch.Tensor, logsumexp: torch.Tensor | None, block_m: int
) -> tuple[int, dict[str, Any]]:
    """Return (programs, arguments) of a forward kernel whose programs have `block_m` queries."""
    heads, blocks = problem.query.shape[1], -(-problem.queries // block_m)
    return blocks * problem.batch * heads, {
        "tensors": problem.tensors._replace(out=out, logsumexp=logsumexp),
        "strides": problem.forward_strides(out, logsumexp),
        "padded": problem.padded_rows(logsumexp),
        **tile_sizes(problem, heads, blocks, problem.group),
    }


def backward_arguments(
    problem: Problem,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_bias: torch.Tensor | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and strides of backward_dq and of backward_dkdv; delta and excesses are allocated."""
    of = problem.strides
    delta = empty(problem.query.shape[:3], torch.float32, out.device)
    excesses = empty(problem.query.shape[:3], torch.float32, out.device) if problem.adds else None
    tensors = problem.tensors._replace(grad_out=grad_out, logsumexp=logsumexp, delta=delta, excesses=excesses)
    strides = BackwardStrides(*map(of, (*problem[:4], grad_out)))
    strides = strides._replace(logsumexp=problem.logsumexp_strides(logsumexp), delta=of(delta))
    return {
        "tensors": tensors._replace(out=out, grad_query=grads[0], grad_bias=grad_bias),
        "strides": strides._replace(out=of(out), grad_query=of(grads[0]), grad_bias=of(grad_bias)),
    }, {
        "tensors": tensors._replace(grad_key=grads[1], grad_value=grads[2]),
        "strides": strides._replace(grad_key=of(grads[1]), grad_value=of(grads[2])),
    }
