"""tritonite comes first: without a GPU it must set up the interpreter before anything imports triton."""

import tritonite  # noqa: I001

import contextlib
import dataclasses
import os
import warnings

import pytest
import torch

from tritonite import catalog, devices
from tritonite.catalog import declare
from tritonite.dispatch import native, override, python

FULL = os.environ.get("TRITONITE_TEST_FULL") == "1"


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


# The native dispatcher keeps what it is first told of an operator, so that its host function is looked up anew.
_hosts = {}


@contextlib.contextmanager
def standing_in(overload, host, **settings):
    """A host function in the place of an ATen overload, declared, recorded and replayed as the catalog's are.

    `host` takes the schema's arguments by position, and outs if there are any, and returns its result or a tuple of
    them. Yields a list that each run of it, which is each call
    that is not replayed, makes longer.
    """
    runs = []

    def run(*values, outs=()):
        runs.append(values)
        result = host(*values, outs=outs) if op.out_names else host(*values)
        return result if isinstance(result, tuple) else (result,)

    packet = overload.partition(".")[0]
    schema = dict(catalog.schemas(packet))[overload]
    names = [argument.name for argument in schema.arguments if not declare.is_out(argument)]
    first = overload not in _hosts
    _hosts[overload] = run
    declared = catalog.Declaration(
        packets=(packet,),
        arguments=tuple(names),
        optional=frozenset(),
        host=lambda values, outs: _hosts[overload](*values, outs=outs),
        family="test",
        kernels=(),
        accepts=(),
        promotion="own",
        method="",
        **{name: frozenset(value) if isinstance(value, tuple) else value for name, value in settings.items()},
    )
    op = declare._overload(declared, overload, schema)
    key, dispatcher = devices.current.dispatch_key, override.native_dispatcher()
    if dispatcher is not None:
        if first:
            override.declare_native(dispatcher, op)
        dispatcher.clear(overload)
        dispatcher.install(overload, False)
        dispatcher.set_active(overload, True)
        remove = lambda: dispatcher.uninstall(overload)
    else:
        kernel = None
        if torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"aten::{overload}", key):
            kernel = torch._C._dispatch_get_computed_kernel_for_dispatch_key(f"aten::{overload}", key)
        library = torch._C._dispatch_library("IMPL", "aten", key, "tritonite", 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(overload, key, python.override(op, kernel), False)
        python.put_in_force(override.installed() | {overload})
        remove = library.reset
    try:
        yield runs
    finally:
        remove()
        python.put_in_force(override.installed())


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks so small that rows take several of them, and several programs."""
    record = dataclasses.replace(devices.current, row_elements=128, row_columns=8, programs=4)
    monkeypatch.setattr(devices, "current", record)


@pytest.fixture(autouse=True)
def clean_state():
    """No test leaves an override, a count, or a changed default behind."""
    torch.manual_seed(0)
    tritonite.reset_stats()
    yield
    tritonite.disable()
    assert not override.registered()
    assert torch.get_default_dtype() is torch.float32


def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: quick checks run with every supported triton")
    torch.set_num_threads(1)
