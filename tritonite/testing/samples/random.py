"""Random numbers. tests/test_random.py, test_dropout.py and test_permutations.py compare their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite import devices, registry
from tritonite.registry import Op
from tritonite.testing.samples import facts

_DETERMINISTIC = {"_masked_scale", "rrelu_with_noise_backward"}
facts.RANDOM |= {op.packet for op in registry.overloads().values() if op.family == "random"} - _DETERMINISTIC


def _probability(tensor: torch.Tensor) -> torch.Tensor:
    """Return probabilities: ATen's kernels for GPUs stop the program for other numbers."""
    return (tensor.abs() % 1).nan_to_num(0.5)


facts.TENSORS["std"] = lambda tensor: tensor if tensor.dtype is torch.bool else tensor.abs().nan_to_num(1.0)
facts.TENSORS["p"] = lambda tensor: _probability(tensor.float()).to(facts.floating(tensor.dtype))


@facts.arguments("uniform", "normal", "normal_functional", "log_normal", "exponential", "cauchy", "bernoulli", "randn")
@facts.arguments("rand", "rand_like", "randn_like")
def _continuous(tensors: facts.Tensors) -> dict[str, Any]:
    """Return the default generator, and the ends of a range."""
    given = {"generator": None, "from": -0.5, "to": 1.25}
    return given | {"size": list(tensors[0].shape), "dtype": tensors[0].dtype}


@facts.arguments("geometric", "native_dropout", "_fused_dropout")
def _by_probability(tensors: facts.Tensors) -> dict[str, Any]:
    return {"generator": None, "p": 0.25, "train": True}


@facts.arguments("random", "randint", "randint_like", "randperm")
def _integers(tensors: facts.Tensors) -> dict[str, Any]:
    numel = tensors[0].numel()
    given = {"generator": None, "from": 1, "to": 5, "low": 1, "high": 5, "n": numel if numel > 4096 else numel % 131}
    return given | {"size": list(tensors[0].shape), "dtype": tensors[0].dtype}


@facts.layouts("randperm")
def _long(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield more numbers than one program sorts."""
    yield "long", [make(4500)]


@facts.arguments("rrelu_with_noise", "rrelu_with_noise_functional", "rrelu_with_noise_backward")
def _slopes(tensors: facts.Tensors) -> dict[str, Any]:
    return {"generator": None, "lower": 0.125, "upper": 0.375}


@facts.operands("bernoulli")
def _probabilities(op: Op, tensors: facts.Tensors, choice: Any) -> facts.Tensors:
    """Return probabilities for the overloads whose first tensor has them."""
    if op.overload in ("bernoulli", "bernoulli.out") and tensors[0].is_floating_point():
        return [_probability(tensor) for tensor in tensors]
    return tensors


@facts.operands("rrelu_with_noise")
def _without_outputs_on_cpu(op: Op, tensors: facts.Tensors, choice: Any) -> facts.Tensors | None:
    """Skip outputs on a CPU, where ATen writes beyond those that are too small."""
    return None if op.out_names and tensors[0].device.type == "cpu" else tensors


@facts.operands("rrelu_with_noise_functional")
def _matching_noise(op: Op, tensors: facts.Tensors, choice: Any) -> facts.Tensors | None:
    """Skip noise of another shape, beyond which ATen's kernel for GPUs reads."""
    return tensors if tensors[0].shape == tensors[1].shape else None


@facts.arguments("_masked_scale")
def _mask(tensors: facts.Tensors) -> dict[str, Any]:
    return {"self": tensors[0], "mask": (tensors[0] > 0).to(torch.uint8), "scale": 1.25}


facts.may_decline(
    ("native_dropout", "native_dropout.out"),
    ("empty",),
    "*no elements",
    "for an empty input ATen's function for CPUs returns the input and a mask in its dtype",
    device="cpu",
)


@facts.drawn("randperm")
def _limited(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit how many numbers are permuted."""
    return arguments | {"n": min(arguments["n"], 6000)}


@facts.drawn("rrelu_with_noise", "rrelu_with_noise_functional")
def _in_order(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ascending finite bounds, which ATen requires on a CPU alone, and noise of the input's shape."""
    ends: list[Any] = [arguments.get(name) for name in ("lower", "upper")]
    if any(not isinstance(end, (int, float)) or end != end or abs(end) > 1e30 for end in ends):
        ends = [0.125, 0.375]
    x, noise = arguments["self"], arguments["noise"]
    if isinstance(noise, torch.Tensor) and isinstance(x, torch.Tensor) and noise.shape != x.shape:
        # ATen writes beyond smaller noise.
        noise = torch.zeros(x.shape, dtype=noise.dtype, device=noise.device)
    return arguments | dict(zip(("lower", "upper"), sorted(ends), strict=True)) | {"noise": noise}


@facts.drawn("bernoulli")
def _drawn_probabilities(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return probabilities from 0 to 1: on a GPU ATen stops the program for other numbers."""
    name = "p" if "p" in arguments else "self"
    if devices.current.aten == "cpu" or not isinstance(arguments[name], torch.Tensor):
        return arguments
    return arguments | {name: facts.within(arguments[name], 0.0, 1.0)}
