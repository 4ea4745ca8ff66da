"""Tritonite: PyTorch's operators as Triton kernels, behind the ordinary torch API."""

import importlib as _importlib
from typing import Any as _Any

from tritonite import devices as _devices
from tritonite import ops
from tritonite.dynamic import pointwise_dynamic
from tritonite.install.override import disable, enable, use_gems
from tritonite.registry import Op
from tritonite.registry import overloads as _overloads
from tritonite.report.audit import audit
from tritonite.report.explain import explain
from tritonite.report.report import OperatorReport, Report, report
from tritonite.report.stats import stats
from tritonite.runtime.compilation import Compilation, CompilationWarning, on_compile
from tritonite.runtime.libentry import libentry
from tritonite.runtime.stats import Counts, reset_stats

device = _devices.current.type
backend = _devices.current

__version__ = "0.1.0"

__all__ = [
    "Compilation",
    "CompilationWarning",
    "Counts",
    "Op",
    "OperatorReport",
    "Report",
    "Warmup",
    "audit",
    "backend",
    "device",
    "disable",
    "enable",
    "explain",
    "fused",
    "graph",
    "libentry",
    "load",
    "load_kernels",
    "nn",
    "on_compile",
    "ops",
    "optim",
    "overloads",
    "patch",
    "pointwise_dynamic",
    "record",
    "report",
    "reset_stats",
    "save",
    "save_kernels",
    "stats",
    "unpatch",
    "use_gems",
    "warm",
]


def overloads() -> dict[str, Op]:
    """Return a new dict of every overload that has a kernel, by name."""
    return dict(_overloads())


def __getattr__(name: str) -> _Any:
    # Importing `fused` registers its operators, and `optim` imports torch.optim, which takes time; do so on first use.
    if name in ("fused", "graph", "nn", "optim"):
        return _importlib.import_module(f"tritonite.{name}")
    if name == "record":
        return _importlib.import_module("tritonite.graph").record
    if name in ("load", "save"):
        return getattr(_importlib.import_module("tritonite.graph.saving.files"), name)
    if name in ("patch", "unpatch"):
        return getattr(_importlib.import_module("tritonite.patching"), name)
    if name in ("load_kernels", "save_kernels"):
        return getattr(_importlib.import_module("tritonite.runtime.artifact"), name)
    if name in ("warm", "Warmup"):
        return getattr(_importlib.import_module("tritonite.warming.warm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
