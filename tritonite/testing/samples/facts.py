"""What no schema tells of operators: the modules of the families add what theirs need."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from tritonite import devices, dtypes
from tritonite.registry import Op

Tensors = list[torch.Tensor]
Arguments = Callable[[Tensors], dict[str, Any] | None]
Operands = Callable[[Op, Tensors, Any], Tensors | None]
Make = Callable[..., torch.Tensor]
Layouts = Callable[[Op, Make], Iterator[tuple[str, Tensors]]]
_Layouts = TypeVar("_Layouts", bound=Layouts)
_Arguments = TypeVar("_Arguments", bound=Arguments)
_Chosen = TypeVar("_Chosen", bound=Callable[..., list[torch.Tensor]])
_Terms = TypeVar("_Terms", bound=Callable[..., float])
_Drawn = TypeVar("_Drawn", bound=Callable[[dict[str, Any]], dict[str, Any]])

# By operator: arguments by name, made of a layout's tensors; None leaves the layout out.
ARGUMENTS: dict[str, Arguments] = {}
# By operator: what makes further layouts, with labels, of the overload and what makes tensors of a shape.
LAYOUTS: dict[str, Layouts] = {}
# By operator: the tensor arguments in order, where a common shape is not enough; None leaves the call out.
OPERANDS: dict[str, Operands] = {}
# By an argument's name: what is made of the tensor that it would be.
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
# By an argument's name: the values that a string or an enumeration is tried with, and the one that an integer has.
CHOICES: dict[str, tuple[Any, ...]] = {}
INTEGERS: dict[str, int] = {"dim": -1, "bins": 5}
# Arguments that samples leave out.
OPTIONS = {"dtype", "layout", "device", "pin_memory"}
# By overload: the values that its flags are tried with, where they are not both.
FLAGS: dict[str, tuple[bool, ...]] = {}
# By operator: a function for the float64 result that ATen does not give.
REFERENCES: dict[str, Callable[..., Any]] = {}
# By operator: the places of results that ATen leaves as their memory was, of which only dtype, shape and device count.
UNWRITTEN: dict[str, tuple[int, ...]] = {}
# Operators that draw random numbers, which differ from call to call: only dtypes, shapes and devices count.
RANDOM: set[str] = set()
# By operator: what makes of drawn arguments, by name, those for which ATen has an answer: its kernels stop the program
# for others, take years, or give what an order of theirs gives.
DRAWN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
# By operator: what makes of the arguments, by place and by name, and of results those in which what ATen chooses freely
# is replaced by what it stands for, such as the indices of one of several equals.
CHOSEN: dict[str, Callable[..., list[torch.Tensor]]] = {}
# Operators of which ATen does not say what they do with nan on a CPU: its loops over vectors and over single elements
# differ, or return what an uninitialised variable held. Samples there are without nan.
NAN_UNDEFINED: set[str] = set()
# Operators whose zeros have a sign that depends on ATen's loop on a CPU, where it is not compared.
ZERO_SIGN_UNDEFINED: set[str] = set()
# Operators whose zeros are sums, of terms that cancel or of zeros: roundoff or where a sum begins gives them a sign,
# which is compared nowhere.
ZERO_SIGN_OF_ROUNDOFF: set[str] = set()
# Operators that write other outputs on a CPU than on a GPU.
DEVICE_DEFINED: set[str] = set()


class Sums(NamedTuple):
    """A call and one of its results, whose elements are sums of operands."""

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
    """Samples that ATen takes and that a kernel leaves to it: an exception to the rule that it serves them all.

    `names` of overloads, or of functions of OpInfo, `labels` and the decline's own `reason` are globs, and all that
    match the first two decline somewhere; `why` says what makes that right. Without `dtypes` it is about all of them,
    without `device` about every kind.
    """

    names: tuple[str, ...]
    labels: tuple[str, ...]
    reason: str
    why: str
    dtypes: tuple[torch.dtype, ...] = ()
    device: str = ""

    def here(self) -> bool:
        """Whether it is about the device in use."""
        return self.device in ("", devices.current.type)

    def covers(self, name: str, label: str, dtype: torch.dtype, reason: str) -> bool:
        """Whether it is about such a decline."""
        return (
            self.here()
            and any(fnmatch.fnmatchcase(name, glob) for glob in self.names)
            and any(fnmatch.fnmatchcase(label, glob) for glob in self.labels)
            and (not self.dtypes or dtype in self.dtypes)
            and fnmatch.fnmatchcase(reason, self.reason)
        )


MAY_DECLINE: list[MayDecline] = []
# The reason of a decline where ATen asked no kernel of the catalog.
NOT_REACHED = "no overload of the catalog was reached"


def may_decline(
    names: tuple[str, ...],
    labels: tuple[str, ...],
    reason: str,
    why: str,
    *,
    dtypes: tuple[torch.dtype, ...] = (),
    device: str = "",
) -> None:
    """Register an exception."""
    MAY_DECLINE.append(MayDecline(names, labels, reason, why, dtypes, device))


def arguments(*packets: str) -> Callable[[_Arguments], _Arguments]:
    """Register what makes arguments of operators by name."""

    def register(make: _Arguments) -> _Arguments:
        ARGUMENTS.update(dict.fromkeys(packets, make))
        return make

    return register


def layouts(*packets: str) -> Callable[[_Layouts], _Layouts]:
    """Register what makes layouts of operators beside those that all have."""

    def register(make: _Layouts) -> _Layouts:
        LAYOUTS.update(dict.fromkeys(packets, make))
        return make

    return register


def operands(*packets: str) -> Callable[[Operands], Operands]:
    """Register what makes the tensor arguments of operators in order."""

    def register(make: Operands) -> Operands:
        OPERANDS.update(dict.fromkeys(packets, make))
        return make

    return register


def drawn(*packets: str) -> Callable[[_Drawn], _Drawn]:
    """Register what makes of drawn arguments of operators those that have an answer."""

    def register(make: _Drawn) -> _Drawn:
        DRAWN.update(dict.fromkeys(packets, make))
        return make

    return register


def floating(dtype: torch.dtype) -> torch.dtype:
    """A dtype of floats itself, and else float32."""
    return dtype if dtype.is_floating_point else torch.float32


def chosen(*packets: str) -> Callable[[_Chosen], _Chosen]:
    """Register what replaces what ATen chooses freely in results of operators."""

    def register(make: _Chosen) -> _Chosen:
        CHOSEN.update(dict.fromkeys(packets, make))
        return make

    return register


def terms(*packets: str) -> Callable[[_Terms], _Terms]:
    """Register what counts the terms of operators' results."""

    def register(count: _Terms) -> _Terms:
        TERMS.update(dict.fromkeys(packets, count))
        return count

    return register


def real(value: Any) -> bool:
    """Whether it is a tensor that can be clamped: of numbers that are not complex, and of no rare dtype."""
    return isinstance(value, torch.Tensor) and value.dtype in dtypes.NUMBERS


def is_scalar(value: Any) -> bool:
    """Whether it is a tensor without dimensions."""
    return isinstance(value, torch.Tensor) and not value.dim()


def whole(value: Any) -> bool:
    """Whether it is a tensor of integers that may tell of places."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


def within(value: Any, low: float, high: float) -> Any:
    """A tensor between two numbers: as it is where it lies there, and else clamped, if it can be."""
    if not real(value) or low > high or bool(((value >= low) & (value <= high)).all()):
        return value
    return (value.nan_to_num(low) if value.is_floating_point() else value).clamp(low, high)


def without_signed_nan(x: torch.Tensor) -> torch.Tensor:
    """On a GPU the same with every nan positive: ATen's kernels there that sort by digits have a negative one before
    all numbers, and the others, as ours, after them. Conversions to bfloat16 on a CPU make negative ones.
    """
    if devices.current.type == "cpu" or not x.is_floating_point() or not (x.isnan() & x.signbit()).any():
        return x
    return x.masked_fill(x.isnan(), float("nan"))


def compares_zero_sign(packet: str | None) -> bool:
    """Whether the sign that an operator gives a zero is ATen's."""
    if packet in ZERO_SIGN_OF_ROUNDOFF:
        return False
    return devices.current.type != "cpu" or packet not in ZERO_SIGN_UNDEFINED
