"""Products of matrices in batches and in groups: orient the operands, pad them, select tiles, launch."""

from __future__ import annotations

import torch

from tritonite import devices
from tritonite.engine.fusing import epilogue_behind
from tritonite.engine.gemm import operands, select
from tritonite.engine.gemm.kernels.arguments import GroupScales, MatrixStrides
from tritonite.engine.gemm.kernels.meta import GroupsMeta
from tritonite.engine.gemm.kernels.persistent import multiply_groups
from tritonite.engine.gemm.launch import run_with_fewer_stages, without_terms
from tritonite.engine.gemm.problem import Problem
from tritonite.engine.gemm.table import Config
from tritonite.engine.gemm.work import NO_EPILOGUE, PLAIN_SUMS, Epilogue, Sums, Work, accumulator
from tritonite.engine.iteration import power_of_2
from tritonite.engine.pointwise.embedded import ResultProgram
from tritonite.errors import Decline
from tritonite.runtime.contract import decline_if_slower, prepare_blas, settings
from tritonite.runtime.symbols import zero_or_one


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue = NO_EPILOGUE,
    sums: Sums = PLAIN_SUMS,
    config: Config | None = None,
    compared: bool = False,
) -> None:
    """Write the epilogue of a @ b into `out`.

    Args:
        a: (batches, M, K), of any strides, like all tensors here. Neither a nor b is read if alpha is 0.
        b: (batches, K, N), of a's dtype.
        out: (batches, M, N), or (1, M, N) if the products of all batches are summed.
        epilogue: factors, addend and activation.
        sums: the precision of sums, and what they run over.
        config: the tiles; by default `select.choose` finds them.
        compared: whether to decline, before any launch, a call that ATen is estimated to be faster with.

    Sums are float32 for floating-point operands, float64 for float64 and int32 for int8, and are rounded once.

    With `settings().invariant` results do not depend on M. Tiles are chosen among those that give the same bits, or
    where there are none, by N, K, dtypes and b's layout alone.
    """
    out, epilogue = _with_program(out, epilogue)
    if not out.numel():
        return
    prepare_blas(out.device)
    epilogue = epilogue.expanded(out.shape)
    if not a.shape[2] or not a.shape[0] or zero_or_one(epilogue.alpha) == 0:
        without_terms(epilogue._replace(alpha=1.0), out, accumulator(a.dtype))
        return
    whole, invariant = sums.whole, config is None and settings().invariant
    same_bits = invariant and whole and not sums.blockwise and select.has_invariant_tiles(a.dtype, out.device)
    # Tiles are fixed by N, K, dtypes and b's layout.
    fixed = invariant and not same_bits
    fixed_descriptors = fixed and whole and operands.can_be_row_major(a, b, out)

    # Orient. Either orientation gives fp16 and bf16 the same bits, but not float32.
    given = epilogue
    if operands.is_transposed(out) and (not invariant or (same_bits and a.dtype.itemsize == 2)):
        a, b, out, epilogue = b.mT, a.mT, out.mT, epilogue.transposed()
    specialized = epilogue.activation is None

    # Pad.
    written, padded = out, (False, False, False)
    if fixed_descriptors:
        a, b, written = operands.row_major(a, b, out)
    elif config is None and whole and not fixed:
        if compared:
            _decline_if_aten_is_faster(a, b, out, given)
        padded = operands.worth_copying(a, b, out)
        if padded[0]:
            a = operands.padded_copy(a, operands.copied_row_major(a))
        if padded[1]:
            b = operands.padded_copy(b)
        written = operands.padded_like(out) if padded[2] else out
    if sums.ends is not None:
        a, b = a.expand(out.shape[0], -1, -1), b.expand(out.shape[0], -1, -1)

    # Select.
    work = Work(a, b, written, epilogue, sums, padded[:2], same_bits)
    if config is None:
        problem = work.problem.of_any_rows() if fixed else work.problem._replace(invariant=same_bits)
        descriptors = fixed_descriptors if fixed else whole and all(map(operands.has_descriptor, (a, b, written)))
        config = select.choose(problem, out.device, descriptors, descriptors and specialized)
        if epilogue.program is not None and (config.warp_specialize or (config.hopper_fp32 and work.exact)):
            raise Decline("a program in a kernel of Gluon's; the product and the program are launched one by one")
        config = select.fitting(config, problem, out.device, epilogue.shared_bytes(config) if config.splits == 1 else 0)

    # Launch.
    run_with_fewer_stages(work, config if whole else config._replace(splits=1, descriptors=False))
    if padded[2]:
        operands.copy_padded(written, out)
    elif written is not out:
        out.copy_(written)


def _with_program(out: torch.Tensor, epilogue: Epilogue) -> tuple[torch.Tensor, Epilogue]:
    """Return the result in memory, and the epilogue with the pointwise program that makes it, if one is fused."""
    fused = epilogue_behind(out)
    if fused is None:
        return out, epilogue
    program = ResultProgram.of(fused.program, fused.result, fused.tensors, fused.numbers)
    (result,) = fused.outs
    return result, epilogue._replace(program=program, more=fused.tensors)


def _decline_if_aten_is_faster(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue) -> None:
    """Decline a product of operands that TMA can address if ATen is estimated to be faster.

    a, b and the result are oriented, `epilogue` is in the order of the call.
    """
    if not all(map(operands.has_descriptor, (a, b, out))):
        return
    # BLAS adds a bias itself. Any other addend ATen copies to the result first, and BLAS accumulates there.
    addend = epilogue.addend
    bias = addend is None or (addend.stride(1) == 0 and zero_or_one(epilogue.beta) == 1)
    copied = () if bias else (out.numel() * out.dtype.itemsize,)
    specialized = epilogue.suits_warp_specialized
    decline_if_slower(select.aten_is_faster(Problem.of(a, b, out), out.device, specialized, copied))


def grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    sums: Sums = PLAIN_SUMS,
    scales: GroupScales | None = None,
) -> None:
    """Write each group of rows of `a` times the group's matrix of `b` into the same rows of `out`.

    a is (M, K), b (groups, K, N) and out (M, N). `ends`, int32, has the end row of each group; rows after the last end
    are not written. TMA must be able to address a and b. `sums` gives the precision.
    """
    groups, K, N = b.shape
    if not (out.numel() and groups):
        return
    prepare_blas(out.device)
    work = Work(a.unsqueeze(0), b, out.unsqueeze(0), sums=sums._replace(ends=ends))
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
        scales=scales,
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
