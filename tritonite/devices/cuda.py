"""The runtime of PyTorch's device type "cuda", on NVIDIA GPUs by CUDA and on AMD GPUs by ROCm."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from tritonite.devices.runtime import Runtime

if TYPE_CHECKING:
    from tritonite.devices.record import Device


@functools.lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=64)
def _resident_threads(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    # Whole blocks of 256 threads, as ATen counts.
    return int(properties.multi_processor_count * (properties.max_threads_per_multi_processor // 256 * 256))


class CudaRuntime(Runtime):
    """The functions of torch.cuda."""

    def module(self, device: torch.device) -> Any:
        return torch.cuda

    # Without a layer of Python, because every launch calls them. PyTorch has them in builds for GPUs only.
    launch_index = staticmethod(getattr(torch._C, "_cuda_getDevice", int))
    launch_stream = staticmethod(getattr(torch._C, "_cuda_getCurrentRawStream", int))  # type: ignore[assignment]

    def current_index(self, kind: Device) -> int | None:
        return torch.cuda.current_device()

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(device)

    def synchronize(self, kind: Device) -> None:
        torch.cuda.synchronize()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def prepare_blas(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            torch.cuda.current_blas_handle()

    def initialized_generators(self, kind: Device) -> tuple[torch.Generator, ...]:
        return tuple(torch.cuda.default_generators) if torch.cuda.is_initialized() else ()

    def multiprocessors(self, device: torch.device, kind: Device) -> int:
        return _multiprocessors(device)

    def resident_threads(self, device: torch.device) -> int:
        return _resident_threads(device)

    def device_name(self, device: torch.device, kind: Device) -> str:
        return torch.cuda.get_device_name(device)
