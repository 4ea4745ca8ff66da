"""Which tiles a product of matrices is cut into: a rule over a table of tiles for each kind of device."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tritonite import devices
from tritonite.tune.tiles import FEW_ROWS, ONE_ROW, SHARED, THROUGH_DESCRIPTORS, THROUGH_POINTERS, Config

# Products of up to so many rows are bound by memory.
FEW = 16
# The rows and columns that a program takes where parts of products are added.
PARTS = (8, 256)


class Problem(NamedTuple):
    """Batches of (M, K) times (K, N), and whether elements along K are next to each other in both operands."""

    batches: int
    M: int
    N: int
    K: int
    dtype: torch.dtype
    result: torch.dtype
    a_inner: bool
    b_inner: bool


@functools.lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """How many programs of the largest kind run at a time."""
    if device.type != "cuda":
        return max(1, devices.current.programs // 8)
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=64)
def copies_tiles(device: torch.device) -> bool:
    """Whether the device copies tiles that a tensor descriptor tells of by itself."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def choose(problem: Problem, device: torch.device, described: bool) -> Config:
    """The tiles for a problem; `described` where all of its operands can have tensor descriptors."""
    kind, size = devices.current.kind, problem.dtype.itemsize
    if problem.M == 1:
        config = ONE_ROW[kind][problem.b_inner]
    elif problem.M <= FEW:
        config = FEW_ROWS[kind][problem.b_inner][size]
    elif described and copies_tiles(device) and size in THROUGH_DESCRIPTORS[kind]:
        return choose_described(problem, device)
    else:
        config = _cheapest(problem, device, THROUGH_POINTERS[kind][size])
    return config._replace(splits=_splits(problem, device, config))


def choose_described(problem: Problem, device: torch.device) -> Config:
    """The tiles for a problem whose operands all have tensor descriptors, whether the device copies tiles or not."""
    kind, size = devices.current.kind, problem.dtype.itemsize
    config = _cheapest(problem, device, THROUGH_DESCRIPTORS[kind].get(size) or THROUGH_POINTERS[kind][size])
    while config.num_stages > 1 and config.shared(size, problem.result.itemsize) > SHARED:
        config = config._replace(num_stages=config.num_stages - 1)
    return config


def _tiles(problem: Problem, config: Config) -> int:
    return problem.batches * -(-problem.M // config.BLOCK_M) * -(-problem.N // config.BLOCK_N)


def _cheapest(problem: Problem, device: torch.device, configs: tuple[Config, ...]) -> Config:
    """By the time of as many rounds of tiles as the device takes; larger tiles are done faster than their size."""
    most = multiprocessors(device)

    def time(config: Config) -> float:
        rounds = -(-_tiles(problem, config) // most)
        return rounds * config.BLOCK_M * config.BLOCK_N / config.rate

    return min(configs, key=time)


def _splits(problem: Problem, device: torch.device, config: Config) -> int:
    """Into how many parts K is split, for the programs to fill the device; a part has 4 blocks at least."""
    wanted = config.programs * multiprocessors(device) // _tiles(problem, config)
    return max(1, min(wanted, problem.K // (4 * config.BLOCK_K)))
