"""Packs many buffers into one staging buffer: where each lies there, and the kernels that bring them there and back.

offsets, nbytes = packed_offsets([t.numel() for t in sources])
staging = compute.alloc(nbytes); compute.pack(staging, sources, offsets)

packer.pack(plans, staging, sources, offsets) or copy each by itself        # False: no kernel can do it here

    plan = plans.plan(...)              # a batch like an earlier one: recognised. Another one: checked, and remembered
    for each run of the plan: table.move(addresses); launch
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chameleon_mm.kernels.pack_table import LayoutGuard
from chameleon_mm.units import round_up


def is_flat(t: Tensor) -> bool:
    """Whether `t` is a buffer: (n,) uint8, contiguous."""
    return t.dtype is torch.uint8 and t.dim() == 1 and t.is_contiguous()


def check_flat(what: str, name: str, t: Tensor, on: torch.device | None = None) -> None:
    """Raise `ValueError` unless `t` is a flat buffer, on the device `on` where one is given."""
    if not is_flat(t) or (on is not None and t.device != on):
        where = "" if on is None else f" on {on}"
        how = f"strides {t.stride()}" if t.layout is torch.strided else f"layout {t.layout}"
        raise ValueError(
            f"{what}: expected {name} as a flat, contiguous uint8 tensor{where}, got {t.dtype} of shape {tuple(t.shape)} and "
            f"{how} on {t.device}: view its bytes first"
        )


def check_ends(what: str, dst: Tensor, src: Tensor, on: torch.device | None = None) -> None:
    """Raise `ValueError` unless both are flat buffers of one size, on the device `on` where one is given."""
    check_flat(what, "dst", dst, on)
    check_flat(what, "src", src, on)
    if dst.numel() != src.numel():
        raise ValueError(f"{what}: expected equal sizes, got {src.numel()} bytes into {dst.numel()}: slice one")


def check_packed(what: str, buffers: Sequence[Tensor], staging: Tensor, offsets: Sequence[int], on: torch.device) -> None:
    """Raise `ValueError`, naming the buffer by its index, unless all are flat buffers on the device `on` and each has its
    place, from its offset on, within `staging`."""
    if len(offsets) != len(buffers):
        raise ValueError(f"{what}: expected an offset for each of {len(buffers)} buffers, got {len(offsets)}")
    check_flat(what, "the staging buffer", staging, on)
    room = staging.numel()
    for i, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
        check_flat(what, f"buffer {i}", buffer, on)
        if offset < 0 or offset + buffer.numel() > room:
            raise ValueError(
                f"{what}: expected buffer {i} within the staging buffer's {room} bytes, got [{offset}, "
                f"{offset + buffer.numel()}): pack fewer buffers at once, or give packed_offsets(sizes).total_bytes"
            )


_log = logging.getLogger(__name__)

PACK_ALIGN_BYTES = 128
"""Alignment of packed buffers, a cache line, which no two share: 16-byte accesses are aligned."""

PACK_PROGRAMS = 16
"""Programs of a pack kernel, so SMs at most: of an H200's 132 a share that compute can spare. Not measured."""

_COPIES_PER_LAUNCH = 3  # what a launch costs the host, published as 9-11 us, in copies of about 3 us

_MAX_PLANS = 32
"""Plans kept for each stream, some KiB each on host and device: a step packs a few kinds of batches over and over."""


class PackedOffsets(NamedTuple):
    """The places of packed buffers."""

    offsets: list[int]
    """Bytes from the start of the staging buffer to each."""
    total_bytes: int
    """Size of a staging buffer that holds all of them: up to the end of the last."""


def packed_offsets(sizes: Sequence[int]) -> PackedOffsets:
    """Places for buffers of `sizes` bytes in their order, each at the next multiple of 128."""
    below, mask = PACK_ALIGN_BYTES - 1, -PACK_ALIGN_BYTES  # round_up, where a call would cost as much
    offsets = list(accumulate([(nbytes + below) & mask for nbytes in sizes], initial=0))
    offsets.pop()
    return PackedOffsets(offsets, offsets[-1] + sizes[-1] if offsets else 0)


class _Run(NamedTuple):
    """Buffers that lie in the staging buffer as `packed_offsets` would have them, from some byte on."""

    begin: int
    end: int
    """Indices of the first buffer and behind the last."""
    first: int
    last: int
    """Bytes of the staging buffer that the run takes: from where, and up to where."""


def _runs(sizes: Sequence[int], offsets: Sequence[int]) -> list[_Run]:
    """The fewest runs that make up buffers of `sizes` at `offsets`: one where all are there, more where some were left out."""
    whole = packed_offsets(sizes)
    if offsets[0] == 0 and list(offsets) == whole.offsets:  # nearly always
        return [_Run(0, len(sizes), 0, whole.total_bytes)]
    runs, begin = [], 0
    for i in range(1, len(sizes) + 1):
        first, last = offsets[begin], offsets[i - 1] + sizes[i - 1]
        if i == len(sizes) or offsets[i] != first + round_up(last - first, PACK_ALIGN_BYTES):
            runs.append(_Run(begin, i, first, last))
            begin = i
    return runs


class PackKernels(NamedTuple):
    """The kernels that a packer launches, as `chameleon_mm.kernels` has them."""

    table: Callable[[Sequence[Tensor]], Any]
    """A `PackTable` of buffers."""
    pack: Callable[..., None]
    """`launch_pack(table, staging, num_programs=...)`."""
    unpack: Callable[..., None]
    """`launch_unpack(staging, table, num_programs=...)`."""


class PackPlan:
    """Plan for a kind of batch: that it can be packed, in which runs, and the tables of their launches."""

    __slots__ = ("_device", "_guard", "_offsets", "_phase", "_room_bytes", "_runs", "_sizes", "_tables", "what")

    def __init__(self, what: str, buffers: Sequence[Tensor], offsets: list[int], device: torch.device) -> None:
        """Make the plan of a batch that `check_packed` let pass, with a buffer at least."""
        self.what = what
        self._device = device
        self._offsets = offsets
        self._sizes = [t.numel() for t in buffers]
        self._room_bytes = max(map(add, offsets, self._sizes))
        self._runs = _runs(self._sizes, offsets)
        self._guard = LayoutGuard(buffers)
        self._tables: list[Any] = []
        phases = {run.first % PACK_ALIGN_BYTES for run in self._runs}
        few = len(self._runs) == 1 or len(self._runs) * _COPIES_PER_LAUNCH <= len(buffers)
        self._phase = phases.pop() if few and len(phases) == 1 else None  # of every run against the alignment; None: no launch

    def suits(self, buffers: Sequence[Tensor], offsets: list[int]) -> bool:
        """Whether `buffers` are flat, on the same device and of the same sizes, and go to the same places."""
        return offsets == self._offsets and (self._guard.passes(buffers) or all(map(self._is_like, buffers, self._sizes)))

    def fits(self, staging: Tensor) -> bool:
        """Whether `staging` is a flat buffer on the same device, with room for everything."""
        return is_flat(staging) and staging.device == self._device and staging.numel() >= self._room_bytes

    def is_launched(self, staging: Tensor) -> bool:
        """Whether kernels bring the batch to `staging` and back; not where runs are many, or begin beside the alignment."""
        return self._phase is not None and (staging.data_ptr() + self._phase) % PACK_ALIGN_BYTES == 0

    def launch(self, kernels: PackKernels, staging: Tensor, buffers: Sequence[Tensor], num_programs: int) -> None:
        """Renew the tables' addresses, of which the first call builds the tables, and launch a kernel for each run."""
        if not self._tables:
            self._tables = [kernels.table(buffers[run.begin : run.end]) for run in self._runs]
        addresses = [t.data_ptr() for t in buffers]
        for run, table in zip(self._runs, self._tables, strict=True):
            table.move(addresses[run.begin : run.end])
            part = staging[run.first :] if run.first else staging
            if self.what == "pack":
                kernels.pack(table, part, num_programs=num_programs)
            else:
                kernels.unpack(part, table, num_programs=num_programs)

    def _is_like(self, t: Tensor, nbytes: int) -> bool:
        return is_flat(t) and t.numel() == nbytes and t.device == self._device


class PackPlans:
    """One stream's plans of the batches seen last, all on `device`. Not thread-safe: its packer is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._plans: list[PackPlan] = []  # the last used first

    def plan(self, what: str, staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int]) -> PackPlan | None:
        """The plan for such a batch, new if it is the first of its kind; None for no buffers at all.

        Raises `ValueError`, naming the buffer, as `Stream.pack` does.
        """
        if type(offsets) is not list:
            offsets = list(offsets)
        for i, plan in enumerate(self._plans):
            if plan.what == what and plan.suits(buffers, offsets) and plan.fits(staging):
                if i:
                    self._plans.insert(0, self._plans.pop(i))
                return plan
        check_packed(what, buffers, staging, offsets, self.device)
        if not buffers:
            return None
        plan = PackPlan(what, buffers, offsets.copy(), self.device)  # the caller's list may change
        del self._plans[_MAX_PLANS - 1 :]
        self._plans.insert(0, plan)
        return plan

    def __len__(self) -> int:
        return len(self._plans)


class Packer:
    """Packs and unpacks by kernels, where they work, for all streams of a device. Thread-safe.

    `num_programs` bounds the SMs that a kernel takes. Raises `ValueError` below 1.
    """

    def __init__(self, num_programs: int = PACK_PROGRAMS, load: Callable[[], PackKernels] | None = None) -> None:
        if num_programs < 1:
            raise ValueError(f"pack_programs: expected 1 or more, got {num_programs}")
        self.num_programs = num_programs
        self._load = load or _triton_kernels
        self._kernels: PackKernels | None = None
        self._refused = False
        self._lock = threading.Lock()  # a table is changed and launched from as one step

    def pack(self, plans: PackPlans, staging: Tensor, sources: Sequence[Tensor], offsets: Sequence[int]) -> bool:
        """Pack as `Stream.pack` does on torch's current stream, whose `plans` these are, checks included. Returns whether it
        was done: not where there is no kernel or no memory for its table, nor for offsets that are not mostly those of
        `packed_offsets`."""
        return self._launch("pack", plans, staging, sources, offsets)

    def unpack(self, plans: PackPlans, destinations: Sequence[Tensor], staging: Tensor, offsets: Sequence[int]) -> bool:
        """Unpack as `Stream.unpack` does, otherwise as `pack`."""
        return self._launch("unpack", plans, staging, destinations, offsets)

    def _launch(self, what: str, plans: PackPlans, staging: Tensor, buffers: Sequence[Tensor], offsets: Sequence[int]) -> bool:
        with self._lock:
            plan = plans.plan(what, staging, buffers, offsets)
            if plan is None:
                return True
            if not plan.is_launched(staging):
                return False
            try:
                kernels = self._working_kernels(staging.device)
                if kernels is None:
                    return False
                plan.launch(kernels, staging, buffers, self.num_programs)
            except torch.OutOfMemoryError:
                return False  # for the table, which is allocated before a launch; copies need no memory
            return True

    def _working_kernels(self, device: torch.device) -> PackKernels | None:
        """The kernels, once one of each has run: Triton may be missing, or lack what it compiles with."""
        if self._kernels is None and not self._refused:
            try:
                kernels = self._load()
                one, staging = torch.zeros(2, PACK_ALIGN_BYTES, dtype=torch.uint8, device=device).unbind()
                kernels.pack(kernels.table([one]), staging, num_programs=1)
                kernels.unpack(staging, kernels.table([one]), num_programs=1)
                self._kernels = kernels
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001  # a compiler fails in ways of its own, and copies do the same work
                self._refused = True
                # The text alone: a log record that kept the error would keep its frames.
                _log.warning("chameleon_mm: buffers are packed by a copy each, as the kernels cannot be used: %s", str(error))
        return self._kernels


def _triton_kernels() -> PackKernels:
    from chameleon_mm.kernels.pack import PackTable, launch_pack, launch_unpack

    return PackKernels(table=PackTable, pack=launch_pack, unpack=launch_unpack)
