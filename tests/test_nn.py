"""Modules of tritonite.nn: values, gradients, and state dicts of the modules that they replace."""

import pytest
import scripts
import torch
from compositions import normal

import tritonite
from tritonite import nn
from tritonite.testing.tolerances import RTOL

functional = torch.nn.functional
DTYPES = [torch.float32, torch.bfloat16]


def compare(ours, theirs, *inputs, times=4.0):
    """Compare results, and gradients by inputs and parameters, relative to the largest element of each."""
    results = [each(*inputs) for each in (ours, theirs)]
    assert results[0].dtype is results[1].dtype and results[0].shape == results[1].shape
    floats = [each for each in inputs if each.is_floating_point()]
    grad = torch.randn_like(results[0])
    grads = [
        torch.autograd.grad(result, [*floats, *module.parameters()], grad)
        for result, module in zip(results, (ours, theirs), strict=True)
    ]
    for own, other in zip((results[0], *grads[0]), (results[1], *grads[1]), strict=True):
        tolerance = times * RTOL[own.dtype]
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance * float(other.detach().abs().max()))


def randomized(module):
    """Return a module whose parameters are random, also those that start as zeros and ones."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return module


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_torchs(dtype):
    kept = {"dtype": dtype, "device": tritonite.device}
    theirs = randomized(torch.nn.RMSNorm(24, eps=1e-5, **kept))
    ours = nn.RMSNorm(24, eps=1e-5, casting="none", **kept)
    ours.load_state_dict(theirs.state_dict())
    assert ours.variance_epsilon == 1e-5
    compare(ours, theirs, normal(3, 24, dtype=dtype, grad=True))


def test_rms_norm_with_an_offset_starts_as_the_identity_of_its_weight():
    x = normal(3, 16)
    norms = [nn.RMSNorm(16, offset=offset).to(tritonite.device) for offset in (0.0, 1.0)]
    assert [float(each.weight.detach().sum()) for each in norms] == [16.0, 0.0]
    torch.testing.assert_close(*[each(x) for each in norms])


def test_norms_of_a_sum_return_the_sum():
    x, residual = normal(3, 16), normal(3, 16)
    for norm in (nn.RMSNorm(16, casting="none"), nn.LayerNorm(16)):
        normalized, total = norm.to(tritonite.device)(x, residual)
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(normalized, norm(total))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_equals_torchs(dtype, bias):
    kept = {"bias": bias, "dtype": dtype, "device": tritonite.device}
    theirs = randomized(torch.nn.LayerNorm(24, **kept))
    ours = nn.LayerNorm(24, **kept)
    ours.load_state_dict(theirs.state_dict())
    compare(ours, theirs, normal(2, 3, 24, dtype=dtype, grad=True))


def test_norms_without_parameters():
    x = normal(3, 16)
    for norm in (nn.RMSNorm(16, elementwise_affine=False), nn.LayerNorm(16, elementwise_affine=False)):
        assert not norm.state_dict()
    torch.testing.assert_close(norm(x), functional.layer_norm(x, (16,)))


class Llama(torch.nn.Module):
    """A gated MLP in torch's functions, with the names of transformers' LlamaMLP."""

    def __init__(self, activation, dtype):
        super().__init__()
        self.activation = nn.gated.ACTIVATIONS[activation]
        sizes = {"gate_proj": (12, 20), "up_proj": (12, 20), "down_proj": (20, 12)}
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Linear(*size, bias=False, dtype=dtype, device=tritonite.device))

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated_mlp_equals_its_composition(activation, dtype):
    theirs = Llama(activation, dtype)
    ours = nn.GatedMLP(12, 20, activation, dtype=dtype, device=tritonite.device)
    ours.load_state_dict(theirs.state_dict())
    compare(ours, theirs, normal(2, 3, 12, dtype=dtype, grad=True))


def test_gated_mlp_names_its_activations():
    with pytest.raises(ValueError, match="'tanh': it may be one of 'silu', 'gelu', 'gelu_tanh', 'relu'"):
        nn.GatedMLP(4, 8, "tanh")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_turns_by_position(interleaved):
    rotary = nn.RotaryEmbedding(6, interleaved=interleaved, device=tritonite.device)
    assert not rotary.state_dict()
    query, key = normal(2, 5, 3, 8), normal(2, 5, 1, 8)
    turned = rotary(query, key)
    for own, each in zip(turned, (query, key), strict=True):
        torch.testing.assert_close(own[..., 6:], each[..., 6:])
        torch.testing.assert_close(own[:, 0], each[:, 0])
        torch.testing.assert_close(own.norm(dim=-1), each.norm(dim=-1))
    # Products of query and key depend on the distance of their positions alone.
    later = rotary(query, key, torch.arange(5, device=query.device) + 7)
    products = [torch.einsum("bqhd,bkgd->bhgqk", *pair) for pair in (turned, later)]
    torch.testing.assert_close(*products, rtol=1e-4, atol=1e-4)


def test_rotary_embedding_needs_pairs():
    with pytest.raises(ValueError, match="dim is 5"):
        nn.RotaryEmbedding(5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy_equals_linear_and_cross_entropy(reduction):
    softcap = 3.0 if reduction == "sum" else None
    ours = nn.LinearCrossEntropy(
        12, 20, bias=True, reduction=reduction, label_smoothing=0.1, softcap=softcap, device=tritonite.device
    )
    head = torch.nn.Linear(12, 20, device=tritonite.device)
    head.load_state_dict(ours.state_dict())
    hidden, target = normal(2, 3, 12, grad=True), torch.randint(20, (2, 3), device=tritonite.device)
    target[0, 1] = -100

    def expected(hidden, target):
        logits = head(hidden)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return functional.cross_entropy(logits.mT, target, reduction=reduction, label_smoothing=0.1)

    expected.parameters = head.parameters
    compare(ours, expected, hidden, target, times=8.0)


def test_moe_equals_a_loop_over_experts():
    ours = randomized(nn.MoE(8, 12, 3, 2, renormalize=False, device=tritonite.device))
    assert [*ours.state_dict()] == ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]

    def expected(x):
        scores, chosen = torch.softmax(x @ ours.gate.weight.mT, -1).topk(2)
        out = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(ours.experts.gate_up_proj, ours.experts.down_proj, strict=True)):
            gate, up = (x @ gate_up.mT).chunk(2, -1)
            share = (scores * (chosen == expert)).sum(-1, keepdim=True)
            out = out + share * ((functional.silu(gate) * up) @ down.mT)
        return out

    expected.parameters = ours.parameters
    compare(ours, expected, normal(2, 4, 8, grad=True), times=8.0)


def test_fp8_linear_shares_the_parameters_of_a_linear():
    linear = torch.nn.Linear(16, 32, device=tritonite.device)
    ours = nn.FP8Linear.from_linear(linear.eval())
    assert ours.weight is linear.weight and ours.bias is linear.bias and not ours.training
    x = normal(4, 16, grad=True)
    result, exact = ours(x), linear(x)
    # float8_e4m3fn has a resolution of 1/16, and errors of 16 products of random signs add up.
    assert float((result - exact).detach().norm() / exact.detach().norm()) < 0.06
    result.sum().backward()
    assert x.grad.shape == x.shape and linear.weight.grad is not None


@pytest.mark.declines("imports alone")
def test_nn_and_patch_are_imported_on_first_use():
    code = (
        "import sys, tritonite;"
        "early = [n for n in sys.modules if n.startswith(('tritonite.nn', 'tritonite.patching'))];"
        "assert not early, early; assert callable(tritonite.patch) and callable(tritonite.unpatch);"
        "assert tritonite.nn.RMSNorm; assert callable(tritonite.patch)"
    )
    scripts.run(code)
