"""Nested kernel arguments: tuples and NamedTuples, flattened to leaves and nested again.

A NamedTuple keeps its type everywhere, because a kernel reads its fields by name. Triton's code generator takes the
names from the signature, and its interpreter from the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def retyped(original: tuple[Any, ...], items: Sequence[Any]) -> tuple[Any, ...]:
    """Return `items` as a NamedTuple of the type of `original`, or as a plain tuple if `original` is no NamedTuple."""
    return type(original)(*items) if hasattr(original, "_fields") else tuple(items)


def flatten(kinds: tuple[Any, ...], values: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the leaves of nested argument tuples, without constexprs. `kinds` has their Triton types, nested alike."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from flatten(kind, value)
        elif kind != "constexpr":
            yield value


def nest(kinds: Any, constants: Any, flat: Iterator[Any]) -> Any:
    """Nest the leaves in `flat` like `kinds`, the reverse of `flatten`.

    `constants`, nested alike, gives the constexprs.
    """
    if not isinstance(kinds, tuple):
        return constants if kinds == "constexpr" else next(flat)
    return retyped(kinds, [nest(kind, constants and constants[i], flat) for i, kind in enumerate(kinds)])
