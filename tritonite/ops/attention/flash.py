"""ATen's flash attention for CUDA, dense and packed, and its gradients."""

import torch

from tritonite.dtypes import FLOATS_OF_16_BITS
from tritonite.engine.attention.dropout import LANES, Dropout
from tritonite.engine.attention.problem import Packed
from tritonite.errors import Decline
from tritonite.ops.attention import checks
from tritonite.ops.attention.passes import run_backward, run_forward
from tritonite.runtime.contract import empty


def _heads_first(tensor):
    """View (batch, rows, heads, elements), or packed (rows, heads, elements), as (batch, heads, rows, elements)."""
    if tensor.dim() not in (3, 4):
        raise Decline(f"an operand has {tensor.dim()} dimensions, and must have 3 or 4")
    return tensor.transpose(1, 2) if tensor.dim() == 4 else tensor.transpose(0, 1).unsqueeze(0)


def _problem(call, state):
    """Check a call, and return the engine's problem.

    Causal masks are aligned so that the last query sees all keys. `state` has dropout's seed and offset: two 64-bit
    integers.
    """
    tensors, starts, lengths, is_causal, scale = call[:3], call.starts, call.lengths, call.mask, call.scale
    checks.check_both_packed(starts)
    rank = 4 if starts[0] is None else 3
    if any(tensor.dim() != rank for tensor in tensors):
        raise Decline(f"operands have {[tensor.dim() for tensor in tensors]} dimensions, and must have {rank}")
    query, key, value = map(_heads_first, tensors)
    checks.check_operands(query, key, value, 8, FLOATS_OF_16_BITS, one_size=True)
    if starts[0] is None:
        problem = checks.problem_of(query, key, value, None, is_causal, scale, key.shape[2] - query.shape[2])
    else:
        checks.check_starts(*starts, query)
        problem = checks.problem_of(
            query, key, value, None, is_causal, scale, packed=Packed(*starts, *lengths, True, True)
        )
    if not checks.has_dropout(problem, call.dropout_p):
        return problem
    has_64_bits = state.dtype in (torch.uint64, torch.int64)
    if not (has_64_bits and tuple(state.shape) == (2,) and state.is_contiguous()) or state.device != query.device:
        raise Decline("the generator's state is not two contiguous 64-bit integers on the query's device")
    advanced = problem.batch * query.shape[1] * LANES
    return problem._replace(dropout=Dropout(call.dropout_p, True, advanced, state.view(torch.int64)))


def _flash_forward(call, debug):
    """Return (out, logsumexp, generator state, unused, debug mask) as `_flash_attention_forward` does."""
    if debug:
        raise Decline("return_debug_mask is not served")
    query, device = call.query, call.query.device
    # ATen allocates the state without dropout, too.
    state, unused = empty((2,), torch.uint64, device), empty((), torch.uint64, device)
    problem = _problem(call, state)
    out = checks.empty_like(query)
    batch, heads, rows, _ = problem.query.shape
    logsumexp = empty((heads, rows) if problem.packed else (batch, heads, rows), torch.float32, device)
    run_forward(problem, "flash", _heads_first(out), logsumexp.unsqueeze(0) if problem.packed else logsumexp, "inf")
    return out, logsumexp, state, unused, empty((0,), query.dtype, device)


def _flash_backward(call, grad_out, out, logsumexp, state):
    """Return the gradients, in the layouts of the operands."""
    problem = _problem(call, state)
    logsumexp = logsumexp.unsqueeze(0) if problem.packed else logsumexp
    results = _heads_first(grad_out), _heads_first(out), logsumexp
    checks.check_forward_results(problem, *results)
    grads = tuple([checks.empty_like(tensor) for tensor in call[:3]])
    run_backward(problem, "flash", *results, tuple([_heads_first(grad) for grad in grads]))
    return grads


@checks.cuda_operator("_scaled_dot_product_flash_attention", accepts=FLOATS_OF_16_BITS)
def _flash_attention(query, key, value, dropout_p, is_causal, return_debug_mask, scale, outs=()):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    lengths = checks.query_and_key_rows(query, key)
    call = checks.Call(*checks.rows_first(query, key, value), None, checks.DENSE, lengths, dropout_p, is_causal, scale)
    out, logsumexp, *rest = _flash_forward(call, return_debug_mask)
    return out.transpose(1, 2), logsumexp, None, None, *lengths, *rest


@checks.cuda_operator("_scaled_dot_product_flash_attention_backward", accepts=FLOATS_OF_16_BITS)
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
    checks.check_not_nested(cum_seq_q, cum_seq_k)
    checks.query_and_key_rows(query, key)
    call = checks.Call(
        *checks.rows_first(query, key, value), None, checks.DENSE, (max_q, max_k), dropout_p, is_causal, scale
    )
    grads = _flash_backward(call, *checks.rows_first(grad_out, out), logsumexp, philox_seed)
    return checks.rows_first(*grads)


def _check_no_options(*values):
    """Decline options of flash attention that no kernel serves."""
    if any(value is not None for value in values):
        raise Decline("a window, seqused_k, alibi_slopes or block_table is given, which is not served")


@checks.cuda_operator("_flash_attention_forward", accepts=FLOATS_OF_16_BITS)
def _flash_attention_rows(
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
    _check_no_options(window_size_left, window_size_right, seqused_k, alibi_slopes, block_table)
    starts, lengths = (cum_seq_q, cum_seq_k), (max_q, max_k)
    call = checks.Call(query, key, value, None, starts, lengths, dropout_p, is_causal, scale)
    return _flash_forward(call, return_debug_mask)


@checks.cuda_operator("_flash_attention_backward", accepts=FLOATS_OF_16_BITS)
def _flash_attention_rows_backward(
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
    _check_no_options(window_size_left, window_size_right)
    starts, lengths = (cum_seq_q, cum_seq_k), (max_q, max_k)
    call = checks.Call(query, key, value, None, starts, lengths, dropout_p, is_causal, scale)
    return _flash_backward(call, grad_out, out, logsumexp, rng_state)
