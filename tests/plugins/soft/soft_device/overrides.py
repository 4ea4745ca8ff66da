"""The vendor's own GELU, for contiguous vectors of float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite import libentry
from tritonite.devices import Override
from tritonite.runtime.contract import empty


@libentry()
@triton.jit
def _gelu_kernel(x, out, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, index < n)
    tl.store(out + index, 0.5 * value * (1 + tl.erf(value * 0.7071067811865476)), index < n)


def _serves(self: torch.Tensor, approximate: str = "none") -> bool:
    return approximate == "none" and self.dtype is torch.float32 and self.dim() == 1 and self.is_contiguous()


def _gelu(self, approximate="none", outs=()):
    out = outs[0] if outs else empty(self.shape, self.dtype, self.device)
    _gelu_kernel[(triton.cdiv(self.numel(), 1024),)](self, out, self.numel(), BLOCK=1024)
    return (out,)


gelu = Override(_gelu, _serves)
