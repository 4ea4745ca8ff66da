"""Rows to experts and back, grouped linear layers and whole layers against loops over experts in float64."""

import functools

import pytest
import scripts
import torch
from compositions import agree, check_library_operator, close, normal

import tritonite
from tritonite import fused
from tritonite.engine.moe import table
from tritonite.errors import Unsupported

functional = torch.nn.functional
library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
DEVICE = tritonite.device


def ids(tokens, k, count, dtype=torch.int32, least=0):
    return torch.randint(least, count, (tokens, k), device=DEVICE).to(dtype)


def order(experts, count):
    """Return the stable order of slots by expert, those without an expert last, and the ends of experts."""
    flat = experts.flatten().long()
    flat = torch.where((flat >= 0) & (flat < count), flat, count)
    counts = torch.bincount(flat, minlength=count + 1)[:count]
    return flat.argsort(stable=True), counts, counts.cumsum(0)


def permuted(x, experts, count):
    slots, _, ends = order(experts, count)
    rows = x.repeat_interleave(experts.shape[1], 0)[slots]
    inside = torch.arange(len(rows), device=x.device) < (ends[-1] if count else 0)
    return torch.where(inside[:, None], rows, 0)


def unpermuted(y, inverse, weights=None):
    rows = torch.where(inverse.unsqueeze(-1) < 0, 0.0, y[inverse.clamp(min=0).long()])
    return rows.sum(1) if weights is None else (rows * weights.unsqueeze(-1)).sum(1)


def grouped(x, weight, offsets, bias=None):
    rows, begin = [], 0
    for i, end in enumerate(offsets.tolist()):
        own = x[begin:end] @ weight[i].T
        rows.append(own if bias is None else own + bias[i])
        begin = end
    return torch.cat([*rows, x.new_zeros(len(x) - begin, weight.shape[1])])


def layer(x, weights, experts, gate_up, down, activation="silu"):
    """Return transformers' loop over experts."""
    function = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    }[activation]
    result = torch.zeros_like(x)
    for i in range(len(down)):
        tokens, slots = (experts == i).nonzero(as_tuple=True)
        gate, up = (x[tokens] @ gate_up[i].T).chunk(2, -1)
        own = (function(gate) * up) @ down[i].T
        result = result.index_add(0, tokens, own * weights[tokens, slots, None])
    return result


def check_sort(experts, count, block):
    slots, counts, ends = order(experts, count)
    _, offsets, inverse = fused.permute(normal(len(experts), 1), experts, count)
    assert offsets.dtype is inverse.dtype is torch.int32
    assert torch.equal(offsets.long(), ends)
    positions = torch.where(inverse < 0, -1 - inverse, inverse).flatten().long()
    assert torch.equal(positions, slots.argsort())
    assert torch.equal(inverse < 0, (experts < 0) | (experts >= count))
    indices, blocks, used = fused.moe_align(experts, count, block)
    widths = (counts + block - 1) // block
    assert used.tolist() == [int(widths.sum()) * block]
    expected = torch.full_like(indices, experts.numel())
    starts = (widths.cumsum(0) - widths) * block
    for i in range(count):
        own = slots[int(ends[i] - counts[i]) : int(ends[i])]
        expected[int(starts[i]) : int(starts[i]) + len(own)] = own.int()
    assert torch.equal(indices, expected)
    owners = torch.arange(count, device=DEVICE).repeat_interleave(widths)
    assert torch.equal(blocks, functional.pad(owners, (0, len(blocks) - len(owners)), value=-1).int())


SORTED = [(1, 1, 1, 1), (7, 2, 4, 4), (5, 3, 40, 16), (60, 3, 5, 1), (0, 2, 3, 8), (33, 1, 2, 64)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "k", "count", "block"), SORTED)
def test_sort_by_expert_is_stable(tokens, k, count, block, dtype):
    check_sort(ids(tokens, k, count, dtype), count, block)
    check_sort(ids(tokens, k, count + 2, dtype, least=-2), count, block)
    check_sort(ids(k, tokens, count, dtype).t() if tokens else ids(0, k, count), count, block)


@pytest.fixture
def small_steps(monkeypatch):
    """Sort by several programs of several steps, and move rows in several blocks."""
    small = table.MoeTable(
        sorted_ids=8, sorted_alone=2, sorting_steps=2, counts=16, columns=16, unrolled=2, finished=64
    )
    monkeypatch.setattr(table, "MOE", dict.fromkeys(table.MOE, small))
    monkeypatch.setattr("tritonite.devices.multiprocessors", lambda device: 5)


def test_sort_by_several_programs(small_steps):
    for tokens, k, count, block in ((70, 2, 5, 4), (41, 3, 40, 3), (30, 1, 1, 8)):
        check_sort(ids(tokens, k, count), count, block)
        check_sort(ids(tokens, k, count + 1, least=-1), count, block)
    check_sort(torch.full((50, 2), 3, device=DEVICE), 5, 16)


def exchange(x, weights, experts, count):
    rows, _, inverse = fused.permute(x, experts, count)
    return rows, fused.unpermute(rows * 2, inverse, weights), fused.unpermute(rows, inverse)


def exchanged(x, weights, experts, count):
    rows = permuted(x, experts, count)
    positions = order(experts, count)[0].argsort().view(experts.shape).int()
    inverse = torch.where((experts >= 0) & (experts < count), positions, -1)
    return rows, unpermuted(rows * 2, inverse, weights), unpermuted(rows, inverse)


def check_exchange(x, weights, experts, count):
    functions = [functools.partial(each, experts=experts, count=count) for each in (exchange, exchanged)]
    agree(*functions, [x, weights], terms=16, grad_terms=max(16, 4 * x.shape[1]))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("tokens", "columns", "k", "count"), [(5, 7, 2, 3), (1, 1, 1, 1), (3, 1, 3, 8), (4, 40, 2, 2)])
def test_rows_go_to_experts_and_back(tokens, columns, k, count, dtype):
    x = normal(tokens, columns, dtype=dtype, grad=True)
    weights = normal(tokens, k, grad=True) if dtype is not torch.float64 else normal(tokens, k, dtype=dtype, grad=True)
    check_exchange(x, weights, ids(tokens, k, count), count)
    check_exchange(x, weights, ids(tokens, k, count + 1, torch.int64, least=-1), count)
    check_exchange(x, weights.detach().to(dtype), ids(tokens, k, count), count)


def test_rows_in_several_blocks(small_steps):
    check_exchange(normal(9, 37, grad=True), normal(9, 3, grad=True), ids(9, 3, 4, least=-1), 4)


def test_rows_at_any_stride():
    x = normal(6, 10)
    weights = normal(3, 6)[:2].t().requires_grad_()
    strided = normal(6, 20)[:, ::2], x.t().contiguous().t(), x[:1].expand(6, 10)
    experts = ids(2, 6, 3).t()
    for each in strided:
        check_exchange(each.detach().requires_grad_(), weights, experts, 3)
    rows, _, inverse = fused.permute(x, experts, 3)
    close(fused.unpermute(rows.t().contiguous().t(), inverse, weights), unpermuted(rows.double(), inverse, weights))


@pytest.mark.smoke
def test_gradients_that_are_expanded():
    x, weights, experts = normal(4, 6, grad=True), normal(4, 2, grad=True), ids(4, 2, 3)
    wide = [each.detach().double().requires_grad_() for each in (x, weights)]
    sum(each.sum() for each in exchange(x, weights, experts, 3)).backward()
    sum(each.sum() for each in exchanged(*wide, experts, 3)).backward()
    close(x.grad, wide[0].grad, 16)
    close(weights.grad, wide[1].grad, 16)


@pytest.mark.smoke
def test_rows_that_no_expert_computed_do_not_spread_nan():
    experts = torch.tensor([[0, -1], [-1, 1]], device=DEVICE)
    rows, _, inverse = fused.permute(normal(2, 4), experts, 2)
    rows[2:] = torch.nan
    rows, weights = rows.requires_grad_(), normal(2, 2, grad=True)
    result = fused.unpermute(rows, inverse, weights)
    grads = torch.autograd.grad(result.sum(), (rows, weights))
    assert result.isfinite().all() and all(grad.isfinite().all() for grad in grads)
    assert not grads[0][2:].any() and not grads[1][experts < 0].any()


LINEAR = fused.grouped_linear, grouped
LINEAR = fused.grouped_linear, grouped
GROUPS = [
    # Inputs, outputs, ends of groups, rows.
    (16, 24, (3, 3, 9, 12), 12),
    (7, 5, (0, 4, 6), 9),
    (1, 1, (2, 3), 3),
    (8, 1, (1,), 1),
    (1, 8, (0, 0, 0), 2),
    (20, 70, (40, 40, 70), 70),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs", "ends", "rows"), GROUPS)
def test_grouped_linear(inputs, outputs, ends, rows, dtype):
    x, offsets = normal(rows, inputs, dtype=dtype, grad=True), torch.tensor(ends, device=DEVICE).int()
    weight = normal(len(ends), outputs, inputs, dtype=dtype, grad=True)
    functions = [functools.partial(each, offsets=offsets) for each in LINEAR]
    agree(*functions, [x, weight], terms=inputs, grad_terms=max(rows, outputs))
    for bias_dtype in {dtype, torch.float32}:
        bias = normal(len(ends), outputs, dtype=bias_dtype, grad=True)
        functions = [lambda x, weight, bias, own=each: own(x, weight, offsets, bias) for each in LINEAR]
        agree(*functions, [x, weight, bias], terms=inputs, grad_terms=max(rows, outputs))


def test_grouped_linear_at_any_stride(small_steps):
    offsets = torch.tensor([1, 3, 3, 3, 9, 9], device=DEVICE).int()[::2]
    weight = normal(3, 12, 10, grad=True)
    for x in (normal(9, 20)[:, ::2], normal(10, 9).t(), normal(9, 13)[:, 3:], normal(1, 10).expand(9, 10)):
        for own in (weight, normal(3, 10, 12, grad=True).mT, normal(1, 12, 10, grad=True).expand(3, 12, 10)):
            functions = [lambda x, weight, own=each: own(x, weight, offsets) for each in LINEAR]
            agree(*functions, [x.detach().requires_grad_(), own.detach().requires_grad_()], terms=16, grad_terms=16)
    bias = normal(12, 3).t().requires_grad_()
    functions = [lambda x, bias, own=each: own(x, weight.detach().to(x.dtype), offsets, bias) for each in LINEAR]
    agree(*functions, [normal(9, 10, grad=True), bias], terms=16, grad_terms=16)


def test_no_rows_and_no_columns():
    offsets = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    for rows, inputs, outputs in ((0, 4, 5), (3, 0, 5), (3, 4, 0)):
        x, weight, bias = (
            normal(rows, inputs, grad=True),
            normal(3, outputs, inputs, grad=True),
            normal(3, outputs, grad=True),
        )
        for given in ((), (bias,)):
            result = fused.grouped_linear(x, weight, offsets, *given)
            assert result.shape == (rows, outputs) and not result.any()  # No row has a group.
            operands = (x, weight, *given)
            for grad, operand in zip(torch.autograd.grad(result.sum(), operands), operands, strict=True):
                assert grad.shape == operand.shape and not grad.any()
    check_exchange(normal(0, 4, grad=True), normal(0, 2, grad=True), ids(0, 2, 3), 3)
    rows, _, inverse = fused.permute(normal(3, 0), ids(3, 2, 3), 3)
    weights = normal(3, 2, grad=True)
    assert fused.unpermute(rows, inverse, weights).shape == (3, 0)
    assert not torch.autograd.grad(fused.unpermute(rows, inverse, weights).sum(), weights)[0].any()
    weights = normal(0, 2), ids(0, 2, 3), normal(3, 8, 6), normal(3, 6, 4)
    assert fused.moe_experts(normal(0, 6), *weights).shape == (0, 6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_experts_are_those_of_a_loop(activation, dtype):
    x, weights = normal(9, 12, dtype=dtype, grad=True), torch.rand(9, 2, device=DEVICE).requires_grad_()
    # Intermediate results are rounded; with small weights they are near 1.
    gate_up, down = [(normal(*shape) / 4).to(dtype).requires_grad_() for shape in ((4, 20, 12), (4, 12, 10))]
    # Expert 2 has no token, and some slots have no expert.
    experts = torch.tensor([0, 1, 3, -1], device=DEVICE)[ids(9, 2, 4).long()]
    functions = [
        lambda *operands, own=each: own(*operands[:2], experts, *operands[2:], activation=activation)
        for each in (fused.moe_experts, layer)
    ]
    agree(*functions, [x, weights, gate_up, down], terms=64, grad_terms=256)


@pytest.mark.parametrize(
    "options", [{}, {"renormalize": False, "scale": 2.0}, {"scoring": "sigmoid", "num_groups": 2, "topk_groups": 1}]
)
def test_moe_is_a_loop_over_chosen_experts(options):
    x, logits = normal(2, 5, 12, grad=True), normal(2, 5, 8, grad=True)
    gate_up, down = [(normal(*shape) / 4).requires_grad_() for shape in ((8, 20, 12), (8, 12, 10))]

    def composed(x, logits, gate_up, down):
        scores = logits.flatten(0, 1)
        scores = scores.sigmoid() if options.get("scoring") == "sigmoid" else scores.softmax(-1)
        experts = fused.route(logits, 2, **options)[1].flatten(0, 1).long()
        weights = scores.gather(-1, experts)
        if options.get("renormalize", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return layer(x.flatten(0, 1), weights * options.get("scale", 1), experts, gate_up, down).view(x.shape)

    ours = functools.partial(fused.moe, k=2, **options)
    agree(ours, composed, [x, logits, gate_up, down], terms=64, grad_terms=256)
    split = tuple(gate_up.detach().chunk(2, 1))
    torch.testing.assert_close(ours(x, logits, split, down), ours(x, logits, gate_up, down))


X, IDS, ENDS = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
W = torch.zeros(3, 5, 8)
Y = torch.zeros(8, 6)
WRONG = [
    (fused.moe_align, (IDS.float(), 3, 4), "experts is torch.float32"),
    (fused.moe_align, (IDS[0], 3, 4), "experts has the shape"),
    (fused.moe_align, (IDS, 0, 4), "num_experts is 0"),
    (fused.moe_align, (IDS, 3, 0), "block_size is 0"),
    (fused.permute, (X[:3], IDS, 3), "x has the shape"),
    (fused.permute, (X.int(), IDS, 3), "x is torch.int32"),
    (fused.permute, (X, IDS[:, :0], 3), "k of 1 at least"),
    (fused.unpermute, (X, IDS), "y has the shape"),
    (fused.unpermute, (Y, IDS.long()), "inverse is torch.int64"),
    (fused.unpermute, (Y, IDS, X), "weights has the shape"),
    (fused.unpermute, (Y, IDS, X[:, :2].half()), "weights is torch.float16"),
    (fused.grouped_linear, (X.double(), W.double(), ENDS), "x is torch.float64"),
    (fused.grouped_linear, (X, W.half(), ENDS), "one dtype"),
    (fused.grouped_linear, (X, W[:2], ENDS), "weight has the shape"),
    (fused.grouped_linear, (X[:, :3], W, ENDS), "weight has the shape"),
    (fused.grouped_linear, (X[0], W, ENDS), "x has the shape"),
    (fused.grouped_linear, (X, W, ENDS.long()), "offsets is torch.int64"),
    (fused.grouped_linear, (X, W[:0], ENDS[:0]), "at least one group"),
    (fused.grouped_linear, (X, W, ENDS, W[:, 0]), "bias has the shape"),
    (fused.grouped_linear, (X, W, ENDS, W[..., 0].double()), "bias is torch.float64"),
    (fused.moe_experts, (X, X[:3, :2], IDS[:3], W, W), "the same tokens"),
    (fused.moe_experts, (X, X[: len(IDS), :1], IDS, W, W), "weights has the shape"),
    (fused.moe_experts, (X, X[: len(IDS), : IDS.shape[1]], IDS, W, W[0, 0, 0]), "down_weight has the shape"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("function", "args", "reason"), WRONG)
def test_wrong_arguments_are_refused(function, args, reason):
    for device in (DEVICE, "meta"):
        with pytest.raises(Unsupported, match=reason):
            function(*[each.to(device) if isinstance(each, torch.Tensor) else each for each in args])


def test_unknown_activations_are_refused():
    with pytest.raises(Unsupported, match="activation is 'relu'"):
        fused.moe(normal(2, 8), normal(2, 3), normal(3, 10, 8), normal(3, 8, 5), 2, activation="relu")


def _calls():
    x, experts = normal(4, 8, grad=True), ids(4, 2, 3, least=-1)
    y, weights = normal(8, 8, grad=True), normal(4, 2, grad=True)
    inverse = fused.permute(x.detach(), experts, 3)[2]
    weight, bias, ends = (
        normal(3, 5, 8, grad=True),
        normal(3, 5, grad=True),
        torch.tensor([2, 2, 7], device=DEVICE).int(),
    )
    yield library.moe_align, (experts, 3, 4)
    yield library.permute, (x, experts, 3)
    yield library.unpermute, (y, inverse, weights)
    yield library.unpermute, (y, inverse)
    yield library.unpermute_backward, (x.detach(), y.detach(), inverse, weights.detach(), True)
    yield library.unpermute_backward, (x.detach(), y.detach(), inverse, None, False)
    yield library.grouped_linear, (y, weight, ends)
    yield library.grouped_linear, (y, weight, ends, bias)
    yield library.grouped_linear_backward_input, (normal(8, 5), weight.detach(), ends)
    yield library.grouped_linear_backward_weight, (normal(8, 5), y.detach(), ends)
    yield library.grouped_linear_backward_bias, (normal(8, 5), ends, torch.float32)


@pytest.mark.parametrize("i", range(11))
def test_opcheck(i):
    packet, args = list(_calls())[i]
    check_library_operator(packet, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic):
    operands = [normal(*shape, grad=True) for shape in ((5, 8), (5, 4), (4, 12, 8), (4, 8, 6))]
    own = functools.partial(fused.moe, k=2)
    compiled = torch.compile(own, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected, actual = own(*operands), compiled(*operands)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    grad = torch.randn_like(expected)
    found, wanted = [torch.autograd.grad(each, operands, grad) for each in (actual, expected)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_vmap():
    operands = normal(3, 5, 8), normal(3, 5, 4), normal(4, 12, 8), normal(4, 8, 6)
    result = torch.vmap(functools.partial(fused.moe, k=2), (0, 0, None, None))(*operands)
    each = [fused.moe(operands[0][i], operands[1][i], *operands[2:], k=2) for i in range(3)]
    torch.testing.assert_close(result, torch.stack(each))


def test_no_call_waits_for_the_device():
    """A dry recording ends where the host would read what a kernel computes."""
    x, experts = normal(5, 8), ids(5, 2, 3)
    rows, ends, inverse = fused.permute(x, experts, 3)
    for name, args in (
        ("route", (normal(5, 3), 2)),
        ("permute", (x, experts, 3)),
        ("grouped_linear", (rows, normal(3, 5, 8), ends)),
        ("silu_and_mul", (rows,)),
        ("unpermute", (rows, inverse, normal(5, 2))),
        ("moe_align", (experts, 3, 4)),
    ):
        text = tritonite.explain(f"tritonite::{name}", *args)
        assert "launch  " in text and "read" not in text, text


def test_calls_are_replayed():
    """Calls through the native dispatcher record a plan once; the test has a process of its own."""
    code = """
import torch, tritonite
from compositions import agree, normal
from test_moe import layer
from tritonite import fused

operands = [normal(*shape, grad=True) for shape in ((5, 8), (5, 4), (4, 12, 8), (4, 8, 6))]
bias, logits = normal(4), operands[1]
for scale in (1.0, 2.0, 0.5):
    def ours(x, logits, gate_up, down):
        return fused.moe(x, logits, gate_up, down, 2, scoring="sigmoid", bias=bias, scale=scale)

    def composed(x, logits, gate_up, down):
        scores = logits.sigmoid()
        experts = (scores + bias).topk(2).indices
        weights = scores.gather(1, experts)
        return layer(x, scale * weights / weights.sum(-1, keepdim=True), experts, gate_up, down)

    agree(ours, composed, operands, terms=64, grad_terms=256)
    experts = (logits.sigmoid() + bias).topk(2).indices
    loss = fused.load_balancing_loss(logits, experts) + fused.router_z_loss(logits)
    torch.autograd.grad(loss, logits)
    fused.moe_align(experts, 4, 16)
counts = {name: own for name, own in tritonite.stats().items() if name.startswith("tritonite::")}
assert len(counts) >= 12, list(counts)
for name, own in counts.items():
    assert own.launched <= 2 and own.replayed >= 2 * own.launched and not own.unrecordable, (name, own)
"""
    scripts.run(code, TRITONITE_NATIVE="1")


def test_rows_of_other_groups_do_not_spread_nan():
    offsets = torch.tensor([3, 5], device=DEVICE).int()
    x, weight = normal(9, 8), normal(2, 4, 8, grad=True)
    x[3:] = torch.nan
    x.requires_grad_()
    result = fused.grouped_linear(x, weight, offsets)
    grads = torch.autograd.grad(result[:3].sum(), (x, weight))
    assert result[:3].isfinite().all() and not result[5:].any()
    assert grads[0].isfinite().all() and not grads[0][5:].any()
    assert grads[1][0].isfinite().all()
