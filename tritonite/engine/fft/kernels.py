"""Stockham's self-sorting Fourier transform, whole transforms in the registers of a program.

A stage of radix r has length / r butterflies. Butterfly j combines the elements j + t * length / r, t < r. With `done`
the product of the radices before it, and j = q + done * p, its result k is multiplied by exp(-2 pi i p k done / length)
and becomes element q + done * (r * p + k). After the last stage all elements are in order. Between stages a gather
moves elements through shared memory.

The transform is forward. A backward one is the same with real and imaginary parts exchanged, of operands and results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonite.engine.fft.butterfly import append, butterfly, pack, unpack
from tritonite.engine.fft.meta import butterflies, butterfly_lanes, done, radix_lanes, radix_of, stages
from tritonite.language import libdevice
from tritonite.language.indices import strided_offset
from tritonite.language.order import wait_for_previous_launch
from tritonite.runtime.libentry import libentry

_HALF_PI = tl.constexpr(1.5707963267948966)


@libentry()
@triton.jit(do_not_specialize=["count"])
def write_roots(roots, count, BLOCK: tl.constexpr):
    """Write cos and sin of 2 pi k / count for k < count, from float64 angles of at most pi / 4."""
    wait_for_previous_launch()
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    quarter = (4 * k + count // 2) // count
    angle = (4 * k - quarter * count).to(tl.float64) * _HALF_PI / count.to(tl.float64)
    cos, sin = libdevice.cos(angle), libdevice.sin(angle)
    turned = quarter % 2 == 1
    root_re, root_im = tl.where(turned, sin, cos), tl.where(turned, cos, sin)
    root_re = tl.where((quarter == 1) | (quarter == 2), -root_re, root_re)
    root_im = tl.where((quarter == 2) | (quarter == 3), -root_im, root_im)
    tl.store(roots + 2 * k, root_re.to(roots.dtype.element_ty), mask=k < count)
    tl.store(roots + 2 * k + 1, root_im.to(roots.dtype.element_ty), mask=k < count)


@triton.jit
def _lanes(STAGE: tl.constexpr, META: tl.constexpr):
    """Return the transform of the program and the butterfly of each lane of a stage."""
    meta: tl.constexpr = META
    COUNT: tl.constexpr = butterfly_lanes(META, STAGE)
    lane = tl.arange(0, meta.batch * COUNT)
    if meta.batch_fastest:
        own, j = lane % meta.batch, lane // meta.batch
    else:
        own, j = lane // COUNT, lane % COUNT
    return own, j


@triton.jit
def _turn(re, im, roots, index, mask, PAIRED: tl.constexpr):
    """Return re + i im times the conjugate of a root of unity. If `PAIRED`, cos and sin are loaded together.

    Pairs halve the loads. But where a thread holds several neighbouring elements, they are exchanged between threads.
    """
    if PAIRED:
        pair = (roots + tl.arange(0, 2)[None, :]) + (2 * index)[:, None]
        cos, sin = tl.split(tl.load(pair, mask=mask[:, None], other=0))
    else:
        cos = tl.load(roots + 2 * index, mask=mask, other=0)
        sin = tl.load(roots + 2 * index + 1, mask=mask, other=0)
    return re * cos + im * sin, im * cos - re * sin


@triton.jit
def _read(re, im, base, element, signal, mask, META: tl.constexpr):
    """Load elements of a signal; of a spectrum's half the conjugate, without the imaginary parts of real elements."""
    meta: tl.constexpr = META
    if meta.hermitian:
        mirrored = 2 * element > signal.length
        element = tl.where(mirrored, signal.length - element, element)
    offset = base + element.to(meta.index) * signal.stride
    value_re = tl.load(re + offset, mask=mask, other=0)
    if im is None:
        value_im = tl.zeros_like(value_re)
    elif meta.hermitian:
        imaginary = mask & (element != 0) & (2 * element != signal.length)
        value_im = tl.load(im + offset, mask=imaginary, other=0)
        value_im = tl.where(mirrored, value_im, -value_im)
    else:
        value_im = tl.load(im + offset, mask=mask, other=0)
    return value_re, value_im


@triton.jit
def _exchange(x, STAGE: tl.constexpr, META: tl.constexpr):
    """Return the operands of the stage after STAGE, given the results of STAGE."""
    meta: tl.constexpr = META
    RADIX: tl.constexpr = radix_of(META, STAGE)
    DONE: tl.constexpr = done(META, STAGE)
    COUNT: tl.constexpr = butterfly_lanes(META, STAGE)
    NEXT: tl.constexpr = butterflies(META, STAGE + 1)
    LANES: tl.constexpr = meta.batch * butterfly_lanes(META, STAGE + 1)
    NEXT_RADIX: tl.constexpr = radix_of(META, STAGE + 1)
    ELEMENTS: tl.constexpr = radix_lanes(META, STAGE + 1)
    # Lanes beyond the transform read one of its elements.
    flat = tl.arange(0, ELEMENTS * LANES)
    lane, t = flat % LANES, tl.minimum(flat // LANES, NEXT_RADIX - 1)
    if meta.batch_fastest:
        own, j = lane % meta.batch, lane // meta.batch
    else:
        own, j = lane // (LANES // meta.batch), lane % (LANES // meta.batch)
    element = tl.minimum(j, NEXT - 1) + t * NEXT
    k, j = element // DONE % RADIX, element % DONE + element // (DONE * RADIX) * DONE
    if meta.batch_fastest:
        source = k * (meta.batch * COUNT) + j * meta.batch + own
    else:
        source = k * (meta.batch * COUNT) + own * COUNT + j
    return unpack(tl.gather(pack(x, RADIX), source, 0), ELEMENTS)


@triton.jit
def _stage(re, im, roots, root_step, STAGE: tl.constexpr, PAIRED: tl.constexpr, META: tl.constexpr):
    """Return the operands of the next stage, given those of a stage that is not the last."""
    RADIX: tl.constexpr = radix_of(META, STAGE)
    DONE: tl.constexpr = done(META, STAGE)
    _, j = _lanes(STAGE, META)
    re, im = butterfly(re, im, RADIX)
    step = j // DONE * DONE * root_step
    out_re, out_im = (re[0],), (im[0],)
    for k in tl.static_range(1, RADIX):
        turned_re, turned_im = _turn(re[k], im[k], roots, step * k, j < butterflies(META, STAGE), PAIRED)
        out_re, out_im = append(out_re, turned_re), append(out_im, turned_im)
    return _exchange(out_re, STAGE, META), _exchange(out_im, STAGE, META)


@libentry()
@triton.jit(do_not_specialize=["transforms", "inner", "root_step"])
def transform(
    out_re,
    out_im,
    re,
    im,
    roots,
    sizes,
    out_strides,
    in_strides,
    target,
    source,
    transforms,
    inner,
    root_step,
    scale: tl.float64,
    META: tl.constexpr,
):
    """Transform some of `transforms` signals; `inner` transforms share a signal.

    `sizes`, `out_strides` and `in_strides` are those of the signals. Without `im` the operand is real, without `out_im`
    the imaginary part of the result is not stored. Roots of unity of the transform are `root_step` apart in the table.
    """
    wait_for_previous_launch()
    meta: tl.constexpr = META
    LAST: tl.constexpr = stages(META) - 1
    REAL: tl.constexpr = im is None or out_im is None
    first = tl.program_id(0).to(meta.index) * meta.batch
    own, j = _lanes(0, META)
    mask = (first + own < transforms) & (j < butterflies(META, 0))
    n = ((first + own) % inner).to(tl.int32)
    base = strided_offset((first + own) // inner, sizes, in_strides, 0)
    x_re, x_im = _read(re, im, base, j * source.step + n * source.inner_step, source, mask, META)
    values_re, values_im = (x_re.to(meta.compute),), (x_im.to(meta.compute),)
    for t in tl.static_range(1, radix_of(META, 0)):
        element = (j + t * butterflies(META, 0)) * source.step + n * source.inner_step
        x_re, x_im = _read(re, im, base, element, source, mask, META)
        values_re, values_im = append(values_re, x_re.to(meta.compute)), append(values_im, x_im.to(meta.compute))

    # A thread may hold several neighbours of real elements, until they are exchanged after the first stage.
    for stage in tl.static_range(LAST):
        values_re, values_im = _stage(values_re, values_im, roots, root_step, stage, stage > 0 or not REAL, META)

    values_re, values_im = butterfly(values_re, values_im, radix_of(META, LAST))
    own, j = _lanes(LAST, META)
    mask = (first + own < transforms) & (j < butterflies(META, LAST))
    n = ((first + own) % inner).to(tl.int32)
    base = strided_offset((first + own) // inner, sizes, out_strides, 0)
    factor = tl.full((), scale, tl.float64).to(meta.compute)
    for k in tl.static_range(radix_of(META, LAST)):
        own_element = j + k * butterflies(META, LAST)
        y_re, y_im = values_re[k], values_im[k]
        if meta.twiddled:
            y_re, y_im = _turn(y_re, y_im, roots, own_element * n, mask, True)
        element = own_element * target.step + n * target.inner_step
        offset = base + element.to(meta.index) * target.stride
        stored = mask & (element < target.length)
        tl.store(out_re + offset, (y_re * factor).to(out_re.dtype.element_ty), mask=stored)
        if out_im is not None:
            tl.store(out_im + offset, (y_im * factor).to(out_im.dtype.element_ty), mask=stored)
