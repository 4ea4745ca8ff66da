"""The contract between a call and its host function: what the function may take, do and return.

A host function may

- allocate memory: `empty`, `empty_strided`, `zeros`
- take views, also with another dtype, and copy: torch's `copy_`, `clone`, `contiguous`, `to`
- launch kernels, draw random numbers (`random_state`) and read data-dependent sizes (`read`)

A recorder notes these steps once, and the native dispatcher repeats them for every call with the same key. A value that
differs between such calls reaches the function as a `Symbol`, to hand on but not to look at: a scalar argument, a
random seed, a data-dependent size. `settings` hold for all calls of a plan, because they are part of the key.
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
    """Options in force for all kernels.

    `faster_only` declines calls for which ATen is known to be faster on this kind of device. `invariant` makes the bits
    of a row's results independent of the number of rows in the batch.
    """

    faster_only: bool
    invariant: bool

    @property
    def bits(self) -> int:
        """The settings as an integer, which the native dispatcher puts into its keys."""
        return self.faster_only | self.invariant << 1

    @staticmethod
    def of_bits(bits: int) -> Settings:
        return Settings(bool(bits & 1), bool(bits & 2))


class _Local(threading.local):
    recorder: Any = None
    in_host_function = False
    # The overload whose host function runs.
    overload = ""
    # Whether the running host function belongs to an operator that writes into arguments, and has launched a kernel.
    writes = False
    launched = False
    # Devices for which this thread has a cuBLAS handle.
    blas: frozenset[torch.device] = frozenset()
    inside_kernel = False
    settings: Settings | None = None


_local = _Local()
_in_force: Settings | None = None
_comparing = True
_strict = False
# Errors that Python raises for arguments that a host function does not check.
_UNFORESEEN = (IndexError, OverflowError, TypeError, ValueError)
_poison = False
# The native dispatcher once in use. It also draws for host functions, so that one lock guards a generator.
native: Any = None


def recorder() -> Any:
    """Return the `Recorder` that notes what this thread's host functions do, or None."""
    return _local.recorder


def swap_recorder(recorder: Any) -> Any:
    """Set this thread's recorder. Returns the one before."""
    outer, _local.recorder = _local.recorder, recorder
    return outer


def inside_kernel() -> bool:
    """Return whether this thread runs a kernel in the interpreter, so that its calls of ATen must not be overridden."""
    return _local.inside_kernel


def swap_inside_kernel(inside: bool) -> bool:
    """Set `inside_kernel` here and in the native dispatcher. Returns the value before."""
    outer, _local.inside_kernel = _local.inside_kernel, inside
    if native is not None:
        native.set_inside_kernel(inside)
    return outer


def in_host_function() -> bool:
    """Return whether this thread runs an operator's host function, which may decline."""
    return _local.in_host_function


def running_overload() -> str:
    """Return the overload whose host function this thread runs, or ""."""
    return _local.overload


@contextlib.contextmanager
def serving(overload: str) -> Iterator[None]:
    """Have `running_overload` return a name within the with block, in which a kernel of the overload is loaded."""
    outer, _local.overload = _local.overload, overload
    try:
        yield
    finally:
        _local.overload = outer


def set_strict(on: bool) -> bool:
    """Set whether host functions raise errors of Python and of compilers instead of declining; for tests.

    Returns the value before.
    """
    global _strict
    before, _strict = _strict, on
    return before


def is_strict() -> bool:
    """Return the value that `set_strict` has set."""
    return _strict


def note_launch() -> None:
    """Note that this thread's host function launches a kernel. From then on Python's errors leave it."""
    _local.launched = True


def has_written() -> bool:
    """Return whether this thread's host function may have written into arguments, and so can no longer decline."""
    return _local.writes and _local.launched


def run_host(
    host: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    outs: Sequence[torch.Tensor],
    writes: bool,
    falls_back: bool = False,
    overload: str = "",
) -> Sequence[Any]:
    """Run a host function and return its results. Raises Decline if the function does.

    Args:
        writes: whether the operator writes into arguments.
        falls_back: whether an IndexError, OverflowError, TypeError or ValueError before the first launch declines the
            call, so that ATen raises its own error. `set_strict(True)` has the error raised instead.
        overload: the operator's name, for `running_overload`.
    """
    outer = _local.in_host_function, _local.writes, _local.launched, _local.overload
    _local.in_host_function, _local.writes, _local.launched, _local.overload = True, writes, False, overload
    try:
        return host(values, outs)
    except _UNFORESEEN as error:
        if _strict or _local.launched or not falls_back:
            raise
        raise Decline(f"{type(error).__name__}: {error}", lasting=False) from error
    finally:
        _local.in_host_function, _local.writes, _local.launched, _local.overload = outer


def is_capturing() -> bool:
    """Return whether this thread's current stream is captured into a CUDA graph."""
    return devices.current.runtime.is_capturing()


def prepare_blas(device: torch.device) -> None:
    """Have PyTorch create this thread's cuBLAS handle for a device, as ATen's first matrix product does.

    ATen's product needs the handle if a kernel that is not compiled declines while a CUDA graph is captured. No handle
    can be created during a capture.
    """
    if device in _local.blas or is_capturing():
        return
    if _local.recorder is None or not _local.recorder.dry:
        devices.of(device).runtime.prepare_blas(device)
        _local.blas |= {device}


def settings_of(faster_only: bool = True, invariant: bool = False) -> Settings:
    """Return the settings for these options of `enable`.

    `faster_only` stays off on devices without measurements of ATen. It also stays off with `invariant`, because a
    decline may depend on the number of rows.
    """
    comparing = _comparing and devices.current.aten_measured and not invariant
    return Settings(faster_only and comparing, invariant)


def put_in_force(settings: Settings | None) -> None:
    """Set the settings of every thread's calls; None restores the defaults."""
    global _in_force
    _in_force = settings


def settings() -> Settings:
    """Return the settings of the call that this thread makes."""
    return _local.settings or _in_force or settings_of()


def fusion(allowed: bool = True) -> dict[str, Any]:
    """Return compile options that turn fused multiply-add off in invariant mode, or where it is not `allowed`.

    Triton fuses a product and a sum only if no mask is between them. A mask depends on whether a block is whole, and so
    on the number of rows. Where threads exchange the terms of a sum, each fuses the product of its own term. Their
    copies of the sum then differ in the last bit.
    """
    fused = devices.current.interpreted or (allowed and not settings().invariant)
    return {} if fused else {"enable_fp_fusion": False}


@contextlib.contextmanager
def under(settings: Settings) -> Iterator[None]:
    """Give this thread's calls these settings within the with block, whatever another thread puts in force."""
    outer, _local.settings = _local.settings, settings
    try:
        yield
    finally:
        _local.settings = outer


def set_comparing(on: bool) -> bool:
    """Set whether later `settings_of` may have `faster_only` on. Returns the value before; for tests and benchmarks."""
    global _comparing
    before, _comparing = _comparing, on
    return before


def decline_if_slower(slower: bool) -> None:
    """Raise Decline if ATen is known to be faster (`slower`) and `faster_only` is in force."""
    if slower and settings().faster_only:
        raise Decline(ATEN_IS_FASTER)


def limit(value: Any, limits: Limits) -> None:
    """Restrict a number of the call, now and in every replay, to `limits`. Raises Decline for a number outside them."""
    if isinstance(value, Number):
        given = value.limits
        value.limits = limits if given is None else given.and_(limits)
        if _local.recorder is not None:
            _local.recorder.limited(value)
        value = value.value
    if not limits.hold(value):
        # Without the value, since each reason has a counter.
        raise Decline("a number outside the range that kernels serve", lasting=False)


def set_poison(on: bool) -> None:
    """Set whether fresh memory is filled with all bits set, which is nan, to show elements that nobody writes."""
    global _poison
    _poison = on


def empty_strided(
    shape: Sequence[int | Size], strides: Sequence[int | Size], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate a result or scratch tensor. Sizes and strides may be data-dependent."""
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
    """Allocate a contiguous result or scratch tensor. Only its first size may be data-dependent."""
    sizes = [max(size, 1) for size in shape[:0:-1]]
    strides = (*itertools.accumulate(sizes, lambda a, b: a * b, initial=1),) if len(shape) else ()
    return empty_strided(shape, strides[::-1], dtype, device)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a contiguous tensor of zeros. A plan sets it to zero in every replay."""
    result = empty(shape, dtype, device)
    if _local.recorder is None or not _local.recorder.dry:
        with _disable_current_modes():
            _set_bits(result, 0)
    if _local.recorder is not None:
        _local.recorder.zeroed(result)
    return result


def filling(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context whose launches alone write a fresh tensor, from the call's arguments and numbers.

    A replay uses the tensor of the one before again, without these launches, if it passes the same to them on the same
    stream. No other launch may write the tensor, and it is no result.
    """
    return contextlib.nullcontext() if _local.recorder is None else _local.recorder.filling(tensor)


def _set_bits(tensor: torch.Tensor, byte: int = 0xFF) -> None:
    storage = tensor.untyped_storage()
    if devices.of(tensor.device).host_memory:
        ctypes.memset(tensor.data_ptr(), byte, storage.nbytes())
        return
    # Hidden from the recorder, because poison is no step of the operator.
    with _disable_current_modes():
        storage.fill_(byte)


def read(numbers: torch.Tensor) -> list[Size]:
    """Return data-dependent sizes from a contiguous int64 tensor of any shape that kernels have written.

    The host waits for the kernels. Raises Decline while a CUDA graph is captured, which cannot wait.
    """
    if is_capturing():
        raise Decline("a data-dependent size while a CUDA graph is captured", lasting=False)
    if _local.recorder is None:
        return [Size(value, i) for i, value in enumerate(awaited(numbers))]
    sizes: list[Size] = _local.recorder.read(numbers)
    return sizes


def number_in(tensor: torch.Tensor) -> Any:
    """Return the number in a 0-d CPU tensor among the call's arguments, to pass to kernels."""
    if _local.recorder is not None:
        return _local.recorder.number(tensor)
    with _disable_current_modes():
        return tensor.item()


def held(number: int | Drawn) -> torch.Tensor:
    """Return a 0-d int64 CPU tensor that holds a seed or an offset: a result, not an argument of kernels."""
    with _disable_current_modes():
        result = torch.empty((), dtype=torch.int64)
    ctypes.c_int64.from_address(result.data_ptr()).value = value_of(number)
    if _local.recorder is not None:
        _local.recorder.held(result, number)
    return result


def first(vector: torch.Tensor, count: Size) -> torch.Tensor:
    """Return the first `count` elements of a vector from `empty`, sharing its memory: a result, not for kernels."""
    with _disable_current_modes():
        # No view, because the caller never sees the base.
        result = vector.new_empty(0).set_(vector.untyped_storage(), 0, (count.value,), (1,))
    if _local.recorder is not None:
        _local.recorder.shortened(result, vector, count)
    return result


def awaited(numbers: torch.Tensor) -> list[int]:
    """Wait for the kernels that write a tensor, and return its elements."""
    values: list[int] = numbers.flatten().tolist()
    return values


def refuse_if_negative(flag: torch.Tensor, reason: str, lasting: bool = False) -> None:
    """Raise Decline with `reason` if the only element of an int64 tensor is negative. The host waits for the element.

    Call it before anything is written or drawn, because a replay also falls back to ATen here. If `lasting`, later
    calls with the key of a declined one go to ATen at once.
    """
    (checked,) = read(flag)
    if checked.value < 0:
        raise Decline(reason, lasting=lasting)
    if lasting and _local.recorder is not None:
        _local.recorder.refuses(reason)
    # Marks the check in a plan: a replay refuses the call when a buffer's size is negative.
    empty((checked,), torch.uint8, flag.device)


def unrepeatable(reason: str) -> None:
    """Have no plan made of the call, because it depends on something outside its key. Such calls run through Python."""
    if _local.recorder is not None:
        _local.recorder.unrecordable(reason)


def _draw(generator: torch.Generator, advance: int) -> tuple[int, int]:
    if native is not None:
        seed, offset = native.draw(generator, advance)
        return seed, offset
    with brief:
        drawn = devices.of(generator.device).runtime.draw(generator, advance)
    if drawn is not None:
        return drawn
    # Without an offset each draw is a seed from ATen's own kernel.
    outer = swap_inside_kernel(True)
    try:
        with _disable_current_modes():
            return int(torch.empty((), dtype=torch.int64).random_(generator=generator)), 0
    finally:
        swap_inside_kernel(outer)


def random_state(
    device: torch.device, advance: int, generator: torch.Generator | None = None
) -> tuple[int | Drawn, int | Drawn]:
    """Return (seed, offset) for a kernel that draws random numbers, from `generator` or the device's default one.

    The generator advances by `advance`, a multiple of 4, as PyTorch's Philox counters do. A kernel declares both as
    unspecialised `tl.int64` parameters, so that one plan serves all values. Raises Decline for a generator of another
    device, and while a CUDA graph is captured, because the graph's replays would repeat the numbers.
    """
    # A generator made for "cuda" has no index.
    if generator is not None and generator.device not in (device, torch.device(device.type)):
        raise Decline(f"a generator of device {generator.device} for tensors on {device}")
    if is_capturing():
        raise Decline("random numbers while a CUDA graph is captured", lasting=False)
    source = devices.of(device).runtime.default_generator(device) if generator is None else generator
    dry = _local.recorder is not None and _local.recorder.dry
    seed, offset = (0, 0) if dry else _draw(source, advance)
    if _local.recorder is None:
        return seed, offset
    draw = _local.recorder.draw(advance)
    return Drawn(seed, draw, 0), Drawn(offset, draw, 1)
