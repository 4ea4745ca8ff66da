"""Kernels of the causal depthwise convolution: y[t] = f(bias + sum over j of weight[j] x[t - width + 1 + j]).

With p the sum before the activation f, and by_p = by_y f'(p), the gradients are

    by_x[t] = sum over j of weight[width - 1 - j] by_p[t + j]
    by_weight[j] = sum over t of by_p[t] x[t - width + 1 + j]
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.short_convolution.meta import OperandStrides, Strides
from tritonite.language.math import sigmoid, silu_derivative
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@triton.jit
def _numbers(strides, INDEX: tl.constexpr):
    """Return strides as numbers of the dtype INDEX: in loops Triton 3.6 forgets which of a tuple are 1."""
    return Strides(
        tl.full((), strides.batch, INDEX), tl.full((), strides.channel, INDEX), tl.full((), strides.token, INDEX)
    )


@triton.jit
def _operand_numbers(strides, INDEX: tl.constexpr):
    """Return the operands' strides as `_numbers` does."""
    weight = tl.full((), strides.weight[0], INDEX), tl.full((), strides.weight[1], INDEX)
    x, state = _numbers(strides.x, INDEX), _numbers(strides.state, INDEX)
    return OperandStrides(x, weight, tl.full((), strides.bias, INDEX), state)


@triton.jit
def _load(rows, strides, channel, token, channels, tokens):
    """Load a block of (channels, tokens), 0 outside the tensor, in float32."""
    mask = (channel < channels)[:, None] & ((token >= 0) & (token < tokens))[None, :]
    pointers = rows + channel[:, None] * strides.channel + token[None, :] * strides.token
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_inputs(operands, strides, batch, channel, token, channels, tokens, META: tl.constexpr):
    """Load a block of x, preceded by the state, in float32; tokens before the first are negative."""
    x = _load(operands.x + batch * strides.x.batch, strides.x, channel, token, channels, tokens)
    if operands.state is not None:
        before: tl.constexpr = META.width - 1
        state = operands.state + batch * strides.state.batch
        x += _load(state, strides.state, channel, token + before, channels, before)
    return x


@triton.jit
def _tap(operands, strides, channel, channels, TAP: tl.constexpr):
    """Load a tap of every channel as a column, in float32."""
    pointers = operands.weight + channel * strides.weight[0] + TAP * strides.weight[1]
    return tl.load(pointers, mask=channel < channels, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _biases(operands, strides, channel, channels, META: tl.constexpr):
    """Load the bias of every channel as a block, 0 without a bias, in float32."""
    CHANNELS: tl.constexpr = META.channels
    TOKENS: tl.constexpr = META.tokens
    block = tl.zeros((CHANNELS, TOKENS), tl.float32)
    if operands.bias is not None:
        own = tl.load(operands.bias + channel * strides.bias, mask=channel < channels, other=0.0)
        block += own.to(tl.float32)[:, None]
    return block


@libentry()
@triton.jit(do_not_specialize=["tokens", "blocks"])
def convolve_tokens(operands, out, strides, out_strides, channels, tokens, blocks, META: tl.constexpr):
    """Convolve a block of channels and tokens; `blocks` is the number of blocks of tokens."""
    wait_for_previous_launch()
    WIDTH: tl.constexpr = META.width
    channel_blocks = tl.cdiv(channels, META.channels)
    batch = (tl.program_id(0) // (blocks * channel_blocks)).to(tl.int64)
    own = tl.program_id(0) // blocks % channel_blocks
    channel = (own * META.channels + tl.arange(0, META.channels)).to(META.index)
    token = ((tl.program_id(0) % blocks) * META.tokens + tl.arange(0, META.tokens)).to(META.index)
    total = _biases(operands, strides, channel, channels, META)
    for j in tl.static_range(WIDTH):
        x = _load_inputs(operands, strides, batch, channel, token + (j + 1 - META.width), channels, tokens, META)
        total += x * _tap(operands, strides, channel, channels, j)
    if META.silu:
        total *= sigmoid(total)
    mask = (channel < channels)[:, None] & (token < tokens)[None, :]
    pointers = out + batch * out_strides.batch + channel[:, None] * out_strides.channel
    tl.store(pointers + token[None, :] * out_strides.token, total.to(out.dtype.element_ty), mask=mask)


@libentry()
@triton.jit(do_not_specialize=["tokens", "blocks", "batches"])
def convolution_gradients(
    operands,
    grad,
    by_x,
    by_state,
    partials,
    strides,
    grad_strides,
    by_x_strides,
    channels,
    tokens,
    blocks,
    batches,
    META: tl.constexpr,
):
    """Compute the gradient by x, and partial sums of those by weight and bias, of a block of channels.

    The programs of the grid's second dimension take the blocks of tokens of all batches in turn. Tokens begin with the
    state, if there is one, whose contiguous gradient is `by_state`. `partials` are float32, (programs, width + 1,
    channels), with the bias last.
    """
    wait_for_previous_launch()
    INDEX: tl.constexpr = META.index
    strides = _operand_numbers(strides, INDEX)
    grad_strides, by_x_strides = _numbers(grad_strides, INDEX), _numbers(by_x_strides, INDEX)
    CHANNELS: tl.constexpr = META.channels
    TOKENS: tl.constexpr = META.tokens
    WIDTH: tl.constexpr = META.width
    # Shifted inputs of a block; the activation's derivative needs later tokens, too.
    SHIFTS: tl.constexpr = 2 * META.width - 1 if META.silu else META.width
    channel = (tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)).to(META.index)
    before: tl.constexpr = META.width - 1
    start = 0
    if operands.state is not None:
        start = -before
    bias = _biases(operands, strides, channel, channels, META)
    sums = ()
    for _ in tl.static_range(WIDTH + 1):
        sums = sums + (tl.zeros((CHANNELS, TOKENS), tl.float32),)
    for block in range(tl.program_id(1), blocks * batches, tl.num_programs(1)):
        batch = (block // blocks).to(tl.int64)
        token = ((block % blocks) * TOKENS + tl.arange(0, TOKENS)).to(META.index) + start
        inputs = ()
        for shift in tl.static_range(SHIFTS):
            x = _load_inputs(operands, strides, batch, channel, token + (shift - before), channels, tokens, META)
            inputs = inputs + (x,)
        by_inputs = tl.zeros((CHANNELS, TOKENS), tl.float32)
        rows = grad + batch * grad_strides.batch
        own = by_inputs
        for j in tl.static_range(WIDTH):
            by_total = _load(rows, grad_strides, channel, token + j, channels, tokens)
            if META.silu:
                total = bias
                for i in tl.static_range(WIDTH):
                    total += inputs[i + j] * _tap(operands, strides, channel, channels, i)
                by_total *= silu_derivative(total, sigmoid(total))
            by_inputs += by_total * _tap(operands, strides, channel, channels, before - j)
            if j == 0:
                own = by_total
        added = ()
        for j in tl.static_range(WIDTH):
            added = added + (sums[j] + own * inputs[j],)
        sums = added + (sums[META.width] + own,)
        valid = (channel < channels)[:, None]
        pointers = by_x + batch * by_x_strides.batch + channel[:, None] * by_x_strides.channel
        mask = valid & ((token >= 0) & (token < tokens))[None, :]
        tl.store(pointers + token[None, :] * by_x_strides.token, by_inputs.to(by_x.dtype.element_ty), mask=mask)
        if by_state is not None:
            pointers = by_state + (batch * channels + channel[:, None]) * before + (token[None, :] + before)
            tl.store(pointers, by_inputs.to(by_state.dtype.element_ty), mask=valid & (token < 0)[None, :])
    for j in tl.static_range(WIDTH + 1):
        row = (tl.program_id(1) * (META.width + 1) + j).to(tl.int64)
        tl.store(partials + row * channels + channel, tl.sum(sums[j], 1), mask=channel < channels)


@libentry()
@triton.jit
def add_partials(partials, by_weight, by_bias, channels, programs, META: tl.constexpr):
    """Add up the partial sums of the gradients by weight and bias, in the order of the programs."""
    wait_for_previous_launch()
    TOKENS: tl.constexpr = META.tokens
    channel = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    tap = tl.program_id(1)
    mask = channel < channels
    total = tl.zeros((TOKENS,), tl.float32)
    for program in range(programs):
        row = (program * (META.width + 1) + tap).to(tl.int64)
        total += tl.load(partials + row * channels + channel, mask=mask, other=0.0)
    if tap < META.width:
        pointers = by_weight + channel.to(tl.int64) * META.width + tap
        tl.store(pointers, total.to(by_weight.dtype.element_ty), mask=mask)
    else:
        if by_bias is not None:
            tl.store(by_bias + channel, total.to(by_bias.dtype.element_ty), mask=mask)


@libentry()
@triton.jit
def append_token(operands, out, strides, channels, length, META: tl.constexpr):
    """Convolve at a new token, and append it to the state in place of the first, for a block of channels.

    META.tokens is `length`, the state's, rounded up to a power of 2. The outputs are contiguous over (batch, channels).
    """
    wait_for_previous_launch()
    blocks = tl.cdiv(channels, META.channels)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    channel = ((tl.program_id(0) % blocks) * META.channels + tl.arange(0, META.channels)).to(META.index)
    token = tl.arange(0, META.tokens).to(META.index)
    inside = channel < channels
    x = tl.load(operands.x + batch * strides.x.batch + channel * strides.x.channel, mask=inside, other=0.0)
    pointers = operands.state + batch * strides.state.batch + channel[:, None] * strides.state.channel
    mask = inside[:, None] & (token < length)[None, :]
    past = tl.load(pointers + token[None, :] * strides.state.token, mask=mask, other=0.0)
    # The last `width` of the state's tokens and x meet the taps.
    tap = token + (META.width - 1) - length
    weights = operands.weight + channel[:, None] * strides.weight[0] + tap[None, :] * strides.weight[1]
    weight = tl.load(weights, mask=mask & (tap >= 0)[None, :], other=0.0).to(tl.float32)
    total = tl.sum(past.to(tl.float32) * weight, 1)
    last = operands.weight + channel * strides.weight[0] + (META.width - 1) * strides.weight[1]
    total += x.to(tl.float32) * tl.load(last, mask=inside, other=0.0).to(tl.float32)
    if operands.bias is not None:
        total += tl.load(operands.bias + channel * strides.bias, mask=inside, other=0.0).to(tl.float32)
    if META.silu:
        total *= sigmoid(total)
    # Every thread has read the state before any overwrites it.
    tl.debug_barrier()
    tl.store(pointers + (token - 1)[None, :] * strides.state.token, past, mask=mask & (token > 0)[None, :])
    end = operands.state + batch * strides.state.batch + channel * strides.state.channel
    tl.store(end + (length - 1) * strides.state.token, x, mask=inside & (length > 0))
    tl.store(out + batch * channels + channel, total.to(out.dtype.element_ty), mask=inside)
