"""A module of a user's own, as `chameleon-mm plan` imports it: `module:function` from the working directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def write_module(name: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write `name`.py to `folder`, which is the working directory until the test ends. Returns `name`."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, name, None)  # so that the entry is gone after the test
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name
