"""Attention and its gradients, with operands of matching shapes."""

# Over 500 lines: dense, packed and cuDNN's operators share operands and references.

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tritonite import devices
from tritonite.testing.samples import facts
from tritonite.testing.samples.matmul import terms_of_products

# Keeps scores small, so that their exponentials keep most of the precision.
_SCALE = 0.125
# Scores that a reference computes at once in float64; their intermediates take several times the memory.
_MAX_SCORES = 2**27


def _heads(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Fill a shape of (batch, heads, rows, elements) with a tensor's finite values.

    Values of a tensor that is not contiguous are laid out as (batch, rows, heads, elements).
    """
    values = tensor.flatten().nan_to_num(1, 1, 1).clamp(-3, 3)
    values = values.repeat(math.prod(shape) // len(values) + 1)[: math.prod(shape)]
    if tensor.is_contiguous():
        return values.view(shape)
    batch, heads, rows, elements = shape
    return values.view(batch, rows, heads, elements).transpose(1, 2)


def _scores(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, causal: bool, last: bool, scale: float
) -> torch.Tensor:
    """Return scores in float64. A causal mask ends at the last key with `last`, and otherwise begins at the first."""
    ratio, (queries, keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    scores = query.double() @ key.double().repeat_interleave(ratio, 1).mT * scale
    if bias is not None:
        scores = scores + bias.double()
    if causal:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(~seen.tril(keys - queries if last else 0), -torch.inf)
    return scores


def _operands(tensors: facts.Tensors, shared: int, biased: bool, last: bool = False) -> dict[str, Any] | None:
    """Return all arguments of the variants of attention, with `shared` heads of key and value.

    Attention is causal if the first tensor is contiguous, and otherwise has a bias if `biased`. Returns None without
    elements, for which ATen's kernel for CPUs stops the program.
    """
    x, y = tensors[:2]
    if not (x.numel() and y.numel()):
        return None
    query, (key, value) = _heads(x, 2, 4, 20, 16), [_heads(each, 2, shared, 24, 16) for each in (y, x)]
    causal = x.is_contiguous()
    bias = _heads(x.contiguous(), 2, 1, 1, 24).expand(2, 4, 20, 24) if biased and not causal else None
    scores = _scores(query, key, bias, causal, last, _SCALE)
    out = (scores.softmax(-1) @ value.double().repeat_interleave(4 // shared, 1)).to(x.dtype)
    given = {"query": query, "key": key, "value": value, "is_causal": causal, "scale": _SCALE, "dropout_p": 0.0}
    given |= {"attn_mask": bias, "attn_bias": bias, "compute_log_sumexp": True, "return_debug_mask": False}
    given |= {"out": out, "logsumexp": scores.logsumexp(-1).float(), "grad_out": query, "grad_out_": query}
    given |= {"cum_seq_q": None, "cum_seq_k": None, "max_q": 20, "max_k": 24}
    given |= dict.fromkeys(("philox_seed", "philox_offset"), torch.zeros((), dtype=torch.int64, device=x.device))
    return given | {"grad_input_mask": [True, True, True, bias is not None]}


def _as_16_bit(tensors: facts.Tensors) -> facts.Tensors | None:
    """Convert floats to float16 unless they are fp16 or bf16; return None for other dtypes.

    cuDNN would read any dtype as float16, beyond the end of the memory.
    """
    if not all(x.is_floating_point() for x in tensors):
        return None
    return [x if x.dtype in (torch.float16, torch.bfloat16) else x.half() for x in tensors]


def _padded(logarithms: torch.Tensor) -> torch.Tensor:
    """Pad logarithms to a multiple of 32 rows, as efficient attention does."""
    return torch.nn.functional.pad(logarithms, (0, -logarithms.shape[2] % 32), value=math.inf)


def _rows_before_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Lay a tensor out as (batch, rows, heads, elements), which the gradient of efficient attention assumes."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


_CPU, _FLASH = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"
_EFFICIENT, _CUDNN = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"
_CUDNN_ROWS = "_cudnn_attention"
_FLASH_ROWS, _EFFICIENT_ROWS = "_flash_attention", "_efficient_attention"
_PACKETS = {
    *(f"{name}{suffix}" for name in (_CPU, _FLASH, _EFFICIENT, _CUDNN) for suffix in ("", "_backward")),
    *(
        f"{name}{suffix}"
        for name in (_FLASH_ROWS, _EFFICIENT_ROWS, _CUDNN_ROWS)
        for suffix in ("_forward", "_backward")
    ),
}
facts.terms(*_PACKETS)(terms_of_products)
# Probabilities are rounded before they are multiplied by values.
facts.ROUNDED_TERMS |= _PACKETS
facts.CANCELLING |= _PACKETS


@facts.arguments(_CPU, f"{_CPU}_backward")
def _grouped(tensors: facts.Tensors) -> dict[str, Any] | None:
    return _operands(tensors, 2, biased=True)


@facts.arguments(_CUDNN, f"{_CUDNN}_backward", f"{_CUDNN_ROWS}_forward", f"{_CUDNN_ROWS}_backward")
def _grouped_16_bit(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return arguments for cuDNN, whose logarithms have a last dimension of 1."""
    converted = _as_16_bit(tensors)
    given = None if converted is None else _operands(converted, 2, biased=True)
    if given is None:
        return None
    bias = given["attn_bias"]
    contiguous = None if bias is None else bias.contiguous()
    return given | {"attn_bias": contiguous, "logsumexp": given["logsumexp"].unsqueeze(3)}


@facts.arguments(_FLASH, f"{_FLASH}_backward")
def _without_bias(tensors: facts.Tensors) -> dict[str, Any] | None:
    converted = _as_16_bit(tensors)
    return None if converted is None else _operands(converted, 2, biased=False, last=True)


@facts.arguments(_EFFICIENT, f"{_EFFICIENT}_backward")
def _ungrouped(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return arguments for efficient attention. The state of the generator is on the CPU."""
    given = _operands(tensors, 4, biased=True)
    if given is None:
        return None
    state = dict.fromkeys(("philox_seed", "philox_offset"), torch.zeros((), dtype=torch.int64))
    return given | state | {"out": _rows_before_heads(given["out"]), "logsumexp": _padded(given["logsumexp"])}


# Starts of packed sequences and the end of the last one.
_QUERY_STARTS, _KEY_STARTS = (0, 13, 40), (0, 20, 48)


def _rows_first(tensors: facts.Tensors, shared: int, last: bool) -> dict[str, Any] | None:
    """Return arguments in (batch, rows, heads, elements), with packed sequences if the first tensor is a matrix."""
    x, y = tensors[:2]
    if not (x.numel() and y.numel()):
        return None
    packed, causal = x.dim() == 2, x.is_contiguous()
    batch, queries, keys = (1, 40, 48) if packed else (2, 20, 24)
    query, key, value = [
        _heads(each, batch, heads, rows, 16).transpose(1, 2)
        for each, heads, rows in ((x, 4, queries), (y, shared, keys), (x, shared, keys))
    ]
    starts: list[Any] = [None, None]
    if packed:
        starts = [torch.tensor(each, dtype=torch.int32, device=x.device) for each in (_QUERY_STARTS, _KEY_STARTS)]
    wide = [each.double() for each in (query, key, value)]
    out, logarithms = _attended_rows(wide, starts, causal, last, _SCALE)
    given: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "dropout_p": 0.0,
        "scale": _SCALE,
        "is_causal": causal,
    }
    given |= {"out": out.to(x.dtype), "grad_out": query, "grad_out_": query, "logsumexp": logarithms, "bias": None}
    given |= dict.fromkeys(("cum_seq_q", "cu_seqlens_q"), starts[0]) | dict.fromkeys(
        ("cum_seq_k", "cu_seqlens_k"), starts[1]
    )
    given |= dict.fromkeys(("max_q", "max_seqlen_q"), 27 if packed else queries)
    given |= dict.fromkeys(("max_k", "max_seqlen_k"), 28 if packed else keys)
    given |= {"return_debug_mask": False, "custom_mask_type": int(causal), "compute_log_sumexp": True}
    given |= {"bias_requires_grad": False, "num_splits_key": None, "window_size": None, "shared_storage_dqdkdv": False}
    given |= dict.fromkeys(("window_size_left", "window_size_right", "seqused_k", "alibi_slopes"))
    return given | dict.fromkeys(("block_table", "num_splits", "seqlen_k"))


@facts.arguments(f"{_FLASH_ROWS}_forward", f"{_FLASH_ROWS}_backward")
def _flash_of_rows(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return arguments for FlashAttention. Packed sequences and their logarithms have no batch dimension."""
    converted = _as_16_bit(tensors)
    given = None if converted is None else _rows_first(converted, 2, last=True)
    if converted is None or given is None:
        return None
    logarithms = torch.cat(given["logsumexp"], 2).float()
    state = torch.zeros(2, dtype=torch.uint64, device=converted[0].device)
    given |= {"logsumexp": logarithms, "rng_state": state, "unused": state[0]}
    if given["cum_seq_q"] is None:
        return given
    packed = ("query", "key", "value", "out", "grad_out", "logsumexp")
    return given | {name: given[name].squeeze(0) for name in packed}


@facts.arguments(f"{_EFFICIENT_ROWS}_forward", f"{_EFFICIENT_ROWS}_backward")
def _efficient_of_rows(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return arguments for efficient attention, which pads the logarithms of each packed sequence."""
    given = _rows_first(tensors, 4, last=False)
    if given is None:
        return None
    state = dict.fromkeys(("philox_seed", "philox_offset"), torch.zeros((), dtype=torch.int64))
    padded = torch.cat([_padded(each) for each in given["logsumexp"]]).float()
    return given | state | {"out": given["out"].contiguous(), "logsumexp": padded}


facts.ZERO_SIGN_OF_ROUNDOFF |= {f"{name}_backward" for name in (_FLASH_ROWS, _EFFICIENT_ROWS, _CUDNN_ROWS)}
facts.ZERO_SIGN_OF_ROUNDOFF |= {f"{name}_backward" for name in (_CPU, _FLASH, _EFFICIENT, _CUDNN)}


def _fits(*tensors: Any) -> bool:
    """Return whether query, key and value are real tensors of matching shapes."""
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 and x.numel() and facts.real(x) for x in tensors):
        return False
    query, key, value = (x.shape for x in tensors)
    return key == value and query[0] == key[0] and query[3] == key[3] and query[1] % key[1] == 0


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, causal: bool, last: bool, scale: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the logsumexp of each row."""

    def attended(query: Any, key: Any, value: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _scores(query, key, bias, causal, last, query.shape[3] ** -0.5 if scale is None else scale)
        return scores.softmax(-1) @ value.repeat_interleave(query.shape[1] // key.shape[1], 1), scores.logsumexp(-1)

    batch, heads, queries = query.shape[:3]
    keys = key.shape[2]
    if batch * heads * queries * keys <= _MAX_SCORES:
        return attended(query, key, value, bias)
    # Keys' heads one by one, with checkpoints, so that a gradient keeps no scores.
    bias = None if bias is None else bias.expand(batch, heads, queries, keys)
    ratio, rows = heads // key.shape[1], []
    for i in range(batch):
        outputs = []
        for j in range(key.shape[1]):
            own, shared = (slice(i, i + 1), slice(j * ratio, (j + 1) * ratio)), (slice(i, i + 1), slice(j, j + 1))
            operands = (query[own], key[shared], value[shared], None if bias is None else bias[own])
            outputs.append(checkpoint(attended, *operands, use_reentrant=False))
        rows.append([torch.cat(each, 1) for each in zip(*outputs, strict=True)])
    out, logarithms = (torch.cat(each) for each in zip(*rows, strict=True))
    return out, logarithms


def _flash(
    query: Any, key: Any, value: Any, dropout_p: float = 0, causal: bool = False, *_: Any, scale: Any = None
) -> Any:
    results = _attended(query, key, value, None, causal, True, scale)
    return *results, *[None] * 6, query.new_empty(0)


def _efficient(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    log: bool,
    dropout_p: float = 0,
    causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    out, logarithms = _attended(query, key, value, bias, causal, False, scale)
    return out, _padded(logarithms) if log else logarithms[:, :, :0], None, None


def _cudnn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    log: bool,
    dropout_p: float = 0,
    causal: bool = False,
    *_: Any,
    scale: Any = None,
) -> Any:
    out, logarithms = _attended(query, key, value, bias, causal, False, scale)
    return out, logarithms[..., None] if log else None, *[None] * 7


def _cudnn_rows(query: Any, key: Any, value: Any, bias: Any, *rest: Any, scale: Any = None) -> Any:
    log, causal = rest[4], rest[6] if len(rest) > 6 else False
    return _cudnn(query, key, value, bias, log, 0, causal, scale=scale)


def _gradients(bias: int, causal: int, last: bool, mask: int = 0) -> Any:
    """Return a reference for a gradient whose bias, causal flag and output mask are the arguments at these indices.

    An index of 0 stands for an operator without that argument.
    """

    def reference(grad: torch.Tensor, *arguments: Any, scale: Any = None) -> Any:
        given = (grad, *arguments)
        query, key, value = [x.detach().requires_grad_() for x in given[1:4]]
        added = given[bias] if bias else None
        asked = bool(mask and given[mask][3]) and added is not None
        if added is not None and asked:
            added = added.detach().requires_grad_()
        with torch.enable_grad():
            is_causal = causal < len(given) and given[causal]
            out = _attended(query, key, value, added, is_causal, last, scale)[0]
            found = torch.autograd.grad(out, (query, key, value, *([added] if asked else [])), grad)
        return found if asked or not mask else (*found, None)

    return reference


def _gradients_of_cpu(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return gradients by the definition, with zeros for rows that see no key.

    ATen's formula needs the logsumexp, which next to the largest finite number does not hold the number of keys.
    """
    operands = [x.detach().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        factor = query.shape[3] ** -0.5 if scale is None else scale
        scores = _scores(operands[0], operands[1], attn_mask, causal, False, factor)
        empty = scores.isneginf().all(-1, keepdim=True)
        probabilities = scores.masked_fill(empty, 0).softmax(-1) * ~empty
        result = probabilities @ operands[2].repeat_interleave(query.shape[1] // key.shape[1], 1)
        return torch.autograd.grad(result, operands, grad)


def _attended_rows(
    operands: list[torch.Tensor], starts: Any, causal: Any, last: bool, scale: Any, bias: Any = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the output as (batch, rows, heads, elements), and the logsumexp of each packed sequence or of all."""
    query, key, value = [tensor.transpose(1, 2) for tensor in operands]
    bounds = [(0, 0), (query.shape[2], key.shape[2])]
    if starts[0] is not None:
        bounds = [(int(i), int(j)) for i, j in zip(*[each.tolist() for each in starts], strict=True)]
    found = [
        _attended(query[:, :, i:j], key[:, :, m:n], value[:, :, m:n], bias, bool(causal), last, scale)
        for (i, m), (j, n) in itertools.pairwise(bounds)
    ]
    return torch.cat([out for out, _ in found], 2).transpose(1, 2), [logarithms for _, logarithms in found]


def _flash_rows(query: Any, key: Any, value: Any, *rest: Any, scale: Any = None, **_: Any) -> Any:
    packed = rest[0] is not None
    given = [tensor.unsqueeze(0) if packed else tensor for tensor in (query, key, value)]
    out, logarithms = _attended_rows(given, rest[:2], rest[5], True, scale)
    together = torch.cat(logarithms, 2)
    return *((out.squeeze(0), together.squeeze(0)) if packed else (out, together)), None, None, query.new_empty(0)


def _efficient_rows(query: Any, key: Any, value: Any, *rest: Any, scale: Any = None, **_: Any) -> Any:
    out, logarithms = _attended_rows([query, key, value], rest[1:3], rest[6], False, scale, rest[0])
    return out, torch.cat([_padded(each) for each in logarithms]), *[None] * 4


def _row_gradients(starts: int, causal: int, last: bool, results: int) -> Any:
    """Return a reference for a gradient whose sequence starts and causal flag are the arguments at these indices."""

    def reference(grad: torch.Tensor, *arguments: Any, scale: Any = None, **_: Any) -> Any:
        given = (grad, *arguments)
        operands = [x.detach().requires_grad_() for x in given[1:4]]
        packed = grad.dim() == 3
        with torch.enable_grad():
            rows = [x.unsqueeze(0) if packed else x for x in operands]
            out = _attended_rows(rows, given[starts : starts + 2], given[causal], last, scale)[0]
            found = torch.autograd.grad(out, operands, grad.unsqueeze(0) if packed else grad)
        return *found, *[None] * (results - 3)

    return reference


facts.REFERENCES |= {f"{_FLASH_ROWS}_forward": _flash_rows, f"{_EFFICIENT_ROWS}_forward": _efficient_rows}
facts.REFERENCES |= {
    f"{_FLASH_ROWS}_backward": _row_gradients(6, 11, True, 3),
    f"{_EFFICIENT_ROWS}_backward": _row_gradients(6, 14, False, 4),
}
# ATen has no attention in float64 on GPUs.
facts.REFERENCES[f"{_CPU}_backward"] = _gradients_of_cpu
facts.REFERENCES |= {_FLASH: _flash, _EFFICIENT: _efficient, _CUDNN: _cudnn, f"{_CUDNN_ROWS}_forward": _cudnn_rows}
facts.REFERENCES |= {
    f"{_FLASH}_backward": _gradients(0, 11, True),
    f"{_EFFICIENT}_backward": _gradients(4, 11, False, mask=10),
    f"{_CUDNN}_backward": _gradients(8, 14, False),
    f"{_CUDNN_ROWS}_backward": _gradients(8, 14, False),
}


def _draw(given: dict[str, Any]) -> int:
    """Return a 32-bit hash of the values of a call's floating-point tensors."""
    drawn = 0
    for x in given.values():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.layout is torch.strided:
            drawn = zlib.crc32(x.detach().resolve_neg().double().cpu().contiguous().numpy().tobytes(), drawn)
    return drawn


def _scale(given: dict[str, Any]) -> float:
    """Return a scale with the sign of the drawn one, positive with a causal mask: others give ATen nan scores."""
    number = given.get("scale")
    if not isinstance(number, (int, float)) or given["is_causal"]:
        return _SCALE
    return -_SCALE if number < 0 else 0.0 if number == 0 else _SCALE


def _with_extremes(bias: torch.Tensor, drawn: int) -> torch.Tensor:
    """Set a row or columns of a bias to extreme values, as padding masks do, or leave the bias as it is."""
    info, bias = torch.finfo(bias.dtype), bias.contiguous().clone()
    rows = [info.min, info.max, *([-math.inf] if bias.device.type == "cpu" else [])]
    columns = [info.min, info.max, -math.inf]
    if drawn % 4 == 1:
        bias[..., drawn // 4 % bias.shape[-2], :] = rows[drawn // 256 % len(rows)]
    elif drawn % 4 == 2 and bias.shape[-1] > 1:
        bias[..., drawn // 4 % bias.shape[-1]] = columns[drawn // 256 % 3]
    elif drawn % 4 == 3 and bias.shape[-1] > 1:
        bias[..., drawn // 4 % bias.shape[-2], 1:] = columns[drawn // 256 % 3]
    return bias


def _decoding(given: dict[str, Any], many: bool) -> dict[str, Any]:
    """Reduce a call to its first query, and with `many` repeat its keys until several programs share them."""
    times = 13 if many else 1
    found = {**given, "query": given["query"][:, :, :1]}
    found |= {name: given[name].repeat(1, 1, times, 1) for name in ("key", "value")}
    for name in ("attn_mask", "attn_bias"):
        bias = given.get(name)
        if isinstance(bias, torch.Tensor) and bias.dim() in (2, 4):
            wide = bias[..., :1, :]
            found[name] = wide if bias.shape[-1] == 1 else wide.repeat(*[1] * (bias.dim() - 1), times)
    return found


def _tame(given: dict[str, Any], dtypes: tuple[torch.dtype, ...] = ()) -> dict[str, Any]:
    """Replace operands that do not match, and limit values so that scores stay small, except in masks.

    ATen's kernels for CPUs and cuDNN check few shapes and dtypes, and read or write beyond the memory of operands that
    do not match. Without rows they stop the program.
    """
    drawn = _draw(given)
    given = {**given, "scale": _scale(given)}
    if drawn % 16 and "dropout_p" in given:
        given["dropout_p"] = 0.0
    query = given["query"]
    operands = query, given["key"], given["value"]
    fits = _fits(*operands)
    if fits and dtypes:
        # cuDNN's kernels assume the query's dtype and device for all operands.
        alike = len({(x.dtype, x.device) for x in operands}) == 1
        fits = alike and query.dtype in dtypes and query.shape[3] % 8 == 0
    if not fits:
        generator = torch.Generator().manual_seed(drawn)
        accepted = dtypes or (torch.float32, torch.float16, torch.bfloat16)
        made = [torch.randn(1, 2, rows, 8, generator=generator) for rows in (3, 8, 8)]
        query, key, value = [x.to(devices.current.type, accepted[drawn % len(accepted)]) for x in made]
        given |= {"query": query, "key": key, "value": value}
        given |= {name: None for name in ("attn_mask", "attn_bias") if name in given}
    for name in ("query", "key", "value", "attn_mask", "attn_bias", "grad_out", "grad_out_"):
        x = given.get(name)
        if x is None and name in given and drawn % 3 and not given["is_causal"]:
            # Only ATen's kernel for CPUs accepts a mask in another dtype.
            wide = name == "attn_mask" and drawn % 2
            dtype = torch.float32 if wide else query.dtype
            x = query.new_zeros((*query.shape[:3], given["key"].shape[2]), dtype=dtype)
        if isinstance(x, torch.Tensor) and facts.real(x) and x.is_floating_point():
            given[name] = x.nan_to_num(1, 1, 1).clamp(-3, 3)
            if name.startswith("attn") and x.numel() and x.dim() >= 2:
                given[name] = _with_extremes(given[name], drawn // 8)
    return _decoding(given, drawn % 8 == 0) if drawn % 4 == 0 else given


@facts.drawn(_CPU, f"{_CPU}_backward")
def _consistent(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return matching operands, and for gradients the results of their forward pass."""
    given = _tame(arguments)
    if "logsumexp" not in given:
        return given
    query, key, value = given["query"], given["key"], given["value"]
    scores = plain = _scores(query, key, None, bool(given["is_causal"]), False, given["scale"])
    try:
        scores = _scores(query, key, given["attn_mask"], bool(given["is_causal"]), False, given["scale"])
    except (AttributeError, RuntimeError):
        given["attn_mask"] = None
    if scores.shape != plain.shape:
        given["attn_mask"], scores = None, plain
    probabilities, logarithms = scores.softmax(-1).nan_to_num(0), scores.logsumexp(-1)
    out = (probabilities @ value.double().repeat_interleave(query.shape[1] // key.shape[1], 1)).to(query.dtype)
    if not isinstance(given["grad_out"], torch.Tensor) or given["grad_out"].shape != out.shape:
        given["grad_out"] = out
    return given | {"out": out, "logsumexp": logarithms.masked_fill(logarithms.isneginf(), 0).float()}


_OF_CUDA = (_FLASH, _EFFICIENT, _CUDNN)


@facts.drawn(
    *(*_OF_CUDA, *[f"{name}_backward" for name in _OF_CUDA]),
    *(f"{_CUDNN_ROWS}_forward", f"{_CUDNN_ROWS}_backward"),
)
def _consistent_on_cuda(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return matching operands for ATen's operators on CUDA, without dropout; arguments tell which operator it is."""
    efficient = "grad_input_mask" in arguments or ("attn_bias" in arguments and "return_debug_mask" not in arguments)
    efficient = efficient and "cum_seq_q" not in arguments
    biased = "attn_bias" in arguments
    dtypes = (torch.float16, torch.bfloat16, *([torch.float32] if efficient else []))
    given = _tame(arguments, dtypes)
    query, key, value = [given[name].contiguous() for name in ("query", "key", "value")]
    if efficient and query.shape[1] != key.shape[1]:
        key, value = query, query
    causal = bool(given["is_causal"]) and query.shape[2] <= key.shape[2]
    # ATen's loads want rows of a multiple of 8 elements.
    shape = (*query.shape[:3], key.shape[2])
    bias = given.get("attn_bias")
    if not (isinstance(bias, torch.Tensor) and bias.shape == shape and bias.dtype == query.dtype and shape[3] % 8 == 0):
        bias = None
    given |= {"query": query, "key": key, "value": value, "is_causal": causal, "dropout_p": 0.0}
    given |= {"attn_bias": bias.contiguous() if bias is not None else None} if biased else {}
    given |= {"return_debug_mask": False} if "return_debug_mask" in given else {}
    whole = {"cum_seq_q": None, "cum_seq_k": None, "max_q": query.shape[2], "max_k": key.shape[2]}
    if "logsumexp" not in given:
        return given | {name: value for name, value in whole.items() if name in given}
    if not efficient and given["scale"] <= 0:
        # FlashAttention and cuDNN have nan gradients for such scales.
        given["scale"] = _SCALE
    wide = query.double(), key.double(), value.double()
    out, logarithms = _attended(*wide, bias, causal, not biased, given["scale"])
    out, logarithms = out.to(query.dtype), logarithms.float()
    logarithms = _padded(logarithms) if efficient else logarithms[..., None] if biased else logarithms
    name = "grad_out_" if efficient else "grad_out"
    grad = given[name]
    if not isinstance(grad, torch.Tensor) or grad.shape != out.shape or grad.dtype != out.dtype:
        grad = out
    given |= {name: grad, "out": _rows_before_heads(out) if efficient else out, "logsumexp": logarithms}
    state = torch.zeros((), dtype=torch.int64, device="cpu" if efficient else query.device)
    given |= {"philox_seed": state, "philox_offset": state}
    if efficient:
        return given | {"grad_input_mask": [True, True, True, bias is not None]}
    return given | whole


@facts.drawn(*[f"{name}_{way}" for name in (_FLASH_ROWS, _EFFICIENT_ROWS) for way in ("forward", "backward")])
def _consistent_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace drawn operands by those of samples: ATen checks few shapes and no sequence starts."""
    make = _flash_of_rows if "cum_seq_q" in arguments else _efficient_of_rows
    query = arguments["query"]
    wide = isinstance(query, torch.Tensor) and query.dim() == 4
    x = torch.linspace(-3, 3, 60, dtype=torch.float16, device=devices.current.type)
    given = make([x.view(3, 4, 5), x.flip(0)] if wide else [x.view(6, 10), x.flip(0)])
    assert given is not None
    return {name: given.get(name, value) for name, value in arguments.items()}


@facts.arguments("_transform_bias_rescale_qkv")
def _projections(tensors: facts.Tensors) -> dict[str, Any] | None:
    """Return projections to three times two heads of four elements or four heads of two, and their bias."""
    x = tensors[0].flatten()
    if not x.numel():
        return None
    whole, bias = x.repeat(288)[:288], x.repeat(24)[:24]
    if x.numel() % 2 == 0:
        return {"qkv": whole.view(3, 4, 24), "qkv_bias": bias, "num_heads": 2}
    # Of heads whose size is a multiple of four ATen's CUDA kernel reads four elements at once, whatever the strides.
    return {"qkv": whole.view(24, 12).t().unflatten(0, (3, 4)), "qkv_bias": bias, "num_heads": 4}


@facts.drawn("_transform_bias_rescale_qkv")
def _fitting_projections(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return projections that fit each other: ATen reads beyond the memory of others."""
    x = arguments["qkv"]
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(3)
    return arguments | (_projections([x]) or _projections([x.new_ones(3)]) or {})
