"""Models of text and speech: MiniLM, Llama, T5 and Whisper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import tritonite
from tritonite.bench.models.workload import Phase, Workload, norms
from tritonite.demo import minilm_folder
from tritonite.demo import smollm2 as trained_llama
from tritonite.errors import TritoniteError


def bert(workload: Workload) -> list[Phase]:
    """MiniLM-L6-v2, with pretrained weights if their package is installed."""
    from transformers import BertModel

    longest, length = 512, workload.tokens
    if length > longest:
        raise TritoniteError(message=f"bert takes at most {longest} tokens, not {length}")
    folder = None if workload.tiny else minilm_folder()
    if folder is not None:
        model = BertModel.from_pretrained(folder, dtype=workload.stored).eval().to(tritonite.device)
        model = workload.formed(model)
    else:
        model = workload.from_config(_bert_config(workload.tiny), "AutoModel")
    words = workload.words(model.config.vocab_size)[:, :-1]
    return [Phase("prefill", length, lambda: model(words).last_hidden_state)]


def bert_step(workload: Workload) -> list[Phase]:
    """A training step of a MiniLM-L6 with random weights and a head over the vocabulary."""
    model = workload.from_config(_bert_config(workload.tiny), "AutoModelForMaskedLM")
    return [_of_words(model, model.bert.embeddings.LayerNorm.weight, workload, 512)]


def llama(workload: Workload) -> list[Phase]:
    """Llama-3.2-1B with random weights: prefill of the prompt, and decoding of one token after it."""
    return _decoder(workload.from_config(_llama_config(workload.tiny), "AutoModelForCausalLM"), workload)


def smollm2(workload: Workload) -> list[Phase]:
    """SmolLM2-135M-Instruct with its trained weights, on random words: prefill and decoding, as of Llama.

    Raises TritoniteError if the packages of the weights are missing.
    """
    model = trained_llama.load(workload.stored)[0]
    if workload.tiny:
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
    return _decoder(workload.formed(model), workload)


def _decoder(model: Any, workload: Workload) -> list[Phase]:
    """Return the prefill of a prompt by a decoder, and the decoding of one token after it."""
    from transformers import DynamicCache

    words, following = workload.words(model.config.vocab_size).tensor_split([-1], 1)
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


def llama_step(workload: Workload) -> list[Phase]:
    """A training step of Llama-3.2-1B with random weights: loss, gradients, and a step of AdamW."""
    model = workload.from_config(_llama_config(workload.tiny), "AutoModelForCausalLM")
    return [_of_words(model, model.model.layers[0].input_layernorm.weight, workload)]


def t5(workload: Workload) -> list[Phase]:
    """T5-small with random weights; the decoder has as many tokens as the encoder."""
    from transformers import T5Config

    # T5Config's defaults are T5-small.
    sizes = {"vocab_size": 128, "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16}
    model = workload.from_config(T5Config(**sizes if workload.tiny else {}), "AutoModel")
    words = workload.words(model.config.vocab_size)[:, :-1]
    return [Phase("forward", words.shape[1], lambda: model(input_ids=words, decoder_input_ids=words).last_hidden_state)]


def whisper(workload: Workload) -> list[Phase]:
    """Whisper base with random weights: 30 seconds of sound, and the first tokens of the text."""
    model, sound, words = _whisper(workload, "AutoModel")
    return [
        Phase("forward", words.shape[1], lambda: model(input_features=sound, decoder_input_ids=words).last_hidden_state)
    ]


def whisper_step(workload: Workload) -> list[Phase]:
    """A training step of Whisper base with random weights."""
    model, sound, words = _whisper(workload, "AutoModelForSpeechSeq2Seq")
    return [
        workload.training(
            model.train(), lambda: model(input_features=sound, labels=words).loss, norms(model), words.shape[1]
        )
    ]


def _whisper(workload: Workload, kind: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a model of a class of transformers, 30 seconds of sound, and the first tokens of its text."""
    from transformers import WhisperConfig

    width, layers, heads, inner = (32, 1, 2, 64) if workload.tiny else (512, 6, 8, 2048)
    sizes = {"d_model": width}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": inner}
    if workload.tiny:
        special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
        sizes |= {"vocab_size": 128, "num_mel_bins": 8, "max_source_positions": 20, **special}
    model = workload.from_config(WhisperConfig(**sizes), kind)
    words = workload.words(model.config.vocab_size)[:, :-1][:, :32]
    return model, workload.noise(model.config.num_mel_bins, 2 * model.config.max_source_positions), words


def _bert_config(tiny: bool) -> Any:
    from transformers import BertConfig

    return BertConfig(**_sized((128, 32, 64, 1, 2) if tiny else (30522, 384, 1536, 6, 12)))


def _llama_config(tiny: bool) -> Any:
    from transformers import LlamaConfig

    sizes = (128, 32, 64, 1, 4, 2) if tiny else (128256, 2048, 8192, 16, 32, 8)
    return LlamaConfig(**_sized(sizes), max_position_embeddings=2**17, tie_word_embeddings=True)


def _sized(sizes: Sequence[int]) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(("vocab_size", *names), sizes, strict=False))


def _of_words(model: Any, compared: torch.nn.Parameter, workload: Workload, longest: int | None = None) -> Phase:
    """Return a step on the words of a prompt of at most `longest` tokens, which are also the labels."""
    words = workload.words(model.config.vocab_size)[:, :-1][:, :longest].contiguous()
    return workload.training(model, lambda: model(words, labels=words).loss, [compared], words.shape[1])
