"""Fixtures and checks of all tests. tritonite comes first: it sets up the interpreter before triton is imported."""

import os

# NumPy's and ATen's products read this once, when they are loaded. With a thread for each core, the threads of pytest's
# workers and of the processes that tests start would spin while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tritonite  # noqa: I001

import contextlib
import dataclasses
import gc
import hashlib
import itertools

from collections import Counter
from unittest import mock

import pytest
import torch

from tritonite import devices
from tritonite.engine.cross_entropy.table import CROSS_ENTROPY
from tritonite.engine import multinomial, random
from tritonite.engine.divergence.table import DIVERGENCE
from tritonite.engine.gemm import cost_pointers, select
from tritonite.engine.gemm.table import LIMITS
from tritonite.engine.histogram import HISTOGRAM
from tritonite.engine.indexing.table import INDEXING
from tritonite.engine.linalg.table import LINALG
from tritonite.engine.norm.table import NORM
from tritonite.engine.pointwise.table import POINTWISE
from tritonite.engine.rows import space
from tritonite.engine.rows.table import ROWS
from tritonite.engine.searching.table import SEARCHING
from tritonite.engine.segmented import SEGMENTED
from tritonite.engine.sorting.table import SORTING
from tritonite.devices import compile_only
from tritonite.runtime import contract, native
from tritonite.runtime.stats import totals
from tritonite.install import override
from tritonite.ops import aten
from tritonite.testing.judge import without_tf32

# Whether all cases run, as on a GPU. By default some run, because the interpreter takes seconds for a case.
FULL = os.environ.get("TRITONITE_TEST_FULL") == "1"


def covering(every, *values):
    """Return all combinations, or without the full set those whose indices add up to a multiple of `every`.

    Each value occurs if two lists or more have at least `every` values.
    """
    combinations = itertools.product(*map(enumerate, values))
    return [[value for _, value in each] for each in combinations if FULL or sum(i for i, _ in each) % every == 0]


def every_second(names, *values):
    """Parametrize a test by all combinations, or without the full set by half of them."""
    return pytest.mark.parametrize(names, covering(2, *values), ids=_name)


def _name(value):
    # An address differs in every process, and would give xdist's workers different names.
    return None if " at 0x" in str(value) else str(value)


def some(*values, turns=1):
    """Return all combinations, or without the full set as many as `turns` times the longest list has values.

    In a turn all lists advance together. From turn to turn list k shifts by k values, for other combinations.
    """
    if FULL:
        return list(itertools.product(*values))
    rounds = itertools.product(range(turns), range(max(map(len, values))))
    return [tuple(each[(i + turn * k) % len(each)] for k, each in enumerate(values)) for turn, i in rounds]


# Slow tests of many cases that are alike, by file. Without the full set, about one case in n runs, for the n given
# here. A hash of its name decides, because every n-th case may have the same dtype or size.
SAMPLED = {
    "test_attention_hopper.py": {
        "test_tiles_of_one_program_have_different_blocks": 2,
        "test_warp_groups_add_a_bias": 2,
        "test_warp_groups_are_synchronised": 2,
    },
    "test_attention_hopper_backward.py": {"test_warp_groups_add_a_bias": 2, "test_warp_groups_are_synchronised": 2},
    "test_convolution.py": {"test_slices_of_k": 2},
    "test_convolution_boxes.py": {"test_convolutions": 2, "test_gradients_of_filters": 2},
    "test_foreach_optimizers.py": {"test_foreach_steps_are_atens": 2},
    "test_fused_attention.py": {"test_values_of_other_sizes_than_keys": 2},
    "test_fused_optimizers.py": {"test_twenty_steps_are_atens": 2},
    "test_graph_random.py": {"test_recorded": 2, "test_compiled": 2},
    "test_linalg_block_jacobi.py": {"test_hard_spectra": 2, "test_shapes_of_singular_values": 2},
    "test_linear_distillation.py": {"test_linear_jsd": 2},
    "test_matmul.py": {"test_every_kernel_in_every_layout": 2, "test_strided_columns_of_any_alignment": 2},
    "test_matmul_calls.py": {"test_products_of_all_sizes": 3},
    "test_matmul_hopper.py": {"test_products_follow_each_other": 4},
    "test_recorded.py": {"test_a_call_is_recorded_and_replayed": 2, "test_a_call_is_explained": 2},
    "test_rows.py": {"test_rows_of_whole_and_partial_blocks": 2},
    "test_short_convolution.py": {"test_several_blocks": 2},
    "test_storage.py": {"test_calls_with_freed_tensors_decline": 3},
    "test_sums.py": {
        "test_sums_of_negative_zeros_have_atens_sign": 2,
        "test_terms_at_one_index_are_added_up": 2,
    },
}


def is_left_out(item):
    """Return whether a case is one of those that run with the full set alone."""
    every = SAMPLED.get(item.path.name, {}).get(item.originalname, 1)
    # The low bits of a checksum such as CRC-32 are alike for names that differ in two equal digits.
    return not FULL and hashlib.sha256(item.name.encode()).digest()[-1] % every != 0


def pytest_collection_modifyitems(config, items):
    """Leave cases out, and put the longest tests first in each half of the list, with which two workers begin."""
    # A test that the command line names runs all its cases.
    if not any("::" in given for given in config.args):
        kept, left_out = [], []
        for item in items:
            (left_out if is_left_out(item) else kept).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    longest = [item for item in items if item.originalname == "test_every_kernel_compiles"]
    others = [item for item in items if item not in longest]
    half = len(others) // 2
    items[:] = [*longest[::2], *others[:half], *longest[1::2], *others[half:]]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without Python's garbage collector, and keep it from visiting what tests and modules hold.

    It would visit the objects of all modules and tests time and again, which live until the process ends.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Most objects of tests are short-lived: a collection after every 700 new ones, Python's default, finds few.
        gc.set_threshold(50_000)
        gc.enable()


@pytest.fixture
def device() -> str:
    return tritonite.device


@contextlib.contextmanager
def calls_through(path):
    """Route calls through the native dispatcher or through Python within the context."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITONITE_NATIVE", "1" if path == "native" else "0")
    caches = (native.module, override.native_dispatcher)
    tritonite.disable()
    for cache in caches:
        cache.cache_clear()
    try:
        assert (override.native_dispatcher() is None) == (path == "python")
        yield
    finally:
        tritonite.disable()
        patch.undo()
        for cache in caches:
            cache.cache_clear()


@pytest.fixture(params=["native", "python"])
def path(request):
    """Run a test twice: with calls through the native dispatcher, and through Python."""
    with calls_through(request.param):
        yield request.param


def forget_plans():
    """Clear the plans that the native dispatcher has recorded, which depend on the device's record and tables."""
    if override._native is not None:
        override._native.clear_all()


@pytest.fixture(scope="module")
def through_native():
    """Route the calls of a module through the native dispatcher."""
    with calls_through("native"):
        yield


@pytest.fixture
def dispatcher(through_native):
    return override.native_dispatcher()


@pytest.fixture
def no_plans(dispatcher):
    """Clear all plans before a test."""
    dispatcher.clear_all()


@pytest.fixture
def change_device(monkeypatch):
    """Return a function that replaces fields of the current device's record."""

    def change(**fields):
        monkeypatch.setattr(devices, "current", dataclasses.replace(devices.current, **fields))
        forget_plans()

    return change


TABLES = {
    "cross_entropy": CROSS_ENTROPY,
    "divergence": DIVERGENCE,
    "gemm": LIMITS,
    "histogram": HISTOGRAM,
    "indexing": INDEXING,
    "linalg": LINALG,
    "norm": NORM,
    "pointwise": POINTWISE,
    "random": random.RANDOM,
    "rows": ROWS,
    "searching": SEARCHING,
    "segmented": SEGMENTED,
    "sorting": SORTING,
}


def _replaced(record, fields):
    """Return a named tuple with fields replaced. A dict for a field that is a named tuple replaces fields of that."""
    nested = {
        name: _replaced(getattr(record, name), value)
        for name, value in fields.items()
        if isinstance(value, dict) and hasattr(getattr(record, name), "_replace")
    }
    return record._replace(**fields | nested)


@pytest.fixture
def change_tables(monkeypatch):
    """Return a function that replaces fields of engines' tables for the current device.

    `change_tables(sorting={"network": 32, "radix": {"block": 64}})` also replaces a field of a record in the table.
    """

    def change(**engines):
        for engine, fields in engines.items():
            table = TABLES[engine]
            monkeypatch.setitem(table, devices.current.kind, _replaced(table[devices.current.kind], fields))
        forget_plans()

    return change


@pytest.fixture
def use_config(monkeypatch):
    """Return a function that makes every product use a config, and the list of whether each could use descriptors."""
    descriptors = []

    def prepare(config):
        monkeypatch.setattr(
            select, "choose", lambda problem, device, can, warp_specialized: descriptors.append(can) or config
        )
        monkeypatch.setattr(select, "for_groups", lambda problem, device: config)
        return descriptors

    return prepare


@pytest.fixture
def set_copy_time(monkeypatch):
    """Return a function that sets the estimated time of a product's padded copy.

    A time of less than 0 makes every product copy what it can, and `math.inf` none.
    """

    def change(microseconds):
        monkeypatch.setattr(cost_pointers, "copying", lambda sizes, _: microseconds * len(sizes) if sizes else 0.0)

    return change


@pytest.fixture
def set_philox(monkeypatch):
    """Return a function that sets the generator's seed and the offset of the next draw, and returns both.

    A draw advances the offset as it asks for. `set_philox.advances` lists the advances.
    """

    def give(seed, offset):
        give.offset = offset

        def drawn(device, advance, generator=None):
            give.advances.append(advance)
            before, give.offset = give.offset, give.offset + advance
            return seed, before

        for module in (random, multinomial):
            monkeypatch.setattr(module, "random_state", drawn)
        return seed, offset

    give.advances = []
    return give


def served(name):
    """Return whether kernels served all calls of an overload, and at least one, since counts were reset."""
    counts = tritonite.stats()[name]
    return counts.launched + counts.replayed > 0 and not counts.declined


@pytest.fixture
def tiny_blocks(change_device):
    """Make blocks so small that a row has several blocks and programs."""
    change_device(row_elements=128, row_columns=8, programs=4)


def check_each(functions, dtype):
    """Compare the results of calls, by the overload that has to serve each, with ATen's."""
    close = {"rtol": 4e-3, "atol": 4e-3} if dtype is torch.float16 else {}
    for name, function in functions.items():
        expected = function()
        with tritonite.use_gems():
            torch.testing.assert_close(function(), expected, **close)
        assert served(name)


CUTS = ("default blocks", "64-bit offsets", "tiny blocks", "a block a program")


def with_cuts(*values):
    """Return parameters: each value with every cut, or without the full set with one of the slow cuts in turn."""
    pairs = [
        (value, name) for i, value in enumerate(values) for name in (CUTS if FULL else (*CUTS[:2], CUTS[2 + i % 2]))
    ]
    return [pytest.param(*pair, id="-".join(map(str, pair))) for pair in pairs]


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch, change_device):
    """Cut rows into blocks in several ways; tiny blocks also split rows over programs."""
    if request.param in ("tiny blocks", "a block a program"):
        change_device(row_elements=32, row_columns=16, programs=4 if request.param == "tiny blocks" else 4096)
    if request.param == "64-bit offsets":
        monkeypatch.setattr(space, "INT32_LIMIT", 4)


WAYS = ("in registers", "by radix", "in shared memory")


@pytest.fixture(params=WAYS)
def way(request, change_device, change_tables):
    """Sort rows that a program holds, or rows of several tiny blocks, without shared memory or with it."""
    if request.param != "in registers":
        change_device(ptx=request.param == "in shared memory" or devices.current.ptx)
        topk = {"sorted_at_once": 16, "held_bytes": 0, "block": 64}
        topk |= {"own_groups": 8, "least_groups": 16, "most_groups": 64}
        radix = {"held_bytes": 0, "block": 64}
        change_tables(sorting={"network": 32, "radix": radix, "select": {"block": 64}, "topk": topk})
    return request.param


@pytest.fixture(scope="module")
def registered_once():
    """Keep overloads registered with torch, out of force, between a module's tests.

    Registering and unregistering all takes longer than most tests do. `disable()` leaves them while a scope is open.
    """
    with tritonite.use_gems(include=()):
        yield


@pytest.fixture
def any_architecture(monkeypatch):
    """Have kernels run on GPUs of every architecture, also where ATen refuses the calls."""
    monkeypatch.setattr(aten, "check_architecture", lambda *given: None)


def seed():
    """Seed the generators of the CPU and the device. `torch.manual_seed` keeps a stack trace for an absent GPU's."""
    (torch.default_generator if tritonite.device == "cpu" else torch).manual_seed(0)


@pytest.fixture(autouse=True)
def clean_state(request):
    """Serve calls also where ATen is faster, and leave no override, plan, count or changed default behind."""
    seed()
    tritonite.reset_stats()
    before = contract.set_comparing(False), contract.set_strict(True)
    with without_tf32():
        yield
    contract.set_comparing(before[0])
    contract.set_strict(before[1])
    tritonite.disable()
    # A plan that a test recorded with another device record or table would be replayed in the next test.
    forget_plans()
    assert not override.registered() or "registered_once" in request.fixturenames
    assert torch.get_default_dtype() is torch.float32


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test whose overridden calls were all declined, because it compared ATen with itself.

    Tests of refusals are marked `@pytest.mark.declines(reason)`. Counts are added up before a test resets them.
    """
    served, declined = 0, Counter()

    def add_up():
        nonlocal served
        found = totals()
        served += found.launched + found.replayed
        declined.update(found.declined)

    reset = tritonite.reset_stats

    def add_up_and_reset():
        add_up()
        reset()

    with mock.patch.object(tritonite, "reset_stats", add_up_and_reset):
        result = yield
    add_up()
    if declined and not served and item.get_closest_marker("declines") is None:
        pytest.fail(f"no kernel ran, every call was declined: {'; '.join(declined)}", pytrace=False)
    return result


def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: quick checks run with other releases of torch and triton")
    config.addinivalue_line("markers", "host: smoke tests of what no triton decides, run with other releases of torch")
    config.addinivalue_line("markers", "declines(reason): every call of the test may be declined, for this reason")
    torch.set_num_threads(1)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Choose blocks as for an H100."""
    record = dataclasses.replace(compile_only.RECORD, kind="nvidia", dispatch_key="CPU", aten_measured=True)
    monkeypatch.setattr(devices, "current", record)
    answers = {"multiprocessors": 132, "name_of": "A GPU", "architecture": "sm_90", "has_wgmma": True}
    for name, answer in {**answers, "shared_memory": 232_448}.items():
        monkeypatch.setattr(devices, name, lambda _, answer=answer: answer)
