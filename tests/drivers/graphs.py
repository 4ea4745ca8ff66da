"""Run graphs of compiled launches on CPU tensors by the driver of graphs.cpp, and print what happens as JSON.

The native dispatcher takes the CPU for a device with a driver here. The "compiled kernels" are C functions.

    python graphs.py LIBRARY     with the library that test_drivers.py builds of graphs.cpp
"""

import ctypes
import json
import sys
import threading
from types import SimpleNamespace

import tritonite  # noqa: F401 - before torch uses Triton

import torch  # isort: skip

from tritonite.graph.plan import AllocateStep, ClearStep, DrawStep, FreeStep
from tritonite.install import override
from tritonite.runtime.plan import Buffer, CopyStep, LaunchStep, Source, View

DISPATCHER = override.native_dispatcher()
LIBRARY = ctypes.CDLL(sys.argv[1])
DISPATCHER.use_driver("cpu", sys.argv[1])
for counter in ("streams", "lookups", "addressed"):
    LIBRARY[f"stub_{counter}"].restype = ctypes.c_int64
N = 8
SIZE = 4 * N
found = {}


def launch(name, *parameters, grid=(1, 1, 1)):
    function = ctypes.cast(LIBRARY[f"stub_{name}"], ctypes.c_void_p).value
    return LaunchStep(list(parameters), grid, function, threads=32)


def given(number):
    """Return the address of an input as a parameter."""
    return False, number, 0, torch.float32


def arena(number):
    """Return the address of float vector `number` in the arena as a parameter."""
    return True, 0, number * SIZE, torch.float32


def axpy(x, y, out, factor=("slot", 0)):
    return launch("axpy", x, y, out, N, factor)


def double(x, out):
    """Return a launch that reads an input through a tensor descriptor."""
    return launch("double", (False, x, 0, bytes(128)), out, N)


def vector(is_buffer, number, index=0):
    return View(Source(is_buffer, number, index * SIZE), (N,), (1,), torch.float32)


def python(function, *args, results=()):
    return "python", function, args, {}, results


def graph(steps, results, vectors=4, written=(False,) * 3, buffers=()):
    buffer = [Buffer(torch.empty(vectors * SIZE, dtype=torch.uint8)), *buffers]
    described = {"device": torch.device("cpu"), "numbers": [0.5], "buffers": buffer}
    return DISPATCHER.Graph(SimpleNamespace(**described, steps=steps, results=results, written=list(written)))


def vectors(count, start=0.0):
    return [torch.arange(float(N)) + start + 10 * i for i in range(count)]


def error_of(call, *arguments):
    """Return the first line of the error that a call raises, or "" for none."""
    try:
        call(*arguments)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def chain(step=None):
    """Return a graph of 4 launches and a step after the first, which computes `expected` of its two inputs."""
    middle = [] if step is None else [step]
    return graph(
        [
            axpy(given(0), given(1), arena(0)),
            *middle,
            axpy(arena(0), given(0), arena(1), 0x3FF0000000000000),
            axpy(arena(0), arena(1), arena(2)),
            axpy(arena(2), arena(2), arena(3), 0x3FF0000000000000),
        ],
        [vector(True, 0, 3), vector(True, 0, 1)],
        written=(False, False),
    )


def expected(x, y):
    first = x + y / 2
    return [2 * (first + (first + x) / 2), first + x]


def right(returned, x, y):
    return all(torch.equal(*pair) for pair in zip(returned, expected(x, y), strict=True))


# Results that stay alive keep their arena, so that the next execution has another one.
plain, kept = chain(), []
for start in range(5):
    x, y = vectors(2, start)
    kept += [(plain.run([x, y]), x, y), (plain.run([x, y]), x, y)]
found["moved"] = [right(*each) for each in kept]
found["arenas"] = len({each[0][0].data_ptr() for each in kept})
found["sets after executions in turn"] = plain.free_arguments()

# A graph's inputs after they have moved: by a call of Python, and by a copy to a lazily cloned tensor.
x, y = vectors(2)
grown = graph(
    [
        axpy(given(0), given(1), arena(0)),
        python(lambda x: x.set_(torch.cat([x, x])), Source(False, 0, 0)),
        axpy(given(0), given(1), arena(1)),
    ],
    [vector(True, 0, 0), vector(True, 0, 1)],
)
moved = x.clone(), y
same = x + y / 2
returned = grown.run(list(moved))
found["moved by a call"] = [torch.equal(each, same) for each in returned] + [len(moved[0]) == 2 * N]

# A lazily cloned input that is written. A view of it is read before and after.
written = graph(
    [
        axpy(given(1), given(2), arena(0)),
        axpy(given(0), given(2), given(0)),
        axpy(given(1), given(2), arena(1)),
    ],
    [vector(True, 0, 0), vector(True, 0, 1)],
    written=(True, False, False),
)
first, y = vectors(2)
found["lazily cloned"] = []
for _ in range(2):
    original = first.clone()
    lazy = torch._lazy_clone(original)
    before, after = written.run([lazy, lazy.view(2, N // 2), y])
    found["lazily cloned"] += [
        torch.equal(original, first),
        torch.equal(lazy, first + y / 2),
        torch.equal(before, first + y / 2),
        torch.equal(after, first + y / 2 + y / 2),
    ]
# The same by a copy, after which the view's memory is elsewhere.
copied = graph(
    [
        axpy(given(1), given(2), arena(0)),
        CopyStep(vector(False, 0), vector(True, 0, 0)),
        axpy(given(1), given(2), arena(1)),
    ],
    [vector(True, 0, 0), vector(True, 0, 1)],
    written=(True, False, False),
)
lazy = torch._lazy_clone(first)
before, after = copied.run([lazy, lazy.view(2, N // 2), y])
found["lazily cloned and copied to"] = [torch.equal(lazy, before), torch.equal(after, before + y / 2)]

# Descriptors get an address only when it has changed.
described = graph(
    [double(0, arena(0)), double(0, arena(1)), double(1, arena(2)), axpy(arena(1), arena(2), arena(3))],
    [vector(True, 0, 3)],
)
x, y, z = vectors(3)
found["described"], found["addressed"] = [], []
for pair in ((x, y), (x, y), (x, z), (z, y), (z, y)):
    found["described"].append(torch.equal(described.run(list(pair))[0], 2 * pair[0] + pair[1]))
    found["addressed"].append(LIBRARY.stub_addressed())
# The second descriptor of the first input is refused its address; the next execution has the same inputs.
LIBRARY.stub_fail(-1, 1)
found["refused address"] = error_of(described.run, [x, y])
found["after it"] = torch.equal(described.run([x, y])[0], 2 * x + y)

# A failed launch, and an error of a call of Python, in the middle.
LIBRARY.stub_fail(2, -1)
x, y = vectors(2, 3.0)
found["failed launch"] = error_of(plain.run, [x, y])
x, y = vectors(2, 4.0)
found["after a failed launch"] = right(plain.run([x, y]), x, y)


def raising():
    if raises:
        raise ValueError("not today")


failing, raises = chain(python(raising)), True
found["raised"] = error_of(failing.run, [x, y])
raises = False
found["after an error"] = right(failing.run([x, y]), x, y)
found["sets after errors"] = [each.free_arguments() for each in (described, plain, failing)]

# A call of Python runs the same graph, on other inputs.
depth, inner = 0, []


def again():
    global depth
    if depth < 6:
        depth += 1
        x, y = vectors(2, 100.0 * depth)
        inner.append((nested.run([x, y]), x, y))


nested = chain(python(again))
x, y = vectors(2)
found["re-entered"] = [right(nested.run([x, y]), x, y), *[right(*each) for each in inner]]
found["sets after 7 at a time"] = nested.free_arguments()

# Threads, which wait for each other in the middle of the first execution.
barrier, wrong = threading.Barrier(6), []
local = threading.local()


def meet():
    if not getattr(local, "met", False):
        local.met = True
        barrier.wait()


shared = chain(python(meet))


def work(seed):
    for i in range(200):
        x, y = vectors(2, seed + 7.0 * i)
        for each in (shared, plain):
            if not right(each.run([x, y]), x, y):
                wrong.append((seed, i))


threads = [threading.Thread(target=work, args=(1000.0 * i,)) for i in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found["wrong in threads"] = wrong
found["sets after threads"] = shared.free_arguments()

# A call of Python changes the stream. Without one, an execution looks it up once.
switching = chain(python(lambda: LIBRARY.stub_set_stream(2)))
for stub in (LIBRARY.stub_streams, LIBRARY.stub_lookups):
    stub()
found["streams"], found["lookups"] = [], []
for each in (switching, plain, plain):
    each.run(vectors(2))
    found["streams"].append(LIBRARY.stub_streams())
    found["lookups"].append(LIBRARY.stub_lookups())
LIBRARY.stub_set_stream(3)
plain.run(vectors(2))
found["streams"].append(LIBRARY.stub_streams())
LIBRARY.stub_set_stream(1)

# Drawn numbers, and a grid without blocks.
number = Source(True, 1, 0)
drawing = graph(
    [
        DrawStep(4),
        AllocateStep((1,)),
        launch("store", (*number, torch.int64), ("drawn", 0, 0)),
        launch("store", (*number, torch.int64), 7, grid=(1, 0, 1)),
    ],
    [number],
    buffers=[Buffer(torch.empty(1, dtype=torch.int64))],
)
torch.manual_seed(5)
drawn = [drawing.run([])[0].item() for _ in range(3)]
torch.manual_seed(5)
found["drawn"] = [len(set(drawn)), drawn == [drawing.run([])[0].item() for _ in range(3)], 7 in drawn]

# A buffer outside the arena that is allocated, cleared and freed, and is allocated elsewhere the next time.
outside = graph(
    [
        AllocateStep((1,)),
        ClearStep(Source(True, 1, 0), SIZE),
        axpy(given(0), (True, 1, 0, torch.float32), (True, 1, 0, torch.float32)),
        axpy(given(0), (True, 1, 0, torch.float32), arena(0), 0x3FF0000000000000),
        python(lambda buffer: kept.append(buffer), Source(True, 1, 0)),
        FreeStep((1,), (0,)),
        axpy(arena(0), arena(0), arena(1)),
    ],
    [vector(True, 0, 1)],
    buffers=[Buffer(torch.empty(N))],
)
x = vectors(1)[0]
kept.clear()
found["outside"] = [torch.equal(outside.run([x])[0], 3 * x) for _ in range(3)]
found["buffers outside"] = len({each.data_ptr() for each in kept})

print(json.dumps(found))
