"""The stand-in's operators and the order of things: CUDA graphs, random numbers, and which bytes the runtime is told of.

These tests are about the stand-in itself. On a GPU there is nothing to test here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cuda_stand_in import control

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not control.is_loaded(), reason="tests the CUDA stand-in itself; it is not loaded"),
]

# ------------------------------------------------------------------------------------------------------------------ graphs


def captured(program: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = program()
    return graph, out


def test_a_capture_runs_nothing_and_a_replay_runs_it_again() -> None:
    x, total = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def program() -> Tensor:
        y = x * 2
        total.add_(y)
        return y.cumsum(0)

    graph, out = captured(program)
    assert total.tolist() == [0.0] * 4
    for i in (1, 2, 3):
        x.fill_(i)
        graph.replay()
        assert out.tolist() == [2.0 * i, 4.0 * i, 6.0 * i, 8.0 * i]
    assert total.tolist() == [12.0] * 4


def test_a_captured_training_step_gives_eagers_bits() -> None:
    def trained(step: Callable[[nn.Module, Tensor, torch.optim.Optimizer], Callable[[], None]]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.zeros(5, 8, device="cuda")
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        run = step(model, x, optimizer)
        for i in range(4):
            x.copy_(torch.randn(5, 8, generator=torch.Generator().manual_seed(i)))
            run()
        return [p.detach().cpu() for p in model.parameters()]

    def eager(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def run() -> None:
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            optimizer.step()

        return run

    def replayed(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        graph, _ = captured(eager(model, x, optimizer))
        return graph.replay

    assert all(torch.equal(a, b) for a, b in zip(trained(eager), trained(replayed), strict=True))


def test_each_replay_draws_other_numbers_and_a_seed_repeats_them() -> None:
    x = torch.ones(64, device="cuda")
    graph, (first, second) = captured(lambda: (F.dropout(x, 0.5), torch.rand(64, device="cuda")))

    def replays() -> list[Tensor]:
        torch.cuda.manual_seed(5)
        drawn = []
        for _ in range(2):
            graph.replay()
            drawn += [first.cpu(), second.cpu()]
        return drawn

    drawn = replays()
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[1], drawn[3])
    assert all(torch.equal(a, b) for a, b in zip(drawn, replays(), strict=True))


def test_what_needs_the_host_is_refused_in_a_capture() -> None:
    """In a process of its own: a capture that cannot be ended leaves torch's allocator waiting for its end."""
    script = """
import torch
x, before = torch.ones(4, device="cuda"), torch.cuda.current_stream()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.nonzero()
except RuntimeError as error:
    print("captur" in str(error))
torch.cuda.set_stream(before)
torch.cuda.synchronize()
print((x + 1).tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True", "[2.0, 2.0, 2.0, 2.0]"]


# ------------------------------------------------------------------------------------------------------------ random numbers


def test_the_same_seed_draws_the_same_numbers() -> None:
    def drawn() -> list[Tensor]:
        torch.manual_seed(7)
        x = torch.ones(100, device="cuda")
        own = torch.Generator("cuda").manual_seed(3)
        return [torch.rand_like(x), torch.randn_like(x), F.dropout(x), torch.rand(100, device="cuda", generator=own)]

    first, again = drawn(), drawn()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({t.sum().item() for t in first}) == len(first)


def test_a_restored_state_repeats_and_the_cpus_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    state = torch.cuda.get_rng_state()
    first = torch.rand(10, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(10, device="cuda"), first)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[2:5],
        lambda t: t[:, 1:3],
        lambda t: t[::2, ::3],
        lambda t: t[:, :1].expand(8, 5),
        lambda t: t.as_strided((4, 6), (2, 1)),
        lambda t: t[0, 0],
        lambda t: t.reshape(2, 4, 6)[:, 1:3, 2:4].permute(2, 0, 1),
    ],
)
def test_the_bytes_of_a_tensor_are_told_exactly(view: Callable[[Tensor], Tensor]) -> None:
    from tests.cuda_stand_in.memory import spans

    base = torch.zeros(8, 6, device="cuda")
    view(base).fill_(1)
    touched = [base.data_ptr() + 4 * i for i in base.reshape(-1).nonzero().flatten().tolist()]
    told = spans(view(base))
    assert told is not None
    assert sorted(at for start, size in told for at in range(start, start + size, 4)) == touched


def test_a_result_is_hidden_from_streams_that_do_not_wait() -> None:
    if control.mode() == "threads":
        pytest.skip("threads: operators run at once, and nothing hides what they wrote")
    x = torch.ones(1024, device="cuda") * 2
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        wrong = x + 1
    assert wrong.isnan().all()
    control.violations()  # it is one
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        right = x + 1
    torch.cuda.synchronize()
    assert right.tolist() == [3.0] * 1024
