"""Products of matrices, batches of matrices, and vectors."""

from __future__ import annotations

import math
from typing import Any

import torch

from tritonite import devices
from tritonite.dtypes import FLOATS
from tritonite.testing.samples import facts
from tritonite.testing.tolerances import ATOL

# Libraries differ in whether a sum begins with 0 or with the first product.
facts.ZERO_SIGN_OF_ROUNDOFF |= {"mm", "mv", "bmm", "dot", "vdot", "addmm", "addmv", "baddbmm", "addbmm"}
facts.ZERO_SIGN_OF_ROUNDOFF |= {"_addmm_activation", "_grouped_mm", "_scaled_mm"}


def shapes_of(packet: str, batches: int, M: int, N: int, K: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a product's tensors by their names, for (batches, M, K) times (batches, K, N)."""
    first, second, result = (M, K), (K, N), (M, N)
    batched_first, batched_second = (batches, *first), (batches, *second)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "mm": {"self": first, "mat2": second},
        "_int_mm": {"self": first, "mat2": second},
        "bmm": {"self": batched_first, "mat2": batched_second},
        "mv": {"self": first, "vec": (K,)},
        "addmm": {"self": result, "mat1": first, "mat2": second},
        "_addmm_activation": {"self": result, "mat1": first, "mat2": second},
        "addmv": {"self": (M,), "mat": first, "vec": (K,)},
        "addr": {"self": result, "vec1": (M,), "vec2": (N,)},
        "baddbmm": {"self": (batches, *result), "batch1": batched_first, "batch2": batched_second},
        "addbmm": {"self": result, "batch1": batched_first, "batch2": batched_second},
        "dot": {"self": (K,), "tensor": (K,)},
        "vdot": {"self": (K,), "other": (K,)},
    }
    return shapes.get(packet, {})


def _with_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a view of 2 or 3 dimensions: a vector becomes pairs, a matrix a batch of two."""
    x = x[None, None] if x.dim() == 0 else x.unflatten(0, (-1, 2)) if x.dim() == 1 else x
    while x.dim() > rank:
        x = x[0] if len(x) else x.flatten(0, 1)
    return x if x.dim() == rank else x.expand(2, *x.shape)


def _matrices(tensors: facts.Tensors) -> dict[str, Any]:
    """Return two matrices that multiply, vectors that multiply with each, and an addend."""
    a, b = (_with_rank(tensor, 2) for tensor in tensors[:2])
    b = b.mT if b.shape[1] == a.shape[1] else a.mT
    row = b[0] if len(b) else b.flatten()
    given = {"mat1": a, "mat": a, "mat2": b, "vec2": row, "self": a[:, :1] + b[:1]}
    return given | {"vec1": a.sum(1).to(a.dtype), "vec": b.sum(1).to(b.dtype)}


def _batches(tensors: facts.Tensors) -> dict[str, Any]:
    """Return two batches of matrices that multiply, and addends of a product and of their sum."""
    a, b = (_with_rank(tensor, 3) for tensor in tensors[:2])
    b = b.mT if b.shape[::2] == a.shape[::2] else a.mT
    added = a[..., :1] + b[:, :1]
    return {"batch1": a, "batch2": b, "mat2": b, "self": added, "added": added[0]}


def _aligned(tensors: facts.Tensors) -> dict[str, Any]:
    """Return matrices of sizes and layouts that ATen accepts for int8, float8 and grouped products on GPUs."""
    a, b = tensors[:2]
    if a.dim() == 2 and a.shape[-1] == b.shape[-1] and a.shape[-1] % 16 == 0:
        return {"self": a, "mat2": b.mT}
    values = a.flatten() if a.numel() else a.new_zeros(1)
    a, b = (values.repeat(size // len(values) + 1)[:size] for size in (32 * 16, 48 * 16))
    return {"self": a.view(32, 16), "mat2": b.view(48, 16).mT}


def _scaled(tensors: facts.Tensors) -> dict[str, Any]:
    given = _aligned([x if x.dtype.itemsize == 1 else x.float().nan_to_num(1, 1, 1) for x in tensors[:2]])
    given = {name: x.to(torch.float8_e4m3fn) for name, x in given.items()}
    one = torch.ones((), device=tensors[0].device)
    return given | {"scale_a": one / 2, "scale_b": one, "bias": None, "scale_result": None, "out_dtype": torch.bfloat16}


def _grouped(tensors: facts.Tensors) -> dict[str, Any]:
    """Return rows in groups of uneven sizes, the first of which is empty."""
    given = _aligned(tensors)
    if given["mat2"].dim() == 2:
        given["mat2"] = given["mat2"].mT.view(3, 16, 16)
    rows, groups = len(given["self"]), len(given["mat2"])
    ends = torch.arange(groups, device=tensors[0].device) ** 2 * rows // (groups - 1) ** 2
    return given | {"offs": ends.int(), "bias": None, "out_dtype": None}


def _scaled_product(
    self: torch.Tensor, mat2: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    return self @ mat2 * scale_a * scale_b


def _grouped_product(self: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    ends = [0, *map(int, offs)]
    groups = zip(ends, ends[1:], mat2, strict=False)
    return torch.cat([self[begin:end] @ matrix for begin, end, matrix in groups])


def _activated(
    self: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    use_gelu: bool = False,
    out: Any = None,
    **scales: Any,
) -> torch.Tensor:
    """Return relu or gelu of a product: ATen's fused gelu on a GPU has float32 constants, also in float64."""
    total = torch.addmm(self, mat1, mat2, **scales)
    if not use_gelu:
        return total.relu()
    return torch.nn.functional.gelu(total, approximate="none" if devices.current.aten == "cpu" else "tanh")


facts.REFERENCES |= {
    "_addmm_activation": _activated,
    "_grouped_mm": _grouped_product,
    "_scaled_mm": _scaled_product,
}


def _first(make: Any, name: str) -> Any:
    """Call the operand `name` also `self`."""

    def made(tensors: facts.Tensors) -> dict[str, Any]:
        given = make(tensors)
        return given | {"self": given[name]}

    return made


def _vectors(tensors: facts.Tensors) -> dict[str, Any]:
    if tensors[0].dim() == 1:
        return {"self": tensors[0], "tensor": tensors[1], "other": tensors[1]}
    a, b = (_with_rank(tensor, 2) for tensor in tensors[:2])
    other = b[:, 0] if b.shape == a.shape else a[:, -1:].flatten()
    return {"self": a[:, :1].flatten(), "tensor": other, "other": other}


_ARGUMENTS = {
    "mm": _first(_matrices, "mat1"),
    "mv": _first(_matrices, "mat1"),
    "bmm": _first(_batches, "batch1"),
    "addmm": _matrices,
    "_addmm_activation": _matrices,
    "addmv": _first(_matrices, "vec1"),
    "addr": _matrices,
    "baddbmm": _batches,
    "addbmm": _first(_batches, "added"),
    "dot": _vectors,
    "vdot": _vectors,
    "_int_mm": _aligned,
    "_scaled_mm": _scaled,
    "_grouped_mm": _grouped,
}
facts.ARGUMENTS |= _ARGUMENTS


def truncated_terms(tensors: facts.Tensors, longest: float) -> float:
    """Return how many rounded terms have the roundoff of `longest` products that tensor cores add up.

    They truncate a sum after each step instead of rounding it (Fasi, Higham, Mikaitis, Pranesh 2021). In 16 bits a step
    adds 16 terms, and loses half a unit in the last place in the mean, of a sum that has grown with the root of the
    number of terms.
    """
    floats = _magnitudes(tensors)
    usual = sorted(float(x.mean()) for x in floats)
    truncated = longest * math.prod(usual[-2:]) / 2
    if any(x.dtype.itemsize == 2 for x in tensors):
        squares = sorted(float(torch.linalg.vector_norm(x)) ** 2 / x.numel() for x in floats)
        grown = (longest * math.prod(squares[-2:])) ** 0.5
        truncated = max(truncated, longest / 16 * grown * 2**-24.5 / ATOL[torch.float16])
    return truncated**2


def _magnitudes(tensors: facts.Tensors) -> list[torch.Tensor]:
    floats = [x.detach().double().abs() for x in tensors if x.is_floating_point()]
    return [x.nan_to_num(0, 0).clamp_max(1e60) for x in floats]


def terms_of_products(sums: facts.Sums, batches: int = 1) -> float:
    """Return the terms of sums of products along the longest dimension of any operand, and along `batches`."""
    largest = sorted(float(x.max()) for x in _magnitudes(sums.tensors))
    longest = batches * max((size for x in sums.tensors for size in x.shape), default=1)
    # A factor multiplies roundoff, too; a small one leaves that of the addend.
    factor = min(max(1.0, abs(sums.alpha)), 1e60) if math.isfinite(sums.alpha) else 1.0
    rounded = longest * max(1.0, math.prod(largest[-2:])) ** 2
    return max(rounded, truncated_terms(sums.tensors, longest)) * factor**2


facts.terms(*_ARGUMENTS)(terms_of_products)


@facts.terms("addbmm")
def _terms_of_all_batches(sums: facts.Sums) -> float:
    """Return the terms of products that are added up along the batches, too."""
    return terms_of_products(sums, max((len(x) for x in sums.tensors if x.dim() == 3), default=1))


@facts.drawn("_grouped_mm")
def ends_in_order(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ascending ends of groups that cover all rows: other results of ATen are undefined."""
    given: list[Any] = [arguments.get(name) for name in ("offs", "self", "mat2")]
    ends, self, mat2 = given
    tensors = all(isinstance(each, torch.Tensor) for each in given)
    if not tensors or ends.dtype is not torch.int32 or ends.dim() != 1 or min(self.dim(), mat2.dim()) < 2:
        return arguments
    if not len(ends):
        # ATen leaves rows outside groups uninitialised.
        return arguments | ({"self": self[:0]} if self.dim() == 2 else {"mat2": mat2[..., :0]})
    last = mat2.shape[-1] if self.dim() == 3 else self.shape[0 if mat2.dim() == 3 else 1]
    counted = torch.arange(1, len(ends) + 1, device=ends.device) * last
    return arguments | {"offs": (counted // len(ends)).int()}


@facts.drawn("baddbmm")
def _finite_where_ignored(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make batches finite if alpha is 0: on the CPU ATen multiplies small batches by 0, and BLAS ignores large ones."""
    if devices.current.aten != "cpu" or arguments.get("alpha") != 0:
        return arguments
    batches = {name: arguments[name] for name in ("batch1", "batch2")}
    finite = {
        name: x.nan_to_num(1.0, 1.0, 1.0) if isinstance(x, torch.Tensor) and x.dtype in FLOATS else x
        for name, x in batches.items()
    }
    return arguments | finite
