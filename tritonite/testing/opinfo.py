"""PyTorch's own OpInfo samples for the operators the catalog covers."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from tritonite import catalog, devices

# Functions that have no overload in the catalog themselves but whose gradients, or parts, have.
_THROUGH_PARTS = {
    "nn.functional.mse_loss",
    "nn.functional.smooth_l1_loss",
    "nn.functional.huber_loss",
    "nn.functional.soft_margin_loss",
    "nn.functional.binary_cross_entropy",
    "nn.functional.prelu",
    "nn.functional.logsigmoid",
    "nn.functional.rrelu",
    "nn.functional.relu6",
    "nn.functional.selu",
}


def _provide_expecttest() -> None:
    """torch's test utilities import expecttest for a base class that the samples do not need."""
    if importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules.setdefault("expecttest", stand_in)


@lru_cache(maxsize=1)
def infos() -> dict[str, Any]:
    """OpInfo by full name, of every function in torch's database that the catalog serves."""
    _provide_expecttest()
    from torch.testing._internal.common_methods_invocations import op_db

    packets = {name.partition(".")[0] for name in catalog.overloads()}
    found = {}
    for info in op_db:
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        if info.aten_name in packets or info.name in _THROUGH_PARTS:
            found[name] = info
    return found


def supported(info: Any, dtype: torch.dtype) -> bool:
    """Whether ATen has the function for this dtype on the current device."""
    return dtype in info.supported_dtypes(devices.current.type)


def sample_inputs(info: Any, dtype: torch.dtype, *, requires_grad: bool, full: bool) -> Iterator[Any]:
    """OpInfo's samples; with `full` the larger set of reference inputs too."""
    device = devices.current.type
    yield from info.sample_inputs(device, dtype, requires_grad=requires_grad)
    if full and not requires_grad and info.reference_inputs_func is not None:
        yield from info.reference_inputs(device, dtype, requires_grad=False)
