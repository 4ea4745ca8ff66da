"""The operators behind `torch.conv1d` to `torch.conv_transpose3d`, `torch.conv_tbc`, and their gradients."""

import torch

from tritonite.dtypes import FLOATS
from tritonite.engine.convolution import launch
from tritonite.engine.outputs import outputs
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.convolution.call import Call, precision, sizes_of, volume
from tritonite.ops.convolution.compute import backward, forward
from tritonite.ops.matmul import precision_of
from tritonite.registry import operator


@operator("convolution", accepts=FLOATS)
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, outs=()):
    """An implicit matrix product: Chetlur et al. 2014."""
    call = Call(input, weight, sizes_of(bias), stride, padding, dilation, transposed, output_padding, groups)
    return forward(call, bias, outs, precision(input.dtype))


@operator("_convolution", accepts=FLOATS)
def _convolution(
    input,
    weight,
    bias,
    stride,
    padding,
    dilation,
    transposed,
    output_padding,
    groups,
    benchmark,
    deterministic,
    cudnn_enabled,
    allow_tf32,
    outs=(),
):
    if not aten.on_cpu() and cudnn_enabled != torch.backends.cudnn.enabled:
        raise Decline(f"cudnn_enabled={cudnn_enabled} unlike torch.backends.cudnn, which decides the result's layout")
    call = Call(input, weight, sizes_of(bias), stride, padding, dilation, transposed, output_padding, groups)
    return forward(call, bias, outs, precision(input.dtype, allow_tf32))


@operator("conv_tbc", accepts=FLOATS)
def conv_tbc(self, weight, bias, pad=0, outs=()):
    """Convolve sequences of (time, batch, channel)."""
    if self.dim() != 3 or weight.dim() != 3 or bias.dim() != 1:
        raise Decline(f"operands of {self.dim()}, {weight.dim()} and {bias.dim()} dimensions, not 3, 3 and 1")
    if not self.numel() or self.stride(0) != self.shape[1] * self.stride(1):
        raise Decline("an input without elements, or whose times and batches are not one dimension in memory")
    input, filters = self.permute(1, 2, 0), weight.permute(2, 1, 0)
    call = Call(input, filters, sizes_of(bias), (1,), (pad,), (1,), False, (0,), 1)
    if bias.dtype is not self.dtype:
        raise Decline(f"a bias of {bias.dtype} for operands of {self.dtype}")
    batch, columns, length = call.shape
    (out,) = outputs((self, weight, bias), [(length, batch, columns)], [self.dtype], outs)
    bias = bias if bias.stride(0) == 1 else bias.contiguous()
    launch.convolve(
        volume(input), volume(filters), bias, volume(out.permute(1, 2, 0)), call.geometry, precision_of(self.dtype)
    )
    return (out,)


@operator("convolution_backward", accepts=FLOATS)
def convolution_backward(
    grad_output,
    input,
    weight,
    bias_sizes,
    stride,
    padding,
    dilation,
    transposed,
    output_padding,
    groups,
    output_mask,
    outs=(),
):
    # Autograd passes the sizes [0] for a convolution without a bias.
    bias_sizes = None if bias_sizes is not None and tuple(bias_sizes) == (0,) else bias_sizes
    call = Call(input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups)
    return backward(call, grad_output, output_mask, outs, precision(input.dtype))
