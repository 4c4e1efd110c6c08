"""Rates of pinned copies by size, timed on the device; `chameleon-mm bench copy` measures in full."""

from __future__ import annotations

import torch

import chameleon_mm as cm

device = cm.resolve_device(None)  # CUDA where there is one, else a simulated GPU: figures are simulated then
compute, link = device.current_stream(), device.new_stream("link")
clock = "simulated" if device.simulated else "measured"
with cm.PinnedPool(device=device) as pool:
    for mib in (1, 4, 16, 64):
        nbytes = mib << 20
        on_host, on_device = pool.empty(nbytes, torch.uint8), compute.alloc(nbytes)
        on_host.fill_(0)
        link.wait(compute.record())  # the buffer is there before a copy touches it
        for direction, (to, source) in {"h2d": (on_device, on_host), "d2h": (on_host, on_device)}.items():
            began = link.record(timed=True)
            link.copy(to, source)
            ended = link.record(timed=True)
            ended.synchronize()
            print(f"{mib:3} MiB {direction}: {nbytes / ended.elapsed_us(began) / 1e3:5.1f} GB/s, {clock} on {device.name}")
        del on_host, to, source  # the pinned block goes back with the last view of it
