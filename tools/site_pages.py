"""A hook of mkdocs: pages of the site that are made of files outside docs/, with links that fit the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=for_site((ROOT / source).read_text())))
    return files


def for_site(text: str) -> str:
    """A page of the repository's root with its links as they are from within docs/."""
    for source, page in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text.replace("](docs/", "](")
