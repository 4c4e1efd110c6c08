"""Puts ours in the place of `torch.autograd.graph.save_on_cpu`, for libraries that offer it as an option of theirs.

    install()
    model = offload_wrapper(model)      # torch's own wrapper: its forward enters save_on_cpu(pin_memory=True)
    ...
    uninstall()

Modules that imported the name before see the replacement, too. What was replaced is kept by the class that replaces it.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from chameleon_mm.arguments import check_keywords, check_type
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.save_on_cpu import save_on_cpu
from chameleon_mm.uncompiled import uncompiled
from chameleon_mm.units import parse_size


class InstalledSaveOnCpu(saved_tensors_hooks):
    """Stands for torch's `save_on_cpu`: the same arguments and base class, one pool for all that are made."""

    installed: ClassVar[type[InstalledSaveOnCpu]]
    """The class that `install` made, of which others may be made."""
    replaced: ClassVar[type]
    """Torch's own."""
    arguments: ClassVar[dict[str, Any]]
    """Arguments that `install` was given."""
    _manager: ClassVar[save_on_cpu | None] = None

    @uncompiled
    def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
        self._shared = self._the_manager()
        super().__init__(self._shared._hooks.pack_hook, self._shared._hooks.unpack_hook)

    def __enter__(self) -> None:
        self._shared.__enter__()

    def __exit__(self, *raised: Any) -> None:  # noqa: PYI036 - what the base class declares, passed on
        self._shared.__exit__(*(raised or (None, None, None)))

    @classmethod
    def _the_manager(cls) -> save_on_cpu:
        """Made with the first of them: which device is the current one may be set after `install`."""
        installed = cls.installed
        if installed._manager is None:
            installed._manager = save_on_cpu(**installed.arguments)
        return installed._manager


def install(**save_on_cpu_args: Any) -> None:
    """Replace `torch.autograd.graph.save_on_cpu` by ours, wherever it has been imported, until `uninstall`.

    `save_on_cpu_args` are our keywords (`device`, `min_bytes`, `pool`, `thresholds`); `device` is that which is current at the
    first use unless given. Does nothing where the same is installed already. Raises `RuntimeError` where it is with other
    arguments, `TypeError` for an unknown argument, and `ValueError` for a malformed size.
    """
    check_keywords("install", save_on_cpu_args, save_on_cpu, but=("pin_memory", "device_type"))
    if (min_bytes := save_on_cpu_args.get("min_bytes")) is not None:
        parse_size(min_bytes, what="min_bytes")
    if (pool := save_on_cpu_args.get("pool")) is not None:
        check_type("pool", pool, PinnedPool, "a PinnedPool, or None for one of its own", "pass PinnedPool('8GiB')")
    there: Any = torch.autograd.graph.save_on_cpu
    if issubclass(there, InstalledSaveOnCpu):
        if there.arguments == save_on_cpu_args:
            return
        raise RuntimeError("install: expected torch's own save_on_cpu, got ours with other arguments; call uninstall() first")
    ours: Any = type("save_on_cpu", (InstalledSaveOnCpu,), {"replaced": there, "arguments": dict(save_on_cpu_args)})
    ours.installed = ours
    _replace(there, ours)


def uninstall() -> None:
    """Put torch's own `save_on_cpu` back everywhere. Does nothing where ours is not installed. Graphs that ours saved something
    for go on as they are."""
    there: Any = torch.autograd.graph.save_on_cpu
    if issubclass(there, InstalledSaveOnCpu):
        _replace(there, there.replaced)


def _replace(old: type, new: type) -> None:
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)
