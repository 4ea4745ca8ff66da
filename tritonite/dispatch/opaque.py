"""What torch.compile must not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames = torch._C._dynamo.eval_frame
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def opaque(function: _Function) -> _Function:
    """Have Dynamo trace neither a function nor what it calls: in a compiled function a call of it is a graph break.

    As torch.compiler.disable, which would import Dynamo, wrap the function, and cost each call of it microseconds.
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "Tritonite's own Python is not traced"  # type: ignore[attr-defined]
    return function
