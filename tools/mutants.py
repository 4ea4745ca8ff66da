"""Faults that tests and the fuzzer have to find, as replacements in the package's source, for `tools/mutate.py`."""

# Over 500 lines: one list of faults.

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what the fault does.
        family: the family of the operators concerned.
        file: path within the package.
        old: text that occurs once in the file.
        new: text in its place.
        packets: operators whose samples, and then fuzzed calls, run with the fault.
        tests: arguments of pytest, run after those.
        survives: why nothing finds the fault; "" if something must.
    """

    name: str
    family: str
    file: str
    old: str
    new: str
    packets: tuple[str, ...] = ()
    tests: str = ""
    survives: str = ""


def _truncated(value: str, indent: str) -> str:
    """Return statements that truncate float32 `value` to the precision of `outs[i]`, if that has a 16-bit dtype."""
    lines = [
        f"value = {value}",
        "if value.dtype == tl.float32 and outs[i].dtype.element_ty == tl.bfloat16:",
        "    value = (value.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)",
        "if value.dtype == tl.float32 and outs[i].dtype.element_ty == tl.float16:",
        "    value = (value.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)",
    ]
    return "\n".join(f"{indent}{line}" for line in lines) + "\n"


_POINTWISE = [
    Mutant(
        "16-bit results of formulas are truncated",
        "pointwise",
        "engine/pointwise/kernels.py",
        "        value = results[i].to(_dtype(LAYOUT, True, i)).to(outs[i].dtype.element_ty)\n",
        _truncated("results[i]", "        ")
        + "        value = value.to(_dtype(LAYOUT, True, i)).to(outs[i].dtype.element_ty)\n",
        ("mul", "exp"),
        "tests/test_accuracy.py -k rounded_to_nearest",
    ),
    Mutant(
        "floor division of floats has no sign rule",
        "pointwise",
        "ops/arithmetic.py",
        "result = tl.where((rest != 0) & ((rest < 0) != (y < 0)), floor - 1, floor)",
        "result = floor",
        ("floor_divide", "div"),
    ),
    Mutant(
        "floor division of large quotients has no sign rule",
        "pointwise",
        "ops/arithmetic.py",
        "quotient = tl.where((remainder != 0) & ((y < 0) != (remainder < 0)), quotient - 1, quotient)",
        "quotient = quotient",
        ("floor_divide", "div"),
    ),
    Mutant(
        "remainder has the sign of the dividend",
        "pointwise",
        "ops/arithmetic.py",
        "return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)",
        "return rest",
        ("remainder",),
    ),
    Mutant(
        "addition ignores alpha",
        "pointwise",
        "ops/arithmetic.py",
        "    return multiply_add(other, alpha, self)\n\n\n@triton.jit\ndef _negated",
        "    return other + self\n\n\n@triton.jit\ndef _negated",
        ("add",),
    ),
    Mutant(
        "negation makes 0.0 of 0.0",
        "pointwise",
        "ops/arithmetic.py",
        "        return self * -1.0\n    return -self",
        "        return 0.0 - self\n    return -self",
        ("neg",),
    ),
    Mutant(
        "products of integers are clamped and do not wrap around",
        "pointwise",
        "ops/arithmetic.py",
        "        return self & other\n    return self * other",
        "        return self & other\n"
        "    if self.dtype == tl.int32:\n"
        "        wide = self.to(tl.int64) * other.to(tl.int64)\n"
        "        return tl.minimum(tl.maximum(wide, -(2**31)), 2**31 - 1).to(tl.int32)\n"
        "    return self * other",
        ("mul",),
    ),
    Mutant(
        "round takes halves up",
        "pointwise",
        "ops/rounding.py",
        "        return libdevice.nearbyint(self)\n    return self",
        "        return tl.floor(self + 0.5)\n    return self",
        ("round",),
    ),
    Mutant(
        "round to decimals takes halves up",
        "pointwise",
        "ops/rounding.py",
        "result = true_divide(libdevice.nearbyint(self * scale), scale)",
        "result = true_divide(tl.floor(self * scale + 0.5), scale)",
        ("round",),
    ),
    Mutant(
        "the larger of two drops nan",
        "pointwise",
        "language/math.py",
        "result = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)",
        "result = tl.maximum(x, y)",
        ("maximum", "clamp"),
        survives="In Triton's interpreter a maximum always propagates nan; on a GPU it does not.",
    ),
    Mutant(
        "the larger of two ignores a nan on its left",
        "pointwise",
        "language/math.py",
        "result = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)",
        "result = tl.where(x > y, x, y)",
        ("maximum", "clamp"),
    ),
    Mutant(
        "less or equal is less",
        "pointwise",
        "ops/comparison.py",
        "    return self <= other",
        "    return self < other",
        ("le",),
    ),
    Mutant(
        "the last element of the last partial block is not written",
        "pointwise",
        "engine/pointwise/kernels.py",
        "    mask = linear < n\n",
        "    mask = linear < n - 1\n",
        ("exp",),
    ),
    Mutant(
        "the last column of a tile is not written",
        "pointwise",
        "engine/pointwise/kernels.py",
        "origin, column < shape[0], row_mask, LAYOUT, False)",
        "origin, column < shape[0] - 1, row_mask, LAYOUT, False)",
        ("add",),
    ),
    Mutant(
        "a broadcast dimension has its tensor's stride",
        "pointwise",
        "engine/iteration.py",
        "own = [0 if size == 1 and to[lead + i] != 1 else strides[i] for i, size in enumerate(shape)]",
        "own = [strides[i] for i, size in enumerate(shape)]",
        ("add",),
    ),
    Mutant(
        "0-d tensors decide dtypes as others do",
        "pointwise",
        "dtypes.py",
        "        if result is None or category(candidate) > category(result):\n",
        "        if result is None or category(candidate) >= category(result):\n",
        ("add", "mul"),
        "tests/test_contracts.py -k promotion",
    ),
    Mutant(
        "an output may overlap an input",
        "pointwise",
        "engine/pointwise/overlap.py",
        "        if a < b + read_bytes and b < a + written_bytes and not interleaved:\n",
        "        if False:\n",
        ("add", "exp"),
        "tests/test_contracts.py -k overlap",
    ),
    Mutant(
        "an output of another shape is written as it is",
        "pointwise",
        "engine/pointwise/declare.py",
        "        if tuple(out.shape) != shape:\n",
        "        if out.numel() < len(shape):\n",
        ("exp",),
        "tests/test_contracts.py -k out",
    ),
    Mutant(
        "a direct call does not count the version of what it writes",
        "pointwise",
        "install/direct.py",
        "        if value is not None:\n            increment_version(value)",
        "        if value is None:\n            increment_version(value)",
        tests="tests/test_contracts.py -k versions",
    ),
    Mutant(
        "a dispatched call does not count the version of what it writes",
        "pointwise",
        "runtime/native/dispatcher.cpp",
        "if (tensor.defined()) tensor.unsafeGetTensorImpl()->bump_version();",
        "if (tensor.defined()) tensor.unsafeGetTensorImpl();",
        tests="tests/test_native.py -k counts_versions",
    ),
    Mutant(
        "a graph's launches keep addresses from before a call that moves memory",
        "pointwise",
        "runtime/native/graph.h",
        "      default: preparation.forget();",
        "      default: break;",
        tests="tests/test_drivers.py -k follows",
    ),
    Mutant(
        "a graph takes an address that the driver has refused for written",
        "pointwise",
        "runtime/native/prepared.h",
        "    known.reset();",
        "    known = address;",
        tests="tests/test_drivers.py -k after_an_error",
    ),
    Mutant(
        "hardtanh has a gradient at its bounds",
        "pointwise",
        "ops/activation.py",
        "    return tl.where((self <= min_val) | (self >= max_val), tl.zeros_like(grad_output), grad_output)",
        "    return tl.where((self < min_val) | (self > max_val), tl.zeros_like(grad_output), grad_output)",
        ("hardtanh_backward",),
    ),
    Mutant(
        "threshold replaces nothing at the threshold",
        "pointwise",
        "ops/activation.py",
        "    return tl.where(self <= threshold, value, self)",
        "    return tl.where(self < threshold, value, self)",
        ("threshold",),
    ),
    Mutant(
        "shifts by the number's own width wrap around",
        "pointwise",
        "ops/bitwise.py",
        "    return (amount >= 0) & (amount < bits)",
        "    return (amount >= 0) & (amount <= bits)",
        ("bitwise_left_shift",),
        survives="LLVM leaves such a shift undefined, but NumPy in the interpreter and NVIDIA's instruction give 0.",
    ),
    Mutant(
        "an integer power has one bit less of its exponent",
        "pointwise",
        "ops/arithmetic.py",
        "    for _ in tl.static_range(bits):",
        "    for _ in tl.static_range(2):",
        ("pow",),
    ),
]

_MOVEMENT = [
    Mutant(
        "roll goes the other way",
        "movement",
        "ops/rearrangement/order.py",
        "        index = at[d] - shifts[d]\n"
        "        indices = indices + (tl.where(index < 0, index + sizes[d], index),)",
        "        index = at[d] + shifts[d]\n"
        "        indices = indices + (tl.where(index >= sizes[d], index - sizes[d], index),)",
        ("roll",),
    ),
    Mutant(
        "a mirror shows its edge twice",
        "movement",
        "ops/rearrangement/padding.py",
        "    return size - 1 - tl.abs(size - 1 - tl.abs(index))",
        "    return size - 1 - tl.abs(size - 1 - tl.where(index < 0, -1 - index, index))",
        ("reflection_pad1d", "reflection_pad2d"),
    ),
    Mutant(
        "padding is one element short at the end",
        "movement",
        "ops/rearrangement/padding.py",
        "(index < sizes[d])\n        indices = indices + (index,)\n"
        "    loaded = read_at(source, indices, inside, 0)\n    return tl",
        "(index < sizes[d] - 1)\n        indices = indices + (index,)\n"
        "    loaded = read_at(source, indices, inside, 0)\n    return tl",
        ("constant_pad_nd",),
    ),
    Mutant(
        "floats are converted to uint8 without a wider integer between",
        "movement",
        "engine/movement.py",
        "            source = source.to(tl.int64)\n",
        "            source = tl.maximum(source, 0.0)\n",
        ("_to_copy", "copy"),
    ),
    Mutant(
        "cat puts the last tensor first",
        "movement",
        "ops/movement.py",
        "    move_each(kept, out.split(sizes, dim))",
        "    move_each(kept[::-1], out.split(sizes[::-1], dim))",
        ("cat",),
    ),
]

_CREATION = [
    Mutant(
        "tril leaves the diagonal out",
        "creation",
        "ops/creation.py",
        "    return tl.where(column - row <= diagonal, self, 0)",
        "    return tl.where(column - row < diagonal, self, 0)",
        ("tril",),
    ),
    Mutant(
        "linspace has one step too many",
        "creation",
        "ops/creation.py",
        "    last = tl.maximum(steps - 1, 1)\n    step = (end.to(tl.float64) - start.to(tl.float64)) / last\n"
        "    below, above = start + step * position, end - step * (last - position)\n    return tl.where",
        "    last = tl.maximum(steps, 1)\n    step = (end.to(tl.float64) - start.to(tl.float64)) / last\n"
        "    below, above = start + step * position, end - step * (last - position)\n    return tl.where",
        ("linspace",),
    ),
    Mutant(
        "a range of integers loses its last element",
        "creation",
        "ops/creation.py",
        "        size = max(0, -((first - last) // by))",
        "        size = max(0, (last - first) // by)",
        ("arange",),
    ),
    Mutant(
        "a periodic window is symmetric",
        "creation",
        "ops/creation.py",
        "    whole = length + int(periodic is not False)",
        "    whole = length",
        ("hann_window", "bartlett_window"),
    ),
]

_ROWS = [
    Mutant(
        "16-bit results of reductions are truncated",
        "rows",
        "engine/rows/kernels.py",
        "            result = tl.broadcast_to(results[i].to(outs[i].dtype.element_ty), (META.block[0],))\n",
        _truncated("results[i]", "            ")
        + "            result = tl.broadcast_to(value.to(outs[i].dtype.element_ty), (META.block[0],))\n",
        ("sum", "mean"),
        "tests/test_accuracy.py -k rounded_to_nearest",
    ),
    Mutant(
        "16-bit results of transformed rows are truncated",
        "rows",
        "engine/rows/kernels.py",
        "        value = tl.broadcast_to(found[i].to(outs[i].dtype.element_ty), META.block)\n",
        _truncated("found[i]", "        ")
        + "        value = tl.broadcast_to(value.to(outs[i].dtype.element_ty), META.block)\n",
        ("native_layer_norm", "_softmax"),
        "tests/test_accuracy.py -k rounded_to_nearest",
    ),
    Mutant(
        "a product begins with 0",
        "rows",
        "ops/reduction/sums.py",
        "product = Reduction((1,), same, _multiply, only)",
        "product = Reduction((0,), same, _multiply, only)",
        ("prod",),
    ),
    Mutant(
        "a maximum starts at 0",
        "rows",
        "ops/reduction/extrema.py",
        "    return (-math.inf if dtype.is_floating_point else torch.iinfo(dtype).min,)",
        "    return (0.0 if dtype.is_floating_point else 0,)",
        ("amax", "max"),
    ),
    Mutant(
        "argmax takes the last of equals",
        "rows",
        "ops/reduction/extrema.py",
        "    ahead = ahead | (((a == b) | ((a != a) & (b != b))) & (i < j))",
        "    ahead = ahead | (((a == b) | ((a != a) & (b != b))) & (i > j))",
        ("argmax", "argmin", "max"),
    ),
    Mutant(
        "argmax passes over nan",
        "rows",
        "ops/reduction/extrema.py",
        "    ahead = (closer & (b == b)) | ((a != a) & (b == b))",
        "    ahead = closer | ((a == a) & (b != b))",
        ("argmax", "argmin", "max"),
    ),
    Mutant(
        "sums of 16-bit elements are kept in 16 bits",
        "rows",
        "engine/rows/states.py",
        "        states = states + (both[i].to(META.states[i]),)\n    return states\n\n\n@triton.jit\ndef _by_stages",
        "        states = states + (both[i].to(tl.bfloat16).to(META.states[i]),)\n"
        "    return states\n\n\n@triton.jit\ndef _by_stages",
        ("sum",),
        "tests/test_rows.py -k any_dimensions",
    ),
    Mutant(
        "elements beyond a row's end are added up",
        "rows",
        "engine/rows/states.py",
        "        masked = masked + (tl.where(mask, state, META.init[i]).to(META.states[i]),)",
        "        masked = masked + (state,)",
        ("amax", "prod", "count_nonzero"),
    ),
    Mutant(
        "the variance's correction is left out",
        "rows",
        "ops/reduction/moments.py",
        "    divisor = tl.maximum(count - correction, 0.0).to(squares.dtype)",
        "    divisor = tl.maximum(count - 1.0, 0.0).to(squares.dtype)",
        ("var", "std"),
    ),
    Mutant(
        "combining two variances ignores the distance of their means",
        "rows",
        "ops/reduction/moments.py",
        "    return mean, squares + other_squares + distance * (distance * (fraction * count)), total",
        "    return mean, squares + other_squares, total",
        ("var", "std"),
    ),
    Mutant(
        "nansum adds nan up",
        "rows",
        "ops/reduction/sums.py",
        "    return tl.where(x != x, 0, x)",
        "    return x",
        ("nansum",),
    ),
]

_SOFTMAX = [
    Mutant(
        "softmax does not subtract the largest element",
        "softmax",
        "ops/softmax.py",
        "    return libdevice.exp(x - row_max) * inverse_sum\n\n\n# Exponentials",
        "    return libdevice.exp(x) * (inverse_sum * libdevice.exp(-row_max))\n\n\n# Exponentials",
        ("_softmax",),
    ),
    Mutant(
        "the gradient of softmax forgets the sum",
        "softmax",
        "ops/softmax.py",
        "    return (grad_output - sum_of_products) * output",
        "    return grad_output * output",
        ("_softmax_backward_data",),
    ),
    Mutant(
        "log_softmax does not subtract the largest element",
        "softmax",
        "ops/softmax.py",
        "    return x - row_max - log_sum",
        "    return x - log_sum",
        ("_log_softmax",),
    ),
]

_NORMS = [
    Mutant(
        "eps is added to the deviation and not to the variance",
        "norms",
        "ops/normalization.py",
        "    variance = over_count(squares, count) + eps.to(squares.dtype)\n"
        "    return mean, inverse(square_root(variance))",
        "    variance = over_count(squares, count)\n"
        "    return mean, inverse(square_root(variance) + eps.to(squares.dtype))",
        ("native_layer_norm", "native_group_norm", "native_batch_norm"),
    ),
    Mutant(
        "a layer norm's bias is added before its weight",
        "norms",
        "ops/normalization.py",
        "    return (x - mean) * rstd * weight + bias",
        "    return ((x - mean) * rstd + bias) * weight",
        ("native_layer_norm",),
    ),
    Mutant(
        "a layer norm's gradient forgets the mean of products",
        "norms",
        "ops/normalization.py",
        "    return rstd * (grad * weight - mean_grad - (x - mean) * rstd * mean_product)",
        "    return rstd * (grad * weight - mean_grad)",
        ("native_layer_norm_backward",),
    ),
    Mutant(
        "running variances are not corrected",
        "norms",
        "ops/batch_norm.py",
        "true_divide(squares, tl.broadcast_to((count - 1.0).to(squares.dtype), squares.shape))",
        "true_divide(squares, tl.broadcast_to(count.to(squares.dtype), squares.shape))",
        ("native_batch_norm", "_native_batch_norm_legit"),
    ),
    Mutant(
        "momentum weighs the old statistic",
        "norms",
        "ops/batch_norm.py",
        "    kept = 1.0 - momentum\n    return kept * running_mean + momentum * mean,",
        "    kept = 1.0 - momentum\n    return momentum * running_mean + kept * mean,",
        ("native_batch_norm", "_native_batch_norm_legit"),
    ),
]

_LOSSES = [
    Mutant(
        "the ignored class counts",
        "losses",
        "engine/nll.py",
        "    counts = mask & (target != ignore_index)\n",
        "    counts = mask & (target == target)\n",
        ("nll_loss_forward", "nll_loss2d_forward"),
    ),
    Mutant(
        "the mean of a weighted loss is over rows",
        "losses",
        "engine/nll.py",
        "            result = true_divide(result, total)",
        "            result = true_divide(result, tl.sum(mask.to(tl.float64), axis=0))",
        ("nll_loss_forward",),
    ),
    Mutant(
        "smooth_l1_loss is linear at beta",
        "losses",
        "ops/loss.py",
        "    return tl.where(distance < beta, inner, distance - 0.5 * beta)",
        "    return tl.where(distance <= beta, inner, distance - 0.5 * beta)",
        ("smooth_l1_loss",),
        survives="At a distance of exactly beta both formulas have the same value.",
    ),
    Mutant(
        "huber_loss has the slope of smooth_l1_loss",
        "losses",
        "ops/loss.py",
        "delta * (distance - 0.5 * delta))",
        "distance - 0.5 * delta)",
        ("huber_loss",),
    ),
    Mutant(
        "logarithms of binary_cross_entropy are not bounded",
        "losses",
        "ops/loss.py",
        "    return (target - 1.0) * maximum_nan(other_log, lowest) - target * maximum_nan(log, lowest)",
        "    return (target - 1.0) * other_log - target * maximum_nan(log, lowest)",
        ("binary_cross_entropy",),
    ),
]

_SCANS = [
    Mutant(
        "a block of a scan begins without the blocks before it",
        "scans",
        "engine/scan.py",
        "        states = combine_states(before, states, META.follow, META)",
        "        states = combine_states(states, states, META.follow, META) if False else states",
        ("cumsum",),
        "tests/test_scan.py -k follow",
    ),
    Mutant(
        "cummax takes the first of equals",
        "scans",
        "ops/scan.py",
        "    return largest_before(b, j, a, i)",
        "    return largest_before(a, i, b, j)",
        ("cummax",),
    ),
]

_PRODUCTS = [
    Mutant(
        "a product's addend is not multiplied by beta",
        "products",
        "engine/gemm/kernels/epilogue.py",
        "        product += arguments.beta * added.to(product.dtype)",
        "        product += added.to(product.dtype)",
        ("addmm", "baddbmm"),
    ),
    Mutant(
        "a product is not multiplied by alpha",
        "products",
        "engine/gemm/kernels/epilogue.py",
        "        product *= arguments.alpha\n",
        "        product *= 1.0\n",
        ("addmm", "baddbmm"),
    ),
    Mutant(
        "the last element along K is not multiplied",
        "products",
        "engine/gemm/kernels/pointers.py",
        "            mask &= (inner < a.end)[None, :]\n",
        "            mask &= (inner < a.end - 1)[None, :]\n",
        ("mm", "bmm"),
        "tests/test_matmul.py -k sizes_that_divide_nothing",
    ),
    Mutant(
        "split-K leaves out a slice",
        "products",
        "engine/gemm/kernels/results.py",
        "mask=mask & (split < splits), other=0)",
        "mask=mask & (split < splits - 1), other=0)",
        ("mm",),
        "tests/test_matmul.py -k every_kernel",
    ),
    Mutant(
        "16-bit results of products are truncated",
        "products",
        "engine/gemm/kernels/epilogue.py",
        "    tl.store(pointers, total.to(out.dtype.element_ty),",
        _truncated("total", "    ").replace("outs[i]", "out")
        + "    tl.store(pointers, value.to(out.dtype.element_ty),",
        ("mm", "bmm"),
        "tests/test_accuracy.py -k rounded_to_nearest",
    ),
]

_ATTENTION = [
    Mutant(
        "causal attention sees one key too many",
        "attention",
        "engine/attention/scores.py",
        "        visible = visible & (columns <= rows + extent.diagonal)",
        "        visible = visible & (columns <= rows + extent.diagonal + 1)",
        ("_scaled_dot_product_flash_attention_for_cpu",),
        "tests/test_attention.py -k several_tiles",
    ),
    Mutant(
        "the accumulator is not rescaled for a new row maximum",
        "attention",
        "engine/attention/forward.py",
        "    acc = dot_terms(weights, split_terms(v, PRECISION), acc * rescale[:, None], PRECISION)",
        "    acc = dot_terms(weights, split_terms(v, PRECISION), acc, PRECISION)",
        ("_scaled_dot_product_flash_attention_for_cpu",),
        "tests/test_attention.py -k several_tiles",
    ),
    Mutant(
        "dropout of attention does not scale what it keeps",
        "attention",
        "engine/attention/dropout.py",
        "    return (1.0 / _keep_probability(p)).to(tl.float32)",
        "    return _keep_probability(p).to(tl.float32)",
        tests="tests/test_attention_dropout.py -k efficient",
    ),
]

_INDEXING = [
    Mutant(
        "negative indices do not count from the end",
        "indexing",
        "engine/indexing/read.py",
        "        value = tl.where(value < 0, value + index_range[0], value)",
        "        value = tl.where(value < 0, -value - 1, value)",
        ("index", "take"),
    ),
    Mutant(
        "the gradient of an embedding has the padding row",
        "indexing",
        "ops/embedding.py",
        "        skipped=padding_idx if padding_idx >= 0 else -(2**31),",
        "        skipped=-(2**31),",
        ("embedding_dense_backward",),
    ),
    Mutant(
        "gradients of an embedding are not divided by counts",
        "indexing",
        "ops/embedding.py",
        '        overwrite="mean" if scale_grad_by_freq else "sum",',
        '        overwrite="sum",',
        ("embedding_dense_backward",),
    ),
    Mutant(
        "the mean of a bag counts padding",
        "indexing",
        "engine/indexing/bags.py",
        "        total = total / tl.maximum(size, 1).to(META.compute)",
        "        total = total / tl.maximum(end - begin, 1).to(META.compute)",
        ("_embedding_bag",),
        "tests/test_indexing.py -k bags_of_many_rows",
    ),
]

_SCATTER = [
    Mutant(
        "values of equal indices overwrite each other",
        "scatter",
        "engine/indexing/segments.py",
        "        total = tl.where(goes_on, total + row, row)",
        "        total = row",
        ("index_put", "embedding_dense_backward"),
    ),
    Mutant(
        "accumulated values replace the target",
        "scatter",
        "engine/indexing/segments.py",
        "        total = total + tl.load(target + offset, mask=mask, other=0).to(META.compute)",
        "        total = total + 0 * tl.load(target + offset, mask=mask, other=0).to(META.compute)",
        ("index_put",),
    ),
    Mutant(
        "a scattered maximum is a sum",
        "scatter",
        "engine/indexing/write.py",
        '    elif OPERATION == "largest":\n        result = maximum_nan(x, y)',
        '    elif OPERATION == "largest":\n        result = x + y',
        ("scatter_reduce", "index_reduce"),
    ),
]

_SORTING = [
    Mutant(
        "equal elements are sorted from the last to the first",
        "sorting",
        "engine/sorting/block.py",
        "    index = tl.broadcast_to(column.to(tl.int64)[None, :], key.shape)\n    if KEYS.bits == 64:",
        "    index = tl.broadcast_to((key.shape[1] - 1 - column.to(tl.int64))[None, :], key.shape)\n"
        "    if KEYS.bits == 64:",
        ("sort",),
    ),
    Mutant(
        "equal elements are sorted in no order",
        "sorting",
        "engine/sorting/block.py",
        "        packed = sort_integers(tl.where(mask, (key.to(tl.int64) << 32) | index, _LAST))\n"
        "        key, index = packed >> 32, packed & 0xFFFFFFFF",
        "        packed = sort_integers(tl.where(mask, (key.to(tl.int64) << 32) | (index ^ 1), _LAST))\n"
        "        key, index = packed >> 32, (packed & 0xFFFFFFFF) ^ 1",
        ("sort",),
    ),
    Mutant(
        "nan sorts as its bits",
        "sorting",
        "engine/sorting/keys.py",
        "        key = tl.where((k & LARGEST) > KEYS.infinity, LARGEST, key)\n",
        "",
        ("sort", "topk", "median"),
    ),
    Mutant(
        "zeros of both signs are not equal",
        "sorting",
        "engine/sorting/keys.py",
        "        key = tl.where(k == -LARGEST - 1, 0, key)\n",
        "        key = tl.where(k == -LARGEST - 1, -1, key)\n",
        ("sort",),
    ),
    Mutant(
        "the median of an even number is the upper one",
        "sorting",
        "engine/sorting/block.py",
        "        result = tl.where(nans > 0, n - nans, (n - 1) // 2)",
        "        result = tl.where(nans > 0, n - nans, n // 2)",
        ("median",),
    ),
]

_SEARCHING = [
    Mutant(
        "a search from the right stops at equals",
        "searching",
        "engine/searching/search.py",
        "        stops = bound > value if RIGHT else bound >= value\n"
        "        low = tl.where(searching & (stops == 0), middle + 1, low)\n"
        "        high = tl.where(searching & stops, middle, high)\n"
        "    tl.store(out + linear, low.to(out.dtype.element_ty), mask=mask)\n\n\n@triton.jit\ndef _bound_of_node",
        "        stops = bound >= value\n"
        "        low = tl.where(searching & (stops == 0), middle + 1, low)\n"
        "        high = tl.where(searching & stops, middle, high)\n"
        "    tl.store(out + linear, low.to(out.dtype.element_ty), mask=mask)\n\n\n@triton.jit\ndef _bound_of_node",
        ("searchsorted", "bucketize"),
    ),
    Mutant(
        "the last bin has no upper edge",
        "searching",
        "engine/histogram.py",
        "    inside = (value >= low) & (value <= high)\n",
        "    inside = (value >= low) & (value < high)\n",
        ("histc",),
    ),
]

_RANDOM = [
    Mutant(
        "a draw advances the generator by half",
        "random",
        "engine/random.py",
        "    return Order(threads, 0, -(-numel // (threads * values)) * _ADVANCE)",
        "    return Order(threads, 0, -(-numel // (threads * values)) * _ADVANCE // 2)",
        tests="tests/test_random.py -k uniform_numbers",
    ),
    Mutant(
        "dropout does not scale what it keeps",
        "random",
        "ops/random/dropout.py",
        "    scale = (1.0 / kept.to(tl.float64)).to(x.dtype)",
        "    scale = kept",
        tests="tests/test_dropout.py -k dropout",
    ),
    Mutant(
        "each iteration of a draw repeats the first one's numbers",
        "random",
        "engine/random.py",
        "    seed, counter = seed.to(tl.int64), (offset.to(tl.int64) >> 2) + turn * DRAWS",
        "    seed, counter = seed.to(tl.int64), (offset.to(tl.int64) >> 2) + turn * 0",
        tests="tests/test_random.py -k uniform_numbers",
    ),
]

_FUSED = [
    Mutant(
        "rotary embedding turns the wrong way",
        "fused",
        "engine/rotary.py",
        "            turned = (a * cosine - b * sine).to(out.dtype.element_ty)",
        "            turned = (a * cosine + b * sine).to(out.dtype.element_ty)",
        tests="tests/test_fused.py -k rotary",
    ),
    Mutant(
        "a fused norm has its eps outside the root",
        "fused",
        "engine/norm/kernels.py",
        "inverse(square_root(square + tl.full((ROWS, 1), eps, tl.float64).to(COMPUTE)))",
        "inverse(square_root(square) + tl.full((ROWS, 1), eps, tl.float64).to(COMPUTE))",
        tests="tests/test_fused.py -k norm",
    ),
    Mutant(
        "the gradient of a gate forgets its own slope",
        "fused",
        "fused/gated.py",
        "    return grad * y * silu_derivative(x, gate), grad * x * gate",
        "    return grad * y * gate, grad * x * gate",
        tests="tests/test_fused.py -k gated",
    ),
]

MUTANTS = [
    *(_POINTWISE + _MOVEMENT + _CREATION + _ROWS + _SOFTMAX + _NORMS + _LOSSES + _SCANS + _PRODUCTS),
    *(_ATTENTION + _INDEXING + _SCATTER + _SORTING + _SEARCHING + _RANDOM + _FUSED),
]
