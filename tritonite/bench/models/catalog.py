"""The models by name, and what makes their passes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch

from tritonite.bench.models import language, vision
from tritonite.bench.models.workload import Phase, Workload
from tritonite.errors import TritoniteError

Make = Callable[[Workload], list[Phase]]
MODELS: dict[str, Make] = {
    "bert": language.bert,
    "convnext": vision.convnext,
    "llama": language.llama,
    "resnet": vision.resnet,
    "t5": language.t5,
    "unet": vision.unet,
    "vae": vision.vae,
    "vit": vision.vit,
    "whisper": language.whisper,
}
# Models whose training step is measured.
STEPS: dict[str, Make] = {
    "bert": language.bert_step,
    "convnext": vision.convnext_step,
    "llama": language.llama_step,
    "resnet": vision.resnet_step,
    "unet": vision.unet_step,
    "vae": vision.vae_step,
}
# Models of images, which may be channels-last.
OF_IMAGES = ("convnext", "resnet", "unet", "vae", "vit")


def phases(
    name: str,
    dtype: torch.dtype,
    batch: int = 1,
    tokens: int = 512,
    tiny: bool = False,
    train: bool = False,
    channels_last: bool = False,
) -> list[Phase]:
    """Return the passes of a model on random inputs, or with `train` its training step.

    Models of images ignore `tokens`. `tiny` makes a model of a few thousand weights. Raises TritoniteError if
    transformers or diffusers is missing, if the model takes fewer tokens or no images, or if no training step is known.
    """
    if train and name not in STEPS:
        raise TritoniteError(message=f"{name} has no training step; models with one are {', '.join(sorted(STEPS))}")
    if channels_last and name not in OF_IMAGES:
        raise TritoniteError(message=f"{name} takes no images; channels-last models are {', '.join(OF_IMAGES)}")
    if importlib.util.find_spec("transformers") is None:
        raise TritoniteError(message="models come from transformers: pip install 'tritonite[bench]'")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return (STEPS if train else MODELS)[name](Workload(dtype, batch, tokens, tiny, channels_last))
