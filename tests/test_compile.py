"""What the interpreter accepts, the compilers accept: every kernel, compiled without a GPU."""

import os
import subprocess
import sys

import pytest
from conftest import FULL

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_every_kernel_compiles(part, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tritonite.testing.targets", "--part", f"{part}/{PARTS}"]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command + (["--full"] if FULL else []), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
