"""No device at all (TRITON_INTERPRET=0 without a GPU): kernels compile for other machines and nothing runs."""

from dataclasses import replace

from tritonite.devices import nvidia
from tritonite.devices.runtime import HostRuntime

RECORD = replace(
    nvidia.RECORD,
    kind="none",
    type="cpu",
    dispatch_key="",
    runtime=HostRuntime(),
    aten="cpu",
    native=None,
    host_memory=True,
    aten_measured=False,
)
