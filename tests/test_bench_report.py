"""A benchmark's results on disk, their comparison, the charts and the page."""

import dataclasses
import io
import json
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
import scripts
from matplotlib import image
from rich.console import Console

from tritonite.bench import charts, page, results
from tritonite.bench import console as view
from tritonite.bench.results import Machine, ModelResult, Result, Run, Timing, readable
from tritonite.errors import InvalidResults

ARTIFACTS = Path(__file__).parent.parent / "results"
NASTY = '<b>"x"</b></script><!--facts-->$a_{'
FAMILIES = {
    "pointwise": ("add", "gelu", "relu", NASTY),
    "reduction": ("sum", "amax"),
    "rowwise": ("softmax", "layer_norm"),
    "matmul": ("mm",),
}
PROVIDERS = ("aten", "tritonite", "compile")
SIZES = (4096, 262144, 4194304, 67108864)


def timing(median):
    return Timing(median, median * 0.99, median * 1.01)


def device_result(chance, op, family, elements, dtype):
    size = 4 if dtype == "float32" else 2
    moved = 2 * size * elements
    best = 3 + moved / 4.2e6
    flops = 2 * int(elements**1.5) if family == "matmul" else None
    if flops:
        best = 5 + flops / 7e8
    times = {name: timing(best * chance.uniform(1, 1.4 if name == "tritonite" else 1.8)) for name in PROVIDERS}
    side = int(elements**0.5)
    return Result(op, family, f"{side}x{side}", dtype, "device", elements, moved, flops, times)


def every_result():
    chance = random.Random(1)
    for family, operators in FAMILIES.items():
        for op in operators:
            for dtype in ("float16", "float32"):
                for elements in SIZES:
                    yield device_result(chance, op, family, elements, dtype)
            times = {name: timing(chance.uniform(6, 11)) for name in PROVIDERS[:2]}
            yield Result(op, family, "64x64", "float32", "host", 4096, 32768, None, times)
            yield dataclasses.replace(device_result(chance, op, family, 4096, "float32"), measure="graph")
    yield Result("cumsum", "scan", "3x5", "float32", "device", 15, 120, failure="WrongAnswer: 3 < 5 & nan")
    for power in range(12, 28, 3):
        moved = 12 * 2**power
        times = {name: timing(4 + moved / 4.2e6 * chance.uniform(1, 1.1)) for name in PROVIDERS}
        yield Result("vector add", "classic", str(2**power), "float32", "device", 2**power, moved, None, times)
    for side in range(512, 4097, 512):
        times = {name: timing(8 + 2 * side**3 / 7e8 * chance.uniform(1, 1.2)) for name in PROVIDERS[:2]}
        yield Result("matmul", "classic", str(side), "float16", "device", side**2, 6 * side**2, 2 * side**3, times)


@pytest.fixture(scope="module")
def run():
    versions = {"torch": "2.13.0", "triton": "3.7.1", "tritonite": "0.1.0"}
    rates = {"float16": 7.2e14, "float32": 7.2e14}
    machine = Machine(
        "NVIDIA H200", "nvidia", versions, "1a2b3c4", "tritonite bench --full", "2026-01-02 03:04", 4.2e12, rates
    )
    operators = [("addmm", 72, 310.0, 290.5), ("gelu", 12, 42.0, 30.0)]
    model = ModelResult(
        *("MiniLM-L6-v2", "prefill", "float16", 8, 128),
        {name: timing(time) for name, time in zip(PROVIDERS, (1310.0, 1190.0, 1020.0), strict=True)},
        {name: timing(time) for name, time in zip(PROVIDERS, (1250.0, 1130.0, 400.0), strict=True)},
        operators,
    )
    return Run(machine, list(every_result()), [model])


def with_machine(run, **changes):
    return dataclasses.replace(run, machine=dataclasses.replace(run.machine, **changes))


def only(run, keep):
    return dataclasses.replace(run, results=[result for result in run.results if keep(result)])


def test_a_run_is_saved_and_loaded(run, tmp_path):
    path = tmp_path / "new" / "run.json"
    interrupted = dataclasses.replace(run, interrupted=True)
    interrupted.save(path)
    assert Run.load(path) == interrupted


@pytest.mark.parametrize("text", ["", "[]", "null", '{"schema": 1}', '{"schema": 99}', '{"schema": 1, "machine": {}}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(InvalidResults, match=re.escape(str(path))):
        Run.load(path)
    with pytest.raises(InvalidResults):
        Run.load(tmp_path / "missing.json")


def slower(result, factor):
    """Return a result with all times multiplied by 1.07, and Tritonite's by `factor` as well."""
    times = {name: timing(time.median * 1.07) for name, time in result.times.items()}
    times["tritonite"] = timing(times["tritonite"].median * factor)
    return dataclasses.replace(result, times=times)


def test_compare_finds_a_slow_down_and_ignores_noise(run):
    chance = random.Random(2)
    timed = [result for result in run.results if result.times]
    noisy = [slower(result, chance.uniform(0.985, 1.015)) for result in timed]
    assert results.compare(run, dataclasses.replace(run, results=noisy)) == []
    planted = [slower(result, 1.2 if place == 5 else 0.8 if place == 7 else 1) for place, result in enumerate(timed)]
    worse, better = results.compare(run, dataclasses.replace(run, results=planted))
    assert worse.result.key == timed[5].key and worse.ratio == pytest.approx(1.2) and worse.noise < 0.05
    assert better.result.key == timed[7].key and better.ratio == pytest.approx(0.8)


def test_charts_are_drawn_and_saved(run, tmp_path):
    paths = charts.save(run, tmp_path / "charts")
    names = ["speedup", "host", "roofline", "scaling", "vector_add", "matmul"]
    assert [path.name for path in paths] == [f"{name}.png" for name in names]
    for path in paths:
        pixels = image.imread(path)
        assert min(pixels.shape[:2]) > 300, path
        inked = (pixels[:, :, :3].min(axis=2) < 0.9).mean()
        assert 0.01 < inked < 0.6, (path, inked)


@pytest.mark.parametrize(
    "keep, names",
    [
        (lambda result: False, set()),
        (lambda result: result.failure, set()),
        (lambda result: result.measure == "host", {"host"}),
        (lambda result: result.measure == "graph", set()),
        (lambda result: result.measure == "device" and result.elements < 2e5, {"speedup", "roofline", "vector_add"}),
        (lambda result: result.op == "vector add", {"speedup", "roofline", "vector_add"}),
        (lambda result: result.op == "sum" and result.measure == "device", {"speedup", "roofline", "scaling"}),
    ],
)
def test_a_chart_without_data_is_left_out(run, keep, names):
    drawn = set(charts.draw(only(run, keep))) - {"matmul"}
    assert drawn == names


def test_without_a_known_bandwidth_there_is_no_roofline(run):
    assert "roofline" not in charts.draw(with_machine(run, copy_bandwidth=0.0, matmul_rates={}))


def test_speedup_shows_the_geometric_mean(run):
    two = [
        Result(
            "sum", "reduction", label, "float32", "device", 8, 64, None, {"aten": timing(aten), "tritonite": timing(1)}
        )
        for label, aten in (("a", 2), ("b", 8))
    ]
    figure = charts.draw(dataclasses.replace(run, results=two))["speedup"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["4.00x"]


def test_the_roofline_shows_the_largest_case(run):
    cases = [
        Result("sum", "reduction", str(size), "float32", "device", size, 42 * 10**5, None, {"tritonite": timing(time)})
        for size, time in ((9, 2), (8, 1))
    ]
    figure = charts.draw(dataclasses.replace(run, results=cases))["roofline"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["50 %"]


def test_many_operators_make_the_host_chart_a_curve(run):
    host = next(result for result in run.results if result.measure == "host")
    many = [dataclasses.replace(host, op=f"op{place}") for place in range(charts.MOST_BARS + 1)]
    lines = [
        len(charts.draw(dataclasses.replace(run, results=some))["host"].axes[0].lines) for some in (many[1:], many)
    ]
    assert lines == [0, 2]


def test_interpreted_runs_say_so(run, tmp_path):
    interpreted = with_machine(run, kind="interpreter")
    for chart, plain in zip(charts.draw(interpreted).values(), charts.draw(run).values(), strict=True):
        assert charts.INTERPRETED in chart.get_suptitle() and "NVIDIA H200" in chart.get_suptitle()
        assert charts.INTERPRETED not in plain.get_suptitle()
    page.write(dataclasses.replace(interpreted, interrupted=True), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count('<p class="banner">') == 3 and "interrupted" in text


class Reader(HTMLParser):
    """A parser that collects a page's references and texts."""

    def __init__(self, text):
        super().__init__()
        self.references, self.texts, self.tags = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def path(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report" / "page.html"
    page.write(run, path)
    return path


def test_the_page_is_self_contained_and_escaped(run, path):
    text = path.read_text()
    reader = Reader(text)
    assert reader.references and all(value.startswith("data:image/svg+xml;base64,") for value in reader.references)
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert NASTY not in text and "<b>&quot;" not in text and '<b>"x"' not in text
    assert reader.tags.count("script") == 2 and reader.tags.count("dl") == 1
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text)[1]
    rows = json.loads(data)["rows"]
    assert [row["cells"][0] for row in rows] == [result.op for result in run.results]
    for fact in ("NVIDIA H200", "2.13.0", "1a2b3c4", "tritonite bench --full", "WrongAnswer: 3 < 5 & nan"):
        assert any(fact in part for part in reader.texts), fact


def test_the_page_of_an_empty_run(run, tmp_path):
    page.write(Run(with_machine(run, copy_bandwidth=0.0).machine), tmp_path / "page.html")
    reader = Reader((tmp_path / "page.html").read_text())
    assert "img" not in reader.tags and "All results" in reader.texts and "Failures" not in reader.texts


def test_the_page_of_models_alone_has_no_empty_sections(run, tmp_path):
    page.write(dataclasses.replace(run, results=[]), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    reader = Reader(text)
    assert "Cases" not in reader.texts and '<section id="all" hidden>' in text
    # 1,310 us over 1,190, and over 1,020.
    assert "1.10x" in reader.texts and "1.28x" in reader.texts
    assert "MiniLM-L6-v2 prefill, Tritonite" in reader.texts


@pytest.mark.parametrize(
    "value, digits, text",
    [
        (1.234, 2, "1.23"),
        (0.02, 2, "0.02"),
        (0.0002345, 2, "0.00023"),
        (0.0, 2, "0.00"),
        (0.4, 0, "0.4"),
        (12.6, 0, "13"),
    ],
)
def test_small_figures_are_not_rounded_to_0(value, digits, text):
    assert readable(value, digits) == text


@pytest.fixture
def slow(run):
    """A run whose operators have a ten-thousandth of ATen's speed, as in the interpreter."""
    results = [
        dataclasses.replace(result, times=result.times | {"tritonite": timing(result.times["aten"].median * scale)})
        for result in run.results
        if result.times and result.measure == "device"
        for scale in (1.0, 9e3)
    ]
    return dataclasses.replace(with_machine(run, copy_bandwidth=1e8), results=results, models=[])


def test_slow_runs_have_figures(slow, tmp_path):
    page.write(slow, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "0.00x" not in text and "lowest 0.00011x" in text
    console = Console(width=200, file=io.StringIO())
    view.summarise(console, slow)
    assert " 0.00 " not in console.file.getvalue()
    shown = {cell for row in dump(tmp_path / "page.html", "", tmp_path)[0] for cell in row}
    assert "0.00x" not in shown and "0 %" not in shown and "0.00011x" in shown


def test_labels_of_ticks_do_not_overlap(slow, run):
    for drawn in (slow, run):
        for name, chart in charts.draw(drawn).items():
            chart.canvas.draw()
            for axes in chart.axes:
                left, right = axes.get_xlim()
                labels = [label for label in axes.get_xticklabels() if left <= label.get_position()[0] <= right]
                labels = [label for label in labels if label.get_text()]
                boxes = [label.get_window_extent() for label in labels]
                texts = [label.get_text() for label in labels]
                assert all(one.x1 < other.x0 for one, other in pairwise(boxes)) and len(boxes) > 1, (name, texts)
                title = axes.title.get_window_extent()
                assert title.x0 >= 0 and title.x1 <= chart.bbox.x1, (name, axes.get_title())


def test_matplotlib_is_imported_by_charts_alone():
    code = "import sys, tritonite, tritonite.bench.results; assert 'matplotlib' not in sys.modules"
    scripts.run(code)


def chromium(folder, *arguments):
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("needs Chromium")
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    flags += "disable-component-update disable-sync"
    command = [found, *(f"--{flag}" for flag in flags.split()), f"--user-data-dir={folder}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def dump(path, fragment, folder):
    """The table's rows as lists of texts, and the page, after its script has run."""
    text = chromium(folder, "--dump-dom", f"{path.as_uri()}#{fragment}")
    assert re.search(r'<body data-ready="yes">', text), "the script did not reach its end"
    body = re.search(r'<table id="results">.*?<tbody>(.*?)</tbody>', text, re.DOTALL)[1]
    rows = re.findall(r"<tr>(.*?)</tr>", body)
    return [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row)] for row in rows], text


def test_the_table_sorts_by_its_address(run, path, tmp_path):
    rows, text = dump(path, "sort=speedup&order=desc", tmp_path)
    assert len(rows) == len(run.results)
    heads = re.findall("<button>(.*?)</button>", text)
    assert heads[:8] == [
        "operator",
        "case",
        "dtype",
        "measure",
        "family",
        "ATen us",
        "Tritonite us",
        "torch.compile us",
    ]
    shown = [row[heads.index("Tritonite speedup")] for row in rows]
    numbers = [float(value.removesuffix("x")) for value in shown if value]
    assert numbers == sorted(numbers, reverse=True) and max(numbers) > min(numbers)
    assert shown[-1] == "" and shown.count("") == sum(not result.times for result in run.results)
    assert 'aria-sort="descending"' in text
    assert text.count("<img ") == len(charts.draw(run))


def test_numbers_sort_as_numbers_and_empty_cells_last(run, path, tmp_path):
    rows, _ = dump(path, "sort=tritonite&order=asc", tmp_path)
    shown = [row[6].split(" ")[0] for row in rows]
    numbers = [float(value) for value in shown if value]
    assert numbers == sorted(numbers) and any(str(a) > str(b) for a, b in pairwise(numbers))
    assert shown[-1] == ""


def test_the_table_filters_by_its_address(run, path, tmp_path):
    rows, text = dump(path, "filter=GELU%204096x&dtype=float16&measure=device", tmp_path)
    assert not rows and f"0 of {len(run.results)} cases" in text
    rows, text = dump(path, "filter=GELU%202048x&dtype=float16&measure=device", tmp_path)
    assert [row[:5] for row in rows] == [["gelu", "2048x2048", "float16", "device", "pointwise"]]
    assert f"1 of {len(run.results)} cases" in text


@pytest.mark.parametrize("name, scheme", [("report.png", 1), ("report_dark.png", 0)])
def test_screenshots_of_the_page_are_not_blank(path, tmp_path, name, scheme):
    ARTIFACTS.mkdir(exist_ok=True)
    shot = ARTIFACTS / name
    shot.unlink(missing_ok=True)
    look = (f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1400,2400", f"--screenshot={shot}")
    chromium(tmp_path, *look, f"{path.as_uri()}#sort=speedup&order=asc")
    pixels = image.imread(shot)[:, :, :3]
    assert pixels.shape[:2] == (2400, 1400)
    for part in (pixels[:800], pixels[800:1600], pixels[1600:]):
        assert part.std() > 0.02
        # In the dark theme, charts must be dark, too.
        assert part.mean() > 0.8 if scheme else part.mean() < 0.3
