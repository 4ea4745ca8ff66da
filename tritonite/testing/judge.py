"""The judge of `report/judge.py` in tests: the results that are compared, and how closely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tritonite.report.judge import Verdict, judge, same_layout, to_reference
from tritonite.runtime import contract, native
from tritonite.testing.samples import (
    CANCELLING,
    CHOSEN,
    RANDOM,
    RESIDUALS,
    ROUNDED_TERMS,
    TERMS,
    UNWRITTEN,
    Sums,
)
from tritonite.testing.tolerances import RESIDUAL

__all__ = [
    "Comparable",
    "Verdict",
    "assert_close",
    "comparable",
    "judge",
    "judge_residuals",
    "may_cancel",
    "poisoned",
    "terms",
    "to_reference",
    "without_tf32",
]


class Comparable(NamedTuple):
    """A result, and how much of it must equal ATen's: "kind", "layout" as well, or "values" as well."""

    value: Any
    extent: str

    @property
    def kind(self) -> Any:
        """The dtype, shape and device of a tensor; anything else as it is."""
        value = self.value
        return (value.dtype, tuple(value.shape), value.device) if isinstance(value, torch.Tensor) else value


def comparable(
    packet: str | None, results: Sequence[Any], arguments: tuple[Sequence[Any], dict[str, Any]] | None = None
) -> list[Comparable]:
    """Return an operator's results with the extent to which each is compared.

    Values of random numbers are not compared, nor are results that `judge_residuals` judges. Results that ATen leaves
    uninitialised are compared by kind. Given the positional and keyword `arguments`, ATen's free choices are replaced
    by what they stand for (`CHOSEN`).
    """
    if arguments is not None and packet in CHOSEN:
        results = CHOSEN[packet](*arguments[0], results=list(results), **arguments[1])
    unwritten = UNWRITTEN.get(packet or "", ())

    def extent(i: int) -> str:
        if i in unwritten:
            return "kind"
        return "layout" if packet in RANDOM or packet in RESIDUALS else "values"

    return [Comparable(result, extent(i)) for i, result in enumerate(results)]


def judge_residuals(
    packet: str | None, arguments: tuple[Sequence[Any], dict[str, Any]], ours: Sequence[Any], aten: Sequence[Any]
) -> str | None:
    """Compare results by the residuals of the equations that they solve (`RESIDUALS`), as LAPACK's tests do.

    Strides must equal ATen's. A matrix passes if each residual is within `RESIDUAL` units of n * eps * norm, or within
    twice ATen's, or if ATen's own is not finite. Return a description of the first failure, or None.
    """
    if packet not in RESIDUALS:
        return None
    for own, theirs in zip(ours, aten, strict=True):
        if isinstance(theirs, torch.Tensor) and not same_layout(own, theirs):
            return f"strides {own.stride()} where ATen gives {theirs.stride()}"
    positional, named = arguments
    measured = [RESIDUALS[packet](*positional, results=list(results), **named) for results in (ours, aten)]
    for i, (own, theirs) in enumerate(zip(*measured, strict=True)):
        bad = theirs.isfinite() & ((own <= (2 * theirs).clamp_min(RESIDUAL)) == 0)
        if bool(bad.any()):
            return f"residual {i} is {float(own[bad][0]):.3g} n eps norm where ATen's is {float(theirs[bad][0]):.3g}"
    return None


def terms(
    packet: str | None, operands: Any, result: torch.Tensor, exact: torch.Tensor | None = None, alpha: float = 1.0
) -> float:
    """Return how many terms of order 1 have the roundoff that an element of an operator's `result` may have near 0.

    By default the elements read for each element of the result; `TERMS` has operators that differ. `exact` is the
    float64 result, and `alpha` the factor of a sum of products.
    """
    tensors = [x for x in pytree.tree_leaves(operands) if isinstance(x, torch.Tensor) and x.numel()]
    if not tensors:
        return 1.0
    count = TERMS.get(packet or "", Sums.per_element)
    return count(Sums(tensors, operands, result, exact, alpha))


def may_cancel(packet: str | None, gradient: bool) -> bool:
    """Return whether an operator's results, or a `gradient` of its results, may be the roundoff of cancelled terms."""
    return packet in ROUNDED_TERMS or (gradient and packet in CANCELLING)


def assert_close(
    actual: torch.Tensor, aten: torch.Tensor, reference: torch.Tensor | None = None, terms: float = 1.0
) -> None:
    """Raise AssertionError if `judge` finds a failure."""
    verdict = judge(actual, aten, reference, terms=terms)
    assert verdict.failure is None, verdict.failure


@contextmanager
def without_tf32() -> Iterator[None]:
    """Have ATen and Tritonite convolve float32 exactly: cuDNN takes TF32 by default, and not for every call."""
    cudnn = torch.backends.cudnn
    kept = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
    with cudnn.flags(**kept, allow_tf32=False):
        yield


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill every output that an engine allocates with nan (all bits set), so that unwritten elements show.

    Within the context Python's errors in host functions are raised, too.
    """
    dispatcher = native.module()
    strict = contract.set_strict(True)
    contract.set_poison(True)
    if dispatcher is not None:
        dispatcher.set_poison(True)
    try:
        yield
    finally:
        contract.set_poison(False)
        contract.set_strict(strict)
        if dispatcher is not None:
            dispatcher.set_poison(False)
