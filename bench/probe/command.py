"""What no source tells about a machine: questions put to its driver, its link and torch, each answered on its own.

for name, item in ITEMS: answers[name] = item()     # an exception becomes {"error": ...}; out of time {"waived": ...}
the record is rewritten after every answer

python3 -m chameleon_mm.bench.probe --json probe.json --item oom_retry
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from chameleon_mm.bench import codec, pack
from chameleon_mm.bench._codec_activations import Shape
from chameleon_mm.bench._environment import environment, write_record
from chameleon_mm.bench._stand_in import NOT_MEASURED, is_stand_in, withheld
from chameleon_mm.bench.pinned import command as pinned
from chameleon_mm.bench.probe import copies, costs, memory, pinning
from chameleon_mm.device import Device, resolve_device
from chameleon_mm.units import KIB, MIB

_CPU_PIN_BYTES = 16 * MIB

Item = Callable[[], dict[str, Any]]

ITEMS: Mapping[str, Item] = {
    "copies_by_engine": copies.by_engine,
    "copies_by_kernel": copies.by_kernel,
    "pack": lambda: _pack(resolve_device("cuda")),
    "codec": lambda: _codec(resolve_device("cuda")),
    "pinning": pinning.rates,
    "pools": lambda: _pools(resolve_device("cuda")),
    "pinning_beside_gemm": pinning.beside_gemm,
    "host_costs": costs.host_costs,
    "reclaim": memory.reclaim,
    "oom_retry": memory.oom_retry,
    "host_pointers": pinning.host_pointers,
}
"""Last what may leave the CUDA context broken: an access to host memory that the device cannot reach. `pack`, `codec` and
`pools` are the themes `pack`, `codec` and `pinned`, whole: in this record, as the files that one run may leave are taken."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every question was answered or waived, 1 if one raised or there is no CUDA device."""
    parser = argparse.ArgumentParser(prog="python3 -m chameleon_mm.bench.probe", description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, required=True, help="where the record goes")
    parser.add_argument("--seconds", type=float, default=90, metavar="N", help="start no item later (default: %(default)s)")
    parser.add_argument("--item", choices=sorted(ITEMS), action="append", help="only this one; may be repeated")
    args = parser.parse_args(arguments)
    console = Console()
    try:
        header = environment("probe", resolve_device("cuda"))
    except RuntimeError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    items = {name: item for name, item in ITEMS.items() if not args.item or name in args.item}
    if is_stand_in(header["device"]):
        items = {name: partial(_rehearsed, item) for name, item in items.items()}

    def keep(answers: Mapping[str, Any]) -> None:
        write_record(args.json, header | {"headline": headline(answers), "items": dict(answers)})

    answers = ask(items, args.seconds, keep)
    console.print_json(data=answers)
    console.print(headline(answers), markup=False)
    return 1 if any("error" in answer for answer in answers.values()) else 0


def _rehearsed(item: Item) -> dict[str, Any]:
    """The answer of the CUDA stand-in to `item`: that it ran, and what is neither a time nor a rate."""
    answer: dict[str, Any] = withheld(item())
    return answer if "waived" in answer else answer | {"figures": NOT_MEASURED}


def _pack(device: Device) -> dict[str, Any]:
    if not is_stand_in(device.name):
        return pack.measure(device, pack.cases(device)).to_dict()
    return pack.measure(device, pack.cases(device, (16 * KIB,)), repeats=1, counts=(16,)).to_dict()


def _codec(device: Device) -> dict[str, Any]:
    shape = Shape(layers=1, width=64, batch=2, steps=1) if is_stand_in(device.name) else None
    return codec.measure(device, shape).to_dict()


def _pools(device: Device) -> dict[str, Any]:
    if not is_stand_in(device.name):
        return pinned.measure(device).to_dict()
    return pinned.measure(device, traces=("moe",), live=(256,), nbytes=_CPU_PIN_BYTES, repeats=2).to_dict()


def ask(
    items: Mapping[str, Item],
    seconds: float,
    keep: Callable[[Mapping[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, dict[str, Any]]:
    """Ask `items` in turn; `keep` gets all answers so far after each. No item starts later than `seconds` from now."""
    start = clock()
    answers: dict[str, dict[str, Any]] = {}
    for name, item in items.items():
        began = clock()
        if began - start > seconds:
            answers[name] = {"waived": f"no time left: {began - start:.0f} of {seconds:.0f} s were over"}
        else:
            try:
                answers[name] = item()
            except Exception as error:  # noqa: BLE001 - what an item raises is its answer; the others are still asked
                where = traceback.format_exc(limit=-3)
                answers[name] = {"error": f"{type(error).__name__}: {error}", "where": where}
            answers[name]["took_s"] = round(clock() - began, 2)
        keep(answers)
    return answers


def headline(answers: Mapping[str, Mapping[str, Any]]) -> str:
    """How many questions were answered, and which were not."""
    broken = [name for name, answer in answers.items() if "error" in answer]
    waived = [name for name, answer in answers.items() if "waived" in answer]
    text = f"{len(answers) - len(broken) - len(waived)} of {len(answers)} answered"
    text += f"; errors: {', '.join(broken)}" if broken else ""
    return text + (f"; waived: {', '.join(waived)}" if waived else "")
