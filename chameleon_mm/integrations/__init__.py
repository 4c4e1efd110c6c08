"""Modules that attach swapping to training frameworks, one each. Importing a module imports its framework.

    import chameleon_mm as cm

    trainer = Trainer(..., callbacks=[cm.integrations.transformers.SwapCallback(hbm_budget="20GiB")])

Importing this package imports no framework. Without its framework, a module raises an `ImportError` that names the extra.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

_MODULES = ("accelerate", "lightning", "transformers", "trl")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_framework(name: str) -> Any:
    """Import the package `name`, which is also the name of our extra. Raises `ImportError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f"{__name__}.{name}: expected {name} to be installed, found none; pip install 'chameleon-mm[{name}]'", name=name
        ) from error
