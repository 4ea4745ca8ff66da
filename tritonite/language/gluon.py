"""Functions of Triton's language in kernels of Gluon's, so that both share device functions and formulas."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language._semantic import GluonSemantic

_full = GluonSemantic.full


def _full_of_any_layout(self: Any, shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
    return _full(self, shape, value, dtype, layout)


def infer_layouts() -> None:
    """Have blocks of `tl.full`, `tl.zeros` and `tl.zeros_like` take the layout of the blocks that they are used with.

    Gluon infers a layout if it is given None, as `gl.full` does by default. Functions of `tl` give none at all.
    """
    GluonSemantic.full = _full_of_any_layout
