"""Models of images and sound: outputs and all gradients are as exact as ATen's, contiguous and channels-last."""

import copy

import pytest
import torch
from conftest import FULL, every_second, served
from torch import nn

import tritonite
from tritonite.testing.tolerances import RTOL


def _resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 4}
    return ResNetForImageClassification(ResNetConfig(**sizes)), (torch.randn(2, 3, 32, 32),)


def _convnext():
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 4}
    config = ConvNextConfig(**sizes, layer_scale_init_value=0.5, initializer_range=0.2)
    return ConvNextForImageClassification(config), (torch.randn(2, 3, 16, 16),)


def _whisper():
    """Whisper's encoder, whose front end are two convolutions of sound."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "dropout": 0.0}
    config = WhisperConfig(**sizes, num_mel_bins=8, max_source_positions=10)
    return WhisperEncoder(config), (torch.randn(2, 8, 20),)


def _unet():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    blocks |= {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "block_out_channels": (4, 8)}
    sizes = {"layers_per_block": 1, "cross_attention_dim": 8, "attention_head_dim": 2, "norm_num_groups": 2}
    # The middle has the layers of the lowest level again.
    sizes |= {} if FULL else {"mid_block_type": None}
    inputs = torch.randn(2, 4, 8, 8), torch.tensor([3, 700]), torch.randn(2, 3, 8)
    return diffusers.UNet2DConditionModel(**sizes, **blocks), inputs


def _vae():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = diffusers.AutoencoderKL(**blocks, block_out_channels=(4, 8), layers_per_block=1, norm_num_groups=2)
    return model, (torch.randn(1, 3, 8, 8),)


class _Block(nn.Sequential):
    """An inverted bottleneck with squeeze and excitation: Sandler et al. 2018, Howard et al. 2019."""

    def __init__(self, channels, wide, kernel, stride):
        super().__init__(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.SiLU(),
        )
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 4, 1), nn.ReLU(), nn.Conv2d(4, wide, 1))
        self.last = nn.Conv2d(wide, channels, 1)
        self.skips = stride == 1

    def forward(self, x):
        inner = x
        for layer in list(self)[:6]:
            inner = layer(inner)
        inner = self.last(inner * self.gate(inner).sigmoid())
        return x + inner if self.skips else inner


def _mobile():
    """A net of depthwise convolutions, with pooling and resampling."""
    layers = nn.Conv2d(3, 8, 3, 2, 1), nn.MaxPool2d(2), _Block(8, 12, 3, 1), _Block(8, 12, 5, 2)
    head = nn.Upsample(scale_factor=2, mode="bilinear"), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    return nn.Sequential(*layers, *head), (torch.randn(2, 3, 16, 16),)


MODELS = {
    "convnext": _convnext,
    "mobile": _mobile,
    "resnet": _resnet,
    "unet": _unet,
    "vae": _vae,
    "whisper": _whisper,
}
OF_TRANSFORMERS = ("convnext", "resnet", "whisper")
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if tritonite.device == "cuda" else (torch.float32,)


def _made(name):
    """Return a model in training, with weights drawn from a fixed seed, and its inputs."""
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(3)
    model, inputs = MODELS[name]()
    return model.train(), inputs


def _laid(model, inputs, dtype, channels_last):
    """Return a copy of a model and its inputs on the device, in a dtype and a memory format."""
    model = copy.deepcopy(model).to(tritonite.device, dtype)
    inputs = [x.to(tritonite.device, dtype if x.is_floating_point() else x.dtype) for x in inputs]
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs]
    return model, inputs


def _results(model, inputs):
    """Return the output and the gradients of its sum of squares by all parameters, in float64."""
    out = model(*inputs)
    out = out if isinstance(out, torch.Tensor) else out[0]
    out.float().square().mean().backward()
    gradients = {name: each.grad.double() for name, each in model.named_parameters() if each.grad is not None}
    return out.detach().double(), gradients


def _distance(found, wanted):
    """Return the largest differences of outputs and of gradients, relative to the largest of all."""
    assert found[1].keys() == wanted[1].keys()
    largest = max(float(each.abs().max()) for each in wanted[1].values())
    far = max(float((found[1][name] - each).abs().max()) for name, each in wanted[1].items())
    return float((found[0] - wanted[0]).abs().max() / wanted[0].abs().max()), far / largest


@every_second(("name", "dtype", "channels_last"), list(MODELS), DTYPES, [False, True])
def test_outputs_and_gradients_are_as_exact_as_atens(name, dtype, channels_last):
    model, inputs = _made(name)
    rounded = copy.deepcopy(model).to(dtype)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    exact = _results(*_laid(rounded, inputs, torch.float64, channels_last))
    aten = _results(*_laid(rounded, inputs, dtype, channels_last))
    own_model, own_inputs = _laid(rounded, inputs, dtype, channels_last)
    with tritonite.use_gems():
        found = _results(own_model, own_inputs)
    assert served("convolution") and served("convolution_backward")
    # Errors of a dozen layers add up.
    for own, other in zip(_distance(found, exact), _distance(aten, exact), strict=True):
        assert own < 2 * other + (16 * RTOL[dtype] if dtype is torch.float32 else RTOL[dtype] / 4)
