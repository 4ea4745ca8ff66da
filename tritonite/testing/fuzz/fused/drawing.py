"""Calls of fused operators, the registry of their draws, and random shapes, dtypes, layouts and values."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite import devices, fused
from tritonite.dtypes import FLOATS, SINGLE_FLOATS

# Names of fused operators in reports and on the command line begin with this.
PREFIX = "tritonite::"
# Shapes before the last dimension, and sizes of rows around the sizes of blocks.
_LEADING: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (5,), (17,), (2, 3), (1, 1, 2), (0,), (2, 0))
_WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70, 127, 128, 129, 255, 257)
_LONG = (511, 513, 1000, 1025, 2049)
# Probability that an argument of a call is spoiled, so that the operator has to refuse or serve it.
_SPOILED = 0.08


@dataclass(frozen=True)
class FusedCall:
    """A call of a fused operator.

    Attributes:
        name: the public function of tritonite.fused.
        arguments: its arguments by name. Tensors whose gradients are compared require one.
        reference: the composition, which takes the same arguments with floats in float64. Returns the results, as many
            as are compared, and after them the new values of the arguments in `written`.
        written: names of arguments that the call writes.
        contiguous: whether results are contiguous.
        slack: absolute tolerance of a result, in units of the operands' resolution times its largest element.
        size: the least magnitude that the tolerance is relative to, for results whose larger terms cancel.
        indices: names of arguments whose values are indices, which are not spoiled.
        served: whether the operator must serve the call.
        function: what is called with the arguments; None for the public function.
    """

    name: str
    arguments: dict[str, Any]
    reference: Callable[..., Any]
    written: tuple[str, ...] = ()
    contiguous: bool = True
    slack: float = 0.0
    size: float = 1e-3
    indices: tuple[str, ...] = ()
    served: bool = True
    function: Callable[..., Any] | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [each for each in pytree.tree_leaves(self.arguments) if isinstance(each, torch.Tensor)]

    @property
    def resolution(self) -> torch.dtype:
        """The widest of the dtypes with the fewest digits among the floating-point operands."""
        floats = [each.dtype for each in self.tensors if each.dtype in FLOATS]
        return max(floats or [torch.float32], key=lambda dtype: torch.finfo(dtype).eps)

    def map(self, function: Callable[[Any], Any]) -> FusedCall:
        """Return the call with `function` applied to every argument, and to the tensors within."""
        return replace(self, arguments=pytree.tree_map(function, self.arguments))

    def run(self) -> Any:
        return (self.function or getattr(fused, self.name))(**self.arguments)

    def compose(self) -> Any:
        return self.reference(**self.arguments)

    def __str__(self) -> str:
        shown = [f"{name}={_shown(value)}" for name, value in self.arguments.items() if value is not None]
        return f"{PREFIX}{self.name}({', '.join(shown)})"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        words = [f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"]
        if not value.is_contiguous():
            words.append(f"strides {value.stride()}")
        if value.storage_offset():
            words.append(f"offset {value.storage_offset()}")
        return " ".join([*words, *["grad"] * value.requires_grad])
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    return repr(value)


Draw = Callable[["Drawer"], FusedCall]
DRAWS: dict[str, Draw] = {}


def draws(*names: str) -> Callable[[Callable[[Drawer, str], FusedCall]], Callable[[Drawer, str], FusedCall]]:
    """Register a function that draws calls of the named public functions, given a drawer and the name."""

    def register(function: Callable[[Drawer, str], FusedCall]) -> Callable[[Drawer, str], FusedCall]:
        for name in names:
            DRAWS[name] = lambda drawer, name=name: function(drawer, name)  # type: ignore[misc]
        return function

    return register


def named_fused(names: str | Iterable[str] | None) -> list[str]:
    """Return the qualified fused operators that patterns match: all for None, and by "tritonite::" only."""
    known = sorted(PREFIX + name for name in DRAWS)
    if names is None:
        return known
    patterns = [names] if isinstance(names, str) else list(names)
    patterns = [each for each in patterns if isinstance(each, str) and each.startswith(PREFIX)]
    return [name for name in known if any(fnmatch.fnmatchcase(name, each) for each in patterns)]


def draw_fused(name: str, seed: int, number: int) -> FusedCall:
    """Return the call of a qualified name such as "tritonite::rms_norm" that a seed and a number determine."""
    drawer = Drawer(f"{seed} {name} {number}")
    call = DRAWS[name.removeprefix(PREFIX)](drawer)
    return drawer.spoiled(call) if drawer.chance(_SPOILED) else call


class Drawer(random.Random):
    """Random numbers seeded by a text, and tensors made from them."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.device = devices.current.type
        self._generator = torch.Generator().manual_seed(self.getrandbits(60))

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def leading(self, least: int = 0) -> tuple[int, ...]:
        """Draw the dimensions before the last, at least `least` of them."""
        return self.choice([each for each in _LEADING if len(each) >= least])

    def width(self, most: int = 2049) -> int:
        """Draw a row's length: often small, rarely 0."""
        if self.chance(0.03):
            return 0
        long = [each for each in _LONG if each <= most]
        return self.choice(long) if long and self.chance(0.1) else self.choice([x for x in _WIDTHS if x <= most])

    def dtype(self, double: bool = False) -> torch.dtype:
        """Draw fp16, bf16 or fp32, with `double` rarely fp64."""
        return torch.float64 if double and self.chance(0.08) else self.choice(SINGLE_FLOATS)

    def parameter_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Draw a parameter's dtype: that of the operand, or float32."""
        return torch.float32 if self.chance(0.25) else dtype

    def normal(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        grad: float = 0.0,
        layout: bool = True,
        overlap: bool = True,
        distinct: int | None = None,
    ) -> torch.Tensor:
        """Return normal numbers in a drawn layout; `grad` is the probability that the tensor requires a gradient."""
        values = torch.randn(tuple(shape), generator=self._generator) * self.choice((1.0, 1.0, 1.0, 0.1, 4.0))
        return self.laid(values.to(dtype), grad, layout, overlap, distinct)

    def fractions(self, shape: Sequence[int]) -> torch.Tensor:
        """Return contiguous float32 numbers in [0, 1) on the CPU, for `laid`."""
        return torch.rand(tuple(shape), generator=self._generator)

    def integers(self, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return contiguous integers from 0 to `high` - 1 on the CPU, for `laid`."""
        return torch.randint(max(1, high), tuple(shape), generator=self._generator).to(dtype)

    def classes(self, high: int, shape: Sequence[int], ignored: int = -100) -> torch.Tensor:
        """Return targets in a drawn layout; none, some or all are `ignored`."""
        found = self.integers(high, shape)
        share = self.choice((0.0, 0.0, 0.3, 0.7, 1.0))
        return self.laid(torch.where(self.fractions(shape) < share, ignored, found), 0.0)

    def laid(
        self,
        values: torch.Tensor,
        grad: float = 0.0,
        layout: bool = True,
        overlap: bool = True,
        distinct: int | None = None,
    ) -> torch.Tensor:
        """Return a view with these values on the device, whose memory has other elements before, between and behind.

        Floats beside the view are nan, so that a result that reads them shows it. Expanded views need `overlap`. The
        dimension `distinct` is never expanded, so that its elements differ.
        """
        shape = list(values.shape)
        way = self.choice(("plain", "plain", "offset", "sliced", "strided", "permuted", "transposed", "expanded"))
        way = way if layout and shape else "plain" if not layout else "offset"
        order = list(range(len(shape)))
        if way == "expanded" and overlap:
            dim = self.randrange(len(shape))
            if shape[dim] and (distinct is None or dim != distinct % len(shape)):
                values = values.narrow(dim, 0, 1)
        elif way == "permuted":
            self.shuffle(order)
        elif way == "transposed" and len(shape) > 1:
            order[-1], order[-2] = order[-2], order[-1]
        before, behind, step = 0, 0, 1
        if way == "sliced":
            before, behind = self.randrange(5), self.randrange(5)
        elif way == "strided":
            step = 2
        inner = [values.shape[i] for i in order]
        room = list(inner)
        if room:
            room[-1] = before + room[-1] * step + behind
        start = self.randrange(1, 4) if way != "plain" else 0
        count = torch.Size(room).numel()
        gap = torch.nan if values.is_floating_point() else 1
        memory = torch.full((start + count + 4,), gap, dtype=torch.float32).to(values.dtype).to(self.device)
        view = memory[start : start + count].view(room)
        if room:
            view = view[..., before : before + inner[-1] * step : step]
        view = view.permute([order.index(i) for i in range(len(order))])
        view.copy_(values)
        return view.expand(shape).requires_grad_(grad > 0 and self.chance(grad))

    def spoiled(self, call: FusedCall) -> FusedCall:
        """Return the call with a tensor of another dtype or shape, which the operator may refuse."""
        names = [name for name, value in call.arguments.items() if isinstance(value, torch.Tensor)]
        name = self.choice(names)
        tensor = call.arguments[name].detach()
        ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda x: x.to(torch.int32),
            lambda x: x.to(torch.float64),
            lambda x: x.unsqueeze(0),
            lambda x: x[..., :-1] if x.dim() else x,
            lambda x: x[0] if x.dim() and len(x) else x,
            lambda x: x.reshape(-1)[:1].reshape(()) if x.numel() else x,
        ]
        way = self.choice(ways[:2] if name in call.indices else ways)
        return replace(call, arguments=call.arguments | {name: way(tensor)}, served=False)
