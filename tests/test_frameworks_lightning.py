"""Lightning's `Trainer` and Fabric with one line of ours give the bits that they give without."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import chameleon_mm as cm
from tests._frameworks import STEPS, Noted, Seen, check_callback, check_loop, check_nothing_left, check_pins, swapping
from tests._plain_models import RESNET
from tests._plain_training import Outcome
from tests.test_pins import ROWS, WIDTH

pytestmark = pytest.mark.usefixtures("short_search")

SwapCallback = cm.integrations.lightning.SwapCallback


class Pictures(LightningModule):  # type: ignore[misc]  # mypy does not follow lightning
    """A ResNet that learns five classes, with one optimizer that Lightning steps."""

    def __init__(self, seen: Seen, *, checkpointing: bool = False) -> None:
        super().__init__()
        net: Any = RESNET()
        self.net = net
        if checkpointing:
            for stage in net.resnet.encoder.stages:
                inner = stage.forward
                stage.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        self.seen = seen

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pictures, labels = batch
        loss: Tensor = self.net(pixel_values=pictures, labels=labels).loss
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.note("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.seen.note("validation loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                self.seen.note("gradient", parameter.grad)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5)}


class Adversaries(LightningModule):  # type: ignore[misc]  # mypy does not follow lightning
    """A generator and a critic with an optimizer each, which the module itself steps."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 48))
        self.critic = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 1))
        self.seen = seen

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        for_critic, for_maker = self.optimizers()
        real = batch[0].flatten(1)[:, :48]
        noise = torch.randn(len(real), 8)
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(self.maker(noise).detach())).mean()
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        other = F.softplus(-self.critic(self.maker(noise))).mean()
        for_maker.zero_grad()
        self.manual_backward(other)
        for_maker.step()
        self.seen.note("critic", loss)
        self.seen.note("maker", other)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.critic.parameters(), lr=1e-3), torch.optim.Adam(self.maker.parameters(), lr=1e-3)]


class Texts(LightningModule):  # type: ignore[misc]  # mypy does not follow lightning
    """Predicts each token of a row from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))

    def training_step(self, ids: Tensor, number: int) -> Tensor:
        return F.cross_entropy(self.net(ids).flatten(0, 1), ids.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Examples(Dataset[tuple[Tensor, Tensor]]):
    """Made as they are asked for: a simulated GPU takes tensors that stay for its own."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(3, 32, 32, generator=generator), torch.randint(5, (), generator=generator)


def trainer(folder: Path, callbacks: list[Any], **args: Any) -> Any:
    defaults = {
        "accelerator": "cpu", "devices": 1, "max_steps": STEPS, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0,
    }  # fmt: skip
    return Trainer(default_root_dir=folder, callbacks=callbacks, **{**defaults, **args})


def trained(build: Callable[[Seen], Any], folder: Path, swap: Any = None, **args: Any) -> Outcome:
    seen = Seen()
    module = build(seen)
    made = trainer(folder, [] if swap is None else [swap], **args)
    made.fit(module, DataLoader(Examples(24), batch_size=4, shuffle=True), DataLoader(Examples(4), batch_size=4))
    check_nothing_left(module)
    return seen.finish(module, *made.optimizers)


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 0.5},
    "bf16": {"precision": "bf16-mixed"},
    "two steps a batch": {"max_steps": 2 * STEPS},
    "evaluation": {"limit_val_batches": 1, "num_sanity_val_steps": 1, "val_check_interval": 2},
}


def check_bits(build: Callable[[Seen], Any], options: tuple[str, ...], folder: Path, budget_kib: int) -> None:
    args = {key: value for option in options for key, value in OPTIONS[option].items()}
    check_callback(SwapCallback, lambda swap: trained(build, folder, swap, **args), budget_kib)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("checkpointing", "options", "budget_kib"),
    [
        pytest.param(False, ("evaluation",), 500, marks=pytest.mark.slow),
        pytest.param(False, ("accumulation", "clipping", "bf16"), 450, marks=pytest.mark.slow),
        (True, ("clipping", "accumulation"), 500),
        *(
            pytest.param(checkpointing, options, 200, marks=[pytest.mark.slow, pytest.mark.thorough])
            for checkpointing in (False, True)
            for n in range(5)
            for options in itertools.combinations(("accumulation", "clipping", "bf16", "evaluation"), n)
        ),
    ],
)
def test_a_trainer_gives_the_same_bits(checkpointing: bool, options: tuple[str, ...], budget_kib: int, tmp_path: Path) -> None:
    check_bits(lambda seen: Pictures(seen, checkpointing=checkpointing), options, tmp_path, budget_kib)


@pytest.mark.slow
def test_manual_optimization_gives_the_same_bits(tmp_path: Path) -> None:
    check_bits(Adversaries, ("two steps a batch",), tmp_path, 250)


@pytest.mark.ci
@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.slow), "bf16-mixed"])
def test_fabric_gives_the_same_bits(precision: str) -> None:
    def train(budget: str | None) -> tuple[Outcome, Any]:
        seen = Seen()
        fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
        net = RESNET()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
        swap = None if budget is None else cm.attach(model, optimizer, **swapping(budget))
        for number, (pictures, labels) in enumerate(DataLoader(Examples(8 * STEPS), 4)):
            accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = model(pixel_values=pictures, labels=labels).loss
                seen.note("loss", loss)
                fabric.backward(loss)
            if not accumulating:
                seen.note("norm", fabric.clip_gradients(model, optimizer, max_norm=0.5))
                optimizer.step()
                optimizer.zero_grad()
        return seen.finish_attached(swap, net, optimizer)

    check_loop(train, 480)


@pytest.mark.ci
def test_pins_hold_in_a_trainer(tmp_path: Path) -> None:
    class Blocks(LightningModule):  # type: ignore[misc]  # mypy does not follow lightning
        def __init__(self, net: Noted) -> None:
            super().__init__()
            self.net = net

        def training_step(self, x: Tensor, number: int) -> Tensor:
            loss: Tensor = self.net(x)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    rows: Any = torch.randn(ROWS * 4, WIDTH, generator=torch.Generator().manual_seed(3))

    def train(model: Noted, swap: Any) -> None:
        made = trainer(tmp_path, [] if swap is None else [swap], max_steps=4)
        made.fit(Blocks(model), DataLoader(rows, batch_size=ROWS))

    check_pins(SwapCallback, train, "2200KiB")


class Kept(Logger):  # type: ignore[misc]  # mypy does not follow lightning
    """Logger that keeps what it is given."""

    name, version = "kept", "0"

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []

    def log_hyperparams(self, *given: Any, **more: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append(metrics)


def test_loggers_and_metrics_of_the_trainer_have_the_figures_of_each_step(tmp_path: Path) -> None:
    swap, logger, module = SwapCallback(**swapping("500KiB")), Kept(), Pictures(Seen())
    options: dict[str, Any] = {
        "max_steps": 3, "accumulate_grad_batches": 2, "logger": logger, "log_every_n_steps": 1, "accelerator": "cpu",
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }  # fmt: skip
    trainer = Trainer(**options, callbacks=[swap])
    trainer.fit(module, DataLoader(Examples(8 * STEPS), 4))
    steps = swap.report().step_figures
    logged = [metrics for metrics in logger.metrics if "swap_step_us" in metrics]
    assert len(steps) == len(logged) == 3
    assert not any("swap_tokens_per_s" in metrics for metrics in logged)  # pictures have none
    for metrics, figures in zip(logged, steps, strict=True):
        assert metrics["swap_step_us"] == figures.step_us
        assert metrics["swap_peak_at_least_bytes"] == figures.peak_hbm_bytes
        assert (metrics.get("swap_peak_bytes") == figures.peak_hbm_bytes) == (
            figures.peak_hbm_at_most_bytes == figures.peak_hbm_bytes
        )
        assert metrics["swap_budget_bytes"] == 500 * 1024
        assert metrics["swap_bytes_out"] == figures.bytes_out > 0
        assert metrics["swap_stall_us"] == figures.stall_us
    assert trainer.callback_metrics["swap_peak_at_least_bytes"] == steps[-1].peak_hbm_bytes
    swap, seldom = SwapCallback(**swapping("500KiB")), Kept()
    trainer = Trainer(**{**options, "max_steps": 6, "logger": seldom, "log_every_n_steps": 3}, callbacks=[swap])
    trainer.fit(Pictures(Seen()), DataLoader(Examples(16 * STEPS), 4))
    steps = swap.report().step_figures
    assert [metrics["swap_bytes_out"] for metrics in seldom.metrics if "swap_step_us" in metrics] == [
        sum(figures.bytes_out for figures in steps[at : at + 3]) / 3 for at in (0, 3)
    ]
    swap, texts = SwapCallback(**swapping("500KiB")), Kept()
    trainer = Trainer(**{**options, "logger": texts}, callbacks=[swap])
    rows: Any = torch.arange(64 * 48).reshape(64, 48) % 32
    trainer.fit(Texts(), DataLoader(rows, 4))
    assert [figures.tokens for figures in swap.report().step_figures] == [2 * 4 * 48] * 3
    assert [metrics["swap_tokens_per_s"] for metrics in texts.metrics if "swap_step_us" in metrics] == [
        1e6 * 2 * 4 * 48 / (figures.step_us or 0) for figures in swap.report().step_figures
    ]
    bare = Trainer(max_steps=2, barebones=True, accelerator="cpu", callbacks=[SwapCallback(**swapping("500KiB"))])
    bare.fit(Pictures(Seen()), DataLoader(Examples(8 * STEPS), 4))  # logs nothing, and does not warn of that
