"""Linear algebra: each kernel with tiles of every size that the table has, in float32 and float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tritonite import registry
from tritonite.runtime.launch import Specialization
from tritonite.testing.compile_cases.cases import TARGETS, Case, compile_cases, launches, unit_strides

_BLOCKED = (
    "linalg_ldl_factor_ex",
    "linalg_cholesky_ex",
    "linalg_lu_factor_ex",
    "linalg_lu",
    "_linalg_det",
    "_linalg_slogdet",
    "linalg_qr",
)
_SIDES, _DTYPES = (3, 16, 64, 128), (torch.float32, torch.float64)


def _calls(x: torch.Tensor) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield calls of a batch of square matrices, which launch each kernel."""
    yield "linalg_cholesky_ex", (x,), {}
    yield "_cholesky_solve_helper", (x, x, False), {}
    yield "linalg_solve_triangular", (x, x), {"upper": True, "left": False}
    yield "linalg_lu", (x,), {}
    yield "_linalg_slogdet", (x,), {}
    pivots = torch.empty(x.shape[:-1], dtype=torch.int32)
    yield "linalg_lu_solve", (x, pivots, x), {}
    yield "linalg_lu_solve", (x, pivots, x), {"adjoint": True}
    yield "linalg_inv_ex", (x,), {}
    yield "linalg_ldl_factor_ex", (x,), {}
    yield "linalg_ldl_solve", (x, pivots, x), {}
    yield "linalg_qr", (x,), {}
    rotated = x[..., :64, :64]
    yield "_linalg_eigh", (rotated,), {}
    yield "_linalg_eigh", (rotated, "U", False), {}
    yield "_linalg_svd", (rotated, True), {}
    yield "_linalg_svd", (rotated, False, False), {}
    yield "ormqr", (x, x[..., 0], x), {}


@compile_cases("linalg")
def linalg(full: bool) -> Iterator[Case]:
    """Tiles of one small matrix, of several in a warp, of a matrix in a warp or in as many as a program has."""
    most = ((100, torch.float32, 128), (100, torch.float64, 64))
    batches = itertools.product((100,), _DTYPES, _SIDES) if full else most
    for batch, dtype, n in (*batches, (1, torch.float32, 2)):
        side = min(n, 64) if dtype is torch.float64 else n
        for label, specialization in _launched(torch.empty(batch, side, side, dtype=dtype)):
            chosen = tuple(TARGETS) if full else ("sm_90",)
            yield Case(f"{label} {dtype}, {batch} of {n} by {n}", specialization, chosen)


@compile_cases("linalg")
def blocks(full: bool) -> Iterator[Case]:
    """The launches of matrices that are divided into blocks: panels, row exchanges, codes, block reflectors."""
    for dtype in _DTYPES[: 1 + full]:
        x, met = torch.empty(2, 300, 300, dtype=dtype), set()
        calls: list[tuple[str, tuple[torch.Tensor, ...]]] = [(name, (x,)) for name in _BLOCKED]
        calls.append(("linalg_ldl_solve", (x, torch.empty(2, 300, dtype=torch.int32), x)))
        for name, arguments in calls:
            for specialization in launches(registry.overloads()[name], arguments):
                key = specialization.kernel, str(specialization.signature)
                if "linalg" in specialization.kernel.__module__ and key not in met:
                    met.add(key)
                    targets = tuple(TARGETS) if full else ("sm_90",)
                    yield Case(f"{name} {dtype} in blocks", specialization, targets)


@compile_cases("linalg")
def rotated_blocks(full: bool) -> Iterator[Case]:
    """The launches of Jacobi's methods on pairs of blocks: norms, the first round of a sweep and others, orders."""
    for dtype in _DTYPES:
        x, met = torch.empty(2, 130, 130, dtype=dtype), []
        for name in ("_linalg_eigh", "_linalg_svd"):
            for specialization in launches(registry.overloads()[name], (x,)):
                key = specialization.kernel, specialization.signature, specialization.constants
                if specialization.kernel.__module__.endswith(("block_jacobi", "block_pairs")) and key not in met:
                    met.append(key)
                    targets = tuple(TARGETS) if full else ("sm_90",)
                    yield Case(f"{name} {dtype} in pairs of blocks", specialization, targets)


@compile_cases("linalg")
def strides_of_one(full: bool) -> Iterator[Case]:
    """Each kernel with one stride after another equal to 1, for matrices whose batch has two strides."""
    for label, specialization in _launched(torch.empty(20, 5, 3, 3).transpose(0, 1)):
        for i, variant in enumerate(unit_strides(specialization)):
            yield Case(f"{label} with stride {i} of 1", variant, ("sm_90",))


def _launched(x: torch.Tensor) -> Iterator[tuple[str, Specialization]]:
    """Yield the kernels of `_calls` once each."""
    met = []
    for name, arguments, named in _calls(x):
        op = registry.overloads()[name]
        for specialization in launches(lambda *given, op=op, named=named: op(*given, **named), arguments):
            key = specialization.kernel, specialization.signature, specialization.constants
            if key not in met:
                met.append(key)
                yield name, specialization
