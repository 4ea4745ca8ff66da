"""What an operator is: its declaration, and the overloads of ATen that follow from it."""

from tritonite.registry.declaration import Declaration, HostFunction, LibraryFormulas, declarations, exclude, excluded
from tritonite.registry.declare import library_operator, operator, pointwise, scalar_kernel
from tritonite.registry.op import Op, library_op, overloads
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
