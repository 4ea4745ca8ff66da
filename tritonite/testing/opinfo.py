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

from tritonite import devices, registry
from tritonite.testing.samples import REFERENCES

# Functions that have no overload in the catalog themselves but whose gradients, or parts, have.
_THROUGH_PARTS = {
    "nn.functional.cross_entropy",
    "nn.functional.nll_loss",
    "nn.functional.prelu",
    "nn.functional.logsigmoid",
    "nn.functional.rrelu",
    "nn.functional.relu6",
    "nn.functional.selu",
    "nn.functional.softmin",
}
# Those that ATen makes of products of matrices.
_PRODUCTS = {"__rmatmul__", "einsum", "inner", "matmul", "nn.functional.bilinear", "nn.functional.linear", "tensordot"}
# What the catalog calls functions that Python, without its modules, calls otherwise.
_CALLED = {
    "special.polygamma": "polygamma",
    "relu6": "hardtanh",
    "rrelu": "rrelu_with_noise",
    "argsort": "sort",
    "msort": "sort",
}
# The degree of a polynomial is a number of steps: ATen's CUDA kernels run 2^63 of them where it is infinite.
_MOST_STEPS = 2**14
# In float64 ATen's gradient, the only reference for ours, differs by 1e-12 from mpmath's, and more than ours does.
UNSURE_GRADIENTS = {"logcumsumexp"}
# Formulas of so many operators, each of which rounds, that in half types ATen's own error tells nothing of ours.
ROUNDED_GRADIENTS = {"ldexp", "linalg_vector_norm"}
# In half types many elements are equal, of which ATen gives any the gradient.
ROUNDED_GRADIENTS |= {"sort", "topk", "kthvalue", "median", "nanmedian", "mode"}
# mpmath's function and its order, for those whose far arguments ATen reduces by a rounded pi / 4 in float64 too.
_BESSEL = {f"special_bessel_{kind}{order}": (f"bessel{kind}", order) for kind in "jy" for order in (0, 1)}


def _provide_expecttest() -> None:
    """torch's test utilities import expecttest for a base class that the samples do not need."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules.setdefault("expecttest", stand_in)


@lru_cache(maxsize=1)
def infos() -> dict[str, Any]:
    """OpInfo by full name, of every function in torch's database that the catalog serves."""
    _provide_expecttest()
    from torch.testing._internal.common_methods_invocations import op_db

    found = {}
    for info in op_db:
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        if packet(info) is not None or info.name in _THROUGH_PARTS:
            found[name] = info
    return found


def entries(name: str) -> list[Any]:
    """Return the entries of torch's database for a function or operator, by any of the names that it has there."""
    _provide_expecttest()
    from torch.testing._internal.common_methods_invocations import op_db

    wanted = name.removesuffix("_")

    def is_meant(info: Any) -> bool:
        own = info.name.removeprefix("nn.functional.")
        others = [alias.name for alias in info.aliases]
        return wanted in (own, own.replace(".", "_"), info.aten_name, *others)

    return [info for info in op_db if is_meant(info)]


@lru_cache(maxsize=1)
def _packets() -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in registry.overloads())


def packet(info: Any) -> str | None:
    """The name of the catalog's operator that an OpInfo is about; some give ATen's name, some only Python's.

    "mm" stands for all of those that functions of matrices consist of.
    """
    python = info.name.replace("nn.functional.", "")
    python = _CALLED.get(python, python)
    if info.name in _PRODUCTS and "mm" in _packets():
        return "mm"
    return next(
        (name for name in (info.aten_name, python, python.replace(".", "_"), f"native_{python}") if name in _packets()),
        None,
    )


def supported(info: Any, dtype: torch.dtype) -> bool:
    """Whether ATen has the function for this dtype on the current device."""
    return dtype in info.supported_dtypes(devices.current.type)


def sample_inputs(info: Any, dtype: torch.dtype, *, requires_grad: bool, full: bool) -> Iterator[Any]:
    """OpInfo's samples; with `full` the larger set of reference inputs too."""
    from torch.testing._internal.common_utils import set_rng_seed

    functions = [info.sample_inputs_func]
    if full and not requires_grad and info.reference_inputs_func is not None:
        functions.append(info.reference_inputs_func)
    for function in functions:
        # What `info.sample_inputs` and `info.reference_inputs` give. They look through the stack for a test
        # case of unittest to tell of each sample, which takes longer than most functions take for all of them.
        found = iter(function(info, devices.current.type, dtype, requires_grad))
        while True:
            set_rng_seed()
            sample = next(found, None)
            if sample is None:
                break
            if "polynomial" not in info.name or not bool((torch.as_tensor(sample.args[0]) > _MOST_STEPS).any()):
                yield sample


def refine(info: Any, sample: Any, reference: Any) -> Any:
    """ATen's float64 `reference` for a float64 sample, with better values where ATen's are known not to be exact."""
    if packet(info) in REFERENCES:
        return REFERENCES[packet(info) or ""](
            *(x.cpu() if torch.is_tensor(x) else x for x in (sample.input, *sample.args)), **sample.kwargs
        )
    bessel = _BESSEL.get(packet(info) or "")
    if bessel is None:
        return reference
    import mpmath

    (name, order), x = bessel, sample.input.cpu()
    far = (x.abs() > 1e4) & x.isfinite() & reference.isfinite()
    values = [float(getattr(mpmath, name)(order, value)) for value in x[far].tolist()]
    return reference.masked_scatter(far, torch.tensor(values, dtype=torch.float64))
