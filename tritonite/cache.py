"""Where Tritonite keeps files between processes."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Tritonite's folder in the user's cache, which need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tritonite"
