"""Bags, segments and sequences whose offsets fall, do not start at 0, or do not end with the indices."""

import dataclasses
import itertools

import pytest
import torch

import tritonite
from tritonite.engine import segmented
from tritonite.engine.indexing import bags

# By name: offsets of bags in four indices, and whether the last offset ends the last bag. On a CPU ATen accesses no
# memory beyond its tensors for any of them.
OFFSETS = {
    "falling": ([0, 3, 1], False),
    "falling to an end": ([0, 3, 1, 4], True),
    "late": ([1, 2], False),
    "late to an end": ([1, 2, 4], True),
    "short": ([0, 2, 3], True),
    "long": ([0, 6], False),
    "long to an end": ([0, 2, 6], True),
    "in order": ([0, 0, 3], False),
    "in order to an end": ([0, 3, 4], True),
}
# By whether ATen uses its kernel for aligned fp16 rows, and by offsets: the source (sequence, row) of six result rows
# on a GPU, from two padded sequences of three rows.
ROWS = {
    False: {
        (0, 3, 1): [(0, 0), None, None, None, None, None],
        (0, 2, 3): [(0, 0), (0, 1), (1, 0), None, None, None],
        (0, 5, 5): [(0, 0), (0, 1), (0, 2), None, None, None],
        (0, 1, 0): [None] * 6,
    },
    True: {
        (0, 3, 1): [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)],
        (0, 2, 3): [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), None],
        (0, 5, 5): [(0, 0), (0, 1), (0, 2), None, None, (1, 0)],
        (0, 1, 0): [(0, 0), (1, 0), (1, 1), (1, 2), None, None],
    },
}
CPU = pytest.mark.skipif(tritonite.device != "cpu", reason="an assertion ends a GPU's context")


def _outcome(call):
    try:
        result = call()
    except (IndexError, RuntimeError) as error:
        return type(error), str(error)
    return [x.tolist() for x in (result if isinstance(result, (list, tuple)) else [result])]


def _declined(name):
    counts = tritonite.stats()[name]
    return sum(counts.declined.values()) if isinstance(counts.declined, dict) else counts.declined


@pytest.mark.declines("offsets that are not in order")
@CPU
@pytest.mark.parametrize("name", ["_embedding_bag", "_embedding_bag_forward_only"])
@pytest.mark.parametrize("given", OFFSETS)
def test_offsets_of_bags_give_what_aten_gives(given, name, path):
    weight, indices = torch.arange(20.0).view(10, 2), torch.tensor([1, 2, 0, 5])
    offsets, last = OFFSETS[given]
    for mode, padding in itertools.product((0, 1, 2), (-1, 2)):
        if "falling" in given and mode != 2 and padding < 0:
            # ATen's fast kernel does not write the rows that follow.
            continue

        def call(mode=mode, padding=padding):
            function = getattr(torch.ops.aten, name)
            return function(weight, indices, torch.tensor(offsets), False, mode, False, None, last, padding)

        expected = _outcome(call)
        with tritonite.use_gems(include=["_embedding_bag*"]):
            for _ in range(2):
                assert _outcome(call) == expected, (mode, padding)
    assert bool(_declined(name)) != ("in order" in given)


@pytest.mark.declines("an index is out of range")
@CPU
def test_a_negative_padding_index_matches_no_row(path):
    """ATen on a CPU refuses a negative index among the indices."""
    weight, indices = torch.randn(5, 3), torch.tensor([1, -1])
    call = lambda: torch.ops.aten._embedding_bag(weight, indices, torch.tensor([0]), padding_idx=-1)
    expected = _outcome(call)
    with tritonite.use_gems(include=["_embedding_bag"]):
        assert _outcome(call)[0] is expected[0]


def _bags_of(offsets, n):
    """Return the rows of each bag, within the indices, as ATen's kernel for GPUs takes them."""
    ends = [*offsets[1:], n]
    return [range(max(0, begin), min(end, n)) for begin, end in zip([0, *offsets[1:]], ends, strict=True)]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [[0, 3, 1], [2, 3], [9, 3], [0, 9], [0, 9, 2], [0, -5, 2], [0, -(2**40), 2**40]])
def test_bags_without_checks_stay_within_the_indices(offsets, mode, device, monkeypatch):
    """Kernels for GPUs do not check offsets, and read no row beyond the indices."""
    meta = bags._meta
    monkeypatch.setattr(bags, "_meta", lambda *a, **k: dataclasses.replace(meta(*a, **k), checks=False))
    weight = torch.randn(6, 3, device=device)
    indices = torch.tensor([-7, -7, -7, -7, 1, 2, -1, 5, -7, -7, -7, -7], device=device)[4:8]
    out, sizes = torch.empty(len(offsets), 3, device=device), torch.empty(len(offsets), dtype=int, device=device)
    told = torch.full((12,), -9, device=device)
    largest = torch.empty(len(offsets), 3, dtype=int, device=device) if mode == "max" else None
    given = torch.tensor(offsets, device=device)
    bags.combine_bags(mode, out, told[4:8], sizes, largest, weight, indices, given, None, -1, -1, False)
    reduce = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[mode]
    for bag, places in enumerate(_bags_of(offsets, 4)):
        rows = weight[[int(indices[i]) for i in places if indices[i] != -1]]
        assert int(sizes[bag]) == len(rows)
        torch.testing.assert_close(out[bag], reduce(rows, 0) if len(rows) else torch.zeros_like(out[bag]))
    assert bool(told[:4].eq(-9).all()) and bool(told[8:].eq(-9).all())


@pytest.mark.parametrize("mode", [0, 1])
def test_gradients_of_bag_numbers_out_of_range_are_zero(mode, device):
    memory = torch.full((9, 3), float("nan"), device=device)
    memory[3:6] = 1.0
    told = torch.tensor([0, -2, 3, 2, 2**40], device=device)
    rows, sizes = torch.tensor([0, 0, 1, 2, 2], device=device), torch.ones(3, dtype=torch.int64, device=device)
    with tritonite.use_gems(include=["_embedding_bag_dense_backward"]):
        result = torch.ops.aten._embedding_bag_dense_backward(
            memory[3:6], rows, told, sizes, rows, 4, False, mode, None
        )
    assert result.tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3, [0.0] * 3]
    assert tritonite.stats()["_embedding_bag_dense_backward"].launched


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("bounds", [[0, 3, 1, 4], [2, 9], [0, 9, 4], [-3, 2], [3, 1]])
def test_segments_without_checks_stay_within_the_data(bounds, reduce, device, monkeypatch):
    """Kernels for GPUs clamp segments to the data. A segment with a negative length is empty."""
    meta = segmented._SegmentMeta
    monkeypatch.setattr(segmented, "_SegmentMeta", lambda *a, **k: meta(*a, **k | {"checks": False}))
    memory = torch.full((12, 2), float("nan"), device=device)
    data = memory[4:8].copy_(torch.rand(4, 2, device=device) + 0.5)
    given = torch.tensor(bounds, device=device)
    op = tritonite.overloads()["segment_reduce"]
    (found,) = op.results((data, reduce), {"offsets": given, "axis": 0, "initial": 1.0, "unsafe": True})
    grad = torch.ones_like(found)
    op = tritonite.overloads()["_segment_reduce_backward"]
    (gradient,) = op.results((grad, found, data, reduce), {"offsets": given, "axis": 0, "initial": 1.0})
    rows = [data[max(0, b) : max(0, b, min(e, 4))] for b, e in itertools.pairwise(bounds)]
    lengths = torch.tensor([len(x) for x in rows], device=device)
    packed = torch.cat(rows)
    expected = torch.segment_reduce(packed, reduce, lengths=lengths, axis=0, initial=1.0, unsafe=True)
    torch.testing.assert_close(found, expected)
    covered = torch.zeros(4, dtype=torch.bool)
    for b, e in itertools.pairwise(bounds):
        covered[max(0, b) : max(0, b, min(e, 4))] = True
    assert not gradient.isnan().any() and not gradient[~covered].any()


@pytest.mark.declines("ATen refuses the sequences")
@CPU
@pytest.mark.parametrize(
    "offsets, total", [([0, 3, 1], 1), ([0, 4, 3], 3), ([0, -1, 2], 2), ([0, 2, 3], 4), ([0, 2, 5], 5)]
)
def test_sequences_that_do_not_fit_raise_atens_error(offsets, total, path):
    dense = torch.arange(12.0).view(2, 3, 2)
    call = lambda: torch.ops.aten._padded_dense_to_jagged_forward(dense, [torch.tensor(offsets)], total)
    expected = _outcome(call)
    with tritonite.use_gems(include=["_padded_dense_to_jagged_forward"]):
        for _ in range(2):
            assert _outcome(call) == expected
    assert bool(_declined("_padded_dense_to_jagged_forward")) == (offsets != [0, 2, 5])


@pytest.mark.parametrize("width, dtype", [(2, torch.float32), (8, torch.float16), (2, torch.float16)], ids=str)
@pytest.mark.parametrize("offsets", [[0, 3, 1], [0, 2, 3], [0, 5, 5], [0, 1, 0]], ids=str)
def test_rows_behind_the_last_sequence_are_atens_on_gpus(offsets, width, dtype, device, monkeypatch):
    """Depending on the layout, ATen's bisection assigns these rows to the last sequence or to none."""
    monkeypatch.setattr("tritonite.ops.aten.on_cpu", lambda: False)
    dense = torch.arange(1, 1 + 6 * width, device=device).view(2, 3, width).to(dtype)
    ends = torch.tensor(offsets, device=device)
    call = lambda: torch.ops.aten._padded_dense_to_jagged_forward(dense, [ends], 6)
    if device == "cuda":
        expected = call()
    else:
        places = ROWS[width == 8][tuple(offsets)]
        expected = torch.stack([torch.zeros_like(dense[0, 0]) if at is None else dense[at] for at in places])
    with tritonite.use_gems(include=["_padded_dense_to_jagged_forward"]):
        assert torch.equal(call(), expected)
    counts = tritonite.stats()["_padded_dense_to_jagged_forward"]
    assert counts.launched + counts.replayed == 1
