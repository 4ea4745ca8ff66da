"""Kernels that the compile matrix has besides those of samples: a module an engine.

Samples are small. A module here launches what they do not reach: every tile of a table, long rows, kernels of one kind
of device. `cases` holds what the modules register; `tritonite.testing.targets` compiles it.
"""

from __future__ import annotations

import importlib

# A module registers its cases when it is imported.
for _engine in (
    "assertion",
    "attention",
    "attention_hopper",
    "convolution",
    "delta_rule",
    "depthwise",
    "distillation",
    "fft",
    "fused",
    "fused_calls",
    "gemm",
    "histogram",
    "indexing",
    "linalg",
    "lists",
    "losses",
    "moe",
    "norms",
    "optim",
    "programs",
    "quantized",
    "rows",
    "searching",
    "serving",
    "sorting",
    "windows",
):
    importlib.import_module(f"tritonite.testing.compile_cases.{_engine}")
