"""Names of the package that tests use or patch exist, also in tests that only run on a GPU."""

import ast
import importlib
import types
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("*.py"))
# Names that a test uses because they do not exist.
ABSENT = {("tritonite.ops", "addd"), ("tritonite.ops", "linalg_eig")}


def imported(tree):
    """Return the modules and objects of the package that a file imports, by local name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tritonite":
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tritonite":
                    name = alias.name if alias.asname else "tritonite"
                    found[alias.asname or "tritonite"] = importlib.import_module(name)
    return found


def assigned(tree):
    """Return the local names that a file assigns or has as parameters, which hide imported ones."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def missing(tree):
    """Yield (line, module, name) for each attribute of a module of the package that does not exist."""
    hidden = assigned(tree)
    known = {name: value for name, value in imported(tree).items() if name not in hidden}

    def resolve(node):
        if isinstance(node, ast.Name):
            return known.get(node.id)
        owner = resolve(node.value) if isinstance(node, ast.Attribute) else None
        return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = resolve(node.value), node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "object", "delattr"):
            constant = node.args[1] if len(node.args) > 1 else None
            if not isinstance(constant, ast.Constant) or not isinstance(constant.value, str):
                continue
            owner, name = resolve(node.args[0]), constant.value
        else:
            continue
        if isinstance(owner, types.ModuleType) and not hasattr(owner, name) and (owner.__name__, name) not in ABSENT:
            yield node.lineno, owner.__name__, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_names_that_a_test_uses_exist(file):
    assert not list(missing(ast.parse(file.read_text())))


def test_a_name_that_does_not_exist_is_found():
    source = (
        "from tritonite.ops import loss\nloss.none\npatch.setattr(loss, 'no_such', 1)\npatch.setattr(loss, 'aten', 1)"
    )
    assert [name for _, _, name in missing(ast.parse(source))] == ["none", "no_such"]
