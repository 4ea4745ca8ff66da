"""Products of floats and a weight of 8-bit or packed 4-bit integers, and the packed format."""

import torch

from tritonite.dtypes import FLOATS, SINGLE_FLOATS
from tritonite.engine.gemm.work import Epilogue
from tritonite.engine.outputs import outputs
from tritonite.engine.quantized.products import int4_words_product, int8_product
from tritonite.engine.quantized.tensor_core_words import pack
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


@operator("_convert_weight_to_int4pack", accepts=(torch.uint8,), cuda_only=("_convert_weight_to_int4pack",))
def _convert_weight_to_int4pack(self, innerKTiles, outs=()):
    """Gather the eight numbers of each word, in the order in which tensor cores read a weight."""
    if self.dtype is not torch.uint8 or self.dim() != 2 or innerKTiles not in (2, 4, 8) or not self.is_contiguous():
        raise Decline(
            f"{self.dtype} of shape {tuple(self.shape)}, {innerKTiles} tiles; a contiguous uint8 matrix is served"
        )
    N, half = self.shape
    if not half or half % (8 * innerKTiles):
        raise Decline(f"{2 * half} numbers along K; multiples of {16 * innerKTiles} are served")
    shape = (-(-N // 8), half // (8 * innerKTiles), 32, innerKTiles // 2)
    (out,) = outs = outputs((self,), [shape], [torch.int32], outs)
    pack(self, out)
    return outs


@operator("_weight_int4pack_mm", accepts=(torch.bfloat16,), cuda_only=("_weight_int4pack_mm",))
def _weight_int4pack_mm(self, mat2, qGroupSize, qScaleAndZeros, outs=()):
    """Dequantise words of a packed weight in registers, and sum products in float32."""
    words_of = mat2.shape[3] if mat2.dim() == 4 else 0
    if self.dim() != 2 or mat2.dtype is not torch.int32 or words_of not in (1, 2, 4) or not mat2.is_contiguous():
        raise Decline(f"a weight of {mat2.dtype} and shape {tuple(mat2.shape)}; contiguous int32 words are served")
    (M, K), N = self.shape, 8 * mat2.shape[0]
    if not self.is_contiguous() or tuple(mat2.shape[1:3]) != (K // (32 * words_of), 32) or K % (32 * words_of):
        raise Decline(f"an operand of shape {tuple(self.shape)} for a weight of shape {tuple(mat2.shape)}")
    if qGroupSize not in (32, 64, 128, 256) or not K or K % qGroupSize:
        raise Decline(f"groups of {qGroupSize} numbers along {K}; 32, 64, 128 and 256, which divide K, are served")
    if self.dtype is not torch.bfloat16 or qScaleAndZeros.dtype is not torch.bfloat16:
        raise Decline(f"operands of {self.dtype} and {qScaleAndZeros.dtype}; bfloat16 is served")
    if tuple(qScaleAndZeros.shape) != (K // qGroupSize, N, 2):
        raise Decline(f"scales and zeros of shape {tuple(qScaleAndZeros.shape)}, not {(K // qGroupSize, N, 2)}")
    (out,) = outs = outputs((self, mat2, qScaleAndZeros), [(M, N)], [self.dtype], outs)
    int4_words_product(self, mat2, qScaleAndZeros, qGroupSize, out)
    return outs
