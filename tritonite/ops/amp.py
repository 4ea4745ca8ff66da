"""Loss scaling for 16-bit floats: gradients are unscaled and checked, and the scale follows what was found."""

import torch
import triton.language as tl

from tritonite.dtypes import FLOATS
from tritonite.engine.lists.reduce import like, scale_each
from tritonite.engine.movement import move
from tritonite.errors import Decline
from tritonite.registry import operator, scalar_kernel


def _check_element(tensor, dtype, name):
    if tensor.numel() != 1 or tensor.dtype is not dtype:
        raise Decline(f"{name} has {tensor.numel()} elements of {tensor.dtype}; one of {dtype} is served")


@operator("_amp_foreach_non_finite_check_and_unscale", accepts=FLOATS)
def unscale(self, found_inf, inv_scale, outs=()):
    """Multiply gradients by `inv_scale`, and set `found_inf` to 1 if an element is inf or nan."""
    if not self:
        raise Decline("lists without tensors")
    _check_element(found_inf, torch.float32, "found_inf")
    _check_element(inv_scale, torch.float32, "inv_scale")
    for x in self:
        if x.dtype not in FLOATS:
            raise Decline(f"a gradient of {x.dtype}")
    if not outs:
        results, flag = [like(x) for x in self], like(found_inf)
        move(found_inf, flag)
        scale_each(self, inv_scale, flag, results)
        return results, flag
    (results,) = outs
    if len(results) != len(self):
        raise Decline(f"{len(results)} outputs for {len(self)} gradients")
    if any([out.shape != x.shape or out.dtype is not x.dtype for x, out in zip(self, results, strict=True)]):
        raise Decline("an output of another shape or dtype than its gradient")
    # The schema of the out= overload marks `found_inf` as written, but ATen does not write it there.
    scale_each(self, inv_scale, found_inf if results is self else None, results)
    return ()


@scalar_kernel(
    own=("scale", "growth_tracker", "found_inf"),
    exact=("growth_factor", "backoff_factor", "growth_interval"),
    output_dtypes=(torch.float32, torch.int32),
)
def _updated(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval):
    """Back off after an overflow; grow after `growth_interval` steps without one, unless the scale would be inf."""
    wide = scale.to(tl.float64)
    grown = (wide * growth_factor).to(tl.float32)
    steps = growth_tracker + 1
    reached = steps.to(tl.float64) == growth_interval.to(tl.float64)
    found = found_inf != 0
    kept = tl.where(reached & (tl.abs(grown) < float("inf")), grown, scale)
    scale = tl.where(found, (wide * backoff_factor).to(tl.float32), kept)
    return scale, tl.where(found | reached, 0, steps)


@operator("_amp_update_scale", accepts=(torch.float32,))
def update_scale(self, growth_tracker, found_inf, scale_growth_factor, scale_backoff_factor, growth_interval, outs=()):
    _check_element(self, torch.float32, "current_scale")
    _check_element(growth_tracker, torch.int32, "growth_tracker")
    _check_element(found_inf, torch.float32, "found_inf")
    in_place = bool(outs) and outs[0] is self
    if outs and (outs[0].shape != self.shape or outs[0].dtype is not torch.float32):
        raise Decline(f"output of shape {tuple(outs[0].shape)} and dtype {outs[0].dtype}")
    scale = outs[0] if outs else like(self)
    # The schema of the out= overload marks `growth_tracker` as written, but ATen does not write it there.
    tracker = growth_tracker if in_place else like(growth_tracker)
    given = [x.view(()) for x in (self, growth_tracker, found_inf)]
    written = given[:2] if in_place else [scale.view(()), tracker.view(())]
    _updated.run((*given, scale_growth_factor, scale_backoff_factor, growth_interval), written)
    return (scale,) if outs else (scale, tracker)
