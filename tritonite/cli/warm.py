"""`tritonite warm`: compile the kernels of a model's passes, and save them to a file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import torch
import typer

import tritonite
from tritonite.cli.bench import MODEL_NAMES, TRAINED_NAMES, known_models, model_dtype, usual_prompt
from tritonite.cli.common import app, console
from tritonite.runtime import cache


@app.command()
def warm(
    model: Annotated[list[str], typer.Option(help=f"model: {MODEL_NAMES}; repeatable")],
    dtype: Annotated[str, typer.Option(help="dtype; default bfloat16, in the interpreter float32")] = "",
    batch: Annotated[list[int] | None, typer.Option(min=1, help="sequences or images; repeatable; default 1")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="tokens of a prompt; repeatable; default 512")] = None,
    train: Annotated[bool, typer.Option(help=f"warm a training step of --model: {TRAINED_NAMES}")] = False,
    channels_last: Annotated[bool, typer.Option(help="make models of images, and their images, channels-last")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes that compile; default one for each core")] = None,
    save: Annotated[Path | None, typer.Option(help="file to write the kernels to, for load_kernels")] = None,
) -> None:
    """Compile the kernels of a model's passes in parallel, into Triton's disk cache and into a file."""
    from tritonite.bench import models

    if save:
        cache.check_writable(save)
    kind, tiny = model_dtype(dtype), tritonite.backend.interpreted
    for name in known_models(model):
        for size in batch or [1]:
            for length in tokens or [usual_prompt()]:
                passes = models.phases(name, models.Workload(kind, size, length, tiny, channels_last), train)
                for phase in passes:
                    with contextlib.nullcontext() if phase.trains else torch.inference_mode():
                        done = tritonite.warm(phase.forward, jobs=jobs)
                        phase.restore()
                    line = f"{name} {phase.name}, batch {size}, {phase.tokens} tokens: {done}"
                    console.print(line, highlight=False, soft_wrap=True, markup=False)
    if save:
        count = tritonite.save_kernels(save)
        console.print(f"{count} kernels written to {save}", highlight=False, soft_wrap=True)
