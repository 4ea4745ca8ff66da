"""Triton's interpreter as kernels need it: libdevice in NumPy, and corrections of the interpreter's operations.

libdevice's functions are computed in float64 and rounded once. `runtime/launch.py` installs the corrections.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tritonite.errors import Decline, InvalidDeclaration
from tritonite.language import shortcuts

_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def by_name(own: Callable[[tl.dtype], np.dtype]) -> Callable[[tl.dtype], np.dtype]:
    """Return a cached version of the interpreter's dtype conversion `own`, which builds its whole table every call."""
    cached: dict[str, np.dtype] = {}

    def numpy_dtype(type_: tl.dtype) -> np.dtype:
        name = type_.scalar.name
        if name not in cached:
            cached[name] = own(type_)
        return cached[name]

    return numpy_dtype


def cast(builder: object, source: TensorHandle, type_: tl.dtype) -> TensorHandle:
    """Cast as the interpreter does, but round bfloat16 to nearest even (its own cast truncates), and take float8."""
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
    """Convert float32 to float8 with rounding to nearest even and nan, both of which the interpreter's own loses."""
    if source.dtype.scalar != tl.float32 or type_.scalar not in _FLOAT8:
        return type(builder).create_fp_to_fp(builder, source, type_, rounding)
    wide = torch.from_numpy(np.ascontiguousarray(source.data))
    return TensorHandle(wide.to(_FLOAT8[type_.scalar]).view(torch.uint8).numpy(), type_.scalar)


def arithmetic(builder: Any, own: str, *given: Any) -> TensorHandle:
    """Apply a function, the last item of `given`, to blocks; bfloat16 in float32 with one rounding.

    Other dtypes go to the interpreter's method named `own`, which would treat the bits of bfloat16 as integers.
    """
    *operands, function = given
    for operand in operands:
        if operand.dtype.scalar.name != "bf16":
            return getattr(type(builder), own)(builder, *given)
    result = function(*[cast(builder, operand, tl.float32).data for operand in operands])
    if result.dtype == np.bool_:
        return TensorHandle(result, tl.int1)
    return cast(builder, TensorHandle(result, tl.float32), tl.bfloat16)


def dot(
    builder: object, a: TensorHandle, b: TensorHandle, acc: TensorHandle, precision: object, imprecise: int
) -> TensorHandle:
    """Return a @ b + acc in the accumulator's dtype; the interpreter's own product treats bfloat16 as integers."""
    dtype = acc.dtype.scalar
    wide = [cast(builder, operand, dtype).data for operand in (a, b)]
    return TensorHandle(np.matmul(*wide) + acc.data, dtype)


def dot_in_order(
    builder: object, a: TensorHandle, b: TensorHandle, acc: TensorHandle, precision: object, imprecise: int
) -> TensorHandle:
    """Return `dot` without BLAS, whose last bits depend on a row's position in the block; tensor cores' do not."""
    dtype = acc.dtype.scalar
    wide = [cast(builder, operand, dtype).data for operand in (a, b)]
    return TensorHandle(np.einsum("ij,jk->ik", *wide) + acc.data, dtype)


def splat(builder: object, type_: tl.dtype, source: TensorHandle) -> TensorHandle:
    """Fill a block with one value as the interpreter does, also with a bool, which Triton 3.9 takes for an integer."""
    if source.data.dtype == np.bool_:
        return TensorHandle(np.full(type_.shape, source.data.item(), np.bool_), tl.int1)
    return type(builder).create_splat(builder, type_, source)


def scalar_constant(semantic: Any, constant: Callable[..., tl.tensor], value: Any, dtype: tl.dtype) -> tl.tensor:
    """Make a scalar of a number, keeping the sign of -0.0, as a kernel parameter on a GPU does."""
    if isinstance(value, float) and value == 0 and dtype is not None and dtype.is_floating():
        return semantic.tensor(getattr(semantic.builder, f"get_{dtype.name}")(value), dtype)
    return constant(value, dtype)


def reduce_pairwise(own: Callable[..., Any], reduction: Any, states: tuple[tl.tensor, ...]) -> Any:
    """Reduce by combining neighbours pairwise, whole blocks at a time; the interpreter's `own` goes element by element.

    A combine function that branches on elements still takes `own`.
    """
    if reduction.axis is None or reduction.keep_dims:
        return own(reduction, states)
    blocks = [np.moveaxis(state.handle.data, reduction.axis, -1) for state in states]
    while blocks[0].shape[-1] > 1:
        sides = [[block[..., side::2] for block in blocks] for side in (0, 1)]
        pairs = [reduction.to_tensor(x, state.dtype) for side in sides for x, state in zip(side, states, strict=True)]
        try:
            combined = reduction.combine_fn.fn(*pairs)
        except InvalidDeclaration:
            return own(reduction, states)
        blocks = [each.handle.data for each in (combined if isinstance(combined, tuple) else (combined,))]
    return [reduction.to_tensor(block[..., 0], state.dtype) for block, state in zip(blocks, states, strict=True)]


def refuse_unless(condition: Any, message: str) -> None:
    """Raise Decline with `message` unless all elements of `condition` are set: the interpreter's `tl.device_assert`."""
    if not np.all(condition):
        raise Decline(message, lasting=False)


def patch_tensor(patch: Callable[..., None], semantic: Any, tensor: type, scope: Any) -> None:
    """Patch `tl.tensor` by the interpreter's own `patch`, then replace its `__index__`, `__bool__` and operators.

    NumPy 2.4 does not accept Triton 3.6's scalars as indices. The interpreter takes every block for true; Triton's
    compiler refuses its truth value as ambiguous.
    """
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
    scope.set_attr(tensor, "__bool__", _truth)
    for name, operator in shortcuts.operators(tensor, semantic).items():
        scope.set_attr(tensor, name, operator)


def _truth(value: tl.tensor) -> bool:
    """Return whether a scalar is true. Raises InvalidDeclaration for a block, unless Triton itself asks."""
    if not value.type.is_block():
        return bool(value.handle.data)
    asking = sys._getframe(1)
    if not asking.f_globals["__name__"].startswith("triton."):
        reason = "it branches on a value of a tensor, which differs from element to element; use tl.where, & and |"
        raise InvalidDeclaration(name=asking.f_code.co_name, reason=reason)
    return True


def _elementwise(function: Callable[..., np.ndarray]) -> Callable[..., tl.tensor]:
    """Return a function of interpreter tensors that broadcasts, computes in float64 and rounds to the first's dtype."""

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
# Triton 3.6 has no rint for AMD, which rounds to the nearest integer, ties to even, as nearbyint does.
nearbyint = _elementwise(np.rint)
pow = _elementwise(np.power)
rsqrt = _elementwise(lambda x: 1 / np.sqrt(x))
sin = _elementwise(np.sin)
sinh = _elementwise(np.sinh)
sqrt = _elementwise(np.sqrt)
tan = _elementwise(np.tan)
tanh = _elementwise(np.tanh)
trunc = _elementwise(np.trunc)


def popc(x: tl.tensor) -> tl.tensor:
    """Return the number of set bits of 32-bit integers."""
    bits = np.unpackbits(np.ascontiguousarray(x.handle.data.astype(np.int32))[..., None].view(np.uint8), axis=-1)
    return tl.tensor(TensorHandle(bits.sum(axis=-1, dtype=np.int32), tl.int32), x.type)
