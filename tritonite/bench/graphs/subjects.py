"""The models of `tritonite bench --graphs`: a call, and inputs of three shapes each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tritonite
from tritonite.bench.models import language, vision
from tritonite.bench.models.workload import Workload, norms


@dataclass(frozen=True)
class Subject:
    """A model and its call.

    Attributes:
        module: the model.
        forward: takes the tensors of `inputs`, and returns a tensor, in training the loss.
        inputs: returns the arguments of shape 0, 1 or 2.
        trains: whether a call runs backward, too.
    """

    module: torch.nn.Module
    forward: Callable[..., torch.Tensor]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    trains: bool = False


def _tokens(workload: Workload, vocabulary: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return words of all tokens, of three quarters, and of half of them."""
    words = workload.words(vocabulary)[:, :-1]
    return lambda shape: (words[:, : words.shape[1] * (4 - shape) // 4].contiguous(),)


def _images(workload: Workload, side: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return one image, two and three, times the batch."""
    images = workload.noise(3, side, side)
    return lambda shape: (images.repeat(1 + shape, 1, 1, 1),)


def bert(workload: Workload) -> Subject:
    model = workload.from_config(language._bert_config(workload.tiny), "AutoModel")
    return Subject(model, lambda words: model(words).last_hidden_state, _tokens(workload, model.config.vocab_size))


def _llama(workload: Workload) -> Any:
    return workload.from_config(language._llama_config(workload.tiny), "AutoModelForCausalLM")


def llama(workload: Workload) -> Subject:
    model = _llama(workload)

    def prefill(words: torch.Tensor) -> torch.Tensor:
        return model(words, use_cache=False, logits_to_keep=1).logits  # type: ignore[no-any-return]

    return Subject(model, prefill, _tokens(workload, model.config.vocab_size))


def llama_decode(workload: Workload) -> Subject:
    """One token of each sequence after a prompt, with a cache of a fixed size."""
    from transformers import StaticCache

    model = _llama(workload)
    words = workload.words(model.config.vocab_size)
    caches: dict[int, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        for copies in (1, 2, 3):
            prompt = words[:, :-1].repeat(copies, 1)
            caches[len(prompt)] = StaticCache(config=model.config, max_cache_len=words.shape[1] + 1)
            model(prompt, past_key_values=caches[len(prompt)], use_cache=True, logits_to_keep=1)
    place = torch.tensor([[words.shape[1] - 1]], device=words.device)

    def decode(following: torch.Tensor) -> torch.Tensor:
        cache = caches[len(following)]
        # Every call writes the same place.
        for layer in cache.layers:
            if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
                layer.cumulative_length.fill_(words.shape[1] - 1)
        result = model(following, past_key_values=cache, use_cache=True, position_ids=place)
        return result.logits  # type: ignore[no-any-return]

    return Subject(model, decode, lambda shape: (words[:, -1:].repeat(1 + shape, 1),))


def llama_train(workload: Workload) -> Subject:
    model = _llama(workload)
    inputs = _tokens(workload, model.config.vocab_size)
    return Subject(model.train(), lambda words: model(words, labels=words, use_cache=False).loss, inputs, True)


def vit(workload: Workload) -> Subject:
    from transformers import ViTConfig

    sizes = {}
    if workload.tiny:
        sizes = {"image_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"hidden_size": 32, "intermediate_size": 64}
    config = ViTConfig(**sizes)
    model = workload.from_config(config, "AutoModel")
    return Subject(
        model, lambda images: model(pixel_values=images).last_hidden_state, _images(workload, config.image_size)
    )


def resnet(workload: Workload) -> Subject:
    model, given = vision._resnet(workload)
    side = given["pixel_values"].shape[-1]
    return Subject(model, lambda images: model(pixel_values=images).logits, _images(workload, side))


# What makes a subject, by (model, phase).
SUBJECTS: dict[tuple[str, str], Callable[[Workload], Subject]] = {
    ("bert", "prefill"): bert,
    ("llama", "prefill"): llama,
    ("llama", "decode"): llama_decode,
    ("llama", "train"): llama_train,
    ("vit", "forward"): vit,
    ("resnet", "forward"): resnet,
}


def subject(model: str, phase: str, workload: Workload) -> Subject:
    """Return a model with random weights from a fixed seed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return SUBJECTS[model, phase](workload)


def gradients(module: torch.nn.Module) -> torch.Tensor:
    """Return the gradients of the later norms as one tensor (1, 1, elements), and clear all gradients."""
    found = [each.grad.float().reshape(1, 1, -1) for each in norms(module) if each.grad is not None]
    module.zero_grad()
    return torch.cat(found, -1).to(tritonite.device)
