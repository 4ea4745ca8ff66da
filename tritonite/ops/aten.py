"""The one question that results depend on besides their operands: do they follow ATen's CPU or its GPU kernels?

ATen has two kernels for most operators, and the two differ: in the order of roundings, in the sign of a zero, in
the layout or dtype of a result, in what they refuse. On a GPU results are ATen's GPU results. In Triton's interpreter
operands are CPU tensors, and results are ATen's CPU results. `Device.aten` says which kernels a kind of device
follows. Code that exists for such a difference asks here, and says next to the question what the difference is.

`check_architecture` is for operators that ATen has for some GPUs alone.
"""

import torch
import triton.language as tl

from tritonite import devices
from tritonite.errors import Decline


def on_cpu() -> bool:
    """Return whether results follow ATen's CPU kernels."""
    return devices.current.aten == "cpu"


def on_gpu() -> bool:
    """Return whether results follow ATen's GPU kernels."""
    return not on_cpu()


def check_architecture(device: torch.device, families: tuple[str, ...], what: str) -> None:
    """Decline a call on an NVIDIA GPU for which ATen refuses it, so that the call raises ATen's error.

    Args:
        device: the call's device. Devices without a compute capability serve the call.
        families: what the names of the architectures that ATen has the call for begin with, such as "sm_8" for sm_80,
            sm_86 and sm_89.
        what: the call, in the plural, for the reason.
    """
    own = devices.architecture(device)
    if own and not own.startswith(families):
        raise Decline(f"{what} on {own}; ATen has them for {', '.join(f'{each}x' for each in families)} alone")


# The answer for device functions. They import it by name: Triton's cache key has the values of named constants only.
ON_CPU = tl.constexpr(on_cpu())
