"""`Device`, the record of a kind of device, and `Override`, a vendor's own host function of an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tritonite.devices.runtime import Runtime

# The kinds for which engines have tables of their own.
KINDS = ("nvidia", "amd", "interpreter", "none")
# The engines that have tables, by the names that `Tables` has.
ENGINES = (
    "attention",
    "convolution",
    "cross_entropy",
    "delta_rule",
    "depthwise",
    "divergence",
    "fft",
    "gemm",
    "gemm_blockwise",
    "gemm_descriptors",
    "gemm_few_rows",
    "gemm_one_row",
    "gemm_pointers",
    "histogram",
    "indexing",
    "linalg",
    "moe",
    "norm",
    "pointwise",
    "quantized",
    "random",
    "rows",
    "sampling",
    "searching",
    "segmented",
    "short_convolution",
    "sorting",
)


class Override(NamedTuple):
    """A vendor's host function of one overload.

    Attributes:
        function: takes the operator's arguments by position and `outs=`, and returns a sequence of results, as every
            host function does. It may raise Decline, and then ATen serves the call.
        serves: takes the same arguments by position. Where it returns False, Tritonite's own host function runs.
    """

    function: Callable[..., Sequence[Any]]
    serves: Callable[..., bool] = lambda *args: True


class NativeDriver(NamedTuple):
    """The driver by which the native dispatcher launches on a kind of device.

    Attributes:
        by_default: whether calls go through the dispatcher unless TRITONITE_NATIVE is 0. Otherwise they do if it is 1.
        driver: "cuda" or "hip", the path of a shared library, or the path of a C++ source that is built at first use.
            The library exports `tritonite_driver`, which runtime/native/driver.h describes. "" for interpreted devices
            whose memory is the host's.
    """

    by_default: bool
    driver: str = ""


@dataclass(frozen=True)
class Device:
    """A kind of device: how PyTorch calls it, its capabilities, limits and block sizes, and what a vendor adds.

    Nothing in the record belongs to one operator.

    Attributes:
        kind: the name, such as "nvidia", under which tables and measurements are kept; "none" for compilation without a
            device.
        type: PyTorch's device type.
        dispatch_key: the key that overrides register at; "" if nothing runs here.
        flat_bytes: bytes of the widest operand that a program handles in a flat iteration space. A block has 2,048
            elements at most, except in the interpreter.
        tile_bytes: bytes of the widest operand that a program handles in a two-dimensional iteration space.
        transpose_tile: (rows, columns) of a tile where operands are contiguous along different dimensions.
        num_warps: warps of a pointwise program.
        row_elements: elements that a program reduces at a time.
        row_columns: contiguous elements of a tile in a column reduction.
        programs: programs that fill the device.
        target: name of Triton's backend; "" where the interpreter runs the kernels.
        runtime: streams, generators, memory and properties of the devices present.
        aten: "cuda" or "cpu": the ATen kernels whose results Tritonite's are, where ATen's differ.
        like: the kind whose table an engine uses where `tables` has none.
        tables: by engine, a function from the table of `like` to this kind's table.
        overrides: a vendor's host functions by overload, such as "gelu" or "add.Tensor": an `Override`, or the
            "module:name" of one.
        native: the driver of the native dispatcher; None if calls go through Python.
        plugin: the package that gave the record; filled in when the plug-in is loaded.
        most_warps: warps of the largest program.
        warp_size: threads of a warp. `runtime.warp_size` may know better for one device.
        shared_memory: bytes of shared memory that a program may use; Triton keeps the rest.
        registers: 32-bit registers of a multiprocessor.
        tensor_cores: dtypes that tensor cores multiply. With float32, products may be computed in TF32 where PyTorch
            allows it.
        tma: tensor descriptors are served by hardware. `runtime.has_tma` may know better for one device.
        fp64: the device computes in float64. Otherwise ATen serves calls with float64 tensors. Triton must convert
            float64 in any case, because kernels take numbers as parameters of float64.
        fp8: Triton converts float8_e4m3fn. `runtime.has_float8` may know better for one device.
        small_elements: the size up to which a pointwise iteration space counts as small.
        small_block: elements of the smallest block in a flat space; 0 where all spaces have the same block.
        small_transpose_tile: `transpose_tile` of small spaces.
        interpreted: Triton's interpreter runs the kernels.
        host_memory: the host reads and writes the device's memory at its own addresses.
        captures: launches can be captured into CUDA graphs.
        pointer_ranges: Triton specialises kernels on whether a buffer is below 2 GiB.
        profiled: PyTorch's profiler times kernels under the activity of CUDA.
        forward_progress: a running program keeps running while other programs wait for it.
        ptx: kernels may contain NVIDIA's assembly.
        aten_measured: it is known where ATen's kernels are faster.
        unverified: operators and families whose results or speed nobody has verified on this kind of device. They stay
            ATen's unless a caller names them.
        options: compiler options of every kernel.
        flushing: compiler options of kernels in which subnormals may be 0.
    """

    kind: str
    type: str
    dispatch_key: str
    flat_bytes: int
    tile_bytes: int
    transpose_tile: tuple[int, int]
    num_warps: int
    row_elements: int
    row_columns: int
    programs: int
    runtime: Runtime
    target: str = ""
    aten: str = "cuda"
    like: str = ""
    tables: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    overrides: Mapping[str, Override | str] = field(default_factory=dict)
    native: NativeDriver | None = None
    plugin: str = ""
    most_warps: int = 16
    warp_size: int = 32
    shared_memory: int = 226 * 1024
    registers: int = 2**16
    tensor_cores: frozenset[torch.dtype] = frozenset()
    tma: bool = False
    fp64: bool = True
    fp8: bool = False
    small_elements: int = 0
    small_block: int = 0
    small_transpose_tile: tuple[int, int] = (0, 0)
    interpreted: bool = False
    host_memory: bool = False
    captures: bool = False
    pointer_ranges: bool = False
    profiled: bool = False
    forward_progress: bool = False
    ptx: bool = False
    aten_measured: bool = False
    unverified: frozenset[str] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)
    flushing: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kind, by the name that users know."""
        return self.kind

    @property
    def accelerator(self) -> str:
        """The type whose generators `torch.random.fork_rng` saves besides the CPU's."""
        return "cuda" if self.type == "cpu" else self.type

    @property
    def aten_key(self) -> str:
        """The dispatch key of the ATen kernels that calls fall back to, whose overloads are replaced."""
        return {"cuda": "CUDA", "cpu": "CPU"}[self.aten] if self.dispatch_key else "CPU"

    @property
    def served_by(self) -> str:
        """The kind and the package that gave it, for people to read."""
        return self.kind if self.plugin in ("", "tritonite") else f"{self.kind} ({self.plugin})"
