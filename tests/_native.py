"""C++ helpers for tests: built once for these sources, and kept from run to run.

module = helper("reclaim", monkeypatch)       # built, or the user's, and loaded; skips where nothing can be compiled
only(["reclaim"], monkeypatch)                # whatever else is built is not found from then on
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import ModuleType

import pytest
import torch

from chameleon_mm.device import native
from chameleon_mm.errors import NativeBuildError
from chameleon_mm.files import cache_folder, make_private, write_file
from chameleon_mm.follow.adaptation import Adaptation
from chameleon_mm.follow.planned_step import PlannedStep

BUILDS = Path("~", ".cache", "chameleon_mm", "tests_native").expanduser()
"""Builds of this version of the sources, kept from run to run."""


def only(names: Collection[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have devices and sessions find no helpers but these."""
    load = native.load
    monkeypatch.setattr(native, "load", lambda name: load(name) if name in names else None)


def without(names: Collection[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have devices and sessions find none of these helpers."""
    only([name for name in native.HELPERS if name not in names], monkeypatch)


def helper(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the helper `name`, which devices and sessions find from now on, like others of that folder."""
    monkeypatch.setattr(native, "CACHE", BUILDS)
    try:
        of_the_user, ours = cache_folder() / "native" / native.file_of(name).name, native.file_of(name)
        if of_the_user.exists() and not ours.exists():  # by `chameleon-mm native`, of the same sources
            make_private(ours.parent)
            write_file(ours, of_the_user.read_bytes(), private=True)
        native.build(name)
    except NativeBuildError as error:
        if not str(error).startswith("native: expected"):  # there is a compiler, and it refuses our source
            raise
        pytest.skip(f"nothing can be compiled here: {error}")
    module = native.load(name)
    if module is None and name == "notes" and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        pytest.skip("torch has the dispatch key of call notes itself, from 2.14 on")
    assert module is not None, native.status(name)
    return module


def unnoted() -> torch._C._ExcludeDispatchKeyGuard:
    """A context whose operators no call notes see."""
    key = torch._C._parse_dispatch_key("Fake")
    assert key is not None
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


def mutated(name: str, text: str, instead: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the helper `name` alone, compiled in `folder` from sources whose only `text` becomes `instead`."""
    found = 0
    for path in native.source_of(name).parent.glob("*.[hc]*"):
        before = path.read_text()
        (folder / path.name).write_text(before.replace(text, instead))
        found += before.count(text)
    assert found == 1
    monkeypatch.setattr(native, "source_of", lambda name: folder / f"{name}.cpp")
    monkeypatch.setattr(native, "_FLAGS", ("-O0", *native._FLAGS[1:]))  # a quarter of the compiler's time less
    module = helper(name, monkeypatch)
    only([name], monkeypatch)
    return module


def keep_first_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep measured times from trying or replacing plans: they are those of the machine that runs the test."""
    monkeypatch.setattr(Adaptation, "_learn_times", lambda self: None)
    monkeypatch.setattr(PlannedStep, "is_decided", True)
