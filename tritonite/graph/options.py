"""The options of the backend, as torch.compile passes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tritonite.errors import InvalidOptions, did_you_mean
from tritonite.graph.compiled import DEFAULT_SHAPES
from tritonite.install.override import Names


@dataclass(frozen=True)
class Options:
    """The options of `torch.compile(..., backend="tritonite", options={...})`.

    Args:
        include, exclude: operators that run as Triton kernels, as `enable()` takes them. Default: all verified ones.
        fuse: whether passes replace parts of the graph by fused operators. Results then differ within the resolution of
            the dtype from those of the separate operators.
        cudagraphs: whether each shape is captured as a CUDA graph; on by default in the mode "reduce-overhead".
        shapes: the largest number of plans that a graph keeps.
    """

    include: Names = None
    exclude: Names = None
    fuse: bool = True
    cudagraphs: bool = False
    shapes: int = DEFAULT_SHAPES


_NAMES = tuple(Options.__dataclass_fields__)
_MODES = {None: False, "default": False, "reduce-overhead": True}


def options_of(mode: str | None, options: dict[str, Any] | None) -> Options:
    """Return the options of a call of torch.compile. Raises InvalidOptions for an unknown mode or option."""
    if mode not in _MODES:
        known = ", ".join(repr(each) for each in _MODES if each)
        raise InvalidOptions(reason=f"mode {mode!r} is not one of {known}")
    for name in options or {}:
        if name not in _NAMES:
            hint = did_you_mean(name, _NAMES)
            raise InvalidOptions(reason=f"there is no option {name!r}{hint}; there are {', '.join(_NAMES)}")
    return Options(**{"cudagraphs": _MODES[mode], **(options or {})})
