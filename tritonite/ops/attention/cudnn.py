"""cuDNN's attention for CUDA, and its gradient."""

import torch

from tritonite.dtypes import FLOATS_OF_16_BITS
from tritonite.engine.iteration import broadcast_shape, contiguous_strides, strides_after_conversion
from tritonite.errors import Decline
from tritonite.ops.attention import checks
from tritonite.ops.attention.passes import run_backward, run_forward
from tritonite.runtime.contract import empty, empty_strided


def _strides_like(query, shape):
    """Return strides of a shape in the order of the query's dimensions."""
    if tuple(query.shape) == tuple(shape):
        return strides_after_conversion(shape, query.stride())
    return contiguous_strides(shape, sorted(range(4), key=query.stride))


def _problem(query, key, value, attn_bias, dropout_p, is_causal, scale):
    """Check what both passes accept."""
    checks.check_no_dropout(dropout_p, "dropout of cuDNN's, whose mapping of random numbers to elements is its own")
    checks.check_operands(query, key, value, 8, FLOATS_OF_16_BITS, one_size=False)
    bias = checks.expanded_bias(
        *(attn_bias, query, key, (query.dtype,)),
        # ATen broadcasts a bias of three dimensions over heads, so its first size must be 1.
        lambda bias, shape: (
            (bias.dim() in (2, 4) or (bias.dim() == 3 and bias.shape[0] == 1))
            and broadcast_shape((bias.shape, shape)) == shape
        ),
    )
    return checks.problem_of(query, key, value, bias, is_causal, scale)


@checks.cuda_operator("_scaled_dot_product_cudnn_attention", accepts=FLOATS_OF_16_BITS)
def cudnn_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale, outs=()
):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    problem = _problem(query, key, value, attn_bias, dropout_p, is_causal, scale)
    if return_debug_mask:
        raise Decline("return_debug_mask is not served")
    device, queries = query.device, query.shape[2]
    shape = (*query.shape[:3], value.shape[3])
    logsumexp = empty((*shape[:3], 1), torch.float32, device) if compute_log_sumexp else None
    out = empty_strided(shape, _strides_like(query, shape), query.dtype, device)
    run_forward(problem, "cudnn", out, None if logsumexp is None else logsumexp.squeeze(3), "inf")
    seed, offset = empty((), torch.int64, device), empty((), torch.int64, device)
    return out, logsumexp, None, None, queries, key.shape[2], seed, offset, None


@checks.cuda_operator(
    "_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward", accepts=FLOATS_OF_16_BITS
)
def cudnn_attention_backward(
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
    checks.check_not_nested(cum_seq_q, cum_seq_k)
    problem = _problem(query, key, value, attn_bias, dropout_p, is_causal, scale)
    if logsumexp.dim() != 4 or logsumexp.shape[3] != 1:
        raise Decline(f"logsumexp is {tuple(logsumexp.shape)}: it must have a fourth dimension of size 1")
    rows = logsumexp.squeeze(3)
    checks.check_forward_results(problem, grad_out, out, rows)
    grads = tuple([checks.empty_like(tensor) for tensor in (query, key, value)])
    return run_backward(problem, "cudnn", grad_out, out, rows, grads)


@checks.cuda_operator("_cudnn_attention_forward", accepts=FLOATS_OF_16_BITS)
def cudnn_attention_forward(
    query,
    key,
    value,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    compute_log_sumexp,
    dropout_p,
    is_causal,
    return_debug_mask,
    scale,
    # Since torch 2.14.
    seqused_k=None,
    block_table=None,
    outs=(),
):
    """Compute what `scaled_dot_product_attention` calls for sequences that are not packed."""
    checks.check_not_nested(cum_seq_q, cum_seq_k)
    if seqused_k is not None or block_table is not None:
        raise Decline("seqused_k or block_table is given, which is not served")
    return cudnn_attention(
        query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale
    )
