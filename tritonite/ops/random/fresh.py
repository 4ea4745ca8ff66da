"""Fresh tensors of random numbers, and permutations."""

from __future__ import annotations

import math

import torch

from tritonite.dtypes import NUMBERS
from tritonite.engine.iteration import is_dense
from tritonite.engine.movement import result, strides_like
from tritonite.engine.random import draw, permute
from tritonite.engine.sorting.lookback import check_length
from tritonite.errors import Decline
from tritonite.ops.creation import alike, check_contiguous, fresh
from tritonite.ops.random.draws import (
    DRAWN,
    INTEGRAL,
    as_int64,
    draw_integers,
    draw_normal,
    draw_uniform,
    largest_integer,
    operator,
    written_to,
)
from tritonite.ops.random.transforms import LAST_BITS
from tritonite.registry import exclude
from tritonite.runtime.contract import empty


@operator("normal", accepts=DRAWN)
def normal_of_size(mean, std, size, generator=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    """Draw a fresh tensor of normal numbers."""
    return _fresh_normal(size, mean, std, generator, (dtype, layout, device, pin_memory), outs)


def _fresh_uniform(size, generator, placement, outs):
    dtype, *others = placement
    out = fresh(size, torch.get_default_dtype() if dtype is None else dtype, *others, outs)
    if out.dtype not in DRAWN:
        raise Decline(f"dtype {out.dtype}")
    draw_uniform(out, 0.0, 1.0, generator)
    return (out,)


def _fresh_normal(size, mean, deviation, generator, placement, outs):
    dtype, *others = placement
    out = fresh(size, torch.get_default_dtype() if dtype is None else dtype, *others, outs)
    if out.dtype not in DRAWN:
        raise Decline(f"dtype {out.dtype}")
    draw_normal(out, mean, deviation, generator)
    return (out,)


def _drawn_like(self, memory_format, placement, accepts, outs, fill_in):
    """Fill a tensor like `self` with `fill_in`; to out= of another layout it is copied, as in ATen."""
    strides = strides_like(self, memory_format)
    out = alike(self, self.shape, *placement, outs, strides)
    if out.dtype not in accepts:
        raise Decline(f"dtype {out.dtype}")
    same = not outs or (is_dense(out.shape, out.stride()) and tuple(out.stride()) == tuple(strides))
    drawn = out if same else result((self,), self.shape, out.dtype, (), strides)
    fill_in(drawn)
    return written_to(out, drawn)


@operator("rand", accepts=DRAWN)
def rand(size, generator=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    return _fresh_uniform(size, generator, (dtype, layout, device, pin_memory), outs)


@operator("rand_like", accepts=DRAWN)
def rand_like(self, generator=None, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None, outs=()):
    placement = (dtype, layout, device, pin_memory)
    return _drawn_like(self, memory_format, placement, DRAWN, outs, lambda out: draw_uniform(out, 0.0, 1.0, generator))


@operator("randn", accepts=DRAWN)
def randn(size, generator=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    """Draw a fresh tensor of standard normal numbers."""
    return _fresh_normal(size, 0.0, 1.0, generator, (dtype, layout, device, pin_memory), outs)


@operator("randn_like", accepts=DRAWN)
def randn_like(
    self, generator=None, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None, outs=()
):
    """Draw a tensor of standard normal numbers like another."""
    placement = (dtype, layout, device, pin_memory)
    return _drawn_like(self, memory_format, placement, DRAWN, outs, lambda out: draw_normal(out, 0.0, 1.0, generator))


@operator("randint", accepts=INTEGRAL)
def randint(high, size, low=0, generator=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    # The schema's default is a dtype's number, which means int64. None is the default dtype.
    dtype = dtype if dtype is None or isinstance(dtype, torch.dtype) else torch.int64
    out = fresh(size, dtype, layout, device, pin_memory, outs)
    if out.dtype not in INTEGRAL:
        raise Decline(f"dtype {out.dtype}")
    draw_integers(out, 0 if low is None else low, high, generator)
    return (out,)


@operator("randint_like", accepts=INTEGRAL)
def randint_like(
    self,
    high,
    low=0,
    generator=None,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
    memory_format=None,
    outs=(),
):
    placement, begin = (dtype, layout, device, pin_memory), 0 if low is None else low
    return _drawn_like(
        self, memory_format, placement, INTEGRAL, outs, lambda out: draw_integers(out, begin, high, generator)
    )


for _name in ("Tensor", "Tensor_out", "Tensor_generator", "Tensor_generator_out"):
    exclude(
        f"randint_like.{_name}",
        "the host reads its end, a tensor on the CPU, and calls random_.from, which has a kernel",
    )
for _name in ("_philox_normal", "_philox_uniform"):
    for _form in ("", ".out"):
        exclude(f"{_name}{_form}", "new in torch 2.13, by keys in a tensor; no GPU has been compared with ATen's")


@operator("randperm", accepts=(torch.int64, torch.int32, torch.int16, torch.float32, torch.float16, torch.float64))
def randperm(n, generator=None, dtype=None, layout=None, device=None, pin_memory=None, outs=()):
    """Sort random keys, of enough bits that few are equal, and shuffle the equal ones."""
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.int64
    check_contiguous(outs)
    if n < 0:
        raise Decline(f"n = {n}, which is negative")
    check_length(n)
    out = fresh((n,), dtype, layout, device, pin_memory, outs)
    if out.dtype not in NUMBERS or out.dtype is torch.bfloat16 or n > largest_integer(out.dtype):
        raise Decline(f"dtype {out.dtype}")
    if not n:
        return (out,)
    bits = math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9))))
    keys = empty((n,), torch.int32 if bits <= 32 else torch.int64, out.device)
    if bits == 32:
        draw_integers(keys, -(2**31), 2**31 - 1, generator)
    else:
        # ATen draws from the least to the largest integer, without that, and keeps the lowest bits.
        width = 8 * keys.dtype.itemsize
        draw(LAST_BITS, keys, span=(2**bits - 1, as_int64(2**width - 1)), generator=generator, wide=True)
    permute(keys, out, bits, generator)
    return (out,)
