"""Regression cases name attributes that exist, and the alternative is what runs inside `chosen_otherwise`."""

import pytest
import torch
from typer.testing import CliRunner

import tritonite
from tritonite import cli, registry
from tritonite.bench.regressions import cases, measure
from tritonite.bench.regressions.cases import Measured, Regression, chosen_otherwise
from tritonite.bench.results import Timing
from tritonite.engine.rows import table
from tritonite.install import library


@pytest.mark.parametrize("name", cases())
def test_a_case_names_an_operator_and_attributes(name):
    case = cases()[name]
    assert case.op in {**registry.overloads(), **library.registered()}
    assert case.alternative and case.gain > 0
    with chosen_otherwise(case.alternative):
        pass


def test_a_field_of_a_table_is_replaced_and_put_back():
    before = table.ROWS["nvidia"].few
    with chosen_otherwise({"tritonite.engine.rows.table.ROWS[nvidia].few": table.Regime(2, 2)}):
        assert table.ROWS["nvidia"].few == table.Regime(2, 2)
    assert table.ROWS["nvidia"].few == before


@pytest.mark.parametrize(
    "name, error",
    [
        ("tritonite.engine.rows.table.ROWS[nvidia].none", AttributeError),
        ("tritonite.engine.rows.table.ROWS[none such].few", KeyError),
        ("tritonite.engine.rows.blocks._none", AttributeError),
    ],
)
def test_a_name_that_does_not_exist_raises(name, error):
    with pytest.raises(error), chosen_otherwise({name: 0}):
        pass


def test_a_gain_of_less_than_half_of_the_expected_one_no_longer_pays():
    case = Regression("c", "add.Tensor", tuple, {}, 1.44)
    measured = lambda choice, other: Measured(case, Timing(choice, choice, choice), Timing(other, other, other))
    assert measured(10.0, 12.1).pays and not measured(10.0, 11.9).pays


@pytest.mark.skipif(tritonite.device == "cuda", reason="measures for minutes on a GPU")
def test_the_command_line_asks_for_a_gpu():
    result = CliRunner().invoke(cli.app, ["bench", "--regressions"])
    assert result.exit_code == 2 and "needs a GPU" in result.output


@pytest.mark.skipif(tritonite.device != "cuda", reason="CUDA graphs need a GPU")
def test_both_ways_of_a_case_are_timed():
    case = next(iter(cases().values()))
    found = measure(case, rounds=2)
    assert found.choice.median > 0 and found.alternative.median > 0
    torch.cuda.synchronize()
