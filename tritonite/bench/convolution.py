"""The family of random benchmark cases of convolutions: layers of models, forward and backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tritonite.bench.cases import Make, Shape
from tritonite.bench.drawing import Call, Source, exactly, family, log_uniform, permuted


@dataclass(frozen=True)
class Layer:
    """A convolution of a model and the sizes of its input, in one dimension or two.

    Attributes:
        channels, filters: channels of the input and of the result.
        sizes: the input's length, or height and width.
        kernel, stride, padding, dilation, output_padding: the same in all dimensions.
        groups: groups of channels, a divisor of `channels` and `filters`.
        bias: whether a bias is added.
        transposed: whether the convolution is transposed.
        first: whether the input is the model's, which needs no gradient.
    """

    channels: int
    filters: int
    sizes: Shape
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    output_padding: int = 0
    groups: int = 1
    bias: bool = True
    transposed: bool = False
    first: bool = False

    @property
    def result(self) -> Shape:
        """Sizes of the result: its length, or height and width."""
        reach = self.dilation * (self.kernel - 1)
        if self.transposed:
            more = reach + self.output_padding + 1 - 2 * self.padding
            return tuple((size - 1) * self.stride + more for size in self.sizes)
        return tuple((size + 2 * self.padding - reach - 1) // self.stride + 1 for size in self.sizes)

    @property
    def weight(self) -> Shape:
        """Return the shape of the weight."""
        own, other = (self.channels, self.filters) if self.transposed else (self.filters, self.channels)
        return (own, other // self.groups, *[self.kernel] * len(self.sizes))

    @property
    def largest(self) -> int:
        """Elements of one image of the input or of the result, whichever has more."""
        return max(self.channels * math.prod(self.sizes), self.filters * math.prod(self.result))

    def flops(self, batch: int) -> int:
        """Return the flops of the forward pass."""
        return 2 * batch * math.prod(self.weight) * math.prod(self.sizes if self.transposed else self.result)

    @property
    def steps(self) -> tuple[Any, ...]:
        """The arguments of `aten::convolution` from `stride` on."""
        lists = [[value] * len(self.sizes) for value in (self.stride, self.padding, self.dilation, self.output_padding)]
        return *lists[:3], self.transposed, lists[3], self.groups


def _resnet(random: Source) -> Layer:
    """Draw from ResNet-50 (He et al. 2015): stem, 1x1 and 3x3 convolutions of blocks, shortcuts."""
    stage = random.randrange(4)
    side, width = 56 >> stage, 64 << stage
    twice, before = (2 * side, 2 * width) if stage else (side, 64)
    return random.choice(
        (
            Layer(3, 64, (224, 224), 7, 2, 3, bias=False, first=True),
            Layer(4 * width, width, (side, side), 1, bias=False),
            Layer(width, 4 * width, (side, side), 1, bias=False),
            Layer(width, width, (side, side), 3, padding=1, bias=False),
            Layer(width, width, (twice, twice), 3, 2 if stage else 1, 1, bias=False),
            Layer(before, 4 * width, (twice, twice), 1, 2 if stage else 1, bias=False),
        )
    )


def _convnext(random: Source) -> Layer:
    """Draw from ConvNeXt-T or B (Liu et al. 2022): patches, downsampling, 7x7 depthwise convolutions."""
    stage, width = random.randrange(4), random.choice((96, 128))
    side, channels = 56 >> stage, width << stage
    return random.choice(
        (
            Layer(3, width, (224, 224), 4, 4, first=True),
            Layer(channels, channels, (side, side), 7, padding=3, groups=channels),
            Layer(channels, channels, (side, side), 7, padding=3, groups=channels),
            Layer(channels, 2 * channels, (side + side % 2, side + side % 2), 2, 2),
        )
    )


def _patches(random: Source) -> Layer:
    """Draw the patches of a vision transformer: ViT, CLIP and DINOv2, 224 to 518 pixels."""
    patch = random.choice((14, 16, 32))
    side = patch * random.choice((14, 16, 24, 37)) if patch < 32 else 224
    return Layer(3, random.choice((384, 768, 1024, 1280)), (side, side), patch, patch, first=True)


def _mobile(random: Source) -> Layer:
    """Draw from MobileNetV2 and EfficientNet-B0 (Sandler et al. 2018, Tan and Le 2019): inverted bottlenecks."""
    # Input channels, expanded channels, output channels, kernel, stride and side of a block.
    channels, wide, filters, kernel, stride, side = random.choice(
        (
            (32, 32, 16, 3, 1, 112),
            (16, 96, 24, 3, 2, 112),
            (24, 144, 40, 5, 2, 56),
            (24, 144, 32, 3, 1, 56),
            (40, 240, 80, 3, 2, 28),
            (64, 384, 96, 3, 1, 14),
            (80, 480, 112, 5, 1, 14),
            (112, 672, 192, 5, 2, 14),
            (160, 960, 320, 3, 1, 7),
            (192, 1152, 192, 5, 1, 7),
        )
    )
    after = side // stride
    return random.choice(
        (
            Layer(channels, wide, (side, side), 1, bias=False),
            Layer(wide, wide, (side, side), kernel, stride, kernel // 2, groups=wide, bias=False),
            Layer(wide, wide, (side, side), kernel, stride, kernel // 2, groups=wide, bias=False),
            Layer(wide, filters, (after, after), 1, bias=False),
        )
    )


def _unet(random: Source) -> Layer:
    """Draw from U-Nets of Stable Diffusion 1.5 and XL: 3x3 convolutions of blocks, shortcuts, changes of size."""
    level, latent = random.randrange(4), random.choice((64, 96, 128))
    side, channels = latent >> level, (320, 640, 1280, 1280)[level]
    skipped = channels + random.choice((320, 640, 1280))
    return random.choice(
        (
            Layer(4, 320, (latent, latent), 3, padding=1, first=True),
            Layer(channels, channels, (side, side), 3, padding=1),
            Layer(channels, channels, (side, side), 3, padding=1),
            Layer(skipped, channels, (side, side), 3, padding=1),
            Layer(skipped, channels, (side, side), 1),
            Layer(channels, channels, (side, side), 3, 2, 1),
            Layer(channels, channels, (side, side), 1),
            Layer(320, 4, (latent, latent), 3, padding=1),
        )
    )


def _vae(random: Source) -> Layer:
    """Draw from Stable Diffusion's autoencoder: 3x3 convolutions at the sizes of images."""
    level = random.randrange(4)
    side, channels = 512 >> level, (128, 256, 512, 512)[level]
    return random.choice(
        (
            Layer(3, 128, (512, 512), 3, padding=1, first=True),
            Layer(channels, channels, (side, side), 3, padding=1),
            Layer(channels, channels, (side, side), 3, padding=1),
            Layer(channels, channels, (side + 1, side + 1), 3, 2),
            Layer(128, 3, (512, 512), 3, padding=1),
            Layer(4, 512, (64, 64), 3, padding=1),
        )
    )


def _whisper(random: Source) -> Layer:
    """Draw one of the two convolutions in front of Whisper's encoder (Radford et al. 2022), tiny to large."""
    width, bins = random.choice(((384, 80), (512, 80), (768, 80), (1024, 80), (1280, 128)))
    return random.choice((Layer(bins, width, (3000,), 3, padding=1, first=True), Layer(width, width, (3000,), 3, 2, 1)))


def _wav2vec(random: Source) -> Layer:
    """Draw from wav2vec 2.0 (Baevski et al. 2020): strided convolutions of sound, and of positions in groups."""
    samples = log_uniform(random, (16_000, 480_000))
    width = random.choice((768, 1024))
    return random.choice(
        (
            Layer(1, 512, (samples,), 10, 5, bias=False, first=True),
            Layer(512, 512, (samples // 5,), 3, 2, bias=False),
            Layer(512, 512, (samples // 80,), 2, 2, bias=False),
            Layer(width, width, (samples // 320,), 128, padding=64, groups=16),
        )
    )


def _vocoder(random: Source) -> Layer:
    """Draw from HiFi-GAN's generator (Kong et al. 2020): transposed and dilated convolutions of sound."""
    level = random.randrange(4)
    channels, length = 512 >> level, log_uniform(random, (32, 1024)) * (1, 8, 64, 128)[level]
    kernel, dilation, stride = random.choice((3, 7, 11)), random.choice((1, 3, 5)), (8, 8, 2, 2)[level]
    return random.choice(
        (
            Layer(channels, channels // 2, (length,), 2 * stride, stride, stride // 2, transposed=True),
            Layer(channels, channels, (length,), kernel, padding=dilation * (kernel // 2), dilation=dilation),
        )
    )


_MODELS = (_resnet, _convnext, _patches, _mobile, _unet, _vae, _whisper, _wav2vec, _vocoder)


def bounded(random: Source, layer: Layer) -> Layer:
    """Return a layer whose channels and sizes are within those of `random`."""
    widest = max(random.sizes.channels)
    side = random.sizes.sides[1] if len(layer.sizes) > 1 else random.sizes.lengths[1]
    channels, filters = (min(count, widest) for count in (layer.channels, layer.filters))
    groups = channels if layer.groups == layer.channels else math.gcd(layer.groups, channels, filters)
    # Padding does not have to reach the kernel's size.
    sizes = tuple(max(min(size, side), layer.dilation * (layer.kernel - 1) + 1) for size in layer.sizes)
    return dataclasses.replace(layer, channels=channels, filters=filters, sizes=sizes, groups=groups)


def draw(random: Source) -> tuple[Layer, int, bool]:
    """Draw a layer, a batch, and whether its tensors are channels-last."""
    layer = bounded(random, random.choice(_MODELS)(random))
    most = max(1, random.sizes.most // (4 * layer.largest))
    batch = min(most, log_uniform(random, (1, 2 * random.sizes.batches[1])))
    return layer, batch, random.random() < 0.5


def operand(shape: Shape, channels_last: bool) -> Callable[[Make], torch.Tensor]:
    """Return what makes a tensor of `shape`, contiguous or channels-last."""
    dims = range(len(shape))
    return permuted(shape, (0, *dims[2:], 1) if channels_last else dims)


@family("convolution")
def _convolution(random: Source) -> Call:
    """Draw the forward or the backward pass of a layer. Sequences may be channels-last as well."""
    layer, batch, channels_last = draw(random)
    backward = random.random() < 0.5
    x = operand((batch, layer.channels, *layer.sizes), channels_last)
    grad = operand((batch, layer.filters, *layer.result), channels_last)
    weight = operand(layer.weight, channels_last and len(layer.sizes) > 1)

    def forwards(make: Make) -> tuple[Any, ...]:
        return x(make), weight(make), make(layer.filters) if layer.bias else None, *layer.steps

    def backwards(make: Make) -> tuple[Any, ...]:
        # Autograd passes a size of 0 without a bias.
        bias = [layer.filters if layer.bias else 0]
        return grad(make), x(make), weight(make), bias, *layer.steps, [not layer.first, True, layer.bias]

    flops = layer.flops(batch)
    if backward:
        products = 1 if layer.first else 2
        return Call("convolution_backward", "convolution_backward", exactly(backwards), flops=products * flops)
    return Call("convolution", "convolution", exactly(forwards), flops=flops)
