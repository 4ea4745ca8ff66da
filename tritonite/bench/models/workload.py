"""Workloads, which make the inputs and weights of models, and phases, the passes of models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

import tritonite


@dataclass(frozen=True)
class Phase:
    """A pass of a model: forward, or a step of its training.

    Attributes:
        name: "prefill", "decode", "encode", "forward" or "train".
        tokens: tokens of every sequence in the pass; 1 for an image.
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


@dataclass(frozen=True)
class Workload:
    """The sizes and layout of what a model runs on.

    Attributes:
        dtype: dtype of weights, images and sound; with `autocast` the dtype that passes compute in.
        batch: number of sequences, images or recordings.
        tokens: tokens of a prompt.
        tiny: whether the model has a few thousand weights only.
        channels_last: whether images and weights are channels-last.
        autocast: whether passes run in autocast, from float32 weights, images and sound.
        form: "patched" for models with fused operators in their modules, "compiled" for models compiled by
            Tritonite's backend, "" for models as they are.
        every_gradient: whether a training step returns the gradients of all parameters.
    """

    dtype: torch.dtype
    batch: int = 1
    tokens: int = 512
    tiny: bool = False
    channels_last: bool = False
    autocast: bool = False
    form: str = ""
    every_gradient: bool = False

    @property
    def stored(self) -> torch.dtype:
        """The dtype of weights, images and sound."""
        return torch.float32 if self.autocast else self.dtype

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager of a forward pass."""
        return torch.autocast(tritonite.device, self.dtype) if self.autocast else contextlib.nullcontext()

    def words(self, vocabulary: int) -> torch.Tensor:
        """Return (batch, tokens + 1) random words: the prompt, and one token more for a decoder.

        A shorter prompt is the beginning of a longer one.
        """
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(2**20, (self.tokens + 1, self.batch), generator=generator).T.contiguous()
        return words.to(tritonite.device) % vocabulary

    def noise(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Return fixed noise (batch, *shape) in place of images or sound."""
        drawn = torch.randn(self.batch, *shape, generator=torch.Generator().manual_seed(seed))
        return self.laid(drawn.to(tritonite.device, self.stored))

    def laid(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of the workload's memory format; other tensors unchanged."""
        channels_last = self.channels_last and images.dim() == 4
        return images.contiguous(memory_format=torch.channels_last) if channels_last else images

    def model(self, make: Callable[[], Any]) -> Any:
        """Return the model that `make` makes on the device, with weights drawn from a fixed seed, for inference."""
        with torch.random.fork_rng(device_type=tritonite.backend.accelerator), torch.device(tritonite.device):
            torch.manual_seed(0)
            model = make().eval()
        return self.formed(model.to(memory_format=torch.channels_last) if self.channels_last else model)

    def formed(self, model: Any) -> Any:
        """Return a model, patched or compiled in place if the workload's form asks for it."""
        if self.form == "patched":
            tritonite.patch(model)
        if self.form == "compiled":
            from tritonite.graph import backend

            # Calls of a model outside `forward`, as of an autoencoder's encoder, are compiled by its children.
            for each in (model, *model.children()) if hasattr(model, "encode") else (model,):
                each.compile(backend=backend, dynamic=False)
        return model

    def from_config(self, config: Any, kind: str) -> Any:
        """Return a model of transformers with random weights, of the class `kind`, such as "AutoModel"."""
        import transformers

        config.dtype = self.stored
        if self.tiny and hasattr(config, "initializer_range"):
            # With the usual range, narrow layers would add next to nothing to their input.
            config.initializer_range = 0.2
        return self.model(lambda: getattr(transformers, kind).from_config(config))

    def training(
        self, model: Any, loss: Callable[[], torch.Tensor], compared: Iterable[torch.nn.Parameter], tokens: int
    ) -> Phase:
        """Return a training step: the loss, gradients, and a step of AdamW. Its result is the gradients of `compared`.

        The learning rate is 0, so that all steps start from the same parameters. The result is (1, 1, elements).
        """
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        parameters = list(compared)
        if self.every_gradient:
            parameters = [each for each in model.parameters() if each.requires_grad]

        def step() -> torch.Tensor:
            with self.scope():
                error = loss()
            error.backward()
            optimizer.step()
            gradients = [each.grad for each in parameters if each.grad is not None]
            optimizer.zero_grad()
            # A decoder's loss may leave parameters without a gradient.
            assert len(gradients) == len(parameters) or self.every_gradient
            return torch.cat([each.reshape(1, 1, -1) for each in gradients], -1)

        return Phase("train", tokens, step, trains=True)


def norms(model: Any) -> list[torch.nn.Parameter]:
    """Return the weights of the second half of all norms, whose gradients a training step returns.

    Gradients of the first layers have the rounding errors of all others.
    """
    every = [
        each.weight
        for each in model.modules()
        if "Norm" in type(each).__name__ and isinstance(getattr(each, "weight", None), torch.nn.Parameter)
    ]
    return every[len(every) // 2 :]
