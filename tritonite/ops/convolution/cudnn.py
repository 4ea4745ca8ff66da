"""Operators that ATen serves with cuDNN, for images and volumes."""

import triton

from tritonite.dtypes import FLOATS, SINGLE_FLOATS, opmath
from tritonite.engine.convolution.epilogue import Epilogue
from tritonite.errors import Decline
from tritonite.ops.convolution.call import Backend, Call, precision, sizes_of
from tritonite.ops.convolution.compute import forward
from tritonite.registry import operator, scalar_kernel
from tritonite.runtime.contract import empty_strided


@triton.jit
def relu(x):
    """Return the rectified values, and nan for nan."""
    return triton.language.maximum(x, 0.0, propagate_nan=triton.language.PropagateNan.ALL)


@scalar_kernel(own=("z",), cast=("alpha",), accepts=FLOATS)
def _scaled(z, alpha):
    return z * alpha


def _cudnn(self, weight, bias, padding, stride, dilation, groups, transposed=False, output_padding=(0,)):
    """Return the checked call of an operator that ATen serves with cuDNN, for images and volumes."""
    if self.dim() not in (4, 5):
        raise Decline(f"an input of {self.dim()} dimensions; 4 and 5 are served")
    # ATen refuses shorter lists, or with relu reads beyond their end.
    lists = (padding, stride, dilation, *((output_padding,) if transposed else ()))
    if any(len(each) != self.dim() - 2 for each in lists):
        raise Decline(f"a stride, padding or dilation that does not have {self.dim() - 2} elements")
    return Call(self, weight, sizes_of(bias), stride, padding, dilation, transposed, output_padding, groups)


@operator("cudnn_convolution", accepts=FLOATS, cuda_only=("cudnn_convolution", "cudnn_convolution.out"))
def cudnn_convolution(self, weight, padding, stride, dilation, groups, benchmark, deterministic, allow_tf32, outs=()):
    call = _cudnn(self, weight, None, padding, stride, dilation, groups)
    return forward(call, None, outs, precision(self.dtype, allow_tf32), Backend.Cudnn)


@operator(
    "cudnn_convolution_transpose",
    accepts=FLOATS,
    cuda_only=("cudnn_convolution_transpose", "cudnn_convolution_transpose.out"),
)
def cudnn_convolution_transpose(
    self, weight, padding, output_padding, stride, dilation, groups, benchmark, deterministic, allow_tf32, outs=()
):
    call = _cudnn(self, weight, None, padding, stride, dilation, groups, True, output_padding)
    return forward(call, None, outs, precision(self.dtype, allow_tf32), Backend.CudnnTranspose)


def _rectified(self, weight, bias, padding, stride, dilation, groups):
    """Return the checked call of a convolution fused with relu, for which cuDNN has no kernel in float64."""
    if self.dtype not in SINGLE_FLOATS:
        raise Decline(f"an input of {self.dtype}; float16, bfloat16 and float32 are served")
    return _cudnn(self, weight, bias, padding, stride, dilation, groups)


@operator(
    "cudnn_convolution_relu",
    accepts=SINGLE_FLOATS,
    cuda_only=("cudnn_convolution_relu", "cudnn_convolution_relu.out"),
)
def cudnn_convolution_relu(self, weight, bias, stride, padding, dilation, groups, outs=()):
    call = _rectified(self, weight, bias, padding, stride, dilation, groups)
    return forward(call, bias, outs, precision(self.dtype), Backend.Cudnn, Epilogue(relu))


@operator(
    "cudnn_convolution_add_relu",
    accepts=SINGLE_FLOATS,
    cuda_only=("cudnn_convolution_add_relu", "cudnn_convolution_add_relu.out"),
)
def cudnn_convolution_add_relu(self, weight, z, alpha, bias, stride, padding, dilation, groups, outs=()):
    """Rectify the convolution plus the bias and alpha z."""
    call = _rectified(self, weight, bias, padding, stride, dilation, groups)
    if z.dtype is not self.dtype or tuple(z.shape) != call.shape:
        raise Decline(f"an addend of {z.dtype} and shape {tuple(z.shape)} for a result of {self.dtype}, {call.shape}")

    def residual_like(out):
        scaled = empty_strided(out.shape, out.stride(), opmath(z.dtype), z.device)
        _scaled.run((z, 1.0 if alpha is None else alpha), (scaled,))
        return scaled

    epilogue = Epilogue(relu)
    return forward(call, bias, outs, precision(self.dtype), Backend.Cudnn, epilogue, residual_like)
