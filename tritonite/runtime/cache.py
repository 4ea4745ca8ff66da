"""Where Tritonite keeps files between processes, and what it says of those that cannot be used."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

from tritonite.errors import UnusableFile


def folder() -> Path:
    """Return Tritonite's folder in the user's cache, which need not exist. Raises OSError where there is no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tritonite"
    except RuntimeError:
        raise OSError("the user has no home folder; set XDG_CACHE_HOME") from None


@functools.lru_cache(maxsize=64)
def warn_once(message: str) -> None:
    """Warn of a file that the work goes on without, once a process."""
    warnings.warn(message, stacklevel=3)


def check_writable(path: Path) -> None:
    """Make the folders of a file that is to be written later. Raises UnusableFile where it could not be written."""
    try:
        existed = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UnusableFile(path=path, reason=error.strerror or error) from error
