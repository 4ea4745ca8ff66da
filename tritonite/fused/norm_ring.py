"""The backward pass of norms of sums, of rows that registers do not hold beside the sums of columns, in Gluon.

A program stays on its multiprocessor alone. The sums of columns stay in its registers, and rows stream through a ring
in its shared memory, where each is read twice, so that memory reads it once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tritonite.language.math import true_divide
from tritonite.language.order import wait_for_previous_launch
from tritonite.ops.normalization import gradient_of_normalized, normalized_by
from tritonite.ops.reduction import add_pairs
from tritonite.runtime.libentry import libentry


@gluon.jit
def _before_end(first, n_columns, CHUNK: gl.constexpr, WHOLE: gl.constexpr):
    """Which elements of a chunk are before the row's end; None, for all, of the WHOLE ones."""
    mask = None
    if CHUNK >= WHOLE:
        mask = first < n_columns - CHUNK * first.shape[0]
    return mask


@gluon.jit
def _copy(tensor, stride, row, sizes, first, STEP: gl.constexpr, FACTS: gl.constexpr, to):
    """Start to copy the chunk that a program comes to STEP chunks after a row's first; beyond the end are zeros."""
    n_rows, n_columns, programs = sizes
    INDEX: gl.constexpr = FACTS[0]
    CHUNK: gl.constexpr = STEP % FACTS[1]
    WHOLE: gl.constexpr = FACTS[2]
    row = row + STEP // FACTS[1] * programs
    mask = row < n_rows
    if CHUNK >= WHOLE:
        mask = mask & _before_end(first, n_columns, CHUNK, WHOLE)
    pointers = (tensor + row.to(INDEX) * stride + first) + CHUNK * first.shape[0]
    async_copy.async_copy_global_to_shared(to, pointers, mask=mask)


@gluon.jit
def _scale(weight, held, first, n_columns, CHUNK: gl.constexpr, WHOLE: gl.constexpr):
    """A chunk of the weight, from registers where it is held there, or from a cache."""
    if len(held) > CHUNK:
        value = held[CHUNK]
    else:
        mask = _before_end(first, n_columns, CHUNK, WHOLE)
        value = gl.load(weight + first + CHUNK * first.shape[0], mask=mask, other=None if CHUNK < WHOLE else 0)
    return value


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
    INDEX: gl.constexpr,
    SUMS: gl.constexpr,
    CHUNKS: gl.constexpr,
    WHOLE: gl.constexpr,
    RING: gl.constexpr,
    LATE: gl.constexpr,
    HELD: gl.constexpr,
):
    """As `norm_backward`, by programs that take a row at a time, in CHUNKS of which the first WHOLE have no end.

    A thread loads 16 bytes of a chunk, and all that it reads it has copied itself. The gradient of the normalised sum
    and the sum have a ring of RING chunks, and the gradient of the sum, which is wanted last, another of LATE. Of the
    weight the first HELD chunks stay in registers.

    Every chunk that is done with makes room for the one RING chunks after it, and what is copied for both is a group.
    So the first reading waits until all groups but those of later chunks have come. As many chunks as the ring has
    beside a row are on their way while the row's means are found.
    """
    wait_for_previous_launch()
    ELEMENT: gl.constexpr = total.dtype.element_ty
    VECTOR: gl.constexpr = 128 // ELEMENT.primitive_bitwidth
    COLUMNS: gl.constexpr = 32 * VECTOR * gl.num_warps()
    FACTS: gl.constexpr = INDEX, CHUNKS, WHOLE
    LAYER: gl.constexpr = len(statistics) > 1
    EACH: gl.constexpr = SUMS[0] + SUMS[1]
    layout: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first = gl.arange(0, COLUMNS, layout)
    program, programs = gl.program_id(0), gl.num_programs(0)
    # So that the compiler knows that rows start at 16 bytes.
    n_columns = n_columns // VECTOR * VECTOR
    stride, late_stride = row_strides[0] // VECTOR * VECTOR, row_strides[len(grads) - 1] // VECTOR * VECTOR
    sizes = n_rows, n_columns, programs
    totals = gl.allocate_shared_memory(ELEMENT, [RING, COLUMNS], shared)
    ring = gl.allocate_shared_memory(ELEMENT, [RING, COLUMNS], shared)
    late_ring = gl.allocate_shared_memory(ELEMENT, [max(LATE, 1), COLUMNS], shared)
    for step in gl.static_range(RING):
        _copy(total, n_columns, program, sizes, first, step, FACTS, totals.index(step))
        _copy(grads[0], stride, program, sizes, first, step, FACTS, ring.index(step))
        if step < LATE:
            _copy(grads[1], late_stride, program, sizes, first, step, FACTS, late_ring.index(step))
        async_copy.commit_group()
    held = ()
    sums = ()
    for chunk in gl.static_range(CHUNKS):
        if chunk < HELD:
            held = held + (_scale(weight[0], (), first, n_columns, chunk, WHOLE),)
        for _ in gl.static_range(EACH):
            sums = sums + (gl.zeros((COLUMNS,), gl.float32, layout),)
    # Where the row's first chunk is.
    place, late_place = 0, 0
    for row in range(program, n_rows, programs):
        rstd = gl.load(statistics[0] + row).to(gl.float32)
        mean = gl.load(statistics[1] + row).to(gl.float32) if LAYER else 0.0
        products = gl.zeros((COLUMNS,), gl.float32, layout)
        shares = gl.zeros((COLUMNS,), gl.float32, layout)
        for chunk in gl.static_range(CHUNKS):
            if len(weight) > 0:
                scale = _scale(weight[0], held, first, n_columns, chunk, WHOLE)
            async_copy.wait_group(RING - 1 - chunk)
            here = (place + chunk) % RING
            weighted = ring.index(here).load(layout).to(gl.float32)
            h = normalized_by(totals.index(here).load(layout).to(gl.float32), mean, rstd)
            if len(weight) > 0:
                weighted *= scale.to(gl.float32)
            products += weighted * h
            if LAYER:
                shares += weighted
        count = gl.cast(n_columns, gl.float32)
        if LAYER:
            product, share = gl.reduce((products, shares), 0, add_pairs)
            share = true_divide(share, count)
        else:
            product, share = gl.sum(products, 0), 0.0
        product = true_divide(product, count)
        place = (place + CHUNKS) % RING
        out = grad_input + gl.cast(row, INDEX) * n_columns + first
        added = ()
        for chunk in gl.static_range(CHUNKS):
            if len(weight) > 0:
                scale = _scale(weight[0], held, first, n_columns, chunk, WHOLE)
            # From the next row's place, lest the compiler keep the addresses of the first reading in registers.
            here, there = (place + RING - CHUNKS + chunk) % RING, (late_place + chunk) % max(LATE, 1)
            if LATE:
                async_copy.wait_group(LATE - 1)
                late = late_ring.index(there).load(layout)
            grad = ring.index(here).load(layout)
            h = totals.index(here).load(layout)
            _copy(total, n_columns, row, sizes, first, chunk + RING, FACTS, totals.index(here))
            _copy(grads[0], stride, row, sizes, first, chunk + RING, FACTS, ring.index(here))
            if LATE:
                _copy(grads[1], late_stride, row, sizes, first, chunk + LATE, FACTS, late_ring.index(there))
            async_copy.commit_group()
            grad = grad.to(gl.float32)
            h = normalized_by(h.to(gl.float32), mean, rstd)
            if SUMS[0]:
                added = added + (sums[len(added)] + grad * h,)
            if SUMS[1]:
                added = added + (sums[len(added)] + grad,)
            if len(weight) > 0:
                grad *= scale.to(gl.float32)
            grad = gradient_of_normalized(grad, h, share, product, rstd)
            if LATE:
                grad += late.to(gl.float32)
            mask = _before_end(first, n_columns, chunk, WHOLE)
            gl.store(out + chunk * COLUMNS, gl.cast(grad, ELEMENT), mask=mask)
        sums = added
        late_place = (late_place + CHUNKS) % max(LATE, 1)
    for chunk in gl.static_range(CHUNKS):
        for i in gl.static_range(EACH):
            pointers = partials + (i * programs + program).to(INDEX) * n_columns + first + chunk * COLUMNS
            gl.store(pointers, sums[chunk * EACH + i], mask=_before_end(first, n_columns, chunk, WHOLE))
