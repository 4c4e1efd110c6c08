"""Memory of the simulator: poison in unwritten memory, late copies, weakly held buffers, and errors for freed memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from chameleon_mm.device.protocols import MemoryReading
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.errors import HostMemoryExhausted
from tests._fakes import refusing
from tests.observed import POISON_BYTE, SimLifetimeError, SimRaceError, unchecked

N = 256


@pytest.fixture
def lax() -> SimDevice:
    """A simulator without its race detector: a missing wait shows as bytes."""
    return unchecked(SimDevice())


def is_poison(t: Tensor) -> bool:
    return bool((t.contiguous().view(torch.uint8) == POISON_BYTE).all())


def test_memory_is_handed_out_poisoned(sim: SimDevice) -> None:
    assert is_poison(sim.current_stream().alloc(N))
    assert is_poison(sim.new_stream("h2d").alloc(N))
    assert is_poison(sim.alloc_pinned(N))
    with sim.compute():
        x = torch.ones(4, 4)
        made = [torch.empty(N), torch.empty_like(x), x.new_empty(N), torch.empty_strided((4, 4), (1, 4))]
    assert all(is_poison(t) for t in made)


def test_a_freed_buffer_is_poison_to_whoever_kept_it(lax: SimDevice) -> None:
    kept = lax.current_stream().alloc(N).fill_(1)
    lax.current_stream().free(kept)
    assert is_poison(kept)


def test_a_freed_buffer_that_someone_else_holds_is_theirs(sim: SimDevice) -> None:
    """Freeing one reference must not change the user's tensor, or the data that another record of the storage holds."""
    users = sim.current_stream().alloc(N).fill_(2)
    sim.current_stream().free(users.detach())
    assert users.tolist() == [2] * N
    with sim.compute():
        users.add_(0)
    ours, theirs = users.untyped_storage(), [users.untyped_storage()]
    del users
    sim.current_stream().free(torch.empty(0, dtype=torch.uint8).set_(ours))
    assert theirs[0].tolist() == [2] * N
    theirs.clear()
    sim.current_stream().free(torch.empty(0, dtype=torch.uint8).set_(ours))
    assert ours.tolist() == [POISON_BYTE] * N  # now it was the last


@pytest.mark.parametrize("by", ["operator", "copy"])
def test_using_a_buffer_that_was_handed_back_is_an_error(sim: SimDevice, by: str) -> None:
    kept = sim.current_stream().alloc(N)
    sim.current_stream().free(kept)
    with sim.compute(), pytest.raises(SimLifetimeError, match="after it was handed back to compute"):
        if by == "operator":
            kept.add_(1)
        else:
            sim.current_stream().copy(sim.alloc_pinned(N), kept)


def test_a_copy_stream_may_free_its_own_buffer_behind_its_own_copy(sim: SimDevice) -> None:
    d2h, host = sim.new_stream("d2h"), sim.alloc_pinned(N)
    staging = d2h.alloc(N).fill_(5)
    d2h.copy(host, staging)
    d2h.free(staging)
    del staging
    d2h.record().synchronize()
    assert host.tolist() == [5] * N


def test_a_destination_is_poison_until_somebody_waits(lax: SimDevice) -> None:
    h2d, host, dst = lax.new_stream("h2d"), lax.alloc_pinned(N).fill_(3), lax.current_stream().alloc(N).fill_(3)
    h2d.copy(dst, host)
    arrived = h2d.record()
    assert is_poison(dst)  # although the earlier bytes happened to be right
    lax.current_stream().wait(arrived)
    assert dst.tolist() == [3] * N


@pytest.mark.parametrize("end", ["source", "destination"])
@pytest.mark.parametrize("how", ["dropped", "resized", "swapped"])
@pytest.mark.usefixtures("no_gc")
def test_a_pending_copy_that_loses_an_end_is_an_error(lax: SimDevice, end: str, how: str) -> None:
    """Never a read of freed memory: `resize_(0)`, as FSDP does, and `.data =` take the memory from under a live tensor."""
    src, dst, d2h = lax.current_stream().alloc(N), lax.alloc_pinned(N), lax.new_stream("d2h")
    if end == "destination":
        src, dst = dst, src
    d2h.copy(dst, src)
    lost = src if end == "source" else dst
    if how == "resized" and end == "source":
        lost.untyped_storage().resize_(0)
    elif how == "swapped":
        lost.data = torch.empty(N, dtype=torch.uint8)
    elif end == "source":
        del src
    else:
        del dst
    del lost
    with pytest.raises(SimLifetimeError, match=f"its {end} was (dropped|resized or given other memory)"):
        d2h.record().synchronize()


@pytest.mark.usefixtures("no_gc")
def test_a_storage_at_a_recycled_id_is_another(sim: SimDevice) -> None:
    """Thousands of short lives: ids come again, and neither the ledger nor the detector takes one for its predecessor."""
    host, d2h = sim.alloc_pinned(N), sim.new_stream("d2h")
    ids = set()
    for _ in range(500):
        buffer = sim.current_stream().alloc(N)
        ids.add(id(buffer.untyped_storage()))
        d2h.wait(sim.current_stream().record())
        d2h.copy(host, buffer)
        sim.current_stream().wait(d2h.record())
        del buffer
    assert len(ids) < 500, "no id was used again: nothing was tested"
    assert sim.allocated_bytes() == 0


@pytest.mark.usefixtures("no_gc")
def test_a_plain_storage_at_the_id_of_dropped_pinned_memory_is_plain(sim: SimDevice) -> None:
    """The ledger has not seen the death when the id is used again."""
    for _ in range(1_000):
        pinned = sim.alloc_pinned(N)
        key = id(pinned.untyped_storage())
        del pinned
        # Several: other objects of the same size may be made and freed meanwhile.
        plain = next((t for t in [torch.empty(N) for _ in range(50)] if id(t.untyped_storage()) == key), None)
        if plain is not None:
            break
    else:
        pytest.fail("no id was used again: nothing was tested")
    assert sim.owns(plain)


def test_pinned_memory_is_page_aligned_and_no_device_memory(sim: SimDevice) -> None:
    for nbytes in (0, 1, 4096, 70_000):
        memory = sim.alloc_pinned(nbytes)
        assert memory.numel() == nbytes and memory.dtype is torch.uint8
        assert nbytes == 0 or memory.data_ptr() % 4096 == 0
        assert sim.is_host_memory(memory) and not sim.owns(memory)
        assert sim.is_host_memory(memory[nbytes // 2 :])
    assert sim.read_memory() == MemoryReading(0, 0, 0)


@pytest.mark.parametrize("wrong", ["slice", "twice", "device", "plain", "other"])
def test_free_pinned_takes_back_whole_live_allocations_alone(sim: SimDevice, wrong: str) -> None:
    memory = sim.alloc_pinned(N)
    candidates = {
        "slice": memory[: N // 2],
        "twice": memory,
        "device": sim.current_stream().alloc(N),
        "plain": torch.empty(N, dtype=torch.uint8),
        "other": SimDevice().alloc_pinned(N),
    }
    if wrong == "twice":
        sim.free_pinned(memory)
    with pytest.raises(ValueError, match="free_pinned: expected what alloc_pinned of this device returned, whole and once"):
        sim.free_pinned(candidates[wrong])
    if wrong != "twice":
        sim.free_pinned(memory)


@pytest.mark.parametrize("check_races", [True, False])
def test_freed_pinned_memory_is_nobodys(check_races: bool) -> None:
    sim = SimDevice() if check_races else unchecked(SimDevice())
    memory = sim.alloc_pinned(N)
    sim.free_pinned(memory)
    with pytest.raises(SimLifetimeError, match="after it was freed by free_pinned"):
        sim.current_stream().copy(memory, sim.current_stream().alloc(N))


def test_host_memory_that_cannot_be_had_is_said_so(sim: SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "empty", refusing(MemoryError, "no such memory"))
    with pytest.raises(HostMemoryExhausted, match=r"host memory: asked for 1\.00 KiB.*no such memory"):
        sim.alloc_pinned(1024)
    with pytest.raises(ValueError, match="expected 0 bytes or more, got -1"):
        sim.alloc_pinned(-1)


def test_copies_of_the_wrong_kind_are_refused(sim: SimDevice) -> None:
    stream, flat, host = sim.current_stream(), sim.current_stream().alloc(N), sim.alloc_pinned(N)
    for dst, src, message in [
        (host, flat[:10], "expected equal sizes, got 10 bytes into 256"),
        (host, flat.view(2, -1), "expected src as a flat"),
        (host[::2], flat[: N // 2], "expected dst as a flat"),
        (host.view(torch.float32), flat[: N // 4], "expected dst as a flat"),
        (flat.to("meta"), flat, "expected dst as a flat"),
        (flat[1:], flat[:-1], "src and dst share 254"),
        (flat, flat, "src and dst share 256"),
        (host, sim.alloc_pinned(N), "at least one end in device memory"),
    ]:
        with pytest.raises(ValueError, match=message):
            stream.copy(dst, src)
    stream.copy(flat[: N // 2], flat[N // 2 :])


def test_a_resized_storage_is_a_new_block(sim: SimDevice) -> None:
    """Its old one went back to its owner: under an access elsewhere that is a race, as it is for a drop."""
    host, d2h = sim.alloc_pinned(N), sim.new_stream("d2h")
    with sim.compute():
        x = torch.ones(N, dtype=torch.uint8)
        d2h.wait(sim.current_stream().record())
        d2h.copy(host, x)
        done = d2h.record()
        x.untyped_storage().resize_(2 * N)
        with pytest.raises(SimRaceError, match="as it was freed"):
            x.add_(1)
        with pytest.raises(SimLifetimeError, match="resized or given other memory"):
            done.synchronize()
