"""The code on the pages that people copy from: it runs, and its assertions hold."""

import ast
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FULL

import tritonite

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "is-it-working.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The first line of a block that needs a GPU, and the condition that then guards it.
MARK = "# Needs a GPU."
GUARD = "torch.cuda.is_available()"
# Code that needs a GPU.
NEEDS = ("torch.cuda.", 'device="cuda"')

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def program(text):
    """Return the blocks of a page as a program, each line at its line number on the page, for tracebacks."""
    lines = [""] * len(text.splitlines())
    for block in BLOCK.finditer(text):
        start = text[: block.start(1)].count("\n")
        code = block[1].splitlines()
        lines[start : start + len(code)] = code
    return "\n".join(lines)


def _run(script, folder, environment, outputs):
    """Run a script in a folder, with files for its output."""
    for stream, output in enumerate(outputs, 1):
        with output.open("wb") as file:
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path = [str(script)], [str(ROOT), *sys.path]
    runpy.run_path(str(script), run_name="__main__")


def run(script, folder):
    """Return (exit code, output, errors) of a script.

    In the interpreter most of a script's time is the import of PyTorch. So scripts are forked from a process that has
    imported it. On a GPU they are not, because a context does not survive a fork.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if FULL or tritonite.device != "cpu":
        # Python puts the folder of a script first in the path, not the current folder.
        code = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_path(sys.argv[1], run_name='__main__')"
        command, kept = [sys.executable, "-c", code, script], {"capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(command, cwd=folder, env=environment, check=False, **kept)
        return done.returncode, done.stdout, done.stderr
    forking, outputs = multiprocessing.get_context("forkserver"), (folder / "output", folder / "errors")
    # Some scripts compile, and some have models of transformers. What is not installed is passed over.
    forking.set_forkserver_preload(["pytest", "tritonite", "torch._dynamo", "transformers.models.bert.modeling_bert"])
    process = forking.Process(target=_run, args=(script, folder, environment, outputs))
    process.start()
    process.join(300)
    if process.is_alive():
        process.kill()
    process.join()
    return process.exitcode, *(output.read_text() for output in outputs)


@pages
def test_code_runs(page, tmp_path):
    # A file, because Triton reads the source of the functions it compiles.
    script = tmp_path / "page.py"
    script.write_text(program(page.read_text()))
    code, _, errors = run(script, tmp_path)
    assert code == 0, errors[-4000:]


@pages
def test_code_for_gpus_is_marked_and_guarded(page):
    for block in BLOCK.findall(page.read_text()):
        marked = block.startswith(MARK + "\n")
        assert marked or not any(need in block.replace(GUARD, "") for need in NEEDS)
        for statement in ast.parse(block).body if marked else ():
            guarded = isinstance(statement, ast.If) and ast.unparse(statement.test) == GUARD
            assert guarded or isinstance(statement, (ast.Import, ast.ImportFrom)), ast.unparse(statement)


def test_there_is_code_on_every_page():
    assert len(PAGES) > 1
    assert all(BLOCK.search(page.read_text()) for page in PAGES)
