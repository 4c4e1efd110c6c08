"""Has the steps of an executor recorded, planned and followed.

adaptation = plan_steps(executor, pool)      # from the next step on
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from chameleon_mm.adaptive.adaptation import Adaptation
from chameleon_mm.adaptive.link_rates import UNMEASURED_LINK, rates_of
from chameleon_mm.adaptive.plan_follower import PlanFollower
from chameleon_mm.executor.executor import Executor
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.policy import LinkCost
from chameleon_mm.profiler.recorder import Recorder
from chameleon_mm.uncompiled import import_dynamo


def plan_steps(
    executor: Executor,
    pool: PinnedPool,
    *,
    model: nn.Module | None = None,
    link_cost: LinkCost | None = None,
    replayable: frozenset[str] = frozenset(),
    is_hidden: Callable[[torch.UntypedStorage], bool] = lambda storage: False,
) -> Adaptation:
    """Let the steps of `executor`, which has a budget, be recorded, planned and followed from the next one on.

    Parameters and buffers of `model` tell what recorded storages are. `link_cost`: what is known of the link before copies were
    timed. `replayable`: base names of operators that may run again. `is_hidden(storage)`: whether its memory is no part of a
    plan.
    """
    import_dynamo()  # now, as the first step's recorder would
    me, metrics = weakref.ref(executor), executor.metrics  # weak: the executor holds its director
    device = executor.device
    adaptation = Adaptation(
        metrics,
        hbm_budget_bytes=executor.budget.hbm_budget_bytes,
        slack_bytes=device.block_slack_bytes,
        host_budget=lambda: pool.limit_bytes,
        make_recorder=lambda: Recorder(
            device,
            model=model,
            is_hidden=is_hidden,
            reclaim_some=lambda nbytes, busy: (it := me()) is not None and it.reclaim_some(nbytes, busy),
        ),
        replayable=replayable,
        min_bytes=executor.rule.min_bytes,
        link_cost=lambda: rates_of(metrics.resolve(), link_cost or UNMEASURED_LINK),
    )
    executor.director = PlanFollower(adaptation)
    return adaptation
