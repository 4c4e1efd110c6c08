"""`chameleon-mm bench codec`: what the lossless codecs make of what a model really saves, and how fast their kernels are.

    found:    by source, dtype and codec       -> share of tensors that are exact, ratio, exceptions of pack12
    rates:    each codec's kernels             -> GB/s of raw bytes, each way; on a GPU alone
    bounds:   exact wherever the status says so; at least 1.5 TB/s

    chameleon-mm bench codec --json codec.json

Shares and ratios are counted by the codecs' torch references and are the same on any device; nothing is simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch import Tensor

from chameleon_mm.bench._codec_activations import Saved, Shape, Source, sources
from chameleon_mm.bench._measure import (
    Cell,
    Column,
    Figure,
    Results,
    Waived,
    add_output_arguments,
    environment,
    interleave,
    timed_us,
)
from chameleon_mm.bench._report import Bound, Report, median_of
from chameleon_mm.bench._stand_in import NO_TRITON, is_stand_in
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.units import MIB

if TYPE_CHECKING:
    from chameleon_mm.kernels.codec import Codec

MIN_GBPS = 1500.0

_RATE_BYTES = 512 * MIB  # ten times the caches of a large GPU
_LIMIT_S = 2.0
_EXCEPTION_CODE = 15  # of pack12
_CODES_BEGIN = 32  # in a record of pack12: two codes a byte from here on

_FOUND = (
    Column(key="tensors", title="tensors", formula="storages of this dtype, parameters left out", on_stand_in=True),
    Column(key="exact", title="exact", formula="share of them for which the status said so", on_stand_in=True),
    Column(key="exact_bytes", title="of bytes", formula="the same, by bytes", on_stand_in=True),
    Column(key="ratio", title="ratio", formula="raw bytes / encoded bytes, of those that are exact", on_stand_in=True),
    Column(
        key="odd",
        title="exceptions",
        formula="share of the numbers in whole blocks that pack12 codes as exceptions",
        on_stand_in=True,
    ),
)
_RATES = (
    Column(key="encode", title="encode GB/s", formula="raw bytes / time between two events around the kernel / 1e9"),
    Column(key="decode", title="decode GB/s", formula="the same of the inverse"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One codec on one tensor."""

    raw_bytes: int
    encoded_bytes: int
    is_exact: bool
    """By its status word."""
    is_wrong: bool
    """Exact by its status word, and decoded to other bytes."""
    numbers: int = 0
    exceptions: int = 0
    """Of pack12: numbers in whole blocks, and how many of those are coded as exceptions."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the options of `chameleon-mm bench codec`."""
    add_output_arguments(parser)
    parser.add_argument(
        "--steps", type=int, default=Shape().steps, metavar="N", help="the model is trained for before (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="samples of each rate (default: %(default)s)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, write what was asked for. Returns 1 if a codec changed a bit that it called exact, else 0."""
    if args.steps < 0 or args.repeats < 1:
        raise ValueError(f"expected --steps >= 0 and --repeats >= 1, got {args.steps} and {args.repeats}")
    device = resolve_device(args.device)
    with console.status("measuring ..."):
        report = measure(device, Shape(steps=args.steps), repeats=args.repeats)
    report.deliver(args, console)
    return int(report.failed)


def measure(device: Device, shape: Shape | None = None, *, repeats: int = 9) -> Report:
    """Both tables, and the bounds on them."""
    from chameleon_mm.kernels.codecs import CODECS

    material = sources(device.torch_device, shape)
    found, wrong = count(device, material, CODECS)
    rates = _rates(device, material, CODECS, repeats)
    bounds = [Bound(name="exact tensors that decoded to other bits", limit=0, found=float(wrong), counted=True)]
    for row in rates.rows:
        for way in ("encode", "decode"):
            name = f"{row.name}, {way}"
            found_gbps = median_of(row.cells[way])
            bounds.append(Bound(name=name, limit=MIN_GBPS, unit="GB/s", found=found_gbps, at_most=False))
    return Report(header=environment("codec", device), tables={"found": found, "rates": rates}, bounds=bounds)


def count(device: Device, material: Iterable[Source], codecs: Sequence[Codec]) -> tuple[Results, int]:
    """A row for each source, dtype and codec for it; and how many exact tensors decoded to other bits."""
    results = Results("codec, on what is saved", device, _FOUND)
    results.notes.append("counted by the torch references: the same on any device")
    wrong = 0
    for source in material:
        for dtype in dict.fromkeys(saved.dtype for saved in source.tensors):
            of_dtype = [saved for saved in source.tensors if saved.dtype is dtype]
            fitting = [codec for codec in codecs if codec.applies_to(dtype)]
            for codec in fitting:
                outcomes = [tried(codec, saved) for saved in of_dtype]
                wrong += sum(outcome.is_wrong for outcome in outcomes)
                params = {"source": source.name, "dtype": str(dtype), "codec": codec.name}
                results.add(f"{source.name}: {codec.name}", params, _found(outcomes))
    return results, wrong


def tried(codec: Codec, saved: Saved) -> Outcome:
    """Encode by the reference, and decode where the status says exact."""
    raw = saved.raw
    encoded = torch.empty(codec.encoded_bytes(raw.numel()), dtype=torch.uint8, device=raw.device)
    status = torch.zeros(1, dtype=torch.int32, device=raw.device)
    codec.encode_reference(raw, encoded, status)
    is_exact = int(status) == 0
    is_wrong = False
    if is_exact:
        back = torch.empty_like(raw)
        codec.decode_reference(encoded, back)
        is_wrong = not torch.equal(back, raw)
    numbers, exceptions = _exceptions(encoded, raw.numel()) if codec.name == "pack12" else (0, 0)
    return Outcome(
        raw_bytes=raw.numel(), encoded_bytes=encoded.numel(), is_exact=is_exact, is_wrong=is_wrong,
        numbers=numbers, exceptions=exceptions,
    )  # fmt: skip


def _exceptions(encoded: Tensor, raw_bytes: int) -> tuple[int, int]:
    # From the codes, which the reference writes right also where it refuses; a record's own count has one byte.
    from chameleon_mm.kernels.codec_pack12 import BLOCK_ELEMENTS, RECORD_BYTES

    blocks = raw_bytes // (2 * BLOCK_ELEMENTS)
    records = encoded[: blocks * RECORD_BYTES].view(blocks, RECORD_BYTES)
    codes = records[:, _CODES_BEGIN : _CODES_BEGIN + BLOCK_ELEMENTS // 2]
    odd = (codes & 15 == _EXCEPTION_CODE).sum() + (codes >> 4 == _EXCEPTION_CODE).sum()
    return blocks * BLOCK_ELEMENTS, int(odd)


def _found(outcomes: Sequence[Outcome]) -> Mapping[str, Cell]:
    exact = [outcome for outcome in outcomes if outcome.is_exact]
    raw, encoded = sum(outcome.raw_bytes for outcome in exact), sum(outcome.encoded_bytes for outcome in exact)
    all_bytes, numbers = sum(outcome.raw_bytes for outcome in outcomes), sum(outcome.numbers for outcome in outcomes)
    odd = sum(outcome.exceptions for outcome in outcomes)
    return {
        "tensors": _one(len(outcomes)),
        "exact": _one(len(exact) / len(outcomes)),
        "exact_bytes": _one(raw / all_bytes),
        "ratio": _one(raw / encoded) if exact else Waived("no tensor is of this codec's kind: all cross raw"),
        "odd": _one(odd / numbers) if numbers else Waived("pack12 alone has exceptions, and whole blocks alone have a code"),
    }


def _one(value: float) -> Figure:
    return Figure.of([value], "1", simulated=False)


def _rates(device: Device, material: Sequence[Source], codecs: Sequence[Codec], repeats: int) -> Results:
    """GB/s of each codec on tensors that it holds, repeated up to a size that no cache does."""
    results = Results("codec, rates", device, _RATES)
    for codec in codecs:
        cells: Mapping[str, Cell]
        saved = largest_exact(codec, material)
        if device.simulated:
            cells = dict.fromkeys(("encode", "decode"), Waived(f"kernels run on a CUDA GPU alone; this is a {device.name}"))
        elif is_stand_in(device.name):
            cells = dict.fromkeys(("encode", "decode"), Waived(NO_TRITON))
        elif saved is None:
            cells = dict.fromkeys(("encode", "decode"), Waived("no tensor here is of this codec's kind"))
        else:
            cells = _rate(device, codec, saved.raw, repeats)
        results.add(codec.name, {"codec": codec.name, "bytes": _RATE_BYTES}, cells)
    return results


def largest_exact(codec: Codec, material: Iterable[Source]) -> Saved | None:
    """The largest tensor that `codec` holds; None where there is none."""
    fitting = [saved for source in material for saved in source.tensors if codec.applies_to(saved.dtype)]
    by_size = sorted(fitting, key=lambda saved: -saved.raw.numel())
    return next((saved for saved in by_size if tried(codec, saved).is_exact), None)


def _rate(device: Device, codec: Codec, sample: Tensor, repeats: int) -> dict[str, Cell]:
    """On a GPU: the kernels as the device launches them."""
    compute = device.current_stream()
    raw = sample.repeat(max(1, _RATE_BYTES // sample.numel()))
    encoded = torch.empty(codec.encoded_bytes(raw.numel()), dtype=torch.uint8, device=raw.device)
    status = torch.zeros(1, dtype=torch.int32, device=raw.device)
    back = torch.empty_like(raw)
    works: dict[str, Callable[[], None]] = {
        "encode": partial(compute.encode, codec, raw, encoded, status),
        "decode": partial(compute.decode, codec, encoded, back),
    }
    works["encode"]()
    works["decode"]()
    if int(status) != 0 or not torch.equal(back, raw):  # a rate of a wrong copy is no rate
        return dict.fromkeys(works, Waived("the kernel did not give the bytes back"))

    def gbps(work: Callable[[], None]) -> float:
        return raw.numel() / timed_us(compute, work) / 1e3

    samples = interleave({way: partial(gbps, work) for way, work in works.items()}, repeats=repeats, limit_s=_LIMIT_S)
    return {way: Figure.of(taken, "GB/s", simulated=False) for way, taken in samples.items()}
