"""Cross products of vectors with three elements."""

from tritonite.dtypes import NUMBERS
from tritonite.engine.iteration import broadcast_shape
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.language.math import multiply_add
from tritonite.ops.indexing import only_dimension
from tritonite.registry import exclude, operator, scalar_kernel

exclude("_linalg_check_errors", "the host waits for the error codes of a factorisation")


@scalar_kernel(accepts=NUMBERS, output_dtypes=(None, None, None))
def _cross(a, b, c, x, y, z):
    return multiply_add(b, z, -(c * y)), multiply_add(c, x, -(a * z)), multiply_add(a, y, -(b * x))


@operator("linalg_cross", kernels=(_cross,))
def linalg_cross(self, other, dim=-1, outs=()):
    """Launch one pointwise formula: the six components are its operands, views of the output its results."""
    if self.dim() != other.dim() or not self.dim() or self.dtype is not other.dtype:
        raise Decline(f"operands of {self.dim()} and {other.dim()} dimensions, of {self.dtype} and {other.dtype}")
    if self.dtype not in NUMBERS:
        raise Decline(f"dtype {self.dtype}")
    dim = only_dimension(dim, self.dim())
    if self.shape[dim] != 3 or other.shape[dim] != 3:
        raise Decline(f"vectors of {self.shape[dim]} and {other.shape[dim]} elements; 3 are served")
    shape = broadcast_shape((self.shape, other.shape))
    (out,) = outputs((self, other), [shape], [self.dtype], outs)
    vectors = [x.expand(shape) for x in (self, other)]
    components = [x.select(dim, i) for x in vectors for i in range(3)]
    _cross.run(components, [out.select(dim, i) for i in range(3)])
    return (out,)
