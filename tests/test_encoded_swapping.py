"""Codecs on the way over the link: fewer bytes where they hold what there is, the raw ones where not, never another bit.

each codec's kind of tensor            crosses shorter, comes back bit for bit
any other                              the codec's own status says so: it crosses as it is, and after a few no more is tried
pressure, drops, other streams         as without
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # imported late, by an operator, it leaves frames in cycles, and handles in those
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import SPECS, Device
from chameleon_mm.executor import Executor
from chameleon_mm.policy import CodecRule, DefaultRule, Limits
from chameleon_mm.saved import ProtectedStorages, SwappedView, codecs_by_name
from chameleon_mm.saved.encoded_form import EncodedForm
from chameleon_mm.saved.state import State
from chameleon_mm.transfer import Thresholds
from chameleon_mm.units import MIB
from tests._fakes import leave_out_meeting
from tests.observed import SimRaceError

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    # The mutants also break what runs when a handle is dropped, where an error can only be reported.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

N = 64 * 1024
SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=0.5, d2h_gbps=0.5, duplex_gbps=0.8)

KINDS: dict[str, Callable[[], Tensor]] = {
    "bool": lambda: torch.rand(N) < 0.3,
    "int64 of 16 bits": lambda: torch.randint(-(1 << 15), 1 << 15, (N,)),
    "int64 of 32 bits": lambda: torch.randint(-(1 << 31), 1 << 31, (N,)),
    "fp32 from bf16": lambda: torch.randn(N).bfloat16().float(),
    "fp32 from fp16": lambda: torch.randn(N).half().float(),
    "bf16": lambda: torch.randn(N).bfloat16(),
}
SHORTER = {
    "bool": 8.0, "int64 of 16 bits": 4.0, "int64 of 32 bits": 2.0,
    "fp32 from bf16": 2.0, "fp32 from fp16": 2.0, "bf16": 2048 / 1568,
}  # fmt: skip
"""How many times shorter each becomes, but for the 16 bytes that carry the status."""

OTHERS: dict[str, Callable[[], Tensor]] = {
    "bool of other bytes": lambda: torch.randint(0, 256, (N,), dtype=torch.uint8).view(torch.bool),
    "int64 of 64 bits": lambda: torch.randint(-(1 << 62), 1 << 62, (N,)),
    "fp32": lambda: torch.randn(N),
    "bf16 of all exponents": lambda: torch.randint(-(1 << 15), 1 << 15, (N,), dtype=torch.int16).view(torch.bfloat16),
}


def bits(t: Tensor) -> Tensor:
    return t.cpu().view(-1).view(torch.uint8)


class Swapping:
    """An executor that tries every codec, and its pool."""

    def __init__(self, device: Device, *, leaving_bytes: int | None = 0, verify: bool = False) -> None:
        self.device = device
        self.pool = cm.PinnedPool("64MiB", device=device)
        self.executor = Executor(
            device,
            self.pool,
            rule=DefaultRule(min_bytes=1),
            limits=Limits(leaving_bytes=leaving_bytes, ahead_bytes=MIB),
            protected=ProtectedStorages(),
            thresholds=Thresholds.direct(),
            codecs=codecs_by_name(("all",)),
            verify=verify,
        )
        self.totals = self.executor.metrics.totals

    def save(self, t: Tensor) -> SwappedView:
        handle = self.executor.save(t)
        assert isinstance(handle, SwappedView)
        return handle

    def next_op(self) -> None:
        torch.ones(1, device=self.device.torch_device, requires_grad=True).exp()
        self.executor.save(torch.nn.Parameter(torch.ones(1, device=self.device.torch_device)))

    def saved_and_gone(self, make: Callable[[], Tensor]) -> tuple[SwappedView, Tensor]:
        """A handle of a tensor that nobody else holds and whose copy out was queued, and its bits."""
        t = make().to(self.device.torch_device)
        expected = bits(t).clone()
        handle = self.save(t)
        del t
        self.next_op()
        return handle, expected

    def settle(self) -> None:
        """All copies are complete and seen: those of encoded bytes, and those of raw ones that a refusal called for."""
        for _ in range(2):
            self.device.synchronize()
            self.next_op()

    def assert_back(self, handle: SwappedView, expected: Tensor) -> None:
        assert torch.equal(bits(self.executor.use(handle)), expected)

    def assert_nothing_left(self) -> None:
        self.device.synchronize()
        self.next_op()
        assert len(self.executor._registry) == 0
        assert self.pool.stats().num_live == 0


@pytest.fixture(params=[0, None], ids=["reclaimed under pressure", "swept when copied"])
def swapping(request: pytest.FixtureRequest, device: Device) -> Swapping:
    return Swapping(device, leaving_bytes=request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_its_kind_crosses_shorter_and_comes_back_bit_for_bit(kind: str, swapping: Swapping) -> None:
    with swapping.device.compute():
        earlier = []
        for _ in range(6):  # a codec that comes first for the dtype may have to be given up
            earlier.append(swapping.saved_and_gone(KINDS[kind]))
            swapping.settle()
        out = swapping.totals.bytes_swapped_out
        handle, expected = swapping.saved_and_gone(KINDS[kind])
        swapping.settle()
        assert handle.claim.saved.state is State.ON_HOST
        assert swapping.totals.bytes_swapped_out - out == pytest.approx(len(expected) / SHORTER[kind] + 16, abs=16)
        swapping.assert_back(handle, expected)
        for each in earlier:
            swapping.assert_back(*each)
        del handle, earlier, each
        swapping.assert_nothing_left()


@pytest.mark.parametrize("kind", OTHERS)
def test_another_crosses_as_it_is_and_is_soon_not_tried(kind: str, swapping: Swapping) -> None:
    with swapping.device.compute():
        handles = []
        for _ in range(12):
            handles.append(swapping.saved_and_gone(OTHERS[kind]))
            swapping.settle()
        tried = sum(swapping.totals.refused_by_codec.values())
        assert not swapping.totals.encoded
        assert tried in (4, 8)  # of each codec that takes the dtype: `give_up_after`
        assert [handle.claim.saved.state for handle, _ in handles] == [State.ON_HOST] * 12
        for handle, expected in handles:
            swapping.assert_back(handle, expected)
        del handles, handle
        swapping.assert_nothing_left()


def test_without_the_status_a_wrong_number_passes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncodedForm, "stands_for_it", lambda self, host: True)
    swapping = Swapping(device)
    with device.compute():
        handle, expected = swapping.saved_and_gone(OTHERS["fp32"])
        with pytest.raises(AssertionError):
            swapping.assert_back(handle, expected)


def test_used_before_it_was_sent_and_dropped_on_the_way() -> None:
    """A slow link: the first is under way, the second queued."""
    device = cm.SimDevice(SLOW_LINK)
    swapping = Swapping(device, leaving_bytes=None)
    with device.compute():
        large, _ = swapping.saved_and_gone(lambda: torch.randn(8 * N))
        queued, expected = swapping.saved_and_gone(KINDS["bf16"])
        dropped, _ = swapping.saved_and_gone(KINDS["bf16"])
        assert queued.claim.saved.state is State.SWAPPING_OUT
        del dropped
        swapping.assert_back(queued, expected)
        del large, queued
        swapping.assert_nothing_left()


def test_verify_takes_its_checksum_of_the_raw_bytes(device: Device) -> None:
    swapping = Swapping(device, verify=True)
    with device.compute():
        for kind in (KINDS["bool"], KINDS["bf16"], OTHERS["fp32"]):
            swapping.assert_back(*swapping.saved_and_gone(kind))
    assert sum(swapping.totals.encoded.values()) == 2


def test_what_was_written_after_the_save_raises(device: Device) -> None:
    swapping = Swapping(device)
    with device.compute():
        t = KINDS["bf16"]().to(device.torch_device)
        handle = swapping.save(t)
        swapping.next_op()
        t.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            swapping.executor.use(handle)


@pytest.mark.parametrize("used_on_side", [False, True])
@pytest.mark.parametrize("sent_on_side", [False, True])
def test_streams_are_ordered_around_a_codec(sent_on_side: bool, used_on_side: bool) -> None:
    device = cm.SimDevice(SLOW_LINK)
    side = device.new_compute_stream("side")
    swapping = Swapping(device)
    with device.compute():
        t = KINDS["bf16"]()
        expected = bits(t).clone()
        handle = swapping.save(t)
        del t
        with device.stream(side if sent_on_side else device.current_stream()):
            swapping.next_op()
            swapping.next_op()
        again = torch.randn(N)
        if used_on_side:
            side.wait(device.current_stream().record())
            with device.stream(side):
                swapping.assert_back(handle, expected)
        swapping.assert_back(handle, expected)
        del again, handle
        swapping.assert_nothing_left()


@pytest.mark.parametrize("left_out", [1, 2], ids=["before it", "after it"])
def test_without_the_streams_meeting_an_encoding_is_a_race(left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = cm.SimDevice(SLOW_LINK)
    side = device.new_compute_stream("side")
    swapping = Swapping(device)
    leave_out_meeting(monkeypatch, left_out)
    with device.compute():
        handle = swapping.save(KINDS["bf16"]())
        with pytest.raises(SimRaceError), device.stream(side):
            swapping.next_op()
            swapping.next_op()
        del handle


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["save", "save", "op", "use", "drop", "squeeze", "wait"]), st.integers(0, 1000)), max_size=40
)


@settings(max_examples=30)
@given(ACTIONS, st.booleans())
def test_any_life_is_exact_and_leaves_nothing(actions: list[tuple[str, int]], slow: bool) -> None:
    device = cm.SimDevice(SLOW_LINK if slow else "h200")
    kinds = [*KINDS.values(), *OTHERS.values()]
    with device.compute():
        swapping = Swapping(device, leaving_bytes=None)
        alive: list[tuple[SwappedView, Tensor]] = []
        for what, number in actions:
            if what == "save":
                t = kinds[number % len(kinds)]()[: 8 * (1 + number)].clone()
                alive.append((swapping.save(t), bits(t).clone()))
                del t
            elif what == "op":
                swapping.next_op()
            elif what == "squeeze":
                swapping.executor.budget.reclaim_all(exclude=())
            elif what == "wait":
                device.synchronize()
            elif alive and what == "use":
                swapping.assert_back(*alive[number % len(alive)])
            elif alive:
                del alive[number % len(alive)]
        for handle, expected in alive:
            swapping.assert_back(handle, expected)
        handle = None  # type: ignore[assignment]  # the loop's last one
        alive.clear()
        swapping.assert_nothing_left()


# --- asked for by name


def test_a_session_with_codecs_is_exact(device: Device) -> None:
    def gradients(codecs: tuple[str, ...] | None) -> tuple[list[Tensor], cm.SwapSession | None]:
        torch.manual_seed(0)
        with device.compute():
            model = torch.nn.Sequential(*(m for _ in range(4) for m in (torch.nn.Linear(256, 256), torch.nn.Dropout(0.1))))
            model = model.to(device.torch_device, torch.bfloat16)
            x = torch.randn(1024, 256, device=device.torch_device, dtype=torch.bfloat16)
            session = None
            if codecs is None:
                model(x).square().sum().backward()
            else:
                session = cm.SwapSession(device.capacity, "64MiB", device, min_bytes="16KiB", codecs=codecs)
                with session, session.step():
                    model(x).square().sum().backward()
            return [p.grad for p in model.parameters() if p.grad is not None], session

    expected, _ = gradients(None)
    for codecs in ((), ("all",), ("bool_as_bits",)):
        got, session = gradients(codecs)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert session is not None
        assert session.pool.stats().num_live == 0


def test_unknown_names_are_refused_with_those_that_there_are() -> None:
    for wrong in (("zip",), "all", ("bf16", "all")):
        with pytest.raises(ValueError, match=r"codecs: expected a sequence of names among .*pack12"):
            cm.SwapSession(device="sim", codecs=wrong)


def test_none_is_tried_unless_asked_for() -> None:
    assert codecs_by_name(()) == ()
    assert CodecRule().choose(["pack12"], encoded={}, refused={}) is None


def test_a_codec_is_given_up_by_its_own_balance() -> None:
    rule = CodecRule(names=("short", "long"), give_up_after=2)
    assert rule.choose(["long", "short"], encoded={}, refused={"short": 1}) == "short"
    assert rule.choose(["long", "short"], encoded={}, refused={"short": 2}) == "long"
    assert rule.choose(["long", "short"], encoded={"short": 5}, refused={"short": 6}) == "short"
    assert rule.choose(["long"], encoded={}, refused={"long": 2}) is None
    assert rule.choose([], encoded={}, refused={}) is None
    with pytest.raises(ValueError, match="give_up_after"):
        CodecRule(give_up_after=0)
