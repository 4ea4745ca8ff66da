"""Products of float8 matrices whose scales are given by a recipe, and products of groups of them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonite import devices
from tritonite.testing.samples import facts
from tritonite.testing.samples.matmul import ends_in_order, terms_of_products

_PRODUCT, _GROUPS, _GROUPS_V2 = "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"
facts.ZERO_SIGN_OF_ROUNDOFF |= {_PRODUCT, _GROUPS, _GROUPS_V2}
facts.terms(_PRODUCT, _GROUPS, _GROUPS_V2)(terms_of_products)
# Rows and columns of the operands, and elements along K: two blocks of 128.
_M, _N, _K = 32, 48, 160
# Lists that are empty without swizzled scales and other inner dimensions.
_UNUSED = ("swizzle_a", "swizzle_b", "contraction_dim")
# Pairs of torch.nn.functional.ScalingType: of tensors, of rows, and of blocks along K.
_RECIPES = ((0, 0), (1, 1), (4, 5), (5, 4), (4, 4))


def _float8(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a finite float8 tensor of a shape with the elements of x, repeated or cut."""
    values = x.flatten().float().nan_to_num(1, 1, 1).clamp(-448, 448) if x.numel() else torch.zeros(1, device=x.device)
    count = int(torch.tensor(shape).prod())
    return values.repeat(count // values.numel() + 1)[:count].view(shape).to(torch.float8_e4m3fn)


def _scales(recipe: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return the scales of (rows, K) as ATen takes them from the first operand."""
    blocks = -(-_K // 128)
    if recipe in (0, 1):
        return torch.linspace(0.5, 1.5, rows, device=device)[:, None] if recipe else torch.ones((), device=device) / 2
    columns, lines = (blocks, rows) if recipe == 4 else (-(-rows // 128), -(-blocks // 4) * 4)
    return torch.linspace(0.5, 1.5, columns * lines, device=device).view(columns, lines).t()


def _recipes(recipe_a: int, recipe_b: int) -> dict[str, list[int]]:
    """Return the lists that name one kind of scales for each operand."""
    return {"recipe_a": [recipe_a], "recipe_b": [recipe_b]} | {name: [] for name in _UNUSED}


def _scaled(tensors: facts.Tensors) -> dict[str, Any]:
    """Return two matrices, and scales by a recipe that the first operand's last size chooses."""
    x = tensors[0]
    # ATen's kernel for CPUs has no scales of blocks.
    served = _RECIPES[:2] if devices.current.aten == "cpu" else _RECIPES
    recipe_a, recipe_b = served[(x.shape[-1] if x.dim() else 0) % len(served)]
    scale_b = _scales(recipe_b, _N, x.device)
    given = {"self": _float8(x, _M, _K), "mat2": _float8(x, _N, _K).mT, "bias": None, "out_dtype": torch.bfloat16}
    given |= {"scale_a": [_scales(recipe_a, _M, x.device)], "scale_b": [scale_b.mT if recipe_b == 1 else scale_b]}
    return given | _recipes(recipe_a, recipe_b)


def _spread(scale: torch.Tensor, recipe: int, rows: int) -> torch.Tensor:
    """Return a scale for each element of (rows, K), or one that broadcasts to that."""
    if recipe in (0, 1):
        return scale.reshape(-1, 1)
    by_row = scale if recipe == 4 else scale.mT.repeat_interleave(128, 0)[:rows]
    return by_row.repeat_interleave(128, 1)[:, :_K]


def _scaled_reference(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: facts.Tensors,
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: facts.Tensors,
    recipe_b: list[int],
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    a = self.double() * _spread(scale_a[0].double(), recipe_a[0], _M)
    return a @ (mat2.mT.double() * _spread(scale_b[0].double(), recipe_b[0], _N)).mT


def _in_groups(tensors: facts.Tensors) -> dict[str, Any]:
    """Return groups of rows, of columns or of the inner dimension, or two batches, by the operand's last size."""
    x = tensors[0]
    kind = (x.shape[-1] if x.dim() else 0) % 4
    shapes = {0: ((_M, _K), (3, _N, _K)), 1: ((3, _M, _K), (_N, _K)), 2: ((3, _M, _K), (3, _N, _K))}
    first, second = shapes.get(kind, ((_M, _K), (_N, _K)))
    # Groups end at multiples of 16, as ATen asks; the first is empty.
    ends = {0: (0, 16, _M), 1: (0, 16, _N), 3: (0, 64, _K)}.get(kind)
    given = {"self": _float8(x, *first), "mat2": _float8(x, *second).mT, "bias": None, "out_dtype": torch.bfloat16}
    scales = [
        torch.linspace(0.5, 1.5, 3 * shape[0] if kind == 3 else shape[0], device=x.device)
        if len(shape) == 2
        else torch.linspace(0.5, 1.5, 3 * shape[1], device=x.device).view(3, -1)
        for shape in (first, second)
    ]
    given["offs"] = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=x.device)
    return given | {"scale_a": scales[0], "scale_b": scales[1], "scale_result": None}


def _in_groups_v2(tensors: facts.Tensors) -> dict[str, Any]:
    given = _in_groups(tensors)
    return given | _recipes(1, 1) | {name: [given[name]] for name in ("scale_a", "scale_b")}


def _groups_reference(
    self: torch.Tensor, mat2: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, offs: Any, *_: Any, **__: Any
) -> torch.Tensor:
    a, b = self.double(), mat2.double()
    if offs is None:
        return a @ b * scale_a[..., None] * scale_b[:, None]
    ends = [0, *map(int, offs)]
    spans = [slice(*span) for span in itertools.pairwise(ends)]
    if self.dim() == mat2.dim():
        rows, columns = scale_a.view(len(spans), -1, 1), scale_b.view(len(spans), 1, -1)
        return torch.stack([a[:, span] @ b[span] for span in spans]) * rows * columns
    if self.dim() == 2:
        return torch.cat([a[s] @ m * scale_a[s, None] * c for s, m, c in zip(spans, b, scale_b, strict=True)])
    return torch.cat([m @ b[:, s] * r[:, None] * scale_b[s] for s, m, r in zip(spans, a, scale_a, strict=True)], 1)


def _groups_reference_v2(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: facts.Tensors,
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: facts.Tensors,
    recipe_b: list[int],
    swizzle_b: list[int],
    offs: Any,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    return _groups_reference(self, mat2, scale_a[0], scale_b[0], offs)


facts.ARGUMENTS |= {_PRODUCT: _scaled, _GROUPS: _in_groups, _GROUPS_V2: _in_groups_v2}
facts.REFERENCES |= {_PRODUCT: _scaled_reference, _GROUPS: _groups_reference, _GROUPS_V2: _groups_reference_v2}


@facts.drawn(_PRODUCT)
def _finite_scales(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return scales without infinities: ATen's kernel for CPUs multiplies operands by them, and others the sums."""

    def finite(scale: torch.Tensor) -> torch.Tensor:
        return scale.clamp(-1e4, 1e4) if scale.dtype is torch.float32 else scale

    names = [name for name in ("scale_a", "scale_b") if name in arguments]
    return arguments | {name: pytree.tree_map_only(torch.Tensor, finite, arguments[name]) for name in names}


@facts.drawn(_GROUPS, _GROUPS_V2)
def _aligned_ends(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ascending ends at multiples of 16 that cover all rows: other results of ATen are undefined."""
    given = ends_in_order(arguments)
    ends = given.get("offs")
    if not isinstance(ends, torch.Tensor) or ends.dtype is not torch.int32 or ends.dim() != 1 or not len(ends):
        return given
    return given | {"offs": torch.cat((ends[:-1] // 16 * 16, ends[-1:]))}
