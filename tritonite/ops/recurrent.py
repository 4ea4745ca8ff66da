"""Cells of recurrent networks after their products: gates, new states, and gradients. ATen has them on CUDA only.

Gates lie side by side along the columns of a matrix, (batch, gates * hidden size). The workspace is ATen's, since
either side may compute the gradient: the gates of an LSTM (input, forget, cell, output) after their activations; of a
GRU reset, update and new gate, the hidden state, and the hidden part of the new gate.
"""

import triton

from tritonite.dtypes import FLOATS, opmath
from tritonite.engine.outputs import outputs
from tritonite.engine.pointwise.gathered import Gathered
from tritonite.engine.rows.declare import Reduction
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language import libdevice
from tritonite.language.indices import read_at
from tritonite.language.math import sigmoid
from tritonite.ops.reduction.sums import added_to_zero, same
from tritonite.registry import exclude, operator, scalar_kernel

# A step needs the state of the step before it. Here a step of an LSTM would be two dependent launches, of a product,
# which reads all 4 * hidden_size ** 2 weights from the L2 cache, and of a cell. cuDNN keeps the weights in registers
# for all steps, synchronises once a step, and computes a layer while the layer before it still runs. Its reserve, which
# the gradient reads, and its random numbers for dropout are its own.
for _form in ("_cudnn_rnn", "_cudnn_rnn.out"):
    exclude(_form, "steps depend on each other: two launches a step cannot be as fast as cuDNN's kernel for all steps")

_total = Reduction((0.0,), same, add_states, added_to_zero)


@triton.jit
def _gate(gates, bias, at, cx):
    """Return a gate of one side before its activation, in the dtype of the state."""
    total = read_at(gates, (at,), at >= 0, 0.0).to(cx.dtype)
    if bias is not None:
        total += read_at(bias, (at,), at >= 0, 0.0).to(cx.dtype)
    return total


@triton.jit
def _gate_of_both(input, hidden, input_bias, hidden_bias, at, cx):
    return _gate(input, input_bias, at, cx) + _gate(hidden, hidden_bias, at, cx)


_SIDES = ("input", "hidden", "input_bias", "hidden_bias")


@scalar_kernel(accepts=FLOATS, pointer=_SIDES, index=("at",), output_dtypes=(None,) * 6)
def _lstm(cx, input, hidden, input_bias, hidden_bias, at):
    """c' = f c + i tanh(...); h' = o tanh(c'). Returns h', c' and the gates."""
    i = sigmoid(_gate_of_both(input, hidden, input_bias, hidden_bias, at, cx))
    f = sigmoid(_gate_of_both(input, hidden, input_bias, hidden_bias, at + 1, cx))
    c = libdevice.tanh(_gate_of_both(input, hidden, input_bias, hidden_bias, at + 2, cx))
    o = sigmoid(_gate_of_both(input, hidden, input_bias, hidden_bias, at + 3, cx))
    cy = f * cx + i * c
    return o * libdevice.tanh(cy), cy, i, f, c, o


@scalar_kernel(accepts=FLOATS, output_dtypes=(None,) * 5)
def _lstm_gradients(grad_hy, grad_cy, cx, cy, i, f, c, o):
    """Return the gradients by c, and by the sums of the four gates."""
    tanh = libdevice.tanh(cy)
    by_o = tanh * 0.0
    by_c = tanh * 0.0
    if grad_hy is not None:
        by_o = grad_hy * tanh
        by_c = grad_hy * o * (1.0 - tanh * tanh)
    if grad_cy is not None:
        by_c += grad_cy
    by_i, by_f, by_new = by_c * c * (1.0 - i) * i, by_c * cx * (1.0 - f) * f, by_c * i * (1.0 - c * c)
    return by_c * f, by_i, by_f, by_new, by_o * (1.0 - o) * o


@scalar_kernel(accepts=FLOATS, pointer=_SIDES, index=("at",), output_dtypes=(None,) * 6)
def _gru(hx, input, hidden, input_bias, hidden_bias, at):
    """n = tanh(... + r h_n); h' = n + z (h - n). Returns h' and the five parts of the workspace."""
    r = sigmoid(_gate_of_both(input, hidden, input_bias, hidden_bias, at, hx))
    z = sigmoid(_gate_of_both(input, hidden, input_bias, hidden_bias, at + 1, hx))
    rest = _gate(hidden, hidden_bias, at + 2, hx)
    n = libdevice.tanh(_gate(input, input_bias, at + 2, hx) + r * rest)
    return n + z * (hx - n), r, z, n, hx, rest


@scalar_kernel(accepts=FLOATS, output_dtypes=(None,) * 7)
def _gru_gradients(grad_hy, r, z, n, hx, hidden):
    """Return the gradients by h, by the sums of the input's gates, and by those of the hidden state's."""
    by_z = grad_hy * (hx - n) * (1.0 - z) * z
    by_n = grad_hy * (1.0 - z) * (1.0 - n * n)
    by_r = by_n * hidden * (1.0 - r) * r
    return grad_hy * z, by_r, by_z, by_n, by_r, by_z, by_n * r


def _parts(matrix, count):
    """Return views of the equal parts of a matrix along its columns."""
    size = matrix.shape[1] // count
    return [matrix.narrow(1, i * size, size) for i in range(count)]


def _side(operand, count):
    """Return gates or their biases as an operand of (batch or 1, gates, hidden size), which a formula reads by gate."""
    if operand is None:
        return None
    matrix = operand if operand.dim() == 2 else operand.unsqueeze(0)
    return Gathered(matrix.view(matrix.shape[0], count, matrix.shape[1] // count), (1,))


def _check_dtypes(first, *others):
    if any(each is not None and each.dtype is not first.dtype for each in others):
        raise Decline(f"operands of {first.dtype} and {[each.dtype for each in others if each is not None]}")


def _check_cell(input_gates, hidden_gates, state, input_bias, hidden_bias, count):
    """Decline operands for which ATen raises."""
    _check_dtypes(input_gates, hidden_gates, state, input_bias, hidden_bias)
    if input_gates.dim() != 2 or state.dim() != 2 or input_gates.shape != hidden_gates.shape:
        raise Decline(f"gates of shapes {tuple(input_gates.shape)} and {tuple(hidden_gates.shape)}")
    if tuple(input_gates.shape) != (state.shape[0], count * state.shape[1]):
        raise Decline(f"gates of shape {tuple(input_gates.shape)} for a state of shape {tuple(state.shape)}")
    if (input_bias is None) != (hidden_bias is None):
        raise Decline("one bias; both or none are served")
    for bias in (input_bias, hidden_bias):
        if bias is not None and tuple(bias.shape) != (input_gates.shape[1],):
            raise Decline(f"bias of shape {tuple(bias.shape)} for gates of shape {tuple(input_gates.shape)}")


def _given(*operands):
    return [each for each in operands if each is not None]


@operator("_thnn_fused_lstm_cell", accepts=FLOATS, cuda_only=("_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell.out"))
def _thnn_fused_lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None, outs=()):
    _check_cell(input_gates, hidden_gates, cx, input_bias, hidden_bias, 4)
    operands = _given(input_gates, hidden_gates, cx, input_bias, hidden_bias)
    shapes = [cx.shape, cx.shape, input_gates.shape]
    hy, cy, workspace = outs = outputs(operands, shapes, [cx.dtype] * 3, outs)
    sides = [_side(each, 4) for each in (input_gates, hidden_gates, input_bias, hidden_bias)]
    _lstm.run((cx.unsqueeze(1), *sides, 1), [each.unsqueeze(1) for each in (hy, cy, *_parts(workspace, 4))])
    return outs


def _with_biases(has_bias, gates, operands, shapes, dtype, outs):
    """Return the outputs of a gradient, and those of the biases, which are the last `gates`; None without biases."""
    if outs and not has_bias:
        raise Decline("outputs for gradients of biases, and no biases")
    width = shapes[0][1]
    shapes = [*shapes, *[(width,)] * gates] if has_bias else shapes
    outs = outputs(operands, shapes, [dtype] * len(shapes), outs)
    return outs if has_bias else (*outs, *[None] * gates)


def _sum_biases(pairs, dtype):
    for by_gates, by_bias in pairs:
        if by_bias is not None:
            _total.run((by_gates,), (0,), (by_bias,), dtype)


@operator(
    "_thnn_fused_lstm_cell_backward_impl",
    accepts=FLOATS,
    cuda_only=("_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_lstm_cell_backward_impl.out"),
)
def _thnn_fused_lstm_cell_backward_impl(grad_hy, grad_cy, cx, cy, workspace, has_bias, outs=()):
    if grad_hy is None and grad_cy is None:
        raise Decline("no gradient; ATen returns no tensors")
    _check_dtypes(workspace, grad_hy, grad_cy, cx, cy)
    if cx.dim() != 2 or any(each.shape != cx.shape for each in _given(grad_hy, grad_cy, cy)):
        raise Decline(f"states of shapes {tuple(cx.shape)} and {tuple(cy.shape)}, or gradients of another shape")
    if tuple(workspace.shape) != (cx.shape[0], 4 * cx.shape[1]):
        raise Decline(f"workspace of shape {tuple(workspace.shape)} for a state of shape {tuple(cx.shape)}")
    operands, shapes = _given(grad_hy, grad_cy, cx, cy, workspace), [workspace.shape, cx.shape]
    grad_gates, grad_cx, grad_bias = outs = _with_biases(has_bias, 1, operands, shapes, cx.dtype, outs)
    _lstm_gradients.run((grad_hy, grad_cy, cx, cy, *_parts(workspace, 4)), (grad_cx, *_parts(grad_gates, 4)))
    _sum_biases([(grad_gates, grad_bias)], opmath(cx.dtype))
    return outs


@operator("_thnn_fused_gru_cell", accepts=FLOATS, cuda_only=("_thnn_fused_gru_cell", "_thnn_fused_gru_cell.out"))
def _thnn_fused_gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None, outs=()):
    _check_cell(input_gates, hidden_gates, hx, input_bias, hidden_bias, 3)
    operands = _given(input_gates, hidden_gates, hx, input_bias, hidden_bias)
    hy, workspace = outs = outputs(operands, [hx.shape, (hx.shape[0], 5 * hx.shape[1])], [hx.dtype] * 2, outs)
    sides = [_side(each, 3) for each in (input_gates, hidden_gates, input_bias, hidden_bias)]
    _gru.run((hx.unsqueeze(1), *sides, 1), [each.unsqueeze(1) for each in (hy, *_parts(workspace, 5))])
    return outs


@operator(
    "_thnn_fused_gru_cell_backward",
    accepts=FLOATS,
    cuda_only=("_thnn_fused_gru_cell_backward", "_thnn_fused_gru_cell_backward.out"),
)
def _thnn_fused_gru_cell_backward(grad_hy, workspace, has_bias, outs=()):
    _check_dtypes(workspace, grad_hy)
    if grad_hy.dim() != 2 or tuple(workspace.shape) != (grad_hy.shape[0], 5 * grad_hy.shape[1]):
        raise Decline(f"workspace of shape {tuple(workspace.shape)} for a gradient of shape {tuple(grad_hy.shape)}")
    gates = grad_hy.shape[0], 3 * grad_hy.shape[1]
    shapes = [gates, gates, grad_hy.shape]
    outs = _with_biases(has_bias, 2, [grad_hy, workspace], shapes, grad_hy.dtype, outs)
    by_input, by_hidden, grad_hx, input_bias, hidden_bias = outs
    written = (grad_hx, *_parts(by_input, 3), *_parts(by_hidden, 3))
    _gru_gradients.run((grad_hy, *_parts(workspace, 5)), written)
    _sum_biases([(by_input, input_bias), (by_hidden, hidden_bias)], opmath(grad_hy.dtype))
    return outs
