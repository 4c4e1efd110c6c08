"""The training benchmark: its model, its sizes, its peers, and the whole theme on the simulator."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chameleon_mm.bench import _training_peers, training
from chameleon_mm.bench._llama import Block, RMSNorm, Rope, Shape, Stack
from chameleon_mm.bench._training_peers import ModelledSaveOnCpu, Peer, peers
from chameleon_mm.bench.training import PeerRun, choose_shape, fill_layers, run_peer
from chameleon_mm.cli import main
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.units import GIB

CPU = torch.device("cpu")
SHAPE = Shape(layers=2, width=32, heads=4, ffn=96, seq=16, batch=2, dtype="float32")
SMALL = [
    "--device=sim", "--layers=3", "--width=64", "--heads=2", "--ffn=224", "--seq=64", "--batch=2", "--steps=1",
]  # fmt: skip


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    training.add_arguments(parser)
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


def test_checkpointing_changes_no_gradient() -> None:
    x = torch.randn(SHAPE.batch, SHAPE.seq, SHAPE.width)
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        stack = Stack(SHAPE, device=CPU, checkpointed=checkpointed)
        stack.loss(x, -x).backward()
        grads.append([p.grad for p in stack.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None and b is not None)
    assert None not in grads[0]


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "--layers"),
        ({"heads": 3}, "multiple of 2"),
        ({"width": 36}, "multiple of 2"),
        ({"dtype": "int8"}, "--dtype"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **change)


def test_fill_takes_what_the_scarcer_memory_allows() -> None:
    block = Shape(layers=1, **training.FILL)
    per_layer = block.layer_state_bytes + block.layer_saved_bytes
    assert fill_layers(block, capacity=2 * 7 * per_layer, host_bytes=1 << 50) == 7
    assert fill_layers(block, capacity=2 * 7 * per_layer - 1, host_bytes=1 << 50) == 6
    assert fill_layers(block, capacity=1 << 50, host_bytes=4 * 5 * block.layer_saved_bytes) == 5
    assert fill_layers(block, capacity=GIB, host_bytes=0) == 2


def test_a_simulator_is_tiny_unless_told_otherwise() -> None:
    sim = SimDevice()
    assert choose_shape(arguments(), sim) == Shape(**training.TINY)
    assert choose_shape(arguments("--layers", "2", "--seq", "32"), sim) == Shape(**{**training.TINY, "layers": 2, "seq": 32})
    with pytest.raises(ValueError, match="--size fill: expected a GPU"):
        choose_shape(arguments("--size", "fill"), sim)


# --- peers


def test_the_modelled_peer_copies_every_save_and_returns_its_bits(sim: SimDevice) -> None:
    pinned = 0
    alloc, free = sim.alloc_pinned, sim.free_pinned

    def counted_alloc(nbytes: int) -> Tensor:
        nonlocal pinned
        pinned += 1
        return alloc(nbytes)

    def counted_free(memory: Tensor) -> None:
        nonlocal pinned
        pinned -= 1
        free(memory)

    sim.alloc_pinned, sim.free_pinned = counted_alloc, counted_free  # type: ignore[method-assign]  # counts what it pins
    with sim.compute(), ModelledSaveOnCpu(sim) as stock:
        for attempt in range(2):
            x = torch.randn(64, 48, requires_grad=True)
            with stock.hooks():
                y = x.t().exp() * x.t()  # saves: the exponential's result, and both factors
            assert pinned == 3, f"attempt {attempt}: memory is reused from the second time on"
            y.sum().backward()
            expected = (x.detach().exp() * x.detach() + x.detach().exp()).clone()
            assert x.grad is not None
            torch.testing.assert_close(x.grad, expected)
    assert pinned == 0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
def test_the_modelled_peer_keeps_shape_dtype_and_bits(shape: tuple[int, ...], dtype: torch.dtype, sim: SimDevice) -> None:
    seen: list[Tensor] = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
            ctx.save_for_backward(kept)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            seen.append(ctx.saved_tensors[0].clone())
            return grads[0], None

    kept = (torch.randn(shape) * 3).to(dtype)
    with sim.compute(), ModelledSaveOnCpu(sim) as stock:
        with stock.hooks():
            y = Keep.apply(torch.ones(1, requires_grad=True), kept)  # type: ignore[no-untyped-call]  # torch annotates no `apply`
        y.sum().backward()
    assert seen[0].dtype == dtype
    assert seen[0].shape == kept.shape
    assert torch.equal(seen[0], kept)


def test_the_first_peer_is_the_one_to_compare_with_and_torchs_own_comes_last() -> None:
    keys = [peer.key for peer in peers(SimDevice())]
    assert keys[0] == "no_swap"
    assert keys[-1] == "torch_save_on_cpu_modelled"


@pytest.mark.parametrize("peer", peers(SimDevice()), ids=lambda peer: peer.key)
def test_a_peer_leaves_nothing_behind(peer: Peer, sim: SimDevice, no_gc: None) -> None:
    result = run_peer(peer, SHAPE, sim, steps=1, seed=0, hbm_budget=sim.capacity)
    assert len(result.losses) == training.WARMUP_STEPS + 1
    assert len(result.step_us) == 1
    assert result.peak_allocated_bytes > 0
    assert sim.allocated_bytes() == 0


# --- the theme


def test_the_theme_runs_on_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "training.json"
    assert main(["bench", "training", *SMALL, "--json", str(path)]) == 0
    assert "simulated H200" in capsys.readouterr().out
    data = json.loads(path.read_text())
    assert data["simulated"] is True
    assert data["theme"] == "training"
    cells = {row["peer"]: row["cells"] for row in data["rows"]}
    assert list(cells) == [peer.key for peer in peers(SimDevice())]
    for peer, row in cells.items():
        assert row["equal_losses"]["median"] == training.WARMUP_STEPS + 1, peer
        assert row["equal_losses"]["simulated"] is False
        assert row["step_ms"]["simulated"] is row["peak_allocated_gib"]["simulated"] is True
        assert "no caching allocator" in row["peak_reserved_gib"]["waived"]
    assert cells["no_swap"]["ratio"]["median"] == 1.0
    peak = {peer: row["peak_allocated_gib"]["median"] for peer, row in cells.items()}
    assert peak["checkpoint"] < peak["no_swap"]
    assert peak["torch_save_on_cpu_modelled"] < peak["no_swap"]


def test_the_session_holds_half_of_the_peak_and_nothing_is_free() -> None:
    sizes = {**training.TINY, "layers": 3}
    by_key = {peer.key: peer for peer in peers(SimDevice())}
    plain = run_peer(by_key["no_swap"], Shape(**sizes), SimDevice(), steps=1, seed=0, hbm_budget=0)
    half = plain.peak_allocated_bytes // 2
    swapped = run_peer(by_key["swap_session"], Shape(**sizes), SimDevice(), steps=1, seed=0, hbm_budget=half)
    assert swapped.peak_allocated_bytes <= half
    assert torch.equal(swapped.losses.view(torch.int32), plain.losses.view(torch.int32))
    assert swapped.step_us[0] >= plain.step_us[0]


def with_result(monkeypatch: pytest.MonkeyPatch, key: str, change: Any) -> None:
    """Replace what the peer `key` gives: an exception to raise, or a function of the run's result."""
    real = training.run_peer

    def fake(peer: Peer, *args: Any, **kwargs: Any) -> PeerRun:
        if peer.key == key and isinstance(change, Exception):
            raise change
        result = real(peer, *args, **kwargs)
        return change(result) if peer.key == key else result

    monkeypatch.setattr(training, "run_peer", fake)


@pytest.mark.parametrize("key", ["swap_session", "chameleon_save_on_cpu"])
def test_a_changed_loss_of_ours_fails_the_benchmark(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_result(monkeypatch, key, lambda r: dataclasses.replace(r, losses=r.losses * torch.tensor([1.0, 1.0, 1.0000001])))
    assert main(["bench", "training", *SMALL]) == 1
    assert "changed a loss" in capsys.readouterr().out


def test_a_changed_loss_of_others_is_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_result(monkeypatch, "checkpoint", lambda r: dataclasses.replace(r, losses=r.losses + 1))
    path = tmp_path / "t.json"
    assert main(["bench", "training", *SMALL, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["rows"][1]["cells"]["equal_losses"]["median"] == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), HostMemoryExhausted("no more to pin")])
def test_a_peer_that_does_not_fit_is_waived_with_its_reason(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_result(monkeypatch, "torch_save_on_cpu_modelled", error)
    path = tmp_path / "t.json"
    assert main(["bench", "training", *SMALL, "--json", str(path)]) == 0
    cells = json.loads(path.read_text())["rows"][-1]["cells"]
    assert all(str(error) in cell["waived"] for cell in cells.values())


def test_without_the_first_peer_there_is_nothing_to_compare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_result(monkeypatch, "no_swap", torch.OutOfMemoryError("out of memory"))
    assert main(["bench", "training", *SMALL]) == 1
    assert "every other figure is a ratio to it" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--steps", "0"], "--steps"),
        (["--heads", "5"], "multiple of"),
        (["--device", "marmot"], "marmot"),
        (["--size", "fill"], "GPU"),
    ],
)
def test_bad_usage_is_told_before_anything_is_trained(
    given: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_result(monkeypatch, "no_swap", AssertionError("trained in spite of bad usage"))
    assert main(["bench", "training", *SMALL, *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_torchs_own_peer_is_the_real_one_on_a_gpu() -> None:
    from chameleon_mm.device.cuda import CudaDevice

    device = CudaDevice()
    stock = peers(device)[-1]
    assert stock.key == "torch_save_on_cpu"
    assert stock.over_run is _training_peers._stock
    result = run_peer(stock, SHAPE, device, steps=1, seed=0, hbm_budget=device.capacity)
    plain = run_peer(peers(device)[0], SHAPE, device, steps=1, seed=0, hbm_budget=device.capacity)
    assert result.losses.shape == plain.losses.shape
    assert result.peak_reserved_bytes is not None
