"""tritonite comes first: without a GPU it must set up the interpreter before anything imports triton."""

import tritonite  # noqa: I001

import contextlib
import dataclasses
import itertools
import os

import pytest
import torch

from tritonite import devices
from tritonite.runtime import contract, native
from tritonite.install import override

# The whole set of cases, as for a GPU; the interpreter takes seconds for some of them, and has a part of each test's.
FULL = os.environ.get("TRITONITE_TEST_FULL") == "1"


def covering(every, *values):
    """All combinations, or without the full set those whose places among the values add up to a multiple of `every`.

    Each value occurs where two lists, or more, have `every` of them.
    """
    combinations = itertools.product(*map(enumerate, values))
    return [
        [value for _, value in each] for each in combinations if FULL or sum(place for place, _ in each) % every == 0
    ]


def every_second(names, *values):
    """A parametrization by all combinations, or without the full set by half of them."""
    return pytest.mark.parametrize(names, covering(2, *values), ids=_name)


def _name(value):
    # What is at an address has another name in every process.
    return None if " at 0x" in str(value) else str(value)


def some(*values, turns=1):
    """Every combination, or without the full set only so many `turns` of the longest list.

    Each list goes round with the longest, and is moved by one more than the list before it from turn to turn.
    """
    if FULL:
        return list(itertools.product(*values))
    rounds = itertools.product(range(turns), range(max(map(len, values))))
    return [tuple(each[(i + turn * k) % len(each)] for k, each in enumerate(values)) for turn, i in rounds]


def pytest_collection_modifyitems(items):
    """The longest tests come first in each half of the list, of which two workers have one each to begin with."""
    longest = [item for item in items if item.path.name == "test_compile.py"]
    others = [item for item in items if item not in longest]
    half = len(others) // 2
    items[:] = [*longest[::2], *others[:half], *longest[1::2], *others[half:]]


@pytest.fixture
def device() -> str:
    return tritonite.device


@contextlib.contextmanager
def calls_through(path):
    """Within it calls go through the native dispatcher, or through Python."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITONITE_NATIVE", "1" if path == "native" else "0")
    caches = (native.module, override.native_dispatcher)
    tritonite.disable()
    for cache in caches:
        cache.cache_clear()
    try:
        assert (override.native_dispatcher() is None) == (path == "python")
        yield
    finally:
        tritonite.disable()
        patch.undo()
        for cache in caches:
            cache.cache_clear()


@pytest.fixture(params=["native", "python"])
def path(request):
    """A test that takes it runs twice: with calls through the native dispatcher, and through Python."""
    with calls_through(request.param):
        yield request.param


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks so small that rows take several of them, and several programs."""
    record = dataclasses.replace(devices.current, row_elements=128, row_columns=8, programs=4)
    monkeypatch.setattr(devices, "current", record)


@pytest.fixture(autouse=True)
def clean_state():
    """Leave no override, plan, count or changed default behind, and let ATen serve no call for its speed."""
    torch.manual_seed(0)
    tritonite.reset_stats()
    before = contract.set_comparing(False), contract.set_strict(True)
    yield
    contract.set_comparing(before[0])
    contract.set_strict(before[1])
    tritonite.disable()
    if override._native is not None:
        # A plan that a test recorded with another device record or table would be replayed in the next test.
        for name in tritonite.overloads():
            override._native.clear(name)
    assert not override.registered()
    assert torch.get_default_dtype() is torch.float32


def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: quick checks run with every supported triton")
    torch.set_num_threads(1)
