"""The form of a regression case, the registry of cases, and the measurement of one case."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import tritonite
from tritonite import registry
from tritonite.bench import timing
from tritonite.bench.results import Timing
from tritonite.install import library

Arguments = Callable[[], tuple[Any, ...]]
# A measured gain below this power of the expected gain no longer pays for the choice.
_PAYS = 0.5


@dataclass(frozen=True)
class Regression:
    """A choice and its alternative on one call.

    Attributes:
        name: the name by which comments refer to the case.
        op: an overload's name, with its namespace for operators outside ATen.
        arguments: makes the arguments of the call, on the GPU.
        alternative: the replacements of attributes that undo the choice, by dotted name. A name such as
            `tritonite.engine.rows.table.ROWS[nvidia].few` replaces a field of an entry of a dictionary.
        gain: the expected time of the alternative over the time of the choice.
    """

    name: str
    op: str
    arguments: Arguments
    alternative: Mapping[str, Any]
    gain: float


@dataclass(frozen=True)
class Measured:
    """Device times of a choice and of its alternative, in microseconds."""

    regression: Regression
    choice: Timing
    alternative: Timing

    @property
    def gain(self) -> float:
        """The time of the alternative over the time of the choice."""
        return self.alternative.median / self.choice.median

    @property
    def pays(self) -> bool:
        """Return whether at least half of the expected gain, in logarithms, was measured."""
        return self.gain >= self.regression.gain**_PAYS


_cases: dict[str, Regression] = {}


def regression(name: str, op: str, arguments: Arguments, alternative: Mapping[str, Any], gain: float) -> None:
    """Register a case. Names in `alternative` are relative to `tritonite.`.

    Raises ValueError for a name that another case has.
    """
    if name in _cases:
        raise ValueError(f"two regression cases are called {name!r}")
    _cases[name] = Regression(name, op, arguments, {f"tritonite.{key}": x for key, x in alternative.items()}, gain)


@functools.lru_cache(maxsize=1)
def cases() -> dict[str, Regression]:
    """Return every case by its name."""
    package = importlib.import_module("tritonite.bench.regressions")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(_cases)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed elements of a shape and dtype, on the GPU."""
    return torch.randn(shape, device=tritonite.device).to(dtype)


@contextlib.contextmanager
def chosen_otherwise(alternative: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes by those of the alternative, and forget earlier choices before and after.

    Raises AttributeError or KeyError for a name that does not exist.
    """
    with contextlib.ExitStack() as stack:
        for name, value in alternative.items():
            stack.enter_context(_replaced(name, value))
        _forget_choices()
        stack.callback(_forget_choices)
        yield


def _replaced(name: str, value: Any) -> Any:
    """Return a context in which one attribute, or one field of an entry of a dictionary, has another value."""
    if "[" not in name:
        return mock.patch(name, value)
    where, _, rest = name.partition("[")
    key, _, field = rest.partition("].")
    module, _, attribute = where.rpartition(".")
    entries = getattr(importlib.import_module(module), attribute)
    entry = entries[key]
    getattr(entry, field)
    replace = dataclasses.replace if dataclasses.is_dataclass(entry) else type(entry)._replace
    return mock.patch.dict(entries, {key: replace(entry, **{field: value})})


def _forget_choices() -> None:
    """Clear every cache of choices in the engines, and the iterations that pointwise kernels keep."""
    for name in [name for name in sys.modules if name.startswith("tritonite.engine")]:
        for attribute in list(vars(sys.modules[name]).values()):
            if hasattr(attribute, "cache_clear"):
                attribute.cache_clear()
    for declaration in registry.declarations:
        for kernel in declaration.kernels:
            kernel.forget_iterations()


def measure(case: Regression, rounds: int = timing.ROUNDS) -> Measured:
    """Time a case on this GPU.

    Both ways are captured in CUDA graphs, which are replayed in turns with a cold L2 cache.
    """
    op = {**registry.overloads(), **library.registered()}[case.op]
    arguments = case.arguments()
    replays = {}
    ways: dict[str, Mapping[str, Any]] = {"choice": {}, "alternative": case.alternative}
    for name, alternative in ways.items():
        with chosen_otherwise(alternative), tritonite.use_gems(include=(), faster_only=False):
            op(*arguments)
            timing.synchronize()
            replays[name] = timing.captured(functools.partial(op, *arguments), 1)
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name] += timing.device_samples(replay)
    return Measured(case, Timing.of(times["choice"]), Timing.of(times["alternative"]))
