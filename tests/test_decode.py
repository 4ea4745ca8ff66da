"""Attention of few queries over many keys by splits, compared with its definition in float64."""

import itertools
import math
from unittest import mock

import pytest
import torch
from conftest import FULL, covering

import tritonite
from tritonite import devices
from tritonite.engine.attention import decode, table
from tritonite.engine.attention.problem import Problem
from tritonite.engine.attention.table import Tile
from tritonite.ops.attention import passes
from tritonite.runtime import contract
from tritonite.runtime.libentry import LibEntry

_CPU = "_scaled_dot_product_flash_attention_for_cpu"
# Keys for several splits. Fewer in the interpreter, where each of the 19 programs of 300 keys takes long.
KEYS = 300 if FULL else 130
only_cpu = pytest.mark.skipif(devices.current.type != "cpu", reason="ATen has this overload on CPUs alone")


@pytest.fixture(params=["one split", "splits"])
def small_tiles(request, monkeypatch):
    """Make small tiles, with one split or many, which programs combine 16 at a time."""
    share = 2**20 if request.param == "one split" else 16
    monkeypatch.setattr(decode.table, "decoding", lambda *_: Tile(16, 16))
    monkeypatch.setattr(decode.table, "keys_of_split", lambda *_: share)
    monkeypatch.setattr(decode.table, "LEAST_SPLIT_KEYS", 16)


def _drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=tritonite.device).to(dtype)


def _operands(B=2, H=4, shared=2, S=1, T=300, D=16, V=None, dtype=torch.float32):
    shapes = ((B, H, S, D), (B, shared, T, D), (B, shared, T, V or D))
    return [_drawn(*shape, dtype=dtype) for shape in shapes]


def _check(query, key, value, bias=None, causal=False, diagonal=0, scale=None, padded=0, far=1e-5, **options):
    """Compare results and logarithms, written to memory of nan, with the definition; `options` are `Problem`'s."""
    work = Problem(query, key, value, bias, scale, causal, diagonal, "ieee", **options)
    queries = query.shape[2]
    out = query.new_full((*query.shape[:3], value.shape[3]), math.nan)
    logsumexp = torch.full((*query.shape[:2], max(queries, padded)), math.nan, device=query.device)
    decode.decode(work, out, logsumexp, "0")
    ratio = query.shape[1] // key.shape[1]
    wide, key, value = query.double(), *[x.double().repeat_interleave(ratio, 1) for x in (key, value)]
    scores = wide @ key.mT * (1 / math.sqrt(query.shape[3]) if scale is None else scale)
    if work.softcap is not None:
        scores = work.softcap * torch.tanh(scores / work.softcap)
    seen = torch.ones(scores.shape, dtype=torch.bool, device=query.device)
    seen = seen.tril(diagonal) if causal else seen
    seen = seen if work.window is None else seen.triu(diagonal - work.window + 1)
    if bias is not None and bias.dtype is torch.bool:
        seen = seen & bias
    elif bias is not None:
        scores = scores + bias.double()
    lowest = scores.new_tensor(-math.inf)
    sinks = lowest.expand(query.shape[1]) if work.sinks is None else work.sinks.double()
    every = torch.cat((scores.where(seen, lowest), sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    logarithms = every.logsumexp(-1)
    shares = every.clamp(min=-1e300).softmax(-1)[..., :-1] * seen
    torch.testing.assert_close(out.double(), shares @ value, atol=far, rtol=far)
    logarithms = logarithms.masked_fill(logarithms == -math.inf, 0)
    torch.testing.assert_close(logsumexp[:, :, :queries].double(), logarithms, atol=1e-5, rtol=1e-5)
    assert logsumexp[:, :, queries:].eq(math.inf).all()
    return out


@pytest.mark.parametrize(
    ("dtype", "heads"),
    covering(3, [torch.float32, torch.float16, torch.bfloat16], [(4, 4), (8, 2), (6, 2), (20, 1)]),
)
def test_heads_that_share_keys(small_tiles, dtype, heads):
    H, shared = heads
    far = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    _check(*_operands(B=2 if FULL else 1, H=H, shared=shared, dtype=dtype), far=far)


@pytest.mark.parametrize(("diagonal", "S"), covering(2, [None, KEYS - 16, 40, 0, -3], [2, 5, 16]))
def test_several_queries(small_tiles, S, diagonal):
    """All queries see all keys, or each sees one more than the query before, or the first ones see none."""
    _check(*_operands(B=1, H=6, S=S, T=KEYS), causal=diagonal is not None, diagonal=diagonal or 0)


@pytest.mark.parametrize(("D", "V"), [(8, 8), (24, 40), (1, 3), (130, 256)])
def test_sizes_of_heads(small_tiles, D, V):
    _check(*_operands(B=1, S=3, T=70, D=D, V=V))


@pytest.mark.parametrize("shape", [(2, 4, 3, KEYS), (2, 1, 1, KEYS), (1, 4, 3, 1)])
@pytest.mark.parametrize("mask", [False, True])
def test_bias(small_tiles, shape, mask):
    bias = _drawn(*shape)
    bias = (bias > 0) if mask else bias
    _check(*_operands(S=3, T=KEYS), bias=bias.expand(2, 4, 3, KEYS), causal=True, diagonal=KEYS - 10)


def test_masks_that_leave_splits_or_rows_without_keys(small_tiles):
    """A mask leaves the filled rows of a cache, or leaves a query no key."""
    mask = torch.zeros(2, 1, 3, KEYS, dtype=torch.bool, device=tritonite.device)
    mask[0, :, 0, :20] = True
    mask[:, :, 1, 100:120] = True
    out = _check(*_operands(S=3, T=KEYS), bias=mask.expand(2, 4, 3, KEYS))
    assert out[:, :, 2].eq(0).all()
    _check(*_operands(S=3, T=KEYS), bias=(mask.float() * 30 - 30).expand(2, 4, 3, KEYS))


@pytest.mark.parametrize(("window", "S", "diagonal"), covering(2, [1, 10, 40, 5000], [1, 3], [KEYS - 3, 20, -2]))
def test_windows(small_tiles, window, S, diagonal):
    """A window is shorter than a split, begins and ends within splits, is longer than the keys, or holds no key."""
    _check(*_operands(B=1, S=S, T=KEYS), causal=True, diagonal=diagonal, window=window)


@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float32, 0.5), (torch.float32, 30.0), (torch.bfloat16, 2.0)])
@pytest.mark.parametrize("biased", [False, True])
def test_soft_caps(small_tiles, dtype, softcap, biased):
    bias = _drawn(1, 1, 1, KEYS, dtype=dtype).expand(1, 4, 2, KEYS) if biased else None
    # The roundoff of a logit is that of the cap.
    far = max(2e-6, 2**-22 * softcap) if dtype is torch.float32 else 3e-2
    _check(*_operands(B=1, S=2, T=KEYS, dtype=dtype), bias=bias, scale=2.0, softcap=softcap, far=far)


@pytest.mark.parametrize("T", [0, 10, KEYS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sinks_count_once(small_tiles, T, dtype):
    """A row's sink counts once, whatever the number of splits. A sink of -inf counts for nothing."""
    query, key, value = _operands(B=1, H=6, S=2, T=T, dtype=dtype)
    sinks = torch.tensor([-math.inf, -3.0, 0.0, 1.0, 9.0, 100.0], device=query.device).to(dtype)
    far = 1e-5 if dtype is torch.float32 else 4e-3
    out = _check(query, key, value, sinks=sinks, far=far)
    assert out[:, 0].any() == (T > 0) and out[:, 1].any() == (T > 0)


def test_windows_caps_sinks_and_a_bias_together(small_tiles):
    bias = _drawn(1, 1, 3, KEYS).expand(2, 6, 3, KEYS)
    options = {"window": 50, "softcap": 2.0, "sinks": _drawn(6)}
    _check(*_operands(H=6, S=3, T=KEYS), bias=bias, causal=True, diagonal=KEYS - 3, scale=-0.7, **options)


def test_a_window_has_splits_of_its_own_keys(monkeypatch):
    """Splits divide the keys that queries see, not all keys."""
    asked = []
    split = table.keys_of_split
    monkeypatch.setattr(
        decode.table, "keys_of_split", lambda _, keys, *rest: asked.append(keys) or split(_, keys, *rest)
    )
    _check(*_operands(B=1, S=2, T=300), causal=True, diagonal=298, window=20)
    assert asked == [21]


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_scale(small_tiles, scale):
    _check(*_operands(S=2, T=KEYS), scale=scale)


def test_logarithms_are_padded(small_tiles):
    _check(*_operands(H=6, S=3, T=70), padded=32)


def test_layouts(small_tiles):
    """Operands are (batch, rows, heads, elements), a view of a larger cache, and a slice of a wider query."""
    query, key, value = [_drawn(2, rows, 4, 40).transpose(1, 2)[..., 8:24] for rows in (3, 90, 90)]
    _check(query, key[:, :2, :70], value[:, :2, :70], causal=True, diagonal=67)


@pytest.mark.parametrize("T", [0, 1, 15, 16, 17])
def test_few_keys(small_tiles, T):
    _check(*_operands(T=T))


def test_tiles_of_the_table():
    _check(*_operands(H=8, shared=1, S=16, T=400), causal=True, diagonal=384)
    _check(*_operands(T=500, dtype=torch.float16), far=4e-3)


def test_same_bits_each_time(small_tiles):
    operands = _operands(S=3, T=KEYS)
    assert torch.equal(_check(*operands), _check(*operands))


@only_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_through_the_dispatcher(path, monkeypatch, dtype):
    """Calls are recorded, and replayed with another scale. The usual kernels compute the gradients."""
    monkeypatch.setattr(decode.table, "keys_of_split", lambda *_: 128)
    launched = []
    run = decode.launch_splits
    monkeypatch.setattr(decode, "launch_splits", lambda *args, **others: (launched.append(args), run(*args, **others)))
    query, key, value = [x.requires_grad_() for x in _operands(B=2 if FULL else 1, S=3, dtype=dtype)]
    mask = _drawn(3, 300).to(dtype)
    far = 1e-5 if dtype is torch.float32 else 3e-2
    for scale in (0.25, 0.5):
        with tritonite.use_gems(include=[_CPU, f"{_CPU}_backward"]):
            own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, False, attn_mask=mask, scale=scale
            )
            grads = torch.autograd.grad(own[0].float().square().sum(), (query, key, value))
        expected = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=scale
        )
        others = torch.autograd.grad(expected[0].float().square().sum(), (query, key, value))
        for each, other in zip((*own, *grads), (*expected, *others), strict=True):
            torch.testing.assert_close(each, other, atol=far, rtol=far)
            assert each.stride() == other.stride()
    counts = tritonite.stats()[_CPU]
    assert not counts.unrecordable and not counts.declined
    assert (counts.launched, counts.replayed) == ((1, 1) if path == "native" else (2, 0))
    assert len(launched) == counts.launched


@only_cpu
@pytest.mark.parametrize(
    ("S", "T", "H", "serves"),
    [(1, 256, 4, True), (16, 600, 16, True), (17, 600, 4, False), (1, 200, 4, False), (16, 600, 20, False)],
)
def test_calls_that_decoding_serves(S, T, H, serves):
    """Few queries of many keys are served, except in invariant mode, where bits must not depend on other sequences."""
    query, key, value = _operands(S=S, T=T, H=H)
    work = Problem(query, key, value, None, None, False, 0, "ieee")
    assert decode.decodes(work) == serves
    assert not decode.decodes(work._replace(causal=True))
    assert decode.decodes(work._replace(causal=True, diagonal=T - S)) == serves
    assert decode.decodes(work._replace(causal=True, diagonal=T - S, window=100)) == serves
    assert decode.decodes(work._replace(softcap=30.0, sinks=query.new_zeros(H))) == serves
    with contract.under(contract.settings_of(invariant=True)):
        assert not decode.decodes(work)


@pytest.mark.parametrize(
    ("kind", "causal"), [("flash", False), ("flash", True), ("efficient", False)] + [("efficient", True)] * FULL
)
def test_packed_sequences(small_tiles, kind, causal, monkeypatch):
    """Each sequence has its result alone. Nothing of other sequences or behind the last one is read."""
    most = 520 if FULL else 264
    lengths = [(1, 300 if FULL else 70), (0, 40), (3, 7), (2, 0), (5, most), (1, 33)]
    S, T = (sum(each) for each in zip(*lengths, strict=True))
    starts = [
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=tritonite.device)
        for each in zip(*lengths, strict=True)
    ]
    dtype, shared, far = (torch.float16, 2, 4e-3) if kind == "flash" else (torch.float32, 4 if FULL else 2, 1e-5)
    heads = 4 if kind == "flash" else shared
    query, key, value = _operands(B=1, H=heads, shared=shared, S=S + 3, T=T + 2, dtype=dtype)
    for tensor, count in ((query, S), (key, T), (value, T)):
        tensor[:, :, count:] = math.nan
    served = []
    monkeypatch.setattr(passes, "decode", lambda *given: served.append(1) or decode.decode(*given))
    ops, rows_first = tritonite.overloads(), [x.transpose(1, 2) for x in (query, key, value)]
    if kind == "flash":
        given = (*[x[0] for x in rows_first], *starts, 5, most, 0.0, causal, False)
        out, logsumexp, *_ = ops["_flash_attention_forward"](*given)
        out = out[None]
    else:
        # With a diagonal from the first key, few queries would see few keys.
        out, *_ = ops["_efficient_attention_forward"](*rows_first, None, *starts, 5, most, 0.0, 0, False)
    assert served
    (first, first_key), out = [each.tolist() for each in starts], out.transpose(1, 2)
    for i, (rows, keys) in enumerate(lengths):
        own = query[:, :, first[i] : first[i] + rows].double()
        of_key, of_value = [
            x[:, :, first_key[i] : first_key[i] + keys].double().repeat_interleave(heads // shared, 1)
            for x in (key, value)
        ]
        scores = own @ of_key.mT / 4
        seen = torch.ones(rows, keys, dtype=torch.bool, device=scores.device)
        seen = seen.tril(keys - rows) if causal and kind == "flash" else seen
        shares = scores.masked_fill(~seen, -1e30).softmax(-1) * seen
        found = out[:, :, first[i] : first[i] + rows].double()
        torch.testing.assert_close(found, shares @ of_value, atol=far, rtol=far)
        if kind == "flash":
            expected = scores.masked_fill(~seen, -math.inf).logsumexp(-1)[0]
            expected = expected.masked_fill(expected == -math.inf, math.inf)
            torch.testing.assert_close(
                logsumexp[:, first[i] : first[i] + rows].double(), expected, atol=1e-4, rtol=1e-5
            )


def test_operators_of_cuda(monkeypatch):
    """Each operator decodes, and returns logarithms in ATen's layout."""
    reached = mock.Mock(wraps=decode.decode)
    monkeypatch.setattr(passes, "decode", reached)
    ops = tritonite.overloads()
    name = "_scaled_dot_product_{}_attention"
    query, key, value = _operands(S=3, D=16, dtype=torch.float16)
    wide = [x.double() for x in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide)
    for own in (
        ops[name.format("flash")](query, key, value)[0],
        ops[name.format("cudnn")](query, key, value, None, True)[0],
        ops[name.format("efficient")](query, *[x.repeat_interleave(2, 1) for x in (key, value)], None, True)[0],
    ):
        torch.testing.assert_close(own.double(), expected, atol=2e-3, rtol=2e-3)
    assert reached.call_count == 3
    logsumexp = ops[name.format("efficient")](query, *[x.repeat_interleave(2, 1) for x in (key, value)], None, True)[1]
    scores = wide[0] @ wide[1].mT / 4
    torch.testing.assert_close(logsumexp[:, :, :3].double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    assert logsumexp.shape == (2, 4, 32) and logsumexp[:, :, 3:].eq(math.inf).all()


@pytest.mark.parametrize(("split_keys", "expected"), [(2**20, [False]), (64, [True, True])])
def test_the_launch_that_combines_splits_starts_early(monkeypatch, split_keys, expected):
    """The launch that combines splits is a dependent launch, which waits for their results."""
    launches = []
    monkeypatch.setattr(devices, "has_dependent_launch", lambda device: True)
    monkeypatch.setattr(decode.table, "keys_of_split", lambda *_: split_keys)
    monkeypatch.setattr(LibEntry, "run", lambda kernel, *args, **kwargs: launches.append(kwargs))
    query, key, value = _operands()
    decode.decode(Problem(query, key, value, None, None, False, 0, "ieee"), torch.empty_like(query), None)
    assert [each["META"].dependent for each in launches] == expected


@pytest.mark.parametrize("programs", [1, 8, 100, 264, 300, 512, 4000])
@pytest.mark.parametrize("keys", [100, 256, 2048, 8192, 131072])
def test_splits_are_whole_blocks_of_keys(programs, keys):
    split_keys = table.keys_of_split(programs, keys, 64, 132)
    assert split_keys % 64 == 0 and (split_keys >= table.LEAST_SPLIT_KEYS or split_keys >= keys)


@pytest.mark.parametrize(
    ("dtype", "of_bias"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
def test_biases_of_the_least_and_largest_numbers(small_tiles, dtype, of_bias):
    """Rows that one number fills, or one column, in one split and in several."""
    far = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}[dtype]
    info = torch.finfo(of_bias)
    bias = _drawn(1, 4, 6, 70, dtype=of_bias)
    bias[:, :, :2], bias[:, :, 3] = info.min, info.max
    bias[:, :, 1, 40], bias[:, :, 2, 40] = -3, info.max
    bias[:, :, 4], bias[:, :, 4, 40] = -math.inf, info.min
    _check(*_operands(B=1, S=6, T=70, dtype=dtype), bias=bias, far=far)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-40])
def test_scales_of_bfloat16(small_tiles, scale):
    _check(*_operands(B=1, S=2, T=70, dtype=torch.bfloat16), scale=scale, far=3e-2)
