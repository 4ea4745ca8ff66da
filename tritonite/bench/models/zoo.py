"""Further models of text, images with text, and sound, with random weights: a tiny size, and a size for a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tritonite.bench.models.workload import Phase, Workload, norms

_NARROW = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TINY = {"vocab_size": 64, "max_position_embeddings": 64, **_NARROW, **_TOKENS}
_GROUPED = {**_TINY, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Text:
    """A model of text.

    Attributes:
        config: the class of its configuration in transformers.
        kind: the class of the model, such as "AutoModelForCausalLM".
        tiny: the configuration of the tiny size.
        full: the configuration of the size for a GPU.
        longest: the most tokens of a prompt; None for any number.
    """

    config: str
    kind: str
    tiny: Mapping[str, Any]
    full: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None

    def forward(self, workload: Workload) -> list[Phase]:
        """Return the forward pass of a prompt; a decoder computes the logits of the last token only."""
        model, words = self._made(workload)
        given: dict[str, Any] = {"input_ids": words}
        if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
            given |= {"logits_to_keep": 1, "use_cache": False}
        return [Phase("forward", words.shape[1], lambda: model(**given).logits)]

    def step(self, workload: Workload) -> list[Phase]:
        """Return a training step."""
        model, words = self._made(workload)
        return [trained(model, {"input_ids": words, "labels": words}, workload, words.shape[1])]

    def _made(self, workload: Workload) -> tuple[Any, torch.Tensor]:
        import transformers

        config = getattr(transformers, self.config)(**(self.tiny if workload.tiny else self.full))
        model = workload.from_config(config, self.kind)
        return model, workload.words(model.config.vocab_size)[:, :-1][:, : self.longest].contiguous()


def _decoder(*sizes: int, **options: Any) -> dict[str, Any]:
    """Return a configuration with (vocabulary, width, inner width, layers, heads, heads of keys)."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip((*names, "num_key_value_heads"), sizes, strict=False)) | options


_CAUSAL = "AutoModelForCausalLM"
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 64, **_TOKENS}
_MAMBA = {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "time_step_rank": 2, **_TOKENS}

TEXTS = {
    # Gemma 3 1B.
    "gemma3": Text(
        "Gemma3TextConfig",
        _CAUSAL,
        _GROUPED | {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention"]},
        _decoder(262144, 1152, 6912, 26, 4, 1, head_dim=256, query_pre_attn_scalar=256, sliding_window=512),
    ),
    # GPT2Config's defaults are GPT-2 small.
    "gpt2": Text("GPT2Config", _CAUSAL, _GPT2, longest=1024),
    # Mamba-130M, which transformers computes by a loop over tokens in Python. With the default initializer_range of 0.1
    # the model amplifies rounding errors, so that bfloat16 logits differ from float32 ones in ATen, too.
    "mamba": Text(
        "MambaConfig",
        _CAUSAL,
        _MAMBA,
        {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24, "initializer_range": 0.02},
        longest=32,
    ),
    # Layers of Mistral 7B, of which a GPU holds a few with the optimiser's states.
    "mistral": Text(
        "MistralConfig", _CAUSAL, _GROUPED, _decoder(32000, 4096, 14336, 4, 32, 8, max_position_embeddings=32768)
    ),
    # Layers of half the width of Mixtral 8x7B's.
    "mixtral": Text(
        "MixtralConfig",
        _CAUSAL,
        _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        _decoder(32000, 2048, 7168, 4, 16, 4, num_local_experts=8, num_experts_per_tok=2),
    ),
    # Phi-1.5.
    "phi": Text("PhiConfig", _CAUSAL, _TINY, _decoder(51200, 2048, 8192, 24, 32, 32), 2048),
    # Qwen3-0.6B.
    "qwen3": Text(
        "Qwen3Config",
        _CAUSAL,
        _GROUPED | {"head_dim": 8},
        _decoder(151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True),
    ),
    # RobertaConfig's defaults are RoBERTa base, whose positions begin after the padding's.
    "roberta": Text(
        "RobertaConfig", "AutoModelForMaskedLM", _TINY, {"vocab_size": 50265, "max_position_embeddings": 514}, 512
    ),
}


def trained(model: Any, given: dict[str, torch.Tensor], workload: Workload, tokens: int) -> Phase:
    """Return a training step of a model whose arguments give a loss. Dropout is off, so that gradients compare."""
    without_dropout(model)
    return workload.training(model.train(), lambda: model(**given).loss, norms(model), tokens)


def without_dropout(model: torch.nn.Module) -> None:
    """Set all probabilities of dropout to 0."""
    for each in model.modules():
        for name, value in vars(each).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(each, torch.nn.Dropout))):
                setattr(each, name, 0.0)


def t5_step(workload: Workload) -> list[Phase]:
    """Return a training step of T5-small."""
    from transformers import T5Config

    sizes = {"vocab_size": 128, "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16}
    config = T5Config(**sizes if workload.tiny else {}, decoder_start_token_id=0)
    model = workload.from_config(config, "AutoModelForSeq2SeqLM")
    words = workload.words(model.config.vocab_size)[:, :-1].contiguous()
    return [trained(model, {"input_ids": words, "labels": words}, workload, words.shape[1])]


def vit_step(workload: Workload) -> list[Phase]:
    """Return a training step of ViT-B/16."""
    from transformers import ViTConfig

    sizes = _NARROW | {"image_size": 32} if workload.tiny else {}
    config = ViTConfig(**sizes, num_labels=10 if workload.tiny else 1000)
    model = workload.from_config(config, "AutoModelForImageClassification")
    images = workload.noise(3, config.image_size, config.image_size)
    labels = torch.arange(workload.batch, device=images.device) * 7 % config.num_labels
    return [trained(model, {"pixel_values": images, "labels": labels}, workload, 1)]


def _clip(workload: Workload) -> tuple[Any, dict[str, Any]]:
    from transformers import CLIPConfig

    sides: dict[str, Any] = {}
    if workload.tiny:
        sides = {"text_config": _TINY, "vision_config": _NARROW | {"image_size": 16, "patch_size": 8}}
        sides |= {"projection_dim": 16}
    # CLIPConfig's defaults are ViT-B/32's.
    model = workload.from_config(CLIPConfig(**sides), "AutoModel")
    longest, side = model.config.text_config.max_position_embeddings, model.config.vision_config.image_size
    words = workload.words(model.config.text_config.vocab_size - 3)[:, :-1][:, :longest] + 3
    return model, {"input_ids": words, "pixel_values": workload.noise(3, side, side)}


def clip(workload: Workload) -> list[Phase]:
    """Return the forward pass of CLIP ViT-B/32: embeddings of images and of their texts."""
    model, given = _clip(workload)

    def forward() -> torch.Tensor:
        output = model(**given)
        return torch.stack([output.image_embeds, output.text_embeds], 1)

    return [Phase("forward", given["input_ids"].shape[1], forward)]


def clip_step(workload: Workload) -> list[Phase]:
    """Return a training step of CLIP by its contrastive loss."""
    model, given = _clip(workload)
    return [trained(model, given | {"return_loss": True}, workload, given["input_ids"].shape[1])]


def _wav2vec2(workload: Workload, kind: str) -> tuple[Any, torch.Tensor]:
    from transformers import Wav2Vec2Config

    sizes: dict[str, Any] = {}
    if workload.tiny:
        sizes = {**_NARROW, "vocab_size": 16, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
        sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    # Wav2Vec2Config's defaults are the base size. Masks of sound would be drawn by NumPy, and layers left out at random
    # would make no two steps alike.
    config = Wav2Vec2Config(**sizes, apply_spec_augment=False, layerdrop=0.0, ctc_zero_infinity=True)
    return workload.from_config(config, kind), workload.noise(210 if workload.tiny else 4 * 16000)


def wav2vec2(workload: Workload) -> list[Phase]:
    """Return the forward pass of wav2vec 2.0 base: four seconds of sound."""
    model, sound = _wav2vec2(workload, "AutoModelForCTC")

    def forward() -> torch.Tensor:
        return model(input_values=sound).logits

    return [Phase("forward", 1, forward)]


def wav2vec2_step(workload: Workload) -> list[Phase]:
    """Return a training step of wav2vec 2.0 by the CTC loss of a text."""
    model, sound = _wav2vec2(workload, "AutoModelForCTC")
    length = 4 if workload.tiny else 32
    labels = workload.words(model.config.vocab_size - 1)[:, :1] + torch.arange(length, device=sound.device)
    labels = labels % (model.config.vocab_size - 1) + 1
    return [trained(model, {"input_values": sound, "labels": labels}, workload, 1)]


MODELS: dict[str, Callable[[Workload], list[Phase]]] = {
    **{name: each.forward for name, each in TEXTS.items()},
    "clip": clip,
    "wav2vec2": wav2vec2,
}
STEPS: dict[str, Callable[[Workload], list[Phase]]] = {
    **{name: each.step for name, each in TEXTS.items()},
    "clip": clip_step,
    "t5": t5_step,
    "vit": vit_step,
    "wav2vec2": wav2vec2_step,
}
