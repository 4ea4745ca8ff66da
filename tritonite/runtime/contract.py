"""The contract between a call and its host function: what such a function may take, ask for and return.

A host function may allocate memory (`empty`, `zeros`), take views, also of another dtype, copy (`copy_`, `clone`,
`contiguous`, `to`), launch kernels, draw random numbers (`random_state`) and read sizes that data decides (`read`).
The native dispatcher records all of it once and then repeats it. What differs from call to call reaches the function as
a `Symbol`, which it can hand on but not look at: a number among its arguments, a random seed, a size read from data.
What is asked of all calls alike, `settings`, is in the keys of what was recorded.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tritonite import devices
from tritonite.errors import ATEN_IS_FASTER, Decline
from tritonite.runtime.hollow import hollow
from tritonite.runtime.locks import brief
from tritonite.runtime.symbols import Drawn, Limits, Number, Size, value_of


class Settings(NamedTuple):
    """What is asked of kernels by who puts them in ATen's place, beside which operators they are.

    With `faster_only` calls go to ATen where that is known to be faster on this kind of device. With `invariant` the
    bits of an element do not depend on how many rows are beside it.
    """

    faster_only: bool
    invariant: bool

    @property
    def bits(self) -> int:
        """As the native dispatcher has them in its keys."""
        return self.faster_only | self.invariant << 1

    @staticmethod
    def of_bits(bits: int) -> Settings:
        return Settings(bool(bits & 1), bool(bits & 2))


class _Local(threading.local):
    recorder: Any = None
    in_host_function = False
    # Whether the host function is of an operator that writes into arguments, and has launched a kernel.
    writes = False
    launched = False
    # The devices that this thread has a cuBLAS handle for.
    blas: frozenset[torch.device] = frozenset()
    inside_kernel = False
    settings: Settings | None = None


_local = _Local()
_in_force: Settings | None = None
_comparing = True
_strict = False
# What Python raises of arguments that a host function's checks have not foreseen.
_UNFORESEEN = (IndexError, OverflowError, TypeError, ValueError)
_poison = False
# The native dispatcher, once it is in use: it moves generators on, which excludes its own calls.
native: Any = None


def recorder() -> Any:
    """What this thread's host functions tell of what they do (see `dispatch.plan`), or None."""
    return _local.recorder


def swap_recorder(recorder: Any) -> Any:
    """Set who is told of what this thread's host functions do. Returns who was."""
    outer, _local.recorder = _local.recorder, recorder
    return outer


def inside_kernel() -> bool:
    """Whether this thread's calls of ATen's operators are served by ATen's own kernels, as the interpreter's are."""
    return _local.inside_kernel


def swap_inside_kernel(inside: bool) -> bool:
    """Set whether they are, here and in the native dispatcher. Returns whether they were."""
    outer, _local.inside_kernel = _local.inside_kernel, inside
    if native is not None:
        native.set_inside_kernel(inside)
    return outer


def in_host_function() -> bool:
    """Whether this thread runs an operator's host function, so that what it cannot do may decline."""
    return _local.in_host_function


def set_strict(on: bool) -> bool:
    """Set whether Python's errors leave host functions, as tests want them to. Returns whether they did."""
    global _strict
    before, _strict = _strict, on
    return before


def note_launch() -> None:
    """Note that this thread's host function launches a kernel, after which no error may decline the call."""
    _local.launched = True


def has_written() -> bool:
    """Whether this thread's host function may have written into arguments, so that it can no longer decline."""
    return _local.writes and _local.launched


def run_host(
    host: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    outs: Sequence[torch.Tensor],
    writes: bool,
    falls_back: bool = False,
) -> Sequence[Any]:
    """Run a host function, of an operator that `writes` into arguments or not. Raises Decline where it does.

    A call that `falls_back` declines, too, where the function raises one of Python's errors before it launches
    anything: ATen raises its own error for what the function's checks have not foreseen. Where `set_strict` is on the
    error is raised.
    """
    outer = _local.in_host_function, _local.writes, _local.launched
    _local.in_host_function, _local.writes, _local.launched = True, writes, False
    try:
        return host(values, outs)
    except _UNFORESEEN as error:
        if _strict or _local.launched or not falls_back:
            raise
        raise Decline(f"{type(error).__name__}: {error}", lasting=False) from error
    finally:
        _local.in_host_function, _local.writes, _local.launched = outer


def is_capturing() -> bool:
    """Whether this thread's current stream is captured into a CUDA graph."""
    return devices.current.type == "cuda" and torch.cuda.is_current_stream_capturing()


def prepare_blas(device: torch.device) -> None:
    """Have PyTorch make this thread's cuBLAS handle for a device, as ATen's first product does.

    ATen's products are captured into a CUDA graph in place of kernels that are not compiled, and no handle can be made
    during a capture.
    """
    if device.type != "cuda" or device in _local.blas or is_capturing():
        return
    if _local.recorder is None or not _local.recorder.dry:
        with torch.cuda.device(device):
            torch.cuda.current_blas_handle()
        _local.blas |= {device}


def settings_of(faster_only: bool = True, invariant: bool = False) -> Settings:
    """The settings that are asked for.

    Nothing is declined for speed where ATen's has not been measured, or where that could depend on how many rows there
    are and must not.
    """
    comparing = _comparing and devices.current.aten_measured and not invariant
    return Settings(faster_only and comparing, invariant)


def put_in_force(settings: Settings | None) -> None:
    """Set what every thread's host functions are asked for; None for what is so where nothing is enabled."""
    global _in_force
    _in_force = settings


def settings() -> Settings:
    """What is asked of the call that this thread makes."""
    return _local.settings or _in_force or settings_of()


def fusion() -> dict[str, Any]:
    """What the compiler is told, where rows must not depend on how many there are, of sums of products.

    It would make one operation of both where no mask is between them, which is a matter of whole blocks.
    """
    return {"enable_fp_fusion": False} if settings().invariant and not devices.current.interpreted else {}


@contextlib.contextmanager
def under(settings: Settings) -> Iterator[None]:
    """Within it these are the settings of this thread's calls, whatever is put in force meanwhile."""
    outer, _local.settings = _local.settings, settings
    try:
        yield
    finally:
        _local.settings = outer


def set_comparing(on: bool) -> bool:
    """Whether what is enabled from now on may leave calls to ATen for its speed. Returns whether it might before."""
    global _comparing
    before, _comparing = _comparing, on
    return before


def decline_if_slower(slower: bool) -> None:
    """Raise Decline where ATen is known to be faster, unless every call that can be served is to be."""
    if slower and settings().faster_only:
        raise Decline(ATEN_IS_FASTER)


def limit(value: Any, limits: Limits) -> None:
    """Have a number of the call keep limits. Raises Decline where it does not."""
    if isinstance(value, Number):
        given = value.limits
        value.limits = limits if given is None else given.and_(limits)
        if _local.recorder is not None:
            _local.recorder.limited(value)
        value = value.value
    if not limits.hold(value):
        raise Decline("a number that the dtype does not hold", lasting=False)


def set_poison(on: bool) -> None:
    """Whether fresh memory has all bits set, which is nan, so that an element that nobody writes shows."""
    global _poison
    _poison = on


def empty_strided(
    shape: Sequence[int | Size], strides: Sequence[int | Size], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor to write: a result, or what one launch hands on to the next. Sizes and strides may be read from data."""
    if _local.recorder is None:
        result = torch.empty_strided(value_of(tuple(shape)), value_of(tuple(strides)), dtype=dtype, device=device)
    elif _local.recorder.dry:
        result = hollow(value_of(tuple(shape)), value_of(tuple(strides)), dtype, device)
        _local.recorder.allocated(result, shape, strides)
        return result
    else:
        with _disable_current_modes() if _local.recorder.watching else contextlib.nullcontext():
            result = torch.empty_strided(value_of(tuple(shape)), value_of(tuple(strides)), dtype=dtype, device=device)
        _local.recorder.allocated(result, shape, strides)
    if _poison:
        _set_bits(result)
    return result


def empty(shape: Sequence[int | Size], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same, contiguous. Of sizes that data decides only the first may be one."""
    sizes = [max(size, 1) for size in shape[:0:-1]]
    strides = (*itertools.accumulate(sizes, lambda a, b: a * b, initial=1),) if len(shape) else ()
    return empty_strided(shape, strides[::-1], dtype, device)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor of zeros, which a plan sets to zero each time."""
    result = empty(shape, dtype, device)
    if _local.recorder is None or not _local.recorder.dry:
        with _disable_current_modes():
            _set_bits(result, 0)
    if _local.recorder is not None:
        _local.recorder.zeroed(result)
    return result


def _set_bits(tensor: torch.Tensor, byte: int = 0xFF) -> None:
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu":
        ctypes.memset(tensor.data_ptr(), byte, storage.nbytes())
        return
    # A recorder would take it for a part of the operator.
    with _disable_current_modes():
        storage.fill_(byte)


def read(numbers: torch.Tensor) -> list[Size]:
    """Sizes that data decides, from a contiguous int64 tensor of any shape that kernels have written.

    The host waits for them. Raises Decline while a CUDA graph is captured, which cannot wait.
    """
    if numbers.device.type != "cpu" and torch.cuda.is_current_stream_capturing():
        raise Decline("a size that data decides while a CUDA graph is captured", lasting=False)
    if _local.recorder is None:
        return [Size(value, i) for i, value in enumerate(awaited(numbers))]
    sizes: list[Size] = _local.recorder.read(numbers)
    return sizes


def number_in(tensor: torch.Tensor) -> Any:
    """The number that a 0-d CPU tensor among the call's arguments holds, for kernels to take."""
    if _local.recorder is not None:
        return _local.recorder.number(tensor)
    with _disable_current_modes():
        return tensor.item()


def held(number: int | Drawn) -> torch.Tensor:
    """A 0-d int64 tensor on the CPU that holds a seed or an offset: a result, not for kernels to take."""
    with _disable_current_modes():
        result = torch.empty((), dtype=torch.int64)
    ctypes.c_int64.from_address(result.data_ptr()).value = value_of(number)
    if _local.recorder is not None:
        _local.recorder.held(result, number)
    return result


def first(vector: torch.Tensor, count: Size) -> torch.Tensor:
    """So many of the elements of a vector that `empty` made, in its memory: a result, not for kernels to take."""
    with _disable_current_modes():
        # Not a view of a tensor that nobody has.
        result = vector.new_empty(0).set_(vector.untyped_storage(), 0, (count.value,), (1,))
    if _local.recorder is not None:
        _local.recorder.shortened(result, vector, count)
    return result


def awaited(numbers: torch.Tensor) -> list[int]:
    """What kernels have written to a tensor, once they have."""
    found: list[int] = numbers.flatten().tolist()
    return found


def refuse_if_negative(flag: torch.Tensor, reason: str, lasting: bool = False) -> None:
    """Decline, for this reason, where an int64 tensor's only element is negative, for which the host waits.

    Before anything is written or drawn: a repeated call leaves to ATen what it refuses. If `lasting`, calls like one
    that was declined are not looked at again.
    """
    (checked,) = read(flag)
    if checked.value < 0:
        raise Decline(reason, lasting=lasting)
    if lasting and _local.recorder is not None:
        _local.recorder.refuses(reason)
    # The mark of it in a plan, which allocates nothing of a negative size.
    empty((checked,), torch.uint8, flag.device)


def unrepeatable(reason: str) -> None:
    """Have no plan repeat the call, which depends on what is not in its key: every one like it goes through Python."""
    if _local.recorder is not None:
        _local.recorder.unrecordable(reason)


def _draw(generator: torch.Generator, advance: int) -> tuple[int, int]:
    if native is not None:
        seed, offset = native.draw(generator, advance)
        return seed, offset
    if generator.device.type == "cpu":
        # Such a generator has no offset: each draw is a seed, by ATen's own kernel.
        outer = swap_inside_kernel(True)
        try:
            with _disable_current_modes():
                return int(torch.empty((), dtype=torch.int64).random_(generator=generator)), 0
        finally:
            swap_inside_kernel(outer)
    with brief:
        offset = generator.get_offset()
        generator.set_offset(offset + advance)
        return generator.initial_seed(), offset


def random_state(
    device: torch.device, advance: int, generator: torch.Generator | None = None
) -> tuple[int | Drawn, int | Drawn]:
    """(seed, offset) for a kernel that draws random numbers, from `generator` or else the device's own.

    The generator moves on by `advance`, a multiple of 4, as PyTorch's Philox counters do. A kernel takes both as
    `tl.int64` parameters that it is not specialised for, so that a plan serves any. Raises Decline for another device's
    generator, and while a CUDA graph is captured, whose replays would repeat the numbers.
    """
    # One that was made for "cuda" has no index.
    if generator is not None and generator.device not in (device, torch.device(device.type)):
        raise Decline(f"a generator of device {generator.device}")
    if device.type == "cpu":
        source = torch.default_generator if generator is None else generator
    elif torch.cuda.is_current_stream_capturing():
        raise Decline("random numbers while a CUDA graph is captured", lasting=False)
    else:
        source = torch.cuda.default_generators[device.index or 0] if generator is None else generator
    dry = _local.recorder is not None and _local.recorder.dry
    seed, offset = (0, 0) if dry else _draw(source, advance)
    if _local.recorder is None:
        return seed, offset
    draw = _local.recorder.draw(advance)
    return Drawn(seed, draw, 0), Drawn(offset, draw, 1)
