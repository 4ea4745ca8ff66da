"""Scaled dot product attention: the operators that `scaled_dot_product_attention` chooses among, and their gradients.

All compute the same by the engine, and differ in what they take and in how their results lie. Dropout is ATen's.
"""

import torch

from tritonite.catalog import operator
from tritonite.dispatch.call import empty, empty_strided, zero_or_one
from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.attention.backward import attention_backward
from tritonite.engine.attention.decode import decode, decodes
from tritonite.engine.attention.forward import attention
from tritonite.engine.attention.problem import Problem
from tritonite.engine.iteration import broadcast_shape, common_device, contiguous_strides, strides_after_conversion
from tritonite.errors import Decline
from tritonite.ops.matmul import precision_of

_HALVES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
# ATen pads the logarithms of efficient attention to a multiple of so many.
_PADDED = 32


def _check(query, key, value, dropout_p, multiple, accepts, one_size):
    """Decline what no kernel takes: `multiple` divides the elements of a head, which are of `one_size` or two."""
    tensors = query, key, value
    if zero_or_one(dropout_p) != 0:
        raise Decline("dropout")
    if query.dtype not in accepts or any(tensor.dtype is not query.dtype for tensor in tensors):
        raise Decline("operands of other dtypes, or of several")
    if any(tensor.dim() != 4 for tensor in tensors):
        raise Decline("operands that are not of four dimensions")
    if common_device(tensors, ())[1]:
        raise Decline("tensors on several devices")
    (batch, heads, _, head), (_, shared, keys, _), size = query.shape, key.shape, value.shape[3]
    if key.shape[3] != head or tuple(value.shape[:3]) != (batch, shared, keys) or key.shape[0] != batch:
        raise Decline("operands whose shapes do not fit")
    if not (shared and heads % shared == 0):
        raise Decline("heads of the query that those of the key do not divide")
    if not 0 < head <= _LARGEST_HEAD or not 0 < size <= _LARGEST_HEAD or head % multiple or size % multiple:
        raise Decline("heads of that size")
    if one_size and head != size:
        raise Decline("values of another size than keys")
    if any(tensor.stride(3) != 1 and tensor.shape[3] != 1 for tensor in tensors):
        raise Decline("elements of a head that are not next to each other")


def _expanded(bias, query, key, dtypes, ranks):
    """A bias of one of the ranks as (batch, heads, queries, keys)."""
    if bias is None:
        return None
    shape = (*query.shape[:3], key.shape[2])
    if bias.dtype not in dtypes or bias.dim() not in ranks or broadcast_shape((bias.shape, shape)) != shape:
        raise Decline("a bias of another dtype or shape")
    if common_device((query, bias), ())[1]:
        raise Decline("a bias on another device")
    return bias.expand(shape)


def _problem(query, key, value, bias, is_causal, scale, diagonal=0):
    return Problem(query, key, value, bias, scale, bool(is_causal), diagonal, precision_of(query.dtype))


def _by_position(shape):
    """The strides of (batch, heads, rows, elements) where the heads of a position lie next to each other."""
    return contiguous_strides(shape, (3, 1, 2, 0))


def _alike(tensor):
    """The strides that `torch.empty_like` gives."""
    return strides_after_conversion(tensor.shape, tensor.stride())


def _attended(problem, strides, logsumexp, empty_rows):
    """The result, of these strides; `logsumexp` is written too."""
    query, size = problem.query, problem.value.shape[3]
    out = empty_strided((*query.shape[:3], size), strides, query.dtype, query.device)
    (decode if decodes(problem) else attention)(problem, out, logsumexp, empty_rows)
    return out


def _gradients(problem, grad_out, out, logsumexp, strides):
    """The gradients of query, key and value, of these strides."""
    query, key, value = problem.query, problem.key, problem.value
    shape = (*query.shape[:3], value.shape[3])
    if grad_out.dtype is not query.dtype or out.dtype is not query.dtype or logsumexp.dtype is not torch.float32:
        raise Decline("results and their gradients of other dtypes than ATen's")
    if tuple(grad_out.shape) != shape or tuple(out.shape) != shape:
        raise Decline("results and their gradients of other shapes than ATen's")
    if tuple(logsumexp.shape[:2]) != shape[:2] or logsumexp.dim() != 3 or logsumexp.shape[2] < shape[2]:
        raise Decline("logarithms of another shape than ATen's")
    if common_device((query, grad_out, out, logsumexp), ())[1]:
        raise Decline("tensors on several devices")
    if out.stride(3) != 1 and out.shape[3] != 1:
        raise Decline("elements of a head that are not next to each other")
    grad_out = grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()
    tensors = zip((query, key, value), strides, strict=True)
    grads = tuple([empty_strided(x.shape, own, x.dtype, x.device) for x, own in tensors])
    attention_backward(problem, grad_out, out, logsumexp, grads)
    return grads


@operator("_scaled_dot_product_flash_attention_for_cpu", accepts=SINGLE_FLOATS, pin_zero_or_one=("dropout_p",))
def _for_cpu(query, key, value, dropout_p, is_causal, attn_mask, scale, outs=()):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    _check(query, key, value, dropout_p, 1, SINGLE_FLOATS, one_size=True)
    bias = _expanded(attn_mask, query, key, (query.dtype, torch.float32), (2, 4))
    problem = _problem(query, key, value, bias, is_causal, scale)
    batch, heads, queries, _ = query.shape
    logsumexp = empty((batch, queries, heads), torch.float32, query.device).transpose(1, 2)
    return _attended(problem, _alike(query), logsumexp, "0"), logsumexp


@operator("_scaled_dot_product_flash_attention_for_cpu_backward", accepts=SINGLE_FLOATS, pin_zero_or_one=("dropout_p",))
def _for_cpu_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale, outs=()):
    """Probabilities computed again, as in Dao 2023."""
    _check(query, key, value, dropout_p, 1, SINGLE_FLOATS, one_size=True)
    bias = _expanded(attn_mask, query, key, (query.dtype, torch.float32), (2, 4))
    problem = _problem(query, key, value, bias, is_causal, scale)
    strides = [_by_position(tensor.shape) for tensor in (query, key, value)]
    return _gradients(problem, grad_out, out, logsumexp, strides)


def _of_cuda(name, accepts):
    """Declares an operator that ATen has for CUDA alone."""
    return operator(name, accepts=accepts, pin_zero_or_one=("dropout_p",), cuda_only=(name,))


def _flash(query, key, value, is_causal, scale):
    """The last query sees all keys."""
    diagonal = key.shape[2] - query.shape[2]
    return _problem(query, key, value, None, is_causal, scale, diagonal)


@_of_cuda("_scaled_dot_product_flash_attention", _HALVES)
def _flash_attention(query, key, value, dropout_p, is_causal, return_debug_mask, scale, outs=()):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    _check(query, key, value, dropout_p, 8, _HALVES, one_size=True)
    if return_debug_mask:
        raise Decline("a debug mask")
    device, queries = query.device, query.shape[2]
    logsumexp = empty(query.shape[:3], torch.float32, device)
    out = _attended(_flash(query, key, value, is_causal, scale), _alike(query), logsumexp, "inf")
    # What ATen keeps of its generator with dropout, and has room for without.
    state, unused = empty((2,), torch.uint64, device), empty((), torch.uint64, device)
    return out, logsumexp, None, None, queries, key.shape[2], state, unused, empty((0,), query.dtype, device)


@_of_cuda("_scaled_dot_product_flash_attention_backward", _HALVES)
def _flash_attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    scale,
    outs=(),
):
    """Probabilities computed again, as in Dao 2023."""
    _check(query, key, value, dropout_p, 8, _HALVES, one_size=True)
    if cum_seq_q is not None or cum_seq_k is not None:
        raise Decline("sequences of several lengths")
    strides = [_alike(tensor) for tensor in (query, key, value)]
    return _gradients(_flash(query, key, value, is_causal, scale), grad_out, out, logsumexp, strides)


def _check_efficient(query, key, value, dropout_p):
    _check(query, key, value, dropout_p, 8, SINGLE_FLOATS, one_size=False)
    if query.shape[1] != key.shape[1]:
        raise Decline("another number of heads of the query than of the key")


@_of_cuda("_scaled_dot_product_efficient_attention", SINGLE_FLOATS)
def _efficient_attention(query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale, outs=()):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    _check_efficient(query, key, value, dropout_p)
    bias = _expanded(attn_bias, query, key, (query.dtype,), (4,))
    device, (batch, heads, queries, _) = query.device, query.shape
    rows = -(-queries // _PADDED) * _PADDED if compute_log_sumexp else 0
    logsumexp = empty((batch, heads, rows), torch.float32, device)
    problem = _problem(query, key, value, bias, is_causal, scale)
    strides = _by_position((*query.shape[:3], value.shape[3]))
    out = _attended(problem, strides, logsumexp if rows else None, "inf")
    return out, logsumexp, empty((), torch.int64, device), empty((), torch.int64, device)


@_of_cuda("_scaled_dot_product_efficient_attention_backward", SINGLE_FLOATS)
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
    _check_efficient(query, key, value, dropout_p)
    bias = _expanded(attn_bias, query, key, (query.dtype,), (4,))
    if bias is not None and grad_input_mask[3]:
        raise Decline("the gradient of a bias")
    problem = _problem(query, key, value, bias, is_causal, scale)
    strides = [_by_position(tensor.shape) for tensor in (query, key, value)]
    return *_gradients(problem, grad_out_, out, logsumexp, strides), None


def _laid_like(query, shape):
    """The strides of a result whose dimensions lie in the order of the query's."""
    if tuple(query.shape) == tuple(shape):
        return _alike(query)
    order = sorted(range(4), key=lambda d: query.stride(d), reverse=True)
    return contiguous_strides(shape, order[::-1])


@_of_cuda("_scaled_dot_product_cudnn_attention", _HALVES)
def _cudnn_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale, outs=()
):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    _check(query, key, value, dropout_p, 8, _HALVES, one_size=False)
    if return_debug_mask:
        raise Decline("a debug mask")
    bias = _expanded(attn_bias, query, key, (query.dtype,), (2, 3, 4))
    device, queries = query.device, query.shape[2]
    shape = (*query.shape[:3], value.shape[3])
    logsumexp = empty((*shape[:3], 1), torch.float32, device) if compute_log_sumexp else None
    problem = _problem(query, key, value, bias, is_causal, scale)
    rows = None if logsumexp is None else logsumexp.squeeze(3)
    out = _attended(problem, _laid_like(query, shape), rows, "inf")
    seed, offset = empty((), torch.int64, device), empty((), torch.int64, device)
    return out, logsumexp, None, None, queries, key.shape[2], seed, offset, None


@_of_cuda("_scaled_dot_product_cudnn_attention_backward", _HALVES)
def _cudnn_attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    scale,
    outs=(),
):
    """Probabilities computed again, as in Dao 2023."""
    _check(query, key, value, dropout_p, 8, _HALVES, one_size=False)
    if cum_seq_q is not None or cum_seq_k is not None:
        raise Decline("sequences of several lengths")
    bias = _expanded(attn_bias, query, key, (query.dtype,), (2, 3, 4))
    rows = logsumexp.squeeze(3) if logsumexp.dim() == 4 and logsumexp.shape[3] == 1 else logsumexp
    problem = _problem(query, key, value, bias, is_causal, scale)
    return _gradients(problem, grad_out, out, rows, [_alike(tensor) for tensor in (query, key, value)])
