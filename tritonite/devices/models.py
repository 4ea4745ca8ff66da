"""NVIDIA GPUs by name, with the numbers of their data sheets, from which costs that nobody measured are estimated."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A GPU by its data sheet. Rates are of dense products that accumulate in float32, in TFLOPS.

    Attributes:
        name: the name in messages and in files of tables, such as "NVIDIA H200".
        words: words of PyTorch's names of such GPUs, each alone enough to identify one.
        architecture: the compute capability, such as "sm_90".
        multiprocessors: number of multiprocessors.
        bandwidth: memory bandwidth in GB/s.
        float16: rate of tensor cores for fp16 and bf16.
        tf32: rate of tensor cores for TF32.
        float8: rate of tensor cores for float8; 0 for GPUs without.
        float32: rate of float32 without tensor cores.
        shared_memory: KiB of shared memory of a multiprocessor.
        l2: MiB of L2 cache.
        source: where the numbers come from.
        measured: whether tables were fitted on such a GPU. All other tables are estimates.
    """

    name: str
    words: tuple[str, ...]
    architecture: str
    multiprocessors: int
    bandwidth: float
    float16: float
    tf32: float
    float8: float
    float32: float
    shared_memory: int
    l2: int
    source: str
    measured: bool = False

    @property
    def file(self) -> str:
        """The name of its file of fitted tables."""
        return f"{self.name.replace(' ', '_')}.json"


_HOPPER = "data sheets at nvidia.com/en-us/data-center/h100 and /h200, NVIDIA H100 Tensor Core GPU Architecture"
_BLACKWELL = "NVIDIA Blackwell Tuning Guide at docs.nvidia.com/cuda/blackwell-tuning-guide"
# Per architecture, the first is the one that stands for GPUs of other names.
MODELS = (
    Model(
        "NVIDIA A100",
        ("A100", "A800"),
        "sm_80",
        108,
        2039,
        312,
        156,
        0,
        19.5,
        164,
        40,
        "data sheet at nvidia.com/en-us/data-center/a100 (80 GB SXM), NVIDIA A100 Tensor Core GPU Architecture",
    ),
    Model(
        "NVIDIA L40S",
        ("L40S",),
        "sm_89",
        142,
        864,
        362,
        183,
        733,
        91.6,
        100,
        96,
        "data sheet at nvidia.com/en-us/data-center/l40s, NVIDIA Ada GPU Architecture (AD102)",
    ),
    Model(
        "NVIDIA GeForce RTX 4090",
        ("4090",),
        "sm_89",
        128,
        1008,
        165.2,
        82.6,
        330.3,
        82.6,
        100,
        72,
        "NVIDIA Ada GPU Architecture, table of the GeForce RTX 4090",
    ),
    Model(
        "NVIDIA H200",
        ("H200",),
        "sm_90",
        132,
        4800,
        989,
        494,
        1979,
        67,
        228,
        50,
        _HOPPER,
        measured=True,
    ),
    Model("NVIDIA H100", ("H100", "H800"), "sm_90", 132, 3350, 989, 494, 1979, 67, 228, 50, _HOPPER),
    Model(
        "NVIDIA B200",
        ("B200", "GB200"),
        "sm_100",
        148,
        7700,
        2250,
        1125,
        4500,
        75,
        228,
        126,
        f"specification of HGX B200 at nvidia.com/en-us/data-center/hgx, divided by its eight GPUs; {_BLACKWELL}",
    ),
    Model(
        "NVIDIA GeForce RTX 5090",
        ("5090",),
        "sm_120",
        170,
        1792,
        209.5,
        104.8,
        419,
        104.8,
        100,
        96,
        f"NVIDIA RTX Blackwell GPU Architecture, table of the GeForce RTX 5090; {_BLACKWELL}",
    ),
)


def known_as(name: str) -> Model | None:
    """Return the model of a GPU by PyTorch's name of it, such as "NVIDIA H100 80GB HBM3"; None for an unlisted GPU."""
    words = set(re.split(r"\W+", name))
    return next((model for model in MODELS if words & set(model.words)), None)


def nearest(name: str, architecture: str) -> Model | None:
    """Return the model that a GPU of this name and architecture is served as; None if none is near.

    A GPU that is not listed is served as one of the closest compute capability with the same major version.
    """
    own = known_as(name)
    if own is not None and own.architecture == architecture:
        return own
    alike = [model for model in MODELS if _capability(model.architecture)[0] == _capability(architecture)[0]]
    return min(alike, key=lambda model: abs(_minor(model.architecture) - _minor(architecture)), default=None)


def measured(model: Model) -> Model:
    """Return the measured model that a model's tables come from: itself, one of its architecture, or else any."""
    found = [each for each in MODELS if each.measured]
    return min(found, key=lambda each: (each is not model, each.architecture != model.architecture))


def _capability(architecture: str) -> tuple[int, int]:
    """Return (major, minor) of a compute capability such as "sm_90"; (0, 0) for any other text."""
    found = re.fullmatch(r"sm_(\d+)(\d)", architecture)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _minor(architecture: str) -> int:
    return _capability(architecture)[1]
