"""Pins: what modules of `keep` save stays on the device, what modules of `never_recompute` save is never dropped.

References are plain PyTorch, with nothing of ours around it. A storage that left the device has no bytes.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import Device, SimDevice
from chameleon_mm.follow.adaptation import Adaptation
from chameleon_mm.plan.unswapped_memory import place_of
from tests import _runs
from tests._programs import assert_same
from tests._random_models import far_ahead
from tests._run_scripts import runs
from tests.test_recompute_plans import RMSNorm, budget_for, latest, plainly, totals
from tests.test_recompute_plans import train as train_decoder

ROWS, WIDTH, BLOCKS, STEPS = 512, 64, 6, 5
STORAGE = ROWS * WIDTH * 4


class Gelu(nn.Module):
    """Saves its input, and notes the storage of that."""

    saved: weakref.ref[torch.UntypedStorage]

    def forward(self, x: Tensor) -> Tensor:
        self.saved = weakref.ref(x.untyped_storage())
        return F.gelu(x)

    @property
    def is_there(self) -> bool:
        storage = self.saved()
        return storage is not None and storage.nbytes() > 0


class Fine(Gelu):
    """Another class that does the same."""


class Block(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.down(self.act(self.up(x))))
        return out


def blocks() -> nn.Module:
    return nn.Sequential(*(Block(Fine() if i == 2 else Gelu()) for i in range(BLOCKS)))


@dataclass(slots=True, kw_only=True)
class Run(_runs.Run):
    there: list[set[int]] = field(default_factory=list)
    """After each forward: blocks whose activation's input is on the device."""


def train(device: Device, build: Callable[[], nn.Module], free_bytes: int | None = None, **given: Any) -> Run:
    """Train in plain PyTorch, or in a session with `free_bytes` more than what is on the device. A pin may be a function of the
    model."""
    run = Run()
    with device.compute() if free_bytes is not None else nullcontext():
        torch.manual_seed(0)
        model: Any = build().to(device.torch_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if free_bytes is not None:
            budget = max(device.allocated_bytes(), sum(p.nbytes for p in model.parameters())) + free_bytes
            pins: dict[str, Any] = {}
            for name in {"keep", "never_recompute"} & given.keys():
                pins[name] = [pin(model) if isinstance(pin, FunctionType) else pin for pin in given.pop(name)]
            run.ran_in = cm.SwapSession(budget, "64MiB", device, "16KiB", model=model, **pins, **given)
        with run.ran_in or nullcontext():
            for _ in range(STEPS):
                with run.ran_in.step() if run.ran_in is not None else nullcontext():
                    loss = model(torch.randn(ROWS, WIDTH).to(device.torch_device)).square().mean()
                    run.there.append({i for i, act in enumerate(acts(model)) if act.is_there})
                    loss.backward()
                    run.seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
                    optimizer.step()
                    optimizer.zero_grad()
        run.seen += [p.detach().clone() for p in model.parameters()]
    return run


def acts(model: nn.Module) -> list[Gelu]:
    return [module for module in model.modules() if isinstance(module, Gelu)]


class Shared(nn.Module):
    """`first` saves a storage, then operators that save others, then `act` saves that storage again. The copy of
    the first save may be under way by then."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.first, self.act, self.middle = nn.Linear(WIDTH, WIDTH), Gelu(), Gelu(), blocks()

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        first = self.first(y)
        other = self.middle(first)
        out: Tensor = other + self.act(y) + first
        return out


PINS: dict[str, tuple[Callable[[], nn.Module], Any, set[int]]] = {
    "path": (blocks, "3", {3}),
    "inner path": (blocks, "[14].act", {1, 4}),
    "module": (blocks, lambda model: model[4], {4}),
    "class": (blocks, Fine, {2}),
    "storage of two modules, by the first": (Shared, "first", {0, 1}),
    "storage of two modules, by the other": (Shared, "act", {0, 1}),
}


@pytest.mark.ci
@pytest.mark.parametrize("plans", [True, False], ids=["planned", "by rule"])
@pytest.mark.parametrize("name", PINS)
def test_what_a_kept_module_saves_never_leaves_and_the_rest_does(device: Device, name: str, plans: bool) -> None:
    build, pin, kept = PINS[name]
    run = train(device, build, 8 * STORAGE, keep=[pin], plans=plans, recompute=False)
    assert_same(train(device, build).seen, run.seen)
    assert all(kept <= there for there in run.there), run.there
    assert all(len(there) < len(acts(build())) for there in run.there), run.there
    loose = train(device, build, 8 * STORAGE, plans=plans, recompute=False)
    assert not all(kept <= there for there in loose.there), "they would have stayed anyway"


@pytest.mark.parametrize("plans", [True, False], ids=["planned", "by rule"])
def test_nothing_is_copied_out_of_a_model_that_is_kept_whole_however_short_memory_is(device: Device, plans: bool) -> None:
    run = train(device, blocks, STORAGE, keep=["?"], plans=plans)
    assert_same(train(device, blocks).seen, run.seen)
    assert run.there == [{*range(BLOCKS)}] * STEPS
    report = run.report
    outside = 1  # the loss's square saves the model's result, in no module
    assert report.bytes_swapped_out <= outside * STORAGE * STEPS
    assert report.recomputed == 0
    loose = train(device, blocks, STORAGE, plans=plans)
    assert loose.report.bytes_swapped_out > BLOCKS * STORAGE * STEPS


@pytest.mark.usefixtures("no_gc")
def test_a_session_with_pins_keeps_no_memory(device: Device) -> None:
    train(device, blocks, 8 * STORAGE, keep=["3"])
    before = device.allocated_bytes()  # on a GPU, cuBLAS's workspaces
    train(device, blocks, 8 * STORAGE, keep=["3"])
    assert device.allocated_bytes() - before < STORAGE
    assert before < 2 * STORAGE or not device.simulated


# --- never_recompute


def dropped_modules(session: cm.SwapSession | None) -> set[str]:
    """Modules that save what some plan of the latest step recomputes."""
    planned = latest(session)
    plans = [trial.program.plan for trial in planned.trials]
    assert plans
    return {place_of(planned.trace, action.tensor).module for plan in plans for action in plan.recomputed}


def test_what_a_module_of_never_recompute_saves_is_swapped_and_never_dropped() -> None:
    budget = budget_for(0.4)
    assert {"1.before", "2.gate", "3"} <= dropped_modules(train_decoder(3, budget, device=far_ahead()).session)
    for pins, others_are_dropped in ((["[23]", RMSNorm], True), (["*"], False)):
        run = train_decoder(6, budget, device=far_ahead(), never_recompute=pins)
        assert run.seen == plainly(6).seen
        dropped = dropped_modules(run.session)
        assert not any(module[0] in "23" or module.endswith(("before", "between")) for module in dropped)
        assert bool(dropped) is (totals(run).recomputed > 0) is others_are_dropped
        assert totals(run).bytes_swapped_out > 0


def test_compiled_regions_save_what_torch_chose_if_something_is_never_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Adaptation] = []

    def note(adaptation: Adaptation) -> None:
        asked.append(adaptation)

    monkeypatch.setattr(Adaptation, "choose_partition", note)
    train(SimDevice(), blocks, 8 * STORAGE, never_recompute=["3"])
    assert not asked
    train(SimDevice(), blocks, 8 * STORAGE, keep=["3"])
    assert len(asked) == STEPS


# --- what they cost


def test_the_report_and_the_page_show_what_pins_hold(tmp_path: Path) -> None:
    budget = budget_for(0.5)
    loose = train_decoder(6, budget, device=far_ahead())
    run = train_decoder(6, budget, device=far_ahead(), keep=["1"], never_recompute=[RMSNorm])
    report, before = run.session.report(), loose.report
    pins = report.pins
    assert before.pins == {}
    assert (pins["keep"], pins["never_recompute"]) == (["1"], ["RMSNorm"])
    movable = sum(before.planned_bytes[what] for what in ("kept", "swapped", "recomputed"))
    assert pins["kept_bytes"] == movable - sum(report.planned_bytes[what] for what in ("kept", "swapped", "recomputed")) > 0
    assert pins["never_recomputed_bytes"] > 0
    row = dict(report.rows())["pins"]
    assert re.fullmatch(r"keep=\['1'\], never_recompute=\['RMSNorm'\]: .* kept, .* never recomputed", row)
    report.save_html(tmp_path / "page.html")
    assert row.partition(": ")[2] in (tmp_path / "page.html").read_text()
    json.dumps(report.to_dict())


def test_pins_without_room_leave_no_plan_and_the_report_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run = train_decoder(3, budget_for(0.3), device=far_ahead(), keep=["*"])
    assert run.seen == plainly(3).seen
    report = run.report
    assert report.planned_step_us is None
    assert report.pins["kept_bytes"] > 0
    assert "Modules of `keep` hold 24." in caplog.text


# --- errors


NONE = "which names none; near names: "


@pytest.mark.parametrize(
    ("pin", "error", "said"),
    [
        ("lm_head", TypeError, "keep: expected a list of patterns, modules or classes, got 'lm_head' (str); put it in [...]"),
        ([3], TypeError, 'keep: expected a path ("*.lm_head"), a module or a class, got 3 (int); leave it out'),
        ([int], TypeError, "got the class int itself"),
        (["0.upp"], ValueError, f"keep: expected a pin that names a module of the model, got '0.upp', {NONE}0.up"),
        (["*.Act"], ValueError, f"got '*.Act', {NONE}0.act"),
        (["*.lm_head"], ValueError, f"got '*.lm_head', {NONE}0, 0.up, 0.act"),
        ([nn.Conv2d], ValueError, f"got the class Conv2d, {NONE}Block, Fine, Gelu"),
        (["3", nn.Linear(1, 1)], ValueError, f"got an object of type Linear, {NONE}Linear"),
    ],
)  # fmt: skip
def test_a_wrong_pin_is_one_line_before_anything_starts(pin: Any, error: type[Exception], said: str) -> None:
    model, device = blocks(), SimDevice(hbm_bytes="1GiB")
    for option in ("keep", "never_recompute"):
        with pytest.raises(error) as told:
            cm.attach(model, device=device, **{option: pin})
        text = said.replace("keep", option) if said.startswith("keep") else said
        assert text in str(told.value)
        assert "\n" not in str(told.value)
        assert not model._forward_pre_hooks


def test_pins_of_modules_whose_forward_saves_nothing_are_said_to_hold_nothing(sim: SimDevice) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + F.linear(F.linear(x, self.up.weight).tanh(), self.down.weight)
            return x

    with sim.compute():
        model = Functional()
        with cm.attach(model, hbm_budget="3MiB", device=sim, min_bytes=4096, keep=["up", "down"]) as handle:
            for _ in range(3):
                handle.begin_step()
                model(torch.randn(512, 64)).square().mean().backward()
                model.zero_grad()
                handle.end_step()
    report = handle.report()
    assert report.steps_by_phase["planned"] == 2
    assert report.pins["kept_bytes"] == 0
    assert ["hold nothing" in text for label, text in report.rows() if label.startswith("pins")] == [True]


def test_a_pin_on_top_of_others_makes_no_plan_faster() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.down(torch.tanh(F.dropout(F.silu(self.up(self.norm(x))) * 1.5, 0.1)))
            return out

    us = []
    for pins in ([], ["1"], ["1", "2"], ["0", "1", "2"]):
        model = nn.Sequential(*(Block() for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with cm.attach(model, device="sim:rtx4090", hbm_budget=15_300_000, min_bytes=4096, never_recompute=pins) as handle:
            for _ in range(2):
                model(torch.randn(2048, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        us.append(handle.report().planned_step_us or 0)
    assert us == sorted(us)
    assert us[1] < 2 * us[0]  # one of four blocks


def test_pins_need_a_model() -> None:
    with pytest.raises(ValueError, match=r"keep: expected a session that knows its model; make it SwapSession\(model=model"):
        cm.SwapSession(device="sim", keep=["a"])
    cm.SwapSession(device="sim", keep=[], never_recompute=())


def test_a_callback_refuses_what_is_no_pin_as_it_is_made() -> None:
    with pytest.raises(TypeError, match="never_recompute: expected a list of patterns"):
        cm.integrations.transformers.SwapCallback(never_recompute="mlp")


SCRIPT = """
import json, weakref, torch
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)))
saved = {}
for name, module in model.named_modules():
    if name.endswith(".1"):
        module.register_forward_pre_hook(lambda _, x, name=name: saved.update({name: weakref.ref(x[0].untyped_storage())}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
there = []
for _ in range(4):
    loss = model(torch.randn(1024, 256)).square().mean()
    there.append([name for name, ref in saved.items() if (storage := ref()) is not None and storage.nbytes()])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(there))
"""


@pytest.mark.ci
def test_the_command_pins_by_patterns(tmp_path: Path) -> None:
    """What modules 1 and 3.1 save stays, and of the rest nothing is recomputed; without pins it leaves, or is recomputed."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    usual = ["--hbm-budget", "9MiB", "--min-bytes", "256KiB"]
    cases = {
        "pinned": [*usual, "--report", "pinned.json", "--keep", "1", "--keep", "3.?", "--never-recompute", "*", "script.py"],
        "loose": [*usual, "--report", "loose.json", "script.py"],
        "wrong": ["--keep", "1", "--never-recompute", "4.11", "script.py"],
        "misspelt": ["--keeps", "1", "script.py"],
    }
    ended = runs(cases, tmp_path, tmp_path / "notes")
    there, reports = {}, {}
    for name in ("pinned", "loose"):
        assert ended[name].code == 0, ended[name].err
        there[name], reports[name] = json.loads(ended[name].out), json.loads((tmp_path / f"{name}.json").read_text())
        assert reports[name]["bytes_swapped_out"] > 0
    assert all({"1.1", "3.1"} <= {*names} and len(names) < 6 for names in there["pinned"]), there
    assert not all({"1.1", "3.1"} <= {*names} for names in there["loose"]), there
    pins = reports["pinned"]["pins"]
    assert (pins["keep"], pins["never_recompute"]) == (["1", "3.?"], ["*"])
    assert pins["kept_bytes"] >= 2 << 20
    assert reports["pinned"]["recomputed"] == 0 < reports["loose"]["recomputed"]
    assert (ended["wrong"].code, ended["wrong"].out) == (1, "")
    assert (
        "never_recompute: expected a pin that names a module of the model, got '4.11', which names none" in ended["wrong"].err
    )
    assert "near names: 4.1\n" in ended["wrong"].err
    assert ended["misspelt"].code == 2
    assert "did you mean --keep?" in ended["misspelt"].err
