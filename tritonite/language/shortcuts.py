"""Shorter ways through Triton's interpreter for operands that need no conversion, with the same results.

Most operations of a kernel have two operands of one dtype, or one and a number. Triton checks, casts and splats each
operand first, which takes many times as long as NumPy's function. `runtime/interpreter.py` installs these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_FLOATS = frozenset(("fp16", "fp32", "fp64"))
# NumPy has these dtypes. It has neither bfloat16 nor float8, and computes differently with bools.
_PLAIN = _INTEGERS | _FLOATS
_BITS = _INTEGERS | {"int1"}
_TYPES = {each.name: each for each in (tl.int1, tl.float16, tl.float32, tl.float64)} | {
    f"{sign}int{bits}": getattr(tl, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
}
# Numbers that are kept as arrays, and tuples without constexprs, before all are forgotten.
_MOST_KEPT = 4096

_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@functools.lru_cache(maxsize=1)
def operators(tensor: type, semantic: Any) -> dict[str, Callable[..., Any]]:
    """Return operators of `tensor` by their methods' names; each calls the method that `tensor` has if it has to."""
    found = {}
    for served, functions in ((_PLAIN, _ARITHMETIC), (_PLAIN, _COMPARISONS), (_BITS, _BITWISE)):
        for name, function in functions.items():
            method, compares = f"__{name}__", functions is _COMPARISONS
            found[method] = _operator(getattr(tensor, method), function, served, semantic, compares)
            if not compares:
                method = f"__r{name}__"
                found[method] = _reflected(getattr(tensor, method), function, served, semantic)
    found["__add__"] = _pointer_addition(found["__add__"])
    found["__getitem__"] = _index(tensor.__getitem__)
    return found


def _operator(
    own: Callable[..., Any], function: np.ufunc, served: frozenset[str], semantic: Any, compares: bool
) -> Callable[..., Any]:
    """Return a method that applies a NumPy function to two tensors of a served dtype, or to one and a number."""

    def operator(self: tl.tensor, other: Any) -> Any:
        dtype = self.dtype
        if dtype.name not in served:
            return own(self, other)
        mine = self.handle.data
        type_ = self.type
        if type(other) is tl.tensor:
            theirs = other.handle.data
            if other.dtype.name != dtype.name or mine.dtype is not theirs.dtype:
                return own(self, other)
            if type_ is not other.type:
                type_ = _broadcast_type(type_, other.type)
                if type_ is None:
                    return own(self, other)
        else:
            theirs = _number(other, dtype, semantic)
            if theirs is None:
                return own(self, other)
        result = TensorHandle(function(mine, theirs), self.handle.dtype)
        if compares:
            type_ = type_.with_element_ty(tl.int1) if type_.is_block() else tl.int1
        return tl.tensor(result, type_)

    return operator


def _broadcast_type(one: Any, other: Any) -> Any:
    """Return the type with elements of `one` and the shape of both after broadcasting, or None if they have none."""
    if not other.is_block():
        return one
    if not one.is_block():
        return other.with_element_ty(one)
    mine, theirs = one.shape.values, other.shape.values
    if mine == theirs:
        return one
    shape = _common_shape(mine, theirs)
    return None if shape is None else tl.block_type(one.element_ty, shape)


def _pointer_addition(add: Callable[..., Any]) -> Callable[..., Any]:
    """Return an addition that moves pointers by offsets in a tensor, and else calls `add`."""

    def addition(self: tl.tensor, other: Any) -> Any:
        if type(self.dtype) is not tl.pointer_type or type(other) is not tl.tensor:
            return add(self, other)
        type_ = _broadcast_type(self.type, other.type) if other.dtype.name in _INTEGERS else None
        if type_ is None:
            return add(self, other)
        width = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
        moved = self.handle.data + width * other.handle.data.astype(np.uint64)
        return tl.tensor(TensorHandle(moved, self.handle.dtype), type_)

    return addition


def _index(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return `tensor.__getitem__` that inserts all dimensions of size 1 of an index such as `[:, None]` at once."""

    def item(self: tl.tensor, index: Any) -> Any:
        if type(index) is not tuple or not self.type.is_block():
            return own(self, index)
        sizes, shape = iter(self.type.shape.values), []
        for each in index:
            if each is not None and each != slice(None):
                return own(self, index)
            size = 1 if each is None else next(sizes, 0)
            if not size:
                return own(self, index)
            shape.append(size)
        shape.extend(sizes)
        handle = TensorHandle(self.handle.data[index], self.handle.dtype)
        return tl.tensor(handle, tl.block_type(self.dtype, shape))

    return item


def even_and_odd(block: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Split dimension 1 of a block into its elements of even and of odd index."""
    rows, columns = block.type.shape.values
    type_, handle = tl.block_type(block.dtype, [rows, columns // 2]), block.handle
    even, odd = (TensorHandle(handle.data[:, side::2], handle.dtype) for side in (0, 1))
    return tl.tensor(even, type_), tl.tensor(odd, type_)


def _reflected(
    own: Callable[..., Any], function: np.ufunc, served: frozenset[str], semantic: Any
) -> Callable[..., Any]:
    """Return a method that applies a NumPy function to a number and a tensor of a served dtype."""

    def reflected(self: tl.tensor, other: Any) -> Any:
        number = _number(other, self.dtype, semantic) if self.dtype.name in served else None
        if number is None:
            return own(self, other)
        return tl.tensor(TensorHandle(function(number, self.handle.data), self.handle.dtype), self.type)

    return reflected


_numbers: dict[tuple[Any, ...], np.ndarray] = {}


def _number(value: Any, dtype: tl.dtype, semantic: Any) -> np.ndarray | None:
    """Return a number as an array of one element of a tensor's dtype, or None if the result has another dtype."""
    if type(value) is tl.constexpr:
        value = value.value
    kind = type(value)
    if kind is int:
        if dtype.name == "int1":
            return None
        if dtype.name in _INTEGERS and not dtype.get_int_min_value() <= value <= dtype.get_int_max_value():
            return None
    elif kind is not float or dtype.name not in _FLOATS:
        return None
    key = kind, value, dtype.name
    found = _numbers.get(key)
    if found is None:
        found = semantic.scalar_constant(value, dtype).handle.data
        # 0.0 and -0.0 are equal keys, and nan is equal to none.
        if value and value == value:
            if len(_numbers) >= _MOST_KEPT:
                _numbers.clear()
            _numbers[key] = found
    return found


def _scalar(value: Any, dtype: tl.dtype, semantic: Any) -> tl.tensor | None:
    """Return a number as a scalar of a tensor's dtype, or None if the result has another dtype."""
    number = _number(value, dtype, semantic) if type(value) in (int, float) and dtype.name in _PLAIN else None
    return None if number is None else tl.tensor(TensorHandle(number, dtype), dtype)


def checked(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return `binary_op_type_checking_impl` that only broadcasts operands without a cast.

    These are tensors of one dtype, pointers with integer offsets, and a tensor with a number that takes its dtype.
    """

    @functools.wraps(own)
    def binary_op_type_checking_impl(
        semantic: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if type(lhs) is tl.tensor and type(rhs) is tl.tensor:
            name, other = lhs.dtype.name, rhs.dtype.name
            alike = name == other and (name in _BITS or (name in _FLOATS and not (div_or_mod and name == "fp16")))
            if alike or (allow_lhs_ptr and other in _INTEGERS and type(lhs.dtype) is tl.pointer_type):
                return semantic.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and not div_or_mod:
            if type(lhs) is tl.tensor and (number := _scalar(rhs, lhs.dtype, semantic)) is not None:
                return semantic.broadcast_impl_value(lhs, number)
            if type(rhs) is tl.tensor and (number := _scalar(lhs, rhs.dtype, semantic)) is not None:
                return semantic.broadcast_impl_value(number, rhs)
        return own(semantic, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return binary_op_type_checking_impl


def broadcast(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return `broadcast_impl_value` that compares the shapes of two blocks of one rank once."""

    @functools.wraps(own)
    def broadcast_impl_value(semantic: Any, lhs: tl.tensor, rhs: tl.tensor) -> Any:
        one, other = lhs.type, rhs.type
        if not (one.is_block() and other.is_block()):
            return own(semantic, lhs, rhs)
        mine, theirs = one.shape.values, other.shape.values
        if mine == theirs:
            return lhs, rhs
        shape = _common_shape(mine, theirs)
        if shape is None:
            return own(semantic, lhs, rhs)
        return _expanded(semantic, lhs, mine, shape), _expanded(semantic, rhs, theirs, shape)

    return broadcast_impl_value


def _common_shape(one: list[int], other: list[int]) -> list[int] | None:
    """Return the shape of two blocks of one rank after broadcasting, or None if they have none or differ in rank."""
    if len(one) != len(other):
        return None
    shape = [second if first == 1 else first for first, second in zip(one, other, strict=True)]
    return shape if all(size in (1, most) for size, most in zip(other, shape, strict=True)) else None


def _expanded(semantic: Any, value: tl.tensor, old: list[int], shape: list[int]) -> tl.tensor:
    if old == shape:
        return value
    return tl.tensor(semantic.builder.create_broadcast(value.handle, shape), tl.block_type(value.dtype, shape))


def expand_dims(source: TensorHandle, axis: int) -> TensorHandle:
    """Insert a dimension of size 1 as the interpreter does, without NumPy's checks of the axis."""
    return TensorHandle(source.data[(*[slice(None)] * axis, None)], source.dtype.scalar)


def block_to_ir(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return `block_type.to_ir` that gives the interpreter's builder a type of plain elements as it is."""

    @functools.wraps(own)
    def to_ir(self: tl.block_type, builder: Any) -> Any:
        plain = self.element_ty.name in _PLAIN or self.element_ty.name in _BITS
        return self if plain and type(builder) is InterpreterBuilder else own(self, builder)

    return to_ir


def patch_core(own: Callable[..., None]) -> Callable[..., None]:
    """Return the interpreter's `_patch_lang_core` whose `dtype.to_ir` returns plain dtypes as they are."""

    def _patch_lang_core(lang: Any, scope: Any) -> None:
        own(lang, scope)
        to_ir = lang.dtype.to_ir
        scope.set_attr(lang.dtype, "to_ir", lambda self, builder: _TYPES.get(self.name) or to_ir(self, builder))

    return _patch_lang_core


def patch_one(own: Callable[..., None], semantic: Any) -> Callable[..., None]:
    """Return the interpreter's `_patch_attr` whose functions call a builtin without Triton's check of its caller."""
    wrapper = tl.core.builtin(lambda: None).__code__

    def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not wrapper:
            own(owner, name, member, builder, scope)
            return
        function = member.__wrapped__

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, builtin)

    return _patch_attr


def handle(own: Callable[..., None]) -> Callable[..., None]:
    """Return `TensorHandle.__init__` that checks the width of a pair of dtypes once."""
    known: set[tuple[str, str]] = set()

    def initialise(self: TensorHandle, data: Any, dtype: tl.dtype, attr: dict[str, Any] | None = None) -> None:
        pair = data.dtype.char, dtype.name
        if pair not in known:
            own(self, data, dtype)
            known.add(pair)
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    return initialise


# Tuples without constexprs by address, which the values keep from being used again.
_plain_tuples: dict[int, tuple[Any, ...]] = {}


def _is_plain(value: Any) -> bool:
    """Return whether a value holds no constexpr, so that Triton would unwrap it to an equal value."""
    if isinstance(value, tuple):
        if id(value) in _plain_tuples:
            return True
        if not all([_is_plain(item) for item in value]):
            return False
        if len(_plain_tuples) >= _MOST_KEPT:
            _plain_tuples.clear()
        _plain_tuples[id(value)] = value
        return True
    return not isinstance(value, (tl.constexpr, tl.tuple, list))


def call_constexpr(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ConstexprFunction.__call__` that passes arguments without constexprs as they are."""

    @functools.wraps(own)
    def call(self: Any, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if _semantic is None and not kwargs and all([_is_plain(each) for each in args]):
            return self.fn(*args)
        return own(self, *args, _semantic=_semantic, **kwargs)

    return call
