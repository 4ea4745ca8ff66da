"""Decoding over caches of latents against its definition in float64: lengths, pages, sizes, several tokens, errors."""

import random

import pytest
import torch
from conftest import FULL, covering

import tritonite
from tritonite import fused
from tritonite.engine.attention import decode
from tritonite.engine.attention.table import Tile
from tritonite.errors import Unsupported

library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FAR = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def small_tiles(monkeypatch):
    """Make tiles so small that small operands have several, and splits of one or two tiles."""
    monkeypatch.setattr(decode.table, "latent_decoding", lambda *_: Tile(16, 32))
    monkeypatch.setattr(decode.table, "keys_of_split", lambda *_: 64)
    monkeypatch.setattr(decode.table, "LEAST_SPLIT_KEYS", 32)


class Latents:
    """Sequences over latents, in pages in random order among pages of nan, or with `page` 0 a sequence a row."""

    def __init__(self, lengths, tokens=None, heads=3, value=32, rest=8, page=16, dtype=torch.float32, seed=0):
        torch.manual_seed(seed)
        draw, size, device = random.Random(seed), value + rest, tritonite.device
        self.lengths, self.tokens, self.value = list(lengths), list(tokens or [1] * len(lengths)), value
        self.rows = [torch.randn(length, size, device=device).to(dtype) for length in self.lengths]
        self.table = None
        if page:
            counts = [-(-length // page) for length in self.lengths]
            order = draw.sample(range(sum(counts) + 3), sum(counts) + 3)
            table = torch.full((len(counts), max(counts, default=0) + 1), -1, dtype=torch.int32)
            cache = torch.full((len(order), page, size), torch.nan, device=device, dtype=dtype)
            for i, (own, count) in enumerate(zip(self.rows, counts, strict=True)):
                pages = [order.pop() for _ in range(count)]
                table[i, :count] = torch.tensor(pages, dtype=torch.int32)
                for j, row in enumerate(own):
                    cache[pages[j // page], j % page] = row
            self.table = table.to(device)
        else:
            room = max(self.lengths, default=0) + 5
            cache = torch.full((len(self.lengths), room, size), torch.nan, device=device, dtype=dtype)
            for own, row in zip(cache, self.rows, strict=True):
                own[: len(row)] = row
        self.cache = cache
        self.query = torch.randn(sum(self.tokens), heads, size, device=device).to(dtype)
        starts = torch.tensor([0, *self.tokens]).cumsum(0).to(device, torch.int32)
        self.starts = starts if tokens is not None else None

    @property
    def operands(self):
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=tritonite.device)
        return self.query, self.cache, self.table, lengths, self.starts

    def attended(self, scale):
        query, cache, table, lengths, starts = self.operands
        given = {"page_table": table, "cu_seqlens": starts, "value_size": self.value, "return_logsumexp": True}
        return fused.mla_decode(query, cache, lengths=lengths, scale=scale, **given)

    def expected(self, scale):
        outs, logs, first = [], [], 0
        for rows, count, length in zip(self.rows, self.tokens, self.lengths, strict=True):
            query, rows = self.query[first : first + count].double(), rows.double()
            first += count
            seen = torch.ones(count, length, dtype=torch.bool, device=query.device).tril(length - count)[:, None]
            scores = (query @ rows.mT * scale).masked_fill(~seen, -torch.inf)
            outs.append(scores.softmax(-1).nan_to_num() @ rows[:, : self.value])
            logs.append(scores.logsumexp(-1))
        return torch.cat(outs), torch.cat(logs)

    def check(self, scale=0.2):
        (own, log), (expected, expected_log) = self.attended(scale), self.expected(scale)
        assert own.dtype is self.query.dtype and own.is_contiguous() and log.dtype is torch.float32
        far = FAR[own.dtype]
        torch.testing.assert_close(own.double(), expected, atol=far, rtol=far)
        torch.testing.assert_close(log.double(), expected_log, atol=1e-4, rtol=1e-4)
        return own


@pytest.mark.parametrize(("page", "dtype"), covering(3, [0, 16, 64, 48], DTYPES))
def test_pages(small_tiles, page, dtype):
    """Some sequences have no row or one. One page size is no power of two, and 0 is a cache without pages."""
    out = Latents([70, 0, 1, 33, 150], page=page, dtype=dtype).check()
    assert not out[1].any()


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_of_deepseek(dtype):
    Latents([70, 1, 0], heads=5, value=512, rest=64, dtype=dtype).check(192**-0.5)


@pytest.mark.parametrize("heads", [1, 3, 16, 17, 40])
def test_heads_fill_a_tile_or_several(small_tiles, heads):
    Latents([70, 31], heads=heads).check()
    Latents([70, 31], heads=heads, page=0).check()


@pytest.mark.parametrize(("value", "rest"), [(1, 0), (20, 0), (7, 3), (64, 1), (100, 20), (16, 128), (512, 0)])
def test_sizes_of_latents(small_tiles, value, rest):
    Latents([40, 9], value=value, rest=rest).check()


@pytest.mark.parametrize("page", [0, 16])
def test_several_tokens_of_a_sequence(small_tiles, page):
    """Tokens see the rows up to their own. Some sequences have more tokens than rows, or none."""
    Latents([70, 40, 9, 50, 3], tokens=[4, 1, 9, 0, 5], heads=5, page=page).check()


def test_blocks_that_all_tokens_see(monkeypatch):
    monkeypatch.setattr(decode.table, "latent_decoding", lambda *_: Tile(64, 32))
    monkeypatch.setattr(decode.table, "keys_of_split", lambda *_: 96)
    monkeypatch.setattr(decode.table, "UNMASKED_ROWS", 64)
    Latents([200, 40], tokens=[3, 2], heads=40).check()


def test_tiles_of_the_table():
    Latents([300, 17], heads=8, value=64, rest=16).check()
    Latents([300, 517], tokens=[30, 1], heads=4, page=64).check()


def test_tokens_behind_the_last_sequence(small_tiles):
    latents = Latents([40, 50], tokens=[5, 1])
    expected, _ = latents.expected(0.2)
    latents.query = torch.cat((latents.query, latents.query))
    out, log = latents.attended(0.2)
    torch.testing.assert_close(out[:6].double(), expected, atol=2e-5, rtol=2e-5)
    assert out[6:].eq(0).all() and log[6:].eq(-torch.inf).all()


def test_layouts(small_tiles):
    """Caches are slices of wider ones or have rows before pages; heads come before tokens in the query."""
    latents = Latents([70, 31])
    latents.query = latents.query.transpose(0, 1).contiguous().transpose(0, 1)
    latents.cache = torch.cat((latents.cache, latents.cache), 2)[..., :40]
    latents.check()
    latents.cache = latents.cache.transpose(0, 1).contiguous().transpose(0, 1)
    assert not latents.cache.is_contiguous()
    latents.check()


def test_no_tokens_and_no_heads():
    latents = Latents([5, 7])
    query, cache, table, lengths, _ = latents.operands
    starts = torch.zeros(3, dtype=torch.int32, device=tritonite.device)
    given = {"lengths": lengths, "scale": 1.0, "page_table": table, "value_size": 32}
    assert fused.mla_decode(query[:0], cache, cu_seqlens=starts, **given).shape == (0, 3, 32)
    assert fused.mla_decode(query[:, :0], cache, **given).shape == (2, 0, 32)


@pytest.mark.parametrize("seed", range(12 if FULL else 5))
def test_random_problems(monkeypatch, seed):
    draw = random.Random(seed)
    block = draw.choice((16, 32, 64))
    rows, split = draw.choice((16, 32, 64)), block * draw.choice((1, 2, 9))
    monkeypatch.setattr(decode.table, "latent_decoding", lambda *_: Tile(rows, block))
    monkeypatch.setattr(decode.table, "keys_of_split", lambda *_: split)
    monkeypatch.setattr(decode.table, "LEAST_SPLIT_KEYS", draw.choice((block, 3 * block)))
    lengths = [draw.choice((0, 1, 17, draw.randrange(1, 200))) for _ in range(draw.randrange(1, 5))]
    tokens = [draw.randrange(0, 6) for _ in lengths] if draw.random() < 0.5 else None
    page, dtype = draw.choice((0, 16, 48, 128)), draw.choice(DTYPES)
    Latents(lengths, tokens, draw.choice((1, 5, 20)), draw.choice((16, 50)), draw.choice((0, 9)), page, dtype).check()


Q, C, L, T = torch.zeros(2, 3, 40), torch.zeros(4, 16, 40), torch.ones(2).int(), torch.zeros(2, 2).int()
WRONG = [
    ((Q.double(), C), {}, "query is torch.float64"),
    ((Q[0], C), {}, "query has the shape"),
    ((Q, C[..., :30]), {}, "cache has the shape"),
    ((Q, C[0]), {}, "cache has the shape"),
    ((Q, C.half()), {}, "one dtype"),
    ((Q, C), {"value_size": 41}, "value_size is 41"),
    ((Q, C), {"value_size": 0}, "value_size is 0"),
    ((torch.zeros(2, 3, 600), C), {"value_size": 400}, "at most 128 elements"),
    ((Q, C), {"page_table": T.long()}, "page_table is torch.int64"),
    ((Q, C), {"lengths": L[:1]}, "lengths has the shape"),
    ((Q, C), {"lengths": L.long()}, "lengths is torch.int64"),
    ((Q, C), {"cu_seqlens": L}, "cu_seqlens has the shape"),
    ((Q[:1], C), {}, "give cu_seqlens"),
    ((Q, C), {"page_table": None}, "lengths has the shape"),
    ((Q, C.to("meta")), {}, "one device"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("args", "given", "words"), WRONG)
def test_wrong_arguments(args, given, words):
    to = lambda x: x.to(tritonite.device) if isinstance(x, torch.Tensor) and x.device.type != "meta" else x
    given = {"lengths": L, "page_table": T, "value_size": 32, "scale": 1.0} | given
    with pytest.raises(Unsupported, match=words):
        fused.mla_decode(*map(to, args), **{name: to(value) for name, value in given.items()})


@pytest.mark.declines("refused calls")
def test_a_query_whose_elements_have_gaps_is_refused():
    query, cache, table, lengths, _ = Latents([5, 7]).operands
    given = {"lengths": lengths, "scale": 1.0, "page_table": table, "value_size": 16}
    with pytest.raises(Unsupported, match="dimension of query is not contiguous"):
        fused.mla_decode(query[..., ::2], cache[..., :20], **given)


def test_gradients_are_refused():
    latents = Latents([5])
    query, cache, table, lengths, _ = latents.operands
    out = fused.mla_decode(query.requires_grad_(), cache, lengths=lengths, scale=1.0, page_table=table, value_size=32)
    with pytest.raises(RuntimeError, match="autograd"):
        out.sum().backward()


@pytest.mark.parametrize("page", [0, 16])
def test_opcheck(page):
    arguments = (*Latents([40, 5], tokens=[2, 1], page=page).operands, 0.2, 32)
    torch.library.opcheck(library.mla_decode, arguments)
    text = tritonite.explain("tritonite::mla_decode", *arguments)
    assert "outside ATen" in text and "launch  " in text


def test_compiled_graphs_give_the_same():
    query, cache, table, lengths, _ = Latents([40, 5]).operands

    def step(query, cache, table, lengths):
        given = {"lengths": lengths, "scale": 0.2, "page_table": table, "value_size": 32}
        return fused.mla_decode(query * 2, cache, **given) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query, cache, table, lengths), step(query, cache, table, lengths))


def test_vmap():
    query, cache, table, lengths, _ = Latents([40, 5]).operands
    function = lambda query: fused.mla_decode(query, cache, lengths=lengths, scale=0.2, page_table=table, value_size=32)
    queries = torch.stack((query, query * 2))
    torch.testing.assert_close(torch.vmap(function)(queries), torch.stack([function(each) for each in queries]))
