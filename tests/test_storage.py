"""Tensors whose storage `resize_` has freed or made too small: no kernel reads them, and ATen's error comes back."""

import pytest
import torch
from test_accuracy import MISSING
from torch.utils import _pytree as pytree

import tritonite
from tritonite import fused
from tritonite.errors import Decline
from tritonite.registry.schema import outgrows_storage
from tritonite.testing import verify
from tritonite.testing.samples import samples

REASON = "a tensor that needs more memory than its storage has"


def resized(tensor, elements=0):
    """Copy a tensor into a storage of its own, which is then resized to a number of elements."""
    storage = tensor.untyped_storage().clone()
    copy = tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    storage.resize_(elements * tensor.itemsize)
    return copy


def _calls(op):
    """Yield arguments of a sample, outputs included, with each of its tensors freed in turn."""
    for dtype in (torch.float32, *op.declaration.accepts):
        for sample in samples(op, dtype, tritonite.device):
            kwargs = dict(sample.kwargs)
            if op.out_names:
                answer = verify.by_aten(op, sample)
                if answer is None:
                    continue
                outs = answer[0] if isinstance(answer[0], tuple) else (answer[0],)
                kwargs |= dict(zip(op.out_names, outs, strict=False))
            leaves, tree = pytree.tree_flatten((sample.args, kwargs))
            places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.numel()]
            for place in places:
                yield pytree.tree_unflatten([resized(x) if i == place else x for i, x in enumerate(leaves)], tree)
            if places:
                return


def _is_tested(name, op):
    return any(op.takes_tensors) and op.has_place and name not in MISSING


@pytest.mark.parametrize("name", [name for name, op in tritonite.overloads().items() if _is_tested(name, op)])
def test_calls_with_freed_tensors_decline(name):
    op, found = tritonite.overloads()[name], 0
    for args, kwargs in _calls(op):
        with pytest.raises(Decline, match=REASON):
            op(*args, **kwargs)
        found += 1
    assert found


RAISING = {
    "_softmax": lambda x: x.softmax(1),
    "gelu": lambda x: torch.nn.functional.gelu(x),
    "native_layer_norm": lambda x: torch.nn.functional.layer_norm(x, (8,)),
    "tril": lambda x: x.tril(),
    "mm": lambda x: torch.ones(3, 8, device=x.device) @ x,
    "_log_softmax": lambda x: x.log_softmax(0),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([1, 2], device=x.device), x),
    "searchsorted.Tensor": lambda x: torch.searchsorted(x, torch.ones(8, 2, device=x.device)),
}


@pytest.mark.parametrize("name", RAISING)
@pytest.mark.skipif(tritonite.device == "cuda", reason="ATen's kernels for a GPU may end the process's use of it")
def test_the_error_is_atens(name, path, device):
    x, call = torch.randn(8, 8, device=device), RAISING[name]
    freed = resized(x)
    with pytest.raises(RuntimeError) as expected:
        call(freed)
    with tritonite.use_gems():
        call(x)
        for _ in range(2):
            with pytest.raises(RuntimeError) as found:
                call(freed)
            assert str(found.value) == str(expected.value)
    assert tritonite.stats()[name].declined == {REASON: 2}


def test_unread_tensors_may_be_freed(path, device):
    freed, small = resized(torch.randn(4, 4, device=device)), resized(torch.randn(2, 2, device=device))
    with tritonite.use_gems():
        assert torch.zeros_like(freed).tolist() == [[0.0] * 4] * 4
        assert freed.new_ones(2).tolist() == [1.0, 1.0]
        # ATen allocates new memory for an output of another size.
        with pytest.warns(UserWarning, match="resized"):
            torch.add(torch.ones(3, device=device), 1, out=small)
    assert small.tolist() == [2.0] * 3


@pytest.mark.skipif(tritonite.device == "cuda", reason="ATen's kernels for a GPU may end the process's use of it")
def test_direct_calls_leave_freed_tensors_to_aten(path, device):
    with pytest.raises(RuntimeError, match="its data is not allocated yet"):
        tritonite.ops.gelu(resized(torch.randn(4, 4, device=device)))


@tritonite.pointwise_dynamic
def _plus(x, y):
    return x + y


@pytest.mark.parametrize("elements", [0, 7])
def test_outside_aten_the_error_is_pytorchs(path, device, elements):
    x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    calls = [
        lambda x: fused.silu_and_mul(x, y),
        lambda x: fused.silu_and_mul(y, x),
        lambda x: _plus(x, y),
        lambda x: _plus(y, 1.0, out0=x),
    ]
    for call in calls:
        call(x.clone())
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"out of bounds for storage of size {4 * elements}$"):
                call(resized(x, elements))


def test_a_storage_may_be_larger_and_no_smaller(device):
    base = torch.randn(6, 8, device=device)
    for view in (
        base,
        base[1:],
        base.t(),
        base[:, ::3],
        base[:1].expand(50, 8),
        base[6:],
        base[2, 3],
        base.mT[2:, 1::2],
    ):
        assert not outgrows_storage(view) and not outgrows_storage([view])
    for view in (base, base[1:], base.t(), base[:, 1::6], base[:1].expand(50, 8), base[2, 3], base.mT[2:, 1::2]):
        last = view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
        for elements, outgrown in ((last + 1, False), (last, True), (0, True)):
            whole = torch.empty_strided((48,), (1,), device=device)
            moved = whole.as_strided(view.shape, view.stride(), view.storage_offset())
            whole.untyped_storage().resize_(4 * elements)
            assert outgrows_storage(moved) == outgrows_storage([None, moved]) == outgrown


@pytest.mark.skipif(tritonite.device == "cuda", reason="ATen's kernel for a GPU takes no views")
def test_a_storage_that_is_too_small_is_not_read(path, device):
    """ATen's own kernel takes views of the tensor, which fail."""
    x = torch.arange(16.0, device=device).view(4, 4)
    with tritonite.use_gems():
        x.roll(1), x[1:].roll(1)
        for whole in (resized(x, 12), resized(x, 15)):
            with pytest.raises(RuntimeError, match="out of bounds for storage"):
                whole.roll(1)
    assert tritonite.stats()["roll"].declined.keys() == {REASON}
