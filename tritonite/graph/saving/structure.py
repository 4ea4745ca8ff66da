"""Arguments and results as trees of torch's pytree, whose classes are found by name."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils import _pytree as pytree

from tritonite.errors import UnsavableGraph
from tritonite.graph.saving.values import decoded, encoded

_LEAF = "leaf"


def tree_as_json(spec: Any) -> Any:
    """Return a tree's structure as JSON. Raises UnsavableGraph for a context that has no JSON."""
    if spec.is_leaf():
        return _LEAF
    context = spec.context
    if isinstance(context, type):
        described: Any = {"class": _class_name(context)}
    elif isinstance(context, (list, tuple)) and any(isinstance(item, type) for item in context):
        items = [_item(item) for item in context]
        described = {"sequence": type(context) is tuple, "items": items}
    else:
        described = {"value": encoded(context)}
    return {
        "class": _class_name(spec.type),
        "context": described,
        "children": [tree_as_json(child) for child in spec.children()],
    }


def _item(item: Any) -> dict[str, Any]:
    return {"class": _class_name(item)} if isinstance(item, type) else {"value": encoded(item)}


def tree_of(described: Any) -> Any:
    """Return the structure of `tree_as_json`. Raises ValueError for a class that is not imported."""
    return pytree.tree_structure(_tree(described))


def _tree(described: Any) -> Any:
    if described == _LEAF:
        return 0
    children = [_tree(child) for child in described["children"]]
    node = pytree.SUPPORTED_NODES[_class(described["class"])]
    return node.unflatten_fn(children, _context(described["context"]))


def _context(described: dict[str, Any]) -> Any:
    if "class" in described:
        return _class(described["class"])
    if "items" in described:
        items = [_context(item) for item in described["items"]]
        return tuple(items) if described["sequence"] else items
    return decoded(described["value"])


def _class_name(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise UnsavableGraph(name=f"{kind.__module__}.{kind.__qualname__}", reason="a class within a function")
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> Any:
    """Return a class of containers. Its module is not imported, because a file may name any module."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_named_tuple = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    if found not in pytree.SUPPORTED_NODES and not is_named_tuple:
        raise ValueError(f"{path} is no container here; import {module} before loading")
    return found
