"""What integrations say where they are used otherwise than they are meant, and Hugging Face's `kernels` beside ours."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import chameleon_mm as cm
from tests._frameworks import check_nothing_left, swapping
from tests._plain_models import llama
from tests.test_frameworks_transformers import trainer

SwapCallback = cm.integrations.transformers.SwapCallback
MAKE = llama(1)


class Late(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Adds a callback to its trainer in the middle of training."""

    def __init__(self, late: TrainerCallback) -> None:
        self.late = late
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.add_callback(self.late)


class Failing(TrainerCallback):  # type: ignore[misc]  # as above
    """Has training raise in its second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyError("of the user's own")


def test_a_callback_that_comes_after_training_began_says_so(tmp_path: Path) -> None:
    late = Late(SwapCallback(**swapping("1MiB")))
    made = late.trainer = trainer(MAKE(), tmp_path, [late], max_steps=3)
    with pytest.raises(RuntimeError, match="expected to be one of the trainer's callbacks before training begins"):
        made.train()


def test_a_budget_below_what_the_model_takes_is_told_before_the_first_step(tmp_path: Path) -> None:
    model = MAKE()
    made = trainer(model, tmp_path, [SwapCallback(**swapping("1KiB"))], max_steps=3)
    with pytest.raises(cm.InfeasibleBudget, match=r"hbm_budget: .*raise the budget or make the model smaller"):
        made.train()
    check_nothing_left(model)


def test_a_callback_goes_on_to_other_trainings_also_after_one_that_raised(tmp_path: Path) -> None:
    swap = SwapCallback(**swapping("64MiB"))
    with pytest.raises(RuntimeError, match="expected a training that has begun, got none"):
        swap.report()
    with pytest.raises(KeyError):
        trainer(MAKE(), tmp_path, [Failing(), swap], max_steps=3).train()
    model = MAKE()
    trainer(model, tmp_path, [swap], max_steps=2).train()
    assert swap.report().steps == 2
    check_nothing_left(model)
    with pytest.raises(KeyError):
        trainer(model, tmp_path, [Failing(), swap], max_steps=3).train()
    swap.detach()
    check_nothing_left(model)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"budget": "1GiB"}, TypeError, "expected arguments of SwapSession"),
        ({"hbm_budget": "much"}, ValueError, "hbm_budget"),
        ({"optimizer_state": 1}, TypeError, "optimizer_state: expected True or False"),
    ],
)
def test_wrong_arguments_are_told_as_a_callback_is_made(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    for callback in (SwapCallback, cm.integrations.lightning.SwapCallback):
        with pytest.raises(kind, match=words):
            callback(**arguments)


def test_a_release_that_is_not_known_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "99.1.0")
    with caplog.at_level(logging.WARNING, "chameleon_mm.integrations"):
        trainer(MAKE(), tmp_path, [SwapCallback(**swapping("64MiB"))], max_steps=1).train()
    (record,) = [record for record in caplog.records if "99.1.0" in record.getMessage()]
    assert record.getMessage().startswith("chameleon_mm: expected transformers 5.0 or newer")


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers", "trl"])
def test_a_framework_that_is_missing_is_told_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    module = importlib.import_module("chameleon_mm.integrations._framework")
    with pytest.raises(ImportError, match=rf"pip install 'chameleon-mm\[{name}\]'"):
        module.Framework(name, first=(1, 0), last=(1, 0)).load()


# --- Hugging Face's kernels


LAYER = """
import torch
from torch import nn

class layers:
    class Gated(nn.Module):
        def forward(self, x):
            return torch.nn.functional.silu(x) * x
"""
BESIDE_KERNELS = """
import sys
from pathlib import Path
import kernels
import torch
from torch import nn
import chameleon_mm as cm
import chameleon_mm.kernels

@kernels.use_kernel_forward_from_hub("Gated")
class Gated(nn.Module):
    def forward(self, x):
        raise AssertionError("not replaced")

def trained(swap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), Gated(), nn.Linear(512, 512), Gated(), nn.Linear(512, 64))
    layer = kernels.LocalLayerRepository(Path(sys.argv[1]), layer_name="Gated")
    with kernels.use_kernel_mapping({"Gated": {"cpu": layer}}):
        model = kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    handle = cm.attach(model, hbm_budget="9MiB", device="sim", min_bytes="64KiB") if swap else None
    for _ in range(3):
        model(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        assert handle.report().bytes_swapped_out > 0
        handle.detach()
    return list(model.parameters())

assert all(torch.equal(a, b) for a, b in zip(trained(False), trained(True), strict=True))
assert not Path(kernels.__file__).is_relative_to(Path(cm.__file__).parent)
print(kernels.__name__, chameleon_mm.kernels.__name__)
"""


def test_layers_that_hugging_faces_kernels_replaced_are_swapped_bit_for_bit(tmp_path: Path) -> None:
    """In a folder and a process of its own: in a checkout, `kernels` is a folder of ours."""
    folder = tmp_path / "repository" / "build" / "torch-cpu"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(LAYER)
    metadata = {
        "version": 1, "name": "gated", "id": "gated_cpu_1", "license": "Apache-2.0", "python-depends": [],
        "backend": {"type": "cpu"},
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata))
    script = tmp_path / "beside.py"
    script.write_text(BESIDE_KERNELS)
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "repository")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "kernels chameleon_mm.kernels\n"
