"""The fuzzer: that it sees each class of difference, that it goes on after a crash, and a short run of it."""

import sys

import pytest
import torch
from conftest import FULL

import tritonite
from tritonite.dtypes import FLOATS, NUMBERS, SINGLE_FLOATS
from tritonite.install.override import select
from tritonite.install.python import record_dry
from tritonite.registry.schema import in_schema_order
from tritonite.runtime.stats import totals
from tritonite.testing.fuzz import Call, Tally, check, draw, fuzz, fuzz_one, run
from tritonite.testing.fuzz.check import Copies, Outcome, difference, outcome_in_float64
from tritonite.testing.fuzz.draw import Drawer
from tritonite.testing.fuzz.run import _Task, _Worker
from tritonite.testing.samples import samples
from tritonite.testing.samples.boundaries import RULES, _are_exact


def outcomes(overload, arguments, ours, change=lambda call: None):
    """Return (the call, ATen's outcome, the outcome in which the result is `ours`, after `change`)."""
    call = Call(tritonite.overloads()[overload], arguments)
    expected, actual = call.map(Copies()), call.map(Copies())
    result = expected.run()
    change(actual)
    return call, Outcome(result, expected), Outcome(ours(actual, result), actual)


def x():
    return torch.tensor([[1.0, -2.0], [3.0, 4.0]], device=tritonite.device)


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        ("value", lambda call, result: result + 1),
        ("value", lambda call, result: result * float("nan")),
        ("dtype", lambda call, result: result.double()),
        ("shape", lambda call, result: result[:1]),
        ("strides", lambda call, result: result.t().contiguous().t()),
        ("alias", lambda call, result: call.arguments["self"].copy_(result)),
        ("results", lambda call, result: (result, result)),
        ("raises", lambda call, result: RuntimeError("no")),
    ],
)
def test_a_difference_is_seen(kind, ours):
    found = difference(*outcomes("neg", {"self": x()}, ours), True)
    assert found is not None and found[0] == kind


def test_sums_of_the_largest_numbers_are_judged():
    """The squares of these numbers overflow float64."""
    given = {"self": torch.full((2, 3), 1e300, dtype=torch.float64, device=tritonite.device), "dim": [1]}
    call = outcomes("sum.dim_IntList", given, lambda call, result: result.clone())
    assert difference(*call, True) is None


def test_equal_results_are_no_finding():
    assert difference(*outcomes("neg", {"self": x()}, lambda call, result: result.clone()), True) is None


def test_missing_and_different_errors_are_findings():
    call, expected, actual = outcomes("neg", {"self": x()}, lambda call, result: result)
    assert difference(call, Outcome(ValueError("no"), call), actual, True)[0] == "answers"
    assert difference(call, Outcome(ValueError("no"), call), Outcome(TypeError("no"), call), True)[0] == "exception"
    assert difference(call, Outcome(ValueError("no"), call), Outcome(ValueError(""), call), True) is None
    assert expected.raised is False


def test_a_stray_write_is_found():
    room = torch.zeros(9, device=tritonite.device)

    def spill(call):
        call.run()
        call.arguments["out"].untyped_storage()[4 * 3] = 1

    call = {"self": torch.ones(4, device=tritonite.device), "out": room[:8:2]}
    assert difference(*outcomes("neg.out", call, lambda call, result: call.arguments["out"], spill), True)[0] == "stray"


def test_running_statistics_are_written_where_no_schema_says_so():
    """A byte of running statistics that ATen happens not to change is no stray write."""
    rows = torch.ones(2, 3, dtype=torch.float64, device=tritonite.device)
    given = {
        "input": rows,
        "mean": rows,
        "invstd": rows,
        "running_mean": rows[0].clone(),
        "running_var": rows[1].clone(),
    }
    given |= {"momentum": 0.25, "eps": 1e-3, "counts": rows[0, :2]}
    call = Call(tritonite.overloads()["batch_norm_gather_stats_with_counts"], given)
    expected, actual = call.map(Copies()), call.map(Copies())
    actual.arguments["running_mean"] += torch.finfo(torch.float64).eps
    results = [Outcome((rows[0], rows[1]), each) for each in (expected, actual)]
    assert difference(call, *results, True) is None
    actual.arguments["invstd"] += 1
    assert difference(call, *results, True)[0] == "stray"


def test_running_statistics_are_compared_where_no_schema_says_that_they_are_written():
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(tritonite.device)
    given = {"input": rows, "weight": None, "bias": None, "running_mean": rows[0].clone(), "running_var": rows[1].abs()}
    given |= {"training": True, "momentum": 0.25, "eps": 1e-3}
    call = Call(tritonite.overloads()["native_batch_norm"], given)
    expected, actual = call.map(Copies()), call.map(Copies())
    results = [Outcome(each.run(), each) for each in (expected, actual)]
    assert difference(call, *results, True) is None
    actual.arguments["running_var"] *= 0.8
    assert difference(call, *results, True)[0] == "value"


def test_a_call_is_the_same_each_time_it_is_drawn():
    for number in range(20):
        first, second = (draw(tritonite.overloads()["addmm.out"], 3, number) for _ in range(2))
        assert str(first) == str(second)
    assert str(draw(tritonite.overloads()["addmm.out"], 4, 0)) != str(draw(tritonite.overloads()["addmm.out"], 3, 0))


@pytest.mark.parametrize("overload", ["index.Tensor", "_unsafe_index_put"])
def test_lists_of_indices_have_none_anywhere(overload):
    lists = [arguments["indices"] for arguments in drawn(overload)]
    assert any(x and x[0] is None for x in lists) and any(x and x[0] is not None for x in lists)


def test_an_answer_where_aten_lacks_a_kernel_is_judged_by_wider_floats():
    call, expected, actual = outcomes("sqrt", {"self": x().abs().bfloat16()}, lambda call, result: result)
    refused = expected._replace(result=NotImplementedError("\"sqrt_cuda\" not implemented for 'BFloat16'"))
    assert difference(call, refused, actual, True) is None
    assert difference(call, refused, actual._replace(result=actual.result + 1), True)[0] == "answers"
    assert difference(call, expected._replace(result=RuntimeError("refused")), actual, True)[0] == "answers"
    no_engine = expected._replace(result=RuntimeError("GET was unable to find an engine to execute this computation"))
    assert difference(call, no_engine, actual, True) is None
    assert difference(call, no_engine, actual._replace(result=actual.result + 1), True)[0] == "answers"


def drawn(overload, count=300):
    """Return drawn calls of an overload, with tensors and numbers by name."""
    return [draw(tritonite.overloads()[overload], 56, number).arguments for number in range(count)]


@pytest.mark.parametrize("overload", ["floor_divide", "floor_divide_.Tensor", "div.Tensor_mode", "floor_divide.Scalar"])
def test_quotients_that_round_to_an_integer_from_below_are_drawn(overload):
    """The floor of such a quotient is one less than the floor of the rounded quotient."""
    found = 0
    for given in drawn(overload):
        if not all(isinstance(given[name], (float, torch.Tensor)) for name in ("self", "other")):
            continue
        operands = [torch.as_tensor(given[name]) for name in ("self", "other")]
        if operands[1].shape not in ((), operands[0].shape) or not all(x.dtype in SINGLE_FLOATS for x in operands):
            continue
        x, y = (each.float() for each in operands)
        quotient = x / y
        whole = (quotient == quotient.floor()) & (quotient.abs() < 1000)
        found += int((whole & (quotient.double() * y.double() != x.double())).sum())
    assert found > 3


@pytest.mark.parametrize(
    ("overload", "is_at_boundary"),
    [
        ("round", lambda x, given: x.frac().abs() == 0.5),
        ("round.decimals", lambda x, given: x * 10.0 ** min(given["decimals"], 9) % 1 == 0.5),
        ("trunc", lambda x, given: (x != x.round()) & ((x - x.round()).abs() < 1e-5)),
        ("asin", lambda x, given: x.abs() == 1),
        ("erfinv", lambda x, given: (x.abs() < 1) & (x.abs() > 1 - 1e-6)),
        ("log", lambda x, given: (x != 0) & (x.abs() < 1e-37)),
        ("threshold", lambda x, given: (x != 0) & (x == given["threshold"])),
        ("histc", lambda x, given: x == given["max"]),
        ("pow.Tensor_Scalar", lambda x, given: x == 27),
        ("add.Tensor", lambda x, given: x.abs() == 2.0**-8),
    ],
)
def test_values_at_which_operators_decide_are_drawn(overload, is_at_boundary):
    found = 0
    for given in drawn(overload):
        x = given["self"]
        if x.dtype in FLOATS and not any(isinstance(value, complex) for value in given.values()):
            found += int(is_at_boundary(x.double(), given).sum())
    assert found > 3


def test_ties_and_equal_keys_are_drawn():
    ties = [given["self"] for given in drawn("topk") if given["self"].numel() > 8]
    assert any(len(x.unique()) <= 3 for x in ties if x.is_floating_point() and not x.isnan().any())
    keys = [(given["self"], given["sorted_sequence"]) for given in drawn("searchsorted.Tensor")]
    keys = [pair for pair in keys if all(isinstance(each, torch.Tensor) and each.dtype in FLOATS for each in pair)]
    keys = [(x.contiguous(), bounds.contiguous()) for x, bounds in keys]
    assert any(x.numel() > 8 and bool(torch.isin(x, bounds).all()) for x, bounds in keys)


def test_integers_that_wrap_around_are_drawn():
    pairs = [(given["self"], given["other"]) for given in drawn("mul.Tensor")]
    pairs = [pair for pair in pairs if all(isinstance(x, torch.Tensor) and x.dtype is torch.int32 for x in pair)]
    found = 0
    for x, y in pairs:
        if x.shape == y.shape:
            found += int((x.long() * y.long() != (x * y).long()).sum())
    assert found


# Overloads of which no kernel serves a drawn call here, and why.
NEVER_SERVED = {
    "_slow_conv2d_backward.grad_input": "no functional overload gives the shapes of three outputs",
    "fractional_max_pool2d_backward.grad_input": "ATen on a CPU ends the process for some indices",
}
DRAWN = sorted(set(select(None)) - NEVER_SERVED.keys())


@pytest.mark.skipif(tritonite.device != "cpu", reason="ATen on a GPU may end the process for some drawn outputs")
@pytest.mark.parametrize("part", range(24) if FULL else [0])
def test_kernels_serve_drawn_calls_of_every_overload(part):
    """Without the full set, one overload of 24. `tritonite verify --fuzz` reports overloads that it finds unserved."""
    unserved = [name for name in DRAWN[part::24] if not any(map(serves, drawn_calls(name, 200)))]
    assert not unserved


def drawn_calls(overload, count):
    return (draw(tritonite.overloads()[overload], 7, number) for number in range(count))


def serves(call):
    """Return whether a kernel would serve a call, which is recorded without a launch."""
    try:
        record_dry(call.op, in_schema_order(call.op.schema, (), call.arguments))
    except Exception:  # noqa: BLE001 - host functions raise any of them for what they are not asked to serve
        return False
    return True


def test_operators_that_no_kernel_serves_are_reported():
    tally = Tally()
    tally.calls_of.update({"neg": 300, "abs": 300, "exp": 3})
    tally.served_of.update({"neg": 1})
    assert tally.never_served() == ["abs"]


@pytest.mark.parametrize("overload", ["_foreach_pow.Scalar_out", "eye.m_out", "_linalg_slogdet.sign"])
def test_outputs_fit_in_many_calls(overload):
    """Overloads of one packet may have arguments of the same names, and factories have options besides."""
    assert sum(map(serves, drawn_calls(overload, 200))) > 10


def test_an_operator_has_values_at_which_it_decides():
    for packet in RULES:
        assert hasattr(torch.ops.aten, packet)
        names = [op.overload for op in tritonite.overloads().values() if op.packet == packet and op.has_place]
        assert not names or any(map(boundaries_of, names)), packet


def test_edges_of_a_histogram_are_drawn_where_all_processors_round_alike():
    assert _are_exact([-2.0, -1.0, 0.0, 1.0], torch.float32) and _are_exact([0.0, 0.5, 1.0], torch.float16)
    assert not _are_exact([-2 + 0.9 * i for i in range(6)], torch.float64)
    assert not _are_exact([0.0, 4097.0, 8194.0], torch.float16)


def test_complex_outputs_of_many_dimensions_are_drawn():
    drawer = Drawer(tritonite.overloads()["relu.out"], 0, 0)
    assert drawer._values((1,) * 64 + (3,), torch.complex64).shape == (1,) * 64 + (3,)


def test_a_reference_leaves_float64_arguments_as_they_were():
    op = tritonite.overloads()["batch_norm_gather_stats"]
    call = Call(op, next(samples(op, torch.float64, tritonite.device)).named(op))
    before = call.map(Copies())
    assert not outcome_in_float64(call).raised
    for name, value in before.arguments.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, call.arguments[name]), name


@pytest.mark.parametrize("overload", ["_fused_adam_", "_fused_adagrad"])
def test_no_drawn_weight_decay_cancels_a_gradient(overload):
    """The step is the quotient of the gradient and its size, or `eps`, so that a cancelled gradient is roundoff."""
    decays = 0
    for given in drawn(overload, 100):
        decay, scale = given["weight_decay"], given["grad_scale"]
        if not isinstance(decay, float):
            continue
        for param, grad in zip(given["self"], given["grads"], strict=True):
            # PyTorch indexes no tensor of more than 64 dimensions.
            param, grad = param.double().flatten(), grad.double().flatten() / (1 if scale is None else float(scale))
            decayed = grad + decay * param * (-1 if given["maximize"] else 1)
            assert not (decayed.abs() < grad.abs() / 16).any()
            decays += int((decayed != grad).sum())
    assert decays > 100


@pytest.mark.parametrize("overload", ["_upsample_bicubic2d_aa.out", "_upsample_bilinear2d_aa.out"])
def test_no_drawn_output_has_rows_that_aten_repeats(overload):
    if tritonite.backend.aten != "cpu":
        pytest.skip("ATen's GPU kernels write rows at any stride")
    outs = [given["out"] for given in drawn(overload)]
    assert not any(x.dim() == 4 and x.numel() and x.stride(2) == 1 and x.shape[3] > 1 for x in outs)
    assert any(x.dim() == 4 and x.numel() and not x.is_contiguous() for x in outs)


@pytest.mark.parametrize("overload", ["upsample_linear1d_backward", "_upsample_bilinear2d_aa_backward"])
def test_no_infinite_gradient_of_a_resampling_is_drawn(overload):
    every = [given["grad_output"] for given in drawn(overload)]
    grads = [x.flatten() for x in every if isinstance(x, torch.Tensor) and x.dtype in FLOATS]
    assert not any(x.isinf().any() for x in grads) and any(x.isnan().any() for x in grads)


@pytest.mark.parametrize("overload", ["grid_sampler_2d", "grid_sampler_3d.out", "grid_sampler_3d_backward"])
def test_grids_are_drawn_whose_positions_are_numbers_on_a_cpu(overload):
    if tritonite.backend.aten != "cpu":
        pytest.skip("ATen's GPU kernels have one answer for nan")
    every = [given["grid"] for given in drawn(overload)]
    # PyTorch indexes no tensor of more than 64 dimensions.
    grids = [x.flatten() for x in every if isinstance(x, torch.Tensor) and x.dtype in FLOATS]
    assert grids and all(x.isfinite().all() for x in grids)


@pytest.mark.parametrize("overload", ["mul.Tensor", "div.Tensor", "_foreach_mul.Tensor", "_foreach_div.List"])
def test_factors_of_one_element_are_drawn_that_16_bit_floats_represent(overload):
    """ATen's CPU kernels multiply by the factor as it is, and GPU kernels by the rounded one."""
    if tritonite.backend.aten != "cpu":
        pytest.skip("ATen's GPU kernels round the factor")
    found = 0
    for given in drawn(overload):
        own, other = ([x] if not isinstance(x, list) else x for x in (given["self"], given["other"]))
        for x, y in zip(own, other * len(own) if len(other) == 1 else other, strict=False):
            floats = isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16)
            if floats and isinstance(y, torch.Tensor) and y.numel() == 1 and y.dtype in NUMBERS:
                found += x.dtype is not y.dtype
                rounded = y.double().to(x.dtype).double()
                assert torch.equal(rounded, y.double()) or y.isnan() or y.isinf()
    assert found


def boundaries_of(overload):
    op = tritonite.overloads()[overload]
    return [x for x in samples(op, torch.float32, tritonite.device) if x.label.startswith("boundaries")]


def test_one_call_is_checked_by_its_number():
    assert fuzz_one("add.Tensor", 1, 2) is None


def ended(whose, way="check", turn=7, first=7):
    """Return a worker whose process has ended in the middle of a call of a turn, after others since the first."""
    worker = _Worker.__new__(_Worker)
    worker.seed, worker.at, worker.ended, worker.turn = 1, ("neg", 5, "neg(...)", whose), False, turn
    worker.process = type("Process", (), {"exitcode": -11})
    worker.task = _Task(first) if way == "check" else _Task(first, way, 3, turn)
    worker.second, worker.unstarted, worker.finished, worker.next = False, False, False, None
    worker.error = ""
    return worker


ENDED = "exit code -11"


def test_a_process_that_ends_in_its_first_call_is_a_finding():
    worker, tally = ended("tritonite"), Tally()
    assert worker.stopped("crash", tally).kind == "crash" and worker.next == _Task(8) and not tally.aten_crashes


def test_aten_repeats_its_runs_before_a_process_that_ends_is_a_finding():
    worker, tally = ended("tritonite", first=3), Tally()
    assert worker.stopped("crash", tally) is None and worker.next == _Task(3, "aten", 3, 7, ENDED)
    worker = ended("aten", first=3)
    assert worker.stopped("crash", tally) is None and worker.next == _Task(7, "alone", 3, 7, ENDED)
    worker.task, worker.next = worker.next, None
    assert worker.unexplained() is None and worker.next == _Task(3, "aten", 3, 7, ENDED)
    worker.task = worker.next
    found = worker.unexplained()
    assert (found.kind, worker.next, tally.aten_crashes) == ("crash", _Task(8), []) and ENDED in found.detail


def test_a_finding_names_the_error_of_the_device():
    worker, tally = ended("tritonite"), Tally()
    worker.connection = type("Connection", (), {"recv": lambda self: ("error", "CUDA error: an illegal access")})()
    assert worker.receive(tally) is None
    assert worker.stopped("crash", tally).detail == "tritonite: CUDA error: an illegal access"


@pytest.mark.parametrize("way", ["alone", "aten"])
def test_a_process_that_atens_runs_end_is_no_finding(way):
    worker, tally = ended("aten", way), Tally()
    assert worker.stopped("crash", tally) is None and worker.next == _Task(8) and len(tally.aten_crashes) == 1


def test_a_process_that_ends_before_its_first_call_is_started_once_more():
    worker, tally = ended("tritonite"), Tally()
    worker.at = None
    assert worker.stopped("crash", tally) is None and worker.next == worker.task
    worker.second, worker.unstarted = True, False
    assert worker.stopped("crash", tally).kind == "start" and worker.next == _Task(8)


class Said:
    """A connection that keeps the messages of a process."""

    def __init__(self):
        self.all = []

    def send(self, told):
        self.all.append(told)

    def findings(self):
        return [value for kind, value in self.all if kind == "finding"]


@pytest.fixture
def work(monkeypatch):
    """Run one round of a worker in this process."""
    monkeypatch.setattr(run.os, "dup2", lambda *_: None)
    monkeypatch.setenv("TRITONITE_NATIVE", "1")
    threads = torch.get_num_threads()

    def turn(name, *task):
        said = Said()
        run._work(said, run.Chosen([name], []), 3, 0, 1, 1, _Task(*task or (0,)))
        return said

    yield turn
    torch.set_num_threads(threads)


def test_atens_runs_in_float64_are_repeated_too(work, monkeypatch):
    dtypes = []
    # The package has a function of the module's name.
    checking = sys.modules[Copies.__module__]
    run_once = checking.outcome
    monkeypatch.setattr(checking, "outcome", lambda call: dtypes.append(call.arguments["self"].dtype) or run_once(call))
    work("neg", 0, "aten", 0, 2)
    assert len(dtypes) == 6 and torch.float64 in dtypes


def test_lists_with_flags_have_a_reference_in_float64():
    lists = {"self": [torch.tensor([True]), torch.tensor([-89.16791])], "out": [torch.empty(1), torch.empty(1)]}
    wide = outcome_in_float64(Call(tritonite.overloads()["_foreach_sinh.out"], lists))
    found = wide.call.arguments["out"][1]
    assert found.dtype is torch.float64 and found.isfinite().all()


@pytest.mark.parametrize("case", [("_foreach_sinh.out", 14), ("tritonite::linear_simpo", 112)])
def test_roundoff_is_no_finding(case):
    assert fuzz_one(case[0], 30116001, case[1]) is None


def test_the_comparison_is_atens():
    said = []
    assert check(draw(tritonite.overloads()["neg"], 1, 0), said.append) is None
    assert said == ["aten", *2 * ["tritonite", "aten"]]


def test_atens_runs_are_repeated_without_kernels(work):
    said = work("neg", 0, "aten", 0, 2)
    assert not said.findings() and said.all[-1] == ("finished", None) and totals().launched == 0
    turns = [value[0] for kind, value in said.all if kind == "at"]
    assert turns == [0, 0, 1, 1, 2, 2] and all(value[-1] == "aten" for kind, value in said.all if kind == "at")


def test_an_error_of_the_fuzzer_is_a_finding(work, monkeypatch):
    def draw(*_):
        raise NotImplementedError("an argument of type Dict")

    monkeypatch.setattr(run, "draw", draw)
    assert [finding.kind for finding in work("neg").findings()] == ["fuzzer"]


def test_a_short_run_finds_nothing(monkeypatch):
    """Two processes make two calls of every overload, or one of every sixth; test_fuzz_fused.py has fused operators."""
    monkeypatch.setattr(run, "named_fused", lambda names: [])
    tally, overloads = Tally(), len(select(None))
    turns = overloads if FULL else -(-overloads // 12)
    findings = list(fuzz(600, None, 20261122, 2, tally, turns))
    assert not findings, "\n".join(map(str, findings))
    assert tally.calls + len(tally.aten_crashes) == 2 * turns and tally.served > tally.calls / 3


def _bounds(dtype):
    info = torch.finfo(dtype)
    return {info.min, info.max}


@pytest.mark.skipif(tritonite.device != "cpu", reason="of ATen's kernel for CPUs")
@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_calls_of_attention_have_masks_of_every_kind(suffix):
    """Masks hold the extreme finite numbers and -inf. Scales have any sign. There is one query, or many."""
    op = tritonite.overloads()[f"_scaled_dot_product_flash_attention_for_cpu{suffix}"]
    met = set()
    for number in range(250):
        arguments = draw(op, 5, number).arguments
        queries, keys, scale = arguments["query"].shape[2], arguments["key"].shape[2], arguments["scale"]
        met |= {"one query over many" if keys > 200 else "one query"} if queries == 1 else set()
        met |= {"negative"} if scale < 0 else {"zero"} if scale == 0 else set()
        mask = arguments["attn_mask"]
        if isinstance(mask, torch.Tensor) and mask.is_floating_point() and mask.numel():
            met |= {bound for bound in _bounds(mask.dtype) if mask.eq(bound).any()}
            met |= {"-inf"} if mask.isneginf().any() else set()
            met |= {"a row"} if mask.eq(min(_bounds(mask.dtype))).all(-1).any() else set()
    extremes = {bound for dtype in (torch.float32, torch.bfloat16) for bound in _bounds(dtype)}
    assert met >= {"one query", "one query over many", "negative", "zero", "-inf", "a row"} | extremes
