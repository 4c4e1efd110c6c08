"""`chameleon-mm bench training`: what each way of holding activations costs one model, in one process.

    for peer in (no swap, checkpointing, SwapSession, our save_on_cpu, torch's save_on_cpu):
        same seed; fresh model, AdamW, data
        WARMUP + steps optimizer steps, each between two timed events of the compute stream
    step time, ratio to no swap, peaks, and how many losses have the bits of the run without swapping

On a simulator the tensors are computed on the CPU, tiny, and times and peaks are simulated: they show how the peers order,
not what a GPU does.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from chameleon_mm.bench._llama import DTYPES, Shape, Stack
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, add_output_arguments
from chameleon_mm.bench._training_peers import Peer, peers
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.reproducible import reproducible
from chameleon_mm.errors import HostMemoryExhausted, InfeasibleBudget
from chameleon_mm.pinned.host_memory import available_host_bytes
from chameleon_mm.units import GIB

WARMUP_STEPS = 2
"""Steps of each peer that do not count: the first pins memory and makes the optimizer's state, the second follows a plan."""

TINY: dict[str, Any] = {"layers": 6, "width": 128, "heads": 4, "ffn": 448, "seq": 256, "batch": 8, "dtype": "float32"}
"""Small enough for a CPU, large enough that every activation is worth moving (1 MiB and more)."""
FILL: dict[str, Any] = {"width": 4096, "heads": 32, "ffn": 14336, "seq": 4096, "batch": 4, "dtype": "bfloat16"}
"""A block as in Llama 3 8B, without grouped heads; `fill_layers` says how many."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options on `parser`."""
    add_output_arguments(parser)
    parser.add_argument(
        "--size",
        choices=("tiny", "fill"),
        help="tiny: seconds on a CPU; fill: as many layers as the device and host memory allow (GPU only). "
        "Default: fill on a GPU, tiny on a simulator. The options below override single sizes",
    )
    for name, what in (
        ("layers", "blocks"), ("width", "residual stream"), ("heads", "attention heads"), ("ffn", "width inside SwiGLU"),
        ("seq", "tokens per row"), ("batch", "rows per step"),
    ):  # fmt: skip
        parser.add_argument(
            f"--{name}", type=int, metavar="N", help=f"{what} (tiny: {TINY[name]}, fill: {FILL.get(name, 'fitted')})"
        )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help=f"tiny: {TINY['dtype']}, fill: {FILL['dtype']}")
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help=f"timed steps per peer, after {WARMUP_STEPS} (default 4)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data (default 0)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run every peer, show the table, write it where `args` say. 1 if a peer of ours changed a loss, else 0.

    Raises `ValueError` for bad usage, before anything is trained.
    """
    if args.steps < 1:
        raise ValueError(f"--steps: expected 1 or more, got {args.steps}")
    device = resolve_device(args.device)
    shape = choose_shape(args, device)
    results = Results("training", device, _columns(device, WARMUP_STEPS + args.steps))
    results.notes.append(
        f"{shape.layers} blocks, width {shape.width}, {shape.heads} heads, ffn {shape.ffn}, {shape.batch} rows of {shape.seq} "
        f"tokens, {shape.dtype}, AdamW; seed {args.seed}; torch's deterministic kernels for every peer"
    )
    baseline: PeerRun | None = None
    failed = False
    for peer in peers(device):
        results.notes.append(f"{peer.name}: {peer.note}")
        with console.status(f"{peer.name} ..."):
            outcome = _attempt(peer, shape, args, baseline)
        baseline = baseline or (outcome if isinstance(outcome, PeerRun) else None)
        results.add(peer.name, {"peer": peer.key, **asdict(shape)}, _cells(outcome, baseline, device))
        if args.json:
            results.write_json(args.json)  # a later peer that runs out of time or memory must not take this one's row
        if peer.ours and isinstance(outcome, PeerRun) and baseline and _equal_losses(outcome, baseline) < len(baseline.losses):
            failed = True
            results.notes.append(f"FAILED: {peer.name} changed a loss")
        if baseline is None:  # nothing to compare the others with
            failed = True
            results.notes.append(f"FAILED: {peer.name} did not run, and every other figure is a ratio to it")
            break
    results.deliver(args, console)
    return int(failed)


def choose_shape(args: argparse.Namespace, device: Device) -> Shape:
    """The sizes that `args` and the kind of device give. Raises `ValueError` for `fill` on a simulator."""
    size = args.size or ("tiny" if device.simulated else "fill")
    if size == "fill" and device.simulated:
        raise ValueError("--size fill: expected a GPU, got a simulator, whose work the CPU does; use --size tiny")
    sizes = dict(TINY if size == "tiny" else FILL)
    sizes |= {name: given for name in TINY if (given := getattr(args, name)) is not None}
    if "layers" not in sizes:
        sizes["layers"] = fill_layers(Shape(layers=1, **sizes), device.capacity, available_host_bytes())
    return Shape(**sizes)


def fill_layers(block: Shape, capacity: int, host_bytes: int) -> int:
    """How many such blocks fill a device without failing any peer, at least 2.

    Device: layers * (state + saved) <= capacity / 2; the rest is for what backward and the optimizer need at their peak.
    Host: layers * saved <= host_bytes / 4, for torch's save_on_cpu rounds every block up to a power of two, copies some
    storages twice, and never gives back what it pinned, after ours has given back as much.
    """
    by_device = capacity // 2 // (block.layer_state_bytes + block.layer_saved_bytes)
    by_host = host_bytes // 4 // block.layer_saved_bytes
    return max(2, min(by_device, by_host))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """What one peer's run gave."""

    losses: Tensor
    """[warm-up and timed steps], float32 on the CPU."""
    step_us: tuple[float, ...]
    """Timed steps alone."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None


def run_peer(peer: Peer, shape: Shape, device: Device, *, steps: int, seed: int, hbm_budget: int) -> PeerRun:
    """Train `WARMUP_STEPS + steps` steps of a fresh model inside `peer`. Raises what the peer and the device raise."""
    gc.collect()  # a cycle of torch's keeps the last peer's optimizer and with it the model: not this peer's memory
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()  # else an earlier peer's cached blocks count as this one's reserved memory
    device.reset_peaks()
    with reproducible(), device.compute():
        torch.manual_seed(seed)
        model = Stack(shape, device=device.torch_device, checkpointed=peer.checkpointed)
        # fused: one kernel on every device. torch's default on a CPU is a dozen small ones per parameter, which no GPU runs.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses: list[Tensor] = []
        marks = [device.current_stream().record(timed=True)]
        with peer.over_run(device, model, hbm_budget) as around:
            for _ in range(WARMUP_STEPS + steps):
                with around.step():
                    x, target = (_noise(shape, device) for _ in range(2))
                    with around.forward():
                        loss = model.loss(x, target)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
                marks.append(device.current_stream().record(timed=True))
        marks[-1].synchronize()
    device.synchronize()
    return PeerRun(
        losses=torch.stack([loss.to("cpu", copy=True) for loss in losses]),
        step_us=tuple(end.elapsed_us(start) for start, end in pairwise(marks[WARMUP_STEPS:])),
        peak_allocated_bytes=device.peak_allocated_bytes(),
        peak_reserved_bytes=device.peak_reserved_bytes(),
    )


def _noise(shape: Shape, device: Device) -> Tensor:
    return torch.randn(shape.batch, shape.seq, shape.width, dtype=DTYPES[shape.dtype], device=device.torch_device)


def _attempt(peer: Peer, shape: Shape, args: argparse.Namespace, baseline: PeerRun | None) -> PeerRun | Waived:
    # A fresh device per peer: on the simulator its clock starts at nothing, on CUDA it is the same GPU again.
    device = resolve_device(args.device)
    hbm_budget = device.capacity if baseline is None else baseline.peak_allocated_bytes // 2
    try:
        return run_peer(peer, shape, device, steps=args.steps, seed=args.seed, hbm_budget=hbm_budget)
    except (torch.OutOfMemoryError, HostMemoryExhausted, InfeasibleBudget) as error:
        return Waived(str(error).splitlines()[0])


def _columns(device: Device, losses: int) -> tuple[Column, ...]:
    simulated = device.simulated
    return (
        Column(key="step_ms", title="step ms", formula="time between events around a step", simulated=simulated),
        Column(key="ratio", title="x no swap", formula="step / median step of no swap", simulated=simulated),
        Column(key="peak_allocated_gib", title="peak GiB", formula="most bytes in live tensors / 2**30", simulated=simulated),
        Column(key="peak_reserved_gib", title="reserved GiB", formula="most bytes reserved by the caching allocator / 2**30"),
        Column(
            key="equal_losses",
            title=f"same losses/{losses}",
            formula="steps, warm-up included, whose loss has the bits of no swap",
        ),
    )


def _cells(outcome: PeerRun | Waived, baseline: PeerRun | None, device: Device) -> dict[str, Cell]:
    if isinstance(outcome, Waived) or baseline is None:
        reason = outcome if isinstance(outcome, Waived) else Waived("no run to compare with")
        return {column.key: reason for column in _columns(device, 0)}
    base_us = Figure.of(baseline.step_us, "us", simulated=device.simulated).median
    figure = partial(Figure.of, simulated=device.simulated)
    reserved: Cell
    if outcome.peak_reserved_bytes is None:
        reserved = Waived("the simulator has no caching allocator: it reserves nothing beyond what is allocated")
    else:
        reserved = Figure.of([outcome.peak_reserved_bytes / GIB], "GiB", simulated=False)
    return {
        "step_ms": figure([us / 1e3 for us in outcome.step_us], "ms"),
        "ratio": figure([us / base_us for us in outcome.step_us], "x"),
        "peak_allocated_gib": figure([outcome.peak_allocated_bytes / GIB], "GiB"),
        "peak_reserved_gib": reserved,
        "equal_losses": Figure.of([_equal_losses(outcome, baseline)], f"of {len(baseline.losses)}", simulated=False),
    }


def _equal_losses(outcome: PeerRun, baseline: PeerRun) -> int:
    same = outcome.losses.view(torch.int32) == baseline.losses.view(torch.int32)
    return int(same.sum())
