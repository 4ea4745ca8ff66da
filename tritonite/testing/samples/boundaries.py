"""Operands at which formulas change: where a result jumps, ties, or ceases to be a number.

RULES changes the operands of a call, by operator. Samples have two such calls of each operator in the table, and the
fuzzer changes some of the calls that it draws.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from tritonite import dtypes
from tritonite.registry.schema import schemas

Arguments = dict[str, Any]
Rule = Callable[[random.Random, Arguments], Arguments]

_ZERO = (0.0, -0.0)
_UNIT = (*_ZERO, 1.0, -1.0)
_WHOLE = (*_UNIT, 2.0, -2.0, 3.0, -3.0, 10.0, -10.0, 100.0)
_HALF_INTEGERS = (0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 3.5, 100.5)
# Numbers halfway between two of bfloat16 or two of float16.
_MIDPOINTS = tuple(sign * (1 + odd / 2**bits) for sign in (1, -1) for odd in (1, 3) for bits in (8, 11))
# Floats to convert: half-integers, midpoints, the largest of float16, and numbers beyond narrow integers.
_CONVERTED = (*_HALF_INTEGERS, *_MIDPOINTS, 65504.0, 65520.0, -3.75, 300.25, -200.5)
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.bfloat16, torch.float16, torch.bool)
# Numbers whose sums lie halfway between two of bfloat16 or two of float16.
_SUMMANDS = (1.0, -1.0, 2.0, *(odd / 2**bits for odd in (1, 3, -1) for bits in (8, 11)))
_SHIFTS = (0, 1, -1, 7, 8, 15, 16, 31, 32, 63, 64)
_BASES = (*_UNIT, 2.0, -2.0, 3.0, 4.0, 9.0, 0.25, 27.0)
_EXPONENTS = (*_ZERO, 1.0, -1.0, 2.0, 3.0, -2.0, 0.5, -0.5, 0.25, 1 / 3)

# By operator: numbers at which its formula changes. Numbers among the call's arguments, such as bounds, are added.
NUMBERS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("ceil", "floor", "trunc", "frac", "sign", "sgn", "signbit", "angle", "abs", "neg"), _WHOLE),
    "round": _HALF_INTEGERS,
    **dict.fromkeys(("acos", "asin", "acosh", "atanh", "erfinv", "special_ndtri", "sinc"), _UNIT),
    **dict.fromkeys(("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "frexp", "exp", "expm1"), _UNIT),
    **dict.fromkeys(("special_entr", "xlogy", "special_xlog1py", "heaviside", "copysign", "nextafter", "atan2"), _UNIT),
    **dict.fromkeys(("lgamma", "digamma", "polygamma", "special_zeta", "igamma", "igammac"), _WHOLE),
    **dict.fromkeys(("relu", "leaky_relu", "elu", "celu", "_prelu_kernel", "threshold", "softplus"), _ZERO),
    **dict.fromkeys(("hardtanh", "hardshrink", "softshrink", "clamp", "clamp_min", "clamp_max"), _UNIT),
    **dict.fromkeys(("hardtanh_backward", "hardshrink_backward", "softshrink_backward"), _UNIT),
    **dict.fromkeys(("leaky_relu_backward", "threshold_backward", "elu_backward", "softplus_backward"), _ZERO),
    **dict.fromkeys(("hardsigmoid", "hardswish", "hardsigmoid_backward", "hardswish_backward"), (3.0, -3.0, *_ZERO)),
    "logit": (0.5, *_UNIT),
}
_NUMBERED = ("self", "input", "self_or_result")


def _tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in dtypes.NUMBERS


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**31


def _broadcast(a: torch.Size, b: torch.Size) -> bool:
    """Return whether two shapes broadcast."""
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def _picked(chooser: random.Random, values: torch.Tensor, shape: Any) -> torch.Tensor:
    """Make a tensor of a shape from elements of `values`."""
    count = torch.Size(shape).numel()
    indices = [chooser.randrange(len(values)) for _ in range(count)]
    return values[torch.tensor(indices, dtype=torch.int64, device=values.device)].reshape(shape)


def _with_neighbours(numbers: Any, like: torch.Tensor) -> torch.Tensor:
    """Convert numbers to the dtype of a tensor, floats with their neighbours, integers with the two extremes."""
    if like.is_floating_point():
        found = torch.tensor([float(x) for x in numbers], dtype=torch.float64).to(like.dtype)
        ends = [torch.full_like(found, end) for end in (-torch.inf, torch.inf)]
        return torch.cat([found, *[torch.nextafter(found, end) for end in ends]]).to(like.device)
    info = torch.iinfo(like.dtype)
    whole = [int(x) for x in numbers if math.isfinite(x) and x == int(x) and info.min <= x <= info.max]
    return torch.tensor([*whole, info.min, info.max], dtype=like.dtype, device=like.device)


def _at_numbers(chooser: random.Random, arguments: Arguments, numbers: tuple[float, ...]) -> Arguments:
    """Set the operand to the numbers, to numbers of the call and to their negatives."""
    name = next((name for name in _NUMBERED if _tensor(arguments.get(name))), None)
    if name is None:
        return arguments
    given = [x for x in arguments.values() if _number(x)]
    x, scale = arguments[name], arguments.get("decimals", 0)
    scaled = [y / 10.0**scale for y in numbers] if _number(scale) and abs(scale) < 9 else numbers
    return arguments | {name: _picked(chooser, _with_neighbours([*scaled, *given, *[-y for y in given]], x), x.shape)}


def _terms(chooser: random.Random, arguments: Arguments) -> Arguments:
    """Set operands so that results are halfway between two 16-bit floats, or wrap around as integers."""
    terms = {name: x for name, x in arguments.items() if name in ("self", "other") and _tensor(x)}
    return arguments | {name: _picked(chooser, _with_neighbours(_SUMMANDS, x), x.shape) for name, x in terms.items()}


def _quotients(chooser: random.Random, arguments: Arguments) -> Arguments:
    """Set the dividend to multiples of the divisor, rounded, or to neighbours of those."""
    x, y = arguments["self"], arguments["other"]
    divisor = y if _tensor(y) else torch.tensor(y) if _number(y) else None
    if not _tensor(x) or divisor is None or not _broadcast(x.shape, divisor.shape):
        return arguments
    shape, dtype = torch.broadcast_shapes(x.shape, divisor.shape), x.dtype
    if not dtype.is_floating_point and _tensor(y) and y.is_floating_point():
        dtype = y.dtype
    factors = _picked(chooser, torch.tensor([-7, -3, -1, 1, 2, 3, 10, 41], device=x.device), shape)
    divisor = divisor.to(x.device)
    multiple = (factors * (divisor.double() if dtype.is_floating_point else divisor)).to(dtype)
    if dtype.is_floating_point:
        ends = torch.tensor([-torch.inf, torch.inf], dtype=dtype, device=x.device)
        moved = torch.nextafter(multiple, _picked(chooser, ends, shape))
        multiple = torch.where(_picked(chooser, torch.tensor([True, False], device=x.device), shape), moved, multiple)
    return arguments | {"self": multiple}


def _conversions(chooser: random.Random, arguments: Arguments) -> Arguments:
    """Set floats to numbers that a narrow dtype rounds, truncates or cannot represent, and convert to that dtype."""
    name = "src" if "src" in arguments else "self"
    x, to = arguments[name], chooser.choice(_NARROW)
    if not _tensor(x) or not x.is_floating_point():
        return arguments
    changed = {name: _picked(chooser, _with_neighbours(_CONVERTED, x), x.shape)}
    if name == "src":
        return arguments | changed | {"self": arguments["self"].to(to)}
    return arguments | changed | {"dtype": to} if "dtype" in arguments else arguments | changed


def _powers(chooser: random.Random, arguments: Arguments) -> Arguments:
    """Set base and exponent so that powers are exact, or powers of 0 and 1."""

    def taken(name: str, numbers: tuple[float, ...]) -> Any:
        value = arguments[name]
        if _tensor(value):
            kept = numbers if value.is_floating_point() else [x for x in numbers if x == int(x) and x >= 0]
            return _picked(chooser, torch.tensor(kept, device=value.device).to(value.dtype), value.shape)
        return type(value)(chooser.choice(numbers)) if _number(value) else value

    return arguments | {"self": taken("self", _BASES), "exponent": taken("exponent", _EXPONENTS)}


def _shifts(chooser: random.Random, arguments: Arguments) -> Arguments:
    """Shift by 0, by a negative amount, and by as many bits as the dtype has."""
    by = arguments["other"]
    if not _tensor(by) or by.is_floating_point():
        return arguments
    return arguments | {"other": _picked(chooser, _with_neighbours(_SHIFTS, by), by.shape)}


def _ties(chooser: random.Random, arguments: Arguments, zeros: bool = False) -> Arguments:
    """Fill the operand with three of its elements, and with `zeros` also with zeros of both signs."""
    x = arguments["self"]
    if not _tensor(x) or not x.numel():
        return arguments
    few = torch.cat([x.flatten()[:3], torch.tensor(_ZERO, device=x.device).to(x.dtype)]) if zeros else x.flatten()[:3]
    return arguments | {"self": _picked(chooser, few, x.shape)}


def _equals(chooser: random.Random, arguments: Arguments) -> Arguments:
    """Make about half of the pairs equal."""
    x, y = arguments["self"], arguments["other"]
    if not (_tensor(x) and _tensor(y)) or x.shape != y.shape or x.device != y.device:
        return arguments
    both = _picked(chooser, torch.tensor([True, False], device=x.device), x.shape)
    return arguments | {"other": torch.where(both, x.to(y.dtype), y)}


def _keys(chooser: random.Random, arguments: Arguments) -> Arguments:
    """Search for the boundaries themselves, among equal ones."""
    name = "sorted_sequence" if "sorted_sequence" in arguments else "boundaries"
    bounds, x = arguments[name], arguments["self"]
    if not _tensor(bounds) or not bounds.numel() or not bounds.dim():
        return arguments
    if arguments.get("sorter") is None:
        bounds = _picked(chooser, bounds.flatten(), bounds.shape).sort(-1).values
    if _tensor(x):
        return arguments | {name: bounds, "self": _picked(chooser, bounds.flatten().to(x.device, x.dtype), x.shape)}
    return arguments | {name: bounds, "self": bounds.flatten()[0].item()}


def _are_exact(edges: list[float], dtype: torch.dtype) -> bool:
    """Return whether `dtype` holds the edges of bins of one width, and that width, without rounding."""
    exact = [Fraction(edges[0]) + Fraction(edges[-1] - edges[0]) * i / (len(edges) - 1) for i in range(len(edges))]
    held = torch.tensor([float(x) for x in (*exact, exact[1] - exact[0])], dtype=torch.float64).to(dtype).tolist()
    return [Fraction(x) for x in held] == [*exact, exact[1] - exact[0]]


def _edges(chooser: random.Random, arguments: Arguments) -> Arguments:
    """Set elements to edges of bins and their neighbours."""
    x, bins = arguments["self"], arguments["bins"]
    if not _tensor(x):
        return arguments
    if _tensor(bins) and bins.numel():
        edges = bins.flatten().tolist()
    elif type(bins) is int and 0 < bins < 1000:
        ends = arguments.get("range") or [arguments.get("min"), arguments.get("max")]
        given = len(ends) == 2 and all(map(_number, ends)) and ends[0] < ends[1]
        if "range" in arguments and not given:
            # The elements give the range, whose edges are rounded if neighbours of whole numbers are its ends.
            return arguments
        low, high = ends if given else (-2, 3)
        edges = [low + (high - low) * i / bins for i in range(bins + 1)]
        if "range" in arguments and not _are_exact(edges, x.dtype):
            # ATen's edges of a histogram are rounded by the vector width of the processor.
            edges = [low, high]
    else:
        return arguments
    return arguments | {"self": _picked(chooser, _with_neighbours(edges, x), x.shape)}


RULES: dict[str, Rule] = {
    **{name: functools.partial(_at_numbers, numbers=numbers) for name, numbers in NUMBERS.items()},
    **dict.fromkeys(("_to_copy", "copy"), _conversions),
    **dict.fromkeys(("add", "sub", "rsub", "mul"), _terms),
    **dict.fromkeys(("div", "floor_divide", "fmod", "remainder"), _quotients),
    **dict.fromkeys(("__lshift__", "__rshift__", "__ilshift__", "__irshift__"), _shifts),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), _shifts),
    # Other operators choose freely among zeros of either sign.
    "sort": functools.partial(_ties, zeros=True),
    **dict.fromkeys(("topk", "kthvalue", "median", "nanmedian", "mode"), _ties),
    **dict.fromkeys(("argmax", "argmin", "max", "min", "amax", "amin", "aminmax", "_aminmax"), _ties),
    **dict.fromkeys(("cummax", "cummin", "_cummax_helper", "_cummin_helper"), _ties),
    **dict.fromkeys(("_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive"), _ties),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "fmax", "fmin"), _equals),
    **dict.fromkeys(("searchsorted", "bucketize"), _keys),
    **dict.fromkeys(("histc", "histogram"), _edges),
    "pow": _powers,
}


_IN_LISTS = "_foreach_"
# Names of operators' arguments where those of their list operators have others.
_OWN_NAMES = {"scalar": "other", "scalars": "other"}


def _in_lists(chooser: random.Random, arguments: Arguments, rule: Rule) -> Arguments:
    """Change the operands at each index of lists as those of the operator that computes one tensor."""
    lists = {name: list(value) for name, value in arguments.items() if isinstance(value, (list, tuple))}
    for i in range(min(map(len, lists.values()), default=0)):
        given = {name: lists[name][i] if name in lists else value for name, value in arguments.items()}
        changed = rule(chooser, {_OWN_NAMES.get(name, name): value for name, value in given.items()})
        for name, items in lists.items():
            items[i] = changed[_OWN_NAMES.get(name, name)]
    return arguments | lists


RULES |= {
    f"{_IN_LISTS}{name}": functools.partial(_in_lists, rule=rule)
    for name, rule in RULES.items()
    if schemas(f"{_IN_LISTS}{name}") and name != "max"
}


def at_boundaries(packet: str, chooser: random.Random, arguments: Arguments) -> Arguments:
    """Change operands of a call, given by name, to values at which its operator decides."""
    return RULES[packet](chooser, arguments) if packet in RULES else arguments
