"""A benchmark run as one self-contained HTML file."""

from __future__ import annotations

import base64
import importlib.resources
import io
import json
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from tritonite.bench import charts
from tritonite.bench.percentiles import declines, percentiles, reproduction, worst
from tritonite.bench.results import REFERENCE, ModelResult, Run, readable, summaries
from tritonite.errors import ATEN_IS_FASTER


def write(run: Run, path: Path) -> None:
    """Write the page: machine, summary, charts, models, failures, and a table that sorts and filters.

    The URL's fragment sets the table: "#sort=speedup&order=desc&filter=gelu&dtype=float16". `sort` is a text column
    ("op", "label", "dtype", "measure", "family"), a provider's name for its time, "speedup" for Tritonite's speedup,
    "speedup_NAME" for another provider's, "bandwidth" or "roofline".
    """
    machine = run.machine
    about = {"commit": machine.commit, "date": machine.date, **machine.versions, "command": machine.command}
    if machine.copy_bandwidth:
        about["copy bandwidth"] = f"{readable(machine.copy_bandwidth / 1e9, 0)} GB/s"
    about |= {f"{dtype} matmul": f"{readable(rate / 1e12, 0)} TFLOP/s" for dtype, rate in machine.matmul_rates.items()}
    warnings = [charts.INTERPRETED] * machine.interpreted
    warnings += ["The run was interrupted: these are the cases measured before that."] * run.interrupted
    sections = {
        "device": escape(machine.device),
        "facts": "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in about.items()),
        "banners": "".join(f'<p class="banner">{escape(warning)}</p>' for warning in warnings),
        "summary": "".join(_summary(run)),
        "charts": _charts(run),
        "models": _models(run),
        "drawn": _drawn(run),
        "failures": _failures(run),
        "unless_results": "" if run.results else " hidden",
        "subject": escape(_name(_subject(run))),
        # A "</script>" within the data would close the script element.
        "data": json.dumps(_table(run), separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = importlib.resources.files("tritonite.bench").joinpath("page.html").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(r"<!--(\w+)-->", lambda match: sections[match[1]], template), encoding="utf-8")


def _name(provider: str) -> str:
    return charts.NAMES.get(provider, provider)


def _others(run: Run) -> list[str]:
    return [provider for provider in run.providers() if provider != REFERENCE]


def _subject(run: Run) -> str:
    """Return the provider that the page is about: the first other than ATen."""
    return next(iter(_others(run)), "tritonite")


def _summary(run: Run) -> Iterable[str]:
    """Yield a card for each measure and provider, cards of counts, and one for each model pass and provider."""
    for each in summaries(run):
        if each.family == "all":
            yield _card(
                f"{_name(each.provider)}, {each.measure} time",
                _times_faster(each.mean),
                f"geometric mean of {each.cases} cases",
                f"lowest {_times_faster(each.lowest)}: {each.worst.op} {each.worst.label}, {each.worst.dtype}",
            )
    failed = sum(bool(result.failure) for result in run.results)
    left = sum(result.declined == ATEN_IS_FASTER for result in run.results)
    operators = len({result.op for result in run.results})
    if run.results:
        yield _card(
            "Cases", str(len(run.results)), f"{operators} operators", f"{failed} failed" if failed else "none failed"
        )
    if left:
        yield _card("Left to ATen", str(left), "cases that ATen serves by default, because it is faster")
    for model in run.models:
        for provider in model.times:
            if speedup := _model_speedup(model, provider):
                yield _card(f"{model.model} {model.phase}, {_name(provider)}", speedup, f"of a pass, {model.dtype}")


def _card(title: str, number: str, *notes: str) -> str:
    lines = "".join(f"<small>{escape(note)}</small>" for note in notes)
    return f'<div class="card">{escape(title)}<b>{escape(number)}</b>{lines}</div>'


def _charts(run: Run) -> str:
    images = []
    for name, chart in charts.draw(run).items():
        buffer = io.BytesIO()
        chart.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        data = base64.b64encode(buffer.getvalue()).decode()
        images.append(
            f'<figure class="card"><img alt="Chart: {escape(name)}" src="data:image/svg+xml;base64,{data}"></figure>'
        )
    return f'<h2>Charts</h2><div class="charts">{"".join(images)}</div>' if images else ""


def _models(run: Run) -> str:
    head = ["model", "phase", "dtype", "batch", "tokens", "provider"]
    head += ["tokens/s", "ms a pass", "speedup", "host ms", "device ms"]
    rows = [_model_row(model, provider) for model in run.models for provider in model.times]
    if not rows:
        return ""
    details = "".join(_model_operators(model) for model in run.models if model.operators)
    return f'<h2>Models</h2><div class="card scroll">{_plain_table(head, rows)}</div>{details}'


def _model_row(model: ModelResult, provider: str) -> list[str]:
    time, host = model.times[provider], model.host_times.get(provider)
    tokens = f"{model.tokens:,}" + (f" after {model.context:,}" if model.context else "")
    return [
        *(model.model, model.phase, model.dtype, f"{model.batch:,}", tokens, _name(provider)),
        f"{model.tokens_per_second(provider):,.1f}",
        f"{time.median / 1e3:,.2f}",
        _model_speedup(model, provider),
        f"{host.median / 1e3:,.2f}" if host else "",
        f"{model.device_times[provider] / 1e3:,.2f}" if provider in model.device_times else "",
    ]


def _model_speedup(model: ModelResult, provider: str) -> str:
    if provider == REFERENCE or REFERENCE not in model.times:
        return ""
    return _times_faster(model.times[REFERENCE].median / model.times[provider].median)


def _model_operators(model: ModelResult) -> str:
    """Return a collapsed table of the operators of a pass and their times."""
    head = ["operator", "calls a pass", "ATen us", "Tritonite us", "difference us"]
    rows = [
        [name, f"{calls:,}", f"{aten:,.1f}", f"{ours:,.1f}", f"{ours - aten:+,.1f}"]
        for name, calls, aten, ours in model.operators
    ]
    return _collapsed(f"Operators of {model.model}, {model.phase}, {model.dtype}", _plain_table(head, rows))


def _drawn(run: Run) -> str:
    """Return the section of drawn cases: percentiles, the lowest speedups, reasons of declines; "" without any."""
    head = ["family", "dtype", "cases", "served", "minimum", "10 %", "median", "geometric mean"]
    rows = [
        [
            each.family,
            each.dtype,
            str(each.cases),
            f"{each.served / each.cases:.0%}",
            *map(_times_faster, each.speedups),
        ]
        for each in percentiles(run)
    ]
    if not rows:
        return ""
    reasons = [[str(count), reason] for reason, count in declines(run)]
    lowest = [
        [_times_faster(speedup), result.op, result.label, result.dtype, reproduction(run, result)]
        for speedup, result in worst(run)
    ]
    sections = [
        f'<div class="card scroll">{_plain_table(head, rows)}</div>',
        _collapsed("The lowest", _plain_table(["speedup", "operator", "case", "dtype", "again"], lowest)),
        _collapsed("Left to ATen", _plain_table(["cases", "why"], reasons)) if reasons else "",
    ]
    return f"<h2>Drawn at random</h2>{''.join(sections)}"


def _times_faster(speedup: float | None) -> str:
    return "" if speedup is None else f"{readable(speedup, 2)}x"


def _collapsed(title: str, content: str) -> str:
    return f'<details class="card"><summary>{escape(title)}</summary>{content}</details>'


def _plain_table(head: list[str], rows: list[list[str]]) -> str:
    """Return an HTML table; columns of numbers are right-aligned."""
    numeric = [all(re.match(r"[-+\d]|$", cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for tag, row in [("th", head), *(("td", row) for row in rows)]:
        cells = [(' class="number"' if right else "", escape(cell)) for right, cell in zip(numeric, row, strict=True)]
        lines.append("".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in cells))
    return "<table><tr>{}</tr></table>".format("</tr><tr>".join(lines))


def _failures(run: Run) -> str:
    failed = [
        (each.op, f"{each.label}, {each.dtype}, {each.measure}", each.failure) for each in run.results if each.failure
    ]
    failed += [(each.model, f"{each.phase}, {each.dtype}", each.failure) for each in run.models if each.failure]
    lines = "".join(
        f'<div><b class="bad">{escape(name)}</b> {escape(case)}<pre>{escape(failure)}</pre></div>'
        for name, case, failure in failed
    )
    return f'<h2>Failures</h2><div class="card">{lines}</div>' if failed else ""


def _table(run: Run) -> dict[str, Any]:
    """Return columns and rows as the page's script reads them; a missing number is null."""
    texts = ("op", "label", "dtype", "measure", "family")
    titles = ("operator", "case", "dtype", "measure", "family")
    columns: list[dict[str, Any]] = [{"id": name, "title": title} for name, title in zip(texts, titles, strict=True)]
    providers, others, subject = run.providers(), _others(run), _subject(run)
    for provider in providers:
        columns.append({"id": provider, "title": f"{_name(provider)} us", "digits": 2, "suffix": "", "spread": True})
    for provider in others:
        name = "speedup" if provider == subject else f"speedup_{provider}"
        title = "speedup" if len(others) == 1 else f"{_name(provider)} speedup"
        columns.append({"id": name, "title": title, "digits": 2, "suffix": "x", "speedup": True})
    columns.append({"id": "bandwidth", "title": "GB/s", "digits": 0, "suffix": ""})
    columns.append({"id": "roofline", "title": "% of roofline", "digits": 0, "suffix": " %"})
    rows = []
    for result in run.results:
        share = run.roofline_share(result, subject)
        moved = result.bytes / result.times[subject].median / 1e3 if subject in result.times else None
        numbers = [
            *(result.times[provider].median if provider in result.times else None for provider in providers),
            *(result.speedup(provider) for provider in others),
            moved if result.measure != "host" else None,
            share * 100 if share is not None else None,
        ]
        rows.append(
            {
                "cells": [*(getattr(result, name) for name in texts), *map(_rounded, numbers)],
                "spreads": {name: _rounded(time.spread * 100) for name, time in result.times.items()},
                "failed": bool(result.failure),
            }
        )
    return {"columns": columns, "rows": rows}


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.6g}")
