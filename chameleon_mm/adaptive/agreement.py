"""Digests of what a rank's plan is made from and of what it does, which ranks that do the same have in common.

plan_digests(planned)      # {"operators": "5f0c...", "sizes": "77a1...", "plan": "0b2e..."}

Times are in none of them: they differ from rank to rank, and from run to run. A plan depends on them, so on a GPU ranks of one
step may have plans that differ.
"""

from __future__ import annotations

import hashlib
import json

from chameleon_mm.adaptive.planned_step import PlannedStep

_DIGITS = 16


def plan_digests(planned: PlannedStep | None) -> dict[str, str]:
    """Digests of the step's operators and hooks in order, of its storages' sizes, and of what its plan does at which hook.
    Without "plan" where it has no plan; empty where no step was planned. Comparable between processes."""
    if planned is None:
        return {}
    trace, trial = planned.trace, planned.current
    names = [trace.op_names[number] for number in trace.op_name.tolist()]
    found = {
        "operators": _digest([names, trace.op_phase.tolist(), trace.hook_use.tolist(), trace.hook_tensor.tolist()]),
        "sizes": _digest(trace.tensor_bytes.tolist()),
    }
    if trial is not None:
        found["plan"] = _digest(
            [[a.tensor, a.nbytes, a.out_at, a.reclaim_at, a.in_at, a.use_at, a.kind.value] for a in trial.program.plan.actions]
        )
    return found


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:_DIGITS]
