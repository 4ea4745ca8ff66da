"""The families of random benchmark cases of Fourier transforms and of linear algebra: batches, and large matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritonite.bench.cases import Make
from tritonite.bench.drawing import Call, Source, exactly, family, log_uniform, named

# Sides of matrices: of covariances, of blocks of preconditioners, of poses and Jacobians. Batches of them.
_SIDES = (4, 4, 6, 8, 8, 12, 16, 16, 24, 32, 32, 48, 64)
_BATCHES = (1000, 8000)
# ATen's solvers for eigenvalues and singular values take about a millisecond a matrix: the least batch is drawn.
_ROTATED = ("_linalg_eigh", "_linalg_svd")
# Sides of one matrix that is divided into blocks.
_LARGE_SIDES = (256, 256, 384, 512, 512, 768, 1024, 1536, 2048)
# Lengths of signals and spectra: of windows of audio, of long convolutions, of images' sides. Signals of a batch.
_LENGTHS = (256, 320, 384, 400, 512, 640, 768, 1000, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_SIGNALS = (500, 2000)
_IMAGE_LENGTHS = (64, 128, 224, 256, 384, 512)


def _definite(make: Make, *shape: int) -> torch.Tensor:
    x = make(*shape)
    return x @ x.mT / shape[-1] + torch.eye(shape[-1], dtype=x.dtype, device=x.device)


def _triangular(make: Make, *shape: int) -> torch.Tensor:
    x = make(*shape)
    return x.tril() / shape[-1] + torch.eye(shape[-1], dtype=x.dtype, device=x.device)


Arguments = Callable[[Make, int, int], Sequence[Any]]
# Arguments of each operator for a batch of square matrices of a side, and its keywords.
_MATRICES: dict[str, tuple[Arguments, dict[str, Any]]] = {
    "linalg_cholesky_ex": (lambda make, B, n: (_definite(make, B, n, n),), {}),
    "_cholesky_solve_helper": (lambda make, B, n: (make(B, n, 4), _triangular(make, B, n, n), False), {}),
    "linalg_lu_factor_ex": (lambda make, B, n: (make(B, n, n),), {}),
    "linalg_inv_ex": (lambda make, B, n: (_definite(make, B, n, n),), {}),
    "_linalg_solve_ex": (lambda make, B, n: (_definite(make, B, n, n), make(B, n, 4)), {}),
    "_linalg_slogdet": (lambda make, B, n: (make(B, n, n),), {}),
    "linalg_solve_triangular": (lambda make, B, n: (_triangular(make, B, n, n), make(B, n, 4)), {"upper": False}),
    "linalg_ldl_factor_ex": (lambda make, B, n: (make(B, n, n),), {}),
    "linalg_qr": (lambda make, B, n: (make(B, 2 * n, n),), {}),
    "_linalg_eigh": (lambda make, B, n: (_definite(make, B, n, n), "L", True), {}),
    "_linalg_svd": (lambda make, B, n: (make(B, n, n), False, True), {}),
}


@family("linalg")
def _linalg(random: Source) -> Call:
    """Draw a factorisation, a solve or an inverse of a batch of matrices of 4 to 64 rows."""
    name = named(random, tuple(_MATRICES))
    arguments, keywords = _MATRICES[name]
    n, most = random.choice(_SIDES), random.sizes.most
    n = min(n, int(most**0.25))
    B = _BATCHES[0] if name in _ROTATED else log_uniform(random, _BATCHES)
    B = max(1, min(B, most // (16 * n * n)))
    return Call(name, name, exactly(lambda make: arguments(make, B, n), **keywords))


_BLOCKED = (
    *("linalg_cholesky_ex", "_cholesky_solve_helper", "linalg_solve_triangular", "linalg_lu_factor_ex"),
    *("linalg_inv_ex", "_linalg_solve_ex", "_linalg_slogdet", "linalg_qr", *_ROTATED),
)


@family("linalg_blocks")
def _linalg_blocks(random: Source) -> Call:
    """Draw a factorisation, a solve or an inverse of one matrix of 256 to 2,048 rows, which is divided into blocks.

    Jacobi's methods get four matrices of half the side.
    """
    name = named(random, _BLOCKED)
    arguments, keywords = _MATRICES[name]
    rows = min(random.choice(_LARGE_SIDES), int(random.sizes.most**0.4))
    # The matrices of QR have twice as many rows as columns.
    n = rows // 2 if name == "linalg_qr" else rows
    B = 1
    if name in _ROTATED:
        B, n = 4, max(1, n // 2)
    return Call(name, name, exactly(lambda make: arguments(make, B, n), **keywords))


@family("fft")
def _fft(random: Source) -> Call:
    """Draw a transform of signals of 256 to 8,192 elements, or once in four times of images."""
    name = random.choice(("_fft_c2c", "_fft_r2c", "_fft_c2r"))
    dims = 2 if random.random() < 0.25 else 1
    most = random.sizes.most
    lengths = [random.choice(_IMAGE_LENGTHS if dims > 1 else _LENGTHS) for _ in range(dims)]
    if most < 2**16:
        lengths = [4 + length % 9 for length in lengths]
    B = max(1, min(log_uniform(random, _SIGNALS), most // (16 * math.prod(lengths))))
    forward = random.random() < 0.5
    along, last = list(range(1, dims + 1)), lengths[-1]
    shape = (B, *lengths[:-1], last // 2 + 1 if name == "_fft_c2r" else last)
    if name == "_fft_c2c":
        return Call(name, name, exactly(lambda make: (make(*shape), along, 0, forward)))
    if name == "_fft_r2c":
        return Call(name, name, exactly(lambda make: (make(*shape), along, 0, True)))
    return Call(name, name, exactly(lambda make: (make(*shape), along, 2, last)))
