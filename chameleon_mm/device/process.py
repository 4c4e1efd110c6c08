"""Process id without a system call: hot paths compare it, because a forked child has another one and cannot use the device.

pid = ThisProcess.pid            # when an object of the device is made
if ThisProcess.pid != pid: ...   # a forked child
"""

from __future__ import annotations

import os


class ThisProcess:
    """Id of the running process."""

    pid = os.getpid()
    """Updated in a forked child. Others only read it."""


os.register_at_fork(after_in_child=lambda: setattr(ThisProcess, "pid", os.getpid()))
