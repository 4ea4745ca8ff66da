"""Whole models: passes checked against ATen's, timed for every provider, and profiled by operator."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tritonite
from tritonite.bench import timing
from tritonite.bench.results import ModelResult, Timing
from tritonite.bench.timing import Provider
from tritonite.demo import minilm_folder
from tritonite.errors import TritoniteError, WrongAnswer
from tritonite.report.report import profiler

# The two providers whose operators are compared.
COMPARED = (timing.ATEN.name, timing.TRITONITE.name)
# Least similarity to ATen's results. In fp16 and bf16 the rounding of every layer adds to the difference.
MINIMUM_SIMILARITY = {torch.float32: 0.999, torch.float16: 0.99, torch.bfloat16: 0.99}
_PASSES = 3
_LISTED_OPERATORS = 12


@dataclass(frozen=True)
class Phase:
    """A pass of a model: forward, or a step of its training.

    Attributes:
        name: "prefill", "decode", "forward" or "train".
        tokens: tokens of every sequence in the pass.
        forward: runs the pass. Returns hidden states or logits, (batch, positions, width); in training, gradients.
        restore: undoes the pass's side effects, so that every pass starts in the same state.
        context: tokens of every sequence before the pass.
        trains: whether the pass computes gradients.
    """

    name: str
    tokens: int
    forward: Callable[[], torch.Tensor]
    restore: Callable[[], None] = lambda: None
    context: int = 0
    trains: bool = False


def _bert(dtype: torch.dtype, tokens: torch.Tensor, tiny: bool) -> list[Phase]:
    """MiniLM-L6-v2, with pretrained weights if their package is installed."""
    from transformers import BertModel

    longest, length = 512, tokens.shape[1] - 1
    if length > longest:
        raise TritoniteError(message=f"bert takes at most {longest} tokens, not {length}")
    folder = None if tiny else minilm_folder()
    if folder is not None:
        model = BertModel.from_pretrained(folder, dtype=dtype).eval().to(tritonite.device)
    else:
        model = _random_weights(_bert_config(dtype, tiny), "AutoModel", tiny)
    words = tokens[:, :-1] % model.config.vocab_size
    return [Phase("prefill", length, lambda: model(words).last_hidden_state)]


def _llama(dtype: torch.dtype, tokens: torch.Tensor, tiny: bool) -> list[Phase]:
    """Llama-3.2-1B with random weights: prefill of the prompt, and decoding of one token after it."""
    from transformers import DynamicCache

    config = _llama_config(dtype, tiny)
    model = _random_weights(config, "AutoModelForCausalLM", tiny)
    words, following = (tokens % config.vocab_size).tensor_split([-1], 1)
    cache = DynamicCache()

    def prefill(cache: Any = None) -> torch.Tensor:
        # Generation needs only the logits of the last token.
        return model(words, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def decode() -> torch.Tensor:
        return model(following, past_key_values=cache, use_cache=True).logits

    with torch.inference_mode():
        prefill(cache)
        # A cropped cache has other strides than a fresh one; crop once, so that all passes see the same strides.
        decode()
        cache.crop(-1)
    return [
        Phase("prefill", words.shape[1], prefill),
        Phase("decode", 1, decode, lambda: cache.crop(-1), words.shape[1]),
    ]


def _t5(dtype: torch.dtype, tokens: torch.Tensor, tiny: bool) -> list[Phase]:
    """T5-small with random weights; the decoder has as many tokens as the encoder."""
    from transformers import T5Config

    # T5Config's defaults are T5-small.
    sizes = {"vocab_size": 128, "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16} if tiny else {}
    model = _random_weights(T5Config(**sizes, dtype=dtype), "AutoModel", tiny)
    words = tokens[:, :-1] % model.config.vocab_size
    return [Phase("forward", words.shape[1], lambda: model(input_ids=words, decoder_input_ids=words).last_hidden_state)]


def _vit(dtype: torch.dtype, tokens: torch.Tensor, tiny: bool) -> list[Phase]:
    """ViT-B/16 with random weights; `tokens` only gives the number of images."""
    from transformers import ViTConfig

    # ViTConfig's defaults are ViT-B/16.
    sizes = {}
    if tiny:
        sizes = {"image_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"hidden_size": 32, "intermediate_size": 64}
    config = ViTConfig(**sizes, dtype=dtype)
    model = _random_weights(config, "AutoModel", tiny)
    images = _noise(dtype, tokens, 3, config.image_size, config.image_size)
    patches = (config.image_size // config.patch_size) ** 2
    return [Phase("forward", patches + 1, lambda: model(pixel_values=images).last_hidden_state)]


def _whisper(dtype: torch.dtype, tokens: torch.Tensor, tiny: bool) -> list[Phase]:
    """Whisper base with random weights: 30 seconds of sound, and the first tokens of the text."""
    from transformers import WhisperConfig

    width, layers, heads, inner = (32, 1, 2, 64) if tiny else (512, 6, 8, 2048)
    sizes = {"d_model": width}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": inner}
    if tiny:
        special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
        sizes |= {"vocab_size": 128, "num_mel_bins": 8, "max_source_positions": 20, **special}
    config = WhisperConfig(**sizes, dtype=dtype)
    model = _random_weights(config, "AutoModel", tiny)
    words = tokens[:, :-1][:, :32] % config.vocab_size
    sound = _noise(dtype, tokens, config.num_mel_bins, 2 * config.max_source_positions)
    return [
        Phase("forward", words.shape[1], lambda: model(input_features=sound, decoder_input_ids=words).last_hidden_state)
    ]


def _noise(dtype: torch.dtype, tokens: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return fixed noise (len(tokens), *shape) in place of images or sound."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(tokens), *shape, generator=generator).to(tokens.device, dtype)


# A phase as each provider runs it, ATen first.
Ways = dict[Provider, Phase]
MODELS: dict[str, Callable[[torch.dtype, torch.Tensor, bool], list[Phase]]] = {
    "bert": _bert,
    "llama": _llama,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
}


def _bert_config(dtype: torch.dtype, tiny: bool) -> Any:
    from transformers import BertConfig

    return BertConfig(**_sized((128, 32, 64, 1, 2) if tiny else (30522, 384, 1536, 6, 12)), dtype=dtype)


def _llama_config(dtype: torch.dtype, tiny: bool) -> Any:
    from transformers import LlamaConfig

    sizes = (128, 32, 64, 1, 4, 2) if tiny else (128256, 2048, 8192, 16, 32, 8)
    return LlamaConfig(**_sized(sizes), max_position_embeddings=2**17, tie_word_embeddings=True, dtype=dtype)


def _sized(sizes: Sequence[int]) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(("vocab_size", *names), sizes, strict=False))


def _random_weights(config: Any, kind: str, tiny: bool) -> Any:
    import transformers

    if tiny:
        # With the usual range, narrow layers would add next to nothing to their input.
        config.initializer_range = 0.2
    with torch.random.fork_rng(range(torch.cuda.device_count())), torch.device(tritonite.device):
        torch.manual_seed(0)
        return getattr(transformers, kind).from_config(config).eval()


def _llama_step(dtype: torch.dtype, tokens: torch.Tensor, tiny: bool) -> list[Phase]:
    """A training step of Llama-3.2-1B with random weights: loss, gradients, and a step of AdamW."""
    config = _llama_config(dtype, tiny)
    model = _random_weights(config, "AutoModelForCausalLM", tiny)
    return [_training(model, model.model.layers[0].input_layernorm.weight, tokens[:, :-1] % config.vocab_size)]


def _bert_step(dtype: torch.dtype, tokens: torch.Tensor, tiny: bool) -> list[Phase]:
    """A training step of a MiniLM-L6 with random weights and a head over the vocabulary."""
    model = _random_weights(_bert_config(dtype, tiny), "AutoModelForMaskedLM", tiny)
    words = tokens[:, :-1][:, :512] % model.config.vocab_size
    return [_training(model, model.bert.embeddings.LayerNorm.weight, words)]


def _training(model: Any, first: torch.nn.Parameter, words: torch.Tensor) -> Phase:
    """Return a step on `words`, (batch, positions), which are also the labels. Its result is the gradient of `first`.

    The learning rate is 0, so that all steps start from the same parameters.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step() -> torch.Tensor:
        model(words, labels=words).loss.backward()
        optimizer.step()
        gradient = first.grad
        optimizer.zero_grad()
        assert gradient is not None
        return gradient[None]

    return Phase("train", words.shape[1], step, trains=True)


# Models whose training step is measured.
STEPS: dict[str, Callable[[torch.dtype, torch.Tensor, bool], list[Phase]]] = {"bert": _bert_step, "llama": _llama_step}


def phases(
    name: str, dtype: torch.dtype, batch: int, tokens: int, tiny: bool = False, train: bool = False
) -> list[Phase]:
    """Return the passes of a model on random tokens, or with `train` its training step.

    A shorter prompt is the beginning of a longer one. `tiny` makes a model of a few thousand weights. Raises
    TritoniteError if transformers is missing, if the model takes fewer tokens, or if no training step is known.
    """
    if train and name not in STEPS:
        raise TritoniteError(message=f"{name} has no training step; models with one are {', '.join(sorted(STEPS))}")
    if importlib.util.find_spec("transformers") is None:
        raise TritoniteError(message="models come from transformers: pip install 'tritonite[bench]'")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(0)
    # One token more than the prompt, for a decoder.
    words = torch.randint(2**20, (tokens + 1, batch), generator=generator).T.contiguous()
    return (STEPS if train else MODELS)[name](dtype, words.to(tritonite.device), tiny)


def measure(
    name: str,
    providers: Sequence[Provider],
    *,
    dtype: torch.dtype,
    batch: int = 1,
    tokens: int = 512,
    tiny: bool = False,
    train: bool = False,
    rounds: int = timing.ROUNDS,
) -> Iterator[ModelResult]:
    """Time a model's passes: a prompt of `tokens` tokens, and for a decoder one more token; or its training step.

    Args:
        name: a key of MODELS.
        providers: the providers to time; the first is ATen.
        dtype: the model's dtype, a key of MINIMUM_SIMILARITY.
        batch: number of sequences.
        tokens: tokens of a prompt.
        tiny: make a model of a few thousand weights.
        train: time the training step instead.
        rounds: rounds in which providers take turns.

    Yields a ModelResult for each pass. Raises WrongAnswer, before anything is timed, if a provider's results differ
    from ATen's.
    """
    text = str(dtype).removeprefix("torch.")
    every = []
    for phase in phases(name, dtype, batch, tokens, tiny, train):
        ways = {each: dataclasses.replace(phase, forward=each.wrap(phase.forward)) for each in providers}
        _check(f"{name} {phase.name}, {text}", ways, MINIMUM_SIMILARITY[dtype])
        every.append(ways)
    # The profiler leaves hooks in the driver that slow calls, so all passes are timed before any is profiled.
    measured = [(ways, *_times(ways, rounds)) for ways in every]
    for ways, times, host_times in measured:
        phase, (profiles, share) = next(iter(ways.values())), _profiles(ways)
        device_times = {name: sum(taken for _, taken in own.values()) for name, own in profiles.items()}
        yield ModelResult(
            model=name,
            phase=phase.name,
            dtype=text,
            batch=batch,
            tokens=phase.tokens,
            times=times,
            host_times=host_times,
            operators=_differences(profiles),
            context=phase.context,
            device_times=device_times if tritonite.device == "cuda" else {},
            own_share=share if tritonite.device == "cuda" else None,
        )


def _pass(phase: Phase) -> tuple[torch.Tensor, float, float]:
    """Run a pass. Return its result, the microseconds until the device was done, and until the call returned."""
    with torch.inference_mode(not phase.trains):
        timing.synchronize()
        begin = time.perf_counter()
        result = phase.forward()
        returned = time.perf_counter()
        timing.synchronize()
        done = time.perf_counter()
        phase.restore()
    return result, (done - begin) * 1e6, (returned - begin) * 1e6


def _check(case: str, ways: Ways, minimum: float) -> None:
    expected = _pass(next(iter(ways.values())))[0]
    for provider, phase in ways.items():
        with provider.scope(None):
            actual = _pass(phase)[0]
        if reason := _disagreement(actual, expected, minimum):
            raise WrongAnswer(provider=provider.name, case=case, reason=reason)


def _disagreement(actual: torch.Tensor, expected: torch.Tensor, minimum: float) -> str:
    """Return how results differ from ATen's beyond `minimum` similarity; "" if they agree."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{actual.dtype} {list(actual.shape)} where ATen gives {expected.dtype} {list(expected.shape)}"
    own, aten = actual.double(), expected.double()
    if not bool(own.isfinite().all()):
        return "not all of it is finite"
    # Like the cosine, but lowered by a difference in length too.
    similarity = float((2 * (own * aten).sum(-1) / ((own * own).sum(-1) + (aten * aten).sum(-1))).min())
    return "" if similarity >= minimum else f"a similarity of {similarity:.6f}, where {minimum} is needed"


def _times(ways: Ways, rounds: int) -> tuple[dict[str, Timing], dict[str, Timing]]:
    """Time passes of providers in turns. Return times of the whole pass, and host times, by provider."""
    passes: dict[str, list[tuple[float, float]]] = {provider.name: [] for provider in ways}
    for _ in range(rounds):
        for provider, phase in ways.items():
            with provider.scope(None):
                # The first pass after a switch of providers finds caches cold.
                _pass(phase)
                passes[provider.name] += [_pass(phase)[1:] for _ in range(_PASSES)]
    whole = {name: Timing.of(done for done, _ in taken) for name, taken in passes.items()}
    return whole, {name: Timing.of(returned for _, returned in taken) for name, taken in passes.items()}


def _profiles(ways: Ways) -> tuple[dict[str, dict[str, tuple[int, float]]], float | None]:
    """Profile the passes of ATen and Tritonite. Returns (profiles by provider, the share of Tritonite's own kernels).

    Without both among the providers the result is ({}, None).
    """
    compared = {provider.name: (phase, provider) for provider, phase in ways.items() if provider.name in COMPARED}
    if len(compared) < len(COMPARED):
        return {}, None
    profiled = {name: _profile(*each) for name, each in compared.items()}
    return {name: operators for name, (operators, _) in profiled.items()}, profiled[timing.TRITONITE.name][1]


def _differences(profiles: Mapping[str, dict[str, tuple[int, float]]]) -> list[tuple[str, int, float, float]]:
    """Return the operators whose times differ most, as in ModelResult.operators."""
    if not profiles:
        return []
    aten, ours = (profiles[name] for name in COMPARED)
    rows = []
    for name in {*aten, *ours}:
        (calls, before), (own_calls, after) = aten.get(name, (0, 0.0)), ours.get(name, (0, 0.0))
        if before != after:
            rows.append((name, max(calls, own_calls), before, after))
    return sorted(rows, key=lambda row: (-abs(row[2] - row[3]), row[0]))[:_LISTED_OPERATORS]


def _profile(phase: Phase, provider: Provider) -> tuple[dict[str, tuple[int, float]], float]:
    """Return (calls a pass, microseconds a pass) of each operator, and the share of Tritonite's own kernels.

    An operator's time is without that of operators that it calls. The share is of all operators' time.
    """
    with provider.scope(None):
        _pass(phase)
        with profiler() as profile:
            for _ in range(_PASSES):
                _pass(phase)
    found: dict[str, tuple[int, float]] = {}
    times = {"aten": 0.0, "tritonite": 0.0}
    for event in profile.key_averages():
        space, _, name = event.key.partition("::")
        if space in ("aten", "tritonite"):
            # A Tritonite kernel has a range named by its overload within ATen's range.
            name = name.partition(".")[0]
            calls, taken = found.get(name, (0, 0.0))
            own = event.self_device_time_total if tritonite.device == "cuda" else event.self_cpu_time_total
            found[name] = max(calls, round(event.count / _PASSES)), taken + own / _PASSES
            times[space] += own
    return found, times["tritonite"] / max(sum(times.values()), 1e-9)
