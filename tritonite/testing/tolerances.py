"""Tolerances of the judge: by dtype RTOL relative to the reference and ATOL near zero, and RESIDUAL of equations."""

from __future__ import annotations

import torch

# The resolution of a dtype.
RTOL = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float32: 1.3e-6, torch.float64: 1e-12}
# A few roundings of intermediate values of order 1.
ATOL = {torch.float16: 5e-7, torch.bfloat16: 5e-7, torch.float32: 5e-7, torch.float64: 1e-14}
# The threshold of LAPACK's own tests, in units of n * eps * norm.
RESIDUAL = 30.0
