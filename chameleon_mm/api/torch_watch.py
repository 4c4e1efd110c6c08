"""Watch torch, while sessions are open, for code that keeps or offloads tensors without a session's hooks.

    selective checkpointing keeps tensors     by the session's hooks, if this torch has `respect_saved_tensors_hooks`;
                                              else their bytes are counted, until torch drops them
    `torch.autograd.graph.save_on_cpu`        a hint: the session's hooks stay active inside
    `OffloadActivations` (TRL, torchtune)     refused

The classes are watched, not functions such as `checkpoint`: models hold `functools.partial`s of these functions, and dynamo
compares them. Offload options of other libraries use the same classes.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from chameleon_mm.device import Device
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.record.dispatch_state import in_backward, saved_tensor_hooks_on_top, tracer_is_on
from chameleon_mm.swap.classify import ProtectedStorages, reason_to_stay
from chameleon_mm.units import format_size


class TorchWatch:
    """Watch of other saved-tensor hooks and of selective checkpoints, on the thread that entered a session and in backward."""

    _open: ClassVar[list[TorchWatch]] = []
    """Watches of all open sessions. Torch's classes have watched methods while there is one."""
    _lock: ClassVar = threading.Lock()
    _replaced: ClassVar[list[tuple[Any, str, Any]]] = []
    """Class, method name, and the original method; None: a base class defines it."""

    def __init__(self, device: Device, protected: ProtectedStorages, save: Callable[[Tensor], Any]) -> None:
        """`protected`: storages that stay on the device anyway. `save`: the session's pack hook."""
        self.most_bytes = 0
        """Maximum bytes that selective checkpoints kept at the same time without a hook."""
        self._device, self._protected, self._save = device, protected, weakref.ref(save)  # weak: avoids a cycle
        self._thread = threading.current_thread()
        self._kept: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        """Address and bytes of a kept tensor's storage, by torch's holder of the tensor."""

    def attach(self, stack: ExitStack) -> None:
        """Watch until `stack` is closed, on this thread."""
        self._thread = threading.current_thread()
        with self._lock:
            if not self._open:
                _watch(saved_tensors_hooks, "__enter__", TorchWatch._hooked)
                if (mode := getattr(torch.utils.checkpoint, "_CachingTorchDispatchMode", None)) is not None:
                    _watch(mode, "__enter__", TorchWatch._keeps)
                    _watch(mode, "__exit__", TorchWatch._kept_by)
            self._open.append(self)
        stack.callback(self._detach)

    def _detach(self) -> None:
        with self._lock:
            self._open.remove(self)
            while self._replaced and not self._open:
                owner, name, own = self._replaced.pop()
                delattr(owner, name) if own is None else setattr(owner, name, own)

    def _hooked(self, hooks: Any) -> Any:
        """Return the hooks to enter instead of `hooks` inside this session's; None: enter `hooks`. Raises `ValueError`."""
        kind, top = type(hooks), saved_tensor_hooks_on_top()
        if top is None or top[0] is not self._save():
            return None
        if kind.__name__ == "OffloadActivations":
            raise ValueError(
                f"session: expected no other offloading of activations inside of it, got {kind.__module__}.{kind.__name__}, "
                f"which moves the same tensors; turn it off (activation_offloading=False)"
            )
        is_hint = (kind.__module__, kind.__name__) == ("torch.autograd.graph", "save_on_cpu")
        return saved_tensors_hooks(*top) if is_hint or getattr(hooks, "is_hint", False) else None

    def _keeps(self, mode: Any) -> None:
        """Have `mode`, which begins to keep tensors, use this session's hooks. It does not if the user chose other ones."""
        hooks, save, frame = saved_tensor_hooks_on_top(), self._save(), sys._getframe(1)
        own: Any = None if hooks is None else hooks[0]  # the checkpoint's
        while "recompute_context" not in frame.f_code.co_cellvars and frame.f_back is not None:
            frame = frame.f_back
        others = frame.f_locals.get("recompute_context")  # if writes to kept tensors are allowed, they must not move
        around = getattr(own, "_user_hooks", None)
        if save is None or around is None or around[0] is not save or getattr(others, "allow_cache_entry_mutation", True):
            return

        def counting(t: Tensor) -> Any:
            """Save `t` through an alias that shares its version counter. Below autograd, an alias normally has its own."""
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                return save(t)

        if mode.respect_saved_tensors_hooks is not False:
            own._user_hooks = counting, around[1]
            mode.respect_saved_tensors_hooks = True

    def _kept_by(self, mode: Any) -> None:
        """Count the tensors that `mode` keeps without a hook."""
        if tracer_is_on() or not (self._thread is threading.current_thread() or in_backward()):
            return
        for kept in tree_leaves(mode.storage):  # per operator, results of its calls: a list in torch 2.11, a dict since
            t = getattr(kept, "val", None)
            if not isinstance(t, Tensor) or getattr(kept, "unpack_hook", None) is not None:
                continue
            if not reason_to_stay(t, self._device, self._protected, min_bytes=1):
                self._kept[kept] = t.untyped_storage()._cdata, t.untyped_storage().nbytes()
        self.most_bytes = max(self.most_bytes, sum(dict(self._kept.values()).values()))

    def problem(self) -> str | None:
        """Return a sentence about bytes that no hook saw, with a remedy; None: there were none."""
        if not self.most_bytes:
            return None
        can = hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks")
        remedy = "leave out respect_saved_tensors_hooks=False, allow_cache_entry_mutation=True and other saved-tensor hooks"
        return (
            f"selective checkpoints kept up to {format_size(self.most_bytes)} where no hook of this session sees them: they "
            f"stay on the device, and plans move what else there is; "
            f"{remedy if can else f'train with torch 2.14 or newer, not {torch.__version__}'}, or keep less by their policy"
        )


def _watch(owner: Any, name: str, before: Callable[[TorchWatch, Any], Any]) -> None:
    """Call `before` for all open sessions before the method `name`. If it returns an object, the method runs on that."""
    there = getattr(owner, name)

    def watched(self: Any, *args: Any) -> Any:
        found = [other for one in tuple(TorchWatch._open) if (other := before(one, self)) is not None]
        return there(found[0] if found else self, *args)

    TorchWatch._replaced.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, uncompiled(watched))
