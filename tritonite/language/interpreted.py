"""The functions of libdevice for Triton's interpreter, each computed in float64 and rounded once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tritonite.errors import Decline, InvalidDeclaration

_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def by_name(own: Callable[[tl.dtype], np.dtype]) -> Callable[[tl.dtype], np.dtype]:
    """The interpreter's NumPy dtype of a dtype; its `own` makes a table of all of them for every operation."""
    found: dict[str, np.dtype] = {}

    def numpy_dtype(type_: tl.dtype) -> np.dtype:
        name = type_.scalar.name
        if name not in found:
            found[name] = own(type_)
        return found[name]

    return numpy_dtype


def cast(builder: object, source: TensorHandle, type_: tl.dtype) -> TensorHandle:
    """The interpreter's cast, also of float8, with bfloat16 rounded to nearest even as on a GPU; its own truncates."""
    to = type_.scalar
    if source.dtype.scalar == tl.float32 and to == tl.bfloat16:
        wide = torch.from_numpy(np.ascontiguousarray(source.data))
        return TensorHandle(wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16), to)
    if source.dtype.scalar == tl.bfloat16 and to == tl.float32:
        return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), to)
    if (
        to == tl.bfloat16
        and source.dtype.scalar not in (tl.float32, tl.bfloat16)
        and source.dtype.scalar not in _FLOAT8
    ):
        return cast(builder, TensorHandle(source.data.astype(np.float32), tl.float32), type_)
    if source.dtype.scalar in _FLOAT8 and to == tl.float32:
        narrow = torch.from_numpy(np.ascontiguousarray(source.data)).view(_FLOAT8[source.dtype.scalar])
        return TensorHandle(narrow.float().numpy(), to)
    return type(builder).cast_impl(builder, source, type_)


def to_float8(builder: object, source: TensorHandle, type_: tl.dtype, rounding: object) -> TensorHandle:
    """The interpreter's conversion of and to float8, of float32 to nearest even and with nan; its own loses both."""
    if source.dtype.scalar != tl.float32 or type_.scalar not in _FLOAT8:
        return type(builder).create_fp_to_fp(builder, source, type_, rounding)
    wide = torch.from_numpy(np.ascontiguousarray(source.data))
    return TensorHandle(wide.to(_FLOAT8[type_.scalar]).view(torch.uint8).numpy(), type_.scalar)


def arithmetic(builder: Any, own: str, *given: Any) -> TensorHandle:
    """Apply a function, the last of those given, to blocks; to bfloat16 ones in float32, rounded once.

    `own` is the name of the interpreter's method for others, which takes the bits of bfloat16 for integers.
    """
    *operands, function = given
    if any(operand.dtype.scalar != tl.bfloat16 for operand in operands):
        return getattr(type(builder), own)(builder, *given)
    found = function(*[cast(builder, operand, tl.float32).data for operand in operands])
    if found.dtype == np.bool_:
        return TensorHandle(found, tl.int1)
    return cast(builder, TensorHandle(found, tl.float32), tl.bfloat16)


def dot(
    builder: object, a: TensorHandle, b: TensorHandle, total: TensorHandle, precision: object, imprecise: int
) -> TensorHandle:
    """The interpreter's product, of operands in the dtype accumulated in; its own takes bfloat16 for integers."""
    accumulator = total.dtype.scalar
    wide = [cast(builder, operand, accumulator).data for operand in (a, b)]
    return TensorHandle(np.matmul(*wide) + total.data, accumulator)


def dot_in_order(
    builder: object, a: TensorHandle, b: TensorHandle, total: TensorHandle, precision: object, imprecise: int
) -> TensorHandle:
    """The same without BLAS, whose last bits depend on where in a block a row is, as those of tensor cores do not."""
    accumulator = total.dtype.scalar
    wide = [cast(builder, operand, accumulator).data for operand in (a, b)]
    return TensorHandle(np.einsum("ij,jk->ik", *wide) + total.data, accumulator)


def splat(builder: object, type_: tl.dtype, source: TensorHandle) -> TensorHandle:
    """The interpreter's block of one value; Triton 3.9 takes what a comparison gives for an integer."""
    if source.data.dtype == np.bool_:
        return TensorHandle(np.full(type_.shape, source.data.item(), np.bool_), tl.int1)
    return type(builder).create_splat(builder, type_, source)


def scalar_constant(semantic: Any, constant: Callable[..., tl.tensor], value: Any, dtype: tl.dtype) -> tl.tensor:
    """The interpreter's scalar of a number, which is a parameter on a GPU and keeps the sign of -0.0 there."""
    if isinstance(value, float) and value == 0 and dtype is not None and dtype.is_floating():
        return semantic.tensor(getattr(semantic.builder, f"get_{dtype.name}")(value), dtype)
    return constant(value, dtype)


def reduce_pairwise(own: Callable[..., Any], reduction: Any, states: tuple[tl.tensor, ...]) -> Any:
    """The interpreter's reduction by any function, of neighbours in whole blocks; its `own` goes element by element.

    That is left to functions which branch on the elements.
    """
    if reduction.axis is None or reduction.keep_dims:
        return own(reduction, states)
    blocks = [np.moveaxis(state.handle.data, reduction.axis, -1) for state in states]
    while blocks[0].shape[-1] > 1:
        sides = [[block[..., side::2] for block in blocks] for side in (0, 1)]
        halves = [reduction.to_tensor(x, state.dtype) for side in sides for x, state in zip(side, states, strict=True)]
        try:
            found = reduction.combine_fn.fn(*halves)
        except InvalidDeclaration:
            return own(reduction, states)
        blocks = [each.handle.data for each in (found if isinstance(found, tuple) else (found,))]
    return [reduction.to_tensor(block[..., 0], state.dtype) for block, state in zip(blocks, states, strict=True)]


def refuse_unless(condition: Any, message: str) -> None:
    """The interpreter's assertion, of all elements of a block. Raises Decline."""
    if not np.all(condition):
        raise Decline(message, lasting=False)


def patch_tensor(patch: Callable[..., None], tensor: type, scope: Any) -> None:
    """What the interpreter makes of `tl.tensor`; a number of Triton 3.6's is no index to NumPy 2.4.

    Its own takes every block for true, of which Triton's compiler says that its truth is ambiguous.
    """
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
    scope.set_attr(tensor, "__bool__", _truth)


def _truth(value: tl.tensor) -> bool:
    """Whether a scalar is true. Raises InvalidDeclaration for a block, but where Triton asks whether it is there."""
    if not value.type.is_block():
        return bool(value.handle.data)
    asking = sys._getframe(1)
    if not asking.f_globals["__name__"].startswith("triton."):
        reason = "it branches on a value of a tensor, which differs from element to element; use tl.where, & and |"
        raise InvalidDeclaration(name=asking.f_code.co_name, reason=reason)
    return True


def _elementwise(function: Callable[..., np.ndarray]) -> Callable[..., tl.tensor]:
    def call(*operands: tl.tensor) -> tl.tensor:
        first = operands[0]
        values = np.broadcast_arrays(*(operand.handle.data for operand in operands))
        wide = [value.astype(np.float64) if value.dtype.kind == "f" else value for value in values]
        result = np.asarray(function(*wide)).astype(first.handle.data.dtype)
        type_ = tl.block_type(first.dtype, list(result.shape)) if result.shape else first.dtype
        return tl.tensor(TensorHandle(result, first.dtype), type_)

    return call


def _from_torch(function: Callable[..., torch.Tensor]) -> Callable[..., tl.tensor]:
    return _elementwise(lambda *values: function(*(torch.from_numpy(value.copy()) for value in values)).numpy())


acos = _elementwise(np.arccos)
acosh = _elementwise(np.arccosh)
asin = _elementwise(np.arcsin)
asinh = _elementwise(np.arcsinh)
atan = _elementwise(np.arctan)
atan2 = _elementwise(np.arctan2)
atanh = _elementwise(np.arctanh)
ceil = _elementwise(np.ceil)
copysign = _elementwise(np.copysign)
cos = _elementwise(np.cos)
cosh = _elementwise(np.cosh)
erf = _from_torch(torch.erf)
erfc = _from_torch(torch.erfc)
erfcx = _from_torch(torch.special.erfcx)
erfinv = _from_torch(torch.erfinv)
exp = _elementwise(np.exp)
exp2 = _elementwise(np.exp2)
expm1 = _elementwise(np.expm1)
floor = _elementwise(np.floor)
fma = _elementwise(lambda x, y, z: x.astype(np.longdouble) * y + z)
fmod = _elementwise(np.fmod)
hypot = _elementwise(np.hypot)
ldexp = _elementwise(np.ldexp)
lgamma = _from_torch(torch.lgamma)
log = _elementwise(np.log)
log10 = _elementwise(np.log10)
log1p = _elementwise(np.log1p)
log2 = _elementwise(np.log2)
pow = _elementwise(np.power)
rint = _elementwise(np.rint)
rsqrt = _elementwise(lambda x: 1 / np.sqrt(x))
sin = _elementwise(np.sin)
sinh = _elementwise(np.sinh)
sqrt = _elementwise(np.sqrt)
tan = _elementwise(np.tan)
tanh = _elementwise(np.tanh)
trunc = _elementwise(np.trunc)


def popc(x: tl.tensor) -> tl.tensor:
    """How many bits of integers of 32 bits are set."""
    bits = np.unpackbits(np.ascontiguousarray(x.handle.data.astype(np.int32))[..., None].view(np.uint8), axis=-1)
    return tl.tensor(TensorHandle(bits.sum(axis=-1, dtype=np.int32), tl.int32), x.type)
