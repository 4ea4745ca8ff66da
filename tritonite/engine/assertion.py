"""An assertion about one element, which stops the program if it fails."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.launch import ASSERTING
from tritonite.runtime.libentry import libentry


@libentry()
@triton.jit
def _assert_nonzero(x, MESSAGE: tl.constexpr):
    """Fail with MESSAGE if the element of `x` is 0."""
    wait_for_previous_launch()
    tl.device_assert(tl.load(x) != 0, MESSAGE)


def assert_nonzero(x: torch.Tensor, message: str) -> None:
    """Stop the program with a message if the one element of `x` is 0."""
    _assert_nonzero[(1,)](x, MESSAGE=message, num_warps=1, **ASSERTING)
