"""Jagged sequences, stored end to end, to padded ones and back."""

import torch

from tritonite.dtypes import FLOATS, INTS
from tritonite.engine.iteration import contiguous_strides
from tritonite.engine.jagged import pad, unpad
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.indexing import check_index
from tritonite.registry import operator
from tritonite.runtime.contract import empty

# On a CPU ATen raises for sequences beyond the values; on a GPU it does not check.


@operator("_jagged_to_padded_dense_forward", accepts=FLOATS)
def jagged_to_padded_dense(values, offsets, max_lengths, padding_value=0.0, outs=()):
    if len(offsets) != 1 or len(max_lengths) != 1:
        raise Decline(f"{len(offsets)} levels of offsets and {len(max_lengths)} of lengths, not one of each")
    if not values.dim() or values.dtype not in FLOATS:
        raise Decline(f"values of {values.dtype} and {values.dim()} dimensions")
    if values.dim() > 2 and aten.on_gpu():
        raise Decline(f"values of {values.dim()} dimensions, for which ATen raises on GPUs")
    (ends,), (longest,) = offsets, max_lengths
    check_index(ends)
    inner = tuple(values.shape[1:])
    if ends.dim() != 1 or len(ends) < 2 or not ends.is_contiguous() or longest <= 0 or not values.numel():
        raise Decline("no sequences, no values, a length of 0, or offsets that are not a contiguous vector")
    if values.stride()[1:] != contiguous_strides(inner):
        raise Decline("values that are not contiguous")
    outputs((values, ends), [], [], (), accepts=FLOATS + INTS)
    result = empty((len(ends) - 1, longest, *inner), values.dtype, values.device)
    pad(result, values, ends, padding_value, aten.on_cpu())
    return (result,)


def _is_aligned(dense: torch.Tensor) -> bool:
    """Return whether ATen copies rows of fp16 by 16-byte vectors."""
    aligned = dense.shape[2] % 8 == dense.stride(1) % 8 == dense.data_ptr() % 16 == 0
    return dense.dtype is torch.float16 and dense.stride(2) == 1 and aligned


@operator("_padded_dense_to_jagged_forward", accepts=FLOATS)
def padded_dense_to_jagged(dense, offsets, total_L=None, outs=()):
    if len(offsets) != 1 or dense.dim() != 3 or dense.dtype not in FLOATS or not dense.numel():
        raise Decline(f"{len(offsets)} levels of offsets, or sequences of {dense.dtype} and shape {tuple(dense.shape)}")
    (ends,) = offsets
    check_index(ends)
    if ends.dim() != 1 or len(ends) != len(dense) + 1 or not ends.is_contiguous():
        raise Decline(f"offsets that are not a contiguous vector of {len(dense) + 1}")
    if total_L is None or total_L < 0:
        raise Decline("no total length, which the host would read from the device, or a negative one")
    if not total_L and aten.on_cpu():
        raise Decline("a total length of 0, which ATen's CPU kernel compares with the last offset")
    outputs((dense, ends), [], [], (), accepts=FLOATS + INTS)
    result = empty((total_L, dense.shape[2]), dense.dtype, dense.device)
    if not total_L:
        return (result,)
    # ATen's kernel for aligned rows of fp16 gives rows behind the last sequence to that sequence.
    searched = len(dense) - (aten.on_cpu() or _is_aligned(dense))
    unpad(result, dense, ends, searched, aten.on_cpu())
    return (result,)
