"""The registry of facts about operators that schemas do not have. Modules named after families fill it."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from tritonite import devices, dtypes
from tritonite.registry import Op

Tensors = list[torch.Tensor]
Arguments = Callable[[Tensors], dict[str, Any] | None]
Operands = Callable[[Op, Tensors, Any], Tensors | None]
Lists = Callable[[Op, str, Tensors], dict[str, Any]]
Make = Callable[..., torch.Tensor]
Layouts = Callable[[Op, Make], Iterator[tuple[str, Tensors]]]
_Layouts = TypeVar("_Layouts", bound=Layouts)
_Arguments = TypeVar("_Arguments", bound=Arguments)
_Chosen = TypeVar("_Chosen", bound=Callable[..., list[torch.Tensor]])
_Residuals = TypeVar("_Residuals", bound=Callable[..., list[torch.Tensor]])
_Terms = TypeVar("_Terms", bound=Callable[..., float])
_Drawn = TypeVar("_Drawn", bound=Callable[[dict[str, Any]], dict[str, Any]])

# By operator: makes arguments by name from the tensors of a layout; None skips the layout.
ARGUMENTS: dict[str, Arguments] = {}
# By operator: yields further layouts, labelled, given the overload and a function that makes tensors of a shape.
LAYOUTS: dict[str, Layouts] = {}
# By operator: makes the tensor arguments in order, where a common shape is not enough; None skips the call.
OPERANDS: dict[str, Operands] = {}
# By family: makes arguments by name from the label and the tensors of a layout, for operators over lists of tensors.
LISTS: dict[str, Lists] = {}
# By argument name: converts the tensor that the argument would be.
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
# By argument name: the values of a string or an enumeration, all of which are tried, and the value of an integer.
CHOICES: dict[str, tuple[Any, ...]] = {}
INTEGERS: dict[str, int] = {"dim": -1, "bins": 5}
# Optional arguments that are None in samples.
OPTIONS = {"dtype", "layout", "device", "pin_memory"}
# By overload: the values of its flags, where these are not False and True.
FLAGS: dict[str, tuple[bool, ...]] = {}
# By overload or operator: computes the float64 result where ATen does not. For an overload without results it writes
# the arguments, and returns them and the outputs by name.
REFERENCES: dict[str, Callable[..., Any]] = {}
# Operators that draw random numbers. Their values are not compared.
RANDOM: set[str] = set()
# By operator: replaces drawn arguments for which ATen stops the program, takes forever, or has a result that depends on
# the order of its kernel.
DRAWN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
# By operator: given positional and keyword arguments and `results`, replaces what ATen chooses freely by what it stands
# for. Indices of one of several equal elements become the elements.
CHOSEN: dict[str, Callable[..., list[torch.Tensor]]] = {}
# By operator: given positional and keyword arguments and `results`, returns the residuals of the equations that the
# results solve, a number for each matrix in units of n times eps times the norm of the operands.
RESIDUALS: dict[str, Callable[..., list[torch.Tensor]]] = {}
# Operators whose results for nan differ between ATen's vector and scalar loops on a CPU, or are uninitialised. Samples
# on a CPU have no nan.
NAN_UNDEFINED: set[str] = set()
# Operators whose zeros have a sign that depends on ATen's loop on a CPU. The sign is not compared there.
ZERO_SIGN_UNDEFINED: set[str] = set()
# Operators whose zeros are sums. Roundoff, or the initial value of the sum, decides their sign; it is never compared.
ZERO_SIGN_OF_ROUNDOFF: set[str] = set()
# Operators that write other outputs on a CPU than on a GPU.
DEVICE_DEFINED: set[str] = set()


class Sums(NamedTuple):
    """A call and one of its results, for an estimate of the result's roundoff."""

    # The tensors among the operands that have elements; at least one.
    tensors: Tensors
    operands: Any
    result: torch.Tensor
    # The float64 result, where there is one.
    exact: torch.Tensor | None
    # The factor of a sum of products.
    alpha: float

    @property
    def read(self) -> int:
        """Elements of the largest operand."""
        return max(x.numel() for x in self.tensors)

    def per_element(self) -> float:
        """Return the elements read for each element of the result, at least 1."""
        return max(1.0, self.read / max(1, self.result.numel()))


# By operator: how many terms of order 1 have as much roundoff near 0 as an element of a result.
TERMS: dict[str, Callable[[Sums], float]] = {}
# Operators that round terms to 16 bits before they add them up.
ROUNDED_TERMS: set[str] = set()
# Operators whose gradients may be the roundoff of terms that cancel.
CANCELLING: set[str] = set()


@dataclass(frozen=True)
class MayDecline:
    """Samples that a kernel may decline: an exception to the rule that kernels serve all samples that ATen accepts.

    `names` of overloads or OpInfo functions, `labels` of samples and the `reason` of the decline, or several, are
    globs. Every name and label must match a decline somewhere. `why` justifies the exception. Empty `dtypes` stand for
    all, an empty `device` for every kind.
    """

    names: tuple[str, ...]
    labels: tuple[str, ...]
    reason: str | tuple[str, ...]
    why: str
    dtypes: tuple[torch.dtype, ...] = ()
    device: str = ""

    def here(self) -> bool:
        """Return whether the exception holds on the device in use."""
        return self.device in ("", devices.current.aten)

    def covers(self, name: str, label: str, dtype: torch.dtype, reason: str) -> bool:
        """Return whether the exception allows a decline."""
        reasons = (self.reason,) if isinstance(self.reason, str) else self.reason
        return (
            self.here()
            and any(fnmatch.fnmatchcase(name, glob) for glob in self.names)
            and any(fnmatch.fnmatchcase(label, glob) for glob in self.labels)
            and (not self.dtypes or dtype in self.dtypes)
            and any(fnmatch.fnmatchcase(reason, glob) for glob in reasons)
        )


MAY_DECLINE: list[MayDecline] = []
# Stands for the reason where ATen called no overload of the catalog.
NOT_REACHED = "no overload of the catalog was reached"


def may_decline(
    names: tuple[str, ...],
    labels: tuple[str, ...],
    reason: str | tuple[str, ...],
    why: str,
    *,
    dtypes: tuple[torch.dtype, ...] = (),
    device: str = "",
) -> None:
    """Register an exception (`MayDecline`)."""
    MAY_DECLINE.append(MayDecline(names, labels, reason, why, dtypes, device))


def arguments(*packets: str) -> Callable[[_Arguments], _Arguments]:
    """Register a function that makes arguments of operators by name."""

    def register(make: _Arguments) -> _Arguments:
        ARGUMENTS.update(dict.fromkeys(packets, make))
        return make

    return register


def lists(*families: str) -> Callable[[Lists], Lists]:
    """Register a function that makes the arguments of a family's operators over lists of tensors."""

    def register(make: Lists) -> Lists:
        LISTS.update(dict.fromkeys(families, make))
        return make

    return register


def layouts(*packets: str) -> Callable[[_Layouts], _Layouts]:
    """Register a generator of layouts that operators have besides the common ones."""

    def register(make: _Layouts) -> _Layouts:
        LAYOUTS.update(dict.fromkeys(packets, make))
        return make

    return register


def operands(*packets: str) -> Callable[[Operands], Operands]:
    """Register a function that makes the tensor arguments of operators in order."""

    def register(make: Operands) -> Operands:
        OPERANDS.update(dict.fromkeys(packets, make))
        return make

    return register


def drawn(*packets: str) -> Callable[[_Drawn], _Drawn]:
    """Register a function that replaces drawn arguments of operators for which ATen has no answer.

    It gets what the functions return that were registered for an operator before.
    """

    def register(make: _Drawn) -> _Drawn:
        for packet in packets:
            earlier = DRAWN.get(packet)
            DRAWN[packet] = make if earlier is None else functools.partial(_one_after_another, earlier, make)
        return make

    return register


def _one_after_another(
    first: Callable[[dict[str, Any]], dict[str, Any]],
    second: Callable[[dict[str, Any]], dict[str, Any]],
    arguments: dict[str, Any],
) -> dict[str, Any]:
    return second(first(arguments))


def floating(dtype: torch.dtype) -> torch.dtype:
    """Return a floating-point dtype as it is, and float32 for any other."""
    return dtype if dtype.is_floating_point else torch.float32


def chosen(*packets: str) -> Callable[[_Chosen], _Chosen]:
    """Register a function that replaces ATen's free choices in results of operators."""

    def register(make: _Chosen) -> _Chosen:
        CHOSEN.update(dict.fromkeys(packets, make))
        return make

    return register


def residuals(*packets: str) -> Callable[[_Residuals], _Residuals]:
    """Register a function that returns the residuals by which results of operators are judged.

    A residual is large for a result that is not the exact one of slightly different operands, however sensitive the
    problem is. Elements of such results are not compared, because roundoff decides those of a singular matrix, pivots
    and codes included. A residual that must be 0 is infinite if it is not.
    """

    def register(measure: _Residuals) -> _Residuals:
        RESIDUALS.update(dict.fromkeys(packets, measure))
        return measure

    return register


def terms(*packets: str) -> Callable[[_Terms], _Terms]:
    """Register a function that counts the terms of operators' results."""

    def register(count: _Terms) -> _Terms:
        TERMS.update(dict.fromkeys(packets, count))
        return count

    return register


def real(value: Any) -> bool:
    """Return whether a value is a tensor of real numbers in a common dtype, which can be clamped."""
    return isinstance(value, torch.Tensor) and value.dtype in dtypes.NUMBERS


def is_scalar(value: Any) -> bool:
    """Return whether a value is a tensor without dimensions."""
    return isinstance(value, torch.Tensor) and not value.dim()


def is_index(value: Any) -> bool:
    """Return whether a value is a tensor in a dtype of indices."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


def within(value: Any, low: float, high: float) -> Any:
    """Clamp a tensor of real numbers to a range; return any other value as it is."""
    if not real(value) or low > high or bool(((value >= low) & (value <= high)).all()):
        return value
    return (value.nan_to_num(low) if value.is_floating_point() else value).clamp(low, high)


def without_signed_nan(x: torch.Tensor) -> torch.Tensor:
    """Make every nan positive on a GPU; on a CPU return the tensor as it is.

    ATen's radix sorts put a negative nan before all numbers, and its other kernels put any nan after them, as ours do.
    Conversions to bfloat16 on a CPU make negative nans.
    """
    if devices.current.aten == "cpu" or not x.is_floating_point() or not (x.isnan() & x.signbit()).any():
        return x
    return x.masked_fill(x.isnan(), float("nan"))


def reference_of(overload: str, packet: str) -> Callable[..., Any] | None:
    """Return the reference of an overload, or else of its packet, or None: then ATen is the reference."""
    return REFERENCES.get(overload, REFERENCES.get(packet))


def compares_zero_sign(packet: str | None) -> bool:
    """Return whether the sign of an operator's zeros must be ATen's."""
    if packet in ZERO_SIGN_OF_ROUNDOFF:
        return False
    return devices.current.aten != "cpu" or packet not in ZERO_SIGN_UNDEFINED
