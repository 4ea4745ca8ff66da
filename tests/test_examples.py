"""The scripts of examples/ run, and what they assert is so."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_runs(script):
    if "transformers" in script.read_text() and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0 and done.stdout, done.stderr[-4000:]


def test_all_are_listed():
    listed = (FOLDER / "README.md").read_text()
    assert SCRIPTS and all(f"]({script.name})" in listed for script in SCRIPTS)
