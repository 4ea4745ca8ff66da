"""Permutations: ATen's keys, sorted, and equal keys shuffled."""

import math

import torch
from conftest import FULL
from curand import grid_of, on_cpu, philox, run_kernel, strided, whole_words

from tritonite.engine import random as engine


def permutation(n, state):
    """Return ATen's permutation, by its keys, sorted and shuffled among equal ones, and whether any are equal."""
    seed, offset = state
    bits = math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9))))
    width = 32 if bits <= 32 else 64
    words = strided(whole_words, n, state, wide=True)
    # ATen's range starts at the least integer, whose bits are 0 but for the highest.
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
def test_permutations_are_atens(set_philox):
    equal = 0
    for n, seeds in ((1, 1), (2, 20), (3, 20), (7, 20), (20, 20), (100, 10), (3000, 1)):
        for seed in range(seeds if FULL else -(-seeds // 3)):
            expected, repeated = permutation(n, set_philox(seed, 8))
            equal += repeated
            dtype = (torch.int64, torch.int16, torch.float32)[seed % 3]
            assert run_kernel("randperm", n, dtype=dtype).tolist() == expected
            assert set_philox.advances[-2:] == [4 * -(-n // (grid_of(n) * 2)), -(-n // 4) * 4]
    assert equal >= 2


@on_cpu
def test_long_permutations_are_atens(set_philox):
    """Keys have 27 to 33 bits; those of 32 bits are negative for half of the elements. One program or several sort."""
    for n, bits in ((4097, 27), (9000, 29), (25_000, 32), (33_000, 33)) if FULL else ((4097, 27), (30_100, 33)):
        expected, _ = permutation(n, set_philox(n, 8))
        assert bits == math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9))))
        dtype = (torch.int32, torch.int64)[n % 2]
        assert run_kernel("randperm", n, dtype=dtype).tolist() == expected
        assert set_philox.advances[-2:] == [4 * -(-n // (grid_of(n) * 2)), -(-n // 4) * 4]


@on_cpu
def test_long_runs_of_equal_keys_cross_programs(set_philox):
    """Runs of many lengths cross the boundary between two programs that shuffle."""
    lengths = [1, 3, 2] * 1000 + [40, 1, 7] * 40
    keys = torch.tensor([key for key, count in enumerate(lengths) for _ in range(count)], dtype=torch.int32)
    n = len(keys)
    assert n > engine.random_table().shuffled
    seed, offset = set_philox(3, 16)
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
def test_equal_keys_are_shuffled_within_their_run(set_philox):
    """Runs have lengths that random keys hardly ever give."""
    lengths = (1, 2, 3, 9, 1, 14, 5, 5)
    keys = torch.tensor([key for key, count in enumerate(lengths) for _ in range(count)], dtype=torch.int32)
    n = len(keys)
    seed, offset = set_philox(3, 16)
    out = torch.empty(n, dtype=torch.int64)
    engine.permute(keys, out, 8, None)
    assert out.tolist() == shuffled(lengths, seed, offset)
