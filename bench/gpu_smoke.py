"""The first minute on a new GPU: what it is, one copy each way, one training step with swapping and one without.

header (device, versions, commit, driver)  -> written at once, whatever happens next
copies: H2D and D2H of 64 MiB               -> the same bytes, GB/s
step:   a small MLP, SwapSession against none -> the same loss and gradients, bit for bit; something was swapped

python3 -m chameleon_mm.bench.gpu_smoke --json smoke.json
"""

from __future__ import annotations

import argparse
import gc
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._environment import write_record
from chameleon_mm.bench._measure import Figure, environment, interleave, timed_us
from chameleon_mm.bench._stand_in import NO_NVIDIA_SMI, NOT_MEASURED, computes_on_cpu, is_stand_in, withheld
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.session import SwapSession
from chameleon_mm.units import MIB, format_size

_COPY_BYTES = 64 * MIB
_CPU_COPY_BYTES = 1 * MIB
_GPU_STEP = {"width": 1024, "rows": 16384}
_CPU_STEP = {"width": 256, "rows": 1024}
_NVIDIA_SMI_FIELDS = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,pcie.link.gen.max"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if copies and step were exact, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python3 -m chameleon_mm.bench.gpu_smoke", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", type=Path, required=True, help="where the record goes")
    args = parser.parse_args(arguments)
    console = Console()
    try:
        device = resolve_device(args.device)
    except (RuntimeError, ValueError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    step = _CPU_STEP if computes_on_cpu(device) else _GPU_STEP
    record = smoke(device, args.json, **step)
    console.print_json(data=record)
    return 0 if record["exact"] else 1


def smoke(device: Device, path: Path, *, width: int, rows: int) -> dict[str, Any]:
    """Run both checks and keep `path` up to date. An exception of a check is its result."""
    gpu = NO_NVIDIA_SMI if is_stand_in(device.name) else nvidia_smi()
    record = environment("smoke", device) | {"gpu": gpu, "exact": False, "headline": "stopped before its end"}
    write_record(path, record)
    nbytes = _CPU_COPY_BYTES if computes_on_cpu(device) else _COPY_BYTES
    record["copies"] = _attempt(lambda: copy_each_way(device, nbytes))
    write_record(path, record)
    record["step"] = _attempt(lambda: swapped_step(device, width=width, rows=rows))
    record["exact"] = bool(record["copies"].get("exact") and record["step"].get("exact"))
    parts = ("copies", "step")
    record["headline"] = "; ".join(f"{part}: {record[part].get('error') or record[part]['headline']}" for part in parts)
    if is_stand_in(device.name):
        record["step"] = withheld(record["step"])
    write_record(path, record)
    return record


def copy_each_way(device: Device, nbytes: int) -> dict[str, Any]:
    """Whether a copy each way brings the same bytes, and its GB/s."""
    stream = device.new_stream("h2d")
    with Buffers(device) as buffers:
        there, back, hbm = buffers.pinned(nbytes), buffers.pinned(nbytes), buffers.on_device(nbytes)
        peers = {
            "h2d": lambda: nbytes / timed_us(stream, lambda: stream.copy(hbm, there)) / 1e3,
            "d2h": lambda: nbytes / timed_us(stream, lambda: stream.copy(back, hbm)) / 1e3,
        }
        samples = interleave(peers, warmup=1, repeats=5)
        stream.copy(back, hbm)
        device.synchronize()
        exact = torch.equal(there, back)
    if is_stand_in(device.name):
        verdict = "the same bytes came back" if exact else "the bytes came back different"
        return {"exact": exact, "headline": f"{verdict}, rates {NOT_MEASURED}", **dict.fromkeys(samples)}
    rates = {name: Figure.of(values, "GB/s", simulated=device.simulated) for name, values in samples.items()}
    text = ", ".join(f"{name.upper()} {rate} GB/s" for name, rate in rates.items())
    return {
        "exact": exact,
        "headline": text if exact else "the bytes came back different",
        **{name: rate.to_dict() for name, rate in rates.items()},
    }


def swapped_step(device: Device, *, width: int, rows: int) -> dict[str, Any]:
    """Whether a step under `SwapSession`, in half of the memory, gives the loss and gradients of a plain step, bit for bit."""
    plain, peak_bytes = _train(device, width, rows, lambda model, step: step())
    reports: list[dict[str, Any]] = []

    def with_session(model: nn.Module, step: Callable[[], None]) -> None:
        session = SwapSession(hbm_budget=peak_bytes // 2, device=device, model=model)
        with session, session.step():
            step()
        device.synchronize()  # a report never waits: it adds up the copies that are complete
        reports.append(session.report().to_dict())

    swapped, swapped_peak_bytes = _train(device, width, rows, with_session)
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(swapped, plain, strict=True))
    moved = reports[0]["bytes_swapped_out"]
    verdict = "bit-identical" if same else "NOT bit-identical"
    peaks = f"peak {format_size(peak_bytes)} -> {format_size(swapped_peak_bytes)}"
    return {
        "exact": same and moved > 0,
        "headline": f"{verdict}, {format_size(moved)} swapped out, {peaks}",
        "peak_bytes": peak_bytes,
        "swapped_peak_bytes": swapped_peak_bytes,
        "report": reports[0],
    }


def _train(
    device: Device, width: int, rows: int, around: Callable[[nn.Module, Callable[[], None]], None]
) -> tuple[list[Tensor], int]:
    """Loss and gradients of one step of an MLP from a fixed seed, and the peak bytes of that step."""
    outcome: list[Tensor] = []
    with device.compute():
        torch.manual_seed(0)
        blocks = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
        model = nn.Sequential(*blocks).to(device.torch_device)
        batch = torch.randn(rows, width, device=device.torch_device)
        device.synchronize()
        gc.collect()  # the other run's model may hang in a cycle, and would count as this run's memory
        device.reset_peaks()

        def step() -> None:
            loss = model(batch).square().mean()
            loss.backward()
            outcome.append(loss.detach())

        around(model, step)
        outcome += [p.grad for p in model.parameters() if p.grad is not None]
        device.synchronize()
        return [t.cpu() for t in outcome], device.peak_allocated_bytes()


def nvidia_smi() -> str:
    """Driver, memory and link as `nvidia-smi` reports them, or why it reports nothing."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return "nvidia-smi is not on the PATH"
    command = [path, f"--query-gpu={_NVIDIA_SMI_FIELDS}", "--format=csv"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi did not answer: {error}"
    return (done.stdout or done.stderr).strip()


def _attempt(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - what a check raises is its result; the other one still runs
        return {"exact": False, "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
