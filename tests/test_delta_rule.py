"""Gated delta rule against a recurrence in float64 and transformers' functions: values, gradients, states, errors."""

import functools

import pytest
import torch
from compositions import agree, check_library_operator, close, normal
from conftest import every_second

import tritonite
from tritonite import fused
from tritonite.engine.delta_rule import problem
from tritonite.errors import Unsupported
from tritonite.testing.compositions.delta_rule import gated_delta_rule

library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FUNCTIONS = [fused.chunk_gated_delta_rule, fused.recurrent_gated_delta_rule]
# Batch, tokens, key heads, heads, key size, value size.
SIZES = [
    (2, 1, 1, 1, 1, 1),
    (1, 16, 2, 2, 16, 16),
    (2, 37, 1, 3, 20, 7),
    (1, 70, 2, 4, 8, 40),
    (1, 70, 1, 1, 64, 1),
]


def recurrence(query, key, value, g, beta, state=None, scale=None, normalize=False):
    return gated_delta_rule(query, key, value, g, beta, scale=scale, initial_state=state, normalize_qk=normalize)


def operands_of(sizes, dtype=torch.float32, state=True, grad=True):
    """Return query, key, value, g, beta and, if asked for, a state, with keys of length 1."""
    batch, tokens, key_heads, heads, key, value = sizes
    keys = torch.nn.functional.normalize(normal(batch, tokens, key_heads, key), dim=-1)
    made = [
        normal(batch, tokens, key_heads, key, dtype=dtype),
        keys.to(dtype),
        normal(batch, tokens, heads, value, dtype=dtype),
        -normal(batch, tokens, heads).abs(),
        normal(batch, tokens, heads).sigmoid().to(dtype),
        normal(batch, heads, key, value) if state else None,
    ]
    return [each if each is None else each.requires_grad_(grad) for each in made]


def ours(function, normalize=False, scale=None):
    def call(*operands):
        state = operands[5] if len(operands) > 5 else None
        return function(
            *operands[:5], scale=scale, initial_state=state, return_final_state=True, normalize_qk=normalize
        )

    return call


def theirs(normalize=False, scale=None):
    return functools.partial(recurrence, normalize=normalize, scale=scale)


@pytest.fixture
def short_chunks(monkeypatch):
    """Make chunks of 16 tokens, and blocks of 16 value columns."""
    table = problem.delta_table()
    blocks = {name: each._replace(columns=16) for name, each in table._asdict().items() if hasattr(each, "columns")}
    monkeypatch.setattr(
        problem, "TABLE", dict.fromkeys(problem.TABLE, table._replace(chunk=16, chunk_fp32=16, **blocks))
    )


@every_second(("sizes", "normalize", "dtype"), SIZES, [False, True], DTYPES)
def test_values_and_gradients(sizes, normalize, dtype, short_chunks):
    operands = operands_of(sizes, dtype)
    agree(ours(FUNCTIONS[0], normalize), theirs(normalize), operands, terms=16, grad_terms=256)


@pytest.mark.smoke
@pytest.mark.parametrize("normalize", [False, True])
def test_a_chunk_of_usual_length(normalize):
    operands = operands_of((1, 70, 1, 2, 24, 20))
    agree(ours(FUNCTIONS[0], normalize), theirs(normalize), operands, terms=16, grad_terms=1024)


@every_second(("sizes", "dtype"), SIZES, DTYPES)
def test_recurrence(sizes, dtype):
    operands = operands_of(sizes, dtype, grad=False)
    results = ours(FUNCTIONS[1], True)(*operands)
    wide = [each.double() for each in operands]
    out, state = theirs(True)(*wide)
    close(results[0], out, 16)
    close(results[1], state, 64)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_states_and_with_a_scale(function, short_chunks):
    operands = operands_of((2, 19, 1, 2, 8, 8), state=False)
    agree(ours(function, scale=-0.3), theirs(scale=-0.3), operands, used=(0,), terms=16, grad_terms=256)
    out, state = function(*[each.detach() for each in operands[:5]])
    assert state is None and out.shape == (2, 19, 2, 8)


@pytest.mark.parametrize("used", [(0,), (1,)])
def test_gradients_of_one_result(used, short_chunks):
    def exact(*operands):
        # The state does not depend on queries: its gradient by them is 0, not None.
        out, state = recurrence(*operands)
        return out, state + 0 * out.sum()

    agree(ours(FUNCTIONS[0]), exact, operands_of((1, 35, 1, 2, 8, 8)), used=used, terms=16, grad_terms=256)


def test_keys_that_are_all_alike(short_chunks):
    # Powers of the chunk's system would overflow the precision of float32 here.
    operands = operands_of((1, 64, 1, 1, 16, 16))
    with torch.no_grad():
        operands[1].copy_(operands[1][:, :1].clone())
        operands[3].zero_()
        operands[4].fill_(1.0)
    agree(ours(FUNCTIONS[0]), theirs(), operands, terms=64, grad_terms=1024)


def test_strong_decays_do_not_overflow(short_chunks):
    operands = operands_of((1, 20, 1, 1, 8, 8))
    with torch.no_grad():
        operands[3].mul_(100)
    agree(ours(FUNCTIONS[0]), theirs(), operands, terms=16, grad_terms=256)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_tokens_return_the_initial_state(function):
    operands = operands_of((2, 0, 1, 2, 4, 4))
    out, state = ours(function)(*operands)
    assert out.shape == (2, 0, 2, 4) and torch.equal(state, operands[5])
    assert torch.equal(torch.autograd.grad(state.sum(), operands[5])[0], torch.ones_like(operands[5]))
    assert not ours(function)(*operands[:5])[1].any()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("sizes", [(0, 3, 1, 2, 4, 4), (2, 3, 0, 0, 4, 4), (2, 3, 1, 2, 4, 0)])
def test_no_elements(function, sizes):
    operands = operands_of(sizes)
    out, state = ours(function)(*operands)
    assert out.shape == operands[2].shape and state.shape == operands[5].shape
    for grad in torch.autograd.grad(out.sum() + state.sum(), operands):
        assert not grad.isnan().any()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_operands_of_any_stride(function, short_chunks):
    # Query, key and value are columns of one product, as in a model; gates have their heads first.
    packed, gates = normal(2, 20, 40), -normal(2, 2, 20).abs()
    query, key = packed[..., :8].unflatten(-1, (1, 8)), packed[..., 8:16].unflatten(-1, (1, 8))
    value, state = packed[..., 16:].unflatten(-1, (12, 2)).transpose(-1, -2), normal(2, 8, 2, 12).transpose(1, 2)
    operands = [query, key, value, gates.transpose(1, 2), normal(1, 1, 2).sigmoid().expand(2, 20, 2), state]
    operands = [each.requires_grad_() for each in operands]
    agree(ours(function, True), theirs(True), operands, terms=16, grad_terms=256)


@pytest.mark.smoke
def test_leading_dimensions():
    operands = operands_of((6, 5, 1, 2, 4, 4))
    for function in FUNCTIONS:
        expected = ours(function)(*operands)
        for own, flat in zip(ours(function)(*[each.unflatten(0, (2, 3)) for each in operands]), expected, strict=True):
            torch.testing.assert_close(own.flatten(0, 1), flat)
        single = ours(function)(*[each[0] for each in operands])
        torch.testing.assert_close(single[0], expected[0][0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_update_in_place(dtype):
    operands = operands_of((2, 4, 1, 2, 20, 12), dtype, grad=False)
    out, final = ours(FUNCTIONS[1], True)(*operands)
    state = operands[5].clone()
    for t in range(4):
        token = [each[:, t : t + 1] for each in operands[:5]]
        own = fused.recurrent_gated_delta_rule_(*token, state, normalize_qk=True)
        torch.testing.assert_close(own, out[:, t : t + 1])
    torch.testing.assert_close(state, final)


def test_states_of_16_bits(short_chunks):
    operands = operands_of((1, 20, 1, 2, 8, 8), torch.bfloat16)
    operands[5] = operands[5].detach().bfloat16().requires_grad_()
    agree(ours(FUNCTIONS[0]), theirs(), operands, terms=16, grad_terms=256)
    state = operands[5].detach().clone()
    given = [each.detach() for each in operands[:5]]
    fused.recurrent_gated_delta_rule_(*given, state)
    close(state, theirs()(*[each.double() for each in (*given, operands[5].detach())])[1], 16)


def test_a_decay_of_zero_forgets_the_state():
    operands = operands_of((1, 3, 1, 1, 4, 4), grad=False)
    operands[3][:, 1] = -float("inf")
    for own, exact in zip(ours(FUNCTIONS[1])(*operands), theirs()(*[each.double() for each in operands]), strict=True):
        close(own, exact, 16)


def test_transformers_functions():
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next import modeling_qwen3_next as model

    operands = operands_of((1, 40, 1, 2, 16, 12), grad=False)
    given = {"initial_state": operands[5], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for function, name in zip(FUNCTIONS, ("chunk", "recurrent"), strict=True):
        expected = getattr(model, f"torch_{name}_gated_delta_rule")(*operands[:5], **given)
        for own, other in zip(ours(function, True)(*operands), expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


Q, V, G = torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4)
WRONG = [
    ((Q.double(), Q, V, G, G), {}, "query is torch.float64"),
    ((Q[0, 0], Q, V, G, G), {}, "query has the shape"),
    ((torch.zeros(2, 3, 2, 257), Q, V, G, G), {}, "key size of 1 to 256"),
    ((Q, Q[:1], V, G, G), {}, "key has the shape"),
    ((Q, Q, V[:, :, :3], G, G), {}, "divide heads"),
    ((Q, Q, V[:1], G, G), {}, "value has the shape"),
    ((Q, Q.half(), V, G, G), {}, "key is torch.float16"),
    ((Q, Q, V.half(), G, G), {}, "value is torch.float16"),
    ((Q, Q, V, G[..., :2], G), {}, "g has the shape"),
    ((Q, Q, V, G, G.double()), {}, "beta is torch.float64"),
    ((Q, Q, V, G, G), {"initial_state": torch.zeros(2, 4, 5, 4)}, "initial_state has the shape"),
    ((Q, Q, V, G, G), {"initial_state": torch.zeros(2, 4, 4, 5).int()}, "initial_state is torch.int32"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("args", "kwargs", "reason"), WRONG)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_arguments_are_refused(function, args, kwargs, reason):
    for device in (tritonite.device, "meta"):
        given = {name: each.to(device) for name, each in kwargs.items()}
        with pytest.raises(Unsupported, match=reason):
            function(*[each.to(device) for each in args], **given)


@pytest.mark.declines("refused calls")
def test_states_that_cannot_be_updated_are_refused():
    operands = operands_of((2, 1, 1, 2, 4, 4), grad=False)
    with pytest.raises(Unsupported, match="not contiguous"):
        fused.recurrent_gated_delta_rule_(*operands[:5], operands[5].transpose(-1, -2))
    with pytest.raises(Unsupported, match="state has the shape"):
        fused.recurrent_gated_delta_rule_(*operands[:5], operands[5][:1])
    with pytest.raises(Unsupported, match="no gradient"):
        fused.recurrent_gated_delta_rule_(operands[0].requires_grad_(), *operands[1:])


def calls():
    *operands, state = operands_of((2, 5, 1, 2, 4, 4))
    detached = [each.detach() for each in operands]
    grad, by_state = normal(2, 5, 2, 4), normal(2, 2, 4, 4)
    for name in ("chunk", "recurrent"):
        yield getattr(library, f"{name}_gated_delta_rule"), (*operands, state, 0.5, True, True)
        yield getattr(library, f"{name}_gated_delta_rule"), (*operands,)
    yield library.recurrent_gated_delta_rule_, (*detached, state.detach(), None, True)
    yield library.gated_delta_rule_backward, (grad, by_state, *detached, state.detach(), 0.5, True)
    yield library.gated_delta_rule_backward, (None, by_state, *detached, None, None, False)


@pytest.mark.parametrize("i", range(7))
def test_opcheck(i):
    check_library_operator(*list(calls())[i])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic):
    def layer(*operands):
        out, state = ours(fused.chunk_gated_delta_rule, True)(*operands)
        last = [each[:, -1:].detach() for each in operands[:5]]
        state = state.detach().clone()
        return out + fused.recurrent_gated_delta_rule_(*last, state), state

    operands = operands_of((2, 9, 1, 2, 4, 4))
    expected = layer(*operands)
    actual = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*operands)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    own, eager = (torch.autograd.grad(each[0].sum(), operands) for each in (actual, expected))
    torch.testing.assert_close(own, eager, rtol=0, atol=0)


def test_vmap():
    operands = operands_of((3, 5, 1, 2, 4, 4), grad=False)
    batched = [each.unsqueeze(1) for each in operands]
    for function in FUNCTIONS:
        expected = ours(function)(*operands)
        for own, each in zip(torch.vmap(ours(function))(*batched), expected, strict=True):
            torch.testing.assert_close(own.squeeze(1), each)
        # A query of its own for each, over keys and values in common.
        first = [each[:1] for each in operands[1:]]
        actual = torch.vmap(lambda query: ours(function)(query, *first)[0])(batched[0])
        each = [ours(function)(query[None], *first)[0] for query in operands[0]]
        torch.testing.assert_close(actual, torch.stack(each))


def test_vmap_of_gradients():
    operands, grads = operands_of((1, 5, 1, 1, 4, 4)), normal(3, 1, 5, 1, 4)
    out, _ = ours(fused.chunk_gated_delta_rule)(*operands)
    gradients = lambda grad: torch.autograd.grad(out, operands, grad, retain_graph=True)
    for own, each in zip(torch.vmap(gradients)(grads), zip(*map(gradients, grads), strict=True), strict=True):
        torch.testing.assert_close(own, torch.stack(each))
