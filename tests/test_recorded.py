"""Every overload through the native dispatcher: recorded once and then replayed, and explained."""

import pytest
import torch
from conftest import calls_through
from test_accuracy import MISSING
from torch.utils import _pytree as pytree

import tritonite
from tritonite.registry.names import overload_named
from tritonite.runtime.stats import counts as counts_of
from tritonite.testing import verify
from tritonite.testing.judge import comparable
from tritonite.testing.samples import samples


@pytest.fixture(scope="module", autouse=True)
def through_native():
    with calls_through("native"):
        yield


# Overloads that read numbers from the memory of a CPU tensor. Each call runs its host function.
UNREPEATABLE = [f"_foreach_{name}.Tensor" for name in ("addcdiv", "addcmul", "addcdiv_", "addcmul_")]
UNREPEATABLE += [f"_foreach_{name}.Tensor_out" for name in ("addcdiv", "addcmul")]

NAMES = [name for name, op in tritonite.overloads().items() if op.has_place and name not in MISSING]


def _runs(op):
    """Yield samples that ATen accepts, with given outputs and results, in float32 and in the other dtypes."""
    for dtype in (torch.float32, *op.declaration.accepts):
        for sample in samples(op, dtype, tritonite.device):
            answer = verify.by_aten(op, sample)
            if answer is not None:
                yield sample, *answer


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_recorded_and_replayed(name):
    op, function = tritonite.overloads()[name], overload_named(name)
    for sample, template, expected in _runs(op):
        tritonite.reset_stats()
        with tritonite.use_gems(include=[name]):
            found = [verify._call(function, op, sample, template) for _ in range(2)]
        # `tritonite.stats` would count the calls of all operators, for each operator.
        counts = counts_of(name)
        if counts.declined:
            continue
        if name in UNREPEATABLE:
            assert (counts.launched, counts.replayed) == (2, 0) and counts.unrecordable
        else:
            assert (counts.launched, counts.replayed, counts.unrecordable) == (1, 1, {})
        for each in found:
            own, aten = (comparable(op.packet, pytree.tree_leaves(results)) for results in (each, expected))
            for ours, theirs in zip(own, aten, strict=True):
                if theirs.extent != "values" or theirs.value is None or isinstance(theirs.value, str):
                    assert ours.kind == theirs.kind
                else:
                    torch.testing.assert_close(ours.value, theirs.value, rtol=2e-2, atol=2e-2, equal_nan=True)
        return
    pytest.fail("no sample is served")


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_explained(name):
    op = tritonite.overloads()[name]
    for sample, template, expected in _runs(op):
        tensors = [each for each in pytree.tree_leaves(expected) if isinstance(each, torch.Tensor)]
        if tensors and not any(each.numel() for each in tensors):
            continue
        outs = template if isinstance(template, tuple) else (template,)
        text = tritonite.explain(name, *sample.args, **sample.kwargs, **dict(zip(op.out_names, outs, strict=False)))
        if "path       ATen" not in text:
            assert "kernel     " in text
            return
    pytest.fail("no sample is served")
