"""Tiles of quantised products and blocks of conversions for each kind of device."""

from __future__ import annotations

from typing import NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables
from tritonite.engine.gemm.table import Config


class QuantizedTable(NamedTuple):
    """Tiles and blocks of a kind of device.

    Tiles of few rows are `transposed`: the weight's rows fill the 64 rows of a tensor core product, and its columns are
    x's rows. With 4-bit weights all tiles are, because tensor cores read only their first operand from registers.

    The rates and the numbers of warps and stages of NVIDIA's tiles follow the shapes of sm_90's instructions. No sweep
    has fitted them.
    """

    float8_few: tuple[Config, ...] = (Config(64, 16, 128, 4, 4, programs=4, transposed=True),)
    float8: tuple[Config, ...] = (
        Config(128, 128, 128, 8, 4, 1.0),
        Config(64, 128, 128, 4, 4, 0.7),
        Config(64, 64, 128, 4, 4, 0.5),
        Config(64, 32, 128, 4, 4, 0.35, transposed=True),
    )
    int4_few: tuple[Config, ...] = (Config(64, 16, 128, 4, 4, programs=4, transposed=True),)
    int4: tuple[Config, ...] = (
        Config(128, 128, 64, 8, 3, 1.0, transposed=True),
        Config(128, 64, 64, 4, 4, 0.7, transposed=True),
        Config(64, 32, 128, 4, 3, 0.35, transposed=True),
    )
    # Products of 4-bit words with at most `words_rows` rows and fewer than `words_k` terms are left to ATen.
    words_rows: int = 8
    words_k: int = 8192
    # Elements of a program that quantises, packs or dequantises, and the most columns of its block.
    elements: int = 4096
    columns: int = 256


def _in_stages(configs: tuple[Config, ...], stages: int) -> tuple[Config, ...]:
    return tuple([config._replace(num_stages=stages) for config in configs])


_NVIDIA = QuantizedTable()
QUANTIZED: Tables[QuantizedTable] = Tables("quantized", dict.fromkeys(devices.KINDS, _NVIDIA))
QUANTIZED["amd"] = _NVIDIA._replace(
    float8_few=_in_stages(_NVIDIA.float8_few, 2),
    float8=_in_stages(_NVIDIA.float8, 2),
    int4_few=_in_stages(_NVIDIA.int4_few, 2),
    int4=_in_stages(_NVIDIA.int4, 2),
)
QUANTIZED["interpreter"] = QuantizedTable(
    float8_few=(Config(32, 16, 64, transposed=True),),
    float8=(Config(32, 32, 64),),
    int4_few=(Config(32, 16, 32, transposed=True),),
    int4=(Config(32, 32, 32, transposed=True),),
)


def quantized_table() -> QuantizedTable:
    """Return the table of the current device."""
    return QUANTIZED[devices.current.kind]


def aten_multiplies_words_faster(rows: int, terms: int) -> bool:
    """Return whether ATen is faster at a product of rows by a weight of 4-bit words, with sums of `terms` products."""
    table = quantized_table()
    return rows <= table.words_rows and terms < table.words_k
