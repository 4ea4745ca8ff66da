"""Charts of a benchmark run, by matplotlib."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from tritonite.bench.results import REFERENCE, Result, Run, readable

INTERPRETED = "Triton's interpreter on a CPU: not a GPU's times"
NAMES = {REFERENCE: "ATen", "tritonite": "Tritonite", "compile": "torch.compile"}
# Grey for ATen, then the colours of Okabe and Ito, which colour-blind readers can distinguish.
PALETTE = ("#6b7280", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), "#1f2937"),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon", "text.parse_math"), False),
    **{"axes.axisbelow": True, "axes.edgecolor": "#9ca3af", "axes.grid": True, "grid.color": "#e5e7eb"},
    **{"figure.titlesize": 12, "figure.titleweight": "bold", "axes.titlesize": 9, "font.size": 9},
    **{"lines.linewidth": 1.8, "lines.markersize": 4},
}
MOST_BARS = 40
MOST_PANELS = 6
# Most ticks of an axis of powers of 2, across a figure and across a panel.
MOST_TICKS, FEW_TICKS = 7, 4
UNITS = ((2**30, "G"), (2**20, "M"), (2**10, "K"))
# Values by row of a chart, then by provider.
Values = dict[str, dict[str, list[float]]]


def draw(run: Run) -> dict[str, Figure]:
    """Return charts by name, without those that the run has no data for."""
    device = [result for result in run.results if result.measure == "device" and result.times]
    classics: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in device:
        if result.family == "classic" and result.label.isdecimal():
            classics[result.op, result.dtype].append(result)
    with matplotlib.rc_context(STYLE):
        charts = {
            "speedup": _speedup(run, device),
            "host": _host(run),
            "roofline": _roofline(run, device),
            "scaling": _scaling(run, [result for result in device if result.family != "classic"]),
        }
        for (op, dtype), found in classics.items():
            name = re.sub(r"\W+", "_", op).strip("_")
            charts[f"{name}_{dtype}" if name in charts else name] = _classic(run, op, dtype, found)
    return {name: chart for name, chart in charts.items() if chart is not None}


def save(run: Run, folder: Path) -> list[Path]:
    """Write every chart as a PNG file into the folder, created if missing, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    charts = {folder / f"{name}.png": chart for name, chart in draw(run).items()}
    for path, chart in charts.items():
        chart.savefig(path, dpi=150)
    return list(charts)


def _figure(run: Run, title: str, height: float) -> Figure:
    """Return an empty figure of 7.6 inches by `height`, with a title."""
    note = f"\n{INTERPRETED}" if run.machine.interpreted else ""
    figure = Figure(figsize=(7.6, height + 0.2 * bool(note)), layout="constrained")
    figure.suptitle(f"{title}, {run.machine.device}{note}", x=0.01, horizontalalignment="left")
    return figure


def _look(run: Run, provider: str) -> dict[str, Any]:
    colour = PALETTE[run.providers().index(provider) % len(PALETTE)]
    return {"color": colour, "label": NAMES.get(provider, provider)}


def _legend(figure: Figure) -> Figure:
    """Add a legend below the axes, with one entry a label, and return the figure."""
    entries = [axes.get_legend_handles_labels() for axes in figure.axes]
    found = {label: handle for handles, labels in entries for handle, label in zip(handles, labels, strict=True)}
    figure.legend(list(found.values()), list(found), loc="outside lower left", ncols=5)
    return figure


def _rows(run: Run, axes: Axes, values: Values) -> list[tuple[str, float, list[float], dict[str, Any]]]:
    """Set up a row for each key, and return (key, y, values, style) for each provider in each row."""
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    providers = _providers(run, values)
    pitch = 0.8 / len(providers)
    return [
        (key, row + (line - (len(providers) - 1) / 2) * pitch, values[key][provider], _look(run, provider))
        for row, key in enumerate(values)
        for line, provider in enumerate(providers)
        if provider in values[key]
    ]


def _providers(run: Run, values: Values) -> list[str]:
    return [name for name in run.providers() if any(name in row for row in values.values())]


def _families(run: Run, title: str, values: Values, form: Callable[[float], str], line: float) -> Figure:
    """Draw a row a family: values as dots, their geometric mean as a diamond and, to the right, as a number."""
    count = len(_providers(run, values))
    figure = _figure(run, title, 1.3 + len(values) * (0.16 + 0.2 * count))
    axes = figure.add_subplot()
    for _, middle, found, look in _rows(run, axes, values):
        # Jitter by the golden ratio: even, and the same in every drawing.
        heights = [middle + (i * 0.618 % 1 - 0.5) * 0.5 / count for i in range(len(found))]
        colour = look["color"]
        axes.scatter(found, heights, s=12, alpha=0.3, linewidths=0, color=colour, rasterized=len(found) > 500)
        mean = statistics.geometric_mean(found)
        axes.plot(mean, middle, "D", markersize=7, markeredgecolor="white", **look)
        right, text = axes.get_yaxis_transform(), form(mean)
        axes.text(1.02, middle, text, color=colour, weight="bold", verticalalignment="center", transform=right)
    axes.axvline(line, color="#111827", linewidth=1)
    return _legend(figure)


def _speedup(run: Run, device: list[Result]) -> Figure | None:
    values: Values = defaultdict(lambda: defaultdict(list))
    for result in device:
        for provider in result.times:
            if provider != REFERENCE and (speedup := result.speedup(provider)):
                values[result.family][provider].append(speedup)
    if not values:
        return None
    figure = _families(run, "Speedup over ATen", values, lambda mean: f"{readable(mean, 2)}x", 1)
    axes = figure.axes[0]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=MOST_TICKS))
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.5), max(high, 2))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x" if x >= 0.1 else f"{x:.2g}x")
    axes.set_xlabel("ATen's device time over the provider's: right is faster. Dot: a case; diamond: geometric mean")
    return figure


def _roofline(run: Run, device: list[Result]) -> Figure | None:
    values: Values = defaultdict(lambda: defaultdict(list))
    for result in {each.op: each for each in sorted(device, key=lambda each: each.elements)}.values():
        for provider in result.times:
            if share := run.roofline_share(result, provider):
                values[result.family][provider].append(share * 100)
    if not values:
        return None
    figure = _families(run, "Share of the roofline", values, lambda mean: f"{readable(mean, 0)} %", 100)
    figure.axes[0].set_xlim(left=0)
    figure.axes[0].set_xlabel("% of what bandwidth and matmul rate allow. Dot: an operator's largest case")
    return figure


def _host(run: Run) -> Figure | None:
    times: Values = defaultdict(lambda: defaultdict(list))
    for result in run.results:
        for provider, timing in result.times.items() if result.measure == "host" else ():
            times[result.op][provider].append(timing.median)
    if not times:
        return None
    providers = _providers(run, times)
    if len(times) > MOST_BARS:
        figure = _figure(run, "Host time a call", 3.6)
        axes = figure.add_subplot(xlabel="operators, each curve from its fastest to its slowest", ylabel="us")
        for provider in providers:
            found = sorted(statistics.median(row[provider]) for row in times.values() if provider in row)
            axes.plot(found, **_look(run, provider))
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    else:
        figure = _figure(run, "Host time a call", 1.2 + len(times) * (0.1 + 0.11 * len(providers)))
        axes = figure.add_subplot(xlabel="us")
        for _, middle, row, look in _rows(run, axes, times):
            axes.barh(middle, statistics.median(row), 0.8 / len(providers), **look)
    return _legend(figure)


def _scaling(run: Run, device: list[Result]) -> Figure | None:
    """Draw throughput against size, a panel an operator, in the dtype with the most sizes.

    Operators with the most sizes come first, one of every family before the next.
    """
    curves: dict[tuple[str, str], dict[int, Result]] = defaultdict(dict)
    for result in device:
        curves[result.op, result.dtype].setdefault(result.elements, result)
    families: dict[str, dict[str, dict[int, Result]]] = defaultdict(dict)
    for (op, _), curve in sorted(curves.items(), key=lambda item: -len(item[1])):
        if len(curve) >= 3:
            families[next(iter(curve.values())).family].setdefault(op, curve)
    tiers = zip_longest(*(found.values() for found in families.values()))
    panels = [curve for tier in tiers for curve in tier if curve][:MOST_PANELS]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(run, "Throughput against size", 1.1 + 2 * rows)
    for panel, curve in enumerate(panels, 1):
        first = next(iter(curve.values()))
        axes = figure.add_subplot(rows, columns, panel, title=f"{first.op}\n{first.dtype}")
        _rates(run, axes, curve, (REFERENCE, "tritonite"), "elements", FEW_TICKS)
    return _legend(figure)


def _classic(run: Run, op: str, dtype: str, results: list[Result]) -> Figure:
    figure = _figure(run, f"{op.capitalize()}, {dtype}", 3.6)
    curve = {int(result.label): result for result in results}
    _rates(run, figure.add_subplot(), curve, run.providers(), "elements" if op == "vector add" else "size")
    return _legend(figure)


def _rates(
    run: Run, axes: Axes, curve: dict[int, Result], providers: Iterable[str], unit: str, ticks: int = MOST_TICKS
) -> None:
    """Draw GB/s, or TFLOP/s for products, against size, and a line at the machine's measured limit."""
    arithmetic = all(result.flops for result in curve.values())
    for provider in providers:
        points = sorted((x, result) for x, result in curve.items() if provider in result.times)
        work = [(result.flops or 0) / 1e6 if arithmetic else result.bytes / 1e3 for _, result in points]
        rates = [each / result.times[provider].median for each, (_, result) in zip(work, points, strict=True)]
        line = "--" if provider == REFERENCE else "-"
        if points:
            axes.plot([x for x, _ in points], rates, line, marker="o", **_look(run, provider))
    dtype = next(iter(curve.values())).dtype
    limit = run.machine.matmul_rates.get(dtype, 0) / 1e12 if arithmetic else run.machine.copy_bandwidth / 1e9
    if limit:
        name = "matmul rate" if arithmetic else "copy bandwidth"
        axes.axhline(limit, color="#111827", linestyle=":", linewidth=1.2, label=name)
    axes.set(xlabel=unit, ylabel="TFLOP/s" if arithmetic else "GB/s", ylim=(0, None))
    if unit == "elements":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(
            lambda x, _: next((f"{x / one:g}{sign}" for one, sign in UNITS if x >= one), f"{x:g}")
        )
