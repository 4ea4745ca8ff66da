"""Write the table of operators whose ATen kernels are faster, from docs/benchmarks/results.json; --check compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import generated

import tritonite
from tritonite.bench.results import Run, slower_operators
from tritonite.registry import slower

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "results.json"


def main() -> int:
    run = Run.load(RESULTS)
    # Fused operators are not in the table: ATen has only compositions of them.
    packets = {op.packet for op in tritonite.overloads().values()}
    slow = {name: dtypes for name, dtypes in slower_operators(run).items() if name in packets}
    table = slower.table() | {run.machine.kind: slow}
    kinds = []
    for kind, operators in table.items():
        # One line an operator.
        lines = [f"    {json.dumps(name)}: {json.dumps(dtypes)}" for name, dtypes in operators.items()]
        kinds.append(f"  {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n  }")
    text = "{\n" + ",\n".join(kinds) + "\n}\n"
    return generated.write(
        slower.PATH, text, f"tritonite/registry/{slower.PATH.name}", "python tools/slower_operators.py"
    )


if __name__ == "__main__":
    sys.exit(main())
