"""Drop-in for `torch.autograd.graph.save_on_cpu`: same call, exact, overlapped, reclaimed in stream order.

    with save_on_cpu(pin_memory=True):        # hooks for this block: its saved tensors are swapped until their last use
        loss = model(x)
    loss.backward()                           # swaps in: first pass last saved first, later in the previous pass's order

There are no steps, and the budget is a session's default. Two constants limit the memory of copies, one per direction.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from chameleon_mm.api.pins import check_pins
from chameleon_mm.device import Device, resolve_device
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.errors import check_keywords, check_type
from chameleon_mm.plan.rule import MIN_BYTES, Limits
from chameleon_mm.pool.pool import PinnedPool, pool_for
from chameleon_mm.swap.budget import take_budget
from chameleon_mm.swap.classify import ProtectedStorages
from chameleon_mm.swap.executor import Executor, autograd_hooks
from chameleon_mm.units import AUTO, MIB, is_auto, parse_budget, parse_size

LEAVING_BYTES = 256 * MIB
"""Device memory that copies out may hold before compute waits for the oldest: 5 ms of copies at 55 GB/s."""

AHEAD_BYTES = 256 * MIB
"""Device memory that prefetches may hold before their first use."""


def check_early(given: Mapping[str, Any]) -> None:
    """Raise `TypeError` or `ValueError` for a wrong argument of a session or `save_on_cpu` that needs no device to check."""
    for name, value in given.items():
        if name in ("plans", "recompute"):
            check_type(name, value, bool, "True or False", "pass one of the two")
        elif value is None or (name == "device" and str(value).startswith("cuda")):
            continue  # no query of a GPU: it would start CUDA
        elif name in ("keep", "never_recompute"):
            check_pins(name, value)
        elif name in ("hbm_budget", "host_budget"):
            if not is_auto(value):
                parse_budget(value, what=name)
        elif name == "min_bytes":
            parse_size(value, what=name)
        elif name == "model":
            check_type(name, value, nn.Module, "a torch.nn.Module or None", "put several into an nn.ModuleList")
        elif name == "pool":
            check_type(name, value, PinnedPool, "a PinnedPool or None", "pass PinnedPool('8GiB')")
        elif name == "device":
            resolve_device(value)


class save_on_cpu:  # noqa: N801 - torch's name: a class used as a function
    """Within this context, tensors saved for backward are swapped to pinned host memory and back, bit for bit.

    `pin_memory`, `device_type`: torch's arguments, accepted without effect. Memory is always pinned, on the device `device`.
    `device`: a `Device`, "cuda", "cuda:1", "sim", or None (CUDA if available, else the simulator). `min_bytes`: minimum size of
    a storage to move (None: 1 MiB). `pool`: a `PinnedPool` to share (None: a new pool).

    Device memory is kept within a session's default budget: nine tenths of the memory that is free on the device or held by
    this process there. If that is full, and in a first pass without a forecast, compute waits for copies, on the device.
    Torch's own hooks copy at every save and back at every use. It takes more device memory than torch's hooks:

    1. the storages of the tensors that one operator saves, until the next hook, because an operator may write what it saved; if
       it saved only a part of a storage, until the hook after that;
    2. for saved views that one node of backward uses, the rest of their storages;
    3. storages smaller than `min_bytes`;
    4. once a pass has shown how much allocation grows between two hooks, `LEAVING_BYTES` for copies out and `AHEAD_BYTES` for
       prefetches, within the budget.

    It may be entered repeatedly, nested (the innermost acts) and on several threads. It keeps its pool and forecasts between
    entries. Hooks act on the thread that entered, which must exit it (`RuntimeError` on another). Tensors saved by graphs that
    dynamo compiled are swapped too; dynamo never traces the hooks. Raises `TypeError` for an argument of another type, and
    `ValueError` for a malformed size, an unknown device or a pool of another device.
    """

    @uncompiled
    def __init__(
        self,
        pin_memory: bool = False,
        device_type: str = "cuda",
        *,
        device: Device | str | None = None,
        min_bytes: int | str | None = None,
        pool: PinnedPool | None = None,
    ) -> None:
        del pin_memory, device_type
        least = MIN_BYTES if min_bytes is None else parse_size(min_bytes, what="min_bytes")
        self.pool = pool_for(device, pool)
        self.device = self.pool.device
        budget_bytes = take_budget(AUTO, self.device).nbytes
        limits = Limits(hbm_budget_bytes=budget_bytes, leaving_bytes=LEAVING_BYTES, ahead_bytes=AHEAD_BYTES)
        protected = ProtectedStorages()
        self._executor = Executor(self.device, self.pool, min_bytes=least, limits=limits, protected=protected)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(*autograd_hooks(self._executor))
        self._entered = threading.local()
        """`times`: number of contexts that the thread is in. Hooks are per thread."""

    def __enter__(self) -> None:
        self._hooks.__enter__()
        self._entered.times = getattr(self._entered, "times", 0) + 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not getattr(self._entered, "times", 0):
            raise RuntimeError(
                f"save_on_cpu: expected to be left on a thread that is inside, got {threading.current_thread().name}, which is "
                f"not: hooks are each thread's own; leave it where it was entered"
            )
        self._entered.times -= 1
        self._hooks.__exit__(kind, error, trace)
        if error is None:
            self._executor.hook_lock.raise_oldest()


# --- Replacement of `torch.autograd.graph.save_on_cpu`, for libraries that use it for an option of their own
#
# It also replaces the name in modules that imported it earlier. The replacing class keeps the original.


class InstalledSaveOnCpu(saved_tensors_hooks):
    """Replacement of torch's `save_on_cpu`: the same arguments and base class, one pool for all instances."""

    installed: ClassVar[type[InstalledSaveOnCpu]]
    """Subclass that `install` made."""
    replaced: ClassVar[type]
    arguments: ClassVar[dict[str, Any]]
    _manager: ClassVar[save_on_cpu | None] = None

    @uncompiled
    def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
        self._shared = self._the_manager()
        super().__init__(self._shared._hooks.pack_hook, self._shared._hooks.unpack_hook)

    def __enter__(self) -> None:
        self._shared.__enter__()

    def __exit__(self, *raised: Any) -> None:  # noqa: PYI036 - declared as in the base class
        self._shared.__exit__(*(raised or (None, None, None)))

    @classmethod
    def _the_manager(cls) -> save_on_cpu:
        """Return the manager. The first instance makes it, because the current device may be set after `install`."""
        installed = cls.installed
        if installed._manager is None:
            installed._manager = save_on_cpu(**installed.arguments)
            installed._manager._hooks.is_hint = True  # type: ignore[attr-defined]  # inside a session, like torch's own
        return installed._manager


def install(**save_on_cpu_args: Any) -> None:
    """Replace `torch.autograd.graph.save_on_cpu` by ours, in all modules that imported it, until `uninstall`.

    `save_on_cpu_args`: keywords of ours (`device`, `min_bytes`, `pool`). `device` defaults to the current device
    at the first use. Does nothing if the same is installed already. Raises `RuntimeError` if it is installed with other
    arguments, `TypeError` for an unknown argument, and `ValueError` for a malformed size.
    """
    check_keywords("install", save_on_cpu_args, save_on_cpu, but=("pin_memory", "device_type"))
    check_early(save_on_cpu_args)
    there: Any = torch.autograd.graph.save_on_cpu
    if issubclass(there, InstalledSaveOnCpu):
        if there.arguments == save_on_cpu_args:
            return
        raise RuntimeError("install: expected torch's own save_on_cpu, got ours with other arguments; call uninstall() first")
    ours: Any = type("save_on_cpu", (InstalledSaveOnCpu,), {"replaced": there, "arguments": dict(save_on_cpu_args)})
    ours.installed = ours
    _replace(there, ours)


def uninstall() -> None:
    """Restore torch's own `save_on_cpu` everywhere. Does nothing if ours is not installed. Graphs saved by ours stay valid."""
    there: Any = torch.autograd.graph.save_on_cpu
    if issubclass(there, InstalledSaveOnCpu):
        _replace(there, there.replaced)


def _replace(old: type, new: type) -> None:
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)
