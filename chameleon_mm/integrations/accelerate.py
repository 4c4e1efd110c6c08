"""Swaps in a training loop of Hugging Face's `accelerate`.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
swap = attach(accelerator, model, hbm_budget="20GiB")
...                                # train, with accelerator.accumulate(model) or without
print(swap.report())
swap.detach()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from chameleon_mm.api.attach import Attachment
from chameleon_mm.api.attach import attach as attach_model
from chameleon_mm.errors import check_type
from chameleon_mm.integrations import load_framework
from chameleon_mm.integrations._trainings import refuse_cpu_checkpointing

accelerate = load_framework("accelerate")


def attach(
    accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **session_args: Any
) -> Attachment:
    """Swap the tensors that `model` saves for backward: `chameleon_mm.api.attach`, for a model from `accelerator.prepare`.

    `optimizer` and `session_args` are those of `SwapSession`; a prepared optimizer is unwrapped. Raises `TypeError` if
    `accelerator` is no `Accelerator`, `ValueError` if it has not prepared `model`, and what `chameleon_mm.api.attach` raises.
    """
    check_type("accelerator", accelerator, accelerate.Accelerator, "an accelerate.Accelerator", "pass the loop's own")
    check_type("model", model, nn.Module, "a torch.nn.Module", "pass what accelerator.prepare returned")
    if not any(prepared is model for prepared in accelerator._models):
        raise ValueError(
            f"attach: expected a model that this accelerator has prepared, got a {type(model).__name__} that it has not; call "
            f"accelerator.prepare first, and pass what it returns"
        )
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    refuse_cpu_checkpointing("attach", getattr(plugin, "deepspeed_config", None))
    return attach_model(model, optimizer, **session_args)
