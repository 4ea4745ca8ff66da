"""Measure memory-bound fused operators against copy bandwidth, and products of fp8 blocks against cuBLAS. Needs a GPU.

    python tools/measure_fused.py

Prints for each operator the microseconds of the device with a cold L2 cache, and the share of copy bandwidth: the bytes
that must be read and written once, over the time. Gradients are measured as calls of the operators that compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritonite import fused
from tritonite.bench.timing import TRITONITE, copy_bandwidth, measure

ROWS, WIDTH, WORDS, BLOCK = 8192, 4096, 32_000, 128
FLOAT8 = torch.float8_e4m3fn
library = torch.ops.tritonite


def microseconds(call: Callable[[], object]) -> float:
    """Return the median device time of a call."""
    return measure({TRITONITE: call}, "")["tritonite"].median


def bytes_of(values: Any) -> int:
    """Return the bytes of the tensors in nested results."""
    if isinstance(values, torch.Tensor):
        return values.nbytes
    return sum(bytes_of(value) for value in values or () if value is not None)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def memory_bound() -> list[tuple[str, Callable[..., Any], Sequence[Any]]]:
    """Return operators, and operands all of which are read once."""
    x, y, weight, bias, grad = (
        normal(ROWS, WIDTH),
        normal(ROWS, WIDTH),
        normal(WIDTH),
        normal(WIDTH),
        normal(ROWS, WIDTH),
    )
    halves, logits = normal(ROWS, 2 * WIDTH), normal(ROWS // 2, WORDS)
    target = torch.randint(WORDS, (ROWS // 2,), device="cuda")
    angles = torch.rand(ROWS // 4, 64, device="cuda").to(torch.bfloat16)
    query, key = normal(4, ROWS // 4, 32, 128), normal(4, ROWS // 4, 8, 128)
    _, _, rstd = library.rms_norm(x, None, weight, 1e-6, 0.0, "none")
    return [
        ("rms_norm", fused.rms_norm, (x, weight)),
        ("rms_norm with residual", lambda x, y, w: fused.rms_norm(x, w, residual=y), (x, y, weight)),
        ("layer_norm", fused.layer_norm, (x, weight, bias)),
        ("rms_norm_backward", lambda *a: library.rms_norm_backward(a[0], None, *a[1:], True), (grad, x, rstd, weight)),
        ("swiglu", fused.swiglu, (x, y)),
        ("swiglu of halves", fused.swiglu, (halves,)),
        ("geglu", fused.geglu, (x, y)),
        ("gated_rms_norm", fused.gated_rms_norm, (x, y, weight)),
        ("rotary_embedding", fused.rotary_embedding, (query, key, angles.cos(), angles.sin())),
        ("quantize by token", fused.quantize, (x,)),
        ("quantize by block", lambda x: fused.quantize(x, granularity="block"), (x,)),
        ("rms_norm_quantize by token", fused.rms_norm_quantize, (x, weight)),
        ("swiglu_quantize by token", fused.swiglu_quantize, (x, y)),
        ("cross_entropy, without gradient", fused.cross_entropy, (logits, target)),
    ]


def blocks(rows: int, columns: int, terms: int) -> None:
    """Print the rates of a product of fp8 blocks, by ours and by cuBLAS, in TFLOP/s."""
    x, weight = normal(rows, terms), normal(columns, terms)
    qx, sx = fused.quantize(x, granularity="block")
    qw = weight.to(FLOAT8)
    sw = torch.ones(columns // BLOCK, terms // BLOCK, device="cuda")
    work = 2 * rows * columns * terms / 1e6
    ours = work / microseconds(lambda: fused.linear_fp8_blocks(qx, qw, sx, sw))
    theirs = {}
    outer = sx.t().contiguous().t()
    for name, scales in (
        ("cuBLAS by blocks", (outer, sw.t())),
        ("cuBLAS by rows", (torch.ones(rows, 1, device="cuda"), torch.ones(1, columns, device="cuda"))),
    ):
        try:
            call = lambda scales=scales: torch._scaled_mm(qx, qw.t(), *scales, out_dtype=torch.bfloat16)  # noqa: E731
            theirs[name] = f"{work / microseconds(call):.0f}"
        except (RuntimeError, ValueError) as error:
            theirs[name] = str(error).splitlines()[0]
    print(f"fp8 blocks {rows}x{columns}x{terms}: {ours:.0f} TFLOP/s; {theirs}")


def main() -> None:
    """Print the table."""
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    for name, call, operands in memory_bound():
        moved = bytes_of(operands) + bytes_of(call(*operands))
        taken = microseconds(lambda call=call, operands=operands: call(*operands))
        print(f"{name}: {taken:.1f} us, {moved / bandwidth * 1e6 / taken:.2f} of copy bandwidth")
    for shape in ((4096, 4096, 4096), (8192, 8192, 8192), (128, 4096, 14_336)):
        blocks(*shape)


if __name__ == "__main__":
    main()
