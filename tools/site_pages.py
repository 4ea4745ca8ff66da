"""mkdocs hook: pages of the site from files outside docs/, with their links adjusted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
ERRORS = ROOT / "tritonite" / "errors.py"


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=for_site((ROOT / source).read_text())))
    files.append(File.generated(config, "api/errors.md", content=errors(ERRORS.read_text())))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri == "ops.md":
        # The operators' table needs the width of the table of contents, which would be empty.
        page.meta["hide"] = ["toc"]
    return markdown


def for_site(text: str) -> str:
    """Return a page of the repository's root with its links relative to docs/."""
    for source, page in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text.replace("](docs/", "](")


def errors(source: str) -> str:
    """Return a page with every error class of a module: its name, its docstring and its message."""
    lines = ["# Errors", "", "Every error that Tritonite raises is a `tritonite.errors.TritoniteError`."]
    for name, docstring, template in _errors(source):
        lines += ["", f"## {name}", "", docstring, "", f"> {template}" if template else ""]
    return "\n".join(lines) + "\n"


def _errors(source: str) -> Iterator[tuple[str, str, str]]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases][:1] == ["TritoniteError"]:
            values = {ast.unparse(each.targets[0]): each.value for each in node.body if isinstance(each, ast.Assign)}
            template = ast.literal_eval(values["template"]) if "template" in values else ""
            yield node.name, ast.get_docstring(node) or "", template.replace("!r}", "}")
