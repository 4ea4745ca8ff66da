"""rms_norm, layer_norm and add_rms_norm_ against models' formulas and float64 compositions, forward and backward."""

import functools

import pytest
import torch
from compositions import agree, close, normal
from conftest import every_second

import tritonite
from tritonite import fused
from tritonite.errors import Unsupported
from tritonite.testing.compositions import layers

functional = torch.nn.functional
library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
CASTINGS = ["llama", "gemma", "none"]


def rms_norm(x, weight=None, residual=None, *, eps=1e-2, offset=0.0):
    return layers.rms_norm(x, weight, eps, residual=residual, offset=offset)


def layer_norm(x, weight=None, bias=None, residual=None):
    return layers.layer_norm(x, weight, bias, 1e-2, residual=residual)


def llama(x, weight, eps=1e-6):
    """Return LlamaRMSNorm's forward of transformers."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def gemma(x, weight, eps=1e-6):
    """Return GemmaRMSNorm's forward of transformers."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(x)


def ours_rms(x, weight=None, residual=None, **given):
    return fused.rms_norm(x, weight, 1e-2, residual=residual, **given)


def ours_layer(x, weight=None, bias=None, residual=None):
    return fused.layer_norm(x, weight, bias, 1e-2, residual=residual)


@every_second(("casting", "offset", "width", "dtype"), CASTINGS, [0.0, 1.0], [1, 5, 70], DTYPES)
def test_rms_norm(casting, offset, width, dtype):
    ours = functools.partial(ours_rms, casting=casting, offset=offset)
    theirs = functools.partial(rms_norm, offset=offset)
    x, weight, residual = (normal(*shape, dtype=dtype, grad=True) for shape in ((2, 3, width), (width,), (2, 3, width)))
    agree(ours, theirs, [x, weight], terms=16, grad_terms=256)
    agree(ours, theirs, [x, weight, residual], terms=16, grad_terms=256)
    agree(ours, theirs, [x, None, residual], used=(0,), terms=16, grad_terms=256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 70])
def test_layer_norm(width, dtype):
    x, residual = (normal(2, 3, width, dtype=dtype, grad=True) for _ in range(2))
    weight, bias = (normal(width, dtype=dtype, grad=True) for _ in range(2))
    agree(ours_layer, layer_norm, [x, weight, bias], terms=16, grad_terms=256)
    agree(ours_layer, layer_norm, [x, None, bias], terms=16, grad_terms=256)
    agree(ours_layer, layer_norm, [x, weight, None, residual], terms=16, grad_terms=256)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_castings_round_where_models_do(dtype):
    x, residual, weight = normal(16, 64, dtype=dtype), normal(16, 64, dtype=dtype), normal(64, dtype=dtype)
    total = x + residual
    # The mean of squares may differ in its last bit, which moves few roundings.
    for casting, offset, formula in (("llama", 0.0, llama), ("gemma", 1.0, gemma)):
        expected = formula(total, weight), formula(x, weight)
        normalized, added = fused.rms_norm(x, weight, residual=residual, offset=offset, casting=casting)
        alone = fused.rms_norm(x, weight, offset=offset, casting=casting)
        assert torch.equal(added, total)
        for own, wanted in zip((normalized, alone), expected, strict=True):
            assert (own == wanted).float().mean() > 0.99
            torch.testing.assert_close(own, wanted)
        other = fused.rms_norm(x, weight, offset=offset, casting={"llama": "none", "gemma": "llama"}[casting])
        assert (other == expected[1]).float().mean() < 0.95


@every_second(("width", "casting", "offset"), [70, 600, 1100], CASTINGS, [0.0, 0.5])
def test_rows_in_chunks_and_split_rows(width, casting, offset, tiny_blocks):
    ours = functools.partial(ours_rms, casting=casting, offset=offset)
    theirs = functools.partial(rms_norm, offset=offset)
    dtype = torch.float32 if casting == "none" else torch.bfloat16
    x, residual = (normal(3, width, dtype=dtype, grad=True) for _ in range(2))
    weight = normal(width, dtype=dtype, grad=True)
    agree(ours, theirs, [x, weight], terms=16, grad_terms=256)
    agree(ours, theirs, [x, weight, residual], terms=16, grad_terms=256)
    agree(ours_layer, layer_norm, [x, weight, None], terms=16, grad_terms=256)


def test_weight_may_be_float32_and_frozen():
    x = normal(4, 24, dtype=torch.bfloat16, grad=True)
    for casting in CASTINGS:
        ours = functools.partial(ours_rms, casting=casting)
        agree(ours, rms_norm, [x, normal(24)], terms=4, grad_terms=16)
        agree(ours, rms_norm, [x, normal(24, grad=True)], terms=4, grad_terms=16)


def layouts(x):
    """Yield x's values with other strides: gaps between rows, gaps between elements, transposed, and expanded."""
    padded = x.new_empty((*x.shape[:-1], x.shape[-1] + 3))
    padded[..., : x.shape[-1]] = x
    strided = x.new_empty((*x.shape, 2))
    strided[..., 0] = x
    yield padded[..., : x.shape[-1]]
    yield strided[..., 0]
    yield x.transpose(-1, 0).contiguous().transpose(-1, 0)
    yield x[:1].expand(x.shape)


def test_rows_at_any_stride():
    weight = normal(48)[::2]
    for x, residual in zip(layouts(normal(6, 5, 24)), list(layouts(normal(6, 5, 24)))[::-1], strict=True):
        x, residual = x.detach().requires_grad_(), residual.detach().requires_grad_()
        agree(ours_rms, rms_norm, [x, weight], terms=4, grad_terms=16)
        agree(ours_rms, rms_norm, [x, weight, residual], terms=4, grad_terms=16)
        agree(ours_layer, layer_norm, [x, weight, weight], terms=4, grad_terms=16)


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)])
def test_no_elements(shape):
    x, weight = normal(*shape, grad=True), normal(shape[-1], grad=True)
    for function in (fused.rms_norm, fused.layer_norm):
        for grad in torch.autograd.grad(function(x, weight).sum(), (x, weight)):
            assert not grad.any()
        assert function(x, weight, residual=x)[1].shape == shape
    fused.add_rms_norm_(x.detach(), x.detach(), weight.detach())


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize(("width", "dtype"), [(1, torch.float16), (24, torch.bfloat16), (70, torch.float32)])
def test_add_rms_norm_in_place(width, dtype, casting):
    for x, residual in zip(
        layouts(normal(3, 4, width, dtype=dtype)), layouts(normal(3, 4, width, dtype=dtype)), strict=True
    ):
        if x.stride(0) == 0:
            continue
        weight, versions = normal(width, dtype=dtype), (x._version, residual._version)
        expected = fused.rms_norm(x, weight, residual=residual, offset=1.0, casting=casting)
        assert fused.add_rms_norm_(x, residual, weight, 1e-6, 1.0, casting) is None
        assert torch.equal(x, expected[0]) and torch.equal(residual, expected[1])
        assert (x._version, residual._version) == tuple(version + 1 for version in versions)


def test_add_rms_norm_in_place_of_split_rows(tiny_blocks):
    x, residual, weight = normal(3, 1100), normal(3, 1100), normal(1100)
    expected = fused.rms_norm(x, weight, residual=residual)
    fused.add_rms_norm_(x, residual, weight)
    torch.testing.assert_close(x, expected[0])
    assert torch.equal(residual, expected[1])


def test_add_rms_norm_touches_no_gaps():
    storage = normal(2, 4, 12)
    before = storage.clone()
    fused.add_rms_norm_(storage[0, :, :8], storage[1, :, :8], normal(8))
    assert torch.equal(storage[..., 8:], before[..., 8:])


@pytest.mark.declines("refused calls")
def test_add_rms_norm_refuses_gradients_and_shared_memory():
    with pytest.raises(Unsupported, match="no gradient"):
        fused.add_rms_norm_(normal(3, 4, grad=True), normal(3, 4))
    with pytest.raises(Unsupported, match="share memory"):
        fused.add_rms_norm_(normal(1, 4).expand(3, 4), normal(3, 4))


def test_skip_norms_are_the_norms_of_sums():
    x, residual, weight = normal(3, 24), normal(3, 24), normal(24)
    for own, other in zip(
        fused.skip_rms_norm(x, residual, weight),
        fused.rms_norm(x, weight, residual=residual, casting="none"),
        strict=True,
    ):
        assert torch.equal(own, other)


X = torch.zeros(2, 3, 8)
WRONG = [
    (fused.rms_norm, (X, torch.zeros(7)), {}, "weight has the shape"),
    (fused.rms_norm, (X,), {"casting": "float"}, "casting is 'float'"),
    (fused.rms_norm, (X,), {"residual": X[:1]}, "residual has the shape"),
    (fused.rms_norm, (X.int(),), {}, "x is torch.int32"),
    (fused.rms_norm, (X[0, 0, 0],), {}, "needs a dimension"),
    (fused.layer_norm, (X, None, torch.zeros(8, dtype=torch.half)), {}, "bias is torch.float16"),
    (fused.layer_norm, (X,), {"residual": X.half()}, "one dtype"),
    (fused.add_rms_norm_, (X, X[..., :4]), {}, "residual has the shape"),
    (fused.add_rms_norm_, (X, X, None, 1e-6, 0.0, "float"), {}, "casting is 'float'"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("function", "args", "others", "reason"), WRONG)
def test_wrong_arguments_are_refused(function, args, others, reason):
    for device in (tritonite.device, "meta"):
        move = lambda value, device=device: value.to(device) if isinstance(value, torch.Tensor) else value
        with pytest.raises(Unsupported, match=reason):
            function(*map(move, args), **{name: move(value) for name, value in others.items()})


def _calls():
    x, residual, weight = normal(2, 3, 8, grad=True), normal(2, 3, 8, grad=True), normal(8, grad=True)
    grad, rows = normal(2, 3, 8), normal(2, 3)
    yield library.rms_norm, (x,)
    yield library.rms_norm, (x, None, weight, 1e-3, 1.0, "gemma")
    yield library.rms_norm_backward, (grad, None, grad, rows, weight.detach(), True, 1.0)
    yield library.layer_norm, (x, None, weight)
    yield library.layer_norm, (x, residual)
    yield library.add_rms_norm_, (grad.clone(), grad.clone(), weight.detach())


@pytest.mark.parametrize("i", range(6))
def test_opcheck(i):
    torch.library.opcheck(*list(_calls())[i])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic):
    def layer(x, residual, weight):
        normalized, total = fused.rms_norm(x, weight, residual=residual, offset=1.0, casting="gemma")
        normalized = fused.layer_norm(normalized * total, weight)
        return fused.rms_norm(normalized, weight)

    operands = [normal(2, 5, 16, grad=True), normal(2, 5, 16, grad=True), normal(16, grad=True)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected, actual = layer(*operands), compiled(*operands)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    grad = torch.randn_like(expected)
    for own, eager in zip(
        torch.autograd.grad(actual, operands, grad), torch.autograd.grad(expected, operands, grad), strict=True
    ):
        torch.testing.assert_close(own, eager, rtol=0, atol=0)


def test_compiled_graphs_write_in_place():
    def step(x, residual, weight):
        x, residual = x * 2, residual * 3
        fused.add_rms_norm_(x, residual, weight)
        return x, residual

    operands = normal(3, 8), normal(3, 8), normal(8)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), step(*operands))


def test_vmap():
    x, weight = normal(4, 3, 8), normal(8)
    given = lambda x: library.rms_norm(x, None, weight, 1e-3, 1.0, "none")[0]
    close(torch.vmap(given)(x), rms_norm(x.double(), weight.double(), eps=1e-3, offset=1.0))


def test_empty_views_share_no_memory():
    x, residual, weight = normal(17, 4)[:, :0], normal(17, 0), normal(0)
    assert x.stride() == (4, 1)
    fused.add_rms_norm_(x.t().t(), residual, weight)
    strided = normal(34).as_strided((17, 0), (0, 2))
    fused.add_rms_norm_(strided, strided, weight)
