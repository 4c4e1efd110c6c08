"""Parts of an executor, made and put together: what swaps out and in, what recomputes, and the budget over them."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from chameleon_mm.device import Device
from chameleon_mm.executor.budget import Budget
from chameleon_mm.executor.comparisons import Comparisons
from chameleon_mm.executor.recipe_runner import RecipeRunner
from chameleon_mm.executor.recomputing import Recomputing
from chameleon_mm.executor.recording import Recording
from chameleon_mm.executor.rescue import Rescue
from chameleon_mm.executor.swap_ins import SwapIns
from chameleon_mm.executor.swap_outs import SwapOuts
from chameleon_mm.executor.weak_calls import weak_reliance_ended
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.policy import DefaultRule, Limits, UseOrder
from chameleon_mm.reclaim import Lending
from chameleon_mm.saved.calling_thread import ComputeStreams
from chameleon_mm.saved.checksums import Checksums
from chameleon_mm.saved.claims import Claims, StorageRegistry
from chameleon_mm.saved.metrics import Metrics
from chameleon_mm.saved.packed_group import Staging
from chameleon_mm.saved.state import SwapContext
from chameleon_mm.transfer import Thresholds, Transfer

if TYPE_CHECKING:
    from chameleon_mm.executor.executor import Executor


class Parts(NamedTuple):
    """Parts of one executor."""

    context: SwapContext
    order: UseOrder
    registry: StorageRegistry
    claims: Claims
    budget: Budget
    outs: SwapOuts
    ins: SwapIns
    recipe_runner: RecipeRunner
    recomputing: Recomputing
    rescue: Rescue


def assemble(
    device: Device,
    pool: PinnedPool,
    executor: weakref.ref[Executor],
    recording: Recording,
    rule: DefaultRule,
    limits: Limits,
    thresholds: Thresholds,
    *,
    verify: bool,
) -> Parts:
    """Parts of `executor`, which none of them keeps alive, for `device`."""
    streams = ComputeStreams(device)
    streams.current()
    transfer = Transfer(device)
    checksums = Checksums(device, pool)
    metrics = Metrics(host_us=lambda: device.host_us, pinned_units=pool.units_reader())
    order, registry, claims = UseOrder(), StorageRegistry(), Claims()
    context = SwapContext(pool, transfer, metrics, streams, checksums if verify else None)
    # Weak: in a cycle with its budget, dropped swap-outs would keep their pool until the collector runs.
    weak_outs: weakref.ref[SwapOuts]
    budget = Budget(
        device,
        limits,
        order,
        metrics,
        storages=registry.all,
        swap_outs=lambda: weak_outs(),  # noqa: PLW0108 - it is there only later
    )
    if (hook := device.allocator_hook()) is not None:
        # A recorder counts who holds a storage, and what operators allocate: what the allocator does would be theirs.
        budget.lending = Lending(hook, may_lend=lambda: recording.recorder is None and streams.is_one())
    staging = Staging(registry, limit_bytes=thresholds.staging_bytes)
    outs = SwapOuts(context, registry, budget, staging, rule=rule, thresholds=thresholds)
    weak_outs = weakref.ref(outs)
    recipe_runner = RecipeRunner(device, context, claims, budget, Comparisons(checksums, metrics.totals))
    ins = SwapIns(context, registry, budget, staging, order, recipe_runner)
    recomputing = Recomputing(device, streams, metrics, recipe_runner, partial(weak_reliance_ended, executor))
    return Parts(context, order, registry, claims, budget, outs, ins, recipe_runner, recomputing, Rescue(ins, budget, streams))
