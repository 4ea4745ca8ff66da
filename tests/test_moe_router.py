"""Routers of mixtures of experts against torch's composition in float64: choices, weights, losses, gradients."""

import functools

import pytest
import torch
from compositions import agree, check_library_operator, close, normal

import tritonite
from tritonite import fused
from tritonite.errors import Unsupported
from tritonite.testing.tolerances import RTOL

library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def best(keys, k):
    """Return the indices of the k largest keys, the lower index first among equal keys."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def routed(logits, k, scoring="softmax", bias=None, num_groups=None, topk_groups=None, renormalize=True, scale=1.0):
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    keys = scores.detach() if bias is None else scores.detach() + bias.double()
    if num_groups is not None:
        by_group = keys.unflatten(-1, (num_groups, -1))
        group_scores = by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1)
        chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best(group_scores, topk_groups), True)
        keys = by_group.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = best(keys, k)
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, experts


def check_route(logits, k, **options):
    weights, experts = fused.route(logits, k, **options)
    wide = logits.detach().double().requires_grad_()
    expected, expected_experts = routed(wide, k, **options)
    assert experts.dtype is torch.int32 and torch.equal(experts.long(), expected_experts)
    assert weights.dtype is (torch.float64 if logits.dtype is torch.float64 else torch.float32)
    close(weights.detach(), expected.detach())
    if logits.requires_grad:
        grad = torch.randn_like(weights)
        (found,) = torch.autograd.grad(weights, logits, grad)
        assert found.dtype is logits.dtype and found.is_contiguous()
        close(found, torch.autograd.grad(expected, wide, grad.double())[0], k, RTOL[logits.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "experts", "k"), [(5, 8, 2), (1, 60, 4), (9, 3, 3), (3, 1, 1), (4, 300, 8)])
def test_weights_and_choices_are_those_of_softmax(tokens, experts, k, dtype):
    for renormalize in (False, True):
        # Distinct logits, also in 16 bits.
        logits = torch.stack([torch.randperm(experts) for _ in range(tokens)]).to(tritonite.device) / 16
        check_route(logits.to(dtype).requires_grad_(), k, renormalize=renormalize)
        weights, experts_of = fused.topk_softmax(logits.to(dtype), k, renormalize=renormalize)
        again = fused.route(logits.to(dtype), k, renormalize=renormalize)
        assert torch.equal(weights, again[0]) and torch.equal(experts_of, again[1])


GROUPED = [(16, 4, 2, 3), (12, 3, 1, 4), (10, 10, 4, 4), (6, 1, 1, 2), (24, 6, 3, 8)]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("experts", "groups", "chosen", "k"), GROUPED)
def test_experts_of_the_best_groups_are_chosen(experts, groups, chosen, k, biased, scoring):
    logits = normal(7, experts, grad=True)
    bias = normal(experts) if biased else None
    options = {"scoring": scoring, "bias": bias, "num_groups": groups, "topk_groups": chosen, "scale": 2.5}
    check_route(logits, k, **options)
    check_route(logits, k, **options, renormalize=False)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_bias_decides_the_choice_and_not_the_weights(dtype):
    logits = torch.linspace(-1, 1, 9, device=tritonite.device).repeat(4, 1).to(dtype).requires_grad_()
    for bias in (-torch.arange(9.0), normal(9).half(), normal(18)[::2].double()):
        check_route(logits, 4, scoring="sigmoid", bias=bias.to(tritonite.device))


@pytest.mark.smoke
def test_first_of_equal_experts_is_chosen():
    logits = torch.tensor([[1.0, 2, 2, 1, 2], [0, 0, 0, 0, 0]], device=tritonite.device)
    assert fused.topk_softmax(logits, 4)[1].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    grouped = fused.route(logits[1:].repeat(1, 2), 3, num_groups=5, topk_groups=2)
    assert grouped[1].tolist() == [[0, 1, 2]]


def test_experts_are_valid_whatever_the_logits():
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[nan, 1, 2, 3], [-inf, -inf, -inf, 0], [inf, 0, 0, nan], [-inf] * 4, [-300] * 4])
    for scoring in ("softmax", "sigmoid"):
        for groups in (None, 2):
            options = {"num_groups": groups, "topk_groups": groups}
            weights, experts = fused.route(logits.to(tritonite.device), 3, scoring=scoring, **options)
            assert all(len(set(row)) == 3 and set(row) <= {0, 1, 2, 3} for row in experts.tolist())
            assert experts[2, 0] == (0 if groups is None else experts[2, 0])
    # All sigmoids are 0, and so are their weights.
    assert not weights[4].any()


def layouts(x):
    padded = x.new_empty((*x.shape[:-1], x.shape[-1] + 3))
    padded[..., : x.shape[-1]] = x
    strided = x.new_empty((*x.shape, 2))
    strided[..., 0] = x
    return padded[..., : x.shape[-1]], strided[..., 0], x.transpose(0, -1).contiguous().transpose(0, -1)


def test_logits_at_any_stride_and_in_any_leading_shape():
    x = normal(3, 4, 6)
    for logits in (*layouts(x), x[0, 0], x[:1, :1].expand(3, 2, 6)):
        check_route(logits.detach().requires_grad_(), 2)
        experts = fused.topk_softmax(logits, 2)[1]
        check_loss(logits.detach().requires_grad_(), experts)


@pytest.mark.smoke
def test_gradients_that_are_expanded():
    logits = normal(5, 6, grad=True)
    wide = logits.detach().double().requires_grad_()
    (fused.route(logits, 3, renormalize=False)[0].sum() * 2).backward()
    (routed(wide, 3, renormalize=False)[0].sum() * 2).backward()
    close(logits.grad, wide.grad, 3)


def balanced(logits, experts, mask=None):
    """Return transformers' load-balancing loss of one layer."""
    count = logits.shape[-1]
    chosen = torch.nn.functional.one_hot(experts.long().reshape(-1, experts.shape[-1]), count).double()
    share = logits.softmax(-1).reshape(-1, count)
    mask = torch.ones(len(share), device=share.device) if mask is None else mask.flatten()
    mask = mask.double() / mask.sum()
    return count * ((chosen * mask[:, None, None]).sum(0) * (share * mask[:, None]).sum(0)).sum()


def squared_logsumexp(logits, mask=None):
    z = logits.logsumexp(-1).flatten() ** 2
    return z.mean() if mask is None else (z * mask.flatten()).sum() / mask.sum()


def check_loss(logits, experts, mask=None):
    for ours, theirs in (
        (
            functools.partial(fused.load_balancing_loss, experts=experts, mask=mask),
            functools.partial(balanced, experts=experts, mask=mask),
        ),
        (functools.partial(fused.router_z_loss, mask=mask), functools.partial(squared_logsumexp, mask=mask)),
    ):
        agree(ours, theirs, [logits], terms=4, grad_terms=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "experts", "k"), [(5, 8, 2), (1, 1, 1), (70, 60, 4)])
def test_losses_are_transformers(tokens, experts, k, dtype):
    logits = normal(tokens, experts, dtype=dtype, grad=True)
    chosen = fused.topk_softmax(logits, k)[1]
    check_loss(logits, chosen)
    mask = torch.arange(tokens, device=tritonite.device) % 3 != 1
    check_loss(logits, chosen.long(), mask)
    check_loss(logits, chosen, mask.int())


def test_loss_of_many_tokens_is_that_of_several_programs(monkeypatch):
    monkeypatch.setattr("tritonite.devices.multiprocessors", lambda device: 3)
    logits = normal(600, 16, grad=True)
    check_loss(logits, fused.topk_softmax(logits, 2)[1], torch.rand(600, device=tritonite.device) < 0.7)


def test_losses_without_tokens_are_nan():
    logits = normal(0, 4, grad=True)
    experts = torch.zeros(0, 2, dtype=torch.int32, device=tritonite.device)
    assert fused.load_balancing_loss(logits, experts).isnan() and fused.router_z_loss(logits).isnan()
    weights, experts = fused.topk_softmax(logits, 2)
    assert weights.shape == experts.shape == (0, 2)
    assert torch.autograd.grad(weights.sum(), logits)[0].shape == (0, 4)
    assert torch.autograd.grad(fused.router_z_loss(logits), logits)[0].shape == (0, 4)


X, IDS = torch.zeros(2, 8), torch.zeros(2, 2, dtype=torch.int32)
WRONG = [
    (fused.route, (X.int(), 2), {}, "logits is torch.int32"),
    (fused.route, (X[0, 0], 1), {}, "must be .*experts"),
    (fused.route, (X[:, :0], 1), {}, "must be .*experts"),
    (fused.route, (X, 0), {}, "k is 0"),
    (fused.route, (X, 9), {}, "1 to 8"),
    (fused.route, (X, 2), {"scoring": "tanh"}, "scoring"),
    (fused.route, (X, 2), {"bias": X[0, :4]}, "bias has the shape"),
    (fused.route, (X, 2), {"bias": X[0].int()}, "bias is torch.int32"),
    (fused.route, (X, 2), {"num_groups": 2}, "both or neither"),
    (fused.route, (X, 2), {"num_groups": 3, "topk_groups": 1}, "divide"),
    (fused.route, (X, 2), {"num_groups": 4, "topk_groups": 5}, "topk_groups is 5"),
    (fused.route, (X, 5), {"num_groups": 4, "topk_groups": 2}, "1 to 4"),
    (fused.load_balancing_loss, (X, IDS[:1]), {}, "experts has the shape"),
    (fused.load_balancing_loss, (X, IDS.float()), {}, "experts is torch.float32"),
    (fused.load_balancing_loss, (X, IDS[:, :0]), {}, "no expert"),
    (fused.load_balancing_loss, (X, IDS, X[:, 0]), {}, "mask is torch.float32"),
    (fused.router_z_loss, (X, IDS), {}, "mask has the shape"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("function", "args", "options", "reason"), WRONG)
def test_wrong_arguments_are_refused(function, args, options, reason):
    for device in (tritonite.device, "meta"):
        move = lambda value: value.to(device) if isinstance(value, torch.Tensor) else value
        with pytest.raises(Unsupported, match=reason):
            function(*map(move, args), **{name: move(value) for name, value in options.items()})


def _calls():
    logits, grad = normal(2, 3, 8, grad=True), normal(2, 3, 2)
    experts = torch.randint(8, (2, 3, 2), device=tritonite.device).int()
    mask = torch.ones(2, 3, dtype=torch.bool, device=tritonite.device)
    yield library.route, (logits, 2)
    yield library.route, (logits, 2, "sigmoid", normal(8), 4, 2, False, 2.5)
    yield library.route_backward, (grad, logits.detach(), experts, "softmax", True, 1.0)
    yield library.load_balancing_loss, (logits, experts, mask)
    yield library.load_balancing_loss, (logits, None)
    yield library.load_balancing_loss_backward, (normal(), normal(8), logits.detach(), mask, 2)


@pytest.mark.parametrize("i", range(6))
def test_opcheck(i):
    packet, args = list(_calls())[i]
    check_library_operator(packet, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic):
    def losses(logits, bias):
        weights, experts = fused.route(logits, 2, scoring="sigmoid", bias=bias, num_groups=4, topk_groups=2)
        return weights.sum() + fused.load_balancing_loss(logits, experts) + fused.router_z_loss(logits)

    logits, bias = normal(5, 8, grad=True), normal(8)
    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected, actual = losses(logits, bias), compiled(logits, bias)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    grads = [torch.autograd.grad(each, logits)[0] for each in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_vmap():
    logits = normal(3, 4, 6)
    weights, experts = torch.vmap(lambda x: fused.topk_softmax(x, 2), 1)(logits)
    expected = fused.topk_softmax(logits.transpose(0, 1), 2)
    assert torch.equal(weights, expected[0]) and torch.equal(experts, expected[1])
    loss = torch.vmap(fused.load_balancing_loss)(logits, expected[1].transpose(0, 1))
    each = [fused.load_balancing_loss(logits[i], expected[1][:, i]) for i in range(3)]
    assert torch.equal(loss, torch.stack(each))


def test_models_of_transformers_agree():
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 32, "n_group": 8, "topk_group": 3}
    layer = modeling.DeepseekV3MoE(modeling.DeepseekV3Config(**sizes, num_experts_per_tok=6)).to(tritonite.device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    bias = layer.gate.e_score_correction_bias.uniform_(0, 1)
    x, own = normal(2, 5, 16), layer.experts
    options = {"scoring": "sigmoid", "bias": bias, "num_groups": 8, "topk_groups": 3, "scale": 2.5}
    found = fused.moe(x, x @ layer.gate.weight.T, own.gate_up_proj, own.down_proj, 6, **options)
    torch.testing.assert_close(found + layer.shared_experts(x), layer(x), rtol=1e-4, atol=1e-4)
    logits, mask = normal(3, 14, 8), torch.arange(14, device=tritonite.device).view(2, 7) % 3 > 0
    expected = mixtral.load_balancing_loss_func(tuple(logits), 8, 2, mask.long())
    experts = fused.topk_softmax(logits, 2)[1]
    torch.testing.assert_close(fused.load_balancing_loss(logits, experts, mask.flatten().expand(3, -1)), expected)
