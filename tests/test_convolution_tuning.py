"""Timing and fitting of convolutions' tiles, on times that the model itself has made up."""

import random

import pytest
import torch

from tritonite import devices
from tritonite.bench.convolution import Layer
from tritonite.engine.convolution import select
from tritonite.engine.convolution.problem import Problem
from tritonite.engine.convolution.table import Tile
from tritonite.tuning import convolution, convolution_fit
from tritonite.tuning.convolution import Timed


def _made_up(filters, monkeypatch):
    """Return times of problems that are the estimates with some tiles' costs, and launches."""
    monkeypatch.setattr(devices, "multiprocessors", lambda _: 132)
    draw = random.Random(1)
    tiles = [Tile(128, 128, 64, 8, 3, 1, 0.45, 0.6, 2.0), Tile(64, 32, 64, 4, 4, 3, 0.12, 0.3, 1.0)]
    tiles.append(Tile(64, 64, 64, 4, 4, 3, 0.16, 0.33, 1.2))
    estimate, device = select.estimate_filters if filters else select.estimate, torch.device("cpu")
    for _ in range(60):
        columns, channels = draw.choice((32, 64, 128, 512)), draw.choice((3, 32, 64, 256))
        problem = Problem(torch.bfloat16, draw.choice((1, 8, 32)), draw.choice((49, 784)), columns, channels, 9, 1, 1)
        splits = [1] if filters else select.possible_splits(problem, tiles[-1], device)
        every = [tile._replace(splits=count) for tile in tiles for count in (splits[0], splits[-1])]
        times = [(tile, 3.0 + estimate(problem, tile, device)) for tile in every]
        yield Timed(problem, filters, 1000, 10.0, tuple(times))


@pytest.mark.parametrize("filters", [False, True])
def test_fit(filters, monkeypatch, tmp_path):
    timed = list(_made_up(filters, monkeypatch))
    convolution.save(timed, tmp_path / "times.json")
    assert convolution.load(tmp_path / "times.json") == timed
    monkeypatch.setattr(convolution_fit, "_STEPS", 300)
    assert any(
        line.startswith("    Tile(64, 64, 64, 4, 4, 3, 0.1") for line in convolution_fit.report(tmp_path / "times.json")
    )
    (fitted,) = convolution_fit.fits(timed).values()
    assert len(fitted.tiles) > 1
    assert fitted.regret < 1.05


def test_runs_are_of_their_layers():
    for run in convolution.runs()[::40]:
        operands = convolution._operands(run, "meta", empty=True)
        assert convolution._problem(run, *operands).rows > 0
        assert convolution._aten(run, operands).shape == operands[1 if run.filters else 2].shape


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_run_computes_what_aten_does(filters, transposed):
    layer = Layer(8, 16, (6,), 3, 2, 1, transposed=transposed, groups=2)
    run = convolution.Run(layer, 2, torch.float32, filters)
    x, weight, out = convolution._operands(run, "cpu" if devices.current.interpreted else "cuda")
    own = [x, weight.clone(), out.normal_()]
    expected = convolution._aten(run, own)
    convolution._call(run, own, convolution._problem(run, *own), Tile(16, 16, 16))
    torch.testing.assert_close(own[1 if filters else 2], expected, rtol=1e-4, atol=1e-4)
