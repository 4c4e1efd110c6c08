"""Files that a command is to write: one that cannot be is refused before anything started, not after all of it ran.

check_outputs({"--json": args.json, "--png": args.png})
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def check_outputs(files: Mapping[str, Path | None]) -> None:
    """`files`: by the option that names each; None was not asked for. Raises `ValueError` for one that cannot be written."""
    for option, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"{option}: expected a file to write, got {path}, a folder; add the name of a file in it")
        if not path.parent.is_dir():
            raise ValueError(f"{option}: expected a file in an existing folder, got {path}; make {path.parent} first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{option}: expected a file that may be written, got {path}; choose another, or change its rights")
