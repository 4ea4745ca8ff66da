"""Functions of Triton's language in kernels of Gluon's, so that both share device functions and formulas."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language._semantic import GluonSemantic

_full = GluonSemantic.full


def _full_of_any_layout(self: Any, shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
    return _full(self, shape, value, dtype, layout)


def infer_layouts() -> None:
    """Have `tl.full`, `tl.zeros` and `tl.zeros_like` in Gluon make blocks of the layout of their use, as `gl.full` does.

    Triton passes no layout, and Gluon infers one only where a caller passes None.
    """
    GluonSemantic.full = _full_of_any_layout
