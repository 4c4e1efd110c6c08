"""Lets a program's `torch.func` transforms run in a session, as they would without one: they refuse saved-tensor hooks.

calls = TransformsBesideHooks(is_own)        # `is_own(hook)`: whether autograd's hook is the session's
calls.begin(); ...; calls.end()

Within `grad`, `vjp` and the others of `torch.func` that save, the session's hooks are off: what is saved in them stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from chameleon_mm.profiler.dispatch_state import saved_tensor_hooks_on_top


class TransformsBesideHooks:
    """While begun, hooks of our own are taken off where torch disables saved-tensor hooks, and put back afterwards."""

    def __init__(self, is_own: Callable[[object], bool]) -> None:
        self._is_own = is_own
        self._torchs: Any = torch.autograd.graph.disable_saved_tensors_hooks

    def begin(self) -> None:
        """Stand in for torch's function. Before dynamo is loaded, which keeps a list of such functions, by their names."""
        torch.autograd.graph.disable_saved_tensors_hooks = self._disable  # type: ignore[assignment]  # a bound method

    def end(self) -> None:
        """Put torch's function back."""
        torch.autograd.graph.disable_saved_tensors_hooks = self._torchs

    @contextmanager
    def _disable(self, message: str) -> Iterator[None]:
        hooks = saved_tensor_hooks_on_top()
        if hooks is None or not self._is_own(hooks[0]):
            with self._torchs(message):
                yield
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with self._torchs(message):
                yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
