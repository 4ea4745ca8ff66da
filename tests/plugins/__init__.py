"""Devices of other packages, and the checks that run on them."""

import ast


def checks_of(path):
    """Return the names of the checks in a file: its functions without arguments, in order."""
    tree = ast.parse(path.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.args.args]
