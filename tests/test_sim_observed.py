"""The simulated device with the tests' observer and without one: the same bits, times and memory; only the observer accuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device.sim import SimDevice, SimObserver
from tests._run_scripts import python
from tests.observed import SimRaceError
from tests.observed.shadow import covers, extent_of, share_bytes

N = 64


def unobserved() -> SimDevice:
    """A device as a user has it."""
    device = SimDevice()
    device.attach_observer(SimObserver())
    return device


def trained(device: SimDevice | None) -> list[Tensor]:
    """Weights after four steps of a net; in a session where a device is given."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(256, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if device is None:
        for _ in range(4):
            step()
        return list(model.parameters())
    with cm.SwapSession("3MiB", "64MiB", device, 0, model=model, optimizer=optimizer) as session:
        for _ in range(4):
            with session.step():
                step()
    assert session.report().bytes_swapped_in > 0
    return list(model.parameters())


def test_what_is_counted_and_computed_is_the_same_without_the_observer() -> None:
    observed, plain = SimDevice(), unobserved()
    weights = trained(None)
    for device in (observed, plain):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(trained(device), weights, strict=True))
    assert plain.host_us == observed.host_us
    assert plain.read_memory() == observed.read_memory()
    for direction in ("d2h", "h2d"):
        assert plain.copy_spans(direction) == observed.copy_spans(direction)


def test_without_the_observer_copies_are_done_at_once_and_nothing_is_refused() -> None:
    device = unobserved()
    hbm, host, back = device.current_stream().alloc(N).fill_(1), device.alloc_pinned(N), device.current_stream().alloc(N)
    d2h, h2d = device.new_stream("d2h"), device.new_stream("h2d")
    d2h.copy(host, hbm)
    h2d.pack(back, [hbm], [0])
    device.current_stream().free(hbm)
    assert host.tolist() == back.tolist() == hbm.tolist() == [1] * N


RACES = """
import sys
import chameleon_mm as cm
device = cm.SimDevice()
device.new_stream("d2h").copy(device.alloc_pinned(64), device.current_stream().alloc(64))
print(sys.argv[1:], __name__)
"""


@pytest.mark.parametrize("observed", [False, True])
def test_a_program_is_observed_where_it_is_asked_for(observed: bool, tmp_path: Path) -> None:
    program = tmp_path / "races.py"
    program.write_text(RACES)
    ended = python([*(["-m", "tests.observed"] if observed else []), str(program), "--some"], tmp_path)
    if observed:
        assert ended.code == 1
        assert f"{SimRaceError.__name__}: buffer #" in ended.err
    else:
        assert (ended.out, ended.err) == ("['--some'] __main__\n", "")


# --- byte extents of tensors, against the bytes that torch itself reaches through them


STORAGE_BYTES = 256


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Any strided view of 256 bytes: with gaps, overlapping itself, expanded, transposed, empty; 1 or 4 bytes an element."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int32]))
    whole = torch.zeros(STORAGE_BYTES, dtype=torch.uint8).view(dtype)
    offset = draw(st.integers(0, whole.numel() - 1))
    shape, strides, left = [], [], whole.numel() - 1 - offset
    for _ in range(draw(st.integers(0, 3))):
        size, stride = draw(st.integers(0, 5)), draw(st.integers(0, 16))
        if size > 1 and (size - 1) * stride > left:
            stride = left // (size - 1)
        left -= max(0, size - 1) * stride
        shape.append(size)
        strides.append(stride)
    return whole.as_strided(shape, strides, offset)


def reached(t: Tensor) -> set[int]:
    """The bytes that `t` reaches: a view of its geometry over numbered elements says which."""
    item = t.element_size()
    numbers = torch.arange(STORAGE_BYTES // item).as_strided(t.shape, t.stride(), t.storage_offset())
    return {number * item + byte for number in numbers.flatten().tolist() for byte in range(item)}


@given(a=views(), b=views())
def test_extents_share_bytes_exactly_where_both_reach(a: Tensor, b: Tensor) -> None:
    one, two = reached(a), reached(b)
    assert share_bytes(extent_of(a), extent_of(b)) == bool(one & two)
    if covers(extent_of(a), extent_of(b)):
        assert two <= one


@given(t=views())
def test_an_extent_ends_where_the_view_does_and_is_dense_where_it_has_no_gap(t: Tensor) -> None:
    extent, there = extent_of(t), reached(t)
    if not there:
        assert extent.start == extent.end
        return
    assert (extent.start, extent.end) == (min(there), max(there) + 1)
    assert (extent.pattern is None) == (len(there) == extent.end - extent.start)
