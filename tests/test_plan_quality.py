"""Plans of steps in the shape of a 7B decoder, and of a pipeline's stage, beside T* and fixed rules.

The ratios that docs/policy.md states. All is arithmetic, on a link with an H200's published rates.
"""

from __future__ import annotations

import pytest

from chameleon_mm.plan.bounds import ideal
from chameleon_mm.plan.planner import generate_plan
from chameleon_mm.plan.swap_all import swap_all
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import Trace
from chameleon_mm.plan.unswapped_memory import memory_curve, smallest_budget
from tests._planner_traces import LayerShape, layer_chain, pipeline_chain
from tests._swap_first import swap_first

LINK = LinkCost(d2h_gbps=54.9, h2d_gbps=55.4, duplex_gbps=83.0)
LAYERS, MICRO_BATCHES = 32, 8


def within(trace: Trace, less: int) -> int:
    """Bytes that leave `less` times fewer for what is saved."""
    activations = int(memory_curve(trace).max()) - trace.start_bytes
    return max(smallest_budget(trace), trace.start_bytes + activations // less)


def everything_us(trace: Trace, budget: int) -> float:
    """Least step time of swapping everything within `budget`, by how many storages are on their way at once."""
    plans = [swap_all(trace, LINK, depth=depth) for depth in (0, 1, 2, 4, 8)]
    return min(plan.step_us for plan in plans if plan.peak_bytes <= budget)


@pytest.mark.parametrize("tokens", [4096, 32_768])
@pytest.mark.parametrize(("less", "of_ideal", "over_first"), [(2, 0.99, 1.10), (4, 0.99, 1.10), (8, 0.98, 1.09)])
def test_a_decoders_plan_is_near_the_ideal_and_ahead_of_fixed_rules(
    tokens: int, less: int, of_ideal: float, over_first: float
) -> None:
    trace = layer_chain(LayerShape(tokens=tokens), LAYERS)
    budget = within(trace, less)
    plan = generate_plan(trace, budget, None, LINK)
    assert plan.peak_bytes <= budget
    assert ideal(trace, budget, LINK).step_us >= of_ideal * plan.step_us
    for depth in range(3):
        assert swap_first(trace, budget, LINK, depth=depth).step_us >= over_first * plan.step_us
    assert everything_us(trace, budget) >= 1.05 * plan.step_us


@pytest.mark.parametrize("tokens", [4096, 32_768])
@pytest.mark.parametrize("less", [2, 4, 8])
def test_a_pipelines_plan_too(tokens: int, less: int) -> None:
    trace = pipeline_chain(LayerShape(tokens=tokens), MICRO_BATCHES, LAYERS // MICRO_BATCHES)
    budget = within(trace, less)
    plan = generate_plan(trace, budget, None, LINK)
    assert plan.peak_bytes <= budget
    assert ideal(trace, budget, LINK).step_us >= 0.96 * plan.step_us
    assert min(swap_first(trace, budget, LINK, depth=depth).step_us for depth in range(3)) >= 1.07 * plan.step_us
    assert everything_us(trace, budget) >= 1.04 * plan.step_us
