"""Selection by a mask, clamping, and filling."""

import torch
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import ALL, NUMBERS, category
from tritonite.errors import Decline
from tritonite.language.math import maximum_nan, minimum_nan
from tritonite.ops import aten
from tritonite.registry import pointwise
from tritonite.runtime.contract import limit
from tritonite.runtime.symbols import limits_of, number_type


def _check_condition(condition, self, other):
    if condition.dtype is not torch.bool:
        raise Decline(f"condition of dtype {condition.dtype}; bool is served")
    return condition, self, other


@pointwise("where", own=("condition",), prepare=_check_condition, cpu_numbers=True)
def where(condition, self, other):
    return tl.where(condition, self, other)


def _check_bounds(self, min, max):
    if min is None and max is None:
        raise Decline("neither min nor max")
    _check_bound(self, min, alone=max is None)
    _check_bound(self, max, alone=min is None)
    return self, min, max


def _check_bound(self, bound, alone=False):
    """Require a finite bound where ATen's GPU kernel ignores nan: with integers, or as the only bound of `clamp`."""
    if aten.on_gpu() and (alone or not self.is_floating_point()) and number_type(bound) is float:
        limit(bound, limits_of(torch.float64)._replace(finite=True))


@pointwise("clamp", accepts=NUMBERS, prepare=_check_bounds)
def clamp(self, min, max):
    if min is not None:
        self = maximum_nan(self, min)
    if max is not None:
        self = minimum_nan(self, max)
    return self


def one_bound(self, bound):
    _check_bound(self, bound)
    return self, bound


@pointwise("clamp_min", accepts=NUMBERS, prepare=lambda self, min: one_bound(self, min))
def clamp_min(self, min):
    return maximum_nan(self, min)


@pointwise("clamp_max", accepts=NUMBERS, prepare=lambda self, max: one_bound(self, max))
def clamp_max(self, max):
    return minimum_nan(self, max)


def _range(dtype):
    """Return the lowest and the highest number of a dtype."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min, info.max


def _check_range(self, value):
    """Decline a value in device memory whose dtype exceeds self's range: ATen reads it and raises on overflow."""
    same_device = isinstance(value, torch.Tensor) and value.device == self.device
    if same_device and self.dtype in ALL and value.dtype in ALL:
        (lowest, highest), (value_lowest, value_highest) = _range(self.dtype), _range(value.dtype)
        if value_lowest < lowest or value_highest > highest:
            raise Decline(f"value of dtype {value.dtype}, whose range exceeds that of {self.dtype}")


def _check_value(self, value, *others):
    if any(x.device.type != devices.current.type for x in (self, *others)):
        raise Decline("a tensor on another device")
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise Decline(f"value of {value.dim()} dimensions; a 0-d tensor is served")
        if category(value.dtype) > category(self.dtype):
            raise Decline(f"value of dtype {value.dtype} for a tensor of {self.dtype}")


def _masked_fill_arguments(self, mask, value):
    _check_value(self, value, mask)
    _check_range(self, value)
    if mask.dtype is not torch.bool:
        raise Decline(f"mask of dtype {mask.dtype}; bool is served")
    return self, mask, value


@pointwise(
    "masked_fill",
    own=("mask",),
    cast=("value",),
    prepare=_masked_fill_arguments,
    contiguous=True,
    cpu_numbers=True,
)
def masked_fill(self, mask, value):
    """where(mask, value, self). A fresh result is contiguous, in whatever layout self is."""
    return tl.where(mask, value, self)


def _fill_arguments(self, value):
    _check_value(self, value)
    return self, value


@pointwise("fill", cast=("value",), prepare=_fill_arguments, cpu_numbers=True, truncates=True)
def fill(self, value):
    return tl.broadcast_to(value, self.shape)


@pointwise("zero")
def zero(self):
    return tl.zeros_like(self)


def _replacements(self, nan, posinf, neginf):
    if not self.is_floating_point():
        return self, 0, 0, 0
    highest = torch.finfo(self.dtype).max
    return (
        self,
        0.0 if nan is None else nan,
        highest if posinf is None else posinf,
        -highest if neginf is None else neginf,
    )


@pointwise("nan_to_num", prepare=_replacements)
def nan_to_num(self, nan, posinf, neginf):
    if not self.dtype.is_floating():
        return self
    finite = tl.where(self == float("inf"), posinf, tl.where(self == float("-inf"), neginf, self))
    return tl.where(self != self, nan, finite)
