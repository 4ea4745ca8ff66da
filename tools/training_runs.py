"""Settings, runs and the judge of tools/train_llama.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from library_text import BYTES

# Aquila-7B: 32 layers of 4096 with 32 heads of 128, an MLP of 11008, 100008 tokens.
HEAD, MLP, TOKENS = 128, 11008 / 4096, 100008 / 4096
# Steps that are left out of a run's speed: kernels are compiled and memory is allocated in them.
WARM_STEPS = 5
# The part of the last steps whose mean loss is a run's final loss.
FINAL = 1 / 15


@dataclass(frozen=True)
class Settings:
    """The model, its data and the optimizer, the same for all runs of a command."""

    width: int = 896
    layers: int = 7
    head: int = HEAD
    vocabulary: int = 21888
    sequence: int = 1024
    batch: int = 8
    steps: int = 300
    rate: float = 6e-4
    clip: float = 1.0
    characters: int = 12_000_000
    deterministic: bool = False

    @property
    def inner(self) -> int:
        """The width of the MLP, a multiple of 64."""
        return max(1, round(self.width * MLP / 64)) * 64

    @property
    def final_steps(self) -> int:
        return max(2, round(self.steps * FINAL))

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step: linear growth for a tenth of the steps, then a cosine down to a tenth."""
        warm = max(1, self.steps // 10)
        if step < warm:
            return self.rate * (step + 1) / warm
        passed = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * passed))


QUICK = Settings(
    width=32, layers=1, head=8, vocabulary=320, sequence=16, batch=2, steps=5, rate=5e-3, characters=40_000
)


def scaled(width: int, **fields: Any) -> Settings:
    """Return settings of a width, a multiple of 128, with Aquila's proportions."""
    return Settings(
        width=width, layers=max(1, width // HEAD), vocabulary=max(BYTES, round(width * TOKENS / 64) * 64), **fields
    )


def width_for(gibibytes: float, sequence: int, batch: int) -> int:
    """Return the largest width whose training state, logits and checkpoints fit in memory."""

    def needed(width: int) -> float:
        own = scaled(width)
        layer = 4 * width * width + 3 * width * own.inner
        parameters = own.layers * layer + 2 * own.vocabulary * width
        # Float32 parameters, gradients and two moments, and bf16 copies; logits in bf16 and twice in float32; the
        # input of each layer, and the activations of one.
        tokens = sequence * batch
        return (
            18 * parameters
            + 10 * tokens * own.vocabulary
            + tokens * (2 * own.layers * width + 16 * (width + own.inner))
        )

    widths = [width for width in range(HEAD, 4096 + HEAD, HEAD) if needed(width) < gibibytes * 2**30]
    return max(widths, default=HEAD)


@dataclass
class Training:
    """One run: its mode, its seed, and what it has found so far."""

    mode: str
    seed: int
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    parameters: int = 0
    peak_bytes: int = 0
    state: dict[str, Any] | None = None

    def record(self, settings: Settings) -> dict[str, Any]:
        """Return what is stored as JSON. The speed is that of the median step."""
        timed = self.milliseconds[WARM_STEPS:] or self.milliseconds
        median = statistics.median(timed)
        return {
            "mode": self.mode,
            "seed": self.seed,
            "losses": self.losses,
            "tokens_per_second": settings.batch * settings.sequence / median * 1e3,
            "step_milliseconds": median,
            "first_step_milliseconds": self.milliseconds[0],
            "peak_bytes": self.peak_bytes,
            "parameters": self.parameters,
        }


@dataclass(frozen=True)
class Judgement:
    """Final losses beside those of ATen's seeds.

    A run's final loss is the mean loss of its last steps. It is right if it lies within `tolerance` of the mean of
    ATen's final losses. The tolerance is the larger of two numbers: `spread`, the largest of ATen's final losses minus
    the smallest, and `noise`, the standard error of one final loss, by the losses of ATen's last steps.
    """

    final: dict[str, float]
    mean: float
    spread: float
    noise: float
    tolerance: float
    wrong: list[str]
    # The largest difference of a step's loss from that of ATen's run with the same seed, by mode.
    apart: dict[str, float]

    @classmethod
    def of(cls, runs: Sequence[dict[str, Any]], last: int) -> Judgement:
        """Judge runs by the mean of their `last` losses."""
        own = {each["seed"]: each["losses"] for each in runs if each["mode"] == "aten"}
        finals = {seed: statistics.fmean(losses[-last:]) for seed, losses in own.items()}
        mean, spread = statistics.fmean(finals.values()), max(finals.values()) - min(finals.values())
        noise = statistics.fmean(statistics.stdev(losses[-last:]) for losses in own.values()) / math.sqrt(last)
        tolerance = max(spread, noise)
        final, apart = {}, {}
        for each in runs:
            if each["mode"] == "aten":
                continue
            final[each["mode"]] = statistics.fmean(each["losses"][-last:])
            apart[each["mode"]] = max(
                abs(ours - theirs) for ours, theirs in zip(each["losses"], own[each["seed"]], strict=True)
            )
        # Written so that nan is wrong.
        wrong = [mode for mode, loss in final.items() if not abs(loss - mean) <= tolerance]
        final |= {f"aten, seed {seed}": loss for seed, loss in finals.items()}
        return cls(final, mean, spread, noise, tolerance, wrong, apart)
