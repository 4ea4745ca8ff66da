"""Norms of one dimension, recognised by an epsilon among the attributes and by what they compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tritonite import devices, fused
from tritonite.dtypes import FLOATS_OF_16_BITS
from tritonite.patching.rebind import only_argument
from tritonite.patching.report import KeepError
from tritonite.patching.samples import RESOLUTION, check_alike, distance, dtype_and_device, normal, required_arguments
from tritonite.runtime.sharding import is_sharded

_EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
# Rows of sample inputs, and their width for a norm without a weight.
_ROWS, _WIDTH = (2, 3), 48


class Norm(NamedTuple):
    """The formula of a norm and the attributes that hold its epsilon, weight and bias."""

    centered: bool
    eps: str
    weight: str | None
    bias: str | None
    offset: float = 0.0
    casting: str = "none"

    @property
    def operator(self) -> str:
        """Return the call as a report shows it."""
        if self.centered:
            return "fused.layer_norm"
        given = f", offset={self.offset:g}" if self.offset else ""
        return f"fused.rms_norm, casting={self.casting!r}{given}"

    def __call__(self, x: torch.Tensor, weight: Any, bias: Any, eps: Any) -> Any:
        """Return the norm of x."""
        if self.centered:
            result: Any = fused.layer_norm(x, weight, bias, eps)
        else:
            result = fused.rms_norm(x, weight, eps, offset=self.offset, casting=self.casting)
        return result


def _epsilon(module: torch.nn.Module) -> str | None:
    """Return the name of the attribute that holds the epsilon: a float, or None in torch.nn.RMSNorm."""
    for name in _EPSILONS:
        value = getattr(module, name, "")
        if isinstance(value, float) or (value is None and isinstance(module, torch.nn.RMSNorm)):
            return name
    return None


def looks_like_norm(module: torch.nn.Module) -> bool:
    """Return whether a module is a leaf with an epsilon and no more than two vectors of one size."""
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return False
    shapes = [each.shape for each in module.parameters()]
    vectors = len(shapes) <= 2 and all(len(each) == 1 for each in shapes) and len(set(shapes)) <= 1
    return vectors and _epsilon(module) is not None and required_arguments(module.forward) == 1


def _size(module: torch.nn.Module, like: torch.Tensor | None) -> int:
    """Return the width of the rows that a norm takes."""
    if like is not None:
        return like.numel()
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, (tuple, list)):
        if len(shape) != 1:
            raise KeepError(f"it normalises over {len(shape)} dimensions: the operator does over one")
        return int(shape[0])
    return shape if isinstance(shape, int) else _WIDTH


def _candidates(eps: str, value: float | None, names: list[str]) -> list[Norm]:
    """Return the formulas that a norm with these parameters may have; a layer norm has an epsilon."""
    weight, bias = (*names, None, None)[:2]
    centered = [] if value is None else [Norm(True, eps, weight, bias)]
    if bias is not None:
        return [*centered, Norm(True, eps, bias, weight)]
    offsets = (0.0, 1.0) if weight is not None else (0.0,)
    castings = ("llama", "gemma", "none") if weight is not None else ("gemma", "none")
    formulas = itertools.product(offsets, castings)
    return [Norm(False, eps, weight, None, *each) for each in formulas] + centered


def recognise_norm(module: torch.nn.Module) -> Norm:
    """Return the formula of a norm: the one with the most results of the module's bits, for random parameters.

    Some inputs are as small as the root of the epsilon, so that the epsilon shows.
    """
    eps = _epsilon(module)
    assert eps is not None
    own, device = dtype_and_device(module)
    # Castings differ in 16 bits alone; a model may be cast after it is patched.
    dtypes = [own] if own in FLOATS_OF_16_BITS else [own, torch.bfloat16]
    probes = [_Probe.of(module, eps, (dtype, device)) for dtype in dtypes]
    best, least = None, 1.0
    for formula in _candidates(eps, getattr(module, eps), list(dict(module.named_parameters()))):
        results = [probe.results(formula, getattr(module, eps)) for probe in probes]
        if any(max(map(distance, *each)) > RESOLUTION[dtype] for each, dtype in zip(results, dtypes, strict=True)):
            continue
        # A formula that rounds where the module does has more results with the module's bits.
        other_bits = float(sum((a != b).float().mean() for a, b in zip(*results[-1], strict=True)))
        if best is None or other_bits < least:
            best, least = formula, other_bits
    if best is None:
        raise KeepError("it computes neither a root mean square norm nor a layer norm of its last dimension")
    return best


class _Probe(NamedTuple):
    """Random inputs and parameters of a norm, and the module's results for them."""

    inputs: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]
    wanted: list[torch.Tensor]

    @classmethod
    def of(cls, module: torch.nn.Module, eps: str, like: tuple[torch.dtype, torch.device]) -> _Probe:
        """Draw inputs and parameters of a dtype, and run the module."""
        parameters = dict(module.named_parameters())
        size = _size(module, next(iter(parameters.values()), None))
        small = (getattr(module, eps) or torch.finfo(torch.float32).eps) ** 0.5
        with torch.no_grad():
            inputs = [normal((*_ROWS, size), like, scale) for scale in (1.0, small)]
            drawn = {name: normal((size,), like) for name in parameters}
            wanted = [torch.func.functional_call(module, drawn, (each,)) for each in inputs]
        if not all(isinstance(each, torch.Tensor) for each in wanted):
            raise KeepError("it does not return one tensor")
        return cls(inputs, drawn, wanted)

    @torch.no_grad()
    def results(self, formula: Norm, eps: float | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return a formula's results and the module's."""
        weight, bias = (self.parameters.get(name or "") for name in (formula.weight, formula.bias))
        return [formula(each, weight, bias, eps) for each in self.inputs], self.wanted


def check_norm(module: torch.nn.Module, formula: Norm, with_gradients: bool) -> None:
    """Raise KeepError unless a formula has the module's results and gradients, with the module's own parameters."""
    weight, bias = (getattr(module, name) if name else None for name in (formula.weight, formula.bias))
    x = normal((*_ROWS, _size(module, weight)), dtype_and_device(module))
    operands = [each for each in (x, weight, bias) if each is not None]
    eps = getattr(module, formula.eps)
    check_alike(lambda: formula(x, weight, bias, eps), lambda: module(x), operands, with_gradients)


def norm_forward(formula: Norm) -> Callable[..., Any]:
    """Return a forward that computes a formula, or calls the class's forward for what the formula does not serve."""
    eps_name, weight_name, bias_name = formula.eps, formula.weight, formula.bias

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = only_argument(args, kwargs)
        weight = getattr(self, weight_name) if weight_name else None
        if x is None or not _serves(x, weight):
            return type(self).forward(self, *args, **kwargs)
        bias = getattr(self, bias_name) if bias_name else None
        return formula(x, weight, bias, getattr(self, eps_name))

    return forward


def _serves(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Return whether the operator's result has the dtype of the module's; autocast makes layer norms float32.

    The operator has no sharding strategy for DTensors, which sequence parallelism gives to norms.
    """
    if is_sharded(x) or (weight is not None and is_sharded(weight)):
        return False
    if x.device.type != devices.current.type or (weight is not None and weight.dtype is not x.dtype):
        return False
    return x.dtype in RESOLUTION and (x.dtype is torch.float32 or not torch.is_autocast_enabled(x.device.type))
