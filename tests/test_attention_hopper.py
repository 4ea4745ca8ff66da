"""The warp-specialised forward pass of attention: the calls it serves, its algorithm without a GPU, and its values."""
# Over 500 lines: all forms of the warp-specialised forward kernel share one reference and its interpreter.

import dataclasses
import itertools
import math
import types

import pytest
import torch
import warps
from conftest import FULL, covering
from warps import Descriptor, Pointer, number

import tritonite
from tritonite import devices
from tritonite.engine.attention import forward, scores, table
from tritonite.engine.attention.hopper import descriptors
from tritonite.engine.attention.hopper import forward as hopper
from tritonite.engine.attention.hopper.descriptors import bias_descriptor
from tritonite.engine.attention.problem import Packed, Problem
from tritonite.engine.attention.prologue import HeadStrides, longest_first
from tritonite.engine.attention.table import WarpSpecialized

on_sm_90 = pytest.mark.skipif(
    not devices.has_wgmma(torch.device(tritonite.device)), reason="Gluon's kernel is for sm_90, which it needs to run"
)


def drawn(*shape, dtype=torch.float16):
    return torch.randn(shape, device=tritonite.device).to(dtype)


def by_definition(work, empty="inf"):
    """Return (result, logsumexp) in float64. For rows that see no key they are 0 and `empty`."""
    query, key, value = [x.double() for x in (work.query, work.key, work.value)]
    key, value = [x.repeat_interleave(work.ratio, 1) for x in (key, value)]
    scores = query @ key.mT * work.factor
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device)
    if work.causal:
        seen = seen.tril(work.diagonal)
    scores = scores.masked_fill(~seen, -torch.inf) + (0 if work.bias is None else work.bias.double())
    logarithms = scores.logsumexp(-1)
    logarithms = torch.where(logarithms == -torch.inf, float(empty), logarithms)
    return scores.softmax(-1).nan_to_num(0) @ value, logarithms


def problem(S=20, T=None, D=64, V=None, H=4, shared=2, B=2, causal=True, diagonal=0, scale=None, dtype=torch.float16):
    shapes = (B, H, S, D), (B, shared, T or S, D), (B, shared, T or S, V or D)
    return Problem(*[drawn(*shape, dtype=dtype) for shape in shapes], None, scale, causal, diagonal, "ieee")


def few_heads(of_one_batch):
    """Return sizes for `problem`, without the full set half as many programs: one batch, or one head of keys."""
    if FULL:
        return {}
    return {"B": 1, "H": 4, "shared": 2} if of_one_batch else {"B": 2, "H": 2, "shared": 1}


# Dimensions (batch, heads, queries) over which a bias is broadcast.
BROADCASTS = {
    "full": (False,) * 3,
    "heads": (False, True, False),
    "batch": (True, True, False),
    "keys": (False, True, True),
}


def with_bias(work, broadcast="full", hidden=0.3):
    """Add a bias in rows padded as ATen pads them, with -inf in a slice, in a block of keys and in a row."""
    shape = [*work.query.shape[:3], work.keys]
    padded = [1 if shared else size for size, shared in zip(shape, BROADCASTS[broadcast], strict=False)]
    bias = drawn(*padded, -(-work.keys // 16) * 16, dtype=work.query.dtype)[..., : work.keys]
    bias.masked_fill_(torch.rand(bias.shape, device=bias.device) < hidden, -math.inf)
    bias[..., 64:192] = -math.inf
    if bias.shape[2] > 1:
        bias[0, 0, 3] = bias[-1, -1, -1] = -math.inf
    return work._replace(bias=bias.expand(shape))


def with_extremes(work, first, column, broadcast="heads"):
    """Add a bias whose rows, from `first` on, have the numbers of padding masks.

    Rows have the least finite number in all columns or in all but one, the largest in one column or in all, and -inf in
    all columns but one of the least number.
    """
    bias = with_bias(work, broadcast, hidden=0).bias.nan_to_num(neginf=0).contiguous()
    info = torch.finfo(bias.dtype)
    bias[..., first : first + 2, :], bias[..., first + 3, :] = info.min, info.max
    bias[..., first + 1, column], bias[..., first + 2, column] = -3, info.max
    bias[..., first + 4, :], bias[..., first + 4, column] = -math.inf, info.min
    rows = torch.nn.functional.pad(bias, (0, -bias.shape[3] % 16))
    return work._replace(bias=rows[..., : bias.shape[3]])


def result(work):
    return work.query.new_full((*work.query.shape[:3], work.value.shape[3]), math.nan)


@pytest.fixture
def of_hopper(monkeypatch):
    monkeypatch.setattr(devices, "has_wgmma", lambda device: True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256), (80, 80), (96, 128), (8, 8)])
def test_serves_operands_that_descriptors_can_address(of_hopper, dtype, sizes):
    work = problem(D=sizes[0], V=sizes[1], dtype=dtype)
    assert hopper.serves(work, result(work))
    rows_first = work._replace(**{name: getattr(work, name).mT.contiguous().mT for name in ("query",)})
    assert not hopper.serves(rows_first, result(work))
    by_rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (work.query, work.key, work.value)]
    assert hopper.serves(Problem(*by_rows, *work[3:]), result(work))
    packed = drawn(2, 20, 3, 4, 64, dtype=dtype).permute(2, 0, 3, 1, 4)
    assert hopper.serves(Problem(*packed, *work[3:]), result(Problem(*packed, *work[3:])))


def test_leaves_other_calls_to_the_kernel_for_all_devices(of_hopper, monkeypatch):
    work = problem()
    out = result(work)
    assert hopper.serves(work, out)
    starts = torch.zeros(2, dtype=torch.int32)
    bias = drawn(2, 4, 20, 32)
    others = [
        work._replace(bias=drawn(2, 4, 20, 20)),
        work._replace(bias=bias[..., 1:21]),
        work._replace(bias=bias[..., ::1].float()[..., :20]),
        work._replace(bias=bias[..., :1].expand(-1, -1, -1, 20)),
        work._replace(bias=drawn(2, 4, 24, 20).mT[:, :, :, :20]),
        work._replace(bias=bias[..., :20] > 0),
        work._replace(packed=Packed(starts, starts, 20, 20, True, True)),
        work._replace(key=work.key[:, :, :0], value=work.value[:, :, :0]),
        work._replace(query=drawn(2, 4, 20, 72)[..., 4:-4]),
        work._replace(query=drawn(2, 4, 20, 66)[..., :64]),
        work._replace(key=work.key[:, :1].expand(-1, 2, -1, -1)),
    ]
    assert not any(hopper.serves(other, out) for other in others)
    wide = problem(dtype=torch.float32)
    assert not hopper.serves(wide, result(wide))
    monkeypatch.setattr(devices, "has_wgmma", lambda device: False)
    assert not hopper.serves(work, out)


@pytest.mark.parametrize("broadcast", BROADCASTS)
def test_serves_a_bias_that_a_descriptor_can_address(of_hopper, broadcast):
    work = with_bias(problem(), broadcast)
    assert hopper.serves(work, result(work))
    described = bias_descriptor(work.bias, 64, 128)
    assert described.shape == [
        1 if shared else size for size, shared in zip((2, 4, 20), BROADCASTS[broadcast], strict=True)
    ] + [20]
    assert described.block_shape == [1, 1, 1 if broadcast == "keys" else 64, 128]
    assert described.base.data_ptr() == work.bias.data_ptr()


# Masks that users give `scaled_dot_product_attention`, made from (batch, heads, queries, keys).
MASKS = {
    "of keys": lambda shape: drawn(shape[0], 1, 1, shape[3]),
    "of keys, expanded": lambda shape: drawn(shape[0], 1, 1, shape[3]).expand(shape),
    "of one sequence": lambda shape: drawn(*shape[2:]),
    "of heads": lambda shape: drawn(1, *shape[1:]),
    "of a longer one": lambda shape: drawn(shape[0], 1, shape[2], 56)[..., : shape[3]],
    "transposed": lambda shape: drawn(1, 1, shape[3], shape[2]).mT,
}


@pytest.mark.parametrize("keys", [24, 21])
@pytest.mark.parametrize("as_bool", [False, True])
@pytest.mark.parametrize("given", MASKS)
def test_masks_of_sdpa_reach_the_kernel(of_hopper, monkeypatch, given, as_bool, keys):
    """ATen turns bools into numbers, pads rows to a multiple of 8 elements, and expands masks to all scores."""
    asked = []
    monkeypatch.setattr(hopper, "attention", lambda *given: asked.append(given))
    query, key = drawn(2, 4, 20, 128), drawn(2, 4, keys, 128)
    mask = MASKS[given]((2, 4, 20, keys))
    if as_bool:
        mask = torch.where(mask > 0, 0.0, torch.tensor(-math.inf, dtype=mask.dtype, device=mask.device))
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        mask = torch.nn.functional.pad(mask, (0, 8 - keys % 8))[..., :keys]
    op = tritonite.overloads()["_scaled_dot_product_efficient_attention"]
    op(query, key, key, mask.expand(2, 4, 20, keys), False)
    assert len(asked) == 1


def test_the_host_function_asks(of_hopper, monkeypatch):
    called = []
    monkeypatch.setattr(hopper, "attention", lambda *given: called.append(given))
    work = problem()
    out = result(work)
    forward.attention(work, out, None, "0")
    assert called == [(work, out, None, "0")] and out.isnan().all()
    biased = work._replace(bias=drawn(2, 4, 20, 20))
    forward.attention(biased, out, None, "0")
    assert len(called) == 1 and not out.isnan().any()


def run(work, tile, at_once, own_staging, programs=3, empty="inf", slots=2):
    """Run the kernel's source in plain Python, a thread for each warp group; return (result, logsumexp)."""
    out = result(work)
    logsumexp = torch.full((*out.shape[:2], -(-out.shape[2] // 32) * 32), math.nan)
    block_d, block_v = hopper.block_sizes(work)
    rows, heads = hopper.ROWS.value, work.query.shape[1]
    blocks = -(-work.queries // tile.BLOCK_M)
    if not own_staging:
        slots, programs = 1, blocks * work.batch * heads
    constants = ("ROWS", "LOG2E", "_COPYING", "_PAIRED_ROUNDS")
    kernel = warps.Kernel(
        hopper.attend_warp_specialized.jit.fn,
        warps.device_functions(scores, descriptors, hopper),
        at_once,
        # The packing of 16-bit numbers in registers is left to the compiler.
        _opaque=lambda number: number,
        _packed=lambda x, dtype: x.to(dtype),
        _unpacked=lambda pairs, dtype, total: pairs,
        LN2=scores.LN2.value,
        **{name: getattr(hopper, name).value for name in constants},
    )
    meta = dataclasses.asdict(work.meta(table.Tile(tile.BLOCK_M, tile.BLOCK_N), out, empty=empty))
    bias = work.bias
    if bias is not None:
        described = bias_descriptor(bias, rows, tile.BLOCK_N)
        bias = Descriptor(bias.as_strided(described.shape, bias.stride()), described.block_shape)
    meta |= {"block_d": block_d, "block_v": block_v, "index": torch.int64}
    meta |= {"consumers": tile.groups, "ping_pong": tile.ping_pong, "overlapped": tile.overlapped, "slots": slots}
    meta |= {"own_staging": own_staging, "registers": tile.registers, "stages": tile.num_stages}
    for program in range(programs):
        kernel(
            program,
            Descriptor(work.query, [1, 1, rows, block_d]),
            Descriptor(work.key, [1, 1, tile.BLOCK_N, block_d]),
            Descriptor(work.value, [1, 1, tile.BLOCK_N, block_v]),
            bias,
            Descriptor(out, [1, 1, rows, block_v]),
            Pointer(logsumexp),
            *(HeadStrides(*logsumexp.stride()), heads, work.batch * heads, work.group, blocks, work.queries),
            *(number(work.keys), work.diagonal, logsumexp.shape[2], programs, torch.tensor(work.factor).double()),
            META=types.SimpleNamespace(**meta),
        )
    return out, logsumexp


TILES = [
    WarpSpecialized(128, 128, 2),
    WarpSpecialized(128, 64, 3),
    WarpSpecialized(64, 64, 2, ping_pong=False),
    WarpSpecialized(128, 32, 2, ping_pong=False),
    WarpSpecialized(128, 64, 2, ping_pong=False, overlapped=False),
    WarpSpecialized(128, 32, 2, overlapped=False),
    WarpSpecialized(192, 64, 2, ping_pong=False, overlapped=False),
    WarpSpecialized(192, 128, 3),
    WarpSpecialized(128, 256, 2, ping_pong=False, overlapped=False),
]


def _has_room_for_a_bias(tile, D=64, V=64):
    """Return whether a tile with a bias fits in 227 KiB; blocks of one row are aligned to 128 bytes, as TMA wants."""
    one = tile.BLOCK_M * (D + (V if D != V else 0))
    blocks = tile.num_stages * tile.BLOCK_N * (D + V + tile.BLOCK_M)
    return 2 * (one + blocks) + hopper._BARRIER_BYTES <= 227 * 1024 and 2 * tile.BLOCK_N >= 128


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize(
    ("sizes", "tile", "at_once", "own_staging"),
    covering(
        4,
        [(300, 300, True, 0, None), (130, 290, True, 160, -0.3), (200, 90, True, -110, 0.1), (65, 257, False, 0, 0.0)],
        TILES,
        [False, True],
        [False, True],
    ),
)
def test_warp_groups_are_synchronised(sizes, tile, at_once, own_staging):
    """No group waits forever. Nothing is read before it has arrived, or overwritten before it was used."""
    S, T, causal, diagonal, scale = sizes
    heads = few_heads(own_staging)
    work = problem(S=S, T=T, V=80 if own_staging else 64, causal=causal, diagonal=diagonal, scale=scale, **heads)
    out, logsumexp = run(work, tile, at_once, own_staging)
    expected, logarithms = by_definition(work)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(logsumexp[:, :, :S].double(), logarithms, atol=1e-5, rtol=1e-5)
    assert logsumexp[:, :, S:].eq(math.inf).all()


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize(
    ("sizes", "broadcast", "tile"),
    covering(
        4,
        [
            (300, 300, True, 0, None, True, "0"),
            (200, 90, True, -110, -0.3, False, "inf"),
            (65, 257, False, 0, 0.0, True, "inf"),
        ],
        BROADCASTS,
        TILES,
    ),
)
def test_warp_groups_add_a_bias(sizes, broadcast, tile):
    """The bias is copied with the keys, has blocks of -inf, and rows that see no key."""
    S, T, causal, diagonal, scale, own_staging, empty = sizes
    heads = few_heads(broadcast != "full")
    work = with_bias(problem(S=S, T=T, causal=causal, diagonal=diagonal, scale=scale, **heads), broadcast)
    out, logsumexp = run(work, tile, False, own_staging, empty=empty)
    expected, logarithms = by_definition(work, empty)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(logsumexp[:, :, :S].double(), logarithms, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_biases_of_extreme_numbers_in_python(dtype):
    """A row of one number gives the mean of its values. A column of the largest number gives that column's value."""
    work = with_extremes(problem(S=80, dtype=dtype, causal=False), 61, 5)
    for tile in (TILES[1], TILES[4]):
        out, logsumexp = run(work, tile, False, True, empty="0")
        expected, logarithms = by_definition(work)
        far = 1e-2 if dtype is torch.float16 else 1.6e-2
        torch.testing.assert_close(out.double(), expected, atol=far, rtol=far)
        torch.testing.assert_close(logsumexp[:, :, :80].double(), logarithms, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize(
    ("sizes", "tile", "at_once"),
    covering(2, [(5, 450 if FULL else 330, 4), (1, 600, 2)], TILES, [False, True]),
)
def test_tiles_of_one_program_have_different_blocks(sizes, tile, at_once):
    """Successive tiles differ in their number of masked blocks. A program has a few tiles, or many tiles in pairs."""
    programs, S, H = sizes
    work = problem(S=S, H=H, shared=2, B=2 if H == 4 else 1)
    out, logsumexp = run(work, tile, at_once, own_staging=True, programs=programs)
    expected, logarithms = by_definition(work)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(logsumexp[:, :, :S].double(), logarithms, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 7, 8, 12])
@pytest.mark.parametrize(("blocks", "heads"), [(1, 12), (3, 4), (4, 3), (5, 5), (7, 9), (8, 12)])
def test_programs_share_tiles_evenly(blocks, heads, programs):
    """Every tile occurs once. No program has more than one tile, or one pair of tiles, above the mean."""
    tiles, taken, lengths = blocks * heads, [], []
    here = types.SimpleNamespace(
        minimum=min, cdiv=lambda x, y: -(-x // y), program_id=lambda _: program, constexpr=None
    )
    scope = {"gl": here, "tl": here, "_PAIRED_ROUNDS": table.PAIRED_ROUNDS}
    for function in (longest_first, hopper._balanced_tile, hopper._tile_end):
        scope[function.fn.__name__] = types.FunctionType(function.fn.__code__, scope)
    for program in range(programs):
        end = scope["_tile_end"](tiles, programs, types.SimpleNamespace(causal=True, slots=2))
        own = range(program, end, programs)
        mine = [scope["_balanced_tile"](tile, blocks, heads, heads, programs) for tile in own]
        taken += mine
        lengths.append(sum(blocks - block for block, _ in mine))
    assert sorted(taken) == [(block, head) for block in range(blocks) for head in range(heads)]
    assert max(lengths) <= sum(lengths) / programs + blocks + (1 if tiles >= table.PAIRED_ROUNDS * programs else 0)


@pytest.mark.skipif(devices.current.type != "cpu", reason="what stands in for a GPU")
@pytest.mark.parametrize("worst", [math.nan, math.inf])
def test_infinities_and_nan_in_keys(worst):
    """A key is not finite, in a masked block or in another one."""
    for at, T in ((3, 150), (7, 150), (64 + 2, 150), (64 + 3, 150), (128 + 7, 150), (64 + 3, 128), (3, 64)):
        work = problem(S=70, T=T, H=2, causal=False)
        work.query[:] = work.query.abs()
        work.key[0, 1, at] = worst
        out, logsumexp = run(work, WarpSpecialized(128, 64, 2), True, True)
        assert out[0, 1].isnan().all() and logsumexp[0, 1, :70].isnan().all()
        assert out[0, 0].isfinite().all() and out[1].isfinite().all()


@on_sm_90
@pytest.mark.parametrize("worst", [math.nan, math.inf])
@pytest.mark.parametrize("D", [64, 128])
def test_infinities_and_nan_in_keys_on_a_device(D, worst):
    for T in (128, 640, 700):
        work = problem(S=300, T=T, D=D, H=16, B=4, shared=16, causal=False)
        work.query[:] = work.query.abs()
        for at in range(16):
            work.key[2, at, 37 * at % T] = work.key[3, at, -1 - at] = worst
        out, logsumexp = attended(work)
        assert out[2:].isnan().all() and logsumexp[2:].isnan().all()
        assert out[:2].isfinite().all() and logsumexp[:2].isfinite().all()


def attended(work, empty="inf"):
    """Return (result, logsumexp) of the host function, and check that memory around them is unchanged."""
    whole = work.query.new_full((*work.query.shape[:2], work.queries + 3, work.value.shape[3] + 8), math.nan)
    out = whole[:, :, : work.queries, : work.value.shape[3]]
    logsumexp = torch.full((*out.shape[:2], -(-out.shape[2] // 32) * 32), math.nan, device=out.device)
    forward.attention(work, out, logsumexp, empty)
    assert whole[:, :, work.queries :].isnan().all() and whole[..., out.shape[3] :].isnan().all()
    assert logsumexp[:, :, work.queries :].eq(math.inf).all()
    return out, logsumexp[:, :, : work.queries]


def check(work, empty="inf"):
    """Compare the warp-specialised kernel with the definition and with the portable kernel.

    The kernel runs with the tile for few queries, and with the tile for many.
    """
    assert hopper.serves(work, result(work))
    far = 4e-3 if work.query.dtype is torch.float16 else 3e-2
    expected, logarithms = by_definition(work, empty)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "serves", lambda *_: False)
        other, others = attended(work, empty)
    for chosen in (table.warp_specialized, lambda head, value, *_: table.WARP_SPECIALIZED[max(head, value)]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table, "warp_specialized", chosen)
            out, logsumexp = attended(work, empty)
            assert all(map(torch.equal, (out, logsumexp), attended(work, empty)))
        torch.testing.assert_close(out.double(), expected, atol=far, rtol=far)
        torch.testing.assert_close(logsumexp.double(), logarithms, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(out, other, atol=far, rtol=far)
        torch.testing.assert_close(logsumexp, others, atol=2e-5, rtol=2e-5)


def chosen(size, value=None):
    """Return the tiles for all numbers of queries and of heads, with 132 multiprocessors."""
    queries, heads = (1, 64, 300, 512, 4096, 16384), (1, 8, 32, 48, 64, 100, 128, 512)
    sizes = itertools.product(queries, (64, 4096), heads, (False, True))
    return {table.warp_specialized(size, value or size, *some, 132, masked) for *some, masked in sizes}


@pytest.mark.parametrize("size", [64, 128, 256])
def test_registers_of_tiles(size):
    """A multiprocessor has 64 Ki registers. A thread has less than 256, in multiples of 8."""
    for tile in chosen(size):
        copying, multiplying = 128 * table.COPYING, 128 * tile.groups * tile.registers
        assert tile.BLOCK_M % 64 == 0 and tile.registers % 8 == 0 < tile.registers < 256
        assert (
            tile.resident * (copying + multiplying) <= tile.resident * 128 * (tile.groups + 1) * tile.maxnreg <= 2**16
        )


@pytest.mark.parametrize("D", [64, 128, 256])
def test_shared_memory_has_room_for_a_bias(D):
    """Every tile fits in 227 KiB, also where values have another size than keys."""
    assert all(_has_room_for_a_bias(tile, D, V) for V in (D, D // 2) for tile in chosen(D, V))
    if D in table.WARP_SPECIALIZED_BACKWARD_WITH_BIAS:
        queries, keys = table.warp_specialized_backward(D, D, True)
        room = 227 * 1024 - hopper._BARRIER_BYTES
        assert 2 * (2 * 128 * D + queries.num_stages * queries.block * (2 * D + 128)) <= room
        assert 2 * (2 * 128 * D + keys.num_stages * keys.block * (2 * D + 128 + 4)) <= room


def test_aten_is_faster_unless_the_table_says_otherwise(monkeypatch):
    """An entry of the table is for one backend, pass and element size."""
    monkeypatch.setattr(table, "FASTER", {("flash", 2, "forward"): range(33, 129)})
    monkeypatch.setattr(table, "FASTER_WITH_BIAS", {("efficient", 4, "forward"): range(1, 65)})
    faster = lambda *given: not table.aten_is_faster(*given)
    assert faster("flash", "forward", 2, 33, False, 512) and faster("flash", "forward", 2, 128, False, 512)
    assert not faster("flash", "forward", 2, 32, False, 512) and not faster("flash", "forward", 2, 129, False, 512)
    assert not faster("flash", "forward", 2, 64, True, 512) and faster("efficient", "forward", 4, 64, True, 512)
    for backend, done_by, size in (("cudnn", "forward", 2), ("flash", "backward", 2), ("flash", "forward", 4)):
        assert not faster(backend, done_by, size, 64, False, 512)
    assert faster("cudnn", "decoding", 2, 64, False, 512)


@on_sm_90
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256, 80, 96, 8])
def test_sizes_of_heads(D, causal, dtype):
    check(problem(S=700, D=D, causal=causal, dtype=dtype))


@on_sm_90
@pytest.mark.parametrize(("D", "V"), [(64, 128), (128, 64), (128, 256), (256, 128), (72, 136)])
def test_values_of_another_size(D, V):
    check(problem(S=300, T=500, D=D, V=V, diagonal=200))


@on_sm_90
@pytest.mark.parametrize("empty", ["0", "inf"])
@pytest.mark.parametrize("S", [1, 63, 64, 65, 127, 128, 129, 1000])
def test_lengths(S, empty):
    for T, causal in itertools.product((S, 1, 300), (False, True)):
        for diagonal in (0, T - S, -50, 70) if causal else (0,):
            check(problem(S=S, T=T, causal=causal, diagonal=diagonal), empty)


@on_sm_90
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("broadcast", BROADCASTS)
@pytest.mark.parametrize("D", [64, 128, 256, 80, 8])
def test_biases(D, broadcast, dtype):
    for S, T, causal, diagonal in (
        (700, 700, True, 0),
        (300, 500, False, 0),
        (1, 130, False, 0),
        (200, 90, True, -110),
    ):
        work = problem(S=S, T=T, D=D, causal=causal, diagonal=diagonal, dtype=dtype)
        check(with_bias(work, broadcast), "0")


@on_sm_90
@pytest.mark.parametrize("D", [64, 128, 80])
def test_biases_of_the_least_and_largest_numbers(D):
    check(with_extremes(problem(S=300, D=D, causal=False, dtype=torch.bfloat16), 120, 130), "0")


@on_sm_90
@pytest.mark.parametrize(("D", "V"), [(64, 128), (128, 64), (128, 256), (256, 128)])
def test_biases_of_values_of_another_size(D, V):
    check(with_bias(problem(S=300, T=500, D=D, V=V, diagonal=200)))


@on_sm_90
@pytest.mark.parametrize("broadcast", BROADCASTS)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("tile", [tile for tile in TILES if _has_room_for_a_bias(tile)])
def test_biases_by_every_kind_of_tile(tile, persistent, broadcast, monkeypatch):
    monkeypatch.setattr(table, "warp_specialized", lambda *_: tile._replace(persistent=persistent))
    check(with_bias(problem(S=450, H=64, shared=32, causal=False), broadcast))


@on_sm_90
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_scale(D, scale):
    check(problem(S=300, D=D, scale=scale))


@on_sm_90
@pytest.mark.parametrize("D", [64, 80, 128])
def test_layouts(D):
    work = problem(S=300, D=D)
    check(Problem(*[x.transpose(1, 2).contiguous().transpose(1, 2) for x in work[:3]], *work[3:]))
    check(Problem(*drawn(2, 300, 3, 4, D).permute(2, 0, 3, 1, 4), *work[3:]))


@on_sm_90
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("causal", [False, True])
def test_every_kind_of_tile(causal, tile, persistent, monkeypatch):
    """There are enough heads for several tiles in each persistent program."""
    monkeypatch.setattr(table, "warp_specialized", lambda *_: tile._replace(persistent=persistent))
    check(problem(S=450, H=64, shared=32, causal=causal))


@on_sm_90
@pytest.mark.parametrize("tile", sorted(tile for tile in chosen(64) if tile.persistent))
@pytest.mark.parametrize(("S", "H"), [(600, 101), (1000, 72)])
def test_tiles_in_pairs(S, H, tile, monkeypatch):
    """The number of tiles is even or odd, and keys are copied several blocks ahead."""
    monkeypatch.setattr(table, "warp_specialized", lambda *_: tile)
    check(problem(S=S, H=H, shared=H, B=3))


@on_sm_90
def test_replays_with_other_operands_and_scales(path):
    """Descriptors of a plan are replayed for other operands, and with scales of either sign."""
    name = "_scaled_dot_product_flash_attention"
    for scale in (0.2, -0.3, 0.1):
        work = problem(S=300, causal=True, scale=scale)
        with tritonite.use_gems(include=[name]):
            out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*work[:3], 0.0, True, scale=scale)
        expected, logarithms = by_definition(work)
        torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=4e-3)
        torch.testing.assert_close(logsumexp.double(), logarithms, atol=2e-5, rtol=2e-5)
    counts = tritonite.stats()[name]
    assert not counts.unrecordable and not counts.declined
    assert (counts.launched, counts.replayed) == ((1, 2) if path == "native" else (3, 0))


@on_sm_90
@pytest.mark.parametrize("broadcast", BROADCASTS)
def test_replays_with_another_bias(broadcast, path):
    """A plan's descriptor of the bias omits the dimensions over which the bias is broadcast."""
    name = "_scaled_dot_product_efficient_attention"
    for _ in range(3):
        work = with_bias(problem(S=300, shared=4, causal=False), broadcast)
        with tritonite.use_gems(include=[name]):
            out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*work[:4], True)
        expected, logarithms = by_definition(work, "0")
        torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=4e-3)
        torch.testing.assert_close(logsumexp[:, :, :300].double(), logarithms, atol=2e-5, rtol=2e-5)
    counts = tritonite.stats()[name]
    assert not counts.unrecordable and not counts.declined
    assert (counts.launched, counts.replayed) == ((1, 2) if path == "native" else (3, 0))
