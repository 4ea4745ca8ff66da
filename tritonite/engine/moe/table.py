"""Block sizes of the kernels of mixtures of experts, for each kind of device."""

from __future__ import annotations

from typing import NamedTuple

from tritonite import devices
from tritonite.devices.tables import Tables


class MoeTable(NamedTuple):
    """Blocks of a kind of device.

    `routed`: scores of a program that chooses experts; it has one token at least.
    `sorted_ids`: ids of a step of a program that sorts ids; the step compares all pairs of ids.
    `counts`: counts, one for each program and expert, that a program reads at a time.
    `sorted_alone`: steps up to which a single program sorts all ids, without a launch that counts them first.
    `sorting_steps`: the fewest steps of each of several programs that sort.
    `columns`: the most columns of a block of a row that moves to its expert or back.
    `unrolled`: the most slots of a token whose rows are in flight together.
    `finished`: elements of a block of rows that is finished after a product of groups.
    `balanced`: probabilities of a step of a program that balances load.
    """

    routed: int = 2048
    sorted_ids: int = 128
    counts: int = 4096
    sorted_alone: int = 4
    sorting_steps: int = 2
    columns: int = 1024
    unrolled: int = 8
    finished: int = 4096
    balanced: int = 2048


MOE: Tables[MoeTable] = Tables("moe", dict.fromkeys(devices.KINDS, MoeTable()))


def moe_table() -> MoeTable:
    """Return the table of the current device."""
    return MOE[devices.current.kind]
