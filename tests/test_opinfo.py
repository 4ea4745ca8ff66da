"""Every function with OpInfo samples, against ATen and float64; calls go through Python unless a GPU runs them."""

import pytest
import torch
from conftest import FULL
from test_accuracy import report_failures

from tritonite.testing import opinfo
from tritonite.testing.verify import DTYPES, check_opinfo

pytestmark = pytest.mark.usefixtures("registered_once")

# Without the full set, every function runs in two dtypes on three samples.
LIMIT = None if FULL else 3
# A sample of a million elements takes the interpreter half a minute.
MOST_ELEMENTS = None if FULL else 2**16
OPINFO_DTYPES = DTYPES if FULL else (torch.bfloat16, torch.int32)


def _takes_lists(name):
    """Whether a sample of a function is a list of 20 tensors or more, so that one is enough without the full set."""
    return name.startswith("_foreach_")


def _functions():
    # test_accuracy calls the overloads of all functions of lists. Without the full set, one in three is enough here.
    lists = [name for name in opinfo.infos() if _takes_lists(name)]
    left_out = set() if FULL else set(lists) - set(lists[::3])
    for name, info in opinfo.infos().items():
        if name in left_out:
            continue
        dtypes = [dtype for dtype in OPINFO_DTYPES if opinfo.supported(info, dtype)] or [torch.float32]
        for dtype in dtypes if FULL or not _takes_lists(name) else dtypes[:1]:
            yield pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.declines("the verifier judges declines")
@pytest.mark.parametrize(("name", "dtype"), list(_functions()))
def test_opinfo(name, dtype):
    limit = LIMIT if FULL or not _takes_lists(name) else 1
    report_failures(check_opinfo(name, opinfo.infos()[name], dtype, limit=limit, most_elements=MOST_ELEMENTS))
