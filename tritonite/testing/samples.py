"""Inputs for an overload made from its schema: layouts, broadcasts, numbers, extreme values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tritonite import devices
from tritonite.catalog import Op

_EXTREMES = (0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 3e38, 0.5, 1e-3, 2.5, -7.0)
# What ATen does with nan on the CPU is not defined: its loops over vectors and over single elements differ, or return
# what an uninitialised variable held. nan is left out of their samples there.
NAN_UNDEFINED = {
    "elu_backward",
    "hardshrink_backward",
    "hardswish_backward",
    "hardtanh_backward",
    "logit_backward",
    "softshrink_backward",
    "special_chebyshev_polynomial_t",
    "special_chebyshev_polynomial_u",
    "special_chebyshev_polynomial_v",
    "special_chebyshev_polynomial_w",
    "special_hermite_polynomial_h",
    "special_hermite_polynomial_he",
    "special_laguerre_polynomial_l",
    "special_legendre_polynomial_p",
    "special_shifted_chebyshev_polynomial_t",
    "special_shifted_chebyshev_polynomial_u",
    "special_shifted_chebyshev_polynomial_v",
    "special_shifted_chebyshev_polynomial_w",
}
# The same two loops of ATen give zeros of different sign; in gradients of rows its sums start from 0 on a GPU, and on a
# CPU from the first element.
ZERO_SIGN_UNDEFINED = {
    "_add_relu",
    "_log_softmax_backward_data",
    "native_layer_norm_backward",
    "clamp_max",
    "clamp_min",
    "fmax",
    "fmin",
    "hardtanh",
    "lerp",
    "log_sigmoid_backward",
    "max",
    "maximum",
    "min",
    "minimum",
    "relu",
    "softshrink",
}
# Where terms cancel to 0, roundoff gives it its sign; softmax's gradient is to ATen a difference of products on GPUs, a
# product with a difference on CPUs.
ZERO_SIGN_OF_ROUNDOFF = {
    "_masked_softmax_backward",
    "_softmax_backward_data",
    "_weight_norm_interface_backward",
    "native_group_norm_backward",
}

# Which outputs they write depends on the device: in evaluation ATen returns statistics on GPUs alone.
DEVICE_DEFINED = {"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"}


def compares_zero_sign(packet: str | None) -> bool:
    """Whether the sign that an operator gives a zero is ATen's."""
    return packet not in ZERO_SIGN_OF_ROUNDOFF | (ZERO_SIGN_UNDEFINED if devices.current.type == "cpu" else set())


_INTEGERS = {"dim": -1, "n": 2, "p": 1, "decimals": 1, "ignore_index": 1}
_CHOICES = {"approximate": ("none", "tanh"), "rounding_mode": (None, "trunc", "floor"), "reduction": (1, 2, 0)}
# Parts of others, which hand them a dimension from 0 and no tensor without dimensions or elements.
_PARTS = {"_cummax_helper", "_cummin_helper"}


def _layer_norm(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Weight and bias for the last dimension, and what the forward pass hands to the backward pass."""
    x = tensors[0]
    size, weight = list(x.shape[-1:]), x[(0,) * (x.dim() - 1)] if x.numel() else x
    given = {"input": x.flip(0) if x.dim() else x, "normalized_shape": size, "weight": weight, "bias": weight}
    given |= {"grad_out": x, "output_mask": [True, True, True], "eps": 1e-5}
    if x.is_floating_point() and x.numel() and x.dim():
        given |= dict(
            zip(("mean", "rstd"), torch.native_layer_norm(given["input"], size, None, None, 1e-5)[1:], strict=True)
        )
    return given


def _group_norm(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Weight and bias for the second dimension, in one group or two: gradients of small rows are but roundoff."""
    x = tensors[0]
    if x.dim() < 2 or not x.numel():
        return {"N": 0, "C": 0, "HxW": 0, "group": 1, "output_mask": [True, True, True]}
    rows, channels = x.shape[:2]
    # ATen reads them as contiguous whatever they are.
    weight = x.select(0, 0).reshape(channels, -1)[:, 0].clone(memory_format=torch.contiguous_format)
    group = 2 if channels % 2 == 0 else 1
    sizes = (rows, channels, x.numel() // (rows * channels), group)
    given = dict(zip(("N", "C", "HxW", "group"), sizes, strict=True))
    given |= {"input": x.flip(0), "weight": weight, "bias": weight, "grad_out": x, "eps": 1e-5}
    if x.is_floating_point():
        # On a GPU ATen takes no other layout; such a sample is left out when it refuses the call.
        _, mean, rstd = torch.native_group_norm(given["input"].contiguous(), None, None, *sizes, 1e-5)
        given |= {"mean": mean, "rstd": rstd, "output_mask": [True, True, True]}
    return given


def _batch_norm(tensors: list[torch.Tensor]) -> dict[str, Any] | None:
    """Weight, bias and running statistics for the second dimension, and what the forward pass hands on."""
    x = tensors[0]
    if x.dim() < 2 or not x.numel():
        # ATen divides by 0, or reads channels that there are not.
        return None
    weight = x.select(0, 0).reshape(x.shape[1], -1)[:, 0].clone()
    # Its rows differ from one another: of few like elements a gradient is but roundoff.
    varied = x.flip(0)
    given = {"input": varied, "weight": weight, "bias": weight.flip(0), "grad_out": x, "momentum": 0.25, "eps": 1e-5}
    variance = weight.double().abs().add(1).to(x.dtype)
    given |= {"running_mean": weight.flip(0), "running_var": variance, "output_mask": [True, True, True]}
    given["reserve"] = torch.empty(0, dtype=torch.uint8, device=x.device)
    if x.is_floating_point():
        # Of the same statistics, because which of them ATen's gradient by given ones takes depends on the layout.
        kept = x.dtype if x.device.type == "cpu" else torch.promote_types(x.dtype, torch.float32)
        mean, variance = given["running_mean"].to(kept), given["running_var"].to(kept)
        rstd = (variance.double() + 1e-5).rsqrt().to(kept)
        given |= {"save_mean": mean, "save_invstd": rstd, "save_var": rstd}
    return given


def _rms_norm(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Layer normalisation's, with the inverse of the root mean square for its gradient."""
    given = _layer_norm(tensors) | {"output_mask": [True, True]}
    x = given["input"]
    if x.is_floating_point() and x.numel() and x.dim():
        # Whether ATen has 0 or nan next to an infinite element depends on how long a row is.
        x = given["input"] = torch.where(x.isinf(), 2.0, x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        given["rstd"] = wide.square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    return given


def _masked(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """A mask of all elements: its type is 2. ATen reads all operands as contiguous whatever they are."""
    x, other = (tensor.expand(tensors[0].shape).contiguous() for tensor in tensors[:2])
    mask = x.flip(0) > 0 if x.dim() else x > 0
    if x.is_floating_point() and x.dim():
        other = other.softmax(-1).masked_fill(mask, 0)
    return {"self": x, "grad_output": x, "output": other, "mask": mask, "mask_type": 2}


def _weight_norm(tensors: list[torch.Tensor]) -> dict[str, Any] | None:
    """A length for each slice along the first dimension; ATen reads all as contiguous whatever they are."""
    v = tensors[0].clone(memory_format=torch.contiguous_format)
    if not (v.dim() and v.numel() and v.is_floating_point()):
        # Along dimension -1 ATen's kernel for GPUs writes nothing; of no elements its kernel for CPUs divides by 0.
        return None
    g = v.flatten(1)[:, 0].clone().reshape(-1, *[1] * (v.dim() - 1)) if v.dim() > 1 else v.clone()
    _, norms = torch.ops.aten._weight_norm_interface(v, g, 0)
    given = {"grad_w": v.flip(0), "saved_v": v, "saved_g": g, "saved_norms": norms}
    return {"v": v, "g": g, "dim": 0} | given


def _softmax(function: Any) -> Any:
    """A gradient that differs along a row, and a result that does: with equal ones ATen's own is but roundoff."""

    def make(tensors: list[torch.Tensor]) -> dict[str, Any]:
        x = tensors[0]
        if not x.is_floating_point():
            return {"grad_output": x, "output": x}
        steps = torch.arange(x.numel(), device=x.device).reshape(x.shape) % 5
        grad = tensors[1] if tensors[1].shape == x.shape else x
        return {"grad_output": grad, "output": function(torch.empty_like(x).copy_(steps), -1)}

    return make


def _of_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """A view of `rank` dimensions, 2 or 3: a vector is cut in pairs, a batch repeated."""
    x = x[None, None] if x.dim() == 0 else x.unflatten(0, (-1, 2)) if x.dim() == 1 else x
    while x.dim() > rank:
        x = x[0] if len(x) else x.flatten(0, 1)
    return x if x.dim() == rank else x.expand(2, *x.shape)


def _matrices(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Two matrices that fit, vectors that fit each, and what may be added to their product."""
    a, b = (_of_rank(tensor, 2) for tensor in tensors[:2])
    b = b.mT if b.shape[1] == a.shape[1] else a.mT
    row = b[0] if len(b) else b.flatten()
    return {"mat1": a, "mat": a, "mat2": b, "vec1": a.sum(1), "vec2": row, "vec": b.sum(1), "self": a[:, :1] + b[:1]}


def _batches(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Two batches of matrices that fit, and what may be added to their products."""
    a, b = (_of_rank(tensor, 3) for tensor in tensors[:2])
    b = b.mT if b.shape[::2] == a.shape[::2] else a.mT
    added = a[..., :1] + b[:, :1]
    return {"batch1": a, "batch2": b, "mat2": b, "self": added, "added": added[0]}


def _aligned(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Matrices of sizes and layouts that ATen's kernels for GPUs take, in bytes and in groups, too."""
    a, b = tensors[:2]
    if a.dim() == 2 and a.shape[-1] == b.shape[-1] and a.shape[-1] % 16 == 0:
        return {"self": a, "mat2": b.mT}
    values = a.flatten() if a.numel() else a.new_zeros(1)
    a, b = (values.repeat(size // len(values) + 1)[:size] for size in (32 * 16, 48 * 16))
    return {"self": a.view(32, 16), "mat2": b.view(48, 16).mT}


def _scaled(tensors: list[torch.Tensor]) -> dict[str, Any]:
    given = _aligned([x if x.dtype.itemsize == 1 else x.float().nan_to_num(1, 1, 1) for x in tensors[:2]])
    given = {name: x.to(torch.float8_e4m3fn) for name, x in given.items()}
    one = torch.ones((), device=tensors[0].device)
    return given | {"scale_a": one / 2, "scale_b": one, "bias": None, "scale_result": None, "out_dtype": torch.bfloat16}


def _grouped(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Rows in groups of uneven sizes, the first of which is empty."""
    given = _aligned(tensors)
    if given["mat2"].dim() == 2:
        given["mat2"] = given["mat2"].mT.view(3, 16, 16)
    rows, groups = len(given["self"]), len(given["mat2"])
    ends = torch.arange(groups, device=tensors[0].device) ** 2 * rows // (groups - 1) ** 2
    return given | {"offs": ends.int(), "bias": None, "out_dtype": None}


def _scaled_product(
    self: torch.Tensor, mat2: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    return self @ mat2 * scale_a * scale_b


def _grouped_product(self: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    ends = [0, *map(int, offs)]
    parts = zip(ends, ends[1:], mat2, strict=False)
    return torch.cat([self[begin:end] @ matrix for begin, end, matrix in parts])


# What ATen does not do in float64, for samples.
REFERENCES: dict[str, Any] = {"_scaled_mm": _scaled_product, "_grouped_mm": _grouped_product}


def _first(make: Any, name: str) -> Any:
    """Where `self` is the operand that others call `name`."""

    def made(tensors: list[torch.Tensor]) -> dict[str, Any]:
        given = make(tensors)
        return given | {"self": given[name]}

    return made


def _vectors(tensors: list[torch.Tensor]) -> dict[str, Any]:
    if tensors[0].dim() == 1:
        return {"self": tensors[0], "tensor": tensors[1], "other": tensors[1]}
    a, b = (_of_rank(tensor, 2) for tensor in tensors[:2])
    other = b[:, 0] if b.shape == a.shape else a[:, -1:].flatten()
    return {"self": a[:, :1].flatten(), "tensor": other, "other": other}


# Arguments that no schema tells of, from a layout's tensors.
_ARGUMENTS = {
    "_log_softmax_backward_data": _softmax(torch.log_softmax),
    "_softmax_backward_data": _softmax(torch.softmax),
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm,
    "_masked_softmax": _masked,
    "_masked_softmax_backward": _masked,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm,
    "batch_norm_backward": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_batch_norm_no_update": _batch_norm,
    "_batch_norm_with_update": _batch_norm,
    "_batch_norm_with_update_functional": _batch_norm,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm,
    "native_layer_norm": _layer_norm,
    "mm": _first(_matrices, "mat1"),
    "_int_mm": _aligned,
    "_scaled_mm": _scaled,
    "_grouped_mm": _grouped,
    "mv": _first(_matrices, "mat1"),
    "bmm": _first(_batches, "batch1"),
    "addmm": _matrices,
    "_addmm_activation": _matrices,
    "addmv": _first(_matrices, "vec1"),
    "addr": _matrices,
    "baddbmm": _batches,
    "addbmm": _first(_batches, "added"),
    "dot": _vectors,
    "vdot": _vectors,
    "native_layer_norm_backward": _layer_norm,
}


@dataclass(frozen=True)
class Sample:
    """Positional and keyword arguments of one call, without its outputs."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Any) -> Sample:
        """The same call with `function` applied to every argument."""
        kwargs = {name: function(value) for name, value in self.kwargs.items()}
        return Sample(self.label, tuple(map(function, self.args)), kwargs)


def _layouts(make: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Four operands each, broadcastable to the first."""
    yield "contiguous", [make(6, 10) for _ in range(4)]
    yield "transposed", [make(6, 10), make(10, 6).t(), make(6, 10), make(10, 6).t()]
    yield "broadcast", [make(4, 20, 36), make(36), make(20, 1), make(4, 1, 1)]
    yield "sliced", [make(13, 40)[::2, 1::2], make(7, 41)[:, 1::2], make(7, 20), make(7, 20)]
    yield "misaligned", [make(101)[1:] for _ in range(4)]
    yield "channels_last", [make(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(4)]
    yield "empty", [make(0, 3) for _ in range(4)]
    yield "zero_dim", [make() for _ in range(4)]


def values(dtype: torch.dtype, device: str, generator: torch.Generator) -> Any:
    """What makes tensors of a shape: floats from -3 to 3, integers of one digit, drawn where the generator is."""
    place = generator.device

    def make(*shape: int) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=generator, device=place).to(device, dtype)
        if not dtype.is_floating_point:
            low = 0 if dtype is torch.uint8 else -9
            return torch.randint(low, 10, shape, generator=generator, device=place).to(device, dtype)
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device=place)
        return (drawn * 6 - 3).to(device, dtype)

    return make


def samples(op: Op, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Iterator[Sample]:
    """Calls of an overload with `dtype` tensors; which of them ATen accepts is for the caller to find out."""
    generator = torch.Generator().manual_seed(seed)
    make = values(dtype, device, generator)
    for label, tensors in _layouts(make):
        if op.inplace and label == "broadcast":
            tensors[0] = tensors[0].clone()
        yield from calls(op, label, tensors)
    if dtype.is_floating_point:
        skip_nan = device == "cpu" and op.packet in NAN_UNDEFINED
        extremes = [value for value in _EXTREMES if value == value or not skip_nan]
        line = torch.tensor(extremes, dtype=torch.float64)
        grid = [line[:, None].repeat(1, len(line)), line[None, :].repeat(len(line), 1)]
        grid += [grid[0].flip(0), grid[1].flip(1)]
        yield from calls(op, "extreme", [x.to(device, dtype) for x in grid])


def calls(op: Op, label: str, tensors: list[torch.Tensor]) -> Iterator[Sample]:
    """The calls of an overload that take `tensors` for its tensor arguments, in order, for every string and flag."""
    if op.packet in _PARTS and not (tensors[0].dim() and tensors[0].numel()):
        return
    special = _ARGUMENTS[op.packet](tensors) if op.packet in _ARGUMENTS else {}
    if special is None:
        return
    choices: tuple[Any, ...] = next((_CHOICES[name] for name in op.names if name in _CHOICES), (None,))
    booleans = (False, True) if any(str(argument.type) == "bool" for argument in op.schema.arguments) else (False,)
    if "training" in op.names and "running_mean" not in op.names:
        # Without statistics ATen reads through a null pointer.
        booleans = (True,)
    if op.packet == "nll_loss2d_forward" and tensors[0].device.type == "cuda":
        # Without a reduction ATen's total weight is what its memory held.
        choices = choices[:-1]
    for choice in choices:
        for boolean in booleans:
            remaining = list(_prepared(op, tensors, choice))
            args: list[Any] = []
            kwargs: dict[str, Any] = {}
            for argument in op.schema.arguments:
                if argument.name in op.out_names:
                    continue
                if argument.name in special:
                    value = special[argument.name]
                elif argument.alias_info is not None and argument.alias_info.is_write and args:
                    # A destination that is no keyword has the first tensor's shape.
                    kind = torch.int64 if argument.name == "indices" else args[0].dtype
                    value = torch.zeros(args[0].shape, dtype=kind, device=args[0].device)
                elif op.packet in _PARTS and argument.name == "dim":
                    value = args[0].dim() - 1
                else:
                    value = _argument(argument, remaining, choice, boolean)
                if argument.kwarg_only:
                    kwargs[argument.name] = value
                else:
                    args.append(value)
            yield Sample(f"{label} {choice or ''}{boolean or ''}".strip(), tuple(args), kwargs)


def _prepared(op: Op, tensors: list[torch.Tensor], choice: Any) -> list[torch.Tensor]:
    """The tensor arguments of operators that want more of them than a common shape."""
    if op.packet == "binary_cross_entropy" and tensors[0].is_floating_point():
        # Probabilities, in place for the layout's sake.
        return [*(x.nan_to_num_().clamp_(0, 1) for x in tensors[:2]), *tensors[2:]]
    if not op.packet.startswith("nll_loss"):
        return tensors
    x = tensors[0] if tensors[0].dim() else tensors[0][None]
    if "2d" in op.packet and x.dim() == 2:
        x = x[None, :, :, None]
    dim = 1 if x.dim() > 1 else 0
    classes, rows = x.shape[dim], x.select(dim, 0) if x.shape[dim] else x.flatten()
    target = (torch.arange(rows.numel(), device=x.device) * 7 % max(classes, 1)).reshape(rows.shape)
    found = {"self": x, "target": target, "weight": tensors[3].flatten()[:classes]}
    found["grad_output"] = rows if choice == 0 else tensors[1].flatten()[:1].sum()
    found["total_weight"] = tensors[2].flatten()[:1].sum()
    return [found[name] for name in op.names if name in found]


def _argument(argument: Any, tensors: list[torch.Tensor], choice: Any, boolean: bool) -> Any:
    kind = str(argument.type)
    if argument.name in _CHOICES:
        return choice
    if kind in ("Tensor", "Optional[Tensor]"):
        tensor = tensors.pop(0) if len(tensors) > 1 else tensors[0]
        if "Optional" in kind and choice == 2:
            # A sum of a loss, without weights.
            return None
        if argument.name in ("mask", "condition"):
            return tensor.nan_to_num() > 0 if tensor.is_floating_point() else tensor > 0
        if argument.name == "n" and tensor.is_floating_point():
            # A degree: ATen's CUDA kernels take 2^63 steps for an infinite one. In place, for the layout's sake.
            return tensor.clamp_(max=1000)
        if argument.name == "value":
            return torch.tensor(2, dtype=tensor.dtype, device=tensor.device)
        return tensor
    if kind == "bool":
        return boolean
    if kind == "int":
        # A dtype is an int in schemas.
        return tensors[0].dtype if argument.name.endswith("dtype") else _INTEGERS[argument.name]
    if kind in ("Optional[int]", "List[int]", "Optional[List[int]]"):
        place = None if argument.name == "dtype" else -1 if tensors[0].dim() else 0
        return [place] if "List" in kind and place is not None else place
    number = 2 if not tensors[0].is_floating_point() else 0.75
    return True if tensors[0].dtype is torch.bool else number
