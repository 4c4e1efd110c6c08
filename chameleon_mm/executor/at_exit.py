"""What an executor has to do before the interpreter ends: have autograd's thread let go of Python objects.

    let_go_at_exit(torch.device("cuda", 0))       # once for each device

A backward holds what was on around it, our hooks among it, and what is to be called at its end. The device's thread may be the
last to let go of these, after `backward` has returned. It takes the interpreter's lock for that, and where the interpreter has
ended torch 2.11 and 2.13 abort the process: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
from contextlib import suppress
from functools import cache

import torch


@cache
def let_go_at_exit(device: torch.device) -> None:
    """Before the interpreter ends, wait until autograd's thread of `device` has let go of the backwards before."""
    if device.type != "cpu":  # whose backwards run on the thread that calls them
        atexit.register(_run_a_backward, device)


def _run_a_backward(device: torch.device) -> None:
    """Run a backward of no bytes, which comes behind what the thread has to do, launches nothing and holds no Python object."""
    with suppress(RuntimeError):  # the device is lost, or this is a forked child
        x = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.backward(x.view(0), torch.empty(0, device=device))
