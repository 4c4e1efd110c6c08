"""`chameleon-mm bench training`: time and memory of each way of holding activations, for one model, in one process.

    small model: host time of a step without a session | in a session that has nothing to swap
    for peer in (no swap, checkpointing, SwapSession at three budgets with and without recomputation, and once without plans,
                 our save_on_cpu, torch's, TRL's and torchtune's where they are installed):
        run = run_peer(...)                      # same seed; fresh model, AdamW, data; warm-up, then timed steps
    peers:   step time, ratio to no swap, peaks, share of losses that have the bits of the run without swapping
    planned: step, peak, stall and recomputation as the plan predicts | as measured | error
    classes: bytes that the plan keeps, swaps, recomputes, holds
    bound:   T* | T* / step time of each session

The model is a small Llama, GPT-2, ViT, ResNet or video DiT (`--model`). `--compile` compiles its blocks, on CUDA.
On a simulator, tensors are tiny and computed on the CPU; times and peaks are simulated: they show the order of the peers, not a
GPU's figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from chameleon_mm.bench._compiled_rows import compiled_rows
from chameleon_mm.bench._environment import environment, write_record
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, columns
from chameleon_mm.bench._planned import Outcome, add_bound, add_classes, add_planned, bound_table, classes_table, planned_table
from chameleon_mm.bench._report import Bound, Report
from chameleon_mm.bench._small_step import small_step
from chameleon_mm.bench._training_models import Workload, backend_for, compiled
from chameleon_mm.bench._training_peers import SWAP_ONLY, Peer, compiled_peers, peers, session_key
from chameleon_mm.bench._training_run import PeerRun, run_peer, warmup_steps
from chameleon_mm.bench._training_sizes import choose_workload
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.device.sim.cost_model import CostModel
from chameleon_mm.errors import HostMemoryExhausted, InfeasibleBudget
from chameleon_mm.units import GIB

SMALL_REPEATS = 5
"""Number of samples of a small model's step for each way to run it."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Run every peer, print, and write the file asked for. Returns 1 if our peer changed a loss or the first did not run.

    Raises `ValueError` for bad usage, before anything is trained.
    """
    if args.steps < 1:
        raise ValueError(f"--steps: expected 1 or more, got {args.steps}")
    device = resolve_device(args.device)
    work = choose_workload(args, device)
    if args.compile and isinstance(device, SimDevice):
        compiled_rows(args, device, console).deliver(args, console)
        return 0
    comparison = Comparison(device, compiled(work, backend_for(device)) if args.compile else work, args)
    if not args.compile:
        with console.status("a small model ..."):
            comparison.watch_small_model()
    for peer in compiled_peers(device) if args.compile else peers(device):
        with console.status(f"{peer.name} ..."):
            comparison.run(peer)
        comparison.write()  # a later peer that runs out of time or memory must not take this one's row
        if comparison.baseline is None:  # nothing to compare the others with
            break
    report = comparison.report()
    report.deliver(args, console)
    return int(report.failed)


def fresh_device(name: str | None) -> Device:
    """Return a device for one peer: on the simulator a new one, whose clock starts at 0; on CUDA the same GPU again.

    The host of a simulated device takes no time. With operators as small as a CPU can compute, a GPU would wait for its host,
    which it does not with a model that fills it.
    """
    device = resolve_device(name)
    if not isinstance(device, SimDevice):
        return device
    free = ("launch", "view", "event", "copy", "triton_launch", "packed_tensor")
    host = CostModel(spec=device.spec, **{f"{name}_us": 0 for name in free})
    return SimDevice(device.spec, device.capacity, cost=host)


class Comparison:
    """Runs of a model on a device, by all peers so far."""

    def __init__(self, device: Device, work: Workload, args: argparse.Namespace) -> None:
        self.baseline: PeerRun | None = None
        """Run without swapping; None: it has not run yet, or did not fit."""
        self._device, self._work, self._args = device, work, args
        self._peers = Results("training", device, _columns(device))
        self._peers.notes.append(f"{work.about}, AdamW; seed {args.seed}; torch's deterministic kernels for every peer")
        if device.simulated:
            self._peers.notes.append("the simulated GPU's host takes no time: it would take more than kernels this small do")
        self._planned, self._classes, self._bound = planned_table(device), classes_table(device), bound_table(device)
        self._small: Results | None = None
        self._bounds: list[Bound] = []
        self._outcomes: dict[str, Outcome] = {}

    def watch_small_model(self) -> None:
        """Measure the host time that a session with nothing to swap adds to a small model's step."""
        self._small, bound = small_step(self._device, repeats=SMALL_REPEATS, seed=self._args.seed)
        self._bounds.append(bound)

    def run(self, peer: Peer) -> None:
        """Run `peer`, or add the reason why it did not run. The first peer is the reference of the others."""
        outcome = self._attempt(peer)
        first = not self._outcomes
        self._outcomes[peer.key] = outcome
        if first and isinstance(outcome, PeerRun):
            self.baseline = outcome
        baseline, warmup = self.baseline, warmup_steps(peer, self._device)
        self._peers.notes.append(f"{peer.name}: {peer.note}; {warmup} steps of warm-up")
        params = {"peer": peer.key, **self._work.params, "share": peer.share, "warmup_steps": warmup}
        self._peers.add(peer.name, params, _cells(outcome, baseline, self._device))
        if baseline is None:
            name = f"{peer.name} ran: the others are ratios to it"
            self._bounds.append(Bound(name=name, limit=1, found=0.0, at_most=False, counted=True))
            return
        if peer.ours:
            self._promise(peer, outcome, baseline)
        if peer.planned:
            add_planned(self._planned, peer.name, peer.key, outcome, baseline)
            add_classes(self._classes, peer.name, peer.key, outcome)
        if peer.way is not None and peer.share is not None:
            # A peer that keeps a budget without a plan has recorded no step: T* is of the swap-only peer with that budget.
            planned = outcome if peer.planned else self._outcomes[session_key(peer.share, SWAP_ONLY)]
            checkpointed = self._outcomes["checkpoint"]
            add_bound(self._bound, peer.name, peer.share, outcome, planned, checkpointed, baseline)

    def _promise(self, peer: Peer, outcome: Outcome, baseline: PeerRun) -> None:
        changed: float | Waived = outcome if isinstance(outcome, Waived) else _changed_losses(outcome, baseline)
        if not self._args.compile or peer.way == SWAP_ONLY:  # of another partition, a compiler may round otherwise
            self._bounds.append(Bound(name=f"{peer.name}: losses changed", limit=0, found=changed, counted=True))
        if peer.share is not None and peer.planned:
            peak = outcome if isinstance(outcome, Waived) else outcome.peak_allocated_bytes / baseline.budget_for(peer.share)
            name = f"{peer.name}: peak of the whole run / budget"
            self._bounds.append(Bound(name=name, limit=1, found=peak, on_stand_in=True))

    def report(self) -> Report:
        """Report of all runs so far."""
        tables = {
            "peers": self._peers,
            "planned against measured": self._planned,
            "classes": self._classes,
            "bound": self._bound,
        }
        if self._small is not None:
            tables["small model"] = self._small
        shown: Mapping[str, Results] = {name: table for name, table in tables.items() if table.rows}
        return Report(header=environment("training", self._device), tables=shown, bounds=self._bounds)

    def write(self) -> None:
        """Write the report so far, if a file was asked for."""
        if self._args.json:
            write_record(Path(self._args.json), self.report().to_dict())

    def _attempt(self, peer: Peer) -> Outcome:
        if (reason := peer.unavailable()) is not None:
            return Waived(reason)
        device = fresh_device(self._args.device)
        budget = device.capacity if self.baseline is None or peer.share is None else self.baseline.budget_for(peer.share)
        try:
            return run_peer(peer, self._work, device, steps=self._args.steps, seed=self._args.seed, hbm_budget=budget)
        except (torch.OutOfMemoryError, HostMemoryExhausted, InfeasibleBudget) as error:
            return Waived(str(error).splitlines()[0])


def _columns(device: Device) -> tuple[Column, ...]:
    times = {
        "step_ms": ("step ms", "time between events around a step"),
        "ratio": ("x no swap", "step / median step of no swap"),
    }
    peak = {"peak_allocated_gib": ("peak GiB", "most bytes in live tensors / 2**30")}
    counted = {
        "peak_reserved_gib": ("reserved GiB", "most bytes reserved by the caching allocator / 2**30"),
        "equal_losses": ("same losses", "share of the steps, warm-up included, whose loss has the bits of no swap"),
    }
    return (
        *columns(times, simulated=device.simulated),
        *columns(peak, simulated=device.simulated, on_stand_in=True),
        *columns(counted, on_stand_in=True),
    )


def _cells(outcome: Outcome, baseline: PeerRun | None, device: Device) -> dict[str, Cell]:
    if isinstance(outcome, Waived) or baseline is None:
        reason = outcome if isinstance(outcome, Waived) else Waived("no run to compare with")
        return {column.key: reason for column in _columns(device)}
    base_us = Figure.of(baseline.step_us, "us", simulated=device.simulated).median
    figure = partial(Figure.of, simulated=device.simulated)
    reserved: Cell
    if outcome.peak_reserved_bytes is None:
        reserved = Waived("the simulator has no caching allocator: it reserves nothing beyond what is allocated")
    else:
        reserved = Figure.of([outcome.peak_reserved_bytes / GIB], "GiB", simulated=False)
    same = 1 - _changed_losses(outcome, baseline) / len(outcome.losses)
    return {
        "step_ms": figure([us / 1e3 for us in outcome.step_us], "ms"),
        "ratio": figure([us / base_us for us in outcome.step_us], "x"),
        "peak_allocated_gib": figure([outcome.peak_allocated_bytes / GIB], "GiB"),
        "peak_reserved_gib": reserved,
        "equal_losses": Figure.of([same], "", simulated=False),
    }


def _changed_losses(outcome: PeerRun, baseline: PeerRun) -> int:
    """Number of losses whose bits differ from the baseline's, which has at least as many losses."""
    before = baseline.losses[: len(outcome.losses)]
    return int((outcome.losses.view(torch.int32) != before.view(torch.int32)).sum())
