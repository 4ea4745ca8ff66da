"""`dist`, the p-norm of a difference, and `renorm`, which scales slices down to a p-norm."""

import math

import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.iteration import broadcast_shape
from tritonite.engine.outputs import dimensions, outputs
from tritonite.engine.rows.declare import Reduction, RowTransform, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language.math import maximum_nan, minimum_nan, square_root, true_divide
from tritonite.ops.reduction.norms import inverse_power, power, root
from tritonite.ops.reduction.sums import check_floats, only
from tritonite.registry import operator


@triton.jit
def _difference(x, y):
    """x - y rounded to the operands' dtype, as in ATen's gradient; 16-bit floats are then widened to float32."""
    if x.dtype == tl.float64:
        difference = x - y
    else:
        difference = (x.to(tl.float32) - y.to(tl.float32)).to(x.dtype).to(tl.float32)
    return difference


@triton.jit
def _one_if_different(x, y):
    return tl.where(_difference(x, y) != 0.0, 1.0, 0.0)


@triton.jit
def _distance(x, y):
    return tl.abs(_difference(x, y))


@triton.jit
def _squared_distance(x, y):
    difference = _difference(x, y)
    return difference * difference


@triton.jit
def _distance_to_power(x, y, p):
    return power(_difference(x, y), p)


_DISTANCES = {
    0.0: Reduction((0.0,), _one_if_different, add_states, only),
    1.0: Reduction((0.0,), _distance, add_states, only),
    2.0: Reduction((0.0,), _squared_distance, add_states, root),
    math.inf: Reduction((0.0,), _distance, maximum_nan, only),
    -math.inf: Reduction((math.inf,), _distance, minimum_nan, only),
}
_any_distance = Reduction((0.0,), _distance_to_power, add_states, inverse_power, parametric=True)


@operator("dist", accepts=FLOATS, pin=("p",))
def dist(self, other, p, outs=()):
    check_floats(self, other)
    if isinstance(p, complex) or math.isnan(p):
        raise Decline(f"p is {p}; it has to be real and not nan")
    shape = broadcast_shape((self.shape, other.shape))
    if math.prod(shape) == 1 and float(p) not in _DISTANCES:
        # The norm of one element is its absolute value in ATen; a power and its root would round.
        p = 1
    if 0 in shape and not 0 <= p < 2**16:
        raise Decline(f"p is {p} for tensors without elements; it has to be in [0, {2**16})")
    reduction = _DISTANCES.get(float(p), _any_distance)
    numbers = (float(p),) if reduction is _any_distance else ()
    dtype = self.dtype
    operands, read = (self.expand(shape), other.expand(shape)), (dtype, dtype)
    return reduced(reduction, operands, None, False, (dtype,), outs, opmath(dtype), numbers=numbers, read=read)


@triton.jit
def _absolute(x, p, maxnorm):
    return tl.abs(x)


@triton.jit
def _square(x, p, maxnorm):
    return x * x


@triton.jit
def _to_power(x, p, maxnorm):
    return power(x, p)


@triton.jit
def _factor(norm, count, p, maxnorm):
    limit = tl.broadcast_to(maxnorm.to(norm.dtype), norm.shape)
    return tl.where(norm > limit, true_divide(limit, norm + 1e-7), 1.0)


@triton.jit
def _factor_of_root(state, count, p, maxnorm):
    return _factor(square_root(state), count, p, maxnorm)


@triton.jit
def _factor_of_power(state, count, p, maxnorm):
    return _factor(inverse_power(state, count, p), count, p, maxnorm)


@triton.jit
def _scale(x, factor, p, maxnorm):
    return x * factor


_RENORMS = {
    1.0: RowTransform(Reduction((0.0,), _absolute, add_states, _factor, parametric=True), _scale),
    2.0: RowTransform(Reduction((0.0,), _square, add_states, _factor_of_root, parametric=True), _scale),
    math.inf: RowTransform(Reduction((0.0,), _absolute, maximum_nan, _factor, parametric=True), _scale),
}
_any_renorm = RowTransform(Reduction((0.0,), _to_power, add_states, _factor_of_power, parametric=True), _scale)


@operator("renorm", accepts=FLOATS, pin=("p", "maxnorm"))
def renorm(self, p, dim, maxnorm, outs=()):
    """Scale each slice along `dim` down to a norm of at most `maxnorm`. The result may be the input."""
    check_floats(self)
    if isinstance(p, complex) or isinstance(maxnorm, complex) or not (p > 0 and maxnorm >= 0):
        raise Decline(f"p is {p} and maxnorm {maxnorm}; p has to be above 0, maxnorm at least 0")
    if 2**16 < p < math.inf:
        raise Decline(f"p is {p}, for which powers are 0, 1 or infinite; up to {2**16} and infinity are served")
    if self.dim() < 2:
        raise Decline(f"{self.dim()} dimensions; 2 or more are served")
    (kept,) = dimensions(dim, self.dim())
    outs = outputs((self,), [self.shape], [self.dtype], outs, in_place=(self,))
    if not self.numel():
        if math.isinf(p):
            raise Decline(f"p is {p} for slices without elements")
        return outs
    dims = [d for d in range(self.dim()) if d != kept]
    _RENORMS.get(float(p), _any_renorm).run((self,), dims, outs, opmath(self.dtype), (float(p), float(maxnorm)))
    return outs
