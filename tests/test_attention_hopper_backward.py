"""The warp-specialised backward pass of attention: the calls it serves, its algorithm without a GPU, and its values."""

import dataclasses
import itertools
import math
import types

import pytest
import torch
import warps
from conftest import FULL, covering
from test_attention_hopper import (
    BROADCASTS,
    drawn,
    few_heads,
    on_sm_90,
    problem,
    result,
    with_bias,
    with_extremes,
)
from warps import Descriptor, Pointer, number

import tritonite
from tritonite import devices
from tritonite.engine.attention import backward, prologue, scores, table
from tritonite.engine.attention.forward import attention
from tritonite.engine.attention.hopper import backward as hopper_backward
from tritonite.engine.attention.hopper import backward_dkdv, backward_dq, descriptors
from tritonite.engine.attention.problem import Packed, Problem
from tritonite.engine.attention.table import Ring, WarpSpecializedBackward


def by_definition(work, grad):
    """Return (result, logsumexp, gradients) in float64. A row that sees no key has a result and gradients of 0."""
    wide = [x.detach().double().requires_grad_() for x in work[:3]]
    key, value = [x.repeat_interleave(work.ratio, 1) for x in wide[1:]]
    scores = wide[0] @ key.mT * work.factor
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=grad.device)
    if work.causal:
        seen = seen.tril(work.diagonal)
    if work.bias is not None:
        seen = seen & ~work.bias.isneginf()
        scores = scores + work.bias.double().nan_to_num(neginf=0)
    out = scores.masked_fill(~seen, -1e300).softmax(-1) * seen @ value
    logarithms = scores.masked_fill(~seen, -torch.inf).logsumexp(-1).detach()
    return out.detach(), logarithms, torch.autograd.grad(out, wide, grad.double())


@pytest.fixture
def of_hopper(monkeypatch):
    monkeypatch.setattr(devices, "has_wgmma", lambda device: True)


def taken(work, grad=None, grads=None):
    return hopper_backward.serves(work, result(work) if grad is None else grad, work[:3] if grads is None else grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256), (80, 80), (96, 128), (8, 8)])
def test_serves_operands_that_descriptors_can_address(of_hopper, dtype, sizes):
    work = problem(D=sizes[0], V=sizes[1], dtype=dtype)
    assert taken(work)
    assert not taken(work._replace(query=work.query.mT.contiguous().mT))
    assert not taken(work, grad=result(work).mT.contiguous().mT)
    assert not taken(work, grads=(work.query.mT.contiguous().mT, *work[1:3]))
    assert not taken(work, grad=result(work)[:, :, :1].expand(-1, -1, 20, -1))
    by_rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in work[:3]]
    assert taken(Problem(*by_rows, *work[3:]))


@pytest.mark.parametrize("broadcast", BROADCASTS)
def test_serves_a_bias_where_shared_memory_has_room(of_hopper, broadcast):
    work = problem()
    assert taken(with_bias(work, broadcast)) and taken(with_bias(problem(D=128, V=80), broadcast))
    assert not taken(with_bias(problem(D=256), broadcast))
    assert not taken(work._replace(bias=drawn(2, 4, 20, 32)[..., 1:21]))


def test_leaves_other_calls_to_the_kernels_for_all_devices(of_hopper, monkeypatch):
    work = problem()
    starts = torch.zeros(2, dtype=torch.int32)
    others = [
        work._replace(bias=drawn(2, 4, 20, 20)),
        work._replace(packed=Packed(starts, starts, 20, 20, True, True)),
        work._replace(key=work.key[:, :, :0], value=work.value[:, :, :0]),
        problem(dtype=torch.float32),
    ]
    assert taken(work) and not any(map(taken, others))
    monkeypatch.setattr(devices, "has_wgmma", lambda device: False)
    assert not taken(work)


def test_the_host_function_asks(of_hopper, monkeypatch):
    called = []
    monkeypatch.setattr(hopper_backward, "attention_backward", lambda *given: called.append(given))
    work = problem()
    out, logsumexp = result(work), torch.zeros(2, 4, 20, device=tritonite.device)
    grads = tuple([torch.full_like(x, math.nan) for x in work[:3]])
    backward.attention_backward(work, out, out, logsumexp, grads)
    assert called == [(work, out, out, logsumexp, grads)] and all(grad.isnan().all() for grad in grads)
    biased = work._replace(bias=drawn(2, 4, 20, 20))
    backward.attention_backward(biased, out.zero_(), out, logsumexp, grads, torch.empty_like(biased.bias))
    assert len(called) == 1 and not any(grad.isnan().any() for grad in grads)
    masked = with_bias(work, "keys")
    backward.attention_backward(masked, out, out, logsumexp, grads)
    assert len(called) == 2
    backward.attention_backward(masked, out, out, logsumexp, grads, torch.empty_like(biased.bias))
    assert len(called) == 2


def run(work, tiles, grad, out, logsumexp, grads, at_once):
    """Run the kernels' sources in plain Python, as the host function launches them."""
    as_is = {"heads", "batch_heads", "group", "blocks", "strides"}

    def given(name, value):
        if isinstance(value, hopper_backward.TensorDescriptor):
            tensor = value.base.as_strided(value.shape, value.strides, value.base.storage_offset())
            return Descriptor(tensor, value.block_shape)
        if name == "META":
            return types.SimpleNamespace(**dataclasses.asdict(dataclasses.replace(value, index=torch.int64)))
        if isinstance(value, tuple):
            return type(value)(*[given(name, each) for each in value])
        if isinstance(value, torch.Tensor):
            return Pointer(value)
        if name == "scale":
            return torch.tensor(value).double()
        return value if name in as_is else number(value)

    class Launcher:
        def __init__(self, kernel, module):
            self.names = list(kernel.jit.signature.parameters)
            self.kernel = warps.Kernel(
                kernel.jit.fn,
                # Only its own module: both have functions of the same names.
                warps.device_functions(scores, descriptors, prologue, module),
                at_once,
                # The registers of an operand are up to the compiler.
                as_operand=lambda tile, dtype, total: tile.to(dtype),
                ROWS=hopper_backward.ROWS.value,
                GROUPS=hopper_backward.GROUPS.value,
                LOG2E=backward_dkdv.LOG2E.value,
            )

        def __getitem__(self, grid):
            def launch(*args, num_warps, **kwargs):
                kwargs |= dict(zip(self.names, args, strict=False))
                for program in range(*grid):
                    self.kernel(program, **{name: given(name, value) for name, value in kwargs.items()})

            return launch

    with pytest.MonkeyPatch.context() as patch:
        for kind, module in (("dq", backward_dq), ("dkdv", backward_dkdv)):
            name = f"attend_backward_{kind}_warp_specialized"
            patch.setattr(hopper_backward, name, Launcher(getattr(hopper_backward, name), module))
        patch.setattr(table, "warp_specialized_backward", lambda *_: tiles)
        patch.setattr(hopper_backward, "empty", lambda *given: torch.empty(given[0], dtype=given[1]).fill_(math.nan))
        hopper_backward.attention_backward(work, grad, out, logsumexp, grads)


TILES = [
    WarpSpecializedBackward(Ring(128, 2), Ring(64, 2)),
    WarpSpecializedBackward(Ring(64, 2), Ring(32, 3)),
    WarpSpecializedBackward(Ring(32, 3, value_stages=2), Ring(128, 1)),
    WarpSpecializedBackward(Ring(64, 2, value_stages=1), Ring(64, 2, separate=True)),
]


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize(
    ("sizes", "tiles", "at_once"),
    covering(
        3,
        [
            (300, 300, True, 0, None),
            (130, 290, True, 160, -0.3),
            (200, 90, True, -110, 0.1),
            (128, 256, True, -300, 0.1),
            (65, 257, False, 0, 0.0),
            (1, 70, True, 69, None),
        ],
        TILES,
        [False, True],
    ),
)
def test_warp_groups_are_synchronised(sizes, tiles, at_once):
    """No group waits forever. Nothing is read before it has arrived, or overwritten before it was used."""
    S, T, causal, diagonal, scale = sizes
    work = problem(S=S, T=T, V=80, causal=causal, diagonal=diagonal, scale=scale, **few_heads(at_once))
    grad = drawn(*work.query.shape[:2], S, 80)
    out, logarithms, expected = by_definition(work, grad)
    grads = tuple([torch.full_like(x, math.nan) for x in work[:3]])
    run(work, tiles, grad, out.half(), logarithms.float(), grads, at_once)
    for own, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(own.double(), exact, atol=1e-2, rtol=4e-3)


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize(
    ("heads", "tiles"), covering(3, [(1, 80, False), (2, 64, False), (2, 80, True), (4, 80, False)], TILES)
)
def test_few_programs_have_one_head_each(heads, tiles, monkeypatch):
    """Query heads that share keys have a program each, whose sums are added afterwards."""
    (shared, V, biased), T = heads, 290 if FULL else 150
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 64)
    added, add = [], hopper_backward.add_heads.run
    monkeypatch.setattr(hopper_backward.add_heads, "run", lambda *x, **options: added.append(x) or add(*x, **options))
    work = problem(S=130, T=T, V=V, shared=shared, diagonal=T - 130)
    work = with_bias(work) if biased and not tiles.key.separate else work
    grad = drawn(2, 4, 130, V)
    out, logarithms, expected = by_definition(work, grad)
    grads = tuple([torch.full((*x.shape[:2], x.shape[2], x.shape[3] + 8), math.nan).half()[..., :-8] for x in work[:3]])
    run(work, tiles, grad, out.half(), logarithms.float(), grads, True)
    assert len(added) == (0 if tiles.key.separate or shared == 4 else 2)
    for own, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(own.double(), exact, atol=1e-2, rtol=4e-3)
    with tritonite.use_gems(invariant=True):
        assert not hopper_backward._splits_heads(work, 1)


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize(
    ("sizes", "broadcast", "tiles"),
    covering(3, [(200, 90, True, -110, -0.3), (65, 257, False, 0, None)], BROADCASTS, TILES[:-1]),
)
def test_warp_groups_add_a_bias(sizes, broadcast, tiles):
    """The bias has blocks of -inf, and rows that see no key."""
    S, T, causal, diagonal, scale = sizes
    heads = few_heads(broadcast != "full")
    work = with_bias(problem(S=S, T=T, V=80, causal=causal, diagonal=diagonal, scale=scale, **heads), broadcast)
    grad = drawn(*work.query.shape[:2], S, 80)
    out, logarithms, expected = by_definition(work, grad)
    # Gradients depend neither on the logarithms of rows that see no key, nor on the order of asynchronous work.
    for empty, at_once in ((0.0, False), (math.inf, True)):
        grads = tuple([torch.full_like(x, math.nan) for x in work[:3]])
        sums = logarithms.float().masked_fill(logarithms.isneginf(), empty)
        run(work, tiles, grad, out.half(), sums, grads, at_once)
        for own, exact in zip(grads, expected, strict=True):
            torch.testing.assert_close(own.double(), exact, atol=1e-2, rtol=4e-3)


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tiles", TILES[:2])
def test_warp_groups_add_the_least_and_largest_numbers(tiles, dtype):
    """Next to such numbers the logsumexp does not hold the logarithm of the number of keys."""
    work = with_extremes(problem(S=80, T=90, causal=False, dtype=dtype), 61, 5)
    grad = drawn(2, 4, 80, 64, dtype=dtype)
    out, logarithms, expected = by_definition(work, grad)
    grads = tuple([torch.full_like(x, math.nan) for x in work[:3]])
    run(work, tiles, grad, out.to(dtype), logarithms.float(), grads, False)
    far = 1e-2 if dtype is torch.float16 else 6e-2
    for own, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(own.double(), exact, atol=far, rtol=far)


def check(work, far=None):
    """Compare two runs of the warp-specialised kernels with the definition; memory around results must not change."""
    far = far or (4e-3 if work.query.dtype is torch.float16 else 3e-2)
    out, grad = result(work), drawn(*result(work).shape, dtype=work.query.dtype)
    logsumexp = torch.full(out.shape[:3], math.nan, device=out.device)
    attention(work, out, logsumexp, "0")
    expected = by_definition(work, grad)[2]
    kept = None
    for _ in range(2):
        whole = [x.new_full((*x.shape[:2], x.shape[2] + 3, x.shape[3] + 8), math.nan) for x in work[:3]]
        grads = tuple([x[:, :, :-3, :-8] for x in whole])
        assert hopper_backward.serves(work, grad, grads)
        backward.attention_backward(work, grad, out, logsumexp, grads)
        for own, around, exact in zip(grads, whole, expected, strict=True):
            assert around[:, :, -3:].isnan().all() and around[..., -8:].isnan().all()
            torch.testing.assert_close(own.double(), exact, atol=4 * far, rtol=far)
        assert kept is None or all(map(torch.equal, kept, grads))
        kept = [x.clone() for x in grads]


@pytest.fixture(params=[False, True], ids=["a program a key head", "a program a query head"])
def split_heads(request, monkeypatch):
    """Run a test with one program for all query heads of a key head, and with one program each."""
    monkeypatch.setattr(hopper_backward, "_splits_heads", lambda *_: request.param)


@on_sm_90
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256, 80, 96, 8])
def test_sizes_of_heads(D, causal, dtype, split_heads):
    check(problem(S=700, D=D, causal=causal, dtype=dtype))


@on_sm_90
@pytest.mark.parametrize(("D", "V"), [(64, 128), (128, 64), (72, 120), (128, 256), (256, 128)])
def test_values_of_another_size(D, V):
    check(problem(S=300, T=500, D=D, V=V, diagonal=200))


@on_sm_90
@pytest.mark.parametrize("S", [1, 63, 64, 65, 127, 128, 129, 1000])
def test_lengths(S, split_heads):
    for T, causal in itertools.product((S, 1, 300), (False, True)):
        for diagonal in (0, T - S, -50, 70) if causal else (0,):
            check(problem(S=S, T=T, causal=causal, diagonal=diagonal))


@on_sm_90
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("broadcast", BROADCASTS)
@pytest.mark.parametrize(("D", "V"), [(64, 64), (128, 128), (80, 80), (8, 8), (64, 128), (128, 64)])
def test_biases(D, V, broadcast, dtype):
    for S, T, causal, diagonal in (
        (700, 700, True, 0),
        (300, 500, False, 0),
        (1, 130, False, 0),
        (200, 90, True, -110),
    ):
        work = problem(S=S, T=T, D=D, V=V, causal=causal, diagonal=diagonal, dtype=dtype)
        check(with_bias(work, broadcast))


@on_sm_90
@pytest.mark.parametrize("D", [64, 128])
def test_biases_of_the_least_and_largest_numbers(D):
    check(with_extremes(problem(S=300, D=D, causal=False, dtype=torch.bfloat16), 120, 130))


@on_sm_90
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_scale(D, scale):
    check(problem(S=300, D=D, scale=scale), far=None if scale != 2 else 2e-2)


@on_sm_90
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_layouts(D):
    work = problem(S=300, D=D)
    check(Problem(*[x.transpose(1, 2).contiguous().transpose(1, 2) for x in work[:3]], *work[3:]))
    check(Problem(*drawn(2, 300, 3, 4, D).permute(2, 0, 3, 1, 4), *work[3:]))


@on_sm_90
@pytest.mark.parametrize("D", [64, 128, 256])
def test_masked_values_that_are_not_finite(D):
    """Keys and values that no row sees do not reach the gradients of others.

    The result is computed before they change: 0 times a value that is not finite is nan, as in ATen.
    """
    work = problem(S=70, T=300, D=D, causal=True)
    out, grad = result(work), drawn(2, 4, 70, D)
    logsumexp = torch.empty(2, 4, 70, device=out.device)
    attention(work, out, logsumexp, "0")
    every = [tuple([torch.full_like(x, math.nan) for x in work[:3]]) for _ in range(2)]
    for grads in every:
        assert hopper_backward.serves(work, grad, grads)
        backward.attention_backward(work, grad, out, logsumexp, grads)
        work.key[:, :, 70:], work.value[:, :, 70:] = math.inf, math.nan
    for finite, found in zip(*[grads[1:] for grads in every], strict=True):
        assert found.isfinite().all() and not found[:, :, 70:].any()
        assert torch.equal(finite, found)


@on_sm_90
def test_replays_with_other_operands_and_scales(path):
    """A plan holds descriptors: of other operands, and with another scale, of either sign."""
    name = "_scaled_dot_product_flash_attention_backward"
    for scale in (0.2, -0.3, 0.1):
        work = problem(S=300, causal=True, scale=scale, shared=4)
        grad = drawn(2, 4, 300, 64)
        out, logarithms, expected = by_definition(work, grad)
        unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        given = grad, *work[:3], out.half(), logarithms.float(), None, None, 300, 300, 0.0, True, unused, unused
        with tritonite.use_gems(include=[name]):
            grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, scale=scale)
        for own, exact in zip(grads, expected, strict=True):
            torch.testing.assert_close(own.double(), exact, atol=1.6e-2, rtol=4e-3)
    counts = tritonite.stats()[name]
    assert not counts.unrecordable and not counts.declined
    assert (counts.launched, counts.replayed) == ((1, 2) if path == "native" else (3, 0))
