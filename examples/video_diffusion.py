"""A small video diffusion transformer over Haar wavelets of videos, plainly and within half of what its step needs."""

from __future__ import annotations

import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.tools.video_models import VideoShape

device = cm.resolve_device(None).torch_device  # CUDA where there is one, else the CPU, which stands for a simulated GPU
shape = VideoShape(layers=4, width=128, heads=4, frames=17, sides=(16, 16), caption=77, caption_width=512)


def latents_of(video: Tensor) -> Tensor:
    """[b, 3, 65, 8 h, 8 w] -> [b, 4, 17, h, w]: Haar wavelets of the first frame and of the mean of each four after it."""
    frames = torch.cat((video[:, :, :1], video[:, :, 1:].unflatten(2, (16, 4)).mean(3)), dim=2)
    for _ in range(3):
        (a, b), (c, d) = ([frames[:, :3, :, i::2, j::2] for j in (0, 1)] for i in (0, 1))
        frames = torch.cat((a + b + c + d, a + b - c - d, a - b + c - d, a - b - c + d), dim=1) / 2
    return frames[:, :4]


def train(hbm_budget: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = shape.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    handle = None if hbm_budget is None else cm.attach(model, hbm_budget=hbm_budget)
    for _ in range(4):
        _, noise, captions, times = shape.batch(2, device=device)
        model.loss(latents_of(torch.randn(2, 3, 65, 128, 128, device=device)), noise, captions, times).backward()
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        print(handle.report())
        handle.detach()
    return [p.detach() for p in model.parameters()]


print("every weight bit for bit plain PyTorch's:", all(map(torch.equal, train(None), train("80MiB"))))
