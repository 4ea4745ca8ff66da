"""Write the tables of README.md and of a guide from docs/benchmarks/*.json; with --check, exit with 1 if one is stale.

A table stands between two comments, `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import generated

from tritonite.bench.graphs.results import GraphRun, table
from tritonite.bench.percentiles import PROVIDER, kernel_speedup
from tritonite.bench.results import ModelResult, Run, quantile

PAGE = Path(__file__).parent.parent / "README.md"
FOLDER = PAGE.parent / "docs" / "benchmarks"
# Families of drawn cases that share a row.
ROWS = {
    "Matrix products drawn at random, against cuBLAS": ("products",),
    "Softmax, norms, reductions and gradients, drawn": ("softmax", "norms", "reductions", "gradients"),
    "Pointwise operators, drawn": ("pointwise",),
}


def operators() -> Iterator[str]:
    """A line a row: models, drawn cases by family, and host time."""
    models, drawn, results = (Run.load(FOLDER / f"{name}.json") for name in ("models_float32", "drawn", "results"))
    yield f"| {models.machine.device}, ATen's time over Tritonite's | cases | geometric mean | lowest tenth | lowest |"
    yield "| --- | --- | --- | --- | --- |"
    passes = [each.device_speedup() for each in models.models]
    names = ", ".join(_title(each.model) for each in models.models)
    yield _row(f"Forward passes in float32, device time: {names}", passes)
    for title, families in ROWS.items():
        yield _row(title, [kernel_speedup(each) for each in drawn.results if each.family in families])
    small = [kernel_speedup(each) for each in results.results if each.measure == "host"]
    yield _row("Host time of calls on 64x64 tensors", small)


def compiled() -> Iterator[str]:
    """A line a model: speedups over eager ATen by provider."""
    run = Run.load(FOLDER / "models.json")
    providers = {PROVIDER: "Tritonite", "compile": "torch.compile", "compile+tritonite": "torch.compile with Tritonite"}
    yield f"| {run.machine.device}, speedup over eager ATen | {' | '.join(providers.values())} |"
    yield "| --- | --- | --- | --- |"
    for each in run.models:
        speedups = (f"{each.speedup(name):.2f}" for name in providers)
        yield f"| {_title(each.model)}, {_pass(each)} | {' | '.join(speedups)} |"


def graphs() -> Iterator[str]:
    """A line a model and way to run it: cold start, steady state, new shapes and start from a file."""
    file = FOLDER / "graphs.json"
    if file.exists():
        yield from table(GraphRun.load(file))
    else:
        yield "`tritonite bench --graphs --json docs/benchmarks/graphs.json` measures what belongs here."


# The tables of each page by name.
TABLES = {
    PAGE: {"operators": operators, "torch.compile": compiled},
    PAGE.parent / "docs" / "guides" / "graphs.md": {"graphs": graphs},
}


def _title(model: str) -> str:
    return {"bert": "BERT", "vit": "ViT", "t5": "T5"}.get(model, model.capitalize())


def _pass(model: ModelResult) -> str:
    after = f" after {model.context}" if model.context else ""
    return f"{model.phase} of {model.batch} x {model.tokens} tokens{after}, {model.dtype}"


def _row(title: str, speedups: list[float | None]) -> str:
    """Return a row of the table; cases without a speedup do not count."""
    known = sorted(each for each in speedups if each is not None)
    numbers = statistics.geometric_mean(known), quantile(known, 0.1), known[0]
    return f"| {title} | {len(known):,} | {' | '.join(f'{each:.2f}' for each in numbers)} |"


def main() -> int:
    return max([_write(page, tables) for page, tables in TABLES.items()])


def _write(page: Path, tables: dict[str, Callable[[], Iterator[str]]]) -> int:
    text = page.read_text()
    for name, lines in tables.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        inside = re.compile(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", re.DOTALL)
        written = "".join(f"{line}\n" for line in lines())
        text = inside.sub(written.replace("\\", r"\\"), text)
    return generated.write(page, text, page.name, "python tools/readme_tables.py")


if __name__ == "__main__":
    sys.exit(main())
