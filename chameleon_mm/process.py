"""The number of the process that runs, without a call to the system: hooks compare it, as a forked child has another one.

if ThisProcess.pid != made_in: ...           # a forked child
"""

from __future__ import annotations

import os


class ThisProcess:
    """The process that runs."""

    pid = os.getpid()
    """Its number. Others only read it."""


def _forked() -> None:
    ThisProcess.pid = os.getpid()


os.register_at_fork(after_in_child=_forked)
