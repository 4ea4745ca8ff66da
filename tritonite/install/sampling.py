"""Samples of the calls of overridden operators, in the native dispatcher and in Python, for `tritonite.audit`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tritonite import registry
from tritonite.install import library, override, python
from tritonite.install.python import Auditor
from tritonite.registry import Op
from tritonite.registry.schema import in_schema_order
from tritonite.runtime.opaque import opaque

_WORD = 1 << 64


def start(auditor: Auditor, rate: float, seed: int) -> None:
    """Show an auditor this share of all calls, chosen by a generator with this seed, until `stop`."""
    draw = random.Random(seed).random

    @opaque
    def of_python(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
        return auditor(op, args, kwargs) if draw() < rate else None

    @opaque
    def of_dispatcher(name: str, values: list[Any]) -> Callable[[Any], None] | None:
        op = registry.overloads().get(name) or library.registered()[name]
        given = dict(zip(op.keywords, values[op.positional :], strict=True))
        return auditor(op, tuple(values[: op.positional]), given)

    python.audit_by(of_python)
    override.audit_natively(of_dispatcher, min(_WORD - 1, int(rate * _WORD)), seed % _WORD)


def stop() -> None:
    """Show calls to nobody."""
    python.audit_by(None)
    override.audit_natively(None, 0, 0)


def repeat(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve a call by the plan that the native dispatcher has for it, else by the host function; count nothing.

    Raises Decline if the host function does.
    """
    dispatcher = override.dispatcher_in_use()
    if dispatcher is not None:
        values = in_schema_order(op.schema, args, kwargs)
        if dispatcher.kept(op.overload, values) == "plan":
            return dispatcher.repeat(op.overload, values)
    return op(*args, **kwargs)
