"""Run a program as Python does, with every `SimDevice` observed: `python -m tests.observed (PROGRAM | -m MODULE) [ARGS]`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.observed import observe_all

if __name__ == "__main__":
    observe_all()
    match sys.argv[1:]:
        case ["-m", module, *arguments]:
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [program, *arguments]:
            sys.argv = [program, *arguments]
            sys.path[0] = str(Path(program).resolve().parent)
            runpy.run_path(program, run_name="__main__")
        case _:
            raise SystemExit("usage: python -m tests.observed (PROGRAM | -m MODULE) [ARGS]")
