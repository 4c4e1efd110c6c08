"""Loads a C++ helper that was built before. Compiles nothing and never fails: a helper that does not load is absent."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from chameleon_mm.native.building import file_of


class Status(NamedTuple):
    """Whether a helper is used, in words."""

    active: bool
    words: str


_log = logging.getLogger(__name__)

_loaded: dict[Path, ModuleType] = {}
_said: set[Path] = set()
"""Builds of which the log has that they do not load."""


def load(name: str) -> ModuleType | None:
    """The helper `name`; None where it is not built for this torch, or does not load. Raises `ValueError` for another name."""
    found = _find(name)
    return found if isinstance(found, ModuleType) else None


def status(name: str) -> Status:
    """Whether sessions that are made now use the helper `name`. Raises `ValueError` for another name."""
    found = _find(name)
    return Status(active=False, words=found) if isinstance(found, str) else Status(active=True, words="active")


def _find(name: str) -> ModuleType | str:
    """The helper, or why there is none."""
    try:
        path = file_of(name)
        if path not in _loaded:
            if not path.exists():
                return "not built for this torch (`chameleon-mm native` builds it)"
            found = _import(name, path)
            if isinstance(found, str):  # asked again the next time: it may have been built anew
                if path not in _said:
                    _said.add(path)
                    _log.warning("chameleon_mm: the C++ helper %r %s; all works without it", name, found)
                return found
            _loaded[path] = found
    except (OSError, RuntimeError) as error:  # no home, or one that may not be read
        return f"not built: {error}"
    return _loaded[path]


def _import(name: str, path: Path) -> ModuleType | str:
    loader = importlib.machinery.ExtensionFileLoader(f"chameleon_mm_{name}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a build does, a session begins without it
        return f"does not load: {error}"
    return module
