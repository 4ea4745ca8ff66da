"""The catalog serves what it promises, from declarations that keep the rules."""

from pathlib import Path

import core_aten
import pytest
import torch
from conftest import served

import tritonite
from tritonite import registry

PROMISED = [name for path in (Path(__file__).parent / "coverage").glob("*.txt") for name in path.read_text().split()]
KEY = tritonite.backend.dispatch_key


def exists(name):
    packet = name.partition(".")[0]
    return name in dict(registry.schemas(packet)) and registry.has_kernel(name, KEY)


def test_every_promised_overload_is_served():
    missing = [n for n in PROMISED if n not in tritonite.overloads() and n not in registry.excluded and exists(n)]
    assert not missing, f"{len(missing)} missing: {missing}"


def test_few_are_excluded_each_with_a_reason():
    assert len(registry.excluded) <= 51
    assert all(registry.excluded.values())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the list is of torch 2.13's overloads")
def test_the_promise_is_for_this_torch():
    assert all(exists(name) for name in PROMISED)


def test_no_composite_is_overridden():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name, op in tritonite.overloads().items():
        if not op.has_place:
            continue
        assert has(f"aten::{name}", KEY) or not has(f"aten::{name}", "CompositeImplicitAutograd"), name


def test_a_declaration_is_short():
    """A declaration has at most eight fields besides its formula."""
    for declaration in registry.declarations:
        assert len(declaration.packets) <= 6, declaration.packets


core_is_known = pytest.mark.skipif(torch.__version__ < "2.13", reason="other operators are of the core")


@core_is_known
def test_all_of_core_aten_that_computes_is_served_or_left_with_a_reason():
    computing = core_aten.computing()
    others = computing - tritonite.overloads().keys()
    reasons = core_aten.COMPOSED.keys() | core_aten.LEFT.keys()
    assert len(computing) <= 172 and others == reasons, others ^ reasons
    assert len(core_aten.LEFT) <= 2
    text = core_aten.page()
    assert f"{len(computing) - len(core_aten.LEFT)} of {len(computing)} operators that compute are served" in text
    assert all(f"| `{name}` |" in text for name in reasons)


# Calls of composites of core ATen, and the operator with a kernel that serves each.
COMPOSITES = [
    ("adaptive_avg_pool1d", "_adaptive_avg_pool2d", (2, 3, 12), ([5],)),
    ("adaptive_avg_pool1d", "mean.dim", (2, 3, 12), ([1],)),
    ("avg_pool1d", "avg_pool2d", (2, 3, 12), ([3], [2], [1])),
    ("upsample_bilinear2d.vec", "upsample_bilinear2d", (2, 3, 6, 8), ([9, 5], False, None)),
    ("upsample_bilinear2d.vec", "upsample_bilinear2d", (2, 3, 6, 8), (None, True, [2.0, 1.5])),
    ("upsample_nearest2d.vec", "upsample_nearest2d", (2, 3, 6, 8), ([9, 5], None)),
    ("upsample_nearest2d.vec", "upsample_nearest2d", (2, 3, 6, 8), (None, [2.0, 1.5])),
    ("var.dim", "var.correction", (2, 3, 6, 8), ([1, 3], True, False)),
    ("var.dim", "var.correction", (2, 3, 6, 8), (None, False, True)),
]


@pytest.mark.parametrize(("name", "kernel", "shape", "arguments"), COMPOSITES)
def test_composites_of_core_aten_are_served(name, kernel, shape, arguments):
    packet, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")
    for trains in (False, True):
        x = torch.randn(shape, device=tritonite.device, requires_grad=trains)
        tritonite.reset_stats()
        with tritonite.use_gems(), torch.inference_mode(not trains):
            actual = function(x, *arguments)
        ran = [each for each, counts in tritonite.stats().items() if counts.launched + counts.replayed]
        assert ran == [kernel] and served(kernel)
        torch.testing.assert_close(actual, function(x, *arguments))


def test_every_composite_of_core_aten_is_called():
    called = {(name, kernel) for name, kernel, *_ in COMPOSITES}
    assert called == {(name, kernel) for name, made in core_aten.COMPOSED.items() for kernel in made}
