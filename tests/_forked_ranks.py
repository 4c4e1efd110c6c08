"""Ranks as torchrun starts them, each a fork of one process: what they all import takes longer than what each does.

    python -m tests._forked_ranks COUNT MODULE FOLDER [NAMES]

Each has torchrun's variables and runs `MODULE.main(FOLDER, *NAMES)`. Once one has failed the others are killed, and the exit
code is 1.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable

from tests._run_scripts import ready_to_fork
from tests.observed import observe_all


def start(work: Callable[[], None], rank: int, count: int) -> int:
    """The pid of a fork that does `work` as `rank`, and ends with no exit handler of its parent's."""
    child = os.fork()
    if child:
        return child
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is told
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(count: int, module: str, *arguments: str) -> int:
    observe_all()
    work = functools.partial(importlib.import_module(module).main, *arguments)
    ready_to_fork()
    running = {start(work, rank, count) for rank in range(count)}
    failed = False
    while running:
        child, status = os.wait()
        running.remove(child)
        if status and not failed:
            failed = True
            for other in running:
                os.kill(other, signal.SIGKILL)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
