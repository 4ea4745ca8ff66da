"""Attention against its definition in float64, and against ATen's kernel for CPUs."""
# Over 500 lines: every backend's forward and backward calls share the references and fixtures here.

import itertools
import math

import pytest
import torch
from conftest import FULL, covering

import tritonite
from tritonite import devices
from tritonite.engine.attention import problem
from tritonite.engine.attention.backward import attention_backward
from tritonite.engine.attention.forward import attention
from tritonite.engine.attention.problem import Problem
from tritonite.engine.attention.table import Tile, Tiles
from tritonite.errors import Decline
from tritonite.runtime import contract
from tritonite.testing.judge import to_reference
from tritonite.testing.samples import REFERENCES, samples

_ATEN = torch.ops.aten
_CPU = "_scaled_dot_product_flash_attention_for_cpu"
only_cpu = pytest.mark.skipif(devices.current.type != "cpu", reason="ATen has this overload on CPUs alone")


@pytest.fixture
def small_tiles(monkeypatch):
    """Make tiles so small that small operands have several, of different sizes along queries and keys."""
    tiles = Tiles(Tile(32, 16), Tile(16, 32), Tile(32, 16))
    monkeypatch.setattr(problem.table, "tiles", lambda *_: tiles)


def _drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=tritonite.device).to(dtype)


def _operands(B=1, H=2, shared=2, S=20, T=24, D=16, V=None, dtype=torch.float32):
    shapes = ((B, H, S, D), (B, shared, T, D), (B, shared, T, V or D))
    return [_drawn(*shape, dtype=dtype) for shape in shapes]


def _by_definition(query, key, value, bias=None, causal=False, diagonal=0, scale=None):
    """Return (result, logsumexp) in float64. For rows that see no key both are 0."""
    ratio = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(ratio, 1), value.repeat_interleave(ratio, 1)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[3]) if scale is None else scale)
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device)
    if causal:
        seen = seen.tril(diagonal)
    if bias is not None and bias.dtype is torch.bool:
        seen = seen & bias
    elif bias is not None:
        scores = scores + bias
    # A row that sees no key has a gradient of 0.
    shares = scores.masked_fill(~seen, -1e30).softmax(-1) * seen
    logarithms = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    return shares @ value, logarithms.masked_fill(logarithms == -torch.inf, 0)


def _check(query, key, value, bias=None, causal=False, diagonal=0, scale=None, far=1e-5):
    """Run both passes of the engine with outputs in memory of nan, and compare them with the definition."""
    work = Problem(query, key, value, bias, scale, causal, diagonal, "ieee")
    out = query.new_full((*query.shape[:3], value.shape[3]), math.nan)
    logsumexp = torch.full(query.shape[:3], math.nan, device=query.device)
    attention(work, out, logsumexp, "0")
    wide = [x.detach().double().requires_grad_() for x in (query, key, value)]
    added = bias if bias is None or bias.dtype is torch.bool else bias.double()
    result, logarithms = _by_definition(*wide, added, causal, diagonal, scale)
    torch.testing.assert_close(out.double(), result.detach(), atol=far, rtol=far)
    torch.testing.assert_close(logsumexp.double(), logarithms.detach(), atol=1e-5, rtol=1e-5)
    grad = _drawn(*out.shape, dtype=query.dtype)
    grads = tuple(torch.full_like(x, math.nan) for x in (query, key, value))
    attention_backward(work, grad, out, logsumexp, grads)
    for own, expected in zip(grads, torch.autograd.grad(result, wide, grad.double()), strict=True):
        torch.testing.assert_close(own.double(), expected, atol=4 * far, rtol=far)
    return grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_several_tiles(small_tiles, dtype, causal):
    far = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    B, H = (2, 4) if FULL else (1, 2)
    _check(*_operands(B=B, H=H, S=70, T=70, D=16, dtype=dtype), causal=causal, far=far)


@pytest.mark.parametrize("causal", [False, True])
def test_bfloat16_terms_of_float32(small_tiles, monkeypatch, causal):
    """Only the first bfloat16 term of infinity is infinite, and all terms of nan are nan, as tensor cores need."""
    monkeypatch.setattr(problem, "dot_precision", lambda precision, query: "bf16x6")
    query, key, value = _operands(S=70, T=70)
    _check(query, key, value, causal=causal)
    key[0, 0, 3, 5], query[..., 5] = math.inf, -1
    value[0, 1].view(torch.int32)[4, 2] = 0x7F800001
    out = torch.empty_like(query)
    attention(Problem(query, key, value, None, None, causal, 0, "ieee"), out, None, "0")
    expected, _ = _by_definition(*[x.double() for x in (query, key, value)], causal=causal)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("S", "T", "diagonal"), [(40, 90, 0), (90, 40, 0), (40, 90, 50), (90, 40, -50), (1, 33, 32)])
def test_causal_of_unequal_lengths(small_tiles, S, T, diagonal):
    """With a diagonal below the first key, the first rows see no key."""
    _check(*_operands(H=4, S=S, T=T), causal=True, diagonal=diagonal)


@pytest.mark.parametrize(("D", "V"), [(8, 8), (24, 40), (80, 16), (1, 3), (130, 256)])
def test_sizes_of_heads(D, V):
    _check(*_operands(S=17, T=19, D=D, V=V))


@pytest.mark.parametrize(("D", "V"), [(16, 16), (80, 16), (8, 256)])
def test_narrow_heads_with_wide_ones_are_padded(D, V):
    """Products on Hopper need 32 columns, and tiles of one kernel similar sizes."""
    query, key, value = _operands(D=D, V=V)
    work = Problem(query, key, value, None, None, False, 0, "ieee")
    meta = work.meta(work.tiles.key)
    narrow, wide = sorted((meta.block_d, meta.block_v))
    assert meta.block_d >= D and meta.block_v >= V and narrow >= 32 and wide <= 2 * narrow


@pytest.mark.parametrize("causal", [False, True])
def test_heads_that_share_keys(small_tiles, causal):
    _check(*_operands(B=2, H=6, shared=2, S=45, T=45), causal=causal)


@pytest.mark.parametrize(
    ("shape", "mask"), covering(2, [(2, 4, 40, 50), (2, 1, 1, 50), (1, 4, 40, 1), (1, 1, 40, 50)], [False, True])
)
def test_bias(small_tiles, shape, mask):
    bias = _drawn(*shape)
    bias = (bias > 0) if mask else bias
    _check(*_operands(B=2, H=4, S=40, T=50), bias=bias.expand(2, 4, 40, 50))


def test_bias_of_any_strides(small_tiles):
    _check(*_operands(S=20, T=24), bias=_drawn(1, 2, 24, 41)[..., 1::2].mT, causal=True)


def test_rows_that_see_no_key(small_tiles):
    bias = torch.zeros(1, 2, 40, 50, device=tritonite.device)
    bias[:, :, 3] = -math.inf
    bias[:, :, 35:, :20] = -math.inf
    query, key, value = _operands(S=40, T=50)
    _check(query, key, value, bias=bias == 0)
    work = Problem(query, key, value, bias, None, False, 0, "ieee")
    out, logsumexp = torch.empty_like(query), query.new_empty(query.shape[:3])
    for empty, expected in (("0", 0.0), ("inf", math.inf)):
        attention(work, out, logsumexp, empty)
        assert out[:, :, 3].eq(0).all() and logsumexp[:, :, 3].eq(expected).all()
        grads = [torch.full_like(x, math.nan) for x in (query, key, value)]
        attention_backward(work, out, out, logsumexp, grads)
        assert grads[0][:, :, 3].eq(0).all() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_scale(small_tiles, scale):
    _check(*_operands(S=40, T=40), causal=True, scale=scale)


@pytest.mark.parametrize("views", ["heads side by side", "packed"])
def test_layouts(small_tiles, views):
    if views == "packed":
        query, key, value = _drawn(2, 33, 3, 4, 16).permute(2, 0, 3, 1, 4)
    else:
        query, key, value = [_drawn(2, 33, 4, 16).transpose(1, 2) for _ in range(3)]
    _check(query, key, value, causal=True)


def test_same_bits_each_time(small_tiles):
    query, key, value = _operands(H=4 if FULL else 2, S=70, T=70)
    torch.manual_seed(1)
    first = _check(query, key, value)
    torch.manual_seed(1)
    assert all(map(torch.equal, first, _check(query, key, value)))


def _call(*operands, causal=False, mask=None, scale=None):
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(*operands, 0.0, causal, attn_mask=mask, scale=scale)


@only_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_at_most_1_2_times_atens(dtype, causal):
    """Errors are root mean squares against float64."""
    query, key, value = _operands(H=4, shared=2, S=64, T=64, D=64, dtype=dtype)
    grad = _drawn(*query.shape, dtype=dtype)
    ops = tritonite.overloads()
    wide = [x.double().requires_grad_() for x in (query, key, value)]
    exact, _ = _by_definition(*wide, causal=causal)
    exacts = (exact.detach(), *torch.autograd.grad(exact, wide, grad.double()))
    errors = []
    for forward, backward in (
        (getattr(_ATEN, _CPU), getattr(_ATEN, f"{_CPU}_backward")),
        (ops[_CPU], ops[f"{_CPU}_backward"]),
    ):
        out, logsumexp = forward(query, key, value, 0.0, causal)
        grads = backward(grad, query, key, value, out, logsumexp, 0.0, causal)
        found = zip((out, *grads), exacts, strict=True)
        errors.append([(own.double() - other).square().mean().sqrt().item() for own, other in found])
    for i, (aten, own) in enumerate(zip(*errors, strict=True)):
        assert own <= 1.2 * aten, i


@only_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_through_the_dispatcher(path, dtype):
    """Calls are recorded, and replayed with another scale. Values, layouts and declines are compared."""
    query, key, value = [x.requires_grad_() for x in _operands(B=2, H=4, shared=2, S=20, T=20, dtype=dtype)]
    mask = _drawn(20, 20)
    wide = [x.detach().double().requires_grad_() for x in (query, key, value)]

    def results(given, mask, scale):
        out, logsumexp = _call(*given, causal=True, mask=mask, scale=scale)
        return out, logsumexp, *torch.autograd.grad(out.square().sum(dtype=mask.dtype), given)

    for scale in (0.25, 0.5):
        with tritonite.use_gems(include=[_CPU, f"{_CPU}_backward"]):
            found = results((query, key, value), mask, scale)
        expected, exact = results((query, key, value), mask, scale), results(wide, mask.double(), scale)
        far = 1e-5 if dtype is torch.float32 else 0.1
        for own, other, precise in zip(found, expected, exact, strict=True):
            torch.testing.assert_close(own.double(), precise.double(), atol=far, rtol=far)
            assert (own.dtype, own.stride()) == (other.dtype, other.stride())
    for name in (_CPU, f"{_CPU}_backward"):
        counts = tritonite.stats()[name]
        assert not counts.unrecordable and not counts.declined
        assert (counts.launched, counts.replayed) == ((1, 1) if path == "native" else (2, 0))


@only_cpu
def test_sdpa_reaches_the_operators():
    query, key, value = _operands()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    with tritonite.use_gems(include=[_CPU]):
        own = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert tritonite.stats()[_CPU].launched == 1
    torch.testing.assert_close(own, expected)


@only_cpu
@pytest.mark.parametrize(("S", "T"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences(S, T):
    """ATen's kernel for CPUs crashes the process."""
    ops = tritonite.overloads()
    query, key, value = _operands(S=S, T=T)
    out, logsumexp = ops[_CPU](query, key, value)
    assert out.shape == query.shape and out.eq(0).all() and logsumexp.eq(0).all()
    for grad, operand in zip(
        ops[f"{_CPU}_backward"](out, query, key, value, out, logsumexp, 0.0, False), (query, key, value), strict=True
    ):
        assert grad.shape == operand.shape and grad.eq(0).all()


@only_cpu
def test_strided_operands_that_aten_misreads():
    """ATen's kernel for CPUs assumes contiguous heads in all operands but the gradient of the result."""
    op = tritonite.overloads()[f"{_CPU}_backward"]
    query, key, value = _operands()
    out, logsumexp = tritonite.overloads()[_CPU](query, key, value)
    strided = out.mT.contiguous().mT
    with pytest.raises(Decline):
        op(out, query, key, value, strided, logsumexp, 0.0, False)
    expected = op(out, query, key, value, out, logsumexp, 0.0, False)
    assert all(map(torch.equal, op(strided, query, key, value, out, logsumexp, 0.0, False), expected))


@only_cpu
def test_declines():
    op = tritonite.overloads()[_CPU]
    query, key, value = _operands()
    for arguments in (
        (query, key, value, 0.5),
        (query.double(), key.double(), value.double()),
        (query.mT.contiguous().mT, key, value),
        (_drawn(1, 3, 20, 16), key, value),
        (query, key, value[:, :, :-1]),
    ):
        with pytest.raises(Decline):
            op(*arguments)


@pytest.mark.parametrize("causal", [False, True])
def test_flash(causal):
    """The last query sees all keys."""
    ops = tritonite.overloads()
    name = "_scaled_dot_product_flash_attention"
    query, key, value = _operands(H=4, shared=2, S=20, T=33, dtype=torch.float16)
    results = ops[name](query, key, value, 0.0, causal)
    out, logsumexp, *rest = results
    expected, logarithms = _by_definition(*[x.double() for x in (query, key, value)], causal=causal, diagonal=13)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(logsumexp.double(), logarithms, atol=1e-5, rtol=1e-5)
    assert rest[:4] == [None, None, 20, 33] and rest[6].shape == (0,)
    assert (rest[4].shape, rest[4].dtype, rest[5].shape) == ((2,), torch.uint64, ())
    grads = ops[f"{name}_backward"](
        *(out, query, key, value, out, logsumexp, None, None, 20, 33, 0.0, causal, rest[4], rest[5])
    )
    assert [grad.shape for grad in grads] == [x.shape for x in (query, key, value)]


def test_efficient():
    """Logarithms are padded with infinity to a multiple of 32 rows, and heads of the result are interleaved."""
    ops = tritonite.overloads()
    name = "_scaled_dot_product_efficient_attention"
    query, key, value = _operands(S=20, T=24, D=16, V=32)
    bias = _drawn(1, 1, 20, 24).expand(1, 2, 20, 24)
    out, logsumexp, seed, offset = ops[name](query, key, value, bias, True)
    expected, logarithms = _by_definition(*[x.double() for x in (query, key, value, bias)])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert logsumexp.shape == (1, 2, 32) and logsumexp[:, :, 20:].eq(math.inf).all()
    torch.testing.assert_close(logsumexp[:, :, :20].double(), logarithms, atol=1e-5, rtol=1e-5)
    assert out.transpose(1, 2).is_contiguous() and ops[name](query, key, value, bias, False)[1].shape == (1, 2, 0)
    given = (out, query, key, value, bias, out, logsumexp, seed, offset, 0.0)
    grads = ops[f"{name}_backward"](*given, [True, True, True, False])
    assert grads[3] is None and grads[2].transpose(1, 2).is_contiguous()
    assert seed.device == offset.device == torch.device("cpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T", [50, 90])
def test_gradient_of_a_bias(small_tiles, causal, T):
    """The gradient is 0 for masked scores, and its rows are padded to a multiple of 16 elements."""
    op = tritonite.overloads()["_efficient_attention_backward"]
    query, key, value = [x.transpose(1, 2) for x in _operands(H=2, S=40, T=T)]
    bias, grad = _drawn(1, 2, 40, 104)[..., :T], _drawn(1, 40, 2, 16)
    forward = tritonite.overloads()["_efficient_attention_forward"]
    out, logsumexp, *state = forward(query, key, value, bias, None, None, None, None, 0.0, int(causal), True)
    given = (grad, query, key, value, bias, out, None, None, 40, T, logsumexp, 0.0, *state[:2], int(causal))
    found = op(*given, True)
    assert op(*given, False)[3] is None
    wide = [x.double().requires_grad_() for x in (query, key, value, bias)]
    rows = [x.transpose(1, 2) for x in wide[:3]]
    exact, _ = _by_definition(*rows, wide[3], causal)
    for own, expected in zip(found, torch.autograd.grad(exact.transpose(1, 2), wide, grad.double()), strict=True):
        torch.testing.assert_close(own.double(), expected, atol=4e-5, rtol=1e-5)
    assert found[3].shape == bias.shape and found[3].stride(2) == -(-T // 16) * 16


LENGTHS = [(5, 7), (0, 3), (33, 36), (17, 17), (12, 0), (1, 50)]


def _starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=tritonite.device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_packed_sequences(small_tiles, kind, causal):
    """Each sequence has its result alone. Nothing of other sequences or behind the last one is read or written."""
    ops = tritonite.overloads()
    dtype, shared, far = (torch.float16, 2, 4e-3) if kind == "flash" else (torch.float32, 4, 1e-5)
    S, T = (sum(lengths) for lengths in zip(*LENGTHS, strict=True))
    starts = [_starts(lengths) for lengths in zip(*LENGTHS, strict=True)]
    query, key, value = [x.transpose(1, 2) for x in _operands(H=4, shared=shared, S=S + 3, T=T + 2, dtype=dtype)]
    for tensor, count in ((query, S), (key, T), (value, T)):
        tensor[:, count:] = math.nan
    grad = _drawn(*query.shape, dtype=dtype)
    if kind == "flash":
        operands = [x[0] for x in (query, key, value)]
        results = ops["_flash_attention_forward"](*operands, *starts, 33, 50, 0.0, causal, False)
        out, logsumexp, *state = results
        given = (grad[0], *operands, out, logsumexp, *starts, 33, 50, 0.0, causal, *state[:2])
        grads = ops["_flash_attention_backward"](*given)
        out, grads, logsumexp = out[None], [x[None] for x in grads], logsumexp[None]
    else:
        operands = (query, key, value)
        results = ops["_efficient_attention_forward"](*operands, None, *starts, 33, 50, 0.0, int(causal), True)
        out, logsumexp, *state = results
        assert state[2:] == [33, 50] and logsumexp.shape == (len(LENGTHS), 4, 64)
        given = (grad, *operands, None, out, *starts, 33, 50, logsumexp, 0.0, *state[:2], int(causal), False)
        *grads, of_bias = ops["_efficient_attention_backward"](*given)
        assert of_bias is None
    empty = math.inf if kind == "flash" else 0.0
    for i, (rows, keys) in enumerate(LENGTHS):
        (first, first_key) = (int(each[i]) for each in starts)
        own = [
            x[:, begin : begin + count].double().transpose(1, 2).requires_grad_()
            for x, begin, count in ((query, first, rows), (key, first_key, keys), (value, first_key, keys))
        ]
        diagonal = keys - rows if kind == "flash" else 0
        exact, logarithms = _by_definition(*own, causal=causal, diagonal=diagonal)
        given = grad[:, first : first + rows].double().transpose(1, 2)
        found = (
            out[:, first : first + rows],
            *(
                x[:, begin : begin + count]
                for x, begin, count in zip(grads, (first, first_key, first_key), (rows, keys, keys), strict=True)
            ),
        )
        exacts = (exact.detach(), *torch.autograd.grad(exact, own, given, allow_unused=True))
        for actual, expected in zip(found, exacts, strict=True):
            torch.testing.assert_close(actual.double().transpose(1, 2), expected, atol=4 * far, rtol=far)
        logs = logsumexp[:, :, first : first + rows] if kind == "flash" else logsumexp[i : i + 1, :, :rows]
        expected = logarithms.masked_fill(torch.tensor(keys == 0, device=logs.device), empty)
        torch.testing.assert_close(logs.double(), expected.detach(), atol=1e-4, rtol=1e-5)
        if kind == "efficient":
            assert logsumexp[i, :, rows : -(-rows // 32) * 32].eq(math.inf).all()


def _samples(op):
    """Yield samples in float16; without the full set each layout once, alternately causal or not."""
    return [each for i, each in enumerate(samples(op, torch.float16, tritonite.device)) if FULL or i % 4 in (0, 3)]


def _on_meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _with_atens_layouts(name, samples, found):
    """Assert that results have the dtypes, shapes and strides of ATen's fake functions, which have no device "cpu"."""
    count = 0
    for sample, results in zip(samples, found, strict=True):
        expected = getattr(torch.ops.aten, name)(*map(_on_meta, sample.args), **sample.kwargs)
        for own, aten in zip(results, expected, strict=True):
            count += isinstance(aten, torch.Tensor)
            if isinstance(aten, torch.Tensor):
                assert (own.dtype, own.shape) == (aten.dtype, aten.shape), sample.label
                varying = [i for i, size in enumerate(aten.shape) if size > 1]
                assert [own.stride(i) for i in varying] == [aten.stride(i) for i in varying], sample.label
            else:
                assert own == aten
    assert count > 20


@pytest.mark.parametrize(
    "name", ["_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward"]
)
def test_layouts_of_packed_results_are_atens(name):
    op = tritonite.overloads()[name]
    chosen = _samples(op)
    _with_atens_layouts(name, chosen, [op(*sample.args, **sample.kwargs) for sample in chosen])


@pytest.mark.parametrize("name", ["flash_attention_forward", "efficient_attention_forward"])
def test_packed_attention_declines_options_that_aten_has(name):
    op = tritonite.overloads()[f"_{name}"]
    sample = next(iter(samples(op, torch.float16, tritonite.device)))
    given = dict(zip(op.names, sample.args, strict=False)) | sample.kwargs
    others = {"window_size_left": 3, "alibi_slopes": given["query"], "window_size": 4, "seqlen_k": given["query"]}
    for argument, value in {"dropout_p": 1.0, "return_debug_mask": True, "custom_mask_type": 3, **others}.items():
        if argument in op.names:
            with pytest.raises(Decline):
                op(**{**given, argument: value})


def test_cudnn():
    ops = tritonite.overloads()
    name = "_scaled_dot_product_cudnn_attention"
    query, key, value = _operands(H=4, shared=2, S=20, T=24, D=16, V=32, dtype=torch.bfloat16)
    out, logsumexp, *rest = ops[name](query, key, value, None, True, 0.0, True)
    expected, logarithms = _by_definition(*[x.double() for x in (query, key, value)], causal=True)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(logsumexp.double(), logarithms[..., None], atol=1e-5, rtol=1e-5)
    given = (out, query, key, value, out, logsumexp, rest[4], rest[5], None, None, None, 20, 24, 0.0, True)
    grads = ops[f"{name}_backward"](*given)
    assert [grad.shape for grad in grads] == [x.shape for x in (query, key, value)]
    same = ops["_cudnn_attention_forward"](query, key, value, None, None, None, 20, 24, True, 0.0, True)
    assert torch.equal(same[0], out) and torch.equal(same[1], logsumexp)
    for grad, other in zip(grads, ops["_cudnn_attention_backward"](*given), strict=True):
        assert torch.equal(grad, other)


@pytest.mark.parametrize("suffix", ["", "_backward"])
@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_cuda_only_operators_have_atens_layouts_and_the_references_values(kind, suffix):
    """The references judge samples on a GPU, where ATen has no attention in float64."""
    name = f"_scaled_dot_product_{kind}_attention{suffix}"
    op = tritonite.overloads()[name]
    chosen = _samples(op)
    found = [op(*sample.args, **sample.kwargs) for sample in chosen]
    _with_atens_layouts(name, chosen, found)
    for sample, results in zip(chosen, found, strict=True):
        wide = sample.map(to_reference)
        exacts = REFERENCES[op.packet](*wide.args, **wide.kwargs)
        assert len(results) == len(exacts)
        for own, exact in zip(results, exacts, strict=True):
            if exact is not None:
                torch.testing.assert_close(own.double(), exact, atol=2e-2, rtol=2e-2)


@only_cpu
@pytest.mark.parametrize("suffix", ["", "_backward"])
@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_calls_that_atens_backend_serves_faster_decline(kind, suffix, change_device, monkeypatch):
    """The comparison is with the backend and the pass of the operator that is called."""
    asked = []
    monkeypatch.setattr(
        problem.table, "aten_is_faster", lambda backend, *given: asked.append((backend, given[0])) or True
    )
    change_device(kind="nvidia")
    monkeypatch.setattr(devices, "has_wgmma", lambda device: True)
    op = tritonite.overloads()[f"_scaled_dot_product_{kind}_attention{suffix}"]
    sample = next(iter(samples(op, torch.float16, tritonite.device)))
    with (
        contract.under(contract.settings_of()._replace(faster_only=True)),
        pytest.raises(Decline, match="ATen is faster here"),
    ):
        op(*sample.args, **sample.kwargs)
    assert {backend for backend, _ in asked} == {kind}
    assert ("backward" in asked[-1][1]) if suffix else asked


@only_cpu
def test_devices_without_measurements_decline(change_device):
    """A device without measurements of its own declines where ATen is faster on other devices."""
    change_device(aten_measured=True)
    operands = _operands()
    with (
        contract.under(contract.settings_of()._replace(faster_only=True)),
        pytest.raises(Decline, match="ATen is faster here"),
    ):
        tritonite.overloads()[_CPU](*operands)
    tritonite.overloads()[_CPU](*operands)


def _extreme(bias, row, column):
    """Set six rows of a bias, from `row` on, to the least and the largest finite number and -inf.

    A row that one number fills gives the mean of values. The largest number in `column` gives that column's value.
    """
    info = torch.finfo(bias.dtype)
    bias[..., row, :] = info.min
    bias[..., row + 1, :] = info.min
    bias[..., row + 1, column] = -3.0
    bias[..., row + 2, column] = info.max
    bias[..., row + 3, :] = info.min
    bias[..., row + 3, column] = -math.inf
    bias[..., row + 4, :] = info.max
    bias[..., row + 5, :] = -math.inf
    bias[..., row + 5, column] = info.min
    return bias


@pytest.mark.parametrize(
    ("dtype", "of_bias"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
def test_biases_of_the_least_and_largest_numbers(small_tiles, dtype, of_bias):
    far = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}[dtype]
    bias = _extreme(_drawn(1, 2, 20, 24, dtype=of_bias), 3, 17)
    _check(*_operands(dtype=dtype), bias=bias, far=far)
    _check(*_operands(dtype=dtype), bias=_extreme(torch.zeros_like(bias), 0, 0), far=far, scale=-0.3)


@pytest.mark.parametrize("scale", [0.0, -0.3, -4.0, 1e-40])
@pytest.mark.parametrize("causal", [False, True])
def test_scales_of_bfloat16(small_tiles, scale, causal):
    _check(*_operands(dtype=torch.bfloat16), causal=causal, scale=scale, far=6e-2)


@pytest.mark.parametrize(("S", "T"), [(20, 0), (1, 0), (1, 1), (1, 24)])
def test_no_keys_and_single_rows(small_tiles, S, T):
    """Rows without keys, and their gradients, are 0, also with a bias."""
    for bias in (None, _drawn(1, 2, S, T)):
        _check(*_operands(S=S, T=T), bias=bias)


@only_cpu
@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan, 1e300, -1e300])
def test_scales_that_are_not_finite(scale):
    query, key, value = _operands()
    with tritonite.use_gems(include=[_CPU]):
        found, _ = getattr(_ATEN, _CPU)(query, key, value, scale=scale)
    # ATen's logarithms of such rows are nan or infinite, depending on its vector instructions.
    expected, _ = getattr(_ATEN, _CPU)(query, key, value, scale=scale)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert not tritonite.stats()[_CPU].declined


@only_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 20])
def test_gradients_of_padded_rows_through_the_dispatcher(dtype, queries, path):
    """Few queries over many keys are decoded, and gradients take the logarithms. Padded rows have logarithms, too."""
    keys = 300
    operands = _operands(S=queries, T=keys, dtype=dtype)
    mask = torch.zeros(queries, keys, dtype=dtype)
    mask[:, 200:] = torch.finfo(dtype).min
    mask[-1] = torch.finfo(dtype).min
    grad = _drawn(*operands[0].shape, dtype=dtype)
    own, wide = [[x.detach().to(to).requires_grad_() for x in operands] for to in (dtype, torch.float64)]
    with tritonite.use_gems(include=[_CPU, f"{_CPU}_backward"]):
        out = torch.nn.functional.scaled_dot_product_attention(*own, mask)
        found = torch.autograd.grad(out, own, grad)
    exact, _ = _by_definition(*wide, mask.double())
    far = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), exact, atol=far, rtol=far)
    for each, expected in zip(found, torch.autograd.grad(exact, wide, grad.double()), strict=True):
        torch.testing.assert_close(each.double(), expected, atol=far, rtol=far)
    counts = tritonite.stats()
    assert not counts[_CPU].declined and not counts[f"{_CPU}_backward"].declined
