"""The training benchmark: its model, its sizes, its peers, and the whole theme on the simulator."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chameleon_mm.api.session import SwapSession
from chameleon_mm.bench import _compiled_rows, _planned, _small_step, _training_peers, training
from chameleon_mm.bench._hooks_peers import IDENTITY
from chameleon_mm.bench._llama import Block, RMSNorm, Rope, Shape, Stack
from chameleon_mm.bench._measure import Figure, Waived
from chameleon_mm.bench._options import FILL, OPTIONS, TINY
from chameleon_mm.bench._small_step import NO_SESSION, SESSION, small_step
from chameleon_mm.bench._training_models import Checkpointed, Sizes, Workload, compiled, gpt2, llama, resnet, video_dit, vit
from chameleon_mm.bench._training_peers import PLANNED, ModelledSaveOnCpu, Peer, compiled_peers, peers
from chameleon_mm.bench._training_run import NO_PLAN, PeerRun, run_peer, warmup_steps
from chameleon_mm.bench._training_sizes import choose_shape, choose_workload, fill_layers
from chameleon_mm.bench.training import fresh_device
from chameleon_mm.device import SimDevice
from chameleon_mm.errors import HostMemoryExhausted, InfeasibleBudget
from chameleon_mm.tools.cli import main
from chameleon_mm.units import GIB
from tests._fakes import CountingDevice, UnsimulatedDevice
from tests._plain_training import image

CPU = torch.device("cpu")
SHAPE = Shape(layers=2, width=32, heads=4, ffn=96, seq=16, batch=2, dtype="float32")
SMALL = [
    "--device=sim", "--layers=2", "--width=64", "--heads=2", "--ffn=224", "--seq=64", "--batch=2", "--steps=1",
]  # fmt: skip
DEEP = ["--device=sim", "--layers=6", "--width=64", "--heads=1", "--ffn=128", "--seq=64", "--batch=64", "--steps=1"]
"""Every activation is worth moving, and a quarter of them is more than the bytes needed at once."""
PLANNING = [f"swap_session_{share}{way}" for share in ("half", "quarter", "eighth") for way in ("", "_swap_only")]
"""Keys of the sessions that plan."""
LIBRARIES = ("trl", "torchtune")
"""Keys of the peers whose code is another library's."""


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    OPTIONS["training"](parser)
    return parser.parse_args(given)


# --- model


def test_rms_norm_is_torchs_own() -> None:
    norm, x = RMSNorm(32), torch.randn(3, 32)
    nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), norm.weight, eps=norm.eps))


def test_rope_scores_depend_on_distance_alone() -> None:
    rope = Rope(seq=12, head_width=8)
    q, k = (torch.randn(8).expand(1, 1, 12, 8) for _ in range(2))
    scores = rope(q)[0, 0] @ rope(k)[0, 0].T
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rope(q).norm(dim=-1), q.norm(dim=-1))
    assert not torch.allclose(scores[0, 0], scores[0, 5])


def test_no_token_sees_a_later_one() -> None:
    stack = Stack(SHAPE, device=CPU)
    x = torch.randn(1, SHAPE.seq, SHAPE.width)
    later = x.clone()
    later[:, 10:] += 1
    with torch.no_grad():
        one, other = stack(x), stack(later)
    assert torch.equal(one[:, :10], other[:, :10])
    assert not torch.equal(one[:, 10:], other[:, 10:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bytes_of_a_block_are_what_the_formula_says(dtype: str) -> None:
    shape = Shape(layers=1, width=128, heads=4, ffn=448, seq=128, batch=2, dtype=dtype)
    block, rope = Stack(shape, device=CPU).blocks[0], Rope(shape.seq, 32).to(getattr(torch, dtype))
    assert isinstance(block, Block)
    own = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *rope.buffers())}
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # keeping it keeps the address its own
        return tensor

    x = torch.randn(shape.batch, shape.seq, shape.width, dtype=getattr(torch, dtype), requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(x, rope)
    total = sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in own)
    # On top of the formula's terms: one float per token and norm, and per token and head of attention.
    assert shape.layer_saved_bytes <= total <= 1.03 * shape.layer_saved_bytes
    state = 4 * sum(p.nbytes for p in block.parameters() if p.dim() > 1)
    assert shape.layer_state_bytes == state


# --- sizes


def test_fill_takes_what_the_scarcer_memory_allows() -> None:
    block = Shape(layers=1, **FILL)
    per_layer = block.layer_state_bytes + block.layer_saved_bytes
    assert fill_layers(block, capacity=2 * 7 * per_layer, host_bytes=1 << 50) == 7
    assert fill_layers(block, capacity=2 * 7 * per_layer - 1, host_bytes=1 << 50) == 6
    assert fill_layers(block, capacity=1 << 50, host_bytes=4 * 5 * block.layer_saved_bytes) == 5
    assert fill_layers(block, capacity=GIB, host_bytes=0) == 2


def test_a_simulator_is_tiny_unless_told_otherwise_and_its_host_costs_nothing() -> None:
    sim = SimDevice()
    assert choose_shape(arguments(), sim) == Shape(**TINY)
    assert choose_shape(arguments("--layers", "2", "--seq", "32"), sim) == Shape(**{**TINY, "layers": 2, "seq": 32})
    device = fresh_device("sim:a100")
    assert isinstance(device, SimDevice)
    assert (device.spec.name, device.host_us) == ("A100", 0.0)
    with device.compute():
        torch.ones(4) + torch.ones(4)
        device.current_stream().record(timed=True)
    assert device.host_us == 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("gpt2", "--ffn", "8"), "--ffn: expected none with --model gpt2"),
        (("resnet", "--heads", "2"), "--heads: expected none with --model resnet"),
        (("resnet", "--seq", "30"), "--seq: expected a multiple of 4 pixels"),
        (("video-dit", "--seq", "3"), "--seq: expected an even number of latents"),
        (("vit", "--seq", "30"), "--seq: expected a multiple of 16 pixels"),
        (("vit", "--heads", "3"), "multiple of heads"),
        (("gpt2", "--layers", "0"), "--layers"),
        (("llama", "--layers", "0"), "--layers"),
        (("llama", "--width", "32", "--heads", "3"), "multiple of 2"),
        (("llama", "--width", "36", "--heads", "4"), "multiple of 2"),
    ],
)
def test_sizes_that_a_model_cannot_have_are_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_workload(arguments("--model", *given), SimDevice())


# --- peers


def test_the_modelled_peer_copies_every_save_and_returns_its_bits() -> None:
    sim = CountingDevice()
    with sim.compute(), ModelledSaveOnCpu(sim) as stock:
        for attempt in range(2):
            x = torch.randn(64, 48, requires_grad=True)
            with stock.hooks():
                y = x.t().exp() * x.t()  # saves: the exponential's result, and both factors
            assert sim.num_pinned == 3, f"attempt {attempt}: memory is reused from the second time on"
            y.sum().backward()
            expected = (x.detach().exp() * x.detach() + x.detach().exp()).clone()
            assert x.grad is not None
            torch.testing.assert_close(x.grad, expected)
    assert not sim.chunks


QUICK = ("checkpoint", "swap_session_quarter")
PEERS = [
    pytest.param(peer, id=peer.key, marks=() if peer.key in QUICK else pytest.mark.slow)
    for peer in peers(SimDevice())
    if peer.key not in LIBRARIES
]


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_leaves_nothing_behind(peer: Peer, sim: SimDevice, no_gc: None) -> None:
    result = run_peer(peer, llama(SHAPE), sim, steps=1, seed=0, hbm_budget=sim.capacity)
    assert len(result.losses) == warmup_steps(peer, sim) + 1
    assert len(result.step_us) == 1
    assert result.peak_allocated_bytes >= result.steady_peak_bytes > result.kept_bytes > 0
    assert (result.followed is not None) == peer.planned
    if result.followed is not None:  # with recomputation some operators may run again, without none
        assert bool(result.followed.replayable) == (peer.way == PLANNED)
    assert sim.allocated_bytes() == 0


def test_a_budget_is_what_stays_and_a_share_of_what_comes_and_goes() -> None:
    run = PeerRun(
        losses=torch.zeros(1), step_us=(1.0,), peak_allocated_bytes=500, peak_reserved_bytes=None,
        steady_peak_bytes=300, kept_bytes=100,
    )  # fmt: skip
    assert (run.activation_bytes, run.budget_for(1 / 2), run.budget_for(1 / 4)) == (200, 200, 150)


# --- the theme


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The theme's, of a shape whose quarter is enough."""
    path = tmp_path_factory.mktemp("bench") / "training.json"
    assert main(["bench", "training", *DEEP, "--json", str(path)]) == 0
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@pytest.mark.ci
def test_every_peer_has_its_row(record: dict[str, Any]) -> None:
    assert (record["simulated"], record["theme"]) == (True, "training")
    cells = {row["peer"]: row["cells"] for row in record["tables"]["peers"]["rows"]}
    assert list(cells) == [peer.key for peer in peers(SimDevice())]
    for peer in LIBRARIES:
        assert all(cell["waived"].startswith("needs CUDA: ") for cell in cells.pop(peer).values())
    for peer in ("checkpoint_part_quarter", "checkpoint_selective_quarter"):  # one block alone takes as much
        assert "with every block checkpointed the step takes" in cells.pop(peer)["step_ms"]["waived"]
    for peer in PLANNING[4:]:  # an eighth of so few blocks is less than one of them needs at once
        assert {cell["waived"] for cell in cells.pop(peer).values()} == {NO_PLAN}
    for peer, row in cells.items():
        assert row["equal_losses"]["median"] == 1.0, peer
        assert row["equal_losses"]["simulated"] is False
        assert row["step_ms"]["simulated"] is row["peak_allocated_gib"]["simulated"] is True
        assert "no caching allocator" in row["peak_reserved_gib"]["waived"]
    assert cells["no_swap"]["ratio"]["median"] == 1.0
    peak = {peer: row["peak_allocated_gib"]["median"] for peer, row in cells.items()}
    assert peak["checkpoint"] < peak["no_swap"]
    assert peak["torch_save_on_cpu_modelled"] < peak["no_swap"]
    assert peak["swap_session_quarter"] < peak["swap_session_half"] < peak["no_swap"]
    step = {peer: row["ratio"]["median"] for peer, row in cells.items()}
    for share in ("half", "quarter"):
        assert step[f"swap_session_{share}"] < step["checkpoint"] < step[f"swap_session_{share}_swap_only"]
    budget = {row["name"]: row["cells"]["budget"]["median"] for row in record["tables"]["bound"]["rows"]}
    for peer in ("checkpoint_part_half", "checkpoint_selective_half"):
        assert peak["checkpoint"] < peak[peer] <= budget["half, planned"]
        assert step["swap_session_half"] < step[peer] < step["checkpoint"]
    changed = [bound for bound in record["bounds"] if bound["name"].endswith("losses changed")]
    assert len(changed) == sum(peer.ours for peer in peers(SimDevice()))
    assert all(bound["counted"] for bound in changed)
    assert sum(bound["held"] is True for bound in changed) == len(changed) - len(PLANNING[4:])


@pytest.mark.ci
def test_what_a_plan_foresaw_stands_beside_what_came(record: dict[str, Any]) -> None:
    table = record["tables"]["planned against measured"]
    rows = {(row["peer"], row["quantity"]): row["cells"] for row in table["rows"]}
    assert list(rows) == [(peer, quantity) for peer in PLANNING for quantity in _planned.QUANTITIES]
    for peer in PLANNING[:4]:
        step, peak, stall, again = (rows[peer, quantity] for quantity in _planned.QUANTITIES)
        assert abs(step["error"]["median"]) < 4
        assert step["measured"]["median"] / step["predicted"]["median"] == pytest.approx(1 + step["error"]["median"] / 100)
        assert peak["measured"]["median"] == pytest.approx(peak["predicted"]["median"], rel=1e-2)  # the losses are kept
        assert step["predicted"]["simulated"] is True
        swap_only = peer.endswith("swap_only")
        assert (again["predicted"]["median"] == 0) == swap_only
        assert abs(again["error"]["median"]) < 4
        assert stall["measured"]["median"] >= 0
    assert not any("NOT steady" in note for note in table["notes"])


@pytest.mark.ci
def test_the_four_classes_are_the_plans_and_what_was_done(record: dict[str, Any]) -> None:
    rows = {row["peer"]: row["cells"] for row in record["tables"]["classes"]["rows"]}
    assert list(rows) == PLANNING
    for peer in PLANNING[:4]:
        gib = {key: cell["median"] for key, cell in rows[peer].items()}
        assert gib["out"] == pytest.approx(gib["swapped"], rel=0.05), peer
        assert gib["dropped"] == pytest.approx(gib["recomputed"], rel=0.05), peer
        assert (gib["recomputed"] == gib["held"] == 0) == peer.endswith("swap_only")
        assert gib["kept"] > 0
        assert rows[peer]["kept"]["simulated"] is True
        assert rows[peer]["out"]["simulated"] is False
    assert rows["swap_session_half"]["swapped"]["median"] < rows["swap_session_half_swap_only"]["swapped"]["median"]


@pytest.mark.ci
def test_nothing_beats_the_bound_and_plans_come_nearer_to_it(record: dict[str, Any]) -> None:
    rows = {row["name"]: row["cells"] for row in record["tables"]["bound"]["rows"]}
    assert len(rows) == len(PLANNING) + 1
    reached = {name: cells["reached"]["median"] for name, cells in rows.items() if "median" in cells["reached"]}
    assert {"half, planned", "half, swap only", "quarter, planned", "quarter, swap only"} <= set(reached)
    assert all(share <= 1.001 for share in reached.values())
    assert reached["quarter, unplanned"] <= reached["quarter, swap only"]
    for share in ("half", "quarter"):  # a plan that may also recompute has the lower bound
        assert rows[f"{share}, planned"]["ideal"]["median"] < rows[f"{share}, swap only"]["ideal"]["median"]
    assert rows["quarter, unplanned"]["budget"]["median"] == rows["quarter, planned"]["budget"]["median"]


def test_a_small_models_step_is_compared_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {
        NO_SESSION: [1000.0, 4000.0, 1000.0],
        IDENTITY: [1010.0, 4040.0, 1200.0],
        SESSION: [1020.0, 4400.0, 1010.0],
    }
    monkeypatch.setattr(_small_step, "interleave", lambda ways, *, repeats: taken)
    table, bound = small_step(UnsimulatedDevice(), repeats=3, seed=0)
    assert bound.found == pytest.approx(1.02)
    assert bound.held
    assert isinstance(table.rows[0].cells["ratio"], Waived)
    hooks = table.rows[1].cells["ratio"]
    assert isinstance(hooks, Figure)
    assert hooks.median == pytest.approx(1.01)


def test_a_small_models_steps_have_nothing_to_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[SwapSession] = []

    def make(**given: Any) -> SwapSession:
        sessions.append(SwapSession(**given))
        return sessions[-1]

    monkeypatch.setattr(_small_step, "SwapSession", make)
    monkeypatch.setattr(_small_step, "TIMED_STEPS", 16)
    _, bound = small_step(UnsimulatedDevice(), repeats=1, seed=0)
    report = sessions[0].report()
    assert (report.bytes_swapped_out, report.steps_by_phase["recorded"]) == (0, 1)
    assert report.steps_by_phase["planned"] >= 16
    assert report.steps == _small_step.WARMUP_STEPS + _small_step.TIMED_STEPS
    assert isinstance(bound.found, float)
    assert small_step(SimDevice(), repeats=1, seed=0)[1].held is None


def only(monkeypatch: pytest.MonkeyPatch, *keys: str) -> None:
    """Run these peers alone, after those that they are compared with."""
    needed = {"no_swap", "checkpoint", *keys}
    needed |= {"swap_session_quarter_swap_only"} & {key.replace("unplanned", "swap_only") for key in keys}
    monkeypatch.setattr(training, "peers", lambda device: tuple(peer for peer in peers(device) if peer.key in needed))


def with_result(monkeypatch: pytest.MonkeyPatch, key: str, change: Any) -> None:
    """Replace the result of the peer `key` by an exception to raise, or by a function of the run's result."""
    real = run_peer

    def fake(peer: Peer, *args: Any, **kwargs: Any) -> PeerRun:
        if peer.key == key and isinstance(change, Exception):
            raise change
        result = real(peer, *args, **kwargs)
        return change(result) if peer.key == key else result

    monkeypatch.setattr(training, "run_peer", fake)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("key", "shape"),
    [("swap_session_half", DEEP), ("swap_session_quarter_unplanned", SMALL), ("chameleon_save_on_cpu", SMALL)],
)
def test_a_changed_loss_of_ours_fails_the_benchmark(
    key: str, shape: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_bit_off(run: PeerRun) -> PeerRun:
        losses = run.losses.clone()
        losses.view(torch.int32)[-1] ^= 1
        return dataclasses.replace(run, losses=losses)

    only(monkeypatch, key)
    with_result(monkeypatch, key, one_bit_off)
    assert main(["bench", "training", *shape]) == 1
    assert "losses changed: 1, at most 0" in " ".join(capsys.readouterr().out.split())


def test_a_changed_loss_of_others_is_a_figure_and_without_the_first_peer_there_is_nothing_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch)
    with_result(monkeypatch, "checkpoint", lambda r: dataclasses.replace(r, losses=r.losses + 1))
    path = tmp_path / "t.json"
    assert main(["bench", "training", *SMALL, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["tables"]["peers"]["rows"][1]["cells"]["equal_losses"]["median"] == 0
    with_result(monkeypatch, "no_swap", torch.OutOfMemoryError("out of memory"))
    assert main(["bench", "training", *SMALL]) == 1
    assert "the others are ratios to it" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("key", "error", "tables"),
    [
        ("torch_save_on_cpu_modelled", torch.OutOfMemoryError("out of memory"), ("peers",)),
        ("torch_save_on_cpu_modelled", HostMemoryExhausted("no more to pin"), ("peers",)),
        ("swap_session_eighth", InfeasibleBudget("no session"), ("peers", "planned against measured", "classes", "bound")),
    ],
)
def test_a_peer_that_does_not_fit_is_waived_with_its_reason(
    key: str, error: Exception, tables: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, key)
    with_result(monkeypatch, key, error)
    path = tmp_path / "t.json"
    assert main(["bench", "training", *SMALL, "--json", str(path)]) == 0
    written = json.loads(path.read_text())["tables"]
    for table in tables:
        cells = {name: cell for name, cell in written[table]["rows"][-1]["cells"].items() if name != "budget"}
        assert cells and all(str(error) in cell["waived"] for cell in cells.values()), table


@pytest.mark.gpu
def test_torchs_own_peer_is_the_real_one_on_a_gpu() -> None:
    from chameleon_mm.device.cuda import CudaDevice

    device = CudaDevice()
    stock = next(peer for peer in peers(device) if peer.key == "torch_save_on_cpu")
    assert stock.over_run is _training_peers._stock
    result = run_peer(stock, llama(SHAPE), device, steps=1, seed=0, hbm_budget=device.capacity)
    assert len(result.losses) == warmup_steps(stock, device) + 1  # fewer than the peer that all are compared with makes
    assert result.peak_reserved_bytes is not None


@pytest.mark.gpu
@pytest.mark.parametrize("key", LIBRARIES)
def test_other_libraries_offload_by_their_own_code_on_a_gpu(key: str) -> None:
    from chameleon_mm.device.cuda import CudaDevice

    device = CudaDevice()
    by_key = {peer.key: peer for peer in peers(device)}
    if (reason := by_key[key].unavailable()) is not None:
        pytest.skip(reason)
    shape = dataclasses.replace(SHAPE, layers=4, seq=64)
    plain, theirs = (
        run_peer(by_key[key], llama(shape), device, steps=1, seed=0, hbm_budget=device.capacity) for key in ("no_swap", key)
    )
    assert torch.equal(plain.losses[: len(theirs.losses)].view(torch.int32), theirs.losses.view(torch.int32))
    assert theirs.activation_bytes < 0.7 * plain.activation_bytes


@pytest.mark.gpu
@pytest.mark.slow
def test_compiled_blocks_train_by_each_way_on_a_gpu() -> None:
    from chameleon_mm.device.cuda import CudaDevice

    device, work = CudaDevice(), compiled(llama(dataclasses.replace(SHAPE, layers=8, width=64, seq=32, batch=128)), "aot_eager")
    first, _, half_saved, inputs_alone, *sessions = compiled_peers(device)
    plain = run_peer(first, work, device, steps=1, seed=0, hbm_budget=device.capacity)
    budgeted = [run_peer(peer, work, device, steps=1, seed=0, hbm_budget=0) for peer in (half_saved, inputs_alone)]
    assert plain.activation_bytes > budgeted[0].activation_bytes > budgeted[1].activation_bytes
    for peer in sessions[:2]:
        assert peer.share == 1 / 2
        ours = run_peer(peer, work, device, steps=1, seed=0, hbm_budget=plain.budget_for(peer.share))
        assert torch.equal(plain.losses.view(torch.int32), ours.losses.view(torch.int32))
        assert ours.peak_allocated_bytes <= plain.budget_for(peer.share)


@pytest.mark.parametrize("key", LIBRARIES)
def test_a_library_that_is_missing_is_one_line_that_names_its_extra(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(module: str) -> None:
        raise ImportError(f"\n    No module named {module!r}\n    see the page\n")

    monkeypatch.setattr(_training_peers, "import_module", absent)
    reason = next(peer.unavailable() for peer in peers(UnsimulatedDevice()) if peer.key == key)
    assert reason is not None and "\n" not in reason
    assert f"pip install 'chameleon-mm[{key}]' (No module named" in reason
    assert f"\n{key} = [" in (Path(__file__).parents[1] / "pyproject.toml").read_text()


# --- the other families: checkpointed and not the same bits, and sessions that train them


SIZES = Sizes(layers=2, width=32, heads=2, seq=32, batch=2, dtype="float32")
OTHERS = {
    "gpt2": gpt2(SIZES),
    "vit": vit(SIZES),
    "resnet": resnet(dataclasses.replace(SIZES, width=8, heads=1)),
    "video-dit": video_dit(dataclasses.replace(SIZES, seq=4)),
}
FAMILIES = {"llama": llama(Shape(layers=2, width=32, heads=2, ffn=48, seq=16, batch=2, dtype="float32")), **OTHERS}


def trained(work: Workload, *, checkpointed: bool) -> tuple[nn.Module, Tensor]:
    """A model after one backward, and its loss."""
    torch.manual_seed(0)
    model, loss_of = work.make(CPU, checkpointed)
    loss = loss_of(*work.batch(CPU))
    loss.backward()
    return model, loss.detach()


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointing_changes_no_bit_and_is_of_every_block_or_none(name: str) -> None:
    (plain, loss), (again, same) = (trained(FAMILIES[name], checkpointed=way) for way in (False, True))
    assert torch.equal(loss, same)
    assert loss.isfinite()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    if name in OTHERS:
        wrapped = [sum(isinstance(module, Checkpointed) for module in model.modules()) for model in (plain, again)]
        assert wrapped == [0, 6 if name == "resnet" else 2]


def test_a_session_trains_a_video_model_with_plain_pytorchs_bits(sim: SimDevice) -> None:
    """The other families are trained in `test_plain_models.py`."""
    work = FAMILIES["video-dit"]

    def train(session: Callable[[nn.Module], SwapSession] | None) -> tuple[list[Any], SwapSession | None]:
        torch.manual_seed(0)
        model, loss_of = work.make(CPU, False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        seen, entered = [], None if session is None else session(model)
        with entered or nullcontext():
            for _ in range(5):
                with entered.step() if entered is not None else nullcontext():
                    loss = loss_of(*work.batch(CPU))
                    loss.backward()
                    seen += [image(loss), *(image(p.grad) for p in model.parameters() if p.grad is not None)]
                    optimizer.step()
                    optimizer.zero_grad()
        return [*seen, *map(image, [*model.state_dict().values(), torch.get_rng_state()])], entered

    with sim.compute():
        roomy = train(lambda model: SwapSession(sim.capacity, device=sim, model=model, min_bytes=1024))[1]
        assert roomy is not None
        peak = max(step.peak_hbm_bytes for step in roomy.report().step_figures[2:])
        sim.reset_peaks()
    expected, _ = train(None)
    with sim.compute():
        seen, session = train(lambda model: SwapSession(int(0.85 * peak), device=sim, model=model, min_bytes=1024))
    assert session is not None
    report = session.report()
    assert seen == expected
    assert report.bytes_swapped_out + report.bytes_recomputed > 0
    assert report.plan_cache_hits > 0
    assert max(step.peak_hbm_bytes for step in report.step_figures) <= report.hbm_budget_bytes


def test_compiled_blocks_are_predicted_by_each_way_within_each_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_compiled_rows, "PARTITIONS", (1.0, 0.5))
    path, sizes = tmp_path / "compiled.json", ["--batch", "2", "--seq", "1024", "--layers", "2"]
    assert main(["bench", "training", "--device", "sim:h100", "--compile", *sizes, "--json", str(path)]) == 0
    by_budget: dict[int, dict[str, dict[str, Any]]] = {}
    for row in json.loads(path.read_text())["rows"]:
        by_budget.setdefault(row["budget_bytes"], {})[row["way"]] = row["cells"]
    assert len(by_budget) == 3
    for budget, ways in by_budget.items():
        assert list(ways) == list(_compiled_rows._NAMES)
        assert ways["no swapping"]["ratio"]["median"] == 1
        ours = ways["this plan"]
        assert ours["peak_gib"]["median"] * GIB <= budget
        others = [ways[name]["step_ms"] for name in ("torch's partition", "memory budget")]
        assert all("median" not in one or ours["step_ms"]["median"] <= one["median"] for one in others)
