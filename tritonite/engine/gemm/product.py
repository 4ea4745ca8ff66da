"""Products of matrices in batches and in groups: orient the operands, pad them, select tiles, launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tritonite import devices
from tritonite.engine.gemm import operands, select
from tritonite.engine.gemm.kernels.arguments import MatrixStrides
from tritonite.engine.gemm.kernels.meta import GroupsMeta
from tritonite.engine.gemm.kernels.persistent import multiply_groups
from tritonite.engine.gemm.launch import (
    NO_EPILOGUE,
    Epilogue,
    Work,
    accumulator,
    run_with_fewer_stages,
    without_terms,
)
from tritonite.engine.gemm.problem import Problem
from tritonite.engine.gemm.table import Config
from tritonite.engine.iteration import power_of_2
from tritonite.runtime.contract import Number, decline_if_slower, prepare_blas, settings
from tritonite.runtime.symbols import zero_or_one


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    alpha: float | Number = 1.0,
    addend: torch.Tensor | None = None,
    beta: float | Number = 0.0,
    scales: Sequence[torch.Tensor] = (),
    activation: Any = None,
    precision: str = "ieee",
    blockwise: bool = False,
    summed: bool = False,
    ends: torch.Tensor | None = None,
    config: Config | None = None,
    compared: bool = False,
) -> None:
    """Write activation(alpha * (a @ b) * scales + beta * addend) into `out`.

    Args:
        a: (batches, M, K), of any strides, like all tensors here. Neither a nor b is read if alpha is 0.
        b: (batches, K, N), of a's dtype.
        out: (batches, M, N), or (1, M, N) if the products of all batches are `summed`.
        addend: broadcast to out's shape; may be `out` itself.
        scales: factors, each broadcast to out's shape.
        activation: a `triton.jit` function of a block in the accumulator's dtype.
        precision: of float32 operands: "ieee" for full precision, by whatever method is fastest, or "tf32".
        blockwise: whether to add sums over blocks of K in float32; tensor cores add float8 products less precisely.
        summed: whether to add the products of all batches.
        ends: int32, (batches,): where along K the group of each of out's batches ends. a and b have one batch then.
        config: the tiles; by default `select.choose` finds them.
        compared: whether to decline, before any launch, a call that ATen is estimated to be faster with.

    Sums are float32 for floating-point operands, float64 for float64 and int32 for int8, and are rounded once.

    With `settings().invariant` results do not depend on M. Tiles are chosen among those that give the same bits, or
    where there are none, by N, K, dtypes and b's layout alone.
    """
    if not out.numel():
        return
    prepare_blas(out.device)
    shape = out.shape
    added = None if addend is None else addend.expand(shape)
    alpha, beta = [number if isinstance(number, Number) else float(number) for number in (alpha, beta)]
    epilogue = Epilogue(added, tuple([scale.expand(shape) for scale in scales]), alpha, beta, activation)
    if not a.shape[2] or not a.shape[0] or zero_or_one(alpha) == 0:
        without_terms(epilogue._replace(alpha=1.0), out, accumulator(a.dtype))
        return
    whole, invariant = ends is None and not summed, config is None and settings().invariant
    same_bits = invariant and whole and not blockwise and select.has_invariant_tiles(a.dtype, out.device)
    # Tiles are fixed by N, K, dtypes and b's layout.
    fixed = invariant and not same_bits
    fixed_descriptors = fixed and whole and operands.can_be_row_major(a, b, out)

    # Orient. Either orientation gives fp16 and bf16 the same bits, but not float32.
    if operands.is_transposed(out) and (not invariant or (same_bits and a.dtype.itemsize == 2)):
        a, b, out, epilogue = b.mT, a.mT, out.mT, epilogue.transposed()
    specialized = epilogue.suits_warp_specialized

    # Pad.
    written, padded = out, (False, False, False)
    if fixed_descriptors:
        a, b, written = operands.row_major(a, b, out)
    elif config is None and whole and not fixed:
        if compared:
            _decline_if_aten_is_faster(a, b, out, added, beta, specialized)
        padded = operands.worth_copying(a, b, out)
        if padded[0]:
            a = operands.padded_copy(a, operands.copied_row_major(a))
        if padded[1]:
            b = operands.padded_copy(b)
        written = operands.padded_like(out) if padded[2] else out
    if ends is not None:
        a, b = a.expand(out.shape[0], -1, -1), b.expand(out.shape[0], -1, -1)

    # Select.
    terms = a.shape[0] if summed else 1
    work = Work(a, b, written, epilogue, terms, ends, precision, blockwise, padded[:2], same_bits)
    if config is None:
        problem = work.problem.of_any_rows() if fixed else work.problem._replace(invariant=same_bits)
        descriptors = fixed_descriptors if fixed else whole and all(map(operands.has_descriptor, (a, b, written)))
        config = select.choose(problem, out.device, descriptors, descriptors and specialized)
        config = select.fitting(config, problem, out.device, epilogue.shared_bytes(config) if config.splits == 1 else 0)

    # Launch.
    run_with_fewer_stages(work, config if whole else config._replace(splits=1, descriptors=False))
    if padded[2]:
        operands.copy_padded(written, out)
    elif written is not out:
        out.copy_(written)


def _decline_if_aten_is_faster(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    addend: torch.Tensor | None,
    beta: float | Number,
    warp_specialized: bool,
) -> None:
    """Decline a product of operands that TMA can address if ATen is estimated to be faster."""
    if not all(map(operands.has_descriptor, (a, b, out))):
        return
    # BLAS adds a bias itself. Any other addend ATen copies to the result first, and BLAS accumulates there.
    bias = addend is None or (addend.stride(1) == 0 and zero_or_one(beta) == 1)
    copied = () if bias else (out.numel() * out.dtype.itemsize,)
    decline_if_slower(select.aten_is_faster(Problem.of(a, b, out), out.device, warp_specialized, copied))


def grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, precision: str) -> None:
    """Write each group of rows of `a` times the group's matrix of `b` into the same rows of `out`.

    a is (M, K), b (groups, K, N) and out (M, N). `ends`, int32, has the end row of each group; rows after the last end
    are not written. TMA must be able to address a and b.
    """
    groups, K, N = b.shape
    if not (out.numel() and groups):
        return
    prepare_blas(out.device)
    work = Work(a.unsqueeze(0), b, out.unsqueeze(0), NO_EPILOGUE, 1, ends, precision, False)
    mean = work.problem._replace(batches=groups, M=-(-a.shape[0] // groups))
    if settings().invariant:
        mean = mean.of_any_rows()
    config = select.fitting(select.for_groups(mean, out.device), mean, out.device)
    # An upper bound: the first and the last tile of each group may be partial.
    tiles = (-(-a.shape[0] // config.BLOCK_M) + 2 * groups) * -(-N // config.BLOCK_N)
    programs = min(tiles, devices.multiprocessors(out.device))
    multiply_groups[(programs,)](
        operands.descriptor(work.a, config.BLOCK_M, config.BLOCK_K),
        operands.descriptor(b, config.BLOCK_K, config.BLOCK_N),
        *(out, ends),
        strides=MatrixStrides(*work.out.stride()),
        M=a.shape[0],
        N=N,
        K=K,
        programs=programs,
        META=GroupsMeta(
            a_transposed=a.stride(1) != 1,
            b_transposed=b.stride(2) != 1,
            groups=groups,
            lanes=power_of_2(groups),
            # TMA needs the start of a copy along a contiguous dimension to be a multiple of 16 bytes.
            multiple=1 if a.stride(1) == 1 else 16 // a.dtype.itemsize,
            **work.facts(config),
        ),
        **work.compile_options(config),
    )
