"""Fused cells of recurrent networks, which ATen has on CUDA alone, against compositions in float64."""

import pytest
import torch
from compositions import close, normal

import tritonite
from tritonite.errors import Decline

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BATCH, SIZE = 3, 5


def lstm(gates, hidden, cx, bias, other):
    """Return the new states, and the gates after their activations."""
    total = gates + hidden + (0 if bias is None else bias + other)
    i, f, c, o = total.chunk(4, 1)
    parts = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cy = parts[1] * cx + parts[0] * parts[2]
    return parts[3] * cy.tanh(), cy, torch.cat(parts, 1)


def gru(gates, hidden, hx, bias, other):
    """Return the new state, and the workspace."""
    own, rest = (gates, hidden) if bias is None else (gates + bias, hidden + other)
    (a, b, c), (d, e, f) = own.chunk(3, 1), rest.chunk(3, 1)
    r, z = (a + d).sigmoid(), (b + e).sigmoid()
    n = (c + r * f).tanh()
    return n + z * (hx - n), torch.cat((r, z, n, hx, f), 1)


def operands(count, dtype, has_bias, layout):
    """Return gates of the input and of the hidden state, a state, and biases."""
    shapes = (BATCH, count * SIZE), (BATCH, count * SIZE), (BATCH, SIZE)
    given = [normal(*shape, dtype=dtype) for shape in shapes]
    if layout == "transposed":
        given = [each.t().contiguous().t() for each in given]
    biases = [normal(2 * count * SIZE, dtype=dtype)[::2] if has_bias else None for _ in range(2)]
    return [*given, *biases]


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "count", "cell"), [("lstm", 4, lstm), ("gru", 3, gru)])
def test_cell(name, count, cell, dtype, has_bias, layout):
    ops, given = tritonite.overloads(), operands(count, dtype, has_bias, layout)
    wide = [None if each is None else each.double().requires_grad_() for each in given]
    exact = cell(*wide)
    results = ops[f"_thnn_fused_{name}_cell"](*given)
    for own, reference in zip(results, exact, strict=True):
        assert own.dtype is dtype and own.is_contiguous()
        close(own, reference.detach(), 4)
    outs = [torch.full_like(each, float("nan")) for each in results]
    ops[f"_thnn_fused_{name}_cell.out"](*given, **{f"out{i}": out for i, out in enumerate(outs)})
    assert all(torch.equal(*pair) for pair in zip(outs, results, strict=True))

    grads = [torch.randn_like(each) for each in results[:-1]]
    sources = [each for each in wide if each is not None]
    wanted = torch.autograd.grad(exact[:-1], sources, [grad.double() for grad in grads])
    if name == "lstm":
        backward, arguments = ops["_thnn_fused_lstm_cell_backward_impl"], (*grads, given[2], *results[1:], has_bias)
        found = backward(*arguments)
        pairs = list(zip(found[:2], (wanted[0], wanted[2]), strict=True))
    else:
        backward, arguments = ops["_thnn_fused_gru_cell_backward"], (*grads, results[1], has_bias)
        found = backward(*arguments)
        pairs = list(zip(found[:3], wanted[:3], strict=True))
    biases = found[len(pairs) :]
    assert all((each is None) != has_bias for each in biases)
    # Saved gates are rounded to the dtype, as ATen's are.
    for own, reference in [*pairs, *(zip(biases, wanted[3 : 3 + len(biases)], strict=True) if has_bias else ())]:
        close(own, reference, 16)


@pytest.mark.smoke
def test_one_gradient():
    ops, given = tritonite.overloads(), operands(4, torch.float32, False, "contiguous")
    _, cy, workspace = ops["_thnn_fused_lstm_cell"](*given)
    grad, backward = torch.randn_like(cy), ops["_thnn_fused_lstm_cell_backward_impl"]
    zero = torch.zeros_like(grad)
    for own, other in (((grad, None), (grad, zero)), ((None, grad), (zero, grad))):
        rest = (given[2], cy, workspace, True)
        for found, expected in zip(backward(*own, *rest), backward(*other, *rest), strict=True):
            torch.testing.assert_close(found, expected)
    with pytest.raises(Decline, match="no gradient"):
        backward(None, None, given[2], cy, workspace, False)


@pytest.mark.smoke
def test_no_samples():
    ops = tritonite.overloads()
    empty, state = torch.empty(0, 4 * SIZE, device=tritonite.device), torch.empty(0, SIZE, device=tritonite.device)
    hy, cy, workspace = ops["_thnn_fused_lstm_cell"](empty, empty, state)
    assert hy.shape == cy.shape == (0, SIZE) and workspace.shape == (0, 4 * SIZE)
    *_, bias = ops["_thnn_fused_lstm_cell_backward_impl"](hy, cy, state, cy, workspace, True)
    assert bias.tolist() == [0.0] * 4 * SIZE


def test_declines():
    ops = tritonite.overloads()
    gates, hidden, state, bias, other = operands(3, torch.float32, True, "contiguous")
    op = ops["_thnn_fused_gru_cell"]
    for arguments, reason in (
        ((gates, hidden.double(), state), "operands of"),
        ((gates, hidden[:1], state), "gates of shapes"),
        ((gates, hidden, state[:, 1:]), "gates of shape"),
        ((gates, hidden, state, bias, None), "one bias"),
        ((gates, hidden, state, bias[1:], other), "bias of shape"),
    ):
        with pytest.raises(Decline, match=reason):
            op(*arguments)
    with pytest.raises(Decline, match="workspace of shape"):
        ops["_thnn_fused_gru_cell_backward"](state, gates, False)
