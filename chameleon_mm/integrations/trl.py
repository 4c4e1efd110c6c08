"""Swaps in TRL's trainers, in place of their own `activation_offloading`, which stays off.

trainer = SFTTrainer(model, SFTConfig(...), train_dataset=data, callbacks=[SwapCallback(hbm_budget="20GiB")])
trainer.train()
"""

from __future__ import annotations

from chameleon_mm.integrations import load_framework
from chameleon_mm.integrations.transformers import SwapCallback

__all__ = ["SwapCallback"]

load_framework("trl")
