"""Patterns over graphs of ATen's operators: expressions become fused operators, within the resolution of the dtype."""

import copy
import operator

import pytest
import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode

import tritonite
from tritonite.graph.fused import calls_of
from tritonite.graph.passes.pointwise import fuse_pointwise
from tritonite.graph.patterns import fuse_patterns

pytestmark = [pytest.mark.smoke, pytest.mark.host]
functional = torch.nn.functional

FLOATS = (torch.bfloat16, torch.float32)


def names(module):
    calls = [node.target for node in calls_of(module.graph)]
    return [target.name() for target in calls if target is not operator.getitem and hasattr(target, "name")]


def check(function, *args, has="", lacks="", dynamic=False, also=()):
    """Fuse the graphs of a function. Compare dtypes, strides and values with those of the separate operators."""
    modules = []

    def compiler(module, _):
        modules.append((module, copy.deepcopy(module)))
        fuse_patterns(module)
        fuse_pointwise(module)
        module.graph.lint()
        return module

    call = aot_function(lambda *given: function(*given), fw_compiler=compiler, decompositions={}, dynamic=dynamic)
    with torch.no_grad():
        call(*args)
        ((module, separate),) = modules
        for given in (args, *also):
            with tritonite.use_gems():
                results = module(*given)
            for ours, theirs in zip(results, separate(*given), strict=True):
                if isinstance(theirs, torch.Tensor):
                    assert ours.dtype is theirs.dtype
                    assert ours.stride() == theirs.stride()
                    torch.testing.assert_close(ours, theirs, rtol=2e-2 if ours.dtype.itemsize == 2 else 1e-5, atol=2e-2)
    found = names(module)
    assert not has or has in found, found
    assert not lacks or lacks not in found, found
    return found


def randn(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, device=device).to(dtype)


def llama_norm(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def gemma_norm(x, weight):
    wide = x.float()
    wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + weight.float())).to(x.dtype)


def torch_norm(x, weight):
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def bare_norm(x, weight):
    return torch_norm(x, None) + weight


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("norm", (llama_norm, gemma_norm, torch_norm, bare_norm))
def test_root_mean_square_norms(device, norm, dtype):
    x, residual, weight = (randn(*shape, dtype=dtype, device=device) for shape in ((3, 5, 8), (3, 5, 8), (8,)))
    # On a GPU, ATen's rms_norm is one operator with a kernel of its own.
    kept = device != "cpu" and norm in (torch_norm, bare_norm)
    check(norm, x, weight, has="aten::_fused_rms_norm" if kept else "tritonite::rms_norm", lacks="aten::mean.dim")

    def of_sum(x, residual, weight):
        total = x + residual
        return norm(total, weight), total

    found = check(of_sum, x, residual, weight, has="tritonite::rms_norm")
    assert len(found) == 1 + (norm is bare_norm)


def layer_norm(x, weight):
    return functional.layer_norm(x, x.shape[-1:], weight, weight)


def frozen_norm(x, weight):
    return llama_norm(x, weight.detach())


# Norms, dtypes and the names of the replaced gradients. On a GPU ATen's rms_norm has an operator for its gradient.
GRADIENTS = (
    (llama_norm, torch.bfloat16, "rms_norm_backward"),
    (frozen_norm, torch.float32, "rms_norm_backward"),
    (torch_norm, torch.float32, "rms_norm_backward" if tritonite.device == "cpu" else "norm_backward_of_sum"),
    (layer_norm, torch.float32, "norm_backward_of_sum"),
)


@pytest.mark.parametrize(("norm", "dtype", "name"), GRADIENTS)
def test_norms_in_training(device, norm, dtype, name):
    def blocks(x, weight):
        x = x + norm(x, weight).sin() * weight
        return x + norm(x, weight).cos()

    x, weight = (randn(*shape, dtype=dtype, device=device).requires_grad_() for shape in ((3, 5, 8), (8,)))
    grad = torch.randn_like(x)
    with tritonite.use_gems():
        expected = torch.autograd.grad(blocks(x, weight), (x, weight), grad)
    torch._dynamo.reset()
    compiled, saved = torch.compile(blocks, backend="tritonite", fullgraph=True), []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
            result = compiled(x, weight)
        actual = torch.autograd.grad(result, (x, weight), grad)
        rtol = 3e-2 if dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol)
    found = [line.split()[1] for line in tritonite.explain(compiled).splitlines() if line.lstrip().startswith("fused")]
    assert found.count(f"{name}:") == 2, found
    # No tensor of x's size is kept in a wider dtype for the backward pass.
    assert {each.dtype for each in saved if each.shape == x.shape} == {dtype}


def by_hand(function, inputs):
    """Return the graph module of the nodes that `function` inserts for inputs."""
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    for node, value in zip(nodes, inputs, strict=True):
        node.meta["val"] = mode.from_tensor(value)

    def insert(target, *args):
        node = graph.call_function(target, args)
        given = fx.map_arg(args, lambda each: each.meta["val"])
        with mode:
            node.meta["val"] = target(*given)
        return node

    graph.output(function(insert, *nodes))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_operator_of_a_root_mean_square_norm(device, dtype):
    x, residual, weight = (randn(*shape, dtype=dtype, device=device) for shape in ((3, 5, 8), (3, 5, 8), (8,)))
    aten = torch.ops.aten

    def of_sum(insert, x, residual, weight):
        total = insert(aten.add.Tensor, x, residual)
        norm = insert(aten._fused_rms_norm.default, total, [8], weight, 1e-6)
        return insert(operator.getitem, norm, 0), insert(aten.mul.Tensor, total, 2)

    module = by_hand(of_sum, (x, residual, weight))
    separate = copy.deepcopy(module)
    fuse_patterns(module)
    assert names(module) == ["tritonite::rms_norm", "aten::mul.Tensor"]
    for ours, theirs in zip(module(x, residual, weight), separate(x, residual, weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)

    def alone(insert, x, weight):
        return (insert(operator.getitem, insert(aten._fused_rms_norm.default, x, [8], weight, None), 0),)

    def with_statistics(insert, x, residual):
        norm = insert(aten._fused_rms_norm.default, insert(aten.add.Tensor, x, residual), [8], None, None)
        return insert(operator.getitem, norm, 0), insert(operator.getitem, norm, 1)

    module = by_hand(alone, (x, weight))
    fuse_patterns(module)
    assert "aten::_fused_rms_norm" in names(module)
    module = by_hand(with_statistics, (x, residual))
    separate = copy.deepcopy(module)
    fuse_patterns(module)
    assert names(module) == ["tritonite::rms_norm", "aten::unsqueeze"]
    for ours, theirs in zip(module(x, residual), separate(x, residual), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)

    def gradient(insert, x, residual, weight, rstd):
        items = insert(aten._fused_rms_norm_backward.default, x, residual, [8], rstd, weight, [True, True])
        by_x, by_weight = (insert(operator.getitem, items, i) for i in range(2))
        return insert(aten.add.Tensor, residual, by_x), by_weight

    module = by_hand(gradient, (x, residual, weight, torch.rand(3, 5, 1, device=device)))
    fuse_patterns(module)
    assert names(module) == ["aten::squeeze.dim", "tritonite::rms_norm_backward"]


def test_norms_that_are_left_alone(device):
    x, weight = randn(5, 8, dtype=torch.bfloat16, device=device), randn(8, dtype=torch.bfloat16, device=device)

    def in_16_bits(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def of_columns(x, weight):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + 1e-6)).to(x.dtype) * weight

    def with_statistics(x, weight):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).to(x.dtype) * weight, scale

    def with_normalized(x, weight):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype) * weight, wide

    for function in (in_16_bits, of_columns, with_normalized):
        check(function, x, weight, lacks="tritonite::rms_norm")
    check(with_statistics, x, weight, has="tritonite::rms_norm")


def test_layer_norm_of_a_sum(device):
    x, residual = randn(3, 5, 8, device=device), randn(3, 5, 8, device=device)
    weight, bias = randn(8, device=device), randn(8, device=device)

    def of_sum(x, residual, weight, bias):
        total = x + residual
        return functional.layer_norm(total, (8,), weight, bias), total.exp()

    check(of_sum, x, residual, weight, bias, has="tritonite::layer_norm", lacks="aten::native_layer_norm")
    check(lambda x, w, b: functional.layer_norm(x, (8,), w, b), x, weight, bias, has="aten::native_layer_norm")
    check(
        lambda x, y, w, b: functional.layer_norm(x + y, (8,), w, b),
        x,
        weight,
        weight,
        bias,
        has="aten::native_layer_norm",
    )


@pytest.mark.parametrize("activation", ("silu", "relu", "gelu", "gelu_tanh"))
def test_gated_activations(device, activation):
    functions = {
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        **{n: getattr(functional, n) for n in ("silu", "relu")},
    }
    function = functions.get(activation, functional.gelu)
    name = f"tritonite::{activation.partition('_')[0]}_and_mul"
    x = randn(3, 5, 8, dtype=torch.bfloat16, device=device)
    check(lambda x: function(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], x, has=name)
    check(lambda x, y: y * function(x), x, x + 1, has=name)
    # A broadcast, and an activation that something else reads.
    check(lambda x, y: y * function(x), x, x[0], lacks=name)
    check(lambda x, y: (y * function(x), function(x) + 1), x, x + 1, has=name)


@pytest.mark.parametrize("shape", ((5, 8), (2, 3, 8)))
def test_activations_of_products(device, shape):
    x, weight, bias = randn(*shape, device=device), randn(6, 8, device=device), randn(6, device=device)
    approximate = "none" if device == "cpu" or torch.device(device).type == "cpu" else "tanh"
    for function in (functional.relu, lambda x: functional.gelu(x, approximate=approximate)):
        check(lambda x, w, b: function(functional.linear(x, w, b)), x, weight, bias, has="aten::_addmm_activation")
    check(lambda x, w, b: functional.silu(functional.linear(x, w, b)), x, weight, bias, lacks="aten::_addmm_activation")
    check(lambda x, w: functional.relu(functional.linear(x, w)), x, weight, lacks="aten::_addmm_activation")


def convolution(x, weight, bias, residual=None, activation=functional.relu, **steps):
    found = functional.conv2d(x, weight, bias, padding=1, **steps)
    return activation(found if residual is None else found + residual)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activations_of_convolutions(device, dtype):
    x, weight, bias, residual = (
        randn(*shape, dtype=dtype, device=device) for shape in ((2, 4, 5, 6), (4, 4, 3, 3), (4,), (2, 4, 5, 6))
    )
    name = "tritonite::conv_bias_act"
    activations = functional.relu, functional.relu6, functional.silu, functional.gelu, functional.hardswish, torch.tanh
    for function in (*activations, torch.sigmoid, lambda x: functional.gelu(x, approximate="tanh")):
        found = check(lambda x, w, b: convolution(x, w, b, activation=function), x, weight, bias, has=name)
        assert found == [name]
    assert check(convolution, x, weight, bias, residual) == [name]
    assert check(lambda x, w, r: r + functional.conv2d(x, w, padding=1), x, weight, residual) == [name]
    last = [each.contiguous(memory_format=torch.channels_last) for each in (x, weight, residual)]
    assert check(lambda x, w, r, b: convolution(x, w, b, r), *last, bias) == [name]
    check(lambda x, w, b: convolution(x, w, b, activation=torch.abs), x, weight, bias, lacks=name)
    check(lambda x, w, b: convolution(x, w, b, b[:, None, None], torch.neg), x, weight, bias, lacks=name)

    def with_operand(x, w, b):
        found = functional.conv2d(x, w, b)
        return functional.relu(found), found

    check(with_operand, x, weight, bias, lacks=name)
    check(lambda x, w: functional.conv_transpose1d(x[:, :, 0], w[0], stride=2).relu(), x, weight, has=name)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotary(states, angles, repeat=True):
    heads = states.view(*states.shape[:2], 3, 8).transpose(1, 2)
    every = torch.cat((angles, angles if repeat else angles + 1), dim=-1)
    cos, sin = ((turn(every) * 1.5).to(states.dtype).unsqueeze(1) for turn in (torch.cos, torch.sin))
    return heads * cos + rotate_half(heads) * sin


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rotary_embedding(device, dtype):
    states, angles = randn(2, 5, 24, dtype=dtype, device=device), randn(1, 5, 4, device=device)
    check(rotary, states, angles, has="tritonite::rotary_embedding", lacks="aten::neg")
    check(lambda x, a: rotary(x, a, repeat=False), states, angles, lacks="tritonite::rotary_embedding")


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_cross_entropy(device, reduction):
    logits = randn(6, 9, dtype=torch.bfloat16, device=device)
    target = torch.tensor([0, 8, -100, 3, 4, 4], device=device)
    name = "tritonite::cross_entropy"
    check(lambda x, t: functional.cross_entropy(x.float(), t, reduction=reduction), logits, target, has=name)
    found = check(lambda x, t: functional.cross_entropy(x, t, reduction=reduction), logits.float(), target, has=name)
    assert found == [name]
    check(lambda x, t: functional.log_softmax(x.float(), -1).sum(), logits, target, lacks=name)

    def with_probabilities(x, t):
        logs = functional.log_softmax(x, -1)
        return functional.nll_loss(logs, t), logs

    check(with_probabilities, logits.float(), target, lacks=name)


def attention(query, key, value, mask=None, divide=False, wide=True):
    scores = query @ key.transpose(2, 3)
    scores = scores / 2.5 if divide else scores * 0.5
    if mask is not None:
        scores = scores + mask
    probabilities = functional.softmax(scores, dim=-1, dtype=torch.float32 if wide else None).to(query.dtype)
    return (probabilities @ value).transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_written_out(device, dtype):
    query, key, value = (randn(2, 3, rows, 8, dtype=dtype, device=device) for rows in (5, 7, 7))
    mask = torch.zeros(2, 1, 5, 7, dtype=dtype, device=device)
    mask[:, :, :3, 3:] = -1e4
    name = "tritonite::attention"
    check(attention, query, key, value, mask, has=name, lacks="aten::bmm")
    check(lambda q, k, v: attention(q, k, v, divide=True, wide=False), query, key, value, has=name)
    check(lambda q, k, v: functional.softmax(q @ k.mT, -1) @ v, query, key, value, has=name)

    def with_probabilities(q, k, v):
        probabilities = functional.softmax(q @ k.mT, -1)
        return probabilities @ v, probabilities

    check(with_probabilities, query, key, value, lacks=name)
    check(lambda q, k, v: functional.softmax(q @ k.mT, 2) @ v, query, key, value, lacks=name)


def test_heads_shared_by_several_queries(device):
    def repeated(x, count):
        batch, heads, rows, size = x.shape
        return x[:, :, None].expand(batch, heads, count, rows, size).reshape(batch, heads * count, rows, size)

    query, key, value = (randn(2, heads, 5, 8, device=device) for heads in (6, 2, 2))
    found = check(lambda q, k, v: attention(q, repeated(k, 3), repeated(v, 3)), query, key, value)
    assert set(found) <= {"tritonite::attention", "aten::transpose.int", "aten::slice.Tensor"}, found
    found = check(lambda q, k, v: attention(q, repeated(k, 3), v), query, key, query, has="tritonite::attention")
    assert "aten::expand" in found


def test_symbolic_sizes(device):
    def layer(x, residual, weight, up):
        total = x + residual
        normed = llama_norm(total, weight)
        return functional.silu(normed @ up) * normed, total

    def given(*lead):
        x, residual, weight = (randn(*shape, device=device) for shape in ((*lead, 8), (*lead, 8), (8,)))
        return x, residual, weight, randn(8, 8, device=device)

    found = check(layer, *given(2, 5), dynamic=True, also=[given(3, 7), given(4, 2)])
    assert "tritonite::rms_norm" in found
    assert "tritonite::silu_and_mul" in found


def test_a_decoder_layer(device):
    """A layer of a transformer has no pointwise operators left but programs."""
    width, heads = 24, 3
    weights = [randn(width, width, device=device) * 0.2 for _ in range(7)] + [randn(width, device=device)] * 2

    def layer(x, angles, q, k, v, o, gate, up, down, first, second):
        normed = llama_norm(x, first)
        every = torch.cat((angles, angles), dim=-1)
        cos, sin = every.cos().unsqueeze(1), every.sin().unsqueeze(1)
        query, key = ((normed @ own).view(2, 5, heads, 8).transpose(1, 2) for own in (q, k))
        query, key = query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin
        value = (normed @ v).view(2, 5, heads, 8).transpose(1, 2)
        x = x + attention(query, key, value).view(2, 5, width) @ o
        normed = llama_norm(x, second)
        return x + (functional.silu(normed @ gate) * (normed @ up)) @ down

    found = check(layer, randn(2, 5, width, device=device), randn(1, 5, 4, device=device), *weights)
    for name in ("attention", "rms_norm", "rotary_embedding", "silu_and_mul"):
        assert f"tritonite::{name}" in found
    assert (found.count("tritonite::rms_norm"), found.count("tritonite::rotary_embedding")) == (2, 1)
    kept = {name for name in found if not name.startswith("tritonite")}
    assert kept <= {
        "aten::view", "aten::_unsafe_view", "aten::mm", "aten::transpose.int", "aten::slice.Tensor", "aten::add.Tensor",
        "aten::cat", "aten::unsqueeze",
    }, found  # fmt: skip
