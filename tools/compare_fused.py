"""Compare fused operators, and training steps of a patched Llama, with ATen and with liger-kernel. Needs a GPU.

    python tools/compare_fused.py [--json FILE] [NAMES]

Prints a row a function: milliseconds of the device forward, and forward with backward, and the peak of allocated memory
beyond the operands in MB. A step of Llama has 4 x 2048 tokens; its times include the host. Providers take turns.
Columns of liger-kernel appear if it is installed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tritonite
from tritonite import fused
from tritonite.bench import timing

functional = torch.nn.functional
LIGER = importlib.util.find_spec("liger_kernel") is not None
ROWS, WIDTH, INNER, WORDS, TOKENS = 8192, 4096, 11008, 128256, 16384
ROUNDS = 5
# Cycles for which the device is kept busy while the host queues a call and its gradient.
_CYCLES = 2_000_000
Call = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """A function by provider, and what makes its operands; operands that require gradients are differentiated."""

    make: Callable[[], Sequence[torch.Tensor]]
    providers: dict[str, Call]


def normal(*shape: int, grad: bool = True, scale: float = 1.0) -> torch.Tensor:
    made = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale
    return made.requires_grad_(grad)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(WORDS, shape, device="cuda")


def _rope_operands() -> list[torch.Tensor]:
    angles = torch.rand(1, 2048, 64, device="cuda")
    both = torch.cat((angles, angles), -1).to(torch.bfloat16)
    return [normal(4, 32, 2048, 128), normal(4, 8, 2048, 128), both.cos(), both.sin()]


def _rope_aten(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return [turned(query), turned(key)]


def _rope_fused(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    half = cos.shape[-1] // 2
    results = fused.rotary_embedding(query.transpose(1, 2), key.transpose(1, 2), cos[..., :half], sin[..., :half])
    return [x.transpose(1, 2) for x in results if x is not None]


def _jsd_aten(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    p, q = (functional.log_softmax(x.float(), -1) for x in (teacher, student))
    m = torch.lerp(p.exp(), q.exp(), 0.5).log()
    each = 0.5 * (functional.kl_div(m, p, reduction="none", log_target=True)) + 0.5 * (
        functional.kl_div(m, q, reduction="none", log_target=True)
    )
    return each.sum(-1).mean()


def _token_log_probabilities(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = (x @ weight.t()).float()
    return (
        -functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).sum(-1)
    )


def _dpo_aten(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    policy = _token_log_probabilities(x, weight, target)
    with torch.no_grad():
        reference = _token_log_probabilities(x.detach(), own, target)
    chosen, rejected = (policy - reference).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def _dpo_fused(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    loss, _ = fused.linear_dpo(x, weight, target, reference=fused.LinearHead(x.detach(), own, None))
    return loss


def _liger() -> dict[str, Call]:
    """Return liger-kernel's function for each row."""
    if not LIGER:
        return {}
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss
    from liger_kernel.transformers import functional as liger

    dpo = LigerFusedLinearDPOLoss()

    def jsd(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        return liger.liger_jsd(*(functional.log_softmax(x.float(), -1) for x in (student, teacher)))

    return {
        "rms_norm": functools.partial(liger.liger_rms_norm, eps=1e-6, in_place=False),
        "layer_norm": functools.partial(liger.liger_layer_norm, eps=1e-5),
        "rope": liger.liger_rope,
        "swiglu": liger.liger_swiglu,
        "geglu": liger.liger_geglu,
        "cross_entropy": liger.liger_cross_entropy,
        "linear_cross_entropy": liger.liger_fused_linear_cross_entropy,
        "jsd": jsd,
        "dpo": lambda x, weight, target, own: dpo(weight, x, target, ref_input=x.detach(), ref_weight=own)[0],
    }


def rows() -> dict[str, Row]:
    """Return the rows by name. Rows of a model are `llama`."""
    x = functools.partial(normal, ROWS, WIDTH)
    head = functools.partial(normal, WORDS, WIDTH, scale=0.02)
    aten: dict[str, tuple[Callable[[], Sequence[torch.Tensor]], Call, Call]] = {
        "rms_norm": (
            lambda: [x(), normal(WIDTH)],
            lambda x, weight: functional.rms_norm(x, weight.shape, weight, 1e-6),
            fused.rms_norm,
        ),
        "layer_norm": (
            lambda: [x(), normal(WIDTH), normal(WIDTH)],
            lambda x, weight, bias: functional.layer_norm(x, weight.shape, weight, bias),
            fused.layer_norm,
        ),
        "rope": (_rope_operands, _rope_aten, _rope_fused),
        "swiglu": (
            lambda: [normal(ROWS, INNER), normal(ROWS, INNER)],
            lambda a, b: functional.silu(a) * b,
            fused.swiglu,
        ),
        "geglu": (
            lambda: [normal(ROWS, INNER), normal(ROWS, INNER)],
            lambda a, b: functional.gelu(a, approximate="tanh") * b,
            fused.geglu,
        ),
        "cross_entropy": (
            lambda: [normal(ROWS, WORDS), words(ROWS)],
            lambda x, target: functional.cross_entropy(x.float(), target),
            fused.cross_entropy,
        ),
        "linear_cross_entropy": (
            lambda: [normal(TOKENS, WIDTH), head(), words(TOKENS)],
            lambda x, weight, target: functional.cross_entropy((x @ weight.t()).float(), target),
            fused.linear_cross_entropy,
        ),
        "jsd": (lambda: [normal(2048, WORDS), normal(2048, WORDS, grad=False)], _jsd_aten, fused.jsd),
        "dpo": (
            lambda: [normal(4, 1024, WIDTH), head(), words(4, 1024), head(grad=False)],
            _dpo_aten,
            _dpo_fused,
        ),
    }
    liger = _liger()
    return {
        name: Row(make, {"aten": ours[0], "tritonite": ours[1]} | ({"liger": liger[name]} if name in liger else {}))
        for name, (make, *ours) in aten.items()
    }


def _differentiated(call: Call, operands: Sequence[torch.Tensor]) -> None:
    results = call(*operands)
    results = results if isinstance(results, (list, tuple)) else [results]
    torch.autograd.backward(list(results), [torch.ones_like(each) for each in results])
    for each in operands:
        each.grad = None


def peak(call: Callable[[], object]) -> float:
    """Return the MB that a call allocates at most."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def measure(row: Row) -> dict[str, dict[str, float]]:
    """Return forward and whole milliseconds and the peak in MB by provider, medians of turns.

    Providers share the operands, and liger-kernel writes gradients over some of them.
    """
    operands = list(row.make())
    found: dict[str, dict[str, float]] = {}
    calls = {}
    for name, call in row.providers.items():
        forward = functools.partial(call, *operands)
        whole = functools.partial(_differentiated, call, operands)
        try:
            for each in (forward, whole, whole):
                each()
            found[name] = {"peak": peak(whole)}
            calls[name] = (forward, whole)
        except Exception as error:  # noqa: BLE001 - a provider that fails has no times
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            torch.cuda.empty_cache()
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for _ in range(ROUNDS):
        for name, pair in calls.items():
            for kept, call in zip(times[name], pair, strict=True):
                kept.extend(us / 1e3 for us in timing.device_samples(call, 1, _CYCLES))
    for name, (forward, whole) in times.items():
        found[name] |= {"forward": statistics.median(forward), "whole": statistics.median(whole)}
    return found


def llama(batch: int = 4, tokens: int = 2048, layers: int = 16) -> dict[str, dict[str, float]]:
    """Return milliseconds and peak MB of training steps of Llama-3.2-1B: eager, by liger-kernel, and patched."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    ids = words(batch, tokens)
    found = {}
    for name in ("eager", "liger", "tritonite") if LIGER else ("eager", "tritonite"):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        if name == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(model=model)
        if name == "tritonite":
            print(tritonite.patch(model))
            tritonite.optim.fuse(optimizer)
            tritonite.enable()
        model.train()

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            step()
        torch.cuda.synchronize()
        taken = (time.perf_counter() - begin) / ROUNDS * 1e3
        found[name] = {"step": taken, "peak": torch.cuda.max_memory_allocated() / 1e6}
        tritonite.disable()
        del model, optimizer, step
        gc.collect()
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json")
    options = parser.parse_args()
    every = rows()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results: dict[str, Any] = {}
    for name in options.names or [*every, "llama"]:
        results[name] = llama() if name == "llama" else measure(every[name])
        for provider, numbers in results[name].items():
            shown = ", ".join(f"{key} {value:.3f}" for key, value in numbers.items())
            print(f"{name}: {provider}: {shown}", flush=True)
        torch.cuda.empty_cache()
        if options.json:
            with open(options.json, "w") as file:
                json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
