"""The race detector: raises if and only if two conflicting accesses have no happens-before, and names both.

The oracle is brute force: `tests._stand_in_calls.Oracle`, which has for each place all operations that it is ordered after.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chameleon_mm.device.sim import SimDevice, SimEvent
from tests._stand_in_calls import Oracle
from tests.observed import POISON_BYTE, SimRaceError, unchecked

N = 64


def test_both_accesses_are_named(sim: SimDevice) -> None:
    hbm, host = sim.current_stream().alloc(N), sim.alloc_pinned(N)
    d2h, h2d = sim.new_stream("d2h"), sim.new_stream("h2d")
    d2h.wait(sim.current_stream().record())
    d2h.copy(host[:48], hbm[:48])
    named = (
        r"pinned memory #2: read of bytes \[32, 64\) by h2d copy of 32 bytes on h2d is not ordered after "
        r"write of bytes \[0, 48\) by d2h copy of 48 bytes on d2h"
    )
    other = sim.current_stream().alloc(32)
    h2d.wait(sim.current_stream().record())
    with pytest.raises(SimRaceError, match=named):
        h2d.copy(other, host[32:])


def test_an_operator_is_named_as_one(sim: SimDevice) -> None:
    host, d2h = sim.alloc_pinned(N), sim.new_stream("d2h")
    with sim.compute():
        x = torch.zeros(N, dtype=torch.uint8)
        d2h.wait(sim.current_stream().record())
        d2h.copy(host, x)
        with pytest.raises(SimRaceError, match=r"write of bytes \[0, 64\) by add_ on compute is not ordered .* copy .* on d2h"):
            x.add_(1)


@pytest.mark.parametrize("look", [SimEvent.synchronize, lambda event: [event.query() for _ in range(10_000)][-1]])
def test_what_the_host_saw_complete_is_ordered(sim: SimDevice, look: Callable[[SimEvent], object]) -> None:
    host, d2h = sim.alloc_pinned(N), sim.new_stream("d2h")
    with sim.compute():
        x = torch.zeros(N, dtype=torch.uint8)
        d2h.wait(sim.current_stream().record())
        d2h.copy(host, x)
        look(d2h.record())
        x.add_(1)
    assert not host.any()


@pytest.mark.usefixtures("no_gc")
def test_a_bare_drop_is_ordered_by_what_the_host_saw(sim: SimDevice) -> None:
    """No call on the owner's stream shows it the synchronisation; the drop still comes after it."""
    host, d2h = sim.alloc_pinned(N), sim.new_stream("d2h")
    x = sim.current_stream().alloc(N)
    d2h.wait(sim.current_stream().record())
    d2h.copy(host, x)
    d2h.record().synchronize()
    del x
    assert sim.allocated_bytes() == 0


@pytest.mark.usefixtures("no_gc")
def test_dropping_a_buffer_under_an_access_is_a_race(sim: SimDevice) -> None:
    hbm, host, d2h = sim.current_stream().alloc(N), sim.alloc_pinned(N), sim.new_stream("d2h")
    d2h.wait(sim.current_stream().record())
    d2h.copy(host, hbm)
    del hbm
    with pytest.raises(SimRaceError, match=r"its owner, as it was freed \(the block is reused\) is not ordered after read"):
        sim.allocated_bytes()
    assert sim.allocated_bytes() == 0  # said once, and booked


def test_freeing_under_an_access_is_a_race(sim: SimDevice) -> None:
    hbm, host, d2h = sim.current_stream().alloc(N), sim.alloc_pinned(N), sim.new_stream("d2h")
    d2h.wait(sim.current_stream().record())
    d2h.copy(host, hbm)
    with pytest.raises(SimRaceError, match="compute, which was handed it back"):
        sim.current_stream().free(hbm)
    sim.current_stream().wait(d2h.record())
    sim.current_stream().free(hbm)


def test_a_storage_unseen_before_its_copy_is_the_compute_streams(sim: SimDevice) -> None:
    """Allocated outside of `compute()`: its block goes back to compute's pool, not to the copy stream's."""
    plain, host, d2h = torch.zeros(N, dtype=torch.uint8), sim.alloc_pinned(N), sim.new_stream("d2h")
    d2h.copy(host, plain)
    del plain
    with pytest.raises(SimRaceError, match="as it was freed"):
        sim.allocated_bytes()


def test_columns_conflict_only_where_they_share_bytes(sim: SimDevice) -> None:
    """Interleaved columns overlap as ranges and share no byte; a row crosses them all."""
    with sim.compute():
        matrix = torch.zeros(8, 8)
        side = sim.new_compute_stream("side")
        side.wait(sim.current_stream().record())
        matrix[:, 0].add_(1)
        with sim.stream(side):
            matrix[:, 1].add_(1)
            matrix[:, 2:4].add_(1)
            with pytest.raises(SimRaceError, match=r"read of bytes \[32, 64\) by add_ on side"):
                matrix[1].add_(1)
        with pytest.raises(SimRaceError, match="write of bytes among"):
            matrix[:, 3].add_(1)


def test_a_write_with_gaps_does_not_hide_what_lies_in_them(sim: SimDevice) -> None:
    with sim.compute():
        matrix = torch.zeros(8, 8)
        side = sim.new_compute_stream("side")
        side.wait(sim.current_stream().record())
        with sim.stream(side):
            matrix[1:7, 1].add_(1)
        after = side.record()
        other = sim.new_compute_stream("other")
        other.wait(sim.current_stream().record())
        with sim.stream(other):
            matrix[:, 0].add_(1)  # spans the side's column without touching it
        sim.current_stream().wait(other.record())
        with pytest.raises(SimRaceError, match="on side"):
            matrix[:, 1].add_(1)
        sim.current_stream().wait(after)
        matrix.add_(1)


def test_pinned_memory_is_freed_only_after_its_copies(sim: SimDevice) -> None:
    hbm, host, d2h = sim.current_stream().alloc(N), sim.alloc_pinned(N), sim.new_stream("d2h")
    d2h.wait(sim.current_stream().record())
    d2h.copy(host, hbm)
    done = d2h.record()
    sim.current_stream().wait(done)  # orders compute, not the host
    with pytest.raises(SimRaceError, match="the host, which frees it"):
        sim.free_pinned(host)
    done.synchronize()
    sim.free_pinned(host)


STREAMS = ("compute", "d2h", "h2d", "other")
BUFFERS = {"hbm0": False, "hbm1": False, "host0": True, "host1": True}
CELL, CELLS = 16, 4
ACTORS = (*STREAMS, "host")


class Program:
    """A random program, run on the simulator and on the oracle side by side, and in plain program order on bytearrays."""

    def __init__(self, seed: int, *, check_races: bool) -> None:
        self.choose = random.Random(seed)
        self.sim = SimDevice() if check_races else unchecked(SimDevice())
        self.oracle = Oracle(len(ACTORS), 0, len(BUFFERS) * CELLS)
        self.streams = {name: self.sim.new_stream(name) for name in STREAMS[1:]} | {"compute": self.sim.current_stream()}
        self.buffers = {
            name: self.sim.alloc_pinned(CELL * CELLS) if host else self.sim.current_stream().alloc(CELL * CELLS)
            for name, host in BUFFERS.items()
        }
        for name in ("hbm0", "hbm1"):
            self._races("compute", name, range(CELLS), writes=True)
        for name, buffer in self.buffers.items():
            torch.manual_seed(len(name) + seed)
            buffer.random_(0, 256)  # outside of compute(): the simulator sees no access
        self.expected = {name: buffer.tolist() for name, buffer in self.buffers.items()}
        self.events: list[tuple[SimEvent, set[int]]] = []

    def _races(self, actor: str, buffer: str, cells: range, *, writes: bool) -> bool:
        """Tell the oracle of an access. True if it conflicts with an earlier one that it is not ordered after."""
        first = CELLS * list(BUFFERS).index(buffer)
        at = ACTORS.index(actor)
        conflicts = self.oracle.access(at, first + cells.start, first + cells.stop, writes=writes)
        if actor == "host":
            self.oracle.host |= self.oracle.stream[at]
        return conflicts > 0

    def step(self) -> tuple[bool, Callable[[], None]]:
        """Return the next piece of work: True if it races by the oracle, and the call on the simulator."""
        kind = self.choose.choice(["copy", "copy", "copy", "kernel", "record", "record", "wait", "wait", "wait", "host", "see"])
        if kind == "copy":
            return self._copy()
        if kind == "kernel":
            return self._kernel("compute")
        if kind == "host":
            return self._kernel("host")
        if kind == "record" or not self.events:
            name = self.choose.choice(STREAMS)
            self.events.append((self.streams[name].record(), self.oracle.stream[ACTORS.index(name)] | self.oracle.host))
            return False, lambda: None
        event, recorded = self.choose.choice(self.events)
        if kind == "see":
            self.oracle.host |= recorded
            return False, event.synchronize
        name = self.choose.choice(STREAMS)
        self.oracle.stream[ACTORS.index(name)] |= recorded
        return False, lambda: self.streams[name].wait(event)

    def undo(self) -> Callable[[], None]:
        """Back to here, for a step that is not run."""
        expected = {name: list(values) for name, values in self.expected.items()}
        oracle = copy.deepcopy(self.oracle)

        def back() -> None:
            self.expected, self.oracle = expected, oracle

        return back

    def _cells(self) -> range:
        start = self.choose.randrange(CELLS)
        return range(start, self.choose.randrange(start, CELLS) + 1)

    def _bytes(self, name: str, cells: range) -> torch.Tensor:
        return self.buffers[name][cells.start * CELL : cells.stop * CELL]

    def _copy(self) -> tuple[bool, Callable[[], None]]:
        names = self.choose.sample(sorted(BUFFERS), 2)
        if all(BUFFERS[name] for name in names):
            names[0] = "hbm0"
        dst, src, cells, stream = *names, self._cells(), self.choose.choice(STREAMS)
        racy = self._races(stream, src, cells, writes=False) | self._races(stream, dst, cells, writes=True)
        where = slice(cells.start * CELL, cells.stop * CELL)
        self.expected[dst][where] = self.expected[src][where]
        return racy, lambda: self.streams[stream].copy(self._bytes(dst, cells), self._bytes(src, cells))

    def _kernel(self, actor: str) -> tuple[bool, Callable[[], None]]:
        """`add_` in device memory by compute, in pinned memory by the host."""
        name = self.choose.choice([name for name, host in BUFFERS.items() if host == (actor == "host")])
        cells = self._cells()
        racy = self._races(actor, name, cells, writes=True)
        for i in range(cells.start * CELL, cells.stop * CELL):
            self.expected[name][i] = (self.expected[name][i] + 1) % 256

        def run() -> None:
            with self.sim.compute():
                self._bytes(name, cells).add_(1)

        return racy, run

    def finish(self) -> dict[str, list[int]]:
        self.sim.synchronize()
        return {name: buffer.tolist() for name, buffer in self.buffers.items()}


@settings(max_examples=400)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 40))
def test_random_programs_race_exactly_where_reachability_says(seed: int, length: int) -> None:
    program = Program(seed, check_races=True)
    for _ in range(length):
        undo = program.undo()
        racy, run = program.step()
        if racy and program.choose.random() < 0.8:
            undo()  # or every long program would end in a race
        elif racy:
            with pytest.raises(SimRaceError):
                run()
            return
        else:
            run()
    assert program.finish() == program.expected


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 40))
def test_late_copies_deliver_what_program_order_delivers(seed: int, length: int) -> None:
    """Without its racy work, a program has no races; with the detector off its bytes must be the same."""
    program = Program(seed, check_races=False)
    for _ in range(length):
        undo = program.undo()
        racy, run = program.step()
        if racy:
            undo()
        else:
            run()
    assert program.finish() == program.expected


def test_the_random_programs_are_of_both_kinds() -> None:
    """Neither side of the equivalence is tested in vain."""
    steps = [Program(seed, check_races=True).step()[0] for seed in range(40)]
    assert any(steps) and not all(steps)


def test_memory_whose_speculative_copy_was_spoiled_is_not_reused_before_that_copy_ends(sim: SimDevice) -> None:
    """The write that spoils the copy is no look at whether it has ended."""
    host, d2h = sim.alloc_pinned(N), sim.new_stream("d2h")
    with sim.compute():
        source = torch.arange(N, dtype=torch.uint8)
        d2h.wait(sim.current_stream().record())
        d2h.copy(host, source, speculative=True)
        source.add_(1)
        with pytest.raises(SimRaceError, match="not ordered after read"):
            sim.current_stream().free(source)
        sim.current_stream().wait(d2h.record())


def test_a_speculative_copy_may_have_its_source_written_and_then_delivers_poison() -> None:
    """A write by an operator is no race with it; reuse of the source's memory still is one."""
    device = SimDevice()
    d2h = device.new_stream("d2h")
    with device.compute():
        source = torch.arange(256, dtype=torch.uint8)
        untouched = device.alloc_pinned(256)
        written = device.alloc_pinned(256)
        for host in (untouched, written):
            d2h.wait(device.current_stream().record())
            d2h.copy(host, source, speculative=True)
            if host is written:
                source.add_(1)
            device.current_stream().wait(d2h.record())
        device.synchronize()
        assert untouched.tolist() == list(range(256))
        assert set(written.tolist()) == {POISON_BYTE}
        d2h.copy(untouched, source, speculative=True)
        with pytest.raises(SimRaceError, match="reused"):
            device.current_stream().free(source)
        device.current_stream().wait(d2h.record())
