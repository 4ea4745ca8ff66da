"""Parameters, buffers and other tensors that a graph refers to: by name if a module has them, else by value."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from typing import Any

import torch

from tritonite.errors import UnsavableGraph
from tritonite.graph.saving.values import decoded, encoded
from tritonite.runtime.recorder import call_has_lazy_bits

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Bytes of one member of a file, whose size is limited.
_CHUNK = 2**27
# A storage is cut off before its first used byte at a multiple of this, which keeps the alignment of pointers.
_ALIGNMENT = 512


class Constants:
    """The tensors of a file to write. A tensor gets the number by which its graphs refer to it, once.

    `names` has the names of a module's tensors. Tensors of one storage share memory after loading, too.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        self.described: list[dict[str, Any]] = []
        self._names = {id(tensor): name for name, tensor in named_tensors(module).items()}
        self._numbers: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []

    def number(self, tensor: Any, name: str) -> int:
        """Return the number of a tensor. Raises UnsavableGraph for a tensor that is not an ordinary strided one."""
        if id(tensor) not in self._numbers:
            if not isinstance(tensor, torch.Tensor):
                raise UnsavableGraph(name=name, reason="a part of the graph is a submodule of its own")
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or call_has_lazy_bits(tensor):
                raise UnsavableGraph(name=name, reason="saved are ordinary strided tensors")
            self._numbers[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return self._numbers[id(tensor)]

    @property
    def size(self) -> int:
        """The bytes of the tensors that are saved by value."""
        storages = {each.untyped_storage()._cdata: each for each in self._by_value()}
        return sum(each.untyped_storage().nbytes() for each in storages.values())

    def written(self) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        """Return (JSON of each tensor, the bytes of those saved by value, by member)."""
        ranges: dict[int, list[int]] = {}
        for tensor in self._by_value():
            begin, end = _extent(tensor)
            found = ranges.setdefault(tensor.untyped_storage()._cdata, [begin, end])
            found[:] = [min(found[0], begin), max(found[1], end)]
        storages = {cdata: number for number, cdata in enumerate(ranges)}
        members: dict[str, bytes] = {}
        described: list[dict[str, Any]] = []
        for tensor in self._tensors:
            meta = meta_of(tensor)
            name = self._names.get(id(tensor))
            if name is not None:
                described.append({"name": name, "meta": meta})
                continue
            cdata = tensor.untyped_storage()._cdata
            begin, end = ranges[cdata]
            begin = begin // _ALIGNMENT * _ALIGNMENT
            number = storages[cdata]
            if f"tensors/{number}.0" not in members:
                data = _bytes(tensor, begin, end)
                for i in range(max(1, -(-len(data) // _CHUNK))):
                    members[f"tensors/{number}.{i}"] = data[i * _CHUNK : (i + 1) * _CHUNK]
            described.append(
                {"storage": number, "bytes": end - begin, "meta": meta, "start": _extent(tensor)[0] - begin}
            )
        return described, members

    def _by_value(self) -> list[torch.Tensor]:
        return [tensor for tensor in self._tensors if id(tensor) not in self._names]


def named_tensors(module: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by name."""
    if module is None:
        return {}
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def meta_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what a plan depends on in a constant, as JSON."""
    return {
        "dtype": encoded(tensor.dtype),
        "device": tensor.device.type,
        "sizes": list(tensor.shape),
        "strides": list(tensor.stride()),
        "aligned": tensor.data_ptr() % 16 == 0,
    }


def constants_of(
    described: list[dict[str, Any]], members: Mapping[str, bytes], module: torch.nn.Module | None, device: torch.device
) -> list[torch.Tensor]:
    """Return the tensors of a file. Raises ValueError for a tensor that the module lacks, or has with another meta."""
    named, storages = named_tensors(module), dict[int, torch.Tensor]()
    found = []
    for each in described:
        meta = each["meta"]
        if "name" in each:
            tensor = named.get(each["name"])
            if tensor is None:
                raise ValueError(f"the tensor {each['name']!r} is saved by name; give load a module that has it")
            own, misaligned = _comparable(meta_of(tensor)), meta["aligned"] and tensor.data_ptr() % 16 != 0
            if own != _comparable(meta) or misaligned:
                raise ValueError(f"the tensor {each['name']!r} of the module has {own}, and the graph serves {meta}")
            found.append(tensor)
            continue
        where = device if meta["device"] == device.type else torch.device(meta["device"])
        number = each["storage"]
        if number not in storages:
            storages[number] = _storage(number, each["bytes"], members).to(where)
        dtype = decoded(meta["dtype"])
        tensor = torch.empty(0, dtype=dtype, device=where)
        start = each["start"] // dtype.itemsize
        found.append(tensor.set_(storages[number].untyped_storage(), start, meta["sizes"], meta["strides"]))
    return found


def _comparable(meta: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in meta.items() if name != "aligned"})


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    size, first = tensor.element_size(), tensor.storage_offset()
    if not tensor.numel():
        return first * size, first * size
    last = first + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (last + 1) * size


def _bytes(tensor: torch.Tensor, begin: int, end: int) -> bytes:
    """Return some bytes of a tensor's storage."""
    if begin == end:
        return b""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    part = whole.set_(tensor.untyped_storage(), begin, (end - begin,), (1,)).cpu()
    return ctypes.string_at(part.data_ptr(), part.numel())


def _storage(number: int, size: int, members: Mapping[str, bytes]) -> torch.Tensor:
    """Return a storage's bytes as a tensor on the CPU."""
    whole, done, i = torch.empty(size, dtype=torch.uint8), 0, 0
    while data := members.get(f"tensors/{number}.{i}"):
        if done + len(data) > size:
            break
        ctypes.memmove(whole.data_ptr() + done, data, len(data))
        done, i = done + len(data), i + 1
    if done != size:
        raise ValueError(f"tensor storage {number} has not {size} bytes")
    return whole
