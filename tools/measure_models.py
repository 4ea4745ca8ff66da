"""Measure SmolLM2's answers and its speed of decoding, and write docs/benchmarks/smollm2.json.

    python tools/measure_models.py [--json FILE] [--new-tokens 64] [--rounds 5] [--prompts 8] [--only answers|speeds]

Answers are greedy, in float32 and bfloat16, by ATen and by Tritonite. Speeds are tokens a second of generation in
bfloat16 at batch 1 and 32, by ATen, by Tritonite, and by Tritonite with a patched model. In the interpreter only
answers are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tritonite
from tritonite.bench import run
from tritonite.cli.common import console
from tritonite.demo import smollm2

FILE = Path(__file__).parent.parent / "docs" / "benchmarks" / "smollm2.json"
BATCHES = (1, 32)
# Tokens of a generation whose kernels are compiled before it is measured.
_WARMED_TOKENS = 4
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


def answers(dtype: torch.dtype, prompts: int, new_tokens: int) -> list[dict[str, Any]]:
    """Return the answers to the first prompts, as dicts of smollm2.Answer."""
    model, tokenizer = smollm2.load(dtype)
    exact = None if dtype is torch.float32 else smollm2.load(torch.float32)[0]
    _warm(model, [smollm2.encoded(tokenizer, prompt) for prompt in smollm2.PROMPTS[:prompts]])
    found = []
    for prompt in smollm2.PROMPTS[:prompts]:
        answer = smollm2.answer(model, tokenizer, prompt, new_tokens, in_float32=exact)
        found.append(dataclasses.asdict(answer))
        console.print(f"{dtype} {found[-1]}", markup=False)
    return found


def _warm(model: Any, prompts: list[torch.Tensor], **options: Any) -> None:
    """Compile in processes what a prompt and the first tokens need, which is nearly all that later tokens need."""
    generations = [(model, ids, _WARMED_TOKENS) for ids in prompts]
    if not tritonite.backend.interpreted:
        with torch.inference_mode(), tritonite.use_gems():
            tritonite.warm(smollm2.greedy, shapes=generations, **options)


def speeds(rounds: int, new_tokens: int) -> list[dict[str, Any]]:
    """Return tokens a second for each batch and cache: median of the rounds, in which providers take turns."""
    model, tokenizer = smollm2.load(torch.bfloat16)
    patched = smollm2.load(torch.bfloat16)[0]
    tritonite.patch(patched)
    ways = {
        "aten": (model, contextlib.nullcontext),
        "tritonite": (model, tritonite.use_gems),
        "patched": (patched, tritonite.use_gems),
    }
    ids = smollm2.encoded(tokenizer, smollm2.QUESTIONS[0])
    rows = []
    for batch in BATCHES:
        for cache, options in CACHES.items():
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for own in (model, patched):
                _warm(own, [ids.expand(batch, -1).contiguous()], **options)
            for _ in range(rounds):
                for name, (own, scope) in ways.items():
                    with scope():
                        # The first call after a switch of providers finds caches cold.
                        _seconds(own, ids.expand(batch, -1), 4, options)
                        taken[name].append(_seconds(own, ids.expand(batch, -1), new_tokens, options))
            per_second = {name: batch * new_tokens / statistics.median(each) for name, each in taken.items()}
            rows.append({"batch": batch, "cache": cache, "new_tokens": new_tokens, "tokens_per_second": per_second})
            console.print(str(rows[-1]), markup=False)
    return rows


def _seconds(model: Any, ids: torch.Tensor, new_tokens: int, options: dict[str, Any]) -> float:
    """Return the seconds of the generation of exactly `new_tokens` tokens, the prompt included."""
    ids = ids.contiguous()
    _synchronize()
    begin = time.perf_counter()
    with torch.inference_mode():
        smollm2.greedy(model, ids, new_tokens, min_new_tokens=new_tokens, **options)
    _synchronize()
    return time.perf_counter() - begin


def _synchronize() -> None:
    if tritonite.device == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=len(smollm2.PROMPTS))
    parser.add_argument("--only", choices=("answers", "speeds"))
    given = parser.parse_args()
    interpreted = tritonite.backend.interpreted
    if interpreted and given.only == "speeds":
        parser.error("speeds need a GPU, and kernels run in Triton's interpreter")
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) if interpreted else (torch.float32, torch.bfloat16)
    if given.only == "speeds":
        dtypes = ()
    command = " ".join(["python", "tools/measure_models.py", *sys.argv[1:]])
    found: dict[str, list[dict[str, Any]]] = {}
    measured: dict[str, Any] = {"machine": dataclasses.asdict(run.machine(command)), "answers": found, "speeds": []}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    for dtype in dtypes:
        found[str(dtype).removeprefix("torch.")] = answers(dtype, given.prompts, given.new_tokens)
        # After each dtype, so that an interrupted command leaves what it has found.
        given.json.write_text(json.dumps(measured, indent=1) + "\n")
    if not interpreted and given.only != "answers":
        measured["speeds"] = speeds(given.rounds, given.new_tokens)
        given.json.write_text(json.dumps(measured, indent=1) + "\n")
    right = all(
        smollm2.passes([smollm2.Answer(**each) for each in found[name]], getattr(torch, name)) for name in found
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
