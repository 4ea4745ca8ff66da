"""Cross entropy over a linear head against torch's in float64: chunks, gradients, shards, errors, transforms."""

import sys
from unittest import mock

import pytest
import torch
from compositions import agree, close, normal
from conftest import every_second
from scripts import run_ranks

import tritonite
from tritonite import devices, fused
from tritonite.engine.cross_entropy import head, launch, table
from tritonite.errors import Unsupported
from tritonite.testing.compositions import losses

library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
REDUCTIONS = ["mean", "sum", "none"]
TERMS = [
    {},
    {"label_smoothing": 0.3, "softcap": 5.0, "z_loss": 0.1, "token_scale": True},
]


def targets(*shape, classes, ignored=0.2):
    """Draw classes, and the ignored target -100."""
    found = torch.randint(0, classes, shape)
    return torch.where(torch.rand(shape) < ignored, -100, found).to(tritonite.device)


def both(target, class_weight=None, chunk_tokens=None, **options):
    """Return our loss and torch's as functions of input, weight and bias."""
    if options.get("token_scale") is True:
        options["token_scale"] = torch.rand(target.shape, device=tritonite.device)
    given = {"class_weight": class_weight, "chunk_tokens": chunk_tokens} | options

    def theirs(x, weight, bias=None):
        logits = x @ weight.mT
        return losses.cross_entropy(logits if bias is None else logits + bias, target, class_weight, **options)[0]

    return lambda x, weight, bias=None: fused.linear_cross_entropy(x, weight, target, bias, **given), theirs


def operands(*lead, size=8, classes=21, dtype=torch.float32):
    """Return input, weight and bias with logits near 1."""
    x, weight, bias = normal(*lead, size, dtype=dtype), normal(classes, size) / size**0.5, normal(classes)
    return [x.requires_grad_(), *(each.to(dtype).requires_grad_() for each in (weight, bias))]


@every_second(("options", "weighted", "reduction", "chunk"), TERMS, [False, True], REDUCTIONS, [None, 4])
def test_terms_reductions_and_chunks(options, weighted, reduction, chunk):
    target = targets(2, 5, classes=21)
    weight = torch.rand(21, device=tritonite.device) if weighted else None
    functions = both(target, weight, chunk, reduction=reduction, **options)
    agree(*functions, operands(2, 5), terms=16, grad_terms=64)


@pytest.mark.parametrize("options", TERMS)
@pytest.mark.parametrize("classes", [1, 15, 16, 17, 50])
def test_rows_of_several_blocks(classes, options, change_tables):
    block = {"elements": 16, "warps": 1}
    change_tables(cross_entropy=dict.fromkeys(("once", "twice", "twice_with_states", "gradient"), block))
    for reduction in ("sum", "none"):
        weight = torch.rand(classes, device=tritonite.device) if reduction == "sum" else None
        functions = both(targets(5, classes=classes), weight, 4, reduction=reduction, **options)
        agree(*functions, operands(5, classes=classes), terms=16, grad_terms=64)


@pytest.mark.parametrize("options", TERMS)
@pytest.mark.parametrize("weighted", [False, True])
def test_few_rows_are_read_in_slices(options, weighted, change_tables, monkeypatch):
    """The gradient by the logits of a chunk with few tokens is written by several programs for each row."""
    combined = mock.Mock(wraps=launch._read_slices)
    monkeypatch.setattr(launch, "_read_slices", combined)
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 12)
    block = {"elements": 16, "warps": 1}
    change_tables(cross_entropy=dict.fromkeys(("once", "gradient"), block) | {"saved_blocks": 2})
    weight = torch.rand(70, device=tritonite.device) if weighted else None
    for reduction in ("mean", "none"):
        functions = both(targets(5, classes=70), weight, 3, reduction=reduction, **options)
        agree(*functions, operands(5, classes=70), terms=16, grad_terms=64)
    assert combined.call_count == 4


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_dtypes(reduction, dtype):
    functions = both(targets(6, classes=21), None, 4, reduction=reduction)
    agree(*functions, operands(6, dtype=dtype), terms=64, grad_terms=64)
    assert functions[0](*operands(6, dtype=dtype)).dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


def test_one_class_one_feature_one_token():
    for lead, size, classes in (((3,), 5, 1), ((3,), 1, 4), ((1,), 5, 4), ((), 3, 4)):
        for reduction in ("mean", "none"):
            functions = both(targets(*lead, classes=classes, ignored=0), reduction=reduction)
            agree(*functions, operands(*lead, size=size, classes=classes), terms=16, grad_terms=16)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_operands_have_no_gradient(reduction, frozen):
    given = operands(6)
    for i in frozen:
        given[i] = given[i].detach()
    agree(*both(targets(6, classes=21), None, 4, reduction=reduction), given, terms=16, grad_terms=64)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_weights_have_no_buffer(reduction, monkeypatch):
    made = []
    make = head.make_gradients
    recorded = lambda *args: made.append(make(*args)) or made[-1]
    # The function of this name hides its module.
    monkeypatch.setattr(sys.modules["tritonite.fused.linear_cross_entropy"], "make_gradients", recorded)
    x, weight, _ = operands(6)
    fused.linear_cross_entropy(x, weight.detach(), targets(6, classes=21), reduction=reduction).sum().backward()
    assert [(each.input is not None, each.weight, each.bias) for each in made if each.input is not None] == [
        (True, None, None)
    ]


def test_tied_weights_add_their_gradients():
    embedding, tokens, target = normal(21, 8, grad=True), targets(6, classes=21, ignored=0), targets(6, classes=21)
    found = fused.linear_cross_entropy(embedding[tokens], embedding, target)
    wide = embedding.detach().double().requires_grad_()
    exact, _ = losses.cross_entropy(wide[tokens] @ wide.mT, target)
    close(torch.autograd.grad(found, embedding)[0], torch.autograd.grad(exact, wide)[0], 16)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_operands_of_any_strides(reduction):
    x, weight, bias = operands(3, 4)
    target, scale = targets(4, 3, classes=21).t(), torch.rand(3, 1, device=tritonite.device).expand(3, 4)
    functions = both(target, None, 5, reduction=reduction, token_scale=scale)
    strided = torch.stack([bias, bias], 1)[:, 0]
    for own in (x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT, torch.cat([x, x], -1)[..., :8]):
        for weights in (weight.t().contiguous().t(), torch.cat([weight, weight], 1)[:, 8:]):
            given = [each.detach().requires_grad_() for each in (own, weights, strided)]
            agree(*functions, given, terms=16, grad_terms=64)


def test_bias_may_be_float32():
    x, weight, _ = operands(6, dtype=torch.bfloat16)
    agree(*both(targets(6, classes=21), None, 4), [x, weight, normal(21, grad=True)], terms=64, grad_terms=64)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_tokens(reduction):
    x, weight, bias = operands(0)
    loss = fused.linear_cross_entropy(x, weight, targets(0, classes=21), bias, reduction=reduction)
    assert loss.shape == ((0,) if reduction == "none" else ())
    assert reduction == "none" or (loss.isnan() if reduction == "mean" else loss == 0)
    for grad, own in zip(torch.autograd.grad(loss.sum(), (x, weight, bias)), (x, weight, bias), strict=True):
        assert grad.shape == own.shape and not grad.any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_tokens_ignored(reduction):
    given = operands(5)
    loss = fused.linear_cross_entropy(*given[:2], targets(5, classes=21, ignored=1), given[2], reduction=reduction)
    assert loss.isnan() if reduction == "mean" else not loss.any()
    for grad in torch.autograd.grad(loss.sum(), given):
        assert not grad.any()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("zeros", ["targets", "all"])
def test_class_weights_of_zero(zeros, ignored, reduction, label_smoothing):
    """A mean over a total weight of 0 is nan, as torch's is, with gradients of nan for tokens that are not ignored."""
    target = torch.full((5,), 3, device=tritonite.device)
    target[: {"none": 0, "some": 2, "all": 5}[ignored]] = -100
    class_weight = torch.ones(21, device=tritonite.device)
    class_weight[3 if zeros == "targets" else ...] = 0
    given = [each.detach().requires_grad_() for each in operands(5)]
    wide = [each.detach().double().requires_grad_() for each in given]
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    expected = torch.nn.functional.cross_entropy(
        wide[0] @ wide[1].mT + wide[2], target, class_weight.double(), **options
    )
    exact = expected, *torch.autograd.grad(expected.sum(), wide)
    x, weight, bias = given
    for found in (
        fused.linear_cross_entropy(x, weight, target, bias, class_weight=class_weight, chunk_tokens=2, **options),
        fused.cross_entropy(x @ weight.mT + bias, target, class_weight, **options),
    ):
        for ours, theirs in zip((found, *torch.autograd.grad(found.sum(), given)), exact, strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_z_loss_and_accuracy(reduction):
    (x, weight, bias), target = operands(2, 5), targets(2, 5, classes=21)
    logits = (x @ weight.mT + bias).detach()
    target[0] = logits[0].argmax(-1)
    options = {"z_loss": 0.1, "reduction": reduction}
    loss, z, accuracy = fused.linear_cross_entropy(
        x, weight, target, bias, return_z_loss=True, return_accuracy=True, chunk_tokens=3, **options
    )
    exact = losses.cross_entropy(logits.double(), target, **options)
    close(loss.detach(), exact[0], 16)
    close(z, exact[1], 16)
    if reduction == "none":
        assert torch.equal(accuracy, (logits.argmax(-1) == target).float())
    else:
        torch.testing.assert_close(accuracy, losses.accuracy(logits, target))


def test_a_backward_pass_may_be_repeated():
    for reduction in ("mean", "none"):
        given = operands(5)
        loss = fused.linear_cross_entropy(*given[:2], targets(5, classes=21), given[2], reduction=reduction)
        grad = torch.rand_like(loss)
        first = torch.autograd.grad(loss, given, grad, retain_graph=True)
        for own, double in zip(first, torch.autograd.grad(loss, given, 2 * grad), strict=True):
            torch.testing.assert_close(2 * own, double)


def test_gradients_of_a_mean_do_not_underflow_in_float16():
    x, weight, _ = operands(64, dtype=torch.float16)
    loss = fused.linear_cross_entropy(x, weight, targets(64, classes=21, ignored=0))
    # A scaled loss, as torch.amp has it; unscaled gradients of a mean over more tokens would be 0 in float16.
    grads = torch.autograd.grad(loss, (x, weight), torch.tensor(2.0**10, device=x.device))
    assert all(grad.isfinite().all() and (grad != 0).float().mean() > 0.9 for grad in grads)


def test_gradients_may_be_added_up_in_the_weights_dtype():
    given, target = operands(12, dtype=torch.bfloat16), targets(12, classes=21)
    options = {"chunk_tokens": 4, "accumulate_dtype": None}
    found = torch.autograd.grad(fused.linear_cross_entropy(*given[:2], target, given[2], **options), given)
    exact = torch.autograd.grad(fused.linear_cross_entropy(*given[:2], target, given[2]), given)
    for own, wide in zip(found, exact, strict=True):
        torch.testing.assert_close(own, wide, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_a_chunk_of_logits_is_in_memory(reduction, monkeypatch):
    made = []
    make = head.buffer_for_logits
    monkeypatch.setattr(head, "buffer_for_logits", lambda *args: made.append(args[:2]) or make(*args))
    x, weight, bias = operands(10)
    loss = fused.linear_cross_entropy(x, weight, targets(10, classes=21), bias, reduction=reduction, chunk_tokens=3)
    loss.sum().backward()
    assert made == [(3, 21)] * (1 if reduction == "mean" else 2)


def test_chunks_have_a_share_of_many_tokens():
    own = table.CROSS_ENTROPY["none"]
    assert [head.tokens_of_a_chunk(n) for n in (0, 1, 100, own.chunk_tokens + 1)] == [1, 1, 100, own.chunk_tokens]
    many = head.tokens_of_a_chunk(2**20)
    assert many % own.chunk_multiple == 0 and 0 <= many - own.chunk_share * 2**20 < own.chunk_multiple


def test_without_wanted_gradients_the_backward_pass_computes_logits_anew():
    given, target = operands(5), targets(5, classes=21)
    numbers = -100, "mean", 0.1, None, 0.0
    options = (*numbers, torch.float32, 3, False, False, False, False, False)
    loss = library.linear_cross_entropy(*given[:2], target, given[2], None, None, *options)[0]
    expected = fused.linear_cross_entropy(*given[:2], target, given[2], label_smoothing=0.1)
    for own, wanted in zip(torch.autograd.grad(loss, given), torch.autograd.grad(expected, given), strict=True):
        torch.testing.assert_close(own, wanted)


X, W, T = torch.zeros(2, 3, 8), torch.zeros(5, 8), torch.zeros(2, 3, dtype=torch.int64)
WRONG = [
    ((X, W[:, :7], T), {}, "weight has the shape"),
    ((X, W[0], T), {}, "weight has the shape"),
    ((X, W[:0], T), {}, "0 classes"),
    ((X, W.half(), T), {}, "one dtype"),
    ((X.int(), W.int(), T), {}, "input is torch.int32"),
    ((X, W, T.int()), {}, "target is torch.int32"),
    ((X, W, T[0]), {}, "target has the shape"),
    ((X, W, T, torch.zeros(8)), {}, "bias has the shape"),
    ((X, W, T, torch.zeros(5).half()), {}, "bias is torch.float16"),
    ((X, W, T), {"class_weight": torch.zeros(8)}, "class_weight has the shape"),
    ((X, W, T), {"chunk_tokens": 0}, "chunk_tokens is 0"),
    ((X, W, T), {"accumulate_dtype": torch.float16}, "accumulate_dtype is torch.float16"),
    ((X, W, T), {"reduction": "max"}, "reduction is 'max'"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("args", "options", "reason"), WRONG)
def test_wrong_arguments_are_refused(args, options, reason):
    for device in (tritonite.device, "meta"):
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        with pytest.raises(Unsupported, match=reason):
            fused.linear_cross_entropy(*[x.to(device) for x in args], **moved)


@pytest.mark.declines("refused calls")
def test_gradients_by_factors_are_refused():
    x, weight, _ = operands(5)
    for name, factor in (("class_weight", normal(21, grad=True)), ("token_scale", normal(5, grad=True))):
        with pytest.raises(Unsupported, match=f"{name} has no gradient: detach"):
            fused.linear_cross_entropy(x, weight, targets(5, classes=21), **{name: factor})


def calls():
    (x, weight, bias), target = operands(5, size=4, classes=6), targets(5, classes=6)
    factors = [torch.rand(size, device=x.device) for size in (6, 5)]
    numbers, chunks = (-100, "mean", 0.1, 2.0, 0.1), (torch.float32, 3)
    given = x, weight, target, bias, *factors
    yield library.linear_cross_entropy, (*given, *numbers, *chunks, True, True, True, True, True)
    yield library.linear_cross_entropy, (*given, -100, "none", 0.0, None, 0.0, *chunks, *[False] * 5)
    plain = [each.detach() for each in given]
    lse, one = normal(5), torch.ones(1, device=x.device)
    backward = library.linear_cross_entropy_backward
    yield backward, (lse, *plain, lse, None, one, 0, 6, -100, "none", 0.1, None, 0.0, *chunks, True, True, True)
    yield backward, (one[0], *plain, lse, one, None, 0, 6, -100, "mean", 0.0, None, 0.0, *chunks, True, False, False)
    yield library.linear_cross_entropy_scaled, (one[0], one, *plain[1:4], plain[0], plain[1], None, -100)
    yield library.linear_cross_entropy_shard, (*plain[:5], 0, 6, *numbers, 3, True)
    rows = lse, normal(5), normal(5), one, plain[2]
    yield library.cross_entropy_of_statistics, (plain[2], *factors, *rows, 6, *numbers, True)


@pytest.mark.parametrize("i", range(7))
def test_opcheck(i):
    every = list(calls())
    assert len(every) == 7
    torch.library.opcheck(*every[i])


@pytest.mark.parametrize("i", range(7))
def test_explain_shows_what_a_call_launches(i):
    packet, args = list(calls())[i]
    text = tritonite.explain(packet._qualified_op_name, *args)
    assert "outside ATen" in text and "launch  " in text


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_graphs_give_the_same(reduction):
    def layer(x, weight, bias, target):
        return fused.linear_cross_entropy(x, weight, target, bias, reduction=reduction, chunk_tokens=3) * 2

    given, target = operands(5), targets(5, classes=21)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    expected, actual = layer(*given, target), compiled(*given, target)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    grad = torch.rand_like(expected)
    for own, eager in zip(
        torch.autograd.grad(actual, given, grad), torch.autograd.grad(expected, given, grad), strict=True
    ):
        torch.testing.assert_close(own, eager, rtol=0, atol=0)


def test_vmap():
    x, target, weight = normal(3, 5, 8), targets(3, 5, classes=21), normal(21, 8)
    for reduction in ("mean", "none"):
        loss = lambda x, target, reduction=reduction: fused.linear_cross_entropy(x, weight, target, reduction=reduction)
        torch.testing.assert_close(torch.vmap(loss)(x, target), torch.stack([*map(loss, x, target)]))


@pytest.mark.skipif(tritonite.device == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_shards_of_the_vocabulary_on_two_processes_are_the_whole(tmp_path):
    run_ranks("distributed_losses", 2, tmp_path / "store")
