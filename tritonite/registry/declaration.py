"""What a family's module says about an operator, and the list of all such declarations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tritonite.engine.pointwise.declare import Pointwise
from tritonite.registry.schema import (
    is_out,
)


class HostFunction(Protocol):
    """What an overload runs: its values without outputs in the declaration's order, and the outputs given, if any.

    It returns what the overload does, one item for each of the schema's returns: tensors, lists of them, numbers, None.
    It raises Decline, before it has written anything, where ATen must serve the call.
    """

    def __call__(self, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> Sequence[Any]: ...


@dataclass(frozen=True)
class LibraryFormulas:
    """What torch.library wants of an operator that ATen does not have.

    `schema` is in PyTorch's language, `fake` gives tensors like the results without computing them, or raises Decline
    where the host function would. `save` and `gradient` are torch.library.register_autograd's `setup_context` and
    `backward`; None where it has no gradient. The `leading` arguments may have any more dimensions before their others,
    and results have them then, too; where they are `broadcast`, those of fewer dimensions need none.
    """

    schema: str
    fake: Callable[..., Any]
    save: Callable[..., None] | None = None
    gradient: Callable[..., Any] | None = None
    leading: tuple[str, ...] = ()
    broadcast: bool = False


@dataclass(frozen=True)
class Declaration:
    """One declared operator: the packets it serves, its argument names, and the host function that runs it.

    A pointwise formula's host function is written by the catalog. `accepts` are dtypes, `promotion` says how arguments
    decide the result's, `method` where a formula is from, `kernels` are the pointwise ones that are launched.

    Of a call's numbers a plan knows the type alone, but the value of those that are `pinned`, on which the host
    function branches, and whether those of `pinned_zero_or_one` are 0 or 1. Unless it takes `lazy_bits`, calls with
    tensors that are conjugated or negated when they are read go to ATen. ATen has the overloads that are `cuda_only`
    on CUDA alone. A host function is `watched` for what it calls of ATen, unless it calls nothing. With `tensors_only`
    it is not called with numbers in the places of tensors. `library` is set of operators outside ATen, in the namespace
    `tritonite`.
    """

    packets: tuple[str, ...]
    arguments: tuple[str, ...]
    optional: frozenset[str]
    host: HostFunction
    family: str
    kernels: tuple[Pointwise, ...]
    accepts: tuple[torch.dtype, ...]
    promotion: str
    method: str
    pinned: frozenset[str] = frozenset()
    pinned_zero_or_one: frozenset[str] = frozenset()
    lazy_bits: bool = False
    cuda_only: frozenset[str] = frozenset()
    watched: bool = True
    tensors_only: bool = False
    library: LibraryFormulas | None = None

    def serves(self, schema: torch.FunctionSchema) -> bool:
        """Whether the schema's arguments, outputs aside, are this declaration's."""
        names = {argument.name for argument in schema.arguments if not is_out(argument)}
        return names <= set(self.arguments) and set(self.arguments) - names <= self.optional


declarations: list[Declaration] = []
excluded: dict[str, str] = {}


def exclude(overload: str, reason: str) -> None:
    """Leave an overload to ATen for good; `reason` says why Triton cannot serve it."""
    excluded[overload] = reason
