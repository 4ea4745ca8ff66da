"""A matcher of expressions in graphs of ATen's operators.

torch's own matchers are not used: that of Inductor takes seconds to import, and `torch.fx.subgraph_rewriter` knows
neither alternatives nor products and sums in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from tritonite.registry.schema import default_of, in_schema_order

aten = torch.ops.aten


@dataclass(frozen=True)
class Match:
    """The values of captures by name, and the nodes that an expression consists of."""

    values: Mapping[str, Any]
    nodes: frozenset[fx.Node] = frozenset()

    def including(self, node: fx.Node) -> Match:
        """Return the match with a further node."""
        return Match(self.values, self.nodes | {node})

    def bound(self, name: str, value: Any) -> Match | None:
        """Return the match with a capture, or None if the name already has another value."""
        if name in self.values:
            return self if self.values[name] is value else None
        return Match({**self.values, name: value}, self.nodes)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str) -> Any:
        """Return the value of a capture, or None if the match has taken an alternative without it."""
        return self.values.get(name)


@dataclass(frozen=True)
class Capture:
    """Any value, also a number. Captures of one name have one value."""

    name: str
    accepts: Callable[[Any], bool] = lambda value: True


@dataclass(frozen=True)
class Call:
    """A call of one of several overloads.

    Args:
        overloads: the overloads.
        args: patterns and constants for the first arguments. The others have their defaults.
        commutes: whether the first two arguments may change places.
        name: a name for the node.
    """

    overloads: tuple[OpOverload, ...]
    args: tuple[Any, ...]
    commutes: bool = False
    name: str = ""


@dataclass(frozen=True)
class Converted:
    """A pattern that may be converted to another dtype."""

    pattern: Any
    name: str = ""


@dataclass(frozen=True)
class Either:
    """One of several patterns."""

    patterns: tuple[Any, ...]


def add(a: Any, b: Any, name: str = "") -> Call:
    """Return the pattern of a sum with a tensor or a number."""
    return Call((aten.add.Tensor, aten.add.Scalar), (a, b), commutes=True, name=name)


def mul(a: Any, b: Any, name: str = "") -> Call:
    """Return the pattern of a product with a tensor or a number."""
    return Call((aten.mul.Tensor, aten.mul.Scalar), (a, b), commutes=True, name=name)


def arguments_of(node: fx.Node) -> list[Any]:
    """Return a value for each argument of a node's overload, in the schema's order, with defaults."""
    return in_schema_order(node.target._schema, node.args, node.kwargs)  # type: ignore[union-attr]


def conversion_source(value: Any) -> fx.Node | None:
    """Return the argument of a node that only converts it to another dtype, else None."""
    if not is_call(value, aten._to_copy.default, torch.ops.prims.convert_element_type.default):
        return None
    source, options = value.args[0], value.kwargs
    kept = options.get("memory_format") in (None, torch.preserve_format) and not options.get("pin_memory")
    before, after = source.meta["val"], value.meta["val"]
    return source if kept and before.device == after.device and before.layout is after.layout else None


def is_call(value: Any, *overloads: OpOverload) -> bool:
    """Return whether a value is a node that calls one of the overloads."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in overloads


def matches(pattern: Any, value: Any) -> Iterator[Match]:
    """Yield the matches of a pattern with a value."""
    return _extensions(pattern, value, Match({}))


def _extensions(pattern: Any, value: Any, match: Match) -> Iterator[Match]:
    """Yield the matches of a pattern with a value that extend a match."""
    if isinstance(pattern, Capture):
        found = match.bound(pattern.name, value) if pattern.accepts(value) else None
        if found is not None:
            yield found
    elif isinstance(pattern, Either):
        for each in pattern.patterns:
            yield from _extensions(each, value, match)
    elif isinstance(pattern, Converted):
        source = conversion_source(value)
        if source is not None:
            named = match.bound(pattern.name, value) if pattern.name else match
            if named is not None:
                yield from _extensions(pattern.pattern, source, named.including(value))
        yield from _extensions(pattern.pattern, value, match)
    elif isinstance(pattern, Call):
        yield from _matches_of_call(pattern, value, match)
    elif not isinstance(value, fx.Node) and type(value) in (type(pattern), int, float) and value == pattern:
        yield match


def _matches_of_call(pattern: Call, value: Any, match: Match) -> Iterator[Match]:
    if not is_call(value, *pattern.overloads):
        return
    given = arguments_of(value)
    count = len(pattern.args)
    defaults = [default_of(argument) for argument in value.target._schema.arguments[count:]]
    if given[count:] != defaults:
        return
    named = match.bound(pattern.name, value) if pattern.name else match
    if named is None:
        return
    start = named.including(value)
    orders = [pattern.args]
    if pattern.commutes:
        first, second, *others = pattern.args
        orders.append((second, first, *others))
    for order in orders:
        yield from _matches_of_each(order, given, start)


def _matches_of_each(patterns: tuple[Any, ...], values: list[Any], match: Match) -> Iterator[Match]:
    if not patterns:
        yield match
        return
    for found in _extensions(patterns[0], values[0], match):
        yield from _matches_of_each(patterns[1:], values[1:], found)


def tensor(value: Any) -> torch.Tensor | None:
    """Return the fake tensor of a node, or None for a number, and for a node that is no tensor."""
    fake = value.meta.get("val") if isinstance(value, fx.Node) else None
    return fake if isinstance(fake, torch.Tensor) else None


def is_tensor(value: Any) -> bool:
    """Return whether a value is a node of a tensor."""
    return tensor(value) is not None


def is_number(value: Any) -> bool:
    """Return whether a value is a Python number."""
    return type(value) in (int, float)
