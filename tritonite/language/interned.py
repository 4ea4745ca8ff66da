"""Triton's types as the interpreter needs them: made once for each element type and shape, not in every operation.

Each function returns a faster version of the method of Triton's that it is given, with the same results.
`runtime/interpreter.py` installs them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl

# Types that are kept, before all are forgotten: pointers' types are new in each launch.
_MOST_TYPES = 4096
# Types of one shape that a block type keeps by element type.
_MOST_OTHERS = 64


def block_type(own: Callable[..., None]) -> Callable[..., None]:
    """Return `block_type.__init__` that copies the fields of an equal type, made before."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def initialise(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        # The fields hold the element type, so that no other object has its address.
        key = (
            id(element_ty),
            *[size if size.__class__ is int else tl.core._unwrap_if_constexpr(size) for size in shape],
        )
        fields = known.get(key)
        if fields is not None:
            self.__dict__.update(fields)
            return
        own(self, element_ty, shape)
        self.others = {}
        if len(known) >= _MOST_TYPES:
            known.clear()
        known[key] = vars(self)

    return initialise


def with_element_ty(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return `block_type.with_element_ty` that keeps the type it returned for an element type."""

    @functools.wraps(own)
    def replaced(self: tl.block_type, scalar_ty: tl.dtype) -> tl.block_type:
        others = self.__dict__.get("others")
        if others is None:
            return own(self, scalar_ty)
        found = others.get(id(scalar_ty))
        if found is None or found.element_ty is not scalar_ty:
            if len(others) >= _MOST_OTHERS:
                others.clear()
            found = others[id(scalar_ty)] = own(self, scalar_ty)
        return found

    return replaced


def tensor(own: Callable[..., None]) -> Callable[..., None]:
    """Return `tensor.__init__` that takes the shape and number of elements from an earlier tensor of the type.

    Block types keep them. Other types are part of records that are copied deeply, and have one shape.
    """
    scalar: list[Any] = []

    def initialise(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        if type.__class__ is tl.block_type:
            fields, dtype = type.__dict__.get("tensor_fields"), type.element_ty
        else:
            fields, dtype = scalar, type.scalar
        if fields:
            self.shape, self.numel = fields
            self.handle, self.type, self.dtype = handle, type, dtype
            return
        own(self, handle, type)
        if type.is_block():
            type.tensor_fields = [self.shape, self.numel]
        else:
            scalar[:] = [self.shape, self.numel]

    return initialise


def equality(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a type's `__eq__` that compares a type with itself at once."""

    def equal(self: tl.dtype, other: object) -> Any:
        return True if self is other else own(self, other)

    return equal


def unwrap(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `_unwrap_if_constexpr` that returns values of the most frequent types at once."""
    plain = {int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.pointer_type, tl.block_type}

    def _unwrap_if_constexpr(value: Any) -> Any:
        return value if value.__class__ in plain else own(value)

    return _unwrap_if_constexpr


def patch_builtins(patch_one: Callable[..., None]) -> Callable[..., None]:
    """Return the interpreter's `_patch_builtin` that lists a module's builtins once, not in every launch."""
    known: dict[Any, list[str]] = {}

    def builtins(owner: Any) -> Iterator[tuple[str, Any]]:
        if owner not in known:
            known[owner] = [name for name, member in inspect.getmembers(owner) if callable(member)]
        for name in known[owner]:
            member = getattr(owner, name, None)
            if tl.core.is_builtin(member):
                yield name, member

    def _patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(owner):
            patch_one(owner, name, member, builder, scope)

    return _patch_builtin
