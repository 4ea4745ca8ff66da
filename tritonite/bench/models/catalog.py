"""The models by name, and what makes their passes."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tritonite.bench.models import language, vision
from tritonite.bench.models import zoo as further
from tritonite.bench.models.workload import Phase, Workload
from tritonite.errors import TritoniteError

Make = Callable[[Workload], list[Phase]]
MODELS: dict[str, Make] = {
    "bert": language.bert,
    "convnext": vision.convnext,
    "llama": language.llama,
    "resnet": vision.resnet,
    "smollm2": language.smollm2,
    "t5": language.t5,
    "unet": vision.unet,
    "vae": vision.vae,
    "vit": vision.vit,
    "whisper": language.whisper,
    **further.MODELS,
}
# Models whose training step is measured.
STEPS: dict[str, Make] = {
    "bert": language.bert_step,
    "convnext": vision.convnext_step,
    "llama": language.llama_step,
    "resnet": vision.resnet_step,
    "unet": vision.unet_step,
    "vae": vision.vae_step,
    "whisper": language.whisper_step,
    **further.STEPS,
}
# Models of images, which may be channels-last.
OF_IMAGES = ("convnext", "resnet", "unet", "vae", "vit")


# Models that `bench --zoo` measures together.
ZOOS = {
    "all": tuple(sorted({*MODELS} - {"smollm2"})),
    "vision": ("convnext", "resnet", "unet", "vae", "whisper"),
}


@dataclass(frozen=True)
class ModelCase:
    """A model and what it runs on; with `train` its training step instead of its passes."""

    name: str
    workload: Workload
    train: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} channels-last" if self.workload.channels_last else self.name

    @property
    def dtype(self) -> str:
        text = str(self.workload.dtype).removeprefix("torch.")
        return f"{text} autocast" if self.workload.autocast else text


def zoo(name: str, workload: Workload) -> list[ModelCase]:
    """Return the inference and the training of each model of a zoo, in autocast, channels-last if it takes images."""
    workload = dataclasses.replace(workload, autocast=True)
    laid = {each: dataclasses.replace(workload, channels_last=each in OF_IMAGES) for each in ZOOS[name]}
    return [ModelCase(each, own, train) for each, own in laid.items() for train in (False, True)]


def phases(name: str, workload: Workload, train: bool = False) -> list[Phase]:
    """Return the passes of a model on random inputs, or with `train` its training step.

    Models of images ignore the workload's tokens. Raises TritoniteError if transformers or diffusers is missing, if the
    model takes fewer tokens or no images, or if no training step is known.
    """
    if train and name not in STEPS:
        raise TritoniteError(message=f"{name} has no training step; models with one are {', '.join(sorted(STEPS))}")
    if workload.channels_last and name not in OF_IMAGES:
        raise TritoniteError(message=f"{name} takes no images; channels-last models are {', '.join(OF_IMAGES)}")
    if importlib.util.find_spec("transformers") is None:
        raise TritoniteError(message="models come from transformers: pip install 'tritonite[bench]'")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with workload.scope():
        made = (STEPS if train else MODELS)[name](workload)
    return made if train else [dataclasses.replace(each, forward=_within(workload, each.forward)) for each in made]


def _within(workload: Workload, forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a forward pass in the workload's autocast."""

    def run() -> torch.Tensor:
        with workload.scope():
            return forward()

    return run if workload.autocast else forward
