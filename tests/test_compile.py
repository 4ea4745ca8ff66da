"""What the interpreter accepts, the compilers accept: every kernel, compiled without a GPU."""

import os
import subprocess
import sys

import pytest
from conftest import FULL

# `make test-targets` asks for more: the matrix of kernels and devices.
MATRIX = os.environ.get("TRITONITE_TEST_TARGETS") == "1"
PARTS = 6 if FULL or MATRIX else 2


@pytest.fixture
def cache(tmp_path_factory):
    """A folder for all parts, wherever they run: what several launch is compiled once."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"


@pytest.mark.parametrize("part", range(PARTS))
def test_every_kernel_compiles(part, cache):
    command = [sys.executable, "-W", "ignore", "-m", "tritonite.testing.targets", "--part", f"{part}/{PARTS}"]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    how = ["--full"] if FULL else [] if MATRIX else ["--quick"]
    done = subprocess.run(command + how, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


_LAYOUT_OF_LOADS = """
import re, torch, tritonite
from triton.backends.compiler import GPUTarget
from tritonite.testing import targets
with targets._noting() as found:
    tritonite.overloads()["mm"](torch.empty(4, 512), torch.empty(512, 1025)[:, :1024])
code = found[0].compile(GPUTarget("cuda", 90, 32)).asm["ttgir"]
(layout,) = re.findall(r"tt.load .*tensor<32x64x.*>, (#blocked[0-9]*)>", code)
print(re.search(rf"^{layout} = .*order = (.*)}}>$", code, re.MULTILINE)[1])
"""


@pytest.mark.smoke
def test_columns_at_odd_addresses_are_loaded_by_neighbouring_threads():
    """Triton 3.6 lays threads along rows where it is told that no two elements are next to each other."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", _LAYOUT_OF_LOADS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[1, 0]", done.stderr[-2000:]
