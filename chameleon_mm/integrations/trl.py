"""Swaps in TRL's trainers, in place of their own `activation_offloading`, which is left off.

trainer = SFTTrainer(model, SFTConfig(...), train_dataset=data, callbacks=[SwapCallback(hbm_budget="20GiB")])
trainer.train()
"""

from __future__ import annotations

from chameleon_mm.integrations import transformers
from chameleon_mm.integrations._framework import Framework

FRAMEWORK = Framework("trl", first=(1, 0), last=(1, 16))
FRAMEWORK.load()


class SwapCallback(transformers.SwapCallback):
    """Swaps what the model of a trainer of TRL keeps for backward, while `train` runs: see `transformers.SwapCallback`."""

    frameworks = (transformers.FRAMEWORK, FRAMEWORK)
