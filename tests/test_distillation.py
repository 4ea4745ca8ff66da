"""Divergences of logits against compositions in float64: values, gradients, layouts, transforms, errors."""

import functools

import pytest
import torch
from compositions import close, normal
from divergences import heads, labels_of, linear_jsd

import tritonite
from tritonite import fused
from tritonite.errors import Unsupported
from tritonite.runtime import contract
from tritonite.testing.compositions.divergences import IGNORED, linear, of_rows

functional = torch.nn.functional
library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


FUNCTIONS = {
    "forward": (fused.kl_divergence, functools.partial(of_rows, kind="kl", beta=0)),
    "reverse": (
        functools.partial(fused.kl_divergence, reverse=True),
        functools.partial(of_rows, kind="kl", beta=1),
    ),
    "jsd": (fused.jsd, of_rows),
    "mixed": (functools.partial(fused.jsd, beta=0.2), functools.partial(of_rows, beta=0.2)),
    "beta of 0": (functools.partial(fused.jsd, beta=0), functools.partial(of_rows, kind="kl", beta=0)),
    "beta of 1": (functools.partial(fused.jsd, beta=1), functools.partial(of_rows, kind="kl", beta=1)),
    "tv": (fused.tv_distance, functools.partial(of_rows, kind="tv")),
}
EACH = pytest.mark.parametrize("name", FUNCTIONS)


def rows_of(name, **options):
    """Return a function of the tests' name and its composition, for losses of rows, by the student's logits."""
    ours, theirs = FUNCTIONS[name]
    return (
        lambda student, teacher: ours(student, teacher, reduction="none", **options),
        lambda student, teacher: theirs(student, teacher, **options),
    )


def agree_in_float32(ours, theirs, student, teacher, terms=1):
    """Compare losses to the resolution of float32, whatever the logits' dtype, and gradients to that of the logits."""
    wide = [student.detach().double().requires_grad_(), teacher.detach().double()]
    actual, exact = ours(student, teacher), theirs(*wide)
    assert actual.dtype is (torch.float64 if torch.float64 in (student.dtype, teacher.dtype) else torch.float32)
    close(actual.detach(), exact.detach(), terms)
    grad = torch.randn_like(actual)
    (found,), (wanted,) = torch.autograd.grad(actual, student, grad), torch.autograd.grad(exact, wide[0], grad.double())
    assert found.dtype is student.dtype
    close(found, wanted, terms)


@pytest.mark.smoke
@pytest.mark.parametrize("width", [1, 3, 70, 1000])
@EACH
def test_divergences(name, width):
    torch.manual_seed(0)
    ours, theirs = rows_of(name, temperature=1.5)
    agree_in_float32(ours, theirs, normal(2, 3, width, grad=True), 2 * normal(2, 3, width), terms=16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("name", ["mixed", "forward"])
def test_dtypes_of_student_and_teacher(name, dtype, other):
    torch.manual_seed(1)
    agree_in_float32(*rows_of(name), normal(4, 40, dtype=dtype, grad=True), normal(4, 40, dtype=other), terms=16)


@pytest.mark.parametrize("width", [257, 600])
@EACH
def test_rows_in_several_blocks(name, width, tiny_blocks):
    torch.manual_seed(2)
    for dtype in (torch.float32, torch.float64):
        student, teacher = normal(3, width, dtype=dtype, grad=True), normal(3, width, dtype=dtype)
        # The largest logits are in the first block, in the last one, and in another for the teacher.
        with torch.no_grad():
            student[0, 5], student[1, -1], teacher[2, 130] = 30, 30, 30
        agree_in_float32(*rows_of(name, temperature=0.7), student, teacher, terms=width)


@EACH
def test_layouts(name):
    ours, theirs = rows_of(name)
    x, y = normal(4, 5, 24), normal(4, 5, 24)
    padded, strided = normal(4, 5, 30)[..., 3:27], normal(4, 5, 48)[..., ::2]
    for student, teacher in (
        (x.transpose(0, 1), y.transpose(0, 1)),
        (padded, strided),
        (strided.transpose(0, 2), padded.transpose(0, 2)),
        (x, y[:1, :1].expand(4, 5, 24)),
        (x[0, 0], y[0, 0]),
    ):
        agree_in_float32(ours, theirs, student.detach().requires_grad_(), teacher, terms=16)


@pytest.mark.parametrize("width", [70, 300])
def test_offsets_of_64_bits(width, tiny_blocks, monkeypatch):
    monkeypatch.setattr("tritonite.engine.iteration.INT32_LIMIT", 4)
    agree_in_float32(*rows_of("mixed"), normal(3, width, grad=True), normal(width, 3).t(), terms=16)


def test_rows_do_not_depend_on_the_batch_in_invariant_mode(tiny_blocks):
    x, y = normal(37, 70), normal(37, 70)
    with contract.under(contract.settings_of(invariant=True)):
        together = fused.jsd(x, y, reduction="none")
        alone = torch.cat([fused.jsd(x[i : i + 1], y[i : i + 1], reduction="none") for i in range(37)])
    assert torch.equal(together, alone)


@EACH
def test_equal_logits_have_no_divergence(name):
    x = normal(3, 50, grad=True)
    loss = rows_of(name)[0](x, x.detach())
    assert loss.abs().max() < 1e-6
    assert torch.autograd.grad(loss.sum(), x)[0].abs().max() < 1e-6


def test_classes_that_are_masked_out():
    # Both tensors of logits exclude a class, and the teacher another.
    student, teacher = normal(2, 9), normal(2, 9)
    student[:, 0], teacher[:, :2] = -torch.inf, -torch.inf
    student.requires_grad_()
    for name in ("forward", "mixed", "tv"):
        ours, theirs = rows_of(name)
        # Logits so low have no probability in float32, but defined gradients.
        agree_in_float32(ours, lambda x, y: theirs(x.clamp(min=-200), y.clamp(min=-200)), student, teacher, 16)
    assert rows_of("reverse")[0](student, teacher).isinf().all()
    with torch.no_grad():
        student[:, 2] = -torch.inf
    loss, exact = rows_of("mixed")[0](student, teacher), rows_of("mixed")[1](student.double(), teacher.double())
    close(loss.detach(), exact.detach(), 16)
    assert torch.autograd.grad(loss.sum(), student)[0].isfinite().all()
    assert rows_of("forward")[0](student, teacher).isinf().all()


def test_logits_far_apart_do_not_overflow():
    student = torch.tensor([[0.0, 300.0], [300.0, -300.0]], device=tritonite.device, requires_grad=True)
    teacher = torch.tensor([[300.0, 0.0], [-300.0, 300.0]], device=tritonite.device)
    for name in FUNCTIONS:
        agree_in_float32(*rows_of(name), student, teacher, 16)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ignored_rows(reduction):
    student, teacher = normal(2, 4, 20), normal(2, 4, 20)
    labels = torch.tensor([[1, IGNORED, 3, 4], [IGNORED, IGNORED, 7, 8]], device=tritonite.device)
    # A row that does not count is not read.
    student[0, 1] = torch.nan
    student.requires_grad_()
    loss = fused.jsd(student, teacher, labels=labels, reduction=reduction)
    kept = labels != IGNORED
    wide = student.detach().double().requires_grad_()
    exact = of_rows(wide[kept], teacher.double()[kept])
    if reduction == "none":
        assert not loss[~kept].any()
        loss = loss[kept]
    exact = exact.sum() if reduction == "sum" else exact.mean() if reduction == "mean" else exact
    close(loss.detach(), exact.detach(), 16)
    close(torch.autograd.grad(loss.sum(), student)[0], torch.autograd.grad(exact.sum(), wide)[0], 16)


def test_another_index_to_ignore():
    student, teacher, labels = normal(3, 5), normal(3, 5), torch.tensor([0, 1, 0], device=tritonite.device)
    loss = fused.tv_distance(student, teacher, labels=labels, ignore_index=0)
    close(loss, of_rows(student.double(), teacher.double(), kind="tv")[1])


@EACH
def test_all_rows_ignored_and_no_rows(name):
    ours, _ = FUNCTIONS[name]
    x = normal(3, 5, grad=True)
    loss = ours(x, x.detach(), labels=torch.full((3,), IGNORED, device=tritonite.device))
    assert loss.item() == 0 and not torch.autograd.grad(loss, x)[0].any()
    for shape in ((0, 5), (2, 0, 5), (3, 0)):
        x = normal(*shape, grad=True)
        loss = ours(x, x.detach())
        assert loss.item() == 0 and torch.autograd.grad(loss, x)[0].shape == shape
        assert ours(x, x.detach(), reduction="none").shape == shape[:-1]


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kl_div(dtype, reduction, log_target):
    x, target = normal(3, 2, 40).log_softmax(-1), normal(3, 2, 40).log_softmax(-1)
    target = target if log_target else target.exp()
    x, target = x.to(dtype).requires_grad_(), target.to(dtype)
    theirs = functools.partial(functional.kl_div, reduction=reduction, log_target=log_target)
    agree_in_float32(
        lambda x, y: fused.kl_div(x, y, reduction=reduction, log_target=log_target),
        lambda x, y: theirs(x, y).sum(-1) if reduction == "none" else theirs(x, y),
        *(x, target),
        terms=16,
    )


def test_kl_div_of_long_rows_and_of_probabilities_of_zero(tiny_blocks):
    x, target = normal(2, 300, grad=True), functional.one_hot(torch.tensor([3, 280], device=tritonite.device), 300)
    agree_in_float32(
        lambda x, y: fused.kl_div(x, y, reduction="none"),
        lambda x, y: functional.kl_div(x, y, reduction="none").sum(-1),
        *(x, target.float()),
        terms=16,
    )


# ---- Transforms and errors -------------------------------------------------------------------------------------------


def _calls():
    x, y, rows = normal(2, 3, 8, grad=True), normal(2, 3, 8), normal(2, 3)
    mask = torch.tensor([[True, False, True]] * 2, device=tritonite.device)
    yield library.divergence, (x, y, None, "jsd", 0.3, 2.0)
    yield library.divergence, (x, y, mask, "forward", 0.5, 1.0)
    yield library.divergence, (x, y, mask, "log_target", 0.5, 1.0)
    yield library.divergence_backward, (rows, y, y, normal(2, 3, 3), "reverse", 0.5, 1.0)
    student, weight, bias, *teacher = heads(4)
    labels, scales = labels_of(4).clamp(min=0), normal(2, 4)
    given = student, weight, bias, *teacher
    yield library.linear_divergence, (*given, labels, scales, "jsd", 0.5, 2.0, True, True, True)
    yield library.linear_divergence, (*given, None, scales[:1], "tv", 0.5, 1.0, True, False, False)
    yield library.linear_divergence, (*given, None, scales[:1], "forward", 0.5, 1.0, False, False, False)


@pytest.mark.parametrize("i", range(7))
def test_opcheck(i):
    calls = list(_calls())
    assert len(calls) == 7
    torch.library.opcheck(*calls[i])


@pytest.mark.parametrize("i", range(7))
def test_explain_shows_what_a_call_launches(i):
    packet, args = list(_calls())[i]
    assert "launch  " in tritonite.explain(packet._qualified_op_name, *args)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic, reduction):
    def losses(student, weight, bias, *teacher):
        logits, others = linear(student, weight, bias), linear(*teacher)
        options = {"labels": labels, "reduction": reduction}
        return (
            fused.jsd(logits, others, beta=0.3, **options)
            + fused.kl_divergence(logits, others, reverse=True, temperature=2.0, **options)
            + fused.tv_distance(logits, others, **options)
            + fused.kl_div(logits, others, reduction=reduction, log_target=True)
            + linear_jsd(student, weight, bias, *teacher, loss_weights=(0.5, 0.5), **options)
        )

    operands, labels = heads(5), labels_of(5)
    expected = losses(*operands)
    actual = torch.compile(losses, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*operands)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(each.sum(), operands[:3]) for each in (actual, expected)]
    torch.testing.assert_close(*grads)


def test_vmap():
    x, y = normal(4, 3, 8), normal(4, 3, 8)
    labels = torch.tensor([[0, IGNORED, 1]] * 4, device=tritonite.device)
    function = functools.partial(fused.jsd, reduction="none")
    for operands, dims in (((x, y), (0, 0)), ((x, y[0]), (0, None)), ((x.movedim(0, 2), y[0]), (2, None))):
        each = [
            function(*[a if d is None else a.select(d, i) for a, d in zip(operands, dims, strict=True)])
            for i in range(4)
        ]
        torch.testing.assert_close(torch.vmap(function, dims)(*operands), torch.stack(each))
    with_labels = lambda x, y, labels: function(x, y, labels=labels)
    each = torch.stack([with_labels(*given) for given in zip(x, y, labels, strict=True)])
    torch.testing.assert_close(torch.vmap(with_labels)(x, y, labels), each)


def test_gradients_that_are_expanded():
    x, y = normal(4, 24, grad=True), normal(4, 24)
    wide = x.detach().double().requires_grad_()
    fused.jsd(x, y, reduction="none").sum().backward()
    of_rows(wide, y.double()).sum().backward()
    close(x.grad, wide.grad, 16)


X, W = torch.zeros(2, 3, 8), torch.zeros(5, 8)
HEADS = (X, W, X, W)
WRONG = [
    (fused.jsd, (X, X[:1]), {}, "teacher has the shape"),
    (fused.jsd, (X, X), {"beta": 1.5}, "beta is 1.5"),
    (fused.jsd, (X, X), {"temperature": 0.0}, "temperature is 0.0"),
    (fused.jsd, (X, X), {"reduction": "batchmean"}, "reduction is 'batchmean'"),
    (fused.jsd, (X, X), {"labels": torch.zeros(3, 2)}, "labels has the shape"),
    (fused.jsd, (X, X.clone().requires_grad_()), {}, "teacher_logits has no gradient: detach"),
    (fused.kl_divergence, (X.int(), X), {}, "student is torch.int32"),
    (fused.kl_divergence, (X[0, 0, 0], X[0, 0, 0]), {}, "needs a dimension"),
    (fused.tv_distance, (X, X.int()), {}, "teacher is torch.int32"),
    (fused.kl_div, (X, X), {"reduction": "max"}, "reduction is 'max'"),
    (fused.kl_div, (X, X.clone().requires_grad_()), {}, "target has no gradient"),
    (fused.linear_jsd, (X, W, X, W[:4]), {}, "teacher_weight has the shape"),
    (fused.linear_jsd, (X, W[:, :4], X, W), {}, "student_weight has the shape"),
    (fused.linear_jsd, (X, W[0], X, W), {}, "student_weight has the shape"),
    (fused.linear_jsd, (X, W.half(), X, W), {}, "student_weight is torch.float16"),
    (fused.linear_jsd, (X, W, X.half(), W.half()), {}, "teacher is torch.float16"),
    (fused.linear_jsd, (X, W, X[:1], W), {}, "teacher has the shape"),
    (fused.linear_jsd, HEADS, {"student_bias": W[0]}, "student_bias has the shape"),
    (fused.linear_jsd, HEADS, {"student_bias": W[:, 0].half()}, "student_bias is torch.float16"),
    (fused.linear_jsd, HEADS, {"loss_weights": (1.0, 1.0)}, "a hard loss needs labels"),
    (fused.linear_jsd, HEADS, {"beta": -1}, "beta is -1"),
    (fused.linear_jsd, HEADS, {"temperature": -1.0}, "temperature is -1.0"),
    (fused.linear_jsd, (X, W, X, W.clone().requires_grad_()), {}, "teacher_weight has no gradient"),
    (
        fused.linear_jsd,
        HEADS,
        {"loss_weights": (1.0, 1.0), "labels": torch.zeros(2, 3, dtype=torch.int16)},
        "labels are torch.int16",
    ),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("function", "args", "options", "reason"), WRONG)
def test_wrong_arguments_are_refused(function, args, options, reason):
    for device in (tritonite.device, "meta"):
        moved = lambda each: each.to(device) if isinstance(each, torch.Tensor) else each
        args = [moved(each).detach().requires_grad_(each.requires_grad) for each in args]
        with pytest.raises(Unsupported, match=reason):
            function(*args, **{name: moved(each) for name, each in options.items()})
