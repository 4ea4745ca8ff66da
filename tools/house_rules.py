"""The project's own rules that no linter knows. Prints each breach and exits with 1 if there is one."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAY_REGISTER = {f"tritonite/{name}.py" for name in ("install/override", "install/library", "testing/stand_in")}
MAY_PRINT = {"tritonite/testing/targets.py"}
# Built from halves, so that this file keeps its own rules.
UNFINISHED = ("TO" + "DO", "FIX" + "ME")
LICENCE = ("Licensed" + " under", "SPDX-" + "License", "Copyright" + " (")
BROAD = {"Exception", "BaseException"}
# A docstring begins with a verb and its object, or names the thing: not with a word that wants another sentence.
OPENERS = "Of|Those|That|The same|What|Which|Whether|As|Where|It|They|So|By|With|How|Beside|Because|If|When|Whose"
OPENER = re.compile(rf"({OPENERS})\b")
# Phrases for which the field has words: style's table of words.
PHRASES = re.compile(
    r"\b(so many|as many as there|(which|that) there (are|is)( not)?|of whose|tells? of|half types|upright|far apart|"
    r"next to each other|goes its own way)\b"
)
# The modules that are about one kind of device: its record, its installation, the clock of its kernels, compilation for
# named targets. Elsewhere code asks the record (`devices.current`), never the name.
ABOUT_A_DEVICE = (
    "tritonite/devices/",
    "tritonite/bench/timing.py",
    "tritonite/report/doctor/machine.py",
    "tritonite/testing/compile_cases/",
    "tritonite/testing/targets.py",
)
KINDS_OF_DEVICE = {"cuda", "hip", "nvidia", "amd", "interpreter"}
REASON = "# noqa: BLE001 - "
# The most parameters of a kernel or a device function, of any other function, and the most lines of a file.
MOST_OF_A_KERNEL, MOST_OF_A_FUNCTION, MOST_LINES = 20, 12, 500
# Begins a comment under a long file's docstring, or in its first line, that says why it is one file.
LONG = "# Over 500 lines: "
# Decorators of functions whose parameters are others' to choose: ATen's schema, a command's options, an update's terms.
SCHEMAS = {"rule", "operator", "cuda_operator", "library_operator", "pointwise", "command"}
# Functions whose settings are independent and given by name.
WIDE = {
    "tritonite/engine/pointwise/declare.py:__init__",
    "tritonite/fused/linear_cross_entropy.py:linear_cross_entropy",
}


def breaches(text: str, name: str) -> Iterator[str]:
    """Yield a line for each breach in a source; `name` is the path from the root of the repository."""
    lines = text.splitlines()
    package = name.startswith("tritonite/")
    for number, line in enumerate(lines, 1):
        if any(word in line for word in UNFINISHED):
            yield f"{name}:{number}: unfinished work belongs in an issue"
        if any(words in line for words in LICENCE):
            yield f"{name}:{number}: the licence stands in LICENSE alone"
    tree = ast.parse(text)
    if len(lines) > MOST_LINES and not _says_why_long(tree, lines):
        yield f"{name}:1: {len(lines)} lines: split the file, or say why not in a comment that begins {LONG!r}"
    if package:
        yield from _wide(tree, name)
        yield from _unclear(tree, text, name)
    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield f"{where}: star import"
        if isinstance(node, ast.ExceptHandler) and _is_broad(node) and REASON not in lines[node.lineno - 1]:
            yield f"{where}: bare or broad except without its reason"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "globals":
                yield f"{where}: globals()"
            if node.func.id == "print" and package and name not in MAY_PRINT:
                yield f"{where}: print outside the command line"
        if package and not name.startswith(ABOUT_A_DEVICE) and _asks_for_a_kind(node):
            yield f"{where}: a question about a kind of device: ask a field of its record, or a method of its runtime"
        if package and _is_launched(node) and "wait_for_previous_launch" not in map(_called, node.body):
            yield f"{where}: a kernel that does not wait for the launch before it"
        if package and name not in MAY_REGISTER and _is_registration(node):
            yield f"{where}: nothing registers with torch but install/override.py, install/library.py and stand_in.py"


def _says_why_long(tree: ast.Module, lines: list[str]) -> bool:
    """Return whether a comment under the docstring, or in the first line, says why a file is long."""
    has_docstring = ast.get_docstring(tree, clean=False) is not None
    below = lines[tree.body[0].end_lineno :] if has_docstring else []
    under = next((line for line in below if line), "")
    return lines[0].startswith(LONG) or under.startswith(LONG)


def _wide(tree: ast.Module, name: str) -> Iterator[str]:
    """Yield a line for each function with too many parameters."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or f"{name}:{node.name}" in WIDE:
            continue
        decorators = {_last_name(each) for each in node.decorator_list}
        most = MOST_OF_A_KERNEL if "jit" in decorators else MOST_OF_A_FUNCTION
        count = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        if count > most and not decorators & SCHEMAS:
            yield f"{name}:{node.lineno}: {node.name} has {count} parameters, of at most {most}: make a record of some"


def _last_name(decorator: ast.expr) -> str:
    """Return the last name of a decorator, such as "jit" of `triton.jit(do_not_specialize=["n"])`."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _unclear(tree: ast.Module, text: str, name: str) -> Iterator[str]:
    """Yield a line for each docstring or comment in words that a reader has to solve."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose = {}
    for node in ast.walk(tree):
        if not isinstance(node, kinds) or (docstring := ast.get_docstring(node)) is None:
            continue
        line = node.body[0].lineno
        prose[line] = docstring
        if OPENER.match(docstring):
            yield f"{name}:{line}: a docstring that opens with {docstring.split()[0]!r}"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            prose[token.start[0]] = token.string
    for line, words in sorted(prose.items()):
        for found in PHRASES.finditer(" ".join(words.split())):
            yield f"{name}:{line}: {found[0]!r}: say it in the field's words"


def _asks_for_a_kind(node: ast.AST) -> bool:
    """Return whether a node compares with a kind's name, or asks PyTorch for CUDA or ROCm.

    `Device.aten` may be compared: it says whose results a device follows, not what the device is.
    """
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        values = [each for side in sides for each in (side.elts if isinstance(side, (ast.Tuple, ast.Set)) else [side])]
        named = any(isinstance(each, ast.Constant) and each.value in KINDS_OF_DEVICE for each in values)
        return named and not any(isinstance(side, ast.Attribute) and side.attr == "aten" for side in sides)
    if not isinstance(node, ast.Attribute):
        return False
    return node.attr == "is_cuda" or ast.unparse(node) in ("torch.cuda", "torch.version.hip", "torch.version.cuda")


def _is_launched(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("libentry" in ast.unparse(each) for each in node.decorator_list)


def _called(statement: ast.stmt) -> str:
    """Return the function that a statement calls, "" for a statement that is no call."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return ast.unparse(call.func) if isinstance(call, ast.Call) else ""


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in kinds)


def _is_registration(node: ast.AST) -> bool:
    """Return whether a node uses torch.library, by import or attribute, or the registration functions behind it."""
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("torch.library") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        from_torch = module == "torch" and any(alias.name == "library" for alias in node.names)
        return from_torch or module.startswith("torch.library")
    if not isinstance(node, ast.Attribute):
        return False
    of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
    return node.attr == "_dispatch_library" or (node.attr == "library" and of_torch)


def main() -> int:
    files = sorted(
        path for folder in ("tritonite", "tests", "tools", "examples") for path in (ROOT / folder).rglob("*.py")
    )
    names = {path: path.relative_to(ROOT).as_posix() for path in files}
    found = [line for path in files for line in breaches(path.read_text(), names[path])]
    for line in found:
        print(line)
    print(f"house rules: {len(files)} files, {len(found)} breaches")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
