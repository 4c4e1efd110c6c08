"""The training benchmark's models: what each family has, checkpointed and not the same bits, and sessions that train them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from chameleon_mm.bench import _training_run
from chameleon_mm.bench._llama import Shape
from chameleon_mm.bench._training_models import Checkpointed, Sizes, Workload, gpt2, llama, resnet, vit
from chameleon_mm.bench._training_peers import PLANNED, SWAP_ONLY, peers, session_key
from chameleon_mm.bench._training_run import run_peer
from chameleon_mm.device import SimDevice

CPU = torch.device("cpu")
SIZES = Sizes(layers=2, width=32, heads=2, seq=32, batch=2, dtype="float32")
OTHERS = {"gpt2": gpt2(SIZES), "vit": vit(SIZES), "resnet": resnet(dataclasses.replace(SIZES, width=8, heads=1))}
FAMILIES = {"llama": llama(Shape(layers=2, width=32, heads=2, ffn=48, seq=16, batch=2, dtype="float32")), **OTHERS}
LARGER = {
    "gpt2": gpt2(Sizes(layers=3, width=64, heads=2, seq=256, batch=16, dtype="float32")),
    "vit": vit(Sizes(layers=3, width=64, heads=2, seq=64, batch=16, dtype="float32")),
    "resnet": resnet(Sizes(layers=1, width=16, seq=32, batch=32, dtype="float32")),
}
"""Most of what they save is worth moving."""


def trained(work: Workload, *, checkpointed: bool) -> tuple[nn.Module, Tensor]:
    """A model after one backward, and its loss."""
    torch.manual_seed(0)
    model, loss_of = work.make(CPU, checkpointed)
    loss = loss_of(*work.batch(CPU))
    loss.backward()
    return model, loss.detach()


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointing_changes_no_bit(name: str) -> None:
    (plain, loss), (again, same) = (trained(FAMILIES[name], checkpointed=way) for way in (False, True))
    assert torch.equal(loss, same)
    assert loss.isfinite()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("name", OTHERS)
def test_every_block_is_checkpointed_or_none(name: str) -> None:
    for checkpointed in (False, True):
        model, _ = OTHERS[name].make(CPU, checkpointed)
        wrapped = sum(isinstance(module, Checkpointed) for module in model.modules())
        blocks = 6 if name == "resnet" else 2
        assert wrapped == (blocks if checkpointed else 0)


def kinds(name: str) -> set[type[nn.Module]]:
    return {type(module) for module in OTHERS[name].make(CPU, False)[0].modules()}


@pytest.mark.parametrize("name", LARGER)
def test_a_session_trains_it_within_half_with_recomputation_and_without(
    name: str, sim: SimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_training_run, "SIMULATED_WARMUP_STEPS", 3)  # a recorded step, and two of proofs
    work, by_key = LARGER[name], {peer.key: peer for peer in peers(sim)}
    plain = run_peer(by_key["no_swap"], work, sim, steps=1, seed=0, hbm_budget=sim.capacity)
    for way in (PLANNED, SWAP_ONLY):
        peer = by_key[session_key(1 / 2, way)]
        run = run_peer(peer, work, SimDevice(), steps=1, seed=0, hbm_budget=plain.budget_for(1 / 2))
        assert torch.equal(run.losses, plain.losses), way
        assert run.steady_peak_bytes <= plain.budget_for(1 / 2)
        assert run.followed is not None
        assert (run.followed.recomputed_bytes > 0) == (way == PLANNED)
