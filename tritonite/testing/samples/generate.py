"""Example calls of an overload, made from its schema: layouts, broadcasts, numbers, extreme values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite.registry import Op
from tritonite.registry.schema import is_out
from tritonite.testing.samples import facts
from tritonite.testing.samples.boundaries import RULES, at_boundaries

_EXTREMES = (0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 3e38, 0.5, 1e-3, 2.5, -7.0)


@dataclass(frozen=True)
class Sample:
    """The positional and keyword arguments of one call, without its outputs."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Any) -> Sample:
        """Return the call with `function` applied to every argument and to the items of lists."""
        args, kwargs = pytree.tree_map(function, (self.args, self.kwargs))
        return Sample(self.label, args, kwargs)

    def named(self, op: Op) -> dict[str, Any]:
        """Return all arguments by the schema's names."""
        positional = [a.name for a in op.schema.arguments if not (a.kwarg_only or is_out(a))]
        return {**dict(zip(positional, self.args, strict=False)), **self.kwargs}

    def changed(self, op: Op, arguments: dict[str, Any]) -> Sample:
        """Return the call with other values of its arguments, given by name."""
        values = [arguments[name] for name in list(self.named(op))[: len(self.args)]]
        return Sample(self.label, tuple(values), {name: arguments[name] for name in self.kwargs})


def _layouts(make: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield labelled layouts of four operands that broadcast to the first."""
    yield "contiguous", [make(6, 10) for _ in range(4)]
    yield "transposed", [make(6, 10), make(10, 6).t(), make(6, 10), make(10, 6).t()]
    yield "broadcast", [make(4, 20, 36), make(20, 1), make(36), make(4, 1, 1)]
    yield "sliced", [make(13, 40)[::2, 1::2], make(7, 41)[:, 1::2], make(7, 20), make(7, 20)]
    yield "misaligned", [make(101)[1:] for _ in range(4)]
    yield "channels_last", [make(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(4)]
    yield "empty", [make(0, 3) for _ in range(4)]
    yield "zero_dim", [make() for _ in range(4)]


def values(dtype: torch.dtype, device: str, generator: torch.Generator) -> Any:
    """Return a function that makes tensors of a shape: floats from -3 to 3, or integers of one digit.

    Values are drawn on the generator's device.
    """
    source = generator.device

    def make(*shape: int) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=generator, device=source).to(device, dtype)
        if not dtype.is_floating_point:
            low = 0 if dtype is torch.uint8 else -9
            return torch.randint(low, 10, shape, generator=generator, device=source).to(device, dtype)
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device=source)
        return (drawn * 6 - 3).to(device, dtype)

    return make


def samples(op: Op, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Iterator[Sample]:
    """Yield calls of an overload with `dtype` tensors. ATen may refuse some of them."""
    generator = torch.Generator().manual_seed(seed)
    make = values(dtype, device, generator)
    for label, tensors in _layouts(make):
        if op.inplace and label == "broadcast":
            tensors[0] = tensors[0].clone()
        yield from calls(op, label, tensors)
    if op.packet in facts.LAYOUTS:
        for label, tensors in facts.LAYOUTS[op.packet](op, make):
            yield from calls(op, label, tensors)
    if op.packet in RULES:
        chooser = random.Random(seed)
        for turn in range(2):
            for sample in calls(op, f"boundaries-{turn}", [make(6, 10) for _ in range(4)]):
                changed = at_boundaries(op.packet, chooser, sample.named(op))
                yield sample.changed(op, facts.DRAWN.get(op.packet, dict)(changed))
    if dtype.is_floating_point:
        skip_nan = device == "cpu" and op.packet in facts.NAN_UNDEFINED
        extremes = [value for value in _EXTREMES if value == value or not skip_nan]
        line = torch.tensor(extremes, dtype=torch.float64)
        grid = [line[:, None].repeat(1, len(line)), line[None, :].repeat(len(line), 1)]
        grid += [grid[0].flip(0), grid[1].flip(1)]
        yield from calls(op, "extreme", [x.to(device, dtype) for x in grid])


def calls(op: Op, label: str, tensors: list[torch.Tensor]) -> Iterator[Sample]:
    """Yield calls of an overload with `tensors` as its tensor arguments, in order, for every choice and flag."""
    special = facts.ARGUMENTS[op.packet](tensors) if op.packet in facts.ARGUMENTS else {}
    if special is None:
        return
    if op.family in facts.LISTS:
        special = facts.LISTS[op.family](op, label, tensors) | special
    choices: tuple[Any, ...] = next((facts.CHOICES[name] for name in op.names if name in facts.CHOICES), ())
    flags: tuple[Any, ...] = ()
    if any(str(argument.type) == "bool" for argument in op.schema.arguments):
        flags = facts.FLAGS.get(op.overload, (False, True))
    for choice in choices or (None,):
        for flag in flags or (False,):
            operands = tensors
            if op.packet in facts.OPERANDS:
                made = facts.OPERANDS[op.packet](op, tensors, choice)
                if made is None:
                    continue
                operands = made
            words = [label, *([str(choice)] if choices else []), *([str(flag)] if flags else [])]
            yield _call(op, " ".join(words), special, list(operands), choice, flag)


def _call(op: Op, label: str, special: dict[str, Any], tensors: list[torch.Tensor], choice: Any, flag: bool) -> Sample:
    """Return one call: `special` arguments by name, and the other tensors from `tensors` in order."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op.schema.arguments:
        if argument.name in op.out_names:
            continue
        if argument.name in special:
            value = special[argument.name]
        elif argument.name == "device":
            value = tensors[0].device
        elif argument.alias_info is not None and argument.alias_info.is_write and args:
            # A positional output has the first tensor's shape.
            kind = torch.int64 if argument.name == "indices" else args[0].dtype
            value = torch.zeros(args[0].shape, dtype=kind, device=args[0].device)
        else:
            value = _argument(argument, tensors, choice, flag)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Sample(label, tuple(args), kwargs)


def _argument(argument: Any, tensors: list[torch.Tensor], choice: Any, flag: bool) -> Any:
    kind = str(argument.type)
    if argument.name in facts.CHOICES:
        return choice
    if kind in ("Tensor", "Optional[Tensor]"):
        tensor = tensors.pop(0) if len(tensors) > 1 else tensors[0]
        if "Optional" in kind and choice == 2:
            # The choice 2 is the reduction "sum", which is tried without weights.
            return None
        return facts.TENSORS[argument.name](tensor) if argument.name in facts.TENSORS else tensor
    if kind == "bool":
        return flag
    if argument.name in facts.OPTIONS and kind.startswith("Optional"):
        return None
    if kind == "int":
        # Schemas call a dtype an int.
        return tensors[0].dtype if argument.name.endswith("dtype") else facts.INTEGERS[argument.name]
    if kind in ("Optional[int]", "List[int]", "Optional[List[int]]"):
        dim = -1 if tensors[0].dim() else 0
        return [dim] if "List" in kind else dim
    number = 2 if not tensors[0].is_floating_point() else 0.75
    return True if tensors[0].dtype is torch.bool else number
