"""The code on the pages that people copy from: it runs, and what it asserts is so."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The first line of a block that does something on a GPU alone, and what then guards it.
MARK = "# Needs a GPU."
GUARD = "torch.cuda.is_available()"
# What of PyTorch's asks for a GPU.
NEEDS = ("torch.cuda.", 'device="cuda"')

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def program(text):
    """A page's blocks one after another, each line where it stands on the page, so that a traceback names it."""
    lines = [""] * len(text.splitlines())
    for block in BLOCK.finditer(text):
        start = text[: block.start(1)].count("\n")
        code = block[1].splitlines()
        lines[start : start + len(code)] = code
    return "\n".join(lines)


@pages
def test_code_runs(page, tmp_path):
    # A file, because Triton reads the source of the functions it compiles.
    script = tmp_path / "page.py"
    script.write_text(program(page.read_text()))
    # The folder of a script comes first in the path, not the one it is started in.
    code = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pages
def test_what_needs_a_gpu_is_marked_and_guarded(page):
    for block in BLOCK.findall(page.read_text()):
        marked = block.startswith(MARK + "\n")
        assert marked or not any(need in block.replace(GUARD, "") for need in NEEDS)
        for statement in ast.parse(block).body if marked else ():
            guarded = isinstance(statement, ast.If) and ast.unparse(statement.test) == GUARD
            assert guarded or isinstance(statement, (ast.Import, ast.ImportFrom)), ast.unparse(statement)


def test_there_is_code_on_every_page():
    assert len(PAGES) > 1
    assert all(BLOCK.search(page.read_text()) for page in PAGES)
