"""Facts about a Triton function from its Python source and bytecode, before anything is compiled."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime.jit import JITCallable, KernelInterface

# Expressions that may be one value or a tuple; only Triton knows.
_OPEN = (ast.Attribute, ast.Call, ast.IfExp, ast.Name, ast.Subscript, type(None))


def result_counts(function: Callable[..., Any]) -> set[int]:
    """Return the numbers of values that its return statements give, as far as its source and its callees' show."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError):
        return set()
    nodes = list(_own_nodes(definition))
    counts: set[int] = set()
    for value in [node.value for node in nodes if isinstance(node, ast.Return)]:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            called = (function.__globals__ | enclosed(function)).get(value.func.id)
            if isinstance(called, (KernelInterface, JITCallable)) and called.fn is not function:
                counts |= result_counts(called.fn)
        given = [value]
        if isinstance(value, ast.Name):
            # Only Triton knows which assignment reaches the return; they count only if all assign tuples.
            given = [node.value for node in nodes if isinstance(node, ast.Assign) and _is_name(node.targets, value.id)]
            given = given if all(isinstance(each, ast.Tuple) for each in given) else []
        counts |= {
            len(each.elts) if isinstance(each, ast.Tuple) else 1 for each in given if not isinstance(each, _OPEN)
        }
    return counts


def returns_nothing(function: Callable[..., Any]) -> bool:
    """Return whether no return statement of a function has a value; False if its source cannot be read."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError):
        return False
    values = [node.value for node in _own_nodes(definition) if isinstance(node, ast.Return)]
    return all(value is None or (isinstance(value, ast.Constant) and value.value is None) for value in values)


def _is_name(targets: list[ast.expr], name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a definition, without those of functions nested in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield child
            yield from _own_nodes(child)


def enclosed(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables of enclosing functions that a function reads, with their values, unless still unbound."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _has_value(cell)}


def without_enclosed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of the function with its enclosing functions' variables among its globals.

    Triton's interpreter looks up variables in globals alone.
    """
    variables = enclosed(function)
    if not variables:
        return function
    copy = types.FunctionType(
        function.__code__,
        function.__globals__ | variables,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return functools.update_wrapper(copy, function)


def refused_names(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the outer variables that a function reads although Triton does not compile them, with their values."""
    outer = enclosed(function)
    for instruction in dis.get_instructions(function):
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval in function.__globals__:
            outer[instruction.argval] = function.__globals__[instruction.argval]
    return {name: value for name, value in outer.items() if not _readable(value)}


def _has_value(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _readable(value: Any) -> bool:
    """Return whether Triton lets a function read this value from an outer scope."""
    return (
        value is None
        or isinstance(value, (ModuleType, KernelInterface, JITCallable, tl.constexpr, tl.dtype))
        or getattr(value, "__triton_builtin__", False)
        or getattr(value, "__triton_aggregate__", False)
        or (isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"))
        or str(getattr(value, "__module__", "")).startswith(("triton.language", "triton.experimental.gluon.language"))
    )
