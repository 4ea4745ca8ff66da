"""`explain` describes a call and changes nothing, for every operator, name and kind of tensor."""

import contextlib
import itertools

import pytest
import torch
from conftest import FULL
from test_accuracy import MISSING
from torch.utils import _pytree as pytree

import tritonite
from tritonite.install.override import native_dispatcher
from tritonite.registry.names import overload_named
from tritonite.registry.schema import in_schema_order
from tritonite.testing import verify
from tritonite.testing.samples import samples

NAMES = [name for name, op in tritonite.overloads().items() if op.has_place and name not in MISSING]


# Exceptions of ATen and of PyTorch's meta functions.
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError)


def calls(op):
    """Yield arguments of up to a dozen samples, with outputs and a generator. ATen may refuse some."""
    every = (sample for dtype in (torch.float32, *op.declaration.accepts) for sample in samples(op, dtype, device()))
    for sample in itertools.islice(every, 12):
        kwargs = dict(sample.kwargs)
        if "generator" in op.names[len(sample.args) :]:
            kwargs["generator"] = torch.Generator(device()).manual_seed(3)
        if op.out_names:
            answer = verify.by_aten(op, sample)
            if answer is None:
                continue
            outs = answer[0] if isinstance(answer[0], tuple) else answer[:1]
            kwargs |= dict(zip(op.out_names, outs, strict=False))
        yield sample.args, kwargs


def names_on(path):
    """Return all overloads on the native path, and without the full set every fourth on the other, which is alike."""
    return NAMES if FULL or path == "native" else NAMES[::4]


def device():
    return tritonite.device


def state(values):
    """Return everything that a call could change: tensors with their memory, and generators."""
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
    generators = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Generator)]
    device = torch.cuda.default_generators if tritonite.device == "cuda" else ()
    return (
        [(x.data_ptr(), x.shape, x.stride(), x._version, x.grad_fn, in_memory(x)) for x in tensors],
        [bytes(g.get_state().numpy()) for g in (torch.default_generator, *device, *generators)],
    )


def in_memory(tensor):
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole.cpu().numpy().tobytes()


def plans(name):
    dispatcher = native_dispatcher()
    return dispatcher.counts(name)[2] if dispatcher is not None else 0


def test_explain_changes_nothing(path):
    changed, served, counted, chosen = [], [], dict(tritonite.stats()), names_on(path)
    for name in chosen:
        for args, kwargs in calls(tritonite.overloads()[name]):
            before, kept = state((args, kwargs)), plans(name)
            try:
                text = tritonite.explain(name, *args, **kwargs)
            except REFUSALS as refusal:
                text = str(refusal)
            if state((args, kwargs)) != before or plans(name) != kept:
                changed.append(name)
            if "kernel     " in text:
                served.append(name)
                break
    assert not changed, changed
    assert dict(tritonite.stats()) == counted
    assert len(served) > 0.9 * len(chosen), sorted({*chosen} - {*served})


def huge(value):
    """Return an expanded matrix with more elements than a machine has memory for."""
    return value[:1, :1].expand(2**6, 2**30) if isinstance(value, torch.Tensor) and value.shape == (6, 10) else value


def test_explain_allocates_nothing(path):
    named = map(tritonite.overloads().get, names_on(path))
    described, every = 0, [op for op in named if not (op.out_names or op.inplace)]
    for op in every:
        for args, kwargs in itertools.islice(calls(op), 1):
            args, kwargs = pytree.tree_map(huge, (args, kwargs))
            try:
                described += "kernel     " in tritonite.explain(op.overload, *args, **kwargs)
            except REFUSALS as refusal:
                assert "memory" not in str(refusal), op.overload
    assert described > 0.4 * len(every), described


# A launch draws at most 2**32 random numbers; there should be few launches.
FACTORIES = {
    "zeros": ((2**45,),),
    "ones": ((2**45,),),
    "empty": ((2**45,),),
    "full": ((2**45,), 2),
    "randn": ((2**36,),),
    "rand": ((2**36,),),
    "randint": (0, 5, (2**36,)),
    "normal": (0.0, 1.0, (2**36,)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_explain_of_a_factory_allocates_nothing(name, path):
    text = tritonite.explain(name, *FACTORIES[name], device=tritonite.device)
    assert "result     " in text or "path       ATen" in text or name == "empty"


def test_explain_takes_a_generator_and_changes_none(path):
    generator = torch.Generator(tritonite.device).manual_seed(3)
    x = torch.rand(4, 8, device=tritonite.device)
    calls = {
        "randn": ((3,),),
        "randint": (0, 5, (3,)),
        "bernoulli": (x,),
        "normal_": (x,),
        "multinomial": (x, 2),
        torch.randn: (3,),
        torch.rand: (3, 4),
    }
    before = state((x, generator))
    for function, args in calls.items():
        on = {} if any(value is x for value in args) else {"device": tritonite.device}
        assert "path       " in tritonite.explain(function, *args, generator=generator, **on)
    assert state((x, generator)) == before


DTYPE_IS_DEFAULT = {"randint": (0, 5, (3,)), "randperm": (7,), "tril_indices": (3, 4), "triu_indices": (3, 4)}


@pytest.mark.parametrize("name", DTYPE_IS_DEFAULT)
def test_explain_of_a_factory_whose_dtype_is_a_default(name, path):
    text = tritonite.explain(name, *DTYPE_IS_DEFAULT[name], device=tritonite.device)
    assert "kernel     " in text and "result     int64" in text and "ATen:" not in text


def test_defaults_of_schemas_are_no_ints_for_dtypes():
    for op in tritonite.overloads().values():
        values = in_schema_order(op.schema, (), {})
        assert all(values[place] is None or type(values[place]) is kind for place, _, kind in op.enumerations)


def test_explain_takes_inference_tensors(path):
    with torch.inference_mode():
        x = torch.randn(4, 8, device=tritonite.device)
        inside = tritonite.explain("softmax", x, 0)
    weight = torch.randn(4, 8, device=tritonite.device)
    assert inside == tritonite.explain("softmax", x, 0) and "runs as    _softmax\n" in inside
    for function in ("linear", lambda y: torch.nn.functional.linear(y, x)):
        assert "runs as    mm\n" in tritonite.explain(
            function, weight if callable(function) else x, *[x][callable(function) :]
        )


def test_explain_follows_intermediate_results(path):
    """Intermediate results have no memory, and nothing is read from them."""
    described, x = 0, None

    def called(*args, **kwargs):
        double = lambda v: v.clone() if isinstance(v, torch.Tensor) else v
        return x(*pytree.tree_map(double, args), **pytree.tree_map(double, kwargs))

    chosen = NAMES if FULL else NAMES[::4]
    for name in chosen:
        x = overload_named(name)
        for args, kwargs in itertools.islice(calls(tritonite.overloads()[name]), 1):
            before = state((args, kwargs))
            with contextlib.suppress(*REFUSALS):
                described += "kernel     " in tritonite.explain(called, *args, **kwargs)
            assert state((args, kwargs)) == before, name
    assert described > 0.7 * len(chosen)


def test_explain_of_what_has_no_shapes_ends_there():
    """PyTorch's function for the shapes of an LSTM cell fails without a bias (torch 2.13)."""

    def cell(gates, state):
        return torch.ops.aten._thnn_fused_lstm_cell.default(gates, gates, state)[0].sum()

    gates = torch.zeros(3, 64, device=tritonite.device)
    text = tritonite.explain(cell, gates, gates[:, :16])
    assert "_thnn_fused_lstm_cell" in text
