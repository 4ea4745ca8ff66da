"""The fitted tables of a device: from a file that the user names, from this machine, or shipped by model.

A file of tables is JSON: the device that they were fitted on, versions, a digest, and the tables as `cost` writes them.
`tritonite tune` writes one for this machine's GPU, and such a file can be given to others.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tritonite.devices import models
from tritonite.engine.gemm import cost
from tritonite.engine.gemm.estimated import estimated
from tritonite.errors import InvalidTables, MismatchedTables
from tritonite.runtime import cache

# The environment variable that names a file of tables to use in place of this machine's own.
VARIABLE = "TRITONITE_TABLES"
_FORMAT = "tritonite tables 1"
_VERSIONS = ("architecture", "tritonite", "torch", "triton")


class Fitted(NamedTuple):
    """Tables of products by the bytes of an element, and where they come from."""

    tables: dict[int, cost.Table]
    origin: str


def own(name: str) -> Path:
    """Return the path of this machine's own tables for a device of this name, which need not exist."""
    return cache.folder() / f"{name.replace(' ', '_')}.json"


def tables(name: str, architecture: str) -> dict[int, cost.Table]:
    """Return the tables of a device by the bytes of an element; none for a device that nothing is known of."""
    return fitted(name, architecture).tables


@functools.lru_cache(maxsize=8)
def fitted(name: str, architecture: str) -> Fitted:
    """Return a device's tables: of the file that TRITONITE_TABLES names, fitted on this machine, or shipped.

    A file that cannot be used is left out with a warning, once.
    """
    named = os.environ.get(VARIABLE)
    found = (_of_file(Path(named), name, f"of the file that {VARIABLE} names") if named else None) or _fitted_here(name)
    return found or shipped(name, architecture)


def _fitted_here(name: str) -> Fitted | None:
    try:
        path = own(name)
        return _of_file(path, name, "of tritonite tune") if path.exists() else None
    except OSError as error:
        cache.warn_once(f"fitted tables cannot be looked for: {error}")
        return None


def _of_file(path: Path, name: str, origin: str) -> Fitted | None:
    try:
        return Fitted(load(path, name), f"{origin}, {path}")
    except (InvalidTables, MismatchedTables) as error:
        cache.warn_once(f"fitted tables are left out: {error}")
        return None


def shipped(name: str, architecture: str) -> Fitted:
    """Return the tables that the package has for a device: measured, taken from a near one, or estimated."""
    model = models.nearest(name, architecture)
    if model is None:
        return Fitted({}, "none: tiles of products are chosen by rule")
    source = models.measured(model)
    found = _file(source)
    if source.architecture != model.architecture:
        why = f"estimated from {source.name} by the data sheet of {model.name}, unmeasured"
        return Fitted(estimated(found, source, model), why)
    own_name = models.known_as(name) is source
    return Fitted(found, f"measured on {source.name}{'' if own_name else ', the nearest; unmeasured on this GPU'}")


@functools.lru_cache(maxsize=4)
def _file(model: models.Model) -> dict[int, cost.Table]:
    return cost.load(cost.FOLDER / model.file)


def save(path: Path, name: str, versions: Mapping[str, str], found: Mapping[int, cost.Table]) -> None:
    """Write tables of a device of this name to a file that `load` reads."""
    text = cost.text(found)
    header = {"format": _FORMAT, "device": name, **versions, "digest": _digest(json.loads(text))}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(f'{json.dumps(header)[:-1]},\n"products": {text}}}\n')
    unfinished.replace(path)
    fitted.cache_clear()


def load(path: Path, name: str) -> dict[int, cost.Table]:
    """Read the tables of a file. Raises InvalidTables, or MismatchedTables if they are not of a device of this name."""
    kept = read(path)
    if kept["device"] != name:
        raise MismatchedTables(path=path, theirs=kept["device"], ours=name)
    try:
        return cost.tables_of(kept["products"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidTables(path=path, reason=f"it has other fields: {error!r}") from None


def versions_of(path: Path) -> dict[str, str]:
    """Return what the tables of a file were fitted with. Raises InvalidTables."""
    return {name: value for name, value in read(path).items() if name in _VERSIONS}


def read(path: Path) -> dict[str, Any]:
    """Return the contents of a file of tables. Raises InvalidTables if it is damaged or no such file."""
    try:
        kept = json.loads(path.read_text())
    except OSError as error:
        raise InvalidTables(path=path, reason=error.strerror or error) from None
    except ValueError as error:
        raise InvalidTables(path=path, reason=f"it is no JSON: {error}") from None
    if not isinstance(kept, dict) or kept.get("format") != _FORMAT:
        raise InvalidTables(path=path, reason=f"it is no file of {_FORMAT!r}")
    if not isinstance(kept.get("device"), str) or kept.get("digest") != _digest(kept.get("products")):
        raise InvalidTables(path=path, reason="it was changed or cut after it was written")
    return kept


def _digest(products: Any) -> str:
    return hashlib.sha256(json.dumps(products, sort_keys=True).encode()).hexdigest()
