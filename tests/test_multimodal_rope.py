"""multimodal_rotary_embedding against the gathers of Qwen2-VL and Qwen3-VL, forward and backward."""

import functools

import pytest
import torch
from compositions import agree, normal
from conftest import every_second

import tritonite
from tritonite import fused
from tritonite.errors import Unsupported
from tritonite.testing.compositions.layers import multimodal_rotary_embedding as rotated

library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


CASES = [
    # Leading dimensions, sequence, heads of query and key, head size, sections, leading dimensions of cos.
    ((2,), 5, (4, 2), 16, [2, 3, 3], (2,)),
    ((), 3, (3, 1), 10, [2, 1, 1], ()),
    ((2, 3), 4, (1, 5), 7, [1, 1, 1], (3,)),
    ((2,), 1, (1, 1), 2, [1, 0, 0], (1,)),
    ((2,), 3, (2, 2), 128, [24, 20, 20], ()),
]


@pytest.mark.smoke
@every_second(("sizes", "interleaved", "interleaved_sections", "dtype"), CASES, [False, True], [False, True], DTYPES)
def test_values_and_gradients(sizes, interleaved, interleaved_sections, dtype):
    lead, sequence, heads, size, sections, leading = sizes
    query, key = (normal(*lead, sequence, each, size, dtype=dtype, grad=True) for each in heads)
    cos, sin = (normal(3, *leading, sequence, sum(sections)) for _ in range(2))
    given = {"sections": sections, "interleaved": interleaved, "interleaved_sections": interleaved_sections}
    ours, theirs = (functools.partial(each, **given) for each in (fused.multimodal_rotary_embedding, rotated))
    agree(ours, theirs, [query, key, cos, sin], terms=16, grad_terms=16)
    agree(ours, theirs, [query, None, cos, sin], terms=16, grad_terms=16)
    agree(ours, theirs, [query, key, cos.to(dtype), sin.to(dtype)], used=(1,), terms=16, grad_terms=16)


@pytest.mark.parametrize("interleaved_sections", [False, True])
def test_equal_planes_are_the_rotary_embedding(interleaved_sections):
    query, key, cos, sin = normal(2, 5, 3, 16), normal(2, 5, 1, 16), normal(5, 8), normal(5, 8)
    expected = fused.rotary_embedding(query, key, cos, sin)
    planes = (cos.expand(3, 5, 8), sin.expand(3, 5, 8))
    actual = fused.multimodal_rotary_embedding(query, key, *planes, [4, 2, 2], False, interleaved_sections)
    for own, wanted in zip(actual, expected, strict=True):
        assert torch.equal(own, wanted)


def test_operands_at_any_stride():
    query, key = normal(16, 3, 5, 2).permute(3, 2, 1, 0), normal(2, 5, 4, 19)[..., 2:18]
    cos, sin = normal(5, 8, 3).permute(2, 0, 1), normal(3, 5, 16)[..., ::2]
    ours, theirs = (
        functools.partial(each, sections=[2, 3, 3], interleaved_sections=True)
        for each in (fused.multimodal_rotary_embedding, rotated)
    )
    operands = [query.detach().requires_grad_(), key.detach().requires_grad_(), cos, sin]
    agree(ours, theirs, operands, terms=16, grad_terms=16)
    operands[0] = normal(1, 5, 1, 16).expand(2, 5, 3, 16).detach().requires_grad_()
    agree(ours, theirs, operands, terms=16, grad_terms=16)


def test_no_elements():
    for shape in ((0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8)):
        x, cos = normal(*shape, grad=True), normal(3, shape[1], 3)
        query, key = fused.multimodal_rotary_embedding(x, x[:, :, :0], cos, cos, [1, 1, 1])
        assert query.shape == shape and key.shape == (*shape[:2], 0, 8)
        assert torch.autograd.grad(query.sum(), x)[0].shape == shape
    x, cos = normal(2, 3, 2, 8), normal(3, 3, 0)
    assert torch.equal(fused.multimodal_rotary_embedding(x, None, cos, cos, [0, 0, 0])[0], x)


X = torch.zeros(2, 3, 8)
COS = torch.zeros(3, 2, 4)
WRONG = [
    ((X, None, COS[0], COS[0], [2, 1, 1]), "cos has the shape"),
    ((X, None, COS[:2], COS[:2], [2, 1, 1]), "cos has the shape"),
    ((X, None, COS, COS[:, :1], [2, 1, 1]), "sin has the shape"),
    ((X, None, COS, COS, [2, 2]), "sections are"),
    ((X, None, COS, COS, [2, 2, 2]), "sections are"),
    ((X, None, COS, COS, [5, -1, 0]), "sections are"),
    ((X, X.half(), COS, COS, [2, 1, 1]), "one dtype"),
    ((X, None, torch.zeros(3, 2, 5), torch.zeros(3, 2, 5), [3, 1, 1]), "at most"),
    ((X.int(), None, COS, COS, [2, 1, 1]), "query is torch.int32"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("args", "reason"), WRONG)
def test_wrong_arguments_are_refused(args, reason):
    for device in (tritonite.device, "meta"):
        with pytest.raises(Unsupported, match=reason):
            fused.multimodal_rotary_embedding(*[x.to(device) if isinstance(x, torch.Tensor) else x for x in args])


def test_cos_and_sin_have_no_gradient():
    cos = normal(3, 2, 2, grad=True)
    with pytest.raises(Unsupported, match=r"multimodal_rotary_embedding.*detach"):
        fused.multimodal_rotary_embedding(normal(2, 1, 4), None, cos, cos, [1, 1, 0])


@pytest.mark.parametrize("key", [False, True])
def test_opcheck(key):
    x, cos = normal(2, 3, 8, grad=True), normal(3, 2, 4)
    args = (x, normal(2, 1, 8, grad=True) if key else None, cos, cos, [2, 1, 1], False, key)
    torch.library.opcheck(library.multimodal_rotary_embedding, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic):
    def turn(query, key, cos, sin):
        return fused.multimodal_rotary_embedding(query, key, cos, sin, [2, 1, 1], interleaved_sections=True)

    operands = [normal(2, 5, 3, 8, grad=True), normal(2, 5, 1, 8, grad=True), normal(3, 5, 4), normal(3, 5, 4)]
    expected = turn(*operands)
    actual = torch.compile(turn, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*operands)
    for own, eager in zip(actual, expected, strict=True):
        assert torch.equal(own, eager)
    grads = [torch.autograd.grad(each[0].square().sum(), operands[0])[0] for each in (actual, expected)]
    assert torch.equal(*grads)


def test_vmap():
    x, cos, sin = normal(4, 2, 5, 3, 8), normal(3, 5, 4), normal(3, 5, 4)
    turn = lambda x: fused.multimodal_rotary_embedding(x, None, cos, sin, [2, 1, 1])[0]
    torch.testing.assert_close(torch.vmap(turn)(x), torch.stack([turn(each) for each in x]))
