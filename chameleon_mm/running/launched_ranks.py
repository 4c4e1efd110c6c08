"""Place of this process among the ranks that a launcher started: it names a rank's files, and says which rank tells.

ranks = LaunchedRank.started_by_launcher()
ranks.own(Path("report.json"))              # report.rank1.json
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """This process among those that its launcher started."""

    rank: int = 0
    count: int = 1

    @classmethod
    def started_by_launcher(
        cls,
        environ: Mapping[str, str] = os.environ,  # noqa: TID251  # launchers tell ranks what they are in variables alone
    ) -> LaunchedRank:
        """This process as torchrun's variables tell, which other launchers set, too; the only one where they do not."""
        try:
            return cls(rank=int(environ["RANK"]), count=int(environ["WORLD_SIZE"]))
        except (KeyError, ValueError):
            return cls()

    def own(self, path: Path) -> Path:
        """Name of this rank's file: `report.rank1.json`, where there are several."""
        return path if self.count == 1 else path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")
