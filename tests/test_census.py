"""The census of ATen's CUDA kernels: each overload is served, or excluded with a reason."""

import census
import pytest
import torch

import tritonite
from tritonite import registry

VERSION, NAMES = census.listed()
# Overloads without a reason, a served one with a reason, and the message about each.
FAULTS = [
    (["add.Tensor", "nobody_wrote_it"], ["add.Tensor"], "nobody_wrote_it: neither served nor excluded"),
    (["as_strided"], ["as_strided"], "as_strided: served, but has a reason"),
    (["add.Tensor"], ["add.Tensor"], "_cslt_.*: matches no overload"),
]


def test_every_overload_is_served_or_has_one_reason():
    reasons = census.excluded(NAMES, tritonite.overloads())
    assert sorted(set(NAMES)) == NAMES and len(NAMES) > 2000
    assert all(reasons.values()) and not reasons.keys() & tritonite.overloads().keys()


@pytest.mark.parametrize(("names", "served", "message"), FAULTS)
def test_a_fault_is_an_error(names, served, message):
    with pytest.raises(ValueError, match=message):
        census.excluded(names, served)


def test_a_pattern_without_a_dot_matches_packets():
    assert census.matches("set_.source_Tensor", "set_") and not census.matches("set_.source_Tensor", "set")
    assert census.matches("rand.names_out", "rand*.names*") and not census.matches("rand.out", "rand*.names*")


def test_the_page_is_current():
    assert census.PATH.read_text() == census.page()


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a build of torch for CUDA")
@pytest.mark.skipif(torch.__version__.partition("+")[0] != VERSION, reason="the list is of another torch")
def test_the_list_is_of_this_torch():
    assert census.with_cuda_kernel() == NAMES


def test_none_is_not_written_yet():
    reasons = census.excluded(NAMES, tritonite.overloads())
    unwritten = [name for name, why in reasons.items() if why.startswith("not written yet")]
    assert not unwritten


def test_no_exclusion_of_the_registry_is_lost():
    reasons = census.excluded(NAMES, tritonite.overloads())
    assert all(reasons[name] == why for name, why in registry.excluded.items() if name in reasons)
