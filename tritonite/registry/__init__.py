"""What an operator is: its declaration, and the overloads of ATen that follow from it."""

from tritonite.registry.declare import (
    Declaration,
    HostFunction,
    LibraryFormulas,
    Op,
    declarations,
    exclude,
    excluded,
    library_op,
    library_operator,
    operator,
    overloads,
    pointwise,
    scalar_kernel,
)
from tritonite.registry.schema import has_kernel, schemas

__all__ = [
    "Declaration",
    "HostFunction",
    "LibraryFormulas",
    "Op",
    "declarations",
    "exclude",
    "excluded",
    "has_kernel",
    "library_op",
    "library_operator",
    "operator",
    "overloads",
    "pointwise",
    "scalar_kernel",
    "schemas",
]
