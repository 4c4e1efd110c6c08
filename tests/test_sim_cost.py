"""What one operator is charged: a roofline of FLOPs and bytes, and nothing for what launches no kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chameleon_mm.device import SPECS
from chameleon_mm.device.sim import CostModel, SimDevice

SPEC = dataclasses.replace(SPECS["a100"], hbm_gbps=1.0, fp32_tflops=1e-3, bf16_tflops=1e-2)
"""So slow that every price is far above the shortest kernel: 1000 B/us, 1000 float32 and 10_000 bfloat16 FLOPs per us."""

COST = CostModel(spec=SPEC, matmul_efficiency=1.0, memory_efficiency=1.0, shortest_kernel_us=1e-3, launch_us=1e-6)


def price(op: Callable[..., object], *args: object) -> float:
    """Device time of `op` in microseconds, on a stream that the host keeps busy."""
    device = SimDevice(SPEC, cost=COST)
    with device.compute():
        torch.ones(10_000)  # so long that launching is hidden behind it
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


def test_fused_attention_costs_what_torch_counts_for_it() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    forward = 2 * (2 * 2 * 4 * 16 * 16 * 8)  # two products of [16, 8] x [8, 16] per head and batch
    out = F.scaled_dot_product_attention(q, k, v)
    assert price(F.scaled_dot_product_attention, q, k, v) == pytest.approx(forward / 1000)
    backward = price(torch.autograd.grad, out.sum(), (q, k, v))
    assert backward >= forward * 2.5 / 1000  # five products, beside the bytes of the sum's gradient


def test_a_wrapper_subclass_is_priced_by_what_it_wraps() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    plain = torch.ones(1000)
    pair = TwoTensor(plain.clone(), plain.clone())
    assert price(lambda: pair + pair) == pytest.approx(2 * price(lambda: plain + plain))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_an_efficiency_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match=r"matmul_efficiency: expected a share in \(0, 1\]"):
        CostModel(spec=SPEC, matmul_efficiency=share)
