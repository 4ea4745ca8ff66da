"""No device at all (TRITON_INTERPRET=0 without a GPU): kernels compile for other machines and nothing runs."""

from dataclasses import replace

from tritonite.devices import nvidia

RECORD = replace(nvidia.RECORD, kind="none", type="cpu", dispatch_key="", aten_measured=False)
