"""Lists of tensors: mixed sizes, layouts, addresses and dtypes, and lists of numbers of mixed types."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from tritonite import devices
from tritonite.registry import Op, declarations
from tritonite.testing.samples import arithmetic, conditional, facts  # noqa: F401 - their facts hold for lists, too

_PREFIX = "_foreach_"
# How many tensors the lists of a layout have; 3 where the layout is not named.
_LENGTHS = {"contiguous": 1, "broadcast": 5, "misaligned": 12, "zero_dim": 40}
# The shapes of the tensors that follow the layout's own.
_SHAPES: tuple[tuple[int, ...], ...] = ((17,), (), (0, 3), (1,), (5, 4), (301,), (2, 3, 4), (1, 1), (0,), (33, 2))
# The ways in which these tensors lie in memory.
_WAYS = ("dense", "odd", "permuted", "strided")
# Dtypes that stand next to a list's own.
_OTHERS = {
    torch.float32: torch.float16,
    torch.float16: torch.bfloat16,
    torch.bfloat16: torch.float32,
    torch.float64: torch.float32,
    torch.int32: torch.int64,
    torch.int64: torch.int8,
}
_FLOATS = (0.75, 2, -1.5, True, 3.0, 0.5)
_INTEGERS = (2, 3, 1, True, 5)

for _table in (facts.ZERO_SIGN_UNDEFINED, facts.NAN_UNDEFINED):
    _table |= {
        f"{_PREFIX}{name}" for name in ("clamp_max", "clamp_min", "maximum", "minimum", "lerp") if name in _table
    }


def _taken(x: torch.Tensor, shape: tuple[int, ...], start: int) -> torch.Tensor:
    """Return a tensor of a shape with elements of x, from `start` on and over again."""
    count = math.prod(shape)
    if not count or not x.numel():
        return torch.full(shape, 1, dtype=x.dtype, device=x.device)
    indices = (torch.arange(count) + start) % x.numel()
    return x.flatten()[indices.to(x.device)].reshape(shape)


def placed(x: torch.Tensor, way: str) -> torch.Tensor:
    """Return the elements of x in another place: at an odd offset, with permuted strides, or with gaps."""
    if way == "odd":
        room = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    elif way == "permuted":
        room = x.new_empty(x.shape[::-1]).permute(*reversed(range(x.dim())))
    elif way == "strided":
        room = x.new_empty((*x.shape, 2))[..., 1]
    else:
        return x.clone()
    return room.copy_(x)


def listed(x: torch.Tensor, label: str, start: int) -> list[torch.Tensor]:
    """Return a list with a layout's tensor and with others; lists of all arguments fit together.

    `start` differs from argument to argument, so that the elements do.
    """
    found = [x]
    ways = itertools.cycle(_WAYS)
    for i in range(_LENGTHS.get(label, 3) - 1):
        own = _taken(x, _SHAPES[i % len(_SHAPES)], start + i)
        if i % 5 == 1:
            own = own.to(_OTHERS.get(x.dtype, x.dtype))
        found.append(placed(own, next(ways)))
    return found


def numbers(dtype: torch.dtype, count: int) -> list[Any]:
    """Return numbers of mixed types that ATen takes for a tensor of a dtype."""
    if dtype is torch.bool:
        return [True] * count
    return list(itertools.islice(itertools.cycle(_FLOATS if dtype.is_floating_point else _INTEGERS), count))


@facts.lists("foreach")
def _arguments(op: Op, label: str, tensors: facts.Tensors) -> dict[str, Any]:
    """Return the arguments of a call that are lists, or a tensor for all tensors of the lists."""
    label, dtype = label.partition(" ")[0], tensors[0].dtype
    found: dict[str, Any] = {}
    count = _LENGTHS.get(label, 3)
    operands = iter(tensors)
    for argument in op.schema.arguments:
        kind = str(argument.type)
        if argument.name in op.out_names:
            continue
        if kind == "List[Tensor]":
            found[argument.name] = listed(next(operands), label, 3 * len(found))
        elif kind == "List[number]":
            found[argument.name] = numbers(dtype, count)
        elif kind == "Tensor" and argument.name == "scalars":
            found[argument.name] = torch.tensor([float(x) for x in numbers(dtype, count)]).to(dtype)
        elif kind == "Tensor":
            found[argument.name] = torch.tensor(2, dtype=dtype, device=devices.current.type)
    return found


@facts.drawn("_foreach_pow")
def _known_parities(arguments: dict[str, Any]) -> dict[str, Any]:
    """Limit exponents as those of `pow`."""

    def limited(exponent: Any) -> Any:
        return facts.DRAWN["pow"]({"exponent": exponent})["exponent"]

    exponent = arguments["exponent"]
    return arguments | {"exponent": [*map(limited, exponent)] if isinstance(exponent, list) else limited(exponent)}


@facts.terms(
    *{packet for declaration in declarations if declaration.family == "foreach" for packet in declaration.packets}
)
def _one_term(sums: facts.Sums) -> float:
    """Return 1, because an element of a result is computed from one element of each list."""
    return 1.0
