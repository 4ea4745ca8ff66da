"""Scripts that compile for an NVIDIA GPU on a machine without one."""

import scripts

# A driver of a GPU that only names its target. Triton's own launches compile with it, and nothing can be loaded.
DRIVER = """
import contextlib
import torch, tritonite
from unittest import mock
from triton.compiler import CompiledKernel
from triton.runtime import driver
from tritonite import devices
from tritonite.registry import overloads
from tritonite.runtime import compilation
from tritonite.testing.compile_cases.cases import TARGETS
from tritonite.warming import warm
from tritonite.warming.collect import collect

TARGET = TARGETS["sm_90"]
driver.set_active(mock.Mock(**{
    "get_current_target.return_value": TARGET, "get_current_device.return_value": 0,
    "get_current_stream.return_value": 0,
}))
mock.patch.object(CompiledKernel, "_init_handles", lambda self: None).start()
mock.patch.object(torch.cuda, "device", lambda index: contextlib.nullcontext()).start()
mock.patch.object(devices, "has_dependent_launch", lambda device: True).start()
mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False).start()
mock.patch.object(torch._C, "_cuda_getDevice", lambda: 0, create=True).start()
mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True).start()

def needed_by(function, *args):
    collector = compilation.Collector(TARGET)
    assert collect(function, args, {}, collector) == {}
    return list(collector.needed.values())
"""


def run(script, cache, anew=False, **variables):
    """Run a script after `DRIVER` with a folder for Triton's disk cache, as `scripts.run` does; return its output."""
    return scripts.run(DRIVER + script, False, anew, TRITON_CACHE_DIR=str(cache), **variables)
