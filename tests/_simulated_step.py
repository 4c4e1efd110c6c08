"""A training step that runs on the simulated GPU, with a host that takes no time: what a step on shapes is held against."""

from __future__ import annotations

from chameleon_mm.device import SPECS
from chameleon_mm.device.sim import CostModel, SimDevice
from chameleon_mm.tools.blocks import Checkpointing
from chameleon_mm.tools.shape_operators import GpuOperators
from chameleon_mm.tools.step_on_shapes import TrainingStep
from chameleon_mm.tools.workload import Build


def simulated_step(build: Build, optimizer: str, *, checkpointed: Checkpointing | None = None) -> tuple[int, int, float]:
    """Bytes before a step of `build` on an H200, its peak in bytes, its time in us. `checkpointed`: as in `TrainingStep`."""
    spec = SPECS["h200"]
    device = SimDevice(spec, cost=CostModel(spec=spec, launch_us=0.0, view_us=0.0, event_us=0.0))
    with device.compute(), GpuOperators():
        step = TrainingStep(build(), optimizer, checkpointed=checkpointed)
        device.reset_peaks()
        start_bytes, start = device.allocated_bytes(), device.current_stream().record(timed=True)
        loss = step.forward_backward()
        step.update()
        end = device.current_stream().record(timed=True)
    del loss
    device.synchronize()
    return start_bytes, device.peak_allocated_bytes(), end.elapsed_us(start)
