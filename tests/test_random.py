"""Random numbers against NumPy's, made by cuRAND's definitions and ATen's order, and against ATen's own on a GPU."""

import math

import numpy as np
import pytest
import torch
from conftest import FULL, some

import tritonite
from tritonite import devices
from tritonite.engine import random as engine
from tritonite.engine.iteration import contiguous_strides, fastest_first
from tritonite.errors import Decline
from tritonite.ops.random.rrelu import rrelu_with_noise
from tritonite.runtime.symbols import Limits

_ATEN = torch.ops.aten
on_cpu = pytest.mark.skipif(devices.current.type != "cpu", reason="of seeds that the CPU's generator draws")
on_gpu = pytest.mark.skipif(devices.current.type == "cpu", reason="ATen's own numbers are a GPU's")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Less than ATen's grid, more, several turns of it, and ends that are none of a block's or of a vector's.
SIZES = (1, 7, 256, 1000, 2049, 8192, 20_001)
SEEDS = ((0, 0), (2**63 - 12345, 4 * 7), (0x9E3779B97F4A7C15 - 2**64, 4 * (2**32 - 2)))
_MASK = np.uint64(0xFFFFFFFF)
TINY = 2.0**-32


# Philox and cuRAND, in NumPy.


def philox(seed, counter, thread):
    """Return four 32-bit numbers for each pair of a counter and a thread, as uint64."""
    counter, thread = (np.asarray(x, dtype=np.uint64) for x in np.broadcast_arrays(counter, thread))
    c = [counter & _MASK, counter >> np.uint64(32), thread & _MASK, thread >> np.uint64(32)]
    key = [np.uint64(seed % 2**64 % 2**32), np.uint64(seed % 2**64 >> 32)]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ key[0],
            second & _MASK,
            (first >> np.uint64(32)) ^ c[3] ^ key[1],
            first & _MASK,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & _MASK, (key[1] + np.uint64(0xBB67AE85)) & _MASK]
    return c


def uniform_of(word):
    return (word.astype(np.float32) * np.float32(TINY) + np.float32(TINY / 2)).astype(np.float32)


def wide_uniform_of(low, high):
    return (low ^ (high << np.uint64(21))).astype(np.float64) * 2.0**-53 + 2.0**-54


def uniforms(seed, counter, thread, wide):
    a, b, c, d = philox(seed, counter, thread)
    return [wide_uniform_of(a, b), wide_uniform_of(c, d)] if wide else [uniform_of(x) for x in (a, b, c, d)]


def normals(seed, counter, thread, wide):
    a, b, c, d = philox(seed, counter, thread)
    if wide:
        radius = np.sqrt(-2 * np.log(wide_uniform_of(a, b)))
        angle = (c ^ (d << np.uint64(21))).astype(np.float64) * 2.0**-52 + 2.0**-53
        return [np.sin(angle * math.pi) * radius, np.cos(angle * math.pi) * radius]
    found = []
    circle = np.float64(np.float32(2 * math.pi)) * TINY
    for x, y in ((a, b), (c, d)):
        radius = np.sqrt(-2 * np.log(uniform_of(x).astype(np.float64)).astype(np.float32))
        angle = (y.astype(np.float32).astype(np.float64) * circle + circle / 2).astype(np.float32).astype(np.float64)
        found += [np.float32(f(angle)) * radius for f in (np.sin, np.cos)]
    return found


def whole_words(seed, counter, thread, wide):
    a, b, c, d = philox(seed, counter, thread)
    return [a << np.uint64(32) | b, c << np.uint64(32) | d] if wide else [a, b, c, d]


def strided(sampler, numel, state, wide=False, threads=2048):
    """The values of elements in order, by ATen's kernels that stride over a grid of `threads` at most."""
    seed, offset = state
    threads = min(threads, -(-numel // 256) * 256)
    values = 2 if wide else 4
    element = np.arange(numel)
    turn, rest = element // (threads * values), element % (threads * values)
    drawn = sampler(seed, np.uint64(offset // 4) + turn.astype(np.uint64), rest % threads, wide)
    return np.choose(rest // threads, drawn)


def side_by_side(numel, vector, state, threads):
    """The uniform numbers of elements in order, by ATen's kernels that load vectors."""
    seed, offset = state
    element = np.arange(numel)
    turn, rest = element // (threads * vector), element % (threads * vector)
    lane = rest % vector
    counter = offset // 4 + turn * max(1, vector // 4) + lane // 4
    drawn = uniforms(seed, counter, rest // vector, False)
    return np.choose(lane % 4, drawn)


def grid_of(numel):
    return min(2048, -(-numel // 256) * 256)


@pytest.fixture
def state(monkeypatch):
    """Sets the seed and offset that draws have, one after the other; the generator moves on as it is asked to."""
    box = {"advances": []}

    def give(seed, offset):
        box["next"] = offset

        def drawn(device, advance, generator=None):
            box["advances"].append(advance)
            before, box["next"] = box["next"], box["next"] + advance
            return seed, before

        monkeypatch.setattr(engine, "random_state", drawn)
        return seed, offset

    give.box = box
    return give


def _run(name, *args, **kwargs):
    """A call of an overload's kernel, which must not decline."""
    return tritonite.overloads()[name](*args, **kwargs)


def _numpy(tensor):
    return tensor.double().cpu().numpy() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.cpu().numpy()


def _rounded(values, dtype):
    return _numpy(torch.from_numpy(np.ascontiguousarray(values)).to(dtype))


def _near(actual, expected, dtype, eps=2):
    bound = eps * torch.finfo(dtype).eps
    expected = np.asarray(expected, dtype=np.float64)
    wrong = np.abs(_numpy(actual).astype(np.float64) - expected) > bound * np.abs(expected) + 1e-300
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}"


# Kernels against NumPy.


@on_cpu
def test_philox_is_the_published_one():
    """The known answers of Random123 (Salmon et al. 2011)."""
    zeros = philox(0, 0, 0)
    assert [int(x) for x in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox(-1, 2**64 - 1, 2**64 - 1)
    assert [int(x) for x in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@on_cpu
@pytest.mark.parametrize(("dtype", "seed_and_offset"), some(FLOATS, SEEDS), ids=str)
def test_uniform_numbers_are_curands(dtype, seed_and_offset, state):
    wide = dtype is torch.float64
    for numel in SIZES:
        given = state(*seed_and_offset)
        x = torch.empty(numel, dtype=dtype)
        _run("uniform_", x)
        drawn = strided(uniforms, numel, given, wide)
        expected = _rounded(drawn, dtype)
        assert np.array_equal(_numpy(x), np.where(expected == 1, 0, expected))
        values = 2 if wide else 4
        assert state.box["advances"][-1] == 4 * -(-numel // (grid_of(numel) * values))
    state(*seed_and_offset)
    _run("uniform_", x, -3.0, 5.0)
    near = _rounded(drawn.astype(np.float64) * 8 - 3, dtype)
    assert np.abs(_numpy(x) - np.where(near == 5, -3, near)).max() <= 4 * torch.finfo(dtype).eps
    assert (_numpy(x) >= -3).all() and (_numpy(x) < 5).all()


@on_cpu
@pytest.mark.parametrize(("dtype", "seed_and_offset"), some(FLOATS, SEEDS), ids=str)
def test_normal_numbers_are_curands(dtype, seed_and_offset, state):
    wide = dtype is torch.float64
    for numel in SIZES[::2]:
        given = state(*seed_and_offset)
        x = torch.empty(numel, dtype=dtype)
        _run("normal_", x, 0.0, 1.0)
        drawn = strided(normals, numel, given, wide)
        # Next to a zero of the sine NumPy's own, of a rounded angle, is no reference in float64.
        assert np.abs(_numpy(x) - drawn).max() < 1e-14 if wide else not _near(x, _rounded(drawn, dtype), dtype)
    state(*seed_and_offset)
    _run("normal_", x, 7.0, 0.25)
    assert np.abs(_numpy(x) - _rounded(drawn.astype(np.float64) * 0.25 + 7, dtype)).max() <= 16 * torch.finfo(dtype).eps


TRANSFORMED = {
    "exponential_": ((1.5,), lambda u, eps: -np.where(u >= 1 - eps / 2, -eps / 2, np.log(u)) / 1.5),
    "geometric_": ((0.3,), lambda u, eps: np.ceil(np.log(u) / np.log1p(-np.float32(0.3) if eps > 1e-10 else -0.3))),
    "cauchy_": ((0.0, 2.0), lambda u, eps: 2 * np.tan(math.pi * (np.clip(u, eps, 1 - eps) - 0.5))),
}


@on_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_numbers_are_of_uniform_ones(name, dtype, state):
    wide, numel = dtype is torch.float64, 9000
    given = state(5, 8)
    numbers, transform = TRANSFORMED[name]
    x = torch.empty(numel, dtype=dtype)
    _run(name, x, *numbers)
    drawn = strided(uniforms, numel, given, wide).astype(np.float64)
    expected = transform(drawn, torch.finfo(torch.float64 if wide else torch.float32).eps)
    if name == "cauchy_":
        # The tangent of a rounded angle.
        expected = _rounded(expected, dtype)
        there = np.isfinite(expected) & (expected != 0)
        far = np.abs(_numpy(x)[there] / expected[there] - 1)
        assert there.mean() > 0.99 and far.max() < (1e-9 if wide else 0.1)
        assert np.median(far) < 2 * torch.finfo(dtype).eps
    elif name == "geometric_":
        assert (_numpy(x) == _rounded(expected, dtype)).mean() > 0.999
        assert np.abs(_numpy(x) - _rounded(expected, dtype)).max() <= 1
    else:
        _near(x, _rounded(expected, dtype), dtype)


@on_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_normal_numbers_are_scaled_and_moved_one_after_the_other(dtype, state):
    """Each step is rounded to the result's dtype, as ATen's are."""
    drawn = strided(normals, 3000, state(5, 8), dtype is torch.float64)
    deviations, means = torch.rand(3000, dtype=dtype) * 3, torch.randn(3000, dtype=dtype)
    scaled = _rounded(_rounded(drawn, dtype).astype(np.float64) * _numpy(deviations), dtype).astype(np.float64)
    for mean, expected in ((means, scaled + _numpy(means)), (0.3, scaled + torch.tensor(0.3, dtype=dtype).item())):
        state(5, 8)
        x = _run("normal.Tensor_Tensor" if mean is means else "normal.float_Tensor", mean, deviations)
        bound = 3 * torch.finfo(dtype).eps * (np.abs(scaled) + np.abs(expected))
        assert (np.abs(_numpy(x) - expected) <= bound).all()


@pytest.mark.parametrize("deviation", [-1.0, math.nan])
def test_a_deviation_that_is_none_leaves_the_generator_alone(deviation, device, path):
    """Also of a call that is repeated, in which the host waits for the deviations before it draws."""
    good, bad = torch.rand(40, device=device), torch.rand(40, device=device)
    bad[17] = deviation
    generator = torch.Generator(device).manual_seed(3)
    tritonite.reset_stats()
    with tritonite.use_gems(include="normal"):
        for _ in range(2):
            torch.normal(0.5, good, generator=generator)
            torch.normal(good, good, generator=generator)
        before = generator.get_state()
        for mean in (0.5, good):
            with pytest.raises(RuntimeError, match="all elements of std >= 0"):
                torch.normal(mean, bad, generator=generator)
        assert torch.equal(generator.get_state(), before)
        assert torch.normal(0.5, bad[:0], generator=generator).shape == (0,)
    for name, calls in (("normal.float_Tensor", 3), ("normal.Tensor_Tensor", 2)):
        counts = tritonite.stats()[name]
        assert counts.launched + counts.replayed == calls and sum(counts.declined.values()) == 1


@on_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_log_normal_numbers_are_of_normal_ones(dtype, state):
    given = state(5, 8)
    x = torch.empty(3000, dtype=dtype)
    _run("log_normal_", x, 0.5, 0.25)
    expected = np.exp(strided(normals, 3000, given, dtype is torch.float64).astype(np.float64) * 0.25 + 0.5)
    _near(x, expected, dtype, eps=4)


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


@on_cpu
@pytest.mark.parametrize("dtype", (torch.bool, *INTEGERS, *FLOATS), ids=str)
def test_integers_are_the_random_bits_modulo_the_range(dtype, state):
    ends = [(0, 2), (0, 100)] if dtype is not torch.bool else [(0, 2)]
    if dtype in (torch.int32, torch.int64, torch.float64):
        ends += [(-5, 2**28 - 5), (-5, 2**28 - 6), (-(2**31), 2**31 - 1)]
    if dtype is torch.int64:
        ends += [(-(2**63), 2**63 - 1), (-7, 2**62), (-(2**63), None), (5, None)]
    for low, high in ends:
        # Long enough for a second round of ATen's grid.
        for numel in (7, 20_001 if FULL else 8193):
            given = state(*SEEDS[1])
            x = torch.empty(numel, dtype=dtype)
            _run("random_.from", x, low, high)
            span = (2**63 if high is None else high) - low
            wide = span >= 2**28
            drawn = [int(word) for word in strided(whole_words, numel, given, wide)]
            # ATen's integers wrap around at 64 bits.
            found = [(word % span + low + 2**63) % 2**64 - 2**63 if span < 2**64 else word for word in drawn]
            if span == 2**64:
                found = [(word + 2**63) % 2**64 - 2**63 for word in drawn]
            assert x.tolist() == found


@on_cpu
@pytest.mark.parametrize("dtype", (torch.bool, *INTEGERS[:5], *FLOATS), ids=str)
def test_integers_without_ends_are_those_of_the_dtype(dtype, state):
    given = state(9, 4)
    x = torch.empty(5000, dtype=dtype)
    _run("random_", x)
    wide = dtype in (torch.int64, torch.float64)
    digits = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}
    spans = {torch.bool: 2} | {d: 2**bits + 1 for d, bits in digits.items()}
    span = spans.get(dtype) or torch.iinfo(dtype).max + 1
    assert x.tolist() == [int(word) % span for word in strided(whole_words, 5000, given, wide)]


@on_cpu
@pytest.mark.parametrize("dtype", (torch.bool, torch.uint8, torch.int64, *FLOATS), ids=str)
def test_bernoulli_numbers_are_of_uniform_ones(dtype, state):
    numel = 9001
    given = state(3, 12)
    x = torch.empty(numel, dtype=dtype)
    _run("bernoulli_.float", x, 0.3)
    drawn = strided(uniforms, numel, given, dtype is torch.float64)
    assert np.array_equal(_numpy(x), drawn < (0.3 if dtype is torch.float64 else np.float32(0.3)))
    for shape in ((numel,), (50, 31), (3, 4, 5)):
        p = torch.rand(shape)
        x = torch.empty(shape, dtype=dtype)
        given = state(3, 12)
        _run("bernoulli_.Tensor", x, p)
        assert state.box["advances"][-1] == 12
        drawn = side_by_side(x.numel(), 4, given, 2**40).reshape(shape)
        assert np.array_equal(_numpy(x), drawn <= p.numpy())


@on_cpu
def test_bernoulli_goes_along_memory_where_both_lie_so(state):
    p = torch.rand(13, 9).t()
    given = state(3, 12)
    x = torch.empty(13, 9).t()
    _run("bernoulli_.Tensor", x, p)
    assert np.array_equal(x.t().numpy(), side_by_side(117, 4, given, 2**40).reshape(13, 9) <= p.t().numpy())
    # The result is contiguous, whatever the layout of the probabilities.
    state(3, 12)
    x = _run("bernoulli", p)
    assert x.is_contiguous()
    assert np.array_equal(x.numpy(), side_by_side(117, 4, given, 2**40).reshape(9, 13) <= p.numpy())


def _layouts(make):
    yield "transposed", make(40, 60).t()
    yield "gaps", make(40, 60)[::2, 1::3]
    yield "permuted with gaps", make(20, 30, 8).permute(2, 0, 1)[:, ::2]
    yield "channels last", make(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield "offset", make(1001)[1:]
    yield "zero-dim", make(1)[0]


@on_cpu
def test_elements_come_in_the_order_of_memory(state):
    for label, x in _layouts(lambda *shape: torch.full(shape, -1.0)):
        given = state(1, 0)
        _run("uniform_", x)
        drawn = torch.from_numpy(strided(uniforms, x.numel(), given))
        order = fastest_first(x.shape, [x.stride()])
        expected = drawn.as_strided(x.shape, contiguous_strides(x.shape, order))
        assert torch.equal(x, expected), label
        if x._base is not None and label.endswith("gaps"):
            assert int((x._base == -1).sum()) == x._base.numel() - x.numel()


@on_cpu
def test_complex_numbers_are_of_two(state):
    given = state(1, 0)
    x = torch.empty(3000, dtype=torch.complex64)
    _run("normal_", x, 0.0, 1.0)
    expected = strided(normals, 6000, given).astype(np.float64) / math.sqrt(2)
    assert np.abs(torch.view_as_real(x).flatten().numpy() - expected).max() < 1e-6


DROPOUT_SIZES = (8, 12, 13, 14, 2048 * 8 + 8, 20_002, 20_004, 20_008, 20_001)


@on_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout_keeps_what_atens_does(dtype, state):
    for numel in DROPOUT_SIZES:
        x = torch.randn(numel, dtype=dtype)
        vector = next(v for v in (16 // dtype.itemsize, 4, 2, 1) if v <= 16 // dtype.itemsize and numel % v == 0)
        for name, p, given_p in (("native_dropout", 0.3, 0.7), ("_fused_dropout", 0.7, 0.7)):
            given = state(11, 4 * 5)
            out, mask = _run(name, x, p, True) if name == "native_dropout" else _run(name, x, p)
            drawn = (
                strided(uniforms, numel, given) if vector == 1 else side_by_side(numel, vector, given, grid_of(numel))
            )
            acc = np.float64 if dtype is torch.float64 else np.float32
            kept = drawn < acc(given_p if name == "_fused_dropout" else 1.0 - p)
            assert mask.dtype is (torch.bool if name == "native_dropout" else torch.uint8)
            assert np.array_equal(mask.bool().numpy(), kept)
            scale = acc(1 / np.float64(acc(1.0 - p if name == "native_dropout" else p)))
            expected = (x.to(torch.float64 if acc is np.float64 else torch.float32).numpy() * acc(1) * kept) * scale
            assert np.array_equal(_numpy(out), _rounded(expected, dtype))
            assert state.box["advances"][-1] == 4 * -(-numel // (grid_of(numel) * 4))


@on_cpu
@pytest.mark.parametrize(
    "numel, programs",
    [(2048 * 8, 2), (2048 * 8 + 8, 3), (1024 * 8, 1), (3000 * 8, 3), (777_000, 95) if FULL else (101_000, 13)],
)
def test_no_program_of_dropout_is_without_elements(numel, programs, state, monkeypatch):
    grids, launched = [], engine.draw_kernel

    class Noting:
        def __getitem__(self, grid):
            grids.append(grid)
            return launched[grid]

    monkeypatch.setattr(engine, "draw_kernel", Noting())
    given = state(11, 4 * 5)
    _, mask = _run("native_dropout", torch.ones(numel, dtype=torch.float16), 0.5, True)
    assert np.array_equal(mask.numpy(), side_by_side(numel, 8, given, grid_of(numel)) < 0.5)
    # A program simulates 1,024 of ATen's 2,048 threads in a round, each with a vector of 8.
    assert grids == [(programs,)]


@on_cpu
def test_dropout_of_other_layouts(state):
    for label, x in _layouts(torch.randn):
        given = state(2, 0)
        out, mask = _run("native_dropout", x, 0.5, None)
        assert out.stride() == torch.empty_like(x).stride() == mask.stride(), label
        assert torch.equal(out, x * mask * 2)
        if label == "gaps":
            assert np.array_equal(mask.flatten().numpy(), strided(uniforms, x.numel(), given) < 0.5)


@on_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout_of_addresses_takes_vectors_that_are_aligned(dtype, state):
    for first in (1, 2, 4, 8):
        x = torch.randn(20_000 + first).to(dtype)[first:]
        vector = math.gcd(first, 16 // dtype.itemsize)
        given = state(2, 0)
        mask = _run("native_dropout", x, 0.5, None)[1]
        drawn = side_by_side(20_000, vector, given, grid_of(20_000)) if vector > 1 else strided(uniforms, 20_000, given)
        assert np.array_equal(mask.numpy(), drawn < 0.5)


def test_dropout_of_addresses_is_right_through_the_dispatcher(device, path):
    """No plan serves one that is for another address."""
    base = torch.randn(2056, device=device)
    with tritonite.use_gems(include="native_dropout"):
        for _ in range(2):
            for first in (0, 1, 2, 3, 4):
                torch.manual_seed(4)
                mask = torch.native_dropout(base[first : first + 2048], 0.5, True)[1]
                torch.manual_seed(4)
                state = tritonite.overloads()["native_dropout"](base[first : first + 2048], 0.5, True)
                assert torch.equal(mask, state[1])
    assert not tritonite.stats()["native_dropout"].declined


@on_cpu
def test_dropout_spoils_what_is_not_finite(state):
    state(2, 0)
    out, mask = _run("native_dropout", torch.full((64,), torch.inf), 0.5, True)
    assert bool((out.isnan() == ~mask).all())


@on_cpu
def test_dropout_that_drops_all_or_nothing_draws_nothing(state):
    state(2, 0)
    x = torch.randn(5, 6).t()
    for arguments, expected in (((0.5, False), x), ((1.0, True), torch.zeros(6, 5)), ((1.0, None), torch.zeros(6, 5))):
        out, mask = _run("native_dropout", x, *arguments)
        assert torch.equal(out, expected) and out.stride() == x.stride()
        assert mask.dtype is torch.bool and bool((mask == (arguments[1] is False)).all())
    assert state.box["advances"] == []


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_leaky_slopes_are_uniform_numbers(dtype, state):
    wide, numel = dtype is torch.float64, 9001
    given = state(3, 12)
    x, noise = torch.randn(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
    out = _run("rrelu_with_noise", x, noise, 0.125, 1 / 3, True)
    slope = _rounded(strided(uniforms, numel, given, wide), dtype).astype(np.float64) * (1 / 3 - 0.125) + 0.125
    expected = np.where(_numpy(x) <= 0, _rounded(slope if wide else slope.astype(np.float32), dtype), 1)
    _near(noise, expected, dtype, eps=1)
    assert torch.equal(out, torch.where(x <= 0, x * noise, x))
    grad = _run("rrelu_with_noise_backward", torch.ones_like(x), x, noise, 0.125, 1 / 3, True, False)
    assert torch.equal(grad, noise)
    for in_training, slope in ((False, (0.125 + 1 / 3) / 2),):
        still = _run("rrelu_with_noise", x, noise, 0.125, 1 / 3, in_training)
        torch.testing.assert_close(still, torch.nn.functional.leaky_relu(x, slope))


@pytest.mark.parametrize("training", [True, False])
def test_noise_on_another_device_is_atens_to_refuse(training):
    """A tensor of noise without dimensions is no scalar either."""
    x, noise = torch.ones((), device=tritonite.device), torch.ones((), device="meta")
    with pytest.raises(Decline, match="noise on meta"):
        rrelu_with_noise(x, noise, 0.125, 0.25, training)


@pytest.mark.declines("refused slopes")
def test_a_slope_that_is_none_is_atens_to_refuse_where_the_result_is_kept(device):
    x = torch.ones(3, device=device)
    with tritonite.use_gems(include="rrelu_with_noise_backward", faster_only=False):
        for lower in (float("nan"), -5.0):
            with pytest.raises(RuntimeError, match="negative slope"):
                _ATEN.rrelu_with_noise_backward(x, x, x, lower, 1.0, False, True)


@pytest.mark.declines("ATen refuses the range")
def test_unsigned_integers_of_64_bits_without_an_end_are_atens_to_refuse(device):
    x = torch.zeros(3, dtype=torch.uint64, device=device)
    with tritonite.use_gems(include="random_.from", faster_only=False):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of bounds"):
                _ATEN.random_(x, 3, None)


def permutation(n, state):
    """ATen's, by its keys, sorted and shuffled where they are equal."""
    seed, offset = state
    bits = math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9))))
    width = 32 if bits <= 32 else 64
    words = strided(whole_words, n, state, wide=True)
    # From the least integer on, whose last bits are 0 but for the highest.
    keys = [int(word) % (2**width - 1) % 2**bits for word in words]
    found = sorted(range(n), key=lambda i: keys[i])
    offset += 4 * -(-n // (grid_of(n) * 2))
    begin = 0
    while begin < n:
        end = next((i for i in range(begin, n) if keys[found[i]] != keys[found[begin]]), n)
        for drawn, i in enumerate(range(end - begin - 1, 0, -1)):
            r = int(philox(seed, offset // 4 + drawn // 4, begin)[drawn % 4]) % (i + 1)
            found[begin + i], found[begin + r] = found[begin + r], found[begin + i]
        begin = end
    return found, len(set(keys)) < n


@on_cpu
def test_permutations_are_atens(state):
    equal = 0
    for n, seeds in ((1, 1), (2, 20), (3, 20), (7, 20), (20, 20), (100, 10), (3000, 1)):
        for seed in range(seeds if FULL else -(-seeds // 3)):
            expected, repeated = permutation(n, state(seed, 8))
            equal += repeated
            dtype = (torch.int64, torch.int16, torch.float32)[seed % 3]
            assert _run("randperm", n, dtype=dtype).tolist() == expected
            assert state.box["advances"][-2:] == [4 * -(-n // (grid_of(n) * 2)), -(-n // 4) * 4]
    assert equal >= 2


@on_cpu
def test_long_permutations_are_atens(state):
    """Keys have 27 to 33 bits, those of 32 with a sign. One program sorts the numbers, or several do."""
    for n, bits in ((4097, 27), (9000, 29), (25_000, 32), (33_000, 33)) if FULL else ((4097, 27), (30_100, 33)):
        expected, _ = permutation(n, state(n, 8))
        assert bits == math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9))))
        dtype = (torch.int32, torch.int64)[n % 2]
        assert _run("randperm", n, dtype=dtype).tolist() == expected
        assert state.box["advances"][-2:] == [4 * -(-n // (grid_of(n) * 2)), -(-n // 4) * 4]


@on_cpu
def test_long_runs_of_equal_keys_cross_programs(state):
    """Runs of many lengths around the ends of what a program shuffles."""
    lengths = [1, 3, 2] * 1000 + [40, 1, 7] * 40
    keys = torch.tensor([key for key, count in enumerate(lengths) for _ in range(count)], dtype=torch.int32)
    n = len(keys)
    assert n > engine._SHUFFLED
    seed, offset = state(3, 16)
    out = torch.empty(n, dtype=torch.int64)
    engine.permute(keys, out, 16, None)
    assert out.tolist() == shuffled(lengths, seed, offset)


def shuffled(lengths, seed, offset):
    """Return numbers in runs of `lengths`, each shuffled by the random numbers of its first element's thread."""
    expected, begin = list(range(sum(lengths))), 0
    for count in lengths:
        for drawn, i in enumerate(range(count - 1, 0, -1)):
            r = int(philox(seed, offset // 4 + drawn // 4, begin)[drawn % 4]) % (i + 1)
            expected[begin + i], expected[begin + r] = expected[begin + r], expected[begin + i]
        begin += count
    return expected


@on_cpu
def test_equal_keys_are_shuffled_within_their_run(state):
    """Runs of every length, which keys that are drawn hardly ever make."""
    lengths = (1, 2, 3, 9, 1, 14, 5, 5)
    keys = torch.tensor([key for key, count in enumerate(lengths) for _ in range(count)], dtype=torch.int32)
    n = len(keys)
    seed, offset = state(3, 16)
    out = torch.empty(n, dtype=torch.int64)
    engine.permute(keys, out, 8, None)
    assert out.tolist() == shuffled(lengths, seed, offset)


@on_cpu
def test_tensors_beyond_32_bits_are_drawn_in_halves(monkeypatch, state):
    """ATen splits tensors of 2 GiB and more, after it has advanced the generator for the whole tensor."""
    monkeypatch.setattr(engine, "_within_32_bits", lambda numel, itemsize: iter([(0, 500), (500, 501)]))
    given = state(1, 0)
    x = torch.empty(1001)
    _run("uniform_", x)
    first, second = (strided(uniforms, n, (given[0], offset)) for n, offset in ((500, 4), (501, 8)))
    assert np.array_equal(x.numpy(), np.concatenate([first, second]))


def test_a_tensor_is_halved_until_32_bits_reach_all_of_it():
    assert list(engine._within_32_bits(2**29 - 1, 4)) == [(0, 2**29 - 1)]
    assert list(engine._within_32_bits(2**29 + 3, 4)) == [(0, 2**28 + 1), (2**28 + 1, 2**28 + 2)]
    assert list(engine._within_32_bits(2**31, 1)) == [(0, 2**30), (2**30, 2**30)]


@pytest.mark.declines("ATen refuses the arguments")
def test_what_aten_refuses_is_declined(device):
    x, whole = torch.empty(4, device=device), torch.empty(4, dtype=torch.int32, device=device)
    refused = [
        lambda: x.uniform_(1.0, 0.0),
        lambda: x.uniform_(-3e38, 3e38),
        lambda: x.normal_(0.0, -1.0),
        lambda: x.exponential_(0.0),
        lambda: x.exponential_(-1.0),
        lambda: x.log_normal_(0.0, 0.0),
        lambda: x.cauchy_(0.0, -1.0),
        lambda: x.geometric_(0.0),
        lambda: x.geometric_(1.0),
        lambda: x.bernoulli_(1.5),
        lambda: x.bernoulli_(-0.5),
        lambda: x.random_(5, 5),
        lambda: whole.random_(0, 2**40),
        lambda: torch.rand(4, dtype=torch.int32, device=device),
        lambda: torch.randint(7, 7, (3,), device=device),
        lambda: x.expand(3, 4).uniform_(),
    ]
    with tritonite.use_gems(include="*"):
        for call in refused:
            with pytest.raises(RuntimeError):
                call()


# The generator.


def _draws(device, generator=None):
    x = torch.empty(300, device=device)
    keywords = {} if generator is None else {"generator": generator}
    yield torch.rand(300, device=device, **keywords)
    yield torch.randn(300, device=device, **keywords)
    yield torch.randint(0, 9, (300,), device=device, **keywords)
    yield x.clone().exponential_(2.0, **keywords)
    yield torch.bernoulli(torch.full((300,), 0.5, device=device), **keywords)
    if generator is None:
        yield torch.nn.functional.dropout(torch.ones(300, device=device), 0.5)


def test_a_seed_gives_the_same_numbers_again(device, path):
    with tritonite.use_gems(include="*"):
        for _ in range(2):
            torch.manual_seed(3)
            first = list(_draws(device))
            second = list(_draws(device))
            torch.manual_seed(3)
            again = list(_draws(device))
            assert all(map(torch.equal, first, again))
            assert not any(map(torch.equal, first, second))
    assert not any(counts.declined for name, counts in tritonite.stats().items() if "rand" in name)


def test_a_generator_of_ones_own_leaves_the_default_one_alone(device, path):
    place = torch.cuda if device == "cuda" else torch
    with tritonite.use_gems(include="*"):
        before = place.get_rng_state()
        drawn = [list(_draws(device, torch.Generator(device).manual_seed(5))) for _ in range(2)]
        assert all(map(torch.equal, *drawn))
        assert torch.equal(place.get_rng_state(), before)


def test_a_state_that_is_set_again_gives_the_same_numbers(device, path):
    place = torch.cuda if device == "cuda" else torch
    with tritonite.use_gems(include="*"):
        list(_draws(device))
        state = place.get_rng_state()
        first = list(_draws(device))
        place.set_rng_state(state)
        assert all(map(torch.equal, first, _draws(device)))


def test_both_paths_draw_the_same(device):
    from conftest import calls_through

    found = []
    for way in ("native", "python"):
        with calls_through(way), tritonite.use_gems(include="*"):
            torch.manual_seed(8)
            found.append([*_draws(device), *_draws(device)])
    assert all(map(torch.equal, *found))


def test_checkpoints_draw_the_same_again(device, path):
    x = torch.randn(64, 64, device=device, requires_grad=True)

    def drop(x):
        return torch.nn.functional.dropout(x, 0.5).sin()

    with tritonite.use_gems(include="*"):
        torch.manual_seed(1)
        out = torch.utils.checkpoint.checkpoint(drop, x, use_reentrant=False)
        out.sum().backward()
        torch.manual_seed(1)
        y = x.detach().clone().requires_grad_()
        drop(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_numbers_are_replayed_and_checked(device):
    """One plan serves all numbers within the limits, and others go to ATen."""
    from conftest import calls_through

    with calls_through("native"), tritonite.use_gems(include="*"):
        x = torch.empty(1000, device=device)
        for deviation in (1.0, 0.5, 4.0):
            x.normal_(100.0, deviation)
            assert abs(float(x.double().std()) - deviation) < 0.1 * deviation
        for p in (0.0, 0.25, 1.0):
            assert abs(float(x.bernoulli_(p).mean()) - p) < 0.06
        for number in (-1.0, math.nan):
            with pytest.raises(RuntimeError):
                x.normal_(0.0, number)
            with pytest.raises(RuntimeError):
                x.bernoulli_(number)
    stats = tritonite.stats()
    assert (stats["normal_"].launched, stats["normal_"].replayed) == (1, 2)
    assert (stats["bernoulli_.float"].launched, stats["bernoulli_.float"].replayed) == (1, 2)


def test_limits_have_a_least_number():
    limits = Limits(0, 1, 1.0, True, 0.0)
    assert limits.hold(0.0) and limits.hold(-0.0) and limits.hold(1.0) and limits.hold(1)
    assert not any(map(limits.hold, (-0.1, 1.1, math.nan, math.inf, -math.inf, 2, -1)))
    assert limits.and_(Limits(0, 9, 9.0, False, 0.5)).least == 0.5


def test_explaining_draws_nothing(device):
    place = torch.cuda if device == "cuda" else torch
    x = torch.empty(10, device=device)
    before = place.get_rng_state()
    assert "draw_kernel" in tritonite.explain("normal_", x, 0.0, 1.0)
    assert torch.equal(place.get_rng_state(), before)


@on_cpu
def test_atens_numbers_are_a_users_unless_asked():
    torch.manual_seed(0)
    expected = torch.rand(5)
    tritonite.enable()
    torch.manual_seed(0)
    assert torch.equal(torch.rand(5), expected)


# Statistics, of seeds that are fixed.


@pytest.fixture
def drawn(device):
    def call(function):
        with tritonite.use_gems(include="*"):
            torch.manual_seed(20240229)
            return function().double().cpu().numpy()

    return call


N = 100_000
# For bounds that follow from the number of samples.
FEW = N if FULL else 20_000


def _kolmogorov(values, distribution):
    """The largest distance to a distribution function, times the root of the count."""
    values = np.sort(values)
    expected = distribution(values)
    steps = np.arange(len(values) + 1) / len(values)
    return math.sqrt(len(values)) * max((steps[1:] - expected).max(), (expected - steps[:-1]).max())


_erf = np.vectorize(math.erf)


@pytest.mark.parametrize(
    ("make", "distribution"),
    [
        (lambda d: torch.rand(FEW, device=d), lambda x: x),
        (lambda d: torch.rand(FEW, device=d, dtype=torch.float64), lambda x: x),
        (lambda d: torch.randn(FEW, device=d), lambda x: (1 + _erf(x / math.sqrt(2))) / 2),
        (lambda d: torch.randn(FEW, device=d, dtype=torch.float64), lambda x: (1 + _erf(x / math.sqrt(2))) / 2),
        (lambda d: torch.empty(FEW, device=d).exponential_(2.0), lambda x: 1 - np.exp(-2 * x)),
        (lambda d: torch.empty(FEW, device=d).cauchy_(1.0, 2.0), lambda x: 0.5 + np.arctan((x - 1) / 2) / math.pi),
        (
            lambda d: torch.empty(FEW, device=d).log_normal_(0.5, 0.25),
            lambda x: (1 + _erf((np.log(x) - 0.5) / 0.25 / math.sqrt(2))) / 2,
        ),
        (lambda d: torch.empty(FEW, device=d).uniform_(-2, 6), lambda x: (x + 2) / 8),
    ],
    ids=["rand", "rand64", "randn", "randn64", "exponential", "cauchy", "log_normal", "uniform"],
)
def test_distributions(make, distribution, drawn, device):
    """Kolmogorov and Smirnov's: beyond 1.95 one in a thousand."""
    assert _kolmogorov(drawn(lambda: make(device)), distribution) < 1.95


def _chi_square(values, probabilities):
    counts = np.bincount(values.astype(np.int64), minlength=len(probabilities))[: len(probabilities)]
    expected = np.asarray(probabilities) * len(values)
    return float(((counts - expected) ** 2 / expected).sum())


def test_discrete_distributions(drawn, device):
    """Pearson's chi-square; of k classes it is k - 1 on average, and its deviation is the root of twice that."""
    values = drawn(lambda: torch.randint(0, 50, (FEW,), device=device))
    assert values.min() == 0 and values.max() == 49
    assert abs(_chi_square(values, [1 / 50] * 50) - 49) < 4 * math.sqrt(98)
    values = drawn(lambda: torch.empty(FEW, device=device).geometric_(0.25))
    assert values.min() == 1
    tail = [0.25 * 0.75**k for k in range(19)]
    merged = np.minimum(values, 20) - 1
    assert abs(_chi_square(merged, [*tail, 1 - sum(tail)]) - 19) < 4 * math.sqrt(38)
    for p in (0.1, 0.5):
        assert abs(drawn(lambda p=p: torch.empty(N, device=device).bernoulli_(p)).mean() - p) < 0.006
        by = drawn(lambda p=p: torch.bernoulli(torch.full((N,), p, device=device)))
        assert abs(by.mean() - p) < 0.006
        kept = drawn(lambda p=p: torch.nn.functional.dropout(torch.ones(N, device=device), p))
        assert abs(kept.mean() - 1) < 0.012


def test_neighbours_and_turns_are_independent(drawn, device):
    values = drawn(lambda: torch.randn(N, device=device))
    for lag in (1, 2, 3, 4, 256, 2048, 8192):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 0.015
    assert abs(values.mean()) < 0.012 and abs(values.std() - 1) < 0.01
    assert abs((values**3).mean()) < 0.03 and abs((values**4).mean() - 3) < 0.1


# ATen's own, on a GPU.

GPU_SIZES = (1, 5, 255, 1024, 4097, 300_001, 2_500_000)
OFFSETS = (0, 8, 4 * (2**32 - 1))


def _in_place(name, *numbers):
    return lambda x, g: getattr(x, name)(*numbers, generator=g)


_SLOPES = (0.125, 1 / 3, True)
DRAWN = {
    "uniform_": (FLOATS, _in_place("uniform_")),
    "uniform_ between": (FLOATS, _in_place("uniform_", -1.25, 3.5)),
    "normal_": (FLOATS, _in_place("normal_")),
    "normal_ of numbers": (FLOATS, _in_place("normal_", 3.0, 0.7)),
    "log_normal_": (FLOATS, _in_place("log_normal_", 0.5, 0.25)),
    "exponential_": (FLOATS, _in_place("exponential_", 1.5)),
    "cauchy_": (FLOATS, _in_place("cauchy_", 0.5, 2.0)),
    "geometric_": ((*FLOATS, torch.int64, torch.uint8), _in_place("geometric_", 0.3)),
    "bernoulli_": ((*FLOATS, torch.bool, torch.int32), _in_place("bernoulli_", 0.3)),
    "random_": ((*FLOATS, torch.bool, *INTEGERS[:5]), _in_place("random_")),
    "random_ to": ((*FLOATS, *INTEGERS), _in_place("random_", 100)),
    "random_ from far": ((torch.int32, torch.int64, torch.float64), _in_place("random_", -5, 2**30)),
    "random_ at 28 bits": ((torch.int32, torch.int64, torch.float64), _in_place("random_", 0, 2**28)),
    "random_ below 28 bits": ((torch.int32, torch.int64, torch.float64), _in_place("random_", 0, 2**28 - 1)),
    "random_ whole": ((torch.int64,), _in_place("random_", -(2**63), None)),
    "rand_like": ((*FLOATS, torch.complex64), lambda x, g: torch.rand_like(x)),
    "randn_like": ((*FLOATS, torch.complex64), lambda x, g: torch.randn_like(x)),
    "randint_like": ((torch.int64, torch.float32), lambda x, g: torch.randint_like(x, -3, 50)),
    "rand": (FLOATS, lambda x, g: torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=g)),
    "randn": (FLOATS, lambda x, g: torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=g)),
    "randint": (INTEGERS[:5], lambda x, g: torch.randint(3, 99, x.shape, dtype=x.dtype, device=x.device, generator=g)),
    "randperm": (
        (torch.int64, torch.int32, torch.float32),
        lambda x, g: torch.randperm(x.numel(), dtype=x.dtype, device=x.device, generator=g),
    ),
    "bernoulli": (FLOATS, lambda x, g: torch.bernoulli(x.abs() % 1, generator=g)),
    "bernoulli_ by": ((*FLOATS, torch.int32), lambda x, g: x.bernoulli_((x.abs() % 1).float() * 0.9, generator=g)),
    "normal around": (FLOATS, lambda x, g: torch.normal(x, 0.7, generator=g)),
    "normal of deviations": (FLOATS, lambda x, g: torch.normal(0.25, x.abs(), generator=g)),
    "normal around of deviations": (FLOATS, lambda x, g: torch.normal(x, x.abs() * 0.5, generator=g)),
    "native_dropout": (FLOATS, lambda x, g: torch.native_dropout(x, 0.3, True)),
    "_fused_dropout": (FLOATS, lambda x, g: _ATEN._fused_dropout(x, 0.7, g)),
    "rrelu": (FLOATS, lambda x, g: _ATEN.rrelu_with_noise_functional(x, torch.zeros_like(x), *_SLOPES, g)),
}
# Operators with a logarithm or a trigonometric function.
ROUNDED = ("normal", "randn", "log_normal", "exponential", "cauchy", "geometric")
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _operand(shape, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)
    return torch.zeros(shape, dtype=dtype, device="cuda")


def _outcome(call, x, seed, offset, own):
    """(results, the state of the generator afterwards)."""
    generator = torch.Generator("cuda") if own else torch.cuda.default_generators[torch.cuda.current_device()]
    generator.manual_seed(seed)
    generator.set_offset(offset)
    base = x._base if x._base is not None else x
    copy = base.clone().as_strided(x.shape, x.stride(), x.storage_offset())
    result = call(copy, generator if own else None)
    return [*(result if isinstance(result, tuple) else (result,)), copy], generator.get_state()


def _agree(name, dtype, ours, atens):
    for a, b in zip(ours, atens, strict=True):
        assert a.shape == b.shape and a.dtype is b.dtype and a.stride() == b.stride()
        if name.split()[0].rstrip("_").removesuffix("_like") not in ROUNDED:
            # torch compares few dtypes of unsigned integers.
            signed = _SIGNED.get(a.dtype, a.dtype)
            assert torch.equal(a.view(signed), b.view(signed))
            continue
        if name == "geometric_":
            assert (a != b).double().mean() < 1e-4 and (a.double() - b.double()).abs().max() <= 1
            continue
        a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (a, b))
        # A sum that cancels has the error of its terms.
        terms = 4 * ("around" in name or "deviations" in name) + 0.5 * (name == "cauchy_")
        bound = 2 * torch.finfo(a.dtype).eps * (b.double().abs() + terms) + 1e-12
        # The difference of infinities is nan.
        assert bool(((a == b) | ((a.double() - b.double()).abs() <= bound)).all())


def _check_atens(name, dtype, x, seed, offset):
    call = DRAWN[name][1]
    own = "like" not in name and name != "native_dropout" and bool(offset % 8)
    atens, after = _outcome(call, x, seed, offset, own)
    tritonite.reset_stats()
    with tritonite.use_gems(include=_FAMILY):
        # Recorded, and replayed.
        for _ in range(2):
            ours, state = _outcome(call, x, seed, offset, own)
            _agree(name, dtype, ours, atens)
            assert torch.equal(state, after)
    served = [counts for overload, counts in tritonite.stats().items() if overload in _FAMILY]
    assert served and not any(counts.declined for counts in served)


_FAMILY = [overload for overload, op in tritonite.overloads().items() if op.family == "random"]


@on_gpu
@pytest.mark.parametrize("name", DRAWN)
def test_numbers_are_atens(name):
    for dtype in DRAWN[name][0]:
        for i, size in enumerate(GPU_SIZES):
            _check_atens(name, dtype, _operand((size,), dtype), 42 + i, OFFSETS[i % len(OFFSETS)])
    torch.cuda.synchronize()


@on_gpu
@pytest.mark.parametrize("name", DRAWN)
def test_numbers_are_atens_in_every_layout(name):
    dtype = DRAWN[name][0][0]
    for _, x in _layouts(lambda *shape: _operand(shape, dtype)):
        _check_atens(name, dtype, x, 7, 4 * 3)


@on_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_masks_are_atens(dtype):
    """Vectors have every width, with more elements than a grid has threads and with fewer."""
    for numel in (2, 4, 6, 8, 9, 1_000_000, 1_000_002, 1_000_004, 1_000_008, 1_000_001, 8 * 2**20):
        _check_atens("native_dropout", dtype, _operand((numel,), dtype), 3, 16)
    for first in (1, 2, 4, 8):
        _check_atens("native_dropout", dtype, _operand((1_000_000 + first,), dtype)[first:], 3, 16)


@on_gpu
def test_a_graph_draws_anew_and_as_atens():
    """While a graph is captured ATen draws, whose kernels a replay gives another offset."""
    x = torch.ones(1000, device="cuda")
    found = []
    for include in ((), _FAMILY):
        torch.manual_seed(4)
        with tritonite.use_gems(include=include):
            torch.nn.functional.dropout(x, 0.5)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = torch.nn.functional.dropout(x, 0.5) + torch.rand(1000, device="cuda")
            # A capture writes offset 0 on a stream of its own, which a busy device may do after a replay's.
            torch.cuda.synchronize()
            for _ in range(2):
                graph.replay()
                found.append(out.clone())
            found.append(torch.rand(10, device="cuda"))
    assert all(map(torch.equal, found[:3], found[3:])) and not torch.equal(found[0], found[1])


@on_gpu
def test_gradients_of_dropout_are_atens():
    found = []
    for include in ((), _FAMILY):
        torch.manual_seed(4)
        x = _operand((64, 1000), torch.float32).requires_grad_()
        with tritonite.use_gems(include=include):
            torch.nn.functional.dropout(x, 0.3).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_every_overload_is_of_the_family():
    assert len(_FAMILY) >= 84
