"""Declarations of operators as data, and the list of all of them."""

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
    """The function behind an overload.

    `values` are the arguments in the declaration's order, `outs` the outputs given by the caller, if any. Returns one
    item for each of the schema's returns: a tensor, a list of tensors, a number or None. Raises Decline, before it has
    written anything, for a call that ATen must serve.
    """

    def __call__(self, values: Sequence[Any], outs: Sequence[torch.Tensor]) -> Sequence[Any]: ...


@dataclass(frozen=True)
class LibraryFormulas:
    """The formulas that torch.library needs for an operator outside ATen.

    Args:
        schema: in PyTorch's schema language.
        fake: returns tensors like the results without computing them, or raises Decline like the host function.
        save, gradient: `setup_context` and `backward` of torch.library.register_autograd; None without a gradient.
        leading: arguments that may have more dimensions in front, which the results then also have. `torch.vmap` uses
            them to batch a call.
        undivided: for arguments by name, returns whether the results depend on each leading argument as a whole, so
            that `torch.vmap` calls the operator for each element of a batch.
        broadcast: leading arguments broadcast, so that one with fewer dimensions needs none in front.
        draws: the operator draws random numbers. torch.compile then keeps the order of its calls.
    """

    schema: str
    fake: Callable[..., Any]
    save: Callable[..., None] | None = None
    gradient: Callable[..., Any] | None = None
    leading: tuple[str, ...] = ()
    broadcast: bool = False
    draws: bool = False
    undivided: Callable[..., bool] | None = None


@dataclass(frozen=True)
class Declaration:
    """One declared operator.

    Args:
        packets: names of ATen operators, without overloads.
        arguments: argument names, in the order of the host function's values.
        optional: the arguments that an overload need not have.
        kernels: pointwise kernels that the host function launches.
        accepts: dtypes served.
        promotion: how the arguments decide the result's dtype.
        method: the first line of the formula's docstring, which names a published method.
        pinned: numbers on whose value the host function branches. Their value is in the key of a plan; of other numbers
            the key has the type only.
        pinned_zero_or_one: numbers of which the key also says whether they are 0 or 1.
        read_on_host: tensor arguments on the CPU from which the host function reads numbers.
        lazy_bits: whether tensors with a lazy conjugation or negation are served; else such calls decline.
        cuda_only: overloads that ATen has on CUDA only.
        prepare: a host function from ATen's arguments to the arguments of the first of `kernels`, or None.
        formula: the only kernel, if the host function launches it with the prepared arguments and does nothing else.
        watched: whether the host function calls torch, so that a recorder has to see these calls.
        tensors_only: whether a number for a tensor argument declines the call.
        library: set for operators outside ATen.
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
    read_on_host: frozenset[str] = frozenset()
    lazy_bits: bool = False
    cuda_only: frozenset[str] = frozenset()
    watched: bool = True
    tensors_only: bool = False
    library: LibraryFormulas | None = None
    prepare: Callable[..., Sequence[Any]] | None = None
    formula: Pointwise | None = None

    def serves(self, schema: torch.FunctionSchema) -> bool:
        """Return whether a schema has this declaration's arguments, ignoring out= arguments."""
        names = {argument.name for argument in schema.arguments if not is_out(argument)}
        return names <= set(self.arguments) and set(self.arguments) - names <= self.optional


declarations: list[Declaration] = []
excluded: dict[str, str] = {}


def exclude(overload: str, reason: str) -> None:
    """Leave an overload to ATen. `reason` says why Triton cannot serve it."""
    excluded[overload] = reason
