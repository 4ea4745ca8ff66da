"""Gluon's language in plain Python: a warp group is a thread, a TMA copy is a function, and blocks are tensors.

Kernels run so without a GPU, and show deadlocks, reads before a copy has arrived, and writes to buffers in use. Warp
groups take turns: where one synchronises, a random group goes on, or a random copy arrives. So copies arrive late, and
wgmma products are computed when they are waited for.
"""

import functools
import math
import random
import threading
import types

import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction


class Block(torch.Tensor):
    """A block in registers. It has a layout, whose properties are not modelled."""

    type = types.SimpleNamespace(layout=types.SimpleNamespace(parent=None))


def block(value, dtype=None):
    return torch.as_tensor(value, dtype=dtype).as_subclass(Block)


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, memory):
        self.memory, self.shape, self.dtype = memory, memory.shape, memory.dtype

    def index(self, i):
        return Shared(self.memory[int(i)])

    def reshape(self, shape):
        return Shared(self.memory.view(shape))

    def permute(self, order):
        return Shared(self.memory.permute(order))

    def slice(self, begin, size):
        return Shared(self.memory.narrow(0, int(begin), size))

    def load(self, _):
        return block(self.memory.clone())

    def store(self, value):
        self.memory.copy_(value)


class Pointer:
    """A pointer into a tensor's memory, or a block of pointers, as offsets from the first element."""

    def __init__(self, tensor, offset=0):
        first = tensor.storage_offset()
        count = tensor.untyped_storage().nbytes() // tensor.itemsize - first
        self.memory, self.offset = tensor.as_strided((count,), (1,), first), offset
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)

    def load(self, mask=None, other=None):
        if mask is None:
            return block(self.memory[int(self.offset)])
        mask, offset = torch.broadcast_tensors(mask, self.offset)
        found = torch.full(mask.shape, other, dtype=self.memory.dtype)
        found[mask] = self.memory[self.checked(offset[mask])]
        return block(found)

    def store(self, value, mask):
        mask, offset, value = torch.broadcast_tensors(mask, self.offset, value)
        self.memory[self.checked(offset[mask])] = value[mask]

    @staticmethod
    def checked(offset):
        """Return offsets as indices, and assert that they are not negative: Python would count from the end."""
        assert (offset >= 0).all()
        return offset.long()


class Descriptor:
    """A TMA descriptor: elements outside the tensor read as 0 and are not written."""

    layout = None

    def __init__(self, tensor, block_shape):
        self.tensor, self.block_shape, self.dtype, self.shape = tensor, block_shape, tensor.dtype, tensor.shape

    def slices(self, offsets):
        """Return the slices of the tensor that a block meets, and of the block those inside of the tensor."""
        ranges = list(zip(self.block_shape, map(int, offsets), self.tensor.shape, strict=True))
        inside = [(max(first, 0), max(min(first + count, end), 0)) for count, first, end in ranges]
        inside = [(begin, max(begin, end)) for begin, end in inside]
        own = [(begin - first, end - first) for (begin, end), (_, first, _) in zip(inside, ranges, strict=True)]
        return tuple([slice(*each) for each in inside]), tuple([slice(*each) for each in own])

    def read(self, offsets):
        found, (inside, own) = torch.zeros(self.block_shape, dtype=self.dtype), self.slices(offsets)
        found[own] = self.tensor[inside]
        return found

    def write(self, offsets, value):
        inside, own = self.slices(offsets)
        self.tensor[inside] = value.view(self.block_shape)[own]


class Deadlock(Exception):
    """A program whose warp groups all wait."""


class Group:
    """A warp group: whether it may go on, and a semaphore that gives it the turn."""

    def __init__(self):
        self.may_go_on, self.turn = lambda: True, threading.Semaphore(0)


class Turns:
    """Warp groups that go on one at a time, and TMA copies that have not arrived.

    In every second program, drawn at random, copies are as late as can be: they arrive when no group can go on.
    """

    def __init__(self):
        self.groups, self.copies, self.failure = [Group()], [], None
        self.random, self.late = random.Random(0), False
        self.own = threading.local()
        self.own.group = self.groups[0]

    def draw(self):
        """Return a group that may go on. Copies that are drawn before it arrive."""
        while True:
            able = [group for group in self.groups if group.may_go_on()]
            if not able or not self.late:
                able += self.copies
            if not able:
                raise Deadlock("no warp group can go on, and no copy is on its way")
            drawn = self.random.choice(able)
            if isinstance(drawn, Group):
                return drawn
            self.copies.remove(drawn)
            drawn()

    def synchronise(self, may_go_on=lambda: True):
        """Let others go on, until this group is drawn and may go on."""
        own = self.own.group
        own.may_go_on = may_go_on
        drawn = self.draw()
        if drawn is not own:
            drawn.turn.release()
            own.turn.acquire()
            if self.failure is not None:
                raise self.failure

    def run(self, functions):
        """Run functions as one warp group each. The first error ends all, and is raised."""
        before, self.groups = self.groups, [Group() for _ in functions]
        self.late = self.random.random() < 0.5
        pairs = zip(self.groups, functions, strict=True)
        threads = [threading.Thread(target=self.go, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        self.draw().turn.release()
        for thread in threads:
            thread.join()
        self.groups = before
        if self.failure is not None:
            raise self.failure

    def go(self, group, function):
        self.own.group = group
        group.turn.acquire()
        if self.failure is not None:
            return
        try:
            function()
            self.groups.remove(group)
            if self.groups:
                self.draw().turn.release()
        except Exception as error:  # noqa: BLE001 - whatever a thread raises fails the test
            self.failure = self.failure or error
            for other in self.groups:
                other.turn.release()


class Barriers:
    """Barriers in shared memory, by address. A phase ends with its last arrival and its last byte."""

    def __init__(self, turns):
        self.turns, self.known = turns, {}
        self.MBarrierLayout = lambda: None

    def init(self, barrier, count):
        self.known[barrier.memory.data_ptr()] = types.SimpleNamespace(count=count, pending=count, bytes=0, phase=0)

    def change(self, barrier, arrivals, size):
        state = self.known[barrier.memory.data_ptr()]
        state.pending, state.bytes = state.pending - arrivals, state.bytes + size
        assert state.pending >= 0, "more arrivals than the barrier counts"
        if state.pending == state.bytes == 0:
            state.phase, state.pending = state.phase + 1, state.count

    def arrive(self, barrier, pred=True):
        if pred:
            self.change(barrier, 1, 0)
            self.turns.synchronise()

    def expect(self, barrier, size):
        self.change(barrier, 1, size)
        self.turns.synchronise()

    def wait(self, barrier, phase, pred=True):
        state = self.known[barrier.memory.data_ptr()]
        if pred:
            self.turns.synchronise(lambda: state.phase % 2 != phase)


class Products:
    """Asynchronous products, computed when they are issued (`at_once`) or when they are waited for.

    With `in_flight`, a kernel may pass a wait while products that it depends on are still outstanding.
    """

    in_flight = False

    def __init__(self, at_once):
        self.at_once, self.own = at_once, threading.local()

    def begin(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        memory = lambda x: (x.memory if isinstance(x, Shared) else x).float()
        product = types.SimpleNamespace(value=None)

        def compute():
            # An accumulator may be an outstanding product.
            before = acc.value if isinstance(acc, types.SimpleNamespace) else acc
            product.value = block(torch.Tensor(memory(a) @ memory(b)) + (before if use_acc else 0))

        self.own.__dict__.setdefault("begun", []).append((product, compute))
        if self.at_once:
            compute()
        return product

    def wait(self, outstanding, deps):
        begun = self.own.begun
        while len(begun) > outstanding:
            product, compute = begun.pop(0)
            if product.value is None:
                compute()
        unfinished = [product for product, _ in begun]
        assert self.in_flight or not any(dep is product for dep in deps for product in unfinished)
        finished = lambda dep: isinstance(dep, types.SimpleNamespace) and not any(dep is each for each in unfinished)
        values = tuple([dep.value if finished(dep) else dep for dep in deps])
        return values[0] if len(values) == 1 else values


def device_functions(*modules):
    """Return the device functions that modules define or import."""
    values = [value for module in modules for value in vars(module).values()]
    functions = [value.fn for value in values if isinstance(value, (GluonJITFunction, InterpretedFunction))]
    return functions + [value for value in values if isinstance(value, type) and hasattr(value, "_fields")]


def named_tuples(*modules):
    """Return the NamedTuples that modules define, by name."""
    found = [(name, value) for module in modules for name, value in vars(module).items()]
    return {name: value for name, value in found if isinstance(value, type) and hasattr(value, "_fields")}


def number(value):
    return block(value) if isinstance(value, int) else value


class Kernel:
    """A kernel's source as a Python function, together with the device functions that it calls.

    `given` are further names that replace those of a GPU in these functions. A call runs one program.
    """

    def __init__(self, kernel, helpers, at_once, **given):
        self.turns, self.products = Turns(), Products(at_once)
        self.barriers = Barriers(self.turns)
        self.stores, self.program = threading.local(), 0
        language = self.language()
        self.scope = {}
        for helper in helpers:
            self.of_this_scope(helper)
        self.scope |= {
            "gl": language,
            "tl": language,
            "mbarrier": self.barriers,
            "tma": types.SimpleNamespace(store_wait=self.store_wait),
            "load": self.load,
            "store": lambda *result: self.stores.__dict__.setdefault("results", []).append(result),
            "warpgroup_mma": self.products.begin,
            "warpgroup_mma_wait": self.products.wait,
            "fence_async_shared": lambda: None,
            "wait_for_previous_launch": lambda: None,
            "range": lambda *bounds: map(number, range(*bounds)),
            **given,
        }
        self.function = self.of_this_scope(kernel)

    def of_this_scope(self, function):
        name = function.__name__
        if isinstance(function, type):
            self.scope[name] = function
            return function
        self.scope[name] = types.FunctionType(function.__code__, self.scope, name, function.__defaults__)
        return self.scope[name]

    def __call__(self, program, *args, **kwargs):
        self.program = program
        self.function(*args, **kwargs)

    def load(self, descriptor, offsets, barrier, to):
        def copy():
            to.memory.copy_(descriptor.read(offsets))
            self.barriers.change(barrier, 0, -to.memory.numel() * to.memory.element_size())

        self.turns.copies.append(copy)
        self.turns.synchronise()

    def store_wait(self, pendings):
        """Wait for results, and only then write them."""
        results = self.stores.__dict__.setdefault("results", [])
        while len(results) > pendings:
            descriptor, offsets, source = results.pop(0)
            descriptor.write(offsets, source.memory)

    def warp_specialize(self, partitions, warps, registers):
        self.turns.run([functools.partial(function, *given) for function, given in partitions])
        assert not self.turns.copies, "copies that nobody waits for"

    def language(self):
        extreme = lambda function: lambda x, y, propagate_nan=None: function(block(x), block(y))
        layouts = ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "SwizzledSharedLayout")
        layouts += ("NVMMASharedLayout",)
        same = ("abs", "exp", "exp2", "log", "log2", "zeros_like", "int32", "int64", "float32", "bfloat16")
        return types.SimpleNamespace(
            allocate_shared_memory=lambda dtype, shape, _: Shared(
                torch.zeros(shape, dtype=dtype) if dtype is torch.int64 else torch.full(shape, math.nan, dtype=dtype)
            ),
            arange=lambda begin, end, _: block(torch.arange(begin, end)),
            zeros=lambda shape, dtype, _: block(torch.zeros(shape, dtype=dtype)),
            full=lambda shape, value, dtype, _: block(torch.full(shape, value, dtype=dtype)),
            broadcast_to=lambda x, shape: x.expand(shape),
            where=lambda mask, x, y: block(torch.where(block(mask), x, y)),
            minimum=extreme(torch.minimum),
            maximum=extreme(torch.maximum),
            reduce=lambda x, dim, _: x.amax(dim),
            max=lambda x, dim: x.amax(dim),
            min=lambda x, dim: x.amin(dim),
            num_warps=lambda: 4,
            sum=lambda x, dim: x.sum(dim),
            cdiv=lambda x, y: (x + y - 1) // y,
            load=lambda pointers, mask=None, other=None: pointers.load(mask, other),
            store=lambda pointers, value, mask: pointers.store(value, mask),
            convert_layout=lambda x, _, assert_trivial=False: x,
            int1=torch.bool,
            program_id=lambda axis: number(self.program[axis] if isinstance(self.program, tuple) else self.program),
            static_range=range,
            PropagateNan=types.SimpleNamespace(ALL=None),
            warp_specialize=self.warp_specialize,
            **{name: getattr(torch, name) for name in same},
            **dict.fromkeys(layouts, lambda *_: None),
        )
