"""Hashes of tensors: bits of all elements combined."""

import torch
import triton
import triton.language as tl

from tritonite.dtypes import ALL
from tritonite.engine.outputs import dimensions, outputs
from tritonite.engine.rows.declare import Reduction
from tritonite.errors import Decline
from tritonite.ops.reduction.sums import only
from tritonite.registry import operator


@triton.jit
def _bits(x):
    return x.to(tl.int64, bitcast=True) if x.dtype.is_floating() else x.to(tl.int64)


@triton.jit
def _exclusive_or(a, b):
    return a ^ b


_hash = Reduction((0,), _bits, _exclusive_or, only, (torch.int64,))


@operator("hash_tensor", accepts=ALL)
def hash_tensor(self, dim=(), keepdim=False, mode=0, outs=()):
    """Combine the bits of elements, floats as float64 and others as int64, by exclusive or."""
    dims = dimensions(dim, self.dim())
    if mode != 0 or self.dtype not in ALL or any(self.shape[d] == 0 for d in dims) or (not self.numel() and not dim):
        raise Decline(f"mode {mode} for {self.dtype} of shape {tuple(self.shape)}; mode 0 with elements is served")
    shape = tuple([1 if d in dims else size for d, size in enumerate(self.shape) if keepdim or d not in dims])
    (out,) = outs = outputs((self,), [shape], [torch.uint64], outs)
    compute = torch.float64 if self.dtype.is_floating_point else torch.int64
    _hash.run((self,), dims, (out.view(torch.int64),), compute)
    return outs
