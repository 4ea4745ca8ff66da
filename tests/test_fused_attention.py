"""Attention with windows, soft caps and sinks against its definition in float64: values, gradients, layouts, errors."""

import functools
import math
import sys
from unittest import mock

import pytest
import scripts
import torch
from compositions import close, normal
from conftest import some

import tritonite
from tritonite import fused
from tritonite.engine.attention import decode, problem
from tritonite.engine.attention.backward import attention_backward
from tritonite.engine.attention.forward import attention
from tritonite.engine.attention.problem import Problem
from tritonite.engine.attention.table import Tile, Tiles
from tritonite.errors import Unsupported

library = torch.ops.tritonite
# The package has a function of the module's name.
attention_operators = sys.modules["tritonite.fused.attention"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture
def small_tiles(monkeypatch):
    """Make tiles so small that small operands have several, of different sizes along queries and keys."""
    tiles = Tiles(Tile(32, 16), Tile(16, 32), Tile(32, 16))
    monkeypatch.setattr(problem.table, "tiles", lambda *_: tiles)


def _visible(queries, keys, is_causal, window, device):
    """Return the mask of keys that queries see."""
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    distance = j - (i + keys - queries)
    left, right = (window - 1, 0) if isinstance(window, int) else window or (-1, -1)
    visible = distance <= (0 if is_causal else right if right >= 0 else keys + queries)
    return visible & (distance >= -left if left >= 0 else True)


def composition(query, key, value, sinks=None, is_causal=False, window=None, softcap=None, scale=None, attn_mask=None):
    ratio = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(ratio, -3), value.repeat_interleave(ratio, -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(query.shape[-2], key.shape[-2], is_causal, window, query.device)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    # A row that sees no key has a gradient of 0.
    scores = scores.masked_fill(~visible, -1e30)
    sink = scores.new_full((), -1e29) if sinks is None else sinks[:, None, None]
    every = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1)
    return every.softmax(-1)[..., :-1] * visible @ value


def operands(B=1, H=2, shared=1, L=20, S=24, D=8, V=None, dtype=torch.float32, sinks=False):
    """Return query, key, value and, if asked for, sinks, which require gradients."""
    shapes = [(B, H, L, D), (B, shared, S, D), (B, shared, S, V or D), *([(H,)] if sinks else [])]
    return [normal(*shape, dtype=dtype, grad=True) for shape in shapes]


def ours(query, key, value, sinks=None, **options):
    return fused.attention(query, key, value, sinks=sinks, **options)


def agree(given, options, function=ours, exact=composition):
    """Compare the result and its gradients by `given` with those of the composition in float64."""
    resolution = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}[given[0].dtype]
    wide = [each.detach().double().requires_grad_() for each in given]
    wanted = exact(*wide, **options)
    found = function(*given, **options)
    close(found.detach(), wanted.detach(), 1, resolution)
    grad = torch.randn_like(found)
    by_ours = torch.autograd.grad(found, given, grad)
    by_definition = torch.autograd.grad(wanted, wide, grad.double())
    for own, reference in zip(by_ours, by_definition, strict=True):
        # A gradient by a sink sums a term for each query.
        close(own, reference, 64 if own.dim() == 1 else 16, resolution)


WINDOWS = [None, 1, 7, 40, 1000, (0, 0), (5, 3), (-1, 2), (2, -1), (0, 30), (30, 0), (-1, -1)]
LENGTHS = [(20, 24), (70, 70), (45, 90), (90, 45), (1, 40), (33, 1)]


@pytest.mark.parametrize(
    ("lengths", "window", "is_causal", "softcap", "sinks", "dtype"),
    some(LENGTHS, WINDOWS, [False, True], [None, 2.0], [False, True], DTYPES, turns=2),
)
def test_options(lengths, window, is_causal, softcap, sinks, dtype, small_tiles):
    given = operands(L=lengths[0], S=lengths[1], dtype=dtype, sinks=sinks)
    agree(given, {"is_causal": is_causal, "window": window, "softcap": softcap})


@pytest.mark.smoke
def test_window_cap_and_sinks_together(small_tiles):
    given = operands(B=2, H=6, shared=3, L=50, S=60, D=5, V=7, sinks=True)
    agree(given, {"window": 20, "softcap": 1.5, "scale": -0.5})


@pytest.mark.smoke
def test_calls_without_options_are_ordinary_attention():
    given = operands(L=20, S=24)
    agree(given, {})
    expected = torch.nn.functional.scaled_dot_product_attention(*given, enable_gqa=True)
    torch.testing.assert_close(fused.attention(*given), expected)


def test_tiles_of_the_device():
    agree(operands(H=1, L=150, S=170, sinks=True), {"window": 30, "softcap": 3.0})


def moved(x, offset):
    """Return a copy of a tensor that begins `offset` elements into its memory."""
    memory = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)
    return memory[offset:].view(x.shape).copy_(x.detach()).requires_grad_()


SIZES = [(40, 32), (32, 40), (16, 100), (64, 128), (128, 33), (256, 128), (128, 200), (24, 24), (128, 128)]


@pytest.mark.parametrize(
    ("sizes", "dtype", "offset", "options"),
    some(SIZES, DTYPES, [0, 3], [{}, {"window": (-1, 4), "softcap": 5.0}, {"is_causal": True}], turns=2),
)
@pytest.mark.parametrize("lengths", [(40, 70), (2, 300)], ids=["tiles", "decoding"])
def test_values_of_other_sizes_than_keys(sizes, dtype, offset, options, lengths):
    """Tensors that are not aligned are copied by other instructions, into other layouts of shared memory."""
    given = operands(B=2, H=2, L=lengths[0], S=lengths[1], D=sizes[0], V=sizes[1], dtype=dtype)
    agree([moved(x, offset) for x in given], options)


@pytest.mark.parametrize("heads", [(3, 1), (6, 2), (5, 5)])
def test_heads_that_are_no_power_of_two(heads):
    agree(operands(2, *heads, L=9, S=11, D=20, V=12, sinks=True), {"window": (4, 1)})


@pytest.mark.parametrize("window", [3, (1, 4), (0, 100)])
@pytest.mark.parametrize("block", [15, 16, 17, 31, 32, 33, 64])
def test_windows_that_begin_and_end_at_blocks(window, block, small_tiles):
    # A window of the block's size on the given sides ends at its edges.
    sides = (block, 0) if window == 3 else (window[0] + block, window[1])
    agree(operands(H=1, L=66, S=66, D=4), {"window": sides})


@pytest.mark.parametrize("sizes", [(0, 2, 5, 6), (1, 2, 0, 6), (1, 2, 5, 0), (2, 0, 5, 6)])
def test_sizes_of_zero(sizes):
    B, H, L, S = sizes
    given = operands(B, H, 1, L, S, sinks=True)
    agree(given, {"window": 3, "softcap": 2.0})


def test_queries_that_see_no_key_get_zero(small_tiles):
    query, key, value = operands(L=40, S=10)
    out = fused.attention(query, key, value, window=3)
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert not out[:, :, :30].any() and not grads[0][:, :, :30].any()
    assert out[:, :, 30:].all() and all(torch.isfinite(grad).all() for grad in grads)


DECODED = [
    {"window": 20},
    {"softcap": 2.0},
    {},
    {"window": (300, 0), "softcap": 30.0},
    {"window": (7, 2), "is_causal": True},
    {"window": (0, 0), "scale": -0.6},
]


@pytest.mark.parametrize(("options", "queries", "dtype"), some(DECODED, [1, 3], DTYPES, turns=1))
@pytest.mark.parametrize("sinks", [False, True])
def test_few_queries_of_many_keys(options, queries, dtype, sinks, monkeypatch):
    """Calls are decoded in splits. Gradients follow from the logsumexp that decoding stores."""
    decoded = mock.Mock(wraps=attention_operators.decode)
    monkeypatch.setattr(attention_operators, "decode", decoded)
    monkeypatch.setattr(decode.table, "keys_of_split", lambda *_: 128)
    agree(operands(H=4, shared=2, L=queries, S=260, D=8, dtype=dtype, sinks=sinks), options)
    assert decoded.call_count == 1


@pytest.mark.parametrize("path", ["native", "python"])
def test_decoding_goes_either_path(path):
    """The test has a process of its own, because operators are registered once."""
    code = """
import tritonite
from test_fused_attention import agree, operands

given = operands(H=4, shared=2, L=1, S=300, sinks=True)
for scale in (0.3, -0.5):
    agree(given, {"window": 20, "softcap": 2.0, "scale": scale})
counts = tritonite.stats()["tritonite::attention"]
print("launched", counts.launched, "replayed", counts.replayed, "declined", sum(counts.declined.values()))
"""
    output = scripts.run(code, TRITONITE_NATIVE=str(int(path == "native")))
    expected = "launched 1 replayed 1" if path == "native" else "launched 2 replayed 0"
    assert output.strip() == f"{expected} declined 0"


def test_sinks_of_infinity_count_for_nothing():
    given = operands(L=5, S=6)
    sinks = torch.full((2,), -math.inf, device=tritonite.device)
    torch.testing.assert_close(ours(*given, sinks, is_causal=True), ours(*given, is_causal=True))


def test_large_scores_reach_the_cap():
    given = [each.detach() * 100 for each in operands(L=6, S=7)]
    exact = composition(*(each.double() for each in given), softcap=5.0)
    close(ours(*given, softcap=5.0), exact, 1, 1e-4)


MASKS = [
    lambda query: torch.randn(20, 24, device=query.device),
    lambda query: torch.randn(2, 1, 1, 24, device=query.device),
    lambda query: torch.randn(2, 20, 24, device=query.device) > 0,
    lambda query: torch.tensor([True] * 20 + [False] * 4, device=query.device),
]


@pytest.mark.parametrize(
    ("sizes", "queries", "dtype"), some([(40, 7), (64, 32), (30, 60)], [1, 33], DTYPES, turns=2), ids=str
)
def test_heads_and_values_of_different_sizes_by_tiles_of_the_device(sizes, queries, dtype):
    given = operands(2, 3, 1, queries, 300, *sizes, dtype=dtype, sinks=True)
    mask = torch.randn(2, 3, queries, 300, device=tritonite.device) > -1
    agree(given, {"softcap": 5.0, "attn_mask": mask})


@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 2.0}])
@pytest.mark.parametrize("mask", range(len(MASKS)))
def test_masks(mask, options, small_tiles):
    given = operands(2, sinks=True)
    agree(given, options | {"attn_mask": MASKS[mask](given[0])})


def test_masks_of_the_lowest_number_with_a_window_and_sinks(small_tiles):
    # All keys of a row have the same lowest score, so its probabilities depend on the rounding of logsumexp.
    given = operands(L=40, S=40, D=4)
    mask = torch.full((40, 40), torch.finfo(torch.float32).min, device=tritonite.device)
    sinks = torch.full((2,), -math.inf, device=tritonite.device)
    out = fused.attention(*given, window=20, attn_mask=mask, sinks=sinks)
    mean = _visible(40, 40, False, 20, out.device).double()
    mean /= mean.sum(1, keepdim=True)
    close(out.detach(), mean @ given[2].detach().double().expand_as(out), 1, 1e-5)
    (by_value,) = torch.autograd.grad(out, given[2], torch.ones_like(out))
    close(by_value, 2 * mean.sum(0)[:, None].expand(1, 1, 40, 4), 1, 1e-4)


def test_gradient_of_a_bias_is_zero_outside_the_window(small_tiles):
    query, key, value = (each.detach() for each in operands(L=70, S=70, H=1))
    bias = normal(1, 1, 70, 70)
    work = Problem(query, key, value, bias, None, True, 0, "ieee", window=25, softcap=2.0)
    out, logsumexp, grad = torch.empty_like(query), query.new_empty(1, 1, 70), torch.randn_like(query)
    attention(work, out, logsumexp)
    grads, by_bias = [torch.empty_like(each) for each in (query, key, value)], torch.full_like(bias, math.nan)
    attention_backward(work, grad, out, logsumexp, tuple(grads), by_bias)
    wide = bias.double().requires_grad_()
    exact = composition(*(each.double() for each in (query, key, value)), window=25, softcap=2.0, attn_mask=wide)
    close(by_bias, torch.autograd.grad(exact, wide, grad.double())[0], 16, 2e-5)


def test_strided_operands():
    # (batch, rows, heads, elements) of one product, elements that are not contiguous, and expanded keys.
    packed = normal(2, 9, 4, 8, grad=True)

    def split(packed):
        views = packed.transpose(1, 2)
        return views[:, :2], views[:, 2:3], views[:, 3:]

    function = lambda packed, **options: fused.attention(*split(packed), **options)
    agree([packed], {"window": 4}, function, lambda packed, **options: composition(*split(packed), **options))
    flipped = [normal(1, 2, 8, 9).mT for _ in range(3)]
    close(fused.attention(*flipped, window=4), composition(*(each.double() for each in flipped), window=4), 1, 2e-5)
    query, key = normal(3, 2, 5, 8), normal(1, 1, 5, 1).expand(3, 2, 5, 8)
    close(fused.attention(query, key, key, window=2), composition(query.double(), key.double(), key.double(), window=2))


@pytest.mark.parametrize("lead", [(), (2, 3), (2, 1, 2)])
def test_leading_dimensions(lead):
    shapes = (*lead, 4, 5, 8), (*lead, 2, 6, 8), (*lead, 2, 6, 8), (4,)
    agree([normal(*shape, grad=True) for shape in shapes], {"window": 3})


def test_memory_is_ordered_as_heads_of_rows():
    query, key, value = operands(2, L=5, S=5)
    out = fused.attention(query, key, value)
    assert out.transpose(1, 2).is_contiguous()
    assert all(grad.transpose(1, 2).is_contiguous() for grad in torch.autograd.grad(out.sum(), (query, key, value)))


def test_results_are_the_same_bits_every_time(small_tiles):
    given = operands(B=2, L=60, S=60, sinks=True)

    def call():
        out = ours(*given, window=20, softcap=2.0)
        return out, *torch.autograd.grad(out, given, torch.ones_like(out))

    assert all(torch.equal(first, second) for first, second in zip(call(), call(), strict=True))


QUERY, KEY = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 6, 8)
WRONG = [
    ((QUERY, KEY, KEY), {"window": 0}, "window is 0"),
    ((QUERY, KEY, KEY), {"window": (1, -2)}, "window is"),
    ((QUERY, KEY, KEY), {"window": (1, 2, 3)}, "window is"),
    ((QUERY, KEY, KEY), {"softcap": -1.0}, "softcap is -1.0"),
    ((QUERY, KEY, KEY), {"softcap": math.inf}, "softcap is inf"),
    ((QUERY, KEY, KEY), {"sinks": torch.zeros(3)}, "sinks has the shape"),
    ((QUERY, KEY, KEY), {"sinks": torch.zeros(4, dtype=torch.float16)}, "sinks is torch.float16"),
    ((QUERY, KEY, KEY), {"attn_mask": torch.zeros(6, 5)}, "attn_mask has the shape"),
    ((QUERY, KEY, KEY), {"attn_mask": torch.zeros(5, 6, dtype=torch.int32)}, "attn_mask is torch.int32"),
    ((QUERY, KEY, KEY[..., :4, :]), {}, "value has the shape"),
    ((QUERY, KEY[..., :7], KEY), {}, "key has the shape"),
    ((QUERY[:, :3], KEY, KEY), {}, "key has 2 heads"),
    ((QUERY[0, 0], KEY, KEY), {}, "query has the shape"),
    ((QUERY, KEY.half(), KEY), {}, "key is torch.float16"),
    ((QUERY.double(), KEY.double(), KEY.double()), {}, "float64"),
    ((torch.zeros(1, 1, 1, 300),) * 3, {}, "1 to 256"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("args", "options", "reason"), WRONG)
def test_wrong_arguments_are_refused(args, options, reason):
    for device in (tritonite.device, "meta"):
        moved = [x.to(device) for x in args]
        given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        with pytest.raises(Unsupported, match=reason):
            fused.attention(*moved, **given)


def test_masks_have_no_gradient():
    with pytest.raises(Unsupported, match="detach"):
        fused.attention(*operands(L=5, S=6), attn_mask=normal(5, 6, grad=True))


OPTIONS = [(False, None, None, None), (True, 3, None, 2.0), (False, 2, 2, None)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_opcheck(options, with_sinks):
    query, key, value, sinks = operands(L=5, S=6, sinks=True)
    sinks = sinks if with_sinks else None
    torch.library.opcheck(library.attention, (query, key, value, *options, sinks, 0.3))
    tensors = [each.detach() for each in (query, key, value)]
    sinks = None if sinks is None else sinks.detach()
    out, logsumexp = library.attention(*tensors, *options, sinks, 0.3)
    given = (torch.randn_like(out), *tensors, out, logsumexp, *options, sinks, 0.3, None)
    torch.library.opcheck(library.attention_backward, given)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic):
    given = operands(L=5, S=6, sinks=True)
    function = functools.partial(ours, window=3, softcap=2.0)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected, actual = function(*given), compiled(*given)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    grad = torch.randn_like(expected)
    pairs = zip(torch.autograd.grad(actual, given, grad), torch.autograd.grad(expected, given, grad), strict=True)
    for own, eager in pairs:
        torch.testing.assert_close(own, eager, rtol=0, atol=0)


@pytest.mark.parametrize("dims", [(0, 0, 0, None), (0, None, 1, None), (None, 0, 0, 0)])
def test_vmap(dims):
    tensors = normal(2, 1, 4, 5, 8), normal(2, 1, 2, 6, 8), normal(2, 1, 2, 6, 8), normal(2, 4)
    given = [x.movedim(0, dim) if dim is not None else x[0] for x, dim in zip(tensors, dims, strict=True)]
    function = functools.partial(ours, window=3)
    each = [
        function(*[x if dim is None else x.select(dim, i) for x, dim in zip(given, dims, strict=True)])
        for i in range(2)
    ]
    torch.testing.assert_close(torch.vmap(function, dims)(*given), torch.stack(each))
