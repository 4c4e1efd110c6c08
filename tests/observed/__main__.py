"""Run a script as `python PROGRAM [ARGS]` does, with every `SimDevice` observed: `python -m tests.observed PROGRAM [ARGS]`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.observed import observe_all

if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m tests.observed PROGRAM [ARGS]")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    observe_all()
    runpy.run_path(sys.argv[0], run_name="__main__")
