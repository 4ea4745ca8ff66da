"""Checks of the calls that ATen's attention operators accept; what a check declines goes to ATen."""

from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.engine.attention.problem import Problem
from tritonite.engine.attention.table import LARGEST_HEAD
from tritonite.engine.iteration import common_device, contiguous_strides, strides_after_conversion
from tritonite.errors import Decline
from tritonite.ops.matmul import precision_of
from tritonite.registry import operator
from tritonite.runtime.contract import empty_strided, limit
from tritonite.runtime.symbols import Limits, zero_or_one

# Dropout probabilities that round to neither 0 nor 1 in float32.
_DROPOUT = Limits(1, 0, 1 - 2.0**-24, True, 2.0**-149)


# Starts of sequences that are not packed.
DENSE = None, None


class Call(NamedTuple):
    """A call over (batch, rows, heads, elements) operands, or over packed ones in the shape that the backend takes.

    starts: first rows of packed sequences in query and key, or DENSE.
    lengths: largest numbers of queries and keys of a sequence; ATen's efficient attention may have None.
    mask: is_causal, or ATen's custom_mask_type.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    starts: tuple[Any, Any]
    lengths: tuple[Any, Any]
    dropout_p: Any
    mask: Any
    scale: Any


def cuda_operator(*names, accepts):
    """Declare operators that ATen has for CUDA alone, with the same arguments in any order."""
    return operator(*names, accepts=accepts, pin_zero_or_one=("dropout_p",), cuda_only=names)


def check_rank(*tensors):
    """Decline operands of other than four dimensions."""
    for tensor in tensors:
        if tensor.dim() != 4:
            raise Decline(f"an operand has {tensor.dim()} dimensions, and must have 4")


def check_same_device(*tensors):
    """Decline tensors on several devices."""
    if common_device(tensors, ())[1]:
        raise Decline("tensors are on several devices")


def check_operands(query, key, value, multiple, accepts, one_size, largest=LARGEST_HEAD):
    """Decline operands, (batch, heads, rows, elements), that no kernel serves.

    A head has up to `largest` elements, a multiple of `multiple`. With `one_size` heads and values have equally many.
    """
    tensors = query, key, value
    if query.dtype not in accepts or any(tensor.dtype is not query.dtype for tensor in tensors):
        raise Decline(f"operands are {query.dtype}, {key.dtype} and {value.dtype}: they must have one supported dtype")
    check_rank(*tensors)
    check_same_device(*tensors)
    (batch, heads, _, head), (_, kv_heads, keys, _), size = query.shape, key.shape, value.shape[3]
    if key.shape[3] != head or tuple(value.shape[:3]) != (batch, kv_heads, keys) or key.shape[0] != batch:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise Decline(f"query, key and value have the shapes {shapes}, which do not fit")
    if not (kv_heads and heads % kv_heads == 0):
        raise Decline(f"key has {kv_heads} heads, which must divide the query's {heads}")
    if not 0 < head <= largest or not 0 < size <= largest or head % multiple or size % multiple:
        raise Decline(f"heads have {head} and {size} elements: multiples of {multiple} up to {largest} are served")
    if one_size and head != size:
        raise Decline(f"values have {size} elements and keys {head}: they must have equally many")
    if any(tensor.stride(3) != 1 and tensor.shape[3] != 1 for tensor in tensors):
        raise Decline("the elements of a head are not contiguous")


def expanded_bias(bias, query, key, dtypes, fits):
    """Expand a bias of one of `dtypes` that `fits` a shape, (batch, heads, queries, keys), to it; None stays None."""
    if bias is None:
        return None
    shape = (*query.shape[:3], key.shape[2])
    if bias.dtype not in dtypes or not fits(bias, shape):
        raise Decline(f"a bias of {bias.dtype} and shape {tuple(bias.shape)} does not fit the query and key")
    check_same_device(query, bias)
    return bias.expand(shape)


def problem_of(query, key, value, bias, is_causal, scale, diagonal=0, packed=None):
    """Return the engine's problem, with products of the precision that is set for the query's dtype."""
    return Problem(query, key, value, bias, scale, bool(is_causal), diagonal, precision_of(query.dtype), packed)


def check_no_dropout(dropout_p, reason):
    """Decline a call with dropout."""
    if zero_or_one(dropout_p) != 0:
        raise Decline(reason)


def has_dropout(problem, dropout_p):
    """Return whether there is dropout. Decline probabilities that ATen refuses, or that its kernels round to 0 or 1."""
    if zero_or_one(dropout_p) == 0:
        return False
    if "random" in devices.current.unverified and not devices.current.interpreted:
        raise Decline(f"dropout on {devices.current.kind}, where ATen's kernels draw other random numbers")
    limit(dropout_p, _DROPOUT)
    if not problem.batch * problem.query.shape[1] * problem.queries * problem.keys:
        raise Decline("dropout of nothing: there are no scores")
    return True


def check_starts(query_starts, key_starts, query):
    """Decline starts of packed sequences that ATen refuses."""
    for starts in (query_starts, key_starts):
        if starts.dtype is not torch.int32 or starts.dim() != 1 or not starts.is_contiguous():
            raise Decline(f"starts of sequences are {starts.dim()}-d {starts.dtype}: they must be contiguous 1-d int32")
    if query_starts.shape != key_starts.shape or query_starts.shape[0] < 2:
        counts = query_starts.shape[0], key_starts.shape[0]
        raise Decline(f"queries have {counts[0]} starts and keys {counts[1]}: both must have the same, at least 2")
    check_same_device(query, query_starts, key_starts)


def check_both_packed(starts):
    """Decline starts of queries without starts of keys, or the reverse."""
    if (starts[0] is None) != (starts[1] is None):
        raise Decline("queries or keys are packed, but not both")


def check_not_nested(cum_seq_q, cum_seq_k):
    """Decline starts of rows that dense operators get for nested tensors."""
    if cum_seq_q is not None or cum_seq_k is not None:
        raise Decline("cum_seq_q and cum_seq_k are for nested tensors, which are not served")


def check_forward_results(problem, grad_out, out, logsumexp):
    """Decline results of a forward pass, and their gradient, whose dtypes, shapes or layouts ATen's would not have."""
    query, value = problem.query, problem.value
    shape = (*query.shape[:3], value.shape[3])
    if grad_out.dtype is not query.dtype or out.dtype is not query.dtype or logsumexp.dtype is not torch.float32:
        raise Decline(f"grad_out is {grad_out.dtype}, out {out.dtype} and logsumexp {logsumexp.dtype}, unlike ATen's")
    if tuple(grad_out.shape) != shape or tuple(out.shape) != shape:
        raise Decline(f"grad_out is {tuple(grad_out.shape)} and out {tuple(out.shape)}: both must be {shape}")
    packed = problem.packed is not None and problem.packed.logarithms
    batch, rows = (1, shape[2]) if packed else (problem.batch, problem.queries)
    if logsumexp.dim() != 3 or tuple(logsumexp.shape[:2]) != (batch, shape[1]) or logsumexp.shape[2] < rows:
        raise Decline(f"logsumexp is {tuple(logsumexp.shape)}: it must be {(batch, shape[1], rows)}, or longer")
    check_same_device(query, grad_out, out, logsumexp)
    if out.stride(3) != 1 and out.shape[3] != 1:
        raise Decline("the elements of a head are not contiguous in out")


def rows_before_heads(shape):
    """Return contiguous (batch, rows, heads, elements) strides for a (batch, heads, rows, elements) shape."""
    return contiguous_strides(shape, (3, 1, 2, 0))


def empty_like(tensor):
    """Return what `torch.empty_like` gives."""
    return empty_strided(
        tensor.shape, strides_after_conversion(tensor.shape, tensor.stride()), tensor.dtype, tensor.device
    )


def query_and_key_rows(query, key):
    """Return the rows of a (batch, heads, rows, elements) query and key."""
    check_rank(query, key)
    return query.shape[2], key.shape[2]


def rows_first(*tensors):
    """Swap dimensions 1 and 2: (batch, heads, rows, elements) becomes (batch, rows, heads, elements), and back."""
    return tuple([tensor.transpose(1, 2) for tensor in tensors])
