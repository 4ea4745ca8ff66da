"""The page of models: tables of what was measured, and a plain sentence for what was not."""

import dataclasses

import models_page

from tritonite.bench.results import Machine, ModelResult, Run, Timing

MACHINE = {
    "device": "a GPU",
    "kind": "nvidia",
    "versions": {"torch": "2"},
    "commit": "abc",
    "command": "run",
    "date": "2026-01-01",
    "copy_bandwidth": 1.0,
}
ANSWER = {"prompt": "Who are you?", "aten": "I | am", "tritonite": "I | am", "tokens": 2, "agreed": 2, "cosine": 1.0}
ANSWER |= {"overall": 0.5, "from_float32": None}


def test_without_results_the_page_has_no_table():
    page = models_page.page(None, None)
    assert page.count("Not measured yet.") == 2 and "|" not in page


def test_answers_and_speeds():
    found = {"machine": MACHINE, "answers": {"float32": [ANSWER]}, "speeds": []}
    page = models_page.page(found, None)
    assert "| Who are you? | I \\| am | the same | 2 of 2 | 1.000000 | 0.500000 |" in page
    rounded = {**found, "answers": {"bfloat16": [ANSWER | {"from_float32": (0.25, 0.125)}]}}
    assert "| 0.500000 | 0.250000 | 0.125000 |" in models_page.page(rounded, None)
    assert "Tokens a second are not measured yet" in page
    speed = {"batch": 32, "cache": "static", "new_tokens": 64, "tokens_per_second": {"aten": 10.0, "tritonite": 20.0}}
    page = models_page.page({**found, "speeds": [speed]}, None)
    assert "| batch | cache | aten | tritonite |" in page and "| 32 | static | 10 | 20 |" in page


def zoo(kind, **fields):
    result = ModelResult("toy", "forward", "float32", 1, 6, {}, {}, similarities={"every kernel": 1.0}, **fields)
    return models_page.page(None, Run(Machine(**{**MACHINE, "kind": kind}), models=[result]))


def test_the_zoo_in_the_interpreter_has_no_times():
    page = zoo(
        "interpreter", call_shares={"every kernel": 0.5}, unserved=[("rand", "no kernel", 2), ("detach_", "", 1)]
    )
    assert "| model | pass | similarity, eager | calls served | served by ATen |" in page
    assert "| toy | forward | 1.000000 | 50.0% | `rand` (2): no kernel |" in page and "need a GPU" in page


PASSES = (("unet", "forward"), ("unet", "train"), ("vae", "train"))


def test_passes_without_results_on_a_gpu_are_named():
    results = [ModelResult(f"{name} channels-last", phase, "float32", 1, 6, {}, {}) for name, phase in PASSES]
    small, large = Run(Machine(**{**MACHINE, "kind": "interpreter"}), models=results), Run(Machine(**MACHINE))
    large.models.append(dataclasses.replace(results[1], model="unet"))
    page = models_page.page(None, small, large)
    assert "## The zoo on a GPU" in page and "Not measured on a GPU yet: unet forward, vae train." in page
    large.models.extend(results)
    assert "on a GPU yet" not in models_page.page(None, small, large)


def test_the_zoo_on_a_gpu_has_speeds():
    times = {name: Timing(value, value, value) for name, value in (("aten", 4.0), ("every kernel", 2.0))}
    result = ModelResult(
        "toy",
        "train",
        "float32",
        1,
        6,
        times,
        times,
        similarities={"every kernel": 1.0, "compiled": 0.5},
        device_times={"aten": 3.0, "every kernel": 1.0},
        device_shares={"every kernel": 0.9},
    )
    page = models_page.page(
        None, Run(Machine(**MACHINE), models=[result, ModelResult(*"abc", 1, 1, {}, {}, failure="no")])
    )
    assert "profiled passes: eager.\n" in page and "| device x, eager | wall x, eager | wall x, compiled |" in page
    assert "| toy | train | 1.000000 | 0.500000 |  | 90.0% | 3.00 | 2.00 |  |  |" in page
    assert "| a | b | no |" in page


def test_the_stored_page_is_current():
    assert models_page.PATH.exists()
