"""Wrong uses of the callbacks raise one sentence each, as early as they can be known; they leave nothing installed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import chameleon_mm as cm
from tests import test_frameworks_lightning as lightning
from tests import test_frameworks_transformers as hf
from tests._frameworks import Seen, check_nothing_left, swapping
from tests._plain_models import llama
from tests._plain_training import differences

CALLBACKS = [hf.SwapCallback, lightning.SwapCallback]


class Fails(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Act at the end of the second step: by default, raise."""

    def __init__(self, act: Callable[[], object] | None = None) -> None:
        self._act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            if self._act is None:
                raise ArithmeticError("lost")
            self._act()


def fit(trainer: Any, module: Any) -> None:
    trainer.fit(module, DataLoader(lightning.Examples(8), batch_size=4))


@pytest.mark.parametrize("callback", CALLBACKS)
def test_wrong_arguments_are_said_when_it_is_made_and_there_is_no_report_before_a_training(callback: Any) -> None:
    session = r"SwapCallback: expected arguments of SwapSession \(hbm_budget, .*\), got"
    for arguments, kind, words in (
        ({"hbm_bugdet": "20GiB"}, TypeError, f"{session} hbm_bugdet="),
        ({"model": nn.Linear(1, 1)}, TypeError, f"{session} model="),
        ({"hbm_budget": "20 apples"}, ValueError, "hbm_budget"),
        ({"optimizer_state": "yes"}, TypeError, "optimizer_state: expected True or False"),
    ):
        with pytest.raises(kind, match=words):
            callback(**arguments)
    with pytest.raises(RuntimeError, match="expected a training that has begun, got none"):
        callback().report()


def test_a_budget_that_is_too_small_is_said_before_the_first_step(tmp_path: Path) -> None:
    model = llama(2)()
    trainer = hf.trainer(model, tmp_path, [hf.SwapCallback(**swapping("1KiB"))])
    with pytest.raises(cm.InfeasibleBudget, match="hbm_budget: expected"):
        trainer.train()
    assert trainer.state.global_step == 0
    check_nothing_left(model)
    module = lightning.Pictures(Seen())
    with pytest.raises(cm.InfeasibleBudget, match="hbm_budget: expected"):
        fit(lightning.trainer(tmp_path, [lightning.SwapCallback(**swapping("1KiB"))]), module)
    check_nothing_left(module)


def test_a_callback_that_comes_after_training_began_says_so(tmp_path: Path) -> None:
    model = llama(2)()
    swap = hf.SwapCallback(**swapping("1MiB"))
    trainer = hf.trainer(model, tmp_path, [])
    trainer.add_callback(Fails(lambda: trainer.add_callback(swap)))
    with pytest.raises(RuntimeError, match="expected to be one of the trainer's callbacks before training begins"):
        trainer.train()
    check_nothing_left(model)


def test_one_callback_serves_trainings_after_each_other_and_not_two_at_once(tmp_path: Path) -> None:
    swap, model = hf.SwapCallback(**swapping("600KiB")), llama(2)()
    for steps in (2, 3):
        hf.trainer(model, tmp_path, [swap], max_steps=steps).train()
        assert swap.report().steps == steps
    check_nothing_left(model)
    inner = hf.trainer(llama(2)(), tmp_path, [swap], max_steps=1)
    trainer = hf.trainer(model, tmp_path, [swap, Fails(inner.train)])
    with pytest.raises(RuntimeError, match="in one training at a time, got a step of a training that it is not attached to"):
        trainer.train()
    check_nothing_left(model)


@pytest.mark.parametrize("way", ["detach", "next training", "dropped"])
def test_what_a_training_that_raised_left_goes(way: str, tmp_path: Path) -> None:
    swap, model = hf.SwapCallback(**swapping("600KiB")), llama(2)()
    trainer = hf.trainer(model, tmp_path, [swap, Fails()])
    with pytest.raises(ArithmeticError):
        trainer.train()
    pool = swap.attachment.session.pool
    if way == "detach":
        swap.detach()
    elif way == "next training":
        hf.trainer(model, tmp_path, [swap], max_steps=1).train()
    else:
        del swap, trainer
        gc.collect()
    check_nothing_left(model)
    gc.collect()
    assert pool.stats().num_live == 0


def test_lightning_tells_of_a_training_that_raised(tmp_path: Path) -> None:
    class Raises(lightning.Pictures):
        def training_step(self, batch: Any, number: int) -> Any:
            if number == 1:
                raise ArithmeticError("lost")
            return super().training_step(batch, number)

    module, swap = Raises(Seen()), lightning.SwapCallback(**swapping("1MiB"))
    with pytest.raises(ArithmeticError):
        fit(lightning.trainer(tmp_path, [swap]), module)
    check_nothing_left(module)
    assert swap.report().steps == 1
    swap.begin(None, module, [])
    swap.detach()  # of one that no callback ended
    check_nothing_left(module)
    swap.detach()


def test_the_state_of_the_optimizer_leaves_where_that_is_asked_for(tmp_path: Path) -> None:
    def train(swap: Any) -> Any:
        seen = Seen()
        model: Any = llama(1)()
        model.resize_token_embeddings(1024)  # 128 KiB of state
        made = hf.trainer(model, tmp_path, [hf.Notes(seen), *([swap] if swap else [])], max_steps=4)
        made.train()
        return seen.finish(model, made.optimizer)

    plain = train(None)
    swap = hf.SwapCallback(optimizer_state=True, **swapping("4MiB"))
    assert differences(plain, train(swap)) == []
    assert swap.report().state_bytes_swapped_out > 0
    module = lightning.Adversaries(Seen())
    with pytest.raises(ValueError, match="expected one optimizer with optimizer_state=True, got 2"):
        fit(lightning.trainer(tmp_path, [lightning.SwapCallback(optimizer_state=True, **swapping("4MiB"))]), module)


def test_accelerate_attaches_what_it_has_prepared() -> None:
    AcceleratorState._reset_state(True)
    accelerator, model = Accelerator(cpu=True), nn.Linear(4, 4)
    with pytest.raises(ValueError, match="expected a model that this accelerator has prepared, got a Linear that it has not"):
        cm.integrations.accelerate.attach(accelerator, model)
    with pytest.raises(TypeError, match=r"accelerator: expected an accelerate\.Accelerator, got an object of type Linear"):
        cm.integrations.accelerate.attach(model, accelerator)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with cm.integrations.accelerate.attach(accelerator, prepared, optimizer, **swapping("1MiB")) as handle:
        prepared(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert handle.report().steps == 1
    check_nothing_left(model)
