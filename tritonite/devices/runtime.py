"""`Runtime`: what the host asks of devices of one type."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tritonite.devices.record import Device


class Runtime:
    """The functions of a device type, by PyTorch's device module (`torch.get_device_module`).

    A subclass overrides what its vendor does otherwise. Properties of a device are asked once, and kept.
    """

    def module(self, device: torch.device) -> Any:
        """Return PyTorch's module of the device type, such as torch.cuda."""
        return torch.get_device_module(device)

    def count(self, kind: Device) -> int:
        """Return the number of devices."""
        return int(self.module(torch.device(kind.type)).device_count())

    def current_index(self, kind: Device) -> int | None:
        """Return the index of this thread's current device; None for a type with one device and no index."""
        return int(self.module(torch.device(kind.type)).current_device())

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a device is this thread's current one."""
        return contextlib.nullcontext()

    def launch_index(self) -> int:
        """Return the index of the device that Triton launches on."""
        from triton.runtime import driver

        return int(driver.active.get_current_device())

    def launch_stream(self, index: int) -> int:
        """Return the handle of a device's current stream, for Triton's launcher."""
        from triton.runtime import driver

        return int(driver.active.get_current_stream(index))

    def synchronize(self, kind: Device) -> None:
        """Wait for all launches on this thread's current device."""
        self.module(torch.device(kind.type)).synchronize()

    def is_capturing(self) -> bool:
        """Return whether this thread's current stream is captured into a graph: nothing may wait or compile then."""
        return False

    def prepare_blas(self, device: torch.device) -> None:
        """Have ATen create what its matrix products need and cannot create during a capture."""

    def default_generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of calls that are given none."""
        generator: torch.Generator = self.module(device).default_generators[device.index or 0]
        return generator

    def initialized_generators(self, kind: Device) -> tuple[torch.Generator, ...]:
        """Return the default generators of all devices, none if the type is not in use yet."""
        return ()

    def draw(self, generator: torch.Generator, advance: int) -> tuple[int, int] | None:
        """Return (seed, offset), and advance the generator; None for one whose draws are seeds from ATen's kernel."""
        offset = generator.get_offset()
        generator.set_offset(offset + advance)
        return generator.initial_seed(), offset

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor over the memory of a tensor on a device with `host_memory`."""
        return tensor

    def multiprocessors(self, device: torch.device, kind: Device) -> int:
        """Return the number of multiprocessors, between which programs are divided."""
        return max(1, kind.programs // 8)

    def warp_size(self, kind: Device) -> int:
        """Return the threads of a warp of this thread's current device."""
        return kind.warp_size

    def resident_threads(self, device: torch.device) -> int:
        """Return the number of threads resident at a time, the most that ATen's grid-stride kernels launch."""
        return 2048

    def shared_memory(self, device: torch.device, kind: Device) -> int:
        """Return the bytes of shared memory that a program may use."""
        return kind.shared_memory

    def device_name(self, device: torch.device, kind: Device) -> str:
        """Return the device name under which tuned tiles are stored."""
        return kind.kind

    def architecture(self, device: torch.device) -> str:
        """Return the architecture whose cost tables hold, such as "sm_90"; "" if there are none."""
        return ""

    def has_tma(self, device: torch.device, kind: Device) -> bool:
        """Return whether tensor descriptors are served by hardware."""
        return kind.tma

    def has_wgmma(self, device: torch.device) -> bool:
        """Return whether the device has sm_90's WGMMA instructions."""
        return False

    def has_float8(self, device: torch.device, kind: Device) -> bool:
        """Return whether Triton converts float8_e4m3fn."""
        return kind.fp8

    def has_dependent_launch(self, device: torch.device) -> bool:
        """Return whether the device prepares a launch while the launch before is ending."""
        return False

    def prepares_launches(self, architecture: Any) -> bool:
        """Return whether Triton's target `architecture` has dependent launches."""
        return False


class HostRuntime(Runtime):
    """The CPU: one device without an index, whose generator counts by itself."""

    def count(self, kind: Device) -> int:
        return 1

    def current_index(self, kind: Device) -> int | None:
        return None

    def synchronize(self, kind: Device) -> None:
        """Do nothing: calls have returned when they are done."""

    def default_generator(self, device: torch.device) -> torch.Generator:
        return torch.default_generator

    def draw(self, generator: torch.Generator, advance: int) -> tuple[int, int] | None:
        # A CPU generator has no offset.
        return None
