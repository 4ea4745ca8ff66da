"""Checked calls of convolutions: operands in three dimensions, and what ATen's result looks like."""

import torch

from tritonite import devices
from tritonite.dtypes import FLOATS
from tritonite.engine.convolution import launch
from tritonite.engine.convolution.problem import Geometry
from tritonite.engine.iteration import format_strides
from tritonite.errors import Decline
from tritonite.ops import aten

Backend = torch._C._ConvBackend


def precision(dtype, allow_tf32=None):
    """Return "tf32" for float32 operands if `allow_tf32`, or by default torch's switch, has it; else "ieee"."""
    if dtype is not torch.float32 or aten.on_cpu() or torch.float32 not in devices.current.tensor_cores:
        return "ieee"
    allowed = torch.backends.cudnn.conv.fp32_precision == "tf32" if allow_tf32 is None else allow_tf32
    return "tf32" if allowed else "ieee"


def sizes_of(bias):
    """Return the sizes of a bias, or None without one."""
    return None if bias is None else list(bias.shape)


def _listed(values, dims, name):
    """Return a number for each dimension, from one for all or one for each."""
    if len(values) not in (1, dims):
        raise Decline(f"{name} of {len(values)} numbers for {dims} dimensions")
    return tuple(values) * (dims if len(values) == 1 else 1)


def volume(tensor):
    """Return a view of (N, C, ...) as (N, C, D, H, W)."""
    while tensor.dim() < 5:
        tensor = tensor.unsqueeze(2)
    return tensor


class Call:
    """A checked call: its geometry, the shape of the result, and the arguments as ATen's own functions take them.

    Raises Decline where ATen raises an error.
    """

    def __init__(self, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups):
        dims = input.dim() - 2
        if not 1 <= dims <= 3 or weight.dim() != input.dim():
            raise Decline(f"an input of {input.dim()} and a weight of {weight.dim()} dimensions; 3 to 5 are served")
        stride, padding = _listed(stride, dims, "stride"), _listed(padding, dims, "padding")
        dilation = _listed(dilation, dims, "dilation")
        output_padding = _listed(output_padding, dims, "output padding")
        if min(stride) < 1 or min(padding) < 0 or min(dilation) < 1 or min(output_padding) < 0 or groups < 1:
            raise Decline(f"stride {stride}, padding {padding}, dilation {dilation}, {groups} groups, out of range")
        if not transposed and any(output_padding):
            raise Decline(f"output padding {output_padding} without transposition")
        if any(more >= max(s, d) for more, s, d in zip(output_padding, stride, dilation, strict=True)):
            raise Decline(f"output padding {output_padding}, not below stride {stride} or dilation {dilation}")
        if input.dtype not in FLOATS or weight.dtype is not input.dtype:
            raise Decline(f"operands of {input.dtype} and {weight.dtype}; served are two of one floating-point dtype")
        if not weight.numel() or 0 in input.shape[1:]:
            raise Decline(f"shapes {tuple(input.shape)} and {tuple(weight.shape)}; no size but the batch may be 0")
        own, channels = weight.shape[0], weight.shape[1]
        if own % groups or input.shape[1] != (own if transposed else channels * groups):
            raise Decline(f"{input.shape[1]} channels and a weight of shape {tuple(weight.shape)} in {groups} groups")
        self.columns = channels * groups if transposed else own
        if bias_sizes is not None and tuple(bias_sizes) != (self.columns,):
            raise Decline(f"a bias of shape {tuple(bias_sizes)}, not {(self.columns,)}")
        steps = zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding, strict=True)
        if transposed:
            sizes = [(size - 1) * s - 2 * p + d * (k - 1) + more + 1 for size, k, s, p, d, more in steps]
        else:
            sizes = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d, _ in steps]
        if min(sizes) < 1:
            raise Decline(f"a kernel of {tuple(weight.shape[2:])} that exceeds the padded input, {tuple(input.shape)}")
        self.input, self.weight, self.dims, self.transposed, self.groups = input, weight, dims, transposed, groups
        self.bias_sizes = bias_sizes
        self.shape = (input.shape[0], self.columns, *sizes)
        self.steps = stride, padding, dilation, output_padding
        more = 3 - dims
        self.geometry = Geometry((1,) * more + stride, (0,) * more + padding, (1,) * more + dilation, groups)

    def channels_last(self, backend=None):
        """Return whether ATen's results are channels-last, with this backend or the one that ATen selects.

        ATen views sequences as images, and takes their input as contiguous.
        """
        input, weight = self.input, self.weight
        stride, padding, dilation, more = [list(each) for each in self.steps]
        if self.dims == 1:
            input, weight = input.unsqueeze(2), weight.unsqueeze(2)
            stride, padding, dilation, more = [1, *stride], [0, *padding], [1, *dilation], [0, *more]
        if backend is None:
            steps = stride, padding, dilation, self.transposed, more, self.groups
            backend = torch._C._select_conv_backend(input, weight, None, *steps, self.bias_sizes)
        # ATen copies a sequence that is not contiguous, and then only the weight's layout counts.
        image = weight if self.dims == 1 and not self.input.is_contiguous() else input
        found = torch._C._conv_determine_backend_memory_format(image, weight, backend)
        return found in (torch.channels_last, torch.channels_last_3d)

    def problem(self, out):
        tensors = volume(self.input), volume(self.weight), volume(out)
        of = launch.transposed_problem_of if self.transposed else launch.problem_of
        return of(*tensors, self.geometry)


def strides_of(shape, channels_last):
    """Return the strides of a result; a sequence is laid out as an image of height 1."""
    if len(shape) > 3:
        return format_strides(shape, channels_last)
    strides = format_strides((*shape[:2], 1, shape[2]), channels_last)
    return *strides[:2], strides[3]
