"""A training loop of one's own, with one line before it: `cm.attach`."""

from __future__ import annotations

import torch
from torch import nn

import chameleon_mm as cm

device = cm.resolve_device(None).torch_device  # CUDA where there is one, else the CPU, which stands for a simulated GPU
layers = (nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6))
model = nn.Sequential(*layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
batches = [torch.randn(1024, 256, device=device) for _ in range(8)]

handle = cm.attach(model, hbm_budget="96MiB")  # the line that is new
for i, batch in enumerate(batches):
    loss = (model(batch) - batch).square().mean() / 2
    loss.backward()
    if i % 2:  # an optimizer step of two micro-batches
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")

report = handle.report()
handle.detach()
report.save_html("plain_loop.html")
print(report)
