"""The projections of `nn.TransformerEncoderLayer`'s fast path, divided into heads."""

import math

import triton

from tritonite.dtypes import FLOATS
from tritonite.engine.iteration import contiguous_strides
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.registry import operator, scalar_kernel
from tritonite.runtime.contract import empty


@scalar_kernel(cast=("scale",), index=("projection",), accepts=FLOATS)
def _biased(x, bias, scale, projection):
    """Add the bias, and scale the first of three projections."""
    total = x + bias
    return triton.language.where(projection == 0, total * scale, total)


@operator("_transform_bias_rescale_qkv", accepts=FLOATS)
def _transform_bias_rescale_qkv(qkv, qkv_bias, num_heads, outs=()):
    """Add a bias to queries, keys and values, divide queries by the square root of a head's size, transpose heads."""
    if qkv.dim() != 3 or qkv.dtype not in FLOATS or qkv_bias.dtype is not qkv.dtype:
        raise Decline(f"projections of {qkv.dtype} and {qkv.dim()} dimensions, and a bias of {qkv_bias.dtype}")
    batch, length, width = qkv.shape
    if num_heads < 1 or width % (3 * num_heads) or tuple(qkv_bias.shape) != (width,) or not qkv.numel():
        raise Decline(f"{num_heads} heads of projections of shape {tuple(qkv.shape)}, bias {tuple(qkv_bias.shape)}")
    size = width // (3 * num_heads)
    shape = (batch, num_heads, length, size)
    x = qkv.unflatten(-1, (3, num_heads, size)).permute(2, 0, 3, 1, 4)
    bias = qkv_bias.view(3, 1, num_heads, 1, size).expand(x.shape)
    scale = 1 / math.sqrt(size)
    if not outs:
        whole = empty((3, *shape), qkv.dtype, qkv.device)
        _biased.run((x, bias, scale, 0), (whole,))
        return tuple(whole.unbind(0))
    outs = outputs((qkv, qkv_bias), [shape] * 3, [qkv.dtype] * 3, outs, strides=contiguous_strides(shape))
    for i, out in enumerate(outs):
        _biased.run((x[i : i + 1], bias[i : i + 1], scale if i == 0 else 1.0, 0), (out[None],))
    return outs
