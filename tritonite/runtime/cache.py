"""The folder of files that Tritonite keeps between processes, and warnings about files that it cannot use."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

from tritonite.errors import UnusableFile


def folder() -> Path:
    """Return Tritonite's folder in the user's cache, which may not exist. Raises OSError if the user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tritonite"
    except RuntimeError:
        raise OSError("the user has no home folder; set XDG_CACHE_HOME") from None


@functools.lru_cache(maxsize=64)
def warn_once(message: str) -> None:
    """Issue a warning, once a process for each message."""
    warnings.warn(message, stacklevel=3)


def check_writable(path: Path) -> None:
    """Create the parent folders of a file to write later. Raises UnusableFile if the file cannot be written."""
    try:
        existed = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UnusableFile(path=path, reason=error.strerror or error) from error
