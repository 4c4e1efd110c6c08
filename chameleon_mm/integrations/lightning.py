"""Swaps in Lightning's `Trainer`. Fabric's loops take `chameleon_mm.api.attach(fabric.setup(model, ...))`.

    swap = SwapCallback(hbm_budget="20GiB")
    Trainer(callbacks=[swap]).fit(module, data)    # attached when training begins, detached when it ends
    print(swap.report())

A step lasts from the start of a batch to the end of the first batch in which an optimizer stepped, automatically or manually:
Lightning calls `training_step` inside the optimizer's step, and not through the module's forward. The figures of each step are
logged by `LightningModule.log` at every `log_every_n_steps`, so loggers and `trainer.callback_metrics` have them; what is no
longer known is NaN.
"""

from __future__ import annotations

from math import nan
from typing import Any

import torch

from chameleon_mm.integrations import load_framework
from chameleon_mm.integrations._trainings import Trainings, refuse_cpu_checkpointing

load_framework("lightning")
from lightning.pytorch.callbacks import Callback  # noqa: E402  # only once it is known to be installed


class SwapCallback(Trainings, Callback):  # type: ignore[misc]  # mypy does not follow lightning
    """Swaps the tensors that a `LightningModule` saves for backward, while `Trainer.fit` runs.

    `session_args` are those of `SwapSession`. With `optimizer_state`, the state of the module's one optimizer is in host memory
    between its steps. A callback serves one training at a time, any number of them one after the other.

    Raises `TypeError` and `ValueError` for arguments that `SwapSession` refuses; `fit` raises `InfeasibleBudget` before its
    first step if the budget is below the memory already allocated on the device.
    """

    _steps_before = 0
    """Number of optimizer steps before the running batch."""
    _logged: tuple[str, ...] = ()
    """Names of the figures that were logged last."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the module, which is on its device by now."""
        refuse_cpu_checkpointing("SwapCallback", getattr(trainer.strategy, "config", None))
        self.begin(trainer, pl_module, trainer.optimizers)
        self._logged = ()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step, unless the batches of one are still being accumulated."""
        self.expect(trainer)
        self._steps_before = trainer.global_step
        self.attachment.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the step if this batch was its last, and log its figures: see `Attachment.log_values`."""
        if trainer.global_step != self._steps_before:
            self.attachment.end_step()
            if not trainer.barebones and trainer._logger_connector.should_update_logs:  # as Lightning's own monitors do
                if values := self.attachment.log_values():
                    values = dict.fromkeys(self._logged, nan) | values  # Lightning repeats what is missing
                    self._logged = tuple(values)
                # On the host: a copy to the device would make it wait for all work at every step.
                pl_module.log_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach if this training is attached."""
        self.end(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach after a training that raised, or was interrupted."""
        self.end(trainer)
