"""Dropout in attention: ATen's masks by the definition of each of its mappings, in NumPy, element by element."""

import math

import numpy as np
import pytest
import torch

import tritonite
from tritonite.engine.attention import forward, problem
from tritonite.engine.attention.table import Tile, Tiles
from tritonite.errors import Decline
from tritonite.install.python import recordable
from tritonite.runtime.recorder import record

SEED, OFFSET, P = 2**63 - 12345, 4 * (2**32 - 3), 0.3
only_interpreted = pytest.mark.skipif(not tritonite.backend.interpreted, reason="of a state that is set")
_FLASH, _EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


def _philox(counter, subsequence, rounds):
    """Return four 32-bit numbers for each counter (Salmon et al. 2011)."""
    low, high = np.uint64(2**32 - 1), np.uint64(32)
    words = [counter & low, counter >> high, subsequence & low, subsequence >> high]
    keys = [SEED & 2**32 - 1, SEED >> 32]
    for _ in range(rounds):
        a, c = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        first, second = map(np.uint64, keys)
        words = [c >> high ^ words[1] ^ first, c & low, a >> high ^ words[3] ^ second, a & low]
        keys = [keys[0] + 0x9E3779B9 & 2**32 - 1, keys[1] + 0xBB67AE85 & 2**32 - 1]
    return np.stack(words, -1)


def _flash_keeps(head, row, column, offset):
    """Return the elements that flash attention keeps.

    A lane of a warp has rows lane / 4 and lane / 4 + 8, and of each eight columns lane % 4 * 2 and the next one.
    """
    lane = row % 8 * 4 + column % 8 // 2
    words = _philox(offset + head * 32 + lane, row // 16 + (column // 32 << 32), 7)
    pair, product = column % 16 // 8, column % 32 // 16
    byte = product * 8 + pair * 4 + row % 16 // 8 * 2 + column % 2
    registers = words.astype("<u4").view(np.uint8)
    drawn = np.take_along_axis(registers, byte[..., None].astype(np.int64), -1)[..., 0]
    return drawn <= math.floor(float(np.float32(1) - np.float32(P)) * 255)


def _efficient_keeps(head, row, column, offset):
    """Return the elements that efficient attention keeps. Each element uses a random number, in order."""
    number = offset + (head * (row.max() + 1) + row) * (column.max() + 1) + column
    words = _philox(number // 4, number * 0, 10)
    word = np.take_along_axis(words, (number % 4)[..., None].astype(np.int64), -1)[..., 0].astype(np.float32)
    return word * np.float32(2**-32) + np.float32(2**-33) > np.float32(P)


def _mask(keeps, heads, queries, keys, offset, first=0):
    """Return the mask of (heads, queries, keys); `first` is the index of the first head, counted over batches."""
    head, row, column = np.indices((heads, queries, keys)).astype(np.uint64)
    return torch.from_numpy(keeps(head + first, row, column, np.uint64(offset)))


def _by_definition(query, key, value, mask, bias=None, diagonal=None):
    """Return attention in float64; `diagonal` is that of a causal mask."""
    ratio = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(ratio, 1), value.repeat_interleave(ratio, 1)
    scores = query @ key.mT / math.sqrt(query.shape[3])
    scores = scores if bias is None else scores + bias
    seen = torch.ones(scores.shape[2:], dtype=torch.bool)
    seen = seen if diagonal is None else seen.tril(diagonal)
    shares = scores.masked_fill(~seen, -1e30).softmax(-1) * seen
    return (shares * mask / (1 - P)) @ value


def _drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=tritonite.device).to(dtype)


@pytest.fixture
def state(monkeypatch):
    """Return a function that sets the seed and the offset of the next draw, which each draw advances."""
    box = {"offset": OFFSET, "advances": []}

    def drawn(device, advance, generator=None):
        before, box["offset"] = box["offset"], box["offset"] + advance
        box["advances"].append(advance)
        return SEED, before

    monkeypatch.setattr(forward, "random_state", drawn)
    return box


@pytest.fixture
def small_tiles(monkeypatch):
    tiles = Tiles(Tile(32, 32), Tile(16, 64), Tile(64, 32))
    monkeypatch.setattr(problem.table, "tiles", lambda *_: tiles)


def _check(found, exacts, far):
    for own, expected in zip(found, exacts, strict=True):
        torch.testing.assert_close(own.double(), expected.detach(), atol=far, rtol=far)


@only_interpreted
@pytest.mark.parametrize(("S", "causal"), [(37, True), (70, False)])
def test_flash(state, small_tiles, S, causal):
    """Query heads share key heads. The second call draws other numbers than the first."""
    ops, T = tritonite.overloads(), 70
    query, key, value = (_drawn(2, heads, rows, 16, dtype=torch.float16) for heads, rows in ((2, S), (1, T), (1, T)))
    for offset in (OFFSET, OFFSET + 4 * 32):
        out, logsumexp, *rest = ops[_FLASH](query, key, value, P, causal)
        assert [int(number) for number in rest[4].view(torch.int64)] == [SEED, offset]
        grad = _drawn(*out.shape, dtype=torch.float16)
        given = (grad, query, key, value, out, logsumexp, None, None, S, T, P, causal, rest[4], rest[5])
        grads = ops[f"{_FLASH}_backward"](*given)
        mask = _mask(_flash_keeps, 4, S, T, offset).view(2, 2, S, T)
        wide = [x.double().requires_grad_() for x in (query, key, value)]
        exact = _by_definition(*wide, mask, diagonal=T - S if causal else None)
        _check((out, *grads), (exact, *torch.autograd.grad(exact, wide, grad.double())), 2e-2)
        lost = _by_definition(*wide, ~mask, diagonal=T - S if causal else None)
        assert (out.double() - lost).abs().max() > 0.5
    assert state["advances"] == [4 * 32] * 2


@only_interpreted
@pytest.mark.parametrize(("T", "causal"), [(33, True), (34, False), (35, True), (40, True), (70, False)])
def test_efficient(state, small_tiles, T, causal):
    """The call has a bias and its gradient. Rows begin with any of the four numbers of a draw."""
    ops, S = tritonite.overloads(), 45
    query, key, value = (_drawn(1, rows, 2, size) for rows, size in ((S, 16), (T, 16), (T, 24)))
    bias = _drawn(1, 2, S, 104)[..., :T]
    given = (query, key, value, bias, None, None, None, None, P, int(causal), True)
    out, logsumexp, seed, offset, *_ = ops["_efficient_attention_forward"](*given)
    assert (int(seed), int(offset)) == (SEED, OFFSET) and seed.dtype is torch.int64
    grad = _drawn(*out.shape)
    given = (grad, query, key, value, bias, out, None, None, S, T, logsumexp, P, seed, offset, int(causal), True)
    grads = ops["_efficient_attention_backward"](*given)
    wide = [x.double().requires_grad_() for x in (query, key, value, bias)]
    rows = [x.transpose(1, 2) for x in wide[:3]]
    mask = _mask(_efficient_keeps, 2, S, T, OFFSET)
    exact = _by_definition(*rows, mask, wide[3], diagonal=0 if causal else None).transpose(1, 2)
    _check((out, *grads), (exact, *torch.autograd.grad(exact, wide, grad.double())), 1e-4)
    assert state["advances"] == [-(-2 * S * T // 4) * 4]


@only_interpreted
def test_packed_sequences(state, small_tiles):
    """In flash attention a head's numbers begin after those of the previous sequence."""
    lengths = [(5, 7), (33, 36), (0, 3), (17, 40)]
    ops, (S, T) = tritonite.overloads(), (sum(each) for each in zip(*lengths, strict=True))
    starts = [torch.tensor([0, *np.cumsum(each)], dtype=torch.int32) for each in zip(*lengths, strict=True)]
    query, key, value = (_drawn(rows, 2, 16, dtype=torch.float16) for rows in (S, T, T))
    out, logsumexp, *rest = ops["_flash_attention_forward"](query, key, value, *starts, 33, 40, P, False, False)
    grad = _drawn(*out.shape, dtype=torch.float16)
    given = (grad, query, key, value, out, logsumexp, *starts, 33, 40, P, False, *rest[:2])
    grads = ops["_flash_attention_backward"](*given)
    for i, (rows, keys) in enumerate(lengths):
        (a, b) = (int(each[i]) for each in starts)
        own = [x[None, c : c + n].transpose(1, 2) for x, c, n in ((query, a, rows), (key, b, keys), (value, b, keys))]
        wide = [x.double().requires_grad_() for x in own]
        exact = _by_definition(*wide, _mask(_flash_keeps, 2, rows, keys, OFFSET, first=2 * i))
        exacts = torch.autograd.grad(exact, wide, grad[None, a : a + rows].transpose(1, 2).double())
        places = ((out, a, rows), (grads[0], a, rows), (grads[1], b, keys), (grads[2], b, keys))
        _check([x[None, c : c + n].transpose(1, 2) for x, c, n in places], (exact, *exacts), 2e-2)
    assert state["advances"] == [4 * 2 * 32]


@only_interpreted
@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_replayed_calls_draw_new_numbers(kind):
    """A plan contains neither seed nor probability. It advances the generator and returns seed and offset."""
    ops, query = tritonite.overloads(), _drawn(1, 33, 2, 16, dtype=torch.float16)
    op, back = ops[f"_{kind}_attention_forward"], ops[f"_{kind}_attention_backward"]
    given = dict.fromkeys(op.names) | {"query": query, "key": query, "value": query, "dropout_p": P}
    given |= {"max_q": 33, "max_k": 33, "is_causal": False, "return_debug_mask": False}
    given |= {"custom_mask_type": 0, "compute_log_sumexp": True}
    results, recorder = record(*recordable(op, [given[name] for name in op.names]))
    plan = recorder.plan(results)
    assert plan is not None, recorder.reason
    assert plan.draws == [64 if kind == "flash" else 2180]
    drawn = [kind for step in plan.launches for kind in step.parameters if kind[0] == "drawn"]
    assert drawn == [("drawn", 0, 0), ("drawn", 0, 1)]
    names = ("rng_state", "unused") if kind == "flash" else ("philox_seed", "philox_offset")
    if kind == "efficient":
        assert plan.results[2:4] == drawn
    given |= {"grad_out": query, "grad_out_": query, "out": results[0], "logsumexp": results[1]}
    given |= dict(zip(names, results[2:4], strict=True)) | {"max_seqlen_q": 33, "max_seqlen_k": 33}
    given |= {"bias_requires_grad": False, "shared_storage_dqdkdv": False}
    grads, recorder = record(*recordable(back, [given.get(name) for name in back.names]))
    plan = recorder.plan(grads)
    assert plan is not None, recorder.reason
    assert not plan.draws and len(plan.slots) == (1 if kind == "flash" else 3)


@pytest.mark.parametrize("p", [1.0, 1.5, -0.1, math.nan, 1 - 2.0**-26])
@pytest.mark.parametrize("name", [_FLASH, _EFFICIENT])
def test_invalid_probabilities_raise(name, p):
    op = tritonite.overloads()[name]
    query = _drawn(1, 2, 20, 16, dtype=torch.float16)
    given = (query, query, query)
    with pytest.raises(Decline):
        op(*given, p) if name == _FLASH else op(*given, None, True, p)


def test_declines():
    ops = tritonite.overloads()
    query = _drawn(1, 2, 20, 16, dtype=torch.float16)
    with pytest.raises(Decline, match="its own"):
        ops["_scaled_dot_product_cudnn_attention"](query, query, query, None, True, P)
    starts = torch.tensor([0, 2], dtype=torch.int32, device=tritonite.device)
    with pytest.raises(Decline, match="other numbers"):
        ops["_efficient_attention_forward"](query, query, query, None, starts, starts, 2, 2, P, 0, True)
    with pytest.raises(Decline, match="nothing"):
        ops[_FLASH](query, query[:, :, :0], query[:, :, :0], P)
