"""Show a session what selective activation checkpointing keeps: torch holds it outside of autograd's saved tensors.

    with the session:            # torch's mode that keeps tensors, `_CachingTorchDispatchMode`, is watched
        the mode is entered      # it keeps them by the session's hooks, if this torch can: `respect_saved_tensors_hooks`
        the mode is left         # bytes that no hook was given are counted, until torch drops them

The mode is watched, and not `checkpoint`: models hold `functools.partial`s of that, and dynamo compares it.
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
from torch.utils._pytree import tree_leaves

from chameleon_mm.device import Device
from chameleon_mm.device.uncompiled import uncompiled
from chameleon_mm.record.dispatch_state import in_backward, saved_tensor_hooks_on_top, tracer_is_on
from chameleon_mm.swap.classify import ProtectedStorages, facts_of
from chameleon_mm.units import format_size

_of_torch: Any = torch.utils.checkpoint  # what is private in it differs among releases


class SelectiveCheckpoints:
    """Selective checkpoints that run in one session, on the thread that entered it and in backward."""

    _open: ClassVar[list[SelectiveCheckpoints]] = []
    """Those of all open sessions. Torch's mode has our methods while there is one."""
    _lock: ClassVar = threading.Lock()
    _replaced: ClassVar[dict[str, Any]] = {}

    def __init__(self, device: Device, protected: ProtectedStorages, save: Callable[[Tensor], Any]) -> None:
        """`protected`: storages that are on the device anyway. `save`: the session's hook for saves."""
        self.most_bytes = 0
        """Maximum bytes that were kept at once where no hook saw them."""
        self._device, self._protected, self._save = device, protected, weakref.ref(save)  # weak: it holds who asks for bytes
        self._thread = threading.current_thread()
        self._kept: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        """Address of the storage, and its bytes, by torch's holder of a kept tensor."""

    def attach(self, stack: ExitStack) -> None:
        """Watch until `stack` is left, on this thread."""
        self._thread, mode = threading.current_thread(), getattr(_of_torch, "_CachingTorchDispatchMode", None)
        if mode is not None:
            with self._lock:
                if not self._open:
                    self._replaced.update({name: vars(mode).get(name) for name in ("__enter__", "__exit__")})
                    _replace(mode)
                self._open.append(self)
            stack.callback(self._detach, mode)

    def _detach(self, mode: Any) -> None:
        with self._lock:
            self._open.remove(self)
            for name, own in self._replaced.items() if not self._open else ():
                delattr(mode, name) if own is None else setattr(mode, name, own)  # without one, it has its base class's

    def entered(self, mode: Any) -> None:
        """Have `mode`, which begins to keep tensors, keep them by this session's hooks, unless the user chose."""
        if getattr(mode, "respect_saved_tensors_hooks", False) is not None:
            return
        hooks, save, frame = saved_tensor_hooks_on_top(), self._save(), sys._getframe(1)
        while "recompute_context" not in frame.f_code.co_cellvars and frame.f_back is not None:
            frame = frame.f_back
        others = frame.f_locals.get("recompute_context")  # if it lets kept tensors be written, they stay where writes find them
        own: Any = None if hooks is None else hooks[0]  # the checkpoint's, which know the hooks around them
        around = getattr(own, "_user_hooks", None)
        if save is None or around is None or around[0] is not save or getattr(others, "allow_cache_entry_mutation", True):
            return

        def counting(t: Tensor) -> Any:
            """Save `t` as a tensor whose version counter is the kept one's, which aliases have not below autograd."""
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                return save(t)

        own._user_hooks = counting, around[1]
        mode.respect_saved_tensors_hooks = True

    def left(self, mode: Any) -> None:
        """Count what `mode` keeps without a hook."""
        if tracer_is_on() or not (self._thread is threading.current_thread() or in_backward()):
            return
        for kept in tree_leaves([list(calls.values()) for calls in mode.storage.values()]):
            t = getattr(kept, "val", None)
            if isinstance(t, Tensor) and getattr(kept, "unpack_hook", None) is None:
                facts = facts_of(t, self._device, self._protected)
                if not facts.kind and facts.nbytes:
                    self._kept[kept] = t.untyped_storage()._cdata, facts.nbytes
        self.most_bytes = max(self.most_bytes, sum(dict(self._kept.values()).values()))

    def problem(self) -> str | None:
        """Sentence about bytes that no hook saw, with what to do; None: there were none."""
        if not self.most_bytes:
            return None
        can = hasattr(_of_torch, "_current_user_saved_tensors_hooks")
        remedy = "leave out respect_saved_tensors_hooks=False, allow_cache_entry_mutation=True and other saved-tensor hooks"
        return (
            f"selective checkpoints kept up to {format_size(self.most_bytes)} where no hook of this session sees them: they "
            f"stay on the device, and plans move what else there is; "
            f"{remedy if can else f'train with torch 2.14 or newer, not {torch.__version__}'}, or keep less by their policy"
        )


def _replace(mode: Any) -> None:
    """Have all open sessions know when a `mode` is entered and left."""
    enter, leave = mode.__enter__, mode.__exit__

    def entered(self: Any) -> Any:
        for one in tuple(SelectiveCheckpoints._open):
            one.entered(self)
        return enter(self)

    def left(self: Any, *raised: Any) -> Any:
        for one in tuple(SelectiveCheckpoints._open):
            one.left(self)
        return leave(self, *raised)

    mode.__enter__, mode.__exit__ = uncompiled(entered), uncompiled(left)
