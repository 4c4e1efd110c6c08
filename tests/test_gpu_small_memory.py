"""A Llama-shaped stack on a device with a quarter of the memory that it needs (on CUDA: and two of the allocator's segments).

The bits are the same, from its first step on.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chameleon_mm.api.session import SwapSession
from chameleon_mm.bench._llama import DTYPES, Shape, Stack
from chameleon_mm.bench._measure import free_unused
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.reproducible import reproducible
from chameleon_mm.pool.host_memory import available_host_bytes
from chameleon_mm.units import GIB, MIB
from tests._memory_limit import fraction_of_memory
from tests._plain_training import Outcome, differences, image

STEPS = 4
"""A recorded one, and some that follow a plan."""

MEDIUM = Shape(layers=8, width=128, heads=2, ffn=384, seq=256, batch=16, dtype="float32")
"""A third of a GiB of activations."""
LARGE = Shape(layers=16, width=768, heads=12, ffn=2048, seq=1024, batch=32, dtype="bfloat16")
"""20 GiB of activations, with 1 GiB of parameters, gradients and moments."""

SEGMENT_BYTES = 20 * MIB
"""Bytes that the caching allocator reserves at a time, for requests of 1 to 10 MiB."""


class Dropping(nn.Module):
    """Stack with dropout after every block, so that a step draws random numbers."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        self.stack = Stack(shape, device=device)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stack.blocks:
            x = F.dropout(block(x, self.stack.rope), 0.1)
        return x


def train(device: Device, shape: Shape, *, hbm_budget: int | None, steps: int = STEPS) -> Outcome:
    """Train a fresh model. `hbm_budget`: of the session that does it; None: without one. Returns its losses, the gradients of
    the last step, the parameters and the random states."""
    with reproducible(), device.compute():
        torch.manual_seed(3)
        model = Dropping(shape, device.torch_device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        session = None
        if hbm_budget is not None:
            session = SwapSession(hbm_budget=hbm_budget, device=device, model=model)
        losses: list[Tensor] = []
        with nullcontext() if session is None else session.pool, nullcontext() if session is None else session:
            for _ in range(steps):
                optimizer.zero_grad()
                with nullcontext() if session is None else session.step():
                    x = torch.randn(shape.batch, shape.seq, shape.width, dtype=DTYPES[shape.dtype], device=device.torch_device)
                    loss = (model(x).float() - x.float()).square().mean()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
        device.synchronize()
        seen = {f"loss {number}": image(loss) for number, loss in enumerate(losses)}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            seen |= {f"gradient of {name}": image(parameter.grad), name: image(parameter)}
        seen["random state"] = image(torch.get_rng_state())
        if device.torch_device.type != "cpu":
            seen["random state of the device"] = image(torch.cuda.get_rng_state(device.torch_device))
        return seen


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [pytest.param(MEDIUM, id="medium"), pytest.param(LARGE, id="large")])
def test_a_quarter_of_the_peak_is_enough_for_the_caching_allocator(shape: Shape) -> None:
    from chameleon_mm.device.cuda import CudaDevice

    device = CudaDevice()
    free_unused()
    if shape is LARGE and (device.capacity < 32 * GIB or available_host_bytes() < 40 * GIB):
        pytest.skip("needs 32 GiB of device memory and 40 GiB of host memory")
    held = torch.cuda.memory_reserved(device.index)
    device.reset_peaks()
    plain = train(device, shape, hbm_budget=None)
    quarter = device.peak_allocated_bytes() // 4
    free_unused()
    # The limit applies to the memory that the allocator reserves, which includes blocks in use. Two more segments, and a part
    # of the quarter, are for its gaps.
    with fraction_of_memory(held + quarter + 2 * SEGMENT_BYTES, device.index):
        with pytest.raises(torch.OutOfMemoryError):
            train(device, shape, hbm_budget=None, steps=1)
        free_unused()
        swapped = train(device, shape, hbm_budget=quarter * 3 // 4)
    assert differences(plain, swapped) == []
