"""Sessions whose reports the tests of pages and traces look at: a small GPT on the simulator, swapped and recomputed."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F

import chameleon_mm as cm
from chameleon_mm.device import SPECS
from chameleon_mm.tools.demo import GPT, GPTConfig
from chameleon_mm.units import MIB


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=4, width=64, heads=2, context=64))


def gpt_report(*, steps: int = 4, plans: bool = True, hbm_mib: float = 7.0, link_gbps: float = 20.0) -> cm.SwapReport:
    """Report of a GPT's steps within so much memory, on a GPU with such a link: slow enough for stalls and recomputation."""
    spec = dataclasses.replace(SPECS["h200"], d2h_gbps=link_gbps, h2d_gbps=link_gbps, duplex_gbps=2 * link_gbps)
    device, model = cm.SimDevice(spec), small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, 256, (8, 64))
    session = cm.SwapSession(device.allocated_bytes() + int(hbm_mib * MIB), "64MiB", device, "16KiB", model=model, plans=plans)
    with session:
        for _ in range(steps):
            with session.step():
                F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
    return session.report()


def busy_report() -> cm.SwapReport:
    """Report of a GPT's steps whose plan recomputes, and stalls all the same."""
    found = gpt_report(hbm_mib=5.5, link_gbps=8.0)
    assert found.planned is not None and found.planned.plan.recompute_us and found.planned.plan.stall_us
    return found
