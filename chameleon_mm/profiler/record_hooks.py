"""Saved-tensor hooks for a recorded step in which nothing moves: they only tell the recorder.

    with recorder, RecordingHooks(recorder, min_bytes=1 << 20):
        loss = model(x); loss.backward()
    trace = recorder.finish()

For a plan without a GPU, under fake tensors, and wherever there is no executor. A saved tensor is kept as it is.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from chameleon_mm.profiler.recorder import Recorder
from chameleon_mm.profiler.step_log import content_of, describe_tensor
from chameleon_mm.profiler.storages import TracedStorage

_sequence_nr = torch._C._autograd._get_sequence_nr
"""Number of the thread's next differentiable operator: it moves once the one that saved is over. Note [Swap-out]."""


class RecordingHooks(torch.autograd.graph.saved_tensors_hooks):
    """Tells `recorder` of every save and use on this thread and its backward.

    Storages of `min_bytes` or more are told apart; what is smaller, a parameter, a leaf or a wrapper subclass is a hook call
    about none. A call is known by its tensor's shape, strides and dtype. Eager's check for in-place writes is off inside:
    record a step that is known to be right. Raises what `saved_tensors_hooks` does.
    """

    def __init__(self, recorder: Recorder, *, min_bytes: int = 1) -> None:
        teller = _HookPair(recorder, min_bytes)
        super().__init__(teller.on_save, teller.on_use)


class _HookPair:
    """The two hooks. Not the manager's own methods: with them it would hold itself."""

    def __init__(self, recorder: Recorder, min_bytes: int) -> None:
        self._recorder = recorder
        self._min_bytes = min_bytes
        self._fresh: list[tuple[TracedStorage, int]] = []
        self._seen: set[Hashable] = set()
        """Views that were saved, by the number of their storage, and storages that were saved whole."""

    def on_save(self, t: Tensor) -> _Handle:
        self._note_copyable()
        traced = self._claim(t) if self._may_move(t) else None
        feature = content_of(describe_tensor(t))
        self._recorder.on_save([traced], feature)
        with self._recorder.paused():
            # One of its own where that is counted below; a result by reference would keep its node, and so itself, alive.
            kept = t if t.is_leaf and traced is None else t.detach()
            handle = _Handle(kept, traced, feature, self._recorder)
        if traced is not None:
            traced.aliases += 1
        return handle

    def on_use(self, handle: _Handle) -> Tensor:
        self._note_copyable()
        self._recorder.on_use([handle.traced], handle.feature)
        return handle.tensor

    def _claim(self, t: Tensor) -> TracedStorage:
        storage = t.untyped_storage()
        traced = self._recorder.add_claim(storage)
        whole = (traced.number, None)
        view = (
            whole
            if t.numel() * t.element_size() == storage.nbytes()
            else (traced.number, (t.storage_offset(), t.stride(), t.shape))
        )
        # A copy out has to begin after the last bytes were saved that no save before had.
        if whole not in self._seen and view not in self._seen:
            self._seen.add(view)
            self._fresh.append((traced, _sequence_nr()))
        return traced

    def _note_copyable(self) -> None:
        now = _sequence_nr()
        for traced, number in self._fresh:
            if number < now:
                self._recorder.sendable(traced)
        self._fresh = [(traced, number) for traced, number in self._fresh if number >= now]

    def _may_move(self, t: Tensor) -> bool:
        if isinstance(t, Parameter) or isinstance(t._base, Parameter) or (t.is_leaf and t.requires_grad):
            return False
        if is_traceable_wrapper_subclass_type(type(t)) or t.layout is not torch.strided or t.is_nested:
            return False
        return t.untyped_storage().nbytes() >= self._min_bytes


class _Handle:
    """Handle that autograd holds: the tensor itself, detached, or by reference if it is a leaf."""

    __slots__ = ("_recorder", "feature", "tensor", "traced")

    def __init__(self, tensor: Tensor, traced: TracedStorage | None, feature: int, recorder: Recorder) -> None:
        self.tensor = tensor
        self.traced = traced
        self.feature = feature
        self._recorder = recorder

    def __del__(self) -> None:
        if self.traced is not None:
            self.traced.aliases -= 1
            self._recorder.retired(self.traced)
