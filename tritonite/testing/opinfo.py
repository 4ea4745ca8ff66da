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

# Functions without an overload in the catalog, whose gradients or steps have one.
_INDIRECT = {
    "nn.functional.cross_entropy",
    "nn.functional.nll_loss",
    "nn.functional.prelu",
    "nn.functional.logsigmoid",
    "nn.functional.rrelu",
    "nn.functional.relu6",
    "nn.functional.selu",
    "nn.functional.softmin",
}
# Functions that ATen computes by products of matrices.
_PRODUCTS = {"__rmatmul__", "einsum", "inner", "matmul", "nn.functional.bilinear", "nn.functional.linear", "tensordot"}
# Names in the catalog of functions that have another name in Python.
_RENAMED = {
    "special.polygamma": "polygamma",
    "relu6": "hardtanh",
    "rrelu": "rrelu_with_noise",
    "argsort": "sort",
    "msort": "sort",
    "cholesky": "linalg_cholesky_ex",
    "cholesky_solve": "_cholesky_solve_helper",
    "linalg.cholesky": "linalg_cholesky_ex",
    "linalg.det": "_linalg_det",
    "linalg.eigh": "_linalg_eigh",
    "linalg.eigvalsh": "_linalg_eigh",
    "linalg.inv": "linalg_inv_ex",
    "linalg.lu_factor": "linalg_lu_factor_ex",
    "linalg.slogdet": "_linalg_slogdet",
    "linalg.solve": "_linalg_solve_ex",
    "linalg.svd": "_linalg_svd",
    "linalg.svdvals": "_linalg_svd",
    **{f"conv{kind}{dims}d": "convolution" for kind in ("", "_transpose") for dims in (1, 2, 3)},
    **{f"fft.{way}fft{dims}": "_fft_c2c" for way in ("", "i") for dims in ("", "2", "n")},
    **{f"fft.{way}fft{dims}": "_fft_r2c" for way in ("r", "ih") for dims in ("", "2", "n")},
    **{f"fft.{way}fft{dims}": "_fft_c2r" for way in ("ir", "h") for dims in ("", "2", "n")},
    "stft": "_fft_r2c",
    "istft": "_fft_c2r",
}
# Largest degree of a polynomial. ATen's CUDA kernels take one step a degree, and 2^63 for an infinite degree.
_MAX_STEPS = 2**14
# Gradients that are not judged in float64, where ATen's, the only reference, is less exact than ours (by mpmath).
UNSURE_GRADIENTS = {"logcumsumexp"}
# Gradients that are not judged in 16 bits: formulas of many operators, each of which rounds.
ROUNDED_GRADIENTS = {"dist", "ldexp", "linalg_vector_norm"}
# On a GPU ATen rounds every step of these formulas of the rounded result, so that it is right in an element by chance.
ROUNDED_GRADIENTS |= {"_foreach_rsqrt", "_foreach_tanh"}
# Many elements are equal in 16 bits, and ATen gives the gradient to any of them.
ROUNDED_GRADIENTS |= {"sort", "topk", "kthvalue", "median", "nanmedian", "mode"}
# Each call draws samples, whose roundoff in 16 bits decides the positions of windows.
ROUNDED_GRADIENTS |= {"fractional_max_pool2d", "fractional_max_pool3d"}
# Functions that do not write an output given for a transform along one dimension (torch 2.13).
UNWRITTEN_OUTPUTS = {"fft.ihfft2", "fft.ihfftn"}
# mpmath's function and its order. ATen reduces large arguments by a rounded pi / 4, also in float64.
_BESSEL = {f"special_bessel_{kind}{order}": (f"bessel{kind}", order) for kind in "jy" for order in (0, 1)}


def _provide_expecttest() -> None:
    """Provide a module for torch's test utilities, which import expecttest for a class that samples do not need."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules.setdefault("expecttest", stand_in)


@lru_cache(maxsize=1)
def _database() -> list[Any]:
    """Return torch's database of functions, those over lists of tensors included."""
    _provide_expecttest()
    from torch.testing._internal import common_methods_invocations as found

    names = ("op_db", *(f"foreach_{kind}_op_db" for kind in ("unary", "binary", "pointwise", "other")))
    return [info for name in names for info in getattr(found, name)]


@lru_cache(maxsize=1)
def infos() -> dict[str, Any]:
    """Return OpInfo by full name for every function of torch's database that the catalog serves."""
    found = {}
    for info in _database():
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        if packet(info) is not None or info.name in _INDIRECT:
            found[name] = info
    return found


def entries(name: str) -> list[Any]:
    """Return the entries of torch's database that have a function or operator under any of their names."""
    wanted = name.removesuffix("_")

    def is_meant(info: Any) -> bool:
        own = info.name.removeprefix("nn.functional.")
        others = [alias.name for alias in info.aliases]
        return wanted in (own, own.replace(".", "_"), info.aten_name, *others)

    return [info for info in _database() if is_meant(info)]


@lru_cache(maxsize=1)
def _packets() -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in registry.overloads())


def packet(info: Any) -> str | None:
    """Return the catalog's operator that an OpInfo tests, by ATen's name or by Python's. None if there is none.

    Functions that ATen computes by products of matrices count as "mm".
    """
    python = info.name.replace("nn.functional.", "")
    python = _RENAMED.get(python, python)
    if info.name in _PRODUCTS and "mm" in _packets():
        return "mm"
    return next(
        (name for name in (info.aten_name, python, python.replace(".", "_"), f"native_{python}") if name in _packets()),
        None,
    )


def supported(info: Any, dtype: torch.dtype) -> bool:
    """Return whether ATen has the function for this dtype on the current device."""
    return dtype in info.supported_dtypes(devices.current.aten)


def sample_inputs(info: Any, dtype: torch.dtype, *, requires_grad: bool, full: bool) -> Iterator[Any]:
    """Yield OpInfo's samples; with `full` its larger set of reference inputs, too."""
    from torch.testing._internal.common_utils import set_rng_seed

    functions = [info.sample_inputs_func]
    if full and not requires_grad and info.reference_inputs_func is not None:
        functions.append(info.reference_inputs_func)
    for function in functions:
        # `info.sample_inputs` would search the stack for a unittest case at each sample, which takes longer than most
        # functions.
        found = iter(function(info, devices.current.type, dtype, requires_grad))
        while True:
            set_rng_seed()
            sample = next(found, None)
            if sample is None:
                break
            if "polynomial" not in info.name or not bool((torch.as_tensor(sample.args[0]) > _MAX_STEPS).any()):
                yield sample


def refine(info: Any, sample: Any, reference: Any) -> Any:
    """Return the float64 `reference` of a float64 sample, with better values where ATen's are known to be inexact."""
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
