"""Tiles of attention's kernels by device kind, bytes of an element and head size; where ATen's kernels are faster."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from tritonite import devices
from tritonite.devices.tables import Tables

# Bytes of keys and values that L2 keeps for programs that read the same heads.
CACHED = 32 * 2**20
# Elements of the widest head that a tile holds.
LARGEST_HEAD = 256
# Scores of wider heads that lie in memory at a time, in float32, and keys of them that a program reads at a time.
WIDE_SCORES = 2**25
WIDE_BLOCK = 2048
# Scores of a wider head, over all batches, from which on these products are faster than ATen's kernel on Hopper.
WIDE_FASTER = 2**22


def _registers(threads: int) -> int:
    """Return the registers per thread if `threads` share a multiprocessor's 65536, rounded down to a multiple of 8."""
    return 65536 // threads // 8 * 8


class Tile(NamedTuple):
    """Queries and keys of a tile, with the compiler's warps and stages."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int = 4
    num_stages: int = 2

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Tiles(NamedTuple):
    """Tiles of the forward kernel, of backward_dq (`query`) and of backward_dkdv (`key`)."""

    forward: Tile
    query: Tile
    key: Tile


# By bytes of an element, then by the largest head size. With 16-bit floats two or three programs of 4 warps share a
# multiprocessor, so that one's exponentials overlap another's products.
# Products of 64 float32 rows have 4 warps: on Hopper, Triton gives a second warp group the same rows.
_NVIDIA = {
    2: {
        64: Tiles(Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(128, 64, 4, 2)),
        128: Tiles(Tile(128, 64, 8, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 3)),
        256: Tiles(Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
    },
    4: {
        64: Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
        128: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
        256: Tiles(Tile(32, 32, 8, 1), Tile(64, 16, 4, 1), Tile(16, 32, 8, 1)),
    },
}
# For 64 KiB of shared memory, as AMD's compute units have.
_SMALL = {
    2: {
        128: Tiles(Tile(128, 64, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
        256: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    },
    4: {
        128: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        256: Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    },
}
# In the interpreter every tile costs milliseconds.
_INTERPRETER = {size: {256: Tiles(*[Tile(128, 128)] * 3)} for size in (2, 4)}
_TABLES = Tables("attention", {"nvidia": _NVIDIA, "none": _NVIDIA, "amd": _SMALL, "interpreter": _INTERPRETER})

# Bytes of shared memory from which on devices use _NVIDIA's tiles: sm_90 and sm_100.
_LARGE = 220 * 1024


def tiles(kind: str, itemsize: int, head: int, shared_memory: int, biased: bool, dropped: bool = False) -> Tiles:
    """Return the tiles for elements of `itemsize` bytes and heads of `head` elements, a power of two up to 256.

    `shared_memory` is in bytes per program. A bias and random numbers take registers: with a bias, the forward kernel
    for 16-bit floats has half as many keys per tile; with dropout, dk and dv of short heads have the tile of longer
    ones.
    """
    table = _SMALL if _TABLES[kind] is _NVIDIA and shared_memory < _LARGE else _TABLES[kind]
    found = table[itemsize][min(most for most in table[itemsize] if head <= most)]
    if dropped and table is _NVIDIA and itemsize == 2 and head <= 64:
        found = found._replace(key=table[2][128].key)
    if biased and table is _NVIDIA and itemsize == 2:
        return found._replace(forward=found.forward._replace(BLOCK_N=found.forward.BLOCK_N // 2))
    return found


# Head sizes for which these kernels are at least about as fast as ATen's on Hopper, by ATen's backend, bytes of an
# element and pass. Everything else is slower there or not measured.
_PASSES = "forward", "warp specialised", "backward", "warp specialised backward"
FASTER: dict[tuple[str, int, str], range] = {
    **{(backend, 2, done_by): range(33, 257) for backend in ("flash", "efficient") for done_by in _PASSES},
    ("flash", 2, "backward"): range(33, 129),
    ("cudnn", 2, "warp specialised"): range(33, 257),
    ("cudnn", 2, "warp specialised backward"): range(65, 257),
    # float32 heads of over 128 elements leave room for tiles of 32 rows only.
    ("efficient", 4, "forward"): range(1, 129),
    ("efficient", 4, "backward"): range(1, 65),
}
# Head sizes for calls with a bias. The gradient of a bias is not measured.
FASTER_WITH_BIAS: dict[tuple[str, int, str], range] = {
    ("cudnn", 2, "warp specialised"): range(33, 129),
    ("efficient", 2, "warp specialised"): range(33, 129),
    ("efficient", 2, "warp specialised backward"): range(33, 129),
    **{each: heads for each, heads in FASTER.items() if each[1] == 4},
}
# Keys from which on heads of up to 64 elements are as fast as cuDNN's. Over fewer keys a tile's start and end, which
# nothing overlaps, are too large a part of its time.
_LONG, _LONG_WITH_BIAS = 2048, 512
# Head sizes for calls without a bias whose tiles do not fill the device. backward_dkdv has one program for all query
# heads of a key head, so for heads of 64 too few programs are left.
FASTER_OF_FEW: dict[tuple[str, int, str], range] = FASTER | {
    ("cudnn", 2, "warp specialised"): range(17, 257),
    ("cudnn", 2, "warp specialised backward"): range(17, 257),
    ("flash", 2, "backward"): range(65, 129),
}


def aten_is_faster(
    backend: str,
    done_by: str,
    itemsize: int,
    head: int,
    biased: bool,
    keys: int,
    few: bool = False,
    short: bool = False,
) -> bool:
    """Return whether a backend of ATen's is faster on Hopper than the kernels that a pass is done by.

    `done_by` is "forward", "warp specialised", "decoding", "backward", "warp specialised backward" or "backward of a
    bias". `few` and `short` are the results of `are_few` and `are_short`.
    """
    if done_by == "decoding":
        return False
    if few and short and done_by in ("forward", "warp specialised"):
        # Start and end of a tile of 64 rows, most of them empty, take longer than its keys.
        return True
    faster = FASTER_WITH_BIAS if biased else FASTER_OF_FEW if few else FASTER
    if head not in faster.get((backend, itemsize, done_by), ()):
        return True
    short = backend == "cudnn" and done_by == "warp specialised" and head <= 64
    if biased:
        return short and keys < _LONG_WITH_BIAS
    return short and not few and keys < _LONG


# Registers per thread of the producer warp.
COPYING = 24


class WarpSpecialized(NamedTuple):
    """A tile of the warp-specialised forward kernel: 64 queries for each of one to three consumer warp groups.

    BLOCK_M, BLOCK_N: queries and keys of a tile.
    num_stages: blocks of keys and of values in shared memory.
    ping_pong: groups take turns to multiply, so that one's exponentials overlap another's products.
    overlapped: a group's own products of a block overlap the next block's exponentials.
    persistent: programs take tile after tile.
    resident: programs that share a multiprocessor and its registers.
    most_stages: upper bound of stages of persistent programs, where shared memory has room.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_stages: int
    ping_pong: bool = True
    overlapped: bool = True
    persistent: bool = False
    resident: int = 1
    most_stages: int = 0

    @property
    def groups(self) -> int:
        return self.BLOCK_M // 64

    @property
    def maxnreg(self) -> int:
        """Registers per thread at launch, when the producer's warp group has the share of a consumer group."""
        return _registers(self.resident * (self.groups + 1) * 128)

    @property
    def registers(self) -> int:
        """Registers per consumer thread after the producer has released most of its own."""
        return min(240, (self.maxnreg * (self.groups + 1) - COPYING) // self.groups // 8 * 8)


# By the larger of block_d and block_v. With short heads another group's products suffice to overlap exponentials, and a
# tile's start and end weigh more: persistent programs overlap them with another tile.
WARP_SPECIALIZED = {
    64: WarpSpecialized(192, 128, 2, ping_pong=False, overlapped=False, persistent=True, most_stages=3),
    128: WarpSpecialized(128, 128, 2),
    256: WarpSpecialized(128, 64, 2, ping_pong=False),
}
# Tiles of fewer queries. They cost more time per query, but waste less in the last wave, and of a causal tile less lies
# beyond the diagonal. _FINER_TIME is their time per query relative to the usual tile's.
_FINER_TILES = {64: WarpSpecialized(128, 128, 2, persistent=True, most_stages=4)}
_FINER_TIME = 1.12
# Tiles for at most _SHORT keys. regressions: attention_few_keys
_SHORT, _SHORT_TILES = 256, {64: WarpSpecialized(128, 64, 2, overlapped=False, persistent=True, most_stages=4)}
# Tiles for calls that do not fill the device: two programs per multiprocessor.
_FEW_TILES = {
    64: WarpSpecialized(64, 128, 2, ping_pong=False, resident=2),
    128: WarpSpecialized(64, 64, 2, ping_pong=False, resident=2),
}


# Tiles per persistent program from which on causal tiles are taken in pairs of a long and a short one.
PAIRED_ROUNDS = 8


def are_few(queries: int, heads: int, multiprocessors: int) -> bool:
    """Return whether tiles of 64 queries leave multiprocessors with less than their two programs."""
    return -(-queries // 64) * heads <= _RESIDENT * multiprocessors


def are_short(queries: int, keys: int) -> bool:
    """Return whether queries are few enough to decode, and keys too few, but more than a block."""
    return queries <= FEW_QUERIES and _BLOCK_KEYS < keys < MANY_KEYS


def warp_specialized(
    head: int, value: int, queries: int, keys: int, heads: int, multiprocessors: int, causal: bool = False
) -> WarpSpecialized:
    """Return the forward tile for a call; `head` and `value` are block_d and block_v, `heads` counts over batches.

    With 0 multiprocessors the number of heads does not decide (invariant mode).
    """
    size = max(head, value)
    if size in _FEW_TILES and are_few(queries, heads, multiprocessors):
        return _FEW_TILES[size]
    if keys <= _SHORT and size in _SHORT_TILES:
        return _SHORT_TILES[size]
    usual, finer = WARP_SPECIALIZED[size], _FINER_TILES.get(size)
    if causal and finer is not None:
        return finer
    if finer is not None and multiprocessors:
        usual_time, finer_time = [
            -(-(-(-queries // tile.BLOCK_M) * heads) // multiprocessors) * tile.BLOCK_M for tile in (usual, finer)
        ]
        if finer_time * _FINER_TIME < usual_time:
            return finer
    return usual


class Ring(NamedTuple):
    """A tile of a warp-specialised backward kernel: two consumer warp groups with 64 rows each, and a ring of blocks.

    block: rows of a block of the other operands, keys for backward_dq and queries for backward_dkdv.
    num_stages: blocks in shared memory; value_stages: blocks of values, None for num_stages.
    separate: both groups have the same 64 keys, one accumulates dv and the other dk.
    """

    block: int
    num_stages: int
    value_stages: int | None = None
    separate: bool = False


class WarpSpecializedBackward(NamedTuple):
    """Tiles of backward_dq (`query`) and of backward_dkdv (`key`) for 16-bit floats."""

    query: Ring
    key: Ring


# By the larger of block_d and block_v.
WARP_SPECIALIZED_BACKWARD = {
    64: WarpSpecializedBackward(Ring(128, 2), Ring(64, 3)),
    128: WarpSpecializedBackward(Ring(128, 2), Ring(64, 2)),
    256: WarpSpecializedBackward(Ring(64, 2, value_stages=1), Ring(64, 2, separate=True)),
}
# Blocks of a bias need shared memory, too; heads of 256 leave too little.
WARP_SPECIALIZED_BACKWARD_WITH_BIAS = {
    64: WARP_SPECIALIZED_BACKWARD[64],
    128: WARP_SPECIALIZED_BACKWARD[128]._replace(query=Ring(64, 2)),
}


def warp_specialized_backward(head: int, value: int, biased: bool) -> WarpSpecializedBackward:
    """Return the backward tiles for block_d and block_v."""
    return (WARP_SPECIALIZED_BACKWARD_WITH_BIAS if biased else WARP_SPECIALIZED_BACKWARD)[max(head, value)]


# Hopper's float32 kernels: keys of a block for 64 queries (BLOCK_N), and queries of a block for 64 keys (BLOCK_M).
FP32 = Tile(32, 32)
# Programs of fp32 backward_dkdv per multiprocessor, and with registers capped for one more, some of which spill.
_USUAL_RESIDENT, _MORE_RESIDENT = 2, 3
# Registers per thread that leave room for one more program of the float32 backward kernels.
CAPPED_REGISTERS = _registers(FP32.num_warps * 32 * _MORE_RESIDENT)


def registers_for_keys(programs: int, multiprocessors: int) -> int | None:
    """Return the register cap of fp32 backward_dkdv if it shortens the launch, else None.

    With more programs per multiprocessor each takes longer in proportion, but fewer waves may waste less in the last.
    regressions: attention_fp32_registers, attention_fp32_registers_bias
    """

    def time(resident: int) -> int:
        return resident * -(-programs // (resident * multiprocessors))

    less = time(_MORE_RESIDENT) < time(_USUAL_RESIDENT)
    return CAPPED_REGISTERS if less else None


# Decoding serves at most FEW_QUERIES queries, FEW_ROWS rows (queries times heads that share a key head), and at least
# MANY_KEYS keys.
FEW_QUERIES, FEW_ROWS, MANY_KEYS = 16, 128, 256
# The keys of one block of the forward kernels' tiles.
_BLOCK_KEYS = 64
# Rows of the smallest tile that tensor cores multiply.
SMALLEST_TILE = 16
# Fewest keys of a split. A program's blocks wait for each other, while programs that fit on the device run at once.
LEAST_SPLIT_KEYS = 64
# Programs per multiprocessor whose blocks are in flight at once, and bytes of keys, and of values, in a block.
_RESIDENT, _TILE_BYTES = 2, 16 * 1024
# Start and end of a program, in blocks of keys.
_OVERHEAD = 2
# Rows of a tile from which on products take time, and blocks that all rows see have a loop without masks.
UNMASKED_ROWS = 64
COMBINING_WARPS = 4


def decoding(itemsize: int, head: int, rows: int, device: torch.device) -> Tile:
    """Return the decoding tile for `rows` rows, cache elements of `itemsize` bytes and heads of `head`, a power of two.

    With few rows all time is that of reading keys and values. Blocks are in flight while one is multiplied, so that two
    programs of a multiprocessor have 64 KiB each in flight.
    """
    shared_memory = devices.shared_memory(device)
    if devices.current.interpreted:
        return Tile(max(SMALLEST_TILE, 1 << max(0, min(rows, 64) - 1).bit_length()), 128)
    stages = 1 if not devices.current.tma else 2 if shared_memory < 2**17 else 3 if shared_memory < _LARGE else 4
    # float8 is converted in registers and counts as 2 bytes; products of float32 need many registers.
    keys = max(16, min(128, _TILE_BYTES // (1 if stages > 2 else 2) // (max(2, itemsize) * max(16, head))))
    most = 32 if itemsize == 4 else 128 if stages > 2 else 64
    queries = next(queries for queries in (SMALLEST_TILE, 32, 64, 128) if rows <= queries or queries == most)
    # With many rows products take time as well: several programs help more than deeper prefetch.
    return Tile(queries, keys, 8 if queries == 128 else 4, min(stages, 3) if queries >= UNMASKED_ROWS else stages)


def latent_decoding(itemsize: int, rows: int, device: torch.device) -> Tile:
    """Return the decoding tile for `rows` rows over latents of up to 512 elements, which are keys and values at once.

    A block of latents is read once. Its accumulator takes most registers, so that more rows share several programs.
    """
    shared_memory = devices.shared_memory(device)
    if devices.current.interpreted:
        return Tile(max(SMALLEST_TILE, 1 << max(0, min(rows, 64) - 1).bit_length()), 128)
    if not devices.current.tma:
        return Tile(SMALLEST_TILE, 16, 4, 1)
    if itemsize == 4:
        return Tile(SMALLEST_TILE, 16, 8, 2 if shared_memory >= 2**17 else 1)
    if shared_memory < 2**17:
        return Tile(SMALLEST_TILE, 32, 4, 2)
    queries = next(queries for queries in (SMALLEST_TILE, 32, 64) if rows <= queries or queries == 64)
    return Tile(queries, 32, 8 if queries == 64 else 4, 3 if shared_memory >= _LARGE or queries < 64 else 2)


@functools.lru_cache(maxsize=1024)
def keys_of_split(programs: int, keys: int, block: int, multiprocessors: int) -> int:
    """Return the keys of a split, a multiple of `block`, for `programs` programs that would take all keys.

    The choice has the shortest time: waves times the blocks of a split and a program's overhead. Two waves' worth of
    programs are not split further: ending programs make room for others, and partial results cost memory traffic.
    """
    slots, blocks = _RESIDENT * multiprocessors, max(1, -(-keys // block))
    most = max(1, min(blocks * block // LEAST_SPLIT_KEYS, 2 * slots // max(1, programs)))

    def time(each: int) -> int:
        return -(-programs * -(-blocks // each) // slots) * (each + _OVERHEAD)

    # min takes the first, so the longest split among equals.
    return block * min([-(-blocks // splits) for splits in range(1, most + 1)], key=time)
