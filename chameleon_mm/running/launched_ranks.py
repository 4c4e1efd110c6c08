"""Ranks that a launcher started beside each other: what their files are called, and who tells of all of them.

ranks = LaunchedRank.started_by_launcher()
gathering = Gathering(ranks); gathering.begin()
gathering.leave(figures)                    # as this rank ends
told = gathering.told_by_last()             # the ranks of this host, for the last that ends; None for all others

Note [Gathering]: ranks leave their figures in a folder of the host and wait for nobody. The last is the one that finds that
each of the others has left its own, or is no process any more: such a rank is missing. Where two find so, one makes the mark.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """This process among those that its launcher started."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """Its number on this host."""
    local_count: int = 1
    launch: str = ""
    """Name of the launch, the same for all ranks of this host, and for no others that run."""

    @classmethod
    def started_by_launcher(
        cls,
        environ: Mapping[str, str] = os.environ,  # noqa: TID251  # launchers tell ranks what they are in variables alone
    ) -> LaunchedRank:
        """This process as torchrun's variables tell, which other launchers set, too; the only one where they do not."""
        numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        try:
            rank, count, local_rank, local_count = (int(environ[name]) for name in numbers)
        except (KeyError, ValueError):
            return cls()
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
        launch = "-".join([str(os.getppid()), *(environ.get(name, "") for name in names)])
        plain = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in launch)
        return cls(rank=rank, count=count, local_rank=local_rank, local_count=local_count, launch=plain)

    def own(self, path: Path) -> Path:
        """Name of this rank's file: `report.rank1.json`, where there are several."""
        return path if self.count == 1 else path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the ranks of one host left."""

    figures: dict[int, dict[str, Any]]
    """By rank."""
    missing: tuple[int, ...]
    """Numbers on this host of those that ended without leaving any."""


class Gathering:
    """The figures of the ranks on one host, in a folder that lasts until they are told. Where there can be no such folder, each
    rank is by itself."""

    def __init__(self, ranks: LaunchedRank, parent: Path | None = None) -> None:
        self._ranks = ranks
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        self._folder = parent / f"chameleon-mm-run-{os.getuid()}-{ranks.launch}"
        self._usable = False

    def begin(self) -> None:
        """Let the others know that this rank runs."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._folder.stat().st_uid == os.getuid():
                (self._folder / f"{self._ranks.local_rank}.pid").write_text(str(os.getpid()), encoding="ascii")
                self._usable = True

    def leave(self, figures: Mapping[str, Any]) -> None:
        """Leave this rank's figures."""
        if self._usable:
            file = self._file(self._ranks.local_rank)
            with contextlib.suppress(OSError):
                whole = file.with_suffix(".part")
                whole.write_text(json.dumps({"rank": self._ranks.rank, "figures": dict(figures)}), encoding="utf-8")
                whole.rename(file)  # at once: another rank reads it whole, or not at all

    def told_by_last(self) -> Told | None:
        """What all ranks of this host left, for the last one, once; None for the others. The folder is gone then."""
        if not self._usable:
            return None
        missing = []
        for local_rank in range(self._ranks.local_count):
            if not self._file(local_rank).exists():
                if self._may_still_leave(local_rank):
                    return None
                missing.append(local_rank)
        try:
            (self._folder / "told").touch(exist_ok=False)
            left = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(self._folder.glob("*.json"))]
        except (OSError, ValueError):
            return None  # another rank tells
        shutil.rmtree(self._folder, ignore_errors=True)
        figures = {int(one["rank"]): one["figures"] for one in left}
        return Told(figures=dict(sorted(figures.items())), missing=tuple(missing))

    def _file(self, local_rank: int) -> Path:
        return self._folder / f"{local_rank}.json"

    def _may_still_leave(self, local_rank: int) -> bool:
        try:
            pid = int((self._folder / f"{local_rank}.pid").read_text(encoding="ascii"))
            alive = psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            alive = False
        except (OSError, ValueError):
            return True  # it has not begun yet
        return alive or self._file(local_rank).exists()
