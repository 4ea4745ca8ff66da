"""Launches of the kernels of products: from a `Work` and its tiles to kernel arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonite import devices
from tritonite.dtypes import TRITON_DTYPES
from tritonite.engine.gemm import operands
from tritonite.engine.gemm.kernels import hopper
from tritonite.engine.gemm.kernels.arguments import GemmStrides, MatrixStrides
from tritonite.engine.gemm.kernels.hopper_fp32 import multiply_bf16x6
from tritonite.engine.gemm.kernels.meta import EpilogueMeta, HopperGemmMeta, PersistentMeta
from tritonite.engine.gemm.kernels.persistent import multiply_persistent
from tritonite.engine.gemm.kernels.pointers import (
    multiply_few_rows,
    multiply_short_k,
    multiply_strided_columns,
    multiply_tiles,
)
from tritonite.engine.gemm.kernels.results import reduce_split_k, write_epilogue
from tritonite.engine.gemm.problem import FEW
from tritonite.engine.gemm.table import LEAST_DOT, Config, limits
from tritonite.engine.gemm.work import NO_EPILOGUE, Epilogue, Work
from tritonite.engine.iteration import offset_type, power_of_2
from tritonite.runtime.contract import empty_strided


def without_terms(epilogue: Epilogue, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Write the result of a product without terms, whose sums are 0 in `dtype`: the epilogue alone."""
    if out.stride(2) != 1 == out.stride(1):
        out, epilogue = out.mT, epilogue.transposed()
    batches, M, N = out.shape
    columns = min(power_of_2(N), limits().reduced_columns)
    rows = min(power_of_2(M), limits().reduced_elements // columns)
    write_epilogue[(batches * -(-M // rows) * -(-N // columns),)](
        out,
        strides=MatrixStrides(*out.stride()),
        M=M,
        N=N,
        META=EpilogueMeta(**epilogue.facts),
        ACCUMULATOR=TRITON_DTYPES[dtype],
        INDEX=offset_type(out, *epilogue.tensors),
        BLOCK_M=rows,
        BLOCK_N=columns,
        **epilogue.arguments,
    )


def run_with_fewer_stages(work: Any, config: Config, launch: Callable[[Any, Config], None] | None = None) -> None:
    """Launch `work`, with one stage less each time the compiler needs more shared memory than estimated.

    `launch` is `run` unless given, and then `work` is a `Work`.
    """
    least = 2 if config.warp_specialize else 1
    while True:
        try:
            (launch or run)(work, config)
        except OutOfResources:
            if config.num_stages == least:
                raise
            config = config._replace(num_stages=config.num_stages - 1)
        else:
            return


def slices(K: int, config: Config) -> tuple[int, int]:
    """Return the blocks of K in each slice of split-K, and the number of slices."""
    blocks = -(-K // config.BLOCK_K)
    steps = max(1, -(-blocks // config.splits))
    return steps, max(1, -(-blocks // steps))


def run(work: Work, config: Config) -> None:
    """Launch the product, and with split-K the reduction of its partial products."""
    batches, M, N = work.out.shape
    steps, splits = slices(work.a.shape[2], config)
    if min(config.BLOCK_M, config.BLOCK_K) < LEAST_DOT:
        # Tensor cores alone multiply strided tiles of columns.
        work = work._replace(column_stride=0)
    problem = work.problem
    work, tiles = work._replace(column_stride=problem.column_stride), problem.tiles(config)
    if splits == 1:
        _launch(work, config, batches, tiles, steps, splits)
        return
    # TMA needs every row to start at a multiple of 16 bytes, whatever the result's rows do.
    width = operands.padded_width(N, work.accumulator) if config.descriptors else N
    strides = M * width, width, 1
    partials = empty_strided((splits * batches, M, N), strides, work.accumulator, work.out.device)
    _launch(work._replace(out=partials, epilogue=NO_EPILOGUE), config, batches, tiles, steps, splits)
    add_slices(partials, work.out, work.epilogue, width, splits, **work.options)


def add_slices(
    partials: torch.Tensor, out: torch.Tensor, epilogue: Epilogue, width: int, splits: int, **options: Any
) -> None:
    """Write the epilogue of the sum of split-K slices, (splits * batches, M, N) with rows `width` apart, to `out`."""
    batches, M, N = out.shape
    most, columns = power_of_2(splits), min(power_of_2(N), limits().reduced_columns)
    rows = min(power_of_2(M), max(1, limits().reduced_elements // (most * columns)))
    reduce_split_k[(batches * -(-M // rows) * -(-N // columns),)](
        *(partials, out),
        strides=MatrixStrides(*out.stride()),
        width=width,
        batches=batches,
        M=M,
        N=N,
        splits=splits,
        **epilogue.arguments,
        **options,
        META=EpilogueMeta(**epilogue.facts),
        INDEX=offset_type(partials, out, *epilogue.tensors),
        SPLITS=most,
        BLOCK_M=rows,
        BLOCK_N=columns,
    )


def _launch(work: Work, config: Config, batches: int, tiles: int, steps: int, splits: int) -> None:
    """Launch the kernel for `config` over `splits` slices of K of `steps` blocks each.

    A slice is `batches` matrices of `tiles` tiles together. The results of the slices follow each other in `work.out`.
    """
    if config.transposed:
        work = work.transposed()
    # Rows of a subtile are at least 32 bytes long in the layouts of shared memory.
    narrow = config.BLOCK_N // 2 * work.out.dtype.itemsize < 32 and not operands.is_column_major(work.out)
    if config.warp_specialize and (narrow or not work.epilogue.suits_warp_specialized):
        config = config._replace(warp_specialize=False, split_store=False)
    M, N = work.out.shape[1:]
    sizes = {"batches": batches, "M": M, "N": N, "K": work.a.shape[2], "steps": steps}
    if config.descriptors:
        sizes |= {
            "last_row": operands.last_start(M, config.BLOCK_M, work.in_place),
            "last_column": operands.last_start(N, config.BLOCK_N + config.MORE_N, work.in_place),
        }
    _launcher(work, config)(work, config, sizes, tiles, splits)


def _launcher(work: Work, config: Config) -> Callable[..., None]:
    """Return the function that launches the kernel for a tile. No other function chooses a kernel by its tile."""
    if config.warp_specialize:
        return _launch_warp_specialized
    if config.descriptors:
        return _launch_persistent
    if config.hopper_fp32 and work.suits_bf16x6:
        return _launch_bf16x6
    if config.BLOCK_K < LEAST_DOT:
        kernel = multiply_short_k
    elif config.BLOCK_M < LEAST_DOT:
        kernel = multiply_few_rows
    else:
        kernel = multiply_strided_columns if work.column_stride else multiply_tiles
    return functools.partial(_launch_pointers, kernel)


def _programs(work: Work, config: Config, tiles: int, splits: int) -> int:
    return min(splits * tiles, config.programs * devices.multiprocessors(work.out.device))


def _launch_warp_specialized(work: Work, config: Config, sizes: dict[str, int], tiles: int, splits: int) -> None:
    a, b, out, more = work.a, work.b, work.out, config.MORE_N
    consumers = config.num_warps // 4
    rows = config.BLOCK_M // (1 if config.pingpong else consumers)
    # A block of a is one copy for all consumers, if they can take their rows from it.
    whole = not operands.is_column_major(a) and power_of_2(config.BLOCK_M) == config.BLOCK_M
    threads = 128 * (consumers + 1)
    half, added = config.BLOCK_N // 2, None if config.split_store else work.epilogue.addend_for_tma(out)
    epilogue = work.epilogue if added is None else work.epilogue._replace(addend=None)
    programs = _programs(work, config, tiles, splits)

    def blocks(tensor: torch.Tensor | None, rows: int, columns: int) -> TensorDescriptor | None:
        none = tensor is None or columns == 0
        return None if none else hopper.in_shared_memory(operands.descriptor(tensor, rows, columns))

    hopper.multiply_warp_specialized[(programs,)](
        blocks(a, config.BLOCK_M if whole else rows, config.BLOCK_K),
        *(blocks(b, config.BLOCK_K, config.BLOCK_N), blocks(b, config.BLOCK_K, more)),
        *(blocks(out, rows, half), blocks(out, rows, more)),
        *(blocks(added, rows, half), blocks(added, rows, more)),
        splits=splits,
        programs=programs,
        added=epilogue.operands,
        alpha=epilogue.alpha,
        beta=epilogue.beta,
        META=HopperGemmMeta(
            index=work.index,
            a_transposed=operands.is_column_major(a),
            b_transposed=operands.is_column_major(b),
            out_transposed=operands.is_column_major(out),
            group_m=config.GROUP_M,
            consumers=consumers,
            pingpong=config.pingpong,
            blockwise=work.sums.blockwise,
            more_n=more,
            addend_by_tma=added is not None,
            addend_batched=added is not None and added.shape[0] > 1,
            stages=config.num_stages,
            buffers=1 if config.split_store else 2,
            **epilogue.facts,
        ),
        num_warps=4,
        maxnreg=devices.current.registers // (threads * config.programs) if config.programs > 1 else None,
        **work.options,
        **sizes,
    )


def _launch_persistent(work: Work, config: Config, sizes: dict[str, int], tiles: int, splits: int) -> None:
    a, b, out, programs = work.a, work.b, work.out, _programs(work, config, tiles, splits)
    # A program's only tile is stored sooner through pointers, if these store 16 bytes at a time. With several tiles,
    # TMA stores one while the next is multiplied.
    by_vectors = operands.padded_width(out.shape[2], out.dtype) == out.shape[2]
    direct = (splits * tiles == programs and by_vectors) or operands.is_column_major(out)
    width = config.BLOCK_N // (2 if config.split_store else 1)
    multiply_persistent[(programs,)](
        operands.descriptor(a, config.BLOCK_M, config.BLOCK_K),
        operands.descriptor(b, config.BLOCK_K, config.BLOCK_N),
        out if direct else operands.descriptor(out, config.BLOCK_M, width),
        MatrixStrides(*out.stride()) if direct else None,
        splits=splits,
        programs=programs,
        META=PersistentMeta(
            result=TRITON_DTYPES[out.dtype],
            a_transposed=operands.is_column_major(a),
            b_transposed=operands.is_column_major(b),
            split=splits > 1,
            split_store=config.split_store,
            **work.facts(config),
            **work.epilogue.facts,
        ),
        **sizes,
        **work.epilogue.arguments,
        **work.compile_options(config),
    )


def _launch_bf16x6(work: Work, config: Config, sizes: dict[str, int], tiles: int, splits: int) -> None:
    a, b, out, epilogue = work.a, work.b, work.out, work.epilogue
    threads = devices.warp_size() * config.num_warps * config.programs
    multiply_bf16x6[(tiles, splits)](
        *(a, b, out),
        strides=_strides(work),
        added=epilogue.operands,
        alpha=epilogue.alpha,
        beta=epilogue.beta,
        META=operands.meta(a, b, out, split=splits > 1, **work.facts(config), **epilogue.facts),
        num_warps=config.num_warps,
        **({"maxnreg": devices.current.registers // threads // 8 * 8} if threads > 256 else {}),
        **work.options,
        **sizes,
    )


def _strides(work: Work) -> GemmStrides:
    return GemmStrides(*[MatrixStrides(*tensor.stride()) for tensor in (work.a, work.b, work.out)])


def _launch_pointers(kernel: Any, work: Work, config: Config, sizes: dict[str, int], tiles: int, splits: int) -> None:
    a, b, out, problem = work.a, work.b, work.out, work.problem
    # Addresses of elements loaded one at a time take registers, and without a limit fewer programs would be resident. A
    # thread also holds a sum for each element of b's block and each of few rows; where these need the registers there
    # is no limit.
    threads = devices.warp_size() * config.num_warps
    limit = max(128, devices.current.registers // (threads * config.programs))
    sums = (config.BLOCK_M + 1) * config.BLOCK_K * config.BLOCK_N // threads
    fits = config.BLOCK_M >= FEW or (sums <= 3 * limit // 4 and problem.b_vector < 16)
    limited = limit < 256 and fits and devices.current.ptx
    a_padding, b_padding = [
        16 // x.dtype.itemsize if padded else 1 for x, padded in zip((a, b), work.padded, strict=True)
    ]
    meta = operands.meta(
        a,
        b,
        out,
        a_padding=a_padding,
        b_padding=b_padding,
        prefetch_a=problem.a_vector < 4 or (problem.column_stride > 0 and problem.a_inner),
        prefetch_b=problem.b_vector < 4,
        column_stride=problem.column_stride,
        split=splits > 1,
        even_k=a.shape[2] % config.BLOCK_K == 0 and work.sums.ends is None,
        **work.facts(config),
        **work.epilogue.facts,
    )
    summed = {} if work.column_stride else {"ends": work.sums.ends, "terms": work.terms}
    kernel[(tiles, splits)](
        *(a, b, out),
        strides=_strides(work),
        META=meta,
        **({"maxnreg": limit} if limited else {}),
        **summed,
        **sizes,
        **work.epilogue.arguments,
        **work.compile_options(config),
    )
