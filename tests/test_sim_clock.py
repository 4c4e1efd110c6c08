"""The simulator's time: every expected value follows from the spec and the cost model, as each comment shows.

The round figures: 10 GB/s = 10_000 bytes per us each way, 15 GB/s both ways together, 1000 GB/s of device memory at 0.85.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chameleon_mm.device import SPECS
from chameleon_mm.device.sim import CostModel, SimDevice
from chameleon_mm.device.sim.cost_model import COPY_LATENCY_US

ROUND = dataclasses.replace(SPECS["a100"], h2d_gbps=10.0, d2h_gbps=10.0, duplex_gbps=15.0, hbm_gbps=1000.0)
MB = 1_000_000
ALONE_US = COPY_LATENCY_US + 100.0
"""A copy of 1e6 bytes with nothing the other way: 1e6 B / 10_000 B/us, and the fixed cost."""


@pytest.fixture
def device() -> SimDevice:
    """Host calls are free here, except where a test prices them."""
    return SimDevice(ROUND, cost=CostModel(spec=ROUND, launch_us=0.0, view_us=0.0, event_us=0.0, copy_us=0.0))


def ordered_buffers(device: SimDevice, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`count` device and `count` pinned buffers of 1e6 bytes that any stream may touch."""
    hbm = [device.current_stream().alloc(MB) for _ in range(count)]
    host = [device.alloc_pinned(MB) for _ in range(count)]
    device.synchronize()
    return hbm, host


def test_copies_of_one_direction_queue_even_from_two_streams(device: SimDevice) -> None:
    (a, b), (p, q) = ordered_buffers(device, 2)
    one, two = device.new_stream("one"), device.new_stream("two")
    one.copy(p, a)
    two.copy(q, b)
    start, first, second = device.current_stream().record(timed=True), one.record(timed=True), two.record(timed=True)
    device.synchronize()
    assert first.elapsed_us(start) == pytest.approx(ALONE_US)
    assert second.elapsed_us(start) == pytest.approx(2 * ALONE_US)


def test_opposite_directions_overlap_and_share_the_duplex_rate(device: SimDevice) -> None:
    (a, b), (p, q) = ordered_buffers(device, 2)
    out, back = device.new_stream("d2h"), device.new_stream("h2d")
    out.copy(p, a)
    back.copy(b, q)
    start, first, second = device.current_stream().record(timed=True), out.record(timed=True), back.record(timed=True)
    device.synchronize()
    assert first.elapsed_us(start) == pytest.approx(ALONE_US)
    # Both begin at once. While the first runs, the link leaves 15 - 10 = 5 GB/s: 100 us * 5_000 B/us; the other half alone.
    assert second.elapsed_us(start) == pytest.approx(ALONE_US + 0.5 * MB / 10_000)


def test_the_spans_of_one_direction_do_not_pile_up(device: SimDevice) -> None:
    (a,), (p,) = ordered_buffers(device, 1)
    out = device.new_stream("d2h")
    for _ in range(20):
        out.copy(p, a)
        out.record().synchronize()
    assert len(device.copy_spans("d2h")) <= 2


def test_a_stream_starts_after_the_event_it_waits_for(device: SimDevice) -> None:
    (a, b), (p, q) = ordered_buffers(device, 2)
    out, back = device.new_stream("d2h"), device.new_stream("h2d")
    start = out.record(timed=True)
    out.copy(p, a)
    back.wait(out.record())
    back.copy(b, q)
    end = back.record(timed=True)
    end.synchronize()
    assert end.elapsed_us(start) == pytest.approx(2 * ALONE_US)  # one after the other: nothing is shared


def test_a_copy_inside_device_memory_reads_and_writes_every_byte(device: SimDevice) -> None:
    (a, b), _ = ordered_buffers(device, 2)
    stream = device.new_stream("d2d")
    start = stream.record(timed=True)
    stream.copy(b, a)
    end = stream.record(timed=True)
    end.synchronize()
    # 2e6 bytes at 0.85 of 1e6 B/us are 2.35 us, above the shortest kernel's 2.
    assert end.elapsed_us(start) == pytest.approx(2 * MB / 850_000)


def test_tiny_kernels_run_at_the_pace_of_the_host() -> None:
    device = SimDevice(ROUND, cost=CostModel(spec=ROUND, event_us=0.0))
    with device.compute():
        x = torch.zeros(4)
        start = device.current_stream().record(timed=True)
        launched = device.host_us
        for _ in range(100):
            x.add_(1)
        end = device.current_stream().record(timed=True)
    assert device.host_us == pytest.approx(launched + 100 * device.cost.launch_us)
    # Each kernel takes 2 us and is launched every 5: the stream is idle in between, and done 2 us after the last launch.
    assert not end.query()
    end.synchronize()
    assert device.host_us == pytest.approx(launched + 100 * device.cost.launch_us + device.cost.shortest_kernel_us)
    assert end.elapsed_us(start) == pytest.approx(100 * device.cost.launch_us)  # from the end of one kernel to another's


def test_large_kernels_run_at_the_pace_of_the_device() -> None:
    device = SimDevice(ROUND)
    with device.compute():
        x = torch.zeros(4 * MB)
        start = device.current_stream().record(timed=True)
        for _ in range(10):
            x.add_(1)
        end = device.current_stream().record(timed=True)
    end.synchronize()
    # 16e6 bytes read and as many written at 850_000 B/us, ten times, with no gap: launching takes 5 us of 37.6.
    assert end.elapsed_us(start) == pytest.approx(10 * 2 * 16 * MB / 850_000)


def test_a_query_is_true_only_once_the_host_clock_has_passed() -> None:
    device = SimDevice(ROUND)
    (a,), (p,) = ordered_buffers(device, 1)
    out = device.new_stream("d2h")
    out.copy(p, a)
    done = out.record()
    assert not done.query()
    polls = 1
    while not done.query():
        polls += 1
    # From the copy's issue 103.1 us; the host is there after the polls of 0.5 us, less the 0.5 us that recording took.
    assert polls == pytest.approx(ALONE_US / device.cost.event_us, abs=2)


def test_an_operator_whose_result_the_host_reads_waits_for_the_stream() -> None:
    device = SimDevice(ROUND)
    with device.compute():
        x = torch.zeros(4 * MB)
        for _ in range(10):
            x.add_(1)
        ahead = device.current_stream().record()
        assert not ahead.query()
        assert x[0].item() == 10
        assert ahead.query()


def test_elapsed_us_needs_two_timed_complete_events_of_one_device(device: SimDevice) -> None:
    (a,), (p,) = ordered_buffers(device, 1)
    out = device.new_stream("d2h")
    start, untimed = out.record(timed=True), out.record()
    out.copy(p, a)
    end = out.record(timed=True)
    with pytest.raises(ValueError, match="complete"):
        end.elapsed_us(start)
    end.synchronize()
    assert end.elapsed_us(start) == pytest.approx(ALONE_US)
    elsewhere = SimDevice(ROUND).current_stream().record(timed=True)
    for wrong in (untimed, elsewhere):
        with pytest.raises(ValueError, match="two timed events of one simulated device"):
            end.elapsed_us(wrong)


def test_an_event_of_another_device_is_refused(device: SimDevice) -> None:
    with pytest.raises(ValueError, match="another one's"):
        device.current_stream().wait(SimDevice().current_stream().record())
    with pytest.raises(TypeError, match="expected an event of the simulator"):
        device.current_stream().wait(torch.Event("cpu"))  # type: ignore[arg-type]  # that is what is tested


# --- what one operator is charged: a roofline of FLOPs and bytes, and nothing for what launches no kernel


SPEC = dataclasses.replace(SPECS["a100"], hbm_gbps=1.0, fp32_tflops=1e-3, bf16_tflops=1e-2)
"""GPU with prices far above the shortest kernel: 1000 B/us, 1000 float32 and 10_000 bfloat16 FLOPs per us."""

COST = CostModel(spec=SPEC, matmul_efficiency=1.0, memory_efficiency=1.0, shortest_kernel_us=1e-3, launch_us=1e-6)


def price(op: Callable[..., object], *args: object) -> float:
    """Device time of `op` in microseconds, on a stream that the host keeps busy."""
    device = SimDevice(SPEC, cost=COST)
    with device.compute():
        torch.ones(10_000)  # long enough to hide the launch
        start = device.current_stream().record(timed=True)
        op(*args)
        end = device.current_stream().record(timed=True)
    end.synchronize()
    return end.elapsed_us(start)


def test_a_product_costs_its_flops_at_the_rate_of_its_dtype() -> None:
    a, b = torch.randn(64, 128), torch.randn(128, 32)
    flops, nbytes = 2 * 64 * 128 * 32, 4 * (64 * 128 + 128 * 32 + 64 * 32)
    assert price(torch.mm, a, b) == pytest.approx(flops / 1000)
    assert price(torch.mm, a.bfloat16(), b.bfloat16()) == pytest.approx(max(flops / 10_000, nbytes / 2 / 1000))


@pytest.mark.parametrize(("heads", "causal"), [(4, False), (4, True), (2, True)])
def test_attention_has_rates_of_its_own_and_half_the_flops_if_causal(heads: int, causal: bool) -> None:
    batch, rows, width = 2, 64, 16
    cost = dataclasses.replace(COST, attention_efficiency=0.5, attention_backward_efficiency=0.25)
    device = SimDevice(SPEC, cost=cost)
    q = torch.randn(batch, 4, rows, width, requires_grad=True)
    k, v = (torch.randn(batch, heads, rows, width, requires_grad=True) for _ in "kv")
    grad = torch.ones(batch, 4, rows, width)
    with device.compute():
        torch.ones(10_000)
        marks = [device.current_stream().record(timed=True)]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads < 4)
        marks.append(device.current_stream().record(timed=True))
        torch.autograd.grad(out, (q, k, v), grad)
        marks.append(device.current_stream().record(timed=True))
    device.synchronize()
    took_us = [end.elapsed_us(start) for start, end in pairwise(marks)]
    product = 2 * batch * 4 * rows * rows * width / (2 if causal else 1)  # of two matrices, of which there are 2 and 5
    assert took_us == pytest.approx([2 * product / 1000 / 0.5, 5 * product / 1000 / 0.25])


@pytest.mark.parametrize(
    ("op", "args", "nbytes"),
    [
        (torch.add, (torch.ones(1000), torch.ones(1000)), 3 * 4000),  # two read, one written
        (torch.mul, ((same := torch.ones(1000)), same), 2 * 4000),  # read once
        (torch.Tensor.add_, (torch.ones(1000), 1.0), 2 * 4000),  # read and written
        (torch.Tensor.zero_, (torch.ones(1000),), 4000),  # written, not read
        (torch.Tensor.copy_, (torch.ones(1000), torch.ones(1000)), 2 * 4000),
        (torch.Tensor.add, (torch.ones(1).expand(1000), torch.ones(1000)), 4 + 2 * 4000),  # one element, however often
        (F.embedding, (torch.arange(10), torch.ones(1000, 100)), 3 * 4000),  # ten rows of a thousand, read and written
        (torch.Tensor.sum, (torch.ones(1000),), 4000 + 4),
    ],
    ids=["add", "same twice", "add_", "zero_", "copy_", "expanded", "embedding", "sum"],
)
def test_other_kernels_cost_the_bytes_they_move(op: Callable[..., object], args: tuple[object, ...], nbytes: int) -> None:
    expected = nbytes / 1000 if op is not F.embedding else (2 * 4000 + 4000) / 1000
    assert price(op, *args) == pytest.approx(expected)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.view(10, 100).t()[2:, 3].detach().unsqueeze(0),
        lambda x: x.split(100),
        torch.empty_like,
        lambda x: x.is_same_size(x),
        lambda x: torch.empty(0).set_(x.untyped_storage()),
        lambda x: torch.empty(7, device="meta") + 1,
    ],
    ids=["views", "split", "empty", "shape", "set_", "meta"],
)
def test_what_launches_no_kernel_takes_no_device_time(op: Callable[[Tensor], object]) -> None:
    assert price(op, torch.ones(1000)) == 0.0


def test_a_matmul_of_three_dimensions_costs_the_product_alone() -> None:
    x, w = torch.randn(4, 16, 32), torch.randn(8, 32)
    assert price(torch.matmul, x, w.t()) == pytest.approx(2 * 4 * 16 * 32 * 8 / 1000)  # its views and reshapes are free


def test_inference_mode_costs_what_grad_mode_costs() -> None:
    """There, composite operators reach a mode whole: they must be taken apart, or their products would be free."""
    x, w, bias = torch.randn(4, 16, 32), torch.randn(8, 32), torch.randn(8)

    def run() -> Tensor:
        return F.dropout(F.linear(x, w, bias).reshape(64, 8), 0.0)

    with torch.inference_mode():
        inside, result = price(run), run()
    assert inside == pytest.approx(price(run))
    assert inside >= 2 * 4 * 16 * 32 * 8 / 1000
    assert torch.equal(result, run())


def test_a_wrapper_subclass_is_priced_by_what_it_wraps() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    plain = torch.ones(1000)
    pair = TwoTensor(plain.clone(), plain.clone())
    assert price(lambda: pair + pair) == pytest.approx(2 * price(lambda: plain + plain))


@pytest.mark.parametrize("name", ["matmul", "attention", "attention_backward", "memory"])
@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_an_efficiency_is_a_share(share: float, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}_efficiency: expected a share in \(0, 1\]"):
        CostModel(spec=SPEC, **{f"{name}_efficiency": share})


def test_the_host_is_at_most_so_many_kernels_ahead() -> None:
    def host_us(lead: int) -> list[float]:
        device = SimDevice(host_lead=lead)
        with device.compute():
            x = torch.zeros(1 << 24)
            seen = []
            for _ in range(6):
                x = x + 1
                seen.append(device.host_us)
        return seen

    free, bound = host_us(1000), host_us(2)
    kernel_us = SimDevice().cost.device_copy_us(1 << 26)
    assert free[-1] < 2 * kernel_us  # launches alone
    assert bound[-1] - bound[-2] == pytest.approx(kernel_us)
    with pytest.raises(ValueError, match="host_lead: expected 1 kernel or more, got 0"):
        SimDevice(host_lead=0)
