"""Pieces under swapped parameters: the sequence of uses, memory under a storage that stays, readings beside a window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.state.parameter_swap import charged_sizes, window_for
from chameleon_mm.state.window import UNKNOWN, DeviceBesideWindow, UseSequence
from chameleon_mm.units import KIB, MIB

SEQUENCES = st.lists(st.integers(0, 5), min_size=1, max_size=12).map(
    lambda keys: [key for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
)


def learned(keys: list[int]) -> UseSequence:
    sequence = UseSequence()
    sequence.begin_step()
    for key in keys:
        sequence.note(key)
    sequence.end_step(completed=True)
    return sequence


@given(SEQUENCES, st.integers(0, 12))
def test_distances_are_those_of_a_step_like_the_last_one(keys: list[int], at: int) -> None:
    """Against the plain definition: the next place of the key in the rest of this step and the whole next one."""
    at = min(at, len(keys))
    sequence = learned(keys)
    sequence.begin_step()
    for key in keys[:at]:
        sequence.note(key)
    ahead = [*keys[at:], *keys]
    for key in range(7):
        assert sequence.distance(key) == (ahead.index(key) if key in ahead else UNKNOWN)
    assert list(sequence.upcoming()) == list(dict.fromkeys([*keys[at:], *keys[:at]]))


def test_a_step_that_leaves_its_sequence_goes_on_from_the_next_place() -> None:
    sequence = learned([0, 1, 2, 1, 3])
    sequence.begin_step()
    sequence.note(2)  # skips 0 and 1
    assert next(sequence.upcoming()) == 1
    sequence.note(7)  # a key that no step used moves nothing
    assert next(sequence.upcoming()) == 1
    sequence.end_step(completed=False)  # and nothing is learned of a step that failed
    assert list(sequence.upcoming()) == [0, 1, 2, 3]


def test_a_use_once_more_in_a_row_is_none() -> None:
    sequence = learned([0, 1])
    sequence.begin_step()
    assert [sequence.note(key) for key in (0, 0, 1, 1)] == [True, False, True, False]


# --- memory under a storage that stays


def test_a_storage_gives_its_memory_back_and_gets_other(device: Device) -> None:
    with device.compute():
        compute = device.current_stream()
        flat = compute.alloc(MIB)
        view = flat[: 4 * KIB].view(64, 64)
        storage, before = flat.untyped_storage(), device.allocated_bytes()
        compute.resize(storage, 0)
        assert storage.nbytes() == 0
        assert before - device.allocated_bytes() == MIB
        compute.resize(storage, MIB)
        assert device.allocated_bytes() == before
        view.fill_(7)
        assert flat[: 4 * KIB].eq(7).all()


def test_no_memory_for_a_storage_changes_nothing() -> None:
    sim = cm.SimDevice("h200", MIB)
    with sim.compute():
        t = torch.ones(128 * KIB // 4)
        sim.current_stream().resize(t.untyped_storage(), 0)
        blocking = sim.current_stream().alloc(MIB)
        with pytest.raises(torch.OutOfMemoryError):
            sim.current_stream().resize(t.untyped_storage(), 128 * KIB)
        assert t.untyped_storage().nbytes() == 0
        del blocking
        sim.current_stream().resize(t.untyped_storage(), 128 * KIB)


# --- readings and sizes


class Set:
    """A window that has so many bytes, and counts as so many."""

    charged_bytes, resident_bytes = 10 * MIB, 3 * MIB


def test_memory_beside_a_window_counts_it_at_its_full_size(sim: cm.SimDevice) -> None:
    seen = beside = DeviceBesideWindow(sim)
    with sim.compute():
        held = torch.ones(MIB)
        before = seen.read_memory()
        assert before == sim.read_memory()
        beside.window = Set  # type: ignore[assignment]  # as much of a window as is read
        beside.note_taken(2 * MIB)
        after = seen.read_memory()
        assert after.allocated_bytes - before.allocated_bytes == 7 * MIB == seen.allocated_bytes() - sim.allocated_bytes()
        assert after.unused_bytes == 7 * MIB
        assert before.cumulative_bytes - after.cumulative_bytes == 2 * MIB
        assert seen.capacity == sim.capacity
        del held


def test_the_window_is_a_share_and_never_less_than_the_largest_need_or_more_than_all() -> None:
    shared = torch.zeros(MIB)
    params = [shared[:1024], shared[1024:], torch.zeros(64 * KIB), torch.zeros(16)]
    sizes = charged_sizes(params)
    assert sizes == [4 * MIB, 256 * KIB]  # one for the storage that two share; the smallest never leaves
    assert window_for(sizes, 1000 * MIB) == 2 * sum(sizes)
    assert window_for(sizes, 20 * MIB) == 2 * sum(sizes) < 3 * max(sizes)
    many = [4 * MIB] * 100
    assert window_for(many, 100 * MIB, 20 * MIB) == int(0.4 * 80 * MIB)
    assert window_for(many, 16 * MIB) == 12 * MIB
    with pytest.raises(cm.InfeasibleBudget, match=r"expected more than 12.0 MiB, the room for") as caught:
        window_for(many, 12 * MIB)
    assert window_for(many, caught.value.smallest_bytes or 0) == 12 * MIB
    assert window_for([], 0) == 0
