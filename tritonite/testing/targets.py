"""Compiling the catalog's kernels for hardware that is not here.

    TRITON_INTERPRET=0 python -m tritonite.testing.targets [--full | --quick] [--part I/N] [NAME...]

Prints a line for every kernel that does not compile and exits with 1 if there is one, with 2 for arguments that name
nothing. Needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from triton.backends.amd.compiler import HIPOptions
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler import CompiledKernel

import tritonite.fused  # noqa: F401 - registers its operators
from tritonite import devices, dtypes, registry
from tritonite.engine import histogram
from tritonite.engine.attention.backward import attention_backward
from tritonite.engine.attention.dropout import Dropout
from tritonite.engine.attention.forward import attention
from tritonite.engine.attention.hopper import backward as hopper_backward
from tritonite.engine.attention.hopper import float32_backward, float32_forward
from tritonite.engine.attention.hopper import forward as hopper_forward
from tritonite.engine.attention.problem import Packed, Problem
from tritonite.engine.attention.table import WARP_SPECIALIZED_BACKWARD_WITH_BIAS
from tritonite.engine.gemm import cost, cost_pointers
from tritonite.engine.gemm import select as gemm_select
from tritonite.engine.gemm import table as tables
from tritonite.engine.gemm.kernels.portable import multiply_persistent
from tritonite.engine.gemm.product import product
from tritonite.engine.norm.ring import norm_backward_by_ring
from tritonite.engine.pointwise import declare as pointwise
from tritonite.engine.searching import search
from tritonite.engine.sorting import dense, select
from tritonite.errors import Decline, did_you_mean
from tritonite.install import library
from tritonite.runtime import contract
from tritonite.runtime.launch import Specialization
from tritonite.runtime.libentry import LibEntry
from tritonite.testing.parts import part_of
from tritonite.testing.samples import samples

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
_OPTIONS = {field.name for options in (CUDAOptions, HIPOptions) for field in dataclasses.fields(options)}
# How labels end of kernels that have to have room in shared memory.
_ROOM = "shared memory's room"
# What reaches global memory in PTX.
_ACCESS = re.compile(r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global|\bcp\.async|\bld\.b|\bst\.b")
# Kernels in NVIDIA's assembly, unless a device has none.
_IN_ASSEMBLY = (
    dense._set_bits.jit,
    dense._look_up.jit,
    dense._write_set.jit,
    histogram._count.jit,
    search._search_from_shared.jit,
    select._count_digit.jit,
    select._select_held.jit,
)
_STATICS = {"approximate": ("none", "tanh"), "rounding_mode": (None, "trunc", "floor")}


def _arguments(kernel: pointwise.Pointwise, dtype: torch.dtype, static: Any, tensor: torch.Tensor) -> list[Any]:
    values: list[Any] = []
    for name, role in kernel.parameters.items():
        if role in ("promoted", "own"):
            values.append(tensor.to(torch.bool if name in ("mask", "condition") else dtype))
        else:
            values.append(static if role == "static" else 1)
    return values


def specializations(kernel: pointwise.Pointwise, full: bool) -> Iterator[tuple[str, Specialization]]:
    """A kernel in every compile-time variant, in every dtype it serves and transposed, or in one dtype alone."""
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


@contextlib.contextmanager
def _noting() -> Iterator[list[Specialization]]:
    """Notes what is launched within it, and launches nothing."""
    found: list[Specialization] = []

    def launch(specialization: Specialization, device: torch.device) -> Callable[..., None]:
        found.append(specialization)
        return lambda *_: None

    def note(kernel: LibEntry, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(kernel.specialization(args, kwargs))

    patches = (
        mock.patch.object(LibEntry, "run", note),
        mock.patch.object(pointwise, "Launch", launch),
        # Of sizes that no kernel has counted.
        mock.patch.object(contract, "awaited", lambda numbers: [64] * numbers.numel()),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield found


def launched(op: registry.Op, full: bool) -> Iterator[tuple[str, Specialization]]:
    """What an operator's host function launches, on samples in every dtype it serves or in one.

    Once on this device, and once where blocks are so small that rows take several of them, and several programs. What
    has NVIDIA's assembly is launched without it, too.
    """
    tiny = dataclasses.replace(devices.current, row_elements=32, row_columns=16, programs=8)
    plain = dataclasses.replace(devices.current, ptx=False)
    served = 0
    with _noting() as found:
        for dtype in dict.fromkeys((torch.float16, torch.float32, torch.int32, *op.declaration.accepts)):
            if dtype not in op.declaration.accepts or (served and not full):
                continue
            for sample, device in itertools.product(samples(op, dtype), (devices.current, tiny)):
                # Of one element for Triton to take sizes of 1 for constants.
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
                    yield from [(f"{label} without assembly", specialization) for specialization in found]


def _has_assembly(label: str, specialization: Specialization) -> bool:
    """Return whether a kernel has NVIDIA's assembly: pairs of 16-bit floats added to memory, or masked swaps."""
    constants = specialization.constants.values()
    written = any(getattr(constant, name, False) for constant in constants for name in ("paired", "masked"))
    return written or (specialization.kernel in _IN_ASSEMBLY and "without assembly" not in label)


def _variants(declaration: registry.Declaration, full: bool) -> Iterator[tuple[str, Specialization]]:
    """Everything a declaration compiles, labelled."""
    for kernel in declaration.kernels:
        for label, specialization in specializations(kernel, full):
            yield f"{kernel.name} {label}", specialization
    if not declaration.kernels:
        ops = [op for op in registry.overloads().values() if op.declaration is declaration]
        functional = [op for op in ops if not op.inplace and not op.out_names]
        for op in functional or ops[:1]:
            for label, specialization in launched(op, full):
                yield f"{op.overload} {label}", specialization


# The targets whose tables of tiles are a kind of device's, those that copy tiles first.
_KINDS = {"nvidia": ("sm_90", "sm_100", "sm_80"), "amd": ("gfx942", "gfx1100")}
_SIZED = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_RESULTS = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.bfloat16}


def tiles(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """A product by every entry of the tables of tiles, and the targets it is for; without `full` one of them.

    And products of few rows by columns that begin within 16 bytes, and whose inner dimension is too short for tiles.
    """
    for kind, names in _KINDS.items():
        for size, config in tables.every(kind):
            warp_specialized, descriptors = config.warp_specialize, config.descriptors
            dtype = torch.float8_e4m3fn if warp_specialized and size == 1 else _SIZED[size]
            # One tile a program and several are written in other ways.
            layouts = ("columns",) if dtype is torch.float8_e4m3fn else ("rows", "columns")
            for batches, layout in itertools.product(
                (1, 256) if descriptors and not warp_specialized else (1,), layouts
            ):
                a, b = torch.empty(batches, config.BLOCK_M, 512, dtype=dtype), torch.empty(1, 512, 512, dtype=dtype)
                out = a.new_empty(a.shape, dtype=_RESULTS.get(dtype, dtype))
                second = (b if layout == "rows" else b.mT).expand(batches, 512, 512)
                with _noting() as found:
                    product(a, second, out, config=config, blockwise=dtype is torch.float8_e4m3fn)
                chosen = names[: 1 if warp_specialized else 2] if descriptors else names
                # Which of float32's tiles a compiler takes differs from one of NVIDIA's targets to another.
                all_of_them = full or (config.bf16x6 and layout == "rows")
                yield f"{config} {dtype} {layout} of {batches}", found[0], chosen if all_of_them else chosen[:1]
    swept = cost.load(cost.FOLDER / "sm_90.json")
    pingpong = [tile for tile in swept[2].configs if tile.pingpong]
    for config, (a_columns, b_columns) in itertools.product(pingpong, itertools.product((False, True), repeat=2)):
        if (a_columns or config.transposed) and not full:
            continue
        a, b = torch.empty(1, 512, 512, dtype=torch.float16), torch.empty(1, 512, 512, dtype=torch.float16)
        with _noting() as found:
            fitted = config._replace(num_stages=3)
            product(a.mT if a_columns else a, b.mT if b_columns else b, torch.empty_like(a), config=fitted)
        yield f"{config} {a_columns} {b_columns}", found[0], ("sm_90",)
    short = [tile for tile in swept[2].short.configs if not tile.descriptors] if swept[2].short else []
    for config, b_inner in itertools.product(short, (False, True)[not full :]):
        a, b = (torch.empty(8, 152, 72, dtype=torch.float16) for _ in range(2))
        with _noting() as found:
            product(a, b.mT if b_inner else b.reshape(8, 72, 152), a.new_empty(8, 152, 152), config=config)
        yield f"{config} {b_inner}", found[0], ("sm_90",)
    # Rows at 16 bytes and within words, in both orders of either operand, by one part of K and by two.
    laid = list(itertools.product((128, 129), (False, True), (False, True), (1, 2)))
    for i, config in enumerate([tile for tile in swept[4].configs if tile.hopper_fp32]):
        for size, a_columns, b_columns, splits in laid if full else (laid[i % 8], laid[15 - i % 8]):
            a, b = torch.empty(1, size, size), torch.empty(1, size, size)
            with _noting() as found:
                a, b = a.mT if a_columns else a, b.mT if b_columns else b
                product(a, b, torch.empty(1, size, size), config=config._replace(splits=splits), addend=a)
            yield f"{config} of {size} {a_columns} {b_columns} in {splits}", found[0], ("sm_90",)
    few = [(kind, each) for kind in ("nvidia", "amd") for each in tables.FEW_ROWS[kind][True][2]]
    for (kind, config), splits in itertools.product(few, (1, 2)[: 1 + full]):
        a, b = torch.empty(2, 5, 1021, dtype=torch.bfloat16), torch.empty(2, 1021, 1021, dtype=torch.bfloat16).mT
        with _noting() as found:
            product(a, b, a.new_empty(2, 5, 1021), config=config._replace(splits=splits))
        yield f"{config} of columns apart in {splits}", found[0], _KINDS[kind] if full else _KINDS[kind][:1]
    for dtype, K in itertools.product(_SIZED.values(), (3, gemm_select.OUTER)[: 1 + full]):
        a, b = torch.empty(2, 100, K, dtype=dtype), torch.empty(2, K, 100, dtype=dtype)
        with _noting() as found:
            product(a, b, a.new_empty(2, 100, 100, dtype=_RESULTS.get(dtype, dtype)))
        every = tuple(itertools.chain(*_KINDS.values()))
        yield f"{dtype} of outer products of {K}", found[0], every if full else every[::4]
    # A single row or column, and an addend of each kind, of products without terms.
    for dtype, (M, N) in itertools.product(_SIZED.values(), ((100, 100), (1, 100), (100, 1))[: 1 + 2 * full]):
        a, b = torch.empty(2, M, 0, dtype=dtype), torch.empty(2, 0, N, dtype=dtype)
        out = a.new_empty(2, M, N, dtype=_RESULTS.get(dtype, dtype))
        for addend in (None, out, out[:1, :1]):
            with _noting() as found:
                product(a, b, out, addend=addend, beta=0.5)
            every = tuple(itertools.chain(*_KINDS.values()))
            label = f"{dtype} of a product of {M} by 0 by {N}, added {addend is not None and tuple(addend.shape)}"
            yield label, found[0], every if full else every[::4]


def copies(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """The copies of operands that products are sooner there with, and what has only the first as its operand."""
    laid = {"rows": torch.empty, "columns": lambda batches, M, N, dtype: torch.empty(batches, N, M, dtype=dtype).mT}
    for (layout, make), dtype in itertools.product(laid.items(), (torch.bfloat16, torch.float32)):
        a, b = make(2, 77, 301, dtype=dtype), torch.empty(2, 301, 64, dtype=dtype)
        with _noting() as found, mock.patch.object(cost_pointers, "copying", lambda sizes, _: -1e9 * len(sizes)):
            product(a, b, torch.empty(2, 77, 64, dtype=dtype))
        for specialization in found[:2]:
            yield f"{dtype} in {layout}", specialization, ("sm_90", "sm_100") if full else ("sm_90",)


def added(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """Products and a matrix of odd rows by tiles that come through descriptors, as calls fit them to shared memory."""
    swept = [config._replace(GROUP_M=1) for config in cost.load(cost.FOLDER / "sm_90.json")[2].configs]
    configs = [config for size, config in tables.every("nvidia") if size == 2 and not config.warp_specialize]
    configs += dict.fromkeys(config for config in swept if config.warp_specialize)
    for i, config in enumerate([config for config in configs if config.descriptors]):
        targets = ("sm_90",) if config.warp_specialize else ("sm_90", "sm_100")
        # Specialised warps copy tiles of what can have a descriptor, and load others.
        for columns in (505, 512) if full else ((505, 512)[i % 2],):
            # So many rows that a program has several tiles, and writes them by way of shared memory.
            a, b, out = [torch.empty(1, 2**15, 512, dtype=torch.bfloat16)[..., :n] for n in (512, columns, columns)]
            addend = torch.empty(2**15, columns, dtype=torch.bfloat16)
            with _noting() as found, mock.patch.object(gemm_select, "choose", lambda *_, config=config: config):
                product(a, b[:, :512], out, addend=addend)
            yield f"{config} as a call fits it to {_ROOM}", found[-1], targets if full else ("sm_90",)


def long_rows(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """Row operators on rows for which no sample is long enough.

    Cooperative ones, those of unrolled loops, those that begin in the middle of words, and columns of halves that come
    one by one.
    """
    x, weight = torch.empty(2, 2**17), torch.empty(2**17)
    arguments: list[tuple[str, tuple[Any, ...]]] = [
        ("_softmax", (x, 1, False)),
        ("_log_softmax", (x, 1, False)),
        ("_softmax_backward_data", (x, x, 1, x.dtype)),
        ("_log_softmax_backward_data", (x, x, 1, x.dtype)),
        ("native_layer_norm", (x, weight.shape, weight, weight, 1e-5)),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        x, weight = torch.empty(4, 2**16, dtype=dtype), torch.empty(2**16, dtype=dtype)
        arguments.append(("native_layer_norm", (x, weight.shape, weight, weight, 1e-5)))
    for dtype, (rows, length) in itertools.product((torch.float32, torch.bfloat16), ((64, 20_003), (2, 2**17 + 1))):
        x = torch.empty(rows, length, dtype=dtype)
        arguments += [("_log_softmax", (x, 1, False)), ("_softmax_backward_data", (x, x, 1, x.dtype))]
    for rows in (4096, 4097):
        x = torch.empty(rows, 129, dtype=torch.bfloat16)
        arguments += [("sum.dim_IntList", (x, [0])), ("argmax", (x, 0)), ("count_nonzero.dim_IntList", (x, [0]))]
    for name, given in arguments:
        record = dataclasses.replace(devices.current, programs=1)
        with _noting() as found, mock.patch.object(devices, "current", record):
            registry.overloads()[name](*given)
        for specialization in found:
            yield f"{name} of long rows", specialization, ("sm_80", "sm_90", "sm_100") if full else ("sm_90",)


def fused_rows(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """Fused operators, on rows of which a program takes several, on two that it holds, and on those it has parts of."""
    for dtype, width in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64) if full else (torch.bfloat16,),
        (64, 1000, 4096, 14_336, 2**16),
    ):
        x, rows = torch.empty(4, width, dtype=dtype), torch.empty(4, dtype=dtypes.opmath(dtype))
        weight, half = x[0].clone(), x[:, : width // 2].contiguous()
        heads, pairs = x.view(4, -1, 8), rows.new_empty(4, 4)
        arguments: list[tuple[str, tuple[Any, ...]]] = [
            ("skip_layer_norm", (x, x, weight, weight, 1e-5)),
            ("skip_layer_norm_backward", (x, x, x, rows, rows, weight, weight, True, True)),
            ("skip_rms_norm", (x, x, weight, 1e-6)),
            ("skip_rms_norm_backward", (x, None, x, rows, weight, True)),
            ("rotary_embedding", (heads, heads, pairs, pairs, False, False)),
            ("rotary_embedding_", (heads, None, pairs[:, :3], pairs[:, :3], True)),
            ("silu_and_mul", (x, x)),
            ("silu_and_mul_backward", (half, x)),
            *(("gelu_and_mul", (x, None, approximate)) for approximate in ("none", "tanh")),
            *(("gelu_and_mul_backward", (half, x, None, approximate)) for approximate in ("none", "tanh")),
        ]
        for name, given in arguments:
            with _noting() as found:
                library.registered()[f"tritonite::{name}"](*given)
            for specialization in found:
                # Halves that stay packed are NVIDIA's assembly.
                names = [target for target in TARGETS if target.startswith("sm") or width < 2**13]
                yield f"{name} {dtype} of {width}", specialization, tuple(names if full else names[1:2])


def rings(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """Gradients of norms whose rows stream through a ring, where a few rows are enough for all multiprocessors."""
    for dtype, width in ((torch.float32, 14_336), (torch.float32, 12_012), (torch.bfloat16, 28_664)):
        x, rows = torch.empty(4, width, dtype=dtype), torch.empty(4)
        name: str = "skip_rms_norm_backward"
        given: tuple[Any, ...] = (x, None, x, rows, x[0], True)
        if dtype is torch.float32:
            name, given = "skip_layer_norm_backward", (x, x, x, rows, rows, x[0], x[0], True, True)
        record = dataclasses.replace(devices.current, programs=8)
        with _noting() as found, mock.patch.object(devices, "current", record):
            library.registered()[f"tritonite::{name}"](*given)
        assert found[0].kernel is norm_backward_by_ring.jit
        yield f"{name} {dtype} of {width} by a ring", found[0], ("sm_80", "sm_90", "sm_100") if full else ("sm_90",)


def in_order(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """What is folded and scanned in one order, along both dimensions, of rows of one block and of several."""
    x = torch.empty(96, 5000, dtype=torch.bfloat16)
    short, column, weight = x[:, :64].contiguous(), x.new_empty(5000, 96), x[0].clone()
    upright = x.new_empty(70, 3, dtype=torch.float16).t()
    rows = torch.empty(96)
    arguments: list[tuple[str, tuple[Any, ...]]] = []
    for each, dim in ((x, 1), (short, 1), (column, 0)):
        arguments += [("sum.dim_IntList", (each, [dim])), ("_softmax", (each, dim, False)), ("cumsum", (each, dim))]
    arguments += [("_softmax", (upright, 1, False)), ("logcumsumexp", (column, 0))]
    arguments += [("max.dim", (x, 1)), ("logcumsumexp", (short, 1)), ("sum", (x.expand(40, -1, -1),))]
    arguments += [("native_layer_norm", (short, [64], weight[:64], weight[:64], 1e-5))]
    arguments += [("tritonite::skip_rms_norm", (x, x, weight, 1e-6))]
    arguments += [("tritonite::skip_rms_norm_backward", (x, None, x, rows, weight, True))]
    for name, given in arguments:
        with _noting() as found, contract.under(contract.settings_of(invariant=True)):
            {**registry.overloads(), **library.registered()}[name](*given)
        for specialization in found:
            yield f"{name} in one order", specialization, tuple(TARGETS) if full else ("sm_90",)


def decoding(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """Attention of few queries over long caches, in rows and in pages, by one split and by several."""
    ops, halves = registry.overloads(), (torch.float16, torch.bfloat16)
    calls: list[tuple[str, registry.Op, tuple[Any, ...]]] = []
    sizes = (80, 256) if full else (128,)
    for dtype, size, queries in itertools.product((*halves, torch.float32), sizes, (1, 4, 16)):
        # Without memory behind most of it: nothing is launched.
        query, key = torch.empty(1, 8, queries, size, dtype=dtype), torch.empty(1, 2, 8192, size, dtype=dtype)
        cpu = ops["_scaled_dot_product_flash_attention_for_cpu"]
        calls += [(f"{dtype} of {queries}x{size}", cpu, (query, key, key, 0.0, queries == 4))]
        calls += [(f"{dtype} of {queries}x{size} biased", cpu, (query[:, :2], key, key, 0.0, False, key[0, 0, :1, :1]))]
    flash = ops["_flash_attention_forward"]
    for dtype, size, queries in itertools.product(halves[1 - full :], sizes, (1, 16)):
        rows, keys = torch.empty(8 * queries, 8, size, dtype=dtype), torch.empty(8192, 2, size, dtype=dtype)
        starts = torch.empty(9, dtype=torch.int32)
        given = (rows, keys, keys, starts, starts, queries, 8192, 0.0, queries > 1, False)
        calls += [(f"{dtype} of {queries}x{size} packed", flash, given)]
    paged, write = [library.registered()[f"tritonite::{name}"] for name in ("paged_attention", "reshape_and_cache")]
    of_scales = (torch.ones(2), torch.ones(2))
    for dtype, size, page, tokens in itertools.product((*halves, torch.float32), sizes, (16, 48, 256), (8, 4096)):
        query, slots = torch.empty(tokens, 8, size, dtype=dtype), torch.empty(tokens, dtype=torch.int64)
        table, lengths = torch.empty(8, 64, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
        starts = None if tokens == 8 else torch.empty(9, dtype=torch.int32)
        for cached in (dtype,) if dtype is torch.float32 else (dtype, torch.float8_e4m3fn):
            cache = torch.empty(64, page, 2, size, dtype=cached)
            scales = (None, None) if cached is dtype else of_scales
            given = (query, cache, cache, table, lengths, starts, *scales, 0.1)
            label = f"{dtype} of {tokens}x{size} in pages of {page} {cached}"
            calls += [(label, paged, (*given, 30.0, 1000) if page == 48 else given)]
            calls += [(label, write, (query[:, :2], query[:, :2], cache, cache, slots, *scales))]
    launches = [(kind, names, False) for kind, names in _KINDS.items()] + [("nvidia", ("sm_90", "sm_100"), True)]
    for (label, op, given), (kind, names, dependent) in itertools.product(calls, launches):
        # Half dtypes are alike to compilers: without `full` bfloat16 alone waits for the launch before its own.
        if not full and (kind != "nvidia" or dependent != ("bfloat16" in label)):
            continue
        # Older devices, and AMD's, do not have float8_e4m3fn.
        wanted = [name for name in names if "float8" not in label or name in ("sm_90", "sm_100")]
        record = dataclasses.replace(devices.current, kind=kind)
        launching = mock.patch.object(devices, "has_dependent_launch", lambda device, dependent=dependent: dependent)
        with _noting() as found, mock.patch.object(devices, "current", record), launching:
            op(*given)
        for specialization in found:
            yield f"{op.overload} {label}", specialization, tuple(wanted if full else wanted[:1])


def warp_specialized_attention(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """Both passes that Hopper's GPUs have, by every tile of their tables, of heads and values of several sizes.

    With a bias, too: of all scores, and of keys alone.
    """
    halves, sizes = (torch.float16, torch.bfloat16), ((64, 64), (80, 128), (128, 128), (128, 256), (256, 256))
    # So many batches that multiprocessors have several tiles, of few keys and of more.
    lengths = ((1, 300), (100, 200), (100, 300), (100, 600))
    for dtype, (head, value), causal, (batch, keys) in itertools.product(halves, sizes, (False, True), lengths):
        if not full and (dtype, head, causal) != (torch.float16, value, True):
            continue
        query, key = torch.empty(batch, 4, 200, head, dtype=dtype), torch.empty(batch, 2, keys, head, dtype=dtype)
        out, logsumexp = torch.empty(batch, 4, 200, value, dtype=dtype), torch.empty(batch, 4, 200)
        problem = Problem(query, key, key.new_empty(batch, 2, keys, value), None, None, causal, 100, "ieee")
        bias = key.new_empty(batch, 1, 200, 608)[..., :keys]
        for kind, given in (("", None), (" with a bias", bias), (" with a bias of keys", bias[:, :, :1])):
            if given is not None:
                # Without `full` one size has a bias in the loops over several tiles.
                if causal if full else batch > 1 and (head, keys) != (128, 600):
                    continue
                problem = problem._replace(bias=given.expand(batch, 4, 200, keys))
            with _noting() as found:
                hopper_forward.attention(problem, out, logsumexp if causal else None)
                if batch == 1 and (given is None or max(head, value) in WARP_SPECIALIZED_BACKWARD_WITH_BIAS):
                    for apart in (False, True):
                        with mock.patch.object(hopper_backward, "_splits_heads", lambda *_, apart=apart: apart):
                            hopper_backward.attention_backward(problem, out, out, logsumexp, problem[:3])
            for specialization in found:
                name = specialization.kernel.__name__
                label = f"{name}{kind} {dtype} of {batch}x{keys}x{head} and {value}{' causal' if causal else ''}"
                yield label, specialization, ("sm_90",)


def dropped(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """Attention with dropout, by both mappings of elements to random numbers, of rows that begin in words of a draw."""
    sizes, state = (64, 128, 256) if full else (64,), torch.empty(2, dtype=torch.int64)
    for dtype, size, keys in itertools.product((torch.bfloat16, torch.float32)[: 1 + full], sizes, (300, 301)):
        query, key = torch.empty(1, 4, 200, size, dtype=dtype), torch.empty(1, 4, keys, size, dtype=dtype)
        for lanes in (True, False):
            if (lanes and (dtype is torch.float32 or keys == 301)) or not (full or lanes or keys == 301):
                continue
            problem = Problem(query, key, key, None, None, not lanes, 0, "ieee")
            problem = problem._replace(dropout=Dropout(0.5, lanes, 4, state if lanes else None))
            for kind, names in _KINDS.items() if full else [("nvidia", ("sm_90",))]:
                record = dataclasses.replace(devices.current, kind=kind)
                with _noting() as found, mock.patch.object(devices, "current", record):
                    attention(problem, query, query.new_empty(query.shape[:3]))
                    attention_backward(problem, query, query, query.new_empty(query.shape[:3]), (query, key, key))
                for specialization in found:
                    label = f"{'lanes' if lanes else 'elements'} of {dtype} {size} over {keys}"
                    yield label, specialization, names


def in_parts(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """Both passes of attention in float32 that Hopper's GPUs have, of packed sequences and beside biases."""
    heads, starts = devices.multiprocessors(torch.device("cpu")), torch.zeros(3, dtype=torch.int32)
    for i, (head, value, causal) in enumerate(((64, 64, False), (24, 64, True), (64, 64, True), (48, 20, False))):
        # So many that a third program for keys is in a multiprocessor.
        query, key = torch.empty(2, heads + 1, 60, head), torch.empty(2, heads + 1, 60, head)
        out, logsumexp = torch.empty(2, heads + 1, 60, value), torch.empty(2, heads + 1, 60)
        scores = torch.empty(2, heads + 1, 60, 60)
        kinds: list[tuple[str, torch.Tensor | None]] = [("", None), (" beside a bias", scores), (" packed", None)]
        kinds += [(" of keys", scores[:, :, :1]), (" mask", scores > 0)]
        for kind, bias in kinds if full else (kinds[:3], kinds[3:], (), ())[i]:
            given = None if bias is None else bias.expand(scores.shape)
            problem = Problem(query, key, key.new_empty(2, heads + 1, 60, value), given, None, causal, 0, "ieee")
            if kind == " packed":
                one = {"query": query[:1], "key": key[:1], "value": problem.value[:1]}
                problem = problem._replace(**one, packed=Packed(starts, starts, 60, 60, causal, True))
            written, sums, grads = out[: problem.query.shape[0]], logsumexp[: problem.query.shape[0]], problem[:3]
            with _noting() as found:
                float32_forward.attention(problem, written, sums if causal else None)
                for of_bias in (None, scores) if bias is scores else (None,):
                    float32_backward.attention_backward(problem, written, written, sums, grads, of_bias)
            for specialization in found:
                label = f"{specialization.kernel.__name__}{kind} of {head} and {value}{' causal' if causal else ''}"
                yield label, specialization, ("sm_90",)


def sorted_rows(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """Rows that are sorted, and selected of, by several programs, and the longest that one sorts by itself."""
    met: set[Any] = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)[: None if full else 1]:
        long, short = torch.ones(3, 9000, dtype=dtype), torch.ones(3, 2048, dtype=dtype)
        arguments: list[tuple[str, tuple[Any, ...]]] = [
            ("sort", (long,)),
            ("sort", (long.t(), 0, True)),
            ("sort", (short,)),
            *[("topk", (row, k)) for row in (short, long) for k in (1, 50, 900)],
            ("topk", (torch.ones(3, 4096, dtype=dtype), 2048)),
            ("topk", (torch.ones(1, 200000, dtype=dtype), 2048)),
            ("topk", (long, 2100, -1, False)),
            ("kthvalue", (short, 7)),
            ("median.dim", (torch.ones(3, 4096, dtype=dtype), 1)),
            ("kthvalue", (long, 7)),
            ("nanmedian.dim", (long, 1)),
            ("mode", (long,)),
            ("isin.Tensor_Tensor", (long, long)),
            ("_unique2", (long, True, True, True)),
        ]
        for name, given in arguments:
            with _noting() as found:
                registry.overloads()[name](*given)
            for specialization in found:
                # AMD's programs do not wait for each other.
                chosen = ("sm_90", "sm_80", "sm_100")[: 3 if full else 1 if specialization.kernel in met else 2]
                met.add(specialization.kernel)
                yield f"{name} {dtype} of long rows", specialization, chosen


def counted_in_shared_memory(full: bool) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """What programs of NVIDIA's devices count, search and copy in their own room in shared memory."""
    n = 2**22
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8)[: None if full else 1]:
        x = torch.empty(n, dtype=dtype)
        arguments: list[tuple[str, tuple[Any, ...]]] = [
            ("median", (x,)),
            *[("topk", (x, k)) for k in (2048, 5000)],
            *[("searchsorted.Tensor", (x[:bounds], x)) for bounds in (1, 2**20)],
            ("searchsorted.Tensor", (x[:100], x.view(2, -1).t(), False, True)),
            ("index_select", (x.view(-1, 1024), 1, torch.zeros(1000, dtype=torch.int32))),
            ("index_select", (x.view(-1, 2**16 // x.itemsize), 1, torch.zeros(8000, dtype=torch.int64))),
        ]
        if dtype in dtypes.FULL_FLOATS:
            wanted = ((False, False), (True, False), (True, True))
            arguments += [("_unique2", (torch.empty(n, dtype=torch.int32), True, *asked)) for asked in wanted]
            arguments += [("histc", (x.view(-1)[:1000], 100)), ("histc", (x, 100, 0, 1))]
            arguments += [("bincount", (torch.empty(n, dtype=torch.int64), x))]
        elif not dtype.is_floating_point:
            arguments += [("bincount", (x,))]
        if dtype not in dtypes.FULL_FLOATS:
            arguments += [("_unique2", (x, True, True)), ("_unique2", (x, True, True, True))]
        for name, given in arguments:
            record = dataclasses.replace(devices.current, ptx=True)
            with _noting() as found, mock.patch.object(devices, "current", record):
                registry.overloads()[name](*given)
            for specialization in found:
                yield (
                    f"{name} {dtype} in shared memory",
                    specialization,
                    ("sm_80", "sm_90", "sm_100")[: None if full else 2],
                )


_GROUPS = {
    "attention": warp_specialized_attention,
    "shared": counted_in_shared_memory,
    "decoding": decoding,
    "dropped": dropped,
    "parts": in_parts,
    "sorted": sorted_rows,
    "tiles": tiles,
    "copies": copies,
    "added": added,
    "rows": long_rows,
    "fused": fused_rows,
    "rings": rings,
    "in_order": in_order,
}


def matrix(
    names: list[str], full: bool, part: tuple[int, int]
) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """Yield a label, a specialization and its targets for everything that the compile matrix has of the names."""
    registry.overloads()
    index, parts = part
    chosen = [d for d in registry.declarations if not names or not set(names).isdisjoint(d.packets)]
    met: set[Any] = set()
    # Neighbours, which have kernels in common.
    for declaration in chosen[len(chosen) * index // parts : len(chosen) * (index + 1) // parts]:
        for label, specialization in _variants(declaration, full):
            alike = _alike(label)
            everywhere = bool(names) or (specialization.kernel, alike) not in met
            targets = _targets(declaration, label, specialization, everywhere, full)
            if len(targets) > (1 if alike else len(_KINDS)):
                met.add((specialization.kernel, alike))
            yield label, specialization, targets
    for name, work in _GROUPS.items():
        if not names or name in names:
            yield from itertools.islice(work(full), index, None, parts)


def _quick(names: list[str], part: tuple[int, int]) -> Iterator[tuple[str, Specialization, tuple[str, ...]]]:
    """Kernels of the named declarations once each, as they are met first, for a device that has all instructions.

    Of all declarations those of a kernel that none before has had, and every fifth of the others.
    """
    met: set[Any] = set()
    kernels: set[Any] = set()
    chosen = [d for d in registry.declarations if not names or not set(names).isdisjoint(d.packets)]
    for declaration in chosen[part[0] :: part[1]]:
        for label, specialization in _variants(declaration, False):
            kernel = declaration, specialization.kernel
            if kernel in met:
                continue
            if names or specialization.kernel not in kernels or len(met) % 5 == 0:
                kernels.add(specialization.kernel)
                yield label, specialization, ("sm_90",)
            met.add(kernel)


def _alike(label: str) -> str | None:
    """What of a launch is alike to all targets of a compiler: loops, and sizes of 1."""
    return next((each for each in ("tiny", "zero_dim") if each in label), None)


def _targets(
    declaration: registry.Declaration, label: str, specialization: Specialization, everywhere: bool, full: bool
) -> tuple[str, ...]:
    """Those that a kernel is for; what is alike to a compiler's targets is for one, and so are products.

    Unless it is tried `everywhere`, one of NVIDIA's and one of AMD's, by turns of operators.
    """
    names = tuple(TARGETS)
    if specialization.kernel is multiply_persistent.jit:
        names = ("sm_90", "sm_100")
    elif set(declaration.accepts) <= set(dtypes.FLOAT8_NAMES):
        # Before sm_89 there are no float8 products.
        names = names[1:]
    if _has_assembly(label, specialization):
        # Of which that for bfloat16 is sm_90's.
        names = ("sm_80", "sm_90", "sm_100") if specialization.kernel in _IN_ASSEMBLY else ("sm_90", "sm_100")
    alike = _alike(label) is not None or declaration.family == "matmul"
    if full or (everywhere and not alike):
        return names
    kinds = [[name for name in names if name in kind] for kind in _KINDS.values()]
    turn = zlib.crc32(f"{declaration.packets[0]} {specialization.kernel.__name__}".encode())
    if not alike:
        return tuple([kind[turn % len(kind)] for kind in kinds if kind])
    # AMD's compiler tries tiny blocks, and sizes of 1, where a kernel first has them.
    chosen = ("sm_90", "gfx942") if everywhere or declaration.family == "matmul" else ("sm_90",)
    return tuple([name for name in names if name in chosen])


def failures(
    names: list[str], full: bool = False, part: tuple[int, int] = (0, 1), quick: bool = False
) -> Iterator[str]:
    """A line for every kernel of the named declarations (all, if none) that does not compile for a target.

    "attention" stands for Hopper's forward pass, "shared" for what has room in shared memory, "decoding" for attention
    of few queries over many keys, "dropped" for attention with dropout, "parts" for attention in float32 on Hopper,
    "sorted" for long rows in order, "tiles" for products by all tables of tiles, "added" for those that a matrix is
    added to, "rows" for long rows, "fused" for operators outside ATen, "rings" for their longest rows, "in_order" for
    rows whose bits are their own. Unless `full`, what is alike to all targets of a compiler is compiled
    for one of them. Where it is met first in a part, or named, a kernel is compiled for all targets, and elsewhere for
    one of each compiler's, by turns. If `quick`, a sample of them is (`_quick`).
    """
    for label, specialization, chosen in _quick(names, part) if quick else matrix(names, full, part):
        # On a device Triton refuses them; neither its interpreter nor its compiler does.
        if unknown := specialization.options.keys() - _OPTIONS:
            yield f"{label}: neither parameters nor options: {', '.join(sorted(unknown))}"
        for name in chosen:
            try:
                compiled = specialization.compile(TARGETS[name])
            except Exception as error:  # noqa: BLE001 - whatever the compiler raises is what to report
                yield f"{label} {name}: {error!r} {error.__cause__!r}"
                continue
            if label.endswith(_ROOM) and compiled.metadata.shared > devices.current.shared_memory + 1024:
                yield f"{label} {name}: {compiled.metadata.shared} bytes of shared memory"
            if TARGETS[name].backend == "cuda" and not _waits_as_launched(compiled):
                yield f"{label} {name}: it may run before what it waits for has ended"


def _waits_as_launched(compiled: CompiledKernel) -> bool:
    """Whether a kernel that a device may prepare early waits before it touches memory, and no other waits.

    What combines splits may read what was there before the splits.
    """
    text = compiled.asm["ptx"]
    wait, access = text.find("griddepcontrol.wait"), _ACCESS.search(text)
    early = access is not None and access.start() < wait and compiled.metadata.name != "combine_splits"
    return (wait >= 0) == compiled.metadata.launch_pdl and not early


def main() -> int:
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
    known = {*_GROUPS, *(packet for declaration in registry.declarations for packet in declaration.packets)}
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
