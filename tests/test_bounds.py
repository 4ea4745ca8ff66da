"""Accesses of interpreted kernels outside their tensors' memory are found, and no others."""

import contextlib

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

import tritonite
from tritonite.runtime.libentry import libentry
from tritonite.testing.bounds import OutsideMemory, checked_bounds
from tritonite.testing.fuzz import run as fuzz

pytestmark = pytest.mark.skipif(not tritonite.backend.interpreted, reason="kernels are interpreted only on a CPU")


@libentry()
@triton.jit
def copied(source, target, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < n), at < n)


@libentry()
@triton.jit
def counted(target, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(target + at, 1, at < n)


@libentry()
@triton.jit
def described(source, target, BLOCK: tl.constexpr):
    tl.store(target + tl.arange(0, BLOCK), source.load([4]))


def fails(kernel, *args):
    with checked_bounds(), pytest.raises(InterpreterError) as error:
        kernel[(1,)](*args, BLOCK=8)
    assert isinstance(error.value.__cause__, OutsideMemory)
    return str(error.value)


def test_reads_and_writes_outside_memory_are_found():
    memory = torch.arange(16.0)
    assert "copied accesses 3 elements" in fails(copied, memory[11:], torch.empty(8), 8)
    assert "copied accesses 1 elements" in fails(copied, memory, torch.empty(7), 8)
    assert "counted accesses 2 elements" in fails(counted, torch.zeros(6, dtype=torch.int32), 8)
    assert "copied accesses 5 elements" in fails(copied, torch.empty(0), torch.empty(8), 5)


def test_what_is_masked_or_within_a_storage_is_not():
    memory = torch.arange(16.0)
    target, count = torch.zeros(8), torch.zeros(5, dtype=torch.int32)
    with checked_bounds():
        copied[(1,)](memory[11:], target, 5, BLOCK=8)
        copied[(1,)](memory[4:6], target[1:], 7, BLOCK=8)
        counted[(1,)](count, 5, BLOCK=8)
        # A descriptor's block may reach beyond its tensor.
        described[(1,)](TensorDescriptor(memory[8:], [8], [1], [8]), target, BLOCK=8)
    assert count.tolist() == [1] * 5 and target.tolist() == [12, 13, 14, 15, 0, 0, 0, 0]


def test_words_and_lists_are_not_found():
    flags, index = torch.zeros(7, dtype=torch.int8), torch.tensor([6, 6])
    with checked_bounds(), tritonite.use_gems(faster_only=False):
        flags.index_put_((index,), torch.ones(2, dtype=torch.int8), accumulate=True)
        found = torch._foreach_add([torch.ones(3), torch.ones(5)], 1.0)
    assert flags[6] == 2 and found[1].tolist() == [2.0] * 5


def test_the_fuzzer_checks_bounds(monkeypatch):
    seen = []
    monkeypatch.setattr(fuzz, "checked_bounds", lambda: seen.append(1) or contextlib.nullcontext())
    assert all(fuzz.fuzz_one("neg", 1, number) is None for number in range(5))
    assert len(seen) == 2
