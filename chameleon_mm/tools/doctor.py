"""Describe this machine: software, GPUs, link, memory limits, and missing parts with the command that adds them.

    for section, name, check in CHECKS: available, text = find(check)
    run(json_path, console)     # the same as a table, and as JSON if a path is given

A missing part is a row, never a crash.
"""

from __future__ import annotations

import json
import platform
import resource
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chameleon_mm import __version__
from chameleon_mm.device import native, present_device
from chameleon_mm.device.cuda import expandable_segments, visible_gpus
from chameleon_mm.files import write_file
from chameleon_mm.pool.host_memory import available_host_bytes, of_machine, pinnable_bytes
from chameleon_mm.swap.calibration import calibrate, keep
from chameleon_mm.tools.outputs import check_outputs, tell_written
from chameleon_mm.units import format_size

# --- The doctor's checks: versions, GPUs and their links, limits on pinned memory, and the link's rates
#
# CHECKS: (section, name, check). check(root) returns a text, or raises with the reason and the command that fixes it
#
# Versions are read without an import, because an installed CuPy may fail to import. Memory limits are the container's.

Check = Callable[[Path], str]
"""Check of one part of the machine. Its argument is the folder that contains `proc` and `sys`."""


class Unavailable(Exception):  # an answer among the doctor's findings, not an error
    """Raised by a check that found nothing, with the reason and the command that fixes it."""


def torch_version(root: Path) -> str:
    built_for = torch.version.cuda
    return f"{torch.__version__}, built {'without CUDA' if built_for is None else f'for CUDA {built_for}'}"


def installed(root: Path, *, distributions: tuple[str, ...]) -> str:
    """Version of the first of `distributions` that is installed; the first is the one to install."""
    for name in distributions:
        try:
            return f"{metadata.version(name)} ({name})"
        except metadata.PackageNotFoundError:
            continue
    raise Unavailable(f"not installed; pip install {distributions[0]}")


_ON_STAND_IN = "for each save that moves, {} for its use (on the CUDA stand-in, docs/measure.md)"
_WITHOUT = {
    "reclaim": "memory comes back at autograd's hooks, not inside of an allocation",
    "memory": "17 us more " + _ON_STAND_IN.format("18"),
    "notes": "14.5 us more for each operator of a step that recomputes (docs/using.md)",
    "loop": "19.8 us more " + _ON_STAND_IN.format("12.4"),
}
"""Cost of the lack of each helper."""


def helpers(root: Path) -> str:
    """Return the state of each C++ helper that this torch can use, and the cost of missing helpers."""
    found = {name: native.status(name) for name in native.useful()}
    rows = [f"{name}: {text}" + ("" if text == "active" else f"; without it: {_WITHOUT[name]}") for name, text in found.items()]
    if set(found.values()) - {"active"}:
        raise Unavailable("\n".join([*rows, "pip install 'chameleon-mm[native]', or build them: chameleon-mm native"]))
    return "\n".join(rows) or "none is of use with this torch"


def driver(root: Path) -> str:
    # "NVRM version: NVIDIA UNIX ... Kernel Module  580.159.03  Release Build ..."
    try:
        words = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").splitlines()[0].split()
    except OSError as error:
        raise Unavailable(f"/proc/driver/nvidia/version: {error.strerror}") from error
    return next(word for word in words if word[:1].isdigit() and "." in word)


def gpus(root: Path) -> str:
    found = visible_gpus()
    if not found and torch.version.cuda is None:
        raise Unavailable("torch is built without CUDA; pip install a build with CUDA, see pytorch.org/get-started")
    if not found:
        raise Unavailable("torch finds no GPU; nvidia-smi says whether the driver does")
    return "\n".join(found)


def segments(root: Path) -> str:
    """Return a text about expandable segments of torch's caching allocator. Raises `Unavailable` if they are off."""
    if not visible_gpus():
        raise Unavailable("no GPU")
    if not expandable_segments():
        raise Unavailable(
            "off: plans leave gaps between blocks, so more is reserved than allocated; before the program starts, "
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    return "on"


def memory(root: Path) -> str:
    """Host memory available, and the part that may be pinned by default: half of it, divided among the ranks here."""
    available, machine = available_host_bytes(root), max(of_machine(root), default=0)
    share = pinnable_bytes(available_bytes=available) // 2
    text = f"{format_size(available)}, of which {format_size(share)} may be pinned by default"
    if available < machine:
        text += f"; a control group leaves less than the {format_size(machine)} of the machine: raise its memory limit"
    return text


def memlock(root: Path) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "none" if soft == resource.RLIM_INFINITY else f"{format_size(soft)}; where pinning fails: ulimit -l unlimited"


def link_rates(root: Path) -> str:
    """Measure the link and store its rates, which sessions use first. Raises the errors of `calibrate`."""
    device = present_device()
    rates = calibrate(device)
    kept = "; kept for sessions" if keep(device, "link", rates) else "; not kept"
    told = ("h2d_gbps", "to the device"), ("d2h_gbps", "to the host"), ("duplex_gbps", "both ways at once")
    return f"{device.name}: " + ", ".join(f"{rates[name]:.1f} GB/s {way}" for name, way in told) + kept


CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("software", "python", lambda root: platform.python_version()),
    ("software", "system", lambda root: platform.platform()),
    ("software", "chameleon-mm", lambda root: __version__),
    ("software", "torch", torch_version),
    ("software", "triton", partial(installed, distributions=("triton",))),
    ("software", "cupy", partial(installed, distributions=("cupy-cuda13x", "cupy-cuda12x", "cupy"))),
    ("software", "C++ helpers", helpers),
    ("software", "NVIDIA driver", driver),
    ("gpu", "GPUs", gpus),
    ("gpu", "expandable segments", segments),
    ("host", "memory available", memory),
    ("host", "memlock limit", memlock),
    ("link", "rates", link_rates),
)


def find(check: Check, root: Path = Path("/")) -> tuple[bool, str]:
    """Run `check`. Returns True and its text, or, after any error, False and "unavailable: reason"."""
    try:
        return True, check(root)
    except Exception as error:  # noqa: BLE001  # any error: the other rows still matter
        return False, f"unavailable: {str(error) or type(error).__name__}"


def run(json_path: Path | None, console: Console) -> int:
    """Run all checks, show the results on `console`, and write them as JSON to `json_path` if given. Returns exit code 0, even
    if parts are missing. Starts CUDA if there is a GPU, and copies for less than a second.

    Raises `OSError` if the file cannot be written.
    """
    check_outputs({"--json": json_path})
    table = Table(title="What this machine offers", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column("section", style="bold", no_wrap=True)
    table.add_column("name", no_wrap=True)
    table.add_column("found", overflow="fold")
    sections: dict[str, dict[str, dict[str, object]]] = {}
    for section, name, check in CHECKS:
        available, text = find(check)
        # Text, not str: drivers answer "[N/A]", which rich would take for markup.
        table.add_row("" if section in sections else section, name, Text(text, style="" if available else "yellow"))
        sections.setdefault(section, {})[name] = {"available": available, "text": text}
    console.print(table)
    if json_path is not None:
        record = {"schema": "chameleon_mm.tools.doctor/3", "findings": sections}
        write_file(json_path, json.dumps(record, indent=2) + "\n")
        tell_written(console, json_path)
    return 0
