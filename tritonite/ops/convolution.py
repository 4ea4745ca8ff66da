"""Convolutions and transposed convolutions of sequences, images and volumes, and their gradients."""

import torch
import triton

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.convolution import launch, select
from tritonite.engine.convolution.epilogue import NO_EPILOGUE, Epilogue
from tritonite.engine.convolution.problem import Geometry
from tritonite.engine.iteration import format_strides, is_dense, same_strides
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.matmul import precision_of
from tritonite.ops.normalization import present
from tritonite.ops.reduction.sums import added_to_zero
from tritonite.registry import operator
from tritonite.runtime.contract import decline_if_slower

_Backend = torch._C._ConvBackend


@triton.jit
def _itself(x):
    return x


@triton.jit
def _relu(x):
    return triton.language.maximum(x, 0.0, propagate_nan=triton.language.PropagateNan.ALL)


_BIAS = Reduction((0.0,), _itself, add_states, added_to_zero)


def convolution_precision(dtype, allow_tf32=None):
    """Return "tf32" for float32 operands if `allow_tf32`, or by default torch's switch, has it; else "ieee"."""
    if dtype is not torch.float32 or aten.on_cpu() or torch.version.hip is not None:
        return "ieee"
    allowed = torch.backends.cudnn.conv.fp32_precision == "tf32" if allow_tf32 is None else allow_tf32
    return "tf32" if allowed else "ieee"


# Operands in three dimensions


def _listed(values, dims, name):
    """Return a number for each dimension, from one for all or one for each."""
    if len(values) not in (1, dims):
        raise Decline(f"{name} of {len(values)} numbers for {dims} dimensions")
    return tuple(values) * (dims if len(values) == 1 else 1)


def _volume(tensor):
    """Return a view of (N, C, ...) as (N, C, D, H, W)."""
    while tensor.dim() < 5:
        tensor = tensor.unsqueeze(2)
    return tensor


class _Call:
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
        # Autograd passes the sizes [0] for a convolution without a bias.
        bias_sizes = None if bias_sizes is not None and tuple(bias_sizes) == (0,) else bias_sizes
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
        tensors = _volume(self.input), _volume(self.weight), _volume(out)
        of = launch.transposed_problem_of if self.transposed else launch.problem_of
        return of(*tensors, self.geometry)


def _strides(shape, channels_last):
    """Return the strides of a result; a sequence is laid out as an image of height 1."""
    if len(shape) > 3:
        return format_strides(shape, channels_last)
    strides = format_strides((*shape[:2], 1, shape[2]), channels_last)
    return *strides[:2], strides[3]


def _decline_if_aten_is_faster(call, out, precision, gradient=False):
    inner = call.input.stride(1) == 1
    decline_if_slower(select.aten_is_faster(call.problem(out), precision, inner, gradient))


# Convolutions


def _forward(call, bias, outs, precision, backend=None, epilogue=NO_EPILOGUE):
    """Return the convolution of a checked call, plus the bias, in ATen's memory format."""
    operands = present(call.input, call.weight, bias)
    if bias is not None and bias.dtype is not call.input.dtype:
        raise Decline(f"a bias of {bias.dtype} for operands of {call.input.dtype}")
    strides = _strides(call.shape, call.channels_last(backend))
    (out,) = outputs(operands, [call.shape], [call.input.dtype], outs, strides=strides)
    _decline_if_aten_is_faster(call, out, precision)
    run = launch.convolve_transposed if call.transposed else launch.convolve
    bias = bias if bias is None or bias.stride(0) == 1 else bias.contiguous()
    run(_volume(call.input), _volume(call.weight), bias, _volume(out), call.geometry, precision, epilogue)
    return (out,)


def _sizes(bias):
    return None if bias is None else list(bias.shape)


@operator("convolution", accepts=FLOATS)
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, outs=()):
    """An implicit matrix product: Chetlur et al. 2014."""
    call = _Call(input, weight, _sizes(bias), stride, padding, dilation, transposed, output_padding, groups)
    return _forward(call, bias, outs, convolution_precision(input.dtype))


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
    call = _Call(input, weight, _sizes(bias), stride, padding, dilation, transposed, output_padding, groups)
    return _forward(call, bias, outs, convolution_precision(input.dtype, allow_tf32))


@operator("conv_tbc", accepts=FLOATS)
def conv_tbc(self, weight, bias, pad=0, outs=()):
    """Convolve sequences of (time, batch, channel)."""
    if self.dim() != 3 or weight.dim() != 3 or bias.dim() != 1:
        raise Decline(f"operands of {self.dim()}, {weight.dim()} and {bias.dim()} dimensions, not 3, 3 and 1")
    if not self.numel() or self.stride(0) != self.shape[1] * self.stride(1):
        raise Decline("an input without elements, or whose times and batches are not one dimension in memory")
    input, filters = self.permute(1, 2, 0), weight.permute(2, 1, 0)
    call = _Call(input, filters, _sizes(bias), (1,), (pad,), (1,), False, (0,), 1)
    if bias.dtype is not self.dtype:
        raise Decline(f"a bias of {bias.dtype} for operands of {self.dtype}")
    batch, columns, length = call.shape
    (out,) = outputs((self, weight, bias), [(length, batch, columns)], [self.dtype], outs)
    bias, volume = bias if bias.stride(0) == 1 else bias.contiguous(), _volume(out.permute(1, 2, 0))
    launch.convolve(_volume(input), _volume(filters), bias, volume, call.geometry, precision_of(self.dtype))
    return (out,)


# Gradients


def _backward(call, grad_output, output_mask, outs, precision, backend=None):
    """Return the gradients of a checked call by input, weight and bias, None for those outside the mask."""
    input, weight, geometry = call.input, call.weight, call.geometry
    if tuple(grad_output.shape) != call.shape or grad_output.dtype is not input.dtype:
        shape = tuple(grad_output.shape)
        raise Decline(f"a gradient of {grad_output.dtype} and shape {shape} for a result of shape {call.shape}")
    if outs and not all(output_mask):
        raise Decline(f"outputs with the mask {list(output_mask)}; all have to be wanted")
    shapes = tuple(input.shape), tuple(weight.shape), (call.columns,)
    operands = grad_output, input, weight
    if outs:
        outs = outputs(operands, shapes, [input.dtype] * 3, outs)
    else:
        strides = [*_gradient_strides(call, backend), (1,)]
        each = zip(shapes, strides, output_mask, strict=True)
        outs = [outputs(operands, [s], [input.dtype], (), strides=own)[0] if flag else None for s, own, flag in each]
    by_input, by_weight, by_bias = outs
    _decline_if_aten_is_faster(call, grad_output, precision, gradient=True)
    grad, image, filters = _volume(grad_output), _volume(input), _volume(weight)
    if all(output_mask[:2]) and not (geometry.is_pointwise and filters[0, 0].numel() == 1):
        # Both gradients read one copy.
        grad = launch.channels_last(grad, call.problem(grad_output))
    if by_input is not None:
        run = launch.convolve if call.transposed else launch.convolve_transposed
        run(grad, filters, None, _volume(by_input), geometry, precision)
    if by_weight is not None:
        pair = (grad, image) if call.transposed else (image, grad)
        launch.filter_gradient(*pair, _volume(by_weight), geometry, precision)
    if by_bias is not None:
        _BIAS.run((grad_output,), (0, *range(2, input.dim())), (by_bias,), opmath(input.dtype))
    return outs


def _gradient_strides(call, backend):
    """Return the strides of the gradients by input and weight. Without a batch they are those of zeros like these."""
    if not call.input.shape[0]:
        return [each.stride() if is_dense(each.shape, each.stride()) else None for each in (call.input, call.weight)]
    channels_last = call.channels_last(backend)
    return [_strides(tuple(each.shape), channels_last) for each in (call.input, call.weight)]


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
    call = _Call(input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups)
    return _backward(call, grad_output, output_mask, outs, convolution_precision(input.dtype))


# ATen's kernels without a library of convolutions: products of matrices, with the precision of those


def _check_layout(outs, shapes, channels_last):
    """Decline outputs that ATen's kernels would give other strides, or write in another order."""
    for out, shape in zip(outs, shapes, strict=False):
        fits = tuple(out.shape) == tuple(shape)
        if not (fits and same_strides(shape, out.stride(), _strides(shape, channels_last))):
            raise Decline(f"output of shape {tuple(out.shape)} with strides {out.stride()}")


def _slow_forward(call, bias, outs, backend):
    _check_layout(outs, [call.shape], call.channels_last(backend))
    return _forward(call, bias, outs, precision_of(call.input.dtype), backend)


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
    return _Call(self, weight, _sizes(bias), stride, padding, dilation, transposed, output_padding, 1)


@operator("_slow_conv2d_forward", accepts=FLOATS)
def _slow_conv2d_forward(self, weight, kernel_size, bias, stride, padding, outs=()):
    call = _slow(2, self, weight, bias, kernel_size, stride, padding)
    return _slow_forward(call, bias, outs, _Backend.Slow2d)


@operator("_slow_conv2d_backward", accepts=FLOATS)
def _slow_conv2d_backward(grad_output, self, weight, kernel_size, stride, padding, output_mask=None, outs=()):
    call = _slow(2, self, weight, None, kernel_size, stride, padding)
    channels_last = call.channels_last(_Backend.Slow2d)
    if channels_last and not weight.is_contiguous(memory_format=torch.channels_last):
        raise Decline("a channels-last input and a weight in another order, which ATen refuses")
    if output_mask is None:
        _check_layout(outs, (tuple(self.shape), tuple(weight.shape)), channels_last)
    output_mask, precision = output_mask or (True,) * 3, precision_of(self.dtype)
    return _backward(call, grad_output, output_mask, outs, precision, _Backend.Slow2d)


@operator("slow_conv3d_forward", accepts=FLOATS)
def slow_conv3d_forward(self, weight, kernel_size, bias, stride, padding, outs=()):
    call = _slow(3, self, weight, bias, kernel_size, stride, padding)
    return _slow_forward(call, bias, outs, _Backend.Slow3d)


@operator("slow_conv_dilated2d", accepts=FLOATS)
def slow_conv_dilated2d(self, weight, kernel_size, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), outs=()):
    call = _slow(2, self, weight, bias, kernel_size, stride, padding, dilation)
    return _forward(call, bias, outs, precision_of(self.dtype), _Backend.SlowDilated2d)


@operator("slow_conv_dilated3d", accepts=FLOATS)
def slow_conv_dilated3d(
    self, weight, kernel_size, bias=None, stride=(1, 1, 1), padding=(0, 0, 0), dilation=(1, 1, 1), outs=()
):
    call = _slow(3, self, weight, bias, kernel_size, stride, padding, dilation)
    return _forward(call, bias, outs, precision_of(self.dtype), _Backend.SlowDilated3d)


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
    return _slow_forward(call, bias, outs, _Backend.SlowTranspose2d)


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
    return _slow_forward(call, bias, outs, _Backend.SlowTranspose3d)


# cuDNN's


def _cudnn(self, weight, bias, padding, stride, dilation, groups, transposed=False, output_padding=(0,)):
    """Return the checked call of an operator that ATen serves with cuDNN, for images and volumes."""
    if self.dim() not in (4, 5):
        raise Decline(f"an input of {self.dim()} dimensions; 4 and 5 are served")
    return _Call(self, weight, _sizes(bias), stride, padding, dilation, transposed, output_padding, groups)


@operator("cudnn_convolution", accepts=FLOATS, cuda_only=("cudnn_convolution", "cudnn_convolution.out"))
def cudnn_convolution(self, weight, padding, stride, dilation, groups, benchmark, deterministic, allow_tf32, outs=()):
    call = _cudnn(self, weight, None, padding, stride, dilation, groups)
    return _forward(call, None, outs, convolution_precision(self.dtype, allow_tf32), _Backend.Cudnn)


@operator(
    "cudnn_convolution_transpose",
    accepts=FLOATS,
    cuda_only=("cudnn_convolution_transpose", "cudnn_convolution_transpose.out"),
)
def cudnn_convolution_transpose(
    self, weight, padding, output_padding, stride, dilation, groups, benchmark, deterministic, allow_tf32, outs=()
):
    call = _cudnn(self, weight, None, padding, stride, dilation, groups, True, output_padding)
    return _forward(call, None, outs, convolution_precision(self.dtype, allow_tf32), _Backend.CudnnTranspose)


@operator("cudnn_convolution_relu", accepts=FLOATS, cuda_only=("cudnn_convolution_relu", "cudnn_convolution_relu.out"))
def cudnn_convolution_relu(self, weight, bias, stride, padding, dilation, groups, outs=()):
    call = _cudnn(self, weight, bias, padding, stride, dilation, groups)
    return _forward(call, bias, outs, convolution_precision(self.dtype), _Backend.Cudnn, Epilogue(_relu))
