"""The project's own rules that no linter knows. Prints each breach and exits with 1 if there is one."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINE_BUDGET = 6500
MAY_REGISTER = {"tritonite/override.py"}
MAY_PRINT = {"tritonite/cli.py", "tritonite/demo.py", "tritonite/testing/targets.py"}


def breaches(path: Path, name: str) -> Iterator[str]:
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        if "TODO" in line or "FIXME" in line:
            yield f"{name}:{number}: unfinished work belongs in an issue"
        if "Licensed under" in line:
            yield f"{name}:{number}: the licence stands in LICENSE alone"
    for node in ast.walk(ast.parse(text)):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield f"{where}: star import"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{where}: bare except"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "globals":
                yield f"{where}: globals()"
            if node.func.id == "print" and name not in MAY_PRINT:
                yield f"{where}: print outside the command line"
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("_dispatch_library", "Library")
            and name not in MAY_REGISTER
        ):
            yield f"{where}: only override.py registers with torch"


def main() -> int:
    files = sorted((ROOT / "tritonite").rglob("*.py"))
    found = [line for path in files for line in breaches(path, path.relative_to(ROOT).as_posix())]
    total = sum(len(path.read_text().splitlines()) for path in files)
    if total > LINE_BUDGET:
        found.append(f"tritonite/ has {total} lines; the budget is {LINE_BUDGET}")
    for line in found:
        print(line)
    print(f"house rules: {len(files)} files, {total} of {LINE_BUDGET} lines, {len(found)} breaches")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
