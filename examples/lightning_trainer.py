"""Training with Lightning's Trainer: swapping is one callback."""

from __future__ import annotations

from itertools import pairwise

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import chameleon_mm as cm


class Autoencoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        sizes = pairwise((512, 2048, 64, 2048, 512))
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in sizes))

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.layers(batch) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


swapping = cm.integrations.lightning.SwapCallback(hbm_budget="88MiB")
trainer = lightning.Trainer(
    max_steps=4,
    accelerator="gpu" if torch.cuda.is_available() else "cpu",
    callbacks=[swapping],  # the line that is new
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Autoencoder(), DataLoader(torch.randn(4096, 512), batch_size=1024))  # type: ignore[arg-type]  # a tensor has items
print(swapping.report())
