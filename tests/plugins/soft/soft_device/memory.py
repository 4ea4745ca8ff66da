"""The allocator: blocks of anonymous memory, which PyTorch's storages own by DLPack, and CPU tensors over them."""

from __future__ import annotations

import collections
import ctypes
import mmap
from typing import Any

import torch

# DLPack's types of device: the CPU, and kDLExtDev, which PyTorch takes for PrivateUse1.
_CPU, _EXTENSION = 1, 12


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("dtype", _Type),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Allocator:
    """Blocks by size. A storage that dies gives its block to the next one of the same size."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = collections.defaultdict(list)
        self._live: dict[int, tuple[Any, ...]] = {}
        # Storages die at any time, also during garbage collection: their blocks are taken back at the next allocation.
        self._dead: collections.deque[int] = collections.deque()
        self._deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._dead.append)
        self.allocated_bytes = 0
        self.most_allocated_bytes = 0

    def bytes(self, size: int) -> torch.Tensor:
        """Return a vector of `size` bytes of the device, at a multiple of 4,096."""
        self._take_back()
        rounded = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
        block = self._free[rounded].pop() if self._free[rounded] else mmap.mmap(-1, rounded)
        self.allocated_bytes += rounded
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        return self._wrapped(address, size, _EXTENSION, block)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor over the memory of a tensor of the device."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        vector = self._wrapped(address, size, _CPU, storage) if size else torch.empty(0, dtype=torch.uint8)
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(vector.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _wrapped(self, address: int, size: int, device: int, keep: Any) -> torch.Tensor:
        shape, strides = (ctypes.c_int64 * 1)(size), (ctypes.c_int64 * 1)(1)
        dims = ctypes.addressof(shape), ctypes.addressof(strides)
        managed = _Managed(_Tensor(address, device, 0, 1, _Type(1, 8, 1), *dims, 0), None, None)
        managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p)
        own = ctypes.addressof(managed)
        self._live[own] = managed, shape, strides, keep
        return torch._C._from_dlpack(_capsule(own, b"dltensor", None))

    def _take_back(self) -> None:
        while self._dead:
            *_, keep = self._live.pop(self._dead.popleft())
            if isinstance(keep, mmap.mmap):
                self.allocated_bytes -= len(keep)
                self._free[len(keep)].append(keep)


ALLOCATOR = Allocator()
on_host = ALLOCATOR.on_host
