"""Sums, products, quotients, remainders, powers, extrema of two operands."""

import math

import torch
import triton
import triton.language as tl

from tritonite.dtypes import ALL, FLOATS, INTS, NUMBERS, Promotion
from tritonite.engine.outputs import is_expanded
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import divide, inverse, maximum_nan, minimum_nan, multiply_add, real_power, true_divide
from tritonite.ops import aten
from tritonite.ops.aten import ON_CPU
from tritonite.registry import pointwise
from tritonite.runtime.contract import limit
from tritonite.runtime.interpreter import reading_on_host
from tritonite.runtime.symbols import Limits, number_type

INT_TO_FLOAT = Promotion.INT_TO_FLOAT


def _decline_bool(self, other, alpha):
    for value in (self, other):
        if number_type(value) is bool or (isinstance(value, torch.Tensor) and value.dtype is torch.bool):
            raise Decline("subtraction with a bool operand")
    return self, other, alpha


@pointwise("add", cpu_numbers=True, casts=True)
def add(self, other, alpha):
    if self.dtype == tl.int1:
        return self | (other & alpha)
    return multiply_add(other, alpha, self)


@triton.jit
def _negated(alpha):
    """-alpha. The product negates 0.0 too, whose sign a sum of zeros depends on."""
    return -1.0 * alpha if alpha.dtype.is_floating() else 0 - alpha


@pointwise("sub", accepts=NUMBERS, prepare=_decline_bool, cpu_numbers=True, casts=True)
def sub(self, other, alpha):
    return multiply_add(other, _negated(alpha), self)


@pointwise("rsub", accepts=NUMBERS, prepare=lambda self, other, alpha: _decline_bool(other, self, alpha))
def rsub(other, self, alpha):
    return multiply_add(self, _negated(alpha), other)


_ADD_RELU = (torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64)


def _check_add_relu(self, other, alpha):
    # ATen has no GPU kernel for it.
    if aten.on_gpu() or self.dtype not in _ADD_RELU:
        raise Decline(f"_add_relu of {self.dtype} on {self.device.type}, which ATen does not have")
    return self, other, alpha


@pointwise("_add_relu", accepts=_ADD_RELU, prepare=_check_add_relu, one_dtype=True)
def _add_relu(self, other, alpha):
    total = multiply_add(other, alpha, self)
    # ATen clamps the result to the largest finite number, too.
    if total.dtype == tl.float32:
        total = tl.where(total > 3.4028234663852886e38, 3.4028234663852886e38, total)
    elif total.dtype == tl.float64:
        total = tl.where(total > 1.7976931348623157e308, 1.7976931348623157e308, total)
    return tl.where(total < 0, tl.zeros_like(total), total)


@pointwise("mul", cpu_numbers=True, casts=True)
def mul(self, other):
    if self.dtype == tl.int1:
        return self & other
    return self * other


@pointwise("div", promote=INT_TO_FLOAT, cpu_numbers=True, casts=True)
def div(self, other):
    return divide(self, other)


@triton.jit
def _floor_divide_floats(x, y):
    """Floor division by way of fmod, as in CPython, so that x == y * (x // y) + x % y holds.

    fmod loops over the bits of the quotient. If all quotients of a block are below 2^22, their remainders come from one
    multiply-add, which is exact. A remainder whose sign is not the divisor's shows a quotient that was rounded up.
    """
    plain = true_divide(x, y)
    floor = libdevice.floor(plain)
    rest = libdevice.fma(-floor, y, x)
    # rest is nan for an infinite divisor.
    ordinary = (y == 0) | ((tl.abs(plain) < 4194304.0) & (rest == rest))
    if tl.min(ordinary.to(tl.int32), axis=None) != 0:
        result = tl.where((rest != 0) & ((rest < 0) != (y < 0)), floor - 1, floor)
    else:
        remainder = libdevice.fmod(x, y)
        quotient = true_divide(x - remainder, y)
        quotient = tl.where((remainder != 0) & ((y < 0) != (remainder < 0)), quotient - 1, quotient)
        floor = libdevice.floor(quotient)
        floor = tl.where(quotient - floor > 0.5, floor + 1, floor)
        result = tl.where(quotient != 0, floor, libdevice.copysign(tl.zeros_like(plain), plain))
        result = tl.where(y == 0, plain, result)
    return result


@triton.jit
def _floor_divide(x, y):
    """Python's floor division."""
    if x.dtype.is_floating():
        result = _floor_divide_floats(x, y)
    else:
        quotient = x // y
        result = tl.where((x % y != 0) & ((x < 0) != (y < 0)), quotient - 1, quotient)
    return result


def _check_divisor(self, other):
    """Decline an integer division by 0 on a CPU, where ATen raises; its GPU kernels do not look at divisors."""
    values = [value for value in (self, other) if isinstance(value, torch.Tensor)]
    if aten.on_gpu() or not values or any(x.is_floating_point() for x in values) or number_type(other) is float:
        return self, other
    if isinstance(other, torch.Tensor):
        with reading_on_host():
            if not bool(other.all()):
                raise Decline("division by zero", lasting=False)
    elif number_type(self) is not float:
        limit(other, Limits(1, 2**63 - 1, math.inf))
    return self, other


@triton.jit
def _broadcast_pair(x, y):
    x, y = tl.broadcast(x, y)
    return x, y


def _rounding(self, other, rounding_mode):
    kinds = [v.dtype if isinstance(v, torch.Tensor) else number_type(v) for v in (self, other)]
    floating = any(kind is float or getattr(kind, "is_floating_point", False) for kind in kinds)
    if rounding_mode not in ("trunc", "floor") and not (rounding_mode is None and floating):
        raise Decline(f"rounding_mode {rounding_mode!r} for integers")
    return *_check_divisor(self, other), rounding_mode


@pointwise("div", accepts=NUMBERS, prepare=_rounding, cpu_numbers=True, casts=True)
def div_rounded(self, other, rounding_mode):
    x, y = _broadcast_pair(self, other)
    if rounding_mode == "floor":
        result = _floor_divide(x, y)
    elif not x.dtype.is_floating():
        result = x // y
    elif rounding_mode == "trunc":
        result = libdevice.trunc(true_divide(x, y))
    else:
        result = true_divide(x, y)
    return result


@pointwise("floor_divide", accepts=NUMBERS, prepare=_check_divisor, cpu_numbers=True)
def floor_divide(self, other):
    x, y = _broadcast_pair(self, other)
    return _floor_divide(x, y)


@pointwise("remainder", accepts=NUMBERS, prepare=_check_divisor, cpu_numbers=True, casts=True)
def remainder(self, other):
    """Python's %: the result has the divisor's sign."""
    x, y = _broadcast_pair(self, other)
    if x.dtype.is_floating():
        rest = libdevice.fmod(x, y)
    else:
        rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@pointwise("fmod", accepts=NUMBERS, prepare=_check_divisor, cpu_numbers=True, casts=True)
def fmod(self, other):
    """C's %: the result has the dividend's sign."""
    x, y = _broadcast_pair(self, other)
    if x.dtype.is_floating():
        rest = libdevice.fmod(x, y)
    else:
        rest = x % y
    return rest


@pointwise("reciprocal", promote=INT_TO_FLOAT)
def reciprocal(self):
    return inverse(self)


@pointwise("neg", accepts=NUMBERS)
def neg(self):
    if self.dtype.is_floating():
        return self * -1.0
    return -self


@pointwise("abs", accepts=NUMBERS)
def abs(self):
    return tl.abs(self)


def _check_float(self, end, weight):
    if not self.is_floating_point():
        raise Decline(f"lerp of {self.dtype}")
    return self, end, weight


@pointwise("addcmul", accepts=NUMBERS, casts=True)
def addcmul(self, tensor1, tensor2, value):
    """self + value * tensor1 * tensor2, multiplied in the order of ATen's kernel for the device.

    The order decides where a product overflows. On a GPU a value of 1 leaves one multiply-add, which rounds once.
    """
    if ON_CPU:
        return multiply_add(value * tensor1, tensor2, self)
    plain = value == 1
    return multiply_add(tl.where(plain, tensor1, value), tl.where(plain, tensor2, tensor1 * tensor2), self)


def _decline_integers(self, tensor1, tensor2, value):
    if not any(each.is_floating_point() or each.is_complex() for each in (tensor1, tensor2)):
        raise Decline(f"addcdiv of {tensor1.dtype} by {tensor2.dtype}; one of them has to be a float")
    return self, tensor1, tensor2, value


@pointwise(
    "addcdiv",
    accepts=FLOATS,
    casts=True,
    prepare=lambda self, tensor1, tensor2, value=1: _decline_integers(self, tensor1, tensor2, value),
)
def addcdiv(self, tensor1, tensor2, value):
    """self + value * tensor1 / tensor2, in the order of ATen's kernel for the device.

    With a value of 0 and an infinite quotient the order decides whether the result is nan.
    """
    if ON_CPU:
        return self + true_divide(value * tensor1, tensor2)
    return multiply_add(value, true_divide(tensor1, tensor2), self)


@pointwise("lerp", accepts=FLOATS, prepare=_check_float, one_dtype=True)
def lerp(self, end, weight):
    """self + weight * (end - self), computed from the nearer end, so that weights of 0 and 1 are exact."""
    distance = end - self
    # distance * -1.0: Triton's negation is 0 - x, which turns 0.0 into 0.0 where ATen has -0.0.
    from_self, from_end = multiply_add(weight, distance, self), multiply_add(distance * -1.0, 1.0 - weight, end)
    return tl.where(tl.abs(weight) < 0.5, from_self, from_end)


_POWERS = (2, 3, -1, -2, 0.5, -0.5)


def power_arguments(self, exponent, power=None):
    if isinstance(exponent, torch.Tensor):
        pair = (self, exponent) if isinstance(self, torch.Tensor) else ()
        if pair and exponent.device != self.device and not any(each.is_floating_point() for each in pair):
            raise Decline("an integer exponent on the CPU, whose sign ATen reads")
        # ATen's result is contiguous if the base is a number.
        return self, exponent if isinstance(self, torch.Tensor) else exponent.contiguous(), None
    integral = number_type(self) is int or (isinstance(self, torch.Tensor) and not self.is_floating_point())
    if integral and type(exponent) is int and exponent < 0:
        raise Decline(f"integers to the power of {exponent}")
    if type(exponent) is bool or exponent not in _POWERS or (integral and type(exponent) is float):
        return self, exponent, None
    return self, exponent, str(exponent + 0 if exponent != int(exponent) else int(exponent))


@triton.jit
def _integer_power(base, exponent):
    """Power by repeated squaring. A negative power is 0 unless the base is 1 or -1."""
    result = tl.full(base.shape, 1, base.dtype)
    square = base
    rest = exponent
    bits: tl.constexpr = base.dtype.primitive_bitwidth
    for _ in tl.static_range(bits):
        result = tl.where((rest & 1) == 1, result * square, result)
        square = square * square
        rest = rest >> 1
    odd = (exponent & 1) == 1
    unit = tl.where(base == 1, tl.full(base.shape, 1, base.dtype), tl.zeros_like(base))
    unit = tl.where(base == -1, tl.where(odd, base, tl.full(base.shape, 1, base.dtype)), unit)
    return tl.where(exponent < 0, unit, result)


@pointwise(
    "pow", accepts=NUMBERS, prepare=power_arguments, static=("power",), pin=("exponent",), cpu_numbers=True, casts=True
)
def pow(self, exponent, power):
    """self ** exponent. `power` names the exponents for which ATen multiplies or takes roots: pow(-inf, 0.5) is nan."""
    x, y = _broadcast_pair(self, exponent)
    if power == "2":
        result = x * x
    elif power == "3":
        result = x * x * x
    elif power == "-1":
        result = inverse(x)
    elif power == "-2":
        result = inverse(x * x)
    elif power == "0.5":
        result = libdevice.sqrt(x)
    elif power == "-0.5":
        result = libdevice.rsqrt(x)
    elif x.dtype.is_floating():
        result = real_power(x, y)
    else:
        result = _integer_power(x, y)
    return result


@pointwise("hypot", accepts=FLOATS)
def hypot(self, other):
    x, y = _broadcast_pair(self, other)
    return libdevice.hypot(x, y)


@pointwise("atan2", promote=INT_TO_FLOAT)
def atan2(self, other):
    x, y = _broadcast_pair(self, other)
    return libdevice.atan2(x, y)


@pointwise("copysign", promote=INT_TO_FLOAT)
def copysign(self, other):
    x, y = _broadcast_pair(self, other)
    return libdevice.copysign(x, y)


@pointwise("nextafter", accepts=(torch.bfloat16, torch.float32, torch.float64), promote=Promotion.NO_OPMATH)
def nextafter(self, other):
    """Add or subtract 1 in the bit pattern: floats of one sign are ordered as their patterns are."""
    x, y = _broadcast_pair(self, other)
    if x.dtype == tl.float64:
        integer: tl.constexpr = tl.int64
    elif x.dtype == tl.float32:
        integer: tl.constexpr = tl.int32
    else:
        integer: tl.constexpr = tl.int16
    wide_y = y.to(tl.float32) if y.dtype == tl.bfloat16 else y
    # A nan of either operand goes through x. Then x depends on both operands and shares y's layout; otherwise Triton
    # would convert each value that depends on x alone, where one operand is transposed.
    x = tl.where(wide_y == wide_y, x, y)
    wide_x = x.to(tl.float32) if x.dtype == tl.bfloat16 else x
    bits = x.to(integer, bitcast=True)
    one = tl.full(bits.shape, 1, integer)
    step = tl.where((wide_x < wide_y) != (bits < 0), bits + one, bits - one)
    sign = y.to(integer, bitcast=True) & (one << (integer.primitive_bitwidth - 1))
    step = tl.where(wide_x == 0, sign | one, step)
    result = tl.where(wide_x == wide_y, y, step.to(x.dtype, bitcast=True))
    return tl.where(wide_x != wide_x, x, result)


def _check_exponent(self, other):
    if isinstance(other, torch.Tensor) and other.dtype is torch.bool and self.is_floating_point():
        raise Decline(f"a bool exponent for {self.dtype}")
    if not isinstance(other, torch.Tensor) or other.is_contiguous():
        return self, other
    if self.shape != other.shape or is_expanded(self):
        raise Decline("a strided exponent whose shape is not self's: its layout decides the result's in ATen")
    return self, other.contiguous()


@pointwise("ldexp", promote=INT_TO_FLOAT, prepare=_check_exponent)
def ldexp(self, other):
    return self * libdevice.exp2(other)


@triton.jit
def _gcd(x, y):
    """Euclid's algorithm, until y is 0 in every lane. The lowest integer has no absolute value and stays negative."""
    x, y = tl.abs(x), tl.abs(y)
    while tl.max((y != 0).to(tl.int32), axis=None) != 0:
        rest = tl.where(y != 0, x % tl.where(y != 0, y, tl.full(y.shape, 1, y.dtype)), x)
        x = tl.where(y != 0, y, x)
        y = tl.where(y != 0, rest, y)
        y = tl.where(x == rest, tl.zeros_like(y), y)
    return x


@pointwise("gcd", accepts=INTS)
def gcd(self, other):
    x, y = _broadcast_pair(self, other)
    # ATen's order of operands, which decides the sign if one of them is the lowest integer.
    return _gcd(y, x)


@pointwise("lcm", accepts=INTS)
def lcm(self, other):
    x, y = _broadcast_pair(self, other)
    divisor = _gcd(y, x)
    safe = tl.where(divisor == 0, tl.full(divisor.shape, 1, divisor.dtype), divisor)
    quotient = x // safe
    if x.dtype.primitive_bitwidth < 32:
        # C computes in int and then truncates.
        multiple = tl.abs(quotient.to(tl.int32) * y.to(tl.int32))
    else:
        multiple = tl.abs(quotient * y)
    return tl.where(divisor == 0, divisor, multiple.to(x.dtype))


@pointwise("xlogy", promote=INT_TO_FLOAT)
def xlogy(self, other):
    """self * log(other); 0 where self is 0, even if the logarithm is infinite."""
    x, y = _broadcast_pair(self, other)
    product = tl.where(x == 0, tl.zeros_like(x), x * libdevice.log(y))
    return tl.where(y != y, y, product)


@pointwise("logaddexp", accepts=FLOATS)
def logaddexp(self, other):
    x, y = _broadcast_pair(self, other)
    larger = maximum_nan(x, y)
    total = larger + libdevice.log1p(libdevice.exp(-tl.abs(x - y)))
    return tl.where((x == y) & (tl.abs(x) == float("inf")), x, total)


@pointwise("logaddexp2", accepts=FLOATS)
def logaddexp2(self, other):
    x, y = _broadcast_pair(self, other)
    larger = maximum_nan(x, y)
    total = larger + libdevice.log1p(libdevice.exp2(-tl.abs(x - y))) * 1.4426950408889634
    return tl.where((x == y) & (tl.abs(x) == float("inf")), x, total)


@pointwise("maximum", cpu_numbers=True)
def maximum(self, other):
    return maximum_nan(self, other)


@pointwise("minimum", cpu_numbers=True)
def minimum(self, other):
    return minimum_nan(self, other)


@pointwise("fmax")
def fmax(self, other):
    """The larger operand, or the other operand where one is nan."""
    x, y = _broadcast_pair(self, other)
    return tl.where(y != y, x, tl.where(x != x, y, maximum_nan(x, y)))


@pointwise("fmin")
def fmin(self, other):
    """The smaller operand, or the other operand where one is nan."""
    x, y = _broadcast_pair(self, other)
    return tl.where(y != y, x, tl.where(x != x, y, minimum_nan(x, y)))


@pointwise("heaviside", accepts=ALL, one_dtype=True)
def heaviside(self, values):
    return tl.where(self == 0, values, (self > 0).to(self.dtype))
