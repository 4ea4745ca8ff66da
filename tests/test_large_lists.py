"""Lists of tensors with more than 2**31 elements: offsets of 64 bits."""

import pytest
import torch

import tritonite
from tritonite.engine.lists import elementwise, table

SIZE = 2**31 + 100
# Elements that differ from the others, and neighbours of them.
ENDS, NEIGHBOURS = (slice(0, 100), slice(2**31 - 100, SIZE)), (slice(100, 200), slice(2**31 - 200, 2**31 - 100))


class LastProgram(table.Table):
    """The table of two tensors, of which the last program of the second one is launched alone."""

    def __init__(self, sizes, elements):
        super().__init__(sizes, elements)
        programs = -(-sizes[1] // elements)
        self._rows[0], self.programs = ("i64", [1 - programs, 1]), 1
        self.first = (programs - 1) * elements


@pytest.mark.skipif(not tritonite.backend.interpreted, reason="an update of all elements runs on a GPU")
def test_the_last_program_of_a_large_tensor(monkeypatch):
    """Pages that no program touches take no memory."""
    made = []
    monkeypatch.setattr(elementwise, "Table", lambda *args: made.append(LastProgram(*args)) or made[-1])
    small, large = (torch.empty(n, dtype=torch.int8, device=tritonite.device) for n in (3, SIZE))
    small.zero_()
    large[-8192:] = 5
    with tritonite.use_gems():
        torch._foreach_add_([small, large], 2)
    (own,) = made
    assert 2**31 <= own.first < SIZE
    assert (large[own.first :] == 7).all() and (large[-8192 : own.first - SIZE] == 5).all() and not small.any()


def _memory():
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


@pytest.mark.skipif(tritonite.device != "cuda", reason="the interpreter would take hours for 2**32 elements")
@pytest.mark.skipif(_memory() < 10 * 2**30, reason="needs 10 GiB of a GPU's memory")
def test_lists_of_large_tensors():
    try:
        xs, ys = ([torch.full((SIZE,), n + i, dtype=torch.int8, device="cuda") for i in range(2)] for n in (1, 10))
        for x in xs:
            for own in ENDS:
                x[own] += 20
        with tritonite.use_gems():
            torch._foreach_add_(xs, 3)
            torch._foreach_sub_(xs, ys)
        for name in ("_foreach_add_.Scalar", "_foreach_sub_.List"):
            counts = tritonite.stats()[name]
            assert counts.launched + counts.replayed == 1 and not counts.declined, (name, counts)
        for x in xs:
            assert all((x[own] == 1 + 20 + 3 - 10).all() for own in ENDS)
            assert all((x[own] == 1 + 3 - 10).all() for own in NEIGHBOURS)
    finally:
        xs = ys = x = None
        torch.cuda.empty_cache()
