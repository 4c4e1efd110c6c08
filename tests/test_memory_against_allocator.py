"""Memory of a training step in the simulator, compared with torch's caching allocator in the CUDA build.

The same step makes the same tensors on both, in the same order, and both round each up to 512 bytes. So without swapping

    simulated peak - a <= allocated peak <= simulated peak + b
    a = the most that an operator holds inside itself, as simulated  + what operators that CUDA lacks made of the simulated peak
    b = the most that an operator holds inside itself, on CUDA       + what operators that the CPU lacks made of the other peak

each taken from a recorded step, none chosen. With swapping each session has a plan of its own, since times differ: its peak is
the plan's, less at most what operators hold inside (a plan takes that at its most), and both lie between what can never leave
and the budget. Peaks are what a step adds to what was there before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from torch import nn

from chameleon_mm.api.session import SwapSession
from chameleon_mm.bench._measure import free_unused, one_thread
from chameleon_mm.bench._training_run import planned_warmup_steps
from chameleon_mm.device import SimDevice
from chameleon_mm.device.cuda import CudaDevice
from chameleon_mm.device.protocols import Device
from chameleon_mm.follow.adaptation import SLACK_PART
from chameleon_mm.plan.trace import Trace
from chameleon_mm.plan.unswapped_memory import peak_memory, smallest_budget
from chameleon_mm.record.recorder import Recorder, RecordingHooks
from chameleon_mm.units import KIB, MIB, allocated_size
from tests._caching_allocator import Block, CachingAllocator
from tests._memory_models import MODELS, Job, Training
from tests.cuda_stand_in import control

_MIN_BYTES = 4 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Figures of a step on one device without swapping."""

    before_bytes: int
    """Bytes allocated before the model was made."""
    start_bytes: int
    """Bytes allocated before the step."""
    peak_bytes: int
    """Maximum bytes allocated in the step that counts."""
    trace: Trace

    @property
    def training_bytes(self) -> int:
        """Bytes that model, batch and optimizer hold between steps."""
        return self.start_bytes - self.before_bytes

    @property
    def above_bytes(self) -> int:
        """Bytes that the step adds at its peak."""
        return self.peak_bytes - self.start_bytes

    @property
    def least_above_bytes(self) -> int:
        """Bytes that it would add if everything that swapping can move were away."""
        return smallest_budget(self.trace) - self.trace.start_bytes


def unswapped(device: Device, make: Callable[[], Job]) -> Seen:
    """Run a step without swapping, then a recorded one."""
    with device.compute(), one_thread():
        before = _begin(device)
        training = Training(make, device)
        training.step()
        start = _begin(device)
        training.step()
        device.synchronize()
        peak = device.peak_allocated_bytes()
        recorder = Recorder(device, model=training.model, optimizers=[training.optimizer])
        with recorder, RecordingHooks(recorder):
            training.step()
        return Seen(before_bytes=before, start_bytes=start, peak_bytes=peak, trace=recorder.finish())


def bounds(simulated: Trace, real: Trace) -> tuple[int, int]:
    """Bounds of the difference between a step's real and simulated peak, without swapping."""
    return -(inner_bytes(simulated) + foreign_bytes(simulated, real)), inner_bytes(real) + foreign_bytes(real, simulated)


def inner_bytes(trace: Trace) -> int:
    """Maximum bytes that an operator of the step takes for itself and gives back."""
    return int(trace.op_inner_bytes.max(initial=0))


def foreign_bytes(trace: Trace, other: Trace) -> int:
    """Bytes at the peak of `trace` in storages that were made by operators of which `other` has none."""
    tick = peak_memory(trace).tick
    there = (trace.tensor_born <= tick) & (trace.tensor_dies >= tick)
    foreign = [trace.op_names[name] not in other.op_names for name in trace.op_name]
    made = np.isin(trace.tensor_born, trace.op_tick[np.array(foreign, np.bool_)])
    return int(allocated_size(trace.tensor_bytes[there & made]).sum())


def _begin(device: Device) -> int:
    """The bytes allocated now, when steps begin that count."""
    device.synchronize()
    free_unused()  # memory that earlier jobs left is not this one's
    device.reset_peaks()
    return device.allocated_bytes()


pytestmark = pytest.mark.gpu

SAME_OPERATORS = ("mlp", "gpt", "recurrent", *(("conv",) if control.is_loaded() else ()))
"""Models that run as the same operators on the simulator, which is a CPU, and on CUDA. On a GPU cuDNN has a batch norm of its
own."""


@cache
def pair(name: str) -> tuple[Seen, Seen]:
    return unswapped(SimDevice(), MODELS[name]), unswapped(CudaDevice(), MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_peaks_without_swapping_agree(name: str) -> None:
    simulated, allocated = pair(name)
    low, high = bounds(simulated.trace, allocated.trace)
    assert simulated.above_bytes + low <= allocated.above_bytes <= simulated.above_bytes + high
    if name in SAME_OPERATORS:
        # The only tolerance is the memory that operators hold inside themselves.
        assert (-low, high) == (inner_bytes(simulated.trace), inner_bytes(allocated.trace))


@pytest.mark.parametrize("name", SAME_OPERATORS)
def test_before_a_step_only_the_step_counts_differ(name: str) -> None:
    """AdamW keeps its number of steps, one tensor for each parameter, on the host: in the simulator all of the host is its."""
    simulated, allocated = pair(name)
    parameters = sum(isinstance(p, nn.Parameter) for p in MODELS[name]().model.parameters())
    assert simulated.training_bytes - allocated.training_bytes == parameters * allocated_size(4)


def test_dropout_is_known_to_differ() -> None:
    """CUDA has an operator for it whose mask is of bools; on a CPU torch draws a mask of floats, and saves that."""
    simulated, allocated = pair("gpt, dropout")
    assert "aten::native_dropout" in set(allocated.trace.op_names) - set(simulated.trace.op_names)
    assert "aten::bernoulli_.float" in set(simulated.trace.op_names) - set(allocated.trace.op_names)
    assert simulated.above_bytes > allocated.above_bytes


@pytest.mark.slow
@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.thorough), 0.25], ids=["half", "quarter"])
@pytest.mark.parametrize("name", MODELS)
def test_budgets_hold_on_the_real_allocator(name: str, share: float) -> None:
    simulated, allocated = pair(name)
    # Or the smallest for which there is a plan, and a part more: the caching allocator may hand out more than is asked for.
    least = max(simulated.least_above_bytes, allocated.least_above_bytes) + simulated.above_bytes // SLACK_PART
    above = max(least, int(share * simulated.above_bytes))
    for device, plain in ((SimDevice(), simulated), (CudaDevice(), allocated)):
        with device.compute(), one_thread():
            _begin(device)
            training = Training(MODELS[name], device)
            training.step()
            start = _begin(device)
            session = SwapSession(start + above, device=device, min_bytes=_MIN_BYTES, model=training.model)
            with session.pool, session:
                for _ in range(planned_warmup_steps(device)):
                    with session.step():
                        training.step()
                earlier = session.report()
                _begin(device)
                with session.step():  # one: the next may be by another plan, which is on trial
                    training.step()
                device.synchronize()
                peak, report = device.peak_allocated_bytes(), session.report()
        assert report.plan_cache_hits > earlier.plan_cache_hits, "expected steps that follow a plan"
        planned = report.planned_peak_bytes
        assert planned is not None
        inner, budget = inner_bytes(plain.trace), start + above
        slack = min(device.block_slack_bytes, budget - planned)
        assert planned - inner <= peak <= planned + slack <= budget
        assert plain.least_above_bytes - inner <= peak - start <= above


@pytest.mark.parametrize("seed", range(3))
def test_the_model_of_the_allocator_reserves_what_the_real_one_does(seed: int) -> None:
    """Without expandable segments: the stand-in has no driver that maps pages."""
    random, pool, model = Random(seed), torch.cuda.MemPool(), CachingAllocator(expandable=False)
    live: list[tuple[torch.Tensor, Block | None]] = []
    for _ in range(400):
        if live and random.random() < 0.45:
            model.free(live.pop(random.randrange(len(live)))[1])
            continue
        nbytes = random.choice((1000, 300 * KIB, MIB, 3 * MIB, 9 * MIB, 12 * MIB, 31 * MIB)) + random.randrange(MIB)
        with torch.cuda.use_mem_pool(pool):
            live.append((torch.empty(nbytes, dtype=torch.uint8, device="cuda"), model.alloc(nbytes)))
    assert model.reserved_bytes == sum(segment["total_size"] for segment in pool.snapshot())
    live.clear()
