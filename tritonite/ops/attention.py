"""Scaled dot product attention: the operators that `scaled_dot_product_attention` chooses among, and their gradients.

All compute the same by the engine, and differ in what they take and in how their results lie. Dropout draws ATen's own
numbers, so that either's gradient may follow the other's result; cuDNN's, whose mapping is its own, is left to it.
"""

import torch

from tritonite import devices
from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.attention import table as table
from tritonite.engine.attention.backward import attention_backward
from tritonite.engine.attention.decode import decode, decodes
from tritonite.engine.attention.dropout import LANES, Dropout
from tritonite.engine.attention.forward import attention
from tritonite.engine.attention.hopper import backward as hopper_backward
from tritonite.engine.attention.hopper import forward as hopper
from tritonite.engine.attention.problem import Packed, Problem
from tritonite.engine.iteration import (
    INT32_LIMIT,
    broadcast_shape,
    common_device,
    contiguous_strides,
    strides_after_conversion,
)
from tritonite.errors import Decline
from tritonite.ops.matmul import precision_of
from tritonite.registry import operator
from tritonite.runtime.contract import decline_if_slower, empty, empty_strided, held, limit, number_in
from tritonite.runtime.symbols import Limits, zero_or_one

_HALVES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
# ATen pads the logarithms of efficient attention to a multiple of so many.
_PADDED = 32
# Probabilities that are not 0 or 1 in float32 either.
_DROPPED = Limits(1, 0, 1 - 2.0**-24, True, 2.0**-149)


def _check(query, key, value, multiple, accepts, one_size):
    """Decline what no kernel takes: `multiple` divides the elements of a head, which are of `one_size` or two."""
    tensors = query, key, value
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


def _expanded(bias, query, key, dtypes, shapes):
    """A bias of a dtype and of one of the shapes that ATen takes as (batch, heads, queries, keys)."""
    if bias is None:
        return None
    if bias.dtype not in dtypes or not shapes(bias):
        raise Decline("a bias of another dtype or shape")
    if common_device((query, bias), ())[1]:
        raise Decline("a bias on another device")
    return bias.expand((*query.shape[:3], key.shape[2]))


def _problem(query, key, value, bias, is_causal, scale, diagonal=0, packed=None):
    return Problem(query, key, value, bias, scale, bool(is_causal), diagonal, precision_of(query.dtype), packed)


def _without_dropout(dropout_p, reason):
    if zero_or_one(dropout_p) != 0:
        raise Decline(reason)


def _draws(problem, dropout_p):
    """Whether there is dropout. Decline probabilities that ATen refuses, or of which its kernels make 0 or 1."""
    if zero_or_one(dropout_p) == 0:
        return False
    if devices.current.kind == "amd":
        raise Decline("dropout by random numbers of other kernels")
    limit(dropout_p, _DROPPED)
    if not problem.batch * problem.query.shape[1] * problem.queries * problem.keys:
        raise Decline("dropout of nothing")
    return True


def _by_position(shape):
    """The strides of (batch, heads, rows, elements) where the heads of a position lie next to each other."""
    return contiguous_strides(shape, (3, 1, 2, 0))


def _like(tensor):
    """What `torch.empty_like` gives."""
    return empty_strided(
        tensor.shape, strides_after_conversion(tensor.shape, tensor.stride()), tensor.dtype, tensor.device
    )


def _decline_if_slower(problem, backend, *done_by):
    """Decline where a backend of ATen's is faster in one of these passes, unless all that can be served is to be."""
    query, biased = problem.query, problem.bias is not None
    size, head = query.dtype.itemsize, max(query.shape[3], problem.value.shape[3])
    measured = devices.current.kind == "nvidia" and devices.has_wgmma(query.device)
    unmeasured = devices.current.aten_measured and not measured
    if problem.dropout is None:
        heads, multiprocessors = problem.batch * query.shape[1], devices.multiprocessors(query.device)
        few = table.are_few(problem.queries, heads, multiprocessors)
        given = size, head, biased, problem.keys, few, table.are_short(problem.queries, problem.keys)
        slower = any([table.aten_is_faster(backend, each, *given) for each in done_by])
    else:
        # FlashAttention's gradients have 0.69 to 0.83 of ATen's speed here, all else 1.1 to 2.0.
        slower = backend == "flash" and "backward" in done_by
    decline_if_slower(unmeasured or (measured and slower))


def _attended(problem, backend, out, logsumexp, empty_rows):
    """Write the result and `logsumexp`. Returns the seed and the offset that dropout drew.

    Who serves a pass that leaves logarithms serves the gradient that they are for, unless there is dropout.
    """
    gradient = ()
    if logsumexp is not None and problem.dropout is None:
        gradient = (_backward_kernels(problem, out, problem[:3]),)
    if decodes(problem, logsumexp):
        _decline_if_slower(problem, backend, "decoding", *gradient)
        decode(problem, out, logsumexp, empty_rows)
        return None
    _decline_if_slower(problem, backend, "warp specialised" if hopper.takes(problem, out) else "forward", *gradient)
    return attention(problem, out, logsumexp, empty_rows)


def _backward_kernels(problem, grad_out, grads, grad_bias=None):
    """Which kernels a backward pass is done by."""
    if grad_bias is not None:
        return "backward of a bias"
    return "warp specialised backward" if hopper_backward.takes(problem, grad_out, grads) else "backward"


def _check_results(problem, grad_out, out, logsumexp):
    """Decline results of the forward pass, and gradients of theirs, that it does not give."""
    query, value = problem.query, problem.value
    shape = (*query.shape[:3], value.shape[3])
    if grad_out.dtype is not query.dtype or out.dtype is not query.dtype or logsumexp.dtype is not torch.float32:
        raise Decline("results and their gradients of other dtypes than ATen's")
    if tuple(grad_out.shape) != shape or tuple(out.shape) != shape:
        raise Decline("results and their gradients of other shapes than ATen's")
    packed = problem.packed is not None and problem.packed.logarithms
    batch, rows = (1, shape[2]) if packed else (problem.batch, problem.queries)
    if logsumexp.dim() != 3 or tuple(logsumexp.shape[:2]) != (batch, shape[1]) or logsumexp.shape[2] < rows:
        raise Decline("logarithms of another shape than ATen's")
    if common_device((query, grad_out, out, logsumexp), ())[1]:
        raise Decline("tensors on several devices")
    if out.stride(3) != 1 and out.shape[3] != 1:
        raise Decline("elements of a head that are not next to each other")


def _gradients(problem, backend, grad_out, out, logsumexp, grads, grad_bias=None):
    """The gradients of query, key and value, which are written."""
    grad_out = grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()
    _decline_if_slower(problem, backend, _backward_kernels(problem, grad_out, grads, grad_bias))
    attention_backward(problem, grad_out, out, logsumexp, grads, grad_bias)
    return grads


def _of_cpu(query, key, value, dropout_p, is_causal, attn_mask, scale):
    """What both passes of ATen's kernel for CPUs take."""
    _without_dropout(dropout_p, "dropout, which ATen refuses")
    _check(query, key, value, 1, SINGLE_FLOATS, one_size=True)
    shape = (*query.shape[:3], key.shape[2])
    bias = _expanded(
        *(attn_mask, query, key, (query.dtype, torch.float32)),
        lambda mask: mask.dim() in (2, 4) and broadcast_shape((mask.shape, shape)) == shape,
    )
    return _problem(query, key, value, bias, is_causal, scale)


@operator("_scaled_dot_product_flash_attention_for_cpu", accepts=SINGLE_FLOATS, pin_zero_or_one=("dropout_p",))
def _for_cpu(query, key, value, dropout_p, is_causal, attn_mask, scale, outs=()):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    problem = _of_cpu(query, key, value, dropout_p, is_causal, attn_mask, scale)
    batch, heads, queries, _ = query.shape
    logsumexp = empty((batch, queries, heads), torch.float32, query.device).transpose(1, 2)
    out = _like(query)
    _attended(problem, "flash", out, logsumexp, "0")
    return out, logsumexp


@operator("_scaled_dot_product_flash_attention_for_cpu_backward", accepts=SINGLE_FLOATS, pin_zero_or_one=("dropout_p",))
def _for_cpu_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale, outs=()):
    """Probabilities computed again, as in Dao 2023."""
    problem = _of_cpu(query, key, value, dropout_p, is_causal, attn_mask, scale)
    _check_results(problem, grad_out, out, logsumexp)
    grads = tuple([empty_strided(x.shape, _by_position(x.shape), x.dtype, x.device) for x in (query, key, value)])
    return _gradients(problem, "flash", grad_out, out, logsumexp, grads)


def _of_cuda(name, accepts):
    """Declares an operator that ATen has for CUDA alone."""
    return operator(name, accepts=accepts, pin_zero_or_one=("dropout_p",), cuda_only=(name,))


def _starts(query_starts, key_starts, query):
    """Decline starts of packed sequences that ATen refuses."""
    for starts in (query_starts, key_starts):
        if starts.dtype is not torch.int32 or starts.dim() != 1 or not starts.is_contiguous():
            raise Decline("starts of sequences of another dtype or layout")
    if query_starts.shape != key_starts.shape or query_starts.shape[0] < 2:
        raise Decline("starts of several numbers of sequences")
    if common_device((query, query_starts, key_starts), ())[1]:
        raise Decline("tensors on several devices")


def _heads_first(tensor):
    """(batch, heads, rows, elements) of (batch, rows, heads, elements), or of packed sequences without a batch."""
    if tensor.dim() not in (3, 4):
        raise Decline("operands that are not of three or four dimensions")
    return tensor.transpose(1, 2) if tensor.dim() == 4 else tensor.transpose(0, 1).unsqueeze(0)


def _flash(query, key, value, starts, lengths, dropout_p, is_causal, scale, state):
    """Flash attention of (batch, rows, heads, elements), or of packed sequences. The last query sees all keys.

    `state` is where dropout has the seed and the offset: two integers of 64 bits.
    """
    tensors = query, key, value
    if (starts[0] is None) != (starts[1] is None):
        raise Decline("queries that are packed, or keys, and not both")
    if any(tensor.dim() != (4 if starts[0] is None else 3) for tensor in tensors):
        raise Decline("operands of another number of dimensions")
    query, key, value = map(_heads_first, tensors)
    _check(query, key, value, 8, _HALVES, one_size=True)
    if starts[0] is None:
        problem = _problem(query, key, value, None, is_causal, scale, key.shape[2] - query.shape[2])
    else:
        _starts(*starts, query)
        problem = _problem(query, key, value, None, is_causal, scale, packed=Packed(*starts, *lengths, True, True))
    if not _draws(problem, dropout_p):
        return problem
    of_64_bits = state.dtype in (torch.uint64, torch.int64)
    if not (of_64_bits and tuple(state.shape) == (2,) and state.is_contiguous()) or state.device != query.device:
        raise Decline("a generator's state of another form than ATen's")
    advanced = problem.batch * query.shape[1] * LANES
    return problem._replace(dropout=Dropout(dropout_p, True, advanced, state.view(torch.int64)))


def _flash_forward(query, key, value, starts, lengths, dropout_p, is_causal, debug, scale):
    """(result, logarithms, state of the generator, unused, mask) as `_flash_attention_forward` gives them."""
    if debug:
        raise Decline("a debug mask")
    device = query.device
    # What ATen keeps of its generator with dropout, and has room for without.
    state, unused = empty((2,), torch.uint64, device), empty((), torch.uint64, device)
    problem = _flash(query, key, value, starts, lengths, dropout_p, is_causal, scale, state)
    out = _like(query)
    batch, heads, rows, _ = problem.query.shape
    logsumexp = empty((heads, rows) if problem.packed else (batch, heads, rows), torch.float32, device)
    _attended(problem, "flash", _heads_first(out), logsumexp.unsqueeze(0) if problem.packed else logsumexp, "inf")
    return out, logsumexp, state, unused, empty((0,), query.dtype, device)


def _flash_backward(grad_out, query, key, value, out, logsumexp, starts, lengths, dropout_p, is_causal, state, scale):
    """The gradients, in the layouts of the operands."""
    problem = _flash(query, key, value, starts, lengths, dropout_p, is_causal, scale, state)
    logsumexp = logsumexp.unsqueeze(0) if problem.packed else logsumexp
    seen = _heads_first(grad_out), _heads_first(out), logsumexp
    _check_results(problem, *seen)
    grads = tuple([_like(tensor) for tensor in (query, key, value)])
    _gradients(problem, "flash", *seen, tuple([_heads_first(grad) for grad in grads]))
    return grads


_DENSE = None, None


@_of_cuda("_scaled_dot_product_flash_attention", _HALVES)
def _flash_attention(query, key, value, dropout_p, is_causal, return_debug_mask, scale, outs=()):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    lengths = _rows(query, key)
    rows_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    out, logsumexp, *rest = _flash_forward(*rows_first, _DENSE, lengths, dropout_p, is_causal, return_debug_mask, scale)
    return out.transpose(1, 2), logsumexp, None, None, *lengths, *rest


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
    if cum_seq_q is not None or cum_seq_k is not None:
        raise Decline("sequences of several lengths")
    _rows(query, key)
    grad_out, query, key, value, out = [x.transpose(1, 2) for x in (grad_out, query, key, value, out)]
    grads = _flash_backward(
        *(grad_out, query, key, value, out, logsumexp, _DENSE, (max_q, max_k), dropout_p, is_causal, philox_seed),
        scale,
    )
    return tuple([grad.transpose(1, 2) for grad in grads])


def _rows(query, key):
    """How many queries and keys there are of four dimensions."""
    if query.dim() != 4 or key.dim() != 4:
        raise Decline("operands that are not of four dimensions")
    return query.shape[2], key.shape[2]


def _without_options(*values):
    """Decline what flash attention has beside the operands."""
    if any(value is not None for value in values):
        raise Decline("windows, slopes, used lengths or pages")


@_of_cuda("_flash_attention_forward", _HALVES)
def _flash_attention_of_rows(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    scale,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
    outs=(),
):
    """Online softmax, of packed sequences too: Milakov and Gimelshein 2018, Dao et al. 2022."""
    _without_options(window_size_left, window_size_right, seqused_k, alibi_slopes, block_table)
    starts = cum_seq_q, cum_seq_k
    return _flash_forward(query, key, value, starts, (max_q, max_k), dropout_p, is_causal, return_debug_mask, scale)


@_of_cuda("_flash_attention_backward", _HALVES)
def _flash_attention_of_rows_backward(
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
    rng_state,
    unused,
    scale,
    window_size_left=None,
    window_size_right=None,
    outs=(),
):
    """Probabilities computed again, as in Dao 2023, of packed sequences too."""
    _without_options(window_size_left, window_size_right)
    starts, lengths = (cum_seq_q, cum_seq_k), (max_q, max_k)
    return _flash_backward(
        *(grad_out, query, key, value, out, logsumexp, starts, lengths, dropout_p, is_causal, rng_state, scale)
    )


# Which keys efficient attention shows its queries: all, or those before them, counted from the first or the last.
_ALL, _FROM_FIRST, _FROM_LAST = range(3)
# The largest batch that ATen computes in one launch.
_LARGEST_BATCH = 2**16 - 1


def _aligned(tensor, every, dims):
    """Decline rows that lie where ATen's loads of 16 bytes, of `every` elements, cannot read them."""
    if tensor.data_ptr() % 16 or any(tensor.stride(dim) % every for dim in dims):
        raise Decline("rows that ATen's loads do not take")


def _efficient(query, key, value, bias, starts, lengths, mask, scale):
    """Efficient attention of (batch, rows, heads, elements), or of packed sequences in a batch of 1."""
    tensors = query, key, value
    if any(tensor.dim() != 4 for tensor in tensors):
        raise Decline("operands that are not of four dimensions")
    query, key, value = [tensor.transpose(1, 2) for tensor in tensors]
    _check(query, key, value, 8, SINGLE_FLOATS, one_size=False)
    if query.shape[1] != key.shape[1]:
        raise Decline("another number of heads of the query than of the key")
    if query.shape[0] > _LARGEST_BATCH:
        raise Decline("a batch that ATen takes in parts")
    every = 16 // query.dtype.itemsize
    for tensor in (query, key):
        _aligned(tensor, every, (1, 2))
    shape = (*query.shape[:3], key.shape[2])
    bias = _expanded(bias, query, key, (query.dtype,), lambda given: tuple(given.shape) == shape)
    if bias is not None:
        _aligned(bias, every, [dim for dim in range(3) if shape[dim] > 1])
        if bias.stride(3) != 1:
            raise Decline("a bias whose elements are not next to each other")
    if (starts[0] is None) != (starts[1] is None):
        raise Decline("queries that are packed, or keys, and not both")
    if mask not in (_ALL, _FROM_FIRST, _FROM_LAST):
        raise Decline("a mask of another kind")
    diagonal = shape[3] - shape[2] if mask == _FROM_LAST else 0
    if starts[0] is None:
        if diagonal < 0:
            raise Decline("queries before the first key")
        return _problem(query, key, value, bias, mask != _ALL, scale, diagonal)
    _starts(*starts, query)
    if query.shape[0] != 1 or bias is not None or mask == _FROM_LAST:
        raise Decline("packed sequences with a batch, a bias or a mask from the last query")
    if None in lengths:
        lengths = [key.shape[2] if length is None else length for length in lengths]
    return _problem(query, key, value, None, mask != _ALL, scale, packed=Packed(*starts, *lengths, False, False))


def _dropping(problem, dropout_p, state=(0, 0)):
    """Efficient attention with dropout, whose gradient has a seed and an offset."""
    if not _draws(problem, dropout_p):
        return problem
    if problem.packed is not None:
        raise Decline("dropout of packed sequences, in whose gradients ATen draws other numbers than in results")
    elements = problem.batch * problem.query.shape[1] * problem.queries * problem.keys
    if elements >= INT32_LIMIT:
        raise Decline("dropout of more elements than ATen counts in 32 bits")
    return problem._replace(dropout=Dropout(dropout_p, False, -(-elements // 4) * 4, state=state))


def _efficient_forward(query, key, value, bias, starts, lengths, dropout_p, mask, logarithms, scale):
    """(result, logarithms, seed, offset) as `_efficient_attention_forward` gives them."""
    problem = _dropping(_efficient(query, key, value, bias, starts, lengths, mask, scale), dropout_p)
    batch, rows, heads, _ = query.shape
    out = empty((batch, rows, heads, value.shape[3]), query.dtype, query.device)
    padded = -(-problem.queries // _PADDED) * _PADDED if logarithms else 0
    logsumexp = empty((problem.batch, heads, padded), torch.float32, query.device)
    drawn = _attended(problem, "efficient", out.transpose(1, 2), logsumexp if logarithms else None, "0")
    # ATen has the state of its generator on the CPU, also if nothing was drawn.
    state = map(held, drawn) if drawn else [empty((), torch.int64, torch.device("cpu")) for _ in range(2)]
    return out, logsumexp, *state


def _bias_gradient(bias):
    """What ATen allocates for it: rows of a multiple of 16 elements."""
    padded = -(-bias.shape[3] // 16) * 16
    return empty((*bias.shape[:3], padded), bias.dtype, bias.device)[..., : bias.shape[3]]


def _efficient_backward(
    grad_out, query, key, value, bias, out, starts, lengths, logsumexp, dropout_p, state, mask, of_bias, shared, scale
):
    """The gradients, of (batch, rows, heads, elements), and that of the bias."""
    problem = _efficient(query, key, value, bias, starts, lengths, mask, scale)
    if zero_or_one(dropout_p) != 0:
        if any(each.dim() or each.dtype is not torch.int64 or each.device.type != "cpu" for each in state):
            raise Decline("a generator's state in a device's memory, as of a captured graph")
        problem = _dropping(problem, dropout_p, [number_in(each) for each in state])
    if grad_out.dim() != 4 or out.dim() != 4:
        raise Decline("results and their gradients of other shapes than ATen's")
    _aligned(value, 4, (1, 2))
    seen = grad_out.transpose(1, 2), out.transpose(1, 2), logsumexp
    _check_results(problem, *seen)
    # ATen takes the strides of these for granted.
    heads, size = out.shape[2:]
    if (out.shape[1] > 1 and out.stride(1) != heads * size) or out.data_ptr() % 16:
        raise Decline("a result that does not lie as ATen's does")
    apart = any(logsumexp.stride(dim) % 8 for dim in (0, 1) if logsumexp.shape[dim] > 1)
    if apart or (logsumexp.shape[2] > 1 and logsumexp.stride(2) != 1):
        raise Decline("logarithms that do not lie as ATen's do")
    shape, device = tuple(query.shape), query.device
    if shared and (shape != tuple(key.shape) or shape != tuple(value.shape)):
        raise Decline("gradients side by side of several shapes")
    if shared:
        together = empty((*shape[:2], 3, *shape[2:]), query.dtype, device)
        grads = tuple([together.select(2, i) for i in range(3)])
    else:
        grads = tuple([empty(tensor.shape, tensor.dtype, device) for tensor in (query, key, value)])
    grad_bias = _bias_gradient(bias) if of_bias and bias is not None else None
    _gradients(problem, "efficient", *seen, tuple([grad.transpose(1, 2) for grad in grads]), grad_bias)
    return *grads, grad_bias


@_of_cuda("_scaled_dot_product_efficient_attention", SINGLE_FLOATS)
def _efficient_attention(query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale, outs=()):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    lengths = _rows(query, key)
    rows_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    mask = _FROM_FIRST if is_causal else _ALL
    out, *others = _efficient_forward(
        *(*rows_first, attn_bias, _DENSE, lengths, dropout_p, mask, compute_log_sumexp, scale)
    )
    return out.transpose(1, 2), *others


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
    lengths = _rows(query, key)
    grad_out, query, key, value, out = [x.transpose(1, 2) for x in (grad_out_, query, key, value, out)]
    mask = _FROM_FIRST if is_causal else _ALL
    grads = _efficient_backward(
        *(grad_out, query, key, value, attn_bias, out, _DENSE, lengths, logsumexp, dropout_p),
        *((philox_seed, philox_offset), mask, grad_input_mask[3], False, scale),
    )
    return *[grad.transpose(1, 2) for grad in grads[:3]], grads[3]


@_of_cuda("_efficient_attention_forward", SINGLE_FLOATS)
def _efficient_attention_of_rows(
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
        raise Decline("windows or used lengths")
    if cu_seqlens_q is not None and max_seqlen_q is None:
        raise Decline("packed sequences without the longest one's length")
    starts, lengths = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    results = _efficient_forward(
        *(query, key, value, bias, starts, lengths, dropout_p, custom_mask_type, compute_log_sumexp, scale)
    )
    # Of packed keys ATen says 0 where it was not told.
    longest = (query.shape[1], key.shape[1]) if cu_seqlens_q is None else (max_seqlen_q, 0)
    return *results, longest[0], longest[1] if max_seqlen_k is None else max_seqlen_k


@_of_cuda("_efficient_attention_backward", SINGLE_FLOATS)
def _efficient_attention_of_rows_backward(
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
        raise Decline("windows, or keys in parts")
    if cu_seqlens_q is not None and not (0 < max_seqlen_q <= query.shape[1] and 0 < max_seqlen_k <= key.shape[1]):
        raise Decline("longest sequences that there are not")
    return _efficient_backward(
        *(grad_out_, query, key, value, bias, out, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)),
        *(logsumexp, dropout_p, (philox_seed, philox_offset), custom_mask_type, bias_requires_grad),
        *(shared_storage_dqdkdv, scale),
    )


def _laid_like(query, shape):
    """The strides of a result whose dimensions lie in the order of the query's."""
    if tuple(query.shape) == tuple(shape):
        return strides_after_conversion(shape, query.stride())
    return contiguous_strides(shape, sorted(range(4), key=query.stride))


def _cudnn(query, key, value, attn_bias, dropout_p, is_causal, scale):
    """Attention as cuDNN's."""
    _without_dropout(dropout_p, "dropout by cuDNN's random numbers, whose mapping to elements is its own")
    _check(query, key, value, 8, _HALVES, one_size=False)
    shape = (*query.shape[:3], key.shape[2])

    bias = _expanded(
        *(attn_bias, query, key, (query.dtype,)),
        # Of three dimensions the first has to expand to one head.
        lambda bias: (
            bias.dim() in (2, 3, 4)
            and broadcast_shape((bias.shape, shape)) == shape
            and (bias.dim() != 3 or bias.shape[0] == 1)
        ),
    )
    return _problem(query, key, value, bias, is_causal, scale)


@_of_cuda("_scaled_dot_product_cudnn_attention", _HALVES)
def _cudnn_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale, outs=()
):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    problem = _cudnn(query, key, value, attn_bias, dropout_p, is_causal, scale)
    if return_debug_mask:
        raise Decline("a debug mask")
    device, queries = query.device, query.shape[2]
    shape = (*query.shape[:3], value.shape[3])
    logsumexp = empty((*shape[:3], 1), torch.float32, device) if compute_log_sumexp else None
    out = empty_strided(shape, _laid_like(query, shape), query.dtype, device)
    _attended(problem, "cudnn", out, None if logsumexp is None else logsumexp.squeeze(3), "inf")
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
    if cum_seq_q is not None or cum_seq_k is not None:
        raise Decline("sequences of several lengths")
    problem = _cudnn(query, key, value, attn_bias, dropout_p, is_causal, scale)
    if logsumexp.dim() != 4 or logsumexp.shape[3] != 1:
        raise Decline("logarithms of another shape than ATen's")
    rows = logsumexp.squeeze(3)
    _check_results(problem, grad_out, out, rows)
    return _gradients(problem, "cudnn", grad_out, out, rows, tuple([_like(tensor) for tensor in (query, key, value)]))
