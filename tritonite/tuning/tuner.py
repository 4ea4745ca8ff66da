"""Find the fastest GEMM tiles of a problem by timing candidates on the current GPU."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tritonite import devices
from tritonite.bench import timing
from tritonite.engine.gemm import select, store
from tritonite.engine.gemm.problem import FEW, Problem
from tritonite.engine.gemm.product import product
from tritonite.engine.gemm.table import Config
from tritonite.engine.iteration import power_of_2
from tritonite.errors import WrongAnswer
from tritonite.runtime import libentry
from tritonite.testing.judge import judge, terms

# Timed calls of each candidate, then of the _BEST fastest.
_FEW_CALLS, _MANY_CALLS, _BEST = 3, 15, 6


class Tuned(NamedTuple):
    """Fastest tiles of a problem, and device times in microseconds: theirs, the default tiles' (`rule`), ATen's."""

    problem: Problem
    config: Config
    microseconds: float
    rule: float
    aten: float


def candidates(problem: Problem) -> Iterator[Config]:
    """Yield the tiles worth timing for a problem; some may not fit the device."""
    size = problem.dtype.itemsize
    if problem.M <= FEW:
        by_rows = problem.M == 1 or size == 8 or (size == 4 and problem.M <= 4)
        rows = min(8, power_of_2(problem.M)) if by_rows else 16
        blocks = itertools.product((4, 8, 16, 32, 64, 128), (32, 64, 128, 256, 512, 1024), (1, 2, 4, 8))
        for columns, inner, warps in blocks:
            elements = rows * columns * inner
            per_thread = elements // (devices.warp_size() * warps)
            if by_rows and 2048 <= elements <= 16_384 and columns * inner >= 1024 and 16 <= per_thread <= 64:
                yield from _split(problem, Config(rows, columns, inner, warps))
            elif not by_rows and columns >= 16 and warps >= 4 and 4096 <= columns * inner * size <= 32_768:
                yield from _split(problem, Config(rows, columns, inner, warps, 4, bf16x6=size == 4))
        return
    shapes = ((64, 64), (64, 128), (128, 64), (64, 256), (128, 128), (128, 256), (256, 128))
    precisions = (False, True) if problem.dtype is torch.float32 else (False,)
    tiles = itertools.product(shapes, (128 // size, 256 // size, 512 // size), (4, 8), precisions)
    for (rows, columns), inner, warps, bf16x6 in tiles:
        if not 32 <= rows * columns // (devices.warp_size() * warps) <= 128 or rows < 16 * warps:
            continue
        for stages, descriptors in ((3, True), (4, True), (5, True), (3, False)):
            split_store = descriptors and rows * columns > 16_384
            config = Config(
                rows, columns, inner, warps, stages, descriptors=descriptors, split_store=split_store, bf16x6=bf16x6
            )
            if config.shared(size, problem.result.itemsize) <= devices.current.shared_memory:
                yield from _split(problem, config)
    if size == 2:
        for rows, (stages, split_store), group in itertools.product((128, 256), ((4, True), (3, False)), (4, 16)):
            config = Config(
                rows, 32_768 // rows, 64, 8, stages, descriptors=True, split_store=split_store, GROUP_M=group
            )
            if config.shared(size, problem.result.itemsize) <= devices.current.shared_memory:
                yield config._replace(warp_specialize=True)
        for rows, more, group in itertools.product((64, 128), (0, 64), (1, 8)):
            stages = 4 if more and rows == 128 else 6
            config = Config(rows, 128, 64, 8, stages, descriptors=True, split_store=True, GROUP_M=group, MORE_N=more)
            yield config._replace(warp_specialize=True, pingpong=True)


def _split(problem: Problem, config: Config) -> Iterator[Config]:
    """Yield the config with each split-K factor that the device may have programs for."""
    tiles = problem.tiles(config)
    for splits in (1, 2, 4, 8, 16):
        if splits == 1 or (tiles * splits <= 1056 and 2 * splits * config.BLOCK_K <= problem.K):
            yield config._replace(splits=splits)


def operands(problem: Problem, device: str, empty: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random operands and an uninitialised result in a problem's sizes, layouts and dtypes.

    Operands are (batches, M, K) and (batches, K, N). With `empty` they are uninitialised too.
    """

    def make(rows: int, columns: int, row_major: bool) -> torch.Tensor:
        shape = (problem.batches, *((rows, columns) if row_major else (columns, rows)))
        value = torch.empty(shape, device=device) if empty else torch.randn(shape, device=device)
        value = value.to(problem.dtype)
        return value if row_major else value.mT

    a, b = make(problem.M, problem.K, problem.a_inner), make(problem.K, problem.N, not problem.b_inner)
    return a, b, torch.empty(problem.batches, problem.M, problem.N, dtype=problem.result, device=device)


def _compile(problem: Problem, config: Config, target: GPUTarget) -> None:
    """Compile a candidate's kernels into Triton's disk cache."""
    with libentry.compiling(target):
        product(*operands(problem, "cpu", empty=True), config=config)


def compile_all(
    work: Sequence[tuple[Problem, Config]],
    jobs: int,
    target: GPUTarget | None = None,
    seconds: float | None = None,
    tell: Callable[[int], object] = lambda done: None,
) -> list[Any]:
    """Compile candidates in `jobs` processes without a GPU, by default for the current device.

    Returns an item for each candidate: its exception, or None. After `seconds` no further candidate is begun, and those
    left have a TimeoutError. `tell` is called with the number of candidates that are done.
    """
    target, hidden = target or driver.active.get_current_target(), {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    before = {name: os.environ.get(name) for name in hidden}
    os.environ.update(hidden)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        with _ignored_interrupts():
            submitted = [pool.submit(_compile, *item, target) for item in work]
        with contextlib.suppress(futures.TimeoutError):
            for done, _ in enumerate(futures.as_completed(submitted, seconds), 1):
                tell(done)
    finally:
        # Candidates that are being compiled end by themselves.
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return [TimeoutError() if each.cancelled() else each.exception() for each in submitted]


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Have processes that start within the context leave Ctrl-C, which a terminal sends to all, to this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def tune_problem(problem: Problem, configs: Sequence[Config]) -> Tuned:
    """Time `configs` on the current GPU and store the fastest. Raises WrongAnswer for a wrong result."""
    a, b, out = operands(problem, devices.current.type)
    expected, exact = torch.matmul(a, b), torch.matmul(a.double(), b.double())
    usual = select.unstored(problem, out.device, True, devices.has_wgmma(out.device))
    rule = select.fitting(usual, problem, out.device)

    def time(config: Config, calls: int) -> float:
        # A graph of one call leaves host time out.
        run = timing.captured(lambda: product(a, b, out, config=config), 1)
        return statistics.median(timing.device_samples(run, calls))

    first: dict[Config, float] = {}
    for config in dict.fromkeys((rule, *configs)):
        try:
            product(a, b, out, config=config)
        except Exception:  # noqa: BLE001 - a candidate that the device or the compiler refuses is no candidate
            continue
        first[config] = time(config, _FEW_CALLS)
    best = {*sorted(first, key=lambda config: first[config])[:_BEST], rule}
    times = {}
    for config in best:
        out.fill_(float("nan"))
        times[config] = time(config, _MANY_CALLS)
        verdict = judge(out, expected, exact, False, devices.current.type, terms=terms("mm", (a, b), out))
        if verdict.failure:
            raise WrongAnswer(provider="tritonite", case=f"{problem} by {config}", reason=verdict.failure)
    config = min(times, key=lambda config: times[config])
    aten = statistics.median(
        timing.device_samples(timing.captured(lambda: torch.matmul(a, b, out=out), 1), _MANY_CALLS)
    )
    store.save(devices.name_of(out.device), problem.key, config, times[config])
    return Tuned(problem, config, times[config], times[rule], aten)
