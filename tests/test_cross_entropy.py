"""Cross entropy of logits against torch's in float64: terms, reductions, layouts, in place, errors, transforms."""

import functools
from unittest import mock

import pytest
import torch
from compositions import agree, close, normal
from conftest import FULL, every_second

import tritonite
from tritonite import devices, fused
from tritonite.engine.cross_entropy import launch
from tritonite.errors import Unsupported
from tritonite.testing.compositions import losses

functional = torch.nn.functional
library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
REDUCTIONS = ["mean", "sum", "none"]
TERMS = [
    {},
    {"label_smoothing": 0.1},
    {"softcap": 3.0},
    {"z_loss": 0.01},
    {"token_scale": True},
    {"label_smoothing": 0.3, "softcap": 5.0, "z_loss": 0.1, "token_scale": True},
]


def targets(*shape, classes, ignored=0.2):
    """Draw classes, and the ignored target -100."""
    found = torch.randint(0, classes, shape)
    return torch.where(torch.rand(shape) < ignored, -100, found).to(tritonite.device)


def both(target, weight=None, **options):
    """Return our loss and torch's as functions of logits."""
    if options.get("token_scale") is True:
        options["token_scale"] = torch.rand(target.shape, device=tritonite.device)
    ours = lambda x: fused.cross_entropy(x, target, weight, **options)
    return ours, lambda x: losses.cross_entropy(x, target, weight, **options)[0]


@pytest.fixture
def small_blocks(change_tables):
    """Make blocks so small that a row has several of them."""
    block = {"elements": 16, "warps": 1}
    change_tables(cross_entropy={"once": block, "gradient": block, "rows": {"elements": 4, "warps": 1}})


@every_second(("options", "weighted", "reduction"), TERMS, [False, True], REDUCTIONS)
def test_terms_and_reductions(options, weighted, reduction):
    target = targets(2, 5, classes=37)
    weight = torch.rand(37, device=tritonite.device) if weighted else None
    agree(*both(target, weight, reduction=reduction, **options), [normal(2, 5, 37, grad=True)], terms=16, grad_terms=16)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    target, options = targets(7, classes=50), {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0}
    agree(*both(target, **options), [normal(7, 50, dtype=dtype, grad=True)], terms=16, grad_terms=16)
    loss = fused.cross_entropy(normal(7, 50, dtype=dtype), target)
    assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32) and not loss.dim()


def test_float64_is_computed_in_float64():
    x, target = normal(5, 40, dtype=torch.float64, grad=True), targets(5, classes=40)
    options = {"label_smoothing": 0.1, "z_loss": 0.3, "softcap": 0.7}
    ours, theirs = both(target, **options)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("options", [TERMS[0], TERMS[-1]])
@pytest.mark.parametrize("classes", [1, 2, 15, 16, 17, 70])
def test_rows_of_several_blocks(options, classes, small_blocks):
    for weight in (None, torch.rand(classes, device=tritonite.device)):
        target = targets(9, classes=classes, ignored=0.1)
        agree(
            *both(target, weight, reduction="sum", **options), [normal(9, classes, grad=True)], terms=16, grad_terms=16
        )


@pytest.fixture
def slices(small_blocks, change_tables, monkeypatch):
    """Read rows of three blocks or more in slices, and count the launches that combine slices."""
    combined = mock.Mock(wraps=launch._read_slices)
    monkeypatch.setattr(launch, "_read_slices", combined)
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 12)
    change_tables(cross_entropy={"saved_blocks": 2})
    return combined


@pytest.mark.parametrize("options", TERMS)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_few_rows_are_read_in_slices(options, rows, slices):
    """Rows are sliced by a block, by two, and by five, where all are as long as a multiple of a block, and by one."""
    for classes, weighted in ((70, True), (160, False)):
        weight = torch.rand(classes, device=tritonite.device) if weighted else None
        functions = both(targets(rows, classes=classes, ignored=0.1), weight, reduction="sum", **options)
        agree(*functions, [normal(rows, classes, grad=True)], terms=16, grad_terms=16)
    assert slices.call_count == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_in_every_dtype_and_layout(dtype, slices):
    target, options = targets(3, classes=70), {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "mean"}
    for own in layouts(normal(3, 70, dtype=dtype)):
        agree(*both(target, **options), [own.detach().requires_grad_()], terms=16, grad_terms=16)
    assert slices.call_count == 3


def test_slices_of_infinite_and_equal_logits(slices):
    """A slice of -inf alone adds nothing, a nan makes the loss nan, and the first of equal logits is the largest."""
    x = normal(4, 70)
    x[0, 16:64], x[1, 3], x[2], x[3, 20:] = -torch.inf, torch.nan, 1.0, 9.0
    target = torch.tensor([5, 5, 0, 20], device=x.device)
    loss, hits = fused.cross_entropy(x, target, reduction="none", return_accuracy=True)
    torch.testing.assert_close(loss, functional.cross_entropy(x, target, reduction="none"), equal_nan=True)
    assert hits[2:].tolist() == [1, 1] and slices.call_count == 1


def test_rows_are_not_sliced_in_invariant_mode(slices):
    x, target = normal(2, 70), targets(2, classes=70, ignored=0)
    with tritonite.use_gems(invariant=True):
        fused.cross_entropy(x, target)
    assert not slices.call_count
    fused.cross_entropy(x, target)
    assert slices.call_count == 1


@pytest.mark.parametrize(
    ("rows", "classes", "expected"),
    [(22, 50_257, 8192), (1, 50_257, 4096), (132, 50_257, 28_672), (300, 50_257, 50_257), (22, 16_384, 16_384)],
)
def test_slices_of_the_device(rows, classes, expected, monkeypatch):
    """Few rows have slices, unless slices save too few blocks."""
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 132)
    assert launch._columns_of_slice(torch.empty(0), rows, classes) == expected


@pytest.mark.parametrize("classes", [1, 3, 300])
def test_rows_of_default_blocks(classes):
    agree(*both(targets(3, 4, classes=classes, ignored=0.1)), [normal(3, 4, classes, grad=True)], terms=16)


def test_torchs_own_function_gives_the_same():
    x, target, weight = normal(9, 20, grad=True), targets(9, classes=20), torch.rand(20, device=tritonite.device)
    for reduction in REDUCTIONS:
        options = {"label_smoothing": 0.2, "reduction": reduction}
        expected = functional.cross_entropy(x, target, weight, **options)
        torch.testing.assert_close(fused.cross_entropy(x, target, weight, **options), expected)


def layouts(x):
    """Yield x's values with other strides: gaps between rows, gaps between elements, and transposed."""
    padded = x.new_empty((*x.shape[:-1], x.shape[-1] + 3))
    padded[..., : x.shape[-1]] = x
    strided = x.new_empty((*x.shape, 2))
    strided[..., 0] = x
    return padded[..., : x.shape[-1]], strided[..., 0], x.transpose(-1, 0).contiguous().transpose(-1, 0)


@pytest.mark.parametrize("wide", [False, True])
def test_logits_and_targets_of_any_strides(wide, monkeypatch):
    if wide:
        monkeypatch.setattr("tritonite.engine.iteration.INT32_LIMIT", 4)
    x, target = normal(4, 3, 20), targets(3, 4, classes=20).t()
    weight, scale = (
        torch.rand(20, 2, device=tritonite.device)[:, 0],
        torch.rand(3, device=tritonite.device).expand(4, 3),
    )
    for own in (*layouts(x), x.transpose(0, 1).contiguous().transpose(0, 1), x[:1].expand(4, 3, 20)):
        for reduction in ("mean", "none"):
            operands = [own.detach().requires_grad_()]
            agree(*both(target, weight, reduction=reduction, token_scale=scale), operands, terms=16, grad_terms=16)


def test_gradients_of_the_loss_at_any_stride():
    target, x = targets(6, classes=9), normal(6, 9, grad=True)
    grad = normal(6, 2)[:, 0]
    for given in (grad, grad[:1].expand(6)):
        loss = fused.cross_entropy(x, target, reduction="none")
        (found,) = torch.autograd.grad(loss, x, given)
        wide = x.detach().double().requires_grad_()
        exact = losses.cross_entropy(wide, target, reduction="none")[0]
        close(found, torch.autograd.grad(exact, wide, given.double())[0], 4)


def test_no_tokens():
    x, target = normal(0, 5, grad=True), targets(0, classes=5)
    assert fused.cross_entropy(x, target).isnan() and fused.cross_entropy(x, target, reduction="sum") == 0
    assert fused.cross_entropy(x, target, reduction="none").shape == (0,)
    for reduction in REDUCTIONS:
        (grad,) = torch.autograd.grad(fused.cross_entropy(x, target, reduction=reduction).sum(), x)
        assert grad.shape == x.shape


def test_one_token_without_dimensions():
    x, target = normal(7, grad=True), torch.tensor(3, device=tritonite.device)
    for reduction in REDUCTIONS:
        agree(*both(target, reduction=reduction), [x], terms=4)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_tokens_ignored(reduction):
    x, target = normal(3, 5, grad=True), torch.full((3,), 1, device=tritonite.device)
    options = {"reduction": reduction, "ignore_index": 1}
    loss = fused.cross_entropy(x, target, **options)
    torch.testing.assert_close(loss, functional.cross_entropy(x, target, **options), equal_nan=True)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert not grad.any()


def test_ignored_tokens_may_have_any_logits():
    x, target = normal(4, 6), torch.tensor([1, -100, 2, -100], device=tritonite.device)
    x[1], x[3] = float("nan"), float("inf")
    x.requires_grad_()
    loss = fused.cross_entropy(x, target, label_smoothing=0.1)
    torch.testing.assert_close(loss, functional.cross_entropy(x[::2], target[::2], label_smoothing=0.1))
    (grad,) = torch.autograd.grad(loss, x)
    assert not grad[1::2].any() and grad[::2].isfinite().all()


def test_logits_of_minus_infinity_have_no_probability(small_blocks):
    x, target = normal(3, 70), torch.tensor([40, 69, 2], device=tritonite.device)
    x[:2, :33], x[0, 50:], x[2, 5:] = -torch.inf, -torch.inf, -torch.inf
    agree(*both(target), [x.requires_grad_()], terms=16)


def test_large_logits():
    x, target = normal(4, 30) * 1000, targets(4, classes=30, ignored=0)
    agree(*both(target, reduction="none"), [x.requires_grad_()], terms=4)


def test_a_target_that_is_no_class_gives_nan():
    x, target = normal(3, 5, grad=True), torch.tensor([1, 5, -2], device=tritonite.device)
    for weight in (None, torch.rand(5, device=tritonite.device)):
        loss = fused.cross_entropy(x, target, weight, reduction="none")
        assert loss.isnan().tolist() == [False, True, True]
        (grad,) = torch.autograd.grad(loss.sum(), x)
        assert grad[1:].isnan().all() and grad[0].isfinite().all()
        assert fused.cross_entropy(x, target, weight).isnan()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_z_loss_and_accuracy(reduction, small_blocks):
    x, target = normal(2, 6, 33, grad=True), targets(2, 6, classes=33)
    with torch.no_grad():
        # The first target is one of two largest logits, and the first of them only in the second token.
        x[0, :2, 7], x[0, :2, 20] = 9, 9
    target[0, :2] = torch.tensor([20, 7])
    target[1] = x[1].argmax(-1)
    options = {"z_loss": 0.01, "reduction": reduction}
    loss, z, accuracy = fused.cross_entropy(x, target, return_z_loss=True, return_accuracy=True, **options)
    exact, exact_z = losses.cross_entropy(x.detach().double(), target, **options)
    close(loss.detach(), exact, 16)
    close(z, exact_z, 16)
    if reduction == "none":
        expected = ((x.argmax(-1) == target) & (target != -100)).float()
        torch.testing.assert_close(accuracy, expected)
    else:
        torch.testing.assert_close(accuracy, losses.accuracy(x, target))
    assert loss.requires_grad and not z.requires_grad and not accuracy.requires_grad
    assert torch.equal(fused.cross_entropy(x, target, return_accuracy=True, **options)[1], accuracy)
    assert torch.equal(fused.cross_entropy(x, target, return_z_loss=True, **options)[1], z)


@pytest.mark.smoke
@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_over_the_logits(reduction, layout):
    leaf, target = normal(4, 3, 20), targets(4, 3, classes=20)
    leaf = (leaf, *layouts(leaf))[layout].detach().requires_grad_()
    logits = leaf * 1
    loss = fused.cross_entropy(logits, target, reduction=reduction, softcap=4.0, inplace=True)
    grad = torch.randn_like(loss)
    before = logits.detach().clone()
    (found,) = torch.autograd.grad(loss, logits, grad, retain_graph=True)
    assert found.data_ptr() == logits.data_ptr() and not torch.equal(found, before)
    again = before.requires_grad_()
    expected = fused.cross_entropy(again, target, reduction=reduction, softcap=4.0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, again, grad)[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits, grad)


def test_gradient_over_the_logits_passes_on():
    x, weight, target = normal(5, 8, grad=True), normal(20, 8, grad=True), targets(5, classes=20)
    found, expected = [
        torch.autograd.grad(fused.cross_entropy(x @ weight.t(), target, inplace=inplace), (x, weight))
        for inplace in (True, False)
    ]
    torch.testing.assert_close(found, expected)


@pytest.mark.declines("refused calls")
def test_inplace_refuses_leaves_and_shared_memory():
    target = targets(4, classes=6)
    with pytest.raises(Unsupported, match="leaf"):
        fused.cross_entropy(normal(4, 6, grad=True), target, inplace=True)
    with pytest.raises(Unsupported, match="share memory"):
        fused.cross_entropy(normal(1, 6).expand(4, 6), target, inplace=True)


def test_a_forward_pass_writes_no_gradient():
    x, target = normal(4, 6, grad=True), targets(4, classes=6)
    with torch.no_grad():
        assert not fused.cross_entropy(x, target, inplace=False).requires_grad
    assert not fused.cross_entropy(x.detach(), target).requires_grad


def test_blocks_do_not_depend_on_the_number_of_rows(monkeypatch):
    found = []
    for rows in (1, 40):
        monkeypatch.setattr(launch, "LossMeta", lambda *args, **facts: found.append(facts) or META(*args, **facts))
        fused.cross_entropy(normal(rows, 100), targets(rows, classes=100), reduction="none")
    shapes = [(facts["rows"], facts["columns"]) for facts in found if "columns" in facts]
    assert len(shapes) >= 2 and len(set(shapes)) == 1


META = launch.LossMeta
X, T = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64)
WRONG = [
    ((X.int(), T), {}, "input is torch.int32"),
    ((X[0, 0, 0], T[0, 0]), {}, "no dimension"),
    ((X[..., :0], T), {}, "0 classes"),
    ((X, T.int()), {}, "target is torch.int32"),
    ((X, T[0]), {}, "target has the shape"),
    ((X, T, torch.zeros(7)), {}, "weight has the shape"),
    ((X, T, torch.zeros(8, dtype=torch.half)), {}, "weight is torch.float16"),
    ((X, T), {"token_scale": torch.zeros(2)}, "token_scale has the shape"),
    ((X, T), {"reduction": "max"}, "reduction is 'max'"),
    ((X, T), {"label_smoothing": 1.5}, "label_smoothing is 1.5"),
    ((X, T), {"softcap": 0.0}, "softcap is 0.0"),
    ((X, T), {"z_loss": -1.0}, "z_loss is -1.0"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("args", "options", "reason"), WRONG)
def test_wrong_arguments_are_refused(args, options, reason):
    for device in (tritonite.device, "meta"):
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        with pytest.raises(Unsupported, match=reason):
            fused.cross_entropy(*[x.to(device) for x in args], **moved)


@pytest.mark.declines("refused calls")
def test_tensors_on_several_devices_and_gradients_by_factors_are_refused():
    x, target = X.to(tritonite.device).requires_grad_(), T.to(tritonite.device)
    with pytest.raises(Unsupported, match="one device"):
        fused.cross_entropy(x, T.to("meta"))
    with pytest.raises(Unsupported, match="weight has no gradient: detach"):
        fused.cross_entropy(x, target, normal(8, grad=True))
    with pytest.raises(Unsupported, match="token_scale has no gradient: detach"):
        fused.cross_entropy(x, target, token_scale=normal(2, 3, grad=True))


def calls():
    x, target, weight, scale = normal(3, 9, grad=True), targets(3, classes=9), torch.rand(9), torch.rand(3)
    weight, scale, lse = weight.to(x.device), scale.to(x.device), normal(3)
    one = torch.ones(1, device=x.device)
    yield library.cross_entropy, (x, target, None, None, -100, "mean", 0.0, None, 0.0, False, False, False)
    yield library.cross_entropy, (x, target, weight, scale, -100, "none", 0.1, 2.0, 0.1, False, True, True)
    given = (target, weight, scale, lse, one, one, -100)
    yield library.cross_entropy_backward, (one[0], x.detach(), *given, "mean", 0.1, None, 0.1)
    yield library.cross_entropy_backward_, (lse, x.detach().clone(), *given, "none", 0.0, 2.0, 0.0)


@pytest.mark.parametrize("i", range(4))
def test_opcheck(i):
    every = list(calls())
    assert len(every) == 4
    torch.library.opcheck(*every[i])


@pytest.mark.parametrize("i", range(4))
def test_explain_shows_what_a_call_launches(i):
    packet, args = list(calls())[i]
    text = tritonite.explain(packet._qualified_op_name, *args)
    assert "outside ATen" in text and "launch  " in text


@pytest.mark.parametrize("dynamic", [False, True] if FULL else [True])
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_graphs_give_the_same(inplace, dynamic):
    def layer(x, target, scale):
        logits = x * 2
        loss, z = fused.cross_entropy(
            logits, target, token_scale=scale, z_loss=0.1, inplace=inplace, return_z_loss=True, label_smoothing=0.1
        )
        return loss + z.detach()

    operands = normal(5, 16, grad=True), targets(5, classes=16), torch.rand(5, device=tritonite.device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected, actual = layer(*operands), compiled(*operands)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    own, eager = (torch.autograd.grad(each, operands[0])[0] for each in (actual, expected))
    torch.testing.assert_close(own, eager, rtol=0, atol=0)


def test_vmap():
    x, target = normal(4, 3, 8), targets(4, 3, classes=8)
    for reduction in ("mean", "none"):
        loss = functools.partial(fused.cross_entropy, reduction=reduction)
        torch.testing.assert_close(torch.vmap(loss)(x, target), torch.stack([*map(loss, x, target)]))
        torch.testing.assert_close(
            torch.vmap(loss, (0, None))(x, target[0]), torch.stack([loss(own, target[0]) for own in x])
        )


def test_calls_are_replayed_for_other_numbers_of_ignored_targets():
    x = normal(4, 6)
    for ignored in (-100, 2, 0):
        target = torch.tensor([1, ignored, 3, 2], device=tritonite.device)
        expected = functional.cross_entropy(x, target, ignore_index=ignored)
        torch.testing.assert_close(fused.cross_entropy(x, target, ignore_index=ignored), expected)
