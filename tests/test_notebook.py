"""What notebooks show of reports: small HTML without scripts, in the notebook's own colours."""

import html.parser

import pytest
import torch

import tritonite
from tritonite.report.report import OperatorReport, Report
from tritonite.report.stats import Stats
from tritonite.runtime.stats import Counts

VOID = {"br"}


class Tree(html.parser.HTMLParser):
    """A parser that raises for tags that do not match, and keeps tags, styles and text."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.styles, self.text = [], set(), set(), ""
        self.feed(source)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert {name for name, _ in attrs} <= {"style"}
        self.tags.add(tag)
        self.styles |= {value for _, value in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def check(source):
    tree = Tree(source)
    assert tree.tags <= {"div", "p", "br", "pre", "table", "tr", "th", "td"}
    # No colour of its own, which would be unreadable on a light or a dark background.
    assert not any("#" in style or "rgb" in style or "background" in style for style in tree.styles)
    return tree.text


REASON = "<script>alert('&')</script> [bold]dtype[/]"


def test_tables_are_escaped():
    report = Report({"<b>": OperatorReport(3, 1, 2, {REASON: 2}, 1.25, 0.5)}, None)
    for shown in (report, Stats({"<b>": Counts(1, 2, {REASON: 2})})):
        source = shown._repr_html_()
        assert "<script" not in source and "<b>" not in source
        text = check(source)
        assert REASON in text and "<b>" in text
    assert "tritonite.report(function, ...)" in text and "calls of 1 operators" in check(report._repr_html_())


def test_tables_of_a_call(device):
    x = torch.randn(4, 4, device=device)
    report = tritonite.report(torch.sigmoid, x)
    assert "sigmoid" in check(report._repr_html_()) and "sigmoid" in check(tritonite.stats()._repr_html_())
    assert len(report._repr_html_()) < 3000


def test_an_empty_table_is_a_table():
    assert "operator" in check(Stats({})._repr_html_())


@pytest.mark.parametrize("function", ["add.Tensor", torch.add, "bitwise_a*"])
def test_an_explanation_is_text_with_lines(device, function):
    x = torch.ones(4, dtype=torch.int32, device=device)
    text = tritonite.explain(function, x, x)
    assert isinstance(text, str) and text == str(text) and "path" in text
    assert check(text._repr_html_()) == text
    assert (text + "").splitlines() == text.splitlines()
