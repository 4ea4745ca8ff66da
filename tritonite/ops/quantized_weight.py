"""Products of floats and a weight of 8-bit integers."""

import torch

from tritonite.dtypes import FLOATS, SINGLE_FLOATS
from tritonite.engine.gemm.work import Epilogue
from tritonite.engine.outputs import outputs
from tritonite.engine.quantized.products import int8_product
from tritonite.errors import Decline
from tritonite.registry import operator


@operator("_weight_int8pack_mm", accepts=SINGLE_FLOATS)
def _weight_int8pack_mm(self, mat2, scales, outs=()):
    """Sum products in float32, and multiply each column of the result by its scale there."""
    if self.dim() != 2 or mat2.dim() != 2 or self.shape[1] != mat2.shape[1] or scales.shape != mat2.shape[:1]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (self, mat2, scales))
        raise Decline(f"operands of shapes {shapes}; (M, K), (N, K) and (N,) are served")
    if self.dtype not in SINGLE_FLOATS or mat2.dtype is not torch.int8 or scales.dtype not in FLOATS:
        raise Decline(f"operands of {self.dtype}, {mat2.dtype} and {scales.dtype}; floats, int8 and floats are served")
    shape = (self.shape[0], mat2.shape[0])
    (out,) = outs = outputs((self, mat2, scales), [shape], [self.dtype], outs)
    int8_product(self, mat2, out, Epilogue(scales=(scales,)))
    return outs
