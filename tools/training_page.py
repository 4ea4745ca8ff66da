"""Write docs/training-curves.md and its picture from the results of tools/train_llama.py and tools/two_gpus.py.

    python tools/training_page.py            # reads docs/benchmarks/training.json and docs/benchmarks/two_gpus.json
    python tools/training_page.py --check    # says whether the page is stale

A part whose results are missing says with which command they are made.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generated
from two_gpus_table import Row, table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "benchmarks"
PAGE = ROOT / "docs" / "training-curves.md"
MODES = {
    "eager": "`enable()`",
    "patched": "`enable()`, `patch(model)`, `optim.fuse`",
    "compiled": '`torch.compile(backend="tritonite")`, `optim.fuse`',
}


def main() -> int:
    training, two = (_read(name) for name in ("training", "two_gpus"))
    if training and "--check" not in sys.argv:
        draw(training, PAGE.with_suffix(".png"))
    text = "\n".join(["# Training beside ATen", "", *curves(training), "", *parallel(two), ""])
    return generated.write(PAGE, text, "docs/training-curves.md", "python tools/training_page.py")


def _read(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _machine(found: dict[str, Any]) -> str:
    """Return a sentence on where results are from."""
    return f"Run on {found['device']} with torch {found['torch']}, at commit {found['commit']}."


def curves(found: dict[str, Any] | None) -> Iterator[str]:
    """Yield the lines of the part on loss curves."""
    yield "## Loss curves"
    yield ""
    if found is None:
        yield "There are no results yet: `python tools/train_llama.py --json docs/benchmarks/training.json` makes them."
        return
    own, judged, runs = found["settings"], found["judgement"], found["runs"]
    yield (
        f"A Llama of Aquila-7B's proportions, with {runs[0]['parameters'] / 1e6:.0f}M parameters in {own['layers']} "
        f"layers of {own['width']}, learns the source text of Python's standard library from scratch: {own['steps']} "
        f"steps of {own['batch']} x {own['sequence']} tokens in bf16 autocast, with activation checkpointing, clipping "
        f"and AdamW. {_machine(found)}"
    )
    yield ""
    yield f"![Loss by step, for ATen's seeds and for Tritonite]({PAGE.stem}.png)"
    yield ""
    yield "| run | final loss | tokens a second | of ATen's | peak memory | largest difference of a step's loss |"
    yield "| --- | --- | --- | --- | --- | --- |"
    speed = statistics.median(run["tokens_per_second"] for run in runs if run["mode"] == "aten")
    for run in runs:
        is_aten = run["mode"] == "aten"
        name = f"ATen, seed {run['seed']}" if is_aten else f"{MODES[run['mode']]}, seed {run['seed']}"
        final = judged["final"][f"aten, seed {run['seed']}" if is_aten else run["mode"]]
        apart = "" if is_aten else f"{judged['apart'][run['mode']]:.3f}"
        memory = f"{run['peak_bytes'] / 2**30:.2f} GiB" if run["peak_bytes"] else ""
        ratio = f"{run['tokens_per_second'] / speed:.2f}"
        yield f"| {name} | {final:.4f} | {run['tokens_per_second']:,.0f} | {ratio} | {memory} | {apart} |"
    yield ""
    last = max(2, round(own["steps"] / 15))
    yield (
        f"A run's final loss is the mean of its last {last} steps. ATen's mean is {judged['mean']:.4f}, the spread of "
        f"its seeds {judged['spread']:.4f}, and the standard error of one final loss {judged['noise']:.4f}. A final "
        f"loss has to be within the larger of the two, {judged['tolerance']:.4f}, of the mean; "
        + (f"{', '.join(judged['wrong'])} is not. " if judged["wrong"] else "all are. ")
        + "The last column compares a run with ATen's run of the same seed. The speed is that of the median step."
    )


def parallel(found: dict[str, Any] | None) -> Iterator[str]:
    """Yield the lines of the part on two GPUs."""
    yield "## A step on two processes"
    yield ""
    if found is None:
        yield "There are no results yet: `python tools/two_gpus.py --json docs/benchmarks/two_gpus.json` makes them."
        return
    own = found["size"]
    yield (
        f"A Llama with layers of {own['width']}, {own['batch']} x {own['sequence']} tokens, on two processes with "
        f"{found['backend']}. Loss and gradients are compared with ATen's on one GPU, in float32, or in bfloat16 for "
        "mixed precision and flash attention. A gradient's error is the norm of the difference by the norm of ATen's "
        f"gradient. {_machine(found)}"
    )
    yield ""
    yield table([Row(**row) for row in found["rows"]])


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the losses of all runs in one picture, and below it their distance from ATen's run of the same seed."""
    import matplotlib
    from matplotlib.figure import Figure

    from tritonite.bench.charts import PALETTE, STYLE

    runs = found["runs"]
    atens = {run["seed"]: run["losses"] for run in runs if run["mode"] == "aten"}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for i, losses in enumerate(atens.values()):
            above.plot(losses, color=PALETTE[0], linewidth=1.0, alpha=0.6, label=None if i else "ATen, all seeds")
        for run, color in zip((run for run in runs if run["mode"] != "aten"), PALETTE[1:], strict=False):
            above.plot(run["losses"], color=color, linewidth=1.0, label=f"Tritonite, {run['mode']}")
            apart = [ours - theirs for ours, theirs in zip(run["losses"], atens[run["seed"]], strict=True)]
            below.plot(apart, color=color, linewidth=0.8)
        above.set(ylabel="loss")
        above.legend()
        below.set(xlabel="step", ylabel="loss - ATen's")
        figure.suptitle("A Llama of Aquila-7B's proportions, from scratch, bf16")
        figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
