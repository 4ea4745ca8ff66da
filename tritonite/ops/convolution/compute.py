"""The convolution of a checked call, and its gradients."""

import triton

from tritonite.dtypes import opmath
from tritonite.engine.convolution import launch, select
from tritonite.engine.convolution.epilogue import NO_EPILOGUE
from tritonite.engine.convolution.product import is_product
from tritonite.engine.iteration import is_dense
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.ops.convolution.call import strides_of, volume
from tritonite.ops.normalization import present
from tritonite.ops.reduction.sums import added_to_zero
from tritonite.runtime.contract import decline_if_slower


@triton.jit
def _itself(x):
    return x


_BIAS = Reduction((0.0,), _itself, add_states, added_to_zero)


def _decline_if_aten_is_faster(call, out, precision, gradient=False):
    stride, padding, dilation, _ = call.steps
    taps = tuple(call.weight.shape[2:])
    kind = select.Kind(
        exact=precision == "ieee",
        channels_last=call.input.stride(1) == 1,
        gradient=gradient,
        patches=not call.transposed and stride == taps and not any(padding) and set(dilation) == {1},
        pointwise=is_product(call.weight, call.geometry),
        sequence=call.dims == 1,
    )
    decline_if_slower(select.aten_is_faster(call.problem(out), kind))


def forward(call, bias, outs, precision, backend=None, epilogue=NO_EPILOGUE, residual_like=None):
    """Return the convolution of a checked call, plus the bias, in ATen's memory format.

    `residual_like` returns the epilogue's residual, given the result whose strides it has.
    """
    operands = present(call.input, call.weight, bias)
    if bias is not None and bias.dtype is not call.input.dtype:
        raise Decline(f"a bias of {bias.dtype} for operands of {call.input.dtype}")
    strides = strides_of(call.shape, call.channels_last(backend))
    (out,) = outputs(operands, [call.shape], [call.input.dtype], outs, strides=strides)
    _decline_if_aten_is_faster(call, out, precision)
    if residual_like is not None:
        epilogue = epilogue._replace(residual=residual_like(out))
    run = launch.convolve_transposed if call.transposed else launch.convolve
    bias = bias if bias is None or bias.stride(0) == 1 else bias.contiguous()
    run(volume(call.input), volume(call.weight), bias, volume(out), call.geometry, precision, epilogue)
    return (out,)


def backward(call, grad_output, output_mask, outs, precision, backend=None):
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
    grad, image, filters = volume(grad_output), volume(input), volume(weight)
    if all(output_mask[:2]) and not is_product(filters, geometry):
        # Both gradients read one copy.
        grad = launch.channels_last(grad, call.problem(grad_output))
    if by_input is not None:
        run = launch.convolve if call.transposed else launch.convolve_transposed
        run(grad, filters, None, volume(by_input), geometry, precision)
    if by_weight is not None:
        pair = (grad, image) if call.transposed else (image, grad)
        launch.filter_gradient(*pair, volume(by_weight), geometry, precision)
    if by_bias is not None:
        _BIAS.run((grad_output,), (0, *range(2, input.dim())), (by_bias,), opmath(input.dtype))
    return outs


def _gradient_strides(call, backend):
    """Return the strides of the gradients by input and weight. Without a batch they are those of zeros like these."""
    if not call.input.shape[0]:
        return [each.stride() if is_dense(each.shape, each.stride()) else None for each in (call.input, call.weight)]
    channels_last = call.channels_last(backend)
    return [strides_of(tuple(each.shape), channels_last) for each in (call.input, call.weight)]
