"""quantize, swiglu_quantize and rms_norm_quantize against formulas written in torch, bit by bit."""

import pytest
import scripts
import torch
from compositions import normal

import tritonite
from tritonite import fused
from tritonite.errors import Unsupported

library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
# A scale of the tensor is computed for "tensor", and given for "static".
WANTED = [(dtype, kind) for dtype in (FLOAT8, INT8) for kind in ("token", "block", "tensor", "static")]
WIDTHS = [1, 5, 127, 128, 300]


def reference(x, dtype, granularity, scale=None):
    """Return quantised values and scales by the formula, in float32 on the CPU.

    On a GPU, ATen divides by a number as if it multiplied by the number's rounded inverse.
    """
    most = 448.0 if dtype is FLOAT8 else 127.0
    wide, device = x.float().cpu(), x.device
    if granularity == "token":
        scale = wide.abs().amax(-1, keepdim=True) / most
        each = scale
    elif granularity == "block":
        blocks = torch.nn.functional.pad(wide, (0, -wide.shape[-1] % 128)).unflatten(-1, (-1, 128))
        scale = blocks.abs().amax(-1) / most
        each = scale.repeat_interleave(128, -1)[..., : wide.shape[-1]]
    else:
        scale = each = (wide.abs().amax().reshape(1) / most) if scale is None else scale.reshape(1).cpu()
    value = wide * torch.where(each == 0, 0.0, 1.0 / each)
    least = -128.0 if dtype is INT8 else -most
    value = value.clamp(least, most)
    value = value.round() if dtype is INT8 else value
    return value.to(dtype).to(device), scale.to(device)


def options(kind):
    """Return the granularity and the scale of an element of WANTED."""
    one = torch.full((1,), 0.01, device=tritonite.device)
    return {"granularity": "tensor", "scale": one} if kind == "static" else {"granularity": kind, "scale": None}


def same(actual, expected):
    """Assert that values and scales, and what else is returned, are equal bit by bit."""
    assert len(actual) == len(expected)
    for own, wanted in zip(actual, expected, strict=True):
        assert own.dtype is wanted.dtype and own.shape == wanted.shape and own.is_contiguous()
        bits = (own.view(torch.uint8), wanted.view(torch.uint8)) if own.dtype is FLOAT8 else (own, wanted)
        assert torch.equal(*bits)


@pytest.mark.smoke
@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize(("dtype", "kind"), WANTED)
def test_quantize(dtype, kind, given):
    for width in WIDTHS:
        x = normal(2, 3, width, dtype=given)
        same(fused.quantize(x, dtype, **options(kind)), reference(x, dtype, **options(kind)))


@pytest.mark.parametrize(("dtype", "kind"), WANTED)
def test_rows_in_chunks_and_rows_read_twice(dtype, kind, tiny_blocks):
    for width in (300, 1100):
        x = normal(3, width)
        same(fused.quantize(x, dtype, **options(kind)), reference(x, dtype, **options(kind)))


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize(("dtype", "kind"), WANTED)
def test_swiglu_quantize(dtype, kind, given):
    for width in WIDTHS[1:]:
        x = normal(3, 2 * width, dtype=given)
        expected = fused.quantize(fused.swiglu(x), dtype, **options(kind))
        same(fused.swiglu_quantize(x, dtype=dtype, **options(kind)), expected)
        x, y = x.chunk(2, -1)
        same(fused.swiglu_quantize(x, y, dtype=dtype, **options(kind)), expected)


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize(("dtype", "kind"), WANTED)
def test_rms_norm_quantize(dtype, kind, given):
    for width, casting, offset in ((1, "llama", 0.0), (127, "gemma", 1.0), (128, "none", 0.0), (300, "llama", 1.0)):
        x, residual, weight = normal(3, width, dtype=given), normal(3, width, dtype=given), normal(width, dtype=given)
        wanted = {"dtype": dtype, **options(kind)}
        norm = {"offset": offset, "casting": casting}
        expected = fused.quantize(fused.rms_norm(x, weight, **norm), **wanted)
        same(fused.rms_norm_quantize(x, weight, **norm, **wanted), expected)
        normalized, total = fused.rms_norm(x, weight, residual=residual, **norm)
        expected = (*fused.quantize(normalized, **wanted), total)
        same(fused.rms_norm_quantize(x, weight, residual=residual, **norm, **wanted), expected)


@pytest.mark.parametrize(("dtype", "kind"), WANTED)
def test_rms_norm_quantize_of_rows_in_chunks_and_split_rows(dtype, kind, tiny_blocks):
    for width in (300, 1100):
        x, residual, weight = normal(3, width), normal(3, width), normal(width)
        wanted = {"dtype": dtype, **options(kind)}
        values, scales, total = fused.rms_norm_quantize(x, weight, residual=residual, **wanted)
        normalized, added = fused.rms_norm(x, weight, residual=residual)
        expected, wanted_scales = fused.quantize(normalized, **wanted)
        # Other blocks add up a row's squares in another order, which moves a rounding here and there.
        assert torch.equal(total, added)
        torch.testing.assert_close(scales, wanted_scales)
        assert (values.float() == expected.float()).float().mean() > 0.99


def test_values_saturate_and_round_to_even():
    values = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 300.0, -300.0]], device=tritonite.device)
    one = torch.ones(1, device=tritonite.device)
    assert fused.quantize(values, INT8, "tensor", one)[0].tolist() == [[0, 2, 2, 0, -2, 126, 127, -128]]
    values = torch.tensor([[17.0, 19.0, 500.0, -1e9, 1e-9, 2.0**-10, 3 * 2.0**-10]], device=tritonite.device)
    expected = [[16.0, 20.0, 448.0, -448.0, 0.0, 0.0, 2.0**-8]]
    assert fused.quantize(values, FLOAT8, "tensor", one)[0].float().tolist() == expected


@pytest.mark.parametrize("granularity", ["token", "block", "tensor"])
def test_zeros_have_the_scale_zero(granularity):
    x = torch.zeros(2, 130, device=tritonite.device)
    x[1, :3] = 1e-44
    for dtype in (FLOAT8, INT8):
        values, scales = fused.quantize(x, dtype, granularity)
        assert not values.float().any() and not scales[0].any()


def test_nan_stays_nan_in_float8_alone():
    x = torch.tensor([[1.0, torch.nan, -2.0]], device=tritonite.device)
    values, scales = fused.quantize(x, FLOAT8)
    assert values.float().isnan().tolist() == [[False, True, False]] and scales.item() == torch.tensor(2.0 / 448).item()
    assert fused.quantize(x, INT8)[0].tolist() == [[64, 0, -127]]


def test_one_scale_of_many_programs(tiny_blocks):
    """The largest magnitude lies in the last row, or in the first, or is nan, which counts for nothing."""
    x = normal(40, 70)
    for row, value in ((39, -50.0), (0, 60.0), (20, torch.nan)):
        x[row, 3] = value
        (values, scale), largest = fused.quantize(x, FLOAT8, "tensor"), x.cpu().abs().nan_to_num().max()
        assert scale.cpu().item() == (largest / 448).item()
        assert values.float().nan_to_num().abs().max() == 448
    assert values.float().isnan().sum() == 1


def test_a_computed_scale_is_that_of_the_rounded_activation():
    """A product that float16 rounds to a larger number has the larger number's scale."""
    x, y = torch.full((1, 4), 1.001, device=tritonite.device).half(), torch.full((1, 4), 3.003, device=tritonite.device)
    y = y.half()
    for given in (x, x.float()):
        found = fused.swiglu_quantize(given, y.to(given.dtype), granularity="tensor")
        same(found, fused.quantize(fused.swiglu(given, y.to(given.dtype)), granularity="tensor"))


@pytest.mark.parametrize("granularity", ["token", "block", "tensor"])
def test_rows_at_any_stride(granularity):
    transposed, padded, expanded = normal(150, 3).t(), normal(3, 2, 153)[..., :150], normal(1, 150).expand(3, 150)
    for x in (transposed, padded, expanded, normal(4, 150, 3).transpose(1, 2)):
        same(fused.quantize(x, INT8, granularity), reference(x, INT8, granularity))
        same(fused.swiglu_quantize(x, granularity=granularity), fused.quantize(fused.swiglu(x), FLOAT8, granularity))
        same(
            fused.rms_norm_quantize(x, granularity=granularity)[:1],
            fused.quantize(fused.rms_norm(x), FLOAT8, granularity)[:1],
        )


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)])
@pytest.mark.parametrize(("dtype", "kind"), WANTED)
def test_no_elements(dtype, kind, shape):
    x, wanted = normal(*shape), {"dtype": dtype, **options(kind)}
    blocks = {"token": (*shape[:-1], 1), "block": (*shape[:-1], -(-shape[-1] // 128))}.get(kind, (1,))
    for values, scales, *_ in (
        fused.quantize(x, **wanted),
        fused.swiglu_quantize(x, x, **wanted),
        fused.rms_norm_quantize(x, residual=x, **wanted),
    ):
        assert values.shape == shape and values.dtype is dtype and scales.shape == blocks
        assert kind == "static" or not scales.any()


X = torch.zeros(2, 8)
ONE = torch.ones(1)
WRONG = [
    (fused.quantize, (X.double(),), "x is torch.float64"),
    (fused.quantize, (X[0, 0],), "needs a dimension"),
    (fused.quantize, (X, torch.int16), "dtype is torch.int16"),
    (fused.quantize, (X, INT8, "row"), "granularity is 'row'"),
    (fused.quantize, (X, INT8, "token", ONE), "give none"),
    (fused.quantize, (X, INT8, "tensor", ONE.half()), "scale is torch.float16"),
    (fused.quantize, (X, INT8, "tensor", X), "one element of float32"),
    (fused.swiglu_quantize, (X[:, :7],), "even"),
    (fused.swiglu_quantize, (X, X[:1]), "y has the shape"),
    (fused.rms_norm_quantize, (X, X[0, :7]), "weight has the shape"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("function", "args", "reason"), WRONG)
def test_wrong_arguments_are_refused(function, args, reason):
    for device in (tritonite.device, "meta"):
        with pytest.raises(Unsupported, match=reason):
            function(*[each.to(device) if isinstance(each, torch.Tensor) else each for each in args])


def test_gradients_are_refused():
    x = normal(2, 8, grad=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        fused.quantize(x)[1].sum().backward()


def _calls():
    x, weight, one = normal(2, 3, 8), normal(8), torch.ones(1, device=tritonite.device)
    yield library.quantize, (x, FLOAT8, "token")
    yield library.quantize, (x, INT8, "tensor", one)
    yield library.quantize, (x, INT8, "tensor")
    yield library.swiglu_quantize, (x, None, INT8, "block")
    yield library.swiglu_quantize, (x, x, FLOAT8, "tensor", one)
    yield library.rms_norm_quantize, (x, x, weight, 1e-6, 0.0, "llama", INT8, "token")
    yield library.rms_norm_quantize, (x, None, weight, 1e-6, 1.0, "gemma", FLOAT8, "tensor", one)
    yield library.rms_norm_quantize, (x, x, weight, 1e-6, 0.0, "llama", FLOAT8, "tensor")


@pytest.mark.parametrize("i", range(8))
def test_opcheck(i):
    function, args = list(_calls())[i]
    # opcheck compares by allclose, which float8 does not have.
    which = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(function, args, test_utils=which)


def test_compiled_graphs_give_the_same():
    def layer(x, weight):
        values, scales = fused.rms_norm_quantize(x, weight, dtype=INT8)
        return fused.swiglu_quantize(values * scales, granularity="block")

    operands = normal(3, 16), normal(16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    same(compiled(*operands), layer(*operands))


def test_vmap():
    x = normal(4, 3, 8)
    values, scales = torch.vmap(lambda x: fused.quantize(x, INT8))(x)
    same((values, scales), fused.quantize(x, INT8))
    for function in (fused.swiglu_quantize, lambda x: fused.rms_norm_quantize(x, residual=x)):
        same(torch.vmap(function, 1)(x), function(x.transpose(0, 1)))


def test_vmap_computes_a_scale_for_each_element():
    x = normal(4, 3, 8)
    for function in (fused.quantize, fused.swiglu_quantize, fused.rms_norm_quantize):
        own = lambda x, function=function: function(x, dtype=INT8, granularity="tensor")
        same(torch.vmap(own)(x), [torch.stack(each) for each in zip(*map(own, x), strict=True)])


def test_calls_are_replayed_by_the_native_dispatcher():
    """The test has a process of its own, because operators are registered once."""
    code = """
import torch, tritonite
from tritonite import fused
x, weight = (torch.randn(*shape).to(tritonite.device) for shape in ((3, 16), (16,)))
heads, angles, one = x.view(3, 2, 8), torch.rand(3, 3, 4).to(tritonite.device), weight[:1].abs()
for eps in (1e-6, 1e-3, 0.5):
    normalized = fused.rms_norm(x, weight, eps, offset=1.0)
    own, residual = x.clone(), torch.zeros_like(x)
    fused.add_rms_norm_(own, residual, weight, eps, 1.0)
    # Two operands may have other blocks than one, which add up squares in another order.
    torch.testing.assert_close(own, normalized)
    assert torch.equal(residual, x)
    values, scales = fused.rms_norm_quantize(x, weight, eps, offset=1.0, dtype=torch.int8)
    for found, expected in zip((values, scales), fused.quantize(normalized, torch.int8), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=int(found.dtype is torch.int8))
    fused.swiglu_quantize(x * eps, granularity="tensor")
    fused.multimodal_rotary_embedding(heads, heads, angles, angles, [2, 1, 1])
counts = tritonite.stats()
names = ("rms_norm", "add_rms_norm_", "rms_norm_quantize", "quantize", "swiglu_quantize", "multimodal_rotary_embedding")
for name in names:
    own = counts[f"tritonite::{name}"]
    assert (own.launched, own.replayed, own.unrecordable) == (1, 2, {}), (name, own)
"""
    scripts.run(code, TRITONITE_NATIVE="1")
