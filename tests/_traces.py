"""Made-up steps and plans, for tests of all readers of a trace.

chain(layers=8)                a transformer-like chain: each layer saves a few tensors, backward uses them in reverse order
chain(micro_batches=3)         forward and backward in turn
pipeline(micro_batches=8)      all forwards, then all backwards, first micro-batch first; of 1 layer: first saved, first used
random_step(random)            branches, repeated saves and uses, storages that nobody may move, odd sizes and orders
random_plan(random, trace)     any actions that `simulate` accepts for it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from chameleon_mm.plan.swap_plan import Action, SwapPlan
from chameleon_mm.plan.timing import LinkCost
from chameleon_mm.plan.trace import NEVER, StepPhase, TensorKind, Trace, TraceBuilder
from chameleon_mm.plan.unswapped_memory import Candidates, peak_memory, smallest_budget
from chameleon_mm.units import MIB

FORWARD, BACKWARD, OPTIMIZER = StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER

H200_LINK = LinkCost(d2h_gbps=54.9, h2d_gbps=55.4, duplex_gbps=83.0)


def chain(
    *,
    layers: int = 8,
    saved_bytes: Sequence[int] = (8 * MIB, 24 * MIB, 8 * MIB, 16 * MIB, 16 * MIB),
    op_us: float = 120.0,
    ops_per_save: int = 2,
    micro_batches: int = 1,
    parameter_bytes: int = 4 * MIB,
    temporary_bytes: int = 2 * MIB,
    fingerprint: int = 0xC4A1,
) -> Trace:
    """Step of a chain of equal layers. A layer runs `ops_per_save` operators for each saved tensor; its backward takes twice as
    long. Each layer has one parameter with a gradient and two moments. The optimizer runs one operator for each parameter.

    A saved tensor is released once the next saved tensor was made from it: in a chain, nothing else holds it then.
    """
    state_bytes = 4 * parameter_bytes * layers
    b = TraceBuilder(start_bytes=state_bytes)
    kinds = (TensorKind.PARAMETER, TensorKind.GRADIENT, TensorKind.OPTIMIZER, TensorKind.OPTIMIZER)
    states = [[b.tensor(parameter_bytes, kind, born=-1) for kind in kinds] for _ in range(layers)]
    waiting: list[int] = []

    def hook_came() -> None:
        while waiting:
            b.sendable(waiting.pop(), b.num_hooks - 1)

    for _ in range(micro_batches):
        x = b.tensor(saved_bytes[-1], TensorKind.ACTIVATION)
        b.op("aten::embedding", FORWARD, op_us, writes=(x,))
        saved: list[tuple[int, int]] = []
        for layer in range(layers):
            for nbytes in saved_bytes:
                b.save(x)
                hook_came()
                waiting.append(x)
                for k in range(ops_per_save - 1):
                    t = b.tensor(temporary_bytes)
                    b.op(f"aten::forward_{k}", FORWARD, op_us, reads=(x,), writes=(t,))
                    b.dies(t)
                y = b.tensor(nbytes, TensorKind.ACTIVATION)
                b.op("aten::mm", FORWARD, op_us, reads=(x, states[layer][0]), writes=(y,))
                b.released(x)
                saved.append((layer, x))
                x = y
        b.op("aten::loss", FORWARD, op_us, reads=(x,))
        b.dies(x)
        gradient: int | None = None
        for layer, x in reversed(saved):
            b.use(x)
            hook_came()
            for k in range(ops_per_save - 1):
                t = b.tensor(temporary_bytes)
                b.op(f"aten::backward_{k}", BACKWARD, 2 * op_us, reads=(x,), writes=(t,))
                b.dies(t)
            before = gradient
            gradient = b.tensor(temporary_bytes)
            reads = (x,) if before is None else (x, before)
            b.op("aten::mm", BACKWARD, 2 * op_us, reads=reads, writes=(gradient, states[layer][1]))
            b.dies(x)
            if before is not None:
                b.dies(before)
        if gradient is not None:
            b.dies(gradient)
    for state in states:
        b.op("aten::_fused_adamw_", OPTIMIZER, op_us / 4, reads=state, writes=state)
    return b.finish(fingerprint)


def pipeline(
    *,
    micro_batches: int,
    layers: int,
    saved_bytes: Callable[[], int] = lambda: 8 * MIB,
    op_us: float = 170.0,
) -> Trace:
    """Step in GPipe's order. Each operator of forward saves its result; backward takes twice as long.

    saved_bytes: asked for each.
    """
    b = TraceBuilder(start_bytes=0)
    waiting: list[int] = []

    def hook_came() -> None:
        while waiting:
            b.sendable(waiting.pop(), b.num_hooks - 1)

    saved: list[list[int]] = []
    for _ in range(micro_batches):
        saved.append([])
        for _ in range(layers):
            x = b.tensor(saved_bytes(), TensorKind.ACTIVATION)
            b.op("aten::mm", FORWARD, op_us, writes=(x,))
            b.save(x)
            hook_came()
            waiting.append(x)
            b.released(x)
            saved[-1].append(x)
    for micro_batch in saved:
        for x in reversed(micro_batch):
            b.use(x)
            hook_came()
            b.op("aten::mm_backward", BACKWARD, 2 * op_us)
            b.dies(x)
    return b.finish(fingerprint=0x61BE)


def random_step(random: Random, *, max_tensors: int = 12, max_us: float = 50.0) -> Trace:
    """Any step: up to `max_tensors` saved storages, some saved and used more than once, some held by others or for ever. Two of
    three operators hold memory inside themselves."""
    untouched = random.randrange(3) * 4096
    there = [random.randrange(1, 9000) for _ in range(random.randrange(3))]
    b = TraceBuilder(start_bytes=untouched + sum(-(-n // 512) * 512 for n in there))
    kinds = tuple(TensorKind)
    known = [b.tensor(nbytes, random.choice(kinds), born=-1) for nbytes in there]
    waiting: list[int] = []

    def op(phase: StepPhase, *, writes: Sequence[int] = ()) -> None:
        reads = random.sample(known, min(len(known), random.randrange(3)))
        us = random.choice((0.0, random.random() * max_us))
        name = random.choice(("aten::mm", "aten::add", "aten::gelu"))
        inner_bytes = b.num_ticks % 3 * 512 * random.randrange(1, 100)
        b.op(name, phase, us, reads=reads, writes=writes, inner_bytes=inner_bytes)

    def hooked() -> None:
        if waiting and random.random() < 0.8:
            b.sendable(waiting.pop(), b.num_hooks - 1)

    for _ in range(random.randrange(1, 3)):
        alive: list[int] = []
        for _ in range(random.randrange(max_tensors // 2 + 1)):
            x = b.tensor(random.choice((0, 512, random.randrange(1, 100_000))), TensorKind.ACTIVATION)
            known.append(x)
            op(FORWARD, writes=(x,))
            for _ in range(random.choice((1, 1, 2))):
                b.save(x)
                hooked()
            waiting.append(x)
            alive.append(x)
            for _ in range(random.randrange(3)):
                t = b.tensor(random.randrange(50_000))
                op(FORWARD, writes=(t,))
                b.dies(t)
            if random.random() < 0.3:
                b.save(-1)
                hooked()
            if random.random() < 0.8:
                b.released(random.choice(alive))
        order = alive[::-1]
        if random.random() < 0.3:
            random.shuffle(order)
        for x in order:
            if random.random() < 0.1:
                continue
            for _ in range(random.choice((1, 1, 1, 2))):
                b.use(x)
                hooked()
                t = b.tensor(random.randrange(50_000))
                op(BACKWARD, writes=(t,))
                b.dies(t)
            if random.random() < 0.9:
                b.dies(x)
    for _ in range(random.randrange(3)):
        op(OPTIMIZER)
    return b.finish(random.getrandbits(64))


def between(trace: Trace, share: float) -> int:
    """Return a budget: `share` of the way from the least one to the bytes that the step takes without swapping."""
    least = smallest_budget(trace)
    return max(1, least + int((peak_memory(trace).nbytes - least) * share))


def away_before_first_uses_alone(trace: Trace) -> Trace:
    """Return `trace` as recorded by a recorder that ignores storages held between two uses."""
    return replace(trace, hook_released=np.full_like(trace.hook_released, NEVER))


def random_plan(random: Random, trace: Trace, *, share: float = 0.8) -> SwapPlan:
    """Plan with random actions, one per candidate with probability `share`: whole or in part, early or late. Promises nothing.

    In every other plan, many actions meet at one hook, where their order counts.
    """
    candidates = Candidates.of(trace)
    actions = []
    meet, meeting = random.choice((0.0, 0.6)), random.randint(0, len(trace.hook_tick))

    def at(low: int, high: int) -> int:
        return min(max(meeting, low), high) if random.random() < meet else random.randint(low, high)

    for i in range(len(candidates)):
        if random.random() >= share:
            continue
        nbytes, sendable, first, use = (
            int(column[i]) for column in (candidates.nbytes, candidates.sendable, candidates.first, candidates.use)
        )
        out_at = at(sendable, use)
        reclaim_at = at(max(first, out_at), use)
        in_at = random.choice((use, at(reclaim_at, use)))
        moved = random.choice((nbytes, random.randint(1, nbytes)))
        actions.append(
            Action(
                tensor=int(candidates.tensor[i]), nbytes=moved, out_at=out_at, reclaim_at=reclaim_at, in_at=in_at, use_at=use
            )
        )
    random.shuffle(actions)
    return plan_of(trace, actions)


def plan_of(trace: Trace, actions: Sequence[Action] = ()) -> SwapPlan:
    """A plan for `trace` that promises nothing."""
    return SwapPlan(
        fingerprint=trace.fingerprint,
        num_hooks=len(trace.hook_tick),
        actions=tuple(actions),
        hbm_budget_bytes=0,
        peak_bytes=0,
        host_bytes=0,
        step_us=0.0,
        stall_us=0.0,
    )
