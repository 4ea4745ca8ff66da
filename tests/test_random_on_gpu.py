"""Random numbers on a GPU, where ATen's own are the reference."""

import pytest
import torch
from curand import ATEN, FLOATS, INTEGERS, OFFSETS, layouts, on_gpu, outcome

import tritonite

GPU_SIZES = (1, 5, 255, 1024, 4097, 300_001, 2_500_000)


def _in_place(name, *numbers):
    return lambda x, g: getattr(x, name)(*numbers, generator=g)


_SLOPES = (0.125, 1 / 3, True)
DRAWN = {
    "uniform_": (FLOATS, _in_place("uniform_")),
    "uniform_ between": (FLOATS, _in_place("uniform_", -1.25, 3.5)),
    "normal_": (FLOATS, _in_place("normal_")),
    "normal_ of numbers": (FLOATS, _in_place("normal_", 3.0, 0.7)),
    "log_normal_": (FLOATS, _in_place("log_normal_", 0.5, 0.25)),
    "exponential_": (FLOATS, _in_place("exponential_", 1.5)),
    "cauchy_": (FLOATS, _in_place("cauchy_", 0.5, 2.0)),
    "geometric_": ((*FLOATS, torch.int64, torch.uint8), _in_place("geometric_", 0.3)),
    "bernoulli_": ((*FLOATS, torch.bool, torch.int32), _in_place("bernoulli_", 0.3)),
    "random_": ((*FLOATS, torch.bool, *INTEGERS[:5]), _in_place("random_")),
    "random_ to": ((*FLOATS, *INTEGERS), _in_place("random_", 100)),
    "random_ from far": ((torch.int32, torch.int64, torch.float64), _in_place("random_", -5, 2**30)),
    "random_ at 28 bits": ((torch.int32, torch.int64, torch.float64), _in_place("random_", 0, 2**28)),
    "random_ below 28 bits": ((torch.int32, torch.int64, torch.float64), _in_place("random_", 0, 2**28 - 1)),
    "random_ whole": ((torch.int64,), _in_place("random_", -(2**63), None)),
    "rand_like": ((*FLOATS, torch.complex64), lambda x, g: torch.rand_like(x)),
    "randn_like": ((*FLOATS, torch.complex64), lambda x, g: torch.randn_like(x)),
    "randint_like": ((torch.int64, torch.float32), lambda x, g: torch.randint_like(x, -3, 50)),
    "rand": (FLOATS, lambda x, g: torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=g)),
    "randn": (FLOATS, lambda x, g: torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=g)),
    "randint": (INTEGERS[:5], lambda x, g: torch.randint(3, 99, x.shape, dtype=x.dtype, device=x.device, generator=g)),
    "randperm": (
        (torch.int64, torch.int32, torch.float32),
        lambda x, g: torch.randperm(x.numel(), dtype=x.dtype, device=x.device, generator=g),
    ),
    "bernoulli": (FLOATS, lambda x, g: torch.bernoulli(x.abs() % 1, generator=g)),
    "bernoulli_ by": ((*FLOATS, torch.int32), lambda x, g: x.bernoulli_((x.abs() % 1).float() * 0.9, generator=g)),
    "normal around": (FLOATS, lambda x, g: torch.normal(x, 0.7, generator=g)),
    "normal of deviations": (FLOATS, lambda x, g: torch.normal(0.25, x.abs(), generator=g)),
    "normal around of deviations": (FLOATS, lambda x, g: torch.normal(x, x.abs() * 0.5, generator=g)),
    "native_dropout": (FLOATS, lambda x, g: torch.native_dropout(x, 0.3, True)),
    "_fused_dropout": (FLOATS, lambda x, g: ATEN._fused_dropout(x, 0.7, g)),
    "rrelu": (FLOATS, lambda x, g: ATEN.rrelu_with_noise_functional(x, torch.zeros_like(x), *_SLOPES, g)),
}
# Operators with a logarithm or a trigonometric function, whose results may be rounded differently.
ROUNDED = ("normal", "randn", "log_normal", "exponential", "cauchy", "geometric")
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _operand(shape, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)
    return torch.zeros(shape, dtype=dtype, device="cuda")


def _agree(name, dtype, ours, atens):
    for a, b in zip(ours, atens, strict=True):
        assert a.shape == b.shape and a.dtype is b.dtype and a.stride() == b.stride()
        if name.split()[0].rstrip("_").removesuffix("_like") not in ROUNDED:
            # torch compares few dtypes of unsigned integers.
            signed = _SIGNED.get(a.dtype, a.dtype)
            assert torch.equal(a.view(signed), b.view(signed))
            continue
        if name == "geometric_":
            assert (a != b).double().mean() < 1e-4 and (a.double() - b.double()).abs().max() <= 1
            continue
        a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (a, b))
        # A sum with cancellation has the error of its terms.
        terms = 4 * ("around" in name or "deviations" in name) + 0.5 * (name == "cauchy_")
        bound = 2 * torch.finfo(a.dtype).eps * (b.double().abs() + terms) + 1e-12
        # The difference of infinities is nan.
        assert bool(((a == b) | ((a.double() - b.double()).abs() <= bound)).all())


def _check_atens(name, dtype, x, seed, offset):
    call = DRAWN[name][1]
    own = "like" not in name and name != "native_dropout" and bool(offset % 8)
    atens, after = outcome(call, x, seed, offset, own)
    tritonite.reset_stats()
    with tritonite.use_gems(include=_FAMILY):
        # The first call is recorded, and the second one is replayed.
        for _ in range(2):
            ours, state = outcome(call, x, seed, offset, own)
            _agree(name, dtype, ours, atens)
            assert torch.equal(state, after)
    served = [counts for overload, counts in tritonite.stats().items() if overload in _FAMILY]
    assert served and not any(counts.declined for counts in served)


_FAMILY = [overload for overload, op in tritonite.overloads().items() if op.family == "random"]


@on_gpu
@pytest.mark.parametrize("name", DRAWN)
def test_numbers_are_atens(name):
    for dtype in DRAWN[name][0]:
        for i, size in enumerate(GPU_SIZES):
            _check_atens(name, dtype, _operand((size,), dtype), 42 + i, OFFSETS[i % len(OFFSETS)])
    torch.cuda.synchronize()


@on_gpu
@pytest.mark.parametrize("name", DRAWN)
def test_numbers_are_atens_in_every_layout(name):
    dtype = DRAWN[name][0][0]
    for _, x in layouts(lambda *shape: _operand(shape, dtype)):
        _check_atens(name, dtype, x, 7, 4 * 3)


@on_gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout_masks_of_all_vector_widths_are_atens(dtype):
    """Vectors have every width, with more elements than a grid has threads and with fewer."""
    for numel in (2, 4, 6, 8, 9, 1_000_000, 1_000_002, 1_000_004, 1_000_008, 1_000_001, 8 * 2**20):
        _check_atens("native_dropout", dtype, _operand((numel,), dtype), 3, 16)
    for first in (1, 2, 4, 8):
        _check_atens("native_dropout", dtype, _operand((1_000_000 + first,), dtype)[first:], 3, 16)


@on_gpu
def test_graphs_draw_atens_numbers_in_every_replay():
    """While a graph is captured ATen draws, because a replay gives its kernels another offset."""
    x = torch.ones(1000, device="cuda")
    found = []
    for include in ((), _FAMILY):
        torch.manual_seed(4)
        with tritonite.use_gems(include=include):
            torch.nn.functional.dropout(x, 0.5)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = torch.nn.functional.dropout(x, 0.5) + torch.rand(1000, device="cuda")
            # A capture writes offset 0 on a stream of its own, possibly later than a replay writes its offset.
            torch.cuda.synchronize()
            for _ in range(2):
                graph.replay()
                found.append(out.clone())
            found.append(torch.rand(10, device="cuda"))
    assert all(map(torch.equal, found[:3], found[3:])) and not torch.equal(found[0], found[1])


@on_gpu
def test_gradients_of_dropout_are_atens():
    found = []
    for include in ((), _FAMILY):
        torch.manual_seed(4)
        x = _operand((64, 1000), torch.float32).requires_grad_()
        with tritonite.use_gems(include=include):
            torch.nn.functional.dropout(x, 0.3).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_every_overload_is_of_the_family():
    assert len(_FAMILY) >= 84
