"""Invariant mode: the bits of an image do not depend on the batch, in convolutions of layers of models."""

import dataclasses

import pytest
import torch
from conftest import FULL, served

import tritonite
from tritonite.bench import convolution, drawing

# An image is compared alone, in batches, and at other positions of a batch.
BATCHES = (1, 2, 3, 5, 8, 17, 33, 64) if FULL else (1, 2, 5)
LAYERS = 200 if tritonite.device == "cuda" else 24 if FULL else 6
SMALL = dataclasses.replace(drawing.OF_MODELS, channels=(64,), sides=(4, 20), lengths=(8, 200), batches=(1, 32))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _bits(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


@pytest.mark.parametrize("seed", range(LAYERS))
def test_an_image_has_the_same_bits_in_every_batch(seed):
    random = drawing.Source(f"invariant {seed}", drawing.TINY if tritonite.device == "cpu" else SMALL)
    layer, _, channels_last = convolution.draw(random)
    dtype = random.choice(DTYPES)
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(shape, generator=generator).to(tritonite.device, dtype)

    most = BATCHES[-1]
    images = convolution.operand((most, layer.channels, *layer.sizes), channels_last)(make)
    grads = convolution.operand((most, layer.filters, *layer.result), channels_last)(make)
    weight = convolution.operand(layer.weight, channels_last and len(layer.sizes) > 1)(make)
    bias = make(layer.filters) if layer.bias else None

    def results(rows):
        """Return the convolution of images and the gradient by these images."""
        x, grad = images[rows], grads[rows]
        out = torch.ops.aten.convolution(x, weight, bias, *layer.steps)
        mask = [True, False, False]
        return out, torch.ops.aten.convolution_backward(grad, x, weight, None, *layer.steps, mask)[0]

    with tritonite.use_gems(["convolution", "convolution_backward"], invariant=True):
        every = results(slice(None))
        for batch in BATCHES[:-1]:
            for first in {0, most - batch}:
                rows = slice(first, first + batch)
                for own, whole in zip(results(rows), every, strict=True):
                    assert torch.equal(_bits(own), _bits(whole[rows])), f"{layer}, {dtype}, images {rows}"
    assert served("convolution") and served("convolution_backward")
