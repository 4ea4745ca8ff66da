"""Products by every tile of the tables, and the copies that come before them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tritonite.devices import models
from tritonite.engine.gemm import cost, cost_pointers, fitted
from tritonite.engine.gemm import select as gemm_select
from tritonite.engine.gemm import table as tables
from tritonite.engine.gemm.kernels.persistent import multiply_persistent
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.symmetric import symmetric_product
from tritonite.engine.gemm.work import Epilogue, Sums
from tritonite.runtime.launch import Specialization
from tritonite.testing.compile_cases.cases import DESCRIPTOR_KERNELS, KINDS, Case, compile_cases, recorded_launches

_DTYPE_OF_SIZE = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_RESULTS = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.bfloat16}
_ALL_TARGETS = tuple(itertools.chain(*KINDS.values()))

DESCRIPTOR_KERNELS.add(multiply_persistent.jit)


def _launches(*arguments: Any, **keywords: Any) -> list[Specialization]:
    with recorded_launches() as found:
        product(*arguments, **keywords)
    return found


@compile_cases("tiles")
def tiles_of_tables(full: bool) -> Iterator[Case]:
    """Products by every entry of the tables of tiles."""
    for kind, names in KINDS.items():
        for size, config in tables.every(kind):
            warp_specialized, descriptors = config.warp_specialize, config.descriptors
            dtype = torch.float8_e4m3fn if warp_specialized and size == 1 else _DTYPE_OF_SIZE[size]
            layouts = ("columns",) if dtype is torch.float8_e4m3fn else ("rows", "columns")
            # The kernel for one tile a program and the one for several differ.
            for batches, layout in itertools.product(
                (1, 256) if descriptors and not warp_specialized else (1,), layouts
            ):
                a, b = torch.empty(batches, config.BLOCK_M, 512, dtype=dtype), torch.empty(1, 512, 512, dtype=dtype)
                out = a.new_empty(a.shape, dtype=_RESULTS.get(dtype, dtype))
                second = (b if layout == "rows" else b.mT).expand(batches, 512, 512)
                found = _launches(a, second, out, sums=Sums(blockwise=dtype is torch.float8_e4m3fn), config=config)
                chosen = names[: 1 if warp_specialized else 2] if descriptors else names
                # NVIDIA's targets differ in which float32 tiles compile.
                every = full or (config.bf16x6 and layout == "rows")
                label = f"{config} {dtype} {layout} of {batches}"
                yield Case(label, found[0], chosen if every else chosen[:1])


@compile_cases("estimated")
def tiles_of_estimated_tables(full: bool) -> Iterator[Case]:
    """16-bit and float32 products by the tiles of devices whose tables are estimated from data sheets."""
    found = {(model.architecture, size, config): None for model, size, config in _estimated()}
    for i, (architecture, size, config) in enumerate(found):
        if full or i % 12 == 0:
            dtype = _DTYPE_OF_SIZE[size]
            a, b = torch.empty(2, 2 * config.BLOCK_M, 512, dtype=dtype), torch.empty(2, 512, 512, dtype=dtype)
            launched = _launches(a, b.mT, a.new_empty(a.shape), config=config)
            yield Case(f"{config} {dtype} of {architecture}", launched[0], (architecture,))


def _estimated() -> Iterator[tuple[models.Model, int, tables.Config]]:
    for model in models.MODELS:
        if models.measured(model).architecture != model.architecture:
            for size, table in fitted.shipped(model.name, model.architecture).tables.items():
                for each in filter(None, (table, table.cached, table.short, table.pointers)):
                    yield from [(model, size, config) for config in each.configs]


@compile_cases("tiles")
def pingpong_tiles(full: bool) -> Iterator[Case]:
    """16-bit products whose consumer warp groups take turns, in both orders of either operand."""
    pingpong = [tile for tile in cost.load(cost.FOLDER / "NVIDIA_H200.json")[2].configs if tile.pingpong]
    for config, (a_columns, b_columns) in itertools.product(pingpong, itertools.product((False, True), repeat=2)):
        if (a_columns or config.transposed) and not full:
            continue
        a, b = torch.empty(1, 512, 512, dtype=torch.float16), torch.empty(1, 512, 512, dtype=torch.float16)
        fitted = config._replace(num_stages=3)
        found = _launches(a.mT if a_columns else a, b.mT if b_columns else b, torch.empty_like(a), config=fitted)
        yield Case(f"{config} {a_columns} {b_columns}", found[0], ("sm_90",))


@compile_cases("tiles")
def tiles_of_short_k(full: bool) -> Iterator[Case]:
    """16-bit products of a K of few blocks."""
    short = cost.load(cost.FOLDER / "NVIDIA_H200.json")[2].short
    configs = [tile for tile in short.configs if not tile.descriptors] if short else []
    for config, b_inner in itertools.product(configs, (False, True)[not full :]):
        a, b = (torch.empty(8, 152, 72, dtype=torch.float16) for _ in range(2))
        second = b.mT if b_inner else b.reshape(8, 72, 152)
        found = _launches(a, second, a.new_empty(8, 152, 152), config=config)
        yield Case(f"{config} {b_inner}", found[0], ("sm_90",))


@compile_cases("tiles")
def bf16x6_tiles(full: bool) -> Iterator[Case]:
    """float32 products of bfloat16 terms: aligned and misaligned rows, both orders of either operand, split K."""
    layouts = list(itertools.product((128, 129), (False, True), (False, True), (1, 2)))
    configs = [tile for tile in cost.load(cost.FOLDER / "NVIDIA_H200.json")[4].configs if tile.hopper_fp32]
    for i, config in enumerate(configs):
        for size, a_columns, b_columns, splits in layouts if full else (layouts[i % 8], layouts[15 - i % 8]):
            a, b = torch.empty(1, size, size), torch.empty(1, size, size)
            a, b = a.mT if a_columns else a, b.mT if b_columns else b
            found = _launches(a, b, torch.empty(1, size, size), Epilogue(a), config=config._replace(splits=splits))
            yield Case(f"{config} of {size} {a_columns} {b_columns} in {splits}", found[0], ("sm_90",))


@compile_cases("tiles")
def few_rows(full: bool) -> Iterator[Case]:
    """16-bit products of few rows, whose second operand has misaligned columns."""
    few = [(kind, each) for kind in ("nvidia", "amd") for each in tables.FEW_ROWS[kind][True][2]]
    for (kind, config), splits in itertools.product(few, (1, 2)[: 1 + full]):
        a, b = torch.empty(2, 5, 1021, dtype=torch.bfloat16), torch.empty(2, 1021, 1021, dtype=torch.bfloat16).mT
        found = _launches(a, b, a.new_empty(2, 5, 1021), config=config._replace(splits=splits))
        label = f"{config} of misaligned columns in {splits}"
        yield Case(label, found[0], KINDS[kind] if full else KINDS[kind][:1])


@compile_cases("tiles")
def outer_products(full: bool) -> Iterator[Case]:
    """Products of a K too short for tensor cores."""
    for dtype, K in itertools.product(_DTYPE_OF_SIZE.values(), (3, tables.limits().outer_k)[: 1 + full]):
        a, b = torch.empty(2, 100, K, dtype=dtype), torch.empty(2, K, 100, dtype=dtype)
        found = _launches(a, b, a.new_empty(2, 100, 100, dtype=_RESULTS.get(dtype, dtype)))
        yield Case(f"{dtype} of outer products of {K}", found[0], _ALL_TARGETS if full else _ALL_TARGETS[::4])


@compile_cases("tiles")
def empty_k(full: bool) -> Iterator[Case]:
    """Products with a K of 0: matrices, a row and a column, with each kind of addend."""
    for dtype, (M, N) in itertools.product(_DTYPE_OF_SIZE.values(), ((100, 100), (1, 100), (100, 1))[: 1 + 2 * full]):
        a, b = torch.empty(2, M, 0, dtype=dtype), torch.empty(2, 0, N, dtype=dtype)
        out = a.new_empty(2, M, N, dtype=_RESULTS.get(dtype, dtype))
        for addend in (None, out, out[:1, :1]):
            found = _launches(a, b, out, Epilogue(addend, beta=0.5))
            label = f"{dtype} of a product of {M} by 0 by {N}, added {addend is not None and tuple(addend.shape)}"
            yield Case(label, found[0], _ALL_TARGETS if full else _ALL_TARGETS[::4])


@compile_cases("copies")
def copied_operands(full: bool) -> Iterator[Case]:
    """Copies of operands into a layout that products read faster, and a product of a copied first operand."""
    layouts = {"rows": torch.empty, "columns": lambda batches, M, N, dtype: torch.empty(batches, N, M, dtype=dtype).mT}
    for (layout, make), dtype in itertools.product(layouts.items(), (torch.bfloat16, torch.float32)):
        a, b = make(2, 77, 301, dtype=dtype), torch.empty(2, 301, 64, dtype=dtype)
        with mock.patch.object(cost_pointers, "copying", lambda sizes, _: -1e9 * len(sizes)):
            found = _launches(a, b, torch.empty(2, 77, 64, dtype=dtype))
        for specialization in found[:2]:
            yield Case(f"{dtype} in {layout}", specialization, ("sm_90", "sm_100") if full else ("sm_90",))


@compile_cases("added")
def addends(full: bool) -> Iterator[Case]:
    """Products plus a matrix, by tiles that TMA copies, as calls fit them to shared memory."""
    swept = [config._replace(GROUP_M=1) for config in cost.load(cost.FOLDER / "NVIDIA_H200.json")[2].configs]
    configs = [config for size, config in tables.every("nvidia") if size == 2 and not config.warp_specialize]
    configs += dict.fromkeys(config for config in swept if config.warp_specialize)
    for i, config in enumerate([config for config in configs if config.descriptors]):
        targets = ("sm_90",) if config.warp_specialize else ("sm_90", "sm_100")
        # TMA copies an addend of 512 columns, and cannot address one of 505.
        for columns in (505, 512) if full else ((505, 512)[i % 2],):
            # Enough rows for several tiles a program, which are then stored through shared memory.
            a, b, out = [torch.empty(1, 2**15, 512, dtype=torch.bfloat16)[..., :n] for n in (512, columns, columns)]
            addend = torch.empty(2**15, columns, dtype=torch.bfloat16)
            with mock.patch.object(gemm_select, "choose", lambda *_, config=config: config):
                found = _launches(a, b[:, :512], out, Epilogue(addend))
            label = f"{config} and {columns} columns"
            yield Case(label, found[-1], targets if full else ("sm_90",), limits_shared_memory=True)


@compile_cases("symmetric")
def symmetric_products(full: bool) -> Iterator[Case]:
    """Symmetric products by every tile of the tables: row-major and column-major X, with and without an addend."""
    layouts = (("rows", 512, 512), ("columns", 512, 512), ("misaligned rows", 301, 77), ("misaligned columns", 301, 77))
    for kind, names in KINDS.items():
        for config, (layout, N, K) in itertools.product(tables.LIMITS[kind].symmetric, layouts):
            x = torch.empty(2, N, K, dtype=torch.bfloat16)
            x = x.mT.contiguous().mT if "columns" in layout else x
            out = x.new_empty(2, N, N)
            for addend in (None, out) if full else (out,):
                with recorded_launches() as found:
                    symmetric_product(x, out, addend, beta=0.5, config=config)
                yield Case(f"{config} {layout}, added {addend is not None}", found[-1], names)
