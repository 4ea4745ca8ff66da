"""The catalog serves what it promises, from declarations that keep the rules."""

from pathlib import Path

import pytest
import torch

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
    assert len(registry.excluded) <= 50
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


# Operators of core ATen that compute nothing: views, sizes, empty tensors, and numbers read by the host.
_NO_COMPUTE = {
    *("_local_scalar_dense", "alias", "as_strided", "diagonal", "empty.memory_format", "empty_strided", "expand"),
    *("permute", "select.int", "slice.Tensor", "split_with_sizes", "squeeze.dim", "squeeze.dims", "unsqueeze", "view"),
    *("resize_", "sym_is_contiguous", "sym_numel", "sym_size.int", "sym_storage_offset", "sym_stride.int"),
}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="other operators are of the core")
def test_most_of_what_core_aten_computes_is_served():
    names = {schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()}
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    every = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    core = {str(overload)[5:].removesuffix(".default") for overload in every if torch.Tag.core in overload.tags}
    assert core >= _NO_COMPUTE
    computing = core - _NO_COMPUTE
    served = computing & tritonite.overloads().keys()
    assert len(computing) <= 172 and len(served) >= 150, sorted(computing - served)
