"""Signatures of `tritonite.ops` in editors and in `help`."""

import inspect
from collections.abc import Sequence

import torch

import tritonite
from tritonite.registry.schema import python_name
from tritonite.registry.signature import Number, signatures


def test_a_signature_is_the_schema_in_python():
    signature = inspect.signature(tritonite.ops.add)
    assert [*signature.parameters] == ["self", "other", "alpha"]
    alpha = signature.parameters["alpha"]
    assert (alpha.kind, alpha.default, alpha.annotation) == (alpha.KEYWORD_ONLY, 1, Number)
    assert signature.parameters["other"].annotation is signature.return_annotation is torch.Tensor

    parameters = signatures("sum")["sum.dim_IntList"].parameters
    assert parameters["dim"].annotation == int | Sequence[int] | None and parameters["dim"].default is inspect._empty
    assert parameters["dtype"].annotation == torch.dtype | None and parameters["dtype"].default is None
    assert signatures("amax")["amax"].parameters["dim"].default == ()
    assert inspect.signature(tritonite.ops.frexp).return_annotation == tuple[torch.Tensor, torch.Tensor]
    assert inspect.signature(tritonite.ops.equal).return_annotation is bool


def test_every_overload_has_one():
    for name, op in tritonite.overloads().items():
        signature = signatures(name.partition(".")[0])[name]
        assert [*signature.parameters] == [python_name(argument.name) for argument in op.schema.arguments]


def test_a_docstring_lists_overloads_dtypes_and_where_a_formula_is_from():
    text = tritonite.ops.gelu.__doc__
    assert "Family: activation." in text and "Hendrycks" in text and "Kernels serve float16, bfloat16," in text
    assert "    gelu.out(self: torch.Tensor, *, approximate: str = 'none', out: torch.Tensor) -> torch.Tensor" in text
    assert "    max.other(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor  (ATen)" in tritonite.ops.max.__doc__
