"""The module `torch.NAME`: one device, whose calls have ended when they return, its streams, events and generator."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch


def device_type() -> str:
    """Return the name that `register` has given PrivateUse1."""
    return torch._C._get_privateuse1_backend_name()


class Event:
    """The time at which a stream reached a point."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: what was launched has ended."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds until another event."""
        return 1000 * (end.time - self.time)


class Stream:
    """A queue of launches, each of which ends before the next call of Python."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority = torch.device(device_type(), 0), priority

    def synchronize(self) -> None:
        """Do nothing: what was launched has ended."""

    def wait_stream(self, other: Stream) -> None:
        """Do nothing: what was launched on the other stream has ended."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Module:
    """The functions of the device type, for PyTorch and for users."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        # PyTorch lets Python make generators of the CPU alone; draws of this device have one of their own.
        self.default_generators = (torch.Generator(),)
        self._stream = Stream.__new__(Stream)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device: Any = None) -> None:
        """Do nothing: what was launched has ended."""

    def current_stream(self, device: Any = None) -> Stream:
        return self._stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Any:
        outer, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = outer

    def manual_seed(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.default_generators[0].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


MODULE = Module()
