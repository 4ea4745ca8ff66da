"""Products of floats and a weight of 8-bit or packed 4-bit integers, and the packed formats."""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import FLOATS, SINGLE_FLOATS
from tritonite.engine.gemm.work import Epilogue
from tritonite.engine.outputs import outputs
from tritonite.engine.quantized.products import int4_words_product, int8_product
from tritonite.engine.quantized.table import aten_multiplies_words_faster
from tritonite.engine.quantized.tensor_core_words import pack
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.activation import silu
from tritonite.registry import operator, scalar_kernel
from tritonite.runtime.contract import decline_if_slower, empty

_silu_formula = silu.formula


@triton.jit
def _relu(x):
    return tl.where(x < 0, tl.zeros_like(x), x)


@triton.jit
def _silu(x):
    return _silu_formula(x)


_ACTIVATIONS = {None: None, "none": None, "relu": _relu, "silu": _silu}


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
    decline_if_slower(aten_multiplies_words_faster(M, K))
    (out,) = outs = outputs((self, mat2, qScaleAndZeros), [(M, N)], [self.dtype], outs)
    int4_words_product(self, mat2, qScaleAndZeros, qGroupSize, out)
    return outs


@scalar_kernel(accepts=(torch.uint8,), output_dtypes=(torch.int8,))
def _biased_bytes(byte):
    """Return the integer that a byte stores with a bias of 128."""
    return byte.to(tl.int32) - 128


@scalar_kernel(accepts=(torch.uint8,), output_dtypes=(torch.int8, torch.int8))
def _biased_nibbles(byte):
    """Return the integers that the low and the high nibble store with a bias of 8."""
    whole = byte.to(tl.int32)
    return (whole & 15) - 8, (whole >> 4) - 8


def _rows_of_interleaved(weight, N):
    """Return the int8 weight (N, K) of a weight that CUTLASS's products of mixed dtypes on sm_80 take, (K, ...) bytes.

    Tiles of 64 numbers along K of two columns, or of four for 4-bit integers, alternate in memory. Within a tile, the
    numbers are in the order in which lanes of a tensor core instruction (m16n8k16) convert them.
    """
    K = weight.shape[0]
    rows = empty((N, K), torch.int8, weight.device)
    if weight.shape[1] == N:
        # Numbers 16 i + 8 h + 2 q + b of a tile are at (i, q, b, h).
        stored = weight.view(N // 2, K // 64, 2, 4, 4, 2, 2)
        placed = rows.view(N // 2, 2, K // 64, 4, 2, 4, 2).permute(0, 2, 1, 3, 5, 6, 4)
        _biased_bytes.run((stored,), (placed,))
        return rows
    # Numbers 32 i + 16 a + 8 nibble + 2 b + h of a tile are at (i, b, h, a).
    stored = weight.view(N // 4, K // 64, 4, 2, 4, 2, 2)
    placed = rows.view(N // 4, 4, K // 64, 2, 2, 2, 4, 2).permute(0, 2, 1, 3, 6, 7, 4, 5)
    _biased_nibbles.run((stored,), (placed[..., 0], placed[..., 1]))
    return rows


@operator("_mixed_dtypes_linear", accepts=(torch.float16, torch.bfloat16), cuda_only=("_mixed_dtypes_linear",))
def _mixed_dtypes_linear(input, weight, scale, bias, activation, outs=()):
    """Undo the interleaving of the weight, and multiply by its integers; scale, bias and activation are fused."""
    dtype = input.dtype
    if dtype not in (torch.float16, torch.bfloat16) or weight.dtype is not torch.uint8 or scale.dtype is not dtype:
        raise Decline(
            f"operands of {dtype}, {weight.dtype} and {scale.dtype}; served are 16-bit floats and a uint8 weight, "
            "with scales of the input's dtype"
        )
    if not input.dim() or weight.dim() != 2 or scale.dim() != 1 or not weight.is_contiguous():
        raise Decline(
            f"operands of shapes {tuple(input.shape)}, {tuple(weight.shape)} and {tuple(scale.shape)}; served are "
            "(..., K), contiguous (K, N) or (K, N / 2), and (N,)"
        )
    aten.check_architecture(input.device, ("sm_8",), "interleaved weights")
    (K, columns), N = weight.shape, scale.shape[0]
    if input.shape[-1] != K or N not in (columns, 2 * columns) or K % 64 or N % 64 or not K * N:
        raise Decline(f"{input.shape[-1]} columns for a weight of shape {(K, columns)} and {N} scales")
    if bias is not None and bias.numel() and (bias.dtype is not dtype or tuple(bias.shape) != (N,)):
        raise Decline(f"a bias of {bias.dtype} and shape {tuple(bias.shape)}, not {dtype} of {(N,)}")
    added = None if bias is None or not bias.numel() else bias
    if activation not in _ACTIVATIONS or (added is None and _ACTIVATIONS[activation] is not None):
        raise Decline(f"the activation {activation!r} without a bias, or no relu or silu; ATen refuses it")
    if input.reshape(-1, K).stride(1) != 1:
        raise Decline("rows of the input that are not contiguous; ATen refuses them")
    inputs = (input, weight, scale, *(() if added is None else (added,)))
    (out,) = outputs(inputs, [(*input.shape[:-1], N)], [dtype], outs)
    epilogue = Epilogue(added, (scale,), beta=1.0, activation=_ACTIVATIONS[activation])
    int8_product(input.reshape(-1, K), _rows_of_interleaved(weight, N), out.view(-1, N), epilogue)
    return (out,)
