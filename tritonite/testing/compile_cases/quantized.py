"""Products of quantised matrices, and conversions to and from their formats."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tritonite import devices, registry
from tritonite.engine.gemm import select
from tritonite.engine.quantized.table import QUANTIZED
from tritonite.install import library
from tritonite.testing.compile_cases.cases import KINDS, TARGETS, Case, compile_cases, launches

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Targets that multiply float8, and targets where it is decoded in registers.
_WITH_FLOAT8 = {"nvidia": ("sm_90", "sm_100"), "amd": ()}
_WITHOUT_FLOAT8 = {"nvidia": ("sm_80",), "amd": ("gfx942", "gfx1100")}


@compile_cases("quantized")
def block_scaled_products(full: bool) -> Iterator[Case]:
    """float8 products by every tile, with scales of blocks: whole and split K, in float8 and decoded to float16."""
    launch = library.registered()["tritonite::linear_fp8_blocks"]
    for kind, native in itertools.product(KINDS, (True, False)):
        table, names = QUANTIZED[kind], (_WITH_FLOAT8 if native else _WITHOUT_FLOAT8)[kind]
        for i, config in enumerate((*table.float8_few, *table.float8)):
            for K, splits, rows in (
                itertools.product((512, 500), (1, 2), (128, 40)) if full else ((512, 1 + i % 2, 128),)
            ):
                x, weight = torch.empty(256, K, dtype=_E4M3), torch.empty(512, K, dtype=_E4M3)
                x_scale, weight_scale = torch.empty(256, 4), torch.empty(-(-512 // rows), 4)
                chosen = mock.patch.object(select, "of_tables", lambda *_, c=config, s=splits: c._replace(splits=s))
                with chosen, mock.patch.object(devices, "has_float8", lambda _, native=native: native):
                    found = launches(launch, (x, weight, x_scale, weight_scale, None, torch.bfloat16, (rows, 128)))
                targets = names if full else names[:1]
                yield Case(f"{config} of {K} in {splits}, scales of {rows}", found[0], targets)


@compile_cases("quantized")
def row_scaled_products(full: bool) -> Iterator[Case]:
    """float8 and int8 products of one row, few and many, with scales of rows: both float8 formats, and decoded ones."""
    for rows, K in itertools.product((1, 8, 512), (512, 500) if full else (512,)):
        scales = torch.empty(rows, 1), torch.empty(512)
        bias = torch.empty(512)
        for dtype, other, native in (
            *((torch.int8, torch.int8, True), (_E4M3, _E4M3, True), (_E5M2, _E4M3, True)),
            *((_E4M3, _E4M3, False), (_E5M2, _E5M2, False)),
        ):
            x, weight = torch.empty(rows, K, dtype=dtype), torch.empty(512, K, dtype=other)
            name = "linear_int8" if dtype is torch.int8 else "linear_fp8"
            with mock.patch.object(devices, "has_float8", lambda _, native=native: native):
                found = launches(library.registered()[f"tritonite::{name}"], (x, weight, *scales, bias, torch.bfloat16))
            for specialization in found:
                targets = ("sm_90", "sm_100") if native else ("sm_80", "gfx942")
                yield Case(f"{name} of {dtype}, {rows} rows", specialization, targets if full else targets[:1])


@compile_cases("quantized")
def scaled_products_by_recipe(full: bool) -> Iterator[Case]:
    """float8 products by recipes of scales: of both formats, of blocks, and in groups with scales of rows."""
    overloads, names = registry.overloads(), _WITH_FLOAT8["nvidia"]
    x, weight, weights = [torch.empty(shape, dtype=_E4M3) for shape in ((256, 512), (512, 512), (4, 512, 512))]
    rows, columns, ends = torch.empty(256), torch.empty(4, 512), torch.empty(4, dtype=torch.int32)
    one, blocks = torch.empty(1), torch.empty(4, 512).t()
    grouped, plain = ("_scaled_grouped_mm", (None, None, None)), ("_scaled_mm", (None, None, torch.bfloat16))
    given: dict[str, tuple[tuple[str, tuple[Any, ...]], tuple[Any, ...]]] = {
        "rows of groups": (grouped, (x, weights.mT, rows, columns, ends)),
        "columns of groups": (grouped, (weights, x.mT, columns, rows, ends)),
        "inner groups": (grouped, (x, weight.mT, torch.empty(1024), columns.view(-1), ends)),
        "two formats": (plain, (x.to(_E5M2), weight.mT, one, one)),
    }
    if "_scaled_mm_v2" in overloads:
        by_recipe: tuple[str, tuple[Any, ...]] = ("_scaled_mm_v2", (None, torch.bfloat16, []))
        a_scale = torch.empty(4, 256).t()
        given["blocks of 1x128"] = (by_recipe, (x, weight.mT, [a_scale], [4], [], [blocks], [4], []))
    for label, ((name, options), arguments) in given.items():
        for fast in (False, True) if full else (False,):
            for specialization in launches(overloads[name], (*arguments, *options, fast)):
                yield Case(f"{label}, fast sums {fast}", specialization, names if full else names[:1])


@compile_cases("quantized")
def int4_products(full: bool) -> Iterator[Case]:
    """Products of packed weights by every tile: with and without zeros, whole and split K."""
    launch = library.registered()["tritonite::linear_int4"]
    for kind, names in KINDS.items():
        table = QUANTIZED[kind]
        for i, config in enumerate((*table.int4_few, *table.int4)):
            every = itertools.product((torch.float16, torch.bfloat16), (128, 64), (True, False), (512, 480))
            for dtype, group, zeros, K in every if full else list(every)[i % 8 * 2 : i % 8 * 2 + 9 : 8]:
                x, weight = torch.empty(256, K, dtype=dtype), torch.empty(512, K // 2, dtype=torch.uint8)
                scales = torch.empty(512, -(-K // group), dtype=dtype)
                with mock.patch.object(select, "of_tables", lambda *_, c=config, i=i: c._replace(splits=1 + i % 2)):
                    found = launches(launch, (x, weight, scales, scales if zeros else None, None, group))
                label = f"{config} {dtype} of {K}, groups of {group}, zeros {zeros}"
                yield Case(label, found[0], names if full else names[:: len(names) - 1])


@compile_cases("quantized")
def int4_words(full: bool) -> Iterator[Case]:
    """Products of weights packed for tensor cores by every tile, whole and split K, and the packing."""
    launch, convert = [registry.overloads()[n] for n in ("_weight_int4pack_mm", "_convert_weight_to_int4pack")]
    for kind, names in KINDS.items():
        table = QUANTIZED[kind]
        for i, config in enumerate((*table.int4_few, *table.int4)):
            for group, words in itertools.product((32, 128), (1, 2, 4)) if full else ((128, 1 << i % 3), (32, 4)):
                weight = torch.empty(64, 512 // (32 * words), 32, words, dtype=torch.int32)
                pairs = torch.empty(512 // group, 512, 2, dtype=torch.bfloat16)
                with mock.patch.object(select, "of_tables", lambda *_, c=config, i=i: c._replace(splits=1 + i % 2)):
                    found = launches(launch, (torch.empty(256, 512, dtype=torch.bfloat16), weight, group, pairs))
                yield Case(f"{config} of {words} words, groups of {group}", found[0], names if full else names[:1])
    for specialization in launches(convert, (torch.empty(64, 256, dtype=torch.uint8), 8)):
        yield Case("words of a weight", specialization, tuple(TARGETS) if full else ("sm_90",))


@compile_cases("quantized")
def int8_weights(full: bool) -> Iterator[Case]:
    """Products of floats and int8 weights by every tile of 4-bit weights, whole and split K."""
    launch = registry.overloads()["_weight_int8pack_mm"]
    for kind, names in KINDS.items():
        table = QUANTIZED[kind]
        for i, config in enumerate((*table.int4_few, *table.int4)):
            every = itertools.product((torch.float16, torch.bfloat16, torch.float32), (512, 480))
            for dtype, K in every if full else list(every)[i % 4 * 2 : i % 4 * 2 + 1]:
                arguments = torch.empty(256, K, dtype=dtype), torch.empty(512, K, dtype=torch.int8), torch.empty(512)
                with mock.patch.object(select, "of_tables", lambda *_, c=config, i=i: c._replace(splits=1 + i % 2)):
                    found = launches(launch, arguments)
                yield Case(f"{config} {dtype} of {K}, int8", found[0], names if full else names[:: len(names) - 1])


@compile_cases("quantized")
def conversions(full: bool) -> Iterator[Case]:
    """Quantisation, packing and dequantisation, and the float8 layer forward and backward."""
    for dtype in (torch.float16, torch.bfloat16)[: 1 + full]:
        for symmetric in (False, True):
            weight, scales = torch.empty(512, 512, dtype=dtype), torch.empty(512, 4, dtype=dtype)
            calls: tuple[tuple[str, tuple[Any, ...]], ...] = (
                ("pack_int4", (weight, 128, symmetric)),
                ("dequantize_int4", (weight[:, :256].byte(), scales, None if symmetric else scales, 128)),
            )
            for name, arguments in calls:
                for specialization in launches(library.registered()[f"tritonite::{name}"], arguments):
                    yield Case(f"{name} {dtype}", specialization, tuple(TARGETS) if full else ("sm_80", "gfx942"))


@compile_cases("quantized")
def float8_layers(full: bool) -> Iterator[Case]:
    """The float8 layer forward and backward, of few rows and of many."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for dtype, (M, N, K) in itertools.product(
        dtypes if full else dtypes[1:], ((1, 40, 70), (6, 20, 40), (256, 384, 512))
    ):
        x, weight, grad = [torch.empty(shape, dtype=dtype) for shape in ((M, K), (N, K), (M, N))]
        saved = [torch.empty_strided((K, size), (-(-size // 16) * 16, 1), dtype=_E4M3) for size in (M, N)]
        one = torch.empty(1)
        calls: tuple[tuple[str, tuple[Any, ...]], ...] = (
            ("fp8_linear", (x, weight, torch.empty(N))),
            ("fp8_linear", (x.t().contiguous().t(), weight)),
            ("fp8_linear_backward", (grad, *saved, one, one, True, True)),
        )
        for name, arguments in calls:
            with mock.patch.object(devices, "has_float8", lambda _: True):
                found = launches(library.registered()[f"tritonite::{name}"], arguments)
            for specialization in found:
                yield Case(f"{name} of {M} rows, {dtype}", specialization, ("sm_90", "sm_100") if full else ("sm_90",))
