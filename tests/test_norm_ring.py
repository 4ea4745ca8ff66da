"""Norms whose rows stream through a ring in shared memory, backward: the kernel, and its algorithm without a GPU."""

import dataclasses
import types

import pytest
import torch

import tritonite
from tritonite import devices
from tritonite.engine.norm import launch, ring
from tritonite.engine.norm.meta import RingMeta
from tritonite.testing.tolerances import RTOL

library = torch.ops.tritonite


def gradients(grad, grad_total, total, mean, rstd, weight):
    """Return the gradients by sum, weight and bias, in float64."""
    grad, total, mean, rstd = grad.double(), total.double(), mean.double()[:, None], rstd.double()[:, None]
    h, weighted = (total - mean) * rstd, grad if weight is None else grad * weight.double()
    share = weighted.mean(1, keepdim=True) if mean.any() else 0.0
    own = rstd * (weighted - share - h * (weighted * h).mean(1, keepdim=True))
    return own if grad_total is None else own + grad_total.double(), (grad * h).sum(0), grad.sum(0)


class Pointer:
    """Elements of memory, as the kernel sees them."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=Element(memory.dtype))

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)

    def load(self, mask=None, other=0):
        offset = torch.as_tensor(self.offset)
        return self.memory.view(-1)[offset if mask is None else torch.where(mask, offset, 0)] * (
            1 if mask is None else mask
        )

    def store(self, value, mask=None):
        chosen = slice(None) if mask is None else mask
        self.memory.view(-1)[self.offset[chosen]] = value[chosen]


@dataclasses.dataclass
class Element:
    dtype: torch.dtype

    @property
    def primitive_bitwidth(self):
        return 8 * self.dtype.itemsize


class Shared:
    """A ring in shared memory, or a chunk of one."""

    def __init__(self, memory):
        self.memory = memory

    def index(self, i):
        return Shared(self.memory[i])

    def load(self, _):
        return self.memory.clone()


class Copies:
    """Asynchronous copies, which complete when they are issued (`at_once`) or when they are waited for."""

    def __init__(self, at_once):
        self.at_once, self.groups, self.group = at_once, [], []

    def async_copy_global_to_shared(self, to, pointers, mask):
        self.group.append(lambda: to.memory.copy_(pointers.load(mask & torch.ones(to.memory.shape, dtype=torch.bool))))
        if self.at_once:
            self.group.pop()()

    def commit_group(self):
        self.groups.append(self.group)
        self.group = []

    def wait_group(self, outstanding):
        while len(self.groups) > outstanding:
            for copy in self.groups.pop(0):
                copy()


def run(program, programs, at_once, *args, **constants):
    """Run the kernel's source in plain Python, where a program is one warp."""
    number = lambda value: torch.tensor(value) if isinstance(value, int) else value
    language = types.SimpleNamespace(
        allocate_shared_memory=lambda element, shape, _: Shared(torch.full(shape, torch.nan, dtype=element.dtype)),
        arange=lambda begin, end, _: torch.arange(begin, end),
        zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
        load=lambda pointers, mask=None, other=0: pointers.load(mask, other),
        store=lambda pointers, value, mask=None: pointers.store(value, mask),
        reduce=lambda values, dim, _: tuple(value.sum(dim) for value in values),
        sum=lambda value, dim: value.sum(dim),
        cast=lambda value, dtype: value.to(getattr(dtype, "dtype", dtype)),
        program_id=lambda _: number(program),
        num_programs=lambda _: number(programs),
        num_warps=lambda: 1,
        BlockedLayout=lambda *_: None,
        SwizzledSharedLayout=lambda *_: None,
        static_range=range,
        float32=torch.float32,
    )
    scope = {
        "gl": language,
        "async_copy": Copies(at_once),
        "range": lambda *bounds: map(number, range(*bounds)),
        "normalized_by": lambda x, mean, rstd: (x - mean) * rstd,
        "gradient_of_normalized": lambda w, h, share, product, rstd: (w - share - h * product) * rstd,
        "true_divide": lambda x, y: x / y,
        "add_pairs": None,
        "wait_for_previous_launch": lambda: None,
    }
    for name in ("_before_end", "_copy", "_scale", "_with_offset", "norm_backward_by_ring"):
        function = getattr(ring, name)
        function = function.jit.fn if name == "norm_backward_by_ring" else function.fn
        scope[name] = types.FunctionType(function.__code__, scope, name)
    pointers = lambda value: tuple(map(Pointer, value)) if isinstance(value, tuple) else Pointer(value)
    *tensors, strides, n_rows, n_columns = args
    scope["norm_backward_by_ring"](*map(pointers, tensors), strides, n_rows, number(n_columns), **constants)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(("chunks", "slots", "late"), [(3, 5, 2), (3, 4, 0), (2, 7, 3), (1, 2, 1)])
def test_every_chunk_has_arrived_when_it_is_read(chunks, slots, late, layer, at_once):
    n_rows, n_columns, programs = 7, 128 * chunks - 20, 2
    grad, grad_total, total = (torch.randn(n_rows, n_columns + 8)[:, :n_columns] for _ in range(3))
    weight, mean, rstd = torch.randn(n_columns), torch.randn(n_rows) * layer, torch.rand(n_rows)
    total = total.contiguous()
    own, partials = torch.empty_like(total), torch.empty(1 + layer, programs, n_columns)
    grads = (grad, grad_total) if late else (grad,)
    given = tuple(each._base for each in grads), total, (rstd, mean)[: 1 + layer], (weight,), own, partials
    offset = 0.0 if layer else 0.5
    meta = RingMeta(torch.int64, True, layer, chunks, chunks - 1, slots, late, chunks - 1, offset)
    for program in range(programs):
        strides = (n_columns + 8,) * len(grads)
        run(program, programs, at_once, *given, strides, n_rows, n_columns, META=meta)
    exact = gradients(grad, grad_total if late else None, total, mean, rstd, weight + offset)
    torch.testing.assert_close(own.double(), exact[0], rtol=1e-5, atol=1e-5)
    for found, expected in zip(partials, exact[1:], strict=False):
        torch.testing.assert_close(found.sum(0).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    devices.current.type == "cpu" or not devices.current.ptx, reason="a kernel in Gluon, which needs NVIDIA's GPU"
)
@pytest.mark.parametrize(
    ("dtype", "n", "layer"),
    [(torch.float32, n, True) for n in (8200, 14_336, 14_348, 16_384)]
    + [(dtype, 28_664, False) for dtype in (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_norms_through_a_ring(dtype, n, layer, monkeypatch):
    launches, kernel = [], launch.norm_backward_by_ring
    counted = type("Counted", (), {"__getitem__": lambda _, grid: launches.append(grid) or kernel[grid]})()
    monkeypatch.setattr(launch, "norm_backward_by_ring", counted)
    normal = lambda *shape: torch.randn(shape, device=tritonite.device).to(dtype)
    rows = 3 * devices.multiprocessors(torch.device(tritonite.device)) + 5
    grad, grad_total, total = normal(rows, n + 8)[:, :n], normal(rows, n), normal(rows, n)
    weight, mean, rstd = normal(n), normal(rows).float() * layer, normal(rows).float().abs()
    for late, own_weight in ((grad_total, weight), (None, weight), (grad_total, None)):
        if layer:
            given = grad, late, total, mean, rstd, own_weight, weight, own_weight is not None, True
            found, again = (library.layer_norm_backward(*given) for _ in range(2))
        else:
            given = grad, late, total, rstd, own_weight, own_weight is not None
            found, again = (library.rms_norm_backward(*given) for _ in range(2))
        exact = gradients(grad, late, total, mean, rstd, own_weight)
        for own, same, expected in zip(found, again, exact, strict=False):
            if own is not None:
                assert torch.equal(own, same)
                torch.testing.assert_close(own.double(), expected, rtol=RTOL[dtype], atol=RTOL[dtype] * rows**0.5)
    assert launches
