"""Names that users know: what they select, and what explain says of them."""

import pytest
import torch
from torch.nn import functional

import tritonite
from tritonite.errors import UnknownOperator, Unsupported
from tritonite.install import override
from tritonite.install.override import select

NAMES = {
    "softmax": {"_softmax", "_softmax_backward_data"},
    "linear": {"addmm", "mm"},
    "matmul": {"mm", "mv", "dot", "bmm"},
    "rms_norm": {"_fused_rms_norm" if tritonite.device == "cuda" else "rsqrt"},
    "cross_entropy": {"_log_softmax", "nll_loss_forward", "nll_loss_backward"},
    "layer_norm": {"native_layer_norm", "native_layer_norm_backward"},
    "scaled_dot_product_attention": {"mm", "bmm"},
    "logsigmoid": {"log_sigmoid_forward"},
    "gelu": {"gelu", "gelu.out", "gelu_backward"},
    "softmax.int": {"_softmax"},
    torch.relu: {"relu"},
    torch.Tensor.softmax: {"_softmax"},
    torch.special.expit: {"sigmoid"},
    functional.cross_entropy: {"_log_softmax", "nll_loss_forward"},
    functional.linear: {"addmm"},
    torch.ops.aten.softmax: {"_softmax"},
}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: getattr(name, "__name__", name))
def test_a_name_selects_what_its_calls_reach(name):
    assert NAMES[name] <= select(name)
    assert not NAMES[name] & select(exclude=name)


def test_functions_that_do_not_reach_an_operator_do_not_select_it():
    assert {name.partition(".")[0].removesuffix("_") for name in select("add")} == {"add"}
    assert select(torch.ops.aten.add.Tensor) == {"add.Tensor"}
    assert select(torch.ops.aten.mm.out) == {"mm.out"}
    assert select(["softmax", torch.relu]) == select("softmax") | select(torch.relu)


def test_unverified_operators_are_selected_by_name_only(change_device):
    change_device(unverified=frozenset({"activation"}))
    override._selected.cache_clear()
    try:
        assert "silu" not in select() and "add.Tensor" in select()
        # Functions that call it do not select it either.
        assert "silu" not in select(torch.nn.functional.cross_entropy)
        assert {"silu", "add.Tensor"} <= select("*")
        assert "silu" in select("silu") and "silu.out" in select(["add", "silu*"])
        assert "include=" in tritonite.explain("silu", torch.randn(4, device=tritonite.device))
    finally:
        override._selected.cache_clear()


def test_a_scope_by_name_serves_the_call(device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    with tritonite.use_gems(include="softmax"):
        (torch.softmax(x, 0) * x.detach()).sum().backward()
    assert tritonite.stats().keys() == {"_softmax", "_softmax_backward_data"}


def test_asking_for_a_name_changes_nothing():
    seed = torch.initial_seed()
    with pytest.raises(UnknownOperator):
        select("manual_seed")
    assert torch.initial_seed() == seed


def test_names_without_kernels_are_distinguished():
    with pytest.raises(UnknownOperator, match="has a kernel here"):
        select("linalg_eig")
    with pytest.raises(UnknownOperator, match="did you mean 'softmax'"):
        select("softmx")


@pytest.mark.parametrize("function", ["softmax", torch.softmax])
def test_explain_names_the_operators_of_a_function(function, device):
    text = tritonite.explain(function, torch.randn(4, 8, device=device), 0)
    assert "runs as    _softmax\n\n_softmax(float32[4, 8], 0, False)" in text and "transform_rows" in text


def test_explain_follows_a_function_of_ones_own(device):
    weight = torch.randn(8, 8, device=device, requires_grad=True)
    text = tritonite.explain(lambda x: torch.linalg.eig((x @ weight).relu()), torch.randn(8, 8, device=device))
    assert "runs as    mm, relu, linalg_eig" in text and "path       ATen: no kernel" in text


def test_explain_reports_missing_kernels(device):
    x = torch.randn(2, 2, device=device)
    assert tritonite.explain("linalg_eig", x) == "linalg_eig(float32[2, 2])\npath       ATen: no kernel"
    assert "ATen: no kernel" in tritonite.explain("linalg_eigvals", x)
    assert "views alone" in tritonite.explain("view", x, [4])


@pytest.mark.parametrize(("name", "other"), [("add.Tensor", 1), ("add", 1), ("softmax", 0)])
def test_explain_refuses_unknown_keywords(name, other, device):
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'foo'"):
        tritonite.explain(name, torch.randn(4, device=device), other, foo=1)


@tritonite.pointwise_dynamic
def squared_distance(x, y):
    return (x - y) * (x - y)


def test_explain_knows_operators_of_ones_own(device):
    x = torch.randn(4, device=device)
    text = tritonite.explain(squared_distance, x, x)
    assert "elementwise_flat of squared_distance" in text
    with pytest.raises(Unsupported, match="cannot take these arguments"):
        tritonite.explain(squared_distance, x, x.to(torch.complex64))


SPELLINGS = {
    "add": ("torch.add", "aten::add", "torch.ops.aten.add", "torch.Tensor.add"),
    "add.Tensor": ("aten::add.Tensor", "torch.ops.aten.add.Tensor"),
    "softmax": ("torch.softmax", "torch.nn.functional.softmax", "F.softmax", "nn.functional.softmax"),
    "special_expit": ("torch.special.expit",),
    "linalg_vector_norm": ("torch.linalg.vector_norm",),
    "bitwise_*": ("torch.bitwise_*", "aten::bitwise_*"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_names_are_taken_as_they_are_written(name, device):
    x = torch.ones(4, 8, device=device, dtype=torch.int32 if "bit" in name else torch.float32)
    arguments = {"softmax": (x, 0), "special_expit": (x,), "linalg_vector_norm": (x,)}.get(name, (x, x))
    for spelled in SPELLINGS[name]:
        assert select(spelled) == select(name) and not select(exclude=spelled) & select(name)
        text = tritonite.explain(spelled, *arguments)
        assert text.partition("(")[2] == tritonite.explain(name, *arguments).partition("(")[2]
        with tritonite.use_gems(include=spelled):
            pass
    if "." not in name and "*" not in name:
        assert getattr(tritonite.ops, SPELLINGS[name][0]) is getattr(tritonite.ops, name)


def test_explain_takes_globs(device):
    x = torch.ones(4, 8, device=device, dtype=torch.int32)
    text = tritonite.explain("bitwise_*", x, x)
    assert "bitwise_and.Tensor(int32[4, 8], int32[4, 8])" in text and "bitwise_xor_.Tensor" in text
    assert "more overloads of bitwise_* do not take these arguments" in text
    with pytest.raises(RuntimeError):
        tritonite.explain("bitwise_*")


@pytest.mark.parametrize("name", ["matmul", "cross", "batch_norm", "nll_loss", "linear", "softmax", "embedding"])
def test_operators_are_what_users_mean(name, device):
    x = torch.randn(3, 3, device=device)
    classes = torch.tensor([0, 2, 1], device=device)
    arguments = {
        "cross": (x, x.roll(1, 0), 1),
        "batch_norm": (x, None, None, None, None, True, 0.1, 1e-5, False),
        "nll_loss": (x, classes),
        "softmax": (x, 0),
        "embedding": (x, classes),
    }.get(name, (x, x))
    function = getattr(tritonite.ops, name)
    torch.testing.assert_close(function(*arguments), getattr(torch.ops.aten, name)(*arguments))
    assert f"aten::{name}" in function.__doc__
    with pytest.raises(AttributeError, match="has no operator"):
        tritonite.ops.linalg_eig  # noqa: B018


def test_the_table_of_overloads_is_a_copy():
    found = tritonite.overloads()
    found.clear()
    assert "add.Tensor" in tritonite.overloads() and "add.Tensor" in select("add")
