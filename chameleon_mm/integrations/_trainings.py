"""Trainings that one callback attaches to, one after the other.

class SwapCallback(Trainings, Callback):       # the framework's
    self.begin(key, model, optimizers)         # attaches; `key` is an object that only this training has
    self.expect(key)                           # at each step: RuntimeError unless this training is attached
    self.end(key)                              # detaches
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn

from chameleon_mm.api.attach import Attachment, attach
from chameleon_mm.api.save_on_cpu import check_early
from chameleon_mm.api.session import SwapSession
from chameleon_mm.errors import check_keywords, check_type
from chameleon_mm.report.report import SwapReport


def refuse_cpu_checkpointing(what: str, deepspeed_config: Any) -> None:
    """Raise `ValueError` for a DeepSpeed configuration (None: there is none) by which its checkpoints go to the host."""
    if isinstance(deepspeed_config, dict) and (deepspeed_config.get("activation_checkpointing") or {}).get("cpu_checkpointing"):
        raise ValueError(
            f"{what}: expected cpu_checkpointing=False in DeepSpeed's activation_checkpointing, got True, which moves the same "
            f"tensors; leave it out"
        )


class Trainings:
    """Attaches one training at a time, and detaches the one before if it is still attached.

    A training that raised may never call `end`. It is detached when the next one begins, or when this object is freed.
    """

    def __init__(self, *, optimizer_state: bool = False, **session_args: Any) -> None:
        super().__init__()
        check_type("optimizer_state", optimizer_state, bool, "True or False", "pass one of the two")
        check_keywords("SwapCallback", session_args, SwapSession, but=("model", "optimizer"))
        check_early(session_args)
        self._session_args, self._optimizer_state = session_args, optimizer_state
        self._attachment: Attachment | None = None
        self._key: object = None
        self._thread = threading.current_thread()
        self._finalizer: weakref.finalize[..., Any] | None = None

    @property
    def attachment(self) -> Attachment:
        """Attachment of the latest training. Raises `RuntimeError` before the first."""
        if self._attachment is None:
            raise RuntimeError(
                "SwapCallback: expected a training that has begun, got none; ask once training runs, or after it"
            )
        return self._attachment

    def report(self) -> SwapReport:
        """Report of the latest training; see `SwapSession.report`. Raises `RuntimeError` before the first."""
        return self.attachment.report()

    def begin(self, key: object, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Attach to `model` for the training that `key` stands for."""
        if self._key is not None and self._thread is not threading.current_thread() and self._thread.is_alive():
            raise RuntimeError(
                f"SwapCallback: expected one training at a time, got a second one while one runs on {self._thread.name}; make "
                f"a callback for each trainer"
            )
        if self._optimizer_state and len(optimizers) != 1:
            raise ValueError(
                f"SwapCallback: expected one optimizer with optimizer_state=True, got {len(optimizers)}; leave it out"
            )
        self.detach()
        self._attachment = attach(model, optimizers[0] if self._optimizer_state else None, **self._session_args)
        self._thread = threading.current_thread()
        self._key = key
        self._finalizer = weakref.finalize(self, self._attachment.detach)
        self._finalizer.atexit = False

    def expect(self, key: object) -> None:
        """Raise `RuntimeError` unless the training of `key` is attached."""
        if self._key is not key:
            raise RuntimeError(
                "SwapCallback: expected to be one of the trainer's callbacks before training begins, and in one training at a "
                "time, got a step of a training that it is not attached to; pass a new one to each Trainer(callbacks=[...])"
            )

    def end(self, key: object) -> None:
        """Detach if the training of `key` is attached."""
        if self._key is key:
            self.detach()

    def detach(self) -> None:
        """End swapping, if a training raised past the framework's callbacks. Call it on the thread that trained. Without a
        training, do nothing."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._key = None
        if self._attachment is not None:
            self._attachment.detach()
