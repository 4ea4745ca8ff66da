"""Host functions that replace an ATen overload, for tests and measurements."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tritonite import devices, registry
from tritonite.install import override, python
from tritonite.registry import Declaration
from tritonite.registry.op import overload_of
from tritonite.registry.schema import is_out

# Host functions by overload. The native dispatcher keeps the first declaration of an operator, so that each declaration
# looks its host function up here.
_hosts: dict[str, Callable[..., Any]] = {}
# Overloads outside the catalog that the native dispatcher has a declaration of.
_declared: set[str] = set()


@contextlib.contextmanager
def standing_in(
    overload: str, host: Callable[..., Any], pin: tuple[str, ...] = (), pin_zero_or_one: tuple[str, ...] = ()
) -> Iterator[list[Any]]:
    """Replace an ATen overload by a host function that is recorded and replayed like the catalog's.

    `host` has the schema's arguments by position, and `outs` if the overload has outputs. It returns a result or a
    tuple of results. Yields a list that grows with each run of `host`; replayed calls do not run it.
    """
    runs: list[Any] = []

    def run(*values: Any, outs: Any = ()) -> Any:
        runs.append(values)
        result = host(*values, outs=outs) if op.out_names else host(*values)
        return result if isinstance(result, tuple) else (result,)

    packet = overload.partition(".")[0]
    schema = dict(registry.schemas(packet))[overload]
    names = [argument.name for argument in schema.arguments if not is_out(argument)]
    _hosts[overload] = run
    declared = Declaration(
        packets=(packet,),
        arguments=tuple(names),
        optional=frozenset(),
        host=lambda values, outs: _hosts[overload](*values, outs=outs),
        family="stand_in",
        kernels=(),
        accepts=(),
        promotion="own",
        method="",
        pinned=frozenset(pin),
        pinned_zero_or_one=frozenset(pin_zero_or_one),
    )
    op = overload_of(declared, overload, schema)
    key, dispatcher = devices.current.dispatch_key, override.native_dispatcher()
    if dispatcher is not None:
        own = registry.overloads().get(overload)
        if own is not None:
            dispatcher.redeclare(overload, list(op.slots), python.recording(op))
        elif overload not in _declared:
            override.declare_native(dispatcher, op)
            _declared.add(overload)
        dispatcher.clear(overload)
        dispatcher.install(overload, False)
        dispatcher.set_active(overload, True)
        remove = functools.partial(_remove, dispatcher, own, overload)
    else:
        kernel = None
        if torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"aten::{overload}", key):
            kernel = torch._C._dispatch_get_computed_kernel_for_dispatch_key(f"aten::{overload}", key)
        library = torch._C._dispatch_library("IMPL", "aten", key, "tritonite", 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(overload, key, python.override(op, kernel, devices.current), False)
        python.put_in_force(override.installed() | {overload})
        remove = library.reset
    try:
        yield runs
    finally:
        remove()
        python.put_in_force(override.installed())


def _remove(dispatcher: Any, own: registry.Op | None, overload: str) -> None:
    """Remove a stand-in from the native dispatcher, and restore the catalog's operator if there is one."""
    dispatcher.uninstall(overload)
    dispatcher.set_active(overload, False)
    if own is not None:
        dispatcher.clear(overload)
        dispatcher.redeclare(overload, list(own.slots), python.recording(own))
