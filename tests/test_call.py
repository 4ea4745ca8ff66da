"""The contract between a call and its host function, through the native dispatcher and through Python."""
# Over 500 lines: one subject, the arguments of a call on both paths, whose cases share the operators declared here.

import contextlib
import sys
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

import tritonite
from tritonite import devices
from tritonite.devices.cuda import CudaRuntime
from tritonite.engine.gemm import product
from tritonite.errors import CapturedInPart, Decline
from tritonite.install import override, python
from tritonite.runtime import compilation, contract
from tritonite.runtime.symbols import zero_or_one
from tritonite.testing.samples import samples
from tritonite.testing.stand_in import standing_in

BLOCK = 64


@pytest.fixture(autouse=True)
def every_path(path):
    """Run all tests of this module on both paths."""


@pytest.fixture
def replays(path):
    """Return how often a host function runs in many calls of a kind: once if calls are recorded."""
    return lambda calls: 1 if path == "native" else calls


@tritonite.libentry()
@triton.jit(do_not_specialize=["n"])
def _add_number(source, target, number: tl.float64, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + index, mask=index < n)
    tl.store(target + index, value + tl.full((), number, tl.float64).to(value.dtype), mask=index < n)


@tritonite.libentry()
@triton.jit
def _count(source, counts, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(source + index, mask=index < n, other=0) != 0
    tl.atomic_add(counts, tl.sum(found.to(tl.int64)))


@tritonite.libentry()
@triton.jit
def _places(source, target, n, BLOCK: tl.constexpr):
    """Write the indices of nonzero elements, by one program."""
    index = tl.arange(0, BLOCK)
    found = tl.load(source + index, mask=index < n, other=0) != 0
    place = tl.cumsum(found.to(tl.int64), axis=0) - 1
    tl.store(target + place, index.to(tl.int64), mask=found & (index < n))


@tritonite.libentry()
@triton.jit(do_not_specialize=["number"])
def _store(target, number: tl.int64):
    tl.store(target, number)


@tritonite.libentry()
@triton.jit(do_not_specialize=["count"])
def _fill_with_count(target, count: tl.int64, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.full((BLOCK,), count, tl.int64), mask=index < count)


def _plus(x, number):
    result = contract.empty(x.shape, x.dtype, x.device)
    _add_number[(triton.cdiv(x.numel(), BLOCK),)](x, result, number, x.numel(), BLOCK=BLOCK)
    return result


def test_numbers_passed_on_to_kernels_are_symbols_of_a_plan(device, replays):
    x = torch.arange(6.0, device=device)
    with standing_in("constant_pad_nd", lambda x, pad, value: _plus(x, value)) as runs:
        for number in (0.5, -2.0, 0.0, float("inf"), 1.0):
            assert torch.equal(torch.constant_pad_nd(x, [0, 0], number), x + number)
        assert len(runs) == replays(5)


def test_numbers_that_a_host_function_branches_on_are_pinned(device, path):
    x = torch.arange(6.0, device=device)

    def host(x, p):
        return _plus(x, 1.0 if p > 2 else -1.0)

    above, below = (x + 1).tolist(), (x - 1).tolist()
    with standing_in("_pdist_forward", host, pin=("p",)) as runs:
        found = [torch.ops.aten._pdist_forward(x, p).tolist() for p in (4.0, 3.0, -2.0, 4.0)]
        assert found == [above, above, below, above]
        assert len(runs) == (3 if path == "native" else 4)
    if path == "native":
        unpinned = standing_in("_cdist_forward", lambda x, y, p, mode: host(x, p))
        with unpinned, pytest.raises(TypeError, match="not pinned"):
            torch.ops.aten._cdist_forward(x, x, 2.0, None)


def test_comparisons_with_0_and_1_do_not_pin_a_number(device, path):
    x = torch.arange(6.0, device=device)

    def host(x, value, *rest):
        return _plus(x, {0: 10.0, 1: 20.0, None: value}[zero_or_one(value)])

    with standing_in("full_like", host, pin_zero_or_one=("fill_value",)) as runs:
        found = [torch.full_like(x, a)[0].item() for a in (0.0, 1.0, 3.0, 4.0, 5.0, 1.0, 0.0)]
        assert found == [10, 20, 3, 4, 5, 20, 10]
        assert len(runs) == (3 if path == "native" else 7)


def test_lists_in_and_out(device, replays):
    """As in `_foreach_add`: a list of tensors, a scalar or a list of scalars, and a list of results."""

    def host(xs, number):
        numbers = number if isinstance(number, (list, tuple)) else [number] * len(xs)
        return ([_plus(x, value) for x, value in zip(xs, numbers, strict=True)],)

    xs = [torch.arange(float(n), device=device) for n in (3, 1, 5)]
    with standing_in("_foreach_add.Scalar", host) as runs:
        for number in (2.0, 3.5):
            found = torch._foreach_add(xs, number)
            assert isinstance(found, (list, tuple)) and all(map(torch.equal, found, [x + number for x in xs]))
        assert len(runs) == replays(2)
    with standing_in("_foreach_add.ScalarList", host) as runs:
        for numbers in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.5]):
            found = torch._foreach_add(xs, numbers)
            assert all(map(torch.equal, found, [x + number for x, number in zip(xs, numbers, strict=True)]))
        assert len(runs) == replays(2)


@pytest.mark.declines("no kernel serves the list")
def test_an_unserved_list_of_1500_tensors_goes_to_aten(device):
    def host(xs, number):
        raise Decline("lists are served later")

    flat = torch.arange(6000.0, device=device)
    lists = {
        "separate": [torch.full((4,), float(i), device=device) for i in range(1500)],
        "one after the other": list(flat.view(1500, 4)),
        "overlapping": [flat[i : i + 4] for i in range(1500)],
        "the same": [flat[:4]] * 1500,
    }
    with standing_in("_foreach_add.Scalar", host):
        for xs in lists.values():
            for _ in range(2):
                found = torch._foreach_add(xs, 2)
                assert len(found) == 1500 and all(torch.equal(a, b + 2) for a, b in zip(found, xs, strict=True))


def test_which_of_many_tensors_overlap_is_in_the_key(device, path):
    flat = torch.zeros(400, device=device)
    seen = []

    def host(xs, number):
        seen.append([x.data_ptr() - xs[0].data_ptr() for x in xs])
        for x in xs:
            _add_number[(1,)](x, x, number, x.numel(), BLOCK=BLOCK)
        return ()

    separate = [flat[20 * i : 20 * i + 8] for i in range(16)]
    moved = [flat[40 + 20 * i : 48 + 20 * i] for i in range(16)]
    overlapping = [flat[20 * i : 20 * i + 8] for i in range(15)] + [flat[284:292]]
    twice = separate[:15] + separate[:1]
    with standing_in("_foreach_add_.Scalar", host):
        for xs, recorded in ((separate, 1), (moved, 1), (overlapping, 2), (twice, 3), (separate, 3), (twice, 3)):
            expected = flat.clone()
            for x in xs:
                expected.as_strided(x.shape, x.stride(), x.storage_offset()).add_(1)
            torch.ops.aten._foreach_add_.Scalar(xs, 1)
            assert torch.equal(flat, expected)
            assert path == "python" or len(seen) == recorded


def test_sizes_that_data_decides(device, replays):
    def host(x):
        counts = contract.zeros((1,), torch.int64, x.device)
        _count[(triton.cdiv(x.numel(), BLOCK),)](x, counts, x.numel(), BLOCK=BLOCK)
        (count,) = contract.read(counts)
        # As on a GPU in ATen, the indices of a dimension are contiguous.
        result = contract.empty_strided((count, 1), (1, count), torch.int64, x.device)
        _places[(1,)](x, result, x.numel(), BLOCK=128)
        return result

    xs = [torch.zeros(100, device=device) for _ in range(4)]
    for x, n in zip(xs, (7, 0, 100, 31), strict=True):
        x[torch.randperm(100)[:n]] = 1
    with standing_in("linalg_eigvals", host) as runs:
        for x in xs:
            expected = x.cpu().numpy().nonzero()[0].tolist()
            found = torch.ops.aten.linalg_eigvals(x)
            assert found.shape == (len(expected), 1) and found.flatten().tolist() == expected
            assert found.stride() == (1, len(expected))
        assert len(runs) == replays(4)


def test_results_cut_to_a_length_that_data_decides(device, replays):
    def host(x):
        counts = contract.zeros((1,), torch.int64, x.device)
        _count[(1,)](x, counts, x.numel(), BLOCK=128)
        result = contract.empty((x.numel(),), torch.int64, x.device)
        _places[(1,)](x, result, x.numel(), BLOCK=128)
        (count,) = contract.read(counts)
        return contract.first(result, count)

    with standing_in("linalg_eigvals", host) as runs:
        for n in (7, 0, 100, 31):
            x = torch.zeros(100, device=device)
            x[torch.randperm(100)[:n]] = 1
            found = torch.ops.aten.linalg_eigvals(x)
            assert found.tolist() == x.cpu().numpy().nonzero()[0].tolist()
            assert found.stride() == (1,) and not found._is_view()
        assert len(runs) == replays(4)


def test_grids_arguments_and_results_that_data_decides(device, replays):
    def host(x):
        (count,) = contract.read(x)
        result = contract.empty((count,), torch.int64, x.device)
        _fill_with_count[(count.blocks(BLOCK),)](result, count, BLOCK=BLOCK)
        return result

    with standing_in("linalg_eigvals", host) as runs:
        for n in (5, 200, 0, 64):
            assert torch.ops.aten.linalg_eigvals(torch.tensor([n], device=device)).tolist() == [n] * n
        assert len(runs) == replays(4)

    def equal(x, other):
        counts = contract.zeros((1,), torch.int64, x.device)
        _count[(1,)](x, counts, x.numel(), BLOCK=BLOCK)
        return tuple(contract.read(counts))

    with standing_in("is_set_to", equal) as runs:
        x, y = torch.zeros(4, device=device), torch.zeros(4, device=device)
        assert x.is_set_to(y) is False
        assert (x + 1).is_set_to(y) is True
        assert len(runs) == replays(2)


def test_results_that_hold_the_seed_and_offset(device, replays):
    """The results are on the CPU, as in efficient attention, whose gradient takes them."""

    def host(x, *_):
        seed, offset = contract.random_state(x.device, 4)
        kept = contract.empty((1,), torch.int64, x.device)
        _store[(1,)](kept, seed)
        return kept, contract.held(seed), contract.held(offset)

    with standing_in("_unique2", host) as runs:
        seen = []
        for _ in range(3):
            kept, seed, offset = torch.ops.aten._unique2(torch.zeros(4, device=device))
            assert (seed.shape, seed.dtype, seed.device.type, offset.device.type) == ((), torch.int64, "cpu", "cpu")
            assert seed.item() == kept.item()
            seen.append((seed.item(), offset.item()))
        assert len(set(seen)) == 3 and len(runs) == replays(3)


def test_zeros_copies_and_views_of_another_dtype(device, replays):
    def host(x, diagonal):
        zeroed = contract.zeros(x.shape, x.dtype, x.device)
        _add_number[(1,)](zeroed, zeroed, 3.0, x.numel(), BLOCK=BLOCK)
        zeroed.t().copy_(x.t().contiguous() if x.dim() == 2 else x)
        doubles = x.t().to(torch.float64)
        return zeroed.view(torch.int32), doubles.view(torch.int64).clone()

    with standing_in("triu", lambda x, d: host(x, d)[0].view(torch.float32)) as runs:
        for _ in range(3):
            x = torch.randn(5, 5, device=device)
            assert torch.equal(torch.triu(x), x)
        assert len(runs) == replays(3)
    with standing_in("sort", lambda x, *_: host(x, 0)) as runs:
        for _ in range(3):
            x = torch.randn(4, 4, device=device)
            bits, doubles = torch.ops.aten.sort.default(x)
            assert torch.equal(bits, x.view(torch.int32))
            assert torch.equal(doubles, x.t().double().view(torch.int64))
        assert len(runs) == replays(3)


def test_results_of_mixed_types(device, replays):
    """Tensors, an int and None, as flash attention returns them."""
    name = "_scaled_dot_product_efficient_attention" if device == "cuda" else "_embedding_bag_forward_only"
    schema = getattr(torch.ops.aten, name).default._schema
    assert len(schema.returns) == 4

    def host(weight, indices, offsets, *rest):
        result = _plus(weight, 1.0)
        return result, result[:1], None, result.view(torch.int32)

    if device == "cuda":
        pytest.skip("an overload with these returns is on the CPU")
    weight, indices = torch.randn(4, 3), torch.tensor([0, 1])
    with standing_in(name, host) as runs:
        for _ in range(2):
            found = getattr(torch.ops.aten, name)(weight, indices, torch.tensor([0]))
            assert torch.equal(found[0], weight + 1) and torch.equal(found[1], weight[:1] + 1)
            assert torch.equal(found[3], (weight + 1).view(torch.int32))
        assert len(runs) == replays(2)


def test_ints_among_results(device, replays):
    def host(query, key, value, *rest):
        result = _plus(query, 2.0)
        return result, result[..., 0], None, None, query.shape[2], key.shape[2], None, None, None

    name = "_scaled_dot_product_flash_attention"
    query, key = torch.randn(1, 2, 4, 8, device=device), torch.randn(1, 2, 6, 8, device=device)
    with standing_in(name, host) as runs:
        for _ in range(2):
            found = getattr(torch.ops.aten, name)(query, key, key)
            assert torch.equal(found[0], query + 2) and found[4:6] == (4, 6)
        assert len(runs) == replays(2)


def test_calls_without_tensors(device, replays, path):
    seen = []

    def host(size, value, dtype=None, layout=None, device=None, pin_memory=None):
        seen.append((dtype, layout, device))
        result = contract.zeros(size, dtype or torch.get_default_dtype(), torch.device(device or tritonite.device))
        _add_number[(1,)](result, result, value, result.numel(), BLOCK=BLOCK)
        return result

    with standing_in("full", host) as runs:
        for value in (1.5, 2.5):
            assert torch.full((2, 3), value, device=device).tolist() == [[value] * 3] * 2
        assert len(runs) == replays(2)
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.full((2, 3), 1.5, device=device).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.full((2, 3), 1.5, dtype=torch.float16, device=device).dtype is torch.float16
        assert seen[-1][0] is torch.float16 and isinstance(seen[-1][2], torch.device)
        assert len(runs) == replays(2) + 2
        if torch.cuda.device_count() > 1:
            for index in (0, 1, 0):
                with torch.cuda.device(index):
                    assert torch.full((2, 3), 3.5, device="cuda").device.index == index


def test_host_functions_get_memory_formats_and_layouts(device):
    seen = []

    def clone(x, memory_format):
        seen.append(memory_format)
        return _plus(x, 0.0)

    with standing_in("clone", clone):
        x = torch.randn(2, 3, 4, 5, device=device)
        for memory_format in (torch.contiguous_format, torch.preserve_format, torch.channels_last):
            x.clone(memory_format=memory_format)
    assert [repr(each) for each in seen] == [
        "torch.contiguous_format",
        "torch.preserve_format",
        "torch.channels_last",
    ]


def _answer(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


# float32, float64, and a number that is no dtype.
@pytest.mark.parametrize("number", [6, 7, pytest.param(46, marks=pytest.mark.declines("ATen refuses the number"))])
def test_dtypes_may_be_ints(number, path, device):
    aten, x = torch.ops.aten, torch.arange(6.0, device=device).view(2, 3)
    calls = [
        lambda: aten.sum(x, dtype=number),
        lambda: aten.cumsum(x, 1, dtype=number),
        lambda: aten.full([2], 3, dtype=number, device=device),
    ]
    for make in calls:
        expected = _answer(make)
        with tritonite.use_gems():
            found = [_answer(make) for _ in range(2)]
        for each in found:
            if isinstance(expected, str):
                # The message names the operator that ATen's kernel calls first.
                assert isinstance(each, str) and (path == "python" or each[:13] == expected[:13] == "RuntimeError:")
            else:
                assert each.dtype is expected.dtype and torch.equal(each, expected)


def test_direct_calls_take_ints_for_enumerations_as_aten_does(device):
    x = torch.randn(2, 3, 4, 5, device=device)
    assert tritonite.ops.sum(x, dtype=7).dtype is torch.float64
    for number in (-1, 2, 100):
        own, aten = (packets.clone(x, memory_format=number) for packets in (tritonite.ops, torch.ops.aten))
        assert torch.equal(own, aten) and own.stride() == aten.stride()
    expected, found = (_answer(packets.zeros_like, x, layout=100) for packets in (torch.ops.aten, tritonite.ops))
    assert found == expected == "RuntimeError: Unknown layout"


@pytest.mark.parametrize(
    "name", [name for name, op in tritonite.overloads().items() if op.enumerations and op.has_place]
)
def test_host_functions_see_no_ints_for_enumerations(name, device):
    op = tritonite.overloads()[name]
    sample = next(iter(samples(op, op.declaration.accepts[0], device)))
    for place, argument, _ in op.enumerations:
        args, kwargs = list(sample.args), dict(sample.kwargs)
        if place < len(args):
            args[place] = 5
        else:
            kwargs[argument] = 5
        with pytest.raises(Decline, match="is given as"):
            op.results(tuple(args), kwargs | dict.fromkeys(op.out_names))


@pytest.mark.declines("nothing is compiled during a capture")
def test_kernels_of_host_functions_are_not_compiled_while_a_graph_is_captured(device, monkeypatch):
    @tritonite.libentry
    @triton.jit
    def add_one(source, target, n, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        tl.store(target + index, tl.load(source + index, mask=index < n) + 1, mask=index < n)

    def host(x, pad, value):
        result = torch.empty_like(x)
        add_one[(1,)](x, result, x.numel(), BLOCK=8)
        return result

    if device == "cpu":
        # As on a GPU, no kernel is compiled yet, and the first launch goes through the decorators.
        monkeypatch.setattr(type(add_one), "_compiles", True)
        monkeypatch.setattr(type(add_one), "_resolve", lambda *_: None)
        monkeypatch.setattr("tritonite.runtime.libentry.driver", mock.Mock())
        monkeypatch.setattr(compilation, "watch", lambda *_: None)
    x, pad = torch.arange(6.0, device=device), (0, 1)
    with standing_in("constant_pad_nd", host) as runs:
        monkeypatch.setattr(contract, "is_capturing", lambda: True)
        for _ in range(2):
            assert torch.constant_pad_nd(x, pad, 2.0).tolist() == [*x.tolist(), 2.0]
        reason = "a kernel to compile while a CUDA graph is captured"
        assert tritonite.stats()["constant_pad_nd"].declined == {reason: 2} and len(runs) == 2
    # No operator's host function runs here, so no call can be declined.
    assert torch.equal(host(x, pad, 2.0), x + 1)


def _compiling(monkeypatch, kernel, device):
    """Simulate a capture on a GPU: no kernel is compiled, and the first launch goes through the decorators."""
    if device == "cpu":
        monkeypatch.setattr(type(kernel), "_compiles", True)
        monkeypatch.setattr(type(kernel), "_resolve", lambda *_: None)
    monkeypatch.setattr(contract, "is_capturing", lambda: True)
    monkeypatch.setattr(python, "is_capturing", lambda: True)


@pytest.mark.declines("nothing is compiled during a capture")
def test_a_first_call_in_a_capture_writes_nothing_twice(device, monkeypatch, path):
    """A host function that writes its arguments declines before its first launch, or else raises an error."""

    @tritonite.libentry
    @triton.jit
    def add_one(target, n, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        tl.store(target + index, tl.load(target + index, mask=index < n) + 1, mask=index < n)

    launches = True

    def host(x, other, alpha):
        if launches:
            contract.note_launch()
        add_one[(1,)](x, x.numel(), BLOCK=8)
        return x

    x, ones = torch.zeros(6, device=device), torch.ones(6, device=device)
    with standing_in("add_.Tensor", host) as runs:
        _compiling(monkeypatch, add_one, device)
        if path == "python":
            with pytest.raises(CapturedInPart, match="the kernel add_one is not compiled"):
                x.add_(ones)
            launches = False
        for _ in range(2):
            x.add_(ones)
        (reason,) = tritonite.stats()["add_.Tensor"].declined
        if path == "native":
            assert reason == "a first call that writes into its arguments while a CUDA graph is captured" and not runs
        else:
            assert reason == "a kernel to compile while a CUDA graph is captured"
    assert x.tolist() == [2.0] * 6
    launches = True
    with standing_in("add.Tensor", host):
        # A host function that writes only fresh memory may decline at any time.
        assert torch.add(x, ones).tolist() == [3.0] * 6


def test_a_handle_of_cublas_is_made_before_a_capture(monkeypatch):
    made, first, second = [], torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(made.append(device)))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: made.append("handle"))
    monkeypatch.setattr(contract._local, "blas", frozenset())
    runtimes = {"cuda": CudaRuntime(), "cpu": devices.HostRuntime()}
    monkeypatch.setattr(devices, "of", lambda device: mock.Mock(runtime=runtimes[device.type]))
    monkeypatch.setattr(contract, "is_capturing", lambda: True)
    contract.prepare_blas(first)
    assert not made
    monkeypatch.setattr(contract, "is_capturing", lambda: False)
    for device in (torch.device("cpu"), first, second, first, second):
        contract.prepare_blas(device)
    assert made == [first, "handle", second, "handle"]


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "mv", "addmv", "baddbmm", "addbmm", "dot", "vdot"])
def test_every_product_prepares_a_handle_of_cublas(name, path, device, monkeypatch):
    op, prepared = tritonite.overloads()[name], []
    monkeypatch.setattr(product, "prepare_blas", prepared.append)
    monkeypatch.setattr(sys.modules["tritonite.ops.matmul"], "prepare_blas", prepared.append)
    sample = next(iter(samples(op, torch.float32, device)))
    op(*sample.args, **sample.kwargs)
    assert prepared


def test_negated_and_conjugated_tensors(device, replays):
    x = torch.randn(4, dtype=torch.complex64, device=device)
    negative, plain = x.conj().imag, x.imag.contiguous()
    assert negative.is_neg()
    with standing_in("clone", lambda x, memory_format: _plus(x, 0.0)) as runs:
        for _ in range(2):
            assert torch.equal(plain.clone(), plain)
            assert torch.equal(negative.clone().resolve_neg(), -plain)
            assert torch.equal(x.conj().clone().resolve_conj(), x.conj().resolve_conj())
        assert len(runs) == replays(2)


def test_a_scope_is_a_switch(device):
    x = torch.ones(4, device=device)
    with tritonite.use_gems(include="add"):
        _ = x + x
    kept = override.registered()
    assert "add.Tensor" in kept and not override.installed()
    tritonite.reset_stats()
    _ = x + x
    assert tritonite.stats() == {}
    with tritonite.use_gems(include="add"):
        _ = x + x
    assert override.registered() == kept and "add.Tensor" in tritonite.stats()
    tritonite.disable()
    assert not override.registered()
    key = devices.current.dispatch_key
    assert "tritonite" not in torch._C._dispatch_dump("aten::add.Tensor") + key


def test_disable_within_a_scope_leaves_nothing_after_it():
    with tritonite.use_gems(include="add"):
        tritonite.disable()
        assert "add.Tensor" in override.installed()
    assert not override.registered()


def test_a_users_kernel_that_comes_after_a_scope_is_overridden_by_the_next(device):
    x = torch.ones(3, device=device)
    with tritonite.use_gems(include="exp2"):
        torch.exp2(x)
    library = torch.library.Library("aten", "IMPL")
    library.impl("exp2", lambda x: torch.full_like(x, 42.0), tritonite.backend.dispatch_key)
    try:
        assert torch.exp2(x)[0] == 42
        with tritonite.use_gems(include="exp2"):
            assert torch.exp2(x)[0] == 2
        assert torch.exp2(x)[0] == 42
    finally:
        library._destroy()
    assert torch.exp2(x)[0] == 2
    with tritonite.use_gems(include="exp2"):
        assert torch.exp2(x)[0] == 2


def test_addmm_of_many_factors_is_one_plan(device, path):
    x, a, b = torch.randn(4, 6, device=device), torch.randn(4, 5, device=device), torch.randn(5, 6, device=device)
    with tritonite.use_gems(include="addmm"):
        for i in range(12):
            found = torch.addmm(x, a, b, alpha=i + 2.5, beta=i - 20.5)
            torch.testing.assert_close(found, x * (i - 20.5) + (a @ b) * (i + 2.5))
    counts = tritonite.stats()["addmm"]
    assert (counts.launched, counts.replayed) == ((1, 11) if path == "native" else (12, 0))
    with tritonite.use_gems(include="addmm"):
        nan = torch.full_like(x, float("nan"))
        torch.testing.assert_close(torch.addmm(nan, a, b, beta=0), a @ b)
        assert torch.equal(torch.addmm(x, a * float("nan"), b, alpha=0), x)


@pytest.mark.skipif(tritonite.device == "cpu", reason="TMA descriptors of several tiles are slow in the interpreter")
def test_addmm_of_many_factors_is_one_plan_through_descriptors(device, path):
    x, a, b = (torch.randn(n, k, device=device).bfloat16() for n, k in ((512, 512), (512, 1024), (1024, 512)))
    with tritonite.use_gems(include="addmm"):
        for i in range(5):
            found = torch.addmm(x, a, b, alpha=i + 3, beta=2)
            torch.testing.assert_close(found, torch.addmm(x, a, b, alpha=i + 3, beta=2), rtol=2e-2, atol=0.5)
    counts = tritonite.stats()["addmm"]
    assert not counts.unrecordable and not counts.declined
    assert path == "python" or counts.launched == 1
