"""Every kernel at small, awkward sizes, each of its buffers at the very edge of an allocation: for compute-sanitizer to watch.

    for edge in (front of its allocation, end of it): for kernel: for size:
        launch; the reference's bytes, or wrong; canaries on the other side as they were, or wrong

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m chameleon_mm.bench._sanitized_kernels ...

A canary shows a write beside a buffer; that a kernel read there shows only where nothing of ours lies, and so every buffer
takes its turn at either end of an allocation. Blocks have the sizes that training has: the same compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.bench._sanitized_memory import CANARY_BYTES, Memory

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""dtype, sizes, strides, and how many elements it lies off a boundary."""

_COPY_ALIGNMENTS = ((0, 0), (3, 3), (0, 5))  # of source and destination, bytes from a 16-byte boundary


@dataclass(frozen=True, slots=True)
class Case:
    """One launch, or a launch and its inverse."""

    name: str
    is_right: Callable[[], bool]


def cases(place: torch.device) -> Iterator[Case]:
    """All of them, on tensors of `place`: a CUDA GPU, or the CPU under Triton's interpreter."""
    from chameleon_mm.bench._copy_kernel import BLOCK_BYTES

    sizes = (0, 1, 15, 16, 17, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 8)
    for at_end in (False, True):
        edge = "at the end" if at_end else "at the front"
        for num_programs in (1, 3):
            where = f"{edge}, {num_programs} programs"
            for nbytes in sizes:
                for shifts in _COPY_ALIGNMENTS:
                    run = partial(_copied, place, nbytes, shifts, at_end, num_programs)
                    yield Case(f"copy, {nbytes} bytes, {shifts} off a boundary, {where}", run)
            for nbytes in sizes:
                run = partial(_summed, place, nbytes, at_end, num_programs)
                yield Case(f"checksum, {nbytes} bytes, {where}", run)
            for kind, layouts in batches(sizes).items():
                yield Case(f"pack, {kind}, {where}", partial(_packed, place, layouts, at_end, num_programs))


def batches(sizes: Sequence[int]) -> dict[str, list[Layout]]:
    """What is packed together: contiguous tensors of `sizes` bytes at every alignment, and layouts of all kinds."""
    return {
        "contiguous": [(torch.uint8, (n,), (1,), shift) for n in sizes for shift in (0, 1, 2, 4, 8)],
        "strided": [
            (torch.bfloat16, (64, 32), (1, 64), 0),  # transposed
            (torch.float32, (40, 8), (12, 1), 0),  # rows of 16-byte units
            (torch.bfloat16, (40, 5), (8, 1), 1),  # rows of single elements
            (torch.int16, (2,) * 8, tuple(3**i for i in range(7, -1, -1)), 0),  # 8 dimensions
            (torch.float32, (3, 5, 7), (7, 0, 1), 0),  # rows repeated
            (torch.int64, (6,), (0,), 0),  # one number repeated
            (torch.complex128, (), (), 0),
            (torch.bool, (0, 3), (3, 1), 0),
        ],
        "overlapping": [(torch.int32, (9, 4), (1, 1), 0), (torch.uint8, (33, 20), (2, 1), 1)],
    }


def _copied(place: torch.device, nbytes: int, shifts: tuple[int, int], at_end: bool, num_programs: int) -> bool:
    from chameleon_mm.bench._copy_kernel import copy_bytes, copy_bytes_reference

    src, dst = (Memory.random(nbytes, place, at_end=at_end, shift=shift) for shift in shifts)
    expected = dst.expected()
    copy_bytes_reference(expected, src.expected())
    copy_bytes(dst.part, src.part, num_programs=num_programs)
    return dst.holds(expected) and src.is_intact()


def _summed(place: torch.device, nbytes: int, at_end: bool, num_programs: int) -> bool:
    from chameleon_mm.kernels.checksum import add_checksum, checksum_reference

    src = Memory.random(nbytes, place, at_end=at_end)
    out = torch.zeros(1, dtype=torch.int64, device=place)
    if src.part.data_ptr() % 16:
        return True  # no launch for it: torch's operators sum what is off the alignment
    add_checksum(out, src.part, num_programs=num_programs)
    return src.is_intact() and int(out) == int(checksum_reference(src.expected()))


def _packed(place: torch.device, layouts: Sequence[Layout], at_end: bool, num_programs: int) -> bool:
    """Pack, and where no two elements share a byte unpack into other memory."""
    from chameleon_mm.kernels.pack import pack, pack_reference, packed_layout, unpack, unpack_reference

    sources, targets = ([_memory_for(layout, place, at_end=at_end) for layout in layouts] for _ in range(2))
    tensors = [_tensor(m.part, layout) for m, layout in zip(sources, layouts, strict=True)]
    staging = Memory.random(packed_layout(tensors).total_bytes, place, at_end=at_end)
    expected = staging.expected()
    pack_reference([_tensor(m.expected(), layout) for m, layout in zip(sources, layouts, strict=True)], expected)
    pack(tensors, staging.part, num_programs=num_programs)
    if not staging.holds(expected) or not all(m.is_intact() for m in sources):
        return False
    if any(_overlaps(layout) for layout in layouts):
        return True
    wanted = [m.expected() for m in targets]
    unpack_reference(expected, [_tensor(part, layout) for part, layout in zip(wanted, layouts, strict=True)])
    others = [_tensor(m.part, layout) for m, layout in zip(targets, layouts, strict=True)]
    unpack(staging.part, others, num_programs=num_programs)
    return staging.holds(expected) and all(m.holds(part) for m, part in zip(targets, wanted, strict=True))


def _memory_for(layout: Layout, place: torch.device, *, at_end: bool) -> Memory:
    dtype, sizes, strides, shift = layout
    reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
    return Memory.random(reach * dtype.itemsize, place, at_end=at_end, shift=shift * dtype.itemsize)


def _tensor(part: Tensor, layout: Layout) -> Tensor:
    """The tensor of `layout` that begins where `part` does and ends where it ends."""
    dtype, sizes, strides, _ = layout
    at = part.storage_offset() // dtype.itemsize if part.numel() else 0
    return torch.empty(0, dtype=dtype, device=part.device).set_(part.untyped_storage(), at, sizes, strides)


def _overlaps(layout: Layout) -> bool:
    """Whether elements share bytes; those that a stride of 0 repeats do not count. By numbering them all."""
    _, sizes, strides, _ = layout
    held = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if stride]
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in held:
        places = (places[:, None] + torch.arange(size) * stride).view(-1)
    return len(places.unique()) < prod(size for size, _ in held)


def check(place: torch.device) -> dict[str, Any]:
    """Run all cases. `cases`: how many; `wrong`: the names of those that were not exact, or touched a canary, or raised."""
    torch.manual_seed(0)
    wrong, number = [], 0
    for case in cases(place):
        number += 1
        try:
            if not case.is_right():
                wrong.append(case.name)
        except Exception as error:  # noqa: BLE001 - what a case raises is its result; the others still run
            wrong.append(f"{case.name}: {type(error).__name__}: {error}")
    return {"cases": number, "wrong": wrong}


def fault(place: torch.device) -> None:
    """Read one byte past the end of an allocation by the copy kernel: what a tool has to notice, or it sees nothing."""
    from chameleon_mm.bench._copy_kernel import BLOCK_BYTES, NUM_WARPS, copy_kernel

    src = torch.zeros(CANARY_BYTES, dtype=torch.uint8, device=place)
    dst = torch.zeros(2 * CANARY_BYTES, dtype=torch.uint8, device=place)
    copy_kernel[(1,)](dst, src, 0, CANARY_BYTES + 1, WIDE=True, BLOCK=BLOCK_BYTES, num_warps=NUM_WARPS, enable_fp_fusion=False)
    dst.cpu()  # waits for it


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if every case was right, 1 otherwise."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python3 -m chameleon_mm.bench._sanitized_kernels", description=description)
    parser.add_argument("--place", type=torch.device, default="cuda", help="of the tensors (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, required=True, help="where the record goes")
    parser.add_argument("--fault", action="store_true", help="only read past the end of a buffer, for the tool to notice")
    args = parser.parse_args(arguments)
    if args.fault:
        fault(args.place)
    record = {"cases": 0, "wrong": []} if args.fault else check(args.place)
    args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(bool(record["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
