"""Fit a device's tables of products within a number of seconds: draw, compile, time, fit (`tritonite tune`)."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch
import triton

import tritonite
from tritonite import devices
from tritonite.devices import models
from tritonite.engine.gemm import cost, fitted
from tritonite.engine.gemm.problem import Problem
from tritonite.engine.gemm.table import Config
from tritonite.tuning import sweep, tuner
from tritonite.tuning.sweep import Kind, Sample, Timed

# Shares of the budget for compilation and timing; the rest is for fits.
_COMPILING, _TIMING = 0.5, 0.3
# Shares of a part's fit: to two thirds of the problems, which is judged by the others, to all, and to ATen's times.
_SEEN, _ALL, _ATEN = 0.4, 0.4, 0.2
# Problems drawn for a part, for each second of the budget, and the least and the most.
_DRAWN, _LEAST_DRAWN, _MOST_DRAWN = 0.5, 6, 300
# Tiles that a problem is timed with at least: their order is what a fit learns.
_LEAST_TILES = 2
# Seconds of fits after Ctrl-C.
_AFTER_INTERRUPT = 15.0


@dataclass
class Part:
    """One of a device's tables: for operands of a dtype, of a kind of problems."""

    dtype: torch.dtype
    kind: Kind
    table: cost.Table
    samples: list[Sample] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    fitted: cost.Table | None = None
    # Geometric means of (time with the chosen tiles) / (best time) on unseen problems: before the fit, and after. None
    # without a fit.
    regrets: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.kind.value}"


class Session:
    """The fit of the current device's tables. `tell` is called with the seconds gone and what is being done."""

    def __init__(
        self,
        seconds: float,
        seed: int = 0,
        jobs: int = 1,
        tell: Callable[[float, str], object] = lambda seconds, text: None,
    ) -> None:
        self.begin, self.seconds, self.seed, self.jobs, self.tell = time.monotonic(), seconds, seed, jobs, tell
        self.device = devices.current_device()
        self.name, self.count = devices.name_of(self.device), devices.multiprocessors(self.device)
        self.start = _start(self.name, self.device)
        self.parts = _parts(self.start)
        self.interrupted = False

    def run(self) -> None:
        """Draw, compile, time and fit. Ctrl-C ends compilation or timing, and what was timed is fitted."""
        try:
            self._draw()
            self._compile(self.seconds * _COMPILING)
            self._time(self.seconds * (_COMPILING + _TIMING))
        except KeyboardInterrupt:
            self.interrupted = True
        try:
            self._fit(self._gone() + _AFTER_INTERRUPT if self.interrupted else self.seconds)
        except KeyboardInterrupt:
            self.interrupted = True

    @property
    def tables(self) -> dict[int, cost.Table]:
        """The device's tables by the bytes of an element: what was fitted, and the initial tables where nothing was."""
        found = {}
        for size, table in self.start.items():
            own = {part.kind: part.fitted for part in self.parts if part.dtype.itemsize == size and part.fitted}
            whole = own.get(Kind.MEMORY, table)
            found[size] = dataclasses.replace(
                whole,
                cached=own.get(Kind.CACHE, table.cached),
                short=own.get(Kind.SHORT, table.short),
                pointers=own.get(Kind.POINTERS, table.pointers),
            )
        return found

    @property
    def versions(self) -> Mapping[str, str]:
        """Architecture and versions that the tables were fitted with, for a file of tables."""
        return {
            "architecture": devices.architecture(self.device),
            "tritonite": tritonite.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
        }

    @property
    def n_fitted(self) -> int:
        """The number of parts with fitted costs."""
        return sum(part.fitted is not None for part in self.parts)

    def _gone(self) -> float:
        return time.monotonic() - self.begin

    def _draw(self) -> None:
        count = max(_LEAST_DRAWN, min(_MOST_DRAWN, int(self.seconds * _DRAWN)))
        for part in self.parts:
            self.tell(self._gone(), f"drawing products of {part}")
            part.samples = sweep.sampled(part.kind, part.dtype, part.table, count, self.seed)

    def _compile(self, end: float) -> None:
        """Compile the samples' kernels until `end`, and leave tiles without a kernel out.

        Parts take turns, each with the kernel that most of its samples share.
        """
        if devices.current.interpreted:
            return
        keys: dict[tuple[Problem, Config], Hashable] = {}
        first: dict[Hashable, tuple[Problem, Config]] = {}
        shared: list[list[Hashable]] = []
        for part in self.parts:
            uses: Counter[Hashable] = Counter()
            for problem, configs in part.samples:
                for config in configs:
                    run = sweep.run_as(config, problem, self.device)
                    key = keys[problem, config] = sweep.kernel_of(problem, run)
                    first.setdefault(key, (problem, run))
                    uses[key] += 1
            shared.append([key for key, _ in uses.most_common()])
        turns = itertools.chain.from_iterable(itertools.zip_longest(*shared))
        order = [key for key in dict.fromkeys(turns) if key is not None]

        def tell(done: int) -> None:
            self.tell(self._gone(), f"compiling kernels, {done} of {len(order)}")

        tell(0)
        work = [first[key] for key in order]
        errors = tuner.compile_all(work, self.jobs, seconds=max(0.0, end - self._gone()), tell=tell)
        ready = {key for key, error in zip(order, errors, strict=True) if error is None}
        for part in self.parts:
            part.samples = [
                Sample(problem, [config for config in configs if keys[problem, config] in ready])
                for problem, configs in part.samples
            ]

    def _time(self, end: float) -> None:
        """Time samples until `end`, of each part for the same time."""
        for left, part in zip(range(len(self.parts), 0, -1), self.parts, strict=True):
            last = self._gone() + (end - self._gone()) / left
            for sample in part.samples:
                if self._gone() > last:
                    break
                if len(sample.configs) >= _LEAST_TILES:
                    self.tell(self._gone(), f"timing products of {part}, {len(part.timed)} done")
                    part.timed.append(sweep.time_sample(sample, part.kind))

    def _fit(self, end: float) -> None:
        """Fit each part's costs until `end`. A fit that chooses no better on unseen problems is dropped."""
        parts = [part for part in self.parts if len(part.timed) >= sweep.LEAST_PROBLEMS]
        for left, part in zip(range(len(parts), 0, -1), parts, strict=True):
            self.tell(self._gone(), f"fitting {part}, {len(part.timed)} products")
            seconds = max(0.0, end - self._gone()) / left
            two_thirds = len(part.timed) * 2 // 3
            seen, unseen = part.timed[:two_thirds], part.timed[two_thirds:]
            found = sweep.fit(seen, part.table, self.count, seconds * _SEEN)
            before, after = [sweep.regret(unseen, each, self.count) for each in (part.table, found)]
            part.regrets = before, after
            if after > before:
                continue
            found = sweep.fit(part.timed, found, self.count, seconds * _ALL)
            # In float32 the model does not describe cuBLAS's times.
            if part.dtype is torch.bfloat16 and part.kind is not Kind.POINTERS:
                found = sweep.fit_aten(part.timed, found, self.count, seconds * _ATEN)
            part.fitted = found


def _start(name: str, device: torch.device) -> dict[int, cost.Table]:
    """Return the tables that the fit starts from: the device's shipped ones, or a measured device's."""
    found = fitted.shipped(name, devices.architecture(device)).tables
    if found:
        return found
    measured = next(model for model in models.MODELS if model.measured)
    found = fitted.shipped(measured.name, measured.architecture).tables
    return {size: cost.without_wgmma(table) for size, table in found.items()}


def _parts(start: Mapping[int, cost.Table]) -> list[Part]:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        whole = start[dtype.itemsize]
        own = {Kind.MEMORY: whole, Kind.CACHE: whole.cached, Kind.SHORT: whole.short, Kind.POINTERS: whole.pointers}
        found += [Part(dtype, kind, table) for kind, table in own.items() if table is not None]
    return found
