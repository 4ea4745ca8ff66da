"""Why a call goes where it goes."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import catalog, devices
from tritonite.catalog import Op
from tritonite.dispatch.override import installed, native_dispatcher
from tritonite.engine.pointwise import Plan
from tritonite.errors import Decline, UnknownOperator


def explain(name: str, *args: Any, **kwargs: Any) -> str:
    """What happens to a call of an overload with these arguments: the path, promotion, kernel and launch, or why ATen.

    Nothing is computed, though the kernel may be compiled. Raises UnknownOperator for an overload that is not served.
    """
    op = catalog.overloads().get(name)
    if op is None:
        reason = catalog.excluded.get(name)
        hint = f" ({reason})" if reason else ""
        raise UnknownOperator(name=name, hint=hint)
    lines = [f"{name}{_describe(args, kwargs)}"]
    state = "overridden now" if name in installed() else "not overridden now: ATen serves it"
    lines.append(f"state      {state}")
    kept = _kept(op, args, kwargs)
    try:
        values, outs = op.bind(args, kwargs)
        plan = op.declaration.kernels[0].plan(values, outs)
    except Decline as decline:
        lines.append(f"path       ATen: {decline.reason}{', remembered natively' if kept == 'decline' else ''}")
        return "\n".join(lines)
    path = {"plan": "native: replayed from a plan", "nothing": "native: the next call is recorded"}.get(kept, "Python")
    if plan is None:
        lines.append(f"path       {path}: a host function of its own; run it and look at tritonite.stats()")
        return "\n".join(lines)
    lines += _explain_plan(plan, path)
    return "\n".join(lines)


def _kept(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What the native dispatcher keeps for such a call; "" where calls go through Python."""
    dispatcher = native_dispatcher()
    if dispatcher is None:
        return ""
    values = list(args)
    for argument in op.schema.arguments[len(args) :]:
        values.append(kwargs.get(argument.name, argument.default_value if argument.has_default_value() else None))
    kept: str = dispatcher.kept(op.overload, values)
    return kept


def _explain_plan(plan: Plan, path: str) -> list[str]:
    summary = plan.summary
    results = ", ".join(map(_short, summary["results"]))
    lines = [
        f"path       {path}: Triton {'interpreter' if devices.current.interpreted else 'kernel'}",
        f"promotion  common {_short(summary['common'])}, computed in {_short(summary['compute'])}, result {results}",
        f"result     shape {tuple(summary['shape'])}" + "".join(f", strides {fresh.strides}" for fresh in plan.fresh),
    ]
    specialization = plan.specialization
    if specialization is None:
        return [*lines, "kernel     none: the result is empty"]
    constants = {
        list(specialization.signature)[path[0]]: value
        for path, value in specialization.constants.items()
        if len(path) == 1 and isinstance(value, int)
    }
    blocks = ", ".join(f"{key} {value}" for key, value in constants.items())
    formula = getattr(specialization.leading[0], "__name__", "")
    lines.append(f"kernel     {specialization.kernel.__name__} of {formula}")
    lines.append(f"config     {blocks}, {specialization.options['num_warps']} warps")
    lines.append(f"launch     {specialization.grid} programs")
    return lines


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{_short(value.dtype)}{list(value.shape)}"
        return repr(value)

    parts = [show(value) for value in args] + [f"{name}={show(value)}" for name, value in kwargs.items()]
    return f"({', '.join(parts)})"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
