"""Loads of a block of rows, from operands of any layout.

A row has the elements of one kept index, and a block has (kept, reduced) elements. `rows`, a tuple, is (kept indices,
kept mask, shapes, strides). `shapes` and `strides` are those of `RowSpace`. META, a `RowsMeta`, has all that is known
at compile time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.pointwise.embedded import evaluate_embedded
from tritonite.engine.rows.meta import KEPT, REDUCED, SEGMENTED
from tritonite.language.indices import aligned_to, strided_offset

_KEPT, _REDUCED, _SEGMENTED = (tl.constexpr(kind) for kind in (KEPT, REDUCED, SEGMENTED))
# Indices of `strides`, which are `RowSpace.strides`.
INPUT_KEPT, INPUT_REDUCED, OUT_KEPT, OUT_REDUCED, ROW_TENSORS, ELEMENT_INDEX = (tl.constexpr(i) for i in range(6))


@triton.jit
def strided_pointers(
    base,
    rows,
    reduced,
    kept_strides,
    reduced_strides,
    ALIGNED: tl.constexpr,
    MISALIGNED: tl.constexpr = False,
    KEPT_ALIGNMENT: tl.constexpr = 1,
    ODD_STRIDES: tl.constexpr = False,
):
    """Return pointers to a block of an operand. KEPT_ALIGNMENT is `RowsMeta.kept_alignment`.

    Pointers of MISALIGNED rows start at their first whole vector. Without known contiguous elements, Triton 3.6 gives
    neighbouring threads elements of one row. The hint of pairs for ODD_STRIDES avoids that. It widens no load, because
    addresses are multiples of an element's size only.
    """
    kept, shapes = rows[0], rows[2]
    kept_offset = strided_offset(kept, shapes[0], kept_strides, KEPT_ALIGNMENT)
    if MISALIGNED:
        kept_offset += ALIGNED - 1
    kept_offset = aligned_to(kept_offset, ALIGNED)
    kept_offset = kept_offset[:, None]
    if ODD_STRIDES:
        kept_offset = tl.max_contiguous(kept_offset, [2, 1])
    # Two additions, so that constant offsets between a row's elements go into the load instructions.
    return (
        base
        + kept_offset
        + aligned_to(strided_offset(reduced, shapes[1], reduced_strides, ALIGNED), KEPT_ALIGNMENT)[None, :]
    )


@triton.jit
def inside(index, end, WHOLE: tl.constexpr):
    """Return which indices are below the end; all of a WHOLE block are, without a comparison."""
    if WHOLE:
        mask = tl.full(index.shape, True, tl.int1)
    else:
        mask = index < end
    return mask


@triton.constexpr_function
def _source(prologue, i):
    return prologue.sources[i]


@triton.constexpr_function
def _value_dtype(prologue, i):
    return prologue.dtypes[i]


@triton.constexpr_function
def _value_count(meta, end):
    # Fewer operands than all are those of the reduction.
    return meta.leaf_values if end < len(meta.kinds) else len(meta.prologue.sources)


@triton.jit
def _after_prologue(operands, META: tl.constexpr, COUNT: tl.constexpr):
    """Return the first COUNT values of the formulas and of the epilogue, from the operands in memory."""
    PROLOGUE: tl.constexpr = META.prologue
    PROGRAM: tl.constexpr = PROLOGUE.program
    if PROGRAM is not None:
        made = evaluate_embedded(PROGRAM, operands)[0]
    values = ()
    for i in tl.static_range(COUNT):
        if _source(PROLOGUE, i) < 0:
            value = tl.broadcast_to(made, META.block)
        else:
            value = operands[_source(PROLOGUE, i)]
        values = values + (value if _value_dtype(PROLOGUE, i) is None else value.to(_value_dtype(PROLOGUE, i)),)
    return values


@triton.jit
def load(
    inputs,
    rows,
    reduced,
    reduced_mask,
    META: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    EVICTION: tl.constexpr,
    CACHE_MODIFIER: tl.constexpr,
    CONVERTED: tl.constexpr = True,
):
    """Return a block's values of the operands from BEGIN to END.

    They are CONVERTED to the dtypes of META, or stay as in memory. A prologue makes other values of them.
    CACHE_MODIFIER is for operands that are the same for every row. Where rows do not start at 16 bytes, elements come
    by scalar or narrow loads. Operands of the kind REDUCED then do too: two layouts would make the compiler exchange
    elements between threads.
    """
    kept, kept_mask, shapes, strides = rows
    # Without an alignment hint, 0 finds an element's segment by a multiplication.
    SEGMENT: tl.constexpr = META.segment if META.segment > 1 else 0
    values = ()
    for i in tl.static_range(BEGIN, END):
        if META.kinds[i] == _KEPT:
            # Two-dimensional pointers would make a thread load its row's value once for each of its elements.
            offset = strided_offset(kept, shapes[0], strides[INPUT_KEPT][i])
            value = tl.load(inputs[i] + offset, mask=kept_mask, other=0)[:, None]
        elif META.kinds[i] == _REDUCED and kept.shape[0] >= 16:
            offset = strided_offset(reduced, shapes[1], strides[INPUT_REDUCED][i])
            value = tl.load(inputs[i] + offset, mask=reduced_mask, other=0)[None, :]
        elif META.kinds[i] == _REDUCED:
            offset = strided_offset(reduced, shapes[1], strides[INPUT_REDUCED][i])[None, :]
            if META.aligned != 1 and len(strides[INPUT_REDUCED][i]) == 1:
                offset = tl.max_contiguous(offset, [1, max(1, META.aligned)])
            value = tl.load(inputs[i] + offset, mask=reduced_mask[None, :], other=0, cache_modifier=CACHE_MODIFIER)
        elif META.kinds[i] == _SEGMENTED:
            offset = strided_offset(reduced, shapes[1], strides[INPUT_REDUCED][i], SEGMENT, True)[None, :]
            offset += strided_offset(kept, shapes[0], strides[INPUT_KEPT][i])[:, None]
            value = tl.load(inputs[i] + offset, mask=kept_mask[:, None] & reduced_mask[None, :], other=0)
        else:
            pointers = strided_pointers(
                *(inputs[i], rows, reduced, strides[INPUT_KEPT][i], strides[INPUT_REDUCED][i]),
                *(META.aligned, META.misaligned, META.kept_alignment, META.odd_strides),
            )
            mask = kept_mask[:, None] & reduced_mask[None, :]
            # An operand with more segments than the first, such as a group norm's weight, is read again, so caches keep
            # it.
            if len(strides[INPUT_REDUCED][i]) > len(strides[INPUT_REDUCED][0]):
                value = tl.load(pointers, mask=mask, other=0)
            else:
                value = tl.load(pointers, mask=mask, other=0, eviction_policy=EVICTION)
        values = values + (value.to(META.dtypes[i]) if CONVERTED else value,)
    if META.prologue is not None:
        values = _after_prologue(values, META, _value_count(META, END))
    return values


@triton.jit
def as_columns(results):
    """Return the results of rows as columns, which broadcast along a row."""
    columns = ()
    for i in tl.static_range(len(results)):
        columns = columns + (results[i][:, None],)
    return columns
