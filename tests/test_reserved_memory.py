"""Plans replayed through a model of torch's caching allocator: they allocate what they say, and reserve a bounded part more.

`test_memory_against_allocator.py` holds the model against the real allocator.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from chameleon_mm.device import SPECS
from chameleon_mm.follow.adaptation import SLACK_BLOCKS
from chameleon_mm.plan.planner import generate_plan
from chameleon_mm.plan.recipes import Recipes
from chameleon_mm.plan.rewrite import rewritten_for
from chameleon_mm.plan.trace import Trace
from chameleon_mm.plan.unswapped_memory import least_memory, peak_memory
from chameleon_mm.tools.prediction import REPLAYED, link_of
from chameleon_mm.tools.step_on_shapes import StepRequest, record_step
from chameleon_mm.tools.workload import built_in
from chameleon_mm.units import MIB
from tests._caching_allocator import CachingAllocator, replay

H100 = SPECS["h100"]


@cache
def llama() -> Trace:
    build = built_in("llama-7b", batch=2, seq=2048, layers=4)
    return record_step(StepRequest(build=build, spec=H100, dtype=torch.bfloat16, optimizer="adamw-fused", min_bytes=MIB)).trace


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@pytest.mark.parametrize("recompute", [REPLAYED, frozenset()], ids=["hybrid", "swaps"])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_plan_replayed_allocates_its_peak_and_reserves_at_most_a_quarter_more(
    share: float, recompute: frozenset[str], expandable: bool
) -> None:
    trace = llama()
    least, peak = least_memory(trace).nbytes, peak_memory(trace).nbytes
    plan = generate_plan(trace, least + int(share * (peak - least)), None, link_of(H100), recompute=recompute)
    assert plan.swaps and bool(plan.recomputed) == bool(recompute)
    allocator = CachingAllocator(expandable=expandable)
    replay(trace, plan, allocator)
    beside = rewritten_for(Recipes.of(trace, None), plan).recomputations.bytes_beside(trace)
    slack = 0 if expandable else SLACK_BLOCKS * MIB  # a block of a segment may be 1 MiB larger than asked for
    assert 0 <= allocator.peak_bytes - (plan.peak_bytes - beside) <= slack
    assert plan.peak_bytes <= allocator.reserved_bytes <= 1.25 * plan.peak_bytes


def test_growing_segments_serve_a_block_that_fits_in_no_segment_of_its_own() -> None:
    reserved = []
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        blocks = [allocator.alloc(30 * MIB) for _ in range(4)]
        for block in blocks[1:3]:
            allocator.free(block)
        allocator.alloc(60 * MIB)  # two free neighbours, which are one only if they lie in one segment
        reserved.append(allocator.reserved_bytes // MIB)
    assert reserved == [180, 120]
