"""Copies, conversions, concatenation, copies of views, and gradients of views."""

from __future__ import annotations

from typing import Any

import torch

from tritonite import devices
from tritonite.dtypes import FULL_FLOATS
from tritonite.engine.iteration import span
from tritonite.testing.samples import facts

facts.CHOICES["memory_format"] = (None, torch.preserve_format, torch.contiguous_format, torch.channels_last)


@facts.arguments("cat", "stack", "_stack")
def _lists(tensors: facts.Tensors) -> dict[str, Any]:
    """Return three tensors of one shape, and the first dimension or the last to concatenate them along."""
    first = tensors[0]
    dim = 0 if first.is_contiguous() else -1
    return {"dim": dim, "tensors": [first, *(x if x.shape == first.shape else first.flip(0) for x in tensors[1:3])]}


@facts.arguments("block_diag")
def _matrices(tensors: facts.Tensors) -> dict[str, Any]:
    return {"tensors": [x if x.dim() < 3 else x.flatten(1) for x in tensors]}


@facts.arguments("expand_copy")
def _expanded(tensors: facts.Tensors) -> dict[str, Any]:
    return {"size": [2, *tensors[0].shape]}


@facts.arguments("permute_copy")
def _reversed(tensors: facts.Tensors) -> dict[str, Any]:
    return {"dims": list(range(tensors[0].dim()))[::-1]}


@facts.arguments("transpose_copy", "diagonal_copy", "diagonal_scatter")
def _two_dimensions(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return two dimensions, and a source for their diagonal."""
    x = tensors[0]
    if x.dim() < 2:
        return None
    dims = {"dim0": -2, "dim1": -1, "offset": 1} if x.dim() < 3 else {"dim0": 0, "dim1": 2, "dim2": 1, "offset": -1}
    dims.setdefault("dim2", 0)
    return {"self": x, **dims, "src": x.diagonal(dims["offset"], dims["dim1"], dims["dim2"]).flip(0)}


@facts.arguments("diagonal_backward", "diag_embed")
def _diagonal(tensors: facts.Tensors) -> dict[str, Any]:
    """Return a gradient of the diagonal below the main one."""
    given = {"grad_output": tensors[0], "offset": -1, "dim1": 0, "dim2": -1}
    if not tensors[0].dim():
        return given | {"input_sizes": []}
    *lead, size = tensors[0].shape
    return given | {"input_sizes": [size + 1, *lead, size]}


@facts.arguments("view_copy", "_reshape_copy")
def _flat(tensors: facts.Tensors) -> dict[str, Any]:
    return {"size": [tensors[0].numel()]}


@facts.arguments("as_strided_copy", "as_strided_scatter", "_reshape_alias_copy")
def _strided(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return a strided view of six elements, and a source of this size."""
    x = tensors[0]
    if not x.dim() or x.numel() < 60:
        return None
    return {"self": x, "size": [2, 3], "stride": [7, 2], "src": x.flatten()[:6].reshape(2, 3), "storage_offset": None}


@facts.arguments("narrow_copy", "slice_copy", "slice_scatter", "slice_backward")
def _rows(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return every second row, and a source and a gradient for these rows."""
    x = tensors[0]
    if not x.dim() or not x.shape[0]:
        return None
    given = {"self": x, "dim": 0, "start": 0, "end": x.shape[0], "step": 2, "length": 1, "input_sizes": list(x.shape)}
    return given | {"src": x[::2].flip(0), "grad_output": x[::2]}


@facts.arguments("select_copy", "select_scatter", "select_backward")
def _one_row(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    if not x.dim() or not x.shape[0]:
        return None
    given = {"self": x, "dim": 0, "index": -1, "input_sizes": list(x.shape)}
    return given | {"src": x[0].flip(0) if x.dim() > 1 else x[0], "grad_output": x[0]}


@facts.arguments("unfold_copy", "unfold_backward")
def _windows(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    if not x.dim() or x.shape[0] < 2:
        return None
    given = {"self": x, "dimension": 0, "dim": 0, "size": 2, "step": 1}
    return given | {"grad_in": x.unfold(0, 2, 1), "input_sizes": list(x.shape)}


@facts.arguments("repeat")
def _repeats(tensors: facts.Tensors) -> dict[str, Any]:
    return {"repeats": [2, *[1] * (tensors[0].dim() - 1), 3][: tensors[0].dim() + 1]}


@facts.arguments("split_copy", "split_with_sizes_copy", "unbind_copy")
def _split(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    if not x.dim() or not x.shape[0]:
        return None
    size = (x.shape[0] + 1) // 2
    return {"self": x, "dim": 0, "split_size": size, "split_sizes": [size, x.shape[0] - size]}


@facts.arguments("squeeze_copy")
def _squeezed(tensors: facts.Tensors) -> dict[str, Any]:
    return {"self": tensors[0].unsqueeze(-1)}


@facts.arguments("view_as_complex_copy")
def _pairs(tensors: facts.Tensors) -> dict[str, Any]:
    return {"self": tensors[0].reshape(-1)[: tensors[0].numel() // 2 * 2].reshape(-1, 2)}


@facts.arguments("_chunk_cat")
def _chunks(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return tensors whose last chunk along the first dimension is smaller."""
    x = tensors[0]
    return {"tensors": [x, x[1:].clone(), x[:1].clone()], "dim": 0, "num_chunks": 2} if x.dim() and len(x) > 1 else None


@facts.drawn("stack", "_stack")
def _one_at_least(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a list that is not empty, for which ATen stops the program, with a contiguous tensor if it has only one.

    ATen reads beyond the memory of a single expanded tensor.
    """
    tensors = arguments["tensors"] or [torch.ones(2, 3, device=devices.current.type)]
    return arguments | {"tensors": [x.contiguous() for x in tensors] if len(tensors) == 1 else tensors}


facts.may_decline(
    ("split_with_sizes_copy.out",),
    ("*",),
    "a tensor that is not contiguous*",
    "ATen's kernel for GPUs reads any dense layout as if it were contiguous",
    device="cuda",
)
facts.may_decline(
    ("dequantize.self",),
    ("*",),
    "a float32 tensor, which ATen returns itself",
    "the result is the argument",
    dtypes=(torch.float32,),
)
facts.may_decline(
    ("conj_physical",),
    ("functional",),
    facts.NOT_REACHED,
    "a real tensor is its own conjugate",
)
facts.may_decline(
    ("addbmm",),
    ("in-place",),
    "copy_: output overlaps an input",
    "ATen copies a tensor to itself, which only addresses show",
    dtypes=(torch.int32,),
)
facts.may_decline(
    ("complex",),
    ("gradient",),
    "*: conversion from torch.bfloat16 to torch.complex32",
    "there is no conversion to complex32",
    dtypes=(torch.float16,),
)
facts.may_decline(
    ("as_strided_copy", "as_strided_scatter"),
    ("functional", "out=", "gradient"),
    "*a storage offset, or invalid sizes or strides",
    "the storage offset is not in the key of a call",
)


@facts.arguments("_conj_copy", "_conj_physical", "conj_physical", "view_as_real_copy")
def _complex(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return complex numbers."""
    x = tensors[0]
    if x.is_complex():
        return {"self": x}
    return {"self": torch.complex(x, -x)} if x.dtype in FULL_FLOATS else None


@facts.drawn("_reshape_alias_copy")
def _within_the_tensor(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return sizes and strides within the tensor: ATen reads beyond its memory for others."""
    x, size, stride = (arguments[name] for name in ("self", "size", "stride"))
    sizes = [*size, *stride]
    if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in sizes) or span(size, stride) <= x.numel():
        return arguments
    return arguments | {"size": size if x.numel() else [0] * len(size), "stride": [0] * len(size)}


@facts.drawn("_chunk_cat")
def _with_dimensions(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return tensors with dimensions, and a limited number of chunks: ATen reads the first size of any tensor."""
    tensors, chunks = arguments["tensors"], arguments["num_chunks"]
    whole = [x.reshape(1) if facts.is_scalar(x) else x for x in tensors]
    return arguments | {"tensors": whole, "num_chunks": min(chunks, 64)}


facts.may_decline(
    ("view_as_complex_copy", "view_as_complex_copy.out"),
    ("empty", "zero_dim"),
    "no elements, or memory that is not aligned to 16 bytes",
    "a plan does not know whether memory that is not aligned to 16 bytes begins at a real part",
)
