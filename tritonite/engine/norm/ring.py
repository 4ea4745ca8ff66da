"""The backward norm kernel for rows that registers do not hold next to the sums of columns, in Gluon.

A persistent program has a multiprocessor to itself. The sums of columns stay in its registers. Rows stream through a
ring in its shared memory, where each is read twice, so that memory reads it once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tritonite.engine.rows.formulas import add_pairs, gradient_of_normalized, normalized_by
from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry


@gluon.jit
def _before_end(first, n_columns, CHUNK: gl.constexpr, WHOLE: gl.constexpr):
    """Return which elements of a chunk are before the row's end; None if the chunk is one of the first WHOLE."""
    mask = None
    if CHUNK >= WHOLE:
        mask = first < n_columns - CHUNK * first.shape[0]
    return mask


@gluon.jit
def _copy(tensor, stride, row, sizes, first, STEP: gl.constexpr, META: gl.constexpr, to):
    """Start the copy of the chunk that comes STEP chunks after the first of `row`, in the order of a program.

    Elements beyond the end are zeros.
    """
    n_rows, n_columns, programs = sizes
    INDEX: gl.constexpr = META.index
    CHUNK: gl.constexpr = STEP % META.chunks
    WHOLE: gl.constexpr = META.whole
    row = row + STEP // META.chunks * programs
    mask = row < n_rows
    if CHUNK >= WHOLE:
        mask = mask & _before_end(first, n_columns, CHUNK, WHOLE)
    pointers = (tensor + row.to(INDEX) * stride + first) + CHUNK * first.shape[0]
    async_copy.async_copy_global_to_shared(to, pointers, mask=mask)


@gluon.jit
def _scale(weight, held, first, n_columns, CHUNK: gl.constexpr, WHOLE: gl.constexpr):
    """Return a chunk of the weight, from registers if it is held late_slot, else from a cache."""
    if len(held) > CHUNK:
        value = held[CHUNK]
    else:
        mask = _before_end(first, n_columns, CHUNK, WHOLE)
        value = gl.load(weight + first + CHUNK * first.shape[0], mask=mask, other=None if CHUNK < WHOLE else 0)
    return value


@gluon.jit
def _with_offset(scale, OFFSET: gl.constexpr):
    """Return scale + OFFSET; an OFFSET of 0 costs nothing."""
    if OFFSET != 0.0:
        scale = scale + OFFSET
    return scale


@libentry()
@gluon.jit
def norm_backward_by_ring(
    grads,
    total,
    statistics,
    weight,
    grad_input,
    partials,
    row_strides,
    n_rows,
    n_columns,
    META: gl.constexpr,
):
    """Compute what `norm_backward` does, a row at a time, from a ring in shared memory.

    A thread reads only elements that it has copied itself, 16 bytes of a chunk. The gradient of the normalised sum and
    the sum have a ring of META.ring chunks each. The gradient of the sum, which is needed last, has a ring of
    META.late.

    A chunk that is no longer needed makes room for the one META.ring chunks later, and the copies into these slots form
    a group. So the first reading waits for all groups except those of later chunks. While a row's means are computed,
    the copies of META.ring - META.chunks chunks are in flight.
    """
    wait_for_previous_launch()
    ELEMENT: gl.constexpr = total.dtype.element_ty
    VECTOR: gl.constexpr = 128 // ELEMENT.primitive_bitwidth
    COLUMNS: gl.constexpr = 32 * VECTOR * gl.num_warps()
    INDEX: gl.constexpr = META.index
    CHUNKS: gl.constexpr = META.chunks
    WHOLE: gl.constexpr = META.whole
    RING: gl.constexpr = META.ring
    LATE: gl.constexpr = META.late
    LAYER: gl.constexpr = len(statistics) > 1
    SUMS: gl.constexpr = META.weight + META.bias
    layout: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first = gl.arange(0, COLUMNS, layout)
    program, programs = gl.program_id(0), gl.num_programs(0)
    # Rounded down to whole vectors, so that the compiler knows that rows start at 16 bytes.
    n_columns = n_columns // VECTOR * VECTOR
    stride, late_stride = row_strides[0] // VECTOR * VECTOR, row_strides[len(grads) - 1] // VECTOR * VECTOR
    sizes = n_rows, n_columns, programs
    totals = gl.allocate_shared_memory(ELEMENT, [RING, COLUMNS], shared)
    ring = gl.allocate_shared_memory(ELEMENT, [RING, COLUMNS], shared)
    late_ring = gl.allocate_shared_memory(ELEMENT, [max(LATE, 1), COLUMNS], shared)
    for step in gl.static_range(RING):
        _copy(total, n_columns, program, sizes, first, step, META, totals.index(step))
        _copy(grads[0], stride, program, sizes, first, step, META, ring.index(step))
        if step < LATE:
            _copy(grads[1], late_stride, program, sizes, first, step, META, late_ring.index(step))
        async_copy.commit_group()
    held = ()
    sums = ()
    for chunk in gl.static_range(CHUNKS):
        if chunk < META.held:
            held = held + (_scale(weight[0], (), first, n_columns, chunk, WHOLE),)
        for _ in gl.static_range(SUMS):
            sums = sums + (gl.zeros((COLUMNS,), gl.float32, layout),)
    # The ring slots of the row's first chunk.
    first_slot, late_first_slot = 0, 0
    for row in range(program, n_rows, programs):
        rstd = gl.load(statistics[0] + row).to(gl.float32)
        mean = gl.load(statistics[1] + row).to(gl.float32) if LAYER else 0.0
        products = gl.zeros((COLUMNS,), gl.float32, layout)
        weighted_sums = gl.zeros((COLUMNS,), gl.float32, layout)
        for chunk in gl.static_range(CHUNKS):
            if len(weight) > 0:
                scale = _scale(weight[0], held, first, n_columns, chunk, WHOLE)
            async_copy.wait_group(RING - 1 - chunk)
            slot = (first_slot + chunk) % RING
            weighted = ring.index(slot).load(layout).to(gl.float32)
            h = normalized_by(totals.index(slot).load(layout).to(gl.float32), mean, rstd)
            if len(weight) > 0:
                weighted *= _with_offset(scale.to(gl.float32), META.offset)
            products += weighted * h
            if LAYER:
                weighted_sums += weighted
        count = gl.cast(n_columns, gl.float32)
        if LAYER:
            mean_product, mean_weighted = gl.reduce((products, weighted_sums), 0, add_pairs)
            mean_weighted = true_divide(mean_weighted, count)
        else:
            mean_product, mean_weighted = gl.sum(products, 0), 0.0
        mean_product = true_divide(mean_product, count)
        first_slot = (first_slot + CHUNKS) % RING
        out = grad_input + gl.cast(row, INDEX) * n_columns + first
        added = ()
        for chunk in gl.static_range(CHUNKS):
            if len(weight) > 0:
                scale = _scale(weight[0], held, first, n_columns, chunk, WHOLE)
            # Counted from the next row's slot, else the compiler keeps the addresses of the first reading in registers.
            slot, late_slot = (first_slot + RING - CHUNKS + chunk) % RING, (late_first_slot + chunk) % max(LATE, 1)
            if LATE:
                async_copy.wait_group(LATE - 1)
                late = late_ring.index(late_slot).load(layout)
            grad = ring.index(slot).load(layout)
            h = totals.index(slot).load(layout)
            _copy(total, n_columns, row, sizes, first, chunk + RING, META, totals.index(slot))
            _copy(grads[0], stride, row, sizes, first, chunk + RING, META, ring.index(slot))
            if LATE:
                _copy(grads[1], late_stride, row, sizes, first, chunk + LATE, META, late_ring.index(late_slot))
            async_copy.commit_group()
            grad = grad.to(gl.float32)
            h = normalized_by(h.to(gl.float32), mean, rstd)
            if META.weight:
                added = added + (sums[len(added)] + grad * h,)
            if META.bias:
                added = added + (sums[len(added)] + grad,)
            if len(weight) > 0:
                grad *= _with_offset(scale.to(gl.float32), META.offset)
            grad = gradient_of_normalized(grad, h, mean_weighted, mean_product, rstd)
            if LATE:
                grad += late.to(gl.float32)
            mask = _before_end(first, n_columns, chunk, WHOLE)
            gl.store(out + chunk * COLUMNS, gl.cast(grad, ELEMENT), mask=mask)
        sums = added
        late_first_slot = (late_first_slot + CHUNKS) % max(LATE, 1)
    for chunk in gl.static_range(CHUNKS):
        for i in gl.static_range(SUMS):
            pointers = partials + (i * programs + program).to(INDEX) * n_columns + first + chunk * COLUMNS
            gl.store(pointers, sums[chunk * SUMS + i], mask=_before_end(first, n_columns, chunk, WHOLE))
