"""ATen's attention operator for CPUs, and its gradient."""

import torch

from tritonite.dtypes import SINGLE_FLOATS
from tritonite.engine.iteration import broadcast_shape
from tritonite.ops.attention import checks
from tritonite.ops.attention.passes import run_backward, run_forward
from tritonite.registry import operator
from tritonite.runtime.contract import empty, empty_strided


def _problem(query, key, value, dropout_p, is_causal, attn_mask, scale):
    """Check what both passes accept."""
    checks.check_no_dropout(dropout_p, "dropout, which ATen refuses on CPUs")
    checks.check_operands(query, key, value, 1, SINGLE_FLOATS, one_size=True)
    bias = checks.expanded_bias(
        *(attn_mask, query, key, (query.dtype, torch.float32)),
        lambda mask, shape: mask.dim() in (2, 4) and broadcast_shape((mask.shape, shape)) == shape,
    )
    return checks.problem_of(query, key, value, bias, is_causal, scale)


@operator("_scaled_dot_product_flash_attention_for_cpu", accepts=SINGLE_FLOATS, pin_zero_or_one=("dropout_p",))
def _for_cpu(query, key, value, dropout_p, is_causal, attn_mask, scale, outs=()):
    """Online softmax: Milakov and Gimelshein 2018, Dao et al. 2022."""
    problem = _problem(query, key, value, dropout_p, is_causal, attn_mask, scale)
    batch, heads, queries, _ = query.shape
    logsumexp = empty((batch, queries, heads), torch.float32, query.device).transpose(1, 2)
    out = checks.empty_like(query)
    run_forward(problem, "flash", out, logsumexp, "0")
    return out, logsumexp


@operator("_scaled_dot_product_flash_attention_for_cpu_backward", accepts=SINGLE_FLOATS, pin_zero_or_one=("dropout_p",))
def _for_cpu_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale, outs=()):
    """Probabilities computed again, as in Dao 2023."""
    problem = _problem(query, key, value, dropout_p, is_causal, attn_mask, scale)
    checks.check_forward_results(problem, grad_out, out, logsumexp)
    operands = query, key, value
    grads = tuple([empty_strided(x.shape, checks.rows_before_heads(x.shape), x.dtype, x.device) for x in operands])
    return run_backward(problem, "flash", grad_out, out, logsumexp, grads)
