"""Observers of quantisation-aware training: moving extrema, and the scale and zero point of their range."""

import torch
import triton
import triton.language as tl

from tritonite.engine.movement import move
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.math import multiply_add, true_divide
from tritonite.ops.fake_quantize import channel_quantized, per_tensor_on_device
from tritonite.ops.reduction.extrema import aminmax
from tritonite.registry import operator, scalar_kernel
from tritonite.runtime.contract import empty_strided


@triton.jit
def _moved(running, current, share):
    """Return the moving average; an infinite one has seen nothing."""
    return tl.where(tl.abs(running) == float("inf"), current, multiply_add(share, current - running, running))


@triton.jit
def _range_of(low, high, least, most, symmetric: tl.constexpr):
    """Return (scale, zero point) in float32 and float64 of a range that is extended to contain 0."""
    steps = most - least
    if symmetric:
        half = libdevice.trunc(steps / 2.0)
        lowest, highest = -(half + 1.0), half
        below = tl.abs(true_divide(low, lowest.to(tl.float32)))
        above = tl.abs(true_divide(high, highest.to(tl.float32)))
        widest = tl.maximum(below, above).to(tl.float64)
        both = (low < 0) & (high > 0)
        low = tl.where(both, (widest * lowest).to(tl.float32), low)
        high = tl.where(both, (widest * highest).to(tl.float32), high)
    low, high = tl.where(low < 0, low, 0.0), tl.where(high > 0, high, 0.0)
    scale = ((high.to(tl.float64) - low.to(tl.float64)) / steps).to(tl.float32)
    inverse = true_divide(tl.full(scale.shape, 1.0, tl.float32), scale)
    scale = tl.where((scale == 0) | (inverse == float("inf")), 0.1, scale)
    wide = scale.to(tl.float64)
    below, above = low.to(tl.float64) / wide, high.to(tl.float64) / wide
    nearer = tl.abs(least) + tl.abs(below) < tl.abs(most) + tl.abs(above)
    zero = tl.where(nearer, least - below, most - above)
    if symmetric:
        zero = tl.where((low < 0) & (high > 0), (least + most) / 2.0, zero)
    zero = tl.where(zero < least, least, tl.where(zero > most, most, libdevice.nearbyint(zero)))
    return scale, zero


@scalar_kernel(
    accepts=(torch.float32,),
    own=("zero_point", "observes", "quantises"),
    exact=("quant_min", "quant_max"),
    cast=("share",),
    static=("symmetric",),
    output_dtypes=(torch.float32, torch.float32, torch.float32, torch.int32),
)
def _observed(
    low, high, running_min, running_max, scale, zero_point, observes, quantises, share, quant_min, quant_max, symmetric
):
    """Move the extrema where the observer is on, and choose a scale and a zero point where quantisation is on."""
    running_min = tl.where(observes == 1, _moved(running_min, low, share), running_min)
    running_max = tl.where(observes == 1, _moved(running_max, high, share), running_max)
    least, most = quant_min.to(tl.float64), quant_max.to(tl.float64)
    own_scale, own_zero = _range_of(running_min, running_max, least, most, symmetric)
    scale = tl.where(quantises == 1, own_scale, scale)
    zero_point = tl.where(quantises == 1, own_zero.to(tl.int32), zero_point)
    return running_min, running_max, scale, zero_point


def _flag(tensor, name):
    if tensor.numel() != 1 or tensor.dtype is not torch.int64:
        raise Decline(f"{name} of {tensor.dtype} with {tensor.numel()} elements; one of int64 is served")
    return tensor.view(())


def _observe(self, on, states, share, quant_min, quant_max, ch_axis, per_row, symmetric, outs):
    """Update `states` (minima, maxima, scales, zero points), and return the fake-quantised tensor and its mask."""
    observes, quantises = _flag(on[0], "observer_on"), _flag(on[1], "fake_quant_on")
    if self.dtype is not torch.float32 or not self.dim() or not self.numel() or not 0 <= ch_axis < self.dim():
        raise Decline(f"{self.dtype} of shape {tuple(self.shape)}, channels {ch_axis}; float32 with elements is served")
    if per_row and ch_axis:
        raise Decline(f"channels in dimension {ch_axis}; ATen quantises those of the first")
    if quant_min >= quant_max:
        raise Decline(f"quant_min {quant_min} not below quant_max {quant_max}")
    size = self.shape[0] if per_row else 1
    for state, dtype in zip(states, (torch.float32, torch.float32, torch.float32, torch.int32), strict=True):
        if state.numel() != size or state.dim() > 1 or state.dtype is not dtype:
            raise Decline(f"a state of {state.dtype} and shape {tuple(state.shape)} for {size} ranges")
    low, high = aminmax(self.reshape(size, -1), 1)
    vectors = [state.view(size) for state in states]
    flags = observes.expand(size), quantises.expand(size)
    _observed.run((low, high, *vectors, *flags, share, quant_min, quant_max, symmetric), vectors)
    scale, zero_point = states[2:]
    if per_row:
        return channel_quantized(self, scale, zero_point, quantises, quant_min, quant_max, outs)
    return per_tensor_on_device(self, scale, zero_point, quantises, quant_min, quant_max, outs)


@operator("_fused_moving_avg_obs_fq_helper", accepts=(torch.float32,), pin=("quant_min", "quant_max", "ch_axis"))
def _fused_moving_avg_obs_fq_helper(
    self,
    observer_on,
    fake_quant_on,
    running_min,
    running_max,
    scale,
    zero_point,
    averaging_const,
    quant_min,
    quant_max,
    ch_axis,
    per_row_fake_quant=False,
    symmetric_quant=False,
    outs=(),
):
    """Reduce to extrema, update states in one launch, and quantise; the host reads neither switch."""
    on, states = (observer_on, fake_quant_on), (running_min, running_max, scale, zero_point)
    numbers = averaging_const, quant_min, quant_max, ch_axis
    return _observe(self, on, states, *numbers, per_row_fake_quant, symmetric_quant, outs)


@operator(
    "_fused_moving_avg_obs_fq_helper_functional", accepts=(torch.float32,), pin=("quant_min", "quant_max", "ch_axis")
)
def _fused_moving_avg_obs_fq_helper_functional(
    self,
    observer_on,
    fake_quant_on,
    running_min,
    running_max,
    scale,
    zero_point,
    averaging_const,
    quant_min,
    quant_max,
    ch_axis,
    per_row_fake_quant=False,
    symmetric_quant=False,
    outs=(),
):
    """Update copies of the states, which are results."""
    given = running_min, running_max, scale, zero_point
    states = [empty_strided(x.shape, x.stride(), x.dtype, x.device) for x in given]
    for x, state in zip(given, states, strict=True):
        move(x, state)
    numbers = averaging_const, quant_min, quant_max, ch_axis
    found = _observe(self, (observer_on, fake_quant_on), states, *numbers, per_row_fake_quant, symmetric_quant, ())
    return *found, *states
