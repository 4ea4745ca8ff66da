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
        name="NVIDIA A100",
        words=("A100", "A800"),
        architecture="sm_80",
        multiprocessors=108,
        bandwidth=2039,
        float16=312,
        tf32=156,
        float8=0,
        float32=19.5,
        shared_memory=164,
        l2=40,
        source="data sheet at nvidia.com/en-us/data-center/a100 (80 GB SXM), NVIDIA A100 Tensor Core GPU Architecture",
    ),
    Model(
        name="NVIDIA L40S",
        words=("L40S",),
        architecture="sm_89",
        multiprocessors=142,
        bandwidth=864,
        float16=362,
        tf32=183,
        float8=733,
        float32=91.6,
        shared_memory=100,
        l2=96,
        source="data sheet at nvidia.com/en-us/data-center/l40s, NVIDIA Ada GPU Architecture (AD102)",
    ),
    Model(
        name="NVIDIA GeForce RTX 4090",
        words=("4090",),
        architecture="sm_89",
        multiprocessors=128,
        bandwidth=1008,
        float16=165.2,
        tf32=82.6,
        float8=330.3,
        float32=82.6,
        shared_memory=100,
        l2=72,
        source="NVIDIA Ada GPU Architecture, table of the GeForce RTX 4090",
    ),
    Model(
        name="NVIDIA H200",
        words=("H200",),
        architecture="sm_90",
        multiprocessors=132,
        bandwidth=4800,
        float16=989,
        tf32=494,
        float8=1979,
        float32=67,
        shared_memory=228,
        l2=50,
        source=_HOPPER,
        measured=True,
    ),
    Model(
        name="NVIDIA H100",
        words=("H100", "H800"),
        architecture="sm_90",
        multiprocessors=132,
        bandwidth=3350,
        float16=989,
        tf32=494,
        float8=1979,
        float32=67,
        shared_memory=228,
        l2=50,
        source=_HOPPER,
    ),
    Model(
        name="NVIDIA B200",
        words=("B200", "GB200"),
        architecture="sm_100",
        multiprocessors=148,
        bandwidth=7700,
        float16=2250,
        tf32=1125,
        float8=4500,
        float32=75,
        shared_memory=228,
        l2=126,
        source=f"specification of HGX B200 at nvidia.com/en-us/data-center/hgx, divided by its 8 GPUs; {_BLACKWELL}",
    ),
    Model(
        name="NVIDIA GeForce RTX 5090",
        words=("5090",),
        architecture="sm_120",
        multiprocessors=170,
        bandwidth=1792,
        float16=209.5,
        tf32=104.8,
        float8=419,
        float32=104.8,
        shared_memory=100,
        l2=96,
        source=f"NVIDIA RTX Blackwell GPU Architecture, table of the GeForce RTX 5090; {_BLACKWELL}",
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
