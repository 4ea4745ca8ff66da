"""Pairs of quantised linear layers: of one decoding step and of many rows, beside bfloat16's or dequantised operands'.

Operands have (M, N, K) as their shape. Dense weights have exactly the values of the quantised ones beside them.
"""

from __future__ import annotations

import torch

from tritonite import fused
from tritonite.bench.fused.pair import Make, Pair, Shape

functional = torch.nn.functional
_BLOCK, _GROUP = 128, 128
_SHAPES: tuple[tuple[Shape, ...], Shape, Shape] = (
    (
        *((rows, *sizes) for rows in (1, 16) for sizes in ((4096, 4096), (14_336, 4096), (4096, 14_336))),
        *((4096, 4096, 4096), (8192, 8192, 8192)),
    ),
    (64, 64, 64),
    (8, 64, 128),
)
_TRAINED = (((4096, 4096, 4096), (4096, 14_336, 4096), (8192, 8192, 8192)), (64, 64, 64), (8, 64, 64))


def _dequantized(x: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a block-scaled matrix in bfloat16, or in float64 if its scales are."""
    wide = scale.repeat_interleave(rows, 0)[: x.shape[0]].repeat_interleave(_BLOCK, 1)[:, : x.shape[1]]
    return (x.to(scale.dtype) * wide).to(torch.bfloat16 if scale.dtype is torch.float32 else scale.dtype)


def _of_blocks(x, weight, x_scale, weight_scale):
    return functional.linear(_dequantized(x, x_scale, 1), _dequantized(weight, weight_scale, _BLOCK))


def _blocks(make: Make, shape: Shape) -> list[torch.Tensor]:
    M, N, K = shape
    x, weight = [make(rows, K).to(torch.float8_e4m3fn) for rows in (M, N)]
    scales = [make(rows, -(-K // _BLOCK)).float().abs_().add_(0.5) for rows in (M, -(-N // _BLOCK))]
    return [x, weight, *scales]


def _integers(make: Make, shape: Shape) -> list[torch.Tensor]:
    """Return x and the weight, dense and in int8, and their scales, powers of 2."""
    M, N, K = shape
    x, weight = [make(rows, K).mul_(32).clamp_(-127, 127).to(torch.int8) for rows in (M, N)]
    scale = torch.full((1,), 2.0**-5, device=x.device)
    dense = [(each.float() * scale).to(torch.bfloat16) for each in (x, weight)]
    return [*dense, x, weight, scale.expand(M, 1), scale.expand(N)]


def _nibbles(make: Make, shape: Shape) -> list[torch.Tensor]:
    """Return x, the dense weight, and the packed weight with scales and zeros."""
    M, N, K = shape
    packed = fused.pack_int4(make(N, K), _GROUP)
    return [make(M, K), fused.dequantize_int4(*packed, group=_GROUP), *[each for each in packed if each is not None]]


def _exact(x: torch.Tensor) -> torch.Tensor:
    """Return values near x that float8_e4m3fn has under the scale of their largest magnitude."""
    x = (x * 256).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / 256
    x[:, :1] = 448 / 256
    return x


PAIRS: dict[str, Pair] = {
    "linear_fp8_blocks": Pair(_of_blocks, fused.linear_fp8_blocks, _blocks, _SHAPES, (torch.bfloat16,)),
    "linear_int8": Pair(
        lambda x, weight, *_: functional.linear(x, weight),
        lambda x, weight, *quantized: fused.linear_int8(*quantized),
        _integers,
        _SHAPES,
        (torch.bfloat16,),
    ),
    "linear_int4": Pair(
        lambda x, weight, *_: functional.linear(x, weight),
        lambda x, weight, *packed: fused.linear_int4(x, *packed, group=_GROUP),
        _nibbles,
        _SHAPES,
        (torch.float16, torch.bfloat16),
    ),
    "fp8_linear": Pair(
        functional.linear,
        fused.fp8_linear,
        lambda make, shape: [_exact(make(shape[0], shape[2])), _exact(make(*shape[1:]))],
        _TRAINED,
        (torch.bfloat16,),
    ),
}
