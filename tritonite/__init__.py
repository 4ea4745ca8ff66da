"""Tritonite: PyTorch's operators as Triton kernels, behind the ordinary torch API."""

from tritonite import devices as _devices  # noqa: I001 - first: it may set TRITON_INTERPRET before triton is imported
from tritonite import ops
from tritonite.catalog import Op, overloads
from tritonite.override import disable, enable, use_gems
from tritonite.stats import Counts, reset_stats, stats

device = _devices.current.type
backend = _devices.current
