"""Symmetric products, X X^T of matrices in batches: select tiles, and launch one program a tile of one triangle."""

from __future__ import annotations

import torch

from tritonite import devices
from tritonite.engine.gemm import operands, select
from tritonite.engine.gemm.kernels.arguments import GemmStrides, MatrixStrides
from tritonite.engine.gemm.kernels.symmetric import multiply_symmetric
from tritonite.engine.gemm.launch import run_with_fewer_stages
from tritonite.engine.gemm.problem import Problem
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.table import Config, limits
from tritonite.engine.gemm.work import Epilogue, Work
from tritonite.engine.iteration import power_of_2
from tritonite.runtime.contract import settings
from tritonite.runtime.symbols import zero_or_one


def symmetric_product(
    x: torch.Tensor,
    out: torch.Tensor,
    addend: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    config: Config | None = None,
) -> None:
    """Write alpha * X X^T + beta * addend into `out`.

    fp16 and bf16 are summed in float32 and rounded once. Only the lower triangle is computed, for half the operations
    of a product, and the result is symmetric in every bit. Other dtypes, devices whose table has no tiles for symmetric
    products, and products of too few tiles take the ordinary product, whose triangles may differ by roundoff.
    regressions: gemm_symmetric

    Args:
        x: (batches, N, K), of any strides, like all tensors here.
        out: (batches, N, N), of x's dtype.
        addend: symmetric matrices that broadcast to the shape of `out`, or None. They are not read if beta is 0.
        alpha, beta: factors of the product and of the addend.
        config: the tiles, which are square; by default `choose` finds them.
    """
    epilogue = Epilogue(None if zero_or_one(beta) == 0 else addend, alpha=alpha, beta=beta)
    work = Work(x, x.mT, out, epilogue.expanded(out.shape), column_stride=0)
    served = x.dtype in (torch.float16, torch.bfloat16) and out.numel() and x.shape[2] and zero_or_one(alpha) != 0
    if served and config is None and limits().symmetric:
        config = choose(work.problem, out.device)
    if not served or config is None:
        product(x, x.mT, out, epilogue)
        return
    if work.problem.a_vector < 16 and x.shape[1] > config.BLOCK_M:
        # Several tiles load each row of X, by 16 bytes from a padded copy.
        copy = operands.padded_copy(x)
        work = work._replace(a=copy, b=copy.mT, padded=(True, True))
    run_with_fewer_stages(work, select.fitting(config, work.problem, out.device), _launch)


def choose(problem: Problem, device: torch.device) -> Config | None:
    """Return the largest tile that gives each multiprocessor a program, or else the smallest.

    Return None if the ordinary product has fewer rounds of tiles, each tile weighed by its time. Tiles have no more
    rows than the result, rounded up to a power of two. In invariant mode the number of matrices does not count.
    """
    batches, configs = 1 if settings().invariant else problem.batches, limits().symmetric
    least, most = devices.multiprocessors(device), power_of_2(problem.M)
    filling = [config for config in configs if batches * _tiles(problem, config) >= least and most >= config.BLOCK_M]
    config = filling[0] if filling else configs[-1]
    rounds, rows = -(-batches * _tiles(problem, config) // least), -(-problem.M // config.BLOCK_M)
    return config if rounds * limits().symmetric_cost < batches * rows * rows / least else None


def _tiles(problem: Problem, config: Config) -> int:
    """Return the number of tiles in the lower triangle of a result, the diagonal included."""
    rows = -(-problem.M // config.BLOCK_M)
    return rows * (rows + 1) // 2


def _launch(work: Work, config: Config) -> None:
    x, out, problem, epilogue = work.a, work.out, work.problem, work.epilogue
    padding = 16 // x.dtype.itemsize if work.padded[0] else 1
    # Elements loaded by less than 4 bytes cannot be copied asynchronously.
    prefetch = problem.a_vector < 4
    multiply_symmetric[(problem.batches * _tiles(problem, config),)](
        *(x, out),
        strides=GemmStrides(*[MatrixStrides(*tensor.stride()) for tensor in (x, work.b, out)]),
        added=epilogue.operands,
        N=problem.M,
        K=problem.K,
        alpha=epilogue.alpha,
        beta=epilogue.beta,
        META=operands.meta(
            x,
            work.b,
            out,
            a_padding=padding,
            b_padding=padding,
            prefetch_a=prefetch,
            prefetch_b=prefetch,
            split=False,
            even_k=problem.K % config.BLOCK_K == 0,
            **work.facts(config),
            **epilogue.facts,
        ),
        **work.compile_options(config),
    )
