"""Sampling of tokens against transformers' processors, and the distribution, seeds and errors of its draws."""

import functools
import math

import numpy as np
import pytest
import torch
from conftest import FULL, covering
from curand import uniforms

import tritonite
from tritonite import fused
from tritonite.engine.sampling import launch
from tritonite.errors import Unsupported

processors = pytest.importorskip("transformers.generation.logits_process")
library = torch.ops.tritonite
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ROWS = 16 if FULL else 5
TOP_K, TOP_P, MIN_P, TYPICAL = (
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
)
WARPERS = {
    "temperature": processors.TemperatureLogitsWarper,
    "top_k": TOP_K,
    "top_p": TOP_P,
    "min_p": MIN_P,
    "typical_p": TYPICAL,
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Make blocks so small that a row has several, the last of which is partial."""
    monkeypatch.setitem(launch.SAMPLING, tritonite.devices.current.kind, launch.SamplingTable(16, 1))


def on_device(values, dtype=None):
    return torch.as_tensor(values, dtype=dtype, device=tritonite.device)


def logits_of(*shape, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return (torch.randn(shape) * 2).to(dtype).to(tritonite.device)


def penalised(scores, tokens, prompts, repetition=1.0, presence=0.0, frequency=0.0):
    """Return float64 scores with vLLM's penalties; `prompts` are the lengths of prompts."""
    scores = scores.double().cpu().clone()
    for row, own, prompt in zip(scores, tokens.tolist(), prompts, strict=True):
        known = [(i, token) for i, token in enumerate(own) if 0 <= token < scores.shape[1]]
        for token in {token for _, token in known}:
            count = sum(1 for i, each in known if each == token and i >= prompt)
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
            row[token] -= frequency * count + presence * (count > 0)
    return scores


def warped(scores, **parameters):
    """Return float64 scores after transformers' processors, row by row; parameters are numbers or lists."""
    rows = []
    for i, row in enumerate(scores.double().cpu()):
        row = row[None]
        for name, make in WARPERS.items():
            if name in parameters:
                value = parameters[name]
                value = value[i] if isinstance(value, (list, torch.Tensor)) else value
                row = make(int(value) if name == "top_k" else float(value))(None, row)
        rows.append(row[0])
    return torch.stack(rows)


def check(found, scores, seeds, positions=0):
    """Compare tokens and log probabilities with inverses of the cumulative probabilities at the seeds' numbers."""
    tokens, log_probs = (each.cpu() for each in found)
    probs = scores.softmax(-1)
    for i, (token, own) in enumerate(zip(tokens.tolist(), probs, strict=True)):
        position = positions if isinstance(positions, int) else positions[i]
        drawn = float(uniforms(int(seeds[i]), position, 0, True)[0])
        expected = int(np.searchsorted(own.cumsum(0).numpy(), drawn))
        assert token == expected, (i, drawn, own)
        assert math.isclose(float(log_probs[i]), math.log(own[token]), rel_tol=1e-4, abs_tol=1e-5)


SINGLE = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"typical_p": 0.6},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8},
]


@pytest.mark.parametrize(("parameters", "dtype"), covering(2, SINGLE, DTYPES))
def test_filters_agree_with_transformers(small_blocks, parameters, dtype):
    logits = logits_of(ROWS, 70, dtype=dtype)
    seeds = torch.arange(ROWS)
    found = fused.sample(logits, seeds=on_device(seeds), return_log_probs=True, **parameters)
    check(found, warped(logits, **parameters), seeds)


@pytest.mark.smoke
def test_parameters_of_every_row(small_blocks):
    logits, seeds = logits_of(4, 50), torch.tensor([3, -1, 2**62, 0])
    parameters = {"temperature": [0.5, 1.0, 2.0, 0.8], "top_k": [5, 50, 12, 3], "top_p": [0.9, 0.5, 0.8, 0.99]}
    parameters |= {"min_p": [0.01, 0.0, 0.1, 0.5], "typical_p": [0.9, 0.5, 0.3, 0.99]}
    given = {name: on_device(values) for name, values in parameters.items()}
    # One tensor has a stride, one is expanded, and one is of another dtype.
    given["top_p"] = on_device([[p, 0.0] for p in parameters["top_p"]])[:, 0]
    given["top_k"] = given["top_k"].int()
    found = fused.sample(logits, seeds=on_device(seeds), return_log_probs=True, **given)
    check(found, warped(logits, **parameters), seeds)


@pytest.mark.parametrize(("prompts", "dtype"), covering(2, [0, 3, [0, 2, 9]], [torch.int32, torch.int64]))
def test_penalties(small_blocks, prompts, dtype):
    logits, seeds = logits_of(3, 40), torch.arange(3)
    tokens = torch.randint(-1, 12, (3, 25), generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens[0, 5], tokens[1, 3:] = 40, -1
    lengths = [prompts] * 3 if isinstance(prompts, int) else prompts
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    given = prompts if isinstance(prompts, int) else on_device(prompts)
    found = fused.sample(
        *(logits,), tokens=on_device(tokens), prompt_lengths=given, seeds=on_device(seeds), temperature=0.7,
        return_log_probs=True, **penalties,
    )  # fmt: skip
    check(found, penalised(logits, tokens, lengths, *penalties.values()) / 0.7, seeds)
    only = fused.sample(
        *(logits,), tokens=on_device(tokens), repetition_penalty=on_device([1.3] * 3), seeds=on_device(seeds),
        return_log_probs=True,
    )  # fmt: skip
    reference = processors.RepetitionPenaltyLogitsProcessor(1.3)
    known = [[token for token in own if 0 <= token < 40] for own in tokens.tolist()]
    each = [reference(torch.tensor([own]), row[None].cpu())[0] for own, row in zip(known, logits, strict=True)]
    check(only, torch.stack(each).double(), seeds)


def test_temperature_0_is_the_largest_logit(small_blocks):
    logits = logits_of(4, 60)
    logits[1, 7] = logits[1, 50] = logits[1].max() + 1
    tokens, log_probs = fused.sample(logits, temperature=0, return_log_probs=True)
    assert torch.equal(tokens, logits.argmax(-1)) and tokens[1] == 7 and not log_probs.any()
    seeds = torch.arange(4)
    mixed = [0.0, 0.7, 0.0, 1.3]
    found = fused.sample(logits, temperature=on_device(mixed), typical_p=0.9, seeds=on_device(seeds))
    assert found[0] == logits[0].argmax() and found[2] == logits[2].argmax()
    expected = fused.sample(
        logits[1::2], temperature=on_device(mixed[1::2]), typical_p=0.9, seeds=on_device(seeds[1::2])
    )
    assert torch.equal(found[1::2], expected)


def test_ties_at_a_bound_are_kept(small_blocks):
    """log_probs of draws tell how many tokens are kept, because all have one weight."""
    logits = on_device([[0.0] * 30 + [-9.0] * 10])
    for parameters in ({"top_k": 3}, {"top_p": 0.1}, {"min_p": 1.0}, {"typical_p": 0.2}):
        _, log_probs = fused.sample(logits, return_log_probs=True, **parameters)
        torch.testing.assert_close(log_probs.exp(), on_device([1 / 30]), rtol=1e-5, atol=0)
    # Both zeros are one score.
    _, log_probs = fused.sample(on_device([[0.0, -0.0, -3.0]]), top_k=1, return_log_probs=True)
    torch.testing.assert_close(log_probs.exp(), on_device([0.5]))


def test_parameters_that_keep_everything_or_one_token(small_blocks):
    logits, seeds = logits_of(3, 40), on_device(torch.arange(3))
    plain = fused.sample(logits, seeds=seeds, return_log_probs=True)
    for parameters in ({"top_k": 0, "top_p": 1.0}, {"top_k": 40, "min_p": 0.0}, {"top_k": -1, "typical_p": 1.0}):
        found = fused.sample(logits, seeds=seeds, return_log_probs=True, **parameters)
        assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])
    for parameters in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"min_p": 2.0}, {"temperature": 1e-4}):
        assert torch.equal(fused.sample(logits, **parameters), logits.argmax(-1))


def test_logits_that_are_not_finite(small_blocks):
    inf, nan = math.inf, math.nan
    few = on_device([[-inf] * 20 + [1.0, nan, 2.0] + [-inf] * 17])
    for parameters in ({}, {"top_k": 5}, {"top_p": 0.999}, {"typical_p": 0.999}, {"temperature": 0.5, "min_p": 1e-3}):
        for _ in range(2):
            assert fused.sample(few, **parameters).item() in (20, 22)
    largest = on_device([[0.0, inf, 3.0, inf]])
    for parameters in ({}, {"top_k": 1}, {"top_p": 0.5}, {"typical_p": 0.5}):
        token, log_prob = fused.sample(largest, return_log_probs=True, **parameters)
        assert token.item() in (1, 3) and math.isclose(log_prob.item(), math.log(0.5), rel_tol=1e-5)
    token, log_prob = fused.sample(on_device([[-inf] * 5, [nan] * 5]), top_k=2, top_p=0.5, return_log_probs=True)
    assert token.tolist() == [-1, -1] and log_prob.isnan().all()


def test_layouts(small_blocks):
    logits, seeds = logits_of(3, 37), on_device(torch.arange(3))
    expected = fused.sample(logits, seeds=seeds, top_k=9)
    padded = torch.cat((logits, logits), 1)[:, :37]
    for own in (logits.t().contiguous().t(), padded, torch.stack((logits, logits), 2)[..., 1]):
        assert not own.is_contiguous() and torch.equal(fused.sample(own, seeds=seeds, top_k=9), expected)
    row = logits[:1].expand(3, 37)
    assert torch.equal(fused.sample(row, seeds=seeds), fused.sample(row.contiguous(), seeds=seeds))


def test_one_token_no_rows_and_no_history():
    one = logits_of(2, 1)
    every = {"temperature": 0.5, "top_k": 1, "top_p": 0.5, "min_p": 0.5, "typical_p": 0.5}
    history = on_device([[0, 0], [-1, -1]])
    token, log_prob = fused.sample(one, tokens=history, repetition_penalty=2.0, return_log_probs=True, **every)
    assert token.tolist() == [0, 0] and not log_prob.any()
    assert fused.sample(one[:0], **every).shape == (0,)
    logits, seeds = logits_of(2, 9), on_device([1, 2])
    none = on_device(torch.empty(2, 0), torch.int64)
    expected = fused.sample(logits, seeds=seeds)
    assert torch.equal(fused.sample(logits, seeds=seeds, tokens=none, frequency_penalty=1.0), expected)
    assert torch.equal(fused.sample(logits, seeds=seeds, tokens=history), expected)
    with pytest.raises(Unsupported, match="with a token at least"):
        fused.sample(logits[:, :0])


@pytest.mark.smoke
def test_draws_with_seeds_do_not_depend_on_the_batch(small_blocks):
    logits, seeds = logits_of(6, 40) / 4, on_device([5, 6, 7, 5, 2**63 - 1, -(2**63)])
    positions = on_device([0, 1, 2, 9, 2**40, 0])
    together = fused.sample(logits, seeds=seeds, positions=positions, top_p=0.99)
    order = on_device([4, 1, 0])
    alone = fused.sample(logits[order], seeds=seeds[order], positions=positions[order].clone(), top_p=0.99)
    assert torch.equal(alone, together[order])
    found = fused.sample(logits, seeds=seeds, positions=positions, return_log_probs=True)
    check(found, logits.double().cpu(), seeds.tolist(), positions.tolist())
    draws = [fused.sample(logits, seeds=seeds, positions=i).tolist() for i in range(3)]
    assert draws[0] != draws[1] != draws[2]


def test_draws_without_seeds_are_the_generators():
    logits = logits_of(6, 40) / 4

    def drawn(**given):
        torch.manual_seed(3)
        return [fused.sample(logits, **given).tolist() for _ in range(2)]

    assert drawn() == drawn() and len(set(map(tuple, drawn()))) == 2
    make = lambda: torch.Generator(tritonite.device).manual_seed(8)
    own = make()
    first = [fused.sample(logits, generator=own).tolist() for _ in range(2)]
    assert first[0] != first[1] and first[0] == fused.sample(logits, generator=make()).tolist()


def test_distribution():
    """Frequencies of tokens are those of probabilities, by Pearson's chi-squared test."""
    rows = 20_000 if tritonite.device != "cpu" else 400 if FULL else 80
    probs = torch.tensor([0.4, 0.05, 0.25, 0.1, 0.2])
    torch.manual_seed(0)
    logits = on_device(probs.log()).expand(rows, 5)
    for seeds in (None, on_device(torch.arange(rows) * 977)):
        counts = fused.sample(logits, seeds=seeds).bincount(minlength=5).double().cpu()
        # Of 4 degrees of freedom, 23.5 is exceeded once in 10,000 times.
        assert ((counts - rows * probs) ** 2 / (rows * probs)).sum() < 23.5


def test_rare_tokens_are_drawn_by_their_probability(small_blocks):
    """A cumulative sum in float32 alone would lose tokens behind 2**24 times their weight."""
    logits = torch.full((1, 60), -30.0)
    logits[0, 0], logits[0, 59] = 0.0, -18.0
    probs = logits.double().softmax(-1)[0]
    token, log_prob = fused.sample(on_device(logits), seeds=on_device([0]), return_log_probs=True)
    assert token.item() == 0 and abs(log_prob.item() - math.log(probs[0])) < 1e-6


X, ONE = torch.zeros(2, 8), torch.zeros(2)
WRONG = [
    ((X.double(),), {}, "logits is torch.float64"),
    ((X[0],), {}, "logits has the shape"),
    ((X[:, :0],), {}, "with a token at least"),
    ((X,), {"temperature": torch.zeros(3)}, "temperature has the shape"),
    ((X,), {"temperature": torch.zeros(2, dtype=torch.int64)}, "temperature is torch.int64"),
    ((X,), {"top_k": ONE}, "top_k is torch.float32"),
    ((X,), {"top_p": torch.zeros(2, device="meta")}, "one device"),
    ((X,), {"seeds": torch.zeros(2, dtype=torch.int32)}, "seeds is torch.int32"),
    ((X,), {"positions": ONE}, "positions is torch.float32"),
    ((X,), {"prompt_lengths": ONE}, "prompt_lengths is torch.float32"),
    ((X,), {"tokens": ONE.long()}, "tokens has the shape"),
    ((X,), {"tokens": X}, "tokens is torch.float32"),
    ((X,), {"tokens": X[:1].long()}, "tokens has the shape"),
    ((X,), {"temperature": -1.0}, "outside the range"),
    ((X,), {"repetition_penalty": 0.0}, "outside the range"),
]


@pytest.mark.declines("refused calls")
@pytest.mark.parametrize(("args", "given", "words"), WRONG)
def test_wrong_arguments(args, given, words):
    to = lambda x: x.to(tritonite.device) if isinstance(x, torch.Tensor) and x.device.type != "meta" else x
    with pytest.raises(Unsupported, match=words):
        fused.sample(*map(to, args), **{name: to(value) for name, value in given.items()})


def test_unknown_parameters():
    with pytest.raises(TypeError, match="top_q"):
        fused.sample(X, top_q=1)


def _arguments(i):
    logits, seeds = logits_of(3, 20), on_device([1, 2, 3])
    row, history = on_device([0.5, 0.6, 0.7]), on_device([[1, 2, -1]] * 3)
    if i == 0:
        numbers = [0.7, None, 5, None, 0.9, None, 0.01, None, 0.9, None, 1.2, None, 0.1, None, 0.1, None]
        return logits, *numbers, history, 1, None, seeds, 0, None, None
    tensors = [None, row, None, seeds, *(None, row) * 6]
    return logits, *tensors, history, None, seeds, seeds, None, seeds, None


@pytest.mark.parametrize("i", [0, 1])
def test_opcheck(i):
    torch.library.opcheck(library.sample, _arguments(i))
    text = tritonite.explain("tritonite::sample", *_arguments(i))
    assert "outside ATen" in text and "launch  " in text


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_give_the_same(dynamic):
    def step(logits, seeds):
        return fused.sample(logits * 2, temperature=0.8, top_k=7, top_p=0.9, seeds=seeds, return_log_probs=True)

    operands = logits_of(2, 20), on_device([4, 5])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for own, expected in zip(compiled(*operands), step(*operands), strict=True):
        assert torch.equal(own, expected)


def test_compilers_know_that_calls_draw():
    assert torch.Tag.nondeterministic_seeded in library.sample.default.tags


def test_vmap():
    logits, seeds = logits_of(2, 3, 20), on_device([[1, 2, 3], [4, 5, 6]])
    function = functools.partial(fused.sample, top_k=5)
    own = torch.vmap(lambda x, seeds: function(x, seeds=seeds))(logits, seeds)
    assert torch.equal(own, torch.stack([function(x, seeds=each) for x, each in zip(logits, seeds, strict=True)]))
