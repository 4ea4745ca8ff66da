"""tools/train_llama.py with a tiny model: curves beside ATen's, a killed command, the judge, the page."""

import dataclasses
import functools
import importlib.util
import json
import statistics

import pytest
import torch
import train_llama
import training_page
from library_text import BYTES, Vocabulary, library_text
from training_runs import HEAD, QUICK, Judgement, Settings, Training, scaled, width_for

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
TINY = dataclasses.replace(
    QUICK, width=16, vocabulary=BYTES, sequence=8, batch=1, steps=2, characters=3000, deterministic=True
)


def losses(command):
    return [each.losses for each in command.runs]


@functools.cache
def whole(mode):
    """Return the losses of a run that nothing stops."""
    command = train_llama.Command(TINY, [Training(mode, 0)])
    command.train()
    return losses(command)[0]


@needs_transformers
@pytest.mark.parametrize("mode", ["eager", "patched", "compiled"])
def test_losses_are_atens(mode):
    expected, found = whole("aten"), whole(mode)
    assert len(found) == TINY.steps and len(set(found)) == TINY.steps
    # Both round to bf16 in every layer; the updates of a few steps do not move the losses apart.
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0.0)


@needs_transformers
@pytest.mark.parametrize(("modes", "stop_after"), [(["aten"], 1), (["aten", "patched"], 3)])
def test_a_stopped_command_goes_on_with_the_same_bits(modes, stop_after, tmp_path):
    """A stop within the first run, and one within the second."""
    file = tmp_path / "run.pt"
    with pytest.raises(train_llama.Stopped):
        train_llama.Command(TINY, [Training(mode, 0) for mode in modes], file).train(stop_after=stop_after)
    resumed = train_llama.Command.resumed(file)
    assert resumed.settings == TINY and sum(map(len, losses(resumed))) == stop_after
    resumed.train()
    assert losses(resumed) == [whole(mode) for mode in modes]


@needs_transformers
def test_the_command_line(tmp_path, capsys):
    """The first call stops, the second goes on, and writes what the page shows."""
    file, result = tmp_path / "run.pt", tmp_path / "result.json"
    given = ["--quick", "--steps", "2", "--modes", "aten", "--seeds", "2", "--save", str(file)]
    assert train_llama.main([*given, "--stop-after", "3"]) == 3
    assert f"--resume {file}" in capsys.readouterr().out
    assert train_llama.main(["--resume", str(file), "--json", str(result)]) == 0
    stored = json.loads(result.read_text())
    assert [(each["mode"], each["seed"], len(each["losses"])) for each in stored["runs"]] == [
        ("aten", 0, 2),
        ("aten", 1, 2),
    ]
    assert not file.with_suffix(".new").exists()


def test_state_is_stored_every_few_steps(tmp_path, monkeypatch):
    """A command that is killed leaves the state of the last multiple of `save_every`."""
    pytest.importorskip("transformers")
    file = tmp_path / "run.pt"
    command = train_llama.Command(TINY, [Training("aten", 0)], file)
    step = train_llama.Run.step

    def killed(run, tokens):
        if len(run.training.losses) == 1:
            raise KeyboardInterrupt
        return step(run, tokens)

    monkeypatch.setattr(train_llama.Run, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        command.train(save_every=1)
    assert losses(train_llama.Command.resumed(file)) == losses(command)


def run(mode, seed, *losses):
    return {"mode": mode, "seed": seed, "losses": list(losses)}


def test_final_losses_are_judged_by_the_spread_of_seeds():
    atens = [run("aten", 0, 9.0, 2.0, 2.0), run("aten", 1, 9.0, 2.1, 2.1), run("aten", 2, 9.0, 2.2, 2.2)]
    judged = Judgement.of([*atens, run("eager", 0, 9.5, 2.25, 2.25), run("patched", 0, 9.0, 2.4, 2.4)], 2)
    assert judged.spread == pytest.approx(0.2) and judged.mean == pytest.approx(2.1) and judged.noise == 0.0
    assert judged.wrong == ["patched"] and judged.apart["eager"] == 0.5
    assert Judgement.of([*atens, run("eager", 0, 9.0, 2.0, float("nan"))], 2).wrong == ["eager"]


def test_final_losses_are_judged_by_the_noise_of_steps():
    """One seed has no spread; its steps scatter."""
    judged = Judgement.of([run("aten", 0, 9.0, 2.0, 3.0), run("eager", 0, 9.0, 2.2, 3.2)], 2)
    assert judged.spread == 0.0 and judged.noise == pytest.approx(statistics.stdev([2.0, 3.0]) / 2**0.5)
    assert not judged.wrong


def test_tokens_are_those_of_the_text():
    text = library_text(3000)
    assert len(text) == 3000
    vocabulary = Vocabulary.of(text, BYTES + 20)
    assert len(vocabulary.ids) == 20 and vocabulary.ids == Vocabulary.of(text, BYTES + 20).ids
    pieces = {token: piece.encode() for piece, token in vocabulary.ids.items()}
    tokens = vocabulary.encode(text + "é").tolist()
    assert b"".join(pieces.get(token, bytes([token % 256])) for token in tokens).decode() == text + "é"
    assert max(tokens) < BYTES + 20


def test_the_model_has_aquilas_proportions():
    whole = scaled(4096)
    assert (whole.layers, whole.inner, whole.vocabulary, whole.head) == (32, 11008, 100032, HEAD)
    assert scaled(896) == Settings()
    widths = [width_for(size, 1024, 8) for size in (1, 16, 140)]
    assert widths == sorted(set(widths)) and all(width % HEAD == 0 for width in widths)


def test_learning_rates_grow_and_fall():
    own = Settings(steps=100, rate=1.0)
    rates = [own.learning_rate(step) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and max(rates) == 1.0 and 0.1 <= rates[-1] < 0.11


def stored(*runs):
    """Return results as the tool stores them."""
    given = {"tokens_per_second": 10.0, "peak_bytes": 2**30, "parameters": 10**8}
    runs = [each | given for each in runs]
    return {
        "commit": "abc",
        "device": "a GPU",
        "torch": "2.11",
        "settings": {"layers": 7, "width": 896, "steps": 3, "batch": 8, "sequence": 1024},
        "judgement": vars(Judgement.of(runs, 2)),
        "runs": runs,
    }


def test_the_page_has_a_row_for_each_run(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(training_page, "RESULTS", tmp_path)
    monkeypatch.setattr(training_page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr("sys.argv", ["training_page"])
    assert training_page.main() == 0 and "There are no results yet" in training_page.PAGE.read_text()
    runs = run("aten", 0, 9.0, 2.0, 2.2), run("aten", 1, 9.0, 2.1, 2.1), run("eager", 0, 9.5, 2.2, 2.0)
    (tmp_path / "training.json").write_text(json.dumps(stored(*runs)))
    monkeypatch.setattr("sys.argv", ["training_page", "--check"])
    assert training_page.main() == 1
    monkeypatch.setattr("sys.argv", ["training_page"])
    assert training_page.main() == 0
    page = training_page.PAGE.read_text()
    assert "| ATen, seed 1 | 2.1000 | 10 | 1.00 | 1.00 GiB |  |" in page
    assert "| `enable()`, seed 0 | 2.1000 | 10 | 1.00 | 1.00 GiB | 0.500 |" in page
    assert (tmp_path / "page.png").stat().st_size > 10_000
