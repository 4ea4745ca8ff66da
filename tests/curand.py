"""Philox and cuRAND in NumPy, the order in which ATen's kernels draw, and comparisons of random numbers."""

import math

import numpy as np
import pytest
import torch

import tritonite
from tritonite import devices

ATEN = torch.ops.aten
on_cpu = pytest.mark.skipif(devices.current.type != "cpu", reason="of seeds that the CPU's generator draws")
on_gpu = pytest.mark.skipif(devices.current.type == "cpu", reason="ATen's own numbers are a GPU's")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MASK = np.uint64(0xFFFFFFFF)
TINY = 2.0**-32


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
    """Return the values of elements in order, by ATen's kernels that stride over a grid of at most `threads`."""
    seed, offset = state
    threads = min(threads, -(-numel // 256) * 256)
    values = 2 if wide else 4
    element = np.arange(numel)
    turn, rest = element // (threads * values), element % (threads * values)
    drawn = sampler(seed, np.uint64(offset // 4) + turn.astype(np.uint64), rest % threads, wide)
    return np.choose(rest // threads, drawn)


def vectorized(numel, vector, state, threads):
    """Return the uniform numbers of elements in order, by ATen's kernels that load vectors."""
    seed, offset = state
    element = np.arange(numel)
    turn, rest = element // (threads * vector), element % (threads * vector)
    lane = rest % vector
    counter = offset // 4 + turn * max(1, vector // 4) + lane // 4
    drawn = uniforms(seed, counter, rest // vector, False)
    return np.choose(lane % 4, drawn)


def grid_of(numel):
    return min(2048, -(-numel // 256) * 256)


def run_kernel(name, *args, **kwargs):
    """Call an overload's host function, which must not decline."""
    return tritonite.overloads()[name](*args, **kwargs)


def as_numpy(tensor):
    return tensor.double().cpu().numpy() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.cpu().numpy()


def rounded(values, dtype):
    return as_numpy(torch.from_numpy(np.ascontiguousarray(values)).to(dtype))


def assert_near(actual, expected, dtype, eps=2):
    bound = eps * torch.finfo(dtype).eps
    expected = np.asarray(expected, dtype=np.float64)
    wrong = np.abs(as_numpy(actual).astype(np.float64) - expected) > bound * np.abs(expected) + 1e-300
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}"


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


def layouts(make):
    yield "transposed", make(40, 60).t()
    yield "gaps", make(40, 60)[::2, 1::3]
    yield "permuted with gaps", make(20, 30, 8).permute(2, 0, 1)[:, ::2]
    yield "channels last", make(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield "offset", make(1001)[1:]
    yield "zero-dim", make(1)[0]


def kolmogorov(values, distribution):
    """Return the largest distance to a distribution function, times the square root of the count."""
    values = np.sort(values)
    expected = distribution(values)
    steps = np.arange(len(values) + 1) / len(values)
    return math.sqrt(len(values)) * max((steps[1:] - expected).max(), (expected - steps[:-1]).max())


def chi_square(values, probabilities):
    counts = np.bincount(values.astype(np.int64), minlength=len(probabilities))[: len(probabilities)]
    expected = np.asarray(probabilities) * len(values)
    return float(((counts - expected) ** 2 / expected).sum())


OFFSETS = (0, 8, 4 * (2**32 - 1))


def outcome(call, x, seed, offset, own):
    """Return (results, the state of the generator afterwards)."""
    generator = torch.Generator("cuda") if own else torch.cuda.default_generators[torch.cuda.current_device()]
    generator.manual_seed(seed)
    generator.set_offset(offset)
    base = x._base if x._base is not None else x
    copy = base.clone().as_strided(x.shape, x.stride(), x.storage_offset())
    result = call(copy, generator if own else None)
    return [*(result if isinstance(result, tuple) else (result,)), copy], generator.get_state()
