"""Packing on the simulated device: exact, as strict as a copy, at a price that adds up.

The round figures: 10 GB/s = 10_000 bytes per us each way, 1000 GB/s of device memory at 0.85.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from chameleon_mm.device import SPECS
from chameleon_mm.device.packing import PACK_ALIGN_BYTES, packed_offsets
from chameleon_mm.device.sim import CostModel, SimDevice, SimStream
from tests.observed import POISON_BYTE, SimLifetimeError, SimRaceError

ROUND = dataclasses.replace(SPECS["a100"], h2d_gbps=10.0, d2h_gbps=10.0, duplex_gbps=15.0, hbm_gbps=1000.0)
SIZES = (0, 1, 15, 128, 129, 4096)


def _filled(sim: SimDevice, sizes: Sequence[int], *, seed: int = 1) -> list[Tensor]:
    """Device buffers of random bytes, none of them poison, that any stream may touch."""
    generator = torch.Generator().manual_seed(seed)
    buffers = [sim.current_stream().alloc(nbytes) for nbytes in sizes]
    for buffer in buffers:
        buffer.copy_(torch.randint(POISON_BYTE, (buffer.numel(),), dtype=torch.uint8, generator=generator))
    sim.synchronize()
    return buffers


def _host(sim: SimDevice, sizes: Sequence[int]) -> list[Tensor]:
    return [sim.alloc_pinned(nbytes) for nbytes in sizes]


# ------------------------------------------------------------------------------------------------------------ packed offsets


@given(st.lists(st.integers(0, 1000)))
def test_packed_buffers_lie_apart_aligned_and_where_the_kernels_put_them(sizes: list[int]) -> None:
    offsets, total = packed_offsets(sizes)
    ends = [offset + nbytes for offset, nbytes in zip(offsets, sizes, strict=True)]
    assert all(offset % PACK_ALIGN_BYTES == 0 for offset in offsets)
    assert all(end <= later for end, later in zip(ends, offsets[1:], strict=False))
    assert total == (ends[-1] if ends else 0)


# ---------------------------------------------------------------------------------------------------------------------- pack


def _round_trip(sim: SimDevice, stream: SimStream, sizes: Sequence[int], offsets: Sequence[int], room: int) -> None:
    """Pack, and unpack into other buffers, all on `stream`."""
    sources, back = _filled(sim, sizes), _filled(sim, sizes, seed=2)
    staging = _filled(sim, [room], seed=3)[0]
    before = staging.clone()
    stream.pack(staging, sources, offsets)
    stream.unpack(back, staging, offsets)
    stream.record().synchronize()
    want = before.clone()
    for source, offset in zip(sources, offsets, strict=True):
        want[offset : offset + source.numel()] = source
    assert torch.equal(staging, want)  # and no other byte
    assert all(torch.equal(end, source) for end, source in zip(back, sources, strict=True))


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20)), max_size=6), st.booleans())
def test_what_is_packed_and_unpacked_is_what_it_was(layout: list[tuple[int, int]], late: bool) -> None:
    sim = SimDevice()
    stream = sim.new_stream("side") if late else sim.current_stream()
    offsets, end = [], 0
    for nbytes, gap in layout:
        offsets.append(end + gap)
        end += gap + nbytes
    _round_trip(sim, stream, [nbytes for nbytes, _ in layout], offsets, end + 7)


def test_on_a_stream_of_copies_packing_is_as_late_as_they_are(sim: SimDevice) -> None:
    """Pack on one stream, copy the packed buffer on another: the wait carries both out, in order."""
    sources, staging, host = _filled(sim, [64, 64]), _filled(sim, [256])[0], _host(sim, [256])[0]
    side, d2h = sim.new_stream("side"), sim.new_stream("d2h")
    side.pack(staging, sources, [0, 128])
    assert staging[:64].eq(POISON_BYTE).all()
    d2h.wait(side.record())
    d2h.copy(host, staging)
    d2h.record().synchronize()
    assert torch.equal(host[128:192], sources[1])


def test_a_late_copy_that_packing_waits_for_is_carried_out_first(sim: SimDevice) -> None:
    hbm, staging, host = _filled(sim, [64])[0], _filled(sim, [64])[0], _host(sim, [64])[0]
    host.fill_(7)
    h2d, compute = sim.new_stream("h2d"), sim.current_stream()
    h2d.copy(hbm, host)
    compute.wait(h2d.record())
    compute.pack(staging, [hbm], [0])
    assert staging.eq(7).all()


def test_packing_is_one_launch_and_the_bytes_both_ways() -> None:
    cost = CostModel(spec=ROUND, triton_launch_us=10.0, packed_tensor_us=0.3, event_us=0.0)
    sim = SimDevice(ROUND, cost=cost)
    sources, staging = _filled(sim, [1_000_000] * 4), _filled(sim, [4_000_000])[0]
    compute, offsets = sim.current_stream(), [0, 1_000_000, 2_000_000, 3_000_000]
    for back in (False, True):
        sim.synchronize()
        called, start = sim.host_us, compute.record(timed=True)
        if back:
            compute.unpack(sources, staging, offsets)
        else:
            compute.pack(staging, sources, offsets)
        assert sim.host_us - called == pytest.approx(10.0 + 4 * 0.3)
        end = compute.record(timed=True)
        end.synchronize()
        # 4e6 bytes read and as many written, at 850_000 bytes per us, once the host has launched.
        assert end.elapsed_us(start) == pytest.approx(11.2 + 8_000_000 / 850_000)


def test_each_source_and_each_place_takes_part_in_race_detection(sim: SimDevice) -> None:
    """A stream that did not wait: it may touch the bytes between the places, and no others."""
    sources, staging, host = _filled(sim, [64, 64]), _filled(sim, [256])[0], _host(sim, [64])[0]
    other = sim.new_stream("other")
    sim.current_stream().pack(staging, sources, [0, 128])
    packed = r"pack of 64 bytes on compute"
    other.copy(staging[64:128], host)
    with pytest.raises(
        SimRaceError, match=rf"read of bytes \[150, 160\) .* not ordered after write of bytes \[128, 192\) by {packed}"
    ):
        other.copy(host[:10], staging[150:160])
    with pytest.raises(
        SimRaceError, match=rf"write of bytes \[0, 64\) .* not ordered after read of bytes \[0, 64\) by {packed}"
    ):
        other.copy(sources[1], host)
    other.copy(host, sources[0])  # two reads at the same time


def test_memory_that_was_handed_back_is_not_packed(sim: SimDevice) -> None:
    source, staging = _filled(sim, [64, 64])
    sim.current_stream().free(source)
    with pytest.raises(SimLifetimeError, match="pack of 64 bytes on compute after it was handed back to compute"):
        sim.current_stream().pack(staging, [source], [0])


def test_under_the_model_s_mode_packing_is_no_operator_of_the_model(sim: SimDevice) -> None:
    with sim.compute():
        source, staging = torch.ones(64, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)
        before = sim.host_us
        sim.current_stream().pack(staging, [source], [64])
        assert sim.host_us - before == pytest.approx(sim.cost.triton_launch_us + sim.cost.packed_tensor_us)
    assert staging[64:].eq(1).all()


Packs = Callable[[SimStream, Tensor, list[Tensor]], None]


def _packs() -> list[tuple[str, Packs, str]]:
    return [
        ("offsets", lambda s, staging, b: s.pack(staging, b, [0]), "expected an offset for each of 3 buffers, got 1"),
        ("dtype", lambda s, staging, b: s.pack(staging, [b[0].view(torch.int32)], [0]), "expected buffer 0 as a flat"),
        ("room", lambda s, staging, b: s.pack(staging, b, [0, 64, 193]), r"buffer 2 within .* 256 bytes, got \[193, 257\)"),
        (
            "places",
            lambda s, staging, b: s.pack(staging, b, [0, 64, 100]),
            "place of buffer 1 and the place of buffer 2 share 28",
        ),
        (
            "in staging",
            lambda s, staging, b: s.pack(staging, [staging[:64]], [32]),
            "buffer 0 and the place of buffer 0 share 32",
        ),
        ("destinations", lambda s, staging, b: s.unpack([b[0], b[0]], staging, [0, 64]), "buffer 0 and buffer 1 share 64"),
    ]


@pytest.mark.parametrize(("act", "match"), [case[1:] for case in _packs()], ids=[case[0] for case in _packs()])
def test_a_pack_that_cannot_be_carried_out_is_refused_whole(sim: SimDevice, act: Packs, match: str) -> None:
    buffers, staging, side = _filled(sim, [64] * 3), _filled(sim, [256])[0], sim.new_stream("side")
    before, bytes_before = sim.host_us, [t.clone() for t in (staging, *buffers)]
    with pytest.raises(ValueError, match=match):
        act(side, staging, buffers)
    assert (sim.host_us, side.ready_us) == (before, 0)
    assert all(torch.equal(t, was) for t, was in zip((staging, *buffers), bytes_before, strict=True))


def test_pinned_memory_is_not_packed(sim: SimDevice) -> None:
    source, staging, host = _filled(sim, [64])[0], _filled(sim, [64])[0], _host(sim, [64])[0]
    side = sim.new_stream("side")
    refused = "buffer 0 and the staging buffer one is pinned host memory"
    with pytest.raises(ValueError, match=refused):
        side.pack(host, [source], [0])
    with pytest.raises(ValueError, match=refused):
        side.pack(staging, [host], [0])
    with pytest.raises(ValueError, match=refused):
        side.unpack([host], staging, [0])


def test_two_sources_may_share_bytes(sim: SimDevice) -> None:
    source, staging = _filled(sim, [64])[0], _filled(sim, [128])[0]
    sim.current_stream().pack(staging, [source, source[8:]], [0, 64])
    assert torch.equal(staging[64:120], source[8:])
