"""Attention and its gradients, of operands that fit each other."""

from __future__ import annotations

import math
from typing import Any

import torch

from tritonite.testing.samples import facts

# So that scores are of a few units, whose exponentials keep most of a score's precision.
_SCALE = 0.125


def _heads(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """A tensor of this shape with the other's finite values; one that lies in another way has heads side by side."""
    values = tensor.flatten().nan_to_num(1, 1, 1).clamp(-3, 3)
    values = values.repeat(math.prod(shape) // len(values) + 1)[: math.prod(shape)]
    if tensor.is_contiguous():
        return values.view(shape)
    batch, heads, rows, elements = shape
    return values.view(batch, rows, heads, elements).transpose(1, 2)


def _scores(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, causal: bool, last: bool, scale: float = _SCALE
) -> torch.Tensor:
    """In float64; `last` where the last query sees all keys, and not the first one alone."""
    ratio, (queries, keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    scores = query.double() @ key.double().repeat_interleave(ratio, 1).mT * scale
    if bias is not None:
        scores = scores + bias.double()
    if causal:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(~seen.tril(keys - queries if last else 0), -torch.inf)
    return scores


def _operands(tensors: facts.Tensors, shared: int, biased: bool, last: bool = False) -> dict[str, Any] | None:
    """Of `shared` heads of key and value; causal where the first lies in rows, and otherwise with a bias if `biased`.

    Without rows or elements ATen's kernel for CPUs ends the process.
    """
    x, y = tensors[:2]
    if not (x.numel() and y.numel()):
        return None
    query, (key, value) = _heads(x, 2, 4, 20, 16), [_heads(each, 2, shared, 24, 16) for each in (y, x)]
    causal = x.is_contiguous()
    bias = _heads(x.contiguous(), 2, 1, 1, 24).expand(2, 4, 20, 24) if biased and not causal else None
    scores = _scores(query, key, bias, causal, last)
    out = (scores.softmax(-1) @ value.double().repeat_interleave(4 // shared, 1)).to(x.dtype)
    given = {"query": query, "key": key, "value": value, "is_causal": causal, "scale": _SCALE, "dropout_p": 0.0}
    given |= {"attn_mask": bias, "attn_bias": bias, "compute_log_sumexp": True, "return_debug_mask": False}
    given |= {"out": out, "logsumexp": scores.logsumexp(-1).float(), "grad_out": query, "grad_out_": query}
    given |= {"cum_seq_q": None, "cum_seq_k": None, "max_q": 20, "max_k": 24}
    given |= dict.fromkeys(("philox_seed", "philox_offset"), torch.zeros((), dtype=torch.int64, device=x.device))
    return given | {"grad_input_mask": [True, True, True, False]}


_CPU, _FLASH = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"
_EFFICIENT, _CUDNN = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"


@facts.arguments(_CPU, f"{_CPU}_backward", _CUDNN, f"{_CUDNN}_backward")
def _grouped(tensors: facts.Tensors) -> dict[str, Any] | None:
    return _operands(tensors, 2, biased=True)


@facts.arguments(_FLASH, f"{_FLASH}_backward")
def _without_bias(tensors: facts.Tensors) -> dict[str, Any] | None:
    return _operands(tensors, 2, biased=False, last=True)


@facts.arguments(_EFFICIENT, f"{_EFFICIENT}_backward")
def _of_all_heads(tensors: facts.Tensors) -> dict[str, Any] | None:
    return _operands(tensors, 4, biased=True)


facts.ZERO_SIGN_OF_ROUNDOFF |= {f"{name}_backward" for name in (_CPU, _FLASH, _EFFICIENT, _CUDNN)}


def _fits(*tensors: Any) -> bool:
    """Whether query, key and value are what attention is of."""
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 and x.numel() and facts.real(x) for x in tensors):
        return False
    query, key, value = (x.shape for x in tensors)
    return key == value and query[0] == key[0] and query[3] == key[3] and query[1] % key[1] == 0


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, causal: bool, last: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the logarithms of the sums."""
    scores = _scores(query, key, bias, causal, last, scale)
    return scores.softmax(-1) @ value.repeat_interleave(query.shape[1] // key.shape[1], 1), scores.logsumexp(-1)


def _flash(query: Any, key: Any, value: Any, dropout_p: float, causal: bool, debug: bool, *, scale: float) -> Any:
    results = _attended(query, key, value, None, causal, True, scale)
    return *results, *[None] * 6, query.new_empty(0)


def _efficient(
    query: Any, key: Any, value: Any, bias: Any, log: bool, dropout_p: float, causal: bool, *, scale: float
) -> Any:
    out, logarithms = _attended(query, key, value, bias, causal, False, scale)
    return out, torch.nn.functional.pad(logarithms, (0, -query.shape[2] % 32), value=torch.inf), None, None


def _cudnn(
    query: Any, key: Any, value: Any, bias: Any, log: bool, dropout_p: float, causal: bool, *_: Any, scale: float
) -> Any:
    out, logarithms = _attended(query, key, value, bias, causal, False, scale)
    return out, logarithms[..., None], *[None] * 7


def _gradients(bias: int, causal: int, last: bool, results: int) -> Any:
    """Of an operator whose bias, if it has one, and whether it is causal are arguments at these places."""

    def reference(grad: torch.Tensor, *arguments: Any, scale: float) -> Any:
        given = (grad, *arguments)
        query, key, value = [x.detach().requires_grad_() for x in given[1:4]]
        with torch.enable_grad():
            added = given[bias] if bias else None
            out, _ = _attended(query, key, value, added, given[causal], last, scale)
            found = torch.autograd.grad(out, (query, key, value), grad)
        return *found, *[None] * (results - 3)

    return reference


# ATen has no float64 on GPUs.
facts.REFERENCES |= {_FLASH: _flash, _EFFICIENT: _efficient, _CUDNN: _cudnn}
facts.REFERENCES |= {
    f"{_FLASH}_backward": _gradients(0, 11, True, 3),
    f"{_EFFICIENT}_backward": _gradients(4, 11, False, 4),
    f"{_CUDNN}_backward": _gradients(8, 14, False, 3),
}
# The state of a generator that nothing is drawn from.
facts.UNWRITTEN |= {_FLASH: (6, 7), _EFFICIENT: (2, 3), _CUDNN: (6, 7)}


@facts.drawn(_CPU, f"{_CPU}_backward")
def _consistent(arguments: dict[str, Any]) -> dict[str, Any]:
    """Operands that fit, scores of a few units, and for gradients what the forward pass gives of them.

    ATen's kernel for CPUs looks at few shapes, and reads or writes beyond those that do not fit, or ends the process
    where there are no rows. It masks before it scales, so that causal scores are nan where the scale is not positive.
    What overflows half types depends on the order of products.
    """
    given: dict[str, Any] = {**arguments, "scale": _SCALE}
    query = given["query"]
    if not _fits(query, given["key"], given["value"]):
        query = query if _fits(query, query, query) else torch.ones(1, 2, 3, 8)
        given |= {"query": query, "key": query, "value": query, "attn_mask": None}
    for name in ("query", "key", "value", "attn_mask", "grad_out"):
        x = given.get(name)
        if isinstance(x, torch.Tensor) and facts.real(x) and x.is_floating_point():
            given[name] = x.nan_to_num(1, 1, 1).clamp(-3, 3)
    if "logsumexp" not in given:
        return given
    query, key, value = given["query"], given["key"], given["value"]
    try:
        scores = _scores(query, key, given["attn_mask"], bool(given["is_causal"]), False)
    except RuntimeError:
        given["attn_mask"] = None
        scores = _scores(query, key, None, bool(given["is_causal"]), False)
    out = (scores.softmax(-1) @ value.double().repeat_interleave(query.shape[1] // key.shape[1], 1)).to(query.dtype)
    if not isinstance(given["grad_out"], torch.Tensor) or given["grad_out"].shape != out.shape:
        given["grad_out"] = out
    return given | {"out": out, "logsumexp": scores.logsumexp(-1).float()}
