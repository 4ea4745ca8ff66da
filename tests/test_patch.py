"""`patch` and `unpatch` on modules of no library: what is recognised, what is kept and why, and what stays."""

import copy
import io

import pytest
import torch
from compositions import normal
from conftest import FULL

import tritonite
from tritonite import patching
from tritonite.patching.deferred import DeferredLogits, Head

functional = torch.nn.functional


class Norm(torch.nn.Module):
    """A norm of transformers' kind, with an offset and any power of x in place of the square."""

    def __init__(self, size=16, eps=1e-5, offset=0.0, power=2):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(size))
        self.epsilon, self.offset, self.power = eps, offset, power

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.abs().pow(self.power).mean(-1, keepdim=True) + self.epsilon)
        return (wide * (self.offset + self.scale.float())).to(x.dtype)


class Gated(torch.nn.Module):
    """A gated MLP whose first linear is the factor, with a dropout and an activation that is no module."""

    def __init__(self, hidden=12, inner=20, dropout=0.0, activation=functional.silu, after=False):
        super().__init__()
        self.w1, self.w2 = torch.nn.Linear(hidden, inner), torch.nn.Linear(hidden, inner)
        self.w3 = torch.nn.Linear(inner, hidden)
        self.drop = torch.nn.Dropout(dropout)
        self.activation, self.after = activation, after

    def forward(self, x):
        product = self.w1(x) * self.activation(self.w2(x))
        return self.drop(self.w3(product)) if self.after else self.w3(self.drop(product))


class Packed(torch.nn.Module):
    """A gated MLP with one linear for both halves, the factor first, and an activation inside its forward."""

    def __init__(self):
        super().__init__()
        self.both, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(12, 8)

    def forward(self, x):
        factor, gate = self.both(x).chunk(2, -1)
        return self.out(factor * functional.gelu(gate, approximate="tanh"))


def on_device(module, dtype=torch.float32):
    return module.to(tritonite.device).to(dtype)


def trained(module, x):
    torch.manual_seed(5)
    result = module(x)
    torch.manual_seed(6)
    return result, *torch.autograd.grad(result, [x, *module.parameters()], torch.randn_like(result))


def compare(module, x, wanted, rtol=2e-5):
    for own, other in zip(trained(module, x), wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=rtol, atol=rtol * float(other.detach().abs().max()))


@pytest.mark.smoke
@pytest.mark.host
@pytest.mark.parametrize(
    ("module", "operator"),
    [
        (Norm(), "fused.rms_norm, casting='gemma'"),
        (Norm(offset=1.0), "fused.rms_norm, casting='gemma', offset=1"),
        (torch.nn.LayerNorm(16), "fused.layer_norm"),
        (torch.nn.LayerNorm(16, bias=False), "fused.layer_norm"),
        (torch.nn.LayerNorm(16, elementwise_affine=False), "fused.layer_norm"),
        (torch.nn.RMSNorm(16, eps=1e-3, elementwise_affine=False), "fused.rms_norm"),
        (torch.nn.RMSNorm(16), "fused.rms_norm"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_norms_are_recognised(module, operator):
    module = on_device(copy.deepcopy(module))
    x = normal(3, 16, grad=True)
    wanted = trained(module, x)
    (replaced,) = tritonite.patch(module).replaced
    assert replaced.operator.startswith(operator)
    tritonite.reset_stats()
    compare(module, x, wanted)
    assert {name.removesuffix("_backward") for name in tritonite.stats()} <= {
        "tritonite::rms_norm",
        "tritonite::layer_norm",
    }


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Norm(power=3), "neither a root mean square norm nor a layer norm"),
        (torch.nn.LayerNorm((4, 4), elementwise_affine=False), "normalises over 2 dimensions"),
        (torch.nn.LayerNorm(16, device="meta"), "weight is on the meta device"),
        (torch.nn.GroupNorm(2, 16), "it raised RuntimeError on sample inputs"),
    ],
    ids=["cubes", "two dimensions", "meta", "groups"],
)
def test_other_norms_are_kept(module, reason):
    module = module if module._get_name() == "LayerNorm" else on_device(module)
    report = tritonite.patch(module)
    assert not report.replaced and reason in report.kept[0].reason
    assert "forward" not in vars(module)


@pytest.mark.smoke
@pytest.mark.host
@pytest.mark.parametrize(
    ("module", "formula"),
    [
        (Gated(), "fused silu and product: w3(act(w2) * w1)"),
        (Gated(hidden=12, inner=12), "fused silu and product: w3(act(w2) * w1)"),
        (Gated(activation=functional.relu), "fused relu and product"),
        (Gated(activation=functional.gelu), "fused gelu and product"),
        (Gated(dropout=0.5), "fused silu and product"),
        (Packed(), "fused gelu_tanh and product: out(act(both) * its other half)"),
    ],
    ids=["silu", "square", "relu", "gelu", "dropout", "packed"],
)
def test_gated_mlps_are_recognised(module, formula):
    module = on_device(copy.deepcopy(module))
    size = 8 if isinstance(module, Packed) else 12
    x = normal(2, 3, size, grad=True)
    wanted = trained(module, x)
    report = tritonite.patch(module)
    assert len(report.replaced) == 1 and report.replaced[0].operator.startswith(formula), report
    compare(module, x, wanted)


def test_exact_and_approximate_gelu_are_told_apart_in_bfloat16():
    for activation, name in (
        (functional.gelu, "gelu"),
        (lambda x: functional.gelu(x, approximate="tanh"), "gelu_tanh"),
    ):
        (replaced,) = tritonite.patch(on_device(Gated(activation=activation), torch.bfloat16)).replaced
        assert replaced.operator.startswith(f"fused {name} and")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Gated(activation=functional.mish), "it is not a product of silu, gelu, gelu_tanh, relu"),
        (Gated(dropout=0.5, after=True), "differs"),
    ],
)
def test_other_gated_mlps_are_kept(module, reason):
    module = on_device(module)
    report = tritonite.patch(module)
    assert not report.replaced and reason in report.kept[0].reason and "forward" not in vars(module)


def test_linears_of_a_gated_mlp_keep_their_hooks_and_may_be_exchanged():
    module = on_device(Gated())
    tritonite.patch(module)
    seen = []
    module.w1.register_forward_hook(lambda *args: seen.append("w1"))
    module.register_forward_hook(lambda *args: seen.append("module"))
    module(normal(2, 12))
    assert seen == ["w1", "module"]
    with torch.no_grad():
        module.w1 = on_device(torch.nn.Linear(12, 20))
        expected = Gated.forward(module, x := normal(2, 12))
        torch.testing.assert_close(module(x), expected)


def test_calls_that_the_operator_does_not_serve_run_the_class_own_forward():
    module = on_device(torch.nn.LayerNorm(16))
    tritonite.patch(module)
    x = normal(3, 16, dtype=torch.bfloat16)
    tritonite.reset_stats()
    with torch.autocast(tritonite.device, torch.bfloat16):
        assert module(x).dtype is torch.nn.LayerNorm.forward(module, x).dtype
    assert "tritonite::layer_norm" not in tritonite.stats()
    with torch.autocast(tritonite.device, torch.bfloat16):
        assert module(x.float()).dtype is torch.float32
    assert "tritonite::layer_norm" in tritonite.stats()
    assert module(input=x.float()).shape == x.shape


class Model(torch.nn.Module):
    """Two layers of a norm and a gated MLP."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList([Norm(12), torch.nn.LayerNorm(12)])
        self.mlps = torch.nn.ModuleList([Gated(), Gated(activation=functional.mish)])

    def forward(self, x):
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return x


def test_report_groups_equal_layers_and_gives_reasons():
    report = tritonite.patch(on_device(Model()))
    assert isinstance(report, patching.PatchReport)
    assert report.counts == {"RMS norm": 1, "layer norm": 1, "gated MLP": 1}
    assert [each.name for each in report.kept] == ["mlps.1"]
    text = str(report)
    assert "replaced: 1 RMS norm, 1 layer norm, 1 gated MLP" in text and "norms.*" in text and "kept: it is" in text


def test_options_leave_kinds_out():
    assert tritonite.patch(on_device(Model()), norm=False).counts == {"gated MLP": 1}
    assert tritonite.patch(on_device(Model()), mlp=False, verify=False).counts == {"RMS norm": 1, "layer norm": 1}


def test_patching_twice_keeps_what_is_replaced():
    model = on_device(Model())
    first = tritonite.patch(model)
    again = tritonite.patch(model)
    assert not again.replaced and {each.reason for each in again.kept} >= {"it is replaced already"}
    assert tritonite.unpatch(model) == len(first.replaced) and tritonite.unpatch(model) == 0
    assert all("forward" not in vars(each) for each in model.modules())


def test_parameters_modes_and_random_state_stay_as_they_are():
    model = on_device(Model())
    model.mlps[0].eval()
    before = {name: (id(each), each.detach().clone()) for name, each in model.named_parameters()}
    modes = [each.training for each in model.modules()]
    state = torch.get_rng_state()
    tritonite.patch(model)
    assert torch.equal(torch.get_rng_state(), state) and modes == [each.training for each in model.modules()]
    for name, each in model.named_parameters():
        assert id(each) == before[name][0] and torch.equal(each, before[name][1]) and each.grad is None


def test_copies_are_patched_and_pickles_are_not():
    model = on_device(Model())
    x = normal(2, 12, grad=True)
    wanted = trained(model, x)
    count = len(tritonite.patch(model).replaced)
    copied = copy.deepcopy(model)
    assert copied.norms[0].forward.__self__ is copied.norms[0]
    compare(copied, x, wanted)
    assert tritonite.unpatch(copied) == count
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    compare(loaded, x, wanted)
    assert tritonite.unpatch(loaded) == 0
    other = on_device(Model())
    other.load_state_dict(model.state_dict())
    compare(other, x, wanted)


def test_a_forward_replaced_by_others_is_kept():
    module = on_device(Norm())
    module.forward = lambda x: x
    report = tritonite.patch(module)
    assert "replaced on the instance before" in report.kept[0].reason


def test_a_model_compiles_in_one_graph():
    model = on_device(Model())
    x = normal(2, 12, grad=True)
    wanted = trained(model, x)
    tritonite.patch(model)
    compiled = torch.compile(model, backend="aot_eager" if FULL else "eager", fullgraph=True)
    compare(compiled, x, wanted)


# ---- Deferred logits -------------------------------------------------------------------------------------------------


def deferred(vocabulary=20, bias=True):
    linear = torch.nn.Linear(12, vocabulary, bias, device=tritonite.device)
    head = Head(linear)
    hidden = normal(2, 5, 12, grad=True)
    return head, head(hidden), linear(hidden)


def _capped(logits):
    return torch.tanh(logits / 2.0) * 2.0


@pytest.mark.parametrize(
    "function",
    [
        lambda logits: logits.float().view(-1, 20),
        lambda logits: _capped(logits).reshape(-1, 20),
        lambda logits: (0.25 * logits).to(torch.float32).contiguous().view(10, 20),
        lambda logits: logits[..., :-1, :].reshape(-1, logits.size(-1)),
        lambda logits: logits[:, 1:, :].contiguous().view(-1, logits.shape[-1]).to(logits.device),
    ],
)
def test_a_cross_entropy_of_deferred_logits_computes_none(function):
    head, logits, expected = deferred()
    rows = function(expected)
    targets = torch.randint(20, (len(rows),), device=rows.device)
    found = function(logits)
    assert isinstance(found, DeferredLogits) and found.shape == rows.shape and found.dtype is rows.dtype
    loss = functional.cross_entropy(found, targets, ignore_index=3, reduction="sum", label_smoothing=0.1)
    assert head.losses == 1 and not head.reason
    wanted = functional.cross_entropy(rows, targets, ignore_index=3, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0.0)
    operands = [logits.hidden, *head.linear.parameters()]
    for own, other in zip(torch.autograd.grad(loss, operands), torch.autograd.grad(wanted, operands), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.declines("logits are computed by ATen")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda logits: logits.argmax(-1), "argmax"),
        (lambda logits: torch.softmax(logits, -1), "softmax"),
        (lambda logits: torch.cat([logits, logits], 1), "cat"),
        (lambda logits: logits + 1, "add"),
        (lambda logits: logits * logits.detach(), "detach"),
        (lambda logits: logits[0], "a part of them"),
        (lambda logits: torch.tanh(torch.tanh(logits)), "tanh"),
        (lambda logits: logits.view(2, 5, 4, 5), "view"),
        (lambda logits: logits.to(torch.int64), "to"),
        (
            lambda logits: functional.cross_entropy(logits.mT, torch.ones(2, 5, dtype=torch.int64).to(logits.device)),
            "mT",
        ),
    ],
)
def test_any_other_use_of_deferred_logits_computes_them(function, reason):
    head, logits, expected = deferred()
    torch.testing.assert_close(function(logits), function(expected))
    assert head.reason == reason and not head.losses
