"""Models of images: ViT, ResNet, ConvNeXt, a diffusion U-Net and an autoencoder, all with random weights.

A result is (images, 1, width), or (images, positions, width), so that every image is compared.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from tritonite.bench.models.workload import Phase, Workload, norms
from tritonite.errors import TritoniteError


def vit(workload: Workload) -> list[Phase]:
    """ViT-B/16."""
    from transformers import ViTConfig

    # ViTConfig's defaults are ViT-B/16.
    sizes = {}
    if workload.tiny:
        sizes = {"image_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"hidden_size": 32, "intermediate_size": 64}
    config = ViTConfig(**sizes)
    model = workload.from_config(config, "AutoModel")
    images = workload.noise(3, config.image_size, config.image_size)
    patches = (config.image_size // config.patch_size) ** 2
    return [Phase("forward", patches + 1, lambda: model(pixel_values=images).last_hidden_state)]


def _classifier(workload: Workload, config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a classifier of images, and arguments of its loss."""
    side = 32 if workload.tiny else 224
    model = workload.from_config(config, "AutoModelForImageClassification")
    labels = torch.arange(workload.batch, device=model.device) * 7 % config.num_labels
    return model, {"pixel_values": workload.noise(3, side, side), "labels": labels}


def _resnet(workload: Workload) -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import ResNetConfig

    # ResNetConfig's defaults are ResNet-50.
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]} if workload.tiny else {}
    model, given = _classifier(workload, ResNetConfig(**sizes, num_labels=10 if workload.tiny else 1000))
    # Blocks near the identity, as in training (Goyal et al. 2017): otherwise rounding errors grow from block to block.
    for each in model.modules():
        if type(each).__name__ == "ResNetBottleNeckLayer":
            torch.nn.init.constant_(each.layer[-1].normalization.weight, 0.1)
    return model, given


def _convnext(workload: Workload) -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import ConvNextConfig

    # ConvNextConfig's defaults are ConvNeXt-T. A layer scale of 1e-6 would hide the blocks' results.
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2} if workload.tiny else {}
    labels = 10 if workload.tiny else 1000
    return _classifier(workload, ConvNextConfig(**sizes, num_labels=labels, layer_scale_init_value=0.1))


def resnet(workload: Workload) -> list[Phase]:
    """ResNet-50 on images of 224 x 224 pixels."""
    return _logits(*_resnet(workload))


def resnet_step(workload: Workload) -> list[Phase]:
    """A training step of ResNet-50."""
    return _of_labels(workload, *_resnet(workload))


def convnext(workload: Workload) -> list[Phase]:
    """ConvNeXt-T on images of 224 x 224 pixels."""
    return _logits(*_convnext(workload))


def convnext_step(workload: Workload) -> list[Phase]:
    """A training step of ConvNeXt-T."""
    return _of_labels(workload, *_convnext(workload))


def _logits(model: Any, given: dict[str, torch.Tensor]) -> list[Phase]:
    images = given["pixel_values"]
    return [Phase("forward", 1, lambda: model(pixel_values=images).logits.unsqueeze(1))]


def _of_labels(workload: Workload, model: Any, given: dict[str, torch.Tensor]) -> list[Phase]:
    return [workload.training(model.train(), lambda: model(**given).loss, norms(model), 1)]


def _diffusers(workload: Workload, kind: str, sizes: dict[str, Any]) -> Any:
    """Return a model of diffusers with random weights. Raises TritoniteError if diffusers is missing."""
    if importlib.util.find_spec("diffusers") is None:
        raise TritoniteError(message="unet and vae come from diffusers: pip install diffusers")
    import diffusers

    # A change of dtype is logged as a warning.
    diffusers.utils.logging.set_verbosity_error()
    return workload.model(lambda: getattr(diffusers, kind)(**sizes).to(workload.stored))


def _unet(workload: Workload) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return a U-Net, and its arguments: noise, a time step of each image, and the states of 77 words."""
    tiny = workload.tiny
    sizes: dict[str, Any] = {"cross_attention_dim": 768, "attention_head_dim": 8}
    if tiny:
        sizes = {"layers_per_block": 1, "cross_attention_dim": 16, "attention_head_dim": 2, "norm_num_groups": 4}
        sizes |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "block_out_channels": (8, 16)}
        sizes |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    model = _diffusers(workload, "UNet2DConditionModel", sizes)
    side, words = (8, 5) if tiny else (64, 77)
    noise = workload.noise(4, side, side)
    steps = torch.arange(workload.batch, device=noise.device) * 37 % 1000
    return model, (noise, steps, workload.noise(words, sizes["cross_attention_dim"], seed=1))


def unet(workload: Workload) -> list[Phase]:
    """Stable Diffusion 1.5's U-Net: one step of denoising images of 512 x 512 pixels."""
    model, given = _unet(workload)
    return [Phase("forward", 1, lambda: _image_rows(model(*given).sample))]


def unet_step(workload: Workload) -> list[Phase]:
    """A training step of Stable Diffusion 1.5's U-Net."""
    model, given = _unet(workload)
    target = workload.noise(*given[0].shape[1:], seed=2)

    def loss() -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(*given).sample.float(), target.float())

    return [workload.training(model.train(), loss, norms(model), 1)]


def _vae(workload: Workload) -> tuple[Any, torch.Tensor]:
    """Return an autoencoder and images."""
    widths = (8, 16) if workload.tiny else (128, 256, 512, 512)
    sizes: dict[str, Any] = {"block_out_channels": widths, "latent_channels": 4}
    sizes["down_block_types"] = ("DownEncoderBlock2D",) * len(widths)
    sizes["up_block_types"] = ("UpDecoderBlock2D",) * len(widths)
    sizes |= {"layers_per_block": 1, "norm_num_groups": 4} if workload.tiny else {"layers_per_block": 2}
    model = _diffusers(workload, "AutoencoderKL", sizes)
    side = 16 if workload.tiny else 512
    return model, workload.noise(3, side, side)


def vae(workload: Workload) -> list[Phase]:
    """Stable Diffusion's autoencoder: encoding of images of 512 x 512 pixels, and decoding of their latents."""
    model, images = _vae(workload)
    scale = 2 ** (len(model.config.block_out_channels) - 1)
    latents = workload.noise(4, images.shape[2] // scale, images.shape[3] // scale, seed=1)
    return [
        Phase("encode", 1, lambda: _image_rows(model.encode(images).latent_dist.mean)),
        Phase("decode", 1, lambda: _image_rows(model.decode(latents).sample)),
    ]


def vae_step(workload: Workload) -> list[Phase]:
    """A training step of Stable Diffusion's autoencoder on the error of reconstructed images."""
    model, images = _vae(workload)

    def loss() -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(images).sample.float(), images.float())

    return [workload.training(model.train(), loss, norms(model), 1)]


def _image_rows(images: torch.Tensor) -> torch.Tensor:
    """Return images as (images, 1, elements)."""
    return images.flatten(1).unsqueeze(1)
