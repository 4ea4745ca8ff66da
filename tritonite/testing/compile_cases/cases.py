"""Compile cases, the registries that engines fill, and a recorder of launches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget

from tritonite import devices, registry
from tritonite.engine.lists import elementwise, table
from tritonite.engine.pointwise import declare as pointwise
from tritonite.runtime import contract
from tritonite.runtime.launch import Specialization
from tritonite.runtime.libentry import LibEntry

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
# Targets of the tables that data sheets give, for which products alone are compiled.
ALL_TARGETS = TARGETS | {"sm_89": GPUTarget("cuda", 89, 32), "sm_120": GPUTarget("cuda", 120, 32)}
# (Older target, newer target of the same family) by name. A sample of the older target's kernels is compiled for the
# newer one.
NEWER_TARGETS = {
    "gfx950": ("gfx942", GPUTarget("hip", "gfx950", 64)),
    "gfx1201": ("gfx1100", GPUTarget("hip", "gfx1201", 32)),
}
# Targets by kind of device. The first two of NVIDIA's have TMA.
KINDS = {"nvidia": ("sm_90", "sm_100", "sm_80"), "amd": ("gfx942", "gfx1100")}


class Case(NamedTuple):
    """A kernel to compile, and the names of the targets to compile it for."""

    label: str
    specialization: Specialization
    targets: tuple[str, ...]
    # Report more shared memory than a program may have as a failure, too.
    limits_shared_memory: bool = False


# Modules that launch by `Launch` rather than by `libentry`.
_LAUNCHING = (pointwise, elementwise, table)
# Yields cases: of every dtype and layout if its argument is true, otherwise a sample of them.
Make = Callable[[bool], Iterator[Case]]
GROUPS: dict[str, list[Make]] = {}
# Kernels in inline PTX, which have another form for devices without it.
ASSEMBLY_KERNELS: set[Any] = set()
# Kernels that read operands by TMA descriptors.
DESCRIPTOR_KERNELS: set[Any] = set()


def compile_cases(group: str) -> Callable[[Make], Make]:
    """Register a generator of cases in a group, which `targets` compiles by its name."""

    def register(make: Make) -> Make:
        GROUPS.setdefault(group, []).append(make)
        return make

    return register


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Specialization]]:
    """Record what host functions launch within the context, and launch nothing."""
    found: list[Specialization] = []

    def launch(specialization: Specialization, device: torch.device) -> Callable[..., None]:
        found.append(specialization)
        return lambda *_: None

    def record(kernel: LibEntry, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(kernel.specialization(args, kwargs))

    patches: tuple[Any, ...] = (
        mock.patch.object(LibEntry, "run", record),
        *(mock.patch.object(module, "Launch", launch) for module in _LAUNCHING),
        # Sizes of results that a kernel would have counted.
        mock.patch.object(contract, "awaited", lambda numbers: [64] * numbers.numel()),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield found


def launches(call: Callable[..., Any], arguments: tuple[Any, ...], **record: Any) -> list[Specialization]:
    """Return what a host function launches, on the current device with these fields of its record replaced."""
    changed = dataclasses.replace(devices.current, **record)
    with recorded_launches() as found, mock.patch.object(devices, "current", changed):
        call(*arguments)
    return found


def unit_strides(specialization: Specialization) -> Iterator[Specialization]:
    """Yield a kernel's specialisations in which one number of its tuples of strides after another is 1.

    Triton makes a constant of such a number, which lacks the type that its loops or functions may need. Sizes of a
    collapsed batch are never 1.
    """
    signature = specialization.signature
    for i, (name, kinds) in enumerate(signature.items()):
        if not isinstance(kinds, tuple) or name == "sizes":
            continue
        for path in _numbers(kinds, (i,)):
            yield dataclasses.replace(
                specialization,
                signature=signature | {name: _with_constant(kinds, path[1:])},
                constants=dict(sorted({**specialization.constants, path: 1}.items())),
                attributes={at: what for at, what in specialization.attributes.items() if at != path},
                compiled={},
            )


def _numbers(kinds: tuple[Any, ...], path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the paths of integers in nested tuples of Triton's types."""
    for i, kind in enumerate(kinds):
        if isinstance(kind, tuple):
            yield from _numbers(kind, (*path, i))
        elif kind in ("i32", "i64"):
            yield (*path, i)


def _with_constant(kinds: tuple[Any, ...], path: tuple[int, ...]) -> tuple[Any, ...]:
    """Return nested tuples of Triton's types with a constant at a path."""
    first, *rest = path
    changed = _with_constant(kinds[first], tuple(rest)) if rest else "constexpr"
    values = [*kinds[:first], changed, *kinds[first + 1 :]]
    return type(kinds)(*values) if hasattr(kinds, "_fields") else tuple(values)


# Elements of inputs that are large enough to be counted, searched or copied in shared memory.
LARGE = 2**22


def large_inputs(full: bool) -> Iterator[tuple[torch.dtype, torch.Tensor]]:
    """Yield an input of `LARGE` elements by dtype; without `full` in float32 alone."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8)[: None if full else 1]:
        yield dtype, torch.empty(LARGE, dtype=dtype)


def shared_memory_cases(dtype: torch.dtype, calls: Iterable[tuple[str, tuple[Any, ...]]], full: bool) -> Iterator[Case]:
    """Yield what calls of overloads launch on a device with inline PTX, whose kernels use shared memory."""
    for name, arguments in calls:
        for specialization in launches(registry.overloads()[name], arguments, ptx=True):
            targets = ("sm_80", "sm_90", "sm_100")[: None if full else 2]
            yield Case(f"{name} {dtype} in shared memory", specialization, targets)
