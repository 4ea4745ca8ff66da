"""The scripts of examples/ run, and their assertions hold."""

import importlib.util
from pathlib import Path

import pytest
from test_docs import run

FOLDER = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs(script, tmp_path):
    if "transformers" in script.read_text() and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    code, output, errors = run(script, tmp_path)
    assert code == 0 and output, errors[-4000:]


def test_all_are_listed():
    listed = (FOLDER / "README.md").read_text()
    assert SCRIPTS and all(f"]({script.name})" in listed for script in SCRIPTS)
