"""Swaps in Hugging Face's `Trainer`, and in trainers derived from it.

swap = SwapCallback(hbm_budget="20GiB")
trainer = Trainer(model, args, train_dataset=data, callbacks=[swap])
trainer.train()                    # attached when it begins, detached when it ends
print(swap.report())
"""

from __future__ import annotations

from typing import Any

from chameleon_mm.integrations import load_framework
from chameleon_mm.integrations._trainings import Trainings, refuse_cpu_checkpointing


class SwapCallback(Trainings, load_framework("transformers").TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Swaps the tensors that the model of a `Trainer` saves for backward, while `train` runs.

    `session_args` are those of `SwapSession`. With `optimizer_state`, the state of the trainer's optimizer is in host memory
    between its steps. A callback serves one training at a time, any number of them one after the other.

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

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that this training is attached."""
        self.expect(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach if this training is attached."""
        self.end(state)
