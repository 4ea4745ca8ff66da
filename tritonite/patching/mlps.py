"""Gated feed-forward layers, recognised by the shapes of their linears and by what they compute."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.nn.gated import ACTIVATIONS, GATED
from tritonite.patching.rebind import only_argument
from tritonite.patching.report import KeepError
from tritonite.patching.samples import RESOLUTION, check_alike, distance, normal, required_arguments
from tritonite.runtime.sharding import is_sharded

_ROWS = (2, 3)


class GatedLayer(NamedTuple):
    """The formula of a gated layer, and the names of its parts. Without `up`, `gate` computes both halves.

    `up_first` says that the first half of what `gate` computes is the factor, and the second half is activated.
    """

    gate: str
    up: str | None
    down: str
    activation: str
    up_first: bool = False
    dropout: str | None = None

    @property
    def operator(self) -> str:
        """Return the call as a report shows it."""
        return f"fused {self.activation} and product: {self.down}(act({self.gate}) * {self.up or 'its other half'})"

    def __call__(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's result. Linears are called as modules, so that their adapters and hooks take part."""
        gate = getattr(module, self.gate)(x)
        # The operators have no sharding strategy for DTensors.
        function = functools.partial(_gated, self.activation) if is_sharded(gate) else GATED[self.activation]
        if self.up is not None:
            hidden = function(gate, getattr(module, self.up)(x))
        elif self.up_first:
            up, gate = gate.chunk(2, -1)
            hidden = function(gate, up)
        else:
            hidden = function(gate)
        if self.dropout is not None:
            hidden = getattr(module, self.dropout)(hidden)
        result: torch.Tensor = getattr(module, self.down)(hidden)
        return result


def _gated(activation: str, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Return what the operator of an activation returns, by torch's operators."""
    if y is None:
        x, y = x.chunk(2, -1)
    return ACTIVATIONS[activation](x) * y


def _linears(module: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Return (in_features, out_features) of the children that have both, by name: linears, and adapters of linears."""
    found = {}
    for name, each in module.named_children():
        inputs, outputs = getattr(each, "in_features", None), getattr(each, "out_features", None)
        if isinstance(inputs, int) and isinstance(outputs, int):
            found[name] = inputs, outputs
    return found


def looks_like_gated_mlp(module: torch.nn.Module) -> bool:
    """Return whether a module takes one argument, and has a gated layer's linears and nothing else that is learned.

    Linears that are all square need an activation beside them, because attention has such linears, too.
    """
    linears = _linears(module)
    if len(linears) not in (2, 3) or next(module.parameters(recurse=False), None) is not None:
        return False
    others = [each for name, each in module.named_children() if name not in linears]
    if any(next(each.parameters(), None) is not None for each in others):
        return False
    if next(_roles(linears), None) is None or required_arguments(module.forward) != 1:
        return False
    square = all(inputs == outputs for inputs, outputs in linears.values())
    return not square or bool(_own_activations(module, linears))


def _roles(linears: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str | None, str, bool]]:
    """Yield (gate, up, down, up_first) for each way in which shapes fit."""
    for names in itertools.permutations(linears):
        sizes = [linears[name] for name in names]
        if len(names) == 3 and sizes[0] == sizes[1] == sizes[2][::-1]:
            yield names[0], names[1], names[2], False
        if len(names) == 2 and sizes[0] == (sizes[1][1], 2 * sizes[1][0]):
            yield names[0], None, names[1], False
            yield names[0], None, names[1], True


def activations_of(module: torch.nn.Module, linears: dict[str, tuple[int, int]]) -> list[str]:
    """Return the names of activations that the module's own parts compute; all names if none does."""
    return _own_activations(module, linears) or list(ACTIVATIONS)


def _own_activations(module: torch.nn.Module, linears: dict[str, tuple[int, int]]) -> list[str]:
    """Return the names of activations that the module's own parts compute, in float64."""
    children = [each for name, each in module.named_children() if name not in linears]
    parts = [*children, *(value for value in vars(module).values() if callable(value))]
    x = torch.linspace(-4, 4, 33, dtype=torch.float64, device=next(module.parameters()).device)
    found = []
    for part in parts:
        if isinstance(part, torch.nn.Dropout):
            continue
        try:
            result = part(x)
        except Exception:  # noqa: BLE001 - any callable among the attributes is tried
            continue
        if isinstance(result, torch.Tensor):
            found += [name for name, each in ACTIVATIONS.items() if distance(result, each(x)) < 1e-12]
    return found


def _dtype(module: torch.nn.Module, linears: dict[str, tuple[int, int]]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and the device of the inputs of a layer; quantised weights take the default dtype."""
    weight = getattr(module.get_submodule(next(iter(linears))), "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise KeepError(f"its linear {next(iter(linears))!r} has no weight to take a dtype from")
    return weight.dtype if weight.dtype in RESOLUTION else torch.get_default_dtype(), weight.device


def recognise_gated_mlp(module: torch.nn.Module) -> GatedLayer:
    """Return the formula of a layer: the one nearest to the module's results for random inputs, in float32 or wider."""
    linears = _linears(module)
    dtype, device = _dtype(module, linears)
    wide = torch.promote_types(dtype, torch.float32)
    x = normal((*_ROWS, _inputs(linears)), (wide, device)).detach()
    # Parameters in float32 tell the exact gelu from its approximation, which 16 bits do not.
    drawn = {name: each.detach().to(wide) for name, each in module.named_parameters() if each.is_floating_point()}
    with torch.no_grad():
        wanted = torch.func.functional_call(module, drawn, (x,))
        best, least = None, RESOLUTION[wide]
        for (gate, up, down, up_first), activation in itertools.product(
            _roles(linears), activations_of(module, linears)
        ):
            formula = GatedLayer(gate, up, down, activation, up_first)
            found = torch.func.functional_call(_Formula(module, formula), _prefixed(drawn), (x,))
            if isinstance(wanted, torch.Tensor) and (apart := distance(found, wanted)) < least:
                best, least = formula, apart
    if best is None:
        raise KeepError(f"it is not a product of {', '.join(ACTIVATIONS)} of one linear and another linear")
    return best


class _Formula(torch.nn.Module):
    """A module that computes a formula with another module's parts."""

    def __init__(self, module: torch.nn.Module, formula: GatedLayer) -> None:
        super().__init__()
        self.module, self.formula = module, formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(self.module, x)


def _prefixed(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"module.{name}": each for name, each in parameters.items()}


def _inputs(linears: dict[str, tuple[int, int]]) -> int:
    """Return the size of the layer's input, which is the narrowest linear's input if shapes leave a choice."""
    gate, *_ = next(_roles(linears))
    return linears[gate][0]


def with_dropout(module: torch.nn.Module, formula: GatedLayer) -> list[GatedLayer]:
    """Return the formula with each place where a dropout of the module may act: none, or on the product."""
    dropouts = [name for name, each in module.named_children() if isinstance(each, torch.nn.Dropout)]
    return [formula, *(formula._replace(dropout=name) for name in dropouts)]


def has_randomness(module: torch.nn.Module) -> bool:
    """Return whether a module draws random numbers in training."""
    return any(getattr(each, "p", 0) for each in module.modules())


def check_gated_mlp(module: torch.nn.Module, formula: GatedLayer, with_gradients: bool) -> None:
    """Raise KeepError unless a formula has the module's results and gradients by the input, in the module's dtype."""
    linears = _linears(module)
    x = normal((*_ROWS, _inputs(linears)), _dtype(module, linears))
    check_alike(lambda: formula(module, x), lambda: module(x), [x], with_gradients)


def gated_mlp_forward(formula: GatedLayer) -> Callable[..., Any]:
    """Return a forward that computes a formula, or calls the class's forward for what the formula does not serve."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = only_argument(args, kwargs)
        if x is None or x.device.type != devices.current.type or x.dtype not in RESOLUTION:
            return type(self).forward(self, *args, **kwargs)
        return formula(self, x)

    return forward
