"""Attention over paged caches against its definition in float64, and writing to the caches."""
# Over 500 lines: reads, writes and page tables share one cache and its reference.

import math
import os
import random
import subprocess
import sys

import pytest
import scripts
import torch
from conftest import FULL, covering, some

import tritonite
from tritonite import fused
from tritonite.engine.attention import decode
from tritonite.engine.attention.table import Tile
from tritonite.errors import Unsupported

library = torch.ops.tritonite
FLOAT8 = torch.float8_e4m3fn
FLOATS_16 = [torch.float16, torch.bfloat16]


@pytest.fixture
def small_tiles(monkeypatch):
    """Make tiles so small that small operands have several, and splits of one or two tiles."""
    monkeypatch.setattr(decode.table, "decoding", lambda *_: Tile(16, 32))
    monkeypatch.setattr(decode.table, "keys_of_split", lambda *_: 64)
    monkeypatch.setattr(decode.table, "LEAST_SPLIT_KEYS", 32)


class Sequences:
    """Sequences over paged caches. Their blocks are in random order among blocks of nan."""

    def __init__(
        self,
        lengths,
        tokens=None,
        H=4,
        shared=2,
        D=16,
        V=None,
        page=16,
        dtype=torch.float32,
        cache=None,
        seed=0,
        spare=3,
        room=1,
    ):
        device, cache = tritonite.device, cache or dtype
        generator = random.Random(seed)
        torch.manual_seed(seed)
        self.lengths, self.tokens = list(lengths), list(tokens or [1] * len(lengths))
        self.ragged = tokens is not None
        counts = [-(-length // page) for length in self.lengths]
        blocks = sum(counts) + spare
        order = generator.sample(range(blocks), blocks)
        table = torch.full((len(counts), max(counts, default=0) + room), -1, dtype=torch.int32)
        caches = [torch.full((blocks, page, shared, size), math.nan) for size in (D, V or D)]
        caches = [each.to(dtype).to(device) for each in caches]
        self.keys = []
        for i, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            own = [order.pop() for _ in range(count)]
            table[i, :count] = torch.tensor(own, dtype=torch.int32)
            pair = [torch.randn(length, shared, size, device=device).to(cache).to(dtype) for size in (D, V or D)]
            self.keys.append([each.double() for each in pair])
            for each, values in zip(caches, pair, strict=True):
                for j in range(length):
                    each[own[j // page], j % page] = values[j]
        self.key, self.value = [each.to(cache) for each in caches]
        self.table = table.to(device)
        self.query = torch.randn(sum(self.tokens), H, D, device=device).to(dtype)
        self.starts = None
        if self.ragged:
            starts = torch.tensor([0, *self.tokens], dtype=torch.int32).cumsum(0).to(torch.int32)
            self.starts = starts.to(device)

    @property
    def operands(self):
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=tritonite.device)
        return [self.query, self.key, self.value, self.table, lengths]

    def attended(self, **given):
        return fused.paged_attention(*self.operands, cu_seqlens=self.starts, **given)

    def expected(self, scale=None, softcap=None, window=None, key_scale=None, value_scale=None, sinks=None):
        """Return the result by the definition, sequence by sequence."""
        results, first = [], 0
        ratio = self.query.shape[1] // self.key.shape[2]
        for (key, value), count, length in zip(self.keys, self.tokens, self.lengths, strict=True):
            query = self.query[first : first + count].double().transpose(0, 1)
            first += count
            if key_scale is not None:
                key, value = key * key_scale.double().view(-1, 1), value * value_scale.double().view(-1, 1)
            key, value = [each.transpose(0, 1).repeat_interleave(ratio, 0) for each in (key, value)]
            scores = query @ key.mT * (1 / math.sqrt(query.shape[2]) if scale is None else scale)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            seen = torch.ones(count, length, dtype=torch.bool, device=query.device).tril(length - count)
            if window is not None:
                seen = seen.triu(length - count - window + 1)
            scores = scores.masked_fill(~seen, -1e30)
            sink = scores.new_full((1, 1, 1), -1e30) if sinks is None else sinks.double()[:, None, None]
            every = torch.cat((scores, sink.expand(*scores.shape[:2], 1)), -1)
            shares = every.softmax(-1)[..., :-1] * seen
            results.append((shares @ value).transpose(0, 1))
        return torch.cat(results)

    def check(self, **given):
        own, expected = self.attended(**given), self.expected(**given)
        assert own.dtype is self.query.dtype and own.is_contiguous()
        far = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[own.dtype]
        torch.testing.assert_close(own.double(), expected, atol=far, rtol=far)
        return own


@pytest.mark.parametrize(("page", "dtype"), covering(3, [16, 32, 64, 24, 256], [torch.float32, *FLOATS_16]))
def test_decoding(small_tiles, page, dtype):
    """A block of keys has several pages, one, or part of one. One page size is no power of two."""
    Sequences([70, 1, 33, 150], page=page, dtype=dtype).check()


def test_tiles_of_the_table():
    Sequences([300, 17], H=8, shared=1).check()
    Sequences([300, 517], tokens=[70, 1]).check()


@pytest.mark.parametrize(("page", "heads"), covering(2, [16, 64], [(4, 4), (6, 2), (12, 1), (20, 1)]))
def test_chunked_prefill_and_decoding_together(small_tiles, page, heads):
    """Queries times heads that share keys fill part of a tile, a tile, or several. A sequence may have no tokens."""
    H, shared = heads
    # With many heads, few tokens fill several tiles, which are slow in the interpreter.
    part, whole = (20, 9) if FULL or H < 12 else (5, 3)
    Sequences(
        [70, 40, whole, 130 if FULL else 70, 5], tokens=[part, 1, whole, 0, 3], H=H, shared=shared, page=page
    ).check()


@pytest.mark.parametrize("window", [1, 20, 33, 64, 1000])
@pytest.mark.parametrize("tokens", [None, [20, 1, 40] if FULL else [9, 1, 17]])
def test_windows(small_tiles, window, tokens):
    Sequences([100, 31, 90], tokens=tokens).check(window=window)


@pytest.mark.parametrize(("page", "window"), covering(2, [16, 64], [None, 50]))
def test_blocks_of_keys_that_all_queries_see(monkeypatch, window, page):
    """Programs with many queries skip the mask in such blocks."""
    monkeypatch.setattr(decode.table, "decoding", lambda *_: Tile(64, 32))
    monkeypatch.setattr(decode.table, "keys_of_split", lambda *_: 96)
    monkeypatch.setattr(decode.table, "UNMASKED_ROWS", 64)
    Sequences([200 if FULL else 140, 40, 90], tokens=[50, 40 if FULL else 20, 1], page=page).check(window=window)


def test_keys_before_a_window_are_not_read(small_tiles):
    sequences = Sequences([150, 90], page=16)
    expected = sequences.expected(window=40)
    for i, length in enumerate(sequences.lengths):
        first = (length - 40) // 16
        sequences.key[sequences.table[i, :first].long()] = math.nan
        sequences.value[sequences.table[i, :first].long()] = math.nan
        sequences.table[i, :first] = -1
    torch.testing.assert_close(sequences.attended(window=40).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
def test_soft_caps(small_tiles, softcap):
    Sequences([100, 31], tokens=[20 if FULL else 9, 1]).check(softcap=softcap, scale=0.7)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sinks_count_once(small_tiles, window, dtype):
    """A head's sink counts once for a token, in one split and in several, also for tokens without keys."""
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], device=tritonite.device).to(dtype)
    Sequences([100, 1, 0, 31], dtype=dtype).check(sinks=sinks, window=window)
    Sequences([4, 100], tokens=[9, 3], dtype=dtype).check(sinks=sinks.float(), softcap=3.0, window=window)


@pytest.mark.parametrize("scale", [0.0, -0.5, 2.0])
def test_scales_of_scores(small_tiles, scale):
    Sequences([70, 31]).check(scale=scale)


@pytest.mark.parametrize(("dtype", "heads"), covering(2, FLOATS_16, [1, 2]))
def test_float8_caches(small_tiles, dtype, heads):
    scales = torch.tensor([0.5, 3.0][:heads], device=tritonite.device)
    sequences = Sequences([70, 31, 100], tokens=[1, 20 if FULL else 9, 3], dtype=dtype, cache=FLOAT8)
    assert sequences.key.dtype is FLOAT8
    sequences.check(key_scale=scales, value_scale=scales + 1)
    Sequences([70, 31], dtype=dtype, cache=FLOAT8).check()


@pytest.mark.parametrize(("D", "V"), [(8, 8), (24, 40), (80, 16), (256, 130)])
def test_sizes_of_heads(small_tiles, D, V):
    Sequences([70, 31], D=D, V=V, tokens=[3, 1]).check()


@pytest.mark.parametrize(
    ("sizes", "dtype", "cache", "page"),
    some([(17, 1), (1, 40), (40, 32), (64, 128), (130, 20)], [torch.float32, *FLOATS_16], [None, FLOAT8], [1, 16]),
)
def test_sizes_of_heads_in_tiles_of_the_table(sizes, dtype, cache, page):
    """Several tokens of a sequence make a tile of 64 rows, which a warp group multiplies."""
    given = {"D": sizes[0], "V": sizes[1], "dtype": dtype, "cache": cache, "page": page}
    Sequences([17, 15, 33], tokens=[5, 2, 5], H=8, shared=1, **given).check()


def test_sequences_without_keys(small_tiles):
    """Padding sequences, and tokens behind the last sequence, give 0."""
    sequences = Sequences([0, 40, 0])
    assert sequences.check()[[0, 2]].eq(0).all()
    sequences = Sequences([40, 50], tokens=[5, 1])
    expected = sequences.expected()
    sequences.query = torch.cat((sequences.query, torch.randn(37, 4, 16, device=tritonite.device)))
    own = sequences.attended()
    torch.testing.assert_close(own[:6].double(), expected, atol=1e-5, rtol=1e-5)
    assert own[6:].eq(0).all()


def test_caches_without_blocks():
    """Empty caches serve sequences without keys."""
    sequences = Sequences([0, 0], spare=0)
    assert not sequences.key.numel()
    assert sequences.check().eq(0).all()


def test_more_tokens_than_keys(small_tiles):
    """The first tokens see no key."""
    assert Sequences([4, 40], tokens=[9, 2]).check()[:5].eq(0).all()


def test_layouts_of_caches(small_tiles):
    """Keys and values are slices of one tensor, or heads come before the rows of a page."""
    sequences = Sequences([70, 31], tokens=[3, 1])
    both = torch.stack((sequences.key, sequences.value), 1)
    sequences.key, sequences.value = both[:, 0], both[:, 1]
    sequences.check()
    sequences.key, sequences.value = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in both.unbind(1)]
    sequences.query = torch.cat((sequences.query, sequences.query), 2)[..., :16]
    assert not sequences.query.is_contiguous()
    sequences.check()


@pytest.mark.parametrize("seed", range(12) if FULL else range(1, 12, 2))
def test_random_problems(monkeypatch, seed):
    """Lengths, tokens, heads, pages, windows, caps, tiles and splits are random."""
    draw = random.Random(seed)
    block = draw.choice((16, 32, 64))
    rows, split = draw.choice((16, 32, 64)), block * draw.choice((1, 2, 9))
    monkeypatch.setattr(decode.table, "decoding", lambda *_: Tile(rows, block))
    monkeypatch.setattr(decode.table, "keys_of_split", lambda *_: split)
    monkeypatch.setattr(decode.table, "LEAST_SPLIT_KEYS", draw.choice((block, 3 * block)))
    monkeypatch.setattr(decode.table, "UNMASKED_ROWS", draw.choice((16, 128)))
    lengths = [draw.choice((0, 1, 17, 64, draw.randrange(1, 200))) for _ in range(draw.randrange(1, 5))]
    tokens = [draw.randrange(0, length + 1) if draw.random() < 0.5 else min(1, length) for length in lengths]
    shared, ratio = draw.choice((1, 2, 3)), draw.choice((1, 2, 4, 5))
    cache = draw.choice((torch.float32, torch.float16, FLOAT8))
    dtype = torch.float32 if cache is torch.float32 else torch.float16
    sequences = Sequences(
        *(lengths, draw.choice((tokens, None)), ratio * shared, shared, draw.choice((8, 16, 40)), None),
        *(draw.choice((16, 32, 48, 64, 128)), dtype, cache, seed),
    )
    sequences.check(window=draw.choice((None, None, 1, 30)), softcap=draw.choice((None, None, 5.0)))


# Part of a message, and a change of operands that stops the program with this message.
_OUT_OF_RANGE = [
    ("caches do not have", "table[0, 1] = 1000"),
    ("caches do not have", "table[1, 0] = -1"),
    ("room for", "lengths += 1000"),
    ("room for", "key, value = key[:0], value[:0]"),
    ("ascend", "starts = [0, 5, 2]"),
    ("begin with 0", "query, starts = query.repeat(30, 1, 1), [1, 55, 60]"),
    ("begin with 0", "query, starts = query.repeat(30, 1, 1), [50, 55, 60]"),
]


def _stops(program, words):
    """Check that a program of this module's names raises, or stops on a GPU, whose context an assertion ends."""
    if tritonite.device == "cpu":
        with pytest.raises(Unsupported, match=words):
            exec(program, dict(vars(sys.modules[__name__])))
        return
    names = "from test_paged_attention import *\nfrom test_paged_attention import _tokens\n"
    code = f"{names}{program}\ntorch.cuda.synchronize()"
    places = os.pathsep.join((os.path.dirname(__file__), *sys.path))
    own = os.environ | {"PYTHONPATH": places}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False)
    assert done.returncode and "device-side assert" in done.stderr and words in done.stderr, done.stderr


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("words", "change"), _OUT_OF_RANGE)
def test_blocks_and_lengths_out_of_range_stop_the_program(words, change):
    _stops(
        f"""
query, key, value, table, lengths = Sequences([70, 31]).operands
starts = None
{change}
if starts is not None:
    starts = torch.tensor(starts, dtype=torch.int32, device=tritonite.device)
fused.paged_attention(query, key, value, table, lengths, cu_seqlens=starts)
""",
        words,
    )


def _operands():
    return dict(
        zip(("query", "key_cache", "value_cache", "block_table", "lengths"), Sequences([70, 31]).operands, strict=True)
    )


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"query": x["query"].double()}, "query is torch.float64"),
        (lambda x: {"query": x["query"][0]}, "must be .tokens, heads, head size"),
        (lambda x: {"key_cache": x["key_cache"][..., :8]}, "of query's head size"),
        (lambda x: {"key_cache": x["key_cache"].half()}, "as query is"),
        (lambda x: {"value_cache": x["value_cache"].half()}, "give both one dtype"),
        (lambda x: {"value_cache": x["value_cache"][:, :8]}, "but for the head size"),
        (lambda x: {"query": x["query"][:, :3]}, "must divide"),
        (lambda x: {"query": x["query"].mT.contiguous().mT}, "make it contiguous"),
        (lambda x: {"key_cache": x["key_cache"].mT.contiguous().mT}, "make it contiguous"),
        (lambda x: {"block_table": x["block_table"].long()}, "must be torch.int32"),
        (lambda x: {"block_table": x["block_table"][0]}, r"must be \(sequences, blocks\)"),
        (lambda x: {"block_table": x["block_table"].t().contiguous().t()}, "make it contiguous"),
        (lambda x: {"lengths": x["lengths"].long()}, "must be torch.int32"),
        (lambda x: {"lengths": x["lengths"][:1]}, "one for each row of block_table"),
        (lambda x: {"query": x["query"][:1]}, "give cu_seqlens"),
        (lambda x: {"cu_seqlens": x["lengths"]}, "one more than rows"),
        (lambda x: {"key_scale": x["lengths"].float()}, "go together"),
        (lambda x: dict.fromkeys(("key_scale", "value_scale"), x["lengths"]), "must be torch.float32"),
        (lambda x: dict.fromkeys(("key_scale", "value_scale"), torch.ones(3)), "must be one element"),
        (lambda x: {"softcap": -1.0}, "softcap is -1.0"),
        (lambda x: {"window": 0}, "window is 0"),
        (lambda x: {"sinks": torch.zeros(3)}, "sinks has the shape"),
        (lambda x: {"sinks": torch.zeros(4, dtype=torch.float16)}, "sinks is torch.float16"),
    ],
)
def test_invalid_calls_raise(change, message):
    """Calls are refused when they run and when they are traced."""
    given = _operands()
    given |= change(given)
    names = ("query", "key_cache", "value_cache", "block_table", "lengths")
    with pytest.raises(Unsupported, match=message):
        fused.paged_attention(*[given.pop(name) for name in names], **given)
    given = _operands()
    given |= change(given)
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises(Unsupported, match=message),
    ):
        fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        fused.paged_attention(*[fake.pop(name) for name in names], **fake)


def test_gradients_are_refused():
    sequences = Sequences([70, 31])
    sequences.query.requires_grad_()
    with pytest.raises(RuntimeError):
        sequences.attended().sum().backward()


def test_registration():
    sequences = Sequences([40, 31], tokens=[3, 1])
    scale = torch.ones(1, device=tritonite.device)
    torch.library.opcheck(library.paged_attention.default, (*sequences.operands, sequences.starts, scale, scale))
    torch.library.opcheck(library.paged_attention.default, (*Sequences([40, 31]).operands,))
    key, value, caches, slots = _tokens()
    torch.library.opcheck(library.reshape_and_cache.default, (key, value, *caches, slots))


def test_calls_are_replayed_by_the_native_dispatcher():
    """Lengths, tables and scales change, with one launch and with two.

    The test has a process of its own, because operators are registered once.
    """
    code = """
import torch
import tritonite
from conftest import FULL
from test_paged_attention import Sequences, _tokens
from tritonite import fused
from tritonite.engine.attention import decode
decode.table.LEAST_SPLIT_KEYS = 32
longest, shorter, blocks = (300, 257, 20) if FULL else (140, 100, 10)
for share, window in ((2**20, None), (64, 1000)):
    decode.table.keys_of_split = lambda *_: share
    for tokens in (None, [3, 1, 2]):
        for seed, lengths in enumerate(([longest, 31, 9], [shorter, 3, 20], [longest, 40, 3])):
            sequences = Sequences(lengths, tokens, room=blocks - -(-lengths[0] // 16), seed=seed)
            for name in ("key", "value"):
                own = getattr(sequences, name)
                setattr(sequences, name, torch.cat((own, own.new_zeros(40 - len(own), *own.shape[1:]))))
            sequences.check(scale=0.1 + seed, window=window)
for _ in range(3):
    key, value, caches, slots = _tokens()
    fused.reshape_and_cache(key, value, *caches, slots)
    assert torch.equal(caches[1][slots // 16, slots % 16], value)
for name, launched, replayed in (("paged_attention", 4, 8), ("reshape_and_cache", 1, 2)):
    own = tritonite.stats()[f"tritonite::{name}"]
    assert (own.launched, own.replayed, own.unrecordable) == (launched, replayed, {}), own
"""
    scripts.run(code, TRITONITE_NATIVE="1")


def test_invariant(monkeypatch):
    """The bits of a sequence's tokens do not depend on other sequences."""
    monkeypatch.setattr(decode.table, "decoding", lambda size, head, rows, device: Tile(min(64, rows), 32))
    both = Sequences([70, 150], tokens=[3, 40])
    with tritonite.use_gems(invariant=True):
        own = both.attended(window=60)
        query, key, value, table, lengths = both.operands
        starts = torch.tensor([0, 3], dtype=torch.int32, device=tritonite.device)
        alone = fused.paged_attention(query[:3], key, value, table[:1], lengths[:1], cu_seqlens=starts, window=60)
    assert torch.equal(own[:3], alone)


def test_compile():
    torch._dynamo.reset()
    sequences = Sequences([70, 31], tokens=[3, 1])
    tokens = torch.randn(4, 2, 16, device=tritonite.device)
    slots = torch.tensor([3, -1, 40, 17], device=tritonite.device)

    def step(query, key, value, table, lengths, starts, tokens, slots):
        fused.reshape_and_cache(tokens, tokens * 2, key, value, slots)
        return fused.paged_attention(query * 2, key, value, table, lengths, cu_seqlens=starts, window=9) + 1

    given = (*sequences.operands, sequences.starts, tokens, slots)
    caches = [each.clone() for each in given[1:3]]
    own = torch.compile(step, fullgraph=True, backend="aot_eager")(given[0], *caches, *given[3:])
    expected = step(*given)
    torch.testing.assert_close(own, expected)
    for each, other in zip(caches, given[1:3], strict=True):
        torch.testing.assert_close(each, other, equal_nan=True, rtol=0, atol=0)


def _tokens(count=7, shared=3, D=16, V=24, page=16, blocks=4, dtype=torch.float16, cache=None, slot=torch.int64):
    device = tritonite.device
    key, value = [torch.randn(count, shared, size, device=device).to(dtype) for size in (D, V)]
    caches = [torch.full((blocks, page, shared, size), 7.0, device=device).to(cache or dtype) for size in (D, V)]
    slots = torch.randperm(blocks * page, device=device)[:count].to(slot)
    return key, value, caches, slots


@pytest.mark.parametrize("slot", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, *FLOATS_16])
@pytest.mark.parametrize("scaled", [False, True])
def test_tokens_are_written(dtype, slot, scaled, tiny_blocks):
    key, value, caches, slots = _tokens(dtype=dtype, slot=slot)
    slots[[1, 4]] = -1
    expected = [each.clone() for each in caches]
    scales = (torch.tensor([2.0, 4.0, 0.5], device=key.device), torch.tensor([3.0], device=key.device))
    for each, tokens, scale in zip(expected, (key, value), scales, strict=True):
        for i, place in enumerate(slots.tolist()):
            if place >= 0:
                written = (tokens[i].float() / scale.view(-1, 1)).to(dtype) if scaled else tokens[i]
                each[place // 16, place % 16] = written
    fused.reshape_and_cache(key, value, *caches, slots, *(scales if scaled else ()))
    assert all(map(torch.equal, caches, expected))


@pytest.mark.parametrize("dtype", [torch.float32, *FLOATS_16])
def test_tokens_are_written_in_float8(dtype):
    """Values are rounded to nearest and saturate. nan stays nan."""
    key, value, caches, slots = _tokens(dtype=dtype, cache=FLOAT8)
    key *= 100
    key[0, 0, :6] = torch.tensor([math.nan, math.inf, -math.inf, 1e4, -1e4, 0.0])
    scale = torch.tensor([0.5], device=key.device)
    fused.reshape_and_cache(key, value, *caches, slots, scale, scale)
    for cache, tokens in zip(caches, (key, value), strict=True):
        written = cache.float()[slots // 16, slots % 16]
        expected = (tokens.float() / 0.5).clamp(-448, 448).to(FLOAT8).float()
        torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)


def test_fewer_slots_than_tokens_and_caches_of_any_strides():
    key, value, _, slots = _tokens(V=16)
    both = torch.full((4, 2, 3, 16, 16), 7.0, device=key.device, dtype=key.dtype)
    caches = [each.transpose(1, 2) for each in both.unbind(1)]
    fused.reshape_and_cache(key.mT.contiguous().mT, value, *caches, slots[:4])
    for cache, tokens in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[slots[:4] // 16, slots[:4] % 16], tokens[:4])
        assert cache.eq(7).sum() == cache.numel() - tokens[:4].numel()


def test_written_tokens_are_attended_to():
    """A prompt is written in several chunks, followed by single tokens."""
    device, page = tritonite.device, 16
    key, value, query = [torch.randn(60, 2, 16, device=device) for _ in range(3)]
    caches = [torch.full((6, page, 2, 16), math.nan, device=device) for _ in range(2)]
    table = torch.tensor([[4, 1, 5, 0]], dtype=torch.int32, device=device)
    first, results = 0, []
    for count in (25, 30, 1, 1, 3):
        chunk = slice(first, first + count)
        positions = torch.arange(first, first + count, device=device)
        slots = table[0].long()[positions // page] * page + positions % page
        fused.reshape_and_cache(key[chunk], value[chunk], *caches, slots)
        first += count
        lengths, starts = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([first], [0, count])]
        results.append(fused.paged_attention(query[chunk], *caches, table, lengths, cu_seqlens=starts))
    wide = [x.double().transpose(0, 1) for x in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True).transpose(0, 1)
    torch.testing.assert_close(torch.cat(results).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.declines("refused calls")
def test_slots_out_of_range_stop_the_program():
    program = "key, value, caches, slots = _tokens()\nfused.reshape_and_cache(key, value, *caches, slots + 64)"
    _stops(program, "slot that the caches do not have")


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"key": x["key"].double()}, "key is torch.float64"),
        (lambda x: {"value": x["value"].float()}, "give both one dtype"),
        (lambda x: {"value": x["value"][0]}, "must be .tokens, heads, head size"),
        (lambda x: {"value": x["value"][:, :2]}, "key's but for the head size"),
        (lambda x: {"key": x["key"][:, :2]}, "as many heads as key_cache"),
        (lambda x: {"key_cache": x["key_cache"].float()}, "as key is"),
        (lambda x: {"slot_mapping": x["slot_mapping"].float()}, "int32 or torch.int64"),
        (lambda x: {"slot_mapping": x["slot_mapping"].repeat(2)}, "or fewer"),
        (lambda x: {"key_cache": x["key_cache"][:1].expand(4, -1, -1, -1)}, "share memory"),
    ],
)
def test_invalid_writes_raise(change, message):
    key, value, caches, slots = _tokens()
    given = {"key": key, "value": value, "key_cache": caches[0], "value_cache": caches[1], "slot_mapping": slots}
    with pytest.raises(Unsupported, match=message):
        fused.reshape_and_cache(**(given | change(given)))
