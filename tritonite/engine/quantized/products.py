"""Products of quantised matrices: choose tiles, slice K, launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.dtypes import FLOAT8_NAMES
from tritonite.engine.gemm import select
from tritonite.engine.gemm.kernels.arguments import MatrixStrides
from tritonite.engine.gemm.launch import add_slices, run_with_fewer_stages, slices, without_terms
from tritonite.engine.gemm.problem import Problem
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.table import Config
from tritonite.engine.gemm.work import NO_EPILOGUE, Epilogue, Sums
from tritonite.engine.iteration import offset_type
from tritonite.engine.quantized.kernels import multiply_float8, multiply_int4, multiply_int8
from tritonite.engine.quantized.meta import (
    Float8Meta,
    Float8Strides,
    Int4Meta,
    Int4Strides,
    Int8Strides,
    QuantizedMeta,
    WordMeta,
    WordStrides,
)
from tritonite.engine.quantized.table import quantized_table
from tritonite.engine.quantized.tensor_core_words import multiply_words
from tritonite.runtime.contract import empty, fusion, settings


class BlockScales(NamedTuple):
    """Scales that vary along K: float32, (rows / group, K / group_k), both rounded up.

    `groups` are the rows of x, and of the weight, that share a scale.
    """

    x: torch.Tensor
    weight: torch.Tensor
    groups: tuple[int, int]
    group_k: int


class _Launch(NamedTuple):
    """A launch of one slice of K, or of all: where it writes, its epilogue, and the blocks of each slice."""

    out: torch.Tensor
    epilogue: Epilogue
    steps: int
    splits: int


class _Work(NamedTuple):
    """A product of x (M, K) and the transpose of a weight (N, K), as `_run` slices it."""

    x: torch.Tensor
    out: torch.Tensor
    epilogue: Epilogue
    launch: Callable[[Config, _Launch], None]


def _has_no_terms(x: torch.Tensor, out: torch.Tensor, epilogue: Epilogue) -> bool:
    """Return whether a product has no results or sums no terms; in the second case write the epilogue alone."""
    if out.numel() and x.shape[1]:
        return False
    if out.numel():
        without_terms(epilogue, out, torch.float32)
    return True


def float8_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue = NO_EPILOGUE,
    scales: BlockScales | None = None,
) -> None:
    """Write the epilogue of x @ weight.T into `out`, for float8 operands of either format and any strides.

    Args:
        x: (M, K).
        weight: (N, K).
        out: (M, N) of fp16, bf16 or float32.
        epilogue: the scales that do not vary along K, and the bias.
        scales: the scales that do, or None.
    """
    if not out.numel():
        return
    result, native = out.unsqueeze(0), devices.has_float8(out.device)
    if scales is None and native:
        product(x.unsqueeze(0), weight.t().unsqueeze(0), result, epilogue, Sums(blockwise=True))
        return
    epilogue = epilogue.expanded(result.shape)
    if _has_no_terms(x, result, epilogue):
        return
    formats = tuple(["" if native else FLOAT8_NAMES[each.dtype] for each in (x, weight)])
    if not native:
        x, weight = x.view(torch.uint8), weight.view(torch.uint8)
    table = quantized_table()

    def launch(config: Config, own: _Launch) -> None:
        pairs = [(x, weight), formats, (None, None), (0, 0)]
        if scales is not None:
            pairs[2:] = [(scales.x, scales.weight), scales.groups]
        (a, b), (a_format, b_format), (a_scale, b_scale), (a_rows, b_rows) = [
            pair[::-1] if config.transposed else pair for pair in pairs
        ]
        group_k = config.BLOCK_K if scales is None else scales.group_k
        result, own_epilogue = _oriented(own, config)
        multiply_float8[_grid(config, own)](
            *(a, b, result),
            *(a_scale, b_scale),
            strides=Float8Strides(*[_strides(each) for each in (a, b, a_scale, b_scale, result)]),
            added=own_epilogue.operands,
            M=a.shape[0],
            N=b.shape[0],
            K=a.shape[1],
            steps=own.steps,
            META=Float8Meta(
                index=offset_type(a, b, result, *own_epilogue.tensors),
                group_k=group_k,
                a_rows=a_rows,
                b_rows=b_rows,
                a_format=a_format,
                b_format=b_format,
                **_facts(config, own, a.shape[1]),
                **own_epilogue.facts,
            ),
            **_options(config),
        )

    group_k = None if scales is None else scales.group_k
    work = _Work(x, result, epilogue, launch)
    _run(work, table.float8_few, table.float8, group_k)


def int4_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    out: torch.Tensor,
    epilogue: Epilogue = NO_EPILOGUE,
) -> None:
    """Write the epilogue of x @ ((numbers - zeros) * scales).T into `out`, for packed numbers of 4 bits.

    Args:
        x: (M, K) of fp16 or bf16.
        weight: uint8, (N, K / 2); the low nibble is the number at the even index.
        scales: (N, K / group) of x's dtype, rounded up.
        zeros: the same, or None for 8.
        group: numbers along K that share a scale, a multiple of 16 or at least K.
        out: (M, N).
        epilogue: a bias.
    """
    result = out.unsqueeze(0)
    epilogue = epilogue.expanded(result.shape)
    if _has_no_terms(x, result, epilogue):
        return
    table = quantized_table()

    def launch(config: Config, own: _Launch) -> None:
        result, own_epilogue = _oriented(own, config)
        multiply_int4[_grid(config, own)](
            *(weight, x, result, scales, zeros),
            strides=Int4Strides(*[_strides(each) for each in (weight, scales, zeros, x, result)]),
            added=own_epilogue.operands,
            M=weight.shape[0],
            N=x.shape[0],
            K=x.shape[1],
            steps=own.steps,
            META=Int4Meta(
                index=offset_type(weight, x, result, *own_epilogue.tensors),
                group_k=group,
                **_facts(config, own, x.shape[1]),
                **own_epilogue.facts,
            ),
            **_options(config),
        )

    work = _Work(x, result, epilogue, launch)
    # A group of at least K elements is one for every block.
    _run(work, table.int4_few, table.int4, group if group < x.shape[1] else None)


def int4_words_product(
    x: torch.Tensor, weight: torch.Tensor, scales_and_zeros: torch.Tensor, group: int, out: torch.Tensor
) -> None:
    """Write x @ ((numbers - 8) * scales + zeros).T into `out`, for a weight packed for tensor cores.

    Args:
        x: bfloat16, (M, K).
        weight: int32, contiguous, as `tensor_core_words` describes.
        scales_and_zeros: bfloat16, (K / group, N, 2).
        group: numbers along K that share a scale, a power of 2 from 32 on that divides K.
        out: (M, N).
    """
    result = out.unsqueeze(0)
    epilogue = NO_EPILOGUE.expanded(result.shape)
    if _has_no_terms(x, result, epilogue):
        return
    table, pairs = quantized_table(), _words_of_pairs(scales_and_zeros)

    def launch(config: Config, own: _Launch) -> None:
        result, own_epilogue = _oriented(own, config)
        multiply_words[_grid(config, own)](
            *(weight, x, result, pairs),
            strides=WordStrides(_strides(x), _strides(result)),
            added=own_epilogue.operands,
            M=out.shape[1],
            N=x.shape[0],
            K=x.shape[1],
            steps=own.steps,
            META=WordMeta(
                index=offset_type(weight, x, result, pairs),
                group_k=group,
                words=weight.shape[3],
                **_facts(config, own, x.shape[1]),
                **own_epilogue.facts,
            ),
            **_options(config),
        )

    _run(_Work(x, result, epilogue, launch), table.int4_few, table.int4, None)


def _words_of_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """Return pairs of bfloat16 as int32, without their last dimension; copy them if they are not contiguous words."""
    if not pairs.is_contiguous() or pairs.storage_offset() % 2:
        own = empty(pairs.shape, pairs.dtype, pairs.device)
        own.copy_(pairs)
        pairs = own
    return pairs.view(torch.int32)[..., 0]


def int8_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, epilogue: Epilogue = NO_EPILOGUE) -> None:
    """Write the epilogue of x @ weight.T into `out`, for floats x (M, K) and an int8 weight (N, K) of any strides."""
    result = out.unsqueeze(0)
    epilogue = epilogue.expanded(result.shape)
    if _has_no_terms(x, result, epilogue):
        return
    table = quantized_table()

    def launch(config: Config, own: _Launch) -> None:
        result, own_epilogue = _oriented(own, config)
        multiply_int8[_grid(config, own)](
            *(weight, x, result),
            strides=Int8Strides(*[_strides(each) for each in (weight, x, result)]),
            added=own_epilogue.operands,
            M=weight.shape[0],
            N=x.shape[0],
            K=x.shape[1],
            steps=own.steps,
            ACTIVATION=own_epilogue.activation,
            META=QuantizedMeta(
                index=offset_type(weight, x, result, *own_epilogue.tensors),
                group_k=config.BLOCK_K,
                **_facts(config, own, x.shape[1]),
                **own_epilogue.facts,
            ),
            **_options(config),
        )

    _run(_Work(x, result, epilogue, launch), table.int4_few, table.int4, None)


def _run(work: _Work, few: tuple[Config, ...], many: tuple[Config, ...], group_k: int | None) -> None:
    """Choose a tile whose blocks of K divide `group_k`, and launch the product.

    In invariant mode neither the tile nor the slices of K depend on the rows of x.
    """
    (M, K), (_, _, N) = work.x.shape, work.out.shape
    problem = Problem(1, M, N, K, work.x.dtype, work.out.dtype, True, True)
    if settings().invariant:
        problem = problem.of_any_rows()
    device = work.out.device
    config = select.fitting(select.of_tables(problem, device, few, many), problem, device)
    if group_k is not None:
        # The largest power of 2 that divides the group.
        config = config._replace(BLOCK_K=min(config.BLOCK_K, group_k & -group_k))
    run_with_fewer_stages(work, config, _launch_slices)


def _launch_slices(work: _Work, config: Config) -> None:
    """Launch the product, and with split-K the sum of its slices."""
    _, M, N = work.out.shape
    steps, splits = slices(work.x.shape[1], config)
    if splits == 1:
        work.launch(config, _Launch(work.out, work.epilogue, steps, splits))
        return
    partials = empty((splits, M, N), torch.float32, work.out.device)
    work.launch(config, _Launch(partials, NO_EPILOGUE, steps, splits))
    add_slices(partials, work.out, work.epilogue, N, splits, **fusion())


def _oriented(own: _Launch, config: Config) -> tuple[torch.Tensor, Epilogue]:
    """Return a launch's result and epilogue, both transposed if the tile is."""
    return (own.out.mT, own.epilogue.transposed()) if config.transposed else (own.out, own.epilogue)


def _grid(config: Config, own: _Launch) -> tuple[int, int]:
    M, N = own.out.shape[:0:-1] if config.transposed else own.out.shape[1:]
    return -(-M // config.BLOCK_M) * -(-N // config.BLOCK_N), own.splits


def _strides(tensor: torch.Tensor | None) -> MatrixStrides:
    """Return the strides of a matrix or of a batch of them; 0 for None."""
    if tensor is None:
        return MatrixStrides(0, 0, 0)
    return MatrixStrides(*tensor.stride()) if tensor.dim() == 3 else MatrixStrides(0, *tensor.stride())


def _facts(config: Config, own: _Launch, K: int) -> dict[str, Any]:
    """Return the fields of `QuantizedMeta` that follow from the tile."""
    return {
        "block_m": config.BLOCK_M,
        "block_n": config.BLOCK_N,
        "block_k": config.BLOCK_K,
        "group_m": config.GROUP_M,
        "split": own.splits > 1,
        "even_k": K % config.BLOCK_K == 0,
    }


def _options(config: Config) -> dict[str, Any]:
    """Return the compile options of a kernel for a tile."""
    stages = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return {**stages, **devices.current.options, **fusion()}
