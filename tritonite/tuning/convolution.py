"""Time tiles of convolutions on the current GPU, and fit the times that `engine.convolution.select` estimates with.

`sweep` times layers of models, `save` and `load` keep the times as JSON, and `fit` returns tiles for
`engine.convolution.table`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tritonite import devices
from tritonite.bench import convolution, drawing, timing
from tritonite.bench.convolution import Layer
from tritonite.engine.convolution import launch, select
from tritonite.engine.convolution.problem import Geometry, Problem
from tritonite.engine.convolution.table import Tile
from tritonite.runtime import libentry
from tritonite.testing.compile_cases.cases import launches

BATCHES = (1, 8, 32)
DTYPES = (torch.bfloat16, torch.float32)
# Layers to draw, the most elements of a tensor, and the most operations by the bytes of an element.
_LAYERS, _LARGEST, _OPERATIONS = 36, 2**27, {2: 6e11, 4: 1e11}
# Timed calls of each tile.
_CALLS = 3
# Largest error allowed, over the largest result.
_TOLERANCE = {2: 2e-2, 4: 1e-4}


class Run(NamedTuple):
    """A convolution of a layer, or the gradient of its filters."""

    layer: Layer
    batch: int
    dtype: torch.dtype
    filters: bool


class Timed(NamedTuple):
    """Times of a run's tiles in microseconds, and ATen's; the bytes of its operands and result."""

    problem: Problem
    filters: bool
    bytes: int
    aten: float
    times: tuple[tuple[Tile, float], ...]
    # Tiles whose result differs from ATen's by more than the tolerance.
    wrong: tuple[Tile, ...] = ()


def candidates(dtype: torch.dtype) -> list[Tile]:
    """Return the tiles to time, with the programs that fit on a multiprocessor at once.

    Besides its sums a thread has about 64 registers, with products of bfloat16 terms 136.
    """
    shapes: tuple[tuple[int, ...], ...]
    if dtype is torch.float32:
        shapes = ((128, 128, 32, 8, 3), (128, 64, 32, 8, 3), (64, 128, 32, 4, 3), (64, 64, 32, 4, 3))
        shapes += ((128, 32, 32, 4, 3), (64, 32, 32, 4, 3))
    else:
        shapes = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4))
        shapes += ((128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 32, 64, 4, 4), (64, 64, 64, 4, 4))
        shapes += ((64, 32, 64, 4, 4),)
    tiles = [Tile(*shape, bf16x6=dtype is torch.float32) for shape in shapes]

    def resident(tile: Tile) -> int:
        threads = devices.warp_size() * tile.num_warps
        registers = threads * (136 if tile.bf16x6 else 64) + tile.block_m * tile.block_n
        room = devices.current.shared_memory // tile.shared(dtype.itemsize)
        return max(1, min(3, room, devices.current.registers // registers))

    return [tile._replace(programs=resident(tile)) for tile in tiles]


# Runs


def layers(count: int = _LAYERS, seed: int = 0) -> list[Layer]:
    """Return drawn layers of models, and those of ResNeXt-50 (Xie et al. 2016), which the kernels here compute."""
    random_ = drawing.Source(f"tiles {seed}", drawing.OF_MODELS)
    found: dict[Layer, None] = {}
    while len(found) < count:
        layer, _, _ = convolution.draw(random_)
        one_tap = layer.kernel == layer.stride == 1
        if not (one_tap or layer.groups == layer.channels > 1 or layer.first):
            found[layer] = None
    grouped = [Layer(128 << i, 128 << i, (56 >> i,) * 2, 3, padding=1, groups=32, bias=False) for i in range(4)]
    return [*found, *grouped, Layer(3, 64, (224, 224), 7, 2, 3, bias=False)]


def runs(seed: int = 0) -> list[Run]:
    """Return the runs to time in a random order."""
    every = [
        Run(layer, batch, dtype, filters)
        for layer, batch, dtype, filters in itertools.product(layers(seed=seed), BATCHES, DTYPES, (False, True))
        if batch * layer.largest <= _LARGEST and layer.flops(batch) <= _OPERATIONS[dtype.itemsize]
    ]
    random.Random(seed).shuffle(every)
    return every


def _tensor(shape: Sequence[int], run: Run, device: str, empty: bool) -> torch.Tensor:
    """Return a channels-last tensor, as a volume."""
    *sizes, channels = shape[0], *shape[2:], shape[1]
    wide = (sizes[0], *[1] * (4 - len(sizes)), *sizes[1:], channels)
    made = torch.empty(wide, dtype=run.dtype, device=device) if empty else None
    tensor = torch.randn(wide, device=device).to(run.dtype) if made is None else made
    return tensor.permute(0, 4, 1, 2, 3)


def _operands(run: Run, device: str, empty: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the input, the filters and the result of a run's convolution."""
    layer = run.layer
    x = _tensor((run.batch, layer.channels, *layer.sizes), run, device, empty)
    out = _tensor((run.batch, layer.filters, *layer.result), run, device, True)
    return x, _tensor(layer.weight, run, device, empty), out


def _geometry(layer: Layer) -> Geometry:
    more, dims = 3 - len(layer.sizes), len(layer.sizes)
    each = zip((1, 0, 1), (layer.stride, layer.padding, layer.dilation), strict=True)
    stride, padding, dilation = [(fill,) * more + (value,) * dims for fill, value in each]
    return Geometry(stride, padding, dilation, layer.groups)  # type: ignore[arg-type]


def _problem(run: Run, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Problem:
    if run.filters and run.layer.transposed:
        return launch.problem_of(out, weight, x, _geometry(run.layer))
    of = launch.transposed_problem_of if run.layer.transposed else launch.problem_of
    return of(x, weight, out, _geometry(run.layer))


def _tiles(run: Run, problem: Problem, device: torch.device) -> list[Tile]:
    """Return the candidates of a run, each with the slices of K worth considering."""
    found = []
    for tile in candidates(run.dtype):
        sizes = (problem.channels, problem.columns) if run.filters else (problem.rows, problem.columns)
        if tile.block_n >= 2 * max(32, sizes[1]) or tile.block_m >= 4 * max(32, sizes[0]):
            continue
        counts = [1] if run.filters else select.possible_splits(problem, tile, device)
        # The first and the last number of slices, and one between.
        found += [tile._replace(splits=count) for count in sorted({counts[0], counts[-1], counts[len(counts) // 2]})]
    return found


def _call(run: Run, operands: Sequence[torch.Tensor], problem: Problem, tile: Tile) -> None:
    """Compute a run with a tile: the result, or the gradient of the filters in place of these."""
    x, weight, out = operands
    geometry, tile = _geometry(run.layer), select.fitting(tile, problem, x.device, run.filters)
    if run.filters:
        pair = (out, x) if run.layer.transposed else (x, out)
        launch.filter_gradient(*pair, weight, geometry, "ieee", tile)
    else:
        convolve = launch.convolve_transposed if run.layer.transposed else launch.convolve
        convolve(x, weight, None, out, geometry, "ieee", tile=tile)


def _aten(run: Run, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute a run with ATen."""
    x, weight, out = [each.squeeze(2) if len(run.layer.sizes) < 3 else each for each in operands]
    dims = len(run.layer.sizes)
    # A sequence is an image of height 1.
    stride, padding, dilation, more = [
        [fill] * (2 - dims) + list(values)
        for fill, values in zip((1, 0, 1, 0), (*run.layer.steps[:3], run.layer.steps[4]), strict=True)
    ]
    steps = stride, padding, dilation, run.layer.transposed, more, run.layer.groups
    if run.filters:
        return torch.ops.aten.convolution_backward(out, x, weight, None, *steps, [False, True, False])[1].unsqueeze(2)
    return torch.ops.aten.convolution(x, weight, None, *steps).unsqueeze(2)


# Times


@contextlib.contextmanager
def _as_on(multiprocessors: int) -> Iterator[None]:
    """Have choices for tensors on the CPU be those of a GPU with this number of multiprocessors."""
    with mock.patch.object(devices, "multiprocessors", lambda _: multiprocessors):
        yield


def _compile(run: Run, tile: Tile, target: GPUTarget, multiprocessors: int) -> None:
    """Compile a run's kernels into Triton's disk cache."""
    operands = _operands(run, "cpu", empty=True)
    with libentry.compiling(target), _as_on(multiprocessors):
        _call(run, operands, _problem(run, *operands), tile)


def _kernels(run: Run, tile: Tile) -> frozenset[str]:
    """Return descriptions of a run's kernels."""
    operands = _operands(run, "cpu", empty=True)
    found = launches(_call, (run, operands, _problem(run, *operands), tile))
    return frozenset([repr((each, each.options)) for each in found])


def _compiled(work: dict[Run, list[Tile]], seconds: float, jobs: int) -> dict[Run, list[Tile]]:
    """Compile in `jobs` processes for at most `seconds`, and return the tiles of each run that are ready."""
    target, hidden = driver.active.get_current_target(), {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    count, kernels = devices.multiprocessors(devices.current_device()), {}
    first: dict[str, tuple[Run, Tile]] = {}
    with _as_on(count):
        for run, tiles in work.items():
            for tile in tiles:
                kernels[run, tile] = _kernels(run, tile)
                for each in kernels[run, tile]:
                    first.setdefault(each, (run, tile))
    before = {name: os.environ.get(name) for name in hidden}
    os.environ.update(hidden)
    try:
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
        submitted = {item: pool.submit(_compile, *item, target, count) for item in dict.fromkeys(first.values())}
        done, _ = wait(submitted.values(), seconds)
        pool.shutdown(wait=True, cancel_futures=True)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    ready = {item for item, each in submitted.items() if each in done and not each.exception()}
    known = {each for item in ready for each in kernels[item]}
    return {run: [tile for tile in tiles if kernels[run, tile] <= known] for run, tiles in work.items()}


def _time(call: timing.Call) -> float:
    # A library's first call creates handles, which is not allowed during graph capture.
    call()
    return statistics.median(timing.device_samples(timing.captured(call, 1), _CALLS))


def sweep(
    compiling: float = 90, seconds: float = 60, jobs: int = os.cpu_count() or 1, seed: int = 0
) -> Iterator[Timed]:
    """Time runs with their tiles: compile for `compiling` seconds at most, then time for `seconds`."""
    device, work = devices.current_device(), {}
    for run in runs(seed):
        work[run] = _tiles(run, _problem(run, *_operands(run, "meta", empty=True)), device)
    ready = _compiled(work, compiling, jobs)
    end = time.monotonic() + seconds
    for run, tiles in ready.items():
        if time.monotonic() > end:
            return
        operands = _operands(run, devices.current.type)
        operands[2].normal_()
        problem, times, wrong = _problem(run, *operands), [], []
        expected = _aten(run, operands)
        own = [*operands[:1], torch.empty_like(operands[1]), operands[2]] if run.filters else [*operands]
        result, limit = own[1 if run.filters else 2], _TOLERANCE[run.dtype.itemsize] * expected.abs().max()
        for tile in tiles:
            call = functools.partial(_call, run, own, problem, tile)
            try:
                result.fill_(float("nan"))
                times.append((tile, _time(call)))
            except Exception:  # noqa: BLE001 - a tile that the device refuses is no candidate
                continue
            if not (result - expected).abs().max() <= limit:
                wrong.append(tile)
        bytes_ = sum(each.numel() * each.dtype.itemsize for each in operands)
        aten = _time(functools.partial(_aten, run, operands))
        if times:
            yield Timed(problem, run.filters, bytes_, aten, tuple(times), tuple(wrong))


def save(timed: Sequence[Timed], path: Path) -> None:
    """Write times as JSON."""
    rows = [
        {
            **each._asdict(),
            "problem": {**each.problem._asdict(), "dtype": str(each.problem.dtype).removeprefix("torch.")},
        }
        for each in timed
    ]
    path.write_text(json.dumps(rows))


def load(path: Path) -> list[Timed]:
    """Read what `save` wrote."""
    found = []
    for row in json.loads(path.read_text()):
        problem = Problem(**row["problem"] | {"dtype": getattr(torch, row["problem"]["dtype"])})
        times = tuple((Tile(*tile), us) for tile, us in row["times"])
        wrong = tuple(Tile(*tile) for tile in row["wrong"])
        found.append(Timed(problem, row["filters"], row["bytes"], row["aten"], times, wrong))
    return found
