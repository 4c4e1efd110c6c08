"""The rewritten trace of a plan that recomputes, and the actions that say which choice it was.

rewritten = rewritten_for(recipes, plan)        # raises ValueError for a plan that nobody could carry out in this step
actions = choice_actions(recipes, rewritten)    # the choice of a rewritten trace as actions
"""

from __future__ import annotations

from chameleon_mm.policy.plan import Action, ActionKind, SwapPlan
from chameleon_mm.policy.recipes import Recipes
from chameleon_mm.policy.rewrite import RewrittenTrace


def rewritten_for(recipes: Recipes, plan: SwapPlan) -> RewrittenTrace:
    """The trace of `recipes` rewritten for what `plan` drops and holds.

    Raises `ValueError` unless all of it can be dropped, held and recomputed, at the hooks that the plan says.
    """
    again = "make a plan for this trace"
    for action in plan.recomputed:
        if not 0 <= action.tensor < len(recipes.can_drop) or not recipes.can_drop[action.tensor]:
            raise ValueError(f"plan, tensor {action.tensor}: expected one that can be recomputed, got another; {again}")
    for action in plan.held:
        if not 0 <= action.tensor < len(recipes.can_hold) or not recipes.can_hold[action.tensor]:
            raise ValueError(f"plan, tensor {action.tensor}: expected one that can be held, got another; {again}")
    rewritten = RewrittenTrace.of(recipes, [a.tensor for a in plan.recomputed], [a.tensor for a in plan.held])
    found = {(action.tensor, action.kind): action for action in choice_actions(recipes, rewritten)}
    for action in plan.recomputed + plan.held:
        expected = found.get((action.tensor, action.kind))
        if expected is None:
            raise ValueError(
                f"plan, tensor {action.tensor}: expected something that is away and that a recomputation reads, got a "
                f"{action.kind.value} of another; {again}"
            )
        if expected != action:
            raise ValueError(
                f"plan, tensor {action.tensor}: expected a {action.kind.value} from hook {expected.out_at} to "
                f"{expected.use_at}, got {action.out_at}, {action.reclaim_at}, {action.in_at} and {action.use_at}; {again}"
            )
    return rewritten


def choice_actions(recipes: Recipes, rewritten: RewrittenTrace) -> tuple[Action, ...]:
    """What `rewritten` drops, by the hook at which it is recomputed, and then what it holds, by the hook of the first
    recomputation that reads it."""
    nbytes = recipes.trace.tensor_bytes
    first_read: dict[int, int] = {}
    for recomputation in rewritten.recomputations.by_hook:
        for x in recomputation.sources:
            first_read.setdefault(x, recomputation.hook)
    spans = [
        (ActionKind.RECOMPUTE, j, rewritten.recomputations.first[j], rewritten.made_at[j])
        for j in sorted(rewritten.recomputations.dropped, key=lambda j: (rewritten.made_at[j], j))
    ]
    spans += [
        (ActionKind.HOLD, h, int(recipes.hold_hook[h]), first_read[h])
        for h in sorted(rewritten.recomputations.held, key=lambda h: (first_read[h], h))
    ]
    return tuple(
        Action(tensor=j, nbytes=int(nbytes[j]), out_at=since, reclaim_at=since, in_at=until, use_at=until, kind=kind)
        for kind, j, since, until in spans
    )
