"""Made-up steps whose storages can be recomputed, and a walk that carries a plan out on them: an oracle for `plan.rewrite`.

random_hybrid_step(random)                 operators of all kinds: in place, with several results, random ones, products, views
random_choice(random, recipes)             storages to drop and storages to hold, at random
random_hybrid_plan(random, trace, recipes) a choice, and random swaps of the rest
carried_out_recomputing(trace, plan)       device memory at every tick, one block at a time; knows nothing of rewritten traces
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

from chameleon_mm.plan.recipes import Recipes
from chameleon_mm.plan.rewrite import RewrittenTrace, choice_actions
from chameleon_mm.plan.swap_plan import ActionKind, SwapPlan
from chameleon_mm.plan.trace import StepPhase, TensorKind, Trace, TraceBuilder
from chameleon_mm.replayable import VIEWS, base_name
from chameleon_mm.units import round_up
from tests._trace_records import hooks_of, ops_of, tensors_of
from tests._traces import plan_of, random_plan

FORWARD, BACKWARD, OPTIMIZER = StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER

_NAMES = ("aten::mul.Tensor", "aten::gelu", "aten::native_dropout", "aten::mm", "aten::attention", "aten::add.Tensor")


class _Forward:
    """Forward of a micro-batch under construction."""

    def __init__(self, random: Random, b: TraceBuilder, parameters: list[int], waiting: list[int]) -> None:
        self._random, self._b, self._parameters, self._waiting = random, b, parameters, waiting
        self.alive: list[int] = []
        self.saved: list[int] = []
        self.dead: set[int] = set()

    def op(self) -> None:
        random, b = self._random, self._b
        there = [x for x in self.alive if x not in self.dead] + self._parameters
        reads = random.sample(there, min(len(there), random.choice((1, 1, 2, 3))))
        us = random.choice((0.0, random.random() * 50))
        inner = random.choice((0, 0, 512 * random.randrange(40)))
        kind = random.random()
        unsaved = [x for x in self.alive if x not in self.saved and x not in self.dead]
        if kind < 0.12 and unsaved:
            x = random.choice(unsaved)
            b.op("aten::add_.Tensor", FORWARD, us, reads=dict.fromkeys((x, *reads)), writes=(x,), inner_bytes=inner)  # type: ignore[arg-type]  # in order, each once
            return
        if kind < 0.2 and there:
            x = random.choice(there)
            b.op("aten::view", FORWARD, 0.0, reads=(x,), writes=(x,))
            return
        outs = [b.tensor(random.randrange(1, 60_000)) for _ in range(random.choice((1, 1, 1, 2)))]
        b.op(random.choice(_NAMES), FORWARD, us, reads=reads, writes=outs, inner_bytes=inner)
        self.alive += outs

    def save(self) -> None:
        """Save a live storage, occasionally for the second time."""
        random, b = self._random, self._b
        there = [x for x in self.alive if x not in self.dead]
        if not there or random.random() < 0.15:
            b.save(-1)
        else:
            x = random.choice(there)
            b.kind(x, TensorKind.ACTIVATION)
            b.save(x)
            if x not in self.saved:
                self.saved.append(x)
                self._waiting.append(x)
                self.hooked(spare=x)
                return
        self.hooked()

    def hooked(self, spare: int = -1) -> None:
        """Mark storages saved before as sendable from this hook on."""
        for x in [x for x in self._waiting if x != spare]:
            self._b.sendable(x, self._b.num_hooks - 1)
            self._waiting.remove(x)

    def let_go(self) -> None:
        """Drop a random storage: it dies if it was not saved, and is released if it was."""
        there = [x for x in self.alive if x not in self.dead]
        if there:
            x = self._random.choice(there)
            self.dead.add(x)
            if x in self.saved:
                self._b.released(x)
            else:
                self._b.dies(x)


def random_hybrid_step(random: Random) -> Trace:
    """Random step of one or two micro-batches. Operators read live storages; some write in place, some write parameters."""
    b = TraceBuilder(start_bytes=0)
    parameters = [b.tensor(random.randrange(1, 9000), TensorKind.PARAMETER, born=-1) for _ in range(3)]
    waiting: list[int] = []
    for _ in range(random.choice((1, 1, 2))):
        forward = _Forward(random, b, parameters, waiting)
        for _ in range(random.randrange(3, 22)):
            forward.op()
            if random.random() < 0.5:
                forward.save()
            if random.random() < 0.5:
                forward.let_go()
        order = forward.saved[::-1]
        if random.random() < 0.3:
            random.shuffle(order)
        for x in order:
            for _ in range(random.choice((1, 1, 1, 2))):
                b.use(x)
                forward.hooked()
                t = b.tensor(random.randrange(50_000))
                b.op("aten::mul.Tensor", BACKWARD, random.random() * 50, reads=(x,), writes=(t,))
                if random.random() < 0.1:
                    p = random.choice(parameters)
                    b.op("aten::add_.Tensor", BACKWARD, 1.0, reads=(p, t), writes=(p,))
                b.dies(t)
            if random.random() < 0.9:
                b.dies(x)
        for x in forward.alive:
            if x not in forward.dead and x not in forward.saved and random.random() < 0.8:
                b.dies(x)
    b.op("aten::add_.Tensor", OPTIMIZER, 5.0, reads=parameters, writes=parameters)
    return b.finish(random.getrandbits(60))


def random_choice(random: Random, recipes: Recipes) -> tuple[list[int], list[int]]:
    """Choose storages to drop and storages to hold at random, with every hold that the recipes need."""
    share = random.random()
    dropped = [j for j in recipes.can_drop.nonzero()[0].tolist() if random.random() < share]
    share = random.random()
    held = [j for j in recipes.can_hold.nonzero()[0].tolist() if not recipes.can_recompute[j] or random.random() < share]
    return dropped, held


def random_hybrid_plan(random: Random, trace: Trace, recipes: Recipes) -> SwapPlan:
    """Plan with a random choice, and random swaps of the other idle storages. It promises nothing."""
    rewritten = RewrittenTrace.of(recipes, *random_choice(random, recipes))
    swaps = []
    for action in random_plan(random, rewritten.trace, share=random.random()).actions:
        hooks = {name: int(rewritten.origin[getattr(action, name)]) for name in ("out_at", "reclaim_at", "in_at", "use_at")}
        swaps.append(replace(action, **hooks))  # type: ignore[arg-type]  # all of them hooks
    return plan_of(trace, (*swaps, *choice_actions(recipes, rewritten)))


class _Oracle:
    """Step under a plan: first the reads of each recomputation, by recursion; then memory, block by block."""

    def __init__(self, trace: Trace, plan: SwapPlan) -> None:
        self.trace, self.plan = trace, plan
        self.ops, self.hooks = ops_of(trace), hooks_of(trace)
        self.sizes = [round_up(tensor.nbytes, 512) for tensor in tensors_of(trace)]
        self.dropped = {a.tensor for a in plan.actions if a.kind is ActionKind.RECOMPUTE}
        self.held = {a.tensor for a in plan.actions if a.kind is ActionKind.HOLD}
        self.saved = {hook.tensor for hook in self.hooks if not hook.use}
        self.born = [tensor.born for tensor in tensors_of(trace)]
        self.dies = [tensor.dies for tensor in tensors_of(trace)]
        self.writers: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            for x in dict.fromkeys(op.writes):
                if not (base_name(op.name) in VIEWS and x in op.reads):
                    self.writers[x].append(i)
        self.recomputations: dict[int, list[int]] = {}
        self.made_by: dict[int, set[int]] = {}
        self.after_reclaims: list[int] = []
        """Bytes allocated at each hook once its reclaims are done, minus those of storages that the step never touches."""
        self._find_recomputations()

    def _find_recomputations(self) -> None:
        """At each use of a dropped storage, find the operators that run and the storages that live on, as they are read."""
        there = set[int]()
        for k, hook in enumerate(self.hooks):
            if not hook.use or hook.tensor not in self.dropped or hook.tensor in there:
                continue
            ops = self._asked_for(hook.tensor, k, there)
            made = {x for x in self.dropped - there if self.writers[x] and ops.issuperset(self.writers[x])}
            there |= made
            self.recomputations[k], self.made_by[k] = sorted(ops), made

    def _asked_for(self, target: int, k: int, there: set[int]) -> set[int]:
        """Operators that recompute `target` at hook `k`, where `there` was recomputed before."""
        ops, asked = set[int](), set[int]()

        def ask(x: int) -> None:
            if x in asked:
                return
            asked.add(x)
            for i in self.writers[x]:
                ops.add(i)
                for y in self.ops[i].reads:
                    if self.born[y] < 0 or y == x:
                        continue
                    if y in there or y in self.held or (y in self.saved and y not in self.dropped):
                        self.dies[y] = max(self.dies[y], self.hooks[k].tick)
                    else:
                        ask(y)

        ask(target)
        return ops

    def run(self) -> list[int]:
        """Maximum bytes allocated during each tick."""
        blocks: dict[tuple[str, int], int] = {}
        hook_of = {hook.tick: k for k, hook in enumerate(self.hooks)}
        inside = {op.tick: op.inner_bytes for op in self.ops}
        there_before = sum(self.sizes[x] for x in range(len(self.sizes)) if self.born[x] < 0)
        untouched = max(0, self.trace.start_bytes - there_before)
        most = []
        for tick in range(self.trace.num_ticks):
            for x in range(len(self.sizes)):
                if self.dies[x] < tick:
                    blocks.pop(("storage", x), None)
                elif max(self.born[x], 0) == tick:
                    blocks["storage", x] = self.sizes[x]
            if tick in hook_of:
                most.append(untouched + self._hook(hook_of[tick], blocks))
            else:
                most.append(untouched + sum(blocks.values()) + inside.get(tick, 0))
        return most

    def _hook(self, k: int, blocks: dict[tuple[str, int], int]) -> int:
        """Carry out hook `k`. Return the maximum of the bytes allocated within it."""
        whole = {x: tensor.nbytes for x, tensor in enumerate(tensors_of(self.trace))}
        swaps = [a for a in self.plan.actions if a.kind is ActionKind.SWAP]
        moments = []
        for action in self.plan.actions:
            if action.kind is ActionKind.RECOMPUTE and action.reclaim_at == k:
                del blocks["storage", action.tensor]
        reclaims = [a for a in swaps if a.reclaim_at == k]
        for action in reclaims:
            if action.nbytes == whole[action.tensor]:
                del blocks["storage", action.tensor]
        for action in reclaims:
            if action.nbytes < whole[action.tensor]:
                blocks["head", action.tensor] = round_up(whole[action.tensor] - action.nbytes, 512)
                moments.append(sum(blocks.values()))
                del blocks["storage", action.tensor]
        moments.append(sum(blocks.values()))
        self.after_reclaims.append(moments[-1])
        backs = [a for a in swaps if a.in_at == k]
        for action in [a for a in backs if a.use_at == k] + [a for a in backs if a.use_at != k]:
            blocks["storage", action.tensor] = self.sizes[action.tensor]
            moments.append(sum(blocks.values()))
            blocks.pop(("head", action.tensor), None)
        moments += self._replay(k, blocks)
        return max(moments)

    def _replay(self, k: int, blocks: dict[tuple[str, int], int]) -> list[int]:
        """Run the operators of the recomputation at hook `k`, if there is one."""
        ops, made = self.recomputations.get(k, []), self.made_by.get(k, set())
        chain = {x for i in ops for x in self.ops[i].writes if set(self.writers[x]) <= set(ops)}
        moments = []
        for at, i in enumerate(ops):
            for x in self.ops[i].writes:
                if self.writers[x][:1] == [i]:
                    blocks["storage" if x in made else "again", x] = self.sizes[x]
            moments.append(sum(blocks.values()) + self.ops[i].inner_bytes)
            later = {x for o in ops[at + 1 :] for x in (*self.ops[o].reads, *self.ops[o].writes)}
            for name, x in list(blocks):
                unneeded = x not in later or x not in chain or (("storage", x) in blocks and x not in self.passing(k))
                if name == "again" and unneeded:
                    del blocks[name, x]
        return moments

    def passing(self, k: int) -> set[int]:
        """Storages that the recomputation at hook `k` makes only for itself, though an equal one may exist."""
        ops = set(self.recomputations[k])
        needed = set[int]()
        stack = list(self.made_by[k])
        while stack:
            x = stack.pop()
            for i in self.writers[x]:
                for y in self.ops[i].reads:
                    by_itself = y in self.held or y in self.dropped or y in self.saved
                    if self.born[y] >= 0 and not by_itself and y not in needed and set(self.writers[y]) <= ops:
                        needed.add(y)
                        stack.append(y)
        return needed


def carried_out_recomputing(trace: Trace, plan: SwapPlan) -> list[int]:
    """Maximum bytes allocated during each tick of `trace` under `plan`, which recomputes."""
    return _Oracle(trace, plan).run()


def levels_after_reclaims(trace: Trace, plan: SwapPlan) -> list[int]:
    """Bytes that are allocated at each hook once its reclaims are done."""
    oracle = _Oracle(trace, plan)
    oracle.run()
    return oracle.after_reclaims
