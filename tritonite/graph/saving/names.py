"""Kernels, formulas and classes of Tritonite by name: "module:path", such as "tritonite.ops.unary:exp.formula"."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tritonite.errors import UnsavableGraph

# Attributes by which a module's object leads to a triton.jit function.
_LEADING = ("formula", "fn", "jit", "kernel", "combine")
_FUNCTIONS = (JITFunction, InterpretedFunction)
_PACKAGES = ("tritonite.", "triton.language.")


def name_of(thing: Any) -> str:
    """Return the name of a triton.jit function, of a NamedTuple, or of a dataclass. Raises UnsavableGraph."""
    is_function = isinstance(thing, _FUNCTIONS)
    own = thing.fn if is_function else thing
    module, path = own.__module__, own.__qualname__
    if module.startswith(_PACKAGES):
        if _follow(module, path) is thing:
            return f"{module}:{path}"
        for name, value in _objects(sys.modules[module]) if is_function else ():
            for leading in _LEADING:
                if getattr(value, leading, None) is thing:
                    return f"{module}:{name}.{leading}"
    raise UnsavableGraph(name=f"{module}.{path}", reason="no module of Tritonite has it under a name")


def named(text: str) -> Any:
    """Return what `name_of` has named. Raises ValueError for every other name."""
    module, _, path = text.partition(":")
    if module.startswith(_PACKAGES):
        found = _follow(module, path)
        is_class = isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))
        if is_class or isinstance(found, _FUNCTIONS):
            return found
    raise ValueError(f"{text!r} is no kernel, formula or record of Tritonite")


def _objects(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a module, and those in its dicts, by path, such as "_GRADIENTS[2]"."""
    for name, value in vars(module).items():
        yield name, value
        if isinstance(value, dict) and not name.startswith("__"):
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items() if isinstance(key, (int, str)))


def _follow(module: str, path: str) -> Any:
    """Return an object by its path within a module, or None."""
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        name, _, key = part.partition("[")
        found = getattr(found, name, None)
        if key and isinstance(found, dict):
            found = found.get(ast.literal_eval(key.removesuffix("]")))
    return found
