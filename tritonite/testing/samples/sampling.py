"""Random numbers from distributions with tensors of parameters. tests/test_sampling.py compares their values."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import registry
from tritonite.registry import Op
from tritonite.testing.samples import facts

_DETERMINISTIC = {"_standard_gamma_grad", "_dirichlet_grad"}
facts.RANDOM |= {op.packet for op in registry.overloads().values() if op.family == "sampling"} - _DETERMINISTIC


def _positive(tensor: torch.Tensor) -> torch.Tensor:
    """Return parameters from 0.01 to 400, for which the distributions are defined."""
    return tensor.abs().nan_to_num(3.0, 3.0, 3.0).clamp(0.01, 400)


@facts.arguments("multinomial")
def _few(tensors: facts.Tensors) -> dict[str, Any]:
    return {"self": _positive(tensors[0].float()).to(tensors[0].dtype), "generator": None, "num_samples": 3}


@facts.operands("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
def _parameters(op: Op, tensors: facts.Tensors, choice: Any) -> facts.Tensors:
    """Return rates or concentrations in the first tensor, and probabilities in the others."""
    made = [_positive(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]
    return [tensor if i == 0 or not tensor.is_floating_point() else tensor / 401 for i, tensor in enumerate(made)]


@facts.arguments("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
def _default_generator(tensors: facts.Tensors) -> dict[str, Any]:
    return {"generator": None}


@facts.drawn("poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "multinomial")
def _valid_parameters(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return valid parameters: for others ATen's kernels stop the program, or never end."""
    return arguments | {
        name: _positive(arguments[name])
        for name in ("self", "count")
        if facts.real(arguments.get(name)) and arguments[name].is_floating_point()
    }


@facts.operands("_standard_gamma_grad")
def _concentrations(op: Op, tensors: facts.Tensors, choice: Any) -> facts.Tensors | None:
    return [_positive(tensor) for tensor in tensors] if tensors[0].is_floating_point() else tensors


@facts.drawn("_standard_gamma_grad", "_dirichlet_grad")
def _positive_concentrations(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return positive concentrations, also for `total` less the first: next to the poles all is roundoff."""
    name = "alpha" if "alpha" in arguments else "self"
    one: Any = arguments[name]
    total: Any = arguments.get("total")
    if not (facts.real(one) and one.is_floating_point()):
        return arguments
    given = arguments | ({name: one.abs()} if bool((one < 0).any()) else {})
    if facts.real(total) and total.is_floating_point():
        try:
            low = total < given[name]
            if bool(low.any()):
                given["total"] = torch.where(low, given[name] + total.abs(), total).to(total.dtype)
        except RuntimeError:
            # ATen refuses shapes that do not fit.
            return given
    return given


@facts.operands("_dirichlet_grad")
def _beta(op: Op, tensors: facts.Tensors, choice: Any) -> facts.Tensors | None:
    """Return a sample from 0.01 to 0.99, a concentration, and the sum of this and another concentration."""
    if not all(tensor.is_floating_point() for tensor in tensors):
        return tensors
    ratio, one, other = (_positive(tensor) for tensor in (*tensors, tensors[0], tensors[-1])[:3])
    return [(ratio / (ratio + 1)).clamp(0.01, 0.99), one, one + other] if one.shape == other.shape else None


facts.may_decline(
    ("multinomial", "multinomial.out"),
    ("*",),
    "dtype *, whose sums ATen rounds after each term",
    "the order of ATen's rounded sums decides into which category a number falls",
    dtypes=(torch.float16, torch.bfloat16),
)
