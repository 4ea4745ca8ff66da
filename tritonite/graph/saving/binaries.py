"""Kernels of a file, loaded onto the device by the driver, without Triton's compiler and without their sources."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from triton.runtime import driver

from tritonite import devices


class Binary:
    """A GPU kernel of a file. `function` is the driver's handle, which `_module` keeps valid."""

    def __init__(self, key: str, files: Mapping[str, bytes], device: torch.device) -> None:
        (metadata,) = [json.loads(data) for name, data in files.items() if name.endswith(".json")]
        (binary,) = [data for name, data in files.items() if not name.endswith(".json")]
        self.hash = key
        with devices.of(device).runtime.on(device):
            loaded = driver.active.utils.load_binary(metadata["name"], binary, metadata["shared"], device.index or 0)
        self._module, self.function = loaded[0], loaded[1]


def loader(kernels: Mapping[str, Mapping[str, bytes]], device: torch.device) -> Callable[[str], Binary]:
    """Return a function that loads each kernel of a file once, by Triton's hash. Raises ValueError for other hashes."""
    loaded: dict[str, Binary] = {}

    def owner_of(key: Any) -> Binary:
        if key not in loaded:
            if key not in kernels:
                raise ValueError(f"the file lacks the kernel {key}")
            loaded[key] = Binary(key, kernels[key], device)
        return loaded[key]

    return owner_of
