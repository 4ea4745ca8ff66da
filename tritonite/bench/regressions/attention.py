"""Cases of attention. Expected gains are of an H200."""

from __future__ import annotations

from typing import Any

import torch

from tritonite.bench.regressions.cases import drawn, regression


def _gradients(biased: bool) -> tuple[Any, ...]:
    """Return the arguments of float32 gradients for 12 heads of 1,500 keys: 288 programs of backward_dkdv."""
    grad_out, query, key, value = [drawn(1, 12, 1500, 64) for _ in range(4)]
    bias = drawn(1, 12, 1500, 1500) if biased else None
    forward = torch.ops.aten._scaled_dot_product_efficient_attention
    out, logsumexp, seed, offset = forward(query, key, value, bias, True)
    operands = grad_out, query, key, value, bias, out
    return *operands, logsumexp, seed, offset, 0.0, [True, True, True, False]


_USUAL_REGISTERS = {"engine.attention.table.registers_for_keys": lambda programs, multiprocessors: None}
_BACKWARD = "_scaled_dot_product_efficient_attention_backward"
regression("attention_fp32_registers", _BACKWARD, lambda: _gradients(False), _USUAL_REGISTERS, 485 / 459)
regression("attention_fp32_registers_bias", _BACKWARD, lambda: _gradients(True), _USUAL_REGISTERS, 595 / 528)
regression(
    "attention_few_keys",
    "_scaled_dot_product_flash_attention",
    lambda: tuple([drawn(32, 16, 256, 64, dtype=torch.float16) for _ in range(3)]),
    {"engine.attention.table._SHORT": 0},
    1.27,
)
