"""Products of matrices and vectors, with an addend or summed over batches, and dot and outer products."""

import torch
import triton
import triton.language as tl

from tritonite import devices
from tritonite.dtypes import FLOAT8_NAMES, FLOATS, NUMBERS, opmath
from tritonite.engine.gemm.product import grouped_product, product
from tritonite.engine.gemm.work import Epilogue, Sums
from tritonite.engine.iteration import broadcast_shape
from tritonite.engine.outputs import outputs
from tritonite.engine.rows.declare import Reduction, reduced
from tritonite.engine.rows.formulas import add_states
from tritonite.errors import Decline
from tritonite.language.math import multiply_add
from tritonite.ops.activation import gelu
from tritonite.ops.reduction.sums import added_to_zero
from tritonite.registry import operator, pointwise
from tritonite.runtime.contract import empty_strided, limit, prepare_blas
from tritonite.runtime.symbols import limits_of, number_type, zero_or_one

_gelu_formula = gelu.formula


@triton.jit
def _relu(x):
    return tl.where(x < 0, tl.zeros_like(x), x)


@triton.jit
def _gelu(x):
    return _gelu_formula(x, "none")


@triton.jit
def _gelu_tanh(x):
    return _gelu_formula(x, "tanh")


# On a GPU ATen's BLAS has the tanh form of GELU.
_GELU = _gelu if devices.current.aten == "cpu" else _gelu_tanh


def precision_of(dtype):
    """Return "tf32" for float32 operands if torch's switches allow TF32 and the device has it, else "ieee"."""
    allowed = torch.float32 in devices.current.tensor_cores and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype is torch.float32 and allowed else "ieee"


def _result_dtype(dtype, out_dtype):
    """Return the result's dtype: the operands', or float32 of fp16 and bf16 if asked for."""
    if out_dtype is not None and out_dtype is not dtype and (dtype.itemsize != 2 or out_dtype is not torch.float32):
        raise Decline(f"a result of {out_dtype} from operands of {dtype}; only fp16 and bf16 operands can give float32")
    return out_dtype or dtype


def _batches(tensor, rank):
    """Return a tensor of `rank` dimensions as (batches, rows, columns). A vector becomes a column."""
    if tensor.dim() != rank:
        raise Decline(f"an operand of {tensor.dim()} dimensions, not {rank}")
    return tensor if rank == 3 else tensor.unsqueeze(0) if rank == 2 else tensor[None, :, None]


def _expanded(tensor, shape):
    if tensor.dim() > len(shape) or broadcast_shape((tensor.shape, shape)) != shape:
        raise Decline(f"an addend of shape {tuple(tensor.shape)}, which does not broadcast to {tuple(shape)}")
    return tensor.expand(shape)


def _multiply(a, b, outs, *, rank=2, out_dtype=None, self=None, beta=0, alpha=1, activation=None, summed=False):
    """Return activation(alpha * (a @ b) + beta * self) of `rank` dimensions, for batches of matrices a and b.

    With `summed` the products of all batches are added.
    """
    dtype, shape = a.dtype, (1 if summed else a.shape[0], a.shape[1], b.shape[2])
    if dtype not in FLOATS or b.dtype is not dtype:
        raise Decline(f"operands of {dtype} and {b.dtype}; served are two of one floating-point dtype")
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise Decline(f"shapes {tuple(a.shape)} and {tuple(b.shape)}, whose batches or inner dimensions differ")
    shape = shape[3 - rank :] if rank > 1 else shape[1:2]
    result, added = _result_dtype(dtype, out_dtype), ()
    if not {number_type(alpha), number_type(beta)} <= {int, float}:
        raise Decline("an alpha or beta that is complex or a bool, not an int or float")
    for factor in (alpha, beta):
        # BLAS multiplies in another order by an infinite factor or NaN.
        limit(factor, limits_of(dtype)._replace(finite=True))
    if self is not None:
        if self.dtype is not dtype and self.dtype is not result:
            raise Decline(f"an addend of {self.dtype}, neither the operands' {dtype} nor the result's {result}")
        added = (_expanded(self, shape),)
    outs = outputs((a, b, *added), [shape], [result], outs, in_place=added)
    addend = _batches(added[0], rank) if added and zero_or_one(beta) != 0 else None
    product(
        *(a, b, _batches(outs[0], rank)),
        Epilogue(addend, alpha=alpha, beta=beta, activation=activation),
        Sums(precision_of(dtype), summed=summed),
        compared=rank > 1 and not summed,
    )
    return outs


@operator("mm", accepts=FLOATS, cuda_only=("mm.dtype", "mm.dtype_out"))
def mm(self, mat2, out_dtype=None, outs=()):
    return _multiply(_batches(self, 2), _batches(mat2, 2), outs, out_dtype=out_dtype)


@operator("bmm", accepts=FLOATS, cuda_only=("bmm.dtype", "bmm.dtype_out"))
def bmm(self, mat2, out_dtype=None, outs=()):
    return _multiply(_batches(self, 3), _batches(mat2, 3), outs, rank=3, out_dtype=out_dtype)


@operator(
    "addmm",
    accepts=FLOATS,
    pin_zero_or_one=("alpha", "beta"),
    cuda_only=("addmm.dtype", "addmm.dtype_out"),
)
def addmm(self, mat1, mat2, beta, alpha, out_dtype=None, outs=()):
    mat1, mat2 = _batches(mat1, 2), _batches(mat2, 2)
    return _multiply(mat1, mat2, outs, out_dtype=out_dtype, self=self, beta=beta, alpha=alpha)


@operator("_addmm_activation", accepts=FLOATS, pin_zero_or_one=("alpha", "beta"))
def _addmm_activation(self, mat1, mat2, beta, alpha, use_gelu, outs=()):
    activation, mat1, mat2 = _GELU if use_gelu else _relu, _batches(mat1, 2), _batches(mat2, 2)
    if not mat1.shape[2]:
        raise Decline("an inner dimension of 0: ATen on a GPU applies no activation then")
    return _multiply(mat1, mat2, outs, self=self, beta=beta, alpha=alpha, activation=activation)


@operator(
    "baddbmm",
    accepts=FLOATS,
    pin_zero_or_one=("alpha", "beta"),
    cuda_only=("baddbmm.dtype", "baddbmm.dtype_out"),
)
def baddbmm(self, batch1, batch2, beta, alpha, out_dtype=None, outs=()):
    batch1, batch2 = _batches(batch1, 3), _batches(batch2, 3)
    return _multiply(batch1, batch2, outs, rank=3, out_dtype=out_dtype, self=self, beta=beta, alpha=alpha)


@operator("addbmm", accepts=FLOATS, pin_zero_or_one=("alpha", "beta"))
def addbmm(self, batch1, batch2, beta, alpha, outs=()):
    batch1, batch2 = _batches(batch1, 3), _batches(batch2, 3)
    return _multiply(batch1, batch2, outs, self=self, beta=beta, alpha=alpha, summed=True)


@operator("mv", accepts=FLOATS)
def mv(self, vec, outs=()):
    return _multiply(_batches(self, 2), _batches(vec, 1), outs, rank=1)


@operator("addmv", accepts=FLOATS, pin_zero_or_one=("alpha", "beta"))
def addmv(self, mat, vec, beta, alpha, outs=()):
    mat, vec = _batches(mat, 2), _batches(vec, 1)
    if not mat.shape[1] and self.shape != (0,):
        raise Decline(
            f"a matrix of 0 rows and an addend of shape {tuple(self.shape)}, whose shape ATen's result then has"
        )
    return _multiply(mat, vec, outs, rank=1, self=self, beta=beta, alpha=alpha)


def _suits_cublas(tensor):
    """Return whether a matrix of 8-bit elements starts at 16 bytes, and each row or column at 4."""
    rows, columns = tensor.stride()
    return tensor.data_ptr() % 16 == 0 and ((columns == 1 and rows % 4 == 0) or (rows == 1 and columns % 4 == 0))


@operator("_int_mm", accepts=(torch.int8,))
def _int_mm(self, mat2, outs=()):
    a, b = _batches(self, 2), _batches(mat2, 2)
    if a.dtype is not torch.int8 or b.dtype is not torch.int8:
        raise Decline(f"operands of {a.dtype} and {b.dtype}, not int8")
    if a.shape[2] != b.shape[1]:
        raise Decline(f"inner dimensions {a.shape[2]} and {b.shape[1]}, which differ")
    if devices.current.aten == "cuda" and (a.shape[1] <= 16 or a.shape[2] % 8 or b.shape[2] % 8):
        sizes = a.shape[1], a.shape[2], b.shape[2]
        raise Decline(f"M, K, N {sizes}: ATen on a GPU needs M > 16 and multiples of 8 for K and N")
    if not a.numel() or not b.numel():
        raise Decline("an operand without elements")
    if any(not out.is_contiguous() for out in outs) or any(0 in x.stride() for x in (self, mat2)):
        raise Decline("an operand with a stride of 0, or an output that is not contiguous")
    if devices.current.aten == "cuda" and not (_suits_cublas(self) and self.stride(1) == 1 and _suits_cublas(mat2)):
        raise Decline("operands that ATen may refuse: misaligned, or the first without contiguous rows")
    outs = outputs((a, b), [(a.shape[1], b.shape[2])], [torch.int32], outs)
    product(a, b, _batches(outs[0], 2))
    return outs


def check_scaled_operands(self, mat2, bias, out_dtype, scales, outs):
    """Decline float8 matrices, a bias, a result's dtype or a layout that scaled products do not serve."""
    a, b = _batches(self, 2), _batches(mat2, 2)
    (_, _, K), N = a.shape, b.shape[2]
    if a.dtype not in FLOAT8_NAMES or b.dtype not in FLOAT8_NAMES:
        raise Decline(f"operands of {a.dtype} and {b.dtype}; served are two of float8")
    if out_dtype not in FLOATS[:3]:
        raise Decline(f"a result of {out_dtype}; served are fp16, bf16 and float32")
    if not K:
        raise Decline("an inner dimension of 0: ATen on a GPU adds no bias then")
    if b.shape[1] != K or K % 16 or N % 16 or a.stride(2) != 1 or b.stride(1) != 1:
        raise Decline(
            f"shapes {tuple(self.shape)} and {tuple(mat2.shape)} or their layout; K and N must be multiples of 16 and "
            "elements along K contiguous"
        )
    if devices.current.aten != "cpu" and not (
        all(map(lies_aligned, (self, mat2, *outs))) and all(scale.data_ptr() % 16 == 0 for scale in scales)
    ):
        raise Decline("an operand, scale or output that is not aligned to 16 bytes, which ATen refuses on a GPU")
    if bias is not None and (bias.dtype not in FLOATS[:3] or bias.shape != (N,)):
        raise Decline(
            f"a bias of {bias.dtype} and shape {tuple(bias.shape)}; served is shape {(N,)} of fp16, bf16 or float32"
        )


def scaled_outputs(self, mat2, scales, bias, out_dtype, outs):
    """Return the outputs of a product of float8 matrices, allocated or checked."""
    # In bytes, which is all that matters to where they lie.
    inputs = (self.view(torch.uint8), mat2.view(torch.uint8), *scales, *(() if bias is None else (bias,)))
    return outputs(inputs, [(self.shape[0], mat2.shape[1])], [out_dtype], outs)


def scaled_product(self, mat2, scale_a, scale_b, bias, out_dtype, use_fast_accum, outs):
    """Multiply float8 matrices that have a scale each, or one for each row of the first and column of the second."""
    check_scaled_operands(self, mat2, bias, out_dtype, (scale_a, scale_b), outs)
    M, N = self.shape[0], mat2.shape[1]
    if scale_a.dtype is not torch.float32 or scale_b.dtype is not torch.float32:
        raise Decline(f"scales of {scale_a.dtype} and {scale_b.dtype}, not float32")
    if scale_a.numel() == scale_b.numel() == 1:
        scale_a, scale_b = scale_a.view(1, 1), scale_b.view(1, 1)
    elif scale_a.shape != (M, 1) or scale_b.shape != (1, N) or out_dtype is not torch.bfloat16:
        raise Decline(
            f"scales of shapes {tuple(scale_a.shape)} and {tuple(scale_b.shape)}; served are one "
            f"for each operand, and for a bfloat16 result {(M, 1)} and {(1, N)}"
        )
    outs = scaled_outputs(self, mat2, (scale_a, scale_b), bias, out_dtype, outs)
    epilogue = Epilogue(bias, (scale_a, scale_b), beta=1)
    product(self[None], mat2[None], outs[0][None], epilogue, Sums(blockwise=not use_fast_accum))
    return outs


@operator("_scaled_mm", accepts=tuple(FLOAT8_NAMES))
def _scaled_mm(self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum, outs=()):
    """Multiply float8 matrices that have a scale each, or one for each row of the first and column of the second."""
    if scale_result is not None:
        raise Decline("a scale for the result")
    return scaled_product(self, mat2, scale_a, scale_b, bias, out_dtype, use_fast_accum, outs)


@operator("_grouped_mm", accepts=FLOATS[:3])
def _grouped_mm(self, mat2, offs, bias, out_dtype, outs=()):
    """Multiply groups of rows, of columns or of the inner dimension, which end at `offs`; without it, two batches."""
    dtype, ranks = self.dtype, (self.dim(), mat2.dim())
    if dtype not in FLOATS[:3] or mat2.dtype is not dtype or out_dtype not in (None, dtype) or bias is not None:
        raise Decline(
            f"operands of {dtype} and {mat2.dtype}, a result of {out_dtype}, or a bias; served is one "
            "dtype of fp16, bf16 and float32, without a bias"
        )
    if ranks not in ((2, 2), (2, 3), (3, 2), (3, 3)) or self.shape[-1] != mat2.shape[-2]:
        raise Decline(
            f"shapes {tuple(self.shape)} and {tuple(mat2.shape)}, whose ranks or inner dimensions do not match"
        )
    if not self.shape[-1]:
        raise Decline("an inner dimension of 0, for which there is no tensor descriptor")
    if (offs is None) != (ranks == (3, 3)) or not (lies_aligned(self) and lies_aligned(mat2)):
        raise Decline("operands that are not aligned to 16 bytes, or offsets missing or given for two batches")
    counts = {len(x) for x in (self, mat2) if x.dim() == 3} | (
        {len(offs)} if offs is not None and offs.dim() else set()
    )
    if len(counts) != 1 or (offs is not None and (offs.dtype is not torch.int32 or offs.stride() != (1,))):
        raise Decline("offsets that are not contiguous int32, or not one for each batch")
    (groups,) = counts
    outputs((self, mat2, *(() if offs is None else (offs,))), [], [], ())
    out = grouped_result(self, mat2, groups, dtype)
    if ranks == (3, 3):
        product(self, mat2, out, sums=Sums(precision_of(dtype)))
    elif ranks == (2, 2):
        product(self[None], mat2[None], out, sums=Sums(precision_of(dtype), ends=offs))
    elif ranks == (2, 3):
        grouped_product(self, mat2, offs, out, Sums(precision_of(dtype)))
    else:
        grouped_product(mat2.mT, self.mT, offs, out.mT, Sums(precision_of(dtype)))
    return (out,)


def grouped_result(self, mat2, groups, dtype):
    """Allocate the result of a grouped product, whose rows are padded to multiples of 16 bytes."""
    rows, columns, padded = self.shape[-2], mat2.shape[-1], 16 // dtype.itemsize
    width = -(-columns // padded) * padded
    if self.dim() != mat2.dim():
        return empty_strided((rows, columns), (width, 1), dtype, self.device)
    return empty_strided((groups, rows, columns), (rows * width, width, 1), dtype, self.device)


def lies_aligned(tensor):
    """Return whether rows or columns are contiguous and start at multiples of 16 bytes."""
    if tensor.dim() < 2:
        return False
    last, other, every = tensor.stride(-1), tensor.stride(-2), 16 // tensor.dtype.itemsize
    rows = last == 1 and other >= max(1, tensor.shape[-1]) and other % every == 0
    columns = other == 1 and last >= max(1, tensor.shape[-2]) and last % every == 0
    batches = tensor.dim() == 2 or (tensor.stride(0) > 0 and tensor.stride(0) % every == 0)
    return (rows or columns) and batches and tensor.data_ptr() % 16 == 0


@triton.jit
def _product_of(x, y):
    return x * y


_DOT = Reduction((0.0,), _product_of, add_states, added_to_zero)


@operator("dot", accepts=FLOATS)
def dot(self, tensor, outs=()):
    dtype = self.dtype
    if dtype not in FLOATS or tensor.dtype is not dtype or self.dim() != 1 or self.shape != tensor.shape:
        raise Decline(
            f"operands of {dtype} and {tensor.dtype}, shapes {tuple(self.shape)} and {tuple(tensor.shape)}; served "
            "are two vectors of one floating-point dtype and size"
        )
    prepare_blas(self.device)
    return reduced(_DOT, (self, tensor), None, False, (dtype,), outs, opmath(dtype))


@operator("vdot", accepts=FLOATS)
def vdot(self, other, outs=()):
    return dot(self, other, outs=outs)


def _outer(self, vec1, vec2, beta, alpha):
    """Return the operands of `addr` as broadcast operands: the addend, vec1 as a column, vec2 as a row, the factors."""
    if vec1.dim() != 1 or vec2.dim() != 1:
        raise Decline(f"operands of {vec1.dim()} and {vec2.dim()} dimensions, not two vectors")
    whole = all(number_type(number) in (bool, int) for number in (beta, alpha))
    if not whole and not any(value.is_floating_point() for value in (self, vec1, vec2)):
        raise Decline("a fractional alpha or beta for integer operands")
    flags = all(value.dtype is torch.bool for value in (self, vec1, vec2))
    if not flags and bool in map(number_type, (beta, alpha)):
        raise Decline("an alpha or beta of bool for operands that are not all bool")
    return _expanded(self, (vec1.shape[0], vec2.shape[0])), vec1.unsqueeze(1), vec2, beta, alpha


@pointwise("addr", accepts=NUMBERS, prepare=_outer)
def addr(self, vec1, vec2, beta, alpha):
    return tl.where(beta == 0, alpha * vec1 * vec2, multiply_add(beta, self, alpha * vec1 * vec2))
