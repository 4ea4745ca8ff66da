"""Tritonite: PyTorch's operators as Triton kernels, behind the ordinary torch API."""

from tritonite import devices as _devices
from tritonite import ops
from tritonite.catalog import Op, overloads
from tritonite.dispatch.override import disable, enable, use_gems
from tritonite.dynamic import pointwise_dynamic
from tritonite.explain import explain
from tritonite.launch import libentry
from tritonite.stats import Counts, reset_stats, stats

device = _devices.current.type
backend = _devices.current

__version__ = "0.1.0"

__all__ = [
    "Counts",
    "Op",
    "backend",
    "device",
    "disable",
    "enable",
    "explain",
    "libentry",
    "ops",
    "overloads",
    "pointwise_dynamic",
    "reset_stats",
    "stats",
    "use_gems",
]
