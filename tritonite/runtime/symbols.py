"""Numbers of a call that a plan does not hold: their value may differ each time the plan is repeated."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch


class Symbol:
    """A number that stands for another one each time a plan is repeated: `value` is this call's.

    It goes to kernels as it is. A host function that computes with it or compares it would decide for all later calls,
    so that raises TypeError; an argument that it must look at is pinned in its declaration.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(f"a number of the call that is not pinned is looked at: {type(self).__name__}({self.value})")

    __bool__ = __float__ = __int__ = __index__ = __hash__ = _refuse  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __abs__ = __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse


class Limits(NamedTuple):
    """What a number may be: an integer from `low` to `high`, or a float of at most `largest` or, if not `finite`, any
    infinite one and nan. Neither is below `least`.
    """

    low: int
    high: int
    largest: float
    finite: bool = False
    least: float = -math.inf

    def and_(self, other: Limits) -> Limits:
        """Both."""
        low, high, largest = max(self.low, other.low), min(self.high, other.high), min(self.largest, other.largest)
        return Limits(low, high, largest, self.finite or other.finite, max(self.least, other.least))

    def hold(self, value: Any) -> bool:
        """Whether a number keeps them."""
        if isinstance(value, complex) or value < self.least:
            return False
        if isinstance(value, float):
            return abs(value) <= self.largest or not (self.finite or math.isfinite(value))
        return self.low <= value <= self.high


# Negated, the least integer of 64 bits would be itself.
_LEAST, _MOST = 1 - 2**63, 2**63 - 1


@functools.lru_cache(maxsize=64)
def limits_of(dtype: torch.dtype) -> Limits:
    """The numbers that `dtype` holds, whatever is lost of their precision; others ATen converts by no one rule."""
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        return Limits(max(_LEAST, -int(largest)), min(_MOST, int(largest)), largest)
    info = torch.iinfo(torch.int64 if dtype is torch.bool else dtype)
    return Limits(info.min, info.max, math.inf)


class Number(Symbol):
    """A number among a call's arguments: its place in the schema, and in a list of numbers, or -1.

    `keyed` where a recorded call serves either numbers that are 0, or that are 1, or all others. A recorded call serves
    those alone that keep the `limits`.
    """

    __slots__ = ("argument", "item", "keyed", "limits")

    def __init__(self, value: bool | int | float, argument: int, item: int = -1, keyed: bool = False) -> None:
        super().__init__(value)
        self.argument, self.item, self.keyed = argument, item, keyed
        self.limits: Limits | None = None


class Drawn(Symbol):
    """A seed (`which` is 0) or an offset (1) of a draw on the call's generator."""

    __slots__ = ("draw", "which")

    def __init__(self, value: int, draw: int, which: int) -> None:
        super().__init__(value)
        self.draw, self.which = draw, which


class Size(Symbol):
    """A size that data decides, the `index`-th that the call reads.

    It may stand among the sizes and strides of `empty_strided`, among a kernel's arguments (declared as tl.int64), in a
    launch's grid as `blocks`, and among results.
    """

    __slots__ = ("index",)

    def __init__(self, value: int, index: int) -> None:
        super().__init__(value)
        self.index = index

    def blocks(self, block: int) -> Blocks:
        """How many blocks of so many elements it takes."""
        return Blocks(self, block)


class Blocks(Symbol):
    """A grid's extent that data decides: as many as `size` has blocks of `block`."""

    __slots__ = ("block", "size")

    def __init__(self, size: Size, block: int) -> None:
        super().__init__(-(-size.value // block))
        self.size, self.block = size, block


def number_type(value: Any) -> type:
    """Whether a number is a bool, an int, a float or a complex, whatever its value."""
    return type(value.value) if isinstance(value, Symbol) else type(value)


def zero_or_one(value: Any) -> int | None:
    """0 or 1 where a number is that, or None, of a number whose declaration says `pin_zero_or_one`."""
    if isinstance(value, Number) and value.keyed:
        value = value.value
    return 0 if value == 0 else 1 if value == 1 else None


def is_negative_zero(value: Any) -> bool:
    """Whether a number is -0.0, of one whose declaration says `pin_zero_or_one`."""
    value = value_of(value)
    return value == 0 and isinstance(value, float) and math.copysign(1.0, value) < 0


def value_of(value: Any) -> Any:
    """What a value is in this very call: for who launches, and for none who decides."""
    if isinstance(value, Symbol):
        return value.value
    return tuple([value_of(item) for item in value]) if type(value) is tuple else value
