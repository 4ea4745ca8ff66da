"""Products of float8 matrices whose scales are given by a recipe, and products of groups of them."""

import torch

from tritonite import devices
from tritonite.dtypes import FLOAT8_NAMES
from tritonite.engine.gemm.kernels.arguments import GroupScales
from tritonite.engine.gemm.product import grouped_product, product
from tritonite.engine.gemm.work import Epilogue, Sums
from tritonite.engine.outputs import outputs
from tritonite.engine.quantized.products import BlockScales, float8_product
from tritonite.errors import Decline
from tritonite.ops import aten
from tritonite.ops.matmul import check_scaled_operands, grouped_result, lies_aligned, scaled_outputs, scaled_product
from tritonite.registry import operator
from tritonite.runtime.contract import empty

# torch.nn.functional.ScalingType.
_TENSOR, _ROW, _BLOCK_1X32, _BLOCK_1X128, _BLOCK_128X128 = 0, 1, 3, 4, 5
# torch.nn.functional.SwizzleType.SWIZZLE_32_4_4.
_SWIZZLED = 1
_OF_BLOCKS = (
    (_BLOCK_1X128, _BLOCK_128X128),
    (_BLOCK_128X128, _BLOCK_1X128),
    (_BLOCK_1X128, _BLOCK_1X128),
    (_BLOCK_1X32, _BLOCK_1X32),
)


@operator(
    "_scaled_mm_v2",
    accepts=tuple(FLOAT8_NAMES),
    pin=("recipe_a", "swizzle_a", "recipe_b", "swizzle_b", "contraction_dim"),
)
def _scaled_mm_v2(
    self,
    mat2,
    scale_a,
    recipe_a,
    swizzle_a,
    scale_b,
    recipe_b,
    swizzle_b,
    bias,
    out_dtype,
    contraction_dim,
    use_fast_accum,
    outs=(),
):
    """Multiply float8 matrices with scales of tensors, of rows, or of blocks along K."""
    recipe = _recipe(scale_a, recipe_a, scale_b, recipe_b, contraction_dim)
    (scale_a,), (scale_b,) = scale_a, scale_b
    swizzled = recipe == (_BLOCK_1X32, _BLOCK_1X32)
    layouts = list(swizzle_a), list(swizzle_b)
    if layouts != ([_SWIZZLED], [_SWIZZLED]) if swizzled else any(map(any, layouts)):
        raise Decline(
            f"scales of the layouts {layouts[0]} and {layouts[1]}; served is SWIZZLE_32_4_4 for scales of 1x32, and "
            "no swizzle for others"
        )
    if recipe in ((_TENSOR, _TENSOR), (_ROW, _ROW)):
        if (recipe == (_TENSOR, _TENSOR)) != (scale_a.numel() == scale_b.numel() == 1):
            raise Decline(
                f"scales of shapes {tuple(scale_a.shape)} and {tuple(scale_b.shape)}, which the recipe {recipe} "
                "does not have"
            )
        return scaled_product(self, mat2, scale_a, scale_b, bias, out_dtype, use_fast_accum, outs)
    if recipe not in _OF_BLOCKS:
        raise Decline(f"a recipe of scales {recipe}; served are scales of tensors, of rows, 1x32, 1x128 and 128x128")
    aten.check_architecture(
        self.device, ("sm_10", "sm_12") if swizzled else ("sm_9",), f"scales of the recipe {recipe}"
    )
    check_scaled_operands(self, mat2, bias, out_dtype, (scale_a, scale_b), outs)
    if self.dtype is not torch.float8_e4m3fn or mat2.dtype is not torch.float8_e4m3fn:
        raise Decline(f"operands of {self.dtype} and {mat2.dtype}; scales of blocks are served for float8_e4m3fn")
    (M, K), N = self.shape, mat2.shape[1]
    by_row, a_rows = _by_row(scale_a, recipe[0], M, K)
    by_column, b_rows = _by_row(scale_b, recipe[1], N, K)
    outs = scaled_outputs(self, mat2, (by_row, by_column), bias, out_dtype, outs)
    if swizzled:
        by_row, by_column = _unswizzled(by_row), _unswizzled(by_column)
    scales = BlockScales(by_row, by_column, (a_rows, b_rows), 32 if swizzled else 128)
    float8_product(self, mat2.t(), outs[0], Epilogue(bias, beta=0.0 if bias is None else 1.0), scales)
    return outs


def _recipe(scale_a, recipe_a, scale_b, recipe_b, contraction_dim):
    """Return the kinds of scales of both operands; decline two levels of scales and other dimensions to sum over."""
    if any(len(each) != 1 for each in (scale_a, recipe_a, scale_b, recipe_b)) or len(contraction_dim):
        raise Decline(
            f"recipes of scales {list(recipe_a)} and {list(recipe_b)}, dimensions {list(contraction_dim)}; served is "
            "one scale tensor for each operand, and sums over the inner dimension"
        )
    return recipe_a[0], recipe_b[0]


def _by_row(scale, recipe, rows, K):
    """Return the scales of (rows, K) as (rows / group, blocks of K), and the rows that share a scale.

    Scales of 1x32 are bytes in the order of SWIZZLE_32_4_4.
    """
    dtype = torch.float8_e8m0fnu if recipe == _BLOCK_1X32 else torch.float32
    if scale.dtype is not dtype:
        raise Decline(f"scales of {scale.dtype}; the recipe has {dtype}")
    blocks = -(-K // (32 if recipe == _BLOCK_1X32 else 128))
    padded = -(-blocks // 4) * 4
    if recipe == _BLOCK_1X32:
        count = -(-rows // 128) * 128 * padded
        if scale.numel() != count or not scale.is_contiguous():
            raise Decline(f"{scale.numel()} scales, or not contiguous; the recipe has {count}")
        return scale.view(torch.uint8).view(-1, padded // 4, 32, 4, 4), 1
    size, most = (rows, blocks) if recipe == _BLOCK_1X128 else (padded, -(-rows // 128))
    if scale.shape != (size, most) or scale.stride(0) != 1 or (most > 1 and scale.stride(1) != size):
        raise Decline(
            f"scales of shape {tuple(scale.shape)} and strides {scale.stride()}; the recipe has {(size, most)} and "
            f"{(1, size)}"
        )
    return (scale, 1) if recipe == _BLOCK_1X128 else (scale.t()[:, :blocks], 128)


def _unswizzled(tiles):
    """Return scales as float32 (rows, blocks of K) from tiles of 128 rows and 4 blocks.

    A tile has row r and block k at (r % 32, r // 32, k).
    """
    down, across = tiles.shape[:2]
    scales = empty((down, 4, 32, across, 4), torch.float32, tiles.device)
    scales.copy_(tiles.view(torch.float8_e8m0fnu).permute(0, 3, 2, 1, 4))
    return scales.view(down * 128, across * 4)


@operator("_scaled_grouped_mm", accepts=(torch.float8_e4m3fn,), cuda_only=("_scaled_grouped_mm",))
def _scaled_grouped_mm(self, mat2, scale_a, scale_b, offs, bias, scale_result, out_dtype, use_fast_accum, outs=()):
    """Multiply groups of float8 matrices that have a scale for each row of the first and column of the second."""
    if scale_result is not None:
        raise Decline("a scale for the result")
    return _groups(self, mat2, scale_a, scale_b, offs, bias, out_dtype, use_fast_accum, outs)


@operator(
    "_scaled_grouped_mm_v2",
    accepts=(torch.float8_e4m3fn,),
    pin=("recipe_a", "swizzle_a", "recipe_b", "swizzle_b", "contraction_dim"),
    cuda_only=("_scaled_grouped_mm_v2", "_scaled_grouped_mm_v2.out"),
)
def _scaled_grouped_mm_v2(
    self,
    mat2,
    scale_a,
    recipe_a,
    swizzle_a,
    scale_b,
    recipe_b,
    swizzle_b,
    offs,
    bias,
    out_dtype,
    contraction_dim,
    use_fast_accum,
    outs=(),
):
    """Multiply groups of float8 matrices that have a scale for each row of the first and column of the second."""
    recipe = _recipe(scale_a, recipe_a, scale_b, recipe_b, contraction_dim)
    if recipe != (_ROW, _ROW):
        raise Decline(f"a recipe of scales {recipe}; served are scales of rows")
    return _groups(self, mat2, scale_a[0], scale_b[0], offs, bias, out_dtype, use_fast_accum, outs)


def _groups(self, mat2, scale_a, scale_b, offs, bias, out_dtype, use_fast_accum, outs):
    """Return the bfloat16 products of groups of rows, of columns or of the inner dimension, or of two batches."""
    ranks = self.dim(), mat2.dim()
    if self.dtype is not torch.float8_e4m3fn or mat2.dtype is not torch.float8_e4m3fn or bias is not None:
        raise Decline(f"operands of {self.dtype} and {mat2.dtype}, or a bias; served is float8_e4m3fn without a bias")
    if out_dtype not in (None, torch.bfloat16):
        raise Decline(f"a result of {out_dtype}; served is bfloat16")
    if ranks not in ((2, 2), (2, 3), (3, 2), (3, 3)) or self.shape[-1] != mat2.shape[-2] or not self.shape[-1]:
        raise Decline(f"shapes {tuple(self.shape)} and {tuple(mat2.shape)}, whose ranks or inner dimensions do not fit")
    if self.shape[-1] % 16 or mat2.shape[-1] % 16 or self.stride(-1) != 1 or mat2.stride(-2) != 1:
        raise Decline(
            f"shapes {tuple(self.shape)} and {tuple(mat2.shape)} or their layout; K and N must be multiples of 16 and "
            "elements along K contiguous"
        )
    if (offs is None) != (ranks == (3, 3)) or not (lies_aligned(self) and lies_aligned(mat2)):
        raise Decline("operands that are not aligned to 16 bytes, or offsets missing or given for two batches")
    if not devices.has_float8(self.device):
        raise Decline("a device without float8, where ATen refuses the call")
    if offs is not None and (offs.dim() != 1 or offs.dtype is not torch.int32 or offs.stride() != (1,)):
        raise Decline(f"offsets of {offs.dtype} and shape {tuple(offs.shape)}; served is a contiguous int32 vector")
    counts = {len(each) for each in (self, mat2) if each.dim() == 3} | (set() if offs is None else {len(offs)})
    if len(counts) != 1:
        raise Decline(f"{sorted(counts)} groups in the operands and offsets")
    (groups,) = counts
    if not groups:
        raise Decline("no groups")
    scale_a = _scales_of_groups(scale_a, self, self.shape[-2], groups, ranks == (2, 2))
    scale_b = _scales_of_groups(scale_b, mat2, mat2.shape[-1], groups, ranks == (2, 2))
    inputs = (self.view(torch.uint8), mat2.view(torch.uint8), scale_a, scale_b, *(() if offs is None else (offs,)))
    # A fresh result has padded rows, which `outputs` does not allocate.
    shape = (self.shape[-2], mat2.shape[-1]) if ranks[0] != ranks[1] else (groups, self.shape[-2], mat2.shape[-1])
    given = outputs(inputs, [shape] * len(outs), [torch.bfloat16] * len(outs), outs)
    out = given[0] if outs else grouped_result(self, mat2, groups, torch.bfloat16)
    sums = Sums(blockwise=not use_fast_accum)
    if ranks == (2, 3):
        grouped_product(self, mat2, offs, out, sums, GroupScales(scale_a, scale_b, scale_b.stride(0)))
    elif ranks == (3, 2):
        scales = GroupScales(scale_b, scale_a, scale_a.stride(0))
        grouped_product(mat2.mT, self.mT, offs, out.mT, sums, scales)
    else:
        a, b = (self, mat2) if ranks == (3, 3) else (self[None], mat2[None])
        epilogue = Epilogue(scales=(scale_a[:, :, None], scale_b[:, None, :]))
        product(a, b, out, epilogue, sums._replace(ends=offs))
    return (out,)


def _scales_of_groups(scale, matrices, rows, groups, inner):
    """Return the scales of one operand: (rows,) for a matrix whose rows are grouped, (groups, rows) for any other.

    `inner` tells that the groups divide the inner dimension of two matrices, which have scales one group after another.
    """
    shape = (groups, rows) if matrices.dim() == 3 else (groups * rows,) if inner else (rows,)
    if scale.dtype is not torch.float32 or tuple(scale.shape) != shape or scale.stride(-1) != 1:
        raise Decline(f"scales of {scale.dtype}, shape {tuple(scale.shape)}; served is contiguous float32 of {shape}")
    return scale.view(groups, rows) if inner else scale
