"""Convolutions against float64: modules, layouts, several tiles and slices, wide offsets, invariance, declines."""

import copy
import importlib
import itertools

import pytest
import torch
from compositions import close, normal
from conftest import some

import tritonite
from tritonite import devices
from tritonite.engine import iteration
from tritonite.engine.convolution import launch, select, table
from tritonite.engine.convolution.epilogue import Epilogue
from tritonite.engine.convolution.problem import Geometry, Problem
from tritonite.engine.convolution.table import Tile
from tritonite.errors import Decline
from tritonite.runtime.stats import totals

# The operator `convolution` goes before the package.
call, cudnn, general = [importlib.import_module(f"tritonite.ops.convolution.{n}") for n in ("call", "cudnn", "general")]
nn = torch.nn
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
MODULES = [
    (nn.Conv1d(6, 4, 3, padding=1), (2, 6, 9)),
    (nn.Conv1d(6, 4, 4, stride=3, groups=2), (2, 6, 13)),
    (nn.Conv2d(3, 5, 3, stride=2, padding=1), (2, 3, 9, 8)),
    (nn.Conv2d(4, 6, (1, 3), padding="same", dilation=2, bias=False), (2, 4, 5, 7)),
    (nn.Conv2d(20, 6, 2, groups=2), (1, 20, 5, 6)),
    (nn.Conv2d(6, 5, 1), (2, 6, 4, 5)),
    (nn.Conv2d(4, 4, 3, padding=1, groups=4), (1, 4, 6, 5)),
    (nn.Conv2d(3, 4, 4, stride=4), (1, 3, 8, 12)),
    (nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1), (1, 2, 3, 4, 5)),
    (nn.ConvTranspose1d(4, 3, 4, stride=3, output_padding=1), (2, 4, 6)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 4, 5)),
    (nn.ConvTranspose2d(4, 3, 2, stride=2), (2, 4, 4, 3)),
    (nn.ConvTranspose2d(3, 3, 3, stride=(2, 3), dilation=(2, 3)), (1, 3, 4, 3)),
    (nn.ConvTranspose3d(2, 3, (2, 3, 2), stride=(2, 1, 2)), (1, 2, 2, 3, 2)),
]


@pytest.fixture
def small_tiles(monkeypatch, change_device):
    """Make tiles so small that every loop has several steps, and the filters' gradient several slices."""
    tiles = dict.fromkeys((2, 4, 8), (Tile(16, 16, 16),))
    own = table.table()._replace(forward=tiles, filters=tiles, least_blocks=1, added=32)
    monkeypatch.setitem(table.TABLE, devices.current.kind, own)
    change_device(programs=64)
    return own


def _compare(module, x, terms=64):
    """Compare a module's result and gradients under Tritonite with those of ATen in float64."""
    exact_module, x = copy.deepcopy(module).double(), x.to(tritonite.device).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    exact = exact_module(exact_x)
    grad = torch.randn_like(exact).to(x.dtype)
    wanted = torch.autograd.grad(exact, [exact_x, *exact_module.parameters()], grad.double())
    with tritonite.use_gems(faster_only=False):
        found = module(x)
        grads = torch.autograd.grad(found, [x, *module.parameters()], grad)
    assert (found.dim(), found.dtype) == (x.dim(), x.dtype)
    for own, reference in zip((found.detach(), *grads), (exact.detach(), *wanted), strict=True):
        close(own, reference, terms)


@pytest.mark.parametrize(("module", "shape"), MODULES, ids=lambda value: str(value).replace(" ", ""))
def test_modules(module, shape):
    _compare(module.to(tritonite.device), normal(*shape))


@pytest.mark.parametrize(
    ("which", "last", "folded"), some([0, 1, 2, 3, 4, 6, 8, 9, 10, 12, 13], [False, True], [1, 16], turns=2)
)
def test_several_tiles_and_slices(which, last, folded, small_tiles, monkeypatch):
    monkeypatch.setitem(table.TABLE, devices.current.kind, small_tiles._replace(folded_channels=folded))
    module, shape = MODULES[which]
    x = normal(*shape)
    if last and x.dim() in LAST:
        x = x.to(memory_format=LAST[x.dim()])
    _compare(module.to(tritonite.device), x)


@pytest.mark.parametrize("which", [2, 4, 10])
def test_copied_filters(which, small_tiles, monkeypatch):
    monkeypatch.setitem(table.TABLE, devices.current.kind, small_tiles._replace(copied_positions=0))
    _compare(MODULES[which][0].to(tritonite.device), normal(*MODULES[which][1]))


@pytest.mark.parametrize("which", [2, 10])
def test_wide_offsets(which, monkeypatch):
    monkeypatch.setattr(iteration, "INT32_LIMIT", 8)
    _compare(MODULES[which][0].to(tritonite.device), normal(*MODULES[which][1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    module = nn.Conv2d(5, 4, 3, stride=2, padding=1).to(tritonite.device, dtype)
    _compare(module, normal(2, 5, 7, 6, dtype=dtype), terms=256)


@pytest.mark.parametrize(("groups", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (1, torch.float32)])
def test_copied_images(groups, dtype, small_tiles, monkeypatch):
    monkeypatch.setitem(table.TABLE, devices.current.kind, small_tiles._replace(copied_work=0))
    module = nn.Conv2d(40, 6, 3, stride=2, padding=1, groups=groups).to(tritonite.device, dtype)
    _compare(module, normal(2, 40, 5, 6, dtype=dtype), terms=1024)


GROUPED = [
    (nn.Conv2d(32, 32, 3, padding=1, groups=8), (1, 32, 3, 4)),
    (nn.Conv1d(12, 24, 3, stride=2, groups=6), (2, 12, 9)),
    (nn.Conv2d(14, 35, (1, 2), groups=7, bias=False), (1, 14, 3, 4)),
    (nn.ConvTranspose2d(24, 12, 3, stride=2, groups=4), (1, 24, 3, 2)),
    (nn.ConvTranspose2d(12, 12, 2, groups=6), (1, 12, 3, 2)),
]


@pytest.mark.parametrize(("which", "last", "dtype"), some(range(5), [False, True], [torch.float32, torch.float64]))
def test_merged_groups(which, last, dtype, small_tiles):
    """Narrow groups share a product, whose filters are block-diagonal."""
    module, shape = copy.deepcopy(GROUPED[which][0]), GROUPED[which][1]
    x = normal(*shape, dtype=dtype)
    _compare(module.to(tritonite.device, dtype), x.to(memory_format=LAST[4]) if last and x.dim() == 4 else x)


@pytest.mark.smoke
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_merged_groups_are_independent(value, small_tiles):
    """Infinite and nan inputs of a group reach the results of this group alone."""
    x, weight = normal(1, 8, 5, 5), normal(8, 2, 3, 3)
    x[0, 3, 2, 2] = value
    with tritonite.use_gems(faster_only=False):
        found, by_input = torch.conv2d(x, weight, groups=4), torch.conv_transpose2d(x, weight, groups=4)
    for own, exact in zip((found, by_input), (torch.conv2d, torch.conv_transpose2d), strict=True):
        reference = exact(x.double(), weight.double(), groups=4)
        torch.testing.assert_close(own.double(), reference, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[:, [0, 1, 4, 5, 6, 7]].isfinite().all()


def test_groups_that_one_product_computes():
    own = Problem(torch.float32, 1, 1, 4, 4, 9, groups=32, phases=1)
    assert select.merged(own) == own._replace(groups=4, columns=32, channels=32, merged=8)
    assert select.merged(own._replace(groups=6)).merged == 6
    assert select.merged(own._replace(groups=11)).merged == 1
    assert select.merged(own._replace(columns=24)).merged == 1
    assert select.merged(own._replace(columns=64)).merged == 1


@pytest.mark.parametrize(("which", "last", "folded"), some([1, 2, 4, 6, 8, 9, 10, 12], [False, True], [1, 16], turns=2))
def test_slices_of_k(which, last, folded, small_tiles, monkeypatch):
    """Programs sum slices of K, some of them empty, and another kernel adds the slices, the bias and an activation."""
    monkeypatch.setitem(table.TABLE, devices.current.kind, small_tiles._replace(folded_channels=folded))
    monkeypatch.setattr(select, "forward_tile", lambda *_, splits: Tile(16, 16, 16, splits=5 if splits else 1))
    module, shape = MODULES[which]
    x = normal(*shape)
    if last and x.dim() in LAST:
        x = x.to(memory_format=LAST[x.dim()])
    _compare(module.to(tritonite.device), x)


@pytest.mark.smoke
@pytest.mark.parametrize("last", [False, True])
def test_slices_of_k_with_an_activation(last):
    x, weight, bias = normal(2, 20, 1, 5, 6), normal(3, 20, 1, 2, 3), normal(3)
    out = x.new_empty(2, 1, 4, 4, 3).permute(0, 4, 1, 2, 3) if last else x.new_empty(2, 3, 1, 4, 4)
    launch.convolve(x, weight, bias, out, Geometry(), "ieee", Epilogue(cudnn.relu), Tile(16, 16, 16, splits=4))
    close(out, torch.conv3d(x.double(), weight.double(), bias.double()).relu(), 256)


@pytest.mark.parametrize("layouts", [*itertools.product(("contiguous", "channels_last"), repeat=2)], ids="-".join)
def test_results_have_the_memory_format_of_aten(layouts):
    x, weight = normal(2, 4, 5, 6), normal(3, 4, 3, 2)
    x, weight = (
        each.to(memory_format=getattr(torch, f"{name}_format" if name == "contiguous" else name))
        for each, name in zip((x, weight), layouts, strict=True)
    )
    arguments = [1, 1], [1, 0], [1, 1], False, [0, 0], 1
    expected = torch.convolution(x, weight, None, *arguments)
    found = tritonite.ops.convolution(x, weight, None, *arguments)
    assert found.stride() == expected.stride()
    gradients = expected, x, weight, None, *arguments, [True] * 3
    for own, aten in zip(
        tritonite.ops.convolution_backward(*gradients), torch.ops.aten.convolution_backward(*gradients), strict=True
    ):
        assert own.stride() == aten.stride()


def test_masked_gradients():
    x, weight = normal(2, 4, 5), normal(3, 4, 2)
    steps = [1], [0], [1], False, [0], 1
    grad = torch.convolution(x, weight, None, *steps)
    for mask in itertools.product((False, True), repeat=3):
        found = tritonite.ops.convolution_backward(grad, x, weight, None, *steps, mask)
        assert tuple(each is not None for each in found) == mask


def test_no_images():
    x, module = torch.zeros(0, 3, 4, 5, device=tritonite.device), MODULES[2][0].to(tritonite.device)
    with tritonite.use_gems():
        found = module(x.requires_grad_())
        grads = torch.autograd.grad(found.sum(), [x, *module.parameters()])
    assert found.shape == (0, 5, 2, 3)
    assert all(not each.any() for each in grads)


def test_second_derivatives():
    """Gradients of gradients are convolutions, too."""
    tensors = [normal(1, 2, 4, 3).double(), normal(2, 2, 3, 2).double(), normal(2).double()]
    grads = [torch.randn_like(each) for each in tensors]

    def second():
        operands = [each.clone().requires_grad_() for each in tensors]
        given = grad.clone().requires_grad_()
        found = torch.conv2d(*operands, stride=(2, 1), padding=(1, 1)).tanh()
        first = torch.autograd.grad(found, operands, given, create_graph=True)
        return torch.autograd.grad(first, [given, *operands], grads)

    grad = torch.randn_like(torch.conv2d(*tensors, stride=(2, 1), padding=(1, 1)))
    exact = second()
    with tritonite.use_gems(faster_only=False):
        found = second()
    for own, aten in zip(found, exact, strict=True):
        close(own, aten, 64)


@pytest.mark.parametrize(
    ("kernel", "channels", "groups", "splits", "last"),
    [
        (3, 20, 1, 1, False),
        (3, 20, 1, 4, False),
        (2, 20, 1, 4, True),
        (3, 3, 1, 1, True),
        (1, 20, 1, 1, True),
        (1, 20, 1, 1, False),
        (2, 8, 4, 1, True),
    ],
    ids=str,
)
def test_an_image_does_not_depend_on_others(kernel, channels, groups, splits, last, small_tiles, monkeypatch):
    monkeypatch.setitem(table.TABLE, devices.current.kind, small_tiles._replace(most_splits=splits, adding=0.0))
    x, weight, bias = normal(5, channels, 6, 7), normal(8, channels // groups, kernel, kernel), normal(8)
    x = x.to(memory_format=torch.channels_last) if last else x
    filters = weight if groups > 1 else weight.transpose(0, 1)
    with tritonite.use_gems(invariant=True):
        whole, alone = (torch.conv2d(each, weight, bias, groups=groups) for each in (x, x[2:3]))
        turned, turned_alone = (torch.conv_transpose2d(each, filters, None, 2, groups=groups) for each in (x, x[2:3]))
    assert torch.equal(whole[2:3], alone)
    assert torch.equal(turned[2:3], turned_alone)


def test_padding_is_not_multiplied_into_results():
    """An infinite input spreads to the positions that meet it, and to no others."""
    x = torch.zeros(1, 1, 5, 5, device=tritonite.device)
    x[0, 0, 2, 2] = float("inf")
    with tritonite.use_gems(faster_only=False):
        found = torch.conv2d(x, torch.ones(1, 1, 3, 3, device=tritonite.device), padding=1)
    expected = torch.zeros_like(found)
    expected[:, :, 1:4, 1:4] = float("inf")
    assert torch.equal(found, expected)


def test_activation():
    x, weight, bias = normal(2, 4, 1, 5, 6), normal(3, 4, 1, 2, 3), normal(3)
    out = x.new_empty(2, 3, 1, 4, 4)
    launch.convolve(x, weight, bias, out, Geometry(), "ieee", Epilogue(cudnn.relu))
    close(out, torch.conv3d(x.double(), weight.double(), bias.double()).relu(), 32)


def test_operators_of_cuda_only():
    x, weight, bias = normal(2, 4, 6, 5), normal(6, 4, 3, 2), normal(6)
    ops = tritonite.overloads()
    # cuDNN's layouts do not depend on the device, but ATen without cuDNN has none.
    found = ops["cudnn_convolution"](x, weight, [1, 0], [2, 1], [1, 1], 1, False, False, False)
    close(found, torch.conv2d(x.double(), weight.double(), None, (2, 1), (1, 0)), 32)
    found = ops["cudnn_convolution_transpose"](
        x, weight.transpose(0, 1).contiguous(), [1, 0], [1, 0], [2, 1], [1, 1], 1, False, False, False
    )
    exact = torch.conv_transpose2d(x.double(), weight.transpose(0, 1).double(), None, (2, 1), (1, 0), (1, 0))
    close(found, exact, 32)
    found = ops["cudnn_convolution_relu"](x, weight, bias, [1, 1], [0, 0], [1, 1], 1)
    exact = torch.conv2d(x.double(), weight.double(), bias.double())
    close(found, exact.relu(), 32)
    for z, alpha in ((normal(2, 6, 4, 4), None), (normal(2, 4, 4, 6).permute(0, 3, 1, 2), -0.5)):
        found = ops["cudnn_convolution_add_relu"](x, weight, z, alpha, bias, [1, 1], [0, 0], [1, 1], 1)
        close(found, (exact + z.double() * (1 if alpha is None else alpha)).relu(), 32)
    given = [each.half() for each in (x, weight, normal(2, 6, 4, 4))]
    found = ops["cudnn_convolution_add_relu"](*given, 0.5, bias.half(), [1, 1], [0, 0], [1, 1], 1)
    wide = [each.double() for each in (*given, bias.half())]
    close(found, (torch.conv2d(*wide[:2], wide[3]) + 0.5 * wide[2]).relu(), 32)
    with pytest.raises(Decline, match="an addend"):
        ops["cudnn_convolution_add_relu"](x, weight, x, None, bias, [1, 1], [0, 0], [1, 1], 1)
    double = [each.double() for each in (x, weight, normal(2, 6, 4, 4), bias)]
    for name, operands in (("cudnn_convolution_relu", double[:2]), ("cudnn_convolution_add_relu", [*double[:3], 0.5])):
        with pytest.raises(Decline, match=r"an input of torch\.float64"):
            ops[name](*operands, double[3], [1, 1], [0, 0], [1, 1], 1)
    for short in range(3):
        lists = [[1] if i == short else [1, 1] for i in range(3)]
        with pytest.raises(Decline, match="does not have 2 elements"):
            ops["cudnn_convolution_relu"](x, weight, bias, *lists, 1)
    with pytest.raises(Decline, match="does not have 2 elements"):
        ops["cudnn_convolution_transpose"](x, weight, [1, 1], [0], [2, 2], [1, 1], 1, False, False, False)


def test_tf32_where_torch_allows_it(monkeypatch):
    monkeypatch.setattr(call.aten, "on_cpu", lambda: False)
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        for setting in ("ieee", "tf32"):
            torch.backends.cudnn.conv.fp32_precision = setting
            assert call.precision(torch.float32) == setting
            assert call.precision(torch.float64) == "ieee"
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert call.precision(torch.float32, False) == "ieee"


@pytest.mark.declines("ATen raises its own error")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight": (3, 4, 9, 9)}, "exceeds the padded input"),
        ({"weight": (3, 5, 2, 2)}, "channels"),
        ({"input": (2, 4, 0, 6)}, "no size but the batch"),
        ({"bias": (4,)}, "a bias of shape"),
        ({"bias": (0,)}, "a bias of shape"),
        ({"stride": [0, 1]}, "out of range"),
        ({"padding": [1, 1, 1]}, "padding of 3 numbers"),
        ({"groups": 3}, "channels"),
        ({"transposed": True, "weight": (4, 3, 2, 2), "output_padding": [1, 0]}, "output padding"),
    ],
)
def test_declines(change, reason):
    given = {"input": (2, 4, 5, 6), "weight": (3, 4, 2, 2), "bias": None, "stride": [1, 1], "padding": [0, 0]}
    given |= {"dilation": [1, 1], "transposed": False, "output_padding": [0, 0], "groups": 1} | change
    tensors = {name: None if given[name] is None else normal(*given[name]) for name in ("input", "weight", "bias")}
    with pytest.raises(Decline, match=reason):
        general.convolution(**given | tensors)
    with tritonite.use_gems(), pytest.raises(RuntimeError):
        torch.convolution(**given | tensors)


def test_a_bias_without_elements_is_left_to_aten():
    x, weight = normal(5, 2, 4), normal(3, 4, 6)
    with pytest.raises(Decline, match="a bias of shape"):
        general.conv_tbc(x, weight, x.new_empty(0))


def test_where_aten_is_faster():
    own = Problem(torch.float32, 8, 56 * 56, 64, 64, 9, groups=1, phases=1)
    wide, half = own._replace(channels=128), own._replace(dtype=torch.bfloat16)
    kind = select.Kind(exact=True, channels_last=True, gradient=False)
    assert not select.aten_is_faster(own, kind)
    assert not select.aten_is_faster(own._replace(groups=2), kind)
    assert select.aten_is_faster(own._replace(channels=3), kind)
    assert select.aten_is_faster(own, kind._replace(channels_last=False))
    assert select.aten_is_faster(own, kind._replace(exact=False))
    assert not select.aten_is_faster(own, kind._replace(gradient=True))
    assert select.aten_is_faster(wide, kind._replace(gradient=True))
    assert select.aten_is_faster(half, kind)
    assert not select.aten_is_faster(half._replace(groups=2), kind)
    assert not select.aten_is_faster(half._replace(taps=11), kind._replace(sequence=True))
    assert select.aten_is_faster(half._replace(taps=1), kind._replace(pointwise=True))
    assert not select.aten_is_faster(half._replace(taps=1), kind._replace(pointwise=True, gradient=True))
    patches = half._replace(channels=3, taps=256)
    assert not select.aten_is_faster(patches, kind._replace(patches=True, gradient=True, channels_last=False))
    assert not select.aten_is_faster(half._replace(channels=3), kind)
    assert select.aten_is_faster(half._replace(channels=3), kind._replace(channels_last=False))
    assert select.aten_is_faster(own._replace(dtype=torch.float64), kind)


@pytest.mark.parametrize("kind", ["nvidia", "amd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tiles_fit(kind, dtype, monkeypatch, change_device):
    """Tiles suit few columns and few positions, and slices stay within their memory."""
    change_device(kind=kind, interpreted=False, programs=1056)
    device = torch.device("cpu")
    for batches, positions, columns, channels, taps in itertools.product((1, 64), (49, 3136), (16, 256), (3, 64), (9,)):
        problem = Problem(dtype, batches, positions, columns, channels, taps, 1, 1)
        for tile in (select.forward_tile(problem, device), select.filter_tile(problem, device)):
            assert min(tile[:3]) >= 16
            assert tile.shared(dtype.itemsize) <= devices.shared_memory(device)
        steps, count = select.slices(problem, select.filter_tile(problem, device), device)
        tile = select.filter_tile(problem, device)
        assert (count - 1) * steps * tile.block_k < problem.rows <= count * steps * tile.block_k
        assert count == 1 or count * columns * channels * taps * 4 <= table.table().slices_bytes


def test_gradients_without_a_bias_are_served():
    x = torch.randn(2, 3, 9, 9, device=tritonite.device, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, device=tritonite.device, requires_grad=True)
    expected = torch.autograd.grad(torch.nn.functional.conv2d(x, weight).square().sum(), (x, weight))
    with tritonite.use_gems(include=("convolution", "convolution_backward"), faster_only=False):
        before = totals().declined
        found = torch.autograd.grad(torch.nn.functional.conv2d(x, weight).square().sum(), (x, weight))
        assert totals().declined == before
    for own, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-4)


def test_strides_of_a_sequence_of_one_channel():
    x = torch.randn(1, 48, 1, device=tritonite.device).permute(0, 2, 1)
    weight = torch.randn(8, 1, 10, device=tritonite.device)
    expected = torch.nn.functional.conv1d(x, weight, stride=5)
    with tritonite.use_gems(include=("convolution",), faster_only=False):
        found = torch.nn.functional.conv1d(x, weight, stride=5)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
