"""The tiles that attention is cut into, by the kind of device, the bytes of an element and the size of a head."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

# The bytes of keys and values that a second-level cache keeps for programs that read the same.
CACHED = 32 * 2**20
# The registers of a multiprocessor.
_REGISTERS = 65536


def _registers(threads: int) -> int:
    """Those of each of so many threads that share a multiprocessor, in eights."""
    return _REGISTERS // threads // 8 * 8


class Tile(NamedTuple):
    """Queries and keys that a program takes at a time."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int = 4
    num_stages: int = 2

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Tiles(NamedTuple):
    """Those of the forward pass, of the gradient of queries, and of those of keys and values."""

    forward: Tile
    query: Tile
    key: Tile


# By the bytes of an element, and by the largest head that they are for. Those of half types were the fastest of 65 on
# an H200: two or three programs of 4 warps to a multiprocessor hide each other's exponentials.
# Products of 64 rows in float32 have one group of 4 warps: on Hopper Triton gives a second group the same rows.
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
# For 64 KiB of shared memory, as AMD's multiprocessors have.
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
# In the interpreter every block costs milliseconds.
_INTERPRETER = {size: {256: Tiles(*[Tile(128, 128)] * 3)} for size in (2, 4)}
_TABLES = {"nvidia": _NVIDIA, "none": _NVIDIA, "amd": _SMALL, "interpreter": _INTERPRETER}


# What the tiles of _NVIDIA need of shared memory: as much as sm_90 and sm_100 have.
_LARGE = 220 * 1024


def tiles(kind: str, size: int, head: int, shared: int, biased: bool, dropped: bool = False) -> Tiles:
    """Those for elements of `size` bytes and heads of at most `head` elements, a power of two to 256.

    `shared` are the bytes of shared memory that a program may have. A bias has registers of its own, which the forward
    pass of half types takes from half of the keys. So have random numbers: beside them the gradients of keys of short
    heads have the tile of longer ones.
    """
    table = _SMALL if _TABLES[kind] is _NVIDIA and shared < _LARGE else _TABLES[kind]
    found = table[size][min(most for most in table[size] if head <= most)]
    if dropped and table is _NVIDIA and size == 2 and head <= 64:
        found = found._replace(key=table[2][128].key)
    if biased and table is _NVIDIA and size == 2:
        return found._replace(forward=found.forward._replace(BLOCK_N=found.forward.BLOCK_N // 2))
    return found


# By a backend that SDPA chooses from, the bytes of an element and a pass: the sizes of heads that these kernels are as
# fast for on Hopper's GPUs. On an H200 the forward pass in half types has 0.96 to 1.03 of cuDNN's speed for heads of
# 128 and 256, 1.2 to 2.3 of FlashAttention's, 2.4 to 4.6 of CUTLASS's. Gradients have 0.90 to 0.99 of cuDNN's for heads
# of 128, 1.18 for 256, 0.81 to 0.96 for 64; 1.04 to 2.05 of FlashAttention's by the warp-specialised kernels, 1.06 to
# 1.28 by those for all devices, but 0.82 for 256; 2.4 to 10 of CUTLASS's. In float32 the forward pass has 1.5 to
# 2.7 of CUTLASS's speed for heads of 64, and gradients 1.5 to 2.7 (0.67 for 128). Others have not been measured.
FASTER: dict[tuple[str, int, str], range] = {
    ("cudnn", 2, "warp specialised"): range(33, 257),
    ("cudnn", 2, "warp specialised backward"): range(65, 257),
    ("flash", 2, "forward"): range(33, 257),
    ("flash", 2, "warp specialised"): range(33, 257),
    ("flash", 2, "backward"): range(33, 129),
    ("flash", 2, "warp specialised backward"): range(33, 257),
    ("efficient", 2, "forward"): range(33, 257),
    ("efficient", 2, "warp specialised"): range(33, 257),
    ("efficient", 2, "backward"): range(33, 257),
    ("efficient", 2, "warp specialised backward"): range(33, 257),
    # Heads of over 128 elements leave room for tiles of 32 rows, which take all keys in turn.
    ("efficient", 4, "forward"): range(1, 129),
    ("efficient", 4, "backward"): range(1, 65),
}
# The same with a bias: 1.24 to 1.48 of cuDNN's speed for heads of 128, 1.22 to 1.29 for 64 over 512 keys and more; 2.5
# to 3.9 of CUTLASS's, gradients too; in float32 1.35 to 2.2 of CUTLASS's, gradients 1.6 to 1.8 for heads of 64.
# The gradient of a bias has not been measured.
FASTER_WITH_BIAS: dict[tuple[str, int, str], range] = {
    ("cudnn", 2, "warp specialised"): range(33, 129),
    ("efficient", 2, "warp specialised"): range(33, 129),
    ("efficient", 2, "warp specialised backward"): range(33, 129),
    ("efficient", 4, "forward"): range(1, 129),
    ("efficient", 4, "backward"): range(1, 65),
}
# From so many keys on, heads of up to 64 are as fast as cuDNN's. Over fewer they have 0.69 to 0.90 of its speed: the
# beginning and the end of a tile are a larger part of it. With a bias fewer have not been measured.
_LONG, _LONG_WITH_BIAS = 2048, 512
# Where tiles are few, and there is no bias: in both passes 1.11 to 1.23 of cuDNN's speed for heads of 64, and for those
# of 32 1.39 in the forward pass and 1.23 with gradients, but 0.91 to 0.97 and 0.79 to 0.83 where tiles are many. The
# programs for keys by the kernels for all devices have all heads of queries that share them: few of those have 0.70 of
# FlashAttention's speed for heads of 64.
FASTER_OF_FEW: dict[tuple[str, int, str], range] = FASTER | {
    ("cudnn", 2, "warp specialised"): range(17, 257),
    ("cudnn", 2, "warp specialised backward"): range(17, 257),
    ("flash", 2, "backward"): range(65, 129),
}


def aten_is_faster(
    backend: str, done_by: str, size: int, head: int, biased: bool, keys: int, few: bool = False, short: bool = False
) -> bool:
    """Whether a backend of ATen's is, on Hopper's GPUs, for elements of `size` bytes, heads of `head` and so many keys.

    A pass is done by the "forward" kernel, the "warp specialised" one, that of "decoding", those of "backward" or of
    "warp specialised backward", or of "backward of a bias". There may be `few` tiles, of `short` rows. Decoding has
    0.94 to 5 of ATen's speed.
    """
    if done_by == "decoding":
        return False
    if few and short and done_by in ("forward", "warp specialised"):
        # Beginning and ending a tile of 64 rows, most of them empty, takes longer than its keys.
        return True
    faster = FASTER_WITH_BIAS if biased else FASTER_OF_FEW if few else FASTER
    if head not in faster.get((backend, size, done_by), ()):
        return True
    short = backend == "cudnn" and done_by == "warp specialised" and head <= 64
    if biased:
        return short and keys < _LONG_WITH_BIAS
    return short and not few and keys < _LONG


# The registers of a thread of the warp that copies.
COPYING = 24


class WarpSpecialized(NamedTuple):
    """A tile of the warp-specialised forward pass of half types: 64 queries for each group of four warps, of at most 3.

    The groups take turns to multiply where they `ping_pong`. A block's products are under the exponentials of the next
    where they are `overlapped`, and `persistent` programs take tile after tile, whose keys are copied as many as
    `most_stages` blocks ahead where there is room. So many programs are `resident` in a multiprocessor, whose registers
    they share.
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
        """A thread's registers when a program begins, in eights; the warp that copies has as many as a group."""
        return _registers(self.resident * (self.groups + 1) * 128)

    @property
    def registers(self) -> int:
        """Those of a group's thread once the warp that copies has given most of its own away."""
        return min(240, (self.maxnreg * (self.groups + 1) - COPYING) // self.groups // 8 * 8)


# By the powers of two that hold a head and a value, those of one size. With short heads another group's products are
# enough to have under exponentials, and a tile's beginning and end are a larger part of it: programs have them under
# another tile's.
WARP_SPECIALIZED = {
    64: WarpSpecialized(192, 128, 2, ping_pong=False, overlapped=False, persistent=True, most_stages=3),
    128: WarpSpecialized(128, 128, 2),
    256: WarpSpecialized(128, 64, 2, ping_pong=False),
}
# Tiles of fewer queries, which take so much longer for each, and are fewer queries to wait for in the last round. Of
# causal ones, whose keys are few, less is beyond the diagonal.
_FINER_TILES = {64: WarpSpecialized(128, 128, 2, persistent=True, most_stages=4)}
_FINER_TIME = 1.12
# For so few keys: 1.27 times as fast over 256 of them as tiles of 128, and 0.88 over 512.
_SHORT, _SHORT_TILES = 256, {64: WarpSpecialized(128, 64, 2, overlapped=False, persistent=True, most_stages=4)}
# Where tiles are few, of which two have room in a multiprocessor.
_FEW_TILES = {
    64: WarpSpecialized(64, 128, 2, ping_pong=False, resident=2),
    128: WarpSpecialized(64, 64, 2, ping_pong=False, resident=2),
}


# From so many tiles for each persistent program on, causal ones are taken in pairs of a long and a short one.
PAIRED_ROUNDS = 8


def are_few(queries: int, heads: int, multiprocessors: int) -> bool:
    """Whether so few tiles of the fewest queries leave multiprocessors idle."""
    return -(-queries // 64) * heads <= _RESIDENT * multiprocessors


def are_short(queries: int, keys: int) -> bool:
    """Return whether queries are as few as in decoding, and keys are too few for it but take several blocks."""
    return queries <= FEW_QUERIES and 64 < keys < MANY_KEYS


def warp_specialized(
    head: int, value: int, queries: int, keys: int, heads: int, multiprocessors: int, causal: bool = False
) -> WarpSpecialized:
    """That for heads and values in powers of two, which the larger decides, of so many queries, keys and heads."""
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
    """A tile of a warp-specialised backward pass: two groups of four warps, with 64 rows of their own each.

    A `block` of the others' rows is taken at a time, and there are num_stages of them in shared memory, of values
    perhaps another number. Groups that are `apart` have the gradients of keys and of values of the same 64 rows.
    """

    block: int
    num_stages: int
    value_stages: int | None = None
    apart: bool = False


class WarpSpecializedBackward(NamedTuple):
    """The tiles for the gradient of queries, and for those of keys and values, of half types."""

    query: Ring
    key: Ring


# By the power of two that holds a head and a value.
WARP_SPECIALIZED_BACKWARD = {
    64: WarpSpecializedBackward(Ring(128, 2), Ring(64, 3)),
    128: WarpSpecializedBackward(Ring(128, 2), Ring(64, 2)),
    256: WarpSpecializedBackward(Ring(64, 2, value_stages=1), Ring(64, 2, apart=True)),
}
# Blocks of a bias take of shared memory what keys and values leave; beside those of 256 there is too little.
WARP_SPECIALIZED_BACKWARD_WITH_BIAS = {
    64: WARP_SPECIALIZED_BACKWARD[64],
    128: WARP_SPECIALIZED_BACKWARD[128]._replace(query=Ring(64, 2)),
}


def warp_specialized_backward(head: int, value: int, biased: bool) -> WarpSpecializedBackward:
    """Those for heads and values in powers of two, which the larger decides."""
    return (WARP_SPECIALIZED_BACKWARD_WITH_BIAS if biased else WARP_SPECIALIZED_BACKWARD)[max(head, value)]


# What float32's passes on Hopper take at a time of queries, for 64 keys, and of keys, for 64 queries.
IN_PARTS = Tile(32, 32)
# So many programs for keys are in a multiprocessor as a rule; with as many registers as leave room for one more, which
# the assembler moves to memory in part, each takes longer in proportion.
_USUAL_RESIDENT, _MORE_RESIDENT = 2, 3
# The registers of a thread where programs of float32's gradients have room for one more.
REGISTERS_OF_MORE = _registers(IN_PARTS.num_warps * 32 * _MORE_RESIDENT)


def registers_for_keys(programs: int, multiprocessors: int) -> int | None:
    """Those that a thread has where float32's gradients of keys take fewer rounds with more programs at a time.

    12 heads of 1,500 keys are 288 programs, two rounds of an H200 or one: gradients took 485 us, with a bias of every
    score 595, and take 459 and 528.
    """

    def time(resident: int) -> int:
        return resident * -(-programs // (resident * multiprocessors))

    less = time(_MORE_RESIDENT) < time(_USUAL_RESIDENT)
    return REGISTERS_OF_MORE if less else None


# Queries, and rows of queries by the heads that share a key, that are few; and keys that are worth sharing.
FEW_QUERIES, FEW_ROWS, MANY_KEYS = 16, 128, 256
# The rows of the smallest tile, which tensor cores take.
FEW = 16
# The keys that a program has at least where several share a head's, a block of them for heads of 128: the blocks of one
# program wait for each other, while programs that the device has room for take no longer than one.
LEAST = 64
# Programs of a multiprocessor whose tiles are on their way at once, each of so many bytes of keys, and of values.
_RESIDENT, _TILE_BYTES = 2, 16 * 1024
# A program's beginning and end, in blocks of keys.
_OVERHEAD = 2
# The rows of a tile from which on multiplying takes time, and keys that all rows see are not compared.
APART = 64
COMBINING_WARPS = 4


def decoding(kind: str, size: int, head: int, rows: int, shared: int) -> Tile:
    """The tile for `rows` of elements of `size` bytes and heads of `head`, a power of two, over many keys.

    Where rows are few all time is that of reading keys and values: blocks of them are on their way while one is
    multiplied, so that two programs of a multiprocessor have 64 KiB each under way.
    """
    if kind == "interpreter":
        return Tile(max(FEW, 1 << max(0, min(rows, 64) - 1).bit_length()), 128)
    stages = 1 if kind == "amd" else 2 if shared < 2**17 else 3 if shared < _LARGE else 4
    # float8 is converted in registers, as if it were wider; products of float32 take many.
    keys = max(16, min(128, _TILE_BYTES // (1 if stages > 2 else 2) // (max(2, size) * max(16, head))))
    most = 32 if size == 4 else 128 if stages > 2 else 64
    queries = next(queries for queries in (FEW, 32, 64, 128) if rows <= queries or queries == most)
    # Of many rows products take time as well, and so several programs are wanted more than deep copies.
    return Tile(queries, keys, 8 if queries == 128 else 4, min(stages, 3) if queries >= APART else stages)


@functools.lru_cache(maxsize=1024)
def keys_of_split(programs: int, keys: int, block: int, multiprocessors: int) -> int:
    """The keys of a split, in whole blocks, where so many programs would take all of them.

    The fewest rounds of the device by the time of each, of which a beginning and an end are a part. Where there are
    two rounds, programs that end make room for others, and nothing is shared: what splits leave takes memory.
    """
    slots, blocks = _RESIDENT * multiprocessors, max(1, -(-keys // block))
    most = max(1, min(blocks * block // LEAST, 2 * slots // max(1, programs)))

    def time(each: int) -> int:
        return -(-programs * -(-blocks // each) // slots) * (each + _OVERHEAD)

    # The largest of those that take as long.
    return block * min([-(-blocks // splits) for splits in range(1, most + 1)], key=time)
