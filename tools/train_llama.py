"""Train a Llama of Aquila-7B's proportions on the standard library's source text, by ATen and by Tritonite.

    python tools/train_llama.py --json docs/benchmarks/training.json      # on one GPU
    python tools/train_llama.py --quick --json quick.json                 # a tiny model, for the interpreter
    python tools/train_llama.py --resume run.pt --json training.json      # goes on where a killed command stopped

A step is a forward and a backward pass in bf16 autocast with activation checkpointing, clipping, and AdamW. Modes are
"aten", "eager" (`tritonite.enable`), "patched" (also `tritonite.patch` and `tritonite.optim`) and "compiled"
(`torch.compile(backend="tritonite")` and `tritonite.optim`). ATen trains with every seed, the others with the first.

The command exits with 1 if the final loss of a mode is not that of ATen's seeds: see `Judgement`. Figure and table are
written by tools/training_page.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from library_text import Vocabulary, digest, library_text
from training_runs import HEAD, QUICK, Judgement, Settings, Training, scaled, width_for

import tritonite
import tritonite.graph  # announces the backend to torch.compile
from tritonite.bench.run import current_commit

INTERPRETED = "a CPU in Triton's interpreter"
MODES = ("aten", "eager", "patched", "compiled")


class Stopped(Exception):
    """The command has made the steps that it may, or its time is over; its state is in the file of --save."""


def make_model(settings: Settings, seed: int) -> torch.nn.Module:
    """Return a Llama with random weights, in training with activation checkpointing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = settings.width // settings.head
    config = LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=settings.inner,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max(2048, settings.sequence),
        rms_norm_eps=1e-5,
        use_cache=False,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(tritonite.device).train()
    with warnings.catch_warnings():
        # transformers has renamed the method; both names work in the versions that have the new one.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def batch(settings: Settings, tokens: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Return the sequences of a step, which depend on seed and step alone, so that a resumed run draws the same."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - settings.sequence, (settings.batch, 1), generator=generator)
    return tokens[starts + torch.arange(settings.sequence)].to(tritonite.device)


class Run:
    """A training run in one mode, from its first step or from a stored state."""

    def __init__(self, settings: Settings, training: Training) -> None:
        self.settings, self.training = settings, training
        self.model = make_model(settings, training.seed)
        training.parameters = sum(each.numel() for each in self.model.parameters())
        # Weight decay is for matrices, as in Llama's training.
        matrices = [each for each in self.model.parameters() if each.dim() > 1]
        vectors = [each for each in self.model.parameters() if each.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        own_step = training.mode in ("patched", "compiled")
        # ATen's fastest step is its fused one, which `enable` serves by one launch, too.
        fused = None if own_step else True
        self.optimizer = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), fused=fused)
        self.clip: Callable[..., object] = torch.nn.utils.clip_grad_norm_
        self.forward: Callable[..., Any] = self.model
        if training.mode == "patched":
            tritonite.patch(self.model)
        if training.mode == "compiled":
            torch._dynamo.reset()
            self.forward = torch.compile(self.model, backend="tritonite")
        if own_step:
            tritonite.optim.fuse(self.optimizer)
            self.clip = tritonite.optim.clip_grad_norm_
        if training.state is not None:
            self.model.load_state_dict(training.state["model"])
            self.optimizer.load_state_dict(training.state["optimizer"])
            training.state = None

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Make the next step. Return its loss, on the device."""
        number = len(self.training.losses)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(number)
        given = batch(self.settings, tokens, self.training.seed, number)
        with torch.autocast(tritonite.device, torch.bfloat16):
            loss = self.forward(input_ids=given, labels=given).loss
        loss.backward()
        self.clip(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Command:
    """The runs of a command in their order, and the file that a killed command is resumed from."""

    def __init__(self, settings: Settings, runs: Sequence[Training], save: Path | None = None) -> None:
        self.settings, self.runs, self.save = settings, list(runs), save
        self.tokens = self._tokens()
        self._current: Run | None = None

    @classmethod
    def resumed(cls, path: Path) -> Command:
        """Return the command that stored a file, which goes on storing it."""
        # On the CPU, because the optimizer puts states beside their parameters, but leaves step counts where they are.
        stored = torch.load(path, map_location="cpu", weights_only=True)
        runs = [Training(**each) for each in stored["runs"]]
        return cls(Settings(**stored["settings"]), runs, path)

    def _tokens(self) -> torch.Tensor:
        text = library_text(self.settings.characters)
        return Vocabulary.of(text, self.settings.vocabulary).encode(text)

    def train(self, save_every: int = 0, stop_after: int = 0, seconds: float = math.inf) -> None:
        """Finish all runs.

        Args:
            save_every: store the state each time after this many steps of a run; 0 for never.
            stop_after: raise Stopped, with the state stored, after this many steps of this call; 0 for never.
            seconds: raise Stopped when they are over.
        """
        begin, made = time.perf_counter(), 0
        with _deterministic(self.settings.deterministic):
            for training in self.runs:
                if len(training.losses) >= self.settings.steps:
                    continue
                for done in self._steps(training, save_every):
                    made += 1
                    if made == stop_after or time.perf_counter() - begin > seconds:
                        self._store()
                        raise Stopped(f"stopped in {training.mode}, seed {training.seed}, after step {done}")
                self._current = None
                _free()
                _show(training, self.settings)

    def _steps(self, training: Training, save_every: int) -> Iterator[int]:
        """Make the steps of a run that are left, and yield their numbers."""
        # Outside the scope, so that all modes begin with the same bits.
        run = Run(self.settings, training)
        self._current = run
        with tritonite.use_gems([] if training.mode == "aten" else None):
            if tritonite.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            while (done := len(training.losses)) < self.settings.steps:
                if save_every and done and done % save_every == 0:
                    self._store()
                started = time.perf_counter()
                # Reading the loss waits for the device, so that the time is that of the whole step.
                training.losses.append(run.step(self.tokens).item())
                training.milliseconds.append((time.perf_counter() - started) * 1e3)
                training.peak_bytes = max(training.peak_bytes, _peak())
                yield done + 1

    def _store(self) -> None:
        """Store all runs in a file. A kill at any time leaves the file before or the new one."""
        if self.save is None or (run := self._current) is None:
            return
        records = [vars(each) | {"state": run.state() if each is run.training else None} for each in self.runs]
        new = self.save.with_suffix(".new")
        torch.save({"settings": dataclasses.asdict(self.settings), "runs": records}, new)
        os.replace(new, self.save)

    def result(self) -> dict[str, Any]:
        """Return settings, machine and runs, as they are stored as JSON."""
        runs = [each.record(self.settings) for each in self.runs]
        return {
            "commit": current_commit(),
            "device": torch.cuda.get_device_name() if tritonite.device == "cuda" else INTERPRETED,
            "torch": torch.__version__,
            "settings": dataclasses.asdict(self.settings) | {"inner": self.settings.inner},
            "text": {"tokens": len(self.tokens), "digest": digest(self.tokens)},
            "runs": runs,
            "judgement": vars(Judgement.of(runs, self.settings.final_steps)),
        }


@contextlib.contextmanager
def _deterministic(on: bool):
    """Use deterministic algorithms within the context, which ATen's attention needs for equal bits on a GPU."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _free() -> None:
    """Free the memory of a run, whose compiled functions refer to each other."""
    torch._dynamo.reset()
    gc.collect()
    if tritonite.device == "cuda":
        torch.cuda.empty_cache()


def _peak() -> int:
    """Return the most bytes that PyTorch has allocated on the GPU, 0 without one."""
    return torch.cuda.max_memory_allocated() if tritonite.device == "cuda" else 0


def _show(training: Training, settings: Settings) -> None:
    found = training.record(settings)
    print(
        f"{training.mode:8} seed {training.seed}: loss {training.losses[0]:.4f} to {training.losses[-1]:.4f}, "
        f"{found['tokens_per_second']:,.0f} tokens/s, {training.peak_bytes / 2**30:.2f} GiB, "
        f"first step {training.milliseconds[0] / 1e3:.1f} s, all {sum(training.milliseconds) / 1e3:.1f} s",
        flush=True,
    )


def _settings(options: argparse.Namespace) -> Settings:
    fields = {"deterministic": options.deterministic}
    if options.quick:
        return dataclasses.replace(QUICK, **fields, **({"steps": options.steps} if options.steps else {}))
    width = options.width or (width_for(options.memory, options.sequence, options.batch) if options.memory else 896)
    if width % HEAD:
        raise SystemExit(f"--width {width} is not a multiple of {HEAD}, the width of a head")
    return scaled(width, sequence=options.sequence, batch=options.batch, steps=options.steps or 300, **fields)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="write settings, losses, speeds and memory here")
    made.add_argument("--quick", action="store_true", help="a tiny model and 5 steps")
    size = made.add_mutually_exclusive_group()
    size.add_argument("--width", type=int, help="width of the model, a multiple of 128; 896 has 107M parameters")
    size.add_argument("--memory", type=float, help="GiB of the GPU: train the largest model that fits")
    made.add_argument("--sequence", type=int, default=1024)
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--steps", type=int)
    made.add_argument("--modes", default=",".join(MODES), help="which of aten,eager,patched,compiled to run")
    made.add_argument("--seeds", type=int, default=3, help="number of seeds that ATen trains with")
    made.add_argument("--deterministic", action="store_true", help="use deterministic algorithms, for equal bits")
    made.add_argument("--save", type=Path, help="file that a killed command can be resumed from")
    made.add_argument("--save-every", type=int, default=0, help="store the state after this many steps each")
    made.add_argument("--stop-after", type=int, default=0, help="store the state and stop after this many steps")
    made.add_argument("--limit", type=float, default=math.inf, help="store the state and stop after these seconds")
    made.add_argument("--resume", type=Path, help="go on with a stored command; its settings are kept")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.resume:
        command = Command.resumed(options.resume)
    else:
        seeds = [Training("aten", seed) for seed in range(options.seeds)]
        modes = options.modes.split(",")
        if unknown := set(modes) - set(MODES) or "aten" not in modes:
            raise SystemExit(f"--modes takes {', '.join(MODES)}, and aten is one of them: {unknown}")
        runs = [*seeds, *(Training(mode, 0) for mode in MODES[1:] if mode in modes)]
        command = Command(_settings(options), runs, options.save)
    if command.settings.deterministic:
        # cuBLAS reads it when PyTorch makes its first handle.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        command.train(options.save_every, options.stop_after, options.limit)
    except Stopped as stopped:
        print(f"{stopped}; go on with --resume {command.save}" if command.save else f"{stopped}; nothing is stored")
        return 3
    result = command.result()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    judged = Judgement(**result["judgement"])
    for name, loss in judged.final.items():
        print(f"final loss {loss:.4f}: {name}")
    print(f"ATen's mean {judged.mean:.4f}, spread {judged.spread:.4f}, step noise {judged.noise:.4f}")
    for mode in judged.wrong:
        print(f"{mode}: the final loss is {judged.tolerance:.4f} or more from ATen's mean")
    return 1 if judged.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
