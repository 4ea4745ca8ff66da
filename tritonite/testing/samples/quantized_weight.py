"""Products of floats and a weight of 8-bit or packed 4-bit integers."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.registry import Op
from tritonite.testing.samples import facts
from tritonite.testing.samples.matmul import truncated_terms

_PACKET = "_weight_int8pack_mm"
facts.ZERO_SIGN_OF_ROUNDOFF.add(_PACKET)
# ATen's kernels for CPUs read whole vectors of 16 elements along K.
_K = 32


def _operands(x: torch.Tensor, rows: int) -> facts.Tensors:
    """Return `rows` rows of K elements of x, and an integer and a scale for each of 7 columns."""
    values = x.flatten().nan_to_num(1, 2, -2).clamp(-3, 3)
    values = values.repeat(-(-8 * _K // max(1, values.numel())))[: 8 * _K]
    weight = (values[: 7 * _K].float() * 40).to(torch.int8).view(7, _K)
    return [values.view(8, _K)[:rows], weight, values[:7].abs() + 0.5]


@facts.operands(_PACKET)
def _matrices(op: Op, tensors: facts.Tensors, choice: Any) -> facts.Tensors | None:
    """Return matrices that fit each other."""
    x = tensors[0]
    return _operands(x, min(8, x.shape[0] if x.dim() else 1)) if x.is_floating_point() and x.numel() else None


@facts.terms(_PACKET)
def _terms(sums: facts.Sums) -> float:
    """Return the number of terms of an element, each times the square of its largest possible value."""
    if len(sums.tensors) < 3:
        # Without elements along K there are no terms.
        return 1.0
    x, weight, scales = sums.tensors
    rounded = x.shape[-1] * (_largest(x) * _largest(weight) * _largest(scales)) ** 2
    return max(1.0, rounded, truncated_terms([x, weight.to(x.dtype)], x.shape[-1]) * _largest(scales) ** 2)


def _largest(x: torch.Tensor) -> float:
    return float(x.double().abs().max().nan_to_num(1, 1))


def _product(self: torch.Tensor, mat2: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return self.double() @ mat2.double().T * scales.double()


facts.REFERENCES[_PACKET] = _product


@facts.drawn(_PACKET)
def _fitting(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return matrices that fit each other: ATen reads beyond the memory of others."""
    x = arguments["self"]
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return arguments
    if not x.numel():
        return arguments | {"self": x.new_empty(0, 3, 3)}
    return arguments | dict(zip(("self", "mat2", "scales"), _operands(x, min(8, x.numel())), strict=True))


_WORDS, _CONVERT = "_weight_int4pack_mm", "_convert_weight_to_int4pack"
facts.ZERO_SIGN_OF_ROUNDOFF.add(_WORDS)


@facts.terms(_WORDS)
def _terms_of_words(sums: facts.Sums) -> float:
    """Return the number of terms of an element, each times the square of its largest possible value."""
    x, _, pairs = sums.tensors
    scale, zero = pairs.unbind(-1)
    return max(1.0, x.shape[-1] * (_largest(x) * (8 * _largest(scale) + _largest(zero))) ** 2)


def _packed(x: torch.Tensor) -> dict[str, Any]:
    """Return a product of 64 numbers along K by 16 rows of a weight, in two groups, and bytes to pack."""
    values = x.flatten().double().nan_to_num(1, 2, -2).clamp(-3, 3)
    values = values.repeat(1024 // values.numel() + 1)[:1024].bfloat16()
    words = (values[:128].float() * 7e8).to(torch.int32).view(2, 2, 32, 1)
    pairs = values[: 2 * 16 * 2].view(2, 16, 2) / 8
    given = {"mat2": words, "qGroupSize": 32, "qScaleAndZeros": pairs, "innerKTiles": 2}
    rows = x.shape[0] % 8 + 1 if x.dim() else 1
    return given | {"self": values[: 64 * rows].view(rows, 64)}


@facts.arguments(_WORDS)
def _of_words(tensors: facts.Tensors) -> dict[str, Any] | None:
    return _packed(tensors[0]) if tensors[0].numel() and not tensors[0].is_complex() else None


@facts.arguments(_CONVERT)
def _of_bytes(tensors: facts.Tensors) -> dict[str, Any] | None:
    x = tensors[0]
    if not x.numel() or x.is_complex():
        return None
    values = x.flatten().double().nan_to_num(1, 2, -2).clamp(-3, 3).repeat(640)[:640]
    return {"self": (values * 40 + 128).to(torch.uint8).view(20, 32), "innerKTiles": 4}


@facts.drawn(_WORDS)
def _fitting_words(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return operands that fit each other: ATen reads beyond the memory of others."""
    x = arguments["self"]
    usable = isinstance(x, torch.Tensor) and x.numel() and not x.is_complex()
    given = _packed(x if usable else torch.ones(3))
    return arguments | {name: value for name, value in given.items() if name in arguments}


@facts.drawn(_CONVERT)
def _fitting_bytes(arguments: dict[str, Any]) -> dict[str, Any]:
    x = arguments["self"]
    usable = isinstance(x, torch.Tensor) and x.numel() and not x.is_complex()
    return arguments | (_of_bytes([x if usable else torch.ones(3)]) or {})


def _product_of_words(self: torch.Tensor, mat2: torch.Tensor, group: int, pairs: torch.Tensor) -> torch.Tensor:
    """Unpack the words, and multiply in float64 by numbers that are rounded to bfloat16."""
    tiles, outer, _, words = mat2.shape
    s = torch.arange(8, device=mat2.device)
    numbers = mat2[..., None] >> 4 * s & 0xF
    # (tile, outer, row, lane, word, parity, byte) to (tile, row, outer, word, byte, lane, parity).
    numbers = numbers.view(tiles, outer, 8, 4, words, 2, 4).permute(0, 2, 1, 4, 6, 3, 5).reshape(8 * tiles, -1)
    scale, zero = [pairs[..., i].t().repeat_interleave(group, 1).double() for i in range(2)]
    weight = ((numbers.double() - 8) * scale + zero).bfloat16().double()
    return self.double() @ weight.T


facts.REFERENCES[_WORDS] = _product_of_words


_INTERLEAVED = "_mixed_dtypes_linear"
facts.ZERO_SIGN_OF_ROUNDOFF.add(_INTERLEAVED)
facts.terms(_INTERLEAVED)(_terms)


@facts.arguments(_INTERLEAVED)
def _of_interleaved(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return rows of 64 numbers, and a weight of 64 columns of 8 or 4 bits, as the first operand's size chooses."""
    x = tensors[0]
    if not x.numel() or x.dtype not in (torch.float16, torch.bfloat16):
        return None
    values = x.flatten().double().nan_to_num(1, 2, -2).clamp(-3, 3).repeat(64 * 64 // x.numel() + 1)[: 64 * 64]
    columns = 64 if x.dim() % 2 else 32
    rows, scale = values[: 8 * 64].view(2, 4, 64).to(x.dtype), (values[:64].abs() + 0.5).to(x.dtype)
    weight = (values[: 64 * columns] * 40 + 128).to(torch.uint8).view(64, columns)
    activation = (None, "relu", "silu")[x.dim() % 3]
    bias = None if activation is None else scale
    return {"input": rows, "weight": weight, "scale": scale, "bias": bias, "activation": activation}


def _product_of_interleaved(
    input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, bias: Any = None, activation: Any = None
) -> torch.Tensor:
    """Sort the numbers of each tile of 64 along K, and multiply in float64."""
    K, N = weight.shape[0], len(scale)
    if weight.shape[1] == N:
        stored = weight.view(N // 2, K // 64, 2, 4, 4, 2, 2)
        numbers = stored.permute(0, 2, 1, 3, 6, 4, 5).reshape(N, K).double() - 128
    else:
        nibbles = torch.stack((weight & 15, weight >> 4), -1).view(N // 4, K // 64, 4, 2, 4, 2, 2, 2)
        numbers = nibbles.permute(0, 2, 1, 3, 6, 7, 4, 5).reshape(N, K).double() - 8
    total = input.double() @ (numbers.T * scale.double()) + (0 if bias is None else bias.double())
    return {"relu": torch.relu, "silu": torch.nn.functional.silu}.get(activation, torch.clone)(total)


facts.REFERENCES[_INTERLEAVED] = _product_of_interleaved
