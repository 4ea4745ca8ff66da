"""ATen's operators without a library of convolutions: products of matrices, with the precision of those."""

import torch

from tritonite.dtypes import FLOATS
from tritonite.engine.outputs import check_layout
from tritonite.errors import Decline
from tritonite.ops.convolution.call import Backend, Call, sizes_of, strides_of
from tritonite.ops.convolution.compute import backward, forward
from tritonite.ops.matmul import precision_of
from tritonite.registry import operator


def _slow_forward(call, bias, outs, backend):
    check_layout(outs, strides_of(call.shape, call.channels_last(backend)))
    return forward(call, bias, outs, precision_of(call.input.dtype), backend)


def _slow(dims, self, weight, bias, kernel_size, stride, padding, dilation=None, transposed=False, output_padding=None):
    """Return the checked call of an operator that names the sizes of its kernel, with a number for each dimension."""
    dilation = (1,) * dims if dilation is None else dilation
    output_padding = (0,) * dims if output_padding is None else output_padding
    if any(len(each) != dims for each in (kernel_size, stride, padding, dilation, output_padding)):
        raise Decline(f"steps of other than {dims} numbers")
    if self.dim() != dims + 2 or tuple(weight.shape[2:]) != tuple(kernel_size):
        raise Decline(
            f"an input of {self.dim()} dimensions or a weight of shape {tuple(weight.shape)} for a kernel of "
            f"{list(kernel_size)}; served are batches"
        )
    if transposed and not self.shape[0]:
        raise Decline("no images, which ATen refuses")
    return Call(self, weight, sizes_of(bias), stride, padding, dilation, transposed, output_padding, 1)


@operator("_slow_conv2d_forward", accepts=FLOATS)
def _slow_conv2d_forward(self, weight, kernel_size, bias, stride, padding, outs=()):
    call = _slow(2, self, weight, bias, kernel_size, stride, padding)
    return _slow_forward(call, bias, outs, Backend.Slow2d)


@operator("_slow_conv2d_backward", accepts=FLOATS)
def _slow_conv2d_backward(grad_output, self, weight, kernel_size, stride, padding, output_mask=None, outs=()):
    call = _slow(2, self, weight, None, kernel_size, stride, padding)
    channels_last = call.channels_last(Backend.Slow2d)
    if channels_last and not weight.is_contiguous(memory_format=torch.channels_last):
        raise Decline("a channels-last input and a weight in another order, which ATen refuses")
    if output_mask is None:
        for out, own in zip(outs, (self, weight), strict=False):
            check_layout([out], strides_of(own.shape, channels_last))
    output_mask, precision = output_mask or (True,) * 3, precision_of(self.dtype)
    return backward(call, grad_output, output_mask, outs, precision, Backend.Slow2d)


@operator("slow_conv3d_forward", accepts=FLOATS)
def slow_conv3d_forward(self, weight, kernel_size, bias, stride, padding, outs=()):
    call = _slow(3, self, weight, bias, kernel_size, stride, padding)
    return _slow_forward(call, bias, outs, Backend.Slow3d)


@operator("slow_conv_dilated2d", accepts=FLOATS)
def slow_conv_dilated2d(self, weight, kernel_size, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), outs=()):
    call = _slow(2, self, weight, bias, kernel_size, stride, padding, dilation)
    return forward(call, bias, outs, precision_of(self.dtype), Backend.SlowDilated2d)


@operator("slow_conv_dilated3d", accepts=FLOATS)
def slow_conv_dilated3d(
    self, weight, kernel_size, bias=None, stride=(1, 1, 1), padding=(0, 0, 0), dilation=(1, 1, 1), outs=()
):
    call = _slow(3, self, weight, bias, kernel_size, stride, padding, dilation)
    return forward(call, bias, outs, precision_of(self.dtype), Backend.SlowDilated3d)


@operator("slow_conv_transpose2d", accepts=FLOATS)
def slow_conv_transpose2d(
    self,
    weight,
    kernel_size,
    bias=None,
    stride=(1, 1),
    padding=(0, 0),
    output_padding=(0, 0),
    dilation=(1, 1),
    outs=(),
):
    call = _slow(2, self, weight, bias, kernel_size, stride, padding, dilation, True, output_padding)
    return _slow_forward(call, bias, outs, Backend.SlowTranspose2d)


@operator("slow_conv_transpose3d", accepts=FLOATS)
def slow_conv_transpose3d(
    self,
    weight,
    kernel_size,
    bias=None,
    stride=(1, 1, 1),
    padding=(0, 0, 0),
    output_padding=(0, 0, 0),
    dilation=(1, 1, 1),
    outs=(),
):
    call = _slow(3, self, weight, bias, kernel_size, stride, padding, dilation, True, output_padding)
    return _slow_forward(call, bias, outs, Backend.SlowTranspose3d)
