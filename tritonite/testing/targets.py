"""Compile the catalog's kernels for devices that are not here.

    TRITON_INTERPRET=0 python -m tritonite.testing.targets [--full | --quick] [--part I/N] [NAME...]

Prints a line for every kernel that does not compile. Exits with 1 if there is one, and with 2 for arguments that name
nothing. Needs no GPU.

The matrix of kernels and targets has two sources: declarations, launched on the samples of the tests, and the groups
of `compile_cases`, where each engine registers kernels that samples do not reach.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import sys
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from triton.backends.amd.compiler import HIPOptions
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler import CompiledKernel

import tritonite.fused  # noqa: F401 - registers its operators
from tritonite import devices, dtypes, registry
from tritonite.engine.lists.kernels import elementwise_list
from tritonite.engine.pointwise import declare as pointwise
from tritonite.errors import Decline, did_you_mean
from tritonite.runtime.launch import Specialization
from tritonite.testing import compile_cases  # noqa: F401 - registers the groups
from tritonite.testing.compile_cases.cases import (
    ALL_TARGETS,
    ASSEMBLY_KERNELS,
    DESCRIPTOR_KERNELS,
    GROUPS,
    KINDS,
    NEWER_TARGETS,
    TARGETS,
    Case,
    recorded_launches,
)
from tritonite.testing.parts import part_of
from tritonite.testing.samples import samples
from tritonite.testing.sass import has_broken_descriptors, stores_stack_pointer

_OPTIONS = {field.name for options in (CUDAOptions, HIPOptions) for field in dataclasses.fields(options)}
# Accesses to global memory in PTX.
_ACCESS = re.compile(r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global|\bcp\.async|\bld\.b|\bst\.b")
# Values of compile-time arguments that are not flags.
_STATICS = {"approximate": ("none", "tanh"), "rounding_mode": (None, "trunc", "floor")}
# One of this many kernels is compiled for newer targets, too.
_SAMPLED = 8
# Ends the label of a kernel that a device without inline PTX gets.
_WITHOUT_ASSEMBLY = "without assembly"


def _arguments(kernel: pointwise.Pointwise, dtype: torch.dtype, static: Any, tensor: torch.Tensor) -> list[Any]:
    values: list[Any] = []
    for name, role in kernel.parameters.items():
        if role in ("promoted", "own"):
            values.append(tensor.to(torch.bool if name in ("mask", "condition") else dtype))
        else:
            values.append(static if role == "static" else 1)
    return values


def specializations(kernel: pointwise.Pointwise, full: bool) -> Iterator[tuple[str, Specialization]]:
    """Yield every compile-time variant of a pointwise kernel, labelled.

    With `full` in every dtype that the kernel serves, and with transposed operands; otherwise in the first such dtype.
    """
    named = [name for name, role in kernel.parameters.items() if role == "static"]
    statics = next((_STATICS[name] for name in named if name in _STATICS), (False, True) if named else (None,))
    layouts = {"contiguous": torch.ones(64, 64), "transposed": torch.ones(64, 64)}
    order = (torch.float32, torch.int32, torch.bool, *dtypes.ALL)
    served = 0
    for dtype in dict.fromkeys(order):
        if served and not full:
            return
        for static in statics:
            for label, tensor in layouts.items():
                values = _arguments(kernel, dtype, static, tensor)
                if label == "transposed":
                    if not full or dtype is not torch.float32:
                        continue
                    values = [v.t() if isinstance(v, torch.Tensor) and i else v for i, v in enumerate(values)]
                try:
                    with mock.patch.object(pointwise, "Launch", lambda *_: None):
                        iteration = kernel.iteration(values)
                except Decline:
                    continue
                served += 1
                if iteration.specialization is not None:
                    yield f"{dtype} {static} {label}", iteration.specialization


def launched(op: registry.Op, full: bool) -> Iterator[tuple[str, Specialization]]:
    """Yield what an operator's host function launches on samples, in every dtype it serves or in one.

    Each sample runs on this device, and on one whose small blocks make rows take several blocks and programs. Kernels
    in inline PTX are launched for a device without it, too.
    """
    tiny = dataclasses.replace(devices.current, row_elements=32, row_columns=16, programs=8)
    plain = dataclasses.replace(devices.current, ptx=False)
    served = 0
    with recorded_launches() as found:
        for dtype in dict.fromkeys((torch.float16, torch.float32, torch.int32, *op.declaration.accepts)):
            if dtype not in op.declaration.accepts or (served and not full):
                continue
            for sample, device in itertools.product(samples(op, dtype), (devices.current, tiny)):
                # Samples without dimensions, because Triton makes sizes of 1 constants.
                labels = ("contiguous", "transposed") if device is tiny else ("contiguous", "transposed", "zero_dim")
                if sample.label.split()[0] not in labels:
                    continue
                found.clear()
                try:
                    with mock.patch.object(devices, "current", device):
                        op(*sample.args, **sample.kwargs)
                except Decline:
                    continue
                served += 1
                label = f"{dtype} {sample.label}{' in tiny blocks' if device is tiny else ''}"
                yield from [(label, specialization) for specialization in found]
                if device is not tiny and any(_has_assembly(label, each) for each in found):
                    found.clear()
                    with mock.patch.object(devices, "current", plain):
                        op(*sample.args, **sample.kwargs)
                    yield from [(f"{label} {_WITHOUT_ASSEMBLY}", specialization) for specialization in found]


def _has_assembly(label: str, specialization: Specialization) -> bool:
    """Return whether a kernel has inline PTX: paired 16-bit atomics, masked swaps, 16-bit prefetches, or its own."""
    constants = specialization.constants.values()
    flags = ("paired",), ("masked",), ("scalar_loads", "prefetch")
    written = any(all(getattr(constant, name, False) for name in names) for constant in constants for names in flags)
    return written or (specialization.kernel in ASSEMBLY_KERNELS and _WITHOUT_ASSEMBLY not in label)


def _variants(declaration: registry.Declaration, full: bool) -> Iterator[tuple[str, Specialization]]:
    """Yield everything that a declaration compiles, labelled.

    A kernel over lists compiles each formula anew, so that without `full` one launch stands for a declaration.
    """
    ops = [op for op in registry.overloads().values() if op.declaration is declaration]
    over_lists = bool(declaration.kernels) and any(op.takes_lists for op in ops)
    if declaration.kernels and not over_lists:
        for kernel in declaration.kernels:
            for label, specialization in specializations(kernel, full):
                yield f"{kernel.name} {label}", specialization
        return
    functional = [op for op in ops if not op.inplace and not op.out_names]
    for op in functional or ops[:1]:
        variants = list(launched(op, full))
        if over_lists and not full:
            variants = [variant for variant in variants if variant[1].kernel is elementwise_list][:1]
        for label, specialization in variants:
            yield f"{op.overload} {label}", specialization


def matrix(names: list[str], full: bool, part: tuple[int, int]) -> Iterator[Case]:
    """Yield a part of the compile matrix: everything, or what the names of operators and groups stand for."""
    registry.overloads()
    index, parts = part
    chosen = [d for d in registry.declarations if not names or not set(names).isdisjoint(d.packets)]
    met: set[Any] = set()
    # A part is a run of neighbouring declarations, because neighbours have kernels in common.
    for declaration in chosen[len(chosen) * index // parts : len(chosen) * (index + 1) // parts]:
        for label, specialization in _variants(declaration, full):
            alike = _alike(label)
            everywhere = bool(names) or (specialization.kernel, alike) not in met
            targets = _targets(declaration, label, specialization, everywhere, full)
            if len(targets) > (1 if alike else len(KINDS)):
                met.add((specialization.kernel, alike))
            elif not (full or everywhere) and (declaration, specialization.kernel) in met:
                # AMD's compiler has had this declaration's formula.
                targets = targets[:1]
            met.add((declaration, specialization.kernel))
            yield Case(label, specialization, targets)
    for name, makes in GROUPS.items():
        if not names or name in names:
            cases = itertools.chain.from_iterable(make(full) for make in makes)
            yield from itertools.islice(cases, index, None, parts)


# `make test` compiles the kernels of one declaration out of this number.
_QUICK_STEP = 8


def _quick(names: list[str], part: tuple[int, int]) -> Iterator[Case]:
    """Yield each kernel of the named declarations once, in the first variant met, for sm_90.

    Without names: each kernel of one declaration in `_QUICK_STEP` once, whichever of these declarations has it.
    """
    met: set[Any] = set()
    if names:
        chosen = [d for d in registry.declarations if not set(names).isdisjoint(d.packets)]
    else:
        chosen = registry.declarations[::_QUICK_STEP]
    for declaration in chosen[part[0] :: part[1]]:
        for label, specialization in _variants(declaration, False):
            kernel = (declaration, specialization.kernel) if names else specialization.kernel
            if kernel not in met:
                met.add(kernel)
                yield Case(label, specialization, ("sm_90",))


def _alike(label: str) -> str | None:
    """Return why a launch is alike for all targets of a compiler: its loops, or its sizes of 1. None if it is not."""
    return next((each for each in ("tiny", "zero_dim") if each in label), None)


def _targets(
    declaration: registry.Declaration, label: str, specialization: Specialization, everywhere: bool, full: bool
) -> tuple[str, ...]:
    """Return the targets to compile a declaration's kernel for.

    With `full`, or where a kernel is tried `everywhere`: all that have it. Otherwise one of NVIDIA's and one of AMD's,
    which the operator's name decides. Launches that are alike, and products, are for fewer targets.
    """
    names = tuple(TARGETS)
    if specialization.kernel in DESCRIPTOR_KERNELS:
        names = ("sm_90", "sm_100")
    elif set(declaration.accepts) <= set(dtypes.FLOAT8_NAMES):
        # Before sm_89 there are no float8 products.
        names = names[1:]
    if _has_assembly(label, specialization):
        # Paired atomics of bfloat16 begin with sm_90.
        names = ("sm_80", "sm_90", "sm_100") if specialization.kernel in ASSEMBLY_KERNELS else ("sm_90", "sm_100")
    alike = _alike(label) is not None or declaration.family == "matmul"
    if full or (everywhere and not alike):
        return names
    kinds = [[name for name in names if name in kind] for kind in KINDS.values()]
    turn = zlib.crc32(f"{declaration.packets[0]} {specialization.kernel.__name__}".encode())
    if not alike:
        return tuple([kind[turn % len(kind)] for kind in kinds if kind])
    # AMD's compiler has small blocks and sizes of 1 where a kernel first has them.
    chosen = ("sm_90", "gfx942") if everywhere or declaration.family == "matmul" else ("sm_90",)
    return tuple([name for name in names if name in chosen])


def failures(
    names: list[str], full: bool = False, part: tuple[int, int] = (0, 1), quick: bool = False
) -> Iterator[str]:
    """Compile a part of the matrix, and yield a line for every kernel that fails for a target.

    A name is that of an operator or of a group: "attention", Hopper's kernels for 16-bit floats; "parts", Hopper's for
    float32; "decoding", "dropped" and "wide", attention of few queries, with dropout and of wide heads; "tiles",
    "copies" and "added", products by every tile, of copied operands and with addends; "rows" and "sorted", long rows;
    "in_order", invariant mode; "fused" and "rings", operators outside ATen; "optim", optimisers; "shared", what counts
    and searches in shared memory.

    With `full` all variants are compiled for all targets, and with `quick` a sample for one (`_quick`). By default a
    kernel is compiled for all targets where it is named or first met. Of each declaration's other launches of it, the
    first is compiled for one target of each compiler, and the rest for one of NVIDIA's.
    NEWER_TARGETS have a sample of the kernels that are not named.
    """
    for label, specialization, chosen, limits_shared_memory in (
        _quick(names, part) if quick else matrix(names, full, part)
    ):
        # A device rejects unknown options; Triton's interpreter and compiler do not.
        if unknown := specialization.options.keys() - _OPTIONS:
            yield f"{label}: neither parameters nor options: {', '.join(sorted(unknown))}"
        newer = {} if quick else _newer(label, chosen, full or bool(names))
        for name, target in ({name: ALL_TARGETS[name] for name in chosen} | newer).items():
            try:
                compiled = specialization.compile(target)
            except Exception as error:  # noqa: BLE001 - whatever the compiler raises is what to report
                yield f"{label} {name}: {error!r} {error.__cause__!r}"
                continue
            if limits_shared_memory and compiled.metadata.shared > devices.current.shared_memory + 1024:
                yield f"{label} {name}: {compiled.metadata.shared} bytes of shared memory"
            if target.backend != "cuda":
                continue
            if not _waits_as_launched(compiled):
                yield f"{label} {name}: it may run before what it waits for has ended"
            if stores_stack_pointer(compiled):
                yield f"{label} {name}: the assembler stores the stack pointer in place of float8 numbers"
            if has_broken_descriptors(compiled):
                yield f"{label} {name}: a product's shared-memory descriptor comes from a kernel argument"


def _newer(label: str, chosen: tuple[str, ...], every: bool) -> dict[str, GPUTarget]:
    """Return the newer targets for which a kernel is compiled: those of chosen targets, for one kernel in eight."""
    if not every and zlib.crc32(label.encode()) % _SAMPLED:
        return {}
    return {name: target for name, (older, target) in NEWER_TARGETS.items() if older in chosen}


def _waits_as_launched(compiled: CompiledKernel) -> bool:
    """Return whether a kernel that is launched early waits before it accesses memory, and no other kernel waits.

    `combine_splits` may read memory that the splits do not write before it waits.
    """
    text = compiled.asm["ptx"]
    wait, access = text.find("griddepcontrol.wait"), _ACCESS.search(text)
    early = access is not None and access.start() < wait and compiled.metadata.name != "combine_splits"
    return (wait >= 0) == compiled.metadata.launch_pdl and not early


def main() -> int:
    """Run the command line, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--full", action="store_true", help="every dtype and layout, not one")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="each kernel of a named declaration once, or of all a sample, for one device",
    )
    parser.add_argument("--part", default="0/1", help="the I-th of N parts of the kernels")
    options = parser.parse_args()
    known = {*GROUPS, *(packet for declaration in registry.declarations for packet in declaration.packets)}
    for name in options.names:
        if name not in known:
            parser.error(f"no operator is called {name!r}{did_you_mean(name, known)}")
    try:
        part = part_of(options.part)
    except ValueError as error:
        parser.error(f"--part {error}")
    found = 0
    for line in failures(options.names, options.full, part, options.quick):
        print(line)
        found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
