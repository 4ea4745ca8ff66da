"""Functions and dispatch modes that torch.compile does not trace into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames = torch._C._dynamo.eval_frame
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def opaque(function: _Function) -> _Function:
    """Have Dynamo trace neither a function nor its callees: a call from a compiled function is a graph break.

    torch.compiler.disable has the same effect, but imports Dynamo and wraps the function, which costs every call time.
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "Tritonite's own Python is not traced"  # type: ignore[attr-defined]
    return function


class OpaqueMode(TorchDispatchMode):
    """A dispatch mode that Dynamo does not trace into. Unlike torch's own way, it does not import Dynamo."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        opaque(cls.__torch_dispatch__)
