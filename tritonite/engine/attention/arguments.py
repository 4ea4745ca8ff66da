"""Arguments that the kernels for all devices and Hopper's float32 kernels share: tensors, strides, sizes, grids."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.engine.attention.problem import Problem
from tritonite.engine.attention.prologue import (
    DkdvInputs,
    DkdvResults,
    DkdvStrides,
    DqInputs,
    DqResults,
    DqStrides,
    ForwardStrides,
    HeadStrides,
    Operands,
    Results,
    Starts,
    TileSizes,
)
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
    operands = Operands(*problem[:4])
    heads, blocks = problem.query.shape[1], -(-problem.queries // block_m)
    query, key, value, result = map(problem.strides, (*operands[:3], out))
    return blocks * problem.batch * heads, {
        "operands": operands,
        "results": Results(out, logsumexp),
        "starts": Starts(*problem.starts),
        "strides": ForwardStrides(
            query, key, value, result, problem.bias_strides, problem.logsumexp_strides(logsumexp)
        ),
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
    operands, of = Operands(*problem[:4]), problem.strides
    delta = empty(problem.query.shape[:3], torch.float32, out.device)
    excesses = empty(problem.query.shape[:3], torch.float32, out.device) if problem.adds else None
    query, key, value, grad = map(of, (*operands[:3], grad_out))
    bias, rows = problem.bias_strides, problem.logsumexp_strides(logsumexp)
    scores = HeadStrides(*((0, 0, 0, 0) if grad_bias is None else grad_bias.stride()))
    shared = {"operands": operands, "starts": Starts(*problem.starts)}
    dq = {
        "inputs": DqInputs(grad_out, out, logsumexp),
        "results": DqResults(grads[0], grad_bias, delta, excesses),
        "strides": DqStrides(query, key, value, bias, grad, of(out), rows, of(grads[0]), scores, of(delta)),
    }
    dkdv = {
        "inputs": DkdvInputs(grad_out, logsumexp, delta, excesses),
        "results": DkdvResults(*grads[1:]),
        "strides": DkdvStrides(query, key, value, bias, grad, rows, of(grads[1]), of(grads[2]), of(delta)),
    }
    return shared | dq, shared | dkdv
