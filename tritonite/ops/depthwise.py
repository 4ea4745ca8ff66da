"""Depthwise convolutions of images and volumes. ATen has these operators on CUDA only, with row-major results."""

from collections.abc import Sequence

import torch

from tritonite.dtypes import FLOATS
from tritonite.engine.convolution.depthwise import depthwise_forward
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.registry import operator
from tritonite.runtime.contract import decline_if_slower


def _out_shape(
    self: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: Sequence[int],
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """Return the shape of the result. Decline operands for which ATen raises."""
    rank = len(kernel_size)
    if not rank or any(len(each) != rank for each in (stride, padding, dilation)):
        raise Decline(f"a window of {len(stride)}, {len(padding)} and {len(dilation)} numbers; {rank} are served")
    if min(*stride, *dilation) < 1 or min(padding) < 0:
        raise Decline(f"stride {stride}, padding {padding}, dilation {dilation}; a positive window is served")
    if self.dim() != rank + 2 or weight.dim() != rank + 2 or not self.numel() or not weight.numel():
        raise Decline(f"an input of shape {tuple(self.shape)} with filters of shape {tuple(weight.shape)}")
    if weight.shape[1] != 1 or weight.shape[0] % self.shape[1] or tuple(weight.shape[2:]) != tuple(kernel_size):
        raise Decline(f"filters of shape {tuple(weight.shape)} for {self.shape[1]} channels and kernels {kernel_size}")
    if weight.dtype is not self.dtype or (bias is not None and bias.dtype is not self.dtype):
        raise Decline(f"an input of {self.dtype} with filters of {weight.dtype} or a bias of another dtype")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise Decline(f"bias of shape {tuple(bias.shape)} for {weight.shape[0]} channels")
    sizes = [
        (size + 2 * before - apart * (taps - 1) - 1) // step + 1
        for size, taps, step, before, apart in zip(self.shape[2:], kernel_size, stride, padding, dilation, strict=True)
    ]
    if min(sizes) < 1:
        raise Decline(f"result of sizes {sizes}; at least 1 is served")
    return (self.shape[0], weight.shape[0], *sizes)


def _convolve(self, weight, kernel_size, bias, stride, padding, dilation, outs):
    shape = _out_shape(self, weight, kernel_size, bias, stride, padding, dilation)
    if any(not out.is_contiguous() for out in outs):
        raise Decline("an output that is not contiguous")
    # Their speed beside ATen's has not been measured.
    decline_if_slower(True)
    operands = (self, weight) if bias is None else (self, weight, bias)
    (out,) = outs = outputs(operands, [shape], [self.dtype], outs)
    volumes = [x if x.dim() == 5 else x.unsqueeze(2) for x in (self, weight, out)]
    window = [(*[fill] * (3 - len(each)), *each) for each, fill in ((stride, 1), (padding, 0), (dilation, 1))]
    depthwise_forward(volumes[0], volumes[1], bias, volumes[2], *window)
    return outs


@operator("_conv_depthwise2d", accepts=FLOATS, cuda_only=("_conv_depthwise2d", "_conv_depthwise2d.out"))
def _conv_depthwise2d(self, weight, kernel_size, bias, stride, padding, dilation, outs=()):
    return _convolve(self, weight, kernel_size, bias, stride, padding, dilation, outs)


@operator("conv_depthwise3d", accepts=FLOATS, cuda_only=("conv_depthwise3d", "conv_depthwise3d.out"))
def conv_depthwise3d(self, weight, kernel_size, bias, stride, padding, dilation, outs=()):
    return _convolve(self, weight, kernel_size, bias, stride, padding, dilation, outs)
