"""The allocator: memory of C, which PyTorch's storages own by DLPack, and CPU tensors over it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

# DLPack's types of device: the CPU, and kDLExtDev, which PyTorch takes for PrivateUse1.
_CPU, _EXTENSION = 1, 12
# Bytes before a tensor's memory, for the record that DLPack owns it by.
_HEADER = 512
_libc = ctypes.CDLL(None)
_libc.aligned_alloc.restype, _libc.aligned_alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_size_t]


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
    _fields_ += [("shape", ctypes.c_int64), ("stride", ctypes.c_int64)]


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# C's own function frees a record and the memory behind it. A storage may die where no Python can run.
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value


def allocate(size: int) -> torch.Tensor:
    """Return a vector of `size` bytes of the device, at a multiple of 512. Raises MemoryError."""
    return _owned(size, _EXTENSION, None)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory of a tensor of the device."""
    storage, view = tensor.untyped_storage(), torch.empty(0, dtype=tensor.dtype)
    size = storage.nbytes()
    vector = _owned(size, _CPU, storage.data_ptr()) if size else torch.empty(0, dtype=torch.uint8)
    view.set_(vector.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    # The memory lives as long as the view is used from Python.
    view.of_device = tensor
    return view


def _owned(size: int, device: int, address: int | None) -> torch.Tensor:
    """Return a vector of bytes over memory at an address, or over new memory, that owns its record."""
    needed = _HEADER + (size if address is None else 0)
    record = _libc.aligned_alloc(_HEADER, -(-needed // _HEADER) * _HEADER)
    if not record:
        raise MemoryError(f"{needed} bytes")
    managed = _Managed.from_address(record)
    managed.shape, managed.stride, managed.context, managed.deleter = size, 1, None, _FREE
    dims: list[Any] = [record + _Managed.shape.offset, record + _Managed.stride.offset]
    managed.tensor = _Tensor(record + _HEADER if address is None else address, device, 0, 1, _Type(1, 8, 1), *dims, 0)
    return torch._C._from_dlpack(_capsule(record, b"dltensor", None))
