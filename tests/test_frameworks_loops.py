"""Loops that people write themselves, with one line of ours: accelerate's, and torchtune's recipes, which are plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader, TensorDataset

import chameleon_mm as cm
from tests._frameworks import STEPS, Seen, check_loop, swapping
from tests._plain_models import denoising, language, llama, recomputed, unet
from tests._plain_training import Outcome

pytestmark = pytest.mark.usefixtures("short_search")


@pytest.fixture(autouse=True)
def _state_of_its_own() -> Iterator[None]:
    """Accelerate's state is the process's, and refuses another precision."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("precision", "checkpointing", "budget_kib"),
    [pytest.param("no", False, 1250, marks=pytest.mark.slow), ("bf16", True, 1200)],
)
def test_accelerate_gives_the_same_bits(precision: str, checkpointing: bool, budget_kib: int) -> None:
    """A diffusion U-Net, with two micro-batches a step and its gradients clipped."""

    def train(budget: str | None) -> tuple[Outcome, Any]:
        seen = Seen()
        accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        net: Any = unet()
        if checkpointing:
            net.enable_gradient_checkpointing()
        made = torch.optim.AdamW(net.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(made, 5)
        model, optimizer, loader, schedule = accelerator.prepare(
            net, made, DataLoader(TensorDataset(torch.arange(2 * STEPS))), schedule
        )
        swap = None if budget is None else cm.integrations.accelerate.attach(accelerator, model, **swapping(budget))
        for _ in loader:
            with accelerator.accumulate(model):
                loss = denoising(model)
                seen.note("loss", loss)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.note("norm", accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return seen.finish_attached(swap, net, made)

    check_loop(train, budget_kib)


@pytest.mark.ci
@pytest.mark.parametrize(("checkpointing", "budget_kib"), [pytest.param(False, 600, marks=pytest.mark.slow), (True, 600)])
def test_a_recipe_gives_the_same_bits(checkpointing: bool, budget_kib: int) -> None:
    """As torchtune's recipes: losses of micro-batches are added up, gradients scaled, clipped, then one step of each."""

    def train(budget: str | None) -> tuple[Outcome, Any]:
        seen = Seen()
        build = recomputed(llama(2), reentrant=False) if checkpointing else llama(2)
        model, loss_of = build(), language(rows=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        swap = None if budget is None else cm.attach(model, **swapping(budget))
        running = torch.zeros(())
        optimizer.zero_grad()
        for number in range(2 * STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=checkpointing):
                loss = loss_of(model)
            running = running + loss.detach()
            (loss / 2).backward()
            if (number + 1) % 2 == 0:
                seen.note("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                schedule.step()
                seen.note("loss", running)
                running = torch.zeros(())
        return seen.finish_attached(swap, model, optimizer)

    check_loop(train, budget_kib)


@pytest.mark.slow
def test_generation_in_between_does_no_harm() -> None:
    """Sampled and greedy, between steps and between the micro-batches of one, and once in training mode."""

    def train(budget: str | None) -> tuple[Outcome, Any]:
        seen = Seen()
        model: Any = llama(2)()
        loss_of, optimizer = language(rows=2), torch.optim.AdamW(model.parameters(), lr=1e-3)
        swap = None if budget is None else cm.attach(model, **swapping(budget))
        prompt = torch.arange(6).reshape(2, 3)
        for number in range(2 * STEPS):
            if number % 5 == 1:
                model.train(mode=number == 11)
                seen.note("ids", model.generate(prompt, do_sample=number % 2 == 0, max_new_tokens=6, pad_token_id=0))
                model.train()
            loss = loss_of(model) / 2
            loss.backward()
            seen.note("loss", loss)
            if number % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
        return seen.finish_attached(swap, model, optimizer)

    check_loop(train, 600)
