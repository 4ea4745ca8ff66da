"""Inputs for an overload made from its schema: layouts, broadcasts, numbers, extreme values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tritonite.catalog import Op

_EXTREMES = (0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 3e38, 0.5, 1e-3, 2.5, -7.0)
# What ATen does with nan on the CPU is not defined: its loops over vectors and over single elements differ, or return
# what an uninitialised variable held. nan is left out of their samples there.
NAN_UNDEFINED = {
    "elu_backward",
    "hardshrink_backward",
    "hardswish_backward",
    "hardtanh_backward",
    "logit_backward",
    "softshrink_backward",
    "special_chebyshev_polynomial_t",
    "special_chebyshev_polynomial_u",
    "special_chebyshev_polynomial_v",
    "special_chebyshev_polynomial_w",
    "special_hermite_polynomial_h",
    "special_hermite_polynomial_he",
    "special_laguerre_polynomial_l",
    "special_legendre_polynomial_p",
    "special_shifted_chebyshev_polynomial_t",
    "special_shifted_chebyshev_polynomial_u",
    "special_shifted_chebyshev_polynomial_v",
    "special_shifted_chebyshev_polynomial_w",
}
# The same two loops of ATen give zeros of different sign.
ZERO_SIGN_UNDEFINED = {
    "_add_relu",
    "fmax",
    "fmin",
    "hardtanh",
    "lerp",
    "log_sigmoid_backward",
    "relu",
    "relu6",
    "softshrink",
}
_INTEGERS = {"dim": -1, "reduction": 1, "n": 2, "p": 1, "decimals": 1}
# Parts of others, which hand them a dimension from 0 and no tensor without dimensions or elements.
_PARTS = {"_cummax_helper", "_cummin_helper"}
_STRINGS = {"approximate": ("none", "tanh"), "rounding_mode": (None, "trunc", "floor")}


@dataclass(frozen=True)
class Sample:
    """Positional and keyword arguments of one call, without its outputs."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Any) -> Sample:
        """The same call with `function` applied to every argument."""
        kwargs = {name: function(value) for name, value in self.kwargs.items()}
        return Sample(self.label, tuple(map(function, self.args)), kwargs)


def _layouts(make: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Four operands each, broadcastable to the first."""
    yield "contiguous", [make(6, 10) for _ in range(4)]
    yield "transposed", [make(6, 10), make(10, 6).t(), make(6, 10), make(10, 6).t()]
    yield "broadcast", [make(4, 20, 36), make(36), make(20, 1), make(4, 1, 1)]
    yield "sliced", [make(13, 40)[::2, 1::2], make(7, 41)[:, 1::2], make(7, 20), make(7, 20)]
    yield "misaligned", [make(101)[1:] for _ in range(4)]
    yield "channels_last", [make(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(4)]
    yield "empty", [make(0, 3) for _ in range(4)]
    yield "zero_dim", [make() for _ in range(4)]


def values(dtype: torch.dtype, device: str, generator: torch.Generator) -> Any:
    """What makes tensors of a shape: floats from -3 to 3, integers of one digit, drawn where the generator is."""
    place = generator.device

    def make(*shape: int) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=generator, device=place).to(device, dtype)
        if not dtype.is_floating_point:
            low = 0 if dtype is torch.uint8 else -9
            return torch.randint(low, 10, shape, generator=generator, device=place).to(device, dtype)
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device=place)
        return (drawn * 6 - 3).to(device, dtype)

    return make


def samples(op: Op, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Iterator[Sample]:
    """Calls of an overload with `dtype` tensors; which of them ATen accepts is for the caller to find out."""
    generator = torch.Generator().manual_seed(seed)
    make = values(dtype, device, generator)
    for label, tensors in _layouts(make):
        if op.inplace and label == "broadcast":
            tensors[0] = tensors[0].clone()
        yield from calls(op, label, tensors)
    if dtype.is_floating_point:
        skip_nan = device == "cpu" and op.packet in NAN_UNDEFINED
        extremes = [value for value in _EXTREMES if value == value or not skip_nan]
        line = torch.tensor(extremes, dtype=torch.float64).to(device, dtype)
        grid = [line[:, None].repeat(1, len(line)), line[None, :].repeat(len(line), 1)]
        yield from calls(op, "extreme", [*grid, grid[0].flip(0).contiguous(), grid[1].flip(1).contiguous()])


def calls(op: Op, label: str, tensors: list[torch.Tensor]) -> Iterator[Sample]:
    """The calls of an overload that take `tensors` for its tensor arguments, in order, for every string and flag."""
    if op.packet in _PARTS and not (tensors[0].dim() and tensors[0].numel()):
        return
    choices = next((_STRINGS[name] for name in op.names if name in _STRINGS), (None,))
    booleans = (False, True) if any(str(argument.type) == "bool" for argument in op.schema.arguments) else (False,)
    for choice in choices:
        for boolean in booleans:
            remaining = list(tensors)
            args: list[Any] = []
            kwargs: dict[str, Any] = {}
            for argument in op.schema.arguments:
                if argument.name in op.out_names:
                    continue
                if argument.alias_info is not None and argument.alias_info.is_write and args:
                    # A destination that is no keyword has the first tensor's shape.
                    kind = torch.int64 if argument.name == "indices" else args[0].dtype
                    value = torch.zeros(args[0].shape, dtype=kind, device=args[0].device)
                elif op.packet in _PARTS and argument.name == "dim":
                    value = args[0].dim() - 1
                else:
                    value = _argument(argument, remaining, choice, boolean)
                if argument.kwarg_only:
                    kwargs[argument.name] = value
                else:
                    args.append(value)
            yield Sample(f"{label} {choice or ''}{boolean or ''}".strip(), tuple(args), kwargs)


def _argument(argument: Any, tensors: list[torch.Tensor], choice: str | None, boolean: bool) -> Any:
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        tensor = tensors.pop(0) if len(tensors) > 1 else tensors[0]
        if argument.name in ("mask", "condition"):
            return tensor.nan_to_num() > 0 if tensor.is_floating_point() else tensor > 0
        if argument.name == "n" and tensor.is_floating_point():
            # A degree: ATen's CUDA kernels take 2^63 steps for an infinite one. In place, for the layout's sake.
            return tensor.clamp_(max=1000)
        if argument.name == "value":
            return torch.tensor(2, dtype=tensor.dtype, device=tensor.device)
        return tensor
    if kind in ("Optional[str]", "str"):
        return choice
    if kind == "bool":
        return boolean
    if kind == "int":
        # A dtype is an int in schemas.
        return tensors[0].dtype if argument.name == "dtype" else _INTEGERS[argument.name]
    if kind in ("Optional[int]", "List[int]", "Optional[List[int]]"):
        place = None if argument.name == "dtype" else -1 if tensors[0].dim() else 0
        return [place] if "List" in kind and place is not None else place
    number = 2 if not tensors[0].is_floating_point() else 0.75
    return True if tensors[0].dtype is torch.bool else number
