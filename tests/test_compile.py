"""Compilation of every kernel without a GPU: compilers accept what the interpreter accepts."""

import os
import subprocess
import sys

import pytest
import scripts
from conftest import FULL

from tritonite.testing.sass import broken_descriptors

# `make test-targets` compiles the whole matrix of kernels and devices.
MATRIX = os.environ.get("TRITONITE_TEST_TARGETS") == "1"
PARTS = 6 if FULL or MATRIX else 1


@pytest.fixture
def cache(tmp_path_factory):
    """Return a cache folder for all shards, so that kernels that several shards launch are compiled once."""
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
with targets.recorded_launches() as found:
    tritonite.overloads()["mm"](torch.empty(4, 512), torch.empty(512, 1025)[:, :1024])
code = found[0].compile(GPUTarget("cuda", 90, 32)).asm["ttgir"]
(layout,) = re.findall(r"tt.load .*tensor<32x64x.*>, (#blocked[0-9]*)>", code)
print(re.search(rf"^{layout} = .*order = (.*)}}>$", code, re.MULTILINE)[1])
"""

_FLOAT8_COPIES = """
import torch
from unittest import mock
import tritonite.fused
from triton.backends.compiler import GPUTarget
from tritonite import devices
from tritonite.install import library
from tritonite.testing import sass, targets
x, weight = torch.empty(6, 40), torch.empty(20, 40)
with targets.recorded_launches() as found, mock.patch.object(devices, "has_float8", lambda _: True):
    library.registered()["tritonite::fp8_linear"](x, weight, None)
casts = [each for each in found if each.kernel.__name__ == "cast_float8"]
print([sass.stores_stack_pointer(each.compile(GPUTarget("cuda", 90, 32))) for each in casts])
"""

_SHORT_COLUMNS = """
import dataclasses, re, torch, tritonite
from triton.backends.compiler import GPUTarget
from tritonite import devices
from tritonite.devices import compile_only
from tritonite.testing import targets
devices.current = dataclasses.replace(compile_only.RECORD, kind="nvidia", dispatch_key="CPU")
for width in (56, 55):
    x = torch.empty(33, 2, 63, 75, width, dtype=torch.float16)
    for name, arguments in (("sum.dim_IntList", ([1],)), ("amax", ([1],)), ("_softmax", (1, False))):
        with targets.recorded_launches() as found:
            tritonite.overloads()[name](x, *arguments)
        ptx = found[0].compile(GPUTarget("cuda", 90, 32)).asm["ptx"]
        loads = re.findall(r"ld.global[.a-z0-9]*", ptx)
        print(set(loads), len(loads), "shared" if re.search("ld.shared|st.shared|shfl", ptx) else "registers")
"""


@pytest.mark.smoke
def test_columns_at_odd_addresses_are_loaded_by_neighbouring_threads():
    """Triton 3.6 assigns neighbouring threads to a row unless it knows that elements are contiguous along columns."""
    assert scripts.run(_LAYOUT_OF_LOADS, interpreted=False) == "[1, 0]\n"


@pytest.mark.smoke
def test_short_columns_stay_in_their_threads():
    """A thread loads 16 bytes or one element at a time, and no data passes between threads."""
    lines = scripts.run(_SHORT_COLUMNS, interpreted=False).splitlines()
    assert len(lines) == 6 and all(line.endswith("registers") for line in lines), lines
    assert all("v4.b32'} 2" in line for line in lines[:3]), lines
    assert all("v4" not in line for line in lines[3:]), lines


@pytest.mark.smoke
def test_float8_copies_are_not_lost_by_the_assembler():
    assert scripts.run(_FLOAT8_COPIES, interpreted=False) == "[False, False]\n"


_BROKEN = """
\t08:-:-:-:1\tULDC.64 UR10, c[0x0][0x2a0];
\t--:-:-:-:1\tUIADD3 UR10, UP0, UR10, 0x40, URZ;
\t--:-:-:-:1\tUIADD3.X UR11, UR11, -0x7fffffe0, URZ, UP0, !UPT;
\t--:-:-:-:1\tUMOV UR22, UR10;
\t--:-:-:-:1\t@P0 HGMMA.64x32x16.F32.BF16 R56, R28, gdesc[UR8].tnspB, R56;
\t--:-:-:-:1\tHGMMA.64x32x16.F32.BF16 R56, gdesc[UR20], R56;
"""


def test_descriptors_from_kernel_arguments_are_found():
    assert [each.split()[0] for each in broken_descriptors(_BROKEN)] == ["HGMMA.64x32x16.F32.BF16"] * 2
    for mended in ("USGXT.U32 UR10, UR4, 0xe", "R2UR UR10, R4", "UIADD3.64 UR10, UR4, UR6, URZ"):
        assert not broken_descriptors(_BROKEN.replace("UMOV UR22", f"{mended};\n\tUMOV UR22"))
