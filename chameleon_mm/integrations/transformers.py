"""Swaps in Hugging Face's `Trainer`, and in trainers derived from it.

swap = SwapCallback(hbm_budget="20GiB")
trainer = Trainer(model, args, train_dataset=data, callbacks=[swap])
trainer.train()                    # attached when it begins, detached when it ends
print(swap.report())
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from chameleon_mm.integrations import load_framework
from chameleon_mm.integrations._trainings import Trainings, refuse_cpu_checkpointing

load_framework("transformers")
from transformers.trainer_callback import CallbackHandler, TrainerCallback  # noqa: E402  # only once it is known to be installed


class SwapCallback(Trainings, TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Swaps the tensors that the model of a `Trainer` saves for backward, while `train` runs.

    `session_args` are those of `SwapSession`. With `optimizer_state`, the state of the trainer's optimizer is in host memory
    between its steps. A callback serves one training at a time, any number of them one after the other. It adds the figures of
    `Attachment.log_values` to the trainer's logs, and is called before the trainer's other callbacks, so that those which
    report to wandb, TensorBoard and others have the figures, too.

    A training that raises calls no callback. It is detached when the callback's next training begins, when the callback is
    freed, or by `detach`. Raises `TypeError` and `ValueError` for arguments that `SwapSession` refuses; `train` raises
    `InfeasibleBudget` before its first step if the budget is below the memory already allocated on the device.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the model, which is on its device by now, as is a checkpoint that training resumes from."""
        if getattr(args, "activation_offloading", False):
            raise ValueError(
                "SwapCallback: expected activation_offloading=False, got True, which moves the same tensors; leave it out"
            )
        refuse_cpu_checkpointing("SwapCallback", getattr(getattr(args, "hf_deepspeed_config", None), "config", None))
        optimizer = kwargs["optimizer"]
        self.begin(state, kwargs["model"], [] if optimizer is None else [optimizer])
        if (callbacks := _callbacks_of_trainer()) is not None and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that this training is attached."""
        self.expect(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the figures of the steps since the last log, except to logs of an evaluation."""
        of_another = self._key is not state
        if of_another or logs is None or any(name.endswith("_runtime") and name != "train_runtime" for name in logs):
            return  # of an evaluation, with any prefix
        values = self.attachment.log_values()
        logs.update(values)
        if state.log_history:  # the trainer has appended a copy of `logs`
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach if this training is attached."""
        self.end(state)


def _callbacks_of_trainer() -> list[Any] | None:
    """Callbacks of the trainer that calls one of them now, in the order of their calls; None: unknown. It passes its list to
    none of them, so it is found on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CallbackHandler.call_event.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"].callbacks
