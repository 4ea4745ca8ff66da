"""The operators: their declarations, and the ATen overloads that follow from the declarations.

- declare: the decorators `pointwise`, `operator` and `library_operator`, and `scalar_kernel`
- declaration: a declaration as data, and the list of all declarations
- op: overloads with a kernel, and the checks of a call before the host function runs
- programs: declared formulas as steps of programs, and programs as text
- schema: facts that PyTorch's dispatcher has about operators
- names: the overloads that a call of one of torch's functions reaches
- signature: schemas as Python signatures
- results: facts about results that schemas do not have
- slower: operators in which ATen is faster, from slower.json
"""

from tritonite.registry.declaration import Declaration, HostFunction, LibraryFormulas, declarations, exclude, excluded
from tritonite.registry.declare import library_operator, operator, over_lists, pointwise, scalar_kernel
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
    "over_lists",
    "overloads",
    "pointwise",
    "scalar_kernel",
    "schemas",
]
