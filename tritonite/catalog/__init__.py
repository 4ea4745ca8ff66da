"""What an operator is: its declaration, and the overloads of ATen that follow from it."""

from tritonite.catalog.declare import (
    Declaration,
    Op,
    by_type,
    declarations,
    exclude,
    excluded,
    operator,
    overloads,
    pointwise,
    scalar_kernel,
)
from tritonite.catalog.schema import has_kernel, schemas

__all__ = [
    "Declaration",
    "Op",
    "by_type",
    "declarations",
    "exclude",
    "excluded",
    "has_kernel",
    "operator",
    "overloads",
    "pointwise",
    "scalar_kernel",
    "schemas",
]
