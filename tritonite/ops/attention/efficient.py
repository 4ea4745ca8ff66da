"""ATen's efficient attention for CUDA, dense and packed, and its gradients."""

from typing import NamedTuple

import torch

from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.attention.dropout import Dropout
from tritonite.engine.attention.problem import Packed
from tritonite.engine.iteration import INT32_LIMIT
from tritonite.errors import Decline
from tritonite.ops.attention import checks
from tritonite.ops.attention.passes import run_backward, run_forward
from tritonite.runtime.contract import empty, held, number_in
from tritonite.runtime.symbols import zero_or_one

# ATen pads the rows of logsumexp to a multiple of this.
_PADDED = 32
# custom_mask_type: no mask, causal from the first query and key, causal up to the last query and key.
_ALL, _FROM_FIRST, _FROM_LAST = range(3)
# Elements of the widest head. ATen has no limit.
_LARGEST_HEAD = 2**14
# Largest batch that ATen computes in one launch.
_LARGEST_BATCH = 2**16 - 1


def _check_aligned(tensor, every, dims):
    """Decline rows that ATen's 16-byte loads, of `every` elements, cannot read."""
    if tensor.data_ptr() % 16 or any(tensor.stride(dim) % every for dim in dims):
        raise Decline("rows are not 16-byte aligned, as ATen requires")


def _dense_call(query, key, value, bias, dropout_p, is_causal, scale):
    """Return the `checks.Call` of (batch, heads, rows, elements) operands."""
    lengths, mask = checks.query_and_key_rows(query, key), _FROM_FIRST if is_causal else _ALL
    return checks.Call(*checks.rows_first(query, key, value), bias, checks.DENSE, lengths, dropout_p, mask, scale)


def _problem(call):
    """Check a call, and return the engine's problem without dropout."""
    starts, lengths, mask, scale = call.starts, call.lengths, call.mask, call.scale
    checks.check_rank(*call[:3])
    query, key, value = checks.rows_first(*call[:3])
    every = 16 // query.dtype.itemsize
    checks.check_operands(query, key, value, every, SINGLE_FLOATS, one_size=False, largest=_LARGEST_HEAD)
    if query.shape[1] != key.shape[1]:
        raise Decline(f"query has {query.shape[1]} heads and key {key.shape[1]}: they must have equally many")
    if query.shape[0] > _LARGEST_BATCH:
        raise Decline(f"the batch is {query.shape[0]}: ATen has several launches above {_LARGEST_BATCH}")
    for tensor in (query, key):
        _check_aligned(tensor, every, (1, 2))
    shape = (*query.shape[:3], key.shape[2])
    bias = checks.expanded_bias(call.bias, query, key, (query.dtype,), lambda given, shape: tuple(given.shape) == shape)
    if bias is not None:
        _check_aligned(bias, every, [dim for dim in range(3) if shape[dim] > 1])
        if bias.stride(3) != 1:
            raise Decline("the last dimension of the bias is not contiguous")
    checks.check_both_packed(starts)
    if mask not in (_ALL, _FROM_FIRST, _FROM_LAST):
        raise Decline(f"custom_mask_type is {mask}: it may be 0, 1 or 2")
    diagonal = shape[3] - shape[2] if mask == _FROM_LAST else 0
    if starts[0] is None:
        if diagonal < 0:
            raise Decline(f"{shape[2]} queries exceed {shape[3]} keys under a mask that is aligned at the end")
        return checks.problem_of(query, key, value, bias, mask != _ALL, scale, diagonal)
    checks.check_starts(*starts, query)
    if query.shape[0] != 1 or bias is not None or mask == _FROM_LAST:
        raise Decline("packed sequences have a batch of more than 1, a bias, or a mask that is aligned at the end")
    if None in lengths:
        lengths = [key.shape[2] if length is None else length for length in lengths]
    return checks.problem_of(
        query, key, value, None, mask != _ALL, scale, packed=Packed(*starts, *lengths, False, False)
    )


def _with_dropout(problem, dropout_p, state=(0, 0)):
    """Return the problem with dropout, if there is any; a gradient gives seed and offset as `state`."""
    if not checks.has_dropout(problem, dropout_p):
        return problem
    if problem.packed is not None:
        raise Decline("dropout of packed sequences, for whose gradients ATen draws other numbers than for results")
    elements = problem.batch * problem.query.shape[1] * problem.queries * problem.keys
    if elements >= INT32_LIMIT:
        raise Decline(f"dropout of {elements} scores, which ATen counts in 32 bits")
    return problem._replace(dropout=Dropout(dropout_p, False, -(-elements // 4) * 4, state=state))


def _efficient_forward(call, logarithms):
    """Return (out, logsumexp, seed, offset) as `_efficient_attention_forward` does."""
    problem = _with_dropout(_problem(call), call.dropout_p)
    (batch, rows, heads, _), dtype, device = call.query.shape, call.query.dtype, call.query.device
    out = empty((batch, rows, heads, call.value.shape[3]), dtype, device)
    padded = -(-problem.queries // _PADDED) * _PADDED if logarithms else 0
    logsumexp = empty((problem.batch, heads, padded), torch.float32, device)
    drawn = run_forward(problem, "efficient", out.transpose(1, 2), logsumexp if logarithms else None, "0")
    # ATen returns the generator state on the CPU, even if nothing was drawn.
    state = map(held, drawn) if drawn else [empty((), torch.int64, torch.device("cpu")) for _ in range(2)]
    return out, logsumexp, *state


def _bias_gradient(bias):
    """Allocate the gradient of a bias as ATen does, with rows of a multiple of 16 elements."""
    padded = -(-bias.shape[3] // 16) * 16
    return empty((*bias.shape[:3], padded), bias.dtype, bias.device)[..., : bias.shape[3]]


class _Gradient(NamedTuple):
    """A backward pass: results of the forward pass, (batch, rows, heads, elements), and what ATen asks for.

    state: seed and offset of dropout.
    shared: the gradients of query, key and value are interleaved in one allocation.
    """

    grad_out: torch.Tensor
    out: torch.Tensor
    logsumexp: torch.Tensor
    state: tuple[torch.Tensor, torch.Tensor]
    bias_requires_grad: bool
    shared: bool = False


def _efficient_backward(call, gradient):
    """Return the gradients, (batch, rows, heads, elements), and the bias's or None."""
    query, key, value, bias = call[:4]
    grad_out, out, logsumexp, state, bias_requires_grad, shared = gradient
    problem = _problem(call)
    if zero_or_one(call.dropout_p) != 0:
        if any(each.dim() or each.dtype is not torch.int64 or each.device.type != "cpu" for each in state):
            raise Decline("the generator state is not two int64 scalars on the CPU, as in a captured graph")
        problem = _with_dropout(problem, call.dropout_p, [number_in(each) for each in state])
    checks.check_rank(grad_out, out)
    _check_aligned(value, 4, (1, 2))
    results = *checks.rows_first(grad_out, out), logsumexp
    checks.check_forward_results(problem, *results)
    # ATen assumes these strides without a check.
    heads, size = out.shape[2:]
    if (out.shape[1] > 1 and out.stride(1) != heads * size) or out.data_ptr() % 16:
        raise Decline("out is not laid out like ATen's: contiguous rows, 16-byte aligned")
    unaligned = any(logsumexp.stride(dim) % 8 for dim in (0, 1) if logsumexp.shape[dim] > 1)
    if unaligned or (logsumexp.shape[2] > 1 and logsumexp.stride(2) != 1):
        raise Decline("logsumexp is not laid out like ATen's: contiguous rows, at strides of a multiple of 8")
    shape, device = tuple(query.shape), query.device
    if shared and (shape != tuple(key.shape) or shape != tuple(value.shape)):
        raise Decline("shared_storage_dqdkdv needs query, key and value of one shape")
    if shared:
        together = empty((*shape[:2], 3, *shape[2:]), query.dtype, device)
        grads = tuple([together.select(2, i) for i in range(3)])
    else:
        grads = tuple([empty(tensor.shape, tensor.dtype, device) for tensor in (query, key, value)])
    grad_bias = _bias_gradient(bias) if bias_requires_grad and bias is not None else None
    run_backward(problem, "efficient", *results, checks.rows_first(*grads), grad_bias)
    return *grads, grad_bias


@checks.cuda_operator("_scaled_dot_product_efficient_attention", accepts=SINGLE_FLOATS)
def _efficient_attention(query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale, outs=()):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    call = _dense_call(query, key, value, attn_bias, dropout_p, is_causal, scale)
    out, *others = _efficient_forward(call, compute_log_sumexp)
    return out.transpose(1, 2), *others


@checks.cuda_operator("_scaled_dot_product_efficient_attention_backward", accepts=SINGLE_FLOATS)
def _efficient_attention_backward(
    grad_out_,
    query,
    key,
    value,
    attn_bias,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    dropout_p,
    grad_input_mask,
    is_causal,
    scale,
    outs=(),
):
    """Probabilities computed again, as in Dao 2023."""
    call = _dense_call(query, key, value, attn_bias, dropout_p, is_causal, scale)
    state = philox_seed, philox_offset
    gradient = _Gradient(*checks.rows_first(grad_out_, out), logsumexp, state, grad_input_mask[3])
    *grads, grad_bias = _efficient_backward(call, gradient)
    return *checks.rows_first(*grads), grad_bias


@checks.cuda_operator("_efficient_attention_forward", accepts=SINGLE_FLOATS)
def _efficient_attention_rows(
    query,
    key,
    value,
    bias,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    custom_mask_type,
    compute_log_sumexp,
    scale,
    seqlen_k=None,
    window_size=None,
    outs=(),
):
    """Online softmax, of packed sequences too: Milakov and Gimelshein 2018, Dao et al. 2022."""
    if seqlen_k is not None or window_size is not None:
        raise Decline("seqlen_k or window_size is given, which is not served")
    if cu_seqlens_q is not None and max_seqlen_q is None:
        raise Decline("max_seqlen_q is missing for packed sequences")
    starts, lengths = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    call = checks.Call(query, key, value, bias, starts, lengths, dropout_p, custom_mask_type, scale)
    results = _efficient_forward(call, compute_log_sumexp)
    # ATen returns 0 for packed keys whose max_seqlen_k is missing.
    longest = (query.shape[1], key.shape[1]) if cu_seqlens_q is None else (max_seqlen_q, 0)
    return *results, longest[0], longest[1] if max_seqlen_k is None else max_seqlen_k


@checks.cuda_operator("_efficient_attention_backward", accepts=SINGLE_FLOATS)
def _efficient_attention_rows_backward(
    grad_out_,
    query,
    key,
    value,
    bias,
    out,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    logsumexp,
    dropout_p,
    philox_seed,
    philox_offset,
    custom_mask_type,
    bias_requires_grad,
    scale,
    num_splits_key=None,
    window_size=None,
    shared_storage_dqdkdv=False,
    outs=(),
):
    """Probabilities computed again, as in Dao 2023, of packed sequences too."""
    if window_size is not None or (num_splits_key is not None and num_splits_key > 1):
        raise Decline("window_size, or num_splits_key above 1, is given, which is not served")
    if cu_seqlens_q is not None and not (0 < max_seqlen_q <= query.shape[1] and 0 < max_seqlen_k <= key.shape[1]):
        raise Decline(f"max_seqlen_q {max_seqlen_q} or max_seqlen_k {max_seqlen_k} exceeds the packed rows, or is 0")
    starts, lengths = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    call = checks.Call(query, key, value, bias, starts, lengths, dropout_p, custom_mask_type, scale)
    state = philox_seed, philox_offset
    gradient = _Gradient(grad_out_, out, logsumexp, state, bias_requires_grad, shared_storage_dqdkdv)
    return _efficient_backward(call, gradient)
